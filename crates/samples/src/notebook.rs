//! The bursty one: a person runs a cell, looks at the result, thinks, runs the next.

use crate::act::{Act, Ended, Kernels, Usual, gib, memory};
use clap::Args;
use partage_samples::driver::Gpu;
use std::time::{Duration, Instant};

/// Compute in bursts, with pauses for thought
///
/// A cell takes memory, computes for half a second to two, and gives the memory back; then nothing happens for one to
/// four seconds. A cell that gets no memory is left out, as a person would go on with another.
#[derive(Args)]
#[command(after_help = "\
Examples:
  partage-sample notebook
  partage-sample notebook --memory 1Gi --seed 7 --seconds 60
  partage run --memory 4Gi --cores 20 -- partage-sample notebook --memory 3Gi")]
pub(crate) struct Notebook {
    /// The most a cell takes, besides what the driver takes for the program
    #[arg(long, value_name = "AMOUNT", default_value = "4Gi", value_parser = memory)]
    memory: u64,

    /// Chooses the cells: the same seed, the same cells
    #[arg(long, value_name = "N", default_value_t = 1)]
    seed: u64,

    #[command(flatten)]
    pub(crate) usual: Usual,
}

/// What a cell does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Cell {
    bytes: u64,
    /// Of the GPU's own time.
    computes: Duration,
    thought: Duration,
}

/// The cells of a seed.
struct Cells {
    random: u64,
    most: u64,
}

impl Cells {
    /// SplitMix64: short, and the same in every build.
    fn next(&mut self) -> u64 {
        self.random = self.random.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.random;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    fn between(&mut self, least: u64, most: u64) -> u64 {
        least + self.next() % (most - least + 1)
    }

    fn cell(&mut self) -> Cell {
        Cell {
            bytes: self.between(self.most.div_ceil(4), self.most),
            computes: Duration::from_millis(self.between(500, 2000)),
            thought: Duration::from_millis(self.between(1000, 4000)),
        }
    }
}

impl Notebook {
    pub(crate) fn play(&self, act: &mut Act<'_>) -> Result<String, Ended> {
        let gpu = Gpu::open(self.usual.gpu)?;
        let mut kernels = Kernels::new(&gpu)?;
        let mut cells = Cells { random: self.seed, most: self.memory };
        let (mut run, mut refused, mut peak) = (0u64, 0u64, 0);
        while !act.is_over() {
            let (cell, number) = (cells.cell(), run + refused + 1);
            match gpu.allocate(cell.bytes) {
                Err(error) if error.is_out_of_memory() => {
                    refused += 1;
                    act.say(format_args!("cell {number}: {} refused: out of memory", gib(cell.bytes)))?;
                }
                memory => {
                    let (memory, begun) = (memory?, Instant::now());
                    if !kernels.compute(act, cell.computes)? {
                        break;
                    }
                    (run, peak) = (run + 1, peak.max(memory.bytes()));
                    act.say(format_args!(
                        "cell {number}: {}, {:.1} s of kernels in {:.1} s",
                        gib(memory.bytes()),
                        cell.computes.as_secs_f64(),
                        begun.elapsed().as_secs_f64()
                    ))?;
                }
            }
            act.rest(cell.thought);
        }
        let (share, cells) = (act.share(), if run == 1 { "cell" } else { "cells" });
        Ok(format!("{run} {cells}, {refused} refused, at most {} at a time, {share}", gib(peak)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cells_stay_within_what_was_said_and_come_again() {
        let cells = |random| {
            let mut cells = Cells { random, most: 4 << 30 };
            (0..200).map(|_| cells.cell()).collect::<Vec<_>>()
        };
        let millis = |time: Duration| time.as_millis();
        for cell in cells(7) {
            assert!((1 << 30..=4 << 30).contains(&cell.bytes), "{cell:?}");
            assert!((500..=2000).contains(&millis(cell.computes)), "{cell:?}");
            assert!((1000..=4000).contains(&millis(cell.thought)), "{cell:?}");
        }
        assert_eq!(cells(7), cells(7));
        assert_ne!(cells(7), cells(8));
        assert_eq!(Cells { random: 1, most: 1 }.cell().bytes, 1, "the least there is");
    }
}
