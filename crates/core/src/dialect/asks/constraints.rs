//! Constraints on GPUs and placement that a pod sets in annotations.

use super::super::Dialect;
use super::{hami, native, volcano};
use crate::model::{Colocation, Constraints, PlacementPolicy, Selector};
use crate::pod::{PodManifest, Problem};
use crate::truncate::shorten;
use std::collections::BTreeSet;

/// Annotations of other dialects that this module reads.
pub(super) const ANNOTATIONS: [&str; 11] = [
    hami::MODE,
    hami::USE_TYPE,
    hami::NO_USE_TYPE,
    hami::USE_UUID,
    hami::NO_USE_UUID,
    hami::GPU_POLICY,
    hami::NODE_POLICY,
    volcano::USE_UUID,
    volcano::NO_USE_UUID,
    volcano::MODE,
    volcano::PODGROUP_POLICY,
];

/// Maximum number of entries in one list, because every entry is compared with every GPU.
const MAX_LIST_ENTRIES: usize = 256;
/// Maximum length of an entry in bytes. Model names and UUIDs are much shorter.
const MAX_ENTRY_LENGTH: usize = 256;

/// Reads the annotations of the dialects that the pod's containers use. Native annotations apply to every dialect.
pub(super) fn read(pod: &PodManifest, dialects: &[Dialect], problems: &mut Vec<Problem>) -> Constraints {
    let (volcano, hami) = (dialects.contains(&Dialect::Volcano), dialects.contains(&Dialect::Hami));
    let annotation = |key: &'static str, applies: bool| {
        debug_assert!(super::reads_annotation(key), "{key} is not in ANNOTATIONS");
        let text = if applies { pod.annotations.get(key) } else { None };
        (key, text.map_or("", String::as_str))
    };
    let models = selector(
        &[annotation(native::MODELS, true), annotation(hami::USE_TYPE, volcano || hami)],
        &[annotation(native::NOT_MODELS, true), annotation(hami::NO_USE_TYPE, volcano || hami)],
        problems,
    );
    let uuids = selector(
        &[
            annotation(native::GPUS, true),
            annotation(volcano::USE_UUID, volcano),
            annotation(hami::USE_UUID, hami),
        ],
        &[
            annotation(native::NOT_GPUS, true),
            annotation(volcano::NO_USE_UUID, volcano),
            annotation(hami::NO_USE_UUID, hami),
        ],
        problems,
    );
    for (key, applies) in [(volcano::MODE, volcano), (hami::MODE, hami)] {
        check_mode(annotation(key, applies), problems);
    }
    if volcano {
        check_volcano(pod, problems);
    }
    // The caller sets the colocation once all containers are read.
    Constraints { models, uuids, colocation: Colocation::default(), policy: policy(pod, hami, problems) }
}

/// Returns the entries of a comma-separated list, trimmed and without empty ones.
pub(super) fn list_entries(list: &str) -> impl Iterator<Item = &str> {
    list.split(',').map(str::trim).filter(|word| !word.is_empty())
}

fn selector(
    only: &[(&'static str, &str)],
    never: &[(&'static str, &str)],
    problems: &mut Vec<Problem>,
) -> Selector {
    let mut selector = Selector::default();
    let mut set_by: Option<&str> = None;
    for &(key, text) in only {
        let list = parse_list(key, text, problems);
        match set_by {
            _ if list.is_empty() => {}
            None => {
                selector.only = list;
                set_by = Some(key);
            }
            Some(_) if selector.only == list => {}
            Some(first) => {
                let message = format!("{first} has a different value: keep one of the two");
                problems.push(Problem::of_pod(key, message));
            }
        }
    }
    let mut seen = BTreeSet::new();
    for &(key, text) in never {
        let list = parse_list(key, text, problems).into_iter();
        selector.never.extend(list.filter(|word| seen.insert(word.clone())));
    }
    selector
}

/// Returns the distinct entries of a list. A list beyond the limits is a problem and yields no entries: a truncated list
/// would have a different meaning.
fn parse_list(key: &str, text: &str, problems: &mut Vec<Problem>) -> Vec<String> {
    let mut seen = BTreeSet::new();
    let list: Vec<&str> = list_entries(text).filter(|word| seen.insert(*word)).collect();
    let wrong = if list.len() > MAX_LIST_ENTRIES {
        Some(format!("lists {} names: the maximum is {MAX_LIST_ENTRIES}", list.len()))
    } else {
        let long = list.iter().find(|word| word.len() > MAX_ENTRY_LENGTH);
        long.map(|word| {
            format!("\"{}\" is too long for a name: the maximum is {MAX_ENTRY_LENGTH} bytes", shorten(word))
        })
    };
    match wrong {
        None => list.into_iter().map(String::from).collect(),
        Some(message) => {
            problems.push(Problem::of_pod(key, message));
            Vec::new()
        }
    }
}

fn policy(pod: &PodManifest, hami: bool, problems: &mut Vec<Problem>) -> Option<PlacementPolicy> {
    let native_policy = pod.annotations.get(native::POLICY).and_then(|text| {
        // Policy names are short, so only invalid names are truncated.
        shorten(text)
            .parse()
            .map_err(|error| problems.push(Problem::of_pod(native::POLICY, format!("{error}"))))
            .ok()
    });
    if !hami {
        return native_policy;
    }
    let [gpu_policy, node_policy] = [hami::GPU_POLICY, hami::NODE_POLICY].map(|key| {
        let text = pod.annotations.get(key)?.as_str();
        match text {
            "binpack" => Some(PlacementPolicy::Binpack),
            "spread" => Some(PlacementPolicy::Spread),
            "topology-aware" if key == hami::GPU_POLICY => Some(PlacementPolicy::Topology),
            "" => None,
            _ => {
                let text = shorten(text);
                let message = format!("unknown policy \"{text}\": write \"binpack\" or \"spread\"");
                problems.push(Problem::of_pod(key, message));
                None
            }
        }
    });
    if let (Some(gpus), Some(nodes)) = (gpu_policy, node_policy)
        && gpus != nodes
        && native_policy.is_none()
    {
        let message = format!(
            "{nodes} for nodes and {gpus} for GPUs: Partage uses one policy for both, {gpus}; keep one of the two annotations"
        );
        problems.push(Problem::of_pod(hami::NODE_POLICY, message));
    }
    native_policy.or(gpu_policy).or(node_policy)
}

/// Reports unsupported ways of splitting a GPU. Partage supports one.
fn check_mode((key, mode): (&str, &str), problems: &mut Vec<Problem>) {
    let message = match mode {
        "" | "hami-core" => return,
        "mig" => "MIG is not supported yet: write \"hami-core\" or remove the annotation".to_string(),
        mode => format!(
            "unsupported mode \"{}\" (MIG is not supported yet): write \"hami-core\" or remove the annotation",
            shorten(mode)
        ),
    };
    problems.push(Problem::of_pod(key, message));
}

/// Reports Volcano annotations that Partage does not support yet.
fn check_volcano(pod: &PodManifest, problems: &mut Vec<Problem>) {
    if pod.annotations.get(volcano::PODGROUP_POLICY).is_some_and(|policy| !policy.is_empty()) {
        problems.push(Problem::of_pod(
            volcano::PODGROUP_POLICY,
            format!("pod group policies are not supported yet: consider {}", native::POLICY),
        ));
    }
}
