//! Garbage collection: releases the grants of pods that have ended and removes orphaned files.
//!
//! A pod holds its grant until nothing of it can use a GPU any more: the pod is finished or gone from the API server, *and* the
//! runtime reports no running container of it. A force-deleted pod disappears from the API server at once, while its containers may
//! still run.

use crate::checkpoint::PodRecord;
use crate::identity::{ContainerState, Holder, RunningContainer};
use crate::node::{CROWD, NodeState, now};
use crate::plugin::Nonce;
use crate::refusals::StartSubject;
use crate::resources::CountResource;
use crate::settings::Settings;
use partage_cluster::{PodView, Severity};
use partage_core::model::{PodId, PodUid};
use std::collections::BTreeSet;
use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio_util::sync::CancellationToken;

/// Interval between full passes when nothing changes.
const FULL_PASS_INTERVAL: Duration = Duration::from_secs(60);
/// Interval between passes while a pod that has ended still has running containers.
const DRAIN_POLL_INTERVAL: Duration = Duration::from_millis(500);
/// Minimum age before a name or a record without a pod counts as orphaned: the API server's list may lag behind kubelet.
const ORPHAN_GRACE_PERIOD: Duration = Duration::from_secs(120);
/// Maximum age of a rejected pod that still gets an event: an earlier agent has explained older ones.
const MAX_REJECTION_AGE: Duration = Duration::from_secs(600);

/// Pods with a grant that the API server's list has contained.
///
/// The list may lag behind kubelet, so that a pod which is missing from it counts as deleted only if it was there before.
#[derive(Debug, Default)]
pub(crate) struct ListedPods(BTreeSet<PodUid>);

impl ListedPods {
    /// Starts with pods whose grants an earlier agent recorded: they were in the list when they were granted.
    pub(crate) fn new(recorded: impl IntoIterator<Item = PodUid>) -> ListedPods {
        ListedPods(recorded.into_iter().collect())
    }

    /// Records that the list contains a pod.
    pub(crate) fn insert(&mut self, uid: &PodUid) {
        self.0.insert(uid.clone());
    }

    /// Returns why a pod with a grant has ended, where it has. `pod` is the list's entry now.
    fn end_of(&self, record: &PodRecord, pod: Option<&PodView>, now: u64) -> Option<PodEnd> {
        match pod {
            Some(pod) => pod.is_finished().then_some(PodEnd::Finished),
            None if self.0.contains(&record.pod.uid) => Some(PodEnd::Deleted),
            None => is_older(record.at, now).then_some(PodEnd::NeverListed),
        }
    }
}

/// Why a pod no longer needs its grant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum PodEnd {
    /// All its containers have ended for good.
    Finished,
    /// The API server had it and has it no more.
    Deleted,
    /// The API server has not listed it for the whole grace period.
    NeverListed,
}

impl fmt::Display for PodEnd {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            PodEnd::Finished => "finished",
            PodEnd::Deleted => "deleted",
            PodEnd::NeverListed => "never listed by the API server",
        })
    }
}

/// Runs a pass whenever pods change, and once a minute.
pub(crate) async fn keep_sweeping(state: Arc<NodeState>, stop: CancellationToken) {
    let mut pods = state.pods.changed();
    let mut told = BTreeSet::new();
    let mut compared = Instant::now();
    while !stop.is_cancelled() {
        pods.borrow_and_update();
        tell_rejected(&state, &mut told);
        let waits = sweep(&state).await;
        // Also where nothing scrapes the metrics.
        if compared.elapsed() >= FULL_PASS_INTERVAL {
            tokio::task::block_in_place(|| state.compare());
            compared = Instant::now();
        }
        let pause = if waits { DRAIN_POLL_INTERVAL } else { FULL_PASS_INTERVAL };
        tokio::select! {
            () = tokio::time::sleep(pause) => {}
            _ = pods.changed(), if !waits => tokio::time::sleep(CROWD).await,
            () = stop.cancelled() => {}
        }
    }
}

