//! Recovery from what earlier agents left: their records and CDI specs, kubelet's checkpoint, and the annotations of pods.

use super::lifecycle::{ContainerOwner, Containers, RecoveredContainer, RecoveryInput};
use super::prepare::PrepareError;
use crate::cdi_edits::DriverBundle;
use crate::config::AgentError;
use crate::containers::ContainerKey;
use crate::device_owner::{ContainerState, DeviceHolder};
use crate::device_plugin::{Refusal, RefusalReason};
use crate::grants::GrantRequest;
use crate::regions::ContainerRegionError;
use crate::report::AgentCounters;
use crate::settings::AgentSettings;
use crate::state::{MachineFacts, NodeAdapters, NodeState, logged_name, now, offered};
use crate::store::{self, PodRecord};
use partage_cluster::{PodView, Severity};
use partage_core::model::{ContainerName, GpuUuid, Grant};
use partage_enforce::error_chain::describe;
use partage_enforce::monitor::MonitorReport;
use partage_enforce::records::DecodeError;
use partage_enforce::shares::Adoption;
use partage_host::cdi::{SpecContent, SpecError, StoredSpec};
use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::PathBuf;

/// The annotation of a CDI spec with the pod's record: enough to recover the grant without the record on disk.
const POD_ANNOTATION: &str = "partage.dev/pod";
/// The annotation of a CDI spec with the container's name.
const CONTAINER_ANNOTATION: &str = "partage.dev/container";
/// The annotation with the directory of the stand-in libraries that the shared CDI spec had when the container's spec was written.
/// The directory must not be removed while the container may run.
const LIBRARIES_ANNOTATION: &str = "partage.dev/libraries";

impl NodeState {
    /// Recovers the node's state from what earlier agents left: their records and CDI specs, and kubelet's checkpoint.
    pub(crate) fn recover(
        adapters: NodeAdapters,
        machine: MachineFacts,
        settings: AgentSettings,
    ) -> Result<NodeState, AgentError> {
        let stored = adapters.store.read().map_err(AgentError::Records)?;
        let mut counts = AgentCounters { quarantined: stored.quarantined as u64, ..AgentCounters::default() };
        let mut left = RecoveryInput {
            allocations: stored.allocations,
            records: stored.pods,
            foreign_records: stored.unsupported,
            kubelet: adapters.device_owners.all().unwrap_or_default(),
            ..RecoveryInput::default()
        };
        let specs = adapters.cdi.all().map_err(AgentError::Specs)?;
        for found in specs {
            match owner(&found) {
                Some(Ok(content)) => drop(left.specs.insert(ContainerKey(found.name), content)),
                Some(Err(OwnerError::Record(error @ DecodeError::UnsupportedVersion { .. }))) => {
                    let path = adapters.cdi.spec_path(&found.name);
                    tracing::warn!(
                        path = %path.display(),
                        %error,
                        "CDI spec of another agent version left in place until the container starts again"
                    );
                    left.foreign_specs.insert(ContainerKey(found.name));
                }
                Some(Err(error)) => {
                    counts.quarantined += 1;
                    let path = adapters.cdi.spec_path(&found.name);
                    tracing::warn!(
                        path = %path.display(),
                        error = %describe(&error),
                        "cannot read a CDI spec, it is written again when the container next starts"
                    );
                }
                None => {}
            }
        }
        adapters.regions.set_throttle_copies(settings.throttle_copies);
        // Nothing is offered on a GPU whose health is unknown.
        let report = MonitorReport { samples: adapters.gpus.sample(), ..MonitorReport::default() };
        let node = offered(&machine.inventory.node, &settings, &report);
        let (containers, recovered) = Containers::recover(node, left);
        let state = NodeState::new(adapters, machine, settings, containers, report, counts);
        state.adopt_regions(recovered);
        Ok(state)
    }

    /// Adopts the regions of containers that were prepared before, and writes the CDI specs that are missing beside them.
    fn adopt_regions(&self, recovered: Vec<RecoveredContainer>) {
        let throttled = self.throttled();
        for RecoveredContainer { key, owner, has_spec } in recovered {
            // After a reboot there is no region, and no container that needs it: the next start creates it. Where an operator
            // removed the region, a running container still has the old one mapped, and a new one would contradict it.
            if !self.adapters.regions.folder(&key).is_dir() {
                continue;
            }
            let Some(record) = self.containers().grants().record(&owner.pod).cloned() else { continue };
            let Some(grant) = record.grant_of(&owner.container) else { continue };
            let adopted = if has_spec {
                let adopted = self.adopt_region(&key, &owner, &record, grant, &throttled);
                adopted
                    .map(|()| self.containers().prepared(std::slice::from_ref(&key), &owner))
                    .map_err(PrepareError::from)
            } else {
                self.prepare(std::slice::from_ref(&key), &owner, &record, grant, true)
            };
            if let Err(error) = adopted {
                let (namespace, pod) = logged_name(Some(&record.pod));
                let container = &owner.container;
                tracing::warn!(namespace, pod, %container, %key, error = %describe(&error), "cannot adopt a region");
            }
        }
        self.apply_turns();
    }

