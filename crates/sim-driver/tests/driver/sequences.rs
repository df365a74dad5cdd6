//! Calls in any order: see `support/sequence.rs`. `make fuzz` looks further than this.

use super::*;
use crate::node::Node;
use crate::sequence;
use partage_driver_api::exports::DriverVersion;

#[test]
fn no_sequence_of_calls_crashes_hangs_or_leaks() {
    let node = Node::new("A100-SXM4-40GB", 2, DriverVersion::R550);
    for seed in 0..4 {
        node.play(&format!("sequences {seed}"));
    }
}

pub fn client(arguments: &[&str]) {
    let [seed] = arguments else { panic!("{arguments:?}") };
    let cuda = Cuda::started();
    let observer =
        partage_sim_node::state::State::attach(std::env::var("PARTAGE_SIM_DIR").unwrap().as_ref()).unwrap();
    let mut random = seed.parse::<u64>().unwrap().wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    for round in 0..120 {
        let bytes: Vec<u8> = (0..600)
            .map(|_| {
                random ^= random << 13;
                random ^= random >> 7;
                random ^= random << 17;
                (random >> 24) as u8
            })
            .collect();
        // SAFETY: the driver is started, and this thread is alone.
        unsafe { sequence::run(&cuda, &bytes) };
        let left = [0, 1].map(|gpu| observer.used_memory(gpu));
        assert_eq!(left, [0, 0], "round {round}");
    }
}
