//! Calls in any order, as the simulated driver's own tests make them: afterwards nothing is left in the account.

use super::*;

#[test]
fn account_is_exact_after_any_sequence_of_calls() {
    let node = node();
    let container = TestContainer::with_memory(&node, 20 << 30);
    for seed in 0..4 {
        container.run_role(&format!("sequences {seed}"));
    }
}

pub fn client(arguments: &[&str]) {
    let [seed] = arguments else { panic!("{arguments:?}") };
    let cuda = CudaLibrary::started();
    let observer = Observer::new();
    let mut random = seed.parse::<u64>().unwrap().wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    for round in 0..50 {
        let bytes: Vec<u8> = (0..600)
            .map(|_| {
                random ^= random << 13;
                random ^= random >> 7;
                random ^= random << 17;
                (random >> 24) as u8
            })
            .collect();
        // SAFETY: the driver is initialized, and only this thread uses it.
        unsafe { sequence::run(&cuda, &bytes) };
        observer.assert_exact(&format!("round {round}"));
        assert_eq!([0, 1].map(|gpu| observer.used(gpu)), [0, 0], "round {round}");
    }
}
