//! Carriers: counts that an admission webhook adds to containers that request only memory, so that kubelet calls a device
//! plugin for them. The pod lists them in an annotation as comma-separated `<container>=<resource>` entries. A carrier
//! itself requests nothing.

use super::constraints::list_entries;
use super::{hami, native, volcano};
use crate::model::ContainerName;
use crate::pod::{PodManifest, Problem};
use crate::truncate::shorten;
use std::collections::{BTreeMap, BTreeSet};

/// Resources that can be carriers: those of which a device plugin serves one device for each share.
pub(super) const CARRIER_RESOURCES: [&str; 3] = [native::GPU, volcano::NUMBER, hami::GPU];

/// The carriers of each container, by container name.
pub(super) struct Carriers(BTreeMap<String, Vec<String>>);

impl Carriers {
    /// Returns the carriers of a container.
    pub(super) fn of(&self, container: &ContainerName) -> &[String] {
        self.0.get(container.as_str()).map_or(&[], Vec::as_slice)
    }
}

/// Reads the annotation that lists the carriers.
pub(super) fn read(pod: &PodManifest, problems: &mut Vec<Problem>) -> Carriers {
    let mut marks: BTreeMap<String, Vec<String>> = BTreeMap::new();
    let names: BTreeSet<&str> = pod.containers.iter().map(|container| container.name.as_str()).collect();
    let text = pod.annotations.get(native::CARRIER).map_or("", String::as_str);
    for mark in list_entries(text) {
        let mut problem = |message| problems.push(Problem::of_pod(native::CARRIER, message));
        let Some((container, resource)) = mark.split_once('=').map(|(c, r)| (c.trim(), r.trim())) else {
            let mark = shorten(mark);
            problem(format!("invalid entry \"{mark}\": write <container>=<resource>, separated by commas"));
            continue;
        };
        if !names.contains(container) {
            let container = shorten(container);
            problem(format!(
                "the pod has no container \"{container}\": name one of its containers, or remove the entry"
            ));
        } else if !CARRIER_RESOURCES.contains(&resource) {
            let resource = shorten(resource);
            problem(format!("{resource} cannot be a carrier: use one of {}", CARRIER_RESOURCES.join(", ")));
        } else {
            let marked = marks.entry(container.into()).or_default();
            if !marked.iter().any(|known| known == resource) {
                marked.push(resource.into());
            }
        }
    }
    Carriers(marks)
}
