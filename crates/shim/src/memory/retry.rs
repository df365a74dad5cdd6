//! Retries reservations for memory that is about to be released.
//!
//! Some calls reserve more than they turn out to need: a block for a small allocation, a pool's growth, a module's
//! image. They release the rest as soon as the driver has answered. A request in between must not be refused for that.

use partage_region::RegionTenant;
use partage_region::futex::preserve_errno;
use std::time::Duration;

/// Most bytes that may be missing for a retry: short-lived reservations are rarely larger than two growths of a pool.
const MAX_SHORTFALL_BYTES: u64 = 64 << 20;

/// Number of attempts that yield the CPU first.
const YIELD_ATTEMPTS: u32 = 8;

/// Number of attempts that sleep afterwards. The kernel adds about 50 µs to each sleep.
const SLEEP_ATTEMPTS: u32 = 8;
const SLEEP_INTERVAL: Duration = Duration::from_micros(20);

/// Reserves memory if it is nearly available, retrying for about half a millisecond.
pub(super) fn reserve_with_retry(region: &RegionTenant, gpu: usize, bytes: u64) -> bool {
    preserve_errno(|| {
        (0..YIELD_ATTEMPTS + SLEEP_ATTEMPTS).take_while(|_| is_nearly_available(region, gpu, bytes)).any(
            |round| {
                if round < YIELD_ATTEMPTS {
                    std::thread::yield_now();
                } else {
                    std::thread::sleep(SLEEP_INTERVAL);
                }
                region.try_reserve(gpu, bytes)
            },
        )
    })
}

/// Returns whether the reservation would fit if slightly more memory were free.
fn is_nearly_available(region: &RegionTenant, gpu: usize, bytes: u64) -> bool {
    let Some(limit) = region.memory_limit(gpu) else { return false };
    bytes <= limit && region.used(gpu).saturating_add(bytes).saturating_sub(limit) <= MAX_SHORTFALL_BYTES
}
