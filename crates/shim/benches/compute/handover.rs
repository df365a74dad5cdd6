//! How long a GPU is idle between two turns, how long requests of a tenant with low latency wait, and what a launch
//! costs.

use crate::Options;
use crate::measure::{Access, Running, TenantSpec, load};
use std::sync::atomic::{AtomicU32, Ordering::SeqCst};
use std::time::{Duration, Instant};

const REQUESTS: u64 = 1_000;
const REQUEST_US: u64 = 200;

/// Runs this part; returns the number of bounds that are missed.
pub fn all(options: &Options) -> usize {
    println!("handovers, load {}", load());
    crate::calls::launches();
    let mut missed = 0;
    for busy in [0, options.busy.max(4)] {
        let _busy = crate::measure::BusyProcesses::start(busy);
        missed += idle_between_turns(busy, Duration::from_secs(options.pair_seconds));
    }
    missed += low_latency();
    println!();
    missed
}

/// Median, 99th percentile and largest of some microseconds.
fn summary(mut micros: Vec<f64>) -> [f64; 3] {
    micros.sort_by(f64::total_cmp);
    let at = |part: f64| micros.get(((micros.len() - 1) as f64 * part).ceil() as usize).copied();
    if micros.is_empty() { [0.0; 3] } else { [0.5, 0.99, 1.0].map(|part| at(part).unwrap_or(0.0)) }
}

fn print(what: &str, count: usize, [median, high, most]: [f64; 3]) {
    println!("{what:<56} {count:>7} {median:>9.0} {high:>9.0} {most:>9.0}");
}

/// Two saturating tenants: each period in which the GPU has nothing to do is one between two turns.
fn idle_between_turns(busy: usize, length: Duration) -> usize {
    println!("{:<56} {:>7} {:>9} {:>9} {:>9}", "microseconds", "count", "median", "99 %", "longest");
    let tenants = [30, 70].map(|cores| TenantSpec::hard("streams 1 200", cores));
    let running = Running::start(&tenants, Access::Shares);
    std::thread::sleep(Duration::from_millis(300));
    let futex = std::thread::scope(|scope| {
        let futex = scope.spawn(|| ping_pong(length));
        let idle = idle_periods(&running, length);
        print(
            &format!("GPU idle between turns, 30/70, {busy} spinning processes"),
            idle.len(),
            summary(idle.clone()),
        );
        let futex = futex.join().unwrap();
        print("futex ping-pong at the same time", futex.len(), summary(futex.clone()));
        (summary(idle)[1], summary(futex)[1])
    });
    let bound = 1_000.0 + 2.0 * futex.1;
    println!("  99 % may be at most {bound:.0}");
    usize::from(futex.0 > bound)
}

/// Returns the microseconds of each period in which the first GPU was idle. Samples are frequent enough that two
/// handovers are rarely in one period; the idle time of each is exact.
fn idle_periods(running: &Running, length: Duration) -> Vec<f64> {
    const IGNORED_US: f64 = 2.0;
    let began = Instant::now();
    let (mut periods, mut idle) = (Vec::new(), 0.0);
    let mut last = running.node.state.usage(0);
    while began.elapsed() < length {
        std::thread::sleep(Duration::from_micros(250));
        let now = running.node.state.usage(0);
        let gap = (now.at - last.at).saturating_sub(now.busy - last.busy) as f64 / 1e3;
        if gap > IGNORED_US {
            idle += gap;
        } else if idle > 0.0 {
            periods.push(idle);
            idle = 0.0;
        }
        last = now;
    }
    periods
}

/// Returns the microseconds of round trips between two threads that wake each other.
fn ping_pong(length: Duration) -> Vec<f64> {
    let word = AtomicU32::new(0);
    let wait = |value: u32| {
        let none = std::ptr::null::<libc::timespec>();
        // SAFETY: the address is of a live word; without a timeout.
        unsafe { libc::syscall(libc::SYS_futex, word.as_ptr(), libc::FUTEX_WAIT, value, none) };
    };
    let set = |value: u32| {
        word.store(value, SeqCst);
        // SAFETY: the address is of a live word.
        unsafe { libc::syscall(libc::SYS_futex, word.as_ptr(), libc::FUTEX_WAKE, 1) };
    };
    const PING: u32 = 1;
    const PONG: u32 = 2;
    const END: u32 = 3;
    let mut rounds = Vec::new();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            loop {
                match word.load(SeqCst) {
                    PING => set(PONG),
                    END => return,
                    other => wait(other),
                }
            }
        });
        let end = Instant::now() + length;
        while Instant::now() < end {
            std::thread::sleep(Duration::from_millis(1));
            let began = Instant::now();
            set(PING);
            while word.load(SeqCst) == PING {
                wait(PING);
            }
            rounds.push(began.elapsed().as_nanos() as f64 / 1e3);
        }
        set(END);
    });
    rounds
}

/// A tenant with a short request now and then, beside one that saturates the GPU.
fn low_latency() -> usize {
    println!(
        "{:<56} {:>7} {:>9} {:>9} {:>9}",
        "microseconds beyond the kernel", "count", "median", "99 %", "longest"
    );
    let mut missed = 0;
    for neighbor_us in [200, 2_000, 20_000] {
        let neighbor = TenantSpec::hard(&format!("streams 1 {neighbor_us}"), 70);
        for (what, access, low_latency) in [
            ("bare", Access::Bare, false),
            ("share", Access::Shares, false),
            ("low latency", Access::Shares, true),
        ] {
            let program = format!("requests {REQUEST_US} {REQUESTS}");
            let specs = [TenantSpec { low_latency, ..TenantSpec::hard(&program, 30) }, neighbor.clone()];
            let mut running = Running::start(&specs, access);
            let (waits, used) = serve(&mut running);
            let count = waits.len();
            let summary = summary(waits);
            print(
                &format!("{what}, neighbor's kernels of {neighbor_us} us, {used:.0} % used"),
                count,
                summary,
            );
            // The longest kernel of the other, and the bound of a handover on a quiet machine.
            missed += usize::from(low_latency && summary[1] > neighbor_us as f64 + 2_000.0);
        }
    }
    missed
}

/// Returns the waiting times of all requests of the first tenant, and the percentage of the GPU in use meanwhile.
fn serve(running: &mut Running) -> (Vec<f64>, f64) {
    let from = running.node.state.usage(0);
    let mut waits = Vec::new();
    loop {
        let line = running.tenants[0][0].line();
        if line == "end" || line.is_empty() {
            break;
        }
        waits.push(line.parse().unwrap());
    }
    let to = running.node.state.usage(0);
    (waits, (to.busy - from.busy) as f64 / (to.at - from.at) as f64 * 100.0)
}
