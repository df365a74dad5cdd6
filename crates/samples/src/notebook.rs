//! A bursty workload: a user runs a notebook cell, reads the result, and runs the next one.

use crate::sample_run::{CommonArgs, KernelQueue, SampleError, SampleRun, gib, memory};
use clap::Args;
use partage_samples::cuda_driver::GpuContext;
use std::time::{Duration, Instant};

/// Compute in bursts with pauses, like a notebook
///
/// A cell allocates memory, computes for 0.5 to 2 seconds and frees the memory. A pause of 1 to 4 seconds follows. A
/// cell whose allocation fails is skipped.
#[derive(Args)]
#[command(after_help = "\
Examples:
  partage-sample notebook
  partage-sample notebook --memory 1Gi --seed 7 --seconds 60
  partage run --memory 4Gi --cores 20 -- partage-sample notebook --memory 3Gi")]
pub(crate) struct Notebook {
    /// Maximum memory of a cell, in addition to the driver's context
    #[arg(long, value_name = "AMOUNT", default_value = "4Gi", value_parser = memory)]
    memory: u64,

    /// Seed of the random cells
    #[arg(long, value_name = "N", default_value_t = 1)]
    seed: u64,

    #[command(flatten)]
    pub(crate) common: CommonArgs,
}

/// The parameters of a cell.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct NotebookCell {
    bytes: u64,
    /// The GPU time that the cell's kernels take.
    computes: Duration,
    /// The pause after the cell.
    pause: Duration,
}

/// Generates the cells of a seed.
struct CellGenerator {
    random: u64,
    max_bytes: u64,
}

impl CellGenerator {
    /// SplitMix64: short, and stable across builds.
    fn next(&mut self) -> u64 {
        self.random = self.random.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.random;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    fn between(&mut self, min: u64, max: u64) -> u64 {
        min + self.next() % (max - min + 1)
    }

    fn cell(&mut self) -> NotebookCell {
        NotebookCell {
            bytes: self.between(self.max_bytes.div_ceil(4), self.max_bytes),
            computes: Duration::from_millis(self.between(500, 2000)),
            pause: Duration::from_millis(self.between(1000, 4000)),
        }
    }
}

impl Notebook {
    pub(crate) fn run(&self, run: &mut SampleRun<'_>) -> Result<String, SampleError> {
        let gpu = GpuContext::open(self.common.gpu)?;
        let mut kernels = KernelQueue::new(&gpu)?;
        let mut cells = CellGenerator { random: self.seed, max_bytes: self.memory };
        let (mut completed, mut refused, mut peak) = (0u64, 0u64, 0);
        while !run.is_over() {
            let (cell, number) = (cells.cell(), completed + refused + 1);
            match gpu.allocate(cell.bytes) {
                Err(error) if error.is_out_of_memory() => {
                    refused += 1;
                    run.print_line(format_args!(
                        "cell {number}: {} refused: out of memory",
                        gib(cell.bytes)
                    ))?;
                }
                memory => {
                    let (memory, begun) = (memory?, Instant::now());
                    if !kernels.compute(run, cell.computes)? {
                        break;
                    }
                    (completed, peak) = (completed + 1, peak.max(memory.bytes()));
                    run.print_line(format_args!(
                        "cell {number}: {}, {:.1} s of kernels in {:.1} s",
                        gib(memory.bytes()),
                        cell.computes.as_secs_f64(),
                        begun.elapsed().as_secs_f64()
                    ))?;
                }
            }
            run.pause(cell.pause);
        }
        let (share, cells) = (run.share(), if completed == 1 { "cell" } else { "cells" });
        Ok(format!("{completed} {cells}, {refused} refused, at most {} at a time, {share}", gib(peak)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cells_stay_within_limits_and_are_reproducible() {
        let cells = |random| {
            let mut cells = CellGenerator { random, max_bytes: 4 << 30 };
            (0..200).map(|_| cells.cell()).collect::<Vec<_>>()
        };
        let millis = |time: Duration| time.as_millis();
        for cell in cells(7) {
            assert!((1 << 30..=4 << 30).contains(&cell.bytes), "{cell:?}");
            assert!((500..=2000).contains(&millis(cell.computes)), "{cell:?}");
            assert!((1000..=4000).contains(&millis(cell.pause)), "{cell:?}");
        }
        assert_eq!(cells(7), cells(7));
        assert_ne!(cells(7), cells(8));
        assert_eq!(CellGenerator { random: 1, max_bytes: 1 }.cell().bytes, 1, "the minimum");
    }
}
