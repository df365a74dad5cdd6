//! `partage sim rm`: removes simulated nodes.

use super::super::CommandExit;
use crate::output::write_line;
use clap::Args;
use partage_sim_node::node::NodeDir;
use std::io::{self, Write};
use std::path::PathBuf;

/// Remove simulated nodes
///
/// Removes a node's directory, if it contains nothing else. Programs that are running on the node continue; new programs find no
/// driver.
#[derive(Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct SimRmCommand {
    /// Directory of a node; can be repeated
    #[arg(value_name = "DIR", required = true)]
    dirs: Vec<PathBuf>,
}

const EXAMPLES: &str = "\
Examples:
  partage sim rm \"$PARTAGE_SIM_DIR\"
  partage sim rm /dev/shm/partage-sim-*

Exit code: 0 success, 2 a node cannot be removed";

impl SimRmCommand {
    pub(crate) fn run(&self, err: &mut dyn Write) -> io::Result<CommandExit> {
        let mut exit = CommandExit::Success;
        for dir in &self.dirs {
            if let Err(error) = NodeDir::remove(dir) {
                write_line(err, format_args!("error: {error}"))?;
                exit = CommandExit::InputError;
            }
        }
        Ok(exit)
    }
}
