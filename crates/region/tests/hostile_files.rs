//! Whatever the files contain, no reader panics, crashes or loops forever.
#![allow(clippy::unwrap_used, clippy::expect_used)]

#[path = "support/hostile.rs"]
mod hostile;

use hostile::{corrupt, make, open, use_region};
use partage_region::{MEMORY_UNIT, RegionTenant, UsageReader};
use proptest::prelude::*;
use std::sync::atomic::{AtomicBool, Ordering};

fn amounts() -> impl Strategy<Value = [u64; 4]> {
    let amount =
        prop_oneof![Just(0), Just(1), Just(MEMORY_UNIT), 0..200 * MEMORY_UNIT, any::<u64>(), Just(u64::MAX)];
    [amount.clone(), amount.clone(), amount.clone(), amount]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(96))]

    #[test]
    fn arbitrary_contents_are_survived(
        layout in 1..=3u32,
        bytes in prop::collection::vec(any::<u8>(), 0..1024),
        amounts in amounts(),
    ) {
        let folder = tempfile::tempdir().unwrap();
        let _owner = make(folder.path(), layout);
        let files = open(folder.path());
        corrupt(&files, &bytes);
        use_region(folder.path(), amounts);
        // Repeated on what the first use left behind.
        corrupt(&files, &bytes);
        use_region(folder.path(), amounts);
    }

    /// Truncates a file to any length.
    #[test]
    fn truncated_files_are_refused(
        layout in 1..=3u32,
        length in 0..3_500_000u64,
        limits in any::<bool>(),
        amounts in amounts(),
    ) {
        let folder = tempfile::tempdir().unwrap();
        let _owner = make(folder.path(), layout);
        let file = &open(folder.path())[usize::from(!limits)];
        let whole = file.metadata().unwrap().len();
        let length = if limits { length % (whole + 1) } else { length };
        file.set_len(length).unwrap();
        prop_assert_eq!(RegionTenant::attach(folder.path()).is_ok(), length >= whole);
        if !limits {
            prop_assert_eq!(UsageReader::open(folder.path()).is_ok(), length >= whole);
        }
        use_region(folder.path(), amounts);
    }
}

/// A hostile process in the same container writes all over the file while a victim works.
#[test]
fn victim_survives_a_hostile_neighbor() {
    let folder = tempfile::tempdir().unwrap();
    let _owner = make(folder.path(), 3);
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let files = open(folder.path());
            let mut random = 0x9e37_79b9_7f4a_7c15u64;
            while !done.load(Ordering::Relaxed) {
                let mut order = [0; 16];
                for half in order.chunks_exact_mut(8) {
                    random = random
                        .wrapping_mul(6_364_136_223_846_793_005)
                        .wrapping_add(1_442_695_040_888_963_407);
                    half.copy_from_slice(&(random ^ random >> 29).to_le_bytes());
                }
                // Only `usage`, and not its first words: attaching must succeed.
                order[0] |= 0b1001;
                corrupt(&files, &order);
            }
        });
        let victim = RegionTenant::attach(folder.path()).unwrap();
        for round in 0..150u64 {
            let bytes = round % 50 * MEMORY_UNIT;
            if victim.reserve(0, bytes).is_ok() {
                victim.release(0, bytes);
            }
            use_region(folder.path(), [round, round * MEMORY_UNIT, 1, MEMORY_UNIT]);
        }
        done.store(true, Ordering::Relaxed);
    });
}
