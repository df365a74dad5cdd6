//! Measures how long each test took, from the order in which libtest reports results.
//!
//! libtest starts tests in the order of `--list`, as many at a time as it has threads, and starts the next one when one
//! ends. A result is printed when its test ends, so the times of the results determine when every test started.

use std::collections::BTreeMap;
use std::time::Duration;

/// How a test ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    Passed,
    Failed,
    Ignored,
}

/// A test that has ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct TestResult {
    pub(super) name: String,
    pub(super) verdict: Verdict,
    pub(super) took: Duration,
}

/// The tests of one run of a test binary.
#[derive(Debug)]
pub(super) struct TestTimer {
    /// Tests that have not started, in the order in which they will.
    waiting: std::vec::IntoIter<String>,
    /// Running tests, and when they started.
    running: BTreeMap<String, Duration>,
}

impl TestTimer {
    /// Starts a run with the tests in libtest's order.
    pub(super) fn start(tests: Vec<String>, threads: usize) -> TestTimer {
        let mut timing = TestTimer { waiting: tests.into_iter(), running: BTreeMap::new() };
        for _ in 0..threads.max(1) {
            timing.start_next(Duration::ZERO);
        }
        timing
    }

    fn start_next(&mut self, now: Duration) {
        if let Some(test) = self.waiting.next() {
            self.running.insert(test, now);
        }
    }

    /// Reads a line that was printed `now` after the start. Returns the test whose result it is, if it is one.
    ///
    /// Programs that tests start may print results of their own: only running tests can end.
    pub(super) fn read(&mut self, line: &str, now: Duration) -> Option<TestResult> {
        let (name, verdict) = result(line)?;
        let started = self.running.remove(name)?;
        self.start_next(now);
        Some(TestResult { name: name.to_string(), verdict, took: now.saturating_sub(started) })
    }

    /// Returns the tests that have started and whose results were not read, as if they passed `now`.
    pub(super) fn unfinished(self, now: Duration) -> impl Iterator<Item = TestResult> {
        let passed = move |(name, started)| TestResult {
            name,
            verdict: Verdict::Passed,
            took: now.saturating_sub(started),
        };
        self.running.into_iter().map(passed)
    }
}

/// Parses the test and its verdict from a line that libtest or rustdoc prints for a result.
pub(super) fn result(line: &str) -> Option<(&str, Verdict)> {
    let (before, result) = line.rsplit_once(" ... ")?;
    let verdict = match result.split([',', ' ']).next()? {
        "ok" => Verdict::Passed,
        "FAILED" => Verdict::Failed,
        "ignored" => Verdict::Ignored,
        _ => return None,
    };
    let before = before.strip_suffix(" - should panic").unwrap_or(before);
    // A program that a test started may have left an unterminated line.
    let (_, name) = before.rsplit_once("test ")?;
    Some((name, verdict))
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    fn names(names: &[&str]) -> Vec<String> {
        names.iter().map(|name| (*name).to_string()).collect()
    }

    #[test]
    fn test_begins_when_a_thread_is_free() {
        let mut timing = TestTimer::start(names(&["a", "b", "c::d", "e"]), 2);
        let mut took = |line: &str, now: u32| {
            let finished = timing.read(line, SECOND * now)?;
            Some((finished.name, finished.verdict, finished.took.as_secs()))
        };
        assert_eq!(took("running 4 tests", 0), None);
        assert_eq!(took("test c::d ... ok", 1), None, "it has not started");
        assert_eq!(took("test b ... ok", 2), Some(("b".into(), Verdict::Passed, 2)));
        assert_eq!(
            took("test c::d ... ignored, takes minutes", 2),
            Some(("c::d".into(), Verdict::Ignored, 0))
        );
        assert_eq!(
            took("half a linetest a - should panic ... FAILED", 7),
            Some(("a".into(), Verdict::Failed, 7))
        );
        assert_eq!(took("test e has been running for over 60 seconds", 8), None);
        let unfinished: Vec<TestResult> = timing.unfinished(SECOND * 9).collect();
        assert_eq!(unfinished, [TestResult { name: "e".into(), verdict: Verdict::Passed, took: SECOND * 7 }]);
    }

    #[test]
    fn more_threads_than_tests_do_no_harm() {
        let mut timing = TestTimer::start(names(&["only"]), 8);
        assert_eq!(timing.read("test only ... ok", SECOND).unwrap().took, SECOND);
        assert_eq!(timing.unfinished(SECOND).count(), 0);
    }
}
