//! `partage up`: the machine's daemon in the foreground, with a live view and metrics.

mod metrics;
mod summary;
mod workloads;

use super::home::HomeArgs;
use super::top::view::{self, Options as View};
use super::{Outcome, says};
use crate::amounts;
use crate::logging::{self, FilterError, LineWriter, LogFormat, LogOptions};
use crate::output::line;
use crate::screen::{self, Kind, Screen, Wake};
use clap::Args;
use partage_enforce::error_chain::describe;
use partage_workstation::client::Client;
use partage_workstation::daemon::{App, Config, DaemonError};
use partage_workstation::home::Home;
use partage_workstation::report::Report;
use partage_workstation::settings::{self, Settings};
use std::collections::VecDeque;
use std::fs::File;
use std::io::{self, Write};
use std::net::SocketAddr;
use std::os::fd::AsFd;
use std::path::PathBuf;
use std::sync::mpsc::{self, SyncSender};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};
use summary::Summary;
use workloads::Workloads;

/// Keep this machine's GPUs and show who uses them
///
/// Uses the NVIDIA driver where there is one, and simulated GPUs where there is none. Shares that run are taken up, and go on
/// when this ends. Without it `partage run` works as well; with it the machine has metrics, and all users share one
/// keeper if root starts it.
#[derive(Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Up {
    /// The settings [default: partage.yaml in --home; else /etc/partage/partage.yaml for root, ~/.config/partage/partage.yaml]
    #[arg(long, value_name = "FILE")]
    settings: Option<PathBuf>,

    /// Read the settings, say whether they are right, and do nothing
    #[arg(long)]
    check: bool,

    /// Where Prometheus finds metrics: an address of this machine, or off [default: as the settings say, 127.0.0.1:9464]
    #[arg(long, value_name = "ADDRESS")]
    metrics: Option<String>,

    /// Log lines instead of the live view
    #[arg(long)]
    plain: bool,

    /// Log as JSON lines instead of the live view
    #[arg(long)]
    json: bool,

    /// Enable debug logging [env: PARTAGE_LOG is a filter by level and crate]
    #[arg(long, short)]
    verbose: bool,

    /// A file of shares to start, each with its command
    #[arg(long, value_name = "FILE")]
    start: Option<PathBuf>,

    /// End after so long, such as 60s or 5m
    #[arg(long = "for", value_name = "TIME", value_parser = amounts::duration)]
    time: Option<Duration>,

    #[command(flatten)]
    home: HomeArgs,
}

const EXAMPLES: &str = "\
Examples:
  partage up
  partage up --settings lab.yaml --check
  partage up --start examples/workloads.yaml --for 60s
  curl http://127.0.0.1:9464/metrics

Exit code: 0 ended as asked, 1 the settings are wrong or it cannot start, 2 something cannot be read";

/// How often the view is drawn anew.
const FRAME: Duration = Duration::from_secs(1);
/// How long the processes of shares that were started here have to end.
const GRACE: Duration = Duration::from_secs(5);
/// Lines of news below the view.
const NEWS: usize = 6;

impl Up {
    pub(crate) fn run(&self, out: &mut dyn Write, err: &mut dyn Write) -> io::Result<Outcome> {
        match self.prepared() {
            Ok(prepared) if self.check => {
                if let Err(error) = partage_workstation::check(&prepared.settings) {
                    line(err, format_args!("error: {}", describe(&error)))?;
                    return Ok(Outcome::Problems);
                }
                let from = prepared.file.map_or_else(|| "no file".into(), |file| file.display().to_string());
                line(out, format_args!("the settings are right ({from})"))?;
                Ok(Outcome::Fine)
            }
            Ok(prepared) => self.keep(prepared, out, err),
            Err(what) => {
                // What is wrong with a file is shown where it is, on several lines.
                for (at, words) in what.lines().enumerate() {
                    line(err, format_args!("{}{words}", if at == 0 { "error: " } else { "  " }))?;
                }
                Ok(Outcome::Problems)
            }
        }
    }

    fn prepared(&self) -> Result<Prepared, String> {
        let home = self.home.home().map_err(|error| error.to_string())?;
        if let Some(name) = partage_workstation::run::inside(&home).filter(|_| !self.check) {
            return Err(format!(
                "this is inside share {name}, from where nobody else's can be kept: leave it first"
            ));
        }
        let loaded = Settings::load(self.settings.as_deref(), &home);
        let (settings, file) = loaded.map_err(|error| describe(&error))?;
        let file = file.map(|file| std::path::absolute(&file).unwrap_or(file));
        let metrics = match &self.metrics {
            Some(text) => settings::metrics_address(text).map_err(|error| error.to_string())?,
            None => settings.metrics,
        };
        let workloads = self.start.as_deref().map(Workloads::load).transpose()?;
        Ok(Prepared { home, settings, file, metrics, workloads })
    }

