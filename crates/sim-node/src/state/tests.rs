use super::*;
use partage_region::failpoint::stop_thread_at;
use proptest::prelude::*;
use std::collections::BTreeMap;
use std::sync::Arc;
use tempfile::TempDir;

const SLICE_NANOS: u64 = 2_000;
const WINDOW_NANOS: u64 = 100_000;

fn folder(gpus: usize) -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    let setup = InitialState { memory: vec![1000 * UNIT; gpus], slice: SLICE_NANOS, window: WINDOW_NANOS };
    create(folder.path(), &setup).unwrap();
    folder
}

fn attach(folder: &TempDir) -> SimNodeState {
    SimNodeState::attach(folder.path()).unwrap()
}

/// Simulates the death of the slot's process: its lock is released, and nothing is cleaned up.
fn simulate_death(state: &SimNodeState) {
    state.alive.release(state.slot);
}

#[test]
fn process_is_listed_while_attached() {
    let folder = folder(2);
    let (one, two) = (attach(&folder), attach(&folder));
    assert_ne!(one.slot(), two.slot());
    assert!(one.processes(0).is_empty());
    one.set_contexts(0, 1);
    assert!(one.take_memory(0, 10));
    let seen = two.processes(0);
    assert_eq!(seen.len(), 1);
    assert_eq!((seen[0].pid, seen[0].used, seen[0].contexts), (std::process::id(), 10, 1));
    assert!(seen[0].name.contains("partage_sim"), "{}", seen[0].name);
    assert!(two.processes(1).is_empty());
    drop(one);
    assert!(two.processes(0).is_empty());
    assert_eq!(two.used_memory(0), 0);
}

#[test]
fn memory_is_granted_up_to_capacity() {
    let folder = folder(1);
    let (one, two) = (attach(&folder), attach(&folder));
    assert!(one.take_memory(0, 600) && !two.take_memory(0, 401) && two.take_memory(0, 400));
    assert!(!one.take_memory(0, 1));
    two.release_memory(0, 400);
    assert!(one.take_memory(0, 400));
    assert_eq!((one.used_memory(0), one.held_memory(0), two.held_memory(0)), (1000, 1000, 0));
}

#[test]
fn memory_of_dead_processes_is_reclaimed_on_demand() {
    let folder = folder(1);
    let (dead, living) = (attach(&folder), attach(&folder));
    assert!(dead.take_memory(0, 900));
    simulate_death(&dead);
    assert!(living.take_memory(0, 1000));
    std::mem::forget(dead);
}

#[test]
fn foreign_state_files_are_refused() {
    let folder = folder(1);
    std::fs::write(folder.path().join(STATE_FILE), "something").unwrap();
    assert!(matches!(SimNodeState::attach(folder.path()), Err(StateError::Foreign(_))));
    std::fs::remove_file(folder.path().join(STATE_FILE)).unwrap();
    assert!(matches!(SimNodeState::attach(folder.path()), Err(StateError::File { .. })));
    let many = InitialState { memory: vec![1; MAX_GPUS + 1], slice: 1, window: 1 };
    assert!(matches!(create(folder.path(), &many), Err(StateError::TooManyGpus(17))));
}

/// A process that lists others may be preempted between resolving a PID and recording it.
#[test]
fn late_record_of_a_pid_does_not_affect_the_next_process_of_the_slot() {
    let folder = folder(1);
    let (lister, dead) = (attach(&folder), attach(&folder));
    let started = |slot: usize| lister.shared.clients[slot].identity.started.load(Acquire);
    let host_pid = |slot: usize| &lister.shared.clients[slot].identity.host_pid;
    let (slot, seen) = (dead.slot(), started(dead.slot()));
    drop(dead);
    let next = attach(&folder);
    assert_eq!(next.slot(), slot);
    assert_ne!(started(slot), seen);
    host_pid(slot).store(0, Release);
    lister.record_host_pid(slot, seen, 7);
    assert_eq!(host_pid(slot).load(Acquire), 0);
    lister.record_host_pid(slot, started(slot), 8);
    lister.record_host_pid(slot, started(slot), 9);
    assert_eq!(host_pid(slot).load(Acquire), 8);
}