    /// Adopts the region of a container that may be running. One that cannot be managed stays as it is.
    pub(super) fn adopt_region(
        &self,
        key: &ContainerKey,
        owner: &ContainerOwner,
        record: &PodRecord,
        grant: &Grant,
        throttled: &BTreeSet<GpuUuid>,
    ) -> Result<(), ContainerRegionError> {
        let regions = &self.adapters.regions;
        if let Adoption::Unmanaged { reason } =
            regions.adopt(key, owner, &grant.shares, throttled, record.turns)?
        {
            let (namespace, pod) = logged_name(Some(&record.pod));
            tracing::warn!(
                namespace,
                pod,
                container = %owner.container,
                %key,
                path = %regions.folder(key).display(),
                reason,
                "region is not managed, the container keeps its limits"
            );
        }
        Ok(())
    }

    /// Resolves the pods that had devices when the agent started and have no readable record: those that run carry their grants
    /// as annotations. Nothing is placed before that.
    pub(crate) async fn resolve_pods(&self) -> Result<(), Refusal> {
        let unresolved = self.containers().unresolved_pods();
        if unresolved.is_empty() {
            return Ok(());
        }
        let unavailable = |cause: &str| {
            let message = format!(
                "the grants of running pods are not known yet: {cause}; kubelet retries automatically"
            );
            Refusal::new(RefusalReason::Failed, message)
        };
        if !self.adapters.pods.is_synced() {
            return Err(unavailable("the API server has not listed the node's pods"));
        }
        let running = self.adapters.runtime.containers().await;
        let running = running.map_err(|error| unavailable(&describe(&error)))?;
        for uid in unresolved {
            let runs = running.iter().any(|one| one.uid == uid && one.state == ContainerState::Running);
            if let Some(pod) = self.adapters.pods.by_uid(&uid).filter(|_| runs) {
                self.adopt_annotated(&pod);
            }
            self.containers().resolved(&uid);
        }
        self.changed.notify_waiters();
        Ok(())
    }

    /// Adopts the grant that a running pod carries in its annotations.
    fn adopt_annotated(&self, pod: &PodView) {
        let request =
            GrantRequest { id: &pod.id, pod: &pod.pod, problems: &[], boot: &self.machine.boot, now: now() };
        let adopted = self.containers().adopt(&request, &self.settings());
        let (namespace, name) = (&pod.id.namespace, &pod.id.name);
        match adopted {
            Ok(record) => {
                tracing::warn!(%namespace, pod = %name, "pod record was lost, grant recovered from the pod's annotation");
                let note = "the node's record of this pod was lost; the agent recovered its grant from the pod's annotation";
                self.adapters.cluster.pod_event(&pod.id, Severity::Normal, "GrantRecovered", note);
                tokio::task::block_in_place(|| self.adopt_regions_of(&record));
            }
            Err(refusal) => {
                let cause = refusal.sentence();
                tracing::warn!(%namespace, pod = %name, cause, "grant of a running pod cannot be recovered");
                let note = format!(
                    "cannot recover the grant of running pod {namespace}/{name}: its record was lost, and its annotations do not contain \
                     the grant ({cause}); its GPU usage is not accounted for: delete the pod"
                );
                self.node_event(Severity::Warning, "GrantLost", &note);
            }
        }
    }

    fn adopt_regions_of(&self, record: &PodRecord) {
        let held = self
            .adapters
            .device_owners
            .all()
            .into_iter()
            .flatten()
            .filter(|holder| holder.uid == record.pod.uid);
        let recovered: Vec<RecoveredContainer> = held
            .filter_map(|DeviceHolder { uid: pod, container, key, .. }| {
                let (key, owner) = (key?, ContainerOwner { pod, container });
                // A spec that another version of the agent wrote is not replaced.
                let has_spec = self.adapters.cdi.get(&key.0).is_some_and(|found| is_unsupported(&found));
                Some(RecoveredContainer { key, owner, has_spec })
            })
            .collect();
        for RecoveredContainer { key, owner, .. } in &recovered {
            self.containers().identify(key, owner);
        }
        self.save_soon(&record.pod.uid);
        self.adopt_regions(recovered);
    }

