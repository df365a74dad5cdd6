//! Whether a share fits one GPU, and if not, its shortfall.

use super::capacity::{GpuAllocation, GpuCapacity, GpuClass};
use crate::model::{Bytes, ContainerRole, Cores, CoresAsk, MemoryAsk, PodAsk, ShareAsk, WantedGpus};
use std::fmt;

/// The requirements of a share on one class of GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ShareNeed {
    /// Its memory limit; `None` for no limit.
    pub limit: Option<Bytes>,
    /// Its guaranteed compute; `None` for none.
    pub cores: Option<Cores>,
    /// Upper limit of its compute while the GPU is otherwise idle.
    pub ceiling: Option<Cores>,
    /// The capacity that the share uses.
    pub usage: GpuAllocation,
    /// Whether even an empty GPU of this class is too small.
    pub too_large: bool,
}

impl ShareNeed {
    /// Resolves a share for a class of GPU.
    pub fn of(share: &ShareAsk, class: &GpuClass) -> ShareNeed {
        let limit = match share.memory {
            MemoryAsk::Unlimited => None,
            MemoryAsk::All => Some(class.memory),
            MemoryAsk::Exactly(bytes) => Some(bytes),
            MemoryAsk::Percent(percent) => Some(class.memory.percent(percent)),
            MemoryAsk::AtMost(bytes) => Some(bytes.min(class.memory)),
        };
        let cores = match share.cores {
            CoresAsk::Uncounted => None,
            CoresAsk::Exactly(cores) => Some(cores),
            CoresAsk::Slots(slots) => Some(Cores::of_slots(slots, class.slots)),
        };
        let too_many_slots = matches!(share.cores, CoresAsk::Slots(slots) if slots > class.slots);
        let usage = if share.whole {
            GpuAllocation::of_whole(class)
        } else {
            GpuAllocation {
                memory: limit.map_or(0, |bytes| bytes.0),
                cores: cores.map_or(0, |cores| cores.as_millipercent().into()),
                shares: 1,
                limited: u32::from(limit.is_some()),
                unlimited: u32::from(limit.is_none()),
                uncounted: u32::from(cores.is_none()),
                ..GpuAllocation::default()
            }
        };
        // One share is never granted more than the card has, overcommitted or not.
        let too_large = limit.is_some_and(|bytes| bytes > class.memory) || too_many_slots;
        ShareNeed { limit, cores, ceiling: share.ceiling, usage, too_large }
    }

    /// Returns whether the share fits beside what is in use. Applies the rules of [`ShareNeed::shortfall_on`].
    #[inline]
    pub fn fits(&self, gpu: &GpuCapacity, class: &GpuClass) -> bool {
        let used = &gpu.used;
        if gpu.withheld || self.too_large || used.whole > 0 || used.shares >= class.max_shares {
            return false;
        }
        if self.usage.whole > 0 {
            return used.shares == 0;
        }
        let memory_fits = match self.limit {
            Some(limit) => used.unlimited == 0 && limit.0 <= class.allocatable.0.saturating_sub(used.memory),
            None => used.limited == 0,
        };
        memory_fits && self.cores_left(used).is_some()
    }

    /// Returns the shortfall of this GPU for the share; `None` if it fits.
    pub fn shortfall_on(&self, gpu: &GpuCapacity, class: &GpuClass) -> Option<Shortfall> {
        let used = &gpu.used;
        if gpu.withheld {
            return Some(Shortfall::Withheld);
        }
        if self.too_large {
            return Some(match self.limit {
                Some(asked) if asked > class.memory => Shortfall::Card { asked, card: class.memory },
                _ => Shortfall::Slots { slots: class.slots },
            });
        }
        if used.whole > 0 {
            return Some(Shortfall::HeldWhole);
        }
        if used.shares >= class.max_shares {
            return Some(Shortfall::Shares { max: class.max_shares });
        }
        if self.usage.whole > 0 {
            return (used.shares > 0).then_some(Shortfall::NotEmpty { shares: used.shares });
        }
        match self.limit {
            Some(_) if used.unlimited > 0 => return Some(Shortfall::BesideUnlimited),
            None if used.limited > 0 => return Some(Shortfall::BesideLimited),
            Some(asked) if asked > gpu.free_memory(class) => {
                return Some(Shortfall::Memory { asked, free: gpu.free_memory(class) });
            }
            _ => {}
        }
        if self.cores_left(used).is_some() {
            return None;
        }
        let free = gpu.free_cores();
        Some(match self.cores {
            Some(asked) if asked > free => Shortfall::Cores { asked, free },
            // All compute would be guaranteed, and shares without a guarantee could not run at all.
            Some(asked) => Shortfall::CoresForOthers { asked },
            None => Shortfall::CoresAllGuaranteed,
        })
    }

