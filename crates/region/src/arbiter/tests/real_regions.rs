//! The arbiter with real regions, threads that act as the processes of containers, and a thread that stands for the
//! GPU: it takes as long as the work does, and reports what it has passed by markers.

use std::collections::VecDeque;
use std::fs::OpenOptions;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use tempfile::TempDir;

use super::doorbell_wait::{DoorbellWait, WakeReason};
use super::scheduler_thread::SchedulerThread;
use super::{Arbiter, HEARTBEAT_INTERVAL_NS, IDLE_HEARTBEAT_INTERVAL_NS, MICRO, MILLI, PERCENT, tuning};
use crate::layout::MARKERS_OFFSET;
use crate::markers::{MarkerValue, StreamMarkers};
use crate::{
    GpuShare, LIMITS_FILE, RegionHandle, RegionOwner, RegionPolicy, RegionTenant, USAGE_FILE, clock, futex,
};

/// Length of a kernel; a marker follows each.
const KERNEL_NS: u64 = 500 * MICRO;

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

/// A kernel in a stream, and the marker behind it.
struct Kernel {
    stream: &'static StreamMarkers,
    marker: MarkerValue,
    had: Arc<AtomicU64>,
}

#[derive(Default)]
struct GpuQueue {
    kernels: Mutex<VecDeque<Kernel>>,
    arrived: Condvar,
    stop: AtomicBool,
}

/// A GPU that runs one kernel at a time, in the order of their launches.
struct TestGpu {
    queue: Arc<GpuQueue>,
    thread: Option<JoinHandle<()>>,
}

impl TestGpu {
    fn new() -> Self {
        let queue = Arc::new(GpuQueue::default());
        let its = Arc::clone(&queue);
        let thread = std::thread::spawn(move || {
            while !its.stop.load(Ordering::Relaxed) {
                let kernels = its.kernels.lock().unwrap();
                let (mut kernels, _) = its.arrived.wait_timeout(kernels, Duration::from_millis(10)).unwrap();
                while let Some(kernel) = kernels.pop_front() {
                    drop(kernels);
                    let start = now();
                    std::thread::sleep(Duration::from_nanos(KERNEL_NS));
                    kernel.had.fetch_add(now() - start, Ordering::Relaxed);
                    kernel.stream.set_settled(kernel.marker);
                    kernels = its.kernels.lock().unwrap();
                }
            }
        });
        Self { queue, thread: Some(thread) }
    }
}

impl Drop for TestGpu {
    fn drop(&mut self) {
        self.queue.stop.store(true, Ordering::Relaxed);
        self.thread.take().unwrap().join().unwrap();
    }
}

struct Container {
    folder: TempDir,
    region: Arc<RegionHandle>,
    /// GPU time that it really had.
    had: Arc<AtomicU64>,
}

