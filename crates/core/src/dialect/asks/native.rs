//! Partage's own words: `partage.dev/*`.

use super::super::Dialect;
use super::Read;
use super::counted::Counted;
use super::lines::Lines;
use super::nearest;
use crate::model::Bytes;
use crate::pod::{Pod, Problem};
use crate::quote::short;

pub(super) const PREFIX: &str = "partage.dev/";
pub(super) const GPU: &str = "partage.dev/gpu";
pub(super) const MEMORY: &str = "partage.dev/memory";
const MEMORY_PERCENT: &str = "partage.dev/memory-percent";
pub(super) const CORES: &str = "partage.dev/cores";
pub(super) const RESOURCES: [&str; 4] = [GPU, MEMORY, MEMORY_PERCENT, CORES];
/// A resource without a GPU, and the annotation that asks for it.
pub(super) const ATTACHABLE: &str = "partage.dev/attachable";

pub(super) const POLICY: &str = "partage.dev/policy";
pub(super) const MODELS: &str = "partage.dev/models";
pub(super) const NOT_MODELS: &str = "partage.dev/not-models";
pub(super) const GPUS: &str = "partage.dev/gpus";
pub(super) const NOT_GPUS: &str = "partage.dev/not-gpus";
pub(super) const SAME_GPU: &str = "partage.dev/same-gpu";
pub(super) const EXCLUSIVE: &str = "partage.dev/exclusive";
/// Memory beyond the limit is placed on the host.
pub(super) const OVERSUBSCRIBE: &str = "partage.dev/oversubscribe";
pub(super) const CORES_LIMIT: &str = "partage.dev/cores-limit";
/// How much memory the slots of the AWS dialect are held to.
pub(super) const MEMORY_LIMIT: &str = "partage.dev/memory-limit";
pub(super) const CARRIER: &str = "partage.dev/carrier";
/// What a pod was given.
pub(in crate::dialect) const GRANT: &str = "partage.dev/grant";
/// Nothing runs in less memory, and "8" for "8Gi" is a slip of the pen.
pub(crate) const LEAST: Bytes = Bytes(1 << 20);
pub(super) const ANNOTATIONS: [&str; 14] = [
    POLICY,
    MODELS,
    NOT_MODELS,
    GPUS,
    NOT_GPUS,
    SAME_GPU,
    EXCLUSIVE,
    OVERSUBSCRIBE,
    CORES_LIMIT,
    MEMORY_LIMIT,
    CARRIER,
    GRANT,
    ATTACHABLE,
    crate::resize::ANNOTATION,
];

pub(super) fn read(lines: &mut Lines<'_>) -> Read {
    let spelling = Counted {
        dialect: Dialect::Native,
        count: GPU,
        memory: MEMORY,
        percent: MEMORY_PERCENT,
        cores: CORES,
        unit: 1,
        least: LEAST,
        percent_wins: false,
        full_is_whole: false,
        zero_is_absent: false,
    };
    spelling.read(lines)
}

/// Annotations under our own name that are none of ours.
pub(super) fn check_annotations(pod: &Pod, problems: &mut Vec<Problem>) {
    for key in pod.annotations.keys() {
        if key.starts_with(PREFIX) && !ANNOTATIONS.contains(&key.as_str()) {
            let near = nearest::of(&short(key), &ANNOTATIONS);
            problems.push(Problem::of_pod(
                key,
                format!("Partage knows no such annotation: did you mean {near}?"),
            ));
        }
    }
}

/// Reads an annotation that is `true` or `false`.
pub(super) fn flag(pod: &Pod, key: &str, problems: &mut Vec<Problem>) -> Option<bool> {
    match pod.annotations.get(key)?.as_str() {
        "true" => Some(true),
        "false" => Some(false),
        other => {
            let other = short(other);
            let message = format!("\"{other}\" is not a boolean: write \"true\" or \"false\"");
            problems.push(Problem::of_pod(key, message));
            None
        }
    }
}
