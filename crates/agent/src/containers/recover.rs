//! Recovery from what earlier agents left: their records and CDI specs, kubelet's checkpoint, and the annotations of pods.

use super::lifecycle::{ContainerOwner, Containers, LeftBehind, Recovered};
use crate::grants::GrantRequest;
use crate::identity::{ContainerState, Holder};
use crate::inject::Materials;
use crate::plugin::{ContainerKey, Refusal};
use crate::report::Counts;
use crate::settings::Settings;
use crate::state::{Adapters, Machine, NodeState, logged_name, now, offered};
use crate::store::{self, PodRecord};
use partage_cluster::{PodView, Severity};
use partage_core::model::ContainerName;
use partage_enforce::error_chain::describe;
use partage_enforce::monitor::MonitorReport;
use partage_enforce::records::DecodeError;
use partage_host::cdi::{Content, Found, SpecError};
use std::collections::BTreeMap;
use std::io;
use std::path::PathBuf;

/// What a CDI file says of its container, besides what it gets: enough to know everything again.
const OF_POD: &str = "partage.dev/pod";
const OF_CONTAINER: &str = "partage.dev/container";
/// The directory of the stand-ins that the shared CDI spec had when the container's spec was written. It must not be removed while the
/// container may run.
const LIBRARIES_ANNOTATION: &str = "partage.dev/libraries";

impl NodeState {
    /// Recovers the node's state from what earlier agents left: their records and CDI specs, and kubelet's checkpoint.
    pub(crate) fn recover(adapters: Adapters, machine: Machine, settings: Settings) -> io::Result<NodeState> {
        let kept = adapters.store.read()?;
        let mut counts = Counts { quarantined: kept.quarantined as u64, ..Counts::default() };
        let mut left = LeftBehind {
            allocations: kept.names,
            records: kept.pods,
            foreign_records: kept.unsupported,
            kubelet: adapters.kubelet.all().unwrap_or_default(),
            ..LeftBehind::default()
        };
        for found in adapters.cdi.all()? {
            match owner(&found) {
                Some(Ok(content)) => drop(left.specs.insert(ContainerKey(found.name), content)),
                Some(Err(OwnerError::Record(error @ DecodeError::UnsupportedVersion { .. }))) => {
                    tracing::warn!(name = found.name, %error, "CDI spec of another agent version left in place");
                    left.foreign_specs.insert(ContainerKey(found.name));
                }
                Some(Err(error)) => {
                    counts.quarantined += 1;
                    tracing::warn!(name = found.name, error = %describe(&error), "cannot read a CDI spec");
                }
                None => {}
            }
        }
        // Nothing is offered on a GPU whose health is not known.
        let report = MonitorReport { looks: adapters.gpus.look(), ..MonitorReport::default() };
        let node = offered(&machine.inventory.node, &settings, &report);
        let (containers, recovered) = Containers::recover(node, left);
        let state = NodeState::new(adapters, machine, settings, containers, report, counts);
        state.adopt_regions(recovered);
        Ok(state)
    }

    /// Adopts the regions of containers that were prepared before, and writes the CDI specs that are missing beside them.
    fn adopt_regions(&self, recovered: Vec<Recovered>) {
        let gated = self.gated();
        for Recovered { key, owner, has_spec } in recovered {
            // After a reboot there is no region, and no container that could miss it: the next start makes it. Where somebody
            // removed the region, a running container still has it mapped, and a new one would only contradict it.
            if !self.adapters.regions.folder(&key).is_dir() {
                continue;
            }
            let Some(record) = self.containers().grants().record(&owner.pod).cloned() else { continue };
            let Some(grant) = record.grant_of(&owner.container) else { continue };
            let adopted = if has_spec {
                let adopted = self.adapters.regions.adopt(&key, &owner, &grant.shares, &gated);
                adopted
                    .map(|()| self.containers().prepared(std::slice::from_ref(&key), &owner))
                    .map_err(String::from)
            } else {
                self.prepare(std::slice::from_ref(&key), &owner, &record, grant, true)
            };
            if let Err(error) = adopted {
                let (namespace, pod) = logged_name(Some(&record.pod));
                let container = &owner.container;
                tracing::warn!(namespace, pod, %container, key = %key, error, "cannot adopt a region");
            }
        }
        self.apply_turns();
    }

