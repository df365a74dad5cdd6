//! Compute ceilings: an annotation of the pod limits how far its compute may exceed the request while the GPU is idle.

use super::super::{Dialect, DialectSettings};
use super::resource_list::ResourceList;
use super::{ContainerReading, native, vcuda};
use crate::model::{Cores, CoresAsk, WantedGpus};
use crate::pod::{PodManifest, Problem};
use crate::truncate::shorten;
use std::collections::{BTreeMap, BTreeSet};

/// The ceilings that a pod's annotations set, by annotation.
pub(super) struct CoresLimits {
    limits: BTreeMap<String, Cores>,
    /// Annotations that apply to at least one container.
    used: BTreeSet<String>,
    /// Annotations that are too low for a container with a whole GPU. This is a problem only if no other container of the
    /// pod uses the annotation, because one annotation serves all containers.
    too_low: BTreeSet<String>,
}

/// Reads the annotations of every dialect that set a ceiling.
pub(super) fn read(pod: &PodManifest, problems: &mut Vec<Problem>) -> CoresLimits {
    let mut limits = BTreeMap::new();
    for (key, text) in &pod.annotations {
        let is_vcuda_limit = vcuda::is_core_limit(key);
        if !is_vcuda_limit && key != native::CORES_LIMIT {
            continue;
        }
        match text.parse::<u64>() {
            Ok(percent) => {
                // In both dialects, values above 100 mean the whole GPU.
                let percent = u32::try_from(percent.min(100)).unwrap_or(100);
                limits.extend(Cores::percent(percent).map(|cores| (key.clone(), cores)));
            }
            Err(_) => {
                let text = shorten(text);
                let message = format!("\"{text}\" is not a percentage: write a whole number from 1 to 100");
                problems.push(Problem::of_pod(key, message));
            }
        }
    }
    CoresLimits { limits, used: BTreeSet::new(), too_low: BTreeSet::new() }
}

impl CoresLimits {
    /// Sets the ceiling of one container.
    pub(super) fn apply(
        &mut self,
        dialect: Dialect,
        want: &mut WantedGpus,
        list: &mut ResourceList<'_>,
        settings: &DialectSettings,
    ) {
        let asked = match want.share.cores {
            CoresAsk::Exactly(cores) => cores,
            CoresAsk::Slots(slots) => Cores::of_slots(slots, settings.aws_slots),
            CoresAsk::Uncounted => return,
        };
        let domains = if dialect == Dialect::Vcuda { vcuda::domains(list.container()) } else { Vec::new() };
        let keys = domains.iter().map(|domain| format!("{domain}/{}", vcuda::CORE_LIMIT));
        for key in keys.chain([native::CORES_LIMIT.to_string()]) {
            let Some(&limit) = self.limits.get(&key) else { continue };
            if limit < asked && asked == Cores::WHOLE {
                self.too_low.insert(key);
                continue;
            }
            self.used.insert(key.clone());
            if limit < asked {
                list.problem(&key, too_low(limit, asked));
            } else if want.share.ceiling.is_some_and(|other| other != limit) {
                list.problem(
                    &key,
                    format!("is {limit}, but another annotation sets a different limit: keep one"),
                );
            } else if asked < Cores::WHOLE {
                want.share.ceiling = Some(limit);
            }
        }
    }

    /// Reports annotations that apply to no container.
    pub(super) fn check_used(&self, containers: &[ContainerReading], problems: &mut Vec<Problem>) {
        let asks = |dialect: Option<Dialect>| {
            containers.iter().any(|c| c.want.is_some() && (dialect.is_none() || c.dialect == dialect))
        };
        for (key, &limit) in self.limits.iter().filter(|(key, _)| !self.used.contains(*key)) {
            let message = if self.too_low.contains(key) {
                too_low(limit, Cores::WHOLE)
            } else if key == native::CORES_LIMIT && asks(None) {
                format!(
                    "no container requests cores that this could limit: add {} or its equivalent",
                    native::CORES
                )
            } else if key != native::CORES_LIMIT && asks(Some(Dialect::Vcuda)) {
                "no container has resources of this domain: write the domain of its resources".to_string()
            } else {
                continue;
            };
            problems.push(Problem::of_pod(key, message));
        }
    }
}

fn too_low(limit: Cores, asked: Cores) -> String {
    format!("{limit} is less than the {asked} requested: write {asked} or more")
}
