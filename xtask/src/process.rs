//! Runs other programs, waits for them and stops them.

use rustix::process::{Pid, Signal, kill_process_group};
use std::fs::File;
use std::io;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// Interval between two checks whether a program has exited.
const POLL_INTERVAL: Duration = Duration::from_millis(50);
/// First interval, which doubles up to the regular one: many short programs run one after the other.
const FIRST_POLL_INTERVAL: Duration = Duration::from_millis(1);
/// Time for a program to exit after SIGTERM.
const TERM_GRACE_PERIOD: Duration = Duration::from_secs(5);

/// How a program ended, with its output.
#[derive(Debug)]
pub(crate) enum ProcessEnd {
    Succeeded(String),
    Failed(String),
    Interrupted,
    TimedOut,
}

/// Runs a program to its end, at most for `timeout`, and returns its output.
///
/// It has its own process group: an interruption reaches it and its children through this process, and only once.
pub(crate) fn run(
    command: &mut Command,
    log: &Path,
    stop: &AtomicBool,
    timeout: Option<Duration>,
) -> io::Result<ProcessEnd> {
    // A file, because a pipe that is not read during the wait would fill up.
    let message = File::create(log)?;
    command.stdout(message.try_clone()?).stderr(message);
    wait(command, log, stop, timeout)
}

/// Runs a program with its standard output in a file; the returned output is standard error only.
pub(crate) fn run_into(
    command: &mut Command,
    out: File,
    log: &Path,
    stop: &AtomicBool,
) -> io::Result<ProcessEnd> {
    command.stdout(out).stderr(File::create(log)?);
    wait(command, log, stop, None)
}

fn wait(
    command: &mut Command,
    log: &Path,
    stop: &AtomicBool,
    timeout: Option<Duration>,
) -> io::Result<ProcessEnd> {
    command.stdin(Stdio::null()).process_group(0);
    let start = Instant::now();
    let mut pause = FIRST_POLL_INTERVAL;
    let mut child = command.spawn()?;
    let end = loop {
        if let Some(status) = child.try_wait()? {
            let message = String::from_utf8_lossy(&std::fs::read(log)?).into_owned();
            break if status.success() {
                ProcessEnd::Succeeded(message)
            } else {
                ProcessEnd::Failed(message)
            };
        }
        if stop.load(Ordering::Relaxed) {
            end_group(&mut child)?;
            break ProcessEnd::Interrupted;
        }
        if timeout.is_some_and(|timeout| start.elapsed() > timeout) {
            end_group(&mut child)?;
            break ProcessEnd::TimedOut;
        }
        std::thread::sleep(pause);
        pause = POLL_INTERVAL.min(pause * 2);
    };
    // A tool may exit on the same signal that this process handles a moment later.
    Ok(if stop.load(Ordering::Relaxed) { ProcessEnd::Interrupted } else { end })
}

/// Ends a child and its process group: SIGTERM, then SIGKILL after [`TERM_GRACE_PERIOD`]. The child must lead its own
/// group.
pub(crate) fn end_group(child: &mut Child) -> io::Result<()> {
    let group = Pid::from_child(child);
    // Errors are ignored: the group may have ended just now. SIGTERM instead of SIGINT: a process that was started in
    // the background ignores SIGINT, and so do its children.
    let _ = kill_process_group(group, Signal::TERM);
    let start = Instant::now();
    while child.try_wait()?.is_none() {
        if start.elapsed() > TERM_GRACE_PERIOD {
            let _ = kill_process_group(group, Signal::KILL);
        }
        std::thread::sleep(POLL_INTERVAL);
    }
    Ok(())
}

/// Sleeps for the poll interval. Returns false if this process was interrupted.
pub(crate) fn pause_unless_stopped(stop: &AtomicBool) -> bool {
    std::thread::sleep(POLL_INTERVAL);
    !stop.load(Ordering::Relaxed)
}

/// Returns the last lines of a tool's output on one line: the reason comes last.
pub(crate) fn last_lines(message: &str) -> String {
    let lines: Vec<_> = message.lines().map(str::trim).filter(|line| !line.is_empty()).collect();
    let from = lines.len().saturating_sub(4);
    match lines.get(from..) {
        Some(last) if !last.is_empty() => last.join(" / "),
        _ => "no output".to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sh(script: &str, stop: &AtomicBool, timeout: Option<Duration>) -> ProcessEnd {
        let log = std::env::temp_dir().join(format!(
            "partage-process-{}-{:?}",
            std::process::id(),
            std::thread::current().id()
        ));
        let end = run(Command::new("sh").args(["-c", script]), &log, stop, timeout).unwrap();
        std::fs::remove_file(log).unwrap();
        end
    }

    #[test]
    fn run_reports_success_failure_and_timeout() {
        let go_on = AtomicBool::new(false);
        assert!(
            matches!(sh("echo out; echo err >&2", &go_on, None), ProcessEnd::Succeeded(message) if message == "out\nerr\n")
        );
        assert!(
            matches!(sh("echo why; exit 3", &go_on, None), ProcessEnd::Failed(message) if message == "why\n")
        );
        assert!(matches!(sh("sleep 60", &go_on, Some(POLL_INTERVAL)), ProcessEnd::TimedOut));
    }

    #[test]
    fn interruption_ends_the_whole_process_group() {
        let marker = std::env::temp_dir().join(format!("partage-interrupted-{}", std::process::id()));
        // The inner shell is not a child of this process: only a signal to the group reaches it.
        let (ready, marker_path) = (marker.with_extension("ready"), marker.display());
        let script = format!(
            "sh -c 'trap \"echo signaled > {marker_path}; exit\" TERM; echo > {}; sleep 60 & wait'; true",
            ready.display()
        );
        let stop = std::sync::Arc::new(AtomicBool::new(false));
        let later = std::sync::Arc::clone(&stop);
        let waited_for = ready.clone();
        let thread = std::thread::spawn(move || {
            // The shell must have set its trap: an earlier signal proves nothing.
            while !waited_for.exists() {
                std::thread::sleep(POLL_INTERVAL);
            }
            later.store(true, Ordering::Relaxed);
        });
        assert!(matches!(sh(&script, &stop, None), ProcessEnd::Interrupted));
        thread.join().unwrap();
        assert!(marker.exists());
        std::fs::remove_file(marker).unwrap();
        std::fs::remove_file(ready).unwrap();
    }

    #[test]
    fn last_lines_are_joined() {
        assert_eq!(last_lines("a\nb\n\nc\nd\n e \n"), "b / c / d / e");
        assert_eq!(last_lines("\n"), "no output");
    }
}
