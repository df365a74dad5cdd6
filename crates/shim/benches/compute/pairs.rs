//! Pairs of the zoo's programs, and what each program of a pair is entitled to.
//!
//! A program that never pauses is entitled to its share. One that pauses between its kernels gets less even on a GPU of
//! its own that is as much slower as its share is smaller, because its pauses stay as long as they are: it is entitled to
//! that, and to no more than it uses alone or its share, whichever is less.

use crate::measure::{Access, Received, TenantSpec, measure};
use crate::programs::Program;
use std::time::Duration;

/// Pairs that differ as much as possible: those of `--pairs quick`, and of the tests.
pub const QUICK_PAIRS: [(&str, &str); 12] = [
    ("eager", "graph-decode"),
    ("eager", "training"),
    ("dynamic-shapes", "ddp"),
    ("graph-decode", "graph-decode"),
    ("prefill-decode", "training"),
    ("ddp", "tiny-kernels"),
    ("tensor-parallel-2", "tensor-parallel-2"),
    ("tensor-parallel-2", "eager"),
    ("multi-stream", "cooperative"),
    ("data-loader", "notebook"),
    ("long-kernels", "graph-decode"),
    ("tensor-parallel-4", "tensor-parallel-2"),
];

/// How a pair shares the GPUs.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Split {
    pub cores: [u32; 2],
    /// Whether a share is also a limit. Otherwise, a program may use what the other leaves.
    pub hard: bool,
}

pub const SPLITS: [Split; 2] =
    [Split { cores: [30, 70], hard: true }, Split { cores: [50, 50], hard: false }];

/// What a program is entitled to, in percent of a GPU.
#[derive(Clone, Copy)]
pub struct Entitlement {
    /// What it gets on a slower GPU of its own.
    pub least: f64,
    /// Its share, or what it uses alone if that is less.
    pub most: f64,
}

impl Entitlement {
    /// Returns the entitlement of a program that uses `demand` percent alone, in a share of this many percent.
    pub fn new(cores: u32, demand: f64) -> Self {
        let share = f64::from(cores);
        let demand = demand.clamp(0.01, 100.0);
        // Per unit of work: the time that the work takes at this share, and the pauses that belong to it.
        let least = 100.0 / (100.0 / share + (100.0 - demand) / demand);
        Self { least, most: share.min(demand).max(least) }
    }

    /// Returns how many points `got` is above (positive) or below (negative).
    pub fn error(&self, got: f64) -> f64 {
        (got - self.most).max(0.0) + (got - self.least).min(0.0)
    }
}

/// Results of a pair.
pub struct PairResult {
    /// Percent of the GPU that each is entitled to, and got.
    pub entitled: [Entitlement; 2],
    pub got: [f64; 2],
    /// How many points each missed it by.
    pub errors: [f64; 2],
    /// The same, if pauses would not count: by how much each missed its share, or what it uses alone if that is less.
    pub strict_errors: [f64; 2],
    /// GPU time of both, in percent of what both use on the bare driver or are entitled to, whichever is less.
    pub total: f64,
    /// Progress of both relative to running alone, in percent of that on the bare driver.
    pub progress: f64,
}

/// Returns the tenant that runs a program.
pub fn tenant(program: &Program, cores: u32, hard: bool) -> TenantSpec {
    TenantSpec {
        gpus: program.gpus,
        ceiling: if hard { cores } else { 100 },
        ..TenantSpec::hard(&format!("zoo {}", program.name), cores)
    }
}

/// Returns how long to measure, so that a program's longest kernel is no more than a tenth of it.
pub fn length(programs: &[&Program], seconds: u64) -> Duration {
    let longest = programs.iter().map(|program| program.longest_kernel_us).max().unwrap_or(0);
    Duration::from_secs(seconds).max(Duration::from_micros(longest * 10))
}

/// Returns what a program gets alone on the bare driver.
pub fn demand(program: &Program, seconds: u64) -> Received {
    measure(&[tenant(program, 100, false)], Access::Bare, length(&[program], seconds))[0]
}

/// Returns the bare results of a pair.
pub fn measure_bare_pair(pair: [&Program; 2], length: Duration) -> Vec<Received> {
    measure(&pair.map(|program| tenant(program, 50, false)), Access::Bare, length)
}

/// Runs a pair in shares.
pub fn measure_pair(
    pair: [&Program; 2],
    split: Split,
    alone: [Received; 2],
    bare: &[Received],
    length: Duration,
) -> PairResult {
    let tenants = [0, 1].map(|at| tenant(pair[at], split.cores[at], split.hard));
    let results = measure(&tenants, Access::Shares, length);
    let got = [0, 1].map(|at| results[at].percent);
    let entitled = [0, 1].map(|at| Entitlement::new(split.cores[at], alone[at].percent));
    let counted = |error: f64| if split.hard { error.abs() } else { (-error).max(0.0) };
    let errors = [0, 1].map(|at| counted(entitled[at].error(got[at])));
    let strict_errors = [0, 1].map(|at| counted(got[at] - entitled[at].most));
    let used = |all: &[Received]| all.iter().map(|it| it.percent).sum::<f64>();
    let reachable =
        if split.hard { used(bare).min(entitled.iter().map(|it| it.most).sum()) } else { used(bare) };
    let progress = |all: &[Received]| -> f64 {
        let one = |at: usize| all[at].steps_per_second / alone[at].steps_per_second.max(1e-9);
        one(0) + one(1)
    };
    PairResult {
        entitled,
        got,
        errors,
        strict_errors,
        total: used(&results) / reachable * 100.0,
        progress: progress(&results) / progress(bare).max(1e-9) * 100.0,
    }
}

/// Returns the points that one more or less of the longest kernel makes.
pub fn kernel_points(programs: &[&Program], length: Duration) -> f64 {
    let longest = programs.iter().map(|program| program.longest_kernel_us).max().unwrap_or(0);
    longest as f64 / length.as_micros() as f64 * 100.0
}
