//! The processes of a node: registration, listing, and reclaiming after their death.

use super::layout::{ClientIdentity, ClientRecord, MAX_CLIENTS};
use super::{SimNodeState, TickClock, now, robust_mutex};
use partage_region::failpoint::point;
use std::os::unix::fs::MetadataExt;
use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};
use std::time::Duration;

/// A process that has contexts on a GPU.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SimGpuProcess {
    /// The slot of the process.
    pub slot: usize,
    /// The PID in the namespace in which the node was created, as a kernel driver reports it. Until a process of that
    /// namespace has resolved it, the PID in its own namespace.
    pub pid: u32,
    /// The memory that it uses in units, including contexts.
    pub used: u64,
    /// The number of open contexts.
    pub contexts: u32,
    /// The first argument of its command line, or its kernel name.
    pub name: String,
}

/// Returns the inode number of this process's PID namespace.
pub(super) fn pid_namespace() -> u64 {
    std::fs::metadata("/proc/self/ns/pid").map_or(0, |data| data.ino())
}

/// Returns the first argument of this process's command line, or its kernel name if that is empty.
fn own_name() -> Vec<u8> {
    let command_line = std::fs::read("/proc/self/cmdline").unwrap_or_default();
    let first: Vec<u8> = command_line.into_iter().take_while(|&byte| byte != 0).collect();
    if !first.is_empty() {
        return first;
    }
    let mut name = std::fs::read("/proc/self/comm").unwrap_or_default();
    name.retain(|&byte| byte != b'\n');
    name
}

impl SimNodeState {
    fn client(&self, slot: usize) -> &ClientRecord {
        &self.shared.clients[slot]
    }

    /// Writes this process's identity into its slot and publishes it.
    pub(super) fn register_process(&self) {
        let identity = &self.client(self.slot).identity;
        let namespace = pid_namespace();
        let pid = std::process::id();
        let is_host_namespace = namespace == self.shared.header.host_namespace.load(Relaxed);
        // Before `host_pid`: a process that records the PID of the slot's last process afterwards notices the change.
        identity.started.store(now(), Release);
        identity.host_pid.store(if is_host_namespace { pid } else { 0 }, Release);
        let name = own_name();
        for (index, byte) in identity.name.iter().enumerate() {
            // The last byte stays zero.
            let last = index + 1 == identity.name.len();
            byte.store(name.get(index).copied().filter(|_| !last).unwrap_or(0), Relaxed);
        }
        identity.pid.store(pid, Release);
        point("sim.client");
        self.shared.header.occupied[self.slot / 64].fetch_or(1 << (self.slot % 64), Release);
        self.publish_pid();
    }

    /// Publishes this process's PID. The last process of the slot may still be exiting and hold the lock that shows
    /// its own PID; without the lock, this process would be listed with the PID of its own namespace.
    fn publish_pid(&self) {
        const RETRY_INTERVAL: Duration = Duration::from_millis(1);
        const MAX_ATTEMPTS: usize = 5000;
        for _ in 0..MAX_ATTEMPTS {
            if self.alive.publish_pid(self.slot) {
                return;
            }
            std::thread::sleep(RETRY_INTERVAL);
        }
    }

    /// Reclaims everything that the last process of a slot held. The caller must hold the slot's lock.
    pub(super) fn clear_slot(&self, slot: usize) {
        for gpu in &self.shared.gpus[..self.gpus] {
            if let Some(held) = robust_mutex::inherit_own(&gpu.line.lock, slot) {
                self.finish_step(gpu);
                drop(held);
            }
        }
        if let Some(held) = robust_mutex::inherit_own(&self.shared.header.event_lock, slot) {
            drop(held);
        }
        if !self.is_occupied(slot) {
            return;
        }
        let client = self.client(slot);
        for gpu in 0..self.gpus {
            let lane = &client.lanes[gpu];
            lane.contexts.store(0, Release);
            point("sim.client");
            self.account(slot, gpu).release_all();
            // The time of death is unknown: its work counts up to the last advance of the timeline.
            let (timeline, _held) = self.timeline(gpu);
            timeline.clear(slot);
        }
        point("sim.client");
        client.identity.pid.store(0, Release);
        point("sim.client");
        client.identity.host_pid.store(0, Release);
        self.shared.header.occupied[slot / 64].fetch_and(!(1 << (slot % 64)), Release);
    }

    fn is_occupied(&self, slot: usize) -> bool {
        self.shared.header.occupied[slot / 64].load(Acquire) >> (slot % 64) & 1 == 1
    }

    /// Iterates over the slots that were acquired and not yet cleared.
    fn occupied(&self) -> impl Iterator<Item = usize> {
        (0..MAX_CLIENTS / 64).flat_map(move |index| {
            let word = self.shared.header.occupied[index].load(Acquire);
            (0..64).filter(move |bit| word >> bit & 1 == 1).map(move |bit| index * 64 + bit)
        })
    }

