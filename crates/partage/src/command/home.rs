//! Which keeper is meant.

use clap::Args;
use partage_local::home::{self, Home};
use std::path::PathBuf;

/// Where shares are kept.
#[derive(Args)]
pub(crate) struct HomeArgs {
    /// The folder in which shares are kept [default: the machine's, else one's own]
    #[arg(long, value_name = "DIR", env = home::VARIABLE, hide_env_values = true)]
    home: Option<PathBuf>,
}

impl HomeArgs {
    pub(crate) fn home(&self) -> Result<Home, String> {
        let home = match &self.home {
            Some(folder) => Home::at(folder),
            None => Home::usual(),
        };
        home.map_err(|error| error.to_string())
    }
}
