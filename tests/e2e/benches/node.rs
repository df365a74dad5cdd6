//! Measures the costs of the node agent, on a real kubelet, containerd and API server, with simulated GPUs. `make
//! bench-node` prints the table of `docs/benchmarks.md`; with `-- --strict` a missed limit is an error.
//!
//! Further arguments select the measurements: `idle starts restarts health grants kills`; the default is all.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::print_stdout, missing_docs)]

// Test helpers that are not used here.
#[allow(dead_code)]
#[path = "../tests/node/consistency.rs"]
mod consistency;
#[path = "node/health_latency.rs"]
mod health_latency;
#[path = "node/pod_groups.rs"]
mod pod_groups;
#[allow(dead_code)]
#[path = "../tests/node/test_node.rs"]
mod test_node;

use partage_testkit::bed::{BedProfile, TestBed};
use partage_testkit::eventually;
use pod_groups::{PodGroups, PodSizes, WAVE_SIZE};
use std::collections::BTreeMap;
use std::process::ExitCode;
use std::time::{Duration, Instant};
use test_node::TestNode;

const SETTINGS: &str = "driver: simulated\nsimulated: {gpus: 8, model: A100-SXM4-40GB}\nsharesPerGpu: 25\nmetrics: {address: '127.0.0.1:9394', anonymous: true}\n";
/// Pods that start concurrently.
const CONCURRENT_PODS: usize = 50;
/// Rounds of concurrent starts, with a share and without.
const START_ROUNDS: usize = 6;
/// Pods that run at the same time.
const MANY_PODS: usize = 100;
/// Pods that are created and deleted while the agent is killed repeatedly.
const CHURN_PODS: usize = 200;
/// Observation period of an idle agent.
const IDLE_PERIOD: Duration = Duration::from_secs(30);
/// Time for the agent to finish work after pods start or end.
const SETTLE_TIME: Duration = Duration::from_secs(5);

fn main() -> ExitCode {
    let words: Vec<String> = std::env::args().skip(1).filter(|word| word != "--bench").collect();
    let strict = words.iter().any(|word| word == "--strict");
    let chosen: Vec<&String> = words.iter().filter(|word| !word.starts_with('-')).collect();
    let is_chosen = |what: &str| chosen.is_empty() || chosen.iter().any(|word| *word == what);
    let bed = TestBed::start(BedProfile::one_node().debian())
        .expect("the bed starts; run `make binaries` first, as root");
    let mut table = FigureTable::default();
    println!("| what | figure | limit set |\n|---|---|---|");
    bed.block_on(async {
        let test_node = TestNode::start(&bed, SETTINGS).await;
        test_node.wait_until_ready().await;
        let bench = NodeBench { pod_groups: PodGroups { test_node: &test_node }, test_node: &test_node };
        if is_chosen("idle") {
            bench.measure_idle("without shares", &mut table);
        }
        if is_chosen("starts") {
            bench.measure_starts(&mut table).await;
        }
        if is_chosen("restarts") {
            bench.measure_restarts(&mut table).await;
        }
        if is_chosen("health") {
            bench.measure_health(&mut table).await;
        }
        if is_chosen("grants") {
            bench.measure_grants(&mut table).await;
        }
        if is_chosen("kills") {
            bench.measure_kills(&mut table).await;
        }
    });
    if table.missed.is_empty() {
        return ExitCode::SUCCESS;
    }
    println!("\nlimits missed: {}", table.missed.join("; "));
    if strict { ExitCode::FAILURE } else { ExitCode::SUCCESS }
}

struct NodeBench<'a> {
    test_node: &'a TestNode<'a>,
    pod_groups: PodGroups<'a>,
}

