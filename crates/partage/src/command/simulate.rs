//! `partage simulate`: replay a trace and see how much of the GPUs each policy gives away.

use super::Outcome;
use crate::input;
use crate::plot::{self, Line};
use crate::progress::Progress;
use clap::{Args, ValueEnum};
use partage_core::place::defaults;
use partage_core::simulate::trace::{self, TraceNode, TracePod};
use partage_core::simulate::{self, Contender, Inflation, NotPlaced};
use serde::Serialize;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

/// Replay a trace of pods and compare placement policies
///
/// Pods arrive one by one in random order and stay; one that fits nowhere is skipped. The figure is the part of
/// all GPUs given away in the end, the mean of several seeds. The same seed gives the same run.
#[derive(Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Simulate {
    /// Nodes: a CSV file with the columns sn, cpu_milli, memory_mib, gpu, model
    #[arg(long, value_name = "FILE")]
    nodes: PathBuf,

    /// Pods: a CSV file with the columns name, cpu_milli, memory_mib, num_gpu, gpu_milli and maybe gpu_spec
    #[arg(long, value_name = "FILE")]
    pods: PathBuf,

    /// fragmentation, binpack, spread, topology, or one to compare with: fgd, best-fit, dot-product, random
    #[arg(long, default_value_t = Contender::Ours(defaults::CLUSTER_POLICY))]
    policy: Contender,

    /// How many runs, each in an order of its own
    #[arg(long, value_name = "N", default_value = "10", value_parser = clap::value_parser!(u64).range(1..=10_000))]
    seeds: u64,

    /// GPU asked by all pods together, as a multiple of what the cluster has
    #[arg(long, value_name = "FACTOR", default_value = "1.3", value_parser = factor)]
    inflate: Inflation,

    /// Run every policy, those of the literature included
    #[arg(long, conflicts_with = "policy")]
    compare: bool,

    /// How to answer
    #[arg(short, long, value_enum, default_value_t = Output::Table)]
    output: Output,

    /// Draw allocation against arrived load
    #[arg(long, value_name = "FILE.svg")]
    plot: Option<PathBuf>,
}

const EXAMPLES: &str = "\
Examples:
  partage simulate --nodes nodes.csv --pods pods.csv
  partage simulate --nodes nodes.csv --pods pods.csv --compare --plot compare.svg
  partage simulate --nodes nodes.csv --pods pods.csv --policy fgd --seeds 3 -o json

Exit code: 0 done, 1 a policy skipped a pod that fits (a bug), 2 unreadable";

#[derive(Clone, Copy, ValueEnum)]
enum Output {
    /// For people
    Table,
    /// For programs
    Json,
    /// One line per run
    Csv,
}

/// `1.3` as thousandths: the target is computed in whole numbers.
fn factor(text: &str) -> Result<Inflation, String> {
    let wrong = || "write a number from 0.1 to 10 with at most three decimals, like 1.3".to_string();
    let (whole, rest) = text.split_once('.').unwrap_or((text, "0"));
    let digits = |part: &str| !part.is_empty() && part.bytes().all(|b| b.is_ascii_digit());
    if !digits(whole) || !digits(rest) || whole.len() > 2 || rest.len() > 3 {
        return Err(wrong());
    }
    let thousandths = format!("{whole}{rest:0<3}").parse().map_err(|_| wrong())?;
    if (100..=10_000).contains(&thousandths) { Ok(Inflation(thousandths)) } else { Err(wrong()) }
}

/// All runs of one policy, as programs read it.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Runs {
    workload: String,
    policy: &'static str,
    seeds: Vec<Seed>,
    mean_allocated_percent: f64,
    decisions: u64,
    nanos_per_decision: u64,
    #[serde(skip)]
    line: Line,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Seed {
    seed: u64,
    allocated_percent: f64,
    placed: u64,
    skipped: u64,
}

impl Simulate {
    pub(crate) fn run(&self, out: &mut dyn Write, err: &mut dyn Write) -> io::Result<Outcome> {
        let read = |file: &Path| input::text(file).map_err(|what| format!("{}: {what}", file.display()));
        let named = |file: &Path, error: trace::TraceError| format!("{}: {error}", file.display());
        let nodes = read(&self.nodes).and_then(|t| trace::read_nodes(&t).map_err(|e| named(&self.nodes, e)));
        let pods = read(&self.pods).and_then(|t| trace::read_pods(&t).map_err(|e| named(&self.pods, e)));
        let (nodes, pods) = match (nodes, pods) {
            (Ok(nodes), Ok(pods)) => (nodes, pods),
            (nodes, pods) => {
                for what in [nodes.err(), pods.err()].into_iter().flatten() {
                    writeln!(err, "error: {what}")?;
                }
                return Ok(Outcome::Unreadable);
            }
        };
        let contenders = if self.compare { Contender::ALL.to_vec() } else { vec![self.policy] };
        let capacity = trace::total_cores(&nodes);
        let orders: Result<Vec<_>, _> =
            (1..=self.seeds).map(|seed| simulate::arrivals(&pods, capacity, self.inflate, seed)).collect();
        let orders = match orders {
            Ok(orders) => orders,
            Err(what) => {
                writeln!(err, "error: {}: {what}", self.pods.display())?;
                return Ok(Outcome::Unreadable);
            }
        };
        // A plot that cannot be written is said before the work, not after it.
        let mut plot = match self.plot.as_ref().map(std::fs::File::create).transpose() {
            Ok(plot) => plot,
            Err(error) => {
                let file = self.plot.as_deref().unwrap_or(Path::new(""));
                writeln!(err, "error: {}: cannot be written: {error}", file.display())?;
                return Ok(Outcome::Unreadable);
            }
        };
        let results = match self.run_all(&nodes, &pods, &orders, &contenders) {
            Ok(results) => results,
            Err(bug) => {
                writeln!(err, "error: {bug}")?;
                return Ok(Outcome::Problems);
            }
        };
        match self.output {
            Output::Table => table(&results, &nodes, out)?,
            Output::Json if self.compare => serde_json::to_writer_pretty(&mut *out, &results)?,
            Output::Json => serde_json::to_writer_pretty(&mut *out, &results[0])?,
            Output::Csv => csv(&results, out)?,
        }
        if matches!(self.output, Output::Json) {
            writeln!(out)?;
        }
        if let Some(file) = &mut plot {
            let lines: Vec<&Line> = results.iter().map(|result| &result.line).collect();
            file.write_all(plot::svg(&self.workload(), &lines).as_bytes())?;
        }
        Ok(Outcome::Fine)
    }

