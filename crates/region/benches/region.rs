//! Measures what a process pays for its region: nanoseconds per call, the least of several runs.
#![allow(clippy::print_stdout, clippy::unwrap_used)]

use partage_region::arbiter::Arbiter;
use partage_region::{
    GpuShare, MEMORY_UNIT, RegionHandle, RegionOwner, RegionPolicy, RegionTenant, UsageReader,
};
use std::hint::black_box;
use std::sync::Arc;
use std::time::Instant;

fn measure(what: &str, calls: u32, mut work: impl FnMut()) {
    let run = |_| {
        let start = Instant::now();
        for _ in 0..calls {
            work();
        }
        start.elapsed().as_nanos() as f64 / f64::from(calls)
    };
    let least = (0..20).map(run).fold(f64::INFINITY, f64::min);
    println!("{what:<44} {least:>10.1} ns");
}

fn main() {
    let folder =
        tempfile::tempdir_in(if std::path::Path::new("/dev/shm").is_dir() { "/dev/shm" } else { "/tmp" });
    let folder = folder.unwrap();
    let shares = [GpuShare { memory: 1 << 30, ..GpuShare::default() }];
    let _owner = RegionOwner::create(folder.path(), &shares, RegionPolicy::default()).unwrap();
    let region = RegionTenant::attach(folder.path()).unwrap();
    measure("reserve and release", 100_000, || {
        region.reserve(0, black_box(1 << 20)).unwrap();
        region.release(0, black_box(1 << 20));
    });
    measure("used", 1_000_000, || {
        black_box(region.used(black_box(0)));
    });
    measure("memory_limit", 1_000_000, || {
        black_box(region.memory_limit(black_box(0)));
    });
    measure("is_gated", 1_000_000, || {
        black_box(region.is_gated(black_box(0)));
    });
    measure("take and return a marker page", 1_000, || {
        let page = region.take_marker_page(0).unwrap();
        region.return_marker_page(page);
    });
    let other = RegionTenant::attach(folder.path()).unwrap();
    measure("reserve and release, two processes alternating", 100_000, || {
        for region in [&region, &other] {
            region.reserve(0, MEMORY_UNIT).unwrap();
            region.release(0, MEMORY_UNIT);
        }
    });
    other.reserve(0, MEMORY_UNIT).unwrap();
    measure("used, after reclaim if due, others hold memory", 100_000, || {
        region.reclaim_dead_processes_if_due();
        black_box(region.used(0));
    });
    measure("refused", 1_000, || {
        assert!(region.reserve(0, 2 << 30).is_err());
    });
    measure("attach and detach", 200, || drop(RegionTenant::attach(folder.path()).unwrap()));
    let others: Vec<RegionTenant> = (0..200).map(|_| RegionTenant::attach(folder.path()).unwrap()).collect();
    measure("attach and detach, 200 others", 200, || drop(RegionTenant::attach(folder.path()).unwrap()));
    measure("reclaim dead processes, 200 others", 20, || {
        region.reclaim_dead_processes();
    });
    let reader = UsageReader::open(folder.path()).unwrap();
    measure("activity, 200 processes", 20, || {
        black_box(reader.gpu_activity(0).unwrap());
    });
    let pages: Vec<_> = others.iter().filter_map(|other| other.take_marker_page(0)).collect();
    for page in &pages {
        assert!(page.stream(0).is_some());
    }
    measure("activity, 200 processes with a marker page each", 20, || {
        black_box(reader.gpu_activity(0).unwrap());
    });
    measure("snapshot, 200 processes", 20, || {
        black_box(reader.snapshot().unwrap());
    });
    drop(others);
    println!();
    for count in [1, 100] {
        idle_arbiter(count);
    }
}

/// Measures an idle arbiter: it writes heartbeats and polls one container at a time.
fn idle_arbiter(regions: usize) {
    let share = GpuShare { cores: 1_000, ceiling: 1_000, waits_for_turns: true, ..GpuShare::default() };
    let folders: Vec<_> = (0..regions).map(|_| tempfile::tempdir().unwrap()).collect();
    let arbiter = Arbiter::new();
    for folder in &folders {
        let shares = std::slice::from_ref(&share);
        let region = RegionHandle::create(folder.path(), shares, RegionPolicy::default()).unwrap();
        arbiter.add(Arc::new(region)).unwrap();
    }
    let busy = || -> u64 {
        let tasks = std::fs::read_dir("/proc/self/task").unwrap().flatten();
        let arbiters = tasks.filter(|task| {
            std::fs::read_to_string(task.path().join("comm"))
                .is_ok_and(|name| name.starts_with("partage-arb"))
        });
        let time = |task: std::fs::DirEntry| {
            std::fs::read_to_string(task.path().join("schedstat"))
                .ok()?
                .split(' ')
                .next()?
                .parse::<u64>()
                .ok()
        };
        arbiters.filter_map(time).sum()
    };
    let (before, decided, began) = (busy(), arbiter.decisions(), Instant::now());
    std::thread::sleep(std::time::Duration::from_secs(3));
    let seconds = began.elapsed().as_secs_f64();
    let percent = (busy() - before) as f64 / seconds / 1e7;
    let decisions = (arbiter.decisions() - decided) as f64 / seconds;
    println!(
        "idle arbiter, {regions} regions: {percent:.2} % of a core, {decisions:.0} decisions per second"
    );
}
