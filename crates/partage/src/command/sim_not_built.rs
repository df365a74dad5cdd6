//! `partage sim` in builds without the simulated driver: an error that names the build that has it.

use super::CommandExit;
use crate::output::write_line;
use clap::Args;
use partage_host::simulated_driver::SimulatedDriverError;
use std::ffi::OsString;
use std::io::{self, Write};

/// Simulate NVIDIA GPUs on a machine without a GPU (not in this build)
#[derive(Args)]
#[command(disable_help_flag = true)]
pub(crate) struct SimCommand {
    /// Arguments of the command in builds that have it; ignored here.
    #[arg(trailing_var_arg = true, allow_hyphen_values = true, hide = true)]
    _arguments: Vec<OsString>,
}

impl SimCommand {
    pub(crate) fn run(&self, _: &mut dyn Write, err: &mut dyn Write) -> io::Result<CommandExit> {
        write_line(err, format_args!("error: {}", SimulatedDriverError::NotBuilt))?;
        Ok(CommandExit::InputError)
    }
}
