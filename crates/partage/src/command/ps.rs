//! `partage ps`: the shares of this machine.

use super::home::HomeArgs;
use super::words::{self, age, clock, cores, size};
use super::{Outcome, Output, says};
use crate::screen::{self, Column, Line, Style, table};
use clap::Args;
use partage_workstation::report::{Report, ShareReport, Stage};
use serde::Serialize;
use std::io::{self, IsTerminal, Write};

/// List the shares of this machine, and who waits for one
#[derive(Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Ps {
    /// How to answer
    #[arg(short, long, value_enum, default_value_t = Output::Table)]
    output: Output,

    #[command(flatten)]
    home: HomeArgs,
}

const EXAMPLES: &str = "\
Memory is what is in use of the limit; cores are what is promised, and after \u{2264} how far the share may go beyond it.
Of a share on several GPUs memory is the sum, and cores are of each.
With \"+ host\", memory beyond the limit is placed on the host.

Examples:
  partage ps
  partage ps -o json | jq -r '.shares[] | select(.user == \"ada\") | .name'

Exit code: 0 done, 2 there is nobody to ask";

/// What programs get.
#[derive(Serialize)]
struct Document<'a> {
    shares: &'a [ShareReport],
    waiting: &'a [partage_workstation::report::WaitingReport],
}

impl Ps {
    pub(crate) fn run(&self, out: &mut dyn Write, err: &mut dyn Write) -> io::Result<Outcome> {
        let (_, report) = match self.home.report() {
            Ok(asked) => asked,
            Err(error) => {
                says(err, &error)?;
                return Ok(Outcome::Unreadable);
            }
        };
        match self.output {
            Output::Json => {
                let document = Document { shares: &report.shares, waiting: &report.waiting };
                serde_json::to_writer_pretty(&mut *out, &document)?;
                writeln!(out)?;
            }
            Output::Table => {
                let terminal = io::stdout().is_terminal();
                let width = if terminal { screen::size().1 } else { usize::MAX };
                screen::print(&lines(&report, clock(), width, screen::has_blocks()), out)?;
            }
        }
        Ok(Outcome::Fine)
    }
}

const COLUMNS: [Column; 9] = [
    Column::text("NAME", 0, 32),
    Column::text("USER", 4, 16),
    Column::text("GPU", 2, usize::MAX),
    Column::number("MEMORY", 0),
    Column::number("CORES", 1),
    Column::text("STATE", 3, usize::MAX),
    Column::number("SINCE", 5),
    Column::number("PROCESSES", 6),
    Column::text("COMMAND", 7, usize::MAX),
];

fn lines(report: &Report, now: u64, width: usize, blocks: bool) -> Vec<Line> {
    let mut lines = if report.shares.is_empty() {
        vec![Line::plain(Style::Plain, format_args!("{}", words::NO_SHARES))]
    } else {
        table(&COLUMNS, report.shares.iter().map(|share| row(share, now, blocks)).collect(), width)
    };
    if !report.waiting.is_empty() {
        lines.push(Line::default());
        lines.extend(words::waiting(report));
    }
    lines
}

fn row(share: &ShareReport, now: u64, blocks: bool) -> Vec<Line> {
    let cell = |text: String| Line::plain(Style::Plain, format_args!("{text}"));
    let gpus: Vec<String> = share.parts.iter().map(|part| part.gpu.to_string()).collect();
    let used: u64 = share.parts.iter().map(|part| part.used_bytes.0).fold(0, u64::saturating_add);
    let limits: Option<Vec<u64>> =
        share.parts.iter().map(|part| part.memory_bytes.map(|limit| limit.0)).collect();
    let limit =
        limits.map_or_else(|| "-".into(), |limits| size(limits.into_iter().fold(0, u64::saturating_add)));
    let beyond = if share.oversubscribe { " + host" } else { "" };
    let up_to = if blocks { "\u{2264}" } else { "<=" };
    let state = match share.stage {
        Stage::Starting => Line::plain(Style::Plain, format_args!("starting")),
        Stage::Running => Line::plain(Style::Good, format_args!("running")),
        Stage::Lingering => Line::plain(Style::Warn, format_args!("lingering")),
        Stage::Stopping => Line::plain(Style::Warn, format_args!("stopping")),
    };
    vec![
        cell(share.name.clone()),
        cell(share.user.clone()),
        cell(gpus.join(",")),
        cell(format!("{} / {limit}{beyond}", size(used))),
        cell(share.parts.first().map_or_else(|| "-".into(), |part| cores(part, up_to))),
        state,
        cell(age(share.since, now)),
        cell(share.members.to_string()),
        cell(words::shell(&share.command)),
    ]
}

#[cfg(test)]
mod tests {
    use super::super::samples::{report, texts};
    use super::*;

    #[test]
    fn shares_are_listed_and_who_waits_comes_below() {
        let report = report();
        assert_eq!(
            texts(&lines(&report, 1_000_090, usize::MAX, true)),
            [
                "NAME      USER  GPU           MEMORY        CORES  STATE     SINCE  PROCESSES  COMMAND",
                "trainer   ada   0    12 GiB / 16 GiB         30 %  running     90s          1  python train.py --epochs 90",
                "notebook  bob   0    7.9 GiB / 8 GiB  20 % ≤100 %  running     90s          1  work",
                "pair      ada   0,1      0 B / 8 GiB            -  stopping    90s          1  work",
                "",
                "waits, 1 of 1: late (eve), 20 GiB of 1 GPU: the largest free part is 12 GiB"
            ]
        );
        assert_eq!(
            texts(&lines(&report, 1_000_090, 60, false))[..2],
            [
                "NAME      USER  GPU           MEMORY         CORES  STATE",
                "trainer   ada   0    12 GiB / 16 GiB          30 %  running"
            ]
        );
    }

    #[test]
    fn oversubscribed_share_says_so() {
        let mut report = report();
        report.shares.truncate(1);
        report.shares[0].oversubscribe = true;
        assert!(texts(&lines(&report, 1_000_090, usize::MAX, true))[1].contains("12 GiB / 16 GiB + host"));
    }

    #[test]
    fn where_nothing_is_something_can_be_done() {
        let mut report = report();
        (report.shares, report.waiting) = (Vec::new(), Vec::new());
        let shown = texts(&lines(&report, 0, 80, true));
        assert_eq!(shown, ["no shares: partage run --memory 4Gi -- COMMAND starts one"]);
    }
}
