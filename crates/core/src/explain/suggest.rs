//! Changes that would make a pod fit. Every suggestion has been tried.

use super::first_fitting;
use crate::model::{
    Ask, Bytes, ContainerName, Cores, CoresAsk, MemoryAsk, MilliCpu, NodeName, PodAsk, Selector, Together,
};
use crate::place::ClusterCapacity;
use std::collections::BTreeSet;
use std::fmt;

/// A change that makes a pod fit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Suggestion {
    /// What to change.
    pub change: Change,
    /// A node that the changed pod fits.
    pub node: NodeName,
}

/// One change of an ask.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Change {
    /// Ask for at most so much GPU memory.
    Memory {
        /// The container, where only one must change.
        container: Option<ContainerName>,
        /// Asked now, of each GPU.
        from: Bytes,
        /// The most that fits.
        to: Bytes,
    },
    /// Ask for at most so many percent of a GPU's memory.
    MemoryPercent {
        /// Asked now.
        from: u32,
        /// The most that fits.
        to: u32,
    },
    /// Ask for at most so much compute.
    Cores {
        /// The container, where only one must change.
        container: Option<ContainerName>,
        /// Asked now, of each GPU.
        from: Cores,
        /// The most that fits.
        to: Cores,
    },
    /// Ask for at most so many slots.
    Slots {
        /// Asked now.
        from: u32,
        /// The most that fit.
        to: u32,
    },
    /// Ask for at most so many GPUs.
    Count {
        /// Asked now.
        from: u32,
        /// The most that fit.
        to: u32,
    },
    /// Ask for a limited part instead of all of a GPU.
    ShareAsk {
        /// The most memory that fits.
        to: Bytes,
    },
    /// Set a memory limit, so that it may sit beside limited shares.
    Limit {
        /// The most that fits.
        to: Bytes,
    },
    /// Allow these models as well.
    Models(Vec<String>),
    /// Allow other GPUs than those named.
    Uuids,
    /// Let the containers sit on different GPUs.
    Apart,
    /// Ask for at most so much CPU.
    Cpu {
        /// Asked now.
        from: MilliCpu,
        /// The most that fits.
        to: MilliCpu,
    },
    /// Ask for at most so much host memory.
    HostMemory {
        /// Asked now.
        from: Bytes,
        /// The most that fits.
        to: Bytes,
    },
}

impl fmt::Display for Suggestion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: it would fit on {}", self.change, self.node)
    }
}

impl fmt::Display for Change {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Change::Memory { container, from, to } => {
                write!(f, "ask for {to} of GPU memory instead of {from}{}", within(container.as_ref()))
            }
            Change::MemoryPercent { from, to } => {
                write!(f, "ask for {to} % of the GPU's memory instead of {from} %")
            }
            Change::Cores { container, from, to } => {
                write!(f, "ask for {to} of the cores instead of {from}{}", within(container.as_ref()))
            }
            Change::Slots { from, to } => write!(f, "ask for {to} slots instead of {from}"),
            Change::Count { from, to: 1 } => write!(f, "ask for 1 GPU instead of {from}"),
            Change::Count { from, to } => write!(f, "ask for {to} GPUs instead of {from}"),
            Change::ShareAsk { to } => write!(f, "ask for a part of a GPU with at most {to} of memory"),
            Change::Limit { to } => {
                write!(f, "set a memory limit of at most {to} (partage.dev/memory-limit)")
            }
            Change::Models(models) => write!(f, "allow the model {}", models.join(" or ")),
            Change::Uuids => f.write_str("allow other GPUs than those named by UUID"),
            Change::Apart => f.write_str("let the containers sit on different GPUs"),
            Change::Cpu { from, to } => write!(f, "ask for {to} instead of {from}"),
            Change::HostMemory { from, to } => write!(f, "ask for {to} of host memory instead of {from}"),
        }
    }
}

fn within(container: Option<&ContainerName>) -> String {
    container.map(|name| format!(" in container {name}")).unwrap_or_default()
}

/// Returns every single change that makes the pod fit somewhere.
pub(super) fn suggestions(cluster: &ClusterCapacity, ask: &PodAsk) -> Vec<Suggestion> {
    let search = Search { cluster, ask };
    let found = [
        search.memory(),
        search.memory_percent(),
        search.cores(),
        search.slots(),
        search.count(),
        search.part(),
        search.limit(),
        search.models(),
        search.uuids(),
        search.apart(),
        search.cpu(),
        search.host_memory(),
    ];
    found.into_iter().flatten().collect()
}

struct Search<'a> {
    cluster: &'a ClusterCapacity,
    ask: &'a PodAsk,
}

