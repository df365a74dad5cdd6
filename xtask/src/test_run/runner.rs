//! Runs the test binaries.

use super::TestRunError;
use super::binaries::{self, BuildArtifacts, TestBinary, cargo};
use super::plan::{self, Durations, RunPlan};
use super::summary::TestTotals;
use super::supervise::{ChildOutcome, LineProgress, OutputStream, supervise};
use super::timing::{TestResult, TestTimer, Verdict, result};
use std::collections::VecDeque;
use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Environment variable with the file to which tests append their skips.
const SKIPPED_VARIABLE: &str = "PARTAGE_SKIPPED";
/// Environment variable that informs tests that the programs were just built.
const BUILT_VARIABLE: &str = "PARTAGE_PROGRAMS_BUILT";

/// Options of a test run.
#[derive(Debug)]
pub struct TestRunOptions<'a> {
    /// Directory for the list of skipped tests, and for the durations that determine the order of the next run.
    pub records: &'a Path,
    /// A test binary in which no test ends for this long is killed and counts as failed.
    pub stall_limit: Duration,
    /// Set to end the run: running tests are killed, and nothing more is started.
    pub stop: &'a AtomicBool,
}

/// Builds and runs all tests of the workspace in the current directory, and prints results to `out`. Returns whether
/// all passed.
pub fn run(options: &TestRunOptions<'_>, out: &mut (dyn Write + Send)) -> Result<bool, TestRunError> {
    let started = Instant::now();
    let mut built = binaries::build(options.stop)?;
    let building = started.elapsed();
    let writing = || TestRunError::io(format!("writing to {}", options.records.display()));
    fs::create_dir_all(options.records).map_err(writing())?;
    // Tests run in the directories of their packages, so the path must be absolute.
    let records = fs::canonicalize(options.records).map_err(writing())?;
    let skipped = records.join("skipped");
    fs::write(&skipped, "").map_err(writing())?;
    let record = records.join("durations.json");
    let mut durations = plan::read_durations(&record);
    let RunPlan { waiting, computing, exclusive } =
        RunPlan::new(std::mem::take(&mut built.tests), &durations);
    let run = TestRunner {
        built: &built,
        options,
        skipped: &skipped,
        out: Mutex::new(out),
        results: Mutex::default(),
    };
    let computing = [TestJob::Documentation].into_iter().chain(computing.into_iter().map(TestJob::Binary));
    run.run_concurrently(waiting.into_iter().map(TestJob::Binary).collect(), computing.collect());
    exclusive.into_iter().for_each(|test| run.run_job(&TestJob::Binary(test)));
    let results = run.results.into_inner().unwrap_or_else(PoisonError::into_inner);
    durations.extend(results.durations);
    plan::write_durations(&record, &durations).map_err(writing())?;
    let is_success = results.totals.is_success();
    let skips = fs::read_to_string(&skipped).unwrap_or_default();
    let report = results.totals.report(&skips, started.elapsed() - building);
    let out = run.out.into_inner().unwrap_or_else(PoisonError::into_inner);
    // A reader that has gone needs no output.
    let _ = write!(out, "\nbuilt in {:.0} s\n{report}", building.as_secs_f64());
    if options.stop.load(Ordering::Relaxed) {
        return Err(TestRunError::Interrupted);
    }
    Ok(is_success)
}

/// A unit of work.
enum TestJob {
    Binary(TestBinary),
    /// The examples in doc comments of all crates, run by cargo and rustdoc.
    Documentation,
}

#[derive(Default)]
struct RunResults {
    totals: TestTotals,
    durations: Durations,
}

struct TestRunner<'a> {
    built: &'a BuildArtifacts,
    options: &'a TestRunOptions<'a>,
    skipped: &'a PathBuf,
    out: Mutex<&'a mut (dyn Write + Send)>,
    results: Mutex<RunResults>,
}

