//! Kernels beside each other: those that do not fill the GPU share it.

use super::FULL;

/// The small kernels that lie after the last full one.
#[derive(Default)]
pub(super) struct Beside {
    /// Nothing begins before this: a kernel that fills the GPU ends here.
    solid: u64,
    placed: Vec<(u64, u64, u32)>,
}

/// More than a GPU runs at a time; beyond, one simply comes after the other.
const MOST: usize = 128;

impl Beside {
    /// A kernel that fills the GPU comes after everything and ends at `end`.
    #[inline]
    pub(super) fn fill(&mut self, end: u64) {
        self.solid = end;
        if !self.placed.is_empty() {
            self.placed.clear();
        }
    }

    /// Where a kernel can begin, at `floor` at the earliest and at `end`, after everything, at the latest. What has been
    /// `served` is past; a later kernel may have a lower floor than this one.
    pub(super) fn find(&mut self, served: u64, floor: u64, end: u64, duration: u64, share: u32) -> u64 {
        let floor = floor.max(served).max(self.solid);
        self.placed.retain(|&(_, until, _)| until > served);
        let start = if self.placed.len() >= MOST {
            let start = end.max(floor);
            self.fill(start);
            start
        } else {
            let ends = self.placed.iter().map(|&(_, until, _)| until).filter(|&until| until > floor);
            let mut starts: Vec<u64> = ends.chain([floor]).collect();
            starts.sort_unstable();
            starts
                .into_iter()
                .find(|&start| {
                    let beside = self
                        .placed
                        .iter()
                        .filter(|&&(from, until, _)| from < start + duration && until > start);
                    beside.map(|&(_, _, theirs)| theirs).sum::<u32>() + share <= FULL
                })
                .unwrap_or(end.max(floor))
        };
        self.placed.push((start, start + duration, share));
        start
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn halves_lie_side_by_side_and_a_full_one_alone() {
        let mut beside = Beside::default();
        assert_eq!(beside.find(0, 0, 0, 100, FULL / 2), 0);
        assert_eq!(beside.find(0, 0, 100, 100, FULL / 2), 0);
        assert_eq!(beside.find(0, 0, 100, 50, FULL / 2), 100);
        beside.fill(300);
        assert_eq!(beside.find(0, 0, 300, 10, 1), 300);
    }

    proptest! {
        /// Never more than the GPU has, and never before the floor.
        #[test]
        fn the_gpu_is_never_over_full(kernels in prop::collection::vec((0..500u64, 1..100u64, 1..=FULL), 1..200)) {
            let mut beside = Beside::default();
            let mut placed: Vec<(u64, u64, u32)> = Vec::new();
            let mut end = 0;
            for (floor, duration, share) in kernels {
                let start = if share == FULL {
                    beside.fill(end + duration);
                    end
                } else {
                    let start = beside.find(0, floor, end, duration, share);
                    prop_assert!(start >= floor);
                    start
                };
                end = end.max(start + duration);
                placed.push((start, start + duration, share));
            }
            for &(at, ..) in &placed {
                let full: u64 = placed
                    .iter()
                    .filter(|&&(from, until, _)| from <= at && at < until)
                    .map(|&(_, _, share)| u64::from(share))
                    .sum();
                prop_assert!(full <= u64::from(FULL), "{full} at {at}");
            }
        }
    }
}