impl NodeBench<'_> {
    /// Measures the agent's memory, and its CPU time while it is idle.
    fn measure_idle(&self, what: &str, table: &mut FigureTable) {
        std::thread::sleep(SETTLE_TIME);
        let process = self.test_node.agent.process().pid().expect("the agent runs");
        let (begun, before) = (Instant::now(), ticks(process));
        std::thread::sleep(IDLE_PERIOD);
        let took = begun.elapsed().as_secs_f64();
        let used = (ticks(process) - before) as f64 / rustix::param::clock_ticks_per_second() as f64;
        let name = format!("agent, 8 GPUs, {what}: of a core when idle");
        table.add(&name, used / took * 100.0, "%", Some(1.0));
        let resident = self.test_node.agent.process().resident_bytes() as f64 / f64::from(1 << 20);
        table.add(&format!("agent, 8 GPUs, {what}: resident"), resident, "MiB", Some(40.0));
    }

    /// Measures pods that start concurrently, with a share and without. The two alternate, and so does which of them is
    /// first, so that other work on the machine slows down both equally.
    async fn measure_starts(&self, table: &mut FigureTable) {
        // Unpacks the image and fills the page cache.
        self.pod_groups.create_and_wait("warm", 2, PodSizes::Share).await;
        self.pod_groups.delete_and_wait("warm").await;
        let (mut without, mut with) = (Vec::new(), Vec::new());
        let mut calls = Vec::new();
        for round in 0..START_ROUNDS {
            let mut waves = [("bare", PodSizes::None, &mut without), ("share", PodSizes::Share, &mut with)];
            if round % 2 == 1 {
                waves.reverse();
            }
            for (kind, sizes, seconds) in waves {
                let begun = Instant::now();
                let from = self.test_node.agent.log().len();
                let crowd = format!("{kind}{round}");
                self.pod_groups.create_and_wait(&crowd, CONCURRENT_PODS, sizes).await;
                seconds.push(begun.elapsed().as_secs_f64());
                calls.extend(calls_since(&self.test_node.agent.log(), from));
                self.pod_groups.delete_and_wait(&crowd).await;
            }
        }
        let of_containers: Vec<f64> = calls.iter().map(|call| call.named + call.ready).collect();
        assert!(
            of_containers.len() >= START_ROUNDS * CONCURRENT_PODS,
            "{} containers were measured",
            of_containers.len()
        );
        let what = format!("{CONCURRENT_PODS} pods start at once: time in the agent");
        table.quantiles(&what, of_containers, Some(50.0));
        table.quantiles("… of it Allocate", calls.iter().map(|call| call.named).collect(), None);
        let mut later: Vec<f64> =
            with.iter().zip(&without).map(|(with, without)| (with / without - 1.0) * 100.0).collect();
        let rounds = format!("median of {START_ROUNDS} rounds");
        let (without, with) = (median(&mut without), median(&mut with));
        table.add(
            &format!("{CONCURRENT_PODS} pods without a share: all are ready after, {rounds}"),
            without,
            "s",
            None,
        );
        table.add(
            &format!("{CONCURRENT_PODS} pods with a share: all are ready after, {rounds}"),
            with,
            "s",
            None,
        );
        let middle = median(&mut later);
        table.add(&format!("… later than without, {rounds}"), middle, "%", None);
        table.add("… least of all rounds", later[0], "%", None);
        table.add("… most of all rounds", later[START_ROUNDS - 1], "%", None);
    }

    /// Measures containers that restart while there is no API server.
    async fn measure_restarts(&self, table: &mut FigureTable) {
        self.pod_groups.create_and_wait("again", CONCURRENT_PODS, PodSizes::Share).await;
        let before = self.pod_groups.processes();
        assert_eq!(before.len(), CONCURRENT_PODS);
        self.test_node.bed.apiserver().kill();
        let from = self.test_node.agent.log().len();
        let begun = Instant::now();
        self.pod_groups.end_processes(&before);
        eventually("all containers are restarted", async || {
            let now = self.pod_groups.processes();
            let again = now.iter().filter(|process| !before.contains(process)).count();
            if again == CONCURRENT_PODS {
                Ok(())
            } else {
                Err(format!("{again} restarted\n{}", self.test_node.agent.log()))
            }
        })
        .await;
        let took = begun.elapsed().as_secs_f64();
        let calls = calls_since(&self.test_node.agent.log(), from);
        assert!(calls.len() >= CONCURRENT_PODS, "{} containers were measured", calls.len());
        self.test_node.start_api_server().await;
        let what = format!("{CONCURRENT_PODS} containers restart at once, no API server: time in the agent");
        table.quantiles(&what, calls.iter().map(|call| call.ready).collect(), Some(50.0));
        table.add("… all restarted after", took, "s", None);
        self.pod_groups.delete_and_wait("again").await;
    }

    /// Measures a hundred concurrent pods with a hundred sizes; each container reports its own view.
    async fn measure_grants(&self, table: &mut FigureTable) {
        let begun = Instant::now();
        self.pod_groups.create_and_wait("many", MANY_PODS, PodSizes::Each).await;
        table.add(
            &format!("{MANY_PODS} pods at once: all are ready after"),
            begun.elapsed().as_secs_f64(),
            "s",
            None,
        );
        let wrong = self.pod_groups.find_wrong_grants("many", MANY_PODS).await;
        table.count(&format!("{MANY_PODS} pods at once: grants that are wrong or missing"), &wrong);
        self.measure_idle(&format!("{MANY_PODS} shares"), table);
        let begun = Instant::now();
        self.pod_groups.delete_and_wait("many").await;
        table.add(
            &format!("{MANY_PODS} pods deleted at once: nothing is left after"),
            begun.elapsed().as_secs_f64(),
            "s",
            None,
        );
    }

    /// Kills the agent repeatedly while pods are created and deleted.
    async fn measure_kills(&self, table: &mut FigureTable) {
        let (killed, outcome) = self.pod_groups.run_under_kills("kill", CHURN_PODS);
        table.add(
            &format!("{CHURN_PODS} pods created and deleted: agent kills meanwhile"),
            killed as f64,
            "times",
            None,
        );
        table.add(
            "… pods that kubelet rejected meanwhile, and that were created again",
            outcome.turned_away as f64,
            "pods",
            None,
        );
        table.count("… grants that are wrong or missing", &outcome.wrong);
        let (held, names) = (
            self.test_node.wait_until_consistent().await,
            "pods, kubelet, the ledger, the regions and containers",
        );
        assert_eq!(held.len(), WAVE_SIZE, "the pods of the last wave stay");
        table.add(&format!("… shares on which {names} agree at the end"), WAVE_SIZE as f64, "", None);
        let begun = Instant::now();
        self.pod_groups.delete_and_wait("kill").await;
        table.add("… nothing is left after", begun.elapsed().as_secs_f64(), "s", None);
    }
}

