//! Leader election on a real Lease: several candidates, killed, released and cut off leaders.

use crate::control_plane::ControlPlane;
use partage_cluster::{ApiClient, ElectionTiming, LeaderElection, LeaderRole, LeaseName};
use partage_testkit::eventually;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

const SECOND: Duration = Duration::from_secs(1);

/// The candidates that take part now. One that leaves is removed first.
type Candidates = Arc<Mutex<Vec<Arc<LeaderElection>>>>;

/// Samples all the time how many candidates lead at once.
struct Observer {
    stop: Arc<AtomicBool>,
    most_leaders: Arc<AtomicUsize>,
    thread: std::thread::JoinHandle<()>,
}

impl Observer {
    fn start(candidates: Candidates) -> Observer {
        let (stop, most_leaders) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicUsize::new(0)));
        let (ended, most) = (Arc::clone(&stop), Arc::clone(&most_leaders));
        let thread = std::thread::spawn(move || {
            while !ended.load(Ordering::SeqCst) {
                let leaders = candidates.lock().unwrap().iter().filter(|one| one.is_leader()).count();
                most.fetch_max(leaders, Ordering::SeqCst);
                std::thread::sleep(Duration::from_millis(1));
            }
        });
        Observer { stop, most_leaders, thread }
    }

    fn end(self) -> usize {
        self.stop.store(true, Ordering::SeqCst);
        self.thread.join().unwrap();
        self.most_leaders.load(Ordering::SeqCst)
    }
}

fn candidate(client: &ApiClient, name: &str) -> Arc<LeaderElection> {
    let lease = LeaseName { namespace: "default".into(), name: "partage-control".into() };
    let timing = ElectionTiming::new(4 * SECOND, 3 * SECOND, SECOND / 2).unwrap();
    Arc::new(LeaderElection::start(client, lease, name, timing))
}

/// Waits for a leader and returns it with the number of its term.
async fn leader(candidates: &Candidates) -> (Arc<LeaderElection>, i32) {
    eventually("a candidate leads", async || {
        let candidates = candidates.lock().unwrap().clone();
        let leader = candidates.iter().find_map(|one| Some((Arc::clone(one), one.term()?.number)));
        leader.ok_or_else(|| format!("{candidates:?}"))
    })
    .await
}

fn leave(candidates: &Candidates, leader: Arc<LeaderElection>) -> LeaderElection {
    candidates.lock().unwrap().retain(|one| !Arc::ptr_eq(one, &leader));
    unshare(leader)
}

/// Takes a candidate out of its `Arc`. No other clone is held for longer than a moment.
fn unshare(mut election: Arc<LeaderElection>) -> LeaderElection {
    loop {
        match Arc::try_unwrap(election) {
            Ok(election) => return election,
            Err(shared) => election = shared,
        }
        std::thread::yield_now();
    }
}

#[test]
fn one_candidate_leads_after_any_leader_failure() {
    let Some(plane) = ControlPlane::start() else { return };
    let candidates = Candidates::default();
    let clients: Vec<ApiClient> = (0..3).map(|_| plane.administrator()).collect();
    plane.bed.block_on(async {
        for (number, client) in clients.iter().enumerate() {
            candidates.lock().unwrap().push(candidate(client, &format!("control-{number}")));
        }
    });
    let observer = Observer::start(Arc::clone(&candidates));
    let next_leader = || plane.bed.block_on(leader(&candidates));

    let (first, term) = next_leader();
    let lease = plane.get(&["lease", "partage-control"]);
    assert_eq!(lease["spec"]["holderIdentity"], first.identity());
    assert_eq!(lease["spec"]["leaseDurationSeconds"], 4);
    plane.bed.kubectl(&["label", "lease", "partage-control", "team=gpu"]).unwrap();
    let followers = || candidates.lock().unwrap().iter().filter(|one| !one.is_leader()).count();
    assert_eq!(followers(), 2);
    plane.bed.block_on(eventually("all know the leader", async || {
        let roles: Vec<LeaderRole> =
            candidates.lock().unwrap().iter().map(|one| one.role().borrow().clone()).collect();
        let known = LeaderRole::Follower { leader: Some(first.identity().to_string()) };
        let followers = roles.iter().filter(|role| **role == known).count();
        if followers == 2 && roles.contains(&LeaderRole::Leader { term }) {
            Ok(())
        } else {
            Err(format!("{roles:?}"))
        }
    }));

    // Killed: it does not give its lease back, and another leads when that has expired.
    drop(leave(&candidates, first));
    let (second, second_term) = next_leader();
    assert!(second_term > term, "{second_term} after {term}");
    let labels = &plane.get(&["lease", "partage-control"])["metadata"]["labels"];
    assert_eq!(labels["team"], "gpu", "what others wrote on the lease stays");

    // Released: its lease has no holder until another takes it.
    plane.bed.block_on(leave(&candidates, second).release());
    let (third, third_term) = next_leader();
    assert!(third_term > second_term, "{third_term} after {second_term}");

    // Cut off: it stops leading without a notification, although no other candidate can take over.
    plane.without_server(|| {
        let mut role = third.role();
        plane.bed.block_on(async {
            role.wait_for(|role| matches!(role, LeaderRole::Follower { .. })).await.unwrap();
        });
        assert!(!third.is_leader() && third.term().is_none());
    });
    drop(third);
    let (fourth, fourth_term) = next_leader();
    assert!(fourth_term > third_term, "{fourth_term} after {third_term}");
    drop(fourth);
    assert_eq!(observer.end(), 1, "never two at once");
}
