//! What a pod's annotations demand of its GPUs.

use super::super::Dialect;
use super::{hami, native, volcano};
use crate::model::{Constraints, Policy, Selector, Together};
use crate::pod::{Pod, Problem};
use crate::quote::short;
use std::collections::BTreeSet;

/// The annotations of other dialects read here.
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

/// The most words of one list: every one is compared with every GPU.
const MOST_WORDS: usize = 256;
/// The longest of them: no model or UUID comes near.
const LONGEST_WORD: usize = 256;

/// Reads the annotations of every dialect the pod's containers ask in; our own hold for all of them.
pub(super) fn read(pod: &Pod, spoken: &[Dialect], problems: &mut Vec<Problem>) -> Constraints {
    let (volcano, hami) = (spoken.contains(&Dialect::Volcano), spoken.contains(&Dialect::Hami));
    let annotation = |key: &'static str, heard: bool| {
        let text = if heard { pod.annotations.get(key) } else { None };
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
    for (key, heard) in [(volcano::MODE, volcano), (hami::MODE, hami)] {
        check_mode(annotation(key, heard), problems);
    }
    if volcano {
        check_volcano(pod, problems);
    }
    // The container readings decide the rest.
    Constraints { models, uuids, together: Together::default(), policy: policy(pod, hami, problems) }
}

/// The entries of a comma list, trimmed; empty ones do not count.
pub(super) fn words(list: &str) -> impl Iterator<Item = &str> {
    list.split(',').map(str::trim).filter(|word| !word.is_empty())
}

fn selector(
    only: &[(&'static str, &str)],
    never: &[(&'static str, &str)],
    problems: &mut Vec<Problem>,
) -> Selector {
    let mut selector = Selector::default();
    let mut said_by: Option<&str> = None;
    for &(key, text) in only {
        let list = listed(key, text, problems);
        match said_by {
            _ if list.is_empty() => {}
            None => {
                selector.only = list;
                said_by = Some(key);
            }
            Some(_) if selector.only == list => {}
            Some(first) => {
                let message = format!("{first} says otherwise: keep one of the two");
                problems.push(Problem::of_pod(key, message));
            }
        }
    }
    let mut seen = BTreeSet::new();
    for &(key, text) in never {
        let list = listed(key, text, problems).into_iter();
        selector.never.extend(list.filter(|word| seen.insert(word.clone())));
    }
    selector
}

/// The words of a list, each once, unless it is too long to be one: a list cut short would mean something else.
fn listed(key: &str, text: &str, problems: &mut Vec<Problem>) -> Vec<String> {
    let mut seen = BTreeSet::new();
    let list: Vec<&str> = words(text).filter(|word| seen.insert(*word)).collect();
    let wrong = if list.len() > MOST_WORDS {
        Some(format!("lists {} names: write {MOST_WORDS} or fewer", list.len()))
    } else {
        let long = list.iter().find(|word| word.len() > LONGEST_WORD);
        long.map(|word| {
            format!("\"{}\" is too long for a name: write {LONGEST_WORD} letters or fewer", short(word))
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

fn policy(pod: &Pod, hami: bool, problems: &mut Vec<Problem>) -> Option<Policy> {
    let own = pod.annotations.get(native::POLICY).and_then(|text| {
        // A policy's name is short: only what is none is cut.
        short(text)
            .parse()
            .map_err(|error| problems.push(Problem::of_pod(native::POLICY, format!("{error}"))))
            .ok()
    });
    if !hami {
        return own;
    }
    let [of_gpus, of_nodes] = [hami::GPU_POLICY, hami::NODE_POLICY].map(|key| {
        let text = pod.annotations.get(key)?.as_str();
        match text {
            "binpack" => Some(Policy::Binpack),
            "spread" => Some(Policy::Spread),
            "topology-aware" if key == hami::GPU_POLICY => Some(Policy::Topology),
            "" => None,
            _ => {
                let text = short(text);
                let message = format!("\"{text}\" is no policy here: write \"binpack\" or \"spread\"");
                problems.push(Problem::of_pod(key, message));
                None
            }
        }
    });
    if let (Some(gpus), Some(nodes)) = (of_gpus, of_nodes)
        && gpus != nodes
        && own.is_none()
    {
        let message = format!(
            "nodes by {nodes} and GPUs by {gpus}: Partage places by one policy for both, {gpus}; write one of them only"
        );
        problems.push(Problem::of_pod(hami::NODE_POLICY, message));
    }
    own.or(of_gpus).or(of_nodes)
}

/// How a GPU is split: Partage has one way (yet).
fn check_mode((key, mode): (&str, &str), problems: &mut Vec<Problem>) {
    let message = match mode {
        "" | "hami-core" => return,
        "mig" => "MIG is not supported yet: write \"hami-core\" or leave it out".to_string(),
        mode => format!(
            "\"{}\" is no mode Partage knows (MIG is not supported yet): write \"hami-core\" or leave it out",
            short(mode)
        ),
    };
    problems.push(Problem::of_pod(key, message));
}

/// What Volcano knows and Partage does not (yet).
fn check_volcano(pod: &Pod, problems: &mut Vec<Problem>) {
    if pod.annotations.get(volcano::PODGROUP_POLICY).is_some_and(|policy| !policy.is_empty()) {
        problems.push(Problem::of_pod(
            volcano::PODGROUP_POLICY,
            format!("pods of a group are not kept apart by Partage (yet): {} may do", native::POLICY),
        ));
    }
}
