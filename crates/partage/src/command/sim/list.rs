//! `partage sim list`: the cards there are.

use super::super::{Outcome, Output};
use crate::output::line;
use clap::Args;
use partage_sim_node::profile::Profile;
use std::io::{self, Write};

/// List the cards that can be simulated
#[derive(Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct List {
    /// How to answer; json has every figure of every card
    #[arg(short, long, value_enum, default_value_t = Output::Table)]
    output: Output,
}

const EXAMPLES: &str = "\
Examples:
  partage sim list
  partage sim list -o json

A card that is not here is a JSON file that names the nearest one and what differs from it:
  {\"base\": \"T4\", \"model\": \"T4-8GB\", \"memory\": {\"total\": 8589934592}}";

impl List {
    pub(crate) fn run(&self, out: &mut dyn Write) -> io::Result<Outcome> {
        match self.output {
            Output::Json => {
                serde_json::to_writer_pretty(&mut *out, &Profile::ALL)?;
                writeln!(out)?;
            }
            Output::Table => table(out)?,
        }
        Ok(Outcome::Fine)
    }
}

fn table(out: &mut dyn Write) -> io::Result<()> {
    writeln!(
        out,
        "{:<16} {:<22} {:>10} {:>4} {:>8} {:>8}",
        "MODEL", "NAME", "MEMORY", "SMS", "COMPUTE", "NVLINKS"
    )?;
    for card in Profile::ALL {
        let (major, minor) = card.compute.major_and_minor();
        let links = card.nvlink.as_ref().map_or("-".to_string(), |nvlink| nvlink.links.to_string());
        line(
            out,
            format_args!(
                "{:<16} {:<22} {:>6} MiB {:>4} {:>8} {:>8}",
                card.model,
                card.name,
                card.memory.total >> 20,
                card.compute.multiprocessors,
                format!("{major}.{minor}"),
                links,
            ),
        )?;
    }
    Ok(())
}