    fn keep(&self, prepared: Prepared, out: &mut dyn Write, err: &mut dyn Write) -> io::Result<Outcome> {
        let Prepared { home, settings, file, metrics, workloads } = prepared;
        let lines = self.kind() == Kind::Stream;
        let news = Arc::new(News::new(lines)?);
        if let Err(error) = self.log(&news) {
            line(err, format_args!("error: {}", describe(&error)))?;
            return Ok(Outcome::Unreadable);
        }
        let served = match metrics.map(metrics::Listener::bind).transpose() {
            Ok(served) => served,
            Err(what) => {
                line(err, format_args!("error: {what}"))?;
                return Ok(Outcome::Problems);
            }
        };
        let config = Config {
            home: home.clone(),
            settings,
            foreground: true,
            metrics: served.as_ref().map(metrics::Listener::address),
            settings_file: file,
        };
        let app = match take_over(&config) {
            Ok(app) => app,
            Err(Why::Daemon(what)) => {
                line(err, format_args!("error: {what}"))?;
                return Ok(Outcome::Problems);
            }
            Err(Why::Client(error)) => {
                says(err, &error)?;
                return Ok(Outcome::Problems);
            }
        };
        // A Ctrl-C that follows the greeting must end the daemon, not kill it. A view would hide the greeting, and is opened later.
        let screen = lines.then(|| Screen::waiting(self.kind()));
        // Lines of JSON are for programs.
        if self.format() != LogFormat::Json {
            greet(&app.report(), served.as_ref().map(metrics::Listener::address), out)?;
        }
        let served = match served.map(|served| served.serve(app.daemon())).transpose() {
            Ok(served) => served,
            Err(what) => {
                line(err, format_args!("error: {what}"))?;
                return Ok(Outcome::Problems);
            }
        };
        let mut summary = Summary::default();
        let mut started = workloads.map(|workloads| workloads.start(&home, &news));
        let screen = screen.unwrap_or_else(|| Screen::waiting(self.kind()));
        let watched = self.watch(&app, screen, &news, &mut summary, out);
        if let Some(started) = &mut started {
            // What these shares did is known as long as they are there.
            summary.see(&app.report());
            started.end(&Client::new(home), GRACE);
        }
        if let Some(served) = served {
            served.stop();
        }
        app.stop();
        let left = app.run();
        watched?;
        for text in started.iter().flat_map(|started| summary.lines(started)) {
            line(out, format_args!("{text}"))?;
        }
        if left > 0 && self.format() != LogFormat::Json {
            let shares = if left == 1 { "1 share goes on".into() } else { format!("{left} shares go on") };
            line(
                out,
                format_args!(
                    "{shares}, kept in the background: partage ps shows them, partage up takes them up"
                ),
            )?;
        }
        Ok(Outcome::Fine)
    }

    /// A live view where there is a terminal for it, unless lines are asked for.
    fn kind(&self) -> Kind {
        if self.plain || self.json { Kind::Stream } else { Kind::Full.on_terminal() }
    }

    fn format(&self) -> LogFormat {
        match self.kind() {
            _ if self.json => LogFormat::Json,
            Kind::Stream => logging::format_from_env(),
            _ => LogFormat::View,
        }
    }

    /// Shows log lines below the view, or as they come.
    fn log(&self, news: &Arc<News>) -> Result<(), FilterError> {
        let news = Arc::clone(news);
        let writer = LineWriter::new(move |line| news.tell(line));
        let options = LogOptions { format: self.format(), verbose: self.verbose, colors: false };
        logging::init(options, move || writer.clone())
    }

