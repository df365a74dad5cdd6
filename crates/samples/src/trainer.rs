//! The steady one: it holds a model and computes without a pause.

use crate::act::{Act, Ended, Kernels, Share, Usual, gib, memory, seconds};
use clap::Args;
use partage_samples::driver::Gpu;
use std::time::Duration;

/// Hold a model and compute without a pause
///
/// Takes memory once, then runs kernels back to back: as much of the GPU as it is given. Says every few seconds how many
/// steps it did and which part of the GPU it had.
#[derive(Args)]
#[command(after_help = "\
Examples:
  partage-sample trainer
  partage-sample trainer --memory 512Mi --seconds 30
  partage run --memory 8Gi --cores 50 -- partage-sample trainer --memory 6Gi")]
pub(crate) struct Trainer {
    /// What the model takes, besides what the driver takes for the program
    #[arg(long, value_name = "AMOUNT", default_value = "6Gi", value_parser = memory)]
    memory: u64,

    /// Seconds between two lines
    #[arg(long, value_name = "N", default_value = "5", value_parser = seconds)]
    every: Duration,

    #[command(flatten)]
    pub(crate) usual: Usual,
}

impl Trainer {
    pub(crate) fn play(&self, act: &mut Act<'_>) -> Result<String, Ended> {
        let gpu = Gpu::open(self.usual.gpu)?;
        let mut kernels = Kernels::new(&gpu)?;
        let model = match gpu.allocate(self.memory) {
            Err(error) if error.is_out_of_memory() => {
                let (free, total) = gpu.memory()?;
                return Err(Ended::Failed(format!(
                    "out of memory: the model takes {}, and of {} there are {} free: use less --memory",
                    gib(self.memory),
                    gib(total),
                    gib(free)
                )));
            }
            model => model?,
        };
        act.say(format_args!("the model takes {}", gib(model.bytes())))?;
        let (mut steps, mut said, mut computed) = (0u64, act.lasted(), act.computed());
        loop {
            let goes_on = kernels.step(act, u64::MAX)?;
            steps += 1;
            if !goes_on {
                return Ok(format!("{steps} steps, {}", act.share()));
            }
            let now = act.lasted();
            if now - said >= self.every {
                let share = Share { computed: act.computed() - computed, of: now - said };
                act.say(format_args!("step {steps}, {share}"))?;
                (said, computed) = (now, act.computed());
            }
        }
    }
}
