//! Leader election between the replicas of a component, on a `coordination.k8s.io/v1` Lease.
//!
//! At most one replica leads at a time. A leader that cannot renew its lease stops leading before any other replica can
//! take it, and a replica never compares its clock with another's: see [`election`].

mod election;

use crate::backoff::spread;
use crate::client::ApiClient;
use crate::error::ClusterError;
use election::{Election, LeaseRecord, LeaseTerm, LocalTime, MAX_LEASE_DURATION, NextStep};
use jiff::Timestamp;
use k8s_openapi::api::coordination::v1::{Lease, LeaseSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{MicroTime, ObjectMeta};
use kube::Api;
use kube::api::PostParams;
use std::fmt;
use std::hash::{BuildHasher, RandomState};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

/// Where a lease is. Its component needs the verbs `get`, `create` and `update` on leases there.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LeaseName {
    /// The namespace that the Lease object is in.
    pub namespace: String,
    /// The name, such as `partage-control`.
    pub name: String,
}

impl fmt::Display for LeaseName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.namespace, self.name)
    }
}

/// Why durations cannot be used for an election.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TimingError {
    /// The API server stores the lease duration in whole seconds.
    #[error("lease duration {0:?}: use whole seconds, from 1 to 600")]
    LeaseDuration(Duration),
    /// A holder must stop before others take its lease, although its clock may be slower than theirs.
    #[error("renew deadline {deadline:?}: use at most three quarters of the lease duration {lease:?}")]
    RenewDeadline {
        /// The refused renew deadline.
        deadline: Duration,
        /// The lease duration that it was compared with.
        lease: Duration,
    },
    /// A holder must have time for more than one attempt.
    #[error(
        "retry interval {interval:?}: use more than 0 and at most a third of the renew deadline {deadline:?}"
    )]
    RetryInterval {
        /// The refused retry interval.
        interval: Duration,
        /// The renew deadline that it was compared with.
        deadline: Duration,
    },
}

/// The durations of an election: 15 s, 10 s and 2 s by default, as for Kubernetes' own components.
///
/// ```
/// use partage_cluster::ElectionTiming;
/// use std::time::Duration;
///
/// let seconds = Duration::from_secs;
/// assert!(ElectionTiming::new(seconds(15), seconds(10), seconds(2)).is_ok());
/// assert!(ElectionTiming::new(seconds(15), seconds(15), seconds(2)).is_err(), "others would wait no longer");
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ElectionTiming {
    lease_duration: Duration,
    renew_deadline: Duration,
    retry_interval: Duration,
}

impl Default for ElectionTiming {
    fn default() -> Self {
        ElectionTiming {
            lease_duration: Duration::from_secs(15),
            renew_deadline: Duration::from_secs(10),
            retry_interval: Duration::from_secs(2),
        }
    }
}

impl ElectionTiming {
    /// Checks that a holder stops leading before another replica can take its lease.
    pub fn new(
        lease_duration: Duration,
        renew_deadline: Duration,
        retry_interval: Duration,
    ) -> Result<ElectionTiming, TimingError> {
        let in_range = (Duration::from_secs(1)..=MAX_LEASE_DURATION).contains(&lease_duration);
        if !in_range || lease_duration.subsec_nanos() != 0 {
            return Err(TimingError::LeaseDuration(lease_duration));
        }
        if renew_deadline > lease_duration * 3 / 4 {
            return Err(TimingError::RenewDeadline { deadline: renew_deadline, lease: lease_duration });
        }
        if retry_interval.is_zero() || retry_interval > renew_deadline / 3 {
            return Err(TimingError::RetryInterval { interval: retry_interval, deadline: renew_deadline });
        }
        Ok(ElectionTiming { lease_duration, renew_deadline, retry_interval })
    }

    /// Returns how long others wait for a silent holder.
    pub fn lease_duration(&self) -> Duration {
        self.lease_duration
    }

    /// Returns how long a holder leads after it sent its last successful write.
    pub fn renew_deadline(&self) -> Duration {
        self.renew_deadline
    }

    /// Returns the time between two attempts to acquire or renew.
    pub fn retry_interval(&self) -> Duration {
        self.retry_interval
    }

    /// Returns the time limit of one request: a holder has two attempts before its deadline.
    fn request_timeout(&self) -> Duration {
        self.renew_deadline / 2
    }
}

