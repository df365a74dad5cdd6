//! `partage sim rm`: removes simulated nodes.

use super::super::Outcome;
use crate::output::line;
use clap::Args;
use partage_sim_node::node::NodeDir;
use std::io::{self, Write};
use std::path::PathBuf;

/// Remove simulated nodes
///
/// Removes the folder of a node, if it is one and holds nothing else. Programs that still run on it keep what they
/// have; programs that start find no driver.
#[derive(Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Rm {
    /// The folder of a node; may be given several times
    #[arg(value_name = "DIR", required = true)]
    dirs: Vec<PathBuf>,
}

const EXAMPLES: &str = "\
Examples:
  partage sim rm \"$PARTAGE_SIM_DIR\"
  partage sim rm /dev/shm/partage-sim-*

Exit code: 0 done, 2 one of them cannot be removed";

impl Rm {
    pub(crate) fn run(&self, err: &mut dyn Write) -> io::Result<Outcome> {
        let mut outcome = Outcome::Fine;
        for dir in &self.dirs {
            if let Err(error) = NodeDir::remove(dir) {
                line(err, format_args!("error: {error}"))?;
                outcome = Outcome::Unreadable;
            }
        }
        Ok(outcome)
    }
}
