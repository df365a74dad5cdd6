//! What kernels take, by experience.
//!
//! A table of fixed size in which every kind of work has one place, found by its hash. Two kinds that meet in one place put
//! each other out; the one that comes back is measured again. Nothing here locks or allocates after the start.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// Places; a program has hundreds of kernels, each in a handful of shapes.
const PLACES: usize = 8192;

/// What is assumed of work that nobody has measured: much. It runs alone that way, and what was too much is given back as
/// soon as it has run.
const GUESS: u64 = 20_000_000;

/// So many measurements of a kind come one after the other; then only some launches are measured.
const EARLY: u64 = 4;

/// Shorter than this nothing counts as long.
const SLACK: u64 = 1_000;

const NANOSECONDS_BITS: u32 = 38;
const NANOSECONDS_MASK: u64 = (1 << NANOSECONDS_BITS) - 1;
/// Above the nanoseconds: how many measurements there were, up to [`EARLY`].
const SEEN_SHIFT: u32 = NANOSECONDS_BITS;
const SEEN_MASK: u64 = 7 << SEEN_SHIFT;
const TAG_SHIFT: u32 = SEEN_SHIFT + 3;

/// A kind of work: a kernel in one shape, a graph.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Key {
    /// Of the shape, too.
    exact: u64,
    /// Of the function alone.
    function: u64,
    /// How large it is, to compare shapes of one function.
    size: u64,
}

/// What is known of a kind of work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Cost {
    /// It was measured in this shape, and often enough.
    Known(u64),
    /// It was measured in this shape.
    Measured(u64),
    /// Another shape of it was.
    Scaled(u64),
    /// Nothing is.
    Guessed(u64),
}

impl Cost {
    #[inline]
    pub(crate) fn nanoseconds(self) -> u64 {
        let (Self::Known(nanoseconds)
        | Self::Measured(nanoseconds)
        | Self::Scaled(nanoseconds)
        | Self::Guessed(nanoseconds)) = self;
        nanoseconds
    }
}

/// Spreads the bits of a number over all places.
#[inline]
fn spread(number: u64) -> u64 {
    let number = (number ^ number >> 32).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    number ^ number >> 29
}

impl Key {
    /// A kernel with its blocks and the threads of each.
    #[inline]
    pub(crate) fn kernel(function: usize, blocks: [u32; 3], threads: [u32; 3]) -> Self {
        let volume = |[x, y, z]: [u32; 3]| u64::from(x).wrapping_mul(u64::from(y)).wrapping_mul(u64::from(z));
        let (blocks, threads) = (volume(blocks), volume(threads));
        let function = spread(function as u64);
        let exact = spread(function ^ blocks.rotate_left(17) ^ threads.rotate_left(48));
        Self { exact, function, size: blocks.saturating_mul(threads).max(1) }
    }

    /// Anything else, by an address or number that stands for it.
    #[inline]
    pub(crate) fn other(kind: u64, which: u64) -> Self {
        let exact = spread(spread(kind) ^ which);
        Self { exact, function: exact, size: 1 }
    }
}

/// The table.
pub(crate) struct Costs {
    exact: Box<[AtomicU64]>,
    /// Nanoseconds of a function in the shape that was measured last, and that shape's size.
    functions: Box<[[AtomicU64; 2]]>,
}

impl Default for Costs {
    fn default() -> Self {
        Self {
            exact: (0..PLACES).map(|_| AtomicU64::new(0)).collect(),
            functions: (0..PLACES / 8).map(|_| [const { AtomicU64::new(0) }; 2]).collect(),
        }
    }
}

/// The part of a hash that tells two kinds in one place apart; never zero, so that an empty place is nobody's.
#[inline]
fn tag(hash: u64) -> u64 {
    (hash >> TAG_SHIFT | 1) << TAG_SHIFT
}

impl Costs {
    #[inline]
    fn place(&self, hash: u64) -> &AtomicU64 {
        &self.exact[hash as usize % PLACES]
    }

    /// What is known of it.
    #[inline]
    pub(crate) fn of(&self, key: Key) -> Cost {
        let word = self.place(key.exact).load(Relaxed);
        if word & !(NANOSECONDS_MASK | SEEN_MASK) != tag(key.exact) {
            return self.scaled(key);
        }
        let nanoseconds = word & NANOSECONDS_MASK;
        if word & SEEN_MASK == EARLY << SEEN_SHIFT {
            Cost::Known(nanoseconds)
        } else {
            Cost::Measured(nanoseconds)
        }
    }

