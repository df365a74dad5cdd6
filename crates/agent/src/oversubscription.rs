//! Memory oversubscription: pods that ask for it by annotation, on nodes that allow it.
//!
//! The decision is made with the pod's grant and persisted in its record: annotations of a running pod can be changed by its
//! tenants, and settings by administrators, and neither must change what a region allows when it is created again.

use crate::device_plugin::{Refusal, RefusalReason};
use crate::settings::AgentSettings;
use crate::store::PodRecord;
use partage_core::model::{Node, Oversubscription, PodAsk};
use partage_region::RegionPolicy;

/// Refuses a pod that asks to oversubscribe its memory on a node that does not allow it.
pub(crate) fn check_allowed(node: &Node, ask: &PodAsk, settings: &AgentSettings) -> Result<(), Refusal> {
    if !ask.oversubscribe || settings.oversubscribe == Oversubscription::Allowed {
        return Ok(());
    }
    let message = format!(
        "the pod requests partage.dev/oversubscribe, which node {} does not allow (setting oversubscribe: refused): remove the \
         annotation and request enough memory, or schedule the pod to a node that allows it",
        node.name
    );
    Err(Refusal::new(RefusalReason::NotAllowed, message))
}

/// Returns the policy of the regions of a pod's containers, which holds for all of their GPUs.
pub(crate) fn region_policy(record: &PodRecord) -> RegionPolicy {
    RegionPolicy { oversubscribe: record.oversubscribe, ..RegionPolicy::default() }
}
