//! Live resizes: a pod's annotation requests other amounts, and the agent applies them to its running containers.

use crate::containers::ContainerKey;
use crate::containers::persist::SaveError;
use crate::device_plugin::Refusal;
use crate::regions::ContainerRegionError;
use crate::settings::ResizePolicy;
use crate::state::{NodeState, logged_name};
use crate::store::PodRecord;
use partage_cluster::{PodView, Severity};
use partage_core::model::{ContainerName, GpuUuid, PodId, PodUid, Share};
use partage_core::resize;
use partage_enforce::error_chain::describe;
use partage_region::failpoint as fault;
use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

/// Minimum interval between two answers to one pod.
const MIN_ANSWER_INTERVAL: Duration = Duration::from_secs(1);

/// Why a resize is refused. Nothing was changed then.
#[derive(Debug, thiserror::Error)]
enum ResizeError {
    /// The settings do not allow resizes.
    #[error("this cluster's settings do not allow it (resize: off): change the manifest")]
    Disabled,
    /// The annotation cannot be parsed, or does not match the grant.
    #[error(transparent)]
    Request(#[from] resize::ResizeError),
    /// The GPU has not enough free capacity, or the grant cannot be encoded.
    #[error("{}", .0.sentence())]
    Refused(Refusal),
    /// A running container cannot get the amounts.
    #[error(transparent)]
    Region(#[from] ContainerRegionError),
    /// The new amounts cannot be persisted.
    #[error(transparent)]
    Save(#[from] SaveError),
}

/// Answers a pod's request for other amounts, once. Returns false if the pod was answered just before and has to wait.
pub(crate) async fn answer(
    state: &NodeState,
    pod: &PodView,
    answered: &mut BTreeMap<PodUid, Instant>,
) -> bool {
    let request = pod.pod.annotations.get(resize::ANNOTATION);
    let _guard = state.lock_pod(&pod.id.uid).await;
    let Some(record) = state.containers().grants().record(&pod.id.uid).cloned() else { return true };
    if record.resize.as_ref() == request {
        return true;
    }
    let Some(request) = request else {
        // The amounts stay. The same request, if it is written again, is a new one.
        let without = PodRecord { resize: None, ..record };
        state.containers().replace(without.clone());
        save(state, &without);
        return true;
    };
    if answered.get(&pod.id.uid).is_some_and(|at| at.elapsed() < MIN_ANSWER_INTERVAL) {
        return false;
    }
    answered.insert(pod.id.uid.clone(), Instant::now());
    let answer = tokio::task::block_in_place(|| resize(state, &record, pod, request));
    let (namespace, name) = (&pod.id.namespace, &pod.id.name);
    match answer {
        Ok(()) => {
            tracing::info!(%namespace, pod = %name, request, "pod resized");
            let note = format!("the pod's shares were resized: {request}");
            state.adapters.cluster.pod_event(&pod.id, Severity::Normal, "Resized", &note);
        }
        Err(error) => {
            let cause = describe(&error);
            tracing::info!(%namespace, pod = %name, request, cause, "resize refused");
            let note = format!("{}: {cause}; nothing was changed", resize::ANNOTATION);
            state.adapters.cluster.pod_event(&pod.id, Severity::Warning, "ResizeRefused", &note);
        }
    }
    true
}

fn resize(state: &NodeState, old: &PodRecord, pod: &PodView, request: &str) -> Result<(), ResizeError> {
    let answered = |record: PodRecord| PodRecord { resize: Some(request.into()), ..record };
    let done = reserve(state, old, pod, request).and_then(|(record, prepared)| {
        let record = answered(record);
        let throttled = state.throttled();
        apply(&mut NodeResize { state, throttled }, old, &record, prepared)?;
        Ok(record)
    });
    match done {
        Ok(record) => {
            let prepared = {
                let mut containers = state.containers();
                containers.replace(record.clone());
                containers.set_saved(&record.pod.uid, true);
                containers.prepared_of(&record.pod.uid)
            };
            state.apply_turns();
            for (key, container) in prepared {
                state.rewrite_spec(&key, &record, &container);
            }
            Ok(())
        }
        Err(error) => {
            // A refused request counts as answered: it is not retried until the annotation changes.
            let record = answered(old.clone());
            state.containers().replace(record.clone());
            state.apply_turns();
            // If this fails too, the next agent answers once more.
            save(state, &record);
            Err(error)
        }
    }
}

/// The containers of a pod that are prepared, with the keys of their regions.
pub(crate) type PreparedContainers = Vec<(ContainerKey, ContainerName)>;

/// The durable steps of a resize.
pub(crate) trait ResizeSteps {
    /// Why a step failed.
    type Error;

    /// Sets the limits of a running container. A container that uses more than a smaller limit refuses.
    fn set_limits(
        &mut self,
        key: &ContainerKey,
        container: &ContainerName,
        shares: &[Share],
    ) -> Result<(), Self::Error>;

    /// Sets the limits of a container back to what they were, whatever it uses.
    fn restore_limits(&mut self, key: &ContainerKey, container: &ContainerName, shares: &[Share]);

    /// Writes the pod's record to disk.
    fn save(&mut self, record: &PodRecord) -> Result<(), Self::Error>;
}

/// Sets the limits of a pod's containers and persists the new record, or sets all limits back. The ledger holds the larger of
/// both amounts meanwhile. An agent that is killed before the record is saved sets the old limits again when it starts.
pub(crate) fn apply<S: ResizeSteps>(
    steps: &mut S,
    old: &PodRecord,
    new: &PodRecord,
    mut prepared: PreparedContainers,
) -> Result<(), S::Error> {
    // Only a container that shrinks can refuse, so those come first: otherwise another container could use its new amount before
    // the resize is rolled back.
    prepared.sort_by_key(|(_, container)| {
        let memory =
            |record| shares(record, container).iter().map(|share| share.memory_bytes).collect::<Vec<_>>();
        memory(new) > memory(old)
    });
    let set_all = |steps: &mut S| {
        for (key, container) in &prepared {
            steps.set_limits(key, container, &shares(new, container))?;
        }
        fault::point("after-resize-regions");
        steps.save(new)
    };
    let done = set_all(steps);
    if done.is_err() {
        for (key, container) in &prepared {
            steps.restore_limits(key, container, &shares(old, container));
        }
    } else {
        fault::point("after-resize-record");
    }
    done
}

/// The steps of a resize on this node.
struct NodeResize<'a> {
    state: &'a NodeState,
    throttled: BTreeSet<GpuUuid>,
}

impl ResizeSteps for NodeResize<'_> {
    type Error = ResizeError;

    fn set_limits(
        &mut self,
        key: &ContainerKey,
        _: &ContainerName,
        shares: &[Share],
    ) -> Result<(), ResizeError> {
        Ok(self.state.adapters.regions.resize(key, shares, &self.throttled)?)
    }

    fn restore_limits(&mut self, key: &ContainerKey, container: &ContainerName, shares: &[Share]) {
        if let Err(error) = self.state.adapters.regions.restore(key, shares, &self.throttled) {
            let owner = self.state.containers().owner(key).map(|owner| owner.pod.clone());
            let pod = owner.and_then(|uid| self.state.pod_id(&uid));
            let (namespace, pod) = logged_name(pod.as_ref());
            let error = describe(&error);
            tracing::warn!(namespace, pod, %container, error, "cannot restore the limits of a container");
        }
    }

    fn save(&mut self, record: &PodRecord) -> Result<(), ResizeError> {
        Ok(self.state.save_now(record)?)
    }
}

fn save(state: &NodeState, record: &PodRecord) {
    if let Err(error) = tokio::task::block_in_place(|| state.save_now(record)) {
        let PodId { namespace, name, .. } = &record.pod;
        tracing::warn!(%namespace, pod = %name, error = %describe(&error), "cannot save a pod record, retrying");
    }
}

/// Reserves the larger of the old and the requested amounts. Returns the new record, and the containers to resize.
fn reserve(
    state: &NodeState,
    old: &PodRecord,
    pod: &PodView,
    request: &str,
) -> Result<(PodRecord, PreparedContainers), ResizeError> {
    let settings = state.settings();
    if settings.resize == ResizePolicy::Off {
        return Err(ResizeError::Disabled);
    }
    let grant = resize::read(request).and_then(|changes| resize::apply(&old.grant, &changes))?;
    let mut containers = state.containers();
    // The CDI spec is written after the region: a container that has only the spec may run with a region that was removed.
    if let Some(key) =
        containers.unprepared_of(&old.pod.uid).find(|key| state.adapters.cdi.get(&key.0).is_some())
    {
        return Err(ContainerRegionError::Missing(state.adapters.regions.folder(key)).into());
    }
    let record = containers.grants().with_grant(old, &pod.pod, grant, &settings);
    let record = record.map_err(ResizeError::Refused)?;
    containers.reserve_resize(old, &record).map_err(ResizeError::Refused)?;
    Ok((record, containers.prepared_of(&old.pod.uid)))
}

fn shares(record: &PodRecord, container: &ContainerName) -> Vec<Share> {
    record.grant_of(container).map(|grant| grant.shares.clone()).unwrap_or_default()
}
