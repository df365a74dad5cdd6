//! `partage replay`: replays a trace of pods and reports the GPU allocation that each policy reaches.

use super::{CommandExit, write_error};
use crate::manifest_files;
use crate::plot::{self, AllocationCurve};
use anyhow::Context;
use clap::{Args, ValueEnum};
use indicatif::{ProgressBar, ProgressStyle};
use partage_core::place::defaults;
use partage_core::replay::trace::{self, TraceNode, TracePod};
use partage_core::replay::{self, Inflation, MissedPlacement, ReplayPolicy};
use serde::Serialize;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

/// Replay a trace of pods and compare placement policies
///
/// Pods arrive one by one in random order and stay; a pod that fits nowhere is skipped. The result is the percentage of all GPU
/// capacity that is allocated at the end, the mean of several seeds. Runs with the same seed are identical.
#[derive(Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct ReplayCommand {
    /// Nodes, in a CSV file with the columns sn, cpu_milli, memory_mib, gpu, model
    #[arg(long, value_name = "FILE")]
    nodes: PathBuf,

    /// Pods, in a CSV file with the columns name, cpu_milli, memory_mib, num_gpu, gpu_milli and optionally gpu_spec
    #[arg(long, value_name = "FILE")]
    pods: PathBuf,

    /// Placement policy: fragmentation, binpack, spread, topology, or a published one: fgd, best-fit, dot-product, random
    #[arg(long, default_value_t = ReplayPolicy::Allocator(defaults::CLUSTER_POLICY))]
    policy: ReplayPolicy,

    /// Number of runs, each with its own order of arrival
    #[arg(long, value_name = "N", default_value = "10", value_parser = clap::value_parser!(u64).range(1..=10_000))]
    seeds: u64,

    /// Total GPU request of all pods, as a multiple of the cluster's capacity
    #[arg(long, value_name = "FACTOR", default_value = "1.3", value_parser = parse_inflation)]
    inflate: Inflation,

    /// Run all policies, including the published ones
    #[arg(long, conflicts_with = "policy")]
    compare: bool,

    /// Output format
    #[arg(short, long, value_enum, default_value_t = ReplayFormat::Table)]
    output: ReplayFormat,

    /// SVG file for a plot of allocation against arrived load
    #[arg(long, value_name = "FILE.svg")]
    plot: Option<PathBuf>,
}

const EXAMPLES: &str = "\
Examples:
  partage replay --nodes nodes.csv --pods pods.csv
  partage replay --nodes nodes.csv --pods pods.csv --compare --plot compare.svg
  partage replay --nodes nodes.csv --pods pods.csv --policy fgd --seeds 3 -o json

Exit code: 0 success, 1 a policy skipped a pod that fits (a bug), 2 a file is unreadable or cannot be written";

#[derive(Clone, Copy, ValueEnum)]
enum ReplayFormat {
    /// Human-readable text
    Table,
    /// One JSON document
    Json,
    /// CSV with one line per run
    Csv,
}

/// Parses a factor such as `1.3` as thousandths: the target load is computed in integers.
fn parse_inflation(text: &str) -> Result<Inflation, String> {
    let invalid = || "use a number from 0.1 to 10 with at most three decimals, such as 1.3".to_string();
    let (whole, rest) = text.split_once('.').unwrap_or((text, "0"));
    let digits = |part: &str| !part.is_empty() && part.bytes().all(|b| b.is_ascii_digit());
    if !digits(whole) || !digits(rest) || whole.len() > 2 || rest.len() > 3 {
        return Err(invalid());
    }
    let thousandths = format!("{whole}{rest:0<3}").parse().map_err(|_| invalid())?;
    if (100..=10_000).contains(&thousandths) { Ok(Inflation(thousandths)) } else { Err(invalid()) }
}

/// The results of all runs of one policy; the JSON output.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct PolicyResult {
    workload: String,
    policy: &'static str,
    seeds: Vec<SeedResult>,
    mean_allocated_percent: f64,
    decisions: u64,
    nanos_per_decision: u64,
    #[serde(skip)]
    line: AllocationCurve,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct SeedResult {
    seed: u64,
    allocated_percent: f64,
    placed: u64,
    skipped: u64,
}

/// Reads a CSV file. Errors start with its path.
fn read_trace<T>(file: &Path, parse: fn(&str) -> Result<T, trace::TraceError>) -> anyhow::Result<T> {
    let read = || anyhow::Ok(parse(&manifest_files::read_text(file)?)?);
    read().with_context(|| file.display().to_string())
}