    #[cold]
    fn scaled(&self, key: Key) -> Cost {
        let [word, size] = &self.functions[key.function as usize % (PLACES / 8)];
        let (word, size) = (word.load(Relaxed), size.load(Relaxed));
        if word & !(NANOSECONDS_MASK | SEEN_MASK) != tag(key.function) || size == 0 {
            return Cost::Guessed(GUESS);
        }
        let scaled = u128::from(word & NANOSECONDS_MASK) * u128::from(key.size) / u128::from(size);
        Cost::Scaled(u64::try_from(scaled).unwrap_or(NANOSECONDS_MASK).clamp(1_000, 1_000_000_000))
    }

    /// What is known of it may not be true any more: what comes next is measured, and what it takes is charged.
    pub(crate) fn doubt(&self, key: Key) {
        let place = self.place(key.exact);
        let word = place.load(Relaxed);
        if word & !(NANOSECONDS_MASK | SEEN_MASK) == tag(key.exact) {
            place.store(word & !SEEN_MASK, Relaxed);
        }
    }

    /// Remembers a measurement. Of the first few the shortest is believed, because what looks slow has waited for something;
    /// afterwards a measurement moves what is known by an eighth of the way, and counts as four times what is known at most.
    pub(crate) fn learn(&self, key: Key, nanoseconds: u64) {
        let nanoseconds = nanoseconds.clamp(1, NANOSECONDS_MASK);
        let place = self.place(key.exact);
        let word = place.load(Relaxed);
        let (known, seen) = (word & NANOSECONDS_MASK, (word & SEEN_MASK) >> SEEN_SHIFT);
        let (new, seen) = if word & !(NANOSECONDS_MASK | SEEN_MASK) != tag(key.exact) || seen == 0 {
            (nanoseconds, 1)
        } else if seen < EARLY {
            (known.min(nanoseconds), seen + 1)
        } else {
            let counted = nanoseconds.min(known.saturating_mul(4).max(SLACK));
            (known.saturating_mul(7).saturating_add(counted).div_ceil(8), EARLY)
        };
        place.store(tag(key.exact) | seen << SEEN_SHIFT | new.min(NANOSECONDS_MASK), Relaxed);
        let [word, size] = &self.functions[key.function as usize % (PLACES / 8)];
        word.store(tag(key.function) | new.min(NANOSECONDS_MASK), Relaxed);
        size.store(key.size, Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kernel(function: usize, blocks: u32) -> Key {
        Key::kernel(function, [blocks, 1, 1], [256, 1, 1])
    }

    #[test]
    fn work_is_known_by_its_shape_and_guessed_from_other_shapes() {
        let costs = Costs::default();
        assert_eq!(costs.of(kernel(0x1000, 10)), Cost::Guessed(GUESS));
        costs.learn(kernel(0x1000, 10), 50_000);
        assert_eq!(costs.of(kernel(0x1000, 10)), Cost::Measured(50_000));
        assert_eq!(costs.of(kernel(0x1000, 20)), Cost::Scaled(100_000));
        assert_eq!(costs.of(kernel(0x2000, 10)), Cost::Guessed(GUESS));
    }

    #[test]
    fn what_is_known_follows_what_is_seen() {
        let costs = Costs::default();
        let key = kernel(0x1000, 10);
        for nanoseconds in [900_000, 50_000, 2_000_000, 50_100] {
            costs.learn(key, nanoseconds);
        }
        assert_eq!(costs.of(key), Cost::Known(50_000));
        for _ in 0..80 {
            costs.learn(key, 80_000);
        }
        assert!((79_000..=80_000).contains(&costs.of(key).nanoseconds()));
        // One that waited for something does not count for much.
        costs.learn(key, 8_000_000);
        assert!(costs.of(key).nanoseconds() <= 110_000);
        for _ in 0..80 {
            costs.learn(key, 20_000);
        }
        let known = costs.of(key).nanoseconds();
        costs.doubt(key);
        assert_eq!(costs.of(key), Cost::Measured(known));
        costs.learn(key, 5_000_000);
        assert_eq!(costs.of(key), Cost::Measured(5_000_000));
        for _ in 0..10 {
            costs.learn(key, 20_000);
        }
        assert_eq!(costs.of(key), Cost::Known(20_000));
    }

    #[test]
    fn thousands_of_kernels_find_room() {
        let costs = Costs::default();
        let keys: Vec<Key> = (0..2000).map(|n| kernel(0x7f00_0000_0000 + n * 64, 1)).collect();
        for (n, key) in keys.iter().enumerate() {
            costs.learn(*key, 1_000 + n as u64);
        }
        let known = keys
            .iter()
            .enumerate()
            .filter(|(n, key)| costs.of(**key) == Cost::Measured(1_000 + *n as u64))
            .count();
        assert!(known > 1_700, "only {known} of 2000 are known");
    }
}
