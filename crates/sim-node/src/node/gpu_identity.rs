//! Unique UUIDs and serial numbers of GPUs, derived from a seed: the same seed gives the same identities.

/// A `SplitMix64` generator of identities.
pub(super) struct IdentityGenerator(u64);

impl IdentityGenerator {
    /// Creates a generator for one GPU: `number` distinguishes the GPUs of a seed.
    pub(super) fn new(seed: u64, number: u64) -> IdentityGenerator {
        let mut random = IdentityGenerator(seed);
        let start = random.next() ^ number.wrapping_mul(0xA076_1D64_78BD_642F);
        IdentityGenerator(start)
    }

    pub(super) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        mixed ^ (mixed >> 31)
    }

    /// Generates a GPU's UUID. Like NVIDIA's, it has no version and no variant bits.
    pub(super) fn uuid(&mut self) -> String {
        let hex = format!("{:016x}{:016x}", self.next(), self.next());
        format!("GPU-{}-{}-{}-{}-{}", &hex[..8], &hex[8..12], &hex[12..16], &hex[16..20], &hex[20..])
    }

    /// Generates a serial number of thirteen digits.
    pub(super) fn serial(&mut self) -> String {
        format!("1{:012}", self.next() % 1_000_000_000_000)
    }
}

/// Returns a random number, from the randomness that seeds the standard library's maps.
pub(super) fn random_u64() -> u64 {
    use std::hash::{BuildHasher, Hasher, RandomState};
    RandomState::new().build_hasher().finish()
}
