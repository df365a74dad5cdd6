//! `partage up`: the machine's daemon in the foreground, with a live view and metrics.

mod metrics_server;
mod usage_summary;
mod workloads;

use super::state_dir::StateDirArgs;
use super::top::view::{self, ViewOptions};
use super::{CommandExit, write_client_error, write_error};
use crate::logging::{self, FilterError, LineWriter, LogFormat, LogOptions};
use crate::output::write_line;
use crate::terminal::{self, DisplayMode, LiveDisplay, WakeReason};
use crate::value_parsers;
use anyhow::bail;
use clap::Args;
use partage_enforce::error_chain::describe;
use partage_workstation::client::DaemonClient;
use partage_workstation::daemon::{DaemonApp, DaemonConfig, DaemonError};
use partage_workstation::report::MachineReport;
use partage_workstation::settings::{self, WorkstationSettings};
use partage_workstation::state_dir::StateDir;
use std::collections::VecDeque;
use std::fs::File;
use std::io::{self, Write};
use std::net::SocketAddr;
use std::os::fd::AsFd;
use std::path::PathBuf;
use std::sync::mpsc::{self, SyncSender};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};
use usage_summary::UsageSummary;
use workloads::Workloads;

/// Run the daemon in the foreground with a live view and metrics
///
/// Uses the NVIDIA driver if one is installed, and simulated GPUs otherwise. Running shares are adopted, and continue when this command
/// exits. `partage run` also works without it, with a daemon in the background; with it the machine has metrics, and all users share
/// one daemon if root starts it.
#[derive(Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct UpCommand {
    /// Settings file [default: partage.yaml in --state-dir; else /etc/partage/partage.yaml for root, ~/.config/partage/partage.yaml]
    #[arg(long, value_name = "FILE")]
    settings: Option<PathBuf>,

    /// Validate the settings and exit
    #[arg(long)]
    check: bool,

    /// Address of the metrics endpoint on this machine, or off [default: from the settings, else 127.0.0.1:9464]
    #[arg(long, value_name = "ADDRESS")]
    metrics: Option<String>,

    /// Log as text lines, without the live view
    #[arg(long)]
    plain: bool,

    /// Log as JSON lines, without the live view
    #[arg(long)]
    json: bool,

    /// Enable debug logging; PARTAGE_LOG filters by level and crate
    #[arg(long, short)]
    verbose: bool,

    /// File of shares to start, each with its command
    #[arg(long, value_name = "FILE")]
    start: Option<PathBuf>,

    /// Time after which to exit, such as 60s or 5m
    #[arg(long = "for", value_name = "TIME", value_parser = value_parsers::parse_duration)]
    time: Option<Duration>,

    #[command(flatten)]
    state_dir: StateDirArgs,
}

const EXAMPLES: &str = "\
Examples:
  partage up
  partage up --settings lab.yaml --check
  partage up --start examples/workloads.yaml --for 60s
  curl http://127.0.0.1:9464/metrics

Exit code: 0 success, 1 the settings are invalid or the daemon cannot start, 2 PARTAGE_LOG is invalid";

/// Interval between updates of the view.
const FRAME_INTERVAL: Duration = Duration::from_secs(1);
/// Time between SIGTERM and SIGKILL for shares of `--start`.
const STOP_GRACE_PERIOD: Duration = Duration::from_secs(5);
/// Maximum number of log lines below the view.
const MAX_RECENT_LINES: usize = 6;

impl UpCommand {
    pub(crate) fn run(&self, out: &mut dyn Write, err: &mut dyn Write) -> io::Result<CommandExit> {
        match self.setup() {
            Ok(setup) if self.check => {
                if let Err(error) = partage_workstation::check(&setup.settings) {
                    write_line(err, format_args!("error: {}", describe(&error)))?;
                    return Ok(CommandExit::ProblemsFound);
                }
                let from = setup.file.map_or_else(|| "no file".into(), |file| file.display().to_string());
                write_line(out, format_args!("the settings are valid ({from})"))?;
                Ok(CommandExit::Success)
            }
            Ok(setup) => self.run_daemon(setup, out, err),
            Err(error) => {
                // An error in a file has several lines, with an excerpt of the file.
                for (at, text) in describe(error.as_ref()).lines().enumerate() {
                    write_line(err, format_args!("{}{text}", if at == 0 { "error: " } else { "  " }))?;
                }
                Ok(CommandExit::ProblemsFound)
            }
        }
    }

    fn setup(&self) -> anyhow::Result<DaemonSetup> {
        let state_dir = self.state_dir.resolve()?;
        if let Some(current) = partage_workstation::run::current_share(&state_dir).filter(|_| !self.check) {
            bail!("the daemon cannot run inside a share, and this shell is in {current}: use another shell");
        }
        let (settings, file) = WorkstationSettings::load(self.settings.as_deref(), &state_dir)?;
        let file = file.map(|file| std::path::absolute(&file).unwrap_or(file));
        let metrics = match &self.metrics {
            Some(text) => settings::metrics_address(text)?,
            None => settings.metrics,
        };
        let workloads = self.start.as_deref().map(Workloads::load).transpose()?;
        Ok(DaemonSetup { state_dir, settings, file, metrics, workloads })
    }

