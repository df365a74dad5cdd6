//! Changes that would make a pod fit. Every suggestion has been tried.

use super::first_fitting;
use crate::model::{
    Ask, Bytes, Colocation, ContainerName, Cores, CoresAsk, MemoryAsk, MilliCpu, NodeName, PodAsk, Selector,
};
use crate::place::ClusterCapacity;
use std::collections::BTreeSet;
use std::fmt;

/// A change that makes a pod fit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Suggestion {
    /// The change of the ask.
    pub change: SuggestedChange,
    /// A node that the changed pod fits.
    pub node: NodeName,
}

/// A change of an ask.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SuggestedChange {
    /// Request less GPU memory.
    Memory {
        /// The container, if only one has to change.
        container: Option<ContainerName>,
        /// The current request for each GPU.
        from: Bytes,
        /// The largest value that fits.
        to: Bytes,
    },
    /// Request a smaller percentage of a GPU's memory.
    MemoryPercent {
        /// The amount of the current request.
        from: u32,
        /// The largest value that fits.
        to: u32,
    },
    /// Request less compute on each GPU.
    Cores {
        /// The container, if only one has to change.
        container: Option<ContainerName>,
        /// The current request for each GPU.
        from: Cores,
        /// The largest value that fits.
        to: Cores,
    },
    /// Request fewer slots, in every ask for more than `to`.
    Slots {
        /// The amount of the current request.
        from: u32,
        /// The largest value that fits.
        to: u32,
    },
    /// Request fewer GPUs, in every ask for more than `to`.
    Count {
        /// The amount of the current request.
        from: u32,
        /// The largest value that fits.
        to: u32,
    },
    /// Request a limited share instead of a whole GPU.
    LimitedShare {
        /// The largest amount of memory that fits.
        to: Bytes,
    },
    /// Set a memory limit, so that the share can be placed beside limited shares.
    Limit {
        /// The largest value that fits.
        to: Bytes,
    },
    /// Allow these models as well.
    Models(Vec<String>),
    /// Allow other GPUs than those named.
    Uuids,
    /// Allow the containers to use different GPUs.
    Apart,
    /// Request less CPU, in thousandths of a core.
    Cpu {
        /// The amount of the current request.
        from: MilliCpu,
        /// The largest value that fits.
        to: MilliCpu,
    },
    /// Request less host memory.
    HostMemory {
        /// The amount of the current request.
        from: Bytes,
        /// The largest value that fits.
        to: Bytes,
    },
}

impl fmt::Display for Suggestion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: it would fit on {}", self.change, self.node)
    }
}

impl fmt::Display for SuggestedChange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            SuggestedChange::Memory { container, from, to } => {
                write!(f, "request {to} of GPU memory instead of {from}{}", within(container.as_ref()))
            }
            SuggestedChange::MemoryPercent { from, to } => {
                write!(f, "request {to} % of the GPU's memory instead of {from} %")
            }
            SuggestedChange::Cores { container, from, to } => {
                write!(f, "request {to} of the cores instead of {from}{}", within(container.as_ref()))
            }
            SuggestedChange::Slots { from, to } => write!(f, "request {to} slots instead of {from}"),
            SuggestedChange::Count { from, to: 1 } => write!(f, "request 1 GPU instead of {from}"),
            SuggestedChange::Count { from, to } => write!(f, "request {to} GPUs instead of {from}"),
            SuggestedChange::LimitedShare { to } => {
                write!(f, "request a share of a GPU with at most {to} of memory")
            }
            SuggestedChange::Limit { to } => {
                write!(f, "set a memory limit of at most {to} (partage.dev/memory-limit)")
            }
            SuggestedChange::Models(models) => write!(f, "allow the model {}", models.join(" or ")),
            SuggestedChange::Uuids => f.write_str("allow other GPUs than those named by UUID"),
            SuggestedChange::Apart => f.write_str("allow the containers to use different GPUs"),
            SuggestedChange::Cpu { from, to } => write!(f, "request {to} instead of {from}"),
            SuggestedChange::HostMemory { from, to } => {
                write!(f, "request {to} of host memory instead of {from}")
            }
        }
    }
}

fn within(container: Option<&ContainerName>) -> String {
    container.map(|name| format!(" in container {name}")).unwrap_or_default()
}

/// Returns every single change that makes the pod fit somewhere.
pub(super) fn suggestions(cluster: &ClusterCapacity, ask: &PodAsk) -> Vec<Suggestion> {
    let search = SuggestionSearch { cluster, ask };
    let found = [
        search.memory(),
        search.memory_percent(),
        search.cores(),
        search.slots(),
        search.count(),
        search.limited_share(),
        search.limit(),
        search.models(),
        search.uuids(),
        search.allow_separate_gpus(),
        search.cpu(),
        search.host_memory(),
    ];
    found.into_iter().flatten().collect()
}

