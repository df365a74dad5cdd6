//! The layouts of common GPU servers: PCI address, NUMA node, CPUs and NVLinks of each GPU.
//!
//! All values are those of real servers of the kind. A node with fewer GPUs has the first ones of a full server. From
//! the ninth on, GPUs are in a second board of the same kind with its own PCI domain and NUMA nodes; paths between
//! the boards cross the system interconnect.

use super::config::{ConfigError, MAX_NODE_GPUS};
use super::topology::{CpuList, NvLinkEnd, PciAddress, PciPath, PciPaths};
use crate::profile::{GpuProfile, ServerModel};

/// GPUs of one full server.
const GPUS_PER_SERVER: usize = 8;

/// The location of one GPU in its server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct GpuLocation {
    pub(super) pci: PciAddress,
    pub(super) numa: u32,
    pub(super) cpus: CpuList,
    pub(super) minor: u32,
    pub(super) module: u32,
    pub(super) links: Vec<NvLinkEnd>,
}

/// The layout of a full server.
struct ServerLayout {
    /// The PCI bus of each GPU.
    buses: [u8; GPUS_PER_SERVER],
    /// The NUMA node of each GPU.
    numa: [u32; GPUS_PER_SERVER],
    /// The number of NUMA nodes of the server.
    numa_nodes: u32,
    /// Cores of one NUMA node. Their second hardware threads are numbered after the first threads of all nodes.
    cpus_per_numa: u32,
    /// The order in which the kernel probes the GPUs, which determines the minor numbers of the device files.
    probe_order: [u32; GPUS_PER_SERVER],
    /// The PCI buses of the NVSwitches.
    switches: &'static [u8],
    /// The path between the two GPUs of a pair (0 and 1, 2 and 3, …).
    pair: PciPath,
    /// The path between other GPUs of one NUMA node.
    near: PciPath,
}

impl ServerLayout {
    fn of(machine: ServerModel) -> ServerLayout {
        let two_sockets = [0, 0, 0, 0, 1, 1, 1, 1];
        let in_order = [0, 1, 2, 3, 4, 5, 6, 7];
        match machine {
            ServerModel::Dgx1 => ServerLayout {
                buses: [0x06, 0x07, 0x0a, 0x0b, 0x85, 0x86, 0x89, 0x8a],
                numa: two_sockets,
                numa_nodes: 2,
                cpus_per_numa: 20,
                probe_order: in_order,
                switches: &[],
                pair: PciPath::Pix,
                near: PciPath::Phb,
            },
            ServerModel::HgxA100 => ServerLayout {
                buses: [0x07, 0x0f, 0x47, 0x4e, 0x87, 0x90, 0xb7, 0xbd],
                numa: [3, 3, 1, 1, 7, 7, 5, 5],
                numa_nodes: 8,
                cpus_per_numa: 16,
                probe_order: [2, 3, 0, 1, 6, 7, 4, 5],
                switches: &[0xc4, 0xc5, 0xc6, 0xc7, 0xc8, 0xc9],
                pair: PciPath::Pxb,
                near: PciPath::Node,
            },
            ServerModel::HgxH100 => ServerLayout {
                buses: [0x1b, 0x43, 0x52, 0x61, 0x9d, 0xc3, 0xd1, 0xdf],
                numa: two_sockets,
                numa_nodes: 2,
                cpus_per_numa: 56,
                probe_order: in_order,
                switches: &[0x07, 0x08, 0x09, 0x0a],
                pair: PciPath::Node,
                near: PciPath::Node,
            },
            ServerModel::Slots => ServerLayout {
                buses: [0x3b, 0x3c, 0x5e, 0x5f, 0xaf, 0xb0, 0xd8, 0xd9],
                numa: two_sockets,
                numa_nodes: 2,
                cpus_per_numa: 24,
                probe_order: in_order,
                switches: &[],
                pair: PciPath::Pix,
                near: PciPath::Node,
            },
        }
    }

    fn cpus(&self, board: u32, numa: u32) -> CpuList {
        let cores = self.numa_nodes * self.cpus_per_numa;
        let first = board * 2 * cores + numa * self.cpus_per_numa;
        let last = first + self.cpus_per_numa - 1;
        CpuList::from_ranges(&[(first, last), (first + cores, last + cores)])
    }

