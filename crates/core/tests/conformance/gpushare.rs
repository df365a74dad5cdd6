//! Aliyun gpushare: best fit by memory.

use crate::test_cluster::*;
use partage_core::model::PlacementPolicy;

/// Returns the GPU that is chosen for `requested` GiB on a node of 16 GiB GPUs with this much free memory each.
fn best_fit(free: &[u64], requested: u64) -> Option<usize> {
    let mut cluster = TestCluster::new(PlacementPolicy::Binpack, [node("n", &vec![16276; free.len()])]);
    for (gpu, free) in free.iter().enumerate() {
        if *free < 16276 {
            cluster.occupy(gpu, memory(1, 16276 - free));
        }
    }
    cluster.preview(memory(1, requested)).first().copied()
}

#[test]
fn b01_no_gpu_has_enough_memory() {
    assert_eq!(best_fit(&[0, 4069], 8138), None);
}

#[test]
fn b02_sum_is_enough_but_no_single_gpu() {
    assert_eq!(best_fit(&[4069, 4069], 8138), None);
}

#[test]
fn b03_exact_fit_is_chosen() {
    assert_eq!(best_fit(&[8138, 0], 8138), Some(0));
}

#[test]
fn b04_tightest_gpu_is_chosen() {
    assert_eq!(best_fit(&[12207, 8138, 4069, 16276], 8138), Some(1));
}

#[test]
fn b05_lowest_index_breaks_ties() {
    assert_eq!(best_fit(&[5, 5, 9], 5), Some(0));
}

#[test]
fn b06_free_memory_of_gpus_is_not_added() {
    assert_eq!(best_fit(&[4, 4], 8), None);
}

/// Upstream fails with two containers. Here each gets its amount.
#[test]
fn b40_two_containers_share_one_gpu() {
    let mut cluster = TestCluster::new(PlacementPolicy::Binpack, [node("n", &[16276, 16276])]);
    let mut ask = pod(&[memory(1, 1024), memory(1, 2048)]);
    ask.constraints.colocation = partage_core::model::Colocation::Preferred;
    let (_, gpus) = cluster.place("p", &ask).unwrap();
    assert_eq!(gpus, [[0], [0]]);
}

/// GPUs of different sizes are counted correctly (upstream uses the size of the first for all).
#[test]
fn b31_gpus_of_different_sizes() {
    let mut cluster = TestCluster::new(PlacementPolicy::Binpack, [node("n", &[12 * 1024, 16 * 1024])]);
    assert_eq!(cluster.preview(memory(1, 14 * 1024)), [1]);
    assert_eq!(cluster.preview(memory(1, 12 * 1024)), [0]);
}
