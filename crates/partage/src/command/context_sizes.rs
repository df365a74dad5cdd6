//! `partage context-sizes`: measures the memory of a CUDA context on each GPU. Daemons start it as a separate process.

use super::CommandExit;
use crate::output::write_line;
use clap::Args;
use std::io::{self, Write};
use std::path::PathBuf;

/// Measure the memory of a CUDA context on each GPU
#[derive(Args)]
pub(crate) struct ContextSizes {
    /// Path of the driver's libcuda.so.1
    cuda: PathBuf,
    /// Path of the driver's libnvidia-ml.so.1
    nvml: PathBuf,
}

impl ContextSizes {
    pub(crate) fn run(&self, out: &mut dyn Write, err: &mut dyn Write) -> io::Result<CommandExit> {
        match partage_host::context_size::print_sizes(&self.cuda, &self.nvml, out) {
            Ok(()) => Ok(CommandExit::Success),
            Err(error) => {
                write_line(err, format_args!("error: {error}"))?;
                Ok(CommandExit::ProblemsFound)
            }
        }
    }
}