/// Threads that reclaim the same dead process concurrently must not affect a new process in its slot.
#[test]
fn concurrent_reclaim_leaves_new_processes_alone() {
    let folder = folder(1);
    let observer = attach(&folder);
    assert!(observer.take_memory(0, 100));
    let done = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                while !done.load(Relaxed) {
                    observer.reclaim_dead();
                }
            });
        }
        for _ in 0..400 {
            let living = attach(&folder);
            living.set_contexts(0, 1);
            assert!(living.take_memory(0, 10));
            assert_eq!(living.held_memory(0), 10);
            simulate_death(&living);
            std::mem::forget(living);
        }
        done.store(true, Relaxed);
    });
    observer.reclaim_dead();
    assert_eq!(observer.used_memory(0), 100);
}

/// Of two processes that are killed together, one may have held a GPU's lock.
#[test]
fn reclaim_inherits_locks_of_dead_processes() {
    let folder = folder(1);
    let observer = Arc::new(attach(&folder));
    // Dead processes are reclaimed in the order of their slots.
    let (first, second) = (attach(&folder), attach(&folder));
    assert!(first.slot < second.slot && first.take_memory(0, 3));
    let (timeline, held) = second.timeline(0);
    std::mem::forget(held);
    assert_ne!(timeline.gpu.line.lock.load(Relaxed), 0);
    simulate_death(&first);
    simulate_death(&second);
    // It must not block forever. It runs on its own thread, so that a deadlock is detected.
    let reclaimer = Arc::clone(&observer);
    let (sender, count) = std::sync::mpsc::channel();
    assert!(!stop_thread_at(u32::MAX, move || sender.send(reclaimer.reclaim_dead()).unwrap()));
    assert_eq!((count.recv(), observer.used_memory(0)), (Ok(2), 0));
    std::mem::forget((first, second));
}

/// Attaching, detaching and reclaiming clear a slot, and must not release locks of living processes.
#[test]
fn reclaim_keeps_locks_of_living_processes() {
    let folder = folder(2);
    let (living, dead) = (attach(&folder), attach(&folder));
    let locks = || {
        let gpus = living.shared.gpus[..2].iter().map(|gpu| gpu.line.lock.load(Relaxed));
        gpus.chain([living.shared.header.event_lock.load(Relaxed)]).collect::<Vec<_>>()
    };
    let (_, held) = living.timeline(1);
    let events = robust_mutex::lock(&living.shared.header.event_lock, living.slot, &living.alive);
    let shut = locks();
    assert!(shut[0] == 0 && shut[1] != 0 && shut[2] != 0);
    let coming = attach(&folder);
    assert_eq!(locks(), shut);
    simulate_death(&dead);
    let (sender, receiver) = std::sync::mpsc::channel();
    std::thread::scope(|scope| {
        let coming = &coming;
        scope.spawn(move || sender.send(coming.reclaim_dead()).unwrap());
        // It waits for the lock of the GPU.
        assert!(receiver.recv_timeout(std::time::Duration::from_millis(20)).is_err());
        drop((held, events));
        assert_eq!(receiver.recv(), Ok(1));
    });
    std::mem::forget(dead);
}

/// Performs all updates of shared state that a process makes, so that it can be killed at each of them.
fn run_busy_process(
    folder: std::path::PathBuf,
    slot: std::sync::mpsc::Sender<SimNodeState>,
) -> impl FnOnce() + Send {
    move || {
        let state = Arc::new(SimNodeState::attach(&folder).unwrap());
        // The test releases the locks of the dead process in place of the kernel, for which it needs the same open
        // files.
        slot.send(duplicate_handle(&state)).unwrap();
        state.set_contexts(0, 1);
        for units in [3, 5] {
            assert!(state.take_memory(0, units));
        }
        state.release_memory(0, 3);
        let mut lane = GpuLane::open(Arc::clone(&state), 0).unwrap();
        lane.extend(10_000).unwrap();
        std::thread::sleep(std::time::Duration::from_micros(200));
        lane.refresh().unwrap();
        lane.extend(20_000).unwrap();
        state.inject(0, GpuFault::Xid(31));
        std::thread::sleep(std::time::Duration::from_micros(200));
        lane.refresh().unwrap();
        drop(lane);
        drop(Arc::into_inner(state));
    }
}

