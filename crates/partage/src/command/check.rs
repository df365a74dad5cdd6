//! `partage check`: shows the GPU requests of manifests and validates them without a cluster.

use super::{CommandExit, DialectArgs, OutputFormat};
use crate::manifest_files;
use crate::output::write_line;
use clap::Args;
use partage_core::check::{CheckReport, WorkloadReport};
use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::io::{self, Write};
use std::path::PathBuf;

/// Validate the GPU requests of manifests
///
/// Reads Pods, Deployments, StatefulSets, DaemonSets, Jobs, CronJobs, ReplicaSets, Volcano Jobs and lists of them, in YAML or JSON, in
/// any dialect. Objects of other kinds are skipped, with an error if they request GPUs. Does not need a cluster.
#[derive(Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct CheckCommand {
    /// Manifest in YAML or JSON, - for standard input; can be repeated
    #[arg(short, long = "file", alias = "filename", value_name = "FILE", required = true)]
    files: Vec<PathBuf>,

    /// Output format
    #[arg(short, long, value_enum, default_value_t = OutputFormat::Table)]
    output: OutputFormat,

    #[command(flatten)]
    dialects: DialectArgs,
}

/// Maximum number of skipped kinds that are listed by name.
const MAX_LISTED_KINDS: usize = 6;

const EXAMPLES: &str = "\
Examples:
  partage check -f pod.yaml
  helm template chart | partage check -f -
  kubectl get pods -A -o json | partage check -f - -o json
  partage check -f gpushare.yaml --gpushare-unit MiB

Exit code: 0 valid, 1 problems found, 2 a file is unreadable or has no workload";

impl CheckCommand {
    pub(crate) fn run(&self, out: &mut dyn Write, err: &mut dyn Write) -> io::Result<CommandExit> {
        let input = manifest_files::read_manifests(&self.files);
        let report = CheckReport::of(&input.workloads, &self.dialects.settings());
        // JSON is written even for empty input; a table is not.
        match self.output {
            OutputFormat::Json => {
                serde_json::to_writer_pretty(&mut *out, &report)?;
                writeln!(out)?;
            }
            OutputFormat::Table if report.workloads.is_empty() => {}
            OutputFormat::Table => write_table(&report, &input.others, out)?,
        }
        for error in input.unread_gpu_requests.iter().chain(&input.unreadable) {
            write_line(err, format_args!("error: {error}"))?;
        }
        Ok(match report.problems() {
            _ if !input.unreadable.is_empty() => CommandExit::InputError,
            0 if input.unread_gpu_requests.is_empty() => CommandExit::Success,
            _ => CommandExit::ProblemsFound,
        })
    }
}

fn write_table(
    report: &CheckReport,
    others: &BTreeMap<String, usize>,
    out: &mut dyn Write,
) -> io::Result<()> {
    for report in &report.workloads {
        write_workload(report, out)?;
    }
    write_line(out, format_args!("{}{}", report.summary(), skipped_kinds(others)))
}

/// Returns the number of skipped objects by kind, most frequent first.
fn skipped_kinds(others: &BTreeMap<String, usize>) -> String {
    let mut kinds: Vec<(&str, usize)> = others.iter().map(|(kind, &count)| (kind.as_str(), count)).collect();
    kinds.sort_by_key(|&(_, count)| Reverse(count));
    let more = kinds.split_off(kinds.len().min(MAX_LISTED_KINDS)).into_iter().map(|(_, count)| count).sum();
    let mut named: Vec<String> = kinds.iter().map(|(kind, count)| format!("{count} {kind}")).collect();
    match more {
        0_usize => {}
        more => named.push(format!("{more} of other kinds")),
    }
    if named.is_empty() { String::new() } else { format!("; skipped: {}", named.join(", ")) }
}

/// Writes the requests and problems of one workload.
pub(super) fn write_workload(report: &WorkloadReport, out: &mut dyn Write) -> io::Result<()> {
    write_line(out, format_args!("{}", report.title()))?;
    for container in &report.containers {
        write_line(out, format_args!("  {}", container.text))?;
    }
    if !report.conditions.is_empty() {
        write_line(out, format_args!("  on: {}", report.conditions.join("; ")))?;
    }
    if report.oversubscribe {
        write_line(out, format_args!("  memory above the limit: in host memory, if the node allows it"))?;
    }
    if report.turns.low_latency {
        write_line(out, format_args!("  latency: low, launches start soon beside long kernels of others"))?;
    }
    if report.turns.priority > 0 {
        let priority = report.turns.priority;
        write_line(out, format_args!("  priority: {priority}, if the node allows it"))?;
    }
    for problem in &report.problems {
        // Container names have at most 63 characters; the input may be longer.
        let container = problem.container.iter().flat_map(|name| name.chars().take(63).chain([' ']));
        let container: String = container.collect();
        write_line(out, format_args!("  problem: {container}{}: {}", problem.field, problem.message))?;
    }
    Ok(())
}
