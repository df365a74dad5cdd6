//! gpu-manager's allocator and gpu-admission's extender.

use crate::world::*;
use partage_core::model::{MemoryAsk, Policy, WantedGpus};
use partage_core::place::NodeIndex;
use partage_core::place::gpu_order;

const GIB: u64 = 1024;

fn whole_gpus(count: u32) -> WantedGpus {
    WantedGpus { count, part: whole(MemoryAsk::All) }
}

/// Upstream's LINK: the best-connected set for several whole GPUs.
fn link(world: &mut World, count: u32) -> Vec<usize> {
    world.would(whole_gpus(count))
}

/// Upstream's FRAGMENT: whole GPUs from the group that has the fewest to spare.
fn fragment(world: &World, count: u32) -> Vec<usize> {
    let capacity = &world.ledger.cluster().node_capacity(NodeIndex(0));
    let free = capacity.gpus.iter().enumerate().filter(|(_, gpu)| gpu.is_free());
    let mask = free.fold(0u64, |mask, (index, _)| mask | 1 << index);
    gpu_order::leftover_set(capacity, mask, count)
        .map(|set| gpu_order::indexes(set).collect())
        .unwrap_or_default()
}

fn topology(node: partage_core::model::Node, busy: &[usize]) -> World {
    let mut world = World::new(Policy::Topology, [node]);
    for &gpu in busy {
        world.occupy(gpu, whole_gpus(1));
    }
    world
}