/// Duplicates a handle, so that the test can release the slot in place of its owner.
fn duplicate_handle(state: &SimNodeState) -> SimNodeState {
    let file = state.file.try_clone().unwrap();
    SimNodeState {
        shared: state.shared,
        file,
        alive: state.alive.duplicate().unwrap(),
        slot: state.slot,
        gpus: state.gpus,
        next_reclaim: AtomicU64::new(0),
    }
}

#[test]
fn state_recovers_from_a_kill_at_every_failpoint() {
    let mut places = 0;
    for n in 0.. {
        let folder = folder(1);
        let living = Arc::new(attach(&folder));
        assert!(living.take_memory(0, 7));
        let (sender, receiver) = std::sync::mpsc::channel();
        let died = stop_thread_at(n, run_busy_process(folder.path().to_path_buf(), sender));
        if let Ok(dead) = receiver.try_recv() {
            simulate_death(&dead);
            std::mem::forget(dead);
        }
        if !died {
            break;
        }
        places += 1;
        // The next process finds a consistent state: no lock held, no memory lost, no work of the dead process.
        let next = Arc::new(attach(&folder));
        next.reclaim_dead();
        assert_eq!(living.used_memory(0), 7, "killed at failpoint {n}");
        assert!(living.processes(0).is_empty(), "killed at failpoint {n}");
        let mut lane = GpuLane::open(Arc::clone(&next), 0).unwrap();
        let start = now();
        lane.extend(1_000_000).unwrap();
        let stamp = lane.mark(1_000_000);
        while let Some(instant) = lane.not_before(1_000_000).unwrap() {
            wait_until(instant);
        }
        let took = stamp.load(std::sync::atomic::Ordering::Relaxed) - start;
        // No other process has work: it takes its nominal time, apart from the time before the submission.
        assert!(
            (1_000_000..1_000_000 + (now() - start)).contains(&took),
            "killed at failpoint {n}: {took} ns"
        );
        let (served, busy) = living.service_time(0, next.slot());
        assert!(served == 1_000_000 && busy >= served && busy <= served + 20_000, "{served} {busy}");
    }
    assert!(places > 60, "only {places} failpoints");
}

/// A submission of a random schedule. The lanes of one GPU run on a simulated clock.
#[derive(Clone, Debug)]
struct Submission {
    at: u64,
    lane: usize,
    work: u64,
}

fn submissions() -> impl Strategy<Value = Vec<Submission>> {
    let one =
        (0..200_000u64, 0..4usize, 1..30_000u64).prop_map(|(at, lane, work)| Submission { at, lane, work });
    prop::collection::vec(one, 1..40).prop_map(|mut all| {
        all.sort_by_key(|submission| submission.at);
        all
    })
}

