//! What the node agent costs and keeps, on a real kubelet, containerd and API server, with simulated GPUs. `make bench-node` prints
//! the table of `docs/benchmarks.md`; with `-- --strict` a figure that is missed is an error.
//!
//! Other words choose what is measured: `idle starts restarts health grants kills`; none is all of it.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::print_stdout, missing_docs)]

// What the tests have and is not needed here.
#[allow(dead_code)]
#[path = "../tests/node/agreement.rs"]
mod agreement;
#[path = "node/health.rs"]
mod health;
#[path = "node/pods.rs"]
mod pods;
#[allow(dead_code)]
#[path = "../tests/node/stage.rs"]
mod stage;

use partage_testkit::bed::{Bed, Profile};
use partage_testkit::eventually;
use pods::{Pods, Sizes, WAVE};
use stage::Stage;
use std::collections::BTreeMap;
use std::process::ExitCode;
use std::time::{Duration, Instant};

const SETTINGS: &str = "driver: simulated\nsimulated: {gpus: 8, model: A100-SXM4-40GB}\nsharesPerGpu: 25\nmetrics: {address: '127.0.0.1:9394', anonymous: true}\n";
/// Pods that start at once.
const AT_ONCE: usize = 50;
/// How often pods start at once, with a share and without.
const START_ROUNDS: usize = 6;
/// Pods that are there at once.
const MANY: usize = 100;
/// Pods that come and go while the agent is killed.
const KILLED_AT: usize = 200;
/// How long an agent is looked at that has nothing to do.
const IDLE: Duration = Duration::from_secs(30);
/// What starting or ending pods left to do is done by then.
const SETTLED: Duration = Duration::from_secs(5);

fn main() -> ExitCode {
    let words: Vec<String> = std::env::args().skip(1).filter(|word| word != "--bench").collect();
    let strict = words.iter().any(|word| word == "--strict");
    let chosen: Vec<&String> = words.iter().filter(|word| !word.starts_with('-')).collect();
    let is_chosen = |what: &str| chosen.is_empty() || chosen.iter().any(|word| *word == what);
    let bed = Bed::start(Profile::one_node().debian()).expect("a bed comes up: make binaries, and be root");
    let mut table = Table::default();
    println!("| what | figure | limit set |\n|---|---|---|");
    bed.block_on(async {
        let stage = Stage::set(&bed, SETTINGS).await;
        stage.is_ready().await;
        let bench = Bench { pods: Pods { stage: &stage }, stage: &stage };
        if is_chosen("idle") {
            bench.idles("without shares", &mut table);
        }
        if is_chosen("starts") {
            bench.starts(&mut table).await;
        }
        if is_chosen("restarts") {
            bench.restarts(&mut table).await;
        }
        if is_chosen("health") {
            bench.health(&mut table).await;
        }
        if is_chosen("grants") {
            bench.grants(&mut table).await;
        }
        if is_chosen("kills") {
            bench.kills(&mut table).await;
        }
    });
    if table.missed.is_empty() {
        return ExitCode::SUCCESS;
    }
    println!("\nmissed: {}", table.missed.join("; "));
    if strict { ExitCode::FAILURE } else { ExitCode::SUCCESS }
}

struct Bench<'a> {
    stage: &'a Stage<'a>,
    pods: Pods<'a>,
}

