//! The greedy one: it wants more memory than it is given, and lives with the refusal.

use crate::act::{Act, Ended, Kernels, Usual, gib};
use clap::Args;
use partage_samples::driver::{DriverError, Gpu, Memory};
use std::time::Duration;

/// What it asks for at a time.
const STEP: u64 = 512 << 20;
/// What it computes between two askings.
const BETWEEN: Duration = Duration::from_millis(100);
/// How long it gets along with what it has, after a refusal.
const AFTER: Duration = Duration::from_secs(3);

/// Ask for more and more memory, until the driver refuses
///
/// Asks for 512 MiB after 512 MiB and computes in between. When the driver says that it is out of memory, it gives half
/// back, computes for a few seconds and asks again. Without a share it takes all the GPU has.
#[derive(Args)]
#[command(after_help = "\
Examples:
  partage-sample greedy --seconds 60
  partage run --memory 4Gi --cores 20 -- partage-sample greedy")]
pub(crate) struct Greedy {
    #[command(flatten)]
    pub(crate) usual: Usual,
}

/// Nothing where there is no memory left.
fn if_there_is_memory<T>(done: Result<T, DriverError>) -> Result<Option<T>, DriverError> {
    match done {
        Err(error) if error.is_out_of_memory() => Ok(None),
        done => done.map(Some),
    }
}

impl Greedy {
    pub(crate) fn play(&self, act: &mut Act<'_>) -> Result<String, Ended> {
        let (mut refused, mut peak) = (0u64, 0);
        while !act.is_over() {
            let opened = Gpu::open(self.usual.gpu).and_then(|gpu| Ok((Kernels::new(&gpu)?, gpu)));
            match if_there_is_memory(opened)? {
                Some((kernels, gpu)) => self.eat(act, kernels, &gpu, &mut refused, &mut peak)?,
                None => {
                    refused += 1;
                    act.say(format_args!("refused at 0.0 GiB: out of memory; asking again later"))?;
                    act.rest(AFTER);
                }
            }
        }
        let times = if refused == 1 { "once".to_string() } else { format!("{refused} times") };
        Ok(format!("refused {times}, held at most {}, {}", gib(peak), act.share()))
    }

    /// Until it is to end.
    fn eat(
        &self,
        act: &mut Act<'_>,
        mut kernels: Kernels,
        gpu: &Gpu,
        refused: &mut u64,
        peak: &mut u64,
    ) -> Result<(), Ended> {
        let mut held: Vec<Memory> = Vec::new();
        loop {
            let computes = match if_there_is_memory(gpu.allocate(STEP))? {
                Some(memory) => {
                    held.push(memory);
                    *peak = (*peak).max(sum(&held));
                    BETWEEN
                }
                None => {
                    *refused += 1;
                    let then = if held.is_empty() { "asking again later" } else { "giving half back" };
                    act.say(format_args!("refused at {}: out of memory; {then}", gib(sum(&held))))?;
                    held.truncate(held.len() / 2);
                    AFTER
                }
            };
            if !kernels.compute(act, computes)? {
                return Ok(());
            }
        }
    }
}

fn sum(held: &[Memory]) -> u64 {
    held.iter().map(Memory::bytes).sum()
}
