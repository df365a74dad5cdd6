//! Names that no two GPUs share, made from a seed: the same seed makes the same names.

/// A short generator with good bits (`SplitMix64`).
pub(super) struct Random(u64);

impl Random {
    /// One that starts with the seed, told apart by a number.
    pub(super) fn new(seed: u64, number: u64) -> Random {
        let mut random = Random(seed);
        let start = random.next() ^ number.wrapping_mul(0xA076_1D64_78BD_642F);
        Random(start)
    }

    pub(super) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        mixed ^ (mixed >> 31)
    }

    /// A GPU's UUID. NVIDIA's have no version and no variant in them either.
    pub(super) fn uuid(&mut self) -> String {
        let hex = format!("{:016x}{:016x}", self.next(), self.next());
        format!("GPU-{}-{}-{}-{}-{}", &hex[..8], &hex[8..12], &hex[12..16], &hex[16..20], &hex[20..])
    }

    /// A serial number of thirteen digits.
    pub(super) fn serial(&mut self) -> String {
        format!("1{:012}", self.next() % 1_000_000_000_000)
    }
}

/// A number that nobody can tell beforehand: the standard library's maps are seeded so.
pub(super) fn unforeseen() -> u64 {
    use std::hash::{BuildHasher, Hasher, RandomState};
    RandomState::new().build_hasher().finish()
}
