//! The processes of a node: coming, being listed, and being cleaned up after.

use super::layout::{Client, SLOTS};
use super::{State, Ticks, now, robust};
use partage_region::failpoint::point;
use std::os::unix::fs::MetadataExt;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};

/// A process that uses a GPU.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Process {
    /// Its slot.
    pub slot: usize,
    /// Its pid in the namespace the node was made in, as the kernel driver reports it. Where nobody of that namespace has
    /// asked for it yet: its pid in its own.
    pub pid: u32,
    /// Units of memory it holds, contexts included.
    pub used: u64,
    /// Contexts it has open.
    pub contexts: u32,
    /// How it was called.
    pub name: String,
}

/// The pid namespace of this process, by the number the kernel gives it.
pub(super) fn pid_namespace() -> u64 {
    std::fs::metadata("/proc/self/ns/pid").map_or(0, |data| data.ino())
}

/// How this process was called, or what the kernel calls it.
fn own_name() -> Vec<u8> {
    let called = std::fs::read("/proc/self/cmdline").unwrap_or_default();
    let first: Vec<u8> = called.into_iter().take_while(|&byte| byte != 0).collect();
    if !first.is_empty() {
        return first;
    }
    let mut name = std::fs::read("/proc/self/comm").unwrap_or_default();
    name.retain(|&byte| byte != b'\n');
    name
}

impl State {
    fn client(&self, slot: usize) -> &Client {
        &self.shared.clients[slot]
    }

    /// Puts this process's name on its slot.
    pub(super) fn introduce(&self) {
        let identity = &self.client(self.slot).identity;
        let namespace = pid_namespace();
        let pid = std::process::id();
        let at_home = namespace == self.shared.header.host_namespace.load(Relaxed);
        identity.host_pid.store(if at_home { pid } else { 0 }, Relaxed);
        identity.started.store(now(), Relaxed);
        let name = own_name();
        for (index, byte) in identity.name.iter().enumerate() {
            // The last byte stays zero.
            let last = index + 1 == identity.name.len();
            byte.store(name.get(index).copied().filter(|_| !last).unwrap_or(0), Relaxed);
        }
        identity.pid.store(pid, Release);
        point("sim.client");
        self.shared.header.occupied[self.slot / 64].fetch_or(1 << (self.slot % 64), Release);
        self.alive.publish_pid(self.slot);
    }

    /// Takes back everything a slot's last process had. The slot must be ours by its lock.
    pub(super) fn clean(&self, slot: usize) {
        for gpu in &self.shared.gpus[..self.gpus] {
            if let Some(held) = robust::inherit(&gpu.line.lock, slot) {
                self.finish(gpu);
                drop(held);
            }
        }
        if let Some(held) = robust::inherit(&self.shared.header.event_lock, slot) {
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
            // Nobody knows when it died. What happened until somebody last looked happened; nothing since.
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

    /// Slots that have been taken and not yet cleaned.
    fn occupied(&self) -> impl Iterator<Item = usize> {
        (0..SLOTS / 64).flat_map(move |index| {
            let word = self.shared.header.occupied[index].load(Acquire);
            (0..64).filter(move |bit| word >> bit & 1 == 1).map(move |bit| index * 64 + bit)
        })
    }

    /// Cleans up after the dead; returns how many there were.
    pub fn sweep(&self) -> usize {
        self.occupied().filter(|&slot| self.bury(slot)).count()
    }

    /// Cleans the slot if its process is dead.
    pub(super) fn bury(&self, slot: usize) -> bool {
        if slot == self.slot || self.alive.is_alive(slot) {
            return false;
        }
        let buried = self.alive.with_dead_slot(slot, || {
            let dead = self.is_occupied(slot);
            self.clean(slot);
            dead
        });
        buried == Some(true)
    }

    /// Cleans up after the dead now and then, if others than this process hold memory of the GPU.
    #[inline]
    pub fn mind_the_dead(&self, gpu: usize) {
        /// Some milliseconds, of whatever rate the counter is.
        const OFTEN: u64 = 1 << 24;
        if self.used_memory(gpu) == self.account(self.slot, gpu).held() {
            return;
        }
        let ticks = Ticks::read();
        let next = self.next_look.load(Relaxed);
        if ticks >= next && self.next_look.compare_exchange(next, ticks + OFTEN, Relaxed, Relaxed).is_ok() {
            self.sweep();
        }
    }

    /// Takes the GPU from the dead. Their work stops when the kernel closes their files; here, when somebody looks.
    pub(super) fn bury_the_busy(&self, gpu: usize) {
        let busy: Vec<usize> = {
            let (timeline, _held) = self.timeline(gpu);
            timeline.runnable().filter(|&slot| slot != self.slot).collect()
        };
        for slot in busy {
            self.bury(slot);
        }
    }

    /// The living processes that have contexts on the GPU, in the order of their coming.
    pub fn processes(&self, gpu: usize) -> Vec<Process> {
        self.sweep();
        let mut found: Vec<(u64, Process)> = self
            .occupied()
            .filter_map(|slot| {
                let contexts = self.client(slot).lanes[gpu].contexts.load(Acquire);
                let started = self.client(slot).identity.started.load(Relaxed);
                let used = self.account(slot, gpu).held();
                let process = Process { slot, pid: self.pid(slot), used, contexts, name: self.name(slot) };
                (contexts > 0).then_some((started, process))
            })
            .collect();
        found.sort_by_key(|(started, process)| (*started, process.slot));
        found.into_iter().map(|(_, process)| process).collect()
    }

    fn pid(&self, slot: usize) -> u32 {
        let identity = &self.client(slot).identity;
        let known = identity.host_pid.load(Acquire);
        if known != 0 {
            return known;
        }
        if pid_namespace() == self.shared.header.host_namespace.load(Relaxed)
            && let Some(pid) = self.alive.pid(slot)
        {
            identity.host_pid.store(pid, Release);
            return pid;
        }
        identity.pid.load(Acquire)
    }

    fn name(&self, slot: usize) -> String {
        let name = &self.client(slot).identity.name;
        let bytes: Vec<u8> =
            name.iter().map(|byte| byte.load(Relaxed)).take_while(|&byte| byte != 0).collect();
        String::from_utf8_lossy(&bytes).into_owned()
    }

    /// Says how many contexts this process has open on the GPU.
    pub fn set_contexts(&self, gpu: usize, contexts: u32) {
        self.client(self.slot).lanes[gpu].contexts.store(contexts, Release);
    }

    /// Whether all work of this process on the GPU is known to be done, without looking.
    #[inline]
    pub fn is_at_rest(&self, gpu: usize) -> bool {
        let lane = &self.client(self.slot).lanes[gpu];
        lane.submitted.load(Acquire) & !super::timeline::DRY <= lane.served.load(Acquire)
    }

    /// Units of memory this process holds on the GPU.
    #[cfg(test)]
    pub(crate) fn held_memory(&self, gpu: usize) -> u64 {
        self.account(self.slot, gpu).held()
    }
}

impl Drop for State {
    fn drop(&mut self) {
        self.clean(self.slot);
        self.alive.release(self.slot);
    }
}