    /// Returns the compute that is left once the share is placed, in thousandths of a percent; `None` if there is not
    /// enough. If any share has no guaranteed compute, something must be left.
    fn cores_left(&self, used: &GpuAllocation) -> Option<u64> {
        let all = u64::from(Cores::WHOLE.as_millipercent());
        let left = all.checked_sub(used.cores)?.checked_sub(self.usage.cores)?;
        let some_uncounted = used.uncounted + self.usage.uncounted > 0;
        (left > 0 || !some_uncounted).then_some(left)
    }
}

/// Why a share does not fit a GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Shortfall {
    /// The GPU is not offered, because it is unhealthy or in another mode.
    Withheld,
    /// The pod excludes its model.
    Model,
    /// The pod excludes its UUID.
    Uuid,
    /// More memory is requested than the card has.
    Card {
        /// Memory that the share requests.
        asked: Bytes,
        /// Memory of the card.
        card: Bytes,
    },
    /// More slots are requested than a GPU is split in.
    Slots {
        /// Slots of one GPU.
        slots: u32,
    },
    /// Another pod holds the whole GPU.
    HeldWhole,
    /// The GPU takes no more shares.
    Shares {
        /// Maximum number of shares per GPU on the node.
        max: u32,
    },
    /// A whole GPU is requested, and this one has shares on it.
    NotEmpty {
        /// Number of shares on the GPU.
        shares: u32,
    },
    /// The GPU has shares without a memory limit, which cannot be combined with limited ones.
    BesideUnlimited,
    /// The GPU has shares with a memory limit, which cannot be combined with unlimited ones.
    BesideLimited,
    /// Too little memory is free.
    Memory {
        /// Memory that the share requests.
        asked: Bytes,
        /// Free memory of the GPU.
        free: Bytes,
    },
    /// Too little compute is free.
    Cores {
        /// Compute that the share requests.
        asked: Cores,
        /// Free compute of the GPU.
        free: Cores,
    },
    /// All compute is guaranteed to other shares.
    CoresAllGuaranteed,
    /// All compute would be guaranteed, and shares without a guarantee are on the GPU.
    CoresForOthers {
        /// Compute that the share requests.
        asked: Cores,
    },
}

impl fmt::Display for Shortfall {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Shortfall::Withheld => f.write_str("is not allocatable"),
            Shortfall::Model => f.write_str("has a model that the pod excludes"),
            Shortfall::Uuid => f.write_str("is excluded by UUID"),
            Shortfall::Card { asked, card } => write!(f, "has {card} in total, {asked} requested"),
            Shortfall::Slots { slots } => write!(f, "has {slots} slots, more are requested of one GPU"),
            Shortfall::HeldWhole => f.write_str("is exclusive to another pod"),
            Shortfall::Shares { max } => write!(f, "has reached its maximum of {max} shares"),
            Shortfall::NotEmpty { shares: 1 } => f.write_str("has 1 share, a whole GPU is requested"),
            Shortfall::NotEmpty { shares } => write!(f, "has {shares} shares, a whole GPU is requested"),
            Shortfall::BesideUnlimited => {
                f.write_str("has shares without a memory limit, which cannot be combined with limited ones")
            }
            Shortfall::BesideLimited => {
                f.write_str("has memory-limited shares, which cannot be combined with unlimited ones")
            }
            Shortfall::Memory { asked, free } => write!(f, "has {free} free, {asked} requested"),
            Shortfall::Cores { asked, free } => write!(f, "has {free} of its cores free, {asked} requested"),
            Shortfall::CoresAllGuaranteed => f.write_str("has all of its cores guaranteed to others"),
            Shortfall::CoresForOthers { asked } => {
                write!(f, "would have no cores left for shares without a guarantee, {asked} requested")
            }
        }
    }
}

