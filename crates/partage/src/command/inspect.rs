//! `partage inspect`: everything about one share.

pub(super) mod nearest;

use super::home::HomeArgs;
use super::words::{age, clock, shell};
use super::{Outcome, Output, says};
use crate::output::line;
use crate::screen::{self, Line, Style};
use clap::Args;
use partage_core::model::Cores;
use partage_workstation::report::{PartReport, ShareReport, Stage};
use std::fmt;
use std::io::{self, Write};

/// Show everything about one share
#[derive(Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Inspect {
    /// The share's name
    name: String,

    /// How to answer
    #[arg(short, long, value_enum, default_value_t = Output::Table)]
    output: Output,

    #[command(flatten)]
    home: HomeArgs,
}

const EXAMPLES: &str = "\
Examples:
  partage inspect trainer
  partage inspect trainer -o json | jq '.parts[].peakBytes'

Exit code: 0 done, 1 there is no share of this name, 2 there is nobody to ask";

impl Inspect {
    pub(crate) fn run(&self, out: &mut dyn Write, err: &mut dyn Write) -> io::Result<Outcome> {
        let (_, report) = match self.home.report() {
            Ok(asked) => asked,
            Err(error) => {
                says(err, &error)?;
                return Ok(Outcome::Unreadable);
            }
        };
        let Some(share) = report.shares.iter().find(|share| share.name == self.name) else {
            line(err, format_args!("error: {}", nearest::unknown(&self.name, &report)))?;
            return Ok(Outcome::Problems);
        };
        match self.output {
            Output::Json => {
                serde_json::to_writer_pretty(&mut *out, share)?;
                writeln!(out)?;
            }
            Output::Table => screen::print(&lines(share, clock()), out)?,
        }
        Ok(Outcome::Fine)
    }
}

/// Where values begin.
const INDENT: usize = 14;

fn entry(key: &str, style: Style, value: impl fmt::Display) -> Line {
    let mut line = Line::plain(Style::Head, format_args!("{key}"));
    line.push(
        Style::Plain,
        format_args!("{}{:2$}", if key.is_empty() { " " } else { ":" }, "", INDENT - 1 - key.len()),
    );
    line.push(style, format_args!("{value}"));
    line
}

fn lines(share: &ShareReport, now: u64) -> Vec<Line> {
    let plain = Style::Plain;
    let mut lines = vec![
        entry("name", plain, &share.name),
        entry("user", plain, format_args!("{} ({})", share.user, share.uid)),
        entry("state", plain, format_args!("{}, for {}", stage(share.stage), age(share.since, now))),
        entry("command", plain, shell(&share.command)),
        entry("process", plain, share.pid),
        Line::default(),
        entry("held by", plain, format_args!("a {}", share.binding)),
        entry("", Style::Faint, binding(&share.binding)),
        entry("cgroup", plain, if share.cgroup { CGROUP } else { NO_CGROUP }),
        entry("device files", plain, if share.device_gate { GATE } else { NO_GATE }),
    ];
    if share.oversubscribe {
        lines.push(entry("beyond limit", plain, OVERSUBSCRIBED));
    }
    for part in &share.parts {
        lines.push(Line::default());
        lines.extend(self::part(part));
    }
    lines.push(Line::default());
    lines.extend(processes(share));
    if !share.bypass_suspected.is_empty() {
        lines.push(Line::default());
        for (at, why) in share.bypass_suspected.iter().enumerate() {
            lines.push(entry(if at == 0 { "suspected" } else { "" }, Style::Bad, why));
        }
    }
    lines
}

fn stage(stage: Stage) -> &'static str {
    match stage {
        Stage::Starting => "starting",
        Stage::Running => "running",
        Stage::Lingering => "its command has ended, processes that it left behind have not",
        Stage::Stopping => "being stopped",
    }
}

/// What a binding means.
fn binding(binding: &str) -> &'static str {
    match binding {
        "mount namespace" => "children, env -i, su and login shells keep the limits",
        "user namespace" => {
            "children, env -i and login shells keep the limits; sudo and su do not work inside"
        }
        "library path" => "children keep the limits; a program that clears its environment leaves the share",
        _ => "this program does not know it: it may be older than the keeper",
    }
}

const CGROUP: &str = "one holds all its processes: none is missed when it is stopped";
const NO_CGROUP: &str = "none: its processes are known by what they inherit from its command";
const GATE: &str = "those of other GPUs are closed to it";
const OVERSUBSCRIBED: &str = "memory is placed on the host, and is not in the figures below";
const NO_GATE: &str = "those of all GPUs are open to it; the driver's libraries hold the limits";