/// A replica's part in an election.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LeaderRole {
    /// Another replica leads, or none is known to.
    Follower {
        /// The identity of the replica that held the lease when it was last read.
        leader: Option<String>,
    },
    /// This replica leads, until it fails to renew the lease in time or stops.
    Leader {
        /// The number of the term. It grows with every change of leadership.
        term: i32,
    },
}

/// A period in which this replica leads. It is extended as long as the lease is renewed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LeaderTerm {
    /// Grows with every change of leadership.
    pub number: i32,
    deadline: LocalTime,
}

impl LeaderTerm {
    /// Returns how long this replica leads from now on if the lease is not renewed: the longest timeout for a request that only a
    /// leader may send. Zero once the term has ended.
    pub fn remaining(&self) -> Duration {
        self.deadline.saturating_sub(local_time())
    }
}

/// Takes part in an election until it is dropped or released.
///
/// ```no_run
/// use partage_cluster::{ApiClient, ElectionTiming, LeaderElection, LeaseName};
///
/// # async fn lead(client: &ApiClient) {
/// let lease = LeaseName { namespace: "partage-system".into(), name: "partage-control".into() };
/// let election = LeaderElection::start(client, lease, "control-0", ElectionTiming::default());
/// if let Some(term) = election.term() {
///     // Requests of a leader end before its term does.
///     let timeout = term.remaining();
/// }
/// // Work of the leader has ended: let another replica lead at once.
/// election.release().await;
/// # }
/// ```
pub struct LeaderElection {
    shared: Arc<ElectionState>,
    identity: String,
    stop: CancellationToken,
    task: Option<JoinHandle<()>>,
}

impl fmt::Debug for LeaderElection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let role = self.shared.role.borrow().clone();
        f.debug_struct("LeaderElection")
            .field("identity", &self.identity)
            .field("role", &role)
            .finish_non_exhaustive()
    }
}

struct ElectionState {
    leadership: Mutex<Leadership>,
    role: watch::Sender<LeaderRole>,
}

#[derive(Default)]
struct Leadership {
    term: Option<LeaseTerm>,
    /// Set once, when this replica leaves the election.
    has_ended: bool,
}

impl ElectionState {
    fn leadership(&self) -> MutexGuard<'_, Leadership> {
        self.leadership.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Ends leadership permanently.
    fn end(&self) {
        self.leadership().has_ended = true;
        self.publish(None, None);
    }

    fn publish(&self, term: Option<LeaseTerm>, holder: Option<&str>) {
        let mut leadership = self.leadership();
        leadership.term = term.filter(|_| !leadership.has_ended);
        let role = match leadership.term {
            Some(term) => LeaderRole::Leader { term: term.number },
            None => LeaderRole::Follower { leader: holder.map(str::to_string) },
        };
        self.role.send_if_modified(|known| {
            let changed = *known != role;
            if changed {
                *known = role;
            }
            changed
        });
    }
}

impl LeaderElection {
    /// Becomes a candidate. `instance` is the replica's name; a random suffix makes its identity unique, so that a
    /// restarted process does not take the lease of its predecessor for its own.
    ///
    /// Must be called inside a tokio runtime.
    pub fn start(
        client: &ApiClient,
        lease: LeaseName,
        instance: &str,
        timing: ElectionTiming,
    ) -> LeaderElection {
        let identity = format!("{instance}_{:016x}", RandomState::new().hash_one(instance));
        let role = watch::Sender::new(LeaderRole::Follower { leader: None });
        let shared = Arc::new(ElectionState { leadership: Mutex::default(), role });
        let stop = CancellationToken::new();
        let candidate = Candidate {
            leases: Api::namespaced(client.kube().clone(), &lease.namespace),
            client: client.clone(),
            lease,
            election: Election::new(
                identity.clone(),
                timing,
                timing.retry_interval.mul_f64(spread(&identity) / 4.0),
            ),
            identity: identity.clone(),
            timing,
            last_seen: None,
            is_failing: false,
            shared: Arc::clone(&shared),
        };
        let task = tokio::spawn(candidate.run(stop.clone()));
        LeaderElection { shared, identity, stop, task: Some(task) }
    }

    /// Returns the identity that the lease shows while this replica leads.
    pub fn identity(&self) -> &str {
        &self.identity
    }

    /// Returns whether this replica leads at this moment, by its own clock.
    pub fn is_leader(&self) -> bool {
        self.term().is_some()
    }

