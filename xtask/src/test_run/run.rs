//! Runs the test binaries.

use super::TestRunError;
use super::binaries::{self, Built, TestBinary, cargo};
use super::output::Totals;
use super::plan::{self, Durations, Plan};
use super::supervise::{Outcome, Progress, Stream, supervise};
use super::timing::{Finished, Timing, Verdict, result};
use std::collections::VecDeque;
use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Names the file that tests append their skips to.
const SKIPPED_VARIABLE: &str = "PARTAGE_SKIPPED";
/// Tells tests that the programs were built just now.
const BUILT_VARIABLE: &str = "PARTAGE_PROGRAMS_BUILT";

/// How the tests are run.
#[derive(Debug)]
pub struct TestRunOptions<'a> {
    /// Folder for the list of skipped tests, and for the durations that the order of the next run is made from.
    pub records: &'a Path,
    /// A test binary in which no test ends for this long is killed and counts as failed.
    pub stall_limit: Duration,
    /// Set when the run is to end: what runs is killed, and nothing more is started.
    pub stop: &'a AtomicBool,
}

/// Builds and runs all tests of the workspace in the current folder, and prints results to `out`. Returns whether all passed.
pub fn run(options: &TestRunOptions<'_>, out: &mut (dyn Write + Send)) -> Result<bool, TestRunError> {
    let began = Instant::now();
    let mut built = binaries::build(options.stop)?;
    let building = began.elapsed();
    let writing = || TestRunError::io(format!("writing to {}", options.records.display()));
    fs::create_dir_all(options.records).map_err(writing())?;
    // Tests run in the folders of their packages.
    let records = fs::canonicalize(options.records).map_err(writing())?;
    let skipped = records.join("skipped");
    fs::write(&skipped, "").map_err(writing())?;
    let record = records.join("durations.json");
    let mut durations = plan::read_durations(&record);
    let Plan { waiting, computing, alone } = Plan::new(std::mem::take(&mut built.tests), &durations);
    let run =
        Run { built: &built, options, skipped: &skipped, out: Mutex::new(out), results: Mutex::default() };
    let computing = [Job::Documentation].into_iter().chain(computing.into_iter().map(Job::Binary));
    run.beside(waiting.into_iter().map(Job::Binary).collect(), computing.collect());
    alone.into_iter().for_each(|test| run.one(&Job::Binary(test)));
    let results = run.results.into_inner().unwrap_or_else(PoisonError::into_inner);
    durations.extend(results.durations);
    plan::write_durations(&record, &durations).map_err(writing())?;
    let is_success = results.totals.is_success();
    let skips = fs::read_to_string(&skipped).unwrap_or_default();
    let report = results.totals.report(&skips, began.elapsed() - building);
    let out = run.out.into_inner().unwrap_or_else(PoisonError::into_inner);
    // A reader that went away has what it wanted.
    let _ = write!(out, "\nbuilt in {:.0} s\n{report}", building.as_secs_f64());
    if options.stop.load(Ordering::Relaxed) {
        return Err(TestRunError::Interrupted);
    }
    Ok(is_success)
}

/// Something to run.
enum Job {
    Binary(TestBinary),
    /// The examples in doc comments of all crates, by cargo and rustdoc.
    Documentation,
}

#[derive(Default)]
struct Results {
    totals: Totals,
    durations: Durations,
}

struct Run<'a> {
    built: &'a Built,
    options: &'a TestRunOptions<'a>,
    skipped: &'a PathBuf,
    out: Mutex<&'a mut (dyn Write + Send)>,
    results: Mutex<Results>,
}

