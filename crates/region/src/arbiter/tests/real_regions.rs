//! The arbiter with real regions, and threads that act as the processes of containers. There is no GPU: a container's
//! time is what it submits in its turns.

use std::fs::OpenOptions;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use tempfile::TempDir;

use super::doorbell_wait::{DoorbellWait, WakeReason};
use super::gpu_thread::GpuThread;
use super::{
    Arbiter, HEARTBEAT_INTERVAL_NS, IDLE_HEARTBEAT_INTERVAL_NS, MILLI, PERCENT, TIME_CHUNK_NS, tuning,
};
use crate::{GpuShare, RegionHandle, RegionOwner, RegionPolicy, RegionTenant, USAGE_FILE, clock, futex};

fn now() -> u64 {
    clock::monotonic_ns()
}

fn share(percent: u32, ceiling: u32) -> GpuShare {
    GpuShare {
        cores: percent * PERCENT,
        ceiling: ceiling * PERCENT,
        waits_for_turns: true,
        uuid: [7; 16],
        ..GpuShare::default()
    }
}

struct Container {
    folder: TempDir,
    region: Arc<RegionHandle>,
}

impl Container {
    fn new(percent: u32, ceiling: u32) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let shares = [share(percent, ceiling)];
        let region = RegionHandle::create(folder.path(), &shares, RegionPolicy::default()).unwrap();
        Self { folder, region: Arc::new(region) }
    }

    fn owner(&self) -> &RegionOwner {
        self.region.owner()
    }

    fn path(&self) -> &Path {
        self.folder.path()
    }

    fn spent(&self) -> u64 {
        self.region.reader().demand(0, now()).unwrap().spent
    }

    /// Starts a process that launches as fast as it may, until it is stopped.
    fn saturate(&self) -> LaunchThread {
        let region = RegionTenant::attach(self.path()).unwrap();
        let stop = Arc::new(AtomicBool::new(false));
        let seen = Arc::clone(&stop);
        let thread = std::thread::spawn(move || {
            while !seen.load(Ordering::Relaxed) {
                launch(&region, TIME_CHUNK_NS, &seen);
            }
        });
        LaunchThread { stop, thread: Some(thread) }
    }
}

/// Does what the shim does at a launch for which the process has no time left.
fn launch(region: &RegionTenant, chunk: u64, stop: &AtomicBool) {
    let (limits, account, lane) = (region.limits(0), region.gpu_account(0), region.lane(0));
    loop {
        let turn = limits.turn();
        let spent = account.spent().load(Ordering::Relaxed);
        if turn.is_open() && spent < limits.allowed() {
            account.spent().fetch_add(chunk, Ordering::Relaxed);
            let busy = lane.busy_until.load(Ordering::Relaxed).max(now());
            lane.busy_until.store(busy + chunk, Ordering::Relaxed);
            return;
        }
        lane.waiting.fetch_add(1, Ordering::SeqCst);
        account.doorbell().fetch_add(1, Ordering::SeqCst);
        futex::wake(account.doorbell(), u32::MAX);
        if limits.turn() == turn && !(turn.is_open() && spent < limits.allowed()) {
            futex::wait(limits.turn_word(), turn.0, Some(Duration::from_millis(50)));
        }
        lane.waiting.fetch_sub(1, Ordering::SeqCst);
        if stop.load(Ordering::Relaxed) {
            return;
        }
    }
}

struct LaunchThread {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Drop for LaunchThread {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        self.thread.take().unwrap().join().unwrap();
    }
}

