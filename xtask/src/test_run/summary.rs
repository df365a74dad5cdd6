//! Prints the summary of a run: skipped tests, slowest tests, and the totals.

use super::timing::{TestResult, Verdict};
use std::fmt::Write as _;
use std::time::Duration;

/// How many of the slowest tests are listed.
const SLOWEST_LISTED: usize = 20;

/// The results of all test binaries.
#[derive(Debug, Default)]
pub(super) struct TestTotals {
    /// Tests, each with the test binary that it is in.
    pub(super) tests: Vec<(String, TestResult)>,
    /// Failures other than failed tests: a test binary that was killed or could not be started.
    pub(super) broken: Vec<String>,
}

impl TestTotals {
    fn count(&self, verdict: Verdict) -> usize {
        self.tests.iter().filter(|(_, test)| test.verdict == verdict).count()
    }

    /// Returns whether every test passed.
    pub(super) fn is_success(&self) -> bool {
        self.broken.is_empty() && self.count(Verdict::Failed) == 0
    }

    /// Returns the text that ends a run.
    pub(super) fn report(mut self, skipped: &str, took: Duration) -> String {
        let mut text = String::new();
        self.tests.sort_by_key(|(_, test)| std::cmp::Reverse(test.took));
        text.push_str("\nslowest tests:\n");
        for (binary, test) in self.tests.iter().take(SLOWEST_LISTED) {
            // Writing to a String cannot fail.
            let _ = writeln!(text, "{:>8.1} s  {binary}: {}", test.took.as_secs_f64(), test.name);
        }
        let skips: Vec<&str> = skipped.lines().collect();
        if !skips.is_empty() {
            let _ = writeln!(text, "\nskipped {} tests:\n  {}", skips.len(), skips.join("\n  "));
        }
        let failed: Vec<String> = self
            .tests
            .iter()
            .filter(|(_, test)| test.verdict == Verdict::Failed)
            .map(|(binary, test)| format!("{binary}: {}", test.name))
            .chain(self.broken.iter().cloned())
            .collect();
        if !failed.is_empty() {
            let _ = writeln!(text, "\nfailures:\n  {}", failed.join("\n  "));
        }
        let _ = writeln!(
            text,
            "\ntest result: {}. {} passed; {} failed; {} ignored; finished in {:.2}s",
            if self.is_success() { "ok" } else { "FAILED" },
            self.count(Verdict::Passed),
            failed.len(),
            self.count(Verdict::Ignored),
            took.as_secs_f64()
        );
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn finished(name: &str, verdict: Verdict, seconds: u64) -> (String, TestResult) {
        ("node".into(), TestResult { name: name.into(), verdict, took: Duration::from_secs(seconds) })
    }

    #[test]
    fn report_has_the_slowest_the_skipped_the_failed_and_the_totals() {
        let mut totals = TestTotals::default();
        totals.tests.extend((0..30).map(|number| finished(&format!("t{number}"), Verdict::Passed, number)));
        totals.tests.push(finished("wrong", Verdict::Failed, 99));
        totals.tests.push(finished("later", Verdict::Ignored, 0));
        totals.broken.push("bed: ended with signal: 9".into());
        assert!(!totals.is_success());
        let text = totals.report("bed: no root\n", Duration::from_secs(61));
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines[1..4], ["slowest tests:", "    99.0 s  node: wrong", "    29.0 s  node: t29"]);
        assert_eq!(lines[22..26], ["", "skipped 1 tests:", "  bed: no root", ""]);
        assert_eq!(lines[26..29], ["failures:", "  node: wrong", "  bed: ended with signal: 9"]);
        assert_eq!(lines[30], "test result: FAILED. 30 passed; 2 failed; 1 ignored; finished in 61.00s");
    }

    #[test]
    fn run_without_failures_is_a_success() {
        let totals = TestTotals { tests: vec![finished("a", Verdict::Passed, 1)], broken: Vec::new() };
        assert!(totals.is_success());
        let text = totals.report("", Duration::from_secs(1));
        assert!(
            text.ends_with("\ntest result: ok. 1 passed; 0 failed; 0 ignored; finished in 1.00s\n"),
            "{text}"
        );
        assert!(!text.contains("skipped") && !text.contains("failures"), "{text}");
    }
}
