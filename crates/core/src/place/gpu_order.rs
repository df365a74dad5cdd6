//! The order of a node's GPUs: for single shares, and sets for several GPUs at once.
//!
//! Sets of GPUs are bit masks. Two ways to choose a set use the topology of the node: [`linked_set`] takes the
//! best-connected GPUs, [`leftover_set`] takes them from the smallest group that has enough, so that larger groups stay
//! whole for pods that need them.

use super::capacity::{GpuCapacity, GpuClass, NodeCapacity};
use super::fit::{PreparedAsk, PreparedWant};
use crate::model::{GpuLink, MAX_GPUS_PER_NODE};
use std::cmp::Reverse;

/// Maximum number of sets that are compared one by one. Beyond it, one set is grown from each GPU by adding the closest
/// GPU repeatedly.
const MAX_COMPARED_SETS: u64 = 2000;

/// Returns the GPUs that a share of `wanted` fits now.
pub fn fitting(
    capacity: &NodeCapacity,
    classes: &[GpuClass],
    prepared: &PreparedAsk,
    wanted: &PreparedWant,
) -> u64 {
    let uuids = &prepared.ask.constraints.uuids;
    let mut mask = 0;
    for (index, gpu) in capacity.gpus.iter().enumerate().take(MAX_GPUS_PER_NODE) {
        let fits = wanted.needs[usize::from(gpu.class)]
            .is_some_and(|need| need.fits(gpu, &classes[usize::from(gpu.class)]));
        if fits && (uuids.is_open() || uuids.admits_uuid(capacity.node.gpus[index].uuid.as_str())) {
            mask |= 1 << index;
        }
    }
    mask
}

/// Returns the indexes in a mask, lowest first.
pub fn indexes(mut mask: u64) -> impl Iterator<Item = usize> + Clone {
    std::iter::from_fn(move || {
        (mask != 0).then(|| {
            let index = mask.trailing_zeros() as usize;
            mask &= mask - 1;
            index
        })
    })
}

/// Returns the `count` lowest GPUs of a mask, or `None` if it has fewer.
pub fn lowest(mask: u64, count: u32) -> Option<u64> {
    (mask.count_ones() >= count)
        .then(|| indexes(mask).take(count as usize).fold(0, |set, gpu| set | 1 << gpu))
}

/// Returns the first `count` GPUs of a list as a mask, or `None` if it has fewer.
pub fn first(gpus: &[usize], count: u32) -> Option<u64> {
    gpus.get(..count as usize).map(|gpus| gpus.iter().fold(0, |set, gpu| set | 1 << gpu))
}

/// Returns a sort key that puts the fullest GPU first: by free compute, then by free memory.
pub fn fullness(gpu: &GpuCapacity, classes: &[GpuClass]) -> impl Ord + use<> {
    (gpu.free_cores(), gpu.free_memory(&classes[usize::from(gpu.class)]))
}

/// Returns a sort key that puts the emptiest GPU first: by number of shares, then by most free.
pub fn emptiness(gpu: &GpuCapacity, classes: &[GpuClass]) -> impl Ord + use<> {
    (gpu.used.shares, Reverse(fullness(gpu, classes)))
}

/// Returns the best-connected `count` GPUs of a mask: the best worst link, then the best sum of links, then the group
/// with the fewest GPUs to spare, then the lowest `key`s, then the lowest indexes.
pub fn linked_set<K: Ord>(
    capacity: &NodeCapacity,
    mask: u64,
    count: u32,
    key: impl Fn(usize) -> K,
) -> Option<u64> {
    for (link, groups) in GpuLink::ALL.iter().zip(capacity.groups.iter()) {
        // GPUs that reach each other by links this good, directly or through others, are in one group, so a set whose
        // worst link is this good lies within one group.
        let large_enough = group_masks(groups, mask).filter(|group| group.count_ones() >= count);
        let sets = large_enough.flat_map(|group| {
            candidates(capacity, group, count).into_iter().map(move |set| (group.count_ones(), set))
        });
        let linked = sets.filter_map(|(spare, set)| {
            let (worst, sum) = links(capacity, set);
            (worst.is_none_or(|worst| worst <= *link)).then_some((sum, spare, set))
        });
        let keys = |set: u64| indexes(set).map(&key).collect::<Vec<K>>();
        let members = |set: u64| indexes(set).collect::<Vec<usize>>();
        let best = linked.min_by(|&(sum_a, spare_a, a), &(sum_b, spare_b, b)| {
            (sum_a, spare_a)
                .cmp(&(sum_b, spare_b))
                .then_with(|| keys(a).cmp(&keys(b)))
                .then_with(|| members(a).cmp(&members(b)))
        });
        if let Some((.., set)) = best {
            return Some(set);
        }
    }
    None
}

