//! Whether a pod's containers may allocate more GPU memory than their limit.

use super::{ContainerReading, native};
use crate::model::MemoryAsk;
use crate::pod::{Pod, Problem};

/// Returns whether a pod asks to oversubscribe its memory.
///
/// A pod none of whose containers has a memory limit cannot: that becomes a problem, and never a pod that starts without what it
/// asked for.
pub(super) fn read(pod: &Pod, containers: &[ContainerReading], problems: &mut Vec<Problem>) -> bool {
    if native::flag(pod, native::OVERSUBSCRIBE, problems) != Some(true) {
        return false;
    }
    let mut wants = containers.iter().filter_map(|container| container.want).peekable();
    let asks = wants.peek().is_some();
    // The limits of a whole GPU without one of its own are the driver's.
    let is_limited = wants.any(|want| match want.part.memory {
        MemoryAsk::Unlimited => false,
        MemoryAsk::All => !want.part.whole,
        MemoryAsk::Exactly(_) | MemoryAsk::Percent(_) | MemoryAsk::AtMost(_) => true,
    });
    // Where no ask is clear, other problems say so.
    if asks && !is_limited {
        let message = format!(
            "no container has a memory limit that could be exceeded: ask for memory, like {}, or leave this annotation out",
            native::MEMORY
        );
        problems.push(Problem::of_pod(native::OVERSUBSCRIBE, message));
    }
    asks && is_limited
}
