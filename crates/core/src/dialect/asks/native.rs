//! The native dialect: `partage.dev/*`.

use super::super::Dialect;
use super::WantResult;
use super::counted_spelling::CountedSpelling;
use super::did_you_mean;
use super::resource_list::ResourceList;
use crate::model::Bytes;
use crate::pod::{PodManifest, Problem};
use crate::truncate::shorten;

pub(super) const PREFIX: &str = "partage.dev/";
pub(super) const GPU: &str = "partage.dev/gpu";
pub(super) const MEMORY: &str = "partage.dev/memory";
const MEMORY_PERCENT: &str = "partage.dev/memory-percent";
pub(super) const CORES: &str = "partage.dev/cores";
pub(super) const RESOURCES: [&str; 4] = [GPU, MEMORY, MEMORY_PERCENT, CORES];
/// The name of a resource for pods without a GPU to which one can be attached, and of the annotation that requests it.
pub(super) const ATTACHABLE: &str = "partage.dev/attachable";

pub(super) const POLICY: &str = "partage.dev/policy";
pub(super) const MODELS: &str = "partage.dev/models";
pub(super) const NOT_MODELS: &str = "partage.dev/not-models";
pub(super) const GPUS: &str = "partage.dev/gpus";
pub(super) const NOT_GPUS: &str = "partage.dev/not-gpus";
pub(super) const SAME_GPU: &str = "partage.dev/same-gpu";
pub(super) const EXCLUSIVE: &str = "partage.dev/exclusive";
/// Allows allocations above the memory limit, which are placed in host memory.
pub(super) const OVERSUBSCRIBE: &str = "partage.dev/oversubscribe";
/// Requests short waits for turns, at some cost in throughput.
pub(super) const LATENCY: &str = "partage.dev/latency";
/// Requests earlier turns than those of containers with a lower priority.
pub(super) const PRIORITY: &str = "partage.dev/priority";
pub(super) const CORES_LIMIT: &str = "partage.dev/cores-limit";
/// Memory limit for slots of the AWS dialect.
pub(super) const MEMORY_LIMIT: &str = "partage.dev/memory-limit";
pub(super) const CARRIER: &str = "partage.dev/carrier";
/// The grant of the pod.
pub(in crate::dialect) const GRANT: &str = "partage.dev/grant";
/// Minimum amount of memory. No program runs in less, and "8" for "8Gi" is a common mistake.
pub(crate) const MIN_MEMORY: Bytes = Bytes(1 << 20);
pub(super) const ANNOTATIONS: [&str; 16] = [
    POLICY,
    MODELS,
    NOT_MODELS,
    GPUS,
    NOT_GPUS,
    SAME_GPU,
    EXCLUSIVE,
    OVERSUBSCRIBE,
    LATENCY,
    PRIORITY,
    CORES_LIMIT,
    MEMORY_LIMIT,
    CARRIER,
    GRANT,
    ATTACHABLE,
    crate::resize::ANNOTATION,
];

/// Reads the request of one container.
pub(super) fn read(list: &mut ResourceList<'_>) -> WantResult {
    let spelling = CountedSpelling {
        dialect: Dialect::Native,
        count: GPU,
        memory: MEMORY,
        percent: MEMORY_PERCENT,
        cores: CORES,
        unit: 1,
        min_memory: MIN_MEMORY,
        percent_wins: false,
        full_is_whole: false,
        zero_is_absent: false,
    };
    spelling.read(list)
}

/// Reports unknown annotations with Partage's prefix.
pub(super) fn check_annotations(pod: &PodManifest, problems: &mut Vec<Problem>) {
    for key in pod.annotations.keys() {
        if key.starts_with(PREFIX) && !ANNOTATIONS.contains(&key.as_str()) {
            let near = did_you_mean::nearest(&shorten(key), &ANNOTATIONS);
            problems.push(Problem::of_pod(key, format!("unknown annotation: did you mean {near}?")));
        }
    }
}

/// Reads a boolean annotation. Any value other than `true` and `false` is a problem.
pub(super) fn flag(pod: &PodManifest, key: &str, problems: &mut Vec<Problem>) -> Option<bool> {
    match pod.annotations.get(key)?.as_str() {
        "true" => Some(true),
        "false" => Some(false),
        other => {
            let other = shorten(other);
            let message = format!("\"{other}\" is not a boolean: write \"true\" or \"false\"");
            problems.push(Problem::of_pod(key, message));
            None
        }
    }
}