fn part(part: &PartReport) -> Vec<Line> {
    let plain = Style::Plain;
    let memory = match part.memory_bytes {
        Some(limit) => format!("{} of {limit} in use, at most {} ever", part.used_bytes, part.peak_bytes),
        None => format!("{} in use, at most {} ever; without a limit", part.used_bytes, part.peak_bytes),
    };
    let cores = match (part.cores, part.ceiling) {
        _ if part.whole => "all of it, alone".into(),
        (None, None | Some(Cores::WHOLE)) => "none promised; what nobody else wants".into(),
        (None, Some(ceiling)) => format!("none promised; what nobody else wants, up to {ceiling}"),
        (Some(cores), Some(ceiling)) if ceiling > cores => {
            format!("{cores} promised, up to {ceiling} while nobody else wants it")
        }
        (Some(cores), _) => format!("{cores} promised, and never more"),
    };
    let seconds = |nanos: u64| nanos as f64 / 1e9;
    let waits = if part.waiting { "; waits for its turn right now" } else { "" };
    let (style, refusals) = match part.refusals {
        0 => (plain, "none".to_string()),
        1 => (Style::Warn, "1 allocation beyond its own limit".into()),
        many => (Style::Warn, format!("{many} allocations beyond its own limit")),
    };
    vec![
        entry("gpu", plain, format_args!("{} ({})", part.gpu, part.uuid)),
        entry("memory", plain, memory),
        entry("refused", style, refusals),
        entry("cores", plain, cores),
        entry("gpu time", plain, format_args!("{:.3} s", seconds(part.spent_nanos))),
        entry("throttled", plain, format_args!("{:.3} s{waits}", seconds(part.throttled_nanos))),
    ]
}

fn processes(share: &ShareReport) -> Vec<Line> {
    let mut lines = vec![entry("processes", Style::Plain, share.members)];
    for (at, process) in share.processes.iter().enumerate() {
        let held: Vec<String> = process
            .held_bytes
            .iter()
            .zip(&share.parts)
            .map(|(held, part)| format!("{held} of GPU {}", part.gpu))
            .collect();
        let command = if process.command.is_empty() { "?" } else { &process.command };
        let words = format!("{} {command}: {}", process.pid, held.join(", "));
        lines.push(entry(if at == 0 { "on a gpu" } else { "" }, Style::Plain, words));
    }
    if share.processes.is_empty() {
        lines.push(entry("on a gpu", Style::Plain, "none"));
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::super::samples::{report, texts};
    use super::*;

    #[test]
    fn everything_is_said() {
        let report = report();
        assert_eq!(
            texts(&lines(&report.shares[0], 1_000_090)),
            [
                "name:         trainer",
                "user:         ada (1000)",
                "state:        running, for 90s",
                "command:      python train.py --epochs 90",
                "process:      4242",
                "",
                "held by:      a mount namespace",
                "              children, env -i, su and login shells keep the limits",
                "cgroup:       one holds all its processes: none is missed when it is stopped",
                "device files: those of other GPUs are closed to it",
                "",
                "gpu:          0 (GPU-00000000-0000-0000-0000-000000000000)",
                "memory:       12 GiB of 16 GiB in use, at most 13 GiB ever",
                "refused:      none",
                "cores:        30 % promised, and never more",
                "gpu time:     0.000 s",
                "throttled:    0.000 s",
                "",
                "processes:    1",
                "on a gpu:     4242 python: 12 GiB of GPU 0"
            ]
        );
        let oversubscribed = ShareReport { oversubscribe: true, ..report.shares[0].clone() };
        let beyond = "beyond limit: memory is placed on the host, and is not in the figures below";
        assert!(texts(&lines(&oversubscribed, 1_000_090)).iter().any(|line| line == beyond));
        let notebook = texts(&lines(&report.shares[1], 1_000_090));
        for line in [
            "held by:      a library path",
            "              children keep the limits; a program that clears its environment leaves the share",
            "refused:      3 allocations beyond its own limit",
            "cores:        20 % promised, up to 100 % while nobody else wants it",
            "on a gpu:     none",
            "suspected:    process 77 holds 2 GiB of GPU 0 that it did not ask for",
        ] {
            assert!(notebook.iter().any(|shown| shown == line), "{line} in {notebook:?}");
        }
    }

    #[test]
    fn every_kind_of_compute_has_its_words() {
        let words = |cores: Option<u32>, ceiling: Option<u32>, whole: bool| {
            let mut part = report().shares[0].parts[0].clone();
            part.cores = cores.and_then(Cores::percent);
            part.ceiling = ceiling.and_then(Cores::percent);
            part.whole = whole;
            self::part(&part)[3].text()[INDENT..].to_string()
        };
        assert_eq!(words(Some(30), None, false), "30 % promised, and never more");
        assert_eq!(words(Some(30), Some(30), false), "30 % promised, and never more");
        assert_eq!(words(Some(30), Some(60), false), "30 % promised, up to 60 % while nobody else wants it");
        assert_eq!(words(None, Some(60), false), "none promised; what nobody else wants, up to 60 %");
        assert_eq!(words(None, Some(100), false), "none promised; what nobody else wants");
        assert_eq!(words(None, None, false), "none promised; what nobody else wants");
        assert_eq!(words(Some(100), None, true), "all of it, alone");
    }
}