/// Runs one pass. Returns whether a pod that has ended still has running containers.
async fn sweep(state: &NodeState) -> bool {
    if !state.pods.is_synced() {
        return false;
    }
    // A file is not orphaned before it is known which pods hold grants.
    if let Err(refusal) = state.adopt().await {
        tracing::debug!("{refusal}");
        return true;
    }
    let mut waits = false;
    let ended = ended(state);
    if !ended.is_empty() {
        // Without the runtime's report nothing is released: a container may still use its GPU.
        let Ok(containers) = state.runtime.containers().await else { return true };
        for (pod, why) in ended {
            let uid = &pod.uid;
            if !ends(uid, &containers) {
                waits = true;
                continue;
            }
            let _alone = state.alone_with(uid).await;
            // A container may have started in the meantime.
            let Ok(containers) = state.runtime.containers().await else { return true };
            if !ends(uid, &containers) {
                waits = true;
                continue;
            }
            tracing::info!(namespace = %pod.namespace, pod = %pod.name, %uid, cause = %why, "pod ended, its shares are released");
            tokio::task::block_in_place(|| state.forget(uid));
        }
    }
    tokio::task::block_in_place(|| remove_orphans(state));
    state.refusals.retain(|subject| match subject {
        StartSubject::Container(uid, _) => state.pod_id(uid).is_some(),
        StartSubject::Devices(resource, ids) => {
            state.names().values().any(|name| name.resource == *resource && name.ids == *ids)
        }
    });
    waits
}

/// The pods with a grant that have ended, as far as the API server's list says so.
fn ended(state: &NodeState) -> Vec<(PodId, PodEnd)> {
    let book = state.book();
    let mut listed = state.listed();
    listed.0.retain(|uid| book.record(uid).is_some());
    let mut ended = Vec::new();
    for record in book.records() {
        let pod = state.pods.by_uid(&record.pod.uid);
        if pod.is_some() {
            listed.insert(&record.pod.uid);
        }
        if let Some(why) = listed.end_of(record, pod.as_deref(), now()) {
            ended.push((record.pod.clone(), why));
        }
    }
    ended
}

/// Whether nothing of a pod runs or is about to.
fn ends(uid: &PodUid, containers: &[RunningContainer]) -> bool {
    containers.iter().filter(|one| one.uid == *uid).all(|one| one.state == ContainerState::Exited)
}

/// Writes an event on each pod that kubelet rejected: why, and what happens next.
fn tell_rejected(state: &NodeState, told: &mut BTreeSet<PodUid>) {
    let pods = state.pods.all();
    told.retain(|uid| pods.iter().any(|pod| pod.id.uid == *uid));
    for pod in pods.iter().filter(|pod| is_ours(pod, &state.settings())) {
        let Some(said) = &pod.rejected else { continue };
        let earlier = state.book().record(&pod.id.uid).map(|record| record.boot != state.boot);
        let created = u64::try_from(pod.created).unwrap_or(0);
        let recent = now() / 1_000_000_000 < created + MAX_REJECTION_AGE.as_secs();
        if (earlier.is_none() && !recent) || !told.insert(pod.id.uid.clone()) {
            continue;
        }
        let (reason, why) = rejection(said, earlier == Some(true));
        let note = format!(
            "{why}: kubelet failed the pod (UnexpectedAdmissionError), and what it held is free; its controller creates a replacement, \
             and a pod without a controller has to be created again"
        );
        state.cluster.pod_event(&pod.id, Severity::Warning, reason, &note);
    }
}

/// Kubelet's words where it has no device plugin, or lost the connection to it while it waited for an answer. The agent's own
/// refusals have the code `FailedPrecondition`.
const AGENT_UNAVAILABLE: [&str; 5] = [
    "no healthy devices present",
    "unregistered device",
    "has been stopped",
    "code = Unavailable",
    "code = Canceled",
];

/// Returns the reason and the cause of a rejection, by what kubelet says of it.
fn rejection(said: &str, rebooted: bool) -> (&'static str, String) {
    // Without kubelet's own words around it.
    let plain = said.trim_start_matches("Pod was rejected: ").trim_start_matches("Allocate failed due to ");
    let plain = plain.trim_end_matches(", which is unexpected").trim_end_matches('.');
    if said.is_empty() || AGENT_UNAVAILABLE.iter().any(|words| said.contains(words)) {
        let why = if rebooted {
            "the node was rebooted, and kubelet admitted its pods before the Partage agent had registered"
        } else {
            "kubelet admitted the pod while the Partage agent was unavailable"
        };
        return ("AgentUnavailable", why.into());
    }
    let why = if said.contains("requested number of devices unavailable") {
        format!(
            "kubelet has fewer free devices than the pod requests, as when another pod came first ({plain})"
        )
    } else if said.contains("rpc error") {
        format!("the Partage agent refused the pod's devices ({plain})")
    } else {
        format!("kubelet rejected the pod ({plain})")
    };
    ("NotAdmitted", why)
}

/// Whether a pod asks for something that is given here.
fn is_ours(pod: &PodView, settings: &Settings) -> bool {
    let resources: Vec<String> = CountResource::enabled(settings).iter().map(CountResource::name).collect();
    let asks = |resource: &String| pod.pod.containers.iter().any(|one| one.amount(resource).is_some());
    resources.iter().any(asks)
}