#[test]
fn t1_available_gpus_follow_occupation() {
    let mut world = topology(s6(GIB), &[]);
    let available = |world: &World| {
        world.ledger.cluster().node_capacity(NodeIndex(0)).gpus.iter().filter(|gpu| gpu.is_free()).count()
    };
    assert_eq!(available(&world), 6);
    for want in [vcuda(50, 1), vcuda(100, 0)] {
        assert_eq!(world.gpus("p", want).len(), 1);
        assert_eq!(available(&world), 5);
        world.delete("p");
        assert_eq!(available(&world), 6);
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
    let mut world = topology(s6(GIB), &[]);
    assert_eq!(link(&mut world, 2), [0, 1]);
    assert_eq!(link(&mut world, 4), [0, 1, 2, 3]);
    assert_eq!(link(&mut world, 5), [0, 1, 2, 3, 4]);
    assert_eq!(link(&mut world, 6), [0, 1, 2, 3, 4, 5]);
    assert_eq!(link(&mut world, 7), NOWHERE);
}

#[test]
fn l4_a_shared_gpu_is_not_whole() {
    let mut world = topology(s6(GIB), &[]);
    world.occupy(0, vcuda(30, 1));
    assert_eq!(link(&mut world, 2), [2, 3]);
    // Upstream takes the lowest indexes (1,2,3,4); two pairs behind one switch each are better connected.
    assert_eq!(link(&mut world, 4), [2, 3, 4, 5]);
    assert_eq!(link(&mut world, 5), [1, 2, 3, 4, 5]);
    assert_eq!(link(&mut world, 6), NOWHERE);
}

#[test]
fn l5_one_of_each_pair_left() {
    let mut world = topology(s6(GIB), &[0, 2, 4]);
    assert_eq!(link(&mut world, 2), [1, 3]);
    assert_eq!(link(&mut world, 3), [1, 3, 5]);
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
    assert_eq!(topology(node("one", &[GIB]), &[]).would(whole_gpus(1)), [0]);
}

#[test]
fn f4_to_f8_leave_larger_groups_whole() {
    assert_eq!(fragment(&topology(s6(GIB), &[]), 1), [4]);
    let mut shared = topology(s6(GIB), &[]);
    shared.occupy(0, vcuda(30, 1));
    assert_eq!(shared.would(whole_gpus(1)), [4]);
    assert_eq!(fragment(&topology(s6(GIB), &[0, 2, 4]), 1), [5]);
    assert_eq!(fragment(&topology(s6(GIB), &[5]), 1), [4]);
    assert_eq!(fragment(&topology(s8(GIB), &[]), 1), [0]);
    assert_eq!(fragment(&topology(s8(GIB), &[1]), 1), [0]);
    let mut two_shared = topology(s8(GIB), &[]);
    two_shared.occupy(0, vcuda(30, 1));
    two_shared.occupy(5, vcuda(30, 1));
    assert_eq!(two_shared.would(whole_gpus(1)), [1]);
}

#[test]
fn s1_s2_s3_share_fills_before_it_opens() {
    let mut world = topology(s6(GIB), &[]);
    assert_eq!(world.gpus("a", vcuda(50, 1)), [0]);
    assert_eq!(world.would(vcuda(60, 1)), [1]);
    assert_eq!(world.would(vcuda(50, 1)), [0]);
    assert_eq!(world.would(vcuda(40, 1)), [0]);
}

#[test]
fn s4_memory_decides_among_equal_cores() {
    let mut world = topology(s6(GIB), &[0, 2, 4, 5]);
    world.occupy(3, vcuda(40, 3));
    world.occupy(1, vcuda(40, 1));
    assert_eq!(world.would(vcuda(30, 1)), [3]);
    assert_eq!(world.would(vcuda(30, 2)), [1]);
}

#[test]
fn s5_s6_what_fits_nowhere_is_refused() {
    let mut world = topology(s8(GIB), &[]);
    world.occupy(0, vcuda(30, 1));
    world.occupy(5, vcuda(30, 1));
    assert_eq!(world.would(vcuda(30, 1)), [0]);
    assert_eq!(world.would(vcuda(80, 1)), [1]);
    assert_eq!(world.would(vcuda(10, 5)), NOWHERE);
}

#[test]
fn a1_sequence() {
    let mut world = topology(s6(GIB), &[]);
    assert_eq!(world.gpus("p1", vcuda(300, 3)), [0, 1, 2]);
    let (_, p2) = world.place("p2", &pod(&[vcuda(100, 1), vcuda(100, 1)])).unwrap();
    assert_eq!(p2, [[3], [4]]);
    assert_eq!(world.gpus("p3", vcuda(100, 1)), [5]);
    world.delete("p2");
    assert_eq!(world.gpus("p4", vcuda(50, 1)), [3]);
    assert_eq!(world.gpus("p5", vcuda(60, 1)), [4]);
    assert_eq!(world.gpus("p6", vcuda(50, 1)), [3]);
    world.delete("p5");
    assert_eq!(world.gpus("p7", vcuda(100, 1)), [4]);
    let capacity = &world.ledger.cluster().node_capacity(NodeIndex(0));
    assert!(capacity.gpus.iter().all(|gpu| gpu.free_cores().as_millipercent() == 0));
}

#[test]
fn d1_to_d7_admission() {
    let nodes = ["testnode0", "testnode1", "testnode2"].map(|name| node(name, &[4 * 256, 4 * 256]));
    let mut world = World::new(Policy::Binpack, nodes);
    let place = |world: &mut World, name: &str, wants: &[WantedGpus]| world.place(name, &pod(wants));
    let at =
        |node: &str, gpus: &[&[usize]]| Some((node.to_string(), gpus.iter().map(|g| g.to_vec()).collect()));
    assert_eq!(place(&mut world, "d1", &[vcuda(10, 1), vcuda(10, 1)]), at("testnode0", &[&[0], &[0]]));
    assert_eq!(place(&mut world, "d2", &[vcuda(100, 3), vcuda(80, 3)]), at("testnode1", &[&[0], &[1]]));
    assert_eq!(place(&mut world, "d3", &[vcuda(200, 10)]), at("testnode2", &[&[0, 1]]));
    assert_eq!(place(&mut world, "d4", &[vcuda(10, 2)]), at("testnode0", &[&[0]]));
    assert_eq!(place(&mut world, "d5", &[vcuda(90, 2)]), at("testnode0", &[&[1]]));
    assert_eq!(place(&mut world, "d6", &[vcuda(20, 1)]), at("testnode1", &[&[1]]));
    for (name, want) in [("a", vcuda(20, 2)), ("b", vcuda(100, 0)), ("c", vcuda(50, 5)), ("d", vcuda(300, 0))]
    {
        assert_eq!(place(&mut world, name, &[want]), None, "d7 {name}");
    }
}

/// Upstream's one-node answer lost its reservation on informer lag; ours is taken at once.
#[test]
fn d11_a_burst_never_over_commits() {
    let mut world = World::new(Policy::Binpack, [node("n", &[4 * 256, 4 * 256])]);
    let placed = (0..50).filter(|i| !world.gpus(&format!("p{i}"), vcuda(30, 1)).is_empty()).count();
    assert_eq!(placed, 6);
    assert_eq!(world.ledger.audit(), []);
}

/// A whole card's memory limit is carried into its share (upstream ignores it).
#[test]
fn whole_card_memory_limit_is_carried() {
    let mut world = World::new(Policy::Topology, [node("n", &[16 * GIB])]);
    world.place("p", &pod(&[vcuda(100, 8)])).unwrap();
    let share = &world.ledger.held(&id("p").uid).unwrap().grant.grants[0].shares[0];
    assert_eq!(share.memory_bytes.unwrap().0, 2 << 30);
    assert!(share.whole);
}

/// Upstream counts memory in blocks of 256 MiB, so that its cards of a little under 1 KiB tie and the lowest
/// comes first; ours counts bytes, and the fullest comes first to the byte.
#[test]
fn t2_the_fullest_first() {
    let mut cards = s6(1);
    for (index, gpu) in cards.gpus.iter_mut().enumerate() {
        gpu.memory_bytes = partage_core::model::Bytes(1024 - index as u64);
    }
    let world = topology(cards, &[5]);
    let cluster = world.ledger.cluster();
    let gpus = &cluster.node_capacity(NodeIndex(0)).gpus;
    let mut order: Vec<usize> = (0..6).collect();
    order.sort_by_key(|&gpu| (gpu_order::fullness(&gpus[gpu], cluster.classes()), gpu));
    assert_eq!(order, [5, 4, 3, 2, 1, 0]);
}
