//! What has ended is given back, and what is nobody's is removed.
//!
//! A pod holds its grant until nothing of it can use a GPU any more: it is gone from the API server, or finished, and the
//! runtime has no container of it that runs. A pod that was deleted by force is gone at once, and its containers are not.

use crate::identity::{ContainerState, Holder, RunningContainer};
use crate::node::{CROWD, NodeState, now};
use crate::plugin::Nonce;
use crate::resources::CountResource;
use crate::settings::Settings;
use partage_cluster::{About, PodView, Severity};
use partage_core::model::PodUid;
use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio_util::sync::CancellationToken;

/// Everything is looked through at least so often.
const BEAT: Duration = Duration::from_secs(60);
/// While something waits for its containers to end.
const SOON: Duration = Duration::from_millis(500);
/// A name that was answered, and a record that was written, may be this young and known to nobody else yet.
const YOUNG: Duration = Duration::from_secs(120);
/// A pod that is older than this when it is found rejected needs no explanation any more.
const TOLD: Duration = Duration::from_secs(600);

/// Sweeps whenever pods change, and once a minute.
pub(crate) async fn keep_sweeping(state: Arc<NodeState>, stop: CancellationToken) {
    let mut pods = state.pods.changed();
    // Those that were known before were pods once: what is not in the list is gone.
    let mut seen: BTreeSet<PodUid> = state.book().records().map(|record| record.pod.uid.clone()).collect();
    let mut told = BTreeSet::new();
    let mut compared = Instant::now();
    while !stop.is_cancelled() {
        pods.borrow_and_update();
        tell_rejected(&state, &mut told);
        let waits = sweep(&state, &mut seen).await;
        // Also where nobody scrapes.
        if compared.elapsed() >= BEAT {
            tokio::task::block_in_place(|| state.compare());
            compared = Instant::now();
        }
        let pause = if waits { SOON } else { BEAT };
        tokio::select! {
            () = tokio::time::sleep(pause) => {}
            _ = pods.changed(), if !waits => tokio::time::sleep(CROWD).await,
            () = stop.cancelled() => {}
        }
    }
}

/// Whether something has ended and still runs.
async fn sweep(state: &NodeState, seen: &mut BTreeSet<PodUid>) -> bool {
    if !state.pods.synced() {
        return false;
    }
    // Nothing is anybody's before it is known who holds what.
    if let Err(refusal) = state.adopt().await {
        tracing::debug!("{refusal}");
        return true;
    }
    let mut ended = Vec::new();
    {
        let book = state.book();
        for record in book.records() {
            let uid = &record.pod.uid;
            match state.pods.by_uid(uid) {
                Some(pod) => {
                    seen.insert(uid.clone());
                    if pod.is_finished() {
                        ended.push(uid.clone());
                    }
                }
                None if seen.contains(uid) || is_older(record.at, now()) => ended.push(uid.clone()),
                None => {}
            }
        }
    }
    let mut waits = false;
    if !ended.is_empty() {
        // Without the runtime's word nothing is given away twice.
        let Ok(containers) = state.runtime.containers().await else { return true };
        for uid in ended {
            if !ends(&uid, &containers) {
                waits = true;
                continue;
            }
            let _alone = state.alone_with(&uid).await;
            // Who started while we waited for our turn is no longer at its end.
            let Ok(containers) = state.runtime.containers().await else { return true };
            if !ends(&uid, &containers) {
                waits = true;
                continue;
            }
            tracing::info!(%uid, "a pod has ended");
            tokio::task::block_in_place(|| state.forget(&uid));
            seen.remove(&uid);
        }
    }
    tokio::task::block_in_place(|| remove_orphans(state));
    waits
}

/// Whether nothing of a pod runs or is about to.
fn ends(uid: &PodUid, containers: &[RunningContainer]) -> bool {
    containers.iter().filter(|one| one.uid == *uid).all(|one| one.state == ContainerState::Exited)
}

