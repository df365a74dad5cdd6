//! `partage resize`: changes the limits of a running share.

use super::format::{exit_of_error, format_cores};
use super::run::ComputeMode;
use super::share_not_found::not_found_message;
use super::state_dir::StateDirArgs;
use super::{CommandExit, OutputFormat, write_client_error};
use crate::output::write_line;
use crate::terminal;
use crate::value_parsers;
use clap::Args;
use partage_core::model::{Bytes, Cores};
use partage_workstation::client::ClientError;
use partage_workstation::protocol::ResizeChange;
use partage_workstation::report::{GpuShareReport, ShareReport};
use serde::Serialize;
use std::io::{self, Write};

/// Resize a running share
///
/// Running programs continue and see the new size at once. A share cannot become smaller than its memory usage, nor larger than the
/// free capacity of its GPUs allows. Options that are omitted keep their values.
#[derive(Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct ResizeCommand {
    /// Name of the share
    name: String,

    /// Memory limit on each GPU, such as 6Gi or 500Mi
    #[arg(long, value_name = "AMOUNT", value_parser = value_parsers::parse_memory)]
    memory: Option<Bytes>,

    /// Memory limit on each GPU, in percent of its memory
    #[arg(long, value_name = "N", value_parser = value_parsers::parse_percent, conflicts_with = "memory")]
    memory_percent: Option<u32>,

    /// Guaranteed compute on each GPU, in percent
    #[arg(long, value_name = "N", value_parser = value_parsers::parse_cores_per_gpu)]
    cores: Option<Cores>,

    /// Whether the share may also use idle GPU time
    #[arg(long, value_enum)]
    mode: Option<ComputeMode>,

    /// Output format; json has the share before and after the change
    #[arg(short, long, value_enum, default_value_t = OutputFormat::Table)]
    output: OutputFormat,

    #[command(flatten)]
    state_dir: StateDirArgs,
}

const EXAMPLES: &str = "\
Examples:
  partage resize trainer --memory 6Gi --cores 50
  partage resize trainer --memory-percent 25
  partage resize trainer --mode hard

Exit code: 0 success, 1 refused or share not found, 2 wrong arguments or no daemon is running";

/// The document that `-o json` prints: the share before and after the resize.
#[derive(Serialize)]
struct ResizeDocument<'a> {
    before: &'a ShareReport,
    after: &'a ShareReport,
}

impl ResizeCommand {
    pub(crate) fn run(&self, out: &mut dyn Write, err: &mut dyn Write) -> io::Result<CommandExit> {
        let change = self.change();
        if change == ResizeChange::default() {
            let hint = "specify --memory, --memory-percent, --cores or --mode";
            write_line(err, format_args!("error: nothing to change: {hint}"))?;
            return Ok(CommandExit::InputError);
        }
        let failed = |err: &mut dyn Write, error: &ClientError| {
            write_client_error(err, error).map(|()| exit_of_error(error))
        };
        let (client, report) = match self.state_dir.report() {
            Ok(connected) => connected,
            Err(error) => return failed(err, &error),
        };
        let Some(before) = report.shares.iter().find(|share| share.name == self.name) else {
            write_line(err, format_args!("error: {}", not_found_message(&self.name, &report)))?;
            return Ok(CommandExit::ProblemsFound);
        };
        let after = match client.resize(&self.name, change) {
            Ok(after) => after,
            Err(error) => return failed(err, &error),
        };
        match self.output {
            OutputFormat::Json => {
                serde_json::to_writer_pretty(&mut *out, &ResizeDocument { before, after: &after })?;
                writeln!(out)?;
            }
            OutputFormat::Table => {
                for text in change_lines(before, &after, terminal::supports_unicode()) {
                    write_line(out, format_args!("{text}"))?;
                }
            }
        }
        Ok(CommandExit::Success)
    }

    fn change(&self) -> ResizeChange {
        ResizeChange {
            memory: self.memory,
            memory_percent: self.memory_percent,
            cores: self.cores,
            mode: self.mode.map(Into::into),
        }
    }
}

/// Returns a line for each GPU, or a single one if the change is the same on all GPUs.
fn change_lines(before: &ShareReport, after: &ShareReport, unicode: bool) -> Vec<String> {
    let changes = after.gpu_shares.iter().map(|now| {
        let then = before.gpu_shares.iter().find(|then| then.uuid == now.uuid);
        (now.gpu, describe_change(then, now, unicode))
    });
    let mut changes: Vec<(u32, String)> = changes.collect();
    let same = changes.windows(2).all(|two| two[0].1 == two[1].1);
    if same {
        changes.truncate(1);
    }
    let lines = changes.into_iter().map(|(gpu, change)| {
        if same {
            format!("{}: {change}", after.name)
        } else {
            format!("{}, GPU {gpu}: {change}", after.name)
        }
    });
    lines.collect()
}

fn describe_change(then: Option<&GpuShareReport>, now: &GpuShareReport, unicode: bool) -> String {
    let (arrow, up_to) = if unicode { ("\u{2192}", "\u{2264}") } else { ("->", "<=") };
    let memory = |gpu_share: &GpuShareReport| {
        gpu_share.memory_bytes.map_or_else(|| "no limit".into(), |bytes| bytes.to_string())
    };
    let cores = |gpu_share: &GpuShareReport| match format_cores(gpu_share, up_to) {
        none if none == "-" => "no guarantee".to_string(),
        some => some,
    };
    let each = |what: &str, then: Option<String>, now: String| match then {
        Some(then) if then != now => format!("{what} {then} {arrow} {now}"),
        _ => format!("{what} {now}"),
    };
    let memory = each("memory", then.map(memory), memory(now));
    let cores = each("cores", then.map(cores), cores(now));
    let same = if memory.contains(arrow) || cores.contains(arrow) { "" } else { ", unchanged" };
    format!("{memory}, {cores}{same}")
}

#[cfg(test)]
mod tests {
    use super::super::test_reports::share;
    use super::*;

    #[test]
    fn change_shows_old_and_new_limits() {
        let before = share("pair", "ada", &[0, 1], 4, 0);
        let mut after = share("pair", "ada", &[0, 1], 6, 50);
        assert_eq!(
            change_lines(&before, &after, true),
            ["pair: memory 4 GiB → 6 GiB, cores no guarantee → 50 %"]
        );
        after.gpu_shares[1].ceiling = Some(Cores::WHOLE);
        assert_eq!(
            change_lines(&before, &after, false),
            [
                "pair, GPU 0: memory 4 GiB -> 6 GiB, cores no guarantee -> 50 %",
                "pair, GPU 1: memory 4 GiB -> 6 GiB, cores no guarantee -> 50 % <=100 %"
            ]
        );
        assert_eq!(
            change_lines(&before, &before, true),
            ["pair: memory 4 GiB, cores no guarantee, unchanged"]
        );
    }
}
