//! Measured costs of kernels.
//!
//! A table of fixed size in which every kind of work has one entry, found by its hash. Two kinds that share an entry
//! evict each other, and are measured again when they return. Nothing here locks or allocates after the start.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// Entries of the table; a program has hundreds of kernels, each in a handful of shapes.
const TABLE_SIZE: usize = 8192;

/// Cost assumed for work that has not been measured, in nanoseconds. It is high, so that such work runs alone; the
/// excess is refunded as soon as it has run.
const UNKNOWN_COST_NS: u64 = 20_000_000;

/// Number of consecutive measurements of a new kind of work; later only some launches are measured.
const EARLY_MEASUREMENTS: u64 = 4;

/// Nanoseconds below which no measurement counts as an outlier.
const MIN_OUTLIER_NS: u64 = 1_000;

const NANOSECONDS_BITS: u32 = 38;
const NANOSECONDS_MASK: u64 = (1 << NANOSECONDS_BITS) - 1;
/// Position of the number of measurements, up to [`EARLY_MEASUREMENTS`], above the nanoseconds.
const COUNT_SHIFT: u32 = NANOSECONDS_BITS;
const COUNT_MASK: u64 = 7 << COUNT_SHIFT;
const TAG_SHIFT: u32 = COUNT_SHIFT + 3;

/// A kind of work: a kernel in one shape, or a graph.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct WorkKey {
    /// Hash of the function and its shape.
    exact: u64,
    /// Hash of the function alone.
    function: u64,
    /// Size of the launch, to compare shapes of one function.
    size: u64,
}

/// The cost of a kind of work, in nanoseconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum KernelCost {
    /// It was measured often enough in this shape.
    Known(u64),
    /// It was measured in this shape.
    Measured(u64),
    /// It was measured in another shape, and scaled by size.
    Scaled(u64),
    /// It has not been measured.
    Guessed(u64),
}

impl KernelCost {
    #[inline]
    pub(crate) fn nanoseconds(self) -> u64 {
        let (Self::Known(nanoseconds)
        | Self::Measured(nanoseconds)
        | Self::Scaled(nanoseconds)
        | Self::Guessed(nanoseconds)) = self;
        nanoseconds
    }
}

/// Mixes the bits of a number, to spread it over all entries.
#[inline]
fn mix_bits(number: u64) -> u64 {
    let number = (number ^ number >> 32).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    number ^ number >> 29
}

impl WorkKey {
    /// Returns the key of a kernel launch with these blocks and threads per block.
    #[inline]
    pub(crate) fn kernel(function: usize, blocks: [u32; 3], threads: [u32; 3]) -> Self {
        let volume = |[x, y, z]: [u32; 3]| u64::from(x).wrapping_mul(u64::from(y)).wrapping_mul(u64::from(z));
        let (blocks, threads) = (volume(blocks), volume(threads));
        let function = mix_bits(function as u64);
        let exact = mix_bits(function ^ blocks.rotate_left(17) ^ threads.rotate_left(48));
        Self { exact, function, size: blocks.saturating_mul(threads).max(1) }
    }

    /// Returns the key of other work, by a kind and an address or number.
    #[inline]
    pub(crate) fn other(kind: u64, which: u64) -> Self {
        let exact = mix_bits(mix_bits(kind) ^ which);
        Self { exact, function: exact, size: 1 }
    }
}

/// The table of costs.
pub(crate) struct KernelCosts {
    exact: Box<[AtomicU64]>,
    /// Nanoseconds of a function in the shape that was measured last, and that shape's size.
    functions: Box<[[AtomicU64; 2]]>,
}

impl Default for KernelCosts {
    fn default() -> Self {
        Self {
            exact: (0..TABLE_SIZE).map(|_| AtomicU64::new(0)).collect(),
            functions: (0..TABLE_SIZE / 8).map(|_| [const { AtomicU64::new(0) }; 2]).collect(),
        }
    }
}

/// Returns the part of a hash that distinguishes kinds in one entry; never zero, so that an empty entry matches none.
#[inline]
fn tag(hash: u64) -> u64 {
    (hash >> TAG_SHIFT | 1) << TAG_SHIFT
}

impl KernelCosts {
    #[inline]
    fn entry(&self, hash: u64) -> &AtomicU64 {
        &self.exact[hash as usize % TABLE_SIZE]
    }

    /// Returns the cost of a kind of work.
    #[inline]
    pub(crate) fn get(&self, key: WorkKey) -> KernelCost {
        let word = self.entry(key.exact).load(Relaxed);
        if word & !(NANOSECONDS_MASK | COUNT_MASK) != tag(key.exact) {
            return self.scaled_cost(key);
        }
        let nanoseconds = word & NANOSECONDS_MASK;
        if word & COUNT_MASK == EARLY_MEASUREMENTS << COUNT_SHIFT {
            KernelCost::Known(nanoseconds)
        } else {
            KernelCost::Measured(nanoseconds)
        }
    }