    /// Writes a changed record into the CDI spec of a container of its pod.
    pub(crate) fn rewrite_spec(&self, key: &ContainerKey, record: &PodRecord, container: &ContainerName) {
        let Some(StoredSpec { content: Ok(content), .. }) = self.adapters.cdi.get(&key.0) else { return };
        let written = annotations(record, container, &self.adapters.driver_bundle).map_err(io::Error::from);
        let written = written.and_then(|mut annotations| {
            // The running container keeps the libraries that it was started with.
            annotations.remove(LIBRARIES_ANNOTATION);
            let libraries = content.annotations.get_key_value(LIBRARIES_ANNOTATION);
            annotations.extend(libraries.map(|(key, folder)| (key.clone(), folder.clone())));
            self.adapters.cdi.put(&key.0, &annotations, &content.edits)
        });
        if let Err(error) = written {
            let (namespace, pod) = logged_name(Some(&record.pod));
            tracing::warn!(namespace, pod, %container, %key, %error, "cannot write a CDI spec");
        }
    }
}

/// Returns the annotations of a container's CDI spec: its pod's record, its name, and the directory of the stand-ins.
pub(super) fn annotations(
    record: &PodRecord,
    container: &ContainerName,
    driver_bundle: &DriverBundle,
) -> serde_json::Result<BTreeMap<String, String>> {
    let libraries = driver_bundle.libraries_dir().to_string_lossy().into_owned();
    let pairs = [
        (POD_ANNOTATION, store::encode(record)?),
        (CONTAINER_ANNOTATION, container.to_string()),
        (LIBRARIES_ANNOTATION, libraries),
    ];
    Ok(pairs.map(|(key, text)| (key.to_string(), text)).into())
}

/// Returns the host paths that a container's CDI spec mounts, and the directory of the stand-ins that the shared spec mounts for it.
pub(crate) fn used_paths(content: SpecContent) -> impl Iterator<Item = PathBuf> {
    let libraries = content.annotations.get(LIBRARIES_ANNOTATION).map(PathBuf::from);
    content.edits.mounts.into_iter().map(|mount| mount.host_path).chain(libraries)
}

/// Returns the pod's record and the container of a CDI spec, as [`annotations`] wrote them. `None` if it has no such annotations.
fn owner(found: &StoredSpec) -> Option<Result<(PodRecord, ContainerName), OwnerError>> {
    let content = match &found.content {
        Ok(content) => content,
        Err(why) => return Some(Err(OwnerError::Spec(why.clone()))),
    };
    let (text, container) =
        (content.annotations.get(POD_ANNOTATION)?, content.annotations.get(CONTAINER_ANNOTATION)?);
    let record = store::decode(text).map_err(OwnerError::Record);
    Some(record.map(|record| (record, ContainerName::from(container.as_str()))))
}

/// Why the container of a CDI spec is unknown.
#[derive(Debug, thiserror::Error)]
enum OwnerError {
    /// The file is not a CDI spec of the agent.
    #[error(transparent)]
    Spec(SpecError),
    /// The record in it cannot be read.
    #[error("the record in the CDI spec cannot be read")]
    Record(#[source] DecodeError),
}

/// Returns whether a CDI spec carries the record of another version of the agent.
fn is_unsupported(found: &StoredSpec) -> bool {
    matches!(owner(found), Some(Err(OwnerError::Record(DecodeError::UnsupportedVersion { .. }))))
}

#[cfg(test)]
mod tests {
    use super::*;
    use partage_host::cdi::{CdiEdits, CdiMount};

    #[test]
    fn used_paths_include_mounts_and_shared_libraries() {
        let mount = CdiMount {
            host_path: "/run/partage/regions/a/limits".into(),
            container_path: "/usr/local/partage/region/limits".into(),
            options: Vec::new(),
        };
        let edits = CdiEdits { mounts: vec![mount], ..CdiEdits::default() };
        let annotations =
            BTreeMap::from([(LIBRARIES_ANNOTATION.to_string(), "/var/lib/partage/lib/550-ab".to_string())]);
        let used: Vec<PathBuf> = used_paths(SpecContent { annotations, edits: edits.clone() }).collect();
        assert_eq!(used, ["/run/partage/regions/a/limits", "/var/lib/partage/lib/550-ab"].map(PathBuf::from));
        // The spec of an earlier agent has no such annotation: its own mounts name the libraries.
        let earlier = used_paths(SpecContent { annotations: BTreeMap::new(), edits });
        assert_eq!(earlier.count(), 1);
    }
}