/// Removes names, CDI files and regions that belong to no pod we know, once kubelet does not know them for one that is there, either.
fn remove_orphans(state: &NodeState) {
    // Before anybody is asked whose they are: what comes meanwhile is not among them.
    let files = state.cdi.names().unwrap_or_default().into_iter().map(Nonce);
    let mut all: BTreeSet<Nonce> = files.chain(state.regions.on_disk()).collect();
    let (mut young, mut unheard) = (BTreeSet::new(), BTreeSet::new());
    let written = state.kubelet.written();
    for (nonce, name) in state.names().iter() {
        all.insert(nonce.clone());
        if !is_older(name.at, now()) {
            young.insert(nonce.clone());
        }
        if !written.is_some_and(|written| is_older(name.at, written)) {
            unheard.insert(nonce.clone());
        }
    }
    let Some(held) = state.kubelet.all() else { return };
    // Kubelet remembers pods that are gone until it gives their devices again.
    let is_there = |uid: &PodUid| state.pods.by_uid(uid).is_some() || state.book().record(uid).is_some();
    let held = held.into_iter().filter(|holder| is_there(&holder.uid));
    let held: BTreeSet<Nonce> = held.filter_map(|Holder { nonce, .. }| nonce).collect();
    let live: Vec<(Nonce, PodUid)> =
        state.regions.live().iter().map(|(nonce, live)| (nonce.clone(), live.uid.clone())).collect();
    let live = live.into_iter().filter(|(_, uid)| state.book().record(uid).is_some());
    let live: BTreeSet<Nonce> = live.map(|(nonce, _)| nonce).collect();
    // Kubelet's checkpoint can be without our newest answers until it is written again: while a container waits, a name that was not
    // answered long before that may be its.
    let waits = |pod: &PodView| {
        !pod.is_finished() && is_ours(pod, &state.settings()) && !state.all_named(&pod.id.uid)
    };
    let somebody_waits = state.pods.all().iter().any(|pod| waits(pod));
    let known = |nonce: &Nonce| {
        let owner = state.owner(nonce);
        held.contains(nonce)
            || live.contains(nonce)
            || owner.as_ref().is_some_and(|uid| state.book().record(uid).is_some())
            || (owner.is_none() && somebody_waits && unheard.contains(nonce))
    };
    for nonce in all.iter().filter(|nonce| !young.contains(nonce) && !known(nonce)) {
        tracing::debug!(%nonce, "removed orphaned grant files");
        state.forget_name(nonce);
    }
}

