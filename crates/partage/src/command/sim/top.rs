//! `partage sim top`: shows the exact usage of a simulated node, live.

mod usage_report;

use super::super::{CommandExit, OutputFormat, write_error};
use super::open_node;
use crate::output::write_line;
use crate::terminal::{DisplayMode, LiveDisplay, StyledLine, TextStyle, WakeReason};
use clap::Args;
use partage_sim_node::node::NodeDir;
use partage_sim_node::state::{GpuActivity, SimNodeState};
use std::io::{self, Write};
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::time::Duration;
use usage_report::SimReport;

/// Show the exact usage of a simulated node
///
/// Shows what a real driver does not report: the exact GPU time of each process, beside the utilization that NVML reports. On a
/// terminal the table is refreshed until q or Ctrl-C; otherwise a new table is printed after each interval.
#[derive(Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct SimTopCommand {
    /// Directory of the node [default: $PARTAGE_SIM_DIR]
    #[arg(long, value_name = "DIR")]
    dir: Option<PathBuf>,

    /// Output format; json is one document, as with --once
    #[arg(short, long, value_enum, default_value_t = OutputFormat::Table)]
    output: OutputFormat,

    /// Print one table after one interval and exit
    #[arg(long)]
    once: bool,

    /// Refresh interval in seconds, over which percentages are computed, 0.01 to 3600
    #[arg(long, value_name = "S", value_parser = parse_seconds, default_value = "1")]
    interval: Duration,
}

const EXAMPLES: &str = "\
Examples:
  partage sim top
  partage sim top --once --interval 5
  partage sim top -o json | jq '.gpus[].processes[] | {pid, sharePercent}'

Exit code: 0 success, 2 the node does not exist or was removed";

fn parse_seconds(text: &str) -> Result<Duration, String> {
    let invalid = || "use 0.01 to 3600 seconds".to_string();
    let seconds: f64 = text.parse().map_err(|_| invalid())?;
    if (0.01..=3600.0).contains(&seconds) { Ok(Duration::from_secs_f64(seconds)) } else { Err(invalid()) }
}

impl SimTopCommand {
    pub(crate) fn run(&self, out: &mut dyn Write, err: &mut dyn Write) -> io::Result<CommandExit> {
        let (node, state) = match open_node(self.dir.as_deref()) {
            Ok(found) => found,
            Err(error) => {
                write_error(err, &error)?;
                return Ok(CommandExit::InputError);
            }
        };
        match self.output {
            OutputFormat::Json => {
                let report = self.sample(&node, &state);
                serde_json::to_writer_pretty(&mut *out, &report)?;
                writeln!(out)?;
                Ok(CommandExit::Success)
            }
            OutputFormat::Table if self.once => {
                for text in self.sample(&node, &state).lines() {
                    write_line(out, format_args!("{text}"))?;
                }
                Ok(CommandExit::Success)
            }
            OutputFormat::Table => self.run_live(&node, &state, out, err),
        }
    }

    fn sample(&self, node: &NodeDir, state: &SimNodeState) -> SimReport {
        let before = read_usage(state);
        std::thread::sleep(self.interval);
        SimReport::new(node, state, &before, &read_usage(state))
    }

    /// Shows tables until the user quits.
    fn run_live(
        &self,
        node: &NodeDir,
        state: &SimNodeState,
        out: &mut dyn Write,
        err: &mut dyn Write,
    ) -> io::Result<CommandExit> {
        /// Maximum time until the first table is shown on a terminal.
        const FIRST_INTERVAL: Duration = Duration::from_millis(200);
        let state_inode = state_inode(node);
        let mut display = LiveDisplay::open(DisplayMode::Inline.on_terminal());
        let footer = StyledLine::new(TextStyle::Plain, format_args!("q quit"));
        let mut before = read_usage(state);
        let mut wait = if display.is_live() { self.interval.min(FIRST_INTERVAL) } else { self.interval };
        loop {
            match display.wait(wait) {
                WakeReason::Quit => return Ok(CommandExit::Success),
                WakeReason::Timeout | WakeReason::Resized | WakeReason::Key(_) => {}
            }
            if self::state_inode(node) != state_inode {
                drop(display);
                write_line(err, format_args!("error: {} was removed", node.path().display()))?;
                return Ok(CommandExit::InputError);
            }
            let after = read_usage(state);
            let report = SimReport::new(node, state, &before, &after);
            let lines = report
                .lines()
                .into_iter()
                .map(|text| StyledLine::new(TextStyle::Plain, format_args!("{text}")));
            display.show(&lines.collect::<Vec<_>>(), &footer, out)?;
            before = after;
            wait = self.interval;
        }
    }
}

fn read_usage(state: &SimNodeState) -> Vec<GpuActivity> {
    (0..state.gpus()).map(|gpu| state.usage(gpu)).collect()
}

/// Returns the inode of the node's state file. It changes if the node is removed and created again in the same directory.
fn state_inode(node: &NodeDir) -> Option<u64> {
    std::fs::metadata(node.state_file()).ok().map(|data| data.ino())
}
