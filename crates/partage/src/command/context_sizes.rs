//! `partage context-sizes`: measures what a context takes on each card, in a process of its own. The keeper starts it.

use super::Outcome;
use crate::output::line;
use clap::Args;
use std::io::{self, Write};
use std::path::PathBuf;

/// Measure what a CUDA context takes on each GPU
#[derive(Args)]
pub(crate) struct ContextSizes {
    /// The driver's libcuda.so.1
    cuda: PathBuf,
    /// The driver's libnvidia-ml.so.1
    nvml: PathBuf,
}

impl ContextSizes {
    pub(crate) fn run(&self, out: &mut dyn Write, err: &mut dyn Write) -> io::Result<Outcome> {
        match partage_host::context::answer(&self.cuda, &self.nvml, out) {
            Ok(()) => Ok(Outcome::Fine),
            Err(error) => {
                line(err, format_args!("error: {error}"))?;
                Ok(Outcome::Problems)
            }
        }
    }
}
