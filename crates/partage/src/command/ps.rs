//! `partage ps`: lists the shares of this machine.

use super::format::{self, format_age, format_bytes, format_cores, unix_seconds};
use super::state_dir::StateDirArgs;
use super::{CommandExit, OutputFormat, write_client_error};
use crate::terminal::{self, StyledLine, TableColumn, TextStyle, layout_table};
use clap::Args;
use partage_workstation::report::{MachineReport, ShareReport, ShareStage};
use serde::Serialize;
use std::io::{self, IsTerminal, Write};

/// List shares and queued requests
#[derive(Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct PsCommand {
    /// Output format
    #[arg(short, long, value_enum, default_value_t = OutputFormat::Table)]
    output: OutputFormat,

    #[command(flatten)]
    state_dir: StateDirArgs,
}

const EXAMPLES: &str = "\
MEMORY is usage and limit, CORES the guaranteed compute; \u{2264} marks the compute limit, which is reached with idle GPU time.
For a share on several GPUs, MEMORY is the sum and CORES applies to each GPU.
\"+ host\" marks shares whose memory above the limit is placed in host memory.

Examples:
  partage ps
  partage ps -o json | jq -r '.shares[] | select(.user == \"ada\") | .name'

Exit code: 0 success, 2 no daemon is running";

/// The document that `-o json` prints: shares, and requests that wait in the queue.
#[derive(Serialize)]
struct PsDocument<'a> {
    shares: &'a [ShareReport],
    waiting: &'a [partage_workstation::report::WaitingReport],
}

impl PsCommand {
    pub(crate) fn run(&self, out: &mut dyn Write, err: &mut dyn Write) -> io::Result<CommandExit> {
        let (_, report) = match self.state_dir.report() {
            Ok(connected) => connected,
            Err(error) => {
                write_client_error(err, &error)?;
                return Ok(CommandExit::InputError);
            }
        };
        match self.output {
            OutputFormat::Json => {
                let document = PsDocument { shares: &report.shares, waiting: &report.waiting };
                serde_json::to_writer_pretty(&mut *out, &document)?;
                writeln!(out)?;
            }
            OutputFormat::Table => {
                let terminal = io::stdout().is_terminal();
                let width = if terminal { terminal::size().1 } else { usize::MAX };
                terminal::print(&lines(&report, unix_seconds(), width, terminal::supports_unicode()), out)?;
            }
        }
        Ok(CommandExit::Success)
    }
}

const COLUMNS: [TableColumn; 9] = [
    TableColumn::text("NAME", 0, 32),
    TableColumn::text("USER", 4, 16),
    TableColumn::text("GPU", 2, usize::MAX),
    TableColumn::number("MEMORY", 0),
    TableColumn::number("CORES", 1),
    TableColumn::text("STATE", 3, usize::MAX),
    TableColumn::number("SINCE", 5),
    TableColumn::number("PROCESSES", 6),
    TableColumn::text("COMMAND", 7, usize::MAX),
];

fn lines(report: &MachineReport, now: u64, width: usize, unicode: bool) -> Vec<StyledLine> {
    let mut lines = if report.shares.is_empty() {
        vec![StyledLine::new(TextStyle::Plain, format_args!("{}", format::NO_SHARES_HINT))]
    } else {
        layout_table(&COLUMNS, report.shares.iter().map(|share| row(share, now, unicode)).collect(), width)
    };
    if !report.waiting.is_empty() {
        lines.push(StyledLine::default());
        lines.extend(format::waiting_lines(report));
    }
    lines
}

fn row(share: &ShareReport, now: u64, unicode: bool) -> Vec<StyledLine> {
    let cell = |text: String| StyledLine::new(TextStyle::Plain, format_args!("{text}"));
    let gpus: Vec<String> = share.gpu_shares.iter().map(|gpu_share| gpu_share.gpu.to_string()).collect();
    let used: u64 =
        share.gpu_shares.iter().map(|gpu_share| gpu_share.used_bytes.0).fold(0, u64::saturating_add);
    let limits: Option<Vec<u64>> =
        share.gpu_shares.iter().map(|gpu_share| gpu_share.memory_bytes.map(|limit| limit.0)).collect();
    let limit = limits
        .map_or_else(|| "-".into(), |limits| format_bytes(limits.into_iter().fold(0, u64::saturating_add)));
    let host_memory = if share.oversubscribe { " + host" } else { "" };
    let up_to = if unicode { "\u{2264}" } else { "<=" };
    let state = match share.stage {
        ShareStage::Starting => StyledLine::new(TextStyle::Plain, format_args!("starting")),
        ShareStage::Running => StyledLine::new(TextStyle::Good, format_args!("running")),
        ShareStage::Lingering => StyledLine::new(TextStyle::Warning, format_args!("lingering")),
        ShareStage::Stopping => StyledLine::new(TextStyle::Warning, format_args!("stopping")),
    };
    vec![
        cell(share.name.clone()),
        cell(share.user.clone()),
        cell(gpus.join(",")),
        cell(format!("{} / {limit}{host_memory}", format_bytes(used))),
        cell(share.gpu_shares.first().map_or_else(|| "-".into(), |gpu_share| format_cores(gpu_share, up_to))),
        state,
        cell(format_age(share.since, now)),
        cell(share.members.to_string()),
        cell(format::shell_quote(&share.command)),
    ]
}

#[cfg(test)]
mod tests {
    use super::super::test_reports::{report, texts};
    use super::*;

    #[test]
    fn queued_requests_are_listed_below_shares() {
        let report = report();
        assert_eq!(
            texts(&lines(&report, 1_000_090, usize::MAX, true)),
            [
                "NAME      USER  GPU           MEMORY        CORES  STATE     SINCE  PROCESSES  COMMAND",
                "trainer   ada   0    12 GiB / 16 GiB         30 %  running     90s          1  python train.py --epochs 90",
                "notebook  bob   0    7.9 GiB / 8 GiB  20 % ≤100 %  running     90s          1  work",
                "pair      ada   0,1      0 B / 8 GiB            -  stopping    90s          1  work",
                "",
                "queued 1 of 1: late (eve), 20 GiB of 1 GPU: the largest free share is 12 GiB"
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
    fn oversubscribed_share_is_marked() {
        let mut report = report();
        report.shares.truncate(1);
        report.shares[0].oversubscribe = true;
        assert!(texts(&lines(&report, 1_000_090, usize::MAX, true))[1].contains("12 GiB / 16 GiB + host"));
    }

    #[test]
    fn empty_list_shows_how_to_start_a_share() {
        let mut report = report();
        (report.shares, report.waiting) = (Vec::new(), Vec::new());
        let shown = texts(&lines(&report, 0, 80, true));
        assert_eq!(shown, ["no shares; start one with: partage run --memory 4Gi -- COMMAND"]);
    }
}