    fn workload(&self) -> String {
        self.pods.file_stem().map_or_else(String::new, |stem| stem.to_string_lossy().into_owned())
    }

    /// Every seed of every contender, spread over the machine's cores.
    fn run_all(
        &self,
        nodes: &[TraceNode],
        pods: &[TracePod],
        orders: &[Vec<usize>],
        contenders: &[Contender],
    ) -> Result<Vec<Runs>, NotPlaced> {
        let jobs: Vec<(Contender, u64)> = contenders
            .iter()
            .flat_map(|&contender| (1..=self.seeds).map(move |seed| (contender, seed)))
            .collect();
        let arrivals: usize = orders.iter().map(Vec::len).sum::<usize>() * contenders.len();
        let progress = Progress::new("simulating", arrivals);
        let next = AtomicUsize::new(0);
        let outcomes = Mutex::new(Vec::new());
        let work = || {
            let started = Instant::now();
            let clock = || u64::try_from(started.elapsed().as_nanos()).unwrap_or(u64::MAX);
            while let Some(&(contender, seed)) = jobs.get(next.fetch_add(1, Ordering::Relaxed)) {
                let order = &orders[(seed - 1) as usize];
                let mut done = 0;
                let mut tell = |count: usize| {
                    progress.add(count - done);
                    done = count;
                };
                let outcome = simulate::run(nodes, pods, order, contender, seed, &clock, &mut tell);
                // Nobody panics while holding it; the results so far are whole either way.
                let mut outcomes = outcomes.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
                outcomes.push((contender, seed, outcome));
            }
        };
        std::thread::scope(|scope| {
            let cores = std::thread::available_parallelism().map_or(1, usize::from);
            for _ in 1..cores.min(jobs.len()) {
                scope.spawn(work);
            }
            work();
        });
        drop(progress);
        let mut outcomes = outcomes.into_inner().unwrap_or_else(std::sync::PoisonError::into_inner);
        outcomes.sort_by_key(|(_, seed, _)| *seed);
        contenders
            .iter()
            .map(|&contender| {
                let own = outcomes.iter().filter(|(of, ..)| *of == contender);
                self.result(contender, own.map(|(_, seed, outcome)| (*seed, outcome)))
            })
            .collect()
    }

    fn result<'a>(
        &self,
        contender: Contender,
        outcomes: impl Iterator<Item = (u64, &'a Result<simulate::Outcome, NotPlaced>)>,
    ) -> Result<Runs, NotPlaced> {
        let (mut seeds, mut nanos, mut decisions, mut curves) = (Vec::new(), 0, 0, Vec::new());
        for (seed, outcome) in outcomes {
            let outcome = outcome.as_ref().map_err(Clone::clone)?;
            seeds.push(Seed {
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
        Ok(Runs {
            workload: self.workload(),
            policy: contender.name(),
            seeds,
            mean_allocated_percent: mean,
            decisions,
            nanos_per_decision: nanos / decisions.max(1),
            line: Line::mean(contender.name(), &curves),
        })
    }
}

fn table(results: &[Runs], nodes: &[TraceNode], out: &mut dyn Write) -> io::Result<()> {
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
        let mean = |of: fn(&Seed) -> u64| result.seeds.iter().map(of).sum::<u64>() / seeds.max(1) as u64;
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

fn csv(results: &[Runs], out: &mut dyn Write) -> io::Result<()> {
    writeln!(out, "workload,policy,seed,allocated_percent,placed,skipped")?;
    for result in results {
        for seed in &result.seeds {
            let Seed { seed, allocated_percent, placed, skipped } = seed;
            writeln!(
                out,
                "{},{},{seed},{allocated_percent:.4},{placed},{skipped}",
                // The name of a file may hold anything; a table has no room for its own marks.
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
    fn factors_are_exact() {
        assert_eq!(factor("1.3"), Ok(Inflation(1300)));
        assert_eq!(factor("1"), Ok(Inflation(1000)));
        assert_eq!(factor("0.125"), Ok(Inflation(125)));
        for wrong in ["", "0", "11", "1.", ".5", "1.2345", "-1", "1e3", "0.05"] {
            assert!(factor(wrong).is_err(), "{wrong}");
        }
    }
}
