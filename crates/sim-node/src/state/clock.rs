//! Time. The GPUs of a node live on the machine's monotonic clock, which all its processes and containers share.

use std::time::Duration;

/// Nanoseconds of the monotonic clock.
pub fn now() -> u64 {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    // Neither is negative, and the clock does not reach 2^64 ns in five hundred years.
    (time.tv_sec as u64).wrapping_mul(1_000_000_000).wrapping_add(time.tv_nsec as u64)
}

/// Waits until about `deadline`: asleep while it is far, then yielding, because a sleeper wakes up to 60 µs late.
///
/// A driver spins here; on a machine with more processes than cores that would take the GPU's time from the others.
pub fn wait_until(deadline: u64) {
    const LATE: u64 = 60_000;
    let left = deadline.saturating_sub(now());
    if left > 2 * LATE {
        std::thread::sleep(Duration::from_nanos(left - LATE));
    } else {
        std::thread::yield_now();
    }
}

/// A clock for "has this much time surely not passed yet", cheaper than [`now`]: the processor's own counter.
#[derive(Debug, Default)]
pub(super) struct Ticks {
    first: Option<(u64, u64)>,
    /// Ticks of a nanosecond in 1/1024, rounded down by a fiftieth: deadlines come early, never late.
    rate: u64,
}

impl Ticks {
    /// The counter's value.
    #[inline]
    pub(super) fn read() -> u64 {
        #[cfg(target_arch = "x86_64")]
        {
            // SAFETY: the instruction is in every x86-64 processor and has no effect on memory.
            #[allow(unsafe_code, unused_unsafe)]
            unsafe {
                std::arch::x86_64::_rdtsc()
            }
        }
        #[cfg(not(target_arch = "x86_64"))]
        now()
    }

    /// The counter's value `nanoseconds` after the instant of the two readings, at the latest. The counter must have
    /// been read before the clock: what passes between the two only makes the deadline earlier.
    pub(super) fn surely_before(&mut self, ticks: u64, wall: u64, nanoseconds: u64) -> u64 {
        // For the rate it is the other way round: fewer ticks in more time, so the first reading of the counter is late.
        let (first_wall, first_ticks) = *self.first.get_or_insert_with(|| (wall, Self::read()));
        let walked = wall.saturating_sub(first_wall);
        if self.rate == 0 && walked > 5_000_000 {
            let ticked = u128::from(ticks.saturating_sub(first_ticks));
            self.rate = u64::try_from(ticked * 1024 * 49 / (50 * u128::from(walked))).unwrap_or(0);
        }
        ticks.saturating_add(self.ticks(nanoseconds))
    }

    /// Ticks that surely pass within `nanoseconds`.
    #[inline]
    pub(super) fn ticks(&self, nanoseconds: u64) -> u64 {
        // A day at most: the product stays far below 2^64.
        (nanoseconds.min(86_400_000_000_000) >> 10).saturating_mul(self.rate)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_deadline_in_ticks_is_never_late() {
        let mut ticks = Ticks::default();
        for _ in 0..2 {
            let counter = Ticks::read();
            ticks.surely_before(counter, now(), 0);
            std::thread::sleep(Duration::from_millis(20));
        }
        assert!(ticks.rate > 0);
        let (start, wall) = (Ticks::read(), now());
        while now() < wall + 10_000_000 {}
        assert!(Ticks::read() - start >= ticks.ticks(10_000_000));
    }
}