impl Container {
    fn new(percent: u32, ceiling: u32) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let shares = [share(percent, ceiling)];
        let region = RegionHandle::create(folder.path(), &shares, RegionPolicy::default()).unwrap();
        Self { folder, region: Arc::new(region), had: Arc::default() }
    }

    /// Returns a container that an older release started.
    fn of_layout(layout: u32, percent: u32) -> Self {
        let Self { folder, region, had } = Self::new(percent, percent);
        drop(region);
        let edit = |file: &str, at: u64, bytes: &[u8]| {
            let file = OpenOptions::new().write(true).open(folder.path().join(file)).unwrap();
            file.write_all_at(bytes, at).unwrap();
            file
        };
        edit(LIMITS_FILE, 8, &layout.to_le_bytes());
        edit(USAGE_FILE, 8, &layout.to_le_bytes());
        let usage = edit(USAGE_FILE, 16, &(MARKERS_OFFSET as u64).to_le_bytes());
        usage.set_len(MARKERS_OFFSET as u64).unwrap();
        Self { region: Arc::new(RegionHandle::open(folder.path()).unwrap()), folder, had }
    }

    fn owner(&self) -> &RegionOwner {
        self.region.owner()
    }

    fn path(&self) -> &Path {
        self.folder.path()
    }

    fn had(&self) -> u64 {
        self.had.load(Ordering::Relaxed)
    }

    fn charged(&self) -> u64 {
        self.owner().limits(0).unwrap().charged()
    }

    /// Starts a process that launches as fast as it may, until it is stopped.
    fn saturate(&self, gpu: &TestGpu) -> LaunchThread {
        // Never detached, because the GPU still writes its markers when the thread ends.
        let region: &'static RegionTenant = Box::leak(Box::new(RegionTenant::attach(self.path()).unwrap()));
        let (queue, had) = (Arc::clone(&gpu.queue), Arc::clone(&self.had));
        let stop = Arc::new(AtomicBool::new(false));
        let seen = Arc::clone(&stop);
        let thread = std::thread::spawn(move || {
            let stream = region.take_marker_page(0).unwrap().stream(0).unwrap();
            while !seen.load(Ordering::Relaxed) {
                if !wait_for_turn(region, stream, &seen) {
                    continue;
                }
                let is_idle = stream.outstanding() == 0;
                let marker = stream.issued().next(false);
                stream.open(now());
                stream.set_issued(marker);
                stream.close();
                if is_idle && !region.limits(0).is_watched() {
                    ring(region);
                }
                let kernel = Kernel { stream, marker, had: Arc::clone(&had) };
                queue.kernels.lock().unwrap().push_back(kernel);
                queue.arrived.notify_one();
            }
        });
        LaunchThread { stop, thread: Some(thread) }
    }
}

/// Does what the shim does before a launch. Returns false if it has to be done again.
fn wait_for_turn(region: &RegionTenant, stream: &StreamMarkers, stop: &AtomicBool) -> bool {
    let (limits, lane) = (region.limits(0), region.lane(0));
    let turn = limits.turn();
    if region.is_gated(0) && !turn.is_open() {
        lane.waiting.fetch_add(1, Ordering::SeqCst);
        while limits.turn() == turn && region.is_gated(0) && !stop.load(Ordering::Relaxed) {
            ring(region);
            futex::wait(limits.turn_word(), turn.0, Some(Duration::from_millis(50)));
        }
        lane.waiting.fetch_sub(1, Ordering::SeqCst);
        return false;
    }
    if stream.outstanding() * KERNEL_NS >= limits.run_ahead() {
        std::thread::sleep(Duration::from_micros(60));
        return false;
    }
    true
}

fn ring(region: &RegionTenant) {
    let doorbell = region.gpu_account(0).doorbell();
    doorbell.fetch_add(1, Ordering::SeqCst);
    futex::wake(doorbell, u32::MAX);
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
    // The first window of saturation is shared without turns.
    time / 100 * u64::from(percent)
        + tuning::MAX_IDLE_CREDIT_NS
        + 2 * tuning::MAX_GUARANTEED_TURN_NS
        + 2 * tuning::SATURATION_WINDOW_NS
        + tuning::MAX_OVERRUN_NS
}

