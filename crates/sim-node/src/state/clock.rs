//! Clocks. Simulated GPUs use the machine's monotonic clock, which all processes and containers share.

use std::time::Duration;

/// Returns the monotonic time in nanoseconds.
pub fn now() -> u64 {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    // Neither value is negative, and 2^64 ns are more than five hundred years.
    (time.tv_sec as u64).wrapping_mul(1_000_000_000).wrapping_add(time.tv_nsec as u64)
}

/// Waits until about `deadline`: sleeps while it is far away, then yields, because a sleep may end up to 60 µs late.
///
/// A real driver spins here. On a machine with more processes than cores, that would delay the other processes.
pub fn wait_until(deadline: u64) {
    const MAX_WAKE_LATENCY_NANOS: u64 = 60_000;
    let left = deadline.saturating_sub(now());
    if left > 2 * MAX_WAKE_LATENCY_NANOS {
        std::thread::sleep(Duration::from_nanos(left - MAX_WAKE_LATENCY_NANOS));
    } else {
        std::thread::yield_now();
    }
}

/// Converts durations into ticks of the processor's counter, which is cheaper to read than [`now`]. The conversion
/// rounds down, so a deadline in ticks is never late.
#[derive(Debug, Default)]
pub(super) struct TickClock {
    first: Option<(u64, u64)>,
    /// Ticks per 1024 ns, reduced by 2 %: deadlines are early, never late.
    rate: u64,
}

impl TickClock {
    /// Reads the processor's counter in ticks; on other architectures than x86-64, the monotonic time in nanoseconds.
    #[inline]
    pub(super) fn read() -> u64 {
        #[cfg(target_arch = "x86_64")]
        {
            // SAFETY: every x86-64 processor has the instruction, and it does not access memory.
            #[allow(unsafe_code, unused_unsafe)]
            unsafe {
                std::arch::x86_64::_rdtsc()
            }
        }
        #[cfg(not(target_arch = "x86_64"))]
        now()
    }

    /// Returns a tick that is reached at most `nanoseconds` after the two readings. The counter must be read before the
    /// clock: the time between the two readings only makes the deadline earlier.
    pub(super) fn latest_safe_tick(&mut self, ticks: u64, wall: u64, nanoseconds: u64) -> u64 {
        // For the rate, the first reading of the counter is after that of the clock: fewer ticks in more time.
        let (first_wall, first_ticks) = *self.first.get_or_insert_with(|| (wall, Self::read()));
        let wall_elapsed = wall.saturating_sub(first_wall);
        if self.rate == 0 && wall_elapsed > 5_000_000 {
            let ticks_elapsed = u128::from(ticks.saturating_sub(first_ticks));
            self.rate =
                u64::try_from(ticks_elapsed * 1024 * 49 / (50 * u128::from(wall_elapsed))).unwrap_or(0);
        }
        ticks.saturating_add(self.ticks(nanoseconds))
    }

    /// Returns a number of ticks that always pass within `nanoseconds`.
    #[inline]
    pub(super) fn ticks(&self, nanoseconds: u64) -> u64 {
        // At most one day, so that the product stays far below 2^64.
        (nanoseconds.min(86_400_000_000_000) >> 10).saturating_mul(self.rate)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tick_deadline_is_never_late() {
        let mut ticks = TickClock::default();
        for _ in 0..2 {
            let counter = TickClock::read();
            ticks.latest_safe_tick(counter, now(), 0);
            std::thread::sleep(Duration::from_millis(20));
        }
        assert!(ticks.rate > 0);
        let (start, wall) = (TickClock::read(), now());
        while now() < wall + 10_000_000 {}
        assert!(TickClock::read() - start >= ticks.ticks(10_000_000));
    }
}
