//! Copy engines: copies and fills take time beside the kernels, one engine per direction.
//!
//! A copy begins when its stream reaches it and the engine is free, and blocks its stream until it ends. It uses no
//! multiprocessor, and on a card also goes on while another process has its time slice, so its time is wall time and
//! not service time.

use super::super::device::Device;
use super::{BlockedOn, ExecutionEngine};
use crate::node::NodeConfig;
use crate::state::now;

/// The part of the raw bandwidth of a PCIe link that copies reach.
const PCIE_EFFICIENCY_PERCENT: u64 = 80;

/// The part of the raw bandwidth of the card's memory that copies and fills reach.
const MEMORY_EFFICIENCY_PERCENT: u64 = 85;

/// Copies that take less take no time: the host needs longer to submit them.
const MIN_COPY_NANOS: u64 = 10_000;

/// The engine that executes a copy. A fill is a copy on the card.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in super::super) enum CopyDirection {
    /// From host memory or from another card.
    ToCard,
    /// From the card to host memory.
    ToHost,
    /// On the card.
    OnCard,
}

/// What moves the bytes of a copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in super::super) enum CopyLink {
    /// The PCIe link of the card.
    Pcie,
    /// The NVLinks to the card with this index on the node, or the PCIe link if there are none.
    Peer(usize),
    /// The memory of the card, by which each byte passes this number of times.
    Memory(u64),
}

/// The engine and the duration of a copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in super::super) struct CopyTime {
    direction: CopyDirection,
    nanos: u64,
}

impl CopyTime {
    /// Returns the time that a copy takes on the device; `None` if it is too short to matter.
    pub(in super::super) fn new(
        device: &Device,
        config: &NodeConfig,
        direction: CopyDirection,
        link: CopyLink,
        bytes: u64,
    ) -> Option<Self> {
        let profile = &device.profile;
        let pcie = || {
            // Bits per nanosecond and lane; from generation 3 on, 128 of 130 bits are data.
            let lane: u64 = [2, 4, 8, 16, 32, 64][profile.pci.generation.clamp(1, 6) as usize - 1];
            lane * 1000 / 8 * u64::from(profile.pci.width) * 128 / 130 * PCIE_EFFICIENCY_PERCENT / 100
        };
        // In megabytes per second, which is bytes per microsecond.
        let megabytes = match link {
            CopyLink::Pcie => pcie(),
            CopyLink::Peer(other) => match config.nvlinks(device.gpu, other) as u64 {
                0 => pcie(),
                links => {
                    links * profile.nvlink.as_ref().map_or(0, |nvlink| u64::from(nvlink.megabytes_per_second))
                }
            },
            CopyLink::Memory(passes) => {
                // Two transfers per clock.
                let raw = u64::from(profile.clocks.memory_max) * 2 * u64::from(profile.memory.bus_width) / 8;
                raw * MEMORY_EFFICIENCY_PERCENT / 100 / passes.max(1)
            }
        };
        let nominal = bytes.saturating_mul(1000) / megabytes.max(1);
        let nanos = nominal.saturating_mul(u64::from(device.state.slowness(device.gpu))) / 1000;
        (nominal >= MIN_COPY_NANOS).then_some(Self { direction, nanos })
    }
}

/// When each engine is free, as an instant.
#[derive(Default)]
pub(super) struct CopyEngines([u64; 3]);

impl CopyEngines {
    /// Takes the engine from `earliest` on, or when it is free; returns the instant at which the copy ends.
    fn run(&mut self, time: CopyTime, earliest: u64) -> u64 {
        let free_at = &mut self.0[time.direction as usize];
        *free_at = earliest.max(*free_at) + time.nanos;
        *free_at
    }
}

impl ExecutionEngine {
    /// Lets the copy of which the bytes have been moved take its time.
    pub(super) fn finish_copy(&mut self, timeline: usize, started: u64) {
        let Some(BlockedOn::Copy(time)) = self.timelines[timeline].blocked_on else { return };
        let end = self.copy_engines.run(time, started);
        self.timelines[timeline].blocked_on = Some(BlockedOn::Until(end));
        // Any sleep of the thread may be too long.
        self.wake_card_thread(0);
    }

    /// Returns the earliest instant at which a copy ends.
    pub(super) fn next_copy_end(&self) -> Option<u64> {
        if !self.unsettled.any() {
            return None;
        }
        let end = |blocked: &BlockedOn| if let BlockedOn::Until(end) = blocked { Some(*end) } else { None };
        self.timelines.iter().filter_map(|timeline| end(timeline.blocked_on.as_ref()?)).min()
    }
}

impl Device {
    /// Waits as long as a copy takes that began at `started`, on its engine.
    pub(in super::super) fn wait_for_copy(&self, time: CopyTime, started: u64) {
        let end = self.engine().copy_engines.run(time, started);
        while now() < end {
            crate::state::wait_until(end);
        }
    }
}
