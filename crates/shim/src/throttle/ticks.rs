//! A fast counter to notice pauses between launches.
#![allow(unsafe_code)]

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// Pause between two launches after which the stream may have run dry.
const PAUSE_NS: u64 = 200_000;

/// Nanoseconds over which the counter's rate is measured.
const CALIBRATION_NS: u64 = 5_000_000;

/// [`PAUSE_NS`] in ticks; at first for a slow counter, so that pauses are noticed too often rather than too rarely.
static PAUSE_TICKS: AtomicU64 = AtomicU64::new(PAUSE_NS / 50);
/// First reading of both clocks; zero before.
static FIRST: [AtomicU64; 2] = [const { AtomicU64::new(0) }; 2];

/// Returns the processor's counter. It may differ between processors by little.
#[inline]
pub(super) fn read() -> u64 {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: every processor of this architecture has the counter.
    return unsafe { core::arch::x86_64::_rdtsc() };
    #[cfg(target_arch = "aarch64")]
    {
        let ticks: u64;
        // SAFETY: the virtual counter may be read by every process and has no side effects.
        unsafe { core::arch::asm!("mrs {}, cntvct_el0", out(reg) ticks, options(nomem, nostack)) };
        return ticks;
    }
    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    return partage_region::clock::monotonic_ns();
}

/// Returns whether a pause lies between two readings. A counter that ran backwards counts as a pause.
#[inline]
pub(super) fn is_pause(before: u64, after: u64) -> bool {
    after.wrapping_sub(before) > PAUSE_TICKS.load(Relaxed)
}

/// Measures the counter's rate, given the time on the monotonic clock.
pub(super) fn calibrate(now: u64) {
    let [first_ns, first_ticks] = &FIRST;
    match first_ns.load(Relaxed) {
        0 => {
            first_ticks.store(read(), Relaxed);
            first_ns.store(now, Relaxed);
        }
        u64::MAX => {}
        since if now.saturating_sub(since) >= CALIBRATION_NS => {
            let ticks = read().wrapping_sub(first_ticks.load(Relaxed));
            let pause = u128::from(ticks) * u128::from(PAUSE_NS) / u128::from(now - since);
            PAUSE_TICKS.store(u64::try_from(pause).unwrap_or(u64::MAX).max(1), Relaxed);
            first_ns.store(u64::MAX, Relaxed);
        }
        _ => {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use partage_region::clock;

    #[test]
    fn pauses_are_measured_in_time() {
        let begin = clock::monotonic_ns();
        calibrate(begin);
        std::thread::sleep(std::time::Duration::from_millis(20));
        calibrate(clock::monotonic_ns());
        let before = read();
        assert!(!is_pause(before, before));
        std::thread::sleep(std::time::Duration::from_millis(20));
        assert!(is_pause(before, read()));
        assert!(is_pause(before, before.wrapping_sub(1)));
    }
}
