//! What is missing may be back in a moment.
//!
//! Some calls take more of the account than they turn out to need: a block for a small allocation, a pool's step, a module's
//! image. They give the rest back as soon as the driver has answered. Whoever asks in between must not be refused for that.

use partage_region::RegionTenant;
use partage_region::futex::keeping_errno;
use std::time::Duration;

/// What is taken for a moment is rarely more: two steps of a pool.
const NEAR: u64 = 64 << 20;

/// How often the processor is left to others first.
const YIELDS: u32 = 8;

/// How often time is let pass then. The kernel adds some fifty microseconds to each.
const SLEEPS: u32 = 8;
const SLEEP: Duration = Duration::from_micros(20);

/// Takes memory if it is nearly there and comes within a moment: half a millisecond or so if it does not.
pub(super) fn take(region: &RegionTenant, gpu: usize, bytes: u64) -> bool {
    keeping_errno(|| {
        (0..YIELDS + SLEEPS).take_while(|_| is_near(region, gpu, bytes)).any(|round| {
            if round < YIELDS {
                std::thread::yield_now();
            } else {
                std::thread::sleep(SLEEP);
            }
            region.try_reserve(gpu, bytes)
        })
    })
}

/// Whether it would fit if a little more were free.
fn is_near(region: &RegionTenant, gpu: usize, bytes: u64) -> bool {
    let Some(limit) = region.memory_limit(gpu) else { return false };
    bytes <= limit && region.used(gpu).saturating_add(bytes).saturating_sub(limit) <= NEAR
}
