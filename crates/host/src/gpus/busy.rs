//! How busy processes keep a GPU: NVML's samples since the last look.

use nvml_wrapper::Device;
use nvml_wrapper::error::NvmlError;
use std::collections::BTreeMap;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// The longest time between two samples of a driver: it may be that there is none yet.
const SAMPLE: Duration = Duration::from_secs(1);

/// What is remembered between looks.
#[derive(Debug, Default)]
pub(super) struct Busy {
    /// The time of the newest sample, in microseconds of the wall clock.
    seen: u64,
    /// Percents by pid, of the newest samples.
    last: BTreeMap<u32, u32>,
}

/// One sample: when, who, and percent.
type Sample = (u64, u32, u32);

impl Busy {
    /// Percents by pid, without those who did nothing; `None` where the driver does not tell.
    pub(super) fn ask(&mut self, device: &Device<'_>) -> Option<&BTreeMap<u32, u32>> {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_micros() as u64;
        let since = if self.seen == 0 { now.saturating_sub(micros(SAMPLE)) } else { self.seen };
        let samples = match device.process_utilization_stats(since) {
            Ok(samples) => samples,
            // Nobody did anything, or the time for a sample has not come; or somebody came just now.
            Err(NvmlError::NotFound | NvmlError::InsufficientSize(_)) => Vec::new(),
            Err(_) => return None,
        };
        let samples = samples.iter().map(|sample| (sample.timestamp, sample.pid, sample.sm_util));
        self.take(samples, since, now);
        Some(&self.last)
    }

    fn take(&mut self, samples: impl Iterator<Item = Sample>, since: u64, now: u64) {
        let mut sums: BTreeMap<u32, (u32, u32)> = BTreeMap::new();
        let mut newest = None;
        // Drivers also give old samples and some that no GPU can have.
        for (time, pid, percent) in samples.filter(|&(time, _, percent)| time > since && percent <= 100) {
            let (sum, count) = sums.entry(pid).or_default();
            (*sum, *count) = (*sum + percent, *count + 1);
            newest = newest.max(Some(time));
        }
        match newest {
            Some(time) => {
                self.seen = time;
                self.last = sums.into_iter().map(|(pid, (sum, count))| (pid, sum / count)).collect();
            }
            None if now.saturating_sub(self.seen) > micros(SAMPLE) => self.last.clear(),
            None => {}
        }
    }
}

fn micros(time: Duration) -> u64 {
    time.as_micros() as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: u64 = 1_000_000;

    fn taken(busy: &mut Busy, samples: &[Sample], now: u64) -> Vec<(u32, u32)> {
        busy.take(samples.iter().copied(), busy.seen, now);
        busy.last.iter().map(|(pid, percent)| (*pid, *percent)).collect()
    }

    #[test]
    fn samples_of_a_process_are_averaged() {
        let mut busy = Busy::default();
        let samples = [(SECOND, 7, 30), (2 * SECOND, 7, 51), (2 * SECOND, 8, 100)];
        assert_eq!(taken(&mut busy, &samples, 2 * SECOND), [(7, 40), (8, 100)]);
    }

    #[test]
    fn what_was_said_stands_until_a_sample_is_due() {
        let mut busy = Busy::default();
        assert_eq!(taken(&mut busy, &[(5 * SECOND, 7, 30)], 5 * SECOND), [(7, 30)]);
        assert_eq!(taken(&mut busy, &[], 5 * SECOND + 100), [(7, 30)]);
        assert_eq!(taken(&mut busy, &[(5 * SECOND, 7, 90)], 6 * SECOND), [(7, 30)]);
        assert_eq!(taken(&mut busy, &[], 6 * SECOND + 1), []);
    }

    #[test]
    fn what_no_gpu_can_have_is_not_taken() {
        let mut busy = Busy::default();
        assert_eq!(taken(&mut busy, &[(SECOND, 7, 4_000_000), (SECOND, 8, 3)], SECOND), [(8, 3)]);
    }
}
