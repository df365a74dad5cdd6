//! `partage daemon`, a hidden command: runs the daemon in the background. `partage run` starts it.

use super::CommandExit;
use super::state_dir::StateDirArgs;
use crate::logging::{self, LogOptions};
use clap::Args;
use partage_enforce::error_chain::describe;
use partage_workstation::client::{BUSY, READY};
use partage_workstation::daemon::{DaemonApp, DaemonConfig, DaemonError};
use partage_workstation::log_file::RotatingLog;
use partage_workstation::settings::WorkstationSettings;
use partage_workstation::state_dir::StateDir;
use std::io::{self, Write};
use std::path::PathBuf;

/// Run the daemon of a state directory in the background
#[derive(Args)]
pub(crate) struct DaemonCommand {
    #[command(flatten)]
    state_dir: StateDirArgs,

    /// Settings file
    #[arg(long, value_name = "FILE")]
    settings: Option<PathBuf>,

    /// Wait until no other daemon runs, then take over
    #[arg(long)]
    standby: bool,
}

impl DaemonCommand {
    pub(crate) fn run(&self, out: &mut dyn Write) -> io::Result<CommandExit> {
        // Files that were inherited from the starting command would stay open for the daemon's lifetime.
        partage_host::process_setup::close_inherited_files();
        // A panicked thread would leave a half-working daemon. The standby process takes over if this one aborts.
        std::panic::set_hook(Box::new(|panic| {
            tracing::error!(%panic, "a thread panicked");
            std::process::abort();
        }));
        // Detaches from the terminal, so that neither its hang-up nor Ctrl-C reaches the daemon. Fails if the process already leads a
        // session, which is as good.
        let _ = rustix::process::setsid();
        let started = self.state_dir.resolve().map_err(DaemonError::from).and_then(|state_dir| {
            self.log(&state_dir);
            self.build(state_dir)
        });
        match started {
            Ok(Some(app)) => {
                // The command that started the daemon may have ended.
                let _ = writeln!(out, "{READY}").and_then(|()| out.flush());
                let shares = app.run();
                tracing::info!(shares, "daemon stopped");
                Ok(CommandExit::Success)
            }
            Ok(None) => Ok(CommandExit::Success),
            Err(DaemonError::Busy) => {
                writeln!(out, "{BUSY}")?;
                Ok(CommandExit::ProblemsFound)
            }
            Err(error) => {
                let why = describe(&error);
                tracing::error!(error = %why, "the daemon cannot run");
                writeln!(out, "{}", why.replace('\n', " "))?;
                Ok(CommandExit::ProblemsFound)
            }
        }
    }

    /// Logs to the file in the state directory.
    fn log(&self, state_dir: &StateDir) {
        let log = RotatingLog::new(state_dir.log());
        let options = LogOptions { format: logging::format_from_env(), verbose: false, colors: false };
        logging::init_or_default(options, move || log.clone());
    }

    fn build(&self, state_dir: StateDir) -> Result<Option<DaemonApp>, DaemonError> {
        let (settings, settings_file) = WorkstationSettings::load(self.settings.as_deref(), &state_dir)?;
        let config = DaemonConfig { state_dir, settings, foreground: false, metrics: None, settings_file };
        if self.standby { DaemonApp::stand_by(config) } else { DaemonApp::build(config).map(Some) }
    }
}
