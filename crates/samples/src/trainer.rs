//! A steady workload: it holds a model in memory and computes continuously.

use crate::sample_run::{CommonArgs, KernelQueue, SampleError, SampleRun, TimeShare, gib, memory, seconds};
use clap::Args;
use partage_samples::cuda_driver::GpuContext;
use std::time::Duration;

/// Hold a model in memory and compute continuously
///
/// Allocates memory once, then runs kernels back to back and uses as much of the GPU as it gets. Prints the number of
/// steps and its share of the GPU every few seconds.
#[derive(Args)]
#[command(after_help = "\
Examples:
  partage-sample trainer
  partage-sample trainer --memory 512Mi --seconds 30
  partage run --memory 8Gi --cores 50 -- partage-sample trainer --memory 6Gi")]
pub(crate) struct Trainer {
    /// Memory of the model, in addition to the driver's context
    #[arg(long, value_name = "AMOUNT", default_value = "6Gi", value_parser = memory)]
    memory: u64,

    /// Seconds between two lines of output
    #[arg(long, value_name = "N", default_value = "5", value_parser = seconds)]
    every: Duration,

    #[command(flatten)]
    pub(crate) common: CommonArgs,
}

impl Trainer {
    pub(crate) fn run(&self, run: &mut SampleRun<'_>) -> Result<String, SampleError> {
        let gpu = GpuContext::open(self.common.gpu)?;
        let mut kernels = KernelQueue::new(&gpu)?;
        let model = match gpu.allocate(self.memory) {
            Err(error) if error.is_out_of_memory() => {
                let (free, total) = gpu.memory()?;
                return Err(SampleError::Failed(format!(
                    "out of memory: the model takes {}, but of {} only {} are free: use less --memory",
                    gib(self.memory),
                    gib(total),
                    gib(free)
                )));
            }
            model => model?,
        };
        run.print_line(format_args!("the model takes {}", gib(model.bytes())))?;
        let (mut steps, mut printed_at, mut computed) = (0u64, run.elapsed(), run.computed());
        loop {
            let goes_on = kernels.step(run, u64::MAX)?;
            steps += 1;
            if !goes_on {
                return Ok(format!("{steps} steps, {}", run.share()));
            }
            let now = run.elapsed();
            if now - printed_at >= self.every {
                let share = TimeShare { computed: run.computed() - computed, of: now - printed_at };
                run.print_line(format_args!("step {steps}, {share}"))?;
                (printed_at, computed) = (now, run.computed());
            }
        }
    }
}
