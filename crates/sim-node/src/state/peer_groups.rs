//! Groups of kernels that wait for each other, on any GPU and in any process of the node.

use super::SimNodeState;
use std::sync::atomic::Ordering::{AcqRel, Acquire};

impl SimNodeState {
    /// Returns the index of the group with this key, which is created if necessary; `None` if the node has no more.
    pub fn open_peer_group(&self, key: u64) -> Option<usize> {
        let groups = &self.shared.header.peer_groups;
        // Zero marks an unused record.
        let key = key.max(1);
        (0..groups.len()).map(|step| (key as usize).wrapping_add(step) % groups.len()).find(|&index| {
            let found = groups[index].key.compare_exchange(0, key, AcqRel, Acquire);
            found.is_ok() || found == Err(key)
        })
    }

    /// Counts a kernel of the group that begins; returns the number of those that began before it.
    pub fn arrive_at_peer_group(&self, group: usize) -> u64 {
        self.shared.header.peer_groups[group].arrivals.fetch_add(1, AcqRel)
    }

    /// Returns whether all `count` kernels have begun that meet the one with this number.
    pub fn has_peer_group_met(&self, group: usize, arrival: u64, count: u64) -> bool {
        let count = count.max(1);
        self.shared.header.peer_groups[group].arrivals.load(Acquire) >= (arrival / count + 1) * count
    }
}