    fn path(&self, a: usize, b: usize) -> PciPath {
        let (x, y) = (a % GPUS_PER_SERVER, b % GPUS_PER_SERVER);
        if a / GPUS_PER_SERVER != b / GPUS_PER_SERVER || self.numa[x] != self.numa[y] {
            PciPath::System
        } else if x / 2 == y / 2 {
            self.pair
        } else {
            self.near
        }
    }
}

/// The number of NVLinks between each two GPUs of a DGX-1 with V100.
const DGX1_NVLINKS: [[usize; GPUS_PER_SERVER]; GPUS_PER_SERVER] = [
    [0, 1, 1, 2, 2, 0, 0, 0],
    [1, 0, 2, 1, 0, 2, 0, 0],
    [1, 2, 0, 2, 0, 0, 1, 0],
    [2, 1, 2, 0, 0, 0, 0, 1],
    [2, 0, 0, 0, 0, 1, 1, 2],
    [0, 2, 0, 0, 1, 0, 2, 1],
    [0, 0, 1, 0, 1, 2, 0, 2],
    [0, 0, 0, 1, 2, 1, 2, 0],
];

/// Returns the locations of `count` GPUs in the server that they are usually installed in, and the PCIe paths between
/// them.
pub(super) fn locate_gpus(
    profile: &GpuProfile,
    count: usize,
) -> Result<(Vec<GpuLocation>, PciPaths), ConfigError> {
    if !(1..=MAX_NODE_GPUS).contains(&count) {
        return Err(ConfigError::Count(count));
    }
    let layout = ServerLayout::of(profile.machine);
    let board_and_position = |index: usize| (index as u32 / GPUS_PER_SERVER as u32, index % GPUS_PER_SERVER);
    let mut locations: Vec<GpuLocation> = (0..count)
        .map(|index| {
            let (board, position) = board_and_position(index);
            // Minor numbers have no gaps: only the GPUs that are present are counted.
            let present = (0..count)
                .filter(|&other| board_and_position(other).0 == board)
                .map(|other| layout.probe_order[other % GPUS_PER_SERVER]);
            let rank = present.filter(|&order| order < layout.probe_order[position]).count() as u32;
            GpuLocation {
                pci: PciAddress { domain: board, bus: layout.buses[position], device: 0 },
                numa: board * layout.numa_nodes + layout.numa[position],
                cpus: layout.cpus(board, layout.numa[position]),
                minor: board * GPUS_PER_SERVER as u32 + rank,
                module: if profile.machine == ServerModel::Slots { 0 } else { position as u32 + 1 },
                links: Vec::new(),
            }
        })
        .collect();
    let links = profile.nvlink.as_ref().map_or(0, |nvlink| nvlink.links as usize);
    match profile.machine {
        ServerModel::HgxA100 | ServerModel::HgxH100 => {
            for (index, location) in locations.iter_mut().enumerate() {
                let switch = |link: usize| {
                    let bus = layout.switches[link % layout.switches.len()];
                    NvLinkEnd::Switch(PciAddress { domain: board_and_position(index).0, bus, device: 0 })
                };
                location.links = (0..links).map(switch).collect();
            }
        }
        ServerModel::Dgx1 => connect_gpus(&mut locations, links, |a, b| {
            if a / GPUS_PER_SERVER == b / GPUS_PER_SERVER {
                DGX1_NVLINKS[a % GPUS_PER_SERVER][b % GPUS_PER_SERVER]
            } else {
                0
            }
        }),
        // An NVLink bridge between neighbors uses all their links.
        ServerModel::Slots => {
            connect_gpus(&mut locations, links, |a, b| if a / 2 == b / 2 { links } else { 0 })
        }
    }
    Ok((locations, PciPaths::from_fn(count, |a, b| layout.path(a, b))))
}

/// Links GPUs directly, with `between(a, b)` links each, as long as both have unused links.
fn connect_gpus(locations: &mut [GpuLocation], links: usize, between: impl Fn(usize, usize) -> usize) {
    for a in 0..locations.len() {
        for b in a + 1..locations.len() {
            for _ in 0..between(a, b) {
                let (at_a, at_b) = (locations[a].links.len(), locations[b].links.len());
                if at_a.max(at_b) < links {
                    locations[a].links.push(NvLinkEnd::Gpu { gpu: b, link: at_b });
                    locations[b].links.push(NvLinkEnd::Gpu { gpu: a, link: at_a });
                }
            }
        }
    }
}