/// The request of one container, resolved for every class of GPU of a cluster.
#[derive(Clone, Debug)]
pub struct PreparedWant {
    /// When the container runs.
    pub role: ContainerRole,
    /// The number of GPUs, and the share of each.
    pub want: WantedGpus,
    /// The requirements of a share by class; `None` if the pod excludes the model.
    pub needs: Vec<Option<ShareNeed>>,
}

/// A pod's ask, resolved once for a cluster, so that examining a node is arithmetic only.
#[derive(Clone, Debug)]
pub struct PreparedAsk {
    /// The ask that was prepared.
    pub ask: PodAsk,
    /// The request of each container, in the order of the spec.
    pub wants: Vec<PreparedWant>,
}

impl PreparedAsk {
    /// Resolves an ask for these classes of GPU.
    pub fn new(ask: &PodAsk, classes: &[GpuClass]) -> PreparedAsk {
        let models = &ask.constraints.models;
        let admitted = |class: &GpuClass| models.is_open() || models.admits_model(&class.model);
        let wants = ask
            .asks
            .iter()
            .map(|asked| PreparedWant {
                role: asked.role,
                want: asked.want,
                needs: classes
                    .iter()
                    .map(|class| admitted(class).then(|| ShareNeed::of(&asked.want.share, class)))
                    .collect(),
            })
            .collect();
        PreparedAsk { ask: ask.clone(), wants }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn class(max_shares: u32) -> GpuClass {
        let memory = Bytes(40 << 30);
        GpuClass { model: "A100".into(), memory, allocatable: memory.percent(150), slots: 10, max_shares }
    }

    fn share_asks() -> impl Strategy<Value = ShareAsk> {
        let memory = prop_oneof![
            Just(MemoryAsk::Unlimited),
            Just(MemoryAsk::All),
            (1u64..70 << 30).prop_map(|b| MemoryAsk::Exactly(Bytes(b))),
            (1u32..=100).prop_map(MemoryAsk::Percent),
        ];
        let cores = prop_oneof![
            Just(CoresAsk::Uncounted),
            (1u32..=100).prop_map(|p| CoresAsk::Exactly(Cores::percent(p).unwrap())),
            (1u32..=12).prop_map(CoresAsk::Slots),
        ];
        (memory, cores, any::<bool>()).prop_map(|(memory, cores, whole)| ShareAsk {
            memory,
            cores,
            whole,
            ceiling: None,
        })
    }

    proptest! {
        /// The fast check and the one that explains apply the same rules.
        #[test]
        fn shortfall_is_reported_exactly_where_the_share_does_not_fit(
            held in proptest::collection::vec(share_asks(), 0..6),
            share in share_asks(),
            withheld: bool,
            max_shares in 1u32..5,
        ) {
            let class = class(max_shares);
            let mut gpu = GpuCapacity { class: 0, withheld: false, used: GpuAllocation::default() };
            for share in held {
                let need = ShareNeed::of(&share, &class);
                if need.fits(&gpu, &class) {
                    gpu.used = gpu.used.plus(need.usage);
                }
                prop_assert!(gpu.used.memory <= class.allocatable.0);
                prop_assert!(gpu.used.cores <= 100_000);
                prop_assert!(gpu.used.shares <= class.max_shares);
                prop_assert!(gpu.used.limited == 0 || gpu.used.unlimited == 0);
                prop_assert!(gpu.used.whole == 0 || gpu.used.shares == 1);
            }
            gpu.withheld = withheld;
            let need = ShareNeed::of(&share, &class);
            prop_assert_eq!(need.fits(&gpu, &class), need.shortfall_on(&gpu, &class).is_none());
        }
    }
}
