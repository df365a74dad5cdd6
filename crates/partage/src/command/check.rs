//! `partage check`: what manifests ask, and what is wrong with them, before they meet a cluster.

use super::{DialectArgs, Outcome, Output};
use crate::input;
use crate::output::line;
use clap::Args;
use partage_core::check::{Report, WorkloadReport};
use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::io::{self, Write};
use std::path::PathBuf;

/// Say what manifests ask of GPUs, and what is wrong with them
///
/// Reads Pods, Deployments, StatefulSets, DaemonSets, Jobs, CronJobs, ReplicaSets, Volcano's Jobs and lists of
/// them, in YAML or JSON, in any dialect. Objects of other kinds are passed over, and named where they ask for
/// GPUs. Needs no cluster.
#[derive(Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Check {
    /// A manifest, YAML or JSON; - is standard input; may be given several times
    #[arg(short, long = "file", alias = "filename", value_name = "FILE", required = true)]
    files: Vec<PathBuf>,

    /// How to answer
    #[arg(short, long, value_enum, default_value_t = Output::Table)]
    output: Output,

    #[command(flatten)]
    dialects: DialectArgs,
}

/// The most other kinds named in one line.
const MOST_KINDS: usize = 6;

const EXAMPLES: &str = "\
Examples:
  partage check -f pod.yaml
  helm template chart | partage check -f -
  kubectl get pods -A -o json | partage check -f - -o json
  partage check -f gpushare.yaml --gpushare-unit MiB

Exit code: 0 fine, 1 problems, 2 unreadable or nothing to read";

impl Check {
    pub(crate) fn run(&self, out: &mut dyn Write, err: &mut dyn Write) -> io::Result<Outcome> {
        let input = input::read(&self.files);
        let report = Report::of(&input.workloads, &self.dialects.settings());
        // A program gets JSON whatever happens; a person is not told that nothing asks for nothing.
        match self.output {
            Output::Json => {
                serde_json::to_writer_pretty(&mut *out, &report)?;
                writeln!(out)?;
            }
            Output::Table if report.workloads.is_empty() => {}
            Output::Table => table(&report, &input.others, out)?,
        }
        for what in input.unread.iter().chain(&input.unreadable) {
            line(err, format_args!("error: {what}"))?;
        }
        Ok(match report.problems() {
            _ if !input.unreadable.is_empty() => Outcome::Unreadable,
            0 if input.unread.is_empty() => Outcome::Fine,
            _ => Outcome::Problems,
        })
    }
}

fn table(report: &Report, others: &BTreeMap<String, usize>, out: &mut dyn Write) -> io::Result<()> {
    for report in &report.workloads {
        workload(report, out)?;
    }
    line(out, format_args!("{}{}", report.summary(), passed_over(others)))
}

/// How many objects of which other kinds there are, the most first.
fn passed_over(others: &BTreeMap<String, usize>) -> String {
    let mut kinds: Vec<(&str, usize)> = others.iter().map(|(kind, &count)| (kind.as_str(), count)).collect();
    kinds.sort_by_key(|&(_, count)| Reverse(count));
    let more = kinds.split_off(kinds.len().min(MOST_KINDS)).into_iter().map(|(_, count)| count).sum();
    let mut named: Vec<String> = kinds.iter().map(|(kind, count)| format!("{count} {kind}")).collect();
    match more {
        0_usize => {}
        more => named.push(format!("{more} of other kinds")),
    }
    if named.is_empty() { String::new() } else { format!("; passed over: {}", named.join(", ")) }
}

/// What one workload asks and what is wrong with it.
pub(super) fn workload(report: &WorkloadReport, out: &mut dyn Write) -> io::Result<()> {
    line(out, format_args!("{}", report.title()))?;
    for container in &report.containers {
        line(out, format_args!("  {}", container.words))?;
    }
    if !report.conditions.is_empty() {
        line(out, format_args!("  on: {}", report.conditions.join("; ")))?;
    }
    if report.oversubscribe {
        line(out, format_args!("  memory beyond the limit: on the host, where the node allows it"))?;
    }
    for problem in &report.problems {
        // As many letters of a name as a container can have.
        let container = problem.container.iter().flat_map(|name| name.chars().take(63).chain([' ']));
        let container: String = container.collect();
        line(out, format_args!("  problem: {container}{}: {}", problem.field, problem.message))?;
    }
    Ok(())
}
