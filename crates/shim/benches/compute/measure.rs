//! Runs tenants beside each other, in shares or on the bare driver, and measures the GPU time that each gets.

use crate::programs::{STEPS_VARIABLE, map_steps};
use crate::setup::{BenchContainer, BenchNode, BenchTenant};
use partage_region::arbiter::Arbiter;
use partage_region::{GpuShare, RegionOwner};
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

pub const CARD: &str = "A100-SXM4-40GB";

/// A container and what runs in it.
#[derive(Clone)]
pub struct TenantSpec {
    /// The words of its program.
    pub program: String,
    /// Number of processes that run the program.
    pub processes: usize,
    /// GPUs that it has shares of, from the first one on.
    pub gpus: usize,
    /// Guaranteed compute in percent.
    pub cores: u32,
    /// Compute that it may reach, in percent.
    pub ceiling: u32,
    pub low_latency: bool,
    /// Whether its processes end during the run: it then got what the others did not.
    pub short_lived: bool,
}

impl TenantSpec {
    /// Returns a tenant with one process and a hard share of the first GPU.
    pub fn hard(program: &str, cores: u32) -> Self {
        Self {
            program: program.to_string(),
            processes: 1,
            gpus: 1,
            cores,
            ceiling: cores,
            low_latency: false,
            short_lived: false,
        }
    }

    /// Returns a tenant that may also use what the others leave.
    pub fn lending(program: &str, cores: u32) -> Self {
        Self { ceiling: 100, ..Self::hard(program, cores) }
    }

    fn shares(&self, node: &BenchNode) -> Vec<GpuShare> {
        let share = |gpu| GpuShare {
            uuid: node.uuid_of(gpu),
            cores: self.cores * 1_000,
            ceiling: self.ceiling * 1_000,
            waits_for_turns: true,
            low_latency: self.low_latency,
            ..GpuShare::default()
        };
        (0..self.gpus).map(share).collect()
    }
}

/// How programs reach the GPU.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Access {
    Bare,
    Shares,
}

/// What one tenant got during a run.
#[derive(Clone, Copy, Default)]
pub struct Received {
    /// Percent of the first GPU's time.
    pub percent: f64,
    /// Percent of the first GPU's time that its container was charged for; zero without shares.
    pub charged_percent: f64,
    /// Steps of the program per second.
    pub steps_per_second: f64,
    /// Steps of the program since it was started.
    pub steps: u64,
}

/// Tenants that run.
pub struct Running {
    pub node: BenchNode,
    pub tenants: Vec<Vec<BenchTenant>>,
    specs: Vec<TenantSpec>,
    step_files: Vec<tempfile::NamedTempFile>,
    containers: Vec<BenchContainer>,
    _arbiter: Option<Arbiter>,
}

impl Running {
    /// Starts all tenants, and lets them begin when all are ready.
    pub fn start(specs: &[TenantSpec], access: Access) -> Self {
        let node = BenchNode::with_gpus(CARD, specs.iter().map(|spec| spec.gpus).max().unwrap_or(1));
        let (mut containers, mut arbiter) = (Vec::new(), None);
        if access == Access::Shares {
            containers =
                specs.iter().map(|spec| BenchContainer::with_shares(&node, &spec.shares(&node))).collect();
            let new = Arbiter::new();
            for container in &containers {
                new.add(container.handle()).unwrap();
            }
            arbiter = Some(new);
        }
        let (mut tenants, mut step_files) = (Vec::new(), Vec::new());
        for (at, spec) in specs.iter().enumerate() {
            let file = tempfile::NamedTempFile::new_in("/dev/shm").unwrap();
            file.as_file().set_len(8).unwrap();
            let libraries =
                containers.get(at).map_or_else(|| node.dir.libraries(), BenchContainer::libraries);
            let words: Vec<&str> = spec.program.split(' ').collect();
            let start =
                || BenchTenant::start_with(&node, &libraries, &words, &[(STEPS_VARIABLE, file.path())]);
            tenants.push((0..spec.processes).map(|_| start()).collect::<Vec<_>>());
            step_files.push(file);
        }
        tenants.iter_mut().flatten().for_each(BenchTenant::ready);
        tenants.iter_mut().flatten().for_each(BenchTenant::go);
        Self { node, tenants, specs: specs.to_vec(), step_files, containers, _arbiter: arbiter }
    }

    /// Returns the nanoseconds, charges and steps of each tenant so far.
    fn totals(&self) -> Vec<[u64; 3]> {
        let usage = self.node.state.usage(0);
        let served =
            |tenants: &[BenchTenant]| tenants.iter().map(|it| self.node.served(it.pid())).sum::<u64>();
        let lasting = |at: usize| if self.specs[at].short_lived { 0 } else { served(&self.tenants[at]) };
        let others: u64 = (0..self.specs.len()).map(lasting).sum();
        let one = |at: usize| {
            let spec = &self.specs[at];
            let got = if spec.short_lived { usage.busy.saturating_sub(others) } else { lasting(at) };
            let charged = self.containers.get(at).map_or(0, |container| {
                RegionOwner::open(container.folder.path()).unwrap().limits(0).unwrap().charged()
            });
            [got, charged, map_steps(self.step_files[at].path()).load(Relaxed)]
        };
        (0..self.specs.len()).map(one).collect()
    }

    /// Measures for this long.
    pub fn measure(&self, length: Duration) -> Vec<Received> {
        let (before, began) = (self.totals(), Instant::now());
        std::thread::sleep(length);
        let (after, took) = (self.totals(), began.elapsed());
        let one = |(after, before): (&[u64; 3], &[u64; 3])| {
            let [served, charged, steps] = [0, 1, 2].map(|at| after[at].saturating_sub(before[at]) as f64);
            Received {
                percent: served / took.as_nanos() as f64 * 100.0,
                charged_percent: charged / took.as_nanos() as f64 * 100.0,
                steps_per_second: steps / took.as_secs_f64(),
                steps: after[2],
            }
        };
        after.iter().zip(&before).map(one).collect()
    }
}

/// Starts tenants, waits until they are at work, and measures for this long.
pub fn measure(specs: &[TenantSpec], access: Access, length: Duration) -> Vec<Received> {
    let running = Running::start(specs, access);
    if !specs.iter().any(|spec| spec.short_lived) {
        std::thread::sleep(WARM_UP);
    }
    running.measure(length)
}

const WARM_UP: Duration = Duration::from_millis(300);

/// Processes that use the processors.
pub struct BusyProcesses(Vec<std::process::Child>);

impl BusyProcesses {
    pub fn start(count: usize) -> Self {
        let start = |_| crate::tenant_command(&["cpu"]).spawn().unwrap();
        Self((0..count).map(start).collect())
    }
}

impl Drop for BusyProcesses {
    fn drop(&mut self) {
        for child in &mut self.0 {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// Returns the machine's load average over the last minute.
pub fn load() -> String {
    let text = std::fs::read_to_string("/proc/loadavg").unwrap_or_default();
    text.split(' ').next().unwrap_or_default().to_string()
}