impl ReplayCommand {
    pub(crate) fn run(&self, out: &mut dyn Write, err: &mut dyn Write) -> io::Result<CommandExit> {
        let nodes = read_trace(&self.nodes, trace::read_nodes);
        let pods = read_trace(&self.pods, trace::read_pods);
        let (nodes, pods) = match (nodes, pods) {
            (Ok(nodes), Ok(pods)) => (nodes, pods),
            (nodes, pods) => {
                for error in [nodes.err(), pods.err()].into_iter().flatten() {
                    write_error(err, &error)?;
                }
                return Ok(CommandExit::InputError);
            }
        };
        let policies = if self.compare { ReplayPolicy::ALL.to_vec() } else { vec![self.policy] };
        let capacity = trace::total_cores(&nodes);
        let orders: Result<Vec<_>, _> =
            (1..=self.seeds).map(|seed| replay::arrivals(&pods, capacity, self.inflate, seed)).collect();
        let orders = match orders {
            Ok(orders) => orders,
            Err(error) => {
                writeln!(err, "error: {}: {error}", self.pods.display())?;
                return Ok(CommandExit::InputError);
            }
        };
        // Created before the runs, so that an error is reported at once.
        let mut plot = match self.plot.as_ref().map(std::fs::File::create).transpose() {
            Ok(plot) => plot,
            Err(error) => {
                let file = self.plot.as_deref().unwrap_or(Path::new(""));
                writeln!(err, "error: {}: cannot write the plot: {error}", file.display())?;
                return Ok(CommandExit::InputError);
            }
        };
        let results = match self.run_all(&nodes, &pods, &orders, &policies) {
            Ok(results) => results,
            Err(bug) => {
                writeln!(err, "error: {bug}")?;
                return Ok(CommandExit::ProblemsFound);
            }
        };
        match self.output {
            ReplayFormat::Table => table(&results, &nodes, out)?,
            ReplayFormat::Json if self.compare => serde_json::to_writer_pretty(&mut *out, &results)?,
            ReplayFormat::Json => serde_json::to_writer_pretty(&mut *out, &results[0])?,
            ReplayFormat::Csv => csv(&results, out)?,
        }
        if matches!(self.output, ReplayFormat::Json) {
            writeln!(out)?;
        }
        if let Some(file) = &mut plot {
            let lines: Vec<&AllocationCurve> = results.iter().map(|result| &result.line).collect();
            file.write_all(plot::svg(&self.workload(), &lines).as_bytes())?;
        }
        Ok(CommandExit::Success)
    }

    fn workload(&self) -> String {
        self.pods.file_stem().map_or_else(String::new, |stem| stem.to_string_lossy().into_owned())
    }

    /// Runs every seed of every policy, in parallel on all cores of the machine.
    fn run_all(
        &self,
        nodes: &[TraceNode],
        pods: &[TracePod],
        orders: &[Vec<usize>],
        policies: &[ReplayPolicy],
    ) -> Result<Vec<PolicyResult>, MissedPlacement> {
        let jobs: Vec<(ReplayPolicy, u64)> =
            policies.iter().flat_map(|&policy| (1..=self.seeds).map(move |seed| (policy, seed))).collect();
        let arrivals: usize = orders.iter().map(Vec::len).sum::<usize>() * policies.len();
        let progress = progress_bar(arrivals);
        let next = AtomicUsize::new(0);
        let outcomes = Mutex::new(Vec::new());
        let work = || {
            let started = Instant::now();
            let clock = || u64::try_from(started.elapsed().as_nanos()).unwrap_or(u64::MAX);
            while let Some(&(policy, seed)) = jobs.get(next.fetch_add(1, Ordering::Relaxed)) {
                let order = &orders[(seed - 1) as usize];
                let mut done = 0;
                let mut report_progress = |count: usize| {
                    progress.inc((count - done) as u64);
                    done = count;
                };
                let outcome = replay::run(nodes, pods, order, policy, seed, &clock, &mut report_progress);
                // Only `push` runs under the lock, so a poisoned lock still has complete results.
                let mut outcomes = outcomes.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
                outcomes.push((policy, seed, outcome));
            }
        };
        std::thread::scope(|scope| {
            let cores = std::thread::available_parallelism().map_or(1, usize::from);
            for _ in 1..cores.min(jobs.len()) {
                scope.spawn(work);
            }
            work();
        });
        progress.finish_and_clear();
        let mut outcomes = outcomes.into_inner().unwrap_or_else(std::sync::PoisonError::into_inner);
        outcomes.sort_by_key(|(_, seed, _)| *seed);
        policies
            .iter()
            .map(|&policy| {
                let own = outcomes.iter().filter(|(of, ..)| *of == policy);
                self.result(policy, own.map(|(_, seed, outcome)| (*seed, outcome)))
            })
            .collect()
    }

