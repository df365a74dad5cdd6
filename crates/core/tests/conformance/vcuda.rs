//! gpu-manager's allocator and gpu-admission's extender.

use crate::test_cluster::*;
use partage_core::model::{MemoryAsk, PlacementPolicy, WantedGpus};
use partage_core::place::NodeIndex;
use partage_core::place::gpu_order;

const GIB: u64 = 1024;

fn whole_gpus(count: u32) -> WantedGpus {
    WantedGpus { count, share: whole(MemoryAsk::All) }
}

/// Upstream's LINK allocator: the best-connected set of several whole GPUs.
fn link(cluster: &mut TestCluster, count: u32) -> Vec<usize> {
    cluster.preview(whole_gpus(count))
}

/// Upstream's FRAGMENT allocator: whole GPUs from the group with the fewest spare GPUs.
fn fragment(cluster: &TestCluster, count: u32) -> Vec<usize> {
    let capacity = &cluster.ledger.cluster().node_capacity(NodeIndex(0));
    let free = capacity.gpus.iter().enumerate().filter(|(_, gpu)| gpu.is_free());
    let mask = free.fold(0u64, |mask, (index, _)| mask | 1 << index);
    gpu_order::leftover_set(capacity, mask, count)
        .map(|set| gpu_order::indexes(set).collect())
        .unwrap_or_default()
}

fn topology(node: partage_core::model::Node, busy: &[usize]) -> TestCluster {
    let mut cluster = TestCluster::new(PlacementPolicy::Topology, [node]);
    for &gpu in busy {
        cluster.occupy(gpu, whole_gpus(1));
    }
    cluster
}

#[test]
fn t1_available_gpus_follow_occupation() {
    let mut cluster = topology(s6(GIB), &[]);
    let available = |cluster: &TestCluster| {
        cluster.ledger.cluster().node_capacity(NodeIndex(0)).gpus.iter().filter(|gpu| gpu.is_free()).count()
    };
    assert_eq!(available(&cluster), 6);
    for want in [vcuda(50, 1), vcuda(100, 0)] {
        assert_eq!(cluster.gpus("p", want).len(), 1);
        assert_eq!(available(&cluster), 5);
        cluster.delete("p");
        assert_eq!(available(&cluster), 6);
    }
}

#[test]
fn l1_three_of_a_fresh_node() {
    assert_eq!(link(&mut topology(s6(GIB), &[]), 3), [0, 1, 2]);
}

#[test]
fn l2_two_with_gpu_2_busy() {
    assert_eq!(link(&mut topology(s6(GIB), &[2]), 2), [0, 1]);
}

#[test]
fn l3_every_size_of_a_fresh_node() {
    let mut cluster = topology(s6(GIB), &[]);
    assert_eq!(link(&mut cluster, 2), [0, 1]);
    assert_eq!(link(&mut cluster, 4), [0, 1, 2, 3]);
    assert_eq!(link(&mut cluster, 5), [0, 1, 2, 3, 4]);
    assert_eq!(link(&mut cluster, 6), [0, 1, 2, 3, 4, 5]);
    assert_eq!(link(&mut cluster, 7), NOWHERE);
}

#[test]
fn l4_shared_gpu_is_not_taken_as_whole() {
    let mut cluster = topology(s6(GIB), &[]);
    cluster.occupy(0, vcuda(30, 1));
    assert_eq!(link(&mut cluster, 2), [2, 3]);
    // Upstream takes the lowest indexes (1,2,3,4); two pairs behind one switch each are better connected.
    assert_eq!(link(&mut cluster, 4), [2, 3, 4, 5]);
    assert_eq!(link(&mut cluster, 5), [1, 2, 3, 4, 5]);
    assert_eq!(link(&mut cluster, 6), NOWHERE);
}

#[test]
fn l5_one_of_each_pair_left() {
    let mut cluster = topology(s6(GIB), &[0, 2, 4]);
    assert_eq!(link(&mut cluster, 2), [1, 3]);
    assert_eq!(link(&mut cluster, 3), [1, 3, 5]);
}