    #[cold]
    fn scaled_cost(&self, key: WorkKey) -> KernelCost {
        let [word, size] = &self.functions[key.function as usize % (TABLE_SIZE / 8)];
        let (word, size) = (word.load(Relaxed), size.load(Relaxed));
        if word & !(NANOSECONDS_MASK | COUNT_MASK) != tag(key.function) || size == 0 {
            return KernelCost::Guessed(UNKNOWN_COST_NS);
        }
        let scaled = u128::from(word & NANOSECONDS_MASK) * u128::from(key.size) / u128::from(size);
        KernelCost::Scaled(u64::try_from(scaled).unwrap_or(NANOSECONDS_MASK).clamp(1_000, 1_000_000_000))
    }

    /// Marks a cost as outdated: the next launches are measured, and charged what they take.
    pub(crate) fn invalidate(&self, key: WorkKey) {
        let entry = self.entry(key.exact);
        let word = entry.load(Relaxed);
        if word & !(NANOSECONDS_MASK | COUNT_MASK) == tag(key.exact) {
            entry.store(word & !COUNT_MASK, Relaxed);
        }
    }

    /// Records a measurement. Of the first few, the shortest counts, because a slow one has waited for something; later
    /// a measurement moves the known cost by an eighth of the difference, and counts as at most four times the known
    /// cost.
    pub(crate) fn learn(&self, key: WorkKey, nanoseconds: u64) {
        let nanoseconds = nanoseconds.clamp(1, NANOSECONDS_MASK);
        let entry = self.entry(key.exact);
        let word = entry.load(Relaxed);
        let (known, seen) = (word & NANOSECONDS_MASK, (word & COUNT_MASK) >> COUNT_SHIFT);
        let (new, seen) = if word & !(NANOSECONDS_MASK | COUNT_MASK) != tag(key.exact) || seen == 0 {
            (nanoseconds, 1)
        } else if seen < EARLY_MEASUREMENTS {
            (known.min(nanoseconds), seen + 1)
        } else {
            let counted = nanoseconds.min(known.saturating_mul(4).max(MIN_OUTLIER_NS));
            (known.saturating_mul(7).saturating_add(counted).div_ceil(8), EARLY_MEASUREMENTS)
        };
        entry.store(tag(key.exact) | seen << COUNT_SHIFT | new.min(NANOSECONDS_MASK), Relaxed);
        let [word, size] = &self.functions[key.function as usize % (TABLE_SIZE / 8)];
        word.store(tag(key.function) | new.min(NANOSECONDS_MASK), Relaxed);
        size.store(key.size, Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kernel(function: usize, blocks: u32) -> WorkKey {
        WorkKey::kernel(function, [blocks, 1, 1], [256, 1, 1])
    }

    #[test]
    fn cost_is_known_by_shape_and_scaled_from_other_shapes() {
        let costs = KernelCosts::default();
        assert_eq!(costs.get(kernel(0x1000, 10)), KernelCost::Guessed(UNKNOWN_COST_NS));
        costs.learn(kernel(0x1000, 10), 50_000);
        assert_eq!(costs.get(kernel(0x1000, 10)), KernelCost::Measured(50_000));
        assert_eq!(costs.get(kernel(0x1000, 20)), KernelCost::Scaled(100_000));
        assert_eq!(costs.get(kernel(0x2000, 10)), KernelCost::Guessed(UNKNOWN_COST_NS));
    }

    #[test]
    fn cost_follows_measurements() {
        let costs = KernelCosts::default();
        let key = kernel(0x1000, 10);
        for nanoseconds in [900_000, 50_000, 2_000_000, 50_100] {
            costs.learn(key, nanoseconds);
        }
        assert_eq!(costs.get(key), KernelCost::Known(50_000));
        for _ in 0..80 {
            costs.learn(key, 80_000);
        }
        assert!((79_000..=80_000).contains(&costs.get(key).nanoseconds()));
        // A measurement that waited for something has little weight.
        costs.learn(key, 8_000_000);
        assert!(costs.get(key).nanoseconds() <= 110_000);
        for _ in 0..80 {
            costs.learn(key, 20_000);
        }
        let known = costs.get(key).nanoseconds();
        costs.invalidate(key);
        assert_eq!(costs.get(key), KernelCost::Measured(known));
        costs.learn(key, 5_000_000);
        assert_eq!(costs.get(key), KernelCost::Measured(5_000_000));
        for _ in 0..10 {
            costs.learn(key, 20_000);
        }
        assert_eq!(costs.get(key), KernelCost::Known(20_000));
    }

    #[test]
    fn thousands_of_kernels_fit_the_table() {
        let costs = KernelCosts::default();
        let keys: Vec<WorkKey> = (0..2000).map(|n| kernel(0x7f00_0000_0000 + n * 64, 1)).collect();
        for (n, key) in keys.iter().enumerate() {
            costs.learn(*key, 1_000 + n as u64);
        }
        let known = keys
            .iter()
            .enumerate()
            .filter(|(n, key)| costs.get(**key) == KernelCost::Measured(1_000 + *n as u64))
            .count();
        assert!(known > 1_700, "only {known} of 2000 are known");
    }
}