    /// Returns the term in which this replica leads at this moment, by its own clock.
    pub fn term(&self) -> Option<LeaderTerm> {
        let now = local_time();
        let term = self.shared.leadership().term.filter(|term| now < term.deadline)?;
        Some(LeaderTerm { number: term.number, deadline: term.deadline })
    }

    /// Returns the replica's role, to wait for its changes. Check [`LeaderElection::is_leader`] before acting on it: a process
    /// that was suspended is notified late.
    pub fn role(&self) -> watch::Receiver<LeaderRole> {
        self.shared.role.subscribe()
    }

    /// Stops leading and gives the lease back, so that another replica need not wait for its expiry. What this replica
    /// does as leader must have ended before.
    pub async fn release(mut self) {
        self.shared.end();
        self.stop.cancel();
        if let Some(task) = self.task.take() {
            // A panic of the task has been reported by the panic hook.
            let _ = task.await;
        }
    }
}

impl Drop for LeaderElection {
    /// Stops leading without releasing the lease: operations that were started as leader may still run.
    fn drop(&mut self) {
        if let Some(task) = self.task.take() {
            task.abort();
        }
        self.shared.end();
    }
}

/// Carries out the actions that the election decides.
struct Candidate {
    client: ApiClient,
    leases: Api<Lease>,
    lease: LeaseName,
    identity: String,
    timing: ElectionTiming,
    election: Election,
    /// The object of the last answer, so that an update keeps its labels and annotations.
    last_seen: Option<Lease>,
    is_failing: bool,
    shared: Arc<ElectionState>,
}

impl Candidate {
    async fn run(mut self, stop: CancellationToken) {
        while !stop.is_cancelled() {
            let now = local_time();
            let step = self.election.next(now);
            self.shared.publish(self.election.term(now), self.election.holder());
            match step {
                NextStep::Wait(until) => {
                    let wait = tokio::time::sleep(until.saturating_sub(now));
                    stop.run_until_cancelled(wait).await;
                }
                NextStep::Read => self.read().await,
                NextStep::Create => self.write(None, 0, true).await,
                NextStep::Write { version, transitions, is_acquisition } => {
                    self.write(Some(version), transitions, is_acquisition).await;
                }
            }
        }
        self.release().await;
    }

    async fn read(&mut self) {
        let operation = || format!("reading lease {}", self.lease);
        let read = self.leases.get_opt(&self.lease.name);
        let read = self.client.request_within(self.time_left(), operation, read).await;
        let now = local_time();
        match read {
            Ok(lease) => {
                self.succeeded();
                self.election.was_read(now, lease.as_ref().map(record));
                self.last_seen = lease;
            }
            Err(error) => self.failed(now, &error),
        }
    }

    async fn write(&mut self, version: Option<String>, transitions: i32, is_acquisition: bool) {
        let is_creation = version.is_none();
        let lease = self.lease_for_this_replica(version, transitions, is_acquisition);
        let operation = || format!("writing lease {}", self.lease);
        let (timeout, options) = (self.time_left(), PostParams::default());
        // Before the request: the moment from which the term is counted.
        let sent = local_time();
        let written = async {
            if is_creation {
                self.leases.create(&options, &lease).await
            } else {
                self.leases.replace(&self.lease.name, &options, &lease).await
            }
        };
        let written = self.client.request_within(timeout, operation, written).await;
        let now = local_time();
        match written {
            Ok(lease) => {
                self.succeeded();
                self.election.was_written(sent, now, record(&lease));
                self.last_seen = Some(lease);
            }
            // It has another version, or another candidate created it.
            Err(ClusterError::Rejected { code: 409, .. }) => self.election.was_refused(now),
            // It was deleted. A creation fails like this if the namespace does not exist.
            Err(ClusterError::Rejected { code: 404, .. }) if !is_creation => self.election.was_refused(now),
            Err(error) => self.failed(now, &error),
        }
    }

    /// Returns the lease with this replica as its holder.
    fn lease_for_this_replica(
        &self,
        version: Option<String>,
        transitions: i32,
        is_acquisition: bool,
    ) -> Lease {
        let mut lease = self.base(version);
        let now = Some(MicroTime(Timestamp::now()));
        let spec = lease.spec.get_or_insert_with(LeaseSpec::default);
        spec.holder_identity = Some(self.identity.clone());
        spec.lease_duration_seconds = i32::try_from(self.timing.lease_duration.as_secs()).ok();
        spec.lease_transitions = Some(transitions);
        // Informational: no decision depends on these.
        spec.renew_time.clone_from(&now);
        if is_acquisition {
            spec.acquire_time = now;
        }
        lease
    }

