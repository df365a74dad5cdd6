//! `partage sim list`: lists the GPU models that can be simulated.

use super::super::{CommandExit, OutputFormat};
use crate::output::write_line;
use clap::Args;
use partage_sim_node::profile::GpuProfile;
use std::io::{self, Write};

/// List the GPU models that can be simulated
#[derive(Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct SimListCommand {
    /// Output format; json has all properties of all models
    #[arg(short, long, value_enum, default_value_t = OutputFormat::Table)]
    output: OutputFormat,
}

const EXAMPLES: &str = "\
Examples:
  partage sim list
  partage sim list -o json

For another model, write a JSON file with the most similar model as its base and the properties that differ:
  {\"base\": \"T4\", \"model\": \"T4-8GB\", \"memory\": {\"total\": 8589934592}}";

impl SimListCommand {
    pub(crate) fn run(&self, out: &mut dyn Write) -> io::Result<CommandExit> {
        match self.output {
            OutputFormat::Json => {
                serde_json::to_writer_pretty(&mut *out, &GpuProfile::ALL)?;
                writeln!(out)?;
            }
            OutputFormat::Table => write_table(out)?,
        }
        Ok(CommandExit::Success)
    }
}

fn write_table(out: &mut dyn Write) -> io::Result<()> {
    writeln!(
        out,
        "{:<16} {:<22} {:>10} {:>4} {:>8} {:>8}",
        "MODEL", "NAME", "MEMORY", "SMS", "COMPUTE", "NVLINKS"
    )?;
    for card in GpuProfile::ALL {
        let (major, minor) = card.compute.major_and_minor();
        let links = card.nvlink.as_ref().map_or("-".to_string(), |nvlink| nvlink.links.to_string());
        write_line(
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
