//! Which keeper is meant.

use clap::Args;
use partage_workstation::client::{Client, ClientError};
use partage_workstation::home::{self, Home, HomeError};
use partage_workstation::report::Report;
use std::path::PathBuf;

/// Where shares are kept.
#[derive(Args)]
pub(crate) struct HomeArgs {
    /// The folder in which shares are kept [default: the machine's, else one's own]
    #[arg(long, value_name = "DIR", env = home::VARIABLE, hide_env_values = true)]
    home: Option<PathBuf>,
}

impl HomeArgs {
    pub(crate) fn home(&self) -> Result<Home, HomeError> {
        match &self.home {
            Some(folder) => Home::at(folder),
            None => Home::usual(),
        }
    }

    /// Whom to ask.
    pub(crate) fn client(&self) -> Result<Client, ClientError> {
        Ok(Client::new(self.home()?))
    }

    /// Whom to ask, and how everything is.
    pub(crate) fn report(&self) -> Result<(Client, Report), ClientError> {
        let client = self.client()?;
        let report = client.report()?;
        Ok((client, report))
    }
}
