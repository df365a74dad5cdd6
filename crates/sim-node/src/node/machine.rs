//! The usual servers: where in them each GPU sits.
//!
//! Addresses, NUMA nodes, CPUs and links are those of real machines of the kind. A node with fewer GPUs has the first
//! ones of a full machine; from the ninth on they sit in a second machine of the same kind, in a PCI domain and on
//! NUMA nodes of their own, that the first one is reached from across the system.

use super::config::{ConfigError, MOST_GPUS};
use super::topology::{Cpus, LinkEnd, PciAddress, PciPath, PciPaths};
use crate::profile::{Machine, Profile};

/// Seats of one machine.
const SEATS: usize = 8;

/// Where one GPU sits.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Seat {
    pub(super) pci: PciAddress,
    pub(super) numa: u32,
    pub(super) cpus: Cpus,
    pub(super) minor: u32,
    pub(super) module: u32,
    pub(super) links: Vec<LinkEnd>,
}

/// A machine's plan.
struct Plan {
    /// The bus of every seat.
    buses: [u8; SEATS],
    /// The NUMA node of every seat.
    numa: [u32; SEATS],
    /// How many NUMA nodes the machine has.
    numa_nodes: u32,
    /// CPUs of one NUMA node; its second threads follow behind the first ones of all nodes.
    cpus_per_numa: u32,
    /// The order in which the kernel finds the seats, which numbers the device files.
    found: [u32; SEATS],
    /// The buses of NVSwitches.
    switches: &'static [u8],
    /// Between seats of one pair, and of one NUMA node.
    pair: PciPath,
    near: PciPath,
}

impl Plan {
    fn of(machine: Machine) -> Plan {
        let two_sockets = [0, 0, 0, 0, 1, 1, 1, 1];
        let in_order = [0, 1, 2, 3, 4, 5, 6, 7];
        match machine {
            Machine::Dgx1 => Plan {
                buses: [0x06, 0x07, 0x0a, 0x0b, 0x85, 0x86, 0x89, 0x8a],
                numa: two_sockets,
                numa_nodes: 2,
                cpus_per_numa: 20,
                found: in_order,
                switches: &[],
                pair: PciPath::Pix,
                near: PciPath::Phb,
            },
            Machine::HgxA100 => Plan {
                buses: [0x07, 0x0f, 0x47, 0x4e, 0x87, 0x90, 0xb7, 0xbd],
                numa: [3, 3, 1, 1, 7, 7, 5, 5],
                numa_nodes: 8,
                cpus_per_numa: 16,
                found: [2, 3, 0, 1, 6, 7, 4, 5],
                switches: &[0xc4, 0xc5, 0xc6, 0xc7, 0xc8, 0xc9],
                pair: PciPath::Pxb,
                near: PciPath::Node,
            },
            Machine::HgxH100 => Plan {
                buses: [0x1b, 0x43, 0x52, 0x61, 0x9d, 0xc3, 0xd1, 0xdf],
                numa: two_sockets,
                numa_nodes: 2,
                cpus_per_numa: 56,
                found: in_order,
                switches: &[0x07, 0x08, 0x09, 0x0a],
                pair: PciPath::Node,
                near: PciPath::Node,
            },
            Machine::Slots => Plan {
                buses: [0x3b, 0x3c, 0x5e, 0x5f, 0xaf, 0xb0, 0xd8, 0xd9],
                numa: two_sockets,
                numa_nodes: 2,
                cpus_per_numa: 24,
                found: in_order,
                switches: &[],
                pair: PciPath::Pix,
                near: PciPath::Node,
            },
        }
    }

    fn cpus(&self, board: u32, numa: u32) -> Cpus {
        let cores = self.numa_nodes * self.cpus_per_numa;
        let first = board * 2 * cores + numa * self.cpus_per_numa;
        let last = first + self.cpus_per_numa - 1;
        Cpus::runs(&[(first, last), (first + cores, last + cores)])
    }