impl Search<'_> {
    /// Returns the largest value up to `most` with which the changed pod fits, and where. Fitting is monotone in every
    /// amount, so bisection finds it.
    fn largest(&self, most: u64, change: impl Fn(&mut PodAsk, u64)) -> Option<(u64, NodeName)> {
        let fits = |amount: u64| {
            let mut ask = self.ask.clone();
            change(&mut ask, amount);
            self.tried(&ask)
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

    fn tried(&self, ask: &PodAsk) -> Option<NodeName> {
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
        let exact = |ask: &Ask| match ask.want.part.memory {
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
                            if let MemoryAsk::Exactly(bytes) = &mut ask.asks[at].want.part.memory {
                                *bytes = (*bytes).min(Bytes(units * unit));
                            }
                        }
                    })?;
                    let to = Bytes(to * unit);
                    Some(Suggestion {
                        change: Change::Memory { container: container.clone(), from, to },
                        node,
                    })
                })
            },
        )
    }

    fn memory_percent(&self) -> Option<Suggestion> {
        let asked = self.ask.asks.iter().filter_map(|ask| match ask.want.part.memory {
            MemoryAsk::Percent(percent) => Some(percent),
            _ => None,
        });
        let from = asked.max()?;
        let (to, node) = self.largest(u64::from(from), |ask, most| {
            for ask in &mut ask.asks {
                if let MemoryAsk::Percent(percent) = &mut ask.want.part.memory {
                    *percent = (*percent).min(most as u32);
                }
            }
        })?;
        Some(Suggestion { change: Change::MemoryPercent { from, to: to as u32 }, node })
    }

    fn cores(&self) -> Option<Suggestion> {
        let promised = |ask: &Ask| match ask.want.part.cores {
            CoresAsk::Exactly(cores) if !ask.want.part.whole => Some(cores),
            _ => None,
        };
        let percent = |percent: u64| Cores::percent(percent.min(100) as u32).unwrap_or(Cores::WHOLE);
        self.in_one_or_all(
            |ask| promised(ask).is_some(),
            |changed, container| {
                let from = changed.iter().filter_map(|&at| promised(&self.ask.asks[at])).max()?;
                let most = u64::from(from.as_millipercent() / 1000).max(1);
                let (to, node) = self.largest(most, |ask, most| {
                    for &at in changed {
                        if let CoresAsk::Exactly(cores) = &mut ask.asks[at].want.part.cores {
                            *cores = (*cores).min(percent(most));
                        }
                    }
                })?;
                Some(Suggestion { change: Change::Cores { container, from, to: percent(to) }, node })
            },
        )
    }

    fn slots(&self) -> Option<Suggestion> {
        let asked = self.ask.asks.iter().filter_map(|ask| match ask.want.part.cores {
            CoresAsk::Slots(slots) => Some(slots),
            _ => None,
        });
        let from = asked.max()?;
        let (to, node) = self.largest(u64::from(from), |ask, most| {
            for ask in &mut ask.asks {
                if let CoresAsk::Slots(slots) = &mut ask.want.part.cores {
                    *slots = (*slots).min(most as u32);
                }
            }
        })?;
        Some(Suggestion { change: Change::Slots { from, to: to as u32 }, node })
    }

    fn count(&self) -> Option<Suggestion> {
        let from = self.ask.asks.iter().map(|ask| ask.want.count).max().filter(|&count| count > 1)?;
        let (to, node) = self.largest(u64::from(from), |ask, most| {
            for ask in &mut ask.asks {
                ask.want.count = ask.want.count.min(most as u32);
            }
        })?;
        Some(Suggestion { change: Change::Count { from, to: to as u32 }, node })
    }

    /// A limited share, where all of a GPU was requested.
    fn part(&self) -> Option<Suggestion> {
        let all = |memory: MemoryAsk| matches!(memory, MemoryAsk::All | MemoryAsk::AtMost(_));
        if !self.ask.asks.iter().any(|ask| ask.want.part.whole || all(ask.want.part.memory)) {
            return None;
        }
        let largest_card = self.cluster.classes().iter().map(|class| class.memory).max()?;
        let (to, node) = self.largest((largest_card.0 >> 20).max(1), |ask, mib| {
            for ask in &mut ask.asks {
                let part = &mut ask.want.part;
                if part.whole || all(part.memory) {
                    part.memory = MemoryAsk::Exactly(Bytes(mib << 20));
                    part.cores = CoresAsk::Uncounted;
                    part.whole = false;
                }
            }
        })?;
        Some(Suggestion { change: Change::ShareAsk { to: Bytes(to << 20) }, node })
    }

    /// A memory limit, where none was requested.
    fn limit(&self) -> Option<Suggestion> {
        let unlimited = |ask: &Ask| ask.want.part.memory == MemoryAsk::Unlimited && !ask.want.part.whole;
        if !self.ask.asks.iter().any(unlimited) {
            return None;
        }
        let largest_card = self.cluster.classes().iter().map(|class| class.memory).max()?;
        let (to, node) = self.largest((largest_card.0 >> 20).max(1), |ask, mib| {
            for ask in ask.asks.iter_mut().filter(|ask| unlimited(ask)) {
                ask.want.part.memory = MemoryAsk::Exactly(Bytes(mib << 20));
            }
        })?;
        Some(Suggestion { change: Change::Limit { to: Bytes(to << 20) }, node })
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
            let found = self.tried(&ask);
            let fits = found.is_some();
            node = node.take().or(found);
            fits
        });
        let fitting: Vec<String> = fitting.map(String::from).collect();
        Some(Suggestion { change: Change::Models(fitting), node: node? })
    }

    fn uuids(&self) -> Option<Suggestion> {
        if self.ask.constraints.uuids.is_open() {
            return None;
        }
        let mut ask = self.ask.clone();
        ask.constraints.uuids = Selector::default();
        Some(Suggestion { change: Change::Uuids, node: self.tried(&ask)? })
    }

    fn apart(&self) -> Option<Suggestion> {
        if self.ask.constraints.together != Together::Required {
            return None;
        }
        let mut ask = self.ask.clone();
        ask.constraints.together = Together::Anywhere;
        Some(Suggestion { change: Change::Apart, node: self.tried(&ask)? })
    }

    fn cpu(&self) -> Option<Suggestion> {
        let from = self.ask.cpu;
        let (to, node) = self.largest(from.0.max(1), |ask, most| ask.cpu = MilliCpu(most))?;
        Some(Suggestion { change: Change::Cpu { from, to: MilliCpu(to) }, node })
    }

    fn host_memory(&self) -> Option<Suggestion> {
        let from = self.ask.memory;
        let (to, node) = self.largest((from.0 >> 20).max(1), |ask, mib| ask.memory = Bytes(mib << 20))?;
        Some(Suggestion { change: Change::HostMemory { from, to: Bytes(to << 20) }, node })
    }
}