/// Runs the schedule and also advances the timeline at the given instants. Returns the service of each lane, the busy
/// time and the instants at which positions were reached.
fn run(schedule: &[Submission], looks: &[u64], end: u64) -> (Vec<u64>, u64, Vec<Vec<u64>>) {
    let folder = folder(1);
    let states: Vec<SimNodeState> = (0..4).map(|_| attach(&folder)).collect();
    let (timeline, _held) = states[0].timeline(0);
    let mut submitted = [0u64; 4];
    let mut events: Vec<(u64, Option<&Submission>)> =
        schedule.iter().map(|submission| (submission.at, Some(submission))).collect();
    events.extend(looks.iter().map(|&at| (at, None)));
    events.sort_by_key(|event| event.0);
    for state in &states {
        timeline.clear(state.slot());
    }
    for (at, submission) in events {
        timeline.advance(at);
        if let Some(submission) = submission {
            submitted[submission.lane] += submission.work;
            timeline.submit(states[submission.lane].slot(), submitted[submission.lane]);
        }
    }
    timeline.advance(end);
    let served = states.iter().map(|state| timeline.lane(state.slot()).served.load(Relaxed)).collect();
    let instants = (0..4)
        .map(|lane| {
            let mut position = 0;
            let own = schedule.iter().filter(|submission| submission.lane == lane);
            own.map(|submission| {
                position += submission.work;
                timeline.instant(states[lane].slot(), position).unwrap_or(0)
            })
            .collect()
        })
        .collect();
    let busy = timeline.gpu.line.busy.load(Relaxed);
    // Later advances use the machine's clock, which is far ahead of the simulated one.
    for state in &states {
        timeline.clear(state.slot());
    }
    (served, busy, instants)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    /// The prediction is exact while no process submits more work.
    #[test]
    fn predicted_instants_are_exact(work in prop::collection::vec(1..30_000u64, 4), look in 0..40_000u64) {
        let folder = folder(1);
        let states: Vec<SimNodeState> = (0..4).map(|_| attach(&folder)).collect();
        let (timeline, _held) = states[0].timeline(0);
        for state in &states {
            timeline.clear(state.slot());
        }
        for (state, &work) in states.iter().zip(&work) {
            timeline.submit(state.slot(), work);
        }
        timeline.advance(look);
        let predicted: Vec<u64> = states
            .iter()
            .zip(&work)
            .map(|(state, &work)| timeline.earliest_instant(state.slot(), work, u64::MAX))
            .collect();
        timeline.advance(1_000_000);
        for ((state, &work), predicted) in states.iter().zip(&work).zip(predicted) {
            // A position that was reached before needs no wait.
            let instant = timeline.instant(state.slot(), work).unwrap();
            prop_assert_eq!(predicted, instant.max(look));
        }
    }

    /// The GPU is never idle while there is work, never does more than was submitted, and advancing the timeline at
    /// other instants changes nothing.
    #[test]
    fn service_does_not_depend_on_observations(schedule in submissions(), looks in prop::collection::vec(0..600_000u64, 0..30),
                                       end in 200_000..700_000u64) {
        let (served, busy, instants) = run(&schedule, &[], end);
        prop_assert_eq!(&run(&schedule, &looks, end.max(600_000)).2.iter().flatten().filter(|&&at| at != 0 && at <= end)
            .count(), &instants.iter().flatten().filter(|&&at| at != 0).count());
        let looks: Vec<u64> = looks.into_iter().filter(|&at| at < end).collect();
        prop_assert_eq!(run(&schedule, &looks, end), (served.clone(), busy, instants.clone()));
        prop_assert_eq!(served.iter().sum::<u64>(), busy);
        // The work that a single server completes, in any order.
        let (mut backlog, mut done, mut clock) = (0u64, 0u64, 0u64);
        for submission in &schedule {
            let did = backlog.min(submission.at - clock);
            done += did;
            backlog = backlog - did + submission.work;
            clock = submission.at;
        }
        done += backlog.min(end - clock);
        prop_assert_eq!(busy, done);
        for lane in &instants {
            let reached: Vec<u64> = lane.iter().copied().take_while(|&at| at != 0).collect();
            prop_assert!(reached.is_sorted(), "{:?}", reached);
            prop_assert!(reached.iter().all(|&at| at <= end));
        }
    }

    /// Lanes that always have work get the same service, up to one slice.
    #[test]
    fn slices_are_fair(lanes in 2..5usize, end in 10_000..500_000u64) {
        let schedule: Vec<Submission> = (0..lanes).map(|lane| Submission { at: 0, lane, work: 1 << 40 }).collect();
        let (served, _, _) = run(&schedule, &[], end);
        let least = served[..lanes].iter().min().unwrap();
        let most = served[..lanes].iter().max().unwrap();
        prop_assert!(most - least <= SLICE_NANOS, "{:?}", served);
    }

    /// For any sequence of operations, the used memory is the sum of the processes' memory and at most the capacity.
    #[test]
    fn memory_accounts_add_up_and_never_exceed_capacity(operations in prop::collection::vec((0..3usize, 0..400u64, any::<bool>()), 1..200)) {
        let folder = folder(1);
        let states: Vec<SimNodeState> = (0..3).map(|_| attach(&folder)).collect();
        let mut held = BTreeMap::from([(0, 0u64), (1, 0), (2, 0)]);
        for (who, units, takes) in operations {
            let total: u64 = held.values().sum();
            if takes {
                prop_assert_eq!(states[who].take_memory(0, units), total + units <= 1000);
                if total + units <= 1000 {
                    *held.get_mut(&who).unwrap() += units;
                }
            } else {
                let units = units.min(held[&who]);
                states[who].release_memory(0, units);
                *held.get_mut(&who).unwrap() -= units;
            }
            prop_assert_eq!(states[0].used_memory(0), held.values().sum::<u64>());
            prop_assert_eq!(states[who].held_memory(0), held[&who]);
        }
    }
}