    fn run_daemon(
        &self,
        setup: DaemonSetup,
        out: &mut dyn Write,
        err: &mut dyn Write,
    ) -> io::Result<CommandExit> {
        let DaemonSetup { state_dir, settings, file, metrics, workloads } = setup;
        let lines = self.display_mode() == DisplayMode::Stream;
        let log = Arc::new(ActivityLog::new(lines)?);
        if let Err(error) = self.log(&log) {
            write_line(err, format_args!("error: {}", describe(&error)))?;
            return Ok(CommandExit::InputError);
        }
        let served = match metrics.map(metrics_server::MetricsListener::bind).transpose() {
            Ok(served) => served,
            Err(error) => {
                write_error(err, &error)?;
                return Ok(CommandExit::ProblemsFound);
            }
        };
        let config = DaemonConfig {
            state_dir: state_dir.clone(),
            settings,
            foreground: true,
            metrics: served.as_ref().map(metrics_server::MetricsListener::address),
            settings_file: file,
        };
        let app = match take_over(&config) {
            Ok(app) => app,
            Err(TakeOverError::Daemon(what)) => {
                write_line(err, format_args!("error: {what}"))?;
                return Ok(CommandExit::ProblemsFound);
            }
            Err(TakeOverError::Client(error)) => {
                write_client_error(err, &error)?;
                return Ok(CommandExit::ProblemsFound);
            }
        };
        // A Ctrl-C after the greeting must stop the daemon in order, so signals are caught before it. A live view would hide the
        // greeting and is opened later.
        let display = lines.then(|| LiveDisplay::open_with_signals(self.display_mode()));
        // JSON output has no greeting.
        if self.format() != LogFormat::Json {
            write_greeting(
                &app.report(),
                served.as_ref().map(metrics_server::MetricsListener::address),
                out,
            )?;
        }
        let served = match served.map(|served| served.serve(app.daemon())).transpose() {
            Ok(served) => served,
            Err(error) => {
                write_error(err, &error)?;
                return Ok(CommandExit::ProblemsFound);
            }
        };
        let mut summary = UsageSummary::default();
        let mut started = workloads.map(|workloads| workloads.start(&state_dir, &log));
        let display = display.unwrap_or_else(|| LiveDisplay::open_with_signals(self.display_mode()));
        let watched = self.watch(&app, display, &log, &mut summary, out);
        if let Some(started) = &mut started {
            // The usage of these shares is known only until they are stopped.
            summary.record(&app.report());
            started.stop(&DaemonClient::new(state_dir), STOP_GRACE_PERIOD);
        }
        if let Some(served) = served {
            served.stop();
        }
        app.stop();
        let left = app.run();
        watched?;
        for text in started.iter().flat_map(|started| summary.lines(started)) {
            write_line(out, format_args!("{text}"))?;
        }
        if left > 0 && self.format() != LogFormat::Json {
            let shares =
                if left == 1 { "1 share continues".into() } else { format!("{left} shares continue") };
            write_line(
                out,
                format_args!("{shares} in the background: list with partage ps, adopt with partage up"),
            )?;
        }
        Ok(CommandExit::Success)
    }

    /// Returns the live view if standard output is a terminal and no log lines were requested.
    fn display_mode(&self) -> DisplayMode {
        if self.plain || self.json { DisplayMode::Stream } else { DisplayMode::FullScreen.on_terminal() }
    }

    fn format(&self) -> LogFormat {
        match self.display_mode() {
            _ if self.json => LogFormat::Json,
            DisplayMode::Stream => logging::format_from_env(),
            _ => LogFormat::View,
        }
    }

    /// Sends log lines to the view, or to standard output.
    fn log(&self, log: &Arc<ActivityLog>) -> Result<(), FilterError> {
        let log = Arc::clone(log);
        let writer = LineWriter::new(move |line| log.push(line));
        let options = LogOptions { format: self.format(), verbose: self.verbose, colors: false };
        logging::init(options, move || writer.clone())
    }

