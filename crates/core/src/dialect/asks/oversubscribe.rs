//! The annotation that lets a pod's containers allocate more GPU memory than their limits.

use super::{ContainerReading, native};
use crate::model::MemoryAsk;
use crate::pod::{PodManifest, Problem};

/// Returns whether a pod requests memory oversubscription.
///
/// If no container has a memory limit, the annotation is a problem: the pod must not start without what it requests.
pub(super) fn read(pod: &PodManifest, containers: &[ContainerReading], problems: &mut Vec<Problem>) -> bool {
    if native::flag(pod, native::OVERSUBSCRIBE, problems) != Some(true) {
        return false;
    }
    let mut wants = containers.iter().filter_map(|container| container.want).peekable();
    let asks = wants.peek().is_some();
    // A whole GPU without an explicit limit is limited by the driver only.
    let is_limited = wants.any(|want| match want.share.memory {
        MemoryAsk::Unlimited => false,
        MemoryAsk::All => !want.share.whole,
        MemoryAsk::Exactly(_) | MemoryAsk::Percent(_) | MemoryAsk::AtMost(_) => true,
    });
    // If no request is clear, other problems are already reported.
    if asks && !is_limited {
        let message = format!(
            "no container has a memory limit to exceed: request memory, like {}, or remove this annotation",
            native::MEMORY
        );
        problems.push(Problem::of_pod(native::OVERSUBSCRIBE, message));
    }
    asks && is_limited
}