    /// Finds out what pods hold that had devices when the agent started and that no readable record tells of: those that run
    /// carry their grants as annotations. Nothing is placed before that.
    pub(crate) async fn resolve_pods(&self) -> Result<(), Refusal> {
        let unresolved = self.containers().unresolved_pods();
        if unresolved.is_empty() {
            return Ok(());
        }
        let later = |why: &str| {
            Refusal(format!("it is not known yet who holds what: {why}; kubelet tries again by itself"))
        };
        if !self.adapters.pods.is_synced() {
            return Err(later("the API server has not told of the node's pods"));
        }
        let running = self.adapters.runtime.containers().await.map_err(|error| later(&error.to_string()))?;
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
                tracing::warn!(%namespace, pod = %name, "record was lost; the grant is read from the pod's annotation");
                tokio::task::block_in_place(|| self.adopt_regions_of(&record));
            }
            Err(why) => {
                let note = format!(
                    "pod {namespace}/{name} runs with a GPU, its record was lost, and its annotations do not say what it holds: {why}; \
                     what it uses is not counted: delete the pod"
                );
                tracing::warn!(%namespace, pod = %name, "{note}");
                self.tell_node(Severity::Warning, "GrantLost", &note);
            }
        }
    }

    fn adopt_regions_of(&self, record: &PodRecord) {
        let held =
            self.adapters.kubelet.all().into_iter().flatten().filter(|holder| holder.uid == record.pod.uid);
        let recovered: Vec<Recovered> = held
            .filter_map(|Holder { uid: pod, container, key, .. }| {
                let (key, owner) = (key?, ContainerOwner { pod, container });
                // A spec that another version of the agent wrote is not replaced.
                let has_spec = self.adapters.cdi.get(&key.0).is_some_and(|found| is_unsupported(&found));
                Some(Recovered { key, owner, has_spec })
            })
            .collect();
        for Recovered { key, owner, .. } in &recovered {
            self.containers().identify(key, owner);
        }
        self.save_soon(&record.pod.uid);
        self.adopt_regions(recovered);
    }

    /// Writes a changed record into the CDI spec of a container of its pod.
    pub(crate) fn rewrite_spec(&self, key: &ContainerKey, record: &PodRecord, container: &ContainerName) {
        let Some(Found { content: Ok(content), .. }) = self.adapters.cdi.get(&key.0) else { return };
        let noted = annotations(record, container, &self.adapters.materials).map_err(io::Error::from);
        let noted = noted.and_then(|mut annotations| {
            // The running container keeps the libraries that it was started with.
            annotations.remove(LIBRARIES_ANNOTATION);
            let libraries = content.annotations.get_key_value(LIBRARIES_ANNOTATION);
            annotations.extend(libraries.map(|(key, folder)| (key.clone(), folder.clone())));
            self.adapters.cdi.put(&key.0, &annotations, &content.edits)
        });
        if let Err(error) = noted {
            let (namespace, pod) = logged_name(Some(&record.pod));
            tracing::warn!(namespace, pod, %container, %key, %error, "cannot write a CDI spec");
        }
    }
}

/// Returns the annotations of a container's CDI spec: its pod's record, its name, and the directory of the stand-ins.
pub(super) fn annotations(
    record: &PodRecord,
    container: &ContainerName,
    materials: &Materials,
) -> serde_json::Result<BTreeMap<String, String>> {
    let libraries = materials.libraries_dir().to_string_lossy().into_owned();
    let pairs = [
        (OF_POD, store::encode(record)?),
        (OF_CONTAINER, container.to_string()),
        (LIBRARIES_ANNOTATION, libraries),
    ];
    Ok(pairs.map(|(key, text)| (key.to_string(), text)).into())
}

/// Returns the host paths that a container's CDI spec mounts, and the directory of the stand-ins that the shared spec mounts for it.
pub(crate) fn used_paths(content: Content) -> impl Iterator<Item = PathBuf> {
    let libraries = content.annotations.get(LIBRARIES_ANNOTATION).map(PathBuf::from);
    content.edits.mounts.into_iter().map(|mount| mount.host_path).chain(libraries)
}

/// The pod and container of a CDI file, as [`annotations`] wrote them.
fn owner(found: &Found) -> Option<Result<(PodRecord, ContainerName), OwnerError>> {
    let content = match &found.content {
        Ok(content) => content,
        Err(why) => return Some(Err(OwnerError::Spec(why.clone()))),
    };
    let (text, container) = (content.annotations.get(OF_POD)?, content.annotations.get(OF_CONTAINER)?);
    let record = store::decode(text).map_err(OwnerError::Record);
    Some(record.map(|record| (record, ContainerName::from(container.as_str()))))
}

/// Why the container of a CDI spec is unknown.
#[derive(Debug, thiserror::Error)]
enum OwnerError {
    /// The file is no CDI spec of ours.
    #[error(transparent)]
    Spec(SpecError),
    /// The record in it cannot be read.
    #[error("its record cannot be read")]
    Record(#[source] DecodeError),
}

/// Whether a CDI spec carries the record of another version of the agent.
fn is_unsupported(found: &Found) -> bool {
    matches!(owner(found), Some(Err(OwnerError::Record(DecodeError::UnsupportedVersion { .. }))))
}

#[cfg(test)]
mod tests {
    use super::*;
    use partage_host::cdi::{Edits, Mount};

    #[test]
    fn used_paths_include_mounts_and_shared_libraries() {
        let mount = Mount {
            host_path: "/run/partage/regions/a/limits".into(),
            container_path: "/usr/local/partage/region/limits".into(),
            options: Vec::new(),
        };
        let edits = Edits { mounts: vec![mount], ..Edits::default() };
        let annotations =
            BTreeMap::from([(LIBRARIES_ANNOTATION.to_string(), "/var/lib/partage/lib/550-ab".to_string())]);
        let used: Vec<PathBuf> = used_paths(Content { annotations, edits: edits.clone() }).collect();
        assert_eq!(used, ["/run/partage/regions/a/limits", "/var/lib/partage/lib/550-ab"].map(PathBuf::from));
        // The spec of an earlier agent has no such annotation: its own mounts name the libraries.
        let earlier = used_paths(Content { annotations: BTreeMap::new(), edits });
        assert_eq!(earlier.count(), 1);
    }
}