    /// Shows the view until the user quits or the time is over.
    fn watch(
        &self,
        app: &DaemonApp,
        mut display: LiveDisplay,
        log: &ActivityLog,
        summary: &mut UsageSummary,
        out: &mut dyn Write,
    ) -> io::Result<()> {
        let end = self.time.map(|time| Instant::now() + time);
        let left = |longest: Duration| {
            end.map_or(longest, |end| end.saturating_duration_since(Instant::now()).min(longest))
        };
        let mut view = ViewOptions::new(usize::MAX, terminal::supports_unicode());
        let mut before: Option<MachineReport> = None;
        let mut now = app.report();
        loop {
            summary.record(&now);
            if display.is_live() {
                view.width = display.size().1;
                let mut lines = view::lines(before.as_ref(), &now, &view);
                lines.push(terminal::StyledLine::default());
                lines.extend(log.lines());
                display.show(&lines, &view::footer(&view), out)?;
            }
            match display.wait(left(FRAME_INTERVAL)) {
                WakeReason::Quit => break,
                WakeReason::Key(key) => {
                    view.apply_key(key);
                }
                WakeReason::Resized => {}
                WakeReason::Timeout => {
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

struct DaemonSetup {
    state_dir: StateDir,
    settings: WorkstationSettings,
    file: Option<PathBuf>,
    metrics: Option<SocketAddr>,
    workloads: Option<Workloads>,
}

enum TakeOverError {
    Daemon(String),
    Client(partage_workstation::client::ClientError),
}

/// Builds the daemon, in place of one in the background.
fn take_over(config: &DaemonConfig) -> Result<DaemonApp, TakeOverError> {
    /// Maximum time for a background daemon to hand over: usually none, longer if requests are in progress or the machine is busy.
    const HAND_OVER_TIMEOUT: Duration = Duration::from_secs(20);
    let until = Instant::now() + HAND_OVER_TIMEOUT;
    let state_dir = &config.state_dir;
    let client = DaemonClient::new(state_dir.clone());
    loop {
        client.take_over().map_err(TakeOverError::Client)?;
        match DaemonApp::build(config.clone()) {
            Ok(app) => return Ok(app),
            Err(DaemonError::Busy) if Instant::now() < until => {
                std::thread::sleep(Duration::from_millis(20));
            }
            Err(DaemonError::Busy) => {
                return Err(TakeOverError::Daemon(format!(
                    "another daemon uses {} and did not hand over in time: stop it first",
                    state_dir.path().display()
                )));
            }
            Err(error) => {
                // Lets the daemon in the background, which was asked to hand over, start again.
                client.resume();
                return Err(TakeOverError::Daemon(describe(&error)));
            }
        }
    }
}

fn write_greeting(
    report: &MachineReport,
    metrics: Option<SocketAddr>,
    out: &mut dyn Write,
) -> io::Result<()> {
    let mut models: Vec<(usize, &str)> = Vec::new();
    for gpu in &report.gpus {
        match models.iter_mut().find(|(_, model)| *model == gpu.model) {
            Some((count, _)) => *count += 1,
            None => models.push((1, &gpu.model)),
        }
    }
    let gpus: Vec<String> = models.iter().map(|(count, model)| format!("{count} x {model}")).collect();
    let gpus = gpus.join(", ");
    let simulated = if report.driver.simulated { "no NVIDIA driver in use: simulating " } else { "" };
    write_line(out, format_args!("{simulated}{gpus}, driver {}", report.driver.version))?;
    if let Some(address) = metrics {
        write_line(out, format_args!("metrics: http://{address}/metrics"))?;
    }
    write_line(
        out,
        format_args!(
            "start a share in another terminal: partage run --memory 4Gi --cores 30 -- COMMAND; stop with Ctrl-C"
        ),
    )?;
    out.flush()
}

/// Recent log lines: kept for the view, or written to standard output.
pub(super) struct ActivityLog {
    /// Queue of the thread that writes lines if there is no view. Callers never block: a full queue drops lines, because the reader
    /// of standard output may be stuck.
    plain: Option<SyncSender<String>>,
    last: Mutex<VecDeque<String>>,
}

impl ActivityLog {
    fn new(plain: bool) -> io::Result<ActivityLog> {
        /// Maximum number of lines in the queue; further lines are dropped.
        const MAX_QUEUED_LINES: usize = 1024;
        if !plain {
            return Ok(ActivityLog { plain: None, last: Mutex::default() });
        }
        // `main` holds the lock of `io::stdout()` until it exits.
        let mut out = File::from(io::stdout().as_fd().try_clone_to_owned()?);
        let (sender, queue) = mpsc::sync_channel::<String>(MAX_QUEUED_LINES);
        std::thread::Builder::new().name("log".into()).spawn(move || {
            for line in queue {
                // The daemon continues even if its output is closed.
                let _ = write_line(&mut out, format_args!("{line}"));
            }
        })?;
        Ok(ActivityLog { plain: Some(sender), last: Mutex::default() })
    }

    pub(super) fn push(&self, line: &str) {
        if let Some(out) = &self.plain {
            let _ = out.try_send(line.into());
            return;
        }
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        if last.len() == MAX_RECENT_LINES {
            last.pop_front();
        }
        last.push_back(line.into());
    }

    fn lines(&self) -> Vec<terminal::StyledLine> {
        let last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        last.iter()
            .map(|line| terminal::StyledLine::new(terminal::TextStyle::Dim, format_args!("{line}")))
            .collect()
    }
}
