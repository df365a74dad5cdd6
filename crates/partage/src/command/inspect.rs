//! `partage inspect`: shows all details of one share.

use super::format::{format_age, shell_quote, unix_seconds};
use super::share_not_found::not_found_message;
use super::state_dir::StateDirArgs;
use super::{CommandExit, OutputFormat, write_client_error};
use crate::output::write_line;
use crate::terminal::{self, StyledLine, TextStyle};
use clap::Args;
use partage_core::model::Cores;
use partage_workstation::report::{GpuShareReport, ShareReport, ShareStage};
use std::fmt;
use std::io::{self, Write};

/// Show all details of a share
#[derive(Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct InspectCommand {
    /// Name of the share
    name: String,

    /// Output format
    #[arg(short, long, value_enum, default_value_t = OutputFormat::Table)]
    output: OutputFormat,

    #[command(flatten)]
    state_dir: StateDirArgs,
}

const EXAMPLES: &str = "\
Examples:
  partage inspect trainer
  partage inspect trainer -o json | jq '.gpuShares[].peakBytes'

Exit code: 0 success, 1 share not found, 2 no daemon is running";

impl InspectCommand {
    pub(crate) fn run(&self, out: &mut dyn Write, err: &mut dyn Write) -> io::Result<CommandExit> {
        let (_, report) = match self.state_dir.report() {
            Ok(connected) => connected,
            Err(error) => {
                write_client_error(err, &error)?;
                return Ok(CommandExit::InputError);
            }
        };
        let Some(share) = report.shares.iter().find(|share| share.name == self.name) else {
            write_line(err, format_args!("error: {}", not_found_message(&self.name, &report)))?;
            return Ok(CommandExit::ProblemsFound);
        };
        match self.output {
            OutputFormat::Json => {
                serde_json::to_writer_pretty(&mut *out, share)?;
                writeln!(out)?;
            }
            OutputFormat::Table => terminal::print(&lines(share, unix_seconds()), out)?,
        }
        Ok(CommandExit::Success)
    }
}

/// Column in which values begin.
const VALUE_COLUMN: usize = 16;

fn entry(key: &str, style: TextStyle, value: impl fmt::Display) -> StyledLine {
    let mut line = StyledLine::new(TextStyle::Heading, format_args!("{key}"));
    line.push(
        TextStyle::Plain,
        format_args!("{}{:2$}", if key.is_empty() { " " } else { ":" }, "", VALUE_COLUMN - 1 - key.len()),
    );
    line.push(style, format_args!("{value}"));
    line
}

fn lines(share: &ShareReport, now: u64) -> Vec<StyledLine> {
    let plain = TextStyle::Plain;
    let mut lines = vec![
        entry("name", plain, &share.name),
        entry("user", plain, format_args!("{} ({})", share.user, share.uid)),
        entry(
            "state",
            plain,
            format_args!("{} for {}", stage_text(share.stage), format_age(share.since, now)),
        ),
        entry("command", plain, shell_quote(&share.command)),
        entry("pid", plain, share.pid),
        StyledLine::default(),
        entry("confinement", plain, &share.confinement),
        entry("", TextStyle::Dim, confinement_effect(&share.confinement)),
        entry("cgroup", plain, if share.cgroup { CGROUP } else { NO_CGROUP }),
        entry("device filter", plain, if share.device_filter { DEVICE_FILTER } else { NO_DEVICE_FILTER }),
    ];
    if share.oversubscribe {
        lines.push(entry("oversubscribed", plain, OVERSUBSCRIBED));
    }
    if share.low_latency {
        lines.push(entry("latency", plain, LOW_LATENCY));
    }
    if share.priority > 0 {
        lines.push(entry("priority", plain, share.priority));
    }
    for gpu_share in &share.gpu_shares {
        lines.push(StyledLine::default());
        lines.extend(self::gpu_share_lines(gpu_share));
    }
    lines.push(StyledLine::default());
    lines.extend(processes(share));
    if !share.bypass_suspected.is_empty() {
        lines.push(StyledLine::default());
        for (at, why) in share.bypass_suspected.iter().enumerate() {
            lines.push(entry(if at == 0 { "bypass" } else { "" }, TextStyle::Error, why));
        }
    }
    lines
}

fn stage_text(stage: ShareStage) -> &'static str {
    match stage {
        ShareStage::Starting => "starting",
        ShareStage::Running => "running",
        ShareStage::Lingering => "lingering (the command has exited, processes that it started have not)",
        ShareStage::Stopping => "stopping",
    }
}

/// Describes which processes a kind of confinement covers.
fn confinement_effect(confinement: &str) -> &'static str {
    match confinement {
        "mount namespace" => "limits apply to child processes, env -i, su and login shells",
        "user namespace" => {
            "limits apply to child processes, env -i and login shells; sudo and su do not work inside"
        }
        "library path" => {
            "limits apply to child processes; a program that clears its environment escapes them"
        }
        _ => "unknown to this version of partage, which may be older than the daemon",
    }
}

const CGROUP: &str = "yes, contains all processes of the share";
const NO_CGROUP: &str = "no, processes are identified by what they inherit from the command";
const DEVICE_FILTER: &str = "yes, device files of other GPUs are blocked";
const NO_DEVICE_FILTER: &str =
    "no, device files of all GPUs are accessible; limits are enforced in the driver libraries";
const LOW_LATENCY: &str = "low, launches start soon beside long kernels of other shares";
const OVERSUBSCRIBED: &str = "memory above the limit is in host memory and not counted below";