impl TestRunner<'_> {
    /// Runs the jobs of two queues in parallel, each queue in its order. An empty queue takes from the other.
    fn run_concurrently(&self, one: VecDeque<TestJob>, other: VecDeque<TestJob>) {
        let queues = Mutex::new([one, other]);
        let next = |own: usize| {
            let mut queues = queues.lock().unwrap_or_else(PoisonError::into_inner);
            queues[own].pop_front().or_else(|| queues[1 - own].pop_front())
        };
        std::thread::scope(|scope| {
            for own in [0, 1] {
                let next = &next;
                scope.spawn(move || {
                    while let Some(job) = next(own) {
                        self.run_job(&job);
                    }
                });
            }
        });
    }

    /// Runs a job, prints its output and records its results. Does nothing once the run is interrupted.
    fn run_job(&self, job: &TestJob) {
        if self.options.stop.load(Ordering::Relaxed) {
            return;
        }
        let (name, header) = match job {
            TestJob::Binary(test) => {
                let header = format!("{} of {}", test.source.display(), test.package);
                (short_name(test), header)
            }
            TestJob::Documentation => ("doc tests".into(), "doc tests of the workspace".into()),
        };
        self.print(&format!("     Running {header}\n"));
        let started = Instant::now();
        let ran = match job {
            TestJob::Binary(test) => self.run_binary(test),
            TestJob::Documentation => self.run_doc_tests(),
        };
        let took = started.elapsed();
        let mut results = self.results.lock().unwrap_or_else(PoisonError::into_inner);
        let text = match ran {
            Ok(ran) => {
                results.totals.broken.extend(ran.defect().map(|defect| format!("{name}: {defect}")));
                results.totals.tests.extend(ran.finished.into_iter().map(|test| (name.clone(), test)));
                if let (TestJob::Binary(test), ChildOutcome::Exited(_)) = (job, ran.outcome) {
                    results.durations.insert(plan::key(test), took);
                }
                ran.text
            }
            Err(error) => {
                let error = error.with_causes();
                results.totals.broken.push(format!("{name}: {error}"));
                error + "\n"
            }
        };
        drop(results);
        self.print(&format!("    Finished {header} in {:.1} s\n{text}", took.as_secs_f64()));
    }

    fn print(&self, text: &str) {
        let mut out = self.out.lock().unwrap_or_else(PoisonError::into_inner);
        // A reader that has gone needs no output.
        let _ = out.write_all(text.as_bytes()).and_then(|()| out.flush());
    }

    fn run_binary(&self, test: &TestBinary) -> Result<BinaryRun, TestRunError> {
        let starting = || TestRunError::io(format!("starting {}", test.executable.display()));
        let list = self.built.command(test).args(["--list", "--format", "terse"]).output();
        let list = list.map_err(starting())?;
        let list = String::from_utf8_lossy(&list.stdout);
        let tests: Vec<String> =
            list.lines().filter_map(|line| line.strip_suffix(": test")).map(str::to_string).collect();
        let threads = plan::threads(test, std::thread::available_parallelism().map_or(1, usize::from));
        let mut command = self.built.command(test);
        command.arg(format!("--test-threads={threads}"));
        let mut timing = TestTimer::start(tests, threads);
        let started = Instant::now();
        let mut ran = self.run_command(command, |line, at| timing.read(line, at))?;
        let unread = timing.unfinished(started.elapsed());
        if ran.is_complete_success() {
            // A program that a test started may have printed into the line of a result.
            ran.finished.extend(unread)
        } else {
            ran.unfinished = unread.map(|test| test.name).collect()
        }
        Ok(ran)
    }

    fn run_doc_tests(&self) -> Result<BinaryRun, TestRunError> {
        let mut command = Command::new(cargo());
        command.args(["test", "--workspace", "--doc", "--no-fail-fast"]);
        // rustdoc runs the examples of a crate in one process, and reports no durations.
        self.run_command(command, |line, _| {
            let (name, verdict) = result(line)?;
            Some(TestResult { name: name.to_string(), verdict, took: Duration::ZERO })
        })
    }

    /// Runs a command, and passes each line that it prints to `read`, with the time since the start.
    ///
    /// Results are read from standard output only: tests report skips on standard error, possibly in the middle of a
    /// line of libtest.
    fn run_command(
        &self,
        mut command: Command,
        mut read: impl FnMut(&str, Duration) -> Option<TestResult>,
    ) -> Result<BinaryRun, TestRunError> {
        command.env(SKIPPED_VARIABLE, self.skipped).env(BUILT_VARIABLE, "1").stderr(Stdio::piped());
        let (mut finished, mut text, mut has_summary) = (Vec::new(), String::new(), false);
        let outcome =
            supervise(&mut command, self.options.stop, self.options.stall_limit, |stream, line, at| {
                // The totals of all test binaries are printed once, at the end.
                if stream == OutputStream::Stdout && line.starts_with(SUMMARY_PREFIX) {
                    has_summary = true;
                    return LineProgress::Made;
                }
                text.push_str(line);
                text.push('\n');
                let Some(test) = (stream == OutputStream::Stdout).then(|| read(line, at)).flatten() else {
                    return LineProgress::None;
                };
                if test.verdict == Verdict::Failed {
                    // The whole output is printed when the test binary has ended, which may take minutes.
                    self.print(&format!("      Failed {}\n", test.name));
                }
                finished.push(test);
                LineProgress::Made
            });
        let outcome = outcome.map_err(TestRunError::io("running tests"))?;
        Ok(BinaryRun { outcome, finished, unfinished: Vec::new(), has_summary, text })
    }
}

/// Prefix of the line that libtest prints after the last test.
const SUMMARY_PREFIX: &str = "test result: ";

/// The result of a test binary.
struct BinaryRun {
    outcome: ChildOutcome,
    finished: Vec<TestResult>,
    /// Tests whose results were not printed.
    unfinished: Vec<String>,
    /// Whether libtest has printed its summary.
    has_summary: bool,
    text: String,
}

impl BinaryRun {
    /// Returns whether libtest reports that every test passed.
    fn is_complete_success(&self) -> bool {
        self.has_summary && matches!(self.outcome, ChildOutcome::Exited(status) if status.success())
    }

    /// Returns what is wrong with the run of the binary, other than failed tests.
    fn defect(&self) -> Option<String> {
        let during = if self.unfinished.is_empty() {
            String::new()
        } else {
            format!(" during {}", self.unfinished.join(", "))
        };
        let has_failure = self.finished.iter().any(|test| test.verdict == Verdict::Failed);
        match self.outcome {
            ChildOutcome::Interrupted => Some(format!("interrupted{during}")),
            ChildOutcome::Stalled => Some(format!("killed because no test ended{during}")),
            // A test ended the whole process, with any status.
            ChildOutcome::Exited(status) if !self.has_summary => {
                Some(format!("{status} before its end{during}"))
            }
            ChildOutcome::Exited(status) if !status.success() && !has_failure => {
                Some(format!("{status}{during}"))
            }
            ChildOutcome::Exited(_) => None,
        }
    }
}

/// Returns the short name of a test binary: its target, or its crate for unit tests.
fn short_name(test: &TestBinary) -> String {
    if test.source.starts_with("src") {
        test.package.clone()
    } else {
        format!("{} {}", test.package, test.target)
    }
}
