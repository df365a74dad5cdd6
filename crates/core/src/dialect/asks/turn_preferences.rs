//! The annotations about a pod's turns on shared GPUs: its latency class and its priority.

use super::{ContainerReading, native};
use crate::model::{CoresAsk, MAX_PRIORITY, TurnPreferences};
use crate::pod::{PodManifest, Problem};
use crate::truncate::shorten;

/// Reads the preferences of a pod. They hold for all of its containers; a pod without GPU requests has none.
pub(super) fn read(
    pod: &PodManifest,
    containers: &[ContainerReading],
    problems: &mut Vec<Problem>,
) -> TurnPreferences {
    let low_latency = low_latency(pod, problems);
    let priority = priority(pod, problems).unwrap_or_default();
    let mut wants = containers.iter().filter_map(|container| container.want).peekable();
    if wants.peek().is_none() {
        return TurnPreferences::default();
    }
    // A container with a whole GPU needs no turns, and its launches start at once.
    let is_guaranteed = wants.any(|want| want.share.whole || want.share.cores != CoresAsk::Uncounted);
    if low_latency && !is_guaranteed {
        let message = "no container requests cores, and only launches within the guarantee start soon: add \
                       partage.dev/cores or its equivalent";
        problems.push(Problem::of_pod(native::LATENCY, message));
    }
    TurnPreferences { low_latency: low_latency && is_guaranteed, priority }
}

fn low_latency(pod: &PodManifest, problems: &mut Vec<Problem>) -> bool {
    match pod.annotations.get(native::LATENCY).map(String::as_str) {
        None => false,
        Some("low") => true,
        Some(other) => {
            let other = shorten(other);
            let message =
                format!("\"{other}\" is not a latency class: write \"low\", or remove this annotation");
            problems.push(Problem::of_pod(native::LATENCY, message));
            false
        }
    }
}

fn priority(pod: &PodManifest, problems: &mut Vec<Problem>) -> Option<u32> {
    let text = pod.annotations.get(native::PRIORITY)?;
    let is_number = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    let priority = text.parse().ok().filter(|priority| is_number && *priority <= MAX_PRIORITY);
    if priority.is_none() {
        let text = shorten(text);
        let message =
            format!("\"{text}\" is not a priority: write a whole number from \"0\" to \"{MAX_PRIORITY}\"");
        problems.push(Problem::of_pod(native::PRIORITY, message));
    }
    priority
}
