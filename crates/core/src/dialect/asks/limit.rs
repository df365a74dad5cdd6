//! How far compute may stretch beyond what was asked: one annotation for the whole pod.

use super::super::{Dialect, Settings};
use super::lines::Lines;
use super::{ContainerReading, native, vcuda};
use crate::model::{Cores, CoresAsk, WantedGpus};
use crate::pod::{Pod, Problem};
use crate::quote::short;
use std::collections::{BTreeMap, BTreeSet};

/// The limits a pod's annotations set, by annotation.
pub(super) struct Limits {
    limits: BTreeMap<String, Cores>,
    /// Those that some container goes by.
    used: BTreeSet<String>,
    /// Those that are too low for a container with all of a GPU. Beside a container with a part of one they
    /// are meant for that one, since there is only one annotation for both.
    too_low: BTreeSet<String>,
}

pub(super) fn read(pod: &Pod, problems: &mut Vec<Problem>) -> Limits {
    let mut limits = BTreeMap::new();
    for (key, text) in &pod.annotations {
        let of_vcuda = vcuda::is_core_limit(key);
        if !of_vcuda && key != native::CORES_LIMIT {
            continue;
        }
        match text.parse::<u64>() {
            Ok(percent) => {
                // Both dialects read anything beyond a GPU as all of it.
                let percent = u32::try_from(percent.min(100)).unwrap_or(100);
                limits.extend(Cores::percent(percent).map(|cores| (key.clone(), cores)));
            }
            Err(_) => {
                let text = short(text);
                let message = format!("\"{text}\" is no percentage: write a whole number from 1 to 100");
                problems.push(Problem::of_pod(key, message));
            }
        }
    }
    Limits { limits, used: BTreeSet::new(), too_low: BTreeSet::new() }
}

impl Limits {
    /// Sets how far one container's compute may stretch.
    pub(super) fn apply(
        &mut self,
        dialect: Dialect,
        want: &mut WantedGpus,
        lines: &mut Lines<'_>,
        settings: &Settings,
    ) {
        let asked = match want.part.cores {
            CoresAsk::Exactly(cores) => cores,
            CoresAsk::Slots(slots) => Cores::of_slots(slots, settings.aws_slots),
            CoresAsk::Uncounted => return,
        };
        let domains = if dialect == Dialect::Vcuda { vcuda::domains(lines.container()) } else { Vec::new() };
        let keys = domains.iter().map(|domain| format!("{domain}/{}", vcuda::CORE_LIMIT));
        for key in keys.chain([native::CORES_LIMIT.to_string()]) {
            let Some(&limit) = self.limits.get(&key) else { continue };
            if limit < asked && asked == Cores::WHOLE {
                self.too_low.insert(key);
                continue;
            }
            self.used.insert(key.clone());
            if limit < asked {
                lines.problem(&key, too_low(limit, asked));
            } else if want.part.ceiling.is_some_and(|other| other != limit) {
                lines
                    .problem(&key, format!("says {limit}, another annotation says something else: keep one"));
            } else if asked < Cores::WHOLE {
                want.part.ceiling = Some(limit);
            }
        }
    }

    /// A limit that limits nothing was meant for something.
    pub(super) fn check_used(&self, containers: &[ContainerReading], problems: &mut Vec<Problem>) {
        let asks = |dialect: Option<Dialect>| {
            containers.iter().any(|c| c.want.is_some() && (dialect.is_none() || c.dialect == dialect))
        };
        for (key, &limit) in self.limits.iter().filter(|(key, _)| !self.used.contains(*key)) {
            let message = if self.too_low.contains(key) {
                too_low(limit, Cores::WHOLE)
            } else if key == native::CORES_LIMIT && asks(None) {
                format!("there are no cores to stretch: add {} or the like", native::CORES)
            } else if key != native::CORES_LIMIT && asks(Some(Dialect::Vcuda)) {
                "no container asks under this domain: write the domain of its resources".to_string()
            } else {
                continue;
            };
            problems.push(Problem::of_pod(key, message));
        }
    }
}

fn too_low(limit: Cores, asked: Cores) -> String {
    format!("{limit} is less than the {asked} asked: write that or more")
}
