//! `partage sim` in builds without the simulated driver: says how to get it.

use super::Outcome;
use crate::output::line;
use clap::Args;
use partage_host::simulated_driver::SimulatedDriverError;
use std::ffi::OsString;
use std::io::{self, Write};

/// Simulated NVIDIA GPUs that programs take for real ones; not in this build
#[derive(Args)]
#[command(disable_help_flag = true)]
pub(crate) struct Sim {
    /// The arguments of the command in builds that have it.
    #[arg(trailing_var_arg = true, allow_hyphen_values = true, hide = true)]
    _arguments: Vec<OsString>,
}

impl Sim {
    pub(crate) fn run(&self, _: &mut dyn Write, err: &mut dyn Write) -> io::Result<Outcome> {
        line(err, format_args!("error: {}", SimulatedDriverError::NotBuilt))?;
        Ok(Outcome::Unreadable)
    }
}