fn thirty_and_seventy(gpu: &TestGpu, a: &Container, b: &Container) {
    let mut all = Vec::new();
    // On a busy machine a thread may get no CPU for a while: one window of several is enough.
    for _ in 0..5 {
        let start = Instant::now();
        let before = [a.had(), b.had()];
        let charged = [a.charged(), b.charged()];
        let threads = [a.saturate(gpu), b.saturate(gpu)];
        wait_for("two seconds of work", || a.had() + b.had() - before[0] - before[1] > 1_500 * MILLI);
        let had = [a.had() - before[0], b.had() - before[1]];
        let time = start.elapsed();
        let charged = [a.charged() - charged[0], b.charged() - charged[1]];
        drop(threads);
        println!("30/70: {had:?}, charged {charged:?} in {time:?}");
        assert!(had[0] <= max_share(30, time) && had[1] <= max_share(70, time), "{had:?} in {time:?}");
        // Read after the charges, so that none of them is for later time.
        assert!(u128::from(charged[0] + charged[1]) <= start.elapsed().as_nanos(), "{charged:?} in {time:?}");
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
    thirty_and_seventy(&TestGpu::new(), &a, &b);
    arbiter.stop();
}

#[test]
fn containers_share_a_gpu_without_futex_waitv() {
    let (a, b) = (Container::new(30, 30), Container::new(70, 70));
    let thread = SchedulerThread::start_with(DoorbellWait::one_at_a_time()).unwrap();
    for (member, container) in [(1, &a), (2, &b)] {
        thread.join(member, &container.region, 0);
    }
    thirty_and_seventy(&TestGpu::new(), &a, &b);
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

/// The next arbiter closes open turns, and continues to count what is charged.
#[test]
fn restarted_arbiter_closes_open_turns_and_keeps_shares() {
    let (gpu, a, b) = (TestGpu::new(), Container::new(40, 40), Container::new(40, 40));
    let arbiter = Arbiter::new();
    for container in [&a, &b] {
        // As a daemon that was killed leaves it.
        container.owner().turns(0).unwrap().open();
        arbiter.add(Arc::clone(&container.region)).unwrap();
    }
    wait_for("the end of both turns", || {
        [&a, &b]
            .iter()
            .all(|it| !it.owner().turns(0).unwrap().turn().is_open() || it.owner().heartbeat(0) > 0)
    });
    arbiter.stop();
    let threads = [a.saturate(&gpu), b.saturate(&gpu)];
    let start = Instant::now();
    let rounds = 4;
    for _ in 0..rounds {
        let before = [&a, &b].map(|it| (it.had(), it.charged()));
        let arbiter = Arbiter::new();
        arbiter.add(Arc::clone(&a.region)).unwrap();
        arbiter.add(Arc::clone(&b.region)).unwrap();
        wait_for("work", || {
            [&a, &b].iter().zip(before).all(|(it, (had, charged))| {
                it.had() > had + 60 * MILLI && it.charged() > charged + 30 * MILLI
            })
        });
        arbiter.stop();
    }
    let time = start.elapsed();
    drop(threads);
    for container in [&a, &b] {
        let most = rounds * max_share(0, Duration::ZERO) + max_share(40, time);
        assert!(container.had() <= most, "{} in {time:?}", container.had());
    }
}

#[test]
fn removed_region_gets_no_turns_and_added_region_does() {
    let (gpu, a, b) = (TestGpu::new(), Container::new(30, 100), Container::new(70, 100));
    let arbiter = Arbiter::new();
    let first = arbiter.add(Arc::clone(&a.region)).unwrap();
    let thread = a.saturate(&gpu);
    wait_for("its first work", || a.had() > 20 * MILLI);
    arbiter.remove(first);
    wait_for("the end of its turn", || {
        !a.owner().turns(0).unwrap().turn().is_open() && a.owner().limits(0).unwrap().is_gated()
    });
    drop(thread);
    wait_for("the end of what was queued", || gpu.queue.kernels.lock().unwrap().is_empty());
    arbiter.add(Arc::clone(&b.region)).unwrap();
    let _thread = b.saturate(&gpu);
    wait_for("work of the other container", || b.had() > 50 * MILLI);
    let had = a.had();
    wait_for("more work of the other container", || b.had() > 150 * MILLI);
    assert_eq!(a.had(), had);
}

/// A container that destroys its own `usage` loses its turns; the arbiter and other containers are not affected.
#[test]
fn truncated_usage_affects_only_its_container() {
    let (gpu, a, b) = (TestGpu::new(), Container::new(30, 100), Container::new(70, 100));
    let arbiter = Arbiter::new();
    arbiter.add(Arc::clone(&a.region)).unwrap();
    arbiter.add(Arc::clone(&b.region)).unwrap();
    // It has no process here: the truncation would kill its own processes.
    let thread = b.saturate(&gpu);
    wait_for("work", || b.had() > 20 * MILLI);
    let file = OpenOptions::new().write(true).open(a.path().join(USAGE_FILE)).unwrap();
    for length in [0, 100, 5_000, 0] {
        file.set_len(length).unwrap();
        let before = b.had();
        wait_for("work beside it", || b.had() > before + 50 * MILLI);
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
    // It has both GPUs to itself, but a ceiling on the second one only.
    wait_for("the end of the gate on the first GPU", || !region.is_gated(0));
    assert!(region.is_gated(1));
}

/// A process that waits on a GPU for which no turns are given must notice that.
#[test]
fn gpu_that_did_not_join_has_no_heartbeat() {
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
    wait_for("a heartbeat of the second GPU", || beats(1) > 0);
    arbiter.stop();
    // The same holds when only one of two GPUs joins the next scheduler.
    let last = beats(1);
    let thread = SchedulerThread::start().unwrap();
    thread.join(1, &a.region, 0);
    wait_for("heartbeats of the first GPU", || beats(0) > last + 300 * MILLI);
    assert_eq!(beats(1), last);
}

/// The shims of older layouts expect turns of another kind: without a heartbeat they limit their own rate.
#[test]
fn region_without_markers_gets_no_turns_and_no_heartbeat() {
    let new = Container::new(30, 100);
    let arbiter = Arbiter::new();
    for layout in [1, 2] {
        let old = Container::of_layout(layout, 30);
        assert_eq!(old.owner().layout(), layout);
        arbiter.add(Arc::clone(&old.region)).unwrap();
        arbiter.add(Arc::clone(&new.region)).unwrap();
        let region = RegionTenant::attach(old.path()).unwrap();
        region.lane(0).waiting.store(1, Ordering::SeqCst);
        ring(&region);
        let first = new.owner().heartbeat(0);
        wait_for("heartbeats of another region", || new.owner().heartbeat(0) > first + 300 * MILLI);
        assert_eq!((region.heartbeat(0), region.limits(0).turn().is_open()), (0, false));
    }
}

/// A process that launches without asking, because it thinks that it may, is found by its doorbell.
#[test]
fn work_of_an_ungated_container_is_charged() {
    let (gpu, a) = (TestGpu::new(), Container::new(30, 100));
    let arbiter = Arbiter::new();
    arbiter.add(Arc::clone(&a.region)).unwrap();
    wait_for("the end of its gate", || !a.owner().limits(0).unwrap().is_gated());
    let (start, charged) = (Instant::now(), a.charged());
    let thread = a.saturate(&gpu);
    wait_for("work", || a.had() > 300 * MILLI);
    drop(thread);
    let (had, time) = (a.had(), start.elapsed());
    wait_for("its charge", || a.charged() - charged >= had * 8 / 10);
    assert!(u128::from(a.charged() - charged) <= time.as_nanos() + 20_000_000, "{} {had}", a.charged());
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
    assert!(!region.is_gated(0));
    // No container waits for turns: the scheduler only sleeps.
    wait_for("a heartbeat dated ahead", || a.owner().heartbeat(0) > now() + HEARTBEAT_INTERVAL_NS);
    a.owner().set(0, &share(30, 100)).unwrap();
    arbiter.limits_changed();
    wait_for("its turn, once it waits for turns", || region.limits(0).turn().is_open());
    // It is still alone and without a ceiling, so that its launches need not look at the turn.
    wait_for("the end of its gate", || !region.is_gated(0));
}

/// A signal wakes the scheduler's thread: it does not wait for its next heartbeat.
#[test]
fn signal_wakes_the_scheduler_thread_at_once() {
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
