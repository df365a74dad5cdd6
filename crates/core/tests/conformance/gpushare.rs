//! Aliyun gpushare: best fit by memory.

use crate::world::*;
use partage_core::model::Policy;

/// A node of 16 GiB cards with so much free on each, and where `asked` goes.
fn best_fit(free: &[u64], asked: u64) -> Option<usize> {
    let mut world = World::new(Policy::Binpack, [node("n", &vec![16276; free.len()])]);
    for (gpu, free) in free.iter().enumerate() {
        if *free < 16276 {
            world.occupy(gpu, memory(1, 16276 - free));
        }
    }
    world.would(memory(1, asked)).first().copied()
}

#[test]
fn b01_no_gpu_has_enough_though_the_node_does_not_either() {
    assert_eq!(best_fit(&[0, 4069], 8138), None);
}

#[test]
fn b02_the_sum_would_do_but_no_single_gpu() {
    assert_eq!(best_fit(&[4069, 4069], 8138), None);
}

#[test]
fn b03_the_one_that_fits_exactly() {
    assert_eq!(best_fit(&[8138, 0], 8138), Some(0));
}

#[test]
fn b04_the_tightest_of_several() {
    assert_eq!(best_fit(&[12207, 8138, 4069, 16276], 8138), Some(1));
}

#[test]
fn b05_ties_go_to_the_lowest() {
    assert_eq!(best_fit(&[5, 5, 9], 5), Some(0));
}

#[test]
fn b06_parts_are_not_added_up() {
    assert_eq!(best_fit(&[4, 4], 8), None);
}

/// Upstream fails on two containers; with us each gets its own amount.
#[test]
fn b40_two_containers_on_one_gpu() {
    let mut world = World::new(Policy::Binpack, [node("n", &[16276, 16276])]);
    let mut ask = pod(&[memory(1, 1024), memory(1, 2048)]);
    ask.constraints.together = partage_core::model::Together::Preferred;
    let (_, gpus) = world.place("p", &ask).unwrap();
    assert_eq!(gpus, [[0], [0]]);
}

/// Different cards keep their own sizes (upstream counts the first one's for all).
#[test]
fn b31_mixed_cards() {
    let mut world = World::new(Policy::Binpack, [node("n", &[12 * 1024, 16 * 1024])]);
    assert_eq!(world.would(memory(1, 14 * 1024)), [1]);
    assert_eq!(world.would(memory(1, 12 * 1024)), [0]);
}