fn gpu_share_lines(gpu_share: &GpuShareReport) -> Vec<StyledLine> {
    let plain = TextStyle::Plain;
    let memory = match gpu_share.memory_bytes {
        Some(limit) => format!("{} of {limit} used, peak {}", gpu_share.used_bytes, gpu_share.peak_bytes),
        None => format!("{} used, peak {}, no limit", gpu_share.used_bytes, gpu_share.peak_bytes),
    };
    let cores = match (gpu_share.cores, gpu_share.ceiling) {
        _ if gpu_share.whole => "exclusive".into(),
        (None, None | Some(Cores::WHOLE)) => "no guarantee, idle time only".into(),
        (None, Some(ceiling)) => format!("no guarantee, idle time only, at most {ceiling}"),
        (Some(cores), Some(ceiling)) if ceiling > cores => {
            format!("{cores} guaranteed, up to {ceiling} with idle time")
        }
        (Some(cores), _) => format!("{cores} guaranteed, hard limit"),
    };
    let seconds = |nanos: u64| nanos as f64 / 1e9;
    let waits = if gpu_share.waiting { ", waiting for a turn now" } else { "" };
    let (style, refusals) = match gpu_share.refusals {
        0 => (plain, "none".to_string()),
        1 => (TextStyle::Warning, "1 allocation above the limit".into()),
        many => (TextStyle::Warning, format!("{many} allocations above the limit")),
    };
    vec![
        entry("gpu", plain, format_args!("{} ({})", gpu_share.gpu, gpu_share.uuid)),
        entry("memory", plain, memory),
        entry("refused", style, refusals),
        entry("cores", plain, cores),
        entry("gpu time", plain, format_args!("{:.3} s", seconds(gpu_share.spent_nanos))),
        entry("throttled", plain, format_args!("{:.3} s{waits}", seconds(gpu_share.throttled_nanos))),
    ]
}

fn processes(share: &ShareReport) -> Vec<StyledLine> {
    let mut lines = vec![entry("processes", TextStyle::Plain, share.members)];
    for (at, process) in share.processes.iter().enumerate() {
        let held: Vec<String> = process
            .held_bytes
            .iter()
            .zip(&share.gpu_shares)
            .map(|(held, gpu_share)| format!("{held} of GPU {}", gpu_share.gpu))
            .collect();
        let command = if process.command.is_empty() { "?" } else { &process.command };
        let text = format!("{} {command}: {}", process.pid, held.join(", "));
        lines.push(entry(if at == 0 { "gpu processes" } else { "" }, TextStyle::Plain, text));
    }
    if share.processes.is_empty() {
        lines.push(entry("gpu processes", TextStyle::Plain, "none"));
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::super::test_reports::{report, texts};
    use super::*;

    #[test]
    fn all_details_are_shown() {
        let report = report();
        assert_eq!(
            texts(&lines(&report.shares[0], 1_000_090)),
            [
                "name:           trainer",
                "user:           ada (1000)",
                "state:          running for 90s",
                "command:        python train.py --epochs 90",
                "pid:            4242",
                "",
                "confinement:    mount namespace",
                "                limits apply to child processes, env -i, su and login shells",
                "cgroup:         yes, contains all processes of the share",
                "device filter:  yes, device files of other GPUs are blocked",
                "",
                "gpu:            0 (GPU-00000000-0000-0000-0000-000000000000)",
                "memory:         12 GiB of 16 GiB used, peak 13 GiB",
                "refused:        none",
                "cores:          30 % guaranteed, hard limit",
                "gpu time:       0.000 s",
                "throttled:      0.000 s",
                "",
                "processes:      1",
                "gpu processes:  4242 python: 12 GiB of GPU 0"
            ]
        );
        let oversubscribed = ShareReport { oversubscribe: true, ..report.shares[0].clone() };
        let expected = "oversubscribed: memory above the limit is in host memory and not counted below";
        assert!(texts(&lines(&oversubscribed, 1_000_090)).iter().any(|line| line == expected));
        let preferred = ShareReport { low_latency: true, priority: 3, ..report.shares[0].clone() };
        for expected in [
            "latency:        low, launches start soon beside long kernels of other shares",
            "priority:       3",
        ] {
            assert!(texts(&lines(&preferred, 1_000_090)).iter().any(|line| line == expected), "{expected}");
        }
        let notebook = texts(&lines(&report.shares[1], 1_000_090));
        for line in [
            "confinement:    library path",
            "                limits apply to child processes; a program that clears its environment escapes them",
            "refused:        3 allocations above the limit",
            "cores:          20 % guaranteed, up to 100 % with idle time",
            "gpu processes:  none",
            "bypass:         process 77 holds 2 GiB of GPU 0 that the shim did not allocate",
        ] {
            assert!(notebook.iter().any(|shown| shown == line), "{line} in {notebook:?}");
        }
    }

    #[test]
    fn compute_shows_guarantee_and_ceiling() {
        let text = |cores: Option<u32>, ceiling: Option<u32>, whole: bool| {
            let mut gpu_share = report().shares[0].gpu_shares[0].clone();
            gpu_share.cores = cores.and_then(Cores::percent);
            gpu_share.ceiling = ceiling.and_then(Cores::percent);
            gpu_share.whole = whole;
            self::gpu_share_lines(&gpu_share)[3].text()[VALUE_COLUMN..].to_string()
        };
        assert_eq!(text(Some(30), None, false), "30 % guaranteed, hard limit");
        assert_eq!(text(Some(30), Some(30), false), "30 % guaranteed, hard limit");
        assert_eq!(text(Some(30), Some(60), false), "30 % guaranteed, up to 60 % with idle time");
        assert_eq!(text(None, Some(60), false), "no guarantee, idle time only, at most 60 %");
        assert_eq!(text(None, Some(100), false), "no guarantee, idle time only");
        assert_eq!(text(None, None, false), "no guarantee, idle time only");
        assert_eq!(text(Some(100), None, true), "exclusive");
    }
}