#[test]
fn l7_eight_gpus() {
    let mut fresh = topology(s8(GIB), &[]);
    assert_eq!(link(&mut fresh, 2), [0, 1]);
    assert_eq!(link(&mut fresh, 3), [0, 1, 2]);
    assert_eq!(link(&mut fresh, 4), [0, 1, 2, 3]);
    assert_eq!(link(&mut fresh, 8), [0, 1, 2, 3, 4, 5, 6, 7]);
    let mut one_busy = topology(s8(GIB), &[1]);
    assert_eq!(link(&mut one_busy, 2), [2, 3]);
    assert_eq!(link(&mut one_busy, 3), [0, 2, 3]);
    assert_eq!(link(&mut one_busy, 4), [4, 5, 6, 7]);
}

#[test]
fn f1_two_of_a_fresh_node() {
    assert_eq!(fragment(&topology(s6(GIB), &[]), 2), [4, 5]);
}

#[test]
fn f2_one_with_gpu_4_busy() {
    assert_eq!(fragment(&topology(s6(GIB), &[4]), 1), [5]);
}

#[test]
fn f3_the_only_gpu() {
    assert_eq!(topology(node("one", &[GIB]), &[]).preview(whole_gpus(1)), [0]);
}

#[test]
fn f4_to_f8_larger_groups_stay_whole() {
    assert_eq!(fragment(&topology(s6(GIB), &[]), 1), [4]);
    let mut shared = topology(s6(GIB), &[]);
    shared.occupy(0, vcuda(30, 1));
    assert_eq!(shared.preview(whole_gpus(1)), [4]);
    assert_eq!(fragment(&topology(s6(GIB), &[0, 2, 4]), 1), [5]);
    assert_eq!(fragment(&topology(s6(GIB), &[5]), 1), [4]);
    assert_eq!(fragment(&topology(s8(GIB), &[]), 1), [0]);
    assert_eq!(fragment(&topology(s8(GIB), &[1]), 1), [0]);
    let mut two_shared = topology(s8(GIB), &[]);
    two_shared.occupy(0, vcuda(30, 1));
    two_shared.occupy(5, vcuda(30, 1));
    assert_eq!(two_shared.preview(whole_gpus(1)), [1]);
}

#[test]
fn s1_s2_s3_used_gpu_is_filled_before_an_empty_one() {
    let mut cluster = topology(s6(GIB), &[]);
    assert_eq!(cluster.gpus("a", vcuda(50, 1)), [0]);
    assert_eq!(cluster.preview(vcuda(60, 1)), [1]);
    assert_eq!(cluster.preview(vcuda(50, 1)), [0]);
    assert_eq!(cluster.preview(vcuda(40, 1)), [0]);
}

#[test]
fn s4_memory_breaks_ties_of_equal_cores() {
    let mut cluster = topology(s6(GIB), &[0, 2, 4, 5]);
    cluster.occupy(3, vcuda(40, 3));
    cluster.occupy(1, vcuda(40, 1));
    assert_eq!(cluster.preview(vcuda(30, 1)), [3]);
    assert_eq!(cluster.preview(vcuda(30, 2)), [1]);
}

#[test]
fn s5_s6_share_that_fits_nowhere_is_refused() {
    let mut cluster = topology(s8(GIB), &[]);
    cluster.occupy(0, vcuda(30, 1));
    cluster.occupy(5, vcuda(30, 1));
    assert_eq!(cluster.preview(vcuda(30, 1)), [0]);
    assert_eq!(cluster.preview(vcuda(80, 1)), [1]);
    assert_eq!(cluster.preview(vcuda(10, 5)), NOWHERE);
}

#[test]
fn a1_sequence() {
    let mut cluster = topology(s6(GIB), &[]);
    assert_eq!(cluster.gpus("p1", vcuda(300, 3)), [0, 1, 2]);
    let (_, p2) = cluster.place("p2", &pod(&[vcuda(100, 1), vcuda(100, 1)])).unwrap();
    assert_eq!(p2, [[3], [4]]);
    assert_eq!(cluster.gpus("p3", vcuda(100, 1)), [5]);
    cluster.delete("p2");
    assert_eq!(cluster.gpus("p4", vcuda(50, 1)), [3]);
    assert_eq!(cluster.gpus("p5", vcuda(60, 1)), [4]);
    assert_eq!(cluster.gpus("p6", vcuda(50, 1)), [3]);
    cluster.delete("p5");
    assert_eq!(cluster.gpus("p7", vcuda(100, 1)), [4]);
    let capacity = &cluster.ledger.cluster().node_capacity(NodeIndex(0));
    assert!(capacity.gpus.iter().all(|gpu| gpu.free_cores().as_millipercent() == 0));
}