    /// Shows how everything is until somebody has seen enough or the time is over.
    fn watch(
        &self,
        app: &App,
        mut screen: Screen,
        news: &News,
        summary: &mut Summary,
        out: &mut dyn Write,
    ) -> io::Result<()> {
        let end = self.time.map(|time| Instant::now() + time);
        let left = |longest: Duration| {
            end.map_or(longest, |end| end.saturating_duration_since(Instant::now()).min(longest))
        };
        let mut view = View::new(usize::MAX, screen::has_blocks());
        let mut before: Option<Report> = None;
        let mut now = app.report();
        loop {
            summary.see(&now);
            if screen.is_live() {
                view.width = screen.size().1;
                let mut lines = view::lines(before.as_ref(), &now, &view);
                lines.push(screen::Line::default());
                lines.extend(news.lines());
                screen.show(&lines, &view::foot(&view), out)?;
            }
            match screen.wait(left(FRAME)) {
                Wake::End => break,
                Wake::Key(key) => {
                    view.key(key);
                }
                Wake::Resized => {}
                Wake::Time => {
                    before = Some(now);
                    now = app.report();
                }
            }
            if end.is_some_and(|end| Instant::now() >= end) {
                break;
            }
        }
        Ok(())
    }
}

struct Prepared {
    home: Home,
    settings: Settings,
    file: Option<PathBuf>,
    metrics: Option<SocketAddr>,
    workloads: Option<Workloads>,
}

enum Why {
    Daemon(String),
    Client(partage_workstation::client::ClientError),
}

/// Builds the daemon, in place of one in the background.
fn take_over(config: &Config) -> Result<App, Why> {
    /// A daemon that is asked to hand over does so at once, unless requests are in progress or the machine is very busy.
    const HAND_OVER_TIMEOUT: Duration = Duration::from_secs(20);
    let until = Instant::now() + HAND_OVER_TIMEOUT;
    let home = &config.home;
    let client = Client::new(home.clone());
    loop {
        client.take_over().map_err(Why::Client)?;
        match App::build(config.clone()) {
            Ok(app) => return Ok(app),
            Err(DaemonError::Busy) if Instant::now() < until => {
                std::thread::sleep(Duration::from_millis(20));
            }
            Err(DaemonError::Busy) => {
                return Err(Why::Daemon(format!(
                    "another keeper holds {} and does not make place: end it first",
                    home.path().display()
                )));
            }
            Err(error) => {
                // Who was sent away for this one comes back.
                client.resume();
                return Err(Why::Daemon(describe(&error)));
            }
        }
    }
}

fn greet(report: &Report, metrics: Option<SocketAddr>, out: &mut dyn Write) -> io::Result<()> {
    let mut models: Vec<(usize, &str)> = Vec::new();
    for gpu in &report.gpus {
        match models.iter_mut().find(|(_, model)| *model == gpu.model) {
            Some((count, _)) => *count += 1,
            None => models.push((1, &gpu.model)),
        }
    }
    let gpus: Vec<String> = models.iter().map(|(count, model)| format!("{count} x {model}")).collect();
    let gpus = gpus.join(", ");
    match report.driver.simulated {
        true => line(
            out,
            format_args!("no NVIDIA driver in use: {gpus} are simulated (driver {})", report.driver.version),
        )?,
        false => line(out, format_args!("{gpus}, driver {}", report.driver.version))?,
    }
    if let Some(address) = metrics {
        line(out, format_args!("metrics: http://{address}/metrics"))?;
    }
    line(
        out,
        format_args!(
            "another terminal: partage run --memory 4Gi --cores 30 -- COMMAND; Ctrl-C ends this one"
        ),
    )?;
    out.flush()
}

/// What happens, a line at a time: below the view, or as it comes.
pub(super) struct News {
    /// To who writes it, where there is no view. Whoever has news does not wait: a reader may have stopped reading.
    plain: Option<SyncSender<String>>,
    last: Mutex<VecDeque<String>>,
}

impl News {
    fn new(plain: bool) -> io::Result<News> {
        /// Lines that may wait for their reader; more are lost.
        const WAITING: usize = 1024;
        if !plain {
            return Ok(News { plain: None, last: Mutex::default() });
        }
        // The program's own handle of it is locked for as long as it runs.
        let mut out = File::from(io::stdout().as_fd().try_clone_to_owned()?);
        let (sender, news) = mpsc::sync_channel::<String>(WAITING);
        std::thread::Builder::new().name("news".into()).spawn(move || {
            for words in news {
                // A reader who left is no reason to stop keeping.
                let _ = line(&mut out, format_args!("{words}"));
            }
        })?;
        Ok(News { plain: Some(sender), last: Mutex::default() })
    }

    pub(super) fn tell(&self, words: &str) {
        if let Some(out) = &self.plain {
            let _ = out.try_send(words.into());
            return;
        }
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        if last.len() == NEWS {
            last.pop_front();
        }
        last.push_back(words.into());
    }

    fn lines(&self) -> Vec<screen::Line> {
        let last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        last.iter().map(|words| screen::Line::plain(screen::Style::Faint, format_args!("{words}"))).collect()
    }
}
