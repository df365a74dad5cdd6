//! Whatever the files hold: nobody who reads them panics, crashes or goes on for ever.
#![allow(clippy::unwrap_used, clippy::expect_used)]

#[path = "support/hostile.rs"]
mod hostile;

use hostile::{live, make, open, spoil};
use partage_region::{RegionTenant, UNIT, UsageReader};
use proptest::prelude::*;
use std::sync::atomic::{AtomicBool, Ordering};

fn amounts() -> impl Strategy<Value = [u64; 4]> {
    let amount = prop_oneof![Just(0), Just(1), Just(UNIT), 0..200 * UNIT, any::<u64>(), Just(u64::MAX)];
    [amount.clone(), amount.clone(), amount.clone(), amount]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(96))]

    #[test]
    fn any_contents_are_survived(
        layout in 1..=2u32,
        bytes in prop::collection::vec(any::<u8>(), 0..1024),
        amounts in amounts(),
    ) {
        let folder = tempfile::tempdir().unwrap();
        let _owner = make(folder.path(), layout);
        let files = open(folder.path());
        spoil(&files, &bytes);
        live(folder.path(), amounts);
        // And once more over what that left.
        spoil(&files, &bytes);
        live(folder.path(), amounts);
    }

    /// Cut at any length.
    #[test]
    fn any_length_is_refused_or_whole(
        layout in 1..=2u32,
        length in 0..2_400_000u64,
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
        live(folder.path(), amounts);
    }
}

/// A hostile neighbour in the same container writes all over the file while a victim works.
#[test]
fn a_victim_outlives_a_hostile_neighbour() {
    let folder = tempfile::tempdir().unwrap();
    let _owner = make(folder.path(), 2);
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
                // Only `usage`, and not its first words: it must be worth attaching to.
                order[0] |= 0b1001;
                spoil(&files, &order);
            }
        });
        let victim = RegionTenant::attach(folder.path()).unwrap();
        for round in 0..150u64 {
            let bytes = round % 50 * UNIT;
            if victim.reserve(0, bytes).is_ok() {
                victim.release(0, bytes);
            }
            live(folder.path(), [round, round * UNIT, 1, UNIT]);
        }
        done.store(true, Ordering::Relaxed);
    });
}