/// Sorts values and returns the median, the upper of two.
fn median(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// Prints the figures, and collects those that miss their limit.
#[derive(Default)]
struct FigureTable {
    missed: Vec<String>,
}

impl FigureTable {
    fn add(&mut self, what: &str, figure: f64, unit: &str, limit: Option<f64>) {
        let digits = if figure.fract() == 0.0 {
            0
        } else if figure < 10.0 {
            2
        } else {
            1
        };
        let of_limit = limit.map_or_else(String::new, |limit| format!("{limit} {unit}"));
        println!("| {what} | {figure:.digits$} {unit} | {of_limit} |");
        if let Some(limit) = limit.filter(|limit| figure > *limit) {
            self.missed.push(format!("{what}: {figure:.digits$} {unit}, the limit is {limit}"));
        }
    }

    /// Adds the median, the 99th percentile, which has the limit, and the maximum.
    fn quantiles(&mut self, what: &str, mut millis: Vec<f64>, limit: Option<f64>) {
        millis.sort_by(f64::total_cmp);
        let quantile =
            |percent: usize| millis.get((millis.len() * percent / 100).min(millis.len() - 1)).copied();
        self.add(&format!("{what}, median"), quantile(50).unwrap(), "ms", None);
        self.add(&format!("{what}, 99th percentile"), quantile(99).unwrap(), "ms", limit);
        self.add(&format!("{what}, maximum of {}", millis.len()), quantile(100).unwrap(), "ms", None);
    }

    /// Adds a number of failures, which must be 0.
    fn count(&mut self, what: &str, things: &[String]) {
        self.add(what, things.len() as f64, "", Some(0.0));
        for thing in things.iter().take(10) {
            println!("{thing}");
        }
    }
}

/// Time that the agent needed for one container, in milliseconds.
struct PrepareTiming {
    named: f64,
    ready: f64,
}

/// Returns the containers that were prepared since the log had length `from`.
fn calls_since(log: &str, from: usize) -> Vec<PrepareTiming> {
    let field = |line: &str, name: &str| {
        let (_, rest) = line.split_once(&format!(" {name}="))?;
        Some(rest.split_whitespace().next()?.to_string())
    };
    let mut named: BTreeMap<String, f64> = BTreeMap::new();
    let mut calls = Vec::new();
    for line in log.get(from..).unwrap_or_default().lines() {
        let (Some(device), Some(micros)) = (field(line, "device"), field(line, "micros")) else { continue };
        let millis = micros.parse::<f64>().unwrap() / 1e3;
        if line.contains("devices allocated") {
            named.insert(device, millis);
        } else if line.contains("container prepared") {
            // A restarted container already has its key.
            calls.push(PrepareTiming { named: named.remove(&device).unwrap_or_default(), ready: millis });
        }
    }
    calls
}

/// Returns the CPU time of a process, its threads and its exited children included.
fn ticks(process: u32) -> u64 {
    let stat = std::fs::read_to_string(format!("/proc/{process}/stat")).unwrap();
    let fields: Vec<&str> = stat.rsplit_once(") ").unwrap().1.split(' ').collect();
    fields[11..15].iter().map(|field| field.parse::<u64>().unwrap()).sum()
}