#[test]
fn d1_to_d7_admission() {
    let nodes = ["testnode0", "testnode1", "testnode2"].map(|name| node(name, &[4 * 256, 4 * 256]));
    let mut cluster = TestCluster::new(PlacementPolicy::Binpack, nodes);
    let place =
        |cluster: &mut TestCluster, name: &str, wants: &[WantedGpus]| cluster.place(name, &pod(wants));
    let at =
        |node: &str, gpus: &[&[usize]]| Some((node.to_string(), gpus.iter().map(|g| g.to_vec()).collect()));
    assert_eq!(place(&mut cluster, "d1", &[vcuda(10, 1), vcuda(10, 1)]), at("testnode0", &[&[0], &[0]]));
    assert_eq!(place(&mut cluster, "d2", &[vcuda(100, 3), vcuda(80, 3)]), at("testnode1", &[&[0], &[1]]));
    assert_eq!(place(&mut cluster, "d3", &[vcuda(200, 10)]), at("testnode2", &[&[0, 1]]));
    assert_eq!(place(&mut cluster, "d4", &[vcuda(10, 2)]), at("testnode0", &[&[0]]));
    assert_eq!(place(&mut cluster, "d5", &[vcuda(90, 2)]), at("testnode0", &[&[1]]));
    assert_eq!(place(&mut cluster, "d6", &[vcuda(20, 1)]), at("testnode1", &[&[1]]));
    for (name, want) in [("a", vcuda(20, 2)), ("b", vcuda(100, 0)), ("c", vcuda(50, 5)), ("d", vcuda(300, 0))]
    {
        assert_eq!(place(&mut cluster, name, &[want]), None, "d7 {name}");
    }
}

/// Upstream can lose a reservation when its informer lags. Here it is recorded immediately.
#[test]
fn d11_burst_of_pods_never_over_commits() {
    let mut cluster = TestCluster::new(PlacementPolicy::Binpack, [node("n", &[4 * 256, 4 * 256])]);
    let placed = (0..50).filter(|i| !cluster.gpus(&format!("p{i}"), vcuda(30, 1)).is_empty()).count();
    assert_eq!(placed, 6);
    assert_eq!(cluster.ledger.audit(), []);
}

/// The memory limit of a whole GPU is part of its share (upstream ignores it).
#[test]
fn memory_limit_of_whole_gpu_is_in_its_share() {
    let mut cluster = TestCluster::new(PlacementPolicy::Topology, [node("n", &[16 * GIB])]);
    cluster.place("p", &pod(&[vcuda(100, 8)])).unwrap();
    let share = &cluster.ledger.held(&id("p").uid).unwrap().grant.grants[0].shares[0];
    assert_eq!(share.memory_bytes.unwrap().0, 2 << 30);
    assert!(share.whole);
}

/// Upstream counts memory in blocks of 256 MiB, so its GPUs of less than 1 KiB are equal and the lowest index is first.
/// Here bytes are counted, and the fullest GPU is first.
#[test]
fn t2_fullest_gpu_is_first() {
    let mut cards = s6(1);
    for (index, gpu) in cards.gpus.iter_mut().enumerate() {
        gpu.memory_bytes = partage_core::model::Bytes(1024 - index as u64);
    }
    let cluster = topology(cards, &[5]);
    let cluster = cluster.ledger.cluster();
    let gpus = &cluster.node_capacity(NodeIndex(0)).gpus;
    let mut order: Vec<usize> = (0..6).collect();
    order.sort_by_key(|&gpu| (gpu_order::fullness(&gpus[gpu], cluster.classes()), gpu));
    assert_eq!(order, [5, 4, 3, 2, 1, 0]);
}