/// Whether something of one time was beyond the grace period at another, both in nanoseconds since 1970.
pub(crate) fn is_older(at: u64, than: u64) -> bool {
    than.saturating_sub(at) > u64::try_from(ORPHAN_GRACE_PERIOD.as_nanos()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::checkpoint::tests::record;
    use partage_cluster::PodPhase;
    use partage_core::pod::Pod;
    use proptest::prelude::*;
    use std::collections::BTreeMap;

    #[test]
    fn rejection_quotes_kubelet_unless_the_agent_was_unavailable() {
        let away = "Pod was rejected: Allocate failed due to no healthy devices present; cannot allocate unhealthy devices partage.dev/gpu, which is unexpected";
        assert_eq!(rejection(away, false).0, "AgentUnavailable");
        assert!(rejection(away, true).1.starts_with("the node was rebooted"));
        let unregistered = "Pod was rejected: Allocate failed due to can't allocate unregistered device partage.dev/gpu, which is unexpected";
        assert_eq!(rejection(unregistered, false).0, "AgentUnavailable");
        for (said, why) in [
            (
                "Pod was rejected: Allocate failed due to requested number of devices unavailable for partage.dev/gpu. Requested: 3, Available: 1, which is unexpected",
                "kubelet has fewer free devices than the pod requests, as when another pod came first (requested number of devices \
                 unavailable for partage.dev/gpu. Requested: 3, Available: 1)",
            ),
            (
                "Pod was rejected: Allocate failed due to rpc error: code = FailedPrecondition desc = the answer cannot be recorded: no space left, which is unexpected",
                "the Partage agent refused the pod's devices (rpc error: code = FailedPrecondition desc = the answer \
                 cannot be recorded: no space left)",
            ),
            ("Pod was rejected: something new", "kubelet rejected the pod (something new)"),
        ] {
            assert_eq!(rejection(said, false), ("NotAdmitted", why.to_string()));
            assert_eq!(rejection(said, true).1, why, "a reboot has nothing to do with it");
        }
    }

    #[test]
    fn connection_lost_during_allocate_is_no_refusal() {
        for said in [
            "Pod was rejected: Allocate failed due to rpc error: code = Canceled desc = grpc: the client connection is closing, which is unexpected",
            "Pod was rejected: Allocate failed due to rpc error: code = Unavailable desc = error reading from server: EOF, which is unexpected",
        ] {
            assert_eq!(
                rejection(said, false),
                (
                    "AgentUnavailable",
                    "kubelet admitted the pod while the Partage agent was unavailable".to_string()
                )
            );
        }
    }

    fn view(uid: &str, phase: PodPhase) -> PodView {
        PodView {
            id: record(uid, 1).pod,
            pod: Pod::default(),
            problems: Vec::new(),
            phase,
            rejected: None,
            created: 0,
            finished_inits: BTreeSet::new(),
        }
    }

    /// A grant of a pod that was in the list is released when the pod is gone, however young it is.
    #[test]
    fn young_pod_that_was_listed_ends_when_it_is_deleted() {
        let young = PodRecord { at: now(), ..record("a", 1) };
        let mut listed = ListedPods::default();
        assert_eq!(listed.end_of(&young, None, now()), None, "the list may lag behind kubelet");
        listed.insert(&young.pod.uid);
        assert_eq!(listed.end_of(&young, None, now()), Some(PodEnd::Deleted));
        assert_eq!(listed.end_of(&young, Some(&view("a", PodPhase::Running)), now()), None);
        let finished = view("a", PodPhase::Succeeded);
        assert_eq!(listed.end_of(&young, Some(&finished), now()), Some(PodEnd::Finished));
        let old = ORPHAN_GRACE_PERIOD.as_nanos() as u64 + 1;
        assert_eq!(
            ListedPods::default().end_of(&record("a", 1), None, 5 + old),
            Some(PodEnd::NeverListed),
            "the grace period is over"
        );
    }

    #[derive(Clone, Debug)]
    enum Step {
        /// The watch reports the pod.
        Appears(u8),
        /// The watch reports that it is gone.
        Vanishes(u8),
        /// It is granted, from the list or from a single GET while the list lags behind.
        Granted(u8),
        /// Time passes, in seconds.
        Passes(u64),
        /// One pass of garbage collection.
        Pass,
    }

    fn steps() -> impl Strategy<Value = Vec<Step>> {
        let step = prop_oneof![
            (0..4_u8).prop_map(Step::Appears),
            (0..4_u8).prop_map(Step::Vanishes),
            (0..4_u8).prop_map(Step::Granted),
            (1..90_u64).prop_map(Step::Passes),
            Just(Step::Pass),
        ];
        proptest::collection::vec(step, 0..80)
    }

    proptest! {
        /// Whatever the order of events: a pass ends exactly the pods that were listed and are gone, and those that were not listed
        /// for the whole grace period.
        #[test]
        fn grants_end_with_their_pods(steps in steps()) {
            let mut listed = ListedPods::default();
            let mut records: BTreeMap<u8, PodRecord> = BTreeMap::new();
            let mut there: BTreeSet<u8> = BTreeSet::new();
            // What an observer of all events knows.
            let mut known: BTreeSet<u8> = BTreeSet::new();
            let mut clock = 0_u64;
            for step in steps {
                match step {
                    Step::Appears(pod) => drop(there.insert(pod)),
                    Step::Vanishes(pod) => drop(there.remove(&pod)),
                    Step::Granted(pod) => {
                        records.entry(pod).or_insert(PodRecord { at: clock, ..record(&pod.to_string(), 1) });
                        if there.contains(&pod) {
                            listed.insert(&records[&pod].pod.uid);
                            known.insert(pod);
                        }
                    }
                    Step::Passes(seconds) => clock += seconds * 1_000_000_000,
                    Step::Pass => {
                        let mut ended = Vec::new();
                        for (pod, record) in &records {
                            let view = there.contains(pod).then(|| view(&pod.to_string(), PodPhase::Running));
                            if view.is_some() {
                                listed.insert(&record.pod.uid);
                                known.insert(*pod);
                            }
                            let end = listed.end_of(record, view.as_ref(), clock);
                            let expected = if there.contains(pod) {
                                None
                            } else if known.contains(pod) {
                                Some(PodEnd::Deleted)
                            } else {
                                is_older(record.at, clock).then_some(PodEnd::NeverListed)
                            };
                            prop_assert_eq!(end, expected);
                            ended.extend(end.map(|_| *pod));
                        }
                        for pod in ended {
                            records.remove(&pod);
                            known.remove(&pod);
                            listed.0.remove(&PodUid::from(pod.to_string().as_str()));
                        }
                    }
                }
            }
        }
    }
}