/// Tells pods why kubelet did not take them, and what happens next.
fn tell_rejected(state: &NodeState, told: &mut BTreeSet<PodUid>) {
    let pods = state.pods.all();
    told.retain(|uid| pods.iter().any(|pod| pod.id.uid == *uid));
    for pod in pods.iter().filter(|pod| is_ours(pod, &state.settings())) {
        let Some(said) = &pod.rejected else { continue };
        let earlier = state.book().record(&pod.id.uid).map(|record| record.boot != state.boot);
        // One that failed long ago was told so by an earlier agent.
        let recent = now() / 1_000_000_000 < u64::try_from(pod.created).unwrap_or(0) + TOLD.as_secs();
        if (earlier.is_none() && !recent) || !told.insert(pod.id.uid.clone()) {
            continue;
        }
        let (reason, why) = rejection(said, earlier == Some(true));
        let note = format!(
            "{why}: it failed the pod (UnexpectedAdmissionError); what it held is free; its controller makes another one, and a pod \
             without a controller has to be made again"
        );
        state.cluster.tell(About::Pod(&pod.id), Severity::Warning, reason, &note);
    }
}

/// What kubelet says where it has no plugin, or has lost it: these devices are counted as lost, or not at all.
const AWAY: [&str; 4] =
    ["no healthy devices present", "unregistered device", "has been stopped", "code = Unavailable"];

/// What it means that kubelet did not take a pod, by what it says of it.
fn rejection(said: &str, booted: bool) -> (&'static str, String) {
    // Without kubelet's own words around it.
    let plain = said.trim_start_matches("Pod was rejected: ").trim_start_matches("Allocate failed due to ");
    let plain = plain.trim_end_matches(", which is unexpected").trim_end_matches('.');
    if said.is_empty() || AWAY.iter().any(|words| said.contains(words)) {
        let why = match booted {
            true => {
                "the node was booted, and kubelet looked for the pod's GPUs before Partage was there again"
            }
            false => "kubelet looked for the pod's GPUs while Partage was not there",
        };
        return ("AgentWasAway", why.into());
    }
    let why = if said.contains("requested number of devices unavailable") {
        format!(
            "kubelet has fewer devices left than the pod asks for, as when another pod came first ({plain})"
        )
    } else if said.contains("rpc error") {
        format!("kubelet asked Partage for the pod's devices and was refused ({plain})")
    } else {
        format!("kubelet did not take the pod ({plain})")
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
        tracing::debug!(%nonce, "nobody's: removed");
        state.forget_name(nonce);
    }
}

/// Whether something of one time was no longer young at another.
fn is_older(at: u64, than: u64) -> bool {
    than.saturating_sub(at) > u64::try_from(YOUNG.as_nanos()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kubelet_is_quoted_unless_nobody_was_there() {
        let away = "Pod was rejected: Allocate failed due to no healthy devices present; cannot allocate unhealthy devices partage.dev/gpu, which is unexpected";
        assert_eq!(rejection(away, false).0, "AgentWasAway");
        assert!(rejection(away, true).1.starts_with("the node was booted"));
        let unregistered = "Pod was rejected: Allocate failed due to can't allocate unregistered device partage.dev/gpu, which is unexpected";
        assert_eq!(rejection(unregistered, false).0, "AgentWasAway");
        for (said, why) in [
            (
                "Pod was rejected: Allocate failed due to requested number of devices unavailable for partage.dev/gpu. Requested: 3, Available: 1, which is unexpected",
                "kubelet has fewer devices left than the pod asks for, as when another pod came first (requested number of devices \
                 unavailable for partage.dev/gpu. Requested: 3, Available: 1)",
            ),
            (
                "Pod was rejected: Allocate failed due to rpc error: code = FailedPrecondition desc = the answer cannot be recorded: no space left, which is unexpected",
                "kubelet asked Partage for the pod's devices and was refused (rpc error: code = FailedPrecondition desc = the answer \
                 cannot be recorded: no space left)",
            ),
            ("Pod was rejected: something new", "kubelet did not take the pod (something new)"),
        ] {
            assert_eq!(rejection(said, false), ("NotAdmitted", why.to_string()));
            assert_eq!(rejection(said, true).1, why, "a boot has nothing to do with it");
        }
    }
}