/// Waits for a condition that must become true; a minute means a hang.
fn wait_for(what: &str, mut is: impl FnMut() -> bool) {
    let start = Instant::now();
    while !is() {
        assert!(start.elapsed() < Duration::from_secs(60), "timed out waiting for {what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Returns the most time that a share may have had in this time, however slow the machine is.
fn max_share(percent: u32, time: Duration) -> u64 {
    let time = u64::try_from(time.as_nanos()).unwrap();
    time / 100 * u64::from(percent)
        + tuning::MAX_IDLE_CREDIT_NS
        + tuning::MAX_GUARANTEED_TURN_NS
        + 2 * TIME_CHUNK_NS
}

fn thirty_and_seventy(a: &Container, b: &Container) {
    let mut all = Vec::new();
    // On a busy machine a thread may get no CPU for a while: one window of several is enough.
    for _ in 0..5 {
        let start = Instant::now();
        let before = [a.spent(), b.spent()];
        let threads = [a.saturate(), b.saturate()];
        wait_for("two seconds of work", || a.spent() + b.spent() - before[0] - before[1] > 1_500 * MILLI);
        let had = [a.spent() - before[0], b.spent() - before[1]];
        let time = start.elapsed();
        drop(threads);
        println!("30/70: {had:?} in {time:?}");
        assert!(had[0] <= max_share(30, time) && had[1] <= max_share(70, time), "{had:?} in {time:?}");
        // The ratio comes from credit: without it each would have half. The model tests how close it comes.
        let part = had[0] * 100 / (had[0] + had[1]);
        if (20..=45).contains(&part) {
            return;
        }
        all.push(had);
    }
    panic!("{all:?}");
}

#[test]
fn two_containers_share_a_gpu_by_their_guarantees() {
    let (a, b) = (Container::new(30, 30), Container::new(70, 70));
    let arbiter = Arbiter::new();
    arbiter.add(Arc::clone(&a.region)).unwrap();
    arbiter.add(Arc::clone(&b.region)).unwrap();
    thirty_and_seventy(&a, &b);
    arbiter.stop();
}

#[test]
fn containers_share_a_gpu_without_futex_waitv() {
    let (a, b) = (Container::new(30, 30), Container::new(70, 70));
    let thread = GpuThread::start_with([7; 16], DoorbellWait::one_at_a_time()).unwrap();
    for (member, container) in [(1, &a), (2, &b)] {
        thread.join(member, &container.region, 0);
    }
    thirty_and_seventy(&a, &b);
}

#[test]
fn idle_arbiter_sends_heartbeats_until_stopped() {
    let (a, b) = (Container::new(30, 30), Container::new(70, 70));
    let arbiter = Arbiter::new();
    arbiter.add(Arc::clone(&a.region)).unwrap();
    let b_member = arbiter.add(Arc::clone(&b.region)).unwrap();
    for container in [&a, &b] {
        wait_for("a heartbeat", || container.owner().heartbeat(0) > 0);
        let first = container.owner().heartbeat(0);
        wait_for("another heartbeat", || container.owner().heartbeat(0) > first);
        // No container computes: the scheduler sleeps, and must not be considered dead meanwhile.
        wait_for("a heartbeat dated ahead", || {
            container.owner().heartbeat(0) > now() + HEARTBEAT_INTERVAL_NS
        });
    }
    arbiter.remove(b_member);
    arbiter.stop();
    let (first, second) = (a.owner().heartbeat(0), b.owner().heartbeat(0));
    // The heartbeat that it wrote before it slept is withdrawn.
    assert!(first <= now() && second <= now());
    // Longer than between two heartbeats: the absence of an event can only be observed by waiting.
    std::thread::sleep(Duration::from_nanos(IDLE_HEARTBEAT_INTERVAL_NS + 100 * MILLI));
    assert_eq!((a.owner().heartbeat(0), b.owner().heartbeat(0)), (first, second));
}

/// An arbiter's knowledge survives it: the next one continues from what was spent, and closes open turns.
#[test]
fn restarted_arbiter_continues_from_spent_time() {
    let (a, b) = (Container::new(40, 40), Container::new(40, 40));
    let threads = [a.saturate(), b.saturate()];
    let start = Instant::now();
    let rounds = 4;
    let mut last = 0;
    for _ in 0..rounds {
        let arbiter = Arbiter::new();
        arbiter.add(Arc::clone(&a.region)).unwrap();
        arbiter.add(Arc::clone(&b.region)).unwrap();
        wait_for("work", || a.spent() > last + 60 * MILLI && b.spent() > last + 60 * MILLI);
        last = a.spent().max(b.spent());
        arbiter.stop();
        let open = [&a, &b].map(|it| it.owner().turns(0).unwrap().turn().is_open());
        assert!(open != [true, true]);
    }
    let time = start.elapsed();
    drop(threads);
    for container in [&a, &b] {
        assert!(
            container.spent()
                <= max_share(40, time)
                    + rounds * (tuning::MAX_IDLE_CREDIT_NS + tuning::MAX_GUARANTEED_TURN_NS)
        );
    }
}

#[test]
fn removed_region_gets_no_turns_and_added_region_does() {
    let (a, b) = (Container::new(30, 100), Container::new(70, 100));
    let arbiter = Arbiter::new();
    let first = arbiter.add(Arc::clone(&a.region)).unwrap();
    let thread = a.saturate();
    wait_for("its first work", || a.spent() > 20 * MILLI);
    arbiter.remove(first);
    wait_for("the end of its turn", || !a.owner().turns(0).unwrap().turn().is_open());
    drop(thread);
    let had = a.spent();
    arbiter.add(Arc::clone(&b.region)).unwrap();
    let _player = b.saturate();
    wait_for("work of the other container", || b.spent() > 50 * MILLI);
    assert_eq!(a.spent(), had);
}

/// A container that destroys its own `usage` loses its turns; the arbiter and other containers are not affected.
#[test]
fn truncated_usage_affects_only_its_container() {
    let (a, b) = (Container::new(30, 100), Container::new(70, 100));
    let arbiter = Arbiter::new();
    arbiter.add(Arc::clone(&a.region)).unwrap();
    arbiter.add(Arc::clone(&b.region)).unwrap();
    // It has no process here: the truncation would kill its own processes.
    let thread = b.saturate();
    wait_for("work", || b.spent() > 20 * MILLI);
    let file = OpenOptions::new().write(true).open(a.path().join(USAGE_FILE)).unwrap();
    for length in [0, 100, 5_000, 0] {
        file.set_len(length).unwrap();
        let before = b.spent();
        wait_for("work beside it", || b.spent() > before + 50 * MILLI);
    }
    drop(thread);
}

#[test]
fn attached_gpu_gets_turns_after_refresh() {
    let a = Container::new(30, 100);
    let arbiter = Arbiter::new();
    let member = arbiter.add(Arc::clone(&a.region)).unwrap();
    a.owner().extend(&GpuShare { uuid: [9; 16], ..share(50, 50) }).unwrap();
    arbiter.refresh(member).unwrap();
    let region = RegionTenant::attach(a.path()).unwrap();
    let (account, lane) = (region.gpu_account(1), region.lane(1));
    lane.waiting.store(1, Ordering::SeqCst);
    account.doorbell().fetch_add(1, Ordering::SeqCst);
    futex::wake(account.doorbell(), u32::MAX);
    wait_for("a turn on the second GPU", || region.limits(1).turn().is_open());
    assert!(region.limits(1).allowed() > 0);
    assert!(!region.limits(0).turn().is_open());
}

/// One GPU's scheduler sends no heartbeat for another GPU: a process that waits there must notice that none runs.
#[test]
fn gpu_without_a_scheduler_has_no_heartbeat() {
    let a = Container::new(30, 100);
    let arbiter = Arbiter::new();
    let member = arbiter.add(Arc::clone(&a.region)).unwrap();
    a.owner().extend(&GpuShare { uuid: [9; 16], ..share(50, 50) }).unwrap();
    let region = RegionTenant::attach(a.path()).unwrap();
    let beats = |gpu| region.heartbeat(gpu);
    wait_for("a heartbeat", || beats(0) > 0);
    let first = beats(0);
    wait_for("many heartbeats", || beats(0) > first + 300 * MILLI);
    assert_eq!((beats(1), beats(2), beats(usize::MAX)), (0, 0, 0));
    arbiter.refresh(member).unwrap();
    wait_for("a heartbeat of the second GPU's scheduler", || beats(1) > 0);
    arbiter.stop();
    // The same holds when one of two schedulers has stopped.
    let last = beats(1);
    let thread = GpuThread::start([7; 16]).unwrap();
    thread.join(1, &a.region, 0);
    wait_for("heartbeats of the remaining scheduler", || beats(0) > last + 300 * MILLI);
    assert_eq!(beats(1), last);
}

/// A container whose launches do not wait for turns may ring its doorbell as it likes.
#[test]
fn unthrottled_container_does_not_wake_the_scheduler() {
    let a = Container::new(30, 100);
    a.owner().set(0, &GpuShare { waits_for_turns: false, ..share(30, 100) }).unwrap();
    let region = RegionTenant::attach(a.path()).unwrap();
    region.lane(0).waiting.store(1, Ordering::SeqCst);
    region.gpu_account(0).doorbell().store(77, Ordering::SeqCst);
    let arbiter = Arbiter::new();
    arbiter.add(Arc::clone(&a.region)).unwrap();
    wait_for("a heartbeat", || a.owner().heartbeat(0) > 0);
    let (first, beats) = (arbiter.decisions(), a.owner().heartbeat(0));
    wait_for("half a second of heartbeats", || a.owner().heartbeat(0) > beats + 500 * MILLI);
    // As many decisions as the heartbeats need, however long they took.
    let halves = (a.owner().heartbeat(0) - beats) / (500 * MILLI) + 1;
    assert!(arbiter.decisions() - first < 60 * halves, "{} in {halves}", arbiter.decisions() - first);
    assert!(!region.limits(0).turn().is_open());
    // No container waits for turns: the scheduler only sleeps.
    wait_for("a heartbeat dated ahead", || a.owner().heartbeat(0) > now() + HEARTBEAT_INTERVAL_NS);
    a.owner().set(0, &share(30, 100)).unwrap();
    arbiter.limits_changed();
    wait_for("its turn, once it waits for turns", || region.limits(0).turn().is_open());
}

/// A signal wakes the GPU thread: it does not wait for its next heartbeat.
#[test]
fn signal_wakes_the_gpu_thread_at_once() {
    let word = std::sync::atomic::AtomicU32::new(0);
    let mut doorbells = DoorbellWait::new();
    doorbells.begin(&word, 0);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            // The other thread most likely waits by then. If not, it finds the word changed, and this test shows
            // nothing.
            std::thread::sleep(Duration::from_millis(50));
            word.fetch_add(1, Ordering::Release);
            futex::wake(&word, 1);
        });
        let heard = doorbells.wait(&word, now(), now() + 60_000 * MILLI, false);
        assert!(matches!(heard, WakeReason::Unknown), "the wait timed out");
    });
}