#[test]
fn slowdown_applies_from_its_injection() {
    let folder = folder(1);
    let state = Arc::new(attach(&folder));
    {
        let (timeline, _held) = state.timeline(0);
        timeline.clear(state.slot());
        timeline.advance(1_000);
        timeline.submit(state.slot(), 10_000);
        timeline.advance(5_000);
        assert_eq!(timeline.lane(state.slot()).served.load(Relaxed), 4_000);
        timeline.gpu.condition.slowness.store(2_500, Relaxed);
        timeline.advance(20_000);
        assert_eq!(timeline.instant(state.slot(), 4_000), Some(5_000));
        assert_eq!(timeline.instant(state.slot(), 10_000), Some(20_000));
    }
    assert_eq!(state.slowness(0), 2_500);
}

#[test]
fn work_on_a_lost_gpu_is_lost_permanently() {
    let folder = folder(2);
    let state = Arc::new(attach(&folder));
    let mut lane = GpuLane::open(Arc::clone(&state), 0).unwrap();
    lane.extend(1 << 40).unwrap();
    state.inject(0, GpuFault::Lost);
    assert!(state.is_lost(0) && !state.is_lost(1));
    assert_eq!(lane.refresh(), Err(GpuLost));
    assert_eq!(lane.not_before(1 << 40), Err(GpuLost));
    assert_eq!(GpuLane::open(Arc::clone(&state), 0).err(), Some(GpuLost));
    state.inject(0, GpuFault::Returned);
    assert_eq!(lane.refresh(), Err(GpuLost));
    assert!(GpuLane::open(state, 0).is_ok());
}

#[test]
fn events_are_delivered_in_order_and_retained() {
    let folder = folder(2);
    let (one, two) = (attach(&folder), attach(&folder));
    let start = two.last_event();
    assert_eq!(two.event_after(start), None);
    one.inject(1, GpuFault::UncorrectedErrors(2));
    let first = two.event_after(start).unwrap();
    assert_eq!((first.gpu, first.kind, first.data), (1, 2, 2));
    let second = two.event_after(first.number).unwrap();
    assert_eq!((second.gpu, second.kind, second.data), (1, 8, 48));
    assert_eq!(two.event_after(second.number), None);
    assert_eq!(two.counter(1, GpuCounter::UncorrectedVolatile), 2);
    for _ in 0..300 {
        one.inject(0, GpuFault::Xid(13));
    }
    // The oldest events are overwritten; the others are delivered in order.
    let mut number = start;
    let mut seen = 0;
    while let Some(event) = two.event_after(number) {
        assert!(event.number > number);
        number = event.number;
        seen += 1;
    }
    assert_eq!(seen, layout::MAX_EVENTS);
}
