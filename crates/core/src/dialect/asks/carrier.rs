//! Counts that our own webhook adds to carry an ask of memory only. They are marked on the pod, as
//! `<container>=<resource>` separated by commas, and ask for nothing themselves.

use super::constraints::words;
use super::{hami, native, volcano};
use crate::model::ContainerName;
use crate::pod::{Pod, Problem};
use crate::quote::short;
use std::collections::{BTreeMap, BTreeSet};

/// What can carry an ask: the counts a device plugin serves.
const COUNTS: [&str; 3] = [native::GPU, volcano::NUMBER, hami::GPU];

/// The marked resources of each container.
pub(super) struct Carriers(BTreeMap<String, Vec<String>>);

impl Carriers {
    pub(super) fn of(&self, container: &ContainerName) -> &[String] {
        self.0.get(container.as_str()).map_or(&[], Vec::as_slice)
    }
}

pub(super) fn read(pod: &Pod, problems: &mut Vec<Problem>) -> Carriers {
    let mut marks: BTreeMap<String, Vec<String>> = BTreeMap::new();
    let names: BTreeSet<&str> = pod.containers.iter().map(|container| container.name.as_str()).collect();
    let text = pod.annotations.get(native::CARRIER).map_or("", String::as_str);
    for mark in words(text) {
        let mut problem = |message| problems.push(Problem::of_pod(native::CARRIER, message));
        let Some((container, resource)) = mark.split_once('=').map(|(c, r)| (c.trim(), r.trim())) else {
            let mark = short(mark);
            problem(format!("\"{mark}\" marks nothing: write <container>=<resource>, separated by commas"));
            continue;
        };
        if !names.contains(container) {
            let container = short(container);
            problem(format!(
                "there is no container \"{container}\": name one of the pod's, or drop the mark"
            ));
        } else if !COUNTS.contains(&resource) {
            let resource = short(resource);
            problem(format!("{resource} cannot carry an ask, only a count can: {}", COUNTS.join(", ")));
        } else {
            let marked = marks.entry(container.into()).or_default();
            if !marked.iter().any(|known| known == resource) {
                marked.push(resource.into());
            }
        }
    }
    Carriers(marks)
}
