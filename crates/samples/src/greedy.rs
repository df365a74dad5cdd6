//! A greedy workload: it allocates until the driver reports out of memory, and continues.

use crate::sample_run::{CommonArgs, KernelQueue, SampleError, SampleRun, gib};
use clap::Args;
use partage_samples::cuda_driver::{CudaDriverError, DeviceMemory, GpuContext};
use std::time::Duration;

/// The size of one allocation.
const ALLOCATION_BYTES: u64 = 512 << 20;
/// The GPU time between two allocations.
const COMPUTE_TIME: Duration = Duration::from_millis(100);
/// The GPU time after a failed allocation.
const COMPUTE_TIME_AFTER_REFUSAL: Duration = Duration::from_secs(3);

/// Allocate more and more memory until an allocation fails
///
/// Allocates 512 MiB at a time and computes in between. When the driver reports out of memory, it frees half of its
/// memory, computes for a few seconds and continues. Without a share it takes all memory of the GPU.
#[derive(Args)]
#[command(after_help = "\
Examples:
  partage-sample greedy --seconds 60
  partage run --memory 4Gi --cores 20 -- partage-sample greedy")]
pub(crate) struct Greedy {
    #[command(flatten)]
    pub(crate) common: CommonArgs,
}

/// Converts an out-of-memory error to `None`.
fn unless_out_of_memory<T>(done: Result<T, CudaDriverError>) -> Result<Option<T>, CudaDriverError> {
    match done {
        Err(error) if error.is_out_of_memory() => Ok(None),
        done => done.map(Some),
    }
}

impl Greedy {
    pub(crate) fn run(&self, run: &mut SampleRun<'_>) -> Result<String, SampleError> {
        let (mut refused, mut peak) = (0u64, 0);
        while !run.is_over() {
            let context =
                GpuContext::open(self.common.gpu).and_then(|gpu| Ok((KernelQueue::new(&gpu)?, gpu)));
            match unless_out_of_memory(context)? {
                Some((kernels, gpu)) => {
                    self.allocate_until_stopped(run, kernels, &gpu, &mut refused, &mut peak)?
                }
                None => {
                    refused += 1;
                    run.print_line(format_args!("refused at 0.0 GiB: out of memory; retrying later"))?;
                    run.pause(COMPUTE_TIME_AFTER_REFUSAL);
                }
            }
        }
        let times = if refused == 1 { "once".to_string() } else { format!("{refused} times") };
        Ok(format!("refused {times}, held at most {}, {}", gib(peak), run.share()))
    }

    /// Allocates and frees memory until the sample is to end.
    fn allocate_until_stopped(
        &self,
        run: &mut SampleRun<'_>,
        mut kernels: KernelQueue,
        gpu: &GpuContext,
        refused: &mut u64,
        peak: &mut u64,
    ) -> Result<(), SampleError> {
        let mut held: Vec<DeviceMemory> = Vec::new();
        loop {
            let computes = match unless_out_of_memory(gpu.allocate(ALLOCATION_BYTES))? {
                Some(memory) => {
                    held.push(memory);
                    *peak = (*peak).max(sum(&held));
                    COMPUTE_TIME
                }
                None => {
                    *refused += 1;
                    let then = if held.is_empty() { "retrying later" } else { "freeing half" };
                    run.print_line(format_args!("refused at {}: out of memory; {then}", gib(sum(&held))))?;
                    held.truncate(held.len() / 2);
                    COMPUTE_TIME_AFTER_REFUSAL
                }
            };
            if !kernels.compute(run, computes)? {
                return Ok(());
            }
        }
    }
}

fn sum(held: &[DeviceMemory]) -> u64 {
    held.iter().map(DeviceMemory::bytes).sum()
}