    fn result<'a>(
        &self,
        policy: ReplayPolicy,
        outcomes: impl Iterator<Item = (u64, &'a Result<replay::ReplayOutcome, MissedPlacement>)>,
    ) -> Result<PolicyResult, MissedPlacement> {
        let (mut seeds, mut nanos, mut decisions, mut curves) = (Vec::new(), 0, 0, Vec::new());
        for (seed, outcome) in outcomes {
            let outcome = outcome.as_ref().map_err(Clone::clone)?;
            seeds.push(SeedResult {
                seed,
                allocated_percent: outcome.allocated_percent(),
                placed: outcome.placed,
                skipped: outcome.skipped,
            });
            nanos += outcome.nanos;
            decisions += outcome.placed + outcome.skipped;
            curves.push(plot::curve(outcome));
        }
        let mean = seeds.iter().map(|seed| seed.allocated_percent).sum::<f64>() / seeds.len().max(1) as f64;
        Ok(PolicyResult {
            workload: self.workload(),
            policy: policy.name(),
            seeds,
            mean_allocated_percent: mean,
            decisions,
            nanos_per_decision: nanos / decisions.max(1),
            line: AllocationCurve::mean(policy.name(), &curves),
        })
    }
}

/// Returns a progress bar on standard error, which is hidden if that is not a terminal.
fn progress_bar(arrivals: usize) -> ProgressBar {
    let style = ProgressStyle::with_template("replaying [{bar:30}] {percent:>3} %, {eta} left")
        .unwrap_or_else(|_| ProgressStyle::default_bar());
    ProgressBar::new(arrivals as u64).with_style(style.progress_chars("#>-"))
}

fn table(results: &[PolicyResult], nodes: &[TraceNode], out: &mut dyn Write) -> io::Result<()> {
    let gpus: u64 = nodes.iter().map(|node| u64::from(node.gpus)).sum();
    let seeds = results.first().map_or(0, |result| result.seeds.len());
    let workload = results.first().map_or("", |result| &result.workload);
    let counted = |count: u64, noun: &str| format!("{count} {noun}{}", if count == 1 { "" } else { "s" });
    let (nodes, gpus) = (counted(nodes.len() as u64, "node"), counted(gpus, "GPU"));
    writeln!(out, "{workload}: {nodes}, {gpus}, {}\n", counted(seeds as u64, "seed"))?;
    writeln!(
        out,
        "{:<14} {:>11} {:>17} {:>10} {:>10}",
        "POLICY", "ALLOCATED", "LEAST..MOST", "PLACED", "SKIPPED"
    )?;
    for result in results {
        let allocated = result.seeds.iter().map(|seed| seed.allocated_percent);
        let (least, most) = allocated.fold((f64::MAX, f64::MIN), |(l, m), a| (l.min(a), m.max(a)));
        let mean =
            |of: fn(&SeedResult) -> u64| result.seeds.iter().map(of).sum::<u64>() / seeds.max(1) as u64;
        writeln!(
            out,
            "{:<14} {:>9.2} % {:>17} {:>10} {:>10}",
            result.policy,
            result.mean_allocated_percent,
            format!("{least:.2}..{most:.2}"),
            mean(|seed| seed.placed),
            mean(|seed| seed.skipped),
        )?;
    }
    Ok(())
}

fn csv(results: &[PolicyResult], out: &mut dyn Write) -> io::Result<()> {
    writeln!(out, "workload,policy,seed,allocated_percent,placed,skipped")?;
    for result in results {
        for seed in &result.seeds {
            let SeedResult { seed, allocated_percent, placed, skipped } = seed;
            writeln!(
                out,
                "{},{},{seed},{allocated_percent:.4},{placed},{skipped}",
                // The file name may contain any character, also those with a meaning in CSV.
                result.workload.replace(['"', ',', '\n', '\r'], "_"),
                result.policy
            )?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn inflation_is_parsed_exactly() {
        assert_eq!(parse_inflation("1.3"), Ok(Inflation(1300)));
        assert_eq!(parse_inflation("1"), Ok(Inflation(1000)));
        assert_eq!(parse_inflation("0.125"), Ok(Inflation(125)));
        for wrong in ["", "0", "11", "1.", ".5", "1.2345", "-1", "1e3", "0.05"] {
            assert!(parse_inflation(wrong).is_err(), "{wrong}");
        }
    }
}