/// Returns the worst link within a set, and the sum of all its links, in which better links count less.
pub fn links(capacity: &NodeCapacity, set: u64) -> (Option<GpuLink>, usize) {
    let mut worst = None;
    let mut sum = 0;
    for a in indexes(set) {
        for b in indexes(set).take_while(|&b| b < a) {
            let link = capacity.node.link(a, b);
            worst = worst.max(Some(link));
            sum += link as usize;
        }
    }
    (worst, sum)
}

/// Returns the sets of `count` GPUs to compare: all of them, or one grown from each GPU if they are too many.
fn candidates(capacity: &NodeCapacity, group: u64, count: u32) -> Vec<u64> {
    if combinations(group.count_ones(), count) <= MAX_COMPARED_SETS {
        return subsets(group, count).collect();
    }
    let grown_from = |first: usize| {
        let mut set = 1u64 << first;
        while set.count_ones() < count {
            let cost = |gpu: usize| {
                let to_set = indexes(set).map(move |member| capacity.node.link(gpu, member));
                (to_set.clone().max(), to_set.map(|link| link as usize).sum::<usize>(), gpu)
            };
            let Some(next) = indexes(group & !set).min_by_key(|&gpu| cost(gpu)) else { break };
            set |= 1 << next;
        }
        set
    };
    indexes(group).map(grown_from).collect()
}

/// Returns how many sets of `count` there are among `members`, saturating.
fn combinations(members: u32, count: u32) -> u64 {
    let mut sets: u64 = 1;
    for at in 0..u64::from(count.min(members - count.min(members))) {
        sets = sets.saturating_mul(u64::from(members) - at) / (at + 1);
    }
    sets
}

/// Returns `count` GPUs of a mask from the group with the fewest GPUs to spare, from the outermost groups inwards, lowest
/// index first.
pub fn leftover_set(capacity: &NodeCapacity, mut mask: u64, count: u32) -> Option<u64> {
    for groups in capacity.groups.iter().rev() {
        let narrower = group_masks(groups, mask)
            .filter(|group| group.count_ones() >= count)
            .min_by_key(|group| (group.count_ones(), group.trailing_zeros()));
        match narrower {
            Some(group) => mask = group,
            None => break,
        }
    }
    lowest(mask, count)
}

/// Returns the members of each group that are in the mask.
fn group_masks(groups: &[u8], mask: u64) -> impl Iterator<Item = u64> {
    let mut left = mask;
    std::iter::from_fn(move || {
        let first = indexes(left).next()?;
        let group =
            indexes(left).filter(|&gpu| groups[gpu] == groups[first]).fold(0, |set, gpu| set | 1 << gpu);
        left &= !group;
        Some(group)
    })
}

/// Returns every set of `count` GPUs of a mask, in the order of their indexes.
pub fn subsets(mask: u64, count: u32) -> impl Iterator<Item = u64> {
    let members: Vec<usize> = indexes(mask).collect();
    let count = count as usize;
    let mut chosen: Option<Vec<usize>> = (count <= members.len()).then(|| (0..count).collect());
    std::iter::from_fn(move || {
        let current = chosen.take()?;
        let set = current.iter().fold(0u64, |set, &at| set | 1 << members[at]);
        let mut next = current;
        // Moves the rightmost position that can still move right; everything after it follows directly.
        if let Some(at) = (0..count).rev().find(|&at| next[at] + (count - at) < members.len()) {
            next[at] += 1;
            for after in at + 1..count {
                next[after] = next[after - 1] + 1;
            }
            chosen = Some(next);
        }
        Some(set)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn subsets_come_in_index_order_and_complete() {
        let sets: Vec<u64> = subsets(0b10110, 2).collect();
        assert_eq!(sets, [0b00110, 0b10010, 0b10100]);
        assert_eq!(subsets(0b111, 3).count(), 1);
        assert_eq!(subsets(0b11, 3).count(), 0);
        assert_eq!(subsets(0xff, 4).count(), 70);
        for (members, count) in [(8, 4), (3, 2), (5, 0), (5, 5), (16, 8)] {
            let all = subsets((1 << members) - 1, count).count() as u64;
            assert_eq!(combinations(members, count), all, "{count} of {members}");
        }
    }
}
