//! How far the agent is, from its first moment on: what probes and Prometheus are told.

use crate::api_server::ApiServer;
use crate::metrics;
use crate::report::{ContainerReport, Counts, Report};
use crate::settings::Metrics;
use crate::state::NodeState;
use partage_core::model::NodeName;
use partage_enforce::report::GpuStatus;
use partage_serve::NotReady;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

/// Interval between attempts to bind an address that is taken.
const BIND_RETRY_INTERVAL: Duration = Duration::from_secs(5);

/// How far it is.
#[derive(Default)]
pub(crate) struct Progress {
    /// From when the node's GPUs are known.
    state: Mutex<Option<Arc<NodeState>>>,
    /// Why there is nothing to share here; then it is ready, and waits.
    nothing: Mutex<Option<String>>,
    /// For each resource, how many listen.
    watched: Mutex<Vec<(String, watch::Receiver<usize>)>>,
}

impl Progress {
    /// Everything is known.
    pub(crate) fn found(&self, state: &Arc<NodeState>) {
        *lock(&self.nothing) = None;
        *lock(&self.state) = Some(Arc::clone(state));
    }

    /// Nothing of it holds any more.
    pub(crate) fn lost(&self) {
        *lock(&self.state) = None;
    }

    fn state(&self) -> Option<Arc<NodeState>> {
        lock(&self.state).clone()
    }

    /// There is nothing to share, for now.
    pub(crate) fn nothing(&self, why: Option<&str>) {
        *lock(&self.nothing) = why.map(str::to_string);
    }

    /// These resources are served.
    pub(crate) fn serves(&self, watched: Vec<(String, watch::Receiver<usize>)>) {
        *lock(&self.watched) = watched;
    }

    /// Why it is not ready, if it is not.
    fn ready(&self) -> Result<(), String> {
        if lock(&self.state).is_none() {
            return lock(&self.nothing)
                .as_ref()
                .map(drop)
                .ok_or_else(|| "the node's GPUs are not known yet".into());
        }
        listened_to(&lock(&self.watched))
    }
}

/// Why kubelet does not know of all resources, if it does not.
fn listened_to(watched: &[(String, watch::Receiver<usize>)]) -> Result<(), String> {
    if watched.is_empty() {
        return Err("no resource is served to kubelet yet".into());
    }
    match watched.iter().find(|(_, watched)| *watched.borrow() == 0) {
        Some((resource, _)) => Err(format!("kubelet does not listen to {resource} yet")),
        None => Ok(()),
    }
}

/// Serves metrics and probes until told to stop.
pub(crate) async fn keep_telling(
    progress: Arc<Progress>,
    cluster: ApiServer,
    settings: Metrics,
    stop: CancellationToken,
) {
    let node = cluster.node.name().clone();
    let auth = metrics::token_auth(move |token| {
        let cluster = cluster.clone();
        async move { cluster.client.token_may_get(&token, "/metrics").await }
    });
    while !stop.is_cancelled() {
        let (of, ready, node) = (Arc::clone(&progress), Arc::clone(&progress), node.clone());
        let report = move || of.state().map_or_else(|| empty(&node), |state| report(&state));
        let served = async {
            let server = metrics::Server::bind(&settings, Arc::clone(&auth)).await?;
            tracing::info!(address = %server.address(), anonymous = settings.anonymous, "metrics are served");
            server.run(report, move || ready.ready().map_err(NotReady::new), stop.clone()).await;
            std::io::Result::Ok(())
        };
        if let Err(error) = served.await {
            tracing::error!("metrics cannot be served on {}: {error}", settings.address);
            stop.run_until_cancelled(tokio::time::sleep(BIND_RETRY_INTERVAL)).await;
        }
    }
}

/// Of a node whose GPUs are not known.
fn empty(node: &NodeName) -> Report {
    Report {
        at: partage_region::clock::exact(),
        node: node.clone(),
        driver: String::new(),
        simulated: false,
        gpus: Vec::new(),
        containers: Vec::new(),
        counts: Counts::default(),
    }
}

/// How the node is now.
fn report(state: &NodeState) -> Report {
    let truth = state.monitor_report().clone();
    let live: Vec<_> = {
        let live = state.adapters.regions.live();
        live.iter()
            .map(|(key, live)| {
                (
                    key.clone(),
                    live.uid.clone(),
                    live.container.clone(),
                    live.shares.clone(),
                    live.region().cloned(),
                )
            })
            .collect()
    };
    // Regions are read before the containers are locked: nobody's start waits for that.
    let live: Vec<_> = live
        .into_iter()
        .map(|(key, uid, container, shares, region)| {
            let usage = region.and_then(|region| region.reader().snapshot().ok());
            (key, uid, container, shares, usage)
        })
        .collect();
    let mismatches = state.check_consistency() as u64;
    let suspected = state.suspected();
    let node_containers = state.containers();
    let grants = node_containers.grants();
    // An init container's share is used before the others start, and not beside theirs.
    let granted = || grants.shares().filter(|(_, grant, _)| !grant.init).map(|(_, _, share)| share);
    let gpus = GpuStatus::of_node(grants.node(), &truth, granted);
    let containers = live.into_iter().filter_map(|(key, uid, container, shares, usage)| {
        let record = grants.record(&uid)?;
        let used = |at: usize| usage.as_ref().and_then(|usage| usage.gpus.get(at)).cloned();
        Some(ContainerReport {
            pod: record.pod.clone(),
            dialect: record.dialect(&container),
            container,
            shares: shares.into_iter().enumerate().map(|(at, share)| (share, used(at))).collect(),
            seen: truth.usage.get(&key).cloned().unwrap_or_default(),
            bypass_suspected: suspected.contains(&key, Instant::now()),
        })
    });
    let mut counts = state.counts().clone();
    counts.mismatches = mismatches;
    Report {
        at: partage_region::clock::exact(),
        node: grants.node().name.clone(),
        driver: state.adapters.gpus.driver_version().into(),
        simulated: state.machine.simulated.is_some(),
        gpus,
        containers: containers.collect(),
        counts,
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Every change under these locks is whole.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_ready_when_kubelet_listens_to_everything() {
        assert_eq!(listened_to(&[]), Err("no resource is served to kubelet yet".into()));
        let (one, two) = (watch::Sender::new(1), watch::Sender::new(0));
        let watched = [("a".to_string(), one.subscribe()), ("b".to_string(), two.subscribe())];
        assert_eq!(listened_to(&watched), Err("kubelet does not listen to b yet".into()));
        two.send_replace(1);
        assert_eq!(listened_to(&watched), Ok(()));
        one.send_replace(0);
        assert_eq!(listened_to(&watched), Err("kubelet does not listen to a yet".into()));
    }
}