    /// Returns the object as it was last seen, or a new one, with the version that it must have on the server.
    fn base(&self, version: Option<String>) -> Lease {
        let mut lease = match &version {
            Some(_) => self.last_seen.clone().unwrap_or_default(),
            None => Lease::default(),
        };
        lease.metadata = ObjectMeta {
            name: Some(self.lease.name.clone()),
            namespace: Some(self.lease.namespace.clone()),
            resource_version: version,
            managed_fields: None,
            ..lease.metadata
        };
        lease
    }

    /// Gives the lease back if this replica holds it. Failure costs the others one lease duration.
    async fn release(&mut self) {
        let version = self.election.release();
        self.shared.publish(None, self.election.holder());
        let Some(version) = version else { return };
        let mut lease = self.base(Some(version));
        let spec = lease.spec.get_or_insert_with(LeaseSpec::default);
        spec.holder_identity = None;
        spec.lease_duration_seconds = Some(1);
        let operation = || format!("releasing lease {}", self.lease);
        let options = PostParams::default();
        let released = self.leases.replace(&self.lease.name, &options, &lease);
        if let Err(error) =
            self.client.request_within(self.timing.request_timeout(), operation, released).await
        {
            tracing::warn!(%error, "lease not released: others wait until it expires");
        }
    }

    /// Returns the time limit of the next request: a leader must notice in time that its term ends.
    fn time_left(&self) -> Duration {
        let now = local_time();
        let timeout = self.timing.request_timeout();
        self.election.term(now).map_or(timeout, |term| timeout.min(term.deadline.saturating_sub(now)))
    }

    fn succeeded(&mut self) {
        if std::mem::take(&mut self.is_failing) {
            tracing::info!(lease = %self.lease, "lease reachable again");
        }
    }

    fn failed(&mut self, now: LocalTime, error: &ClusterError) {
        self.election.has_failed(now);
        // Once per absence.
        if std::mem::replace(&mut self.is_failing, true) {
            tracing::debug!(lease = %self.lease, %error, "lease still not reachable");
        } else {
            tracing::warn!(lease = %self.lease, %error, "lease not reachable");
        }
    }
}

fn record(lease: &Lease) -> LeaseRecord {
    let spec = lease.spec.clone().unwrap_or_default();
    let seconds = spec.lease_duration_seconds.and_then(|seconds| u64::try_from(seconds).ok());
    LeaseRecord {
        holder: spec.holder_identity.unwrap_or_default(),
        duration: seconds.filter(|seconds| *seconds > 0).map(Duration::from_secs),
        transitions: spec.lease_transitions.unwrap_or_default(),
        version: lease.metadata.resource_version.clone().unwrap_or_default(),
    }
}

/// Returns the time since boot, including the time in which the machine was suspended: a leader that wakes up must know that its term
/// is over.
fn local_time() -> LocalTime {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
    Duration::new(
        u64::try_from(now.tv_sec).unwrap_or_default(),
        u32::try_from(now.tv_nsec).unwrap_or_default(),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn timing_that_could_let_two_replicas_lead_is_refused() {
        let seconds = Duration::from_secs;
        let timing = |lease, deadline, retry| ElectionTiming::new(lease, deadline, retry).err();
        assert_eq!(timing(seconds(15), seconds(10), seconds(2)), None);
        assert_eq!(timing(seconds(4), seconds(3), seconds(1)), None);
        for lease in [Duration::ZERO, Duration::from_millis(1500), seconds(601)] {
            assert_eq!(timing(lease, seconds(1), seconds(1)), Some(TimingError::LeaseDuration(lease)));
        }
        assert!(matches!(
            timing(seconds(4), seconds(4), seconds(1)),
            Some(TimingError::RenewDeadline { .. })
        ));
        for retry in [Duration::ZERO, seconds(2)] {
            let refused = timing(seconds(4), seconds(3), retry);
            assert!(matches!(refused, Some(TimingError::RetryInterval { .. })), "{retry:?}");
        }
        let default = ElectionTiming::default();
        let checked =
            ElectionTiming::new(default.lease_duration, default.renew_deadline, default.retry_interval);
        assert_eq!(checked, Ok(default));
    }
}