impl Bench<'_> {
    /// The agent's memory, and its time while there is nothing to do.
    fn idles(&self, what: &str, table: &mut Table) {
        std::thread::sleep(SETTLED);
        let process = self.stage.agent.process().process().expect("the agent runs");
        let (begun, before) = (Instant::now(), ticks(process));
        std::thread::sleep(IDLE);
        let took = begun.elapsed().as_secs_f64();
        let used = (ticks(process) - before) as f64 / rustix::param::clock_ticks_per_second() as f64;
        let name = format!("agent, 8 GPUs, {what}: of a core when idle");
        table.add(&name, used / took * 100.0, "%", Some(1.0));
        let resident = self.stage.agent.process().resident_bytes() as f64 / f64::from(1 << 20);
        table.add(&format!("agent, 8 GPUs, {what}: resident"), resident, "MiB", Some(40.0));
    }

    /// Measures pods that start at once, with a share and without. The two take turns, and so does which of them is first: other work on
    /// the machine then slows down both alike.
    async fn starts(&self, table: &mut Table) {
        // The image is unpacked and the programs are in the page cache afterwards.
        self.pods.come("warm", 2, Sizes::Share).await;
        self.pods.go("warm").await;
        let (mut without, mut with) = (Vec::new(), Vec::new());
        let mut calls = Vec::new();
        for round in 0..START_ROUNDS {
            let mut waves = [("bare", Sizes::None, &mut without), ("share", Sizes::Share, &mut with)];
            if round % 2 == 1 {
                waves.reverse();
            }
            for (kind, sizes, seconds) in waves {
                let begun = Instant::now();
                let from = self.stage.agent.log().len();
                let crowd = format!("{kind}{round}");
                self.pods.come(&crowd, AT_ONCE, sizes).await;
                seconds.push(begun.elapsed().as_secs_f64());
                calls.extend(calls_since(&self.stage.agent.log(), from));
                self.pods.go(&crowd).await;
            }
        }
        let of_containers: Vec<f64> = calls.iter().map(|call| call.named + call.ready).collect();
        assert!(
            of_containers.len() >= START_ROUNDS * AT_ONCE,
            "{} containers were counted",
            of_containers.len()
        );
        let what = format!("{AT_ONCE} pods start at once: the agent's part");
        table.quantiles(&what, of_containers, Some(50.0));
        table.quantiles("… of it Allocate", calls.iter().map(|call| call.named).collect(), None);
        let mut later: Vec<f64> =
            with.iter().zip(&without).map(|(with, without)| (with / without - 1.0) * 100.0).collect();
        let rounds = format!("median of {START_ROUNDS} rounds");
        let (without, with) = (median(&mut without), median(&mut with));
        table.add(
            &format!("{AT_ONCE} pods without a share: all are ready after, {rounds}"),
            without,
            "s",
            None,
        );
        table.add(&format!("{AT_ONCE} pods with a share: all are ready after, {rounds}"), with, "s", None);
        let middle = median(&mut later);
        table.add(&format!("… later than without, {rounds}"), middle, "%", None);
        table.add("… least of all rounds", later[0], "%", None);
        table.add("… most of all rounds", later[START_ROUNDS - 1], "%", None);
    }

    /// Containers that start again while there is no API server.
    async fn restarts(&self, table: &mut Table) {
        self.pods.come("again", AT_ONCE, Sizes::Share).await;
        let before = self.pods.processes();
        assert_eq!(before.len(), AT_ONCE);
        self.stage.bed.apiserver().kill();
        let from = self.stage.agent.log().len();
        let begun = Instant::now();
        self.pods.end_processes(&before);
        eventually("all containers run again", async || {
            let now = self.pods.processes();
            let again = now.iter().filter(|process| !before.contains(process)).count();
            if again == AT_ONCE {
                Ok(())
            } else {
                Err(format!("{again} run again\n{}", self.stage.agent.log()))
            }
        })
        .await;
        let took = begun.elapsed().as_secs_f64();
        let calls = calls_since(&self.stage.agent.log(), from);
        assert!(calls.len() >= AT_ONCE, "{} containers were counted", calls.len());
        self.stage.api_server_is_back().await;
        let what = format!("{AT_ONCE} containers restart at once, no API server: the agent's part");
        table.quantiles(&what, calls.iter().map(|call| call.ready).collect(), Some(50.0));
        table.add("… all run again after", took, "s", None);
        self.pods.go("again").await;
    }

    /// A hundred pods at once, of a hundred sizes: each looks for itself.
    async fn grants(&self, table: &mut Table) {
        let begun = Instant::now();
        self.pods.come("many", MANY, Sizes::Each).await;
        table.add(
            &format!("{MANY} pods at once: all are ready after"),
            begun.elapsed().as_secs_f64(),
            "s",
            None,
        );
        let wrong = self.pods.wrong("many", MANY).await;
        table.count(&format!("{MANY} pods at once: grants that are wrong or missing"), &wrong);
        self.idles(&format!("{MANY} shares"), table);
        let begun = Instant::now();
        self.pods.go("many").await;
        table.add(
            &format!("{MANY} pods deleted at once: nothing is left after"),
            begun.elapsed().as_secs_f64(),
            "s",
            None,
        );
    }

    /// The agent is killed again and again while pods come and go.
    async fn kills(&self, table: &mut Table) {
        let (killed, outcome) = self.pods.through_kills("kill", KILLED_AT);
        table.add(
            &format!("{KILLED_AT} pods come and go: the agent is killed meanwhile"),
            killed as f64,
            "times",
            None,
        );
        table.add(
            "… pods that kubelet turned away in between, and came again",
            outcome.turned_away as f64,
            "pods",
            None,
        );
        table.count("… grants that are wrong or missing", &outcome.wrong);
        let (held, names) =
            (self.stage.agrees().await, "pods, kubelet, the ledger, the regions and containers");
        assert_eq!(held.len(), WAVE, "those that stay");
        table.add(&format!("… shares of which {names} say the same at the end"), WAVE as f64, "", None);
        let begun = Instant::now();
        self.pods.go("kill").await;
        table.add("… nothing is left after", begun.elapsed().as_secs_f64(), "s", None);
    }
}

