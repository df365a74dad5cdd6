//! The utilization of a GPU by process: NVML's samples since the last query.

use nvml_wrapper::Device;
use nvml_wrapper::error::NvmlError;
use std::collections::BTreeMap;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// The longest interval between two samples of the driver: until it is over, the driver may have no new sample.
const MAX_SAMPLE_INTERVAL: Duration = Duration::from_secs(1);

/// The longest time that one sample is taken to cover: an interval between queries, and one between samples.
const MAX_COVERED_TIME: Duration = Duration::from_secs(2);

/// The utilization by process that is kept between queries.
#[derive(Debug, Default)]
pub(super) struct ProcessUtilization {
    /// The time of the newest sample, in microseconds since 1970.
    newest: u64,
    /// The utilization by pid from the newest samples, in percent.
    last: BTreeMap<u32, u32>,
    /// The GPU time by pid, in microseconds, that the samples of the last query add to earlier ones.
    worked: BTreeMap<u32, u64>,
}

/// A sample: its time in microseconds since 1970, the pid, and the utilization in percent.
type UtilizationSample = (u64, u32, u32);

impl ProcessUtilization {
    /// Returns the utilization in percent by pid, without idle processes; `None` if the driver does not report it.
    pub(super) fn update(&mut self, device: &Device<'_>) -> Option<&BTreeMap<u32, u32>> {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_micros() as u64;
        let since =
            if self.newest == 0 { now.saturating_sub(micros(MAX_SAMPLE_INTERVAL)) } else { self.newest };
        let since = since.max(now.saturating_sub(micros(MAX_COVERED_TIME)));
        let samples = match device.process_utilization_stats(since) {
            Ok(samples) => samples,
            // No process was active, there is no new sample yet, or a process started between NVML's two queries.
            Err(NvmlError::NotFound | NvmlError::InsufficientSize(_)) => Vec::new(),
            Err(_) => return None,
        };
        let samples = samples.iter().map(|sample| (sample.timestamp, sample.pid, sample.sm_util));
        self.add_samples(samples, since, now);
        Some(&self.last)
    }

    /// Returns the GPU time of a process that the last query added, in nanoseconds. No time is counted twice, however
    /// often and irregularly the driver is queried.
    pub(super) fn worked_ns(&self, pid: u32) -> u64 {
        self.worked.get(&pid).map_or(0, |micros| micros.saturating_mul(1_000))
    }

    fn add_samples(&mut self, samples: impl Iterator<Item = UtilizationSample>, since: u64, now: u64) {
        let mut sums: BTreeMap<u32, (u32, u32)> = BTreeMap::new();
        let mut newest = None;
        // The end of the time that earlier samples cover, by pid.
        let mut covered: BTreeMap<u32, u64> = BTreeMap::new();
        self.worked.clear();
        // Drivers also return old samples, and values above 100 %.
        for (time, pid, percent) in samples.filter(|&(time, _, percent)| time > since && percent <= 100) {
            let (sum, count) = sums.entry(pid).or_default();
            (*sum, *count) = (*sum + percent, *count + 1);
            newest = newest.max(Some(time));
            let covered = covered.entry(pid).or_insert(since);
            let passed = time.saturating_sub(*covered).min(micros(MAX_COVERED_TIME));
            *covered = time.max(*covered);
            *self.worked.entry(pid).or_default() += passed * u64::from(percent) / 100;
        }
        match newest {
            Some(time) => {
                self.newest = time;
                self.last = sums.into_iter().map(|(pid, (sum, count))| (pid, sum / count)).collect();
            }
            None if now.saturating_sub(self.newest) > micros(MAX_SAMPLE_INTERVAL) => {
                self.last.clear();
                // The next sample does not cover the time in which there were none.
                self.newest = now.saturating_sub(micros(MAX_SAMPLE_INTERVAL));
            }
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

    fn taken(busy: &mut ProcessUtilization, samples: &[UtilizationSample], now: u64) -> Vec<(u32, u32)> {
        busy.add_samples(samples.iter().copied(), busy.newest, now);
        busy.last.iter().map(|(pid, percent)| (*pid, *percent)).collect()
    }

    #[test]
    fn samples_of_a_process_are_averaged() {
        let mut busy = ProcessUtilization::default();
        let samples = [(SECOND, 7, 30), (2 * SECOND, 7, 51), (2 * SECOND, 8, 100)];
        assert_eq!(taken(&mut busy, &samples, 2 * SECOND), [(7, 40), (8, 100)]);
    }

    #[test]
    fn utilization_is_kept_until_a_new_sample_is_due() {
        let mut busy = ProcessUtilization::default();
        assert_eq!(taken(&mut busy, &[(5 * SECOND, 7, 30)], 5 * SECOND), [(7, 30)]);
        assert_eq!(taken(&mut busy, &[], 5 * SECOND + 100), [(7, 30)]);
        assert_eq!(taken(&mut busy, &[(5 * SECOND, 7, 90)], 6 * SECOND), [(7, 30)]);
        assert_eq!(taken(&mut busy, &[], 6 * SECOND + 1), []);
    }

    #[test]
    fn gpu_time_is_counted_once() {
        let mut busy = ProcessUtilization::default();
        taken(&mut busy, &[(10 * SECOND, 7, 50)], 10 * SECOND);
        assert_eq!(busy.worked_ns(7), 1_000_000_000, "a first sample covers two seconds at most");
        taken(&mut busy, &[], 10 * SECOND + 500_000);
        assert_eq!(busy.worked_ns(7), 0, "the utilization is kept, its time is not counted again");
        let samples = [(11 * SECOND, 7, 100), (11 * SECOND, 8, 20), (11 * SECOND + 500_000, 7, 10)];
        taken(&mut busy, &samples, 12 * SECOND);
        assert_eq!((busy.worked_ns(7), busy.worked_ns(8)), (1_050_000_000, 200_000_000));
        // Nothing runs for a minute.
        taken(&mut busy, &[], 72 * SECOND);
        taken(&mut busy, &[(72 * SECOND, 7, 100)], 72 * SECOND + 1);
        assert_eq!(busy.worked_ns(7), 1_000_000_000);
    }

    #[test]
    fn values_above_100_percent_are_ignored() {
        let mut busy = ProcessUtilization::default();
        assert_eq!(taken(&mut busy, &[(SECOND, 7, 4_000_000), (SECOND, 8, 3)], SECOND), [(8, 3)]);
    }
}
