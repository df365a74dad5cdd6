//! The option that selects a daemon: its state directory.

use clap::Args;
use partage_workstation::client::{ClientError, DaemonClient};
use partage_workstation::report::MachineReport;
use partage_workstation::state_dir::{self, StateDir, StateDirError};
use std::path::PathBuf;

/// The state directory, which identifies a daemon.
#[derive(Args)]
pub(crate) struct StateDirArgs {
    /// State directory of the daemon [default: that of the system daemon if it runs, else that of the user]
    #[arg(long, value_name = "DIR", env = state_dir::STATE_DIR_VARIABLE, hide_env_values = true)]
    state_dir: Option<PathBuf>,
}

impl StateDirArgs {
    /// Returns the state directory that the option names, or the default one.
    pub(crate) fn resolve(&self) -> Result<StateDir, StateDirError> {
        match &self.state_dir {
            Some(dir) => StateDir::at(dir),
            None => StateDir::default_location(),
        }
    }

    /// Returns a client of the daemon.
    pub(crate) fn client(&self) -> Result<DaemonClient, ClientError> {
        Ok(DaemonClient::new(self.resolve()?))
    }

    /// Returns a client of the daemon, and the daemon's current report.
    pub(crate) fn report(&self) -> Result<(DaemonClient, MachineReport), ClientError> {
        let client = self.client()?;
        let report = client.report()?;
        Ok((client, report))
    }
}