impl Run<'_> {
    /// Runs the jobs of two queues beside each other, each queue in its order. A queue that is empty takes from the other.
    fn beside(&self, one: VecDeque<Job>, other: VecDeque<Job>) {
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
                        self.one(&job);
                    }
                });
            }
        });
    }

    /// Runs a job, prints its output and records its results. Does nothing once the run is interrupted.
    fn one(&self, job: &Job) {
        if self.options.stop.load(Ordering::Relaxed) {
            return;
        }
        let (name, header) = match job {
            Job::Binary(test) => {
                let header = format!("{} of {}", test.source.display(), test.package);
                (name_of(test), header)
            }
            Job::Documentation => ("doc tests".into(), "doc tests of the workspace".into()),
        };
        self.print(&format!("     Running {header}\n"));
        let began = Instant::now();
        let ran = match job {
            Job::Binary(test) => self.binary(test),
            Job::Documentation => self.documentation(),
        };
        let took = began.elapsed();
        let mut results = self.results.lock().unwrap_or_else(PoisonError::into_inner);
        let text = match ran {
            Ok(ran) => {
                results.totals.broken.extend(ran.defect().map(|defect| format!("{name}: {defect}")));
                results.totals.tests.extend(ran.finished.into_iter().map(|test| (name.clone(), test)));
                if let (Job::Binary(test), Outcome::Exited(_)) = (job, ran.outcome) {
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
        // A reader that went away has what it wanted.
        let _ = out.write_all(text.as_bytes()).and_then(|()| out.flush());
    }

    fn binary(&self, test: &TestBinary) -> Result<Ran, TestRunError> {
        let starting = || TestRunError::io(format!("starting {}", test.executable.display()));
        let list = self.built.command(test).args(["--list", "--format", "terse"]).output();
        let list = list.map_err(starting())?;
        let list = String::from_utf8_lossy(&list.stdout);
        let tests: Vec<String> =
            list.lines().filter_map(|line| line.strip_suffix(": test")).map(str::to_string).collect();
        let threads = plan::threads(test, std::thread::available_parallelism().map_or(1, usize::from));
        let mut command = self.built.command(test);
        command.arg(format!("--test-threads={threads}"));
        let mut timing = Timing::start(tests, threads);
        let began = Instant::now();
        let mut ran = self.watch(command, |line, at| timing.read(line, at))?;
        let unread = timing.unfinished(began.elapsed());
        match ran.is_complete_success() {
            // A program that a test started may have printed into the line of a result.
            true => ran.finished.extend(unread),
            false => ran.unfinished = unread.map(|test| test.name).collect(),
        }
        Ok(ran)
    }

    fn documentation(&self) -> Result<Ran, TestRunError> {
        let mut command = Command::new(cargo());
        command.args(["test", "--workspace", "--doc", "--no-fail-fast"]);
        // rustdoc runs the examples of a crate in one process, and reports no times.
        self.watch(command, |line, _| {
            let (name, verdict) = result(line)?;
            Some(Finished { name: name.to_string(), verdict, took: Duration::ZERO })
        })
    }

    /// Runs a command, and passes each line that it prints to `read`, with the time since the start.
    ///
    /// Results are read from standard output only: tests report skips on standard error, possibly in the middle of a line
    /// of libtest.
    fn watch(
        &self,
        mut command: Command,
        mut read: impl FnMut(&str, Duration) -> Option<Finished>,
    ) -> Result<Ran, TestRunError> {
        command.env(SKIPPED_VARIABLE, self.skipped).env(BUILT_VARIABLE, "1").stderr(Stdio::piped());
        let (mut finished, mut text, mut has_summary) = (Vec::new(), String::new(), false);
        let outcome =
            supervise(&mut command, self.options.stop, self.options.stall_limit, |stream, line, at| {
                // One line has the totals of all test binaries, at the end.
                if stream == Stream::Stdout && line.starts_with(SUMMARY) {
                    has_summary = true;
                    return Progress::Made;
                }
                text.push_str(line);
                text.push('\n');
                let Some(test) = (stream == Stream::Stdout).then(|| read(line, at)).flatten() else {
                    return Progress::None;
                };
                if test.verdict == Verdict::Failed {
                    // The rest is printed when the test binary has ended, which may take minutes.
                    self.print(&format!("      Failed {}\n", test.name));
                }
                finished.push(test);
                Progress::Made
            });
        let outcome = outcome.map_err(TestRunError::io("running tests"))?;
        Ok(Ran { outcome, finished, unfinished: Vec::new(), has_summary, text })
    }
}

/// The beginning of the line that libtest prints after the last test.
const SUMMARY: &str = "test result: ";

/// A test binary that has ended.
struct Ran {
    outcome: Outcome,
    finished: Vec<Finished>,
    /// Tests whose results were not printed.
    unfinished: Vec<String>,
    /// Whether libtest has printed its summary, after the last test.
    has_summary: bool,
    text: String,
}

impl Ran {
    /// Whether libtest reports that every test passed.
    fn is_complete_success(&self) -> bool {
        self.has_summary && matches!(self.outcome, Outcome::Exited(status) if status.success())
    }

    /// What is wrong with the run of the binary, other than tests that failed.
    fn defect(&self) -> Option<String> {
        let during = match self.unfinished.is_empty() {
            true => String::new(),
            false => format!(" during {}", self.unfinished.join(", ")),
        };
        let has_failure = self.finished.iter().any(|test| test.verdict == Verdict::Failed);
        match self.outcome {
            Outcome::Interrupted => Some(format!("interrupted{during}")),
            Outcome::Stalled => Some(format!("killed because no test ended{during}")),
            // A test ended the whole process, with whatever status.
            Outcome::Exited(status) if !self.has_summary => Some(format!("{status} before its end{during}")),
            Outcome::Exited(status) if !status.success() && !has_failure => Some(format!("{status}{during}")),
            Outcome::Exited(_) => None,
        }
    }
}

/// The short name of a test binary: its area, or its crate for unit tests.
fn name_of(test: &TestBinary) -> String {
    match test.source.starts_with("src") {
        true => test.package.clone(),
        false => format!("{} {}", test.package, test.target),
    }
}
