//! Random call sequences: see `support/sequence.rs`. `make fuzz` explores more.

use super::*;
use crate::node::TestNode;
use crate::sequence;
use partage_driver_api::exports::DriverVersion;

#[test]
fn random_call_sequences_do_not_crash_hang_or_leak() {
    let node = TestNode::new("A100-SXM4-40GB", 2, DriverVersion::R550);
    for seed in 0..4 {
        node.run_role(&format!("sequences {seed}"));
    }
}

pub fn client(arguments: &[&str]) {
    let [seed] = arguments else { panic!("{arguments:?}") };
    let cuda = CudaLibrary::started();
    let observer =
        partage_sim_node::state::SimNodeState::attach(std::env::var("PARTAGE_SIM_DIR").unwrap().as_ref())
            .unwrap();
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
        // SAFETY: the driver is initialized, and no other thread uses it.
        unsafe { sequence::run(&cuda, &bytes) };
        let left = [0, 1].map(|gpu| observer.used_memory(gpu));
        assert_eq!(left, [0, 0], "round {round}");
    }
}