/// Sorts values and returns the one in the middle, the upper of two.
fn median(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// What is printed, and what was not good enough.
#[derive(Default)]
struct Table {
    missed: Vec<String>,
}

impl Table {
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

    /// The median, and the 99th of a hundred, which is the one that has a limit.
    fn quantiles(&mut self, what: &str, mut millis: Vec<f64>, limit: Option<f64>) {
        millis.sort_by(f64::total_cmp);
        let quantile =
            |percent: usize| millis.get((millis.len() * percent / 100).min(millis.len() - 1)).copied();
        self.add(&format!("{what}, median"), quantile(50).unwrap(), "ms", None);
        self.add(&format!("{what}, 99th of 100"), quantile(99).unwrap(), "ms", limit);
        self.add(&format!("{what}, longest of {}", millis.len()), quantile(100).unwrap(), "ms", None);
    }

    /// Things that must not be.
    fn count(&mut self, what: &str, things: &[String]) {
        self.add(what, things.len() as f64, "", Some(0.0));
        for thing in things.iter().take(10) {
            println!("{thing}");
        }
    }
}

/// What the agent did for one container, in milliseconds.
struct Call {
    named: f64,
    ready: f64,
}

/// The containers that were made ready since the log was so long.
fn calls_since(log: &str, from: usize) -> Vec<Call> {
    let field = |line: &str, name: &str| {
        let (_, rest) = line.split_once(&format!(" {name}="))?;
        Some(rest.split_whitespace().next()?.to_string())
    };
    let mut named: BTreeMap<String, f64> = BTreeMap::new();
    let mut calls = Vec::new();
    for line in log.get(from..).unwrap_or_default().lines() {
        let (Some(device), Some(micros)) = (field(line, "device"), field(line, "micros")) else { continue };
        let millis = micros.parse::<f64>().unwrap() / 1e3;
        if line.contains("devices are named") {
            named.insert(device, millis);
        } else if line.contains("a container is ready") {
            // A container that starts again has its name already.
            calls.push(Call { named: named.remove(&device).unwrap_or_default(), ready: millis });
        }
    }
    calls
}

/// Processor time of a process, its threads and its ended children included.
fn ticks(process: u32) -> u64 {
    let stat = std::fs::read_to_string(format!("/proc/{process}/stat")).unwrap();
    let fields: Vec<&str> = stat.rsplit_once(") ").unwrap().1.split(' ').collect();
    fields[11..15].iter().map(|field| field.parse::<u64>().unwrap()).sum()
}