    /// Reclaims the slots of dead processes and returns their number.
    pub fn reclaim_dead(&self) -> usize {
        self.occupied().filter(|&slot| self.reclaim_if_dead(slot)).count()
    }

    /// Reclaims the slot if its process is dead.
    pub(super) fn reclaim_if_dead(&self, slot: usize) -> bool {
        if slot == self.slot || self.alive.is_alive(slot) {
            return false;
        }
        let reclaimed = self.alive.with_dead_slot(slot, || {
            let dead = self.is_occupied(slot);
            self.clear_slot(slot);
            dead
        });
        reclaimed == Some(true)
    }

    /// Reclaims dead processes every few milliseconds, if processes other than this one hold memory of the GPU.
    #[inline]
    pub fn reclaim_dead_periodically(&self, gpu: usize) {
        /// A few milliseconds at any common rate of the counter.
        const RECLAIM_INTERVAL_TICKS: u64 = 1 << 24;
        if self.used_memory(gpu) == self.account(self.slot, gpu).held() {
            return;
        }
        let ticks = TickClock::read();
        let next = self.next_reclaim.load(Relaxed);
        if ticks >= next
            && self
                .next_reclaim
                .compare_exchange(next, ticks + RECLAIM_INTERVAL_TICKS, Relaxed, Relaxed)
                .is_ok()
        {
            self.reclaim_dead();
        }
    }

    /// Reclaims dead processes that have work on the GPU. A real driver stops their work when the kernel closes their
    /// files; here it stops at the next check.
    pub(super) fn reclaim_dead_runnable(&self, gpu: usize) {
        let busy: Vec<usize> = {
            let (timeline, _held) = self.timeline(gpu);
            timeline.runnable().filter(|&slot| slot != self.slot).collect()
        };
        for slot in busy {
            self.reclaim_if_dead(slot);
        }
    }

    /// Returns the living processes that have contexts on the GPU, in the order of their start.
    pub fn processes(&self, gpu: usize) -> Vec<SimGpuProcess> {
        self.reclaim_dead();
        let mut found: Vec<(u64, SimGpuProcess)> = self
            .occupied()
            .filter_map(|slot| {
                let contexts = self.client(slot).lanes[gpu].contexts.load(Acquire);
                let started = self.client(slot).identity.started.load(Relaxed);
                let used = self.account(slot, gpu).held();
                let process =
                    SimGpuProcess { slot, pid: self.pid(slot), used, contexts, name: self.name(slot) };
                (contexts > 0).then_some((started, process))
            })
            .collect();
        found.sort_by_key(|(started, process)| (*started, process.slot));
        found.into_iter().map(|(_, process)| process).collect()
    }

    fn pid(&self, slot: usize) -> u32 {
        let identity = &self.client(slot).identity;
        let started = identity.started.load(Acquire);
        let known = identity.host_pid.load(Acquire);
        if known != 0 {
            return known;
        }
        if pid_namespace() == self.shared.header.host_namespace.load(Relaxed)
            && let Some(pid) = self.alive.pid(slot)
        {
            self.record_host_pid(slot, started, pid);
            return pid;
        }
        identity.pid.load(Acquire)
    }

    /// Records the PID in the host's namespace of the process that registered at `started`. By now the process may have
    /// ended, and the slot may belong to another one: then nothing is recorded.
    pub(super) fn record_host_pid(&self, slot: usize, started: u64, pid: u32) {
        let ClientIdentity { host_pid, started: registered, .. } = &self.client(slot).identity;
        if host_pid.compare_exchange(0, pid, AcqRel, Relaxed).is_ok() && registered.load(Acquire) != started {
            let _ = host_pid.compare_exchange(pid, 0, AcqRel, Relaxed);
        }
    }

    fn name(&self, slot: usize) -> String {
        let name = &self.client(slot).identity.name;
        let bytes: Vec<u8> =
            name.iter().map(|byte| byte.load(Relaxed)).take_while(|&byte| byte != 0).collect();
        String::from_utf8_lossy(&bytes).into_owned()
    }

    /// Sets the number of contexts that this process has open on the GPU.
    pub fn set_contexts(&self, gpu: usize, contexts: u32) {
        self.client(self.slot).lanes[gpu].contexts.store(contexts, Release);
    }

    /// Returns whether all work of this process on the GPU is known to be done, without advancing the timeline.
    #[inline]
    pub fn is_idle(&self, gpu: usize) -> bool {
        let lane = &self.client(self.slot).lanes[gpu];
        lane.submitted.load(Acquire) & !super::timeline::DRY <= lane.served.load(Acquire)
    }

    /// Returns the units of memory that this process holds on the GPU.
    #[cfg(test)]
    pub(crate) fn held_memory(&self, gpu: usize) -> u64 {
        self.account(self.slot, gpu).held()
    }
}

impl Drop for SimNodeState {
    fn drop(&mut self) {
        self.clear_slot(self.slot);
        self.alive.release(self.slot);
    }
}