    fn path(&self, a: usize, b: usize) -> PciPath {
        let (x, y) = (a % SEATS, b % SEATS);
        match () {
            () if a / SEATS != b / SEATS || self.numa[x] != self.numa[y] => PciPath::System,
            () if x / 2 == y / 2 => self.pair,
            () => self.near,
        }
    }
}

/// NVLinks between the seats of a DGX-1 with V100.
const MESH: [[usize; SEATS]; SEATS] = [
    [0, 1, 1, 2, 2, 0, 0, 0],
    [1, 0, 2, 1, 0, 2, 0, 0],
    [1, 2, 0, 2, 0, 0, 1, 0],
    [2, 1, 2, 0, 0, 0, 0, 1],
    [2, 0, 0, 0, 0, 1, 1, 2],
    [0, 2, 0, 0, 1, 0, 2, 1],
    [0, 0, 1, 0, 1, 2, 0, 2],
    [0, 0, 0, 1, 2, 1, 2, 0],
];

/// The seats of `count` cards in the machine they usually sit in, and the ways between them.
pub(super) fn seats(profile: &Profile, count: usize) -> Result<(Vec<Seat>, PciPaths), ConfigError> {
    if !(1..=MOST_GPUS).contains(&count) {
        return Err(ConfigError::Count(count));
    }
    let plan = Plan::of(profile.machine);
    let on_boards = |index: usize| (index as u32 / SEATS as u32, index % SEATS);
    let mut seats: Vec<Seat> = (0..count)
        .map(|index| {
            let (board, seat) = on_boards(index);
            // Device files are numbered without gaps, in the order of those that are there.
            let here = (0..count)
                .filter(|&other| on_boards(other).0 == board)
                .map(|other| plan.found[other % SEATS]);
            let rank = here.filter(|&found| found < plan.found[seat]).count() as u32;
            Seat {
                pci: PciAddress { domain: board, bus: plan.buses[seat], device: 0 },
                numa: board * plan.numa_nodes + plan.numa[seat],
                cpus: plan.cpus(board, plan.numa[seat]),
                minor: board * SEATS as u32 + rank,
                module: if profile.machine == Machine::Slots { 0 } else { seat as u32 + 1 },
                links: Vec::new(),
            }
        })
        .collect();
    let links = profile.nvlink.as_ref().map_or(0, |nvlink| nvlink.links as usize);
    match profile.machine {
        Machine::HgxA100 | Machine::HgxH100 => {
            for (index, seat) in seats.iter_mut().enumerate() {
                let switch = |link: usize| {
                    let bus = plan.switches[link % plan.switches.len()];
                    LinkEnd::Switch(PciAddress { domain: on_boards(index).0, bus, device: 0 })
                };
                seat.links = (0..links).map(switch).collect();
            }
        }
        Machine::Dgx1 => {
            wire(
                &mut seats,
                links,
                |a, b| {
                    if a / SEATS == b / SEATS { MESH[a % SEATS][b % SEATS] } else { 0 }
                },
            )
        }
        // A bridge between neighbours takes all their links.
        Machine::Slots => wire(&mut seats, links, |a, b| if a / 2 == b / 2 { links } else { 0 }),
    }
    Ok((seats, PciPaths::from_fn(count, |a, b| plan.path(a, b))))
}

/// Links GPUs directly: so many between each two, as long as both have links left.
fn wire(seats: &mut [Seat], links: usize, between: impl Fn(usize, usize) -> usize) {
    for a in 0..seats.len() {
        for b in a + 1..seats.len() {
            for _ in 0..between(a, b) {
                let (at_a, at_b) = (seats[a].links.len(), seats[b].links.len());
                if at_a.max(at_b) < links {
                    seats[a].links.push(LinkEnd::Gpu { gpu: b, link: at_b });
                    seats[b].links.push(LinkEnd::Gpu { gpu: a, link: at_a });
                }
            }
        }
    }
}
