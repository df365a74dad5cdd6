//! A program that uses a GPU through `libcuda.so.1` as any other does: it holds memory and runs kernels, so that
//! clients have something to show. `partage-testkit workload` runs it; [`crate::sim_node::SimNode::workload`] starts
//! it.

use partage_samples::cuda_driver::{CudaDriverError, GpuContext};
use std::collections::VecDeque;
use std::io::{Read, Write};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// Duration of one kernel of a fully busy GPU, or of one round of a partly busy one.
const ROUND_MICROS: u32 = 10_000;
/// Kernels that are queued on a fully busy GPU.
const KERNELS_IN_FLIGHT: usize = 16;
/// Interval at which an idle program checks whether it should stop.
const POLL_INTERVAL: Duration = Duration::from_millis(20);

/// How the workload uses a GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::Args)]
pub struct WorkloadOptions {
    /// Index of the GPU among those that the program sees
    #[arg(long, default_value_t = 0)]
    pub gpu: u32,
    /// Memory to hold, in MiB, in addition to the context of the driver
    #[arg(long, default_value_t = 0)]
    pub memory_mib: u64,
    /// Percentage of the time in which kernels run
    #[arg(long, default_value_t = 0, value_parser = clap::value_parser!(u32).range(0..=100))]
    pub busy: u32,
}

/// Why the workload failed.
#[derive(Debug, thiserror::Error)]
pub enum WorkloadError {
    /// The driver is missing, or refused a call.
    #[error(transparent)]
    Driver(#[from] CudaDriverError),
    /// Standard output could not be written.
    #[error("cannot write to standard output: {0}")]
    Output(#[from] std::io::Error),
}

/// Uses the GPU until standard input ends or `stop` is set. Prints `ready` when the memory is allocated and, if kernels
/// run, the first ones are complete.
pub fn run(load: &WorkloadOptions, out: &mut dyn Write, stop: &AtomicBool) -> Result<(), WorkloadError> {
    let input_ended = watch_stdin();
    let should_stop = || stop.load(Ordering::Relaxed) || input_ended.load(Ordering::Relaxed);
    let gpu = GpuContext::open(load.gpu)?;
    let _held = match load.memory_mib {
        0 => None,
        mib => Some(gpu.allocate(mib << 20)?),
    };
    if load.busy == 0 {
        writeln!(out, "ready")?;
        while !should_stop() {
            std::thread::sleep(POLL_INTERVAL);
        }
        return Ok(());
    }
    let kernel = gpu.kernel(ROUND_MICROS * load.busy / 100)?;
    let mut events = VecDeque::new();
    // A fully busy GPU has its next kernels queued before it needs them, whatever else the machine does.
    for _ in 0..if load.busy == 100 { KERNELS_IN_FLIGHT } else { 1 } {
        events.push_back(kernel.launch()?);
    }
    let begun = Instant::now();
    let mut due = Duration::ZERO;
    while let Some(event) = events.pop_front() {
        event.wait()?;
        if due.is_zero() {
            writeln!(out, "ready")?;
        }
        if should_stop() {
            break;
        }
        due += Duration::from_micros(u64::from(ROUND_MICROS));
        if load.busy < 100 {
            std::thread::sleep(due.saturating_sub(begun.elapsed()));
        }
        kernel.launch_with_event(&event)?;
        events.push_back(event);
    }
    Ok(())
}

/// Returns a flag that becomes true when standard input ends: the starting process has exited, or requests this one to
/// end.
fn watch_stdin() -> Arc<AtomicBool> {
    let input_ended = Arc::new(AtomicBool::new(false));
    let ended_flag = Arc::clone(&input_ended);
    std::thread::spawn(move || {
        let mut stdin = std::io::stdin();
        while matches!(stdin.read(&mut [0; 64]), Ok(1..)) {}
        ended_flag.store(true, Ordering::Relaxed);
    });
    input_ended
}
