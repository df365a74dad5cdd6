//! A program that uses a GPU as any other does, through `libcuda.so.1`: it holds memory and keeps the GPU busy, so that
//! there is something to see. `partage-testkit workload` is it; [`crate::sim_node::SimNode::workload`] starts it.

use partage_samples::driver::{DriverError, Gpu};
use std::collections::VecDeque;
use std::io::{Read, Write};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// One kernel of a GPU that is always busy, or one round of a GPU that rests in between.
const ROUND_MICROS: u32 = 10_000;
/// Kernels on their way to a GPU that is always busy.
const AHEAD: usize = 16;
/// How often a program that computes nothing looks whether it should end.
const GLANCE: Duration = Duration::from_millis(20);

/// How a GPU is used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::Args)]
pub struct Load {
    /// The GPU's index among those the program sees
    #[arg(long, default_value_t = 0)]
    pub gpu: u32,
    /// Memory to hold, in MiB, besides what the driver takes for the process
    #[arg(long, default_value_t = 0)]
    pub memory_mib: u64,
    /// Percent of the time that kernels run
    #[arg(long, default_value_t = 0, value_parser = clap::value_parser!(u32).range(0..=100))]
    pub busy: u32,
}

/// Why a GPU cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum WorkloadError {
    /// The driver is not there, or refused.
    #[error(transparent)]
    Driver(#[from] DriverError),
    /// Who started it does not listen.
    #[error("nobody listens: {0}")]
    Alone(#[from] std::io::Error),
}

/// Uses the GPU until standard input ends or `stop` says so. Says `ready` when the memory is held and, where kernels
/// run, the first ones are done.
pub fn run(load: &Load, out: &mut dyn Write, stop: &AtomicBool) -> Result<(), WorkloadError> {
    let over = until_input_ends();
    let ends = || stop.load(Ordering::Relaxed) || over.load(Ordering::Relaxed);
    let gpu = Gpu::open(load.gpu)?;
    let _held = match load.memory_mib {
        0 => None,
        mib => Some(gpu.allocate(mib << 20)?),
    };
    if load.busy == 0 {
        writeln!(out, "ready")?;
        while !ends() {
            std::thread::sleep(GLANCE);
        }
        return Ok(());
    }
    let kernel = gpu.kernel(ROUND_MICROS * load.busy / 100)?;
    let mut events = VecDeque::new();
    // A GPU that never rests has its next kernels before it needs them, whatever else the machine does.
    for _ in 0..if load.busy == 100 { AHEAD } else { 1 } {
        events.push_back(kernel.launch()?);
    }
    let begun = Instant::now();
    let mut due = Duration::ZERO;
    while let Some(event) = events.pop_front() {
        event.wait()?;
        if due.is_zero() {
            writeln!(out, "ready")?;
        }
        if ends() {
            break;
        }
        due += Duration::from_micros(u64::from(ROUND_MICROS));
        if load.busy < 100 {
            std::thread::sleep(due.saturating_sub(begun.elapsed()));
        }
        kernel.launch_before(&event)?;
        events.push_back(event);
    }
    Ok(())
}

/// True from when standard input has ended: who started the program is gone, or wants it to go.
fn until_input_ends() -> Arc<AtomicBool> {
    let over = Arc::new(AtomicBool::new(false));
    let says = Arc::clone(&over);
    std::thread::spawn(move || {
        let mut stdin = std::io::stdin();
        while matches!(stdin.read(&mut [0; 64]), Ok(1..)) {}
        says.store(true, Ordering::Relaxed);
    });
    over
}