struct SuggestionSearch<'a> {
    cluster: &'a ClusterCapacity,
    ask: &'a PodAsk,
}

impl SuggestionSearch<'_> {
    /// Returns the largest value up to `most` with which the changed pod fits, and where. Fitting is monotone in every
    /// amount, so bisection finds it.
    fn largest(&self, most: u64, change: impl Fn(&mut PodAsk, u64)) -> Option<(u64, NodeName)> {
        let fits = |amount: u64| {
            let mut ask = self.ask.clone();
            change(&mut ask, amount);
            self.fitting_node(&ask)
        };
        let mut best = (1, fits(1)?);
        let (mut low, mut high) = (1, most);
        while low < high {
            let middle = low + (high - low).div_ceil(2);
            match fits(middle) {
                Some(node) => {
                    best = (middle, node);
                    low = middle;
                }
                None => high = middle - 1,
            }
        }
        Some(best)
    }

    fn fitting_node(&self, ask: &PodAsk) -> Option<NodeName> {
        let node = first_fitting(self.cluster, ask)?;
        Some(self.cluster.node_capacity(node).node.name.clone())
    }

    /// Tries a change in one container after the other, then in all of them at once.
    fn in_one_or_all(
        &self,
        asks: impl Fn(&Ask) -> bool,
        change: impl Fn(&[usize], Option<ContainerName>) -> Option<Suggestion>,
    ) -> Option<Suggestion> {
        let all: Vec<usize> = (0..self.ask.asks.len()).filter(|&at| asks(&self.ask.asks[at])).collect();
        let name = |at: usize| (self.ask.asks.len() > 1).then(|| self.ask.asks[at].container.clone());
        let one = all.iter().find_map(|&at| change(&[at], name(at)));
        one.or_else(|| if all.len() > 1 { change(&all, None) } else { None })
    }

    fn memory(&self) -> Option<Suggestion> {
        let exact = |ask: &Ask| match ask.want.share.memory {
            MemoryAsk::Exactly(bytes) => Some(bytes),
            _ => None,
        };
        self.in_one_or_all(
            |ask| exact(ask).is_some(),
            |changed, container| {
                let from = changed.iter().filter_map(|&at| exact(&self.ask.asks[at])).max()?;
                // In the unit that the amount was written in, as far as that can be seen.
                let units = [1u64 << 30, 1 << 28, 1 << 20].into_iter().filter(|unit| from.0 % unit == 0);
                units.chain([1 << 20]).find_map(|unit| {
                    let (to, node) = self.largest((from.0 / unit).max(1), |ask, units| {
                        for &at in changed {
                            if let MemoryAsk::Exactly(bytes) = &mut ask.asks[at].want.share.memory {
                                *bytes = (*bytes).min(Bytes(units * unit));
                            }
                        }
                    })?;
                    let to = Bytes(to * unit);
                    Some(Suggestion {
                        change: SuggestedChange::Memory { container: container.clone(), from, to },
                        node,
                    })
                })
            },
        )
    }

    fn memory_percent(&self) -> Option<Suggestion> {
        let asked = self.ask.asks.iter().filter_map(|ask| match ask.want.share.memory {
            MemoryAsk::Percent(percent) => Some(percent),
            _ => None,
        });
        let from = asked.max()?;
        let (to, node) = self.largest(u64::from(from), |ask, most| {
            for ask in &mut ask.asks {
                if let MemoryAsk::Percent(percent) = &mut ask.want.share.memory {
                    *percent = (*percent).min(most as u32);
                }
            }
        })?;
        Some(Suggestion { change: SuggestedChange::MemoryPercent { from, to: to as u32 }, node })
    }

    fn cores(&self) -> Option<Suggestion> {
        let guaranteed = |ask: &Ask| match ask.want.share.cores {
            CoresAsk::Exactly(cores) if !ask.want.share.whole => Some(cores),
            _ => None,
        };
        let percent = |percent: u64| Cores::percent(percent.min(100) as u32).unwrap_or(Cores::WHOLE);
        self.in_one_or_all(
            |ask| guaranteed(ask).is_some(),
            |changed, container| {
                let from = changed.iter().filter_map(|&at| guaranteed(&self.ask.asks[at])).max()?;
                let most = u64::from(from.as_whole_percent()).max(1);
                let (to, node) = self.largest(most, |ask, most| {
                    for &at in changed {
                        if let CoresAsk::Exactly(cores) = &mut ask.asks[at].want.share.cores {
                            *cores = (*cores).min(percent(most));
                        }
                    }
                })?;
                Some(Suggestion { change: SuggestedChange::Cores { container, from, to: percent(to) }, node })
            },
        )
    }

    fn slots(&self) -> Option<Suggestion> {
        let asked = self.ask.asks.iter().filter_map(|ask| match ask.want.share.cores {
            CoresAsk::Slots(slots) => Some(slots),
            _ => None,
        });
        let from = asked.max()?;
        let (to, node) = self.largest(u64::from(from), |ask, most| {
            for ask in &mut ask.asks {
                if let CoresAsk::Slots(slots) = &mut ask.want.share.cores {
                    *slots = (*slots).min(most as u32);
                }
            }
        })?;
        Some(Suggestion { change: SuggestedChange::Slots { from, to: to as u32 }, node })
    }

    fn count(&self) -> Option<Suggestion> {
        let from = self.ask.asks.iter().map(|ask| ask.want.count).max().filter(|&count| count > 1)?;
        let (to, node) = self.largest(u64::from(from), |ask, most| {
            for ask in &mut ask.asks {
                ask.want.count = ask.want.count.min(most as u32);
            }
        })?;
        Some(Suggestion { change: SuggestedChange::Count { from, to: to as u32 }, node })
    }

    /// Returns a limited share if all of a GPU was requested.
    fn limited_share(&self) -> Option<Suggestion> {
        let all = |memory: MemoryAsk| matches!(memory, MemoryAsk::All | MemoryAsk::AtMost(_));
        if !self.ask.asks.iter().any(|ask| ask.want.share.whole || all(ask.want.share.memory)) {
            return None;
        }
        let largest_card = self.cluster.classes().iter().map(|class| class.memory).max()?;
        let (to, node) = self.largest((largest_card.0 >> 20).max(1), |ask, mib| {
            for ask in &mut ask.asks {
                let share = &mut ask.want.share;
                if share.whole || all(share.memory) {
                    share.memory = MemoryAsk::Exactly(Bytes(mib << 20));
                    share.cores = CoresAsk::Uncounted;
                    share.whole = false;
                }
            }
        })?;
        Some(Suggestion { change: SuggestedChange::LimitedShare { to: Bytes(to << 20) }, node })
    }

    /// Returns a memory limit if none was requested.
    fn limit(&self) -> Option<Suggestion> {
        let unlimited = |ask: &Ask| ask.want.share.memory == MemoryAsk::Unlimited && !ask.want.share.whole;
        if !self.ask.asks.iter().any(unlimited) {
            return None;
        }
        let largest_card = self.cluster.classes().iter().map(|class| class.memory).max()?;
        let (to, node) = self.largest((largest_card.0 >> 20).max(1), |ask, mib| {
            for ask in ask.asks.iter_mut().filter(|ask| unlimited(ask)) {
                ask.want.share.memory = MemoryAsk::Exactly(Bytes(mib << 20));
            }
        })?;
        Some(Suggestion { change: SuggestedChange::Limit { to: Bytes(to << 20) }, node })
    }

    fn models(&self) -> Option<Suggestion> {
        if self.ask.constraints.models.is_open() {
            return None;
        }
        let models: BTreeSet<&str> =
            self.cluster.classes().iter().map(|class| class.model.as_str()).collect();
        let mut node = None;
        let fitting = models.into_iter().filter(|model| {
            let mut ask = self.ask.clone();
            ask.constraints.models = Selector { only: vec![format!("={model}")], never: Vec::new() };
            let found = self.fitting_node(&ask);
            let fits = found.is_some();
            node = node.take().or(found);
            fits
        });
        let fitting: Vec<String> = fitting.map(String::from).collect();
        Some(Suggestion { change: SuggestedChange::Models(fitting), node: node? })
    }

    fn uuids(&self) -> Option<Suggestion> {
        if self.ask.constraints.uuids.is_open() {
            return None;
        }
        let mut ask = self.ask.clone();
        ask.constraints.uuids = Selector::default();
        Some(Suggestion { change: SuggestedChange::Uuids, node: self.fitting_node(&ask)? })
    }

    fn allow_separate_gpus(&self) -> Option<Suggestion> {
        if self.ask.constraints.colocation != Colocation::Required {
            return None;
        }
        let mut ask = self.ask.clone();
        ask.constraints.colocation = Colocation::Anywhere;
        Some(Suggestion { change: SuggestedChange::Apart, node: self.fitting_node(&ask)? })
    }

    fn cpu(&self) -> Option<Suggestion> {
        let from = self.ask.cpu;
        let (to, node) = self.largest(from.0.max(1), |ask, most| ask.cpu = MilliCpu(most))?;
        Some(Suggestion { change: SuggestedChange::Cpu { from, to: MilliCpu(to) }, node })
    }

    fn host_memory(&self) -> Option<Suggestion> {
        let from = self.ask.memory;
        let (to, node) = self.largest((from.0 >> 20).max(1), |ask, mib| ask.memory = Bytes(mib << 20))?;
        Some(Suggestion { change: SuggestedChange::HostMemory { from, to: Bytes(to << 20) }, node })
    }
}
