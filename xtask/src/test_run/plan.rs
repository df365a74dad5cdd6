//! Decides the order of the test binaries and their number of threads.

use super::binaries::TestBinary;
use std::collections::{BTreeMap, VecDeque};
use std::path::Path;
use std::time::Duration;

/// Test binaries that mostly wait for a real Kubernetes, by package and target. They run with more threads than there
/// are processors, beside those that compute.
const WAITING: &[(&str, &str)] = &[
    ("partage-cluster", "api_server"),
    ("partage-e2e", "cluster"),
    ("partage-e2e", "node"),
    ("partage-testkit", "bed"),
];
/// Threads per processor for a test binary that waits.
const WAITING_THREADS_PER_CPU: usize = 2;

/// Test binaries that must run exclusively: they count what beds leave behind, and would count other beds too.
const EXCLUSIVE: &[(&str, &str)] = &[("partage-testkit", "cleanup")];

/// Expected duration of a test binary that has not run before: it runs before those that are known to be short.
const DEFAULT_DURATION: Duration = Duration::from_secs(30);

/// The durations of earlier runs, by package and target.
pub(super) type Durations = BTreeMap<String, Duration>;

/// Returns the key of a test binary in [`Durations`].
pub(super) fn key(test: &TestBinary) -> String {
    format!("{} {}", test.package, test.source.display())
}

/// Reads what [`write_durations`] wrote. A missing or unreadable file is an empty record.
pub(super) fn read_durations(file: &Path) -> Durations {
    let text = std::fs::read(file).unwrap_or_default();
    let seconds: BTreeMap<String, f64> = serde_json::from_slice(&text).unwrap_or_default();
    let duration = |seconds| Duration::try_from_secs_f64(seconds).unwrap_or(DEFAULT_DURATION);
    seconds.into_iter().map(|(key, seconds)| (key, duration(seconds))).collect()
}

/// Stores the durations of this run for the order of the next one.
pub(super) fn write_durations(file: &Path, durations: &Durations) -> std::io::Result<()> {
    let seconds: BTreeMap<&String, f64> =
        durations.iter().map(|(key, duration)| (key, duration.as_secs_f64())).collect();
    std::fs::write(file, serde_json::to_string_pretty(&seconds)? + "\n")
}

/// The order of a run. Within each group the longest comes first.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct RunPlan {
    /// Run one after the other, in parallel with those of `computing`.
    pub(super) waiting: VecDeque<TestBinary>,
    /// Run one after the other, in parallel with those of `waiting`.
    pub(super) computing: VecDeque<TestBinary>,
    /// Run one after the other when all others have ended.
    pub(super) exclusive: VecDeque<TestBinary>,
}

impl RunPlan {
    pub(super) fn new(mut tests: Vec<TestBinary>, earlier: &Durations) -> RunPlan {
        tests.sort_by_key(|test| {
            std::cmp::Reverse(earlier.get(&key(test)).copied().unwrap_or(DEFAULT_DURATION))
        });
        let mut plan = RunPlan::default();
        for test in tests {
            let group = match test {
                _ if is_in(&test, EXCLUSIVE) => &mut plan.exclusive,
                _ if is_in(&test, WAITING) => &mut plan.waiting,
                _ => &mut plan.computing,
            };
            group.push_back(test);
        }
        plan
    }
}

/// Returns the number of threads with which libtest runs the tests of a binary.
///
/// At least two: with one, libtest prints a test's name before the test and the result after it, and output of the test
/// comes between them.
pub(super) fn threads(test: &TestBinary, cpus: usize) -> usize {
    let threads = if is_in(test, WAITING) { WAITING_THREADS_PER_CPU * cpus } else { cpus };
    threads.max(2)
}

fn is_in(test: &TestBinary, group: &[(&str, &str)]) -> bool {
    group.contains(&(test.package.as_str(), test.target.as_str()))
}

#[cfg(test)]
mod tests {
    use super::super::binaries::named;
    use super::*;

    fn targets(tests: &VecDeque<TestBinary>) -> Vec<&str> {
        tests.iter().map(|test| test.target.as_str()).collect()
    }

    #[test]
    fn longest_comes_first_in_each_group_and_unknown_before_short() {
        let earlier: Durations = [("short", 1), ("long", 100)]
            .map(|(target, seconds)| (key(&named("partage-core", target)), Duration::from_secs(seconds)))
            .into();
        let tests = [
            named("partage-testkit", "cleanup"),
            named("partage-core", "short"),
            named("partage-e2e", "node"),
            named("partage-core", "unknown"),
            named("partage-core", "long"),
        ];
        let plan = RunPlan::new(tests.to_vec(), &earlier);
        assert_eq!(targets(&plan.computing), ["long", "unknown", "short"]);
        assert_eq!((targets(&plan.waiting), targets(&plan.exclusive)), (vec!["node"], vec!["cleanup"]));
        assert_eq!((threads(&tests[1], 2), threads(&tests[2], 2)), (2, 4));
        assert_eq!(threads(&tests[1], 1), 2, "with one thread libtest splits its result lines");
    }

    #[test]
    fn durations_are_read_as_they_were_written() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("durations.json");
        assert_eq!(read_durations(&file), Durations::new());
        let durations =
            Durations::from([("partage-core src/lib.rs".to_string(), Duration::from_millis(1500))]);
        write_durations(&file, &durations).unwrap();
        assert_eq!(read_durations(&file), durations);
        std::fs::write(&file, "{\"a\": -1").unwrap();
        assert_eq!(read_durations(&file), Durations::new());
    }
}
