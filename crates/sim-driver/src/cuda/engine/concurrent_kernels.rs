//! Places small kernels concurrently: kernels that do not fill the GPU share it.

use super::FULL_GPU_SHARE;

/// The small kernels placed after the last one that filled the GPU.
#[derive(Default)]
pub(super) struct ConcurrentKernels {
    /// No kernel starts before this position: a kernel that fills the GPU ends here.
    exclusive_until: u64,
    placed: Vec<(u64, u64, u32)>,
}

/// More kernels than a GPU runs at a time; beyond this limit they are placed one after the other.
const MAX_CONCURRENT_KERNELS: usize = 128;

impl ConcurrentKernels {
    /// Places a kernel that fills the GPU: it follows all others and ends at `end`.
    #[inline]
    pub(super) fn set_exclusive_until(&mut self, end: u64) {
        self.exclusive_until = end;
        if !self.placed.is_empty() {
            self.placed.clear();
        }
    }

    /// Adds a kernel that has its place already, whatever runs there.
    pub(super) fn occupy(&mut self, start: u64, end: u64, share: u32) {
        if end > start {
            self.placed.push((start, end, share));
        }
    }

    /// Returns where a kernel starts: at `earliest` or later, and no later than `end`, after all others. Positions
    /// before `served` are in the past. A later kernel may have an earlier `earliest` than this one.
    pub(super) fn place(&mut self, served: u64, earliest: u64, end: u64, duration: u64, share: u32) -> u64 {
        let earliest = earliest.max(served).max(self.exclusive_until);
        self.placed.retain(|&(_, until, _)| until > served);
        let start = if self.placed.len() >= MAX_CONCURRENT_KERNELS {
            let start = end.max(earliest);
            self.set_exclusive_until(start);
            start
        } else {
            let ends = self.placed.iter().map(|&(_, until, _)| until).filter(|&until| until > earliest);
            let mut starts: Vec<u64> = ends.chain([earliest]).collect();
            starts.sort_unstable();
            starts
                .into_iter()
                .find(|&start| {
                    let concurrent = self
                        .placed
                        .iter()
                        .filter(|&&(from, until, _)| from < start + duration && until > start);
                    concurrent.map(|&(_, _, theirs)| theirs).sum::<u32>() + share <= FULL_GPU_SHARE
                })
                .unwrap_or(end.max(earliest))
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
    fn half_gpu_kernels_overlap_and_full_kernel_runs_alone() {
        let mut concurrent = ConcurrentKernels::default();
        assert_eq!(concurrent.place(0, 0, 0, 100, FULL_GPU_SHARE / 2), 0);
        assert_eq!(concurrent.place(0, 0, 100, 100, FULL_GPU_SHARE / 2), 0);
        assert_eq!(concurrent.place(0, 0, 100, 50, FULL_GPU_SHARE / 2), 100);
        concurrent.set_exclusive_until(300);
        assert_eq!(concurrent.place(0, 0, 300, 10, 1), 300);
    }

    proptest! {
        /// The shares of concurrent kernels never exceed the GPU, and no kernel starts before its earliest position.
        #[test]
        fn placements_never_exceed_the_gpu(kernels in prop::collection::vec((0..500u64, 1..100u64, 1..=FULL_GPU_SHARE), 1..200)) {
            let mut concurrent = ConcurrentKernels::default();
            let mut placed: Vec<(u64, u64, u32)> = Vec::new();
            let mut end = 0;
            for (earliest, duration, share) in kernels {
                let start = if share == FULL_GPU_SHARE {
                    concurrent.set_exclusive_until(end + duration);
                    end
                } else {
                    let start = concurrent.place(0, earliest, end, duration, share);
                    prop_assert!(start >= earliest);
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
                prop_assert!(full <= u64::from(FULL_GPU_SHARE), "{full} at {at}");
            }
        }
    }
}
