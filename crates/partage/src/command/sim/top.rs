//! `partage sim top`: who uses what on a simulated node, in simulated truth.

mod report;

use super::super::{Outcome, Output};
use super::attach;
use crate::output::line;
use crate::screen::{Kind, Line, Screen, Style, Wake};
use clap::Args;
use partage_sim_node::node::NodeDir;
use partage_sim_node::state::{State, Usage};
use report::Report;
use std::io::{self, Write};
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::time::Duration;

/// Show who uses what on a simulated node, in simulated truth
///
/// Says what no driver tells: how long each process really had a GPU, beside what NVML shows of it. On a terminal the
/// table is drawn anew until q or Ctrl-C; elsewhere one follows the other.
#[derive(Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Top {
    /// The folder of the node [default: $PARTAGE_SIM_DIR]
    #[arg(long, value_name = "DIR")]
    dir: Option<PathBuf>,

    /// How to answer; json is one document, as with --once
    #[arg(short, long, value_enum, default_value_t = Output::Table)]
    output: Output,

    /// One table, after one interval
    #[arg(long)]
    once: bool,

    /// Seconds that shares are taken over, and between tables: 0.01 to 3600
    #[arg(long, value_name = "S", value_parser = seconds, default_value = "1")]
    interval: Duration,
}

const EXAMPLES: &str = "\
Examples:
  partage sim top
  partage sim top --once --interval 5
  partage sim top -o json | jq '.gpus[].processes[] | {pid, sharePercent}'

Exit code: 0 done, 2 there is no such node, or it was removed meanwhile";

fn seconds(text: &str) -> Result<Duration, String> {
    let wrong = || "use 0.01 to 3600 seconds".to_string();
    let seconds: f64 = text.parse().map_err(|_| wrong())?;
    if (0.01..=3600.0).contains(&seconds) { Ok(Duration::from_secs_f64(seconds)) } else { Err(wrong()) }
}

impl Top {
    pub(crate) fn run(&self, out: &mut dyn Write, err: &mut dyn Write) -> io::Result<Outcome> {
        let (node, state) = match attach(self.dir.as_deref()) {
            Ok(found) => found,
            Err(what) => {
                line(err, format_args!("error: {what}"))?;
                return Ok(Outcome::Unreadable);
            }
        };
        match self.output {
            Output::Json => {
                let report = self.one(&node, &state);
                serde_json::to_writer_pretty(&mut *out, &report)?;
                writeln!(out)?;
                Ok(Outcome::Fine)
            }
            Output::Table if self.once => {
                for text in self.one(&node, &state).lines() {
                    line(out, format_args!("{text}"))?;
                }
                Ok(Outcome::Fine)
            }
            Output::Table => self.go_on(&node, &state, out, err),
        }
    }

    fn one(&self, node: &NodeDir, state: &State) -> Report {
        let before = look(state);
        std::thread::sleep(self.interval);
        Report::new(node, state, &before, &look(state))
    }

    /// Table after table, until somebody has seen enough.
    fn go_on(
        &self,
        node: &NodeDir,
        state: &State,
        out: &mut dyn Write,
        err: &mut dyn Write,
    ) -> io::Result<Outcome> {
        /// Nobody likes to look at nothing for a whole interval.
        const FIRST: Duration = Duration::from_millis(200);
        let identity = identity(node);
        let mut screen = Screen::open(Kind::Inline.on_terminal());
        let foot = Line::plain(Style::Plain, format_args!("q ends"));
        let mut before = look(state);
        let mut wait = if screen.is_live() { self.interval.min(FIRST) } else { self.interval };
        loop {
            match screen.wait(wait) {
                Wake::End => return Ok(Outcome::Fine),
                Wake::Time | Wake::Resized | Wake::Key(_) => {}
            }
            if self::identity(node) != identity {
                drop(screen);
                line(err, format_args!("error: {} was removed", node.path().display()))?;
                return Ok(Outcome::Unreadable);
            }
            let after = look(state);
            let report = Report::new(node, state, &before, &after);
            let lines =
                report.lines().into_iter().map(|text| Line::plain(Style::Plain, format_args!("{text}")));
            screen.show(&lines.collect::<Vec<_>>(), &foot, out)?;
            before = after;
            wait = self.interval;
        }
    }
}

fn look(state: &State) -> Vec<Usage> {
    (0..state.gpus()).map(|gpu| state.usage(gpu)).collect()
}

/// Another node in the same folder has another one.
fn identity(node: &NodeDir) -> Option<u64> {
    std::fs::metadata(node.state()).ok().map(|data| data.ino())
}
