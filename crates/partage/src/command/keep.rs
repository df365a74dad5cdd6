//! `partage keep`: the daemon in the background. People do not type it; `partage run` does.

use super::Outcome;
use super::home::HomeArgs;
use crate::logging::{self, LogOptions};
use clap::Args;
use partage_enforce::error_chain::describe;
use partage_workstation::client::{BUSY, READY};
use partage_workstation::daemon::{App, Config, DaemonError};
use partage_workstation::home::Home;
use partage_workstation::log_file::RotatingLog;
use partage_workstation::settings::Settings;
use std::io::{self, Write};
use std::path::PathBuf;

/// Keep the shares of a home, in the background
#[derive(Args)]
pub(crate) struct Keep {
    #[command(flatten)]
    home: HomeArgs,

    /// The settings
    #[arg(long, value_name = "FILE")]
    settings: Option<PathBuf>,

    /// Wait until nobody else keeps them
    #[arg(long)]
    standby: bool,
}

impl Keep {
    pub(crate) fn run(&self, out: &mut dyn Write) -> io::Result<Outcome> {
        // What it was started with open is not its own.
        partage_host::process_setup::close_inherited_files();
        // A thread that fails leaves half a daemon: the one who stands by is better.
        std::panic::set_hook(Box::new(|panic| {
            tracing::error!(%panic, "a thread panicked");
            std::process::abort();
        }));
        // A terminal that goes away, or its Ctrl-C, is not meant for it. It may lead a session already.
        let _ = rustix::process::setsid();
        let started = self.home.home().map_err(DaemonError::from).and_then(|home| {
            self.log(&home);
            self.build(home)
        });
        match started {
            Ok(Some(app)) => {
                // The command that started the daemon may have ended.
                let _ = writeln!(out, "{READY}").and_then(|()| out.flush());
                let shares = app.run();
                tracing::info!(shares, "daemon stopped");
                Ok(Outcome::Fine)
            }
            Ok(None) => Ok(Outcome::Fine),
            Err(DaemonError::Busy) => {
                writeln!(out, "{BUSY}")?;
                Ok(Outcome::Problems)
            }
            Err(error) => {
                let why = describe(&error);
                tracing::error!(error = %why, "the daemon cannot run");
                writeln!(out, "{}", why.replace('\n', " "))?;
                Ok(Outcome::Problems)
            }
        }
    }

    /// Logs into the file of the home.
    fn log(&self, home: &Home) {
        let log = RotatingLog::new(home.log());
        let options = LogOptions { format: logging::format_from_env(), verbose: false, colors: false };
        logging::init_or_default(options, move || log.clone());
    }

    fn build(&self, home: Home) -> Result<Option<App>, DaemonError> {
        let (settings, settings_file) = Settings::load(self.settings.as_deref(), &home)?;
        let config = Config { home, settings, foreground: false, metrics: None, settings_file };
        if self.standby { App::stand_by(config) } else { App::build(config).map(Some) }
    }
}
