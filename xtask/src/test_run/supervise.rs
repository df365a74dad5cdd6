//! Runs a child process, reads its output line by line, and ends it when it stalls or the run is interrupted.

use crate::process::end_group;
use std::io::{self, BufRead, BufReader, Read};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::time::{Duration, Instant};

/// Interval between checks for an interruption, a stall and the end of a child that prints nothing.
const POLL_INTERVAL: Duration = Duration::from_millis(100);

/// How long output is read after the child has exited: its descendants may continue to print.
const DRAIN_LIMIT: Duration = Duration::from_secs(5);

/// The output stream of a line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum OutputStream {
    Stdout,
    Stderr,
}

/// Whether a line shows that the child makes progress.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum LineProgress {
    Made,
    None,
}

/// How a child ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ChildOutcome {
    Exited(ExitStatus),
    /// It made no progress for the stall limit, and was killed with its process group.
    Stalled,
    /// The run was interrupted, and the child was killed with its process group.
    Interrupted,
}

/// Runs a command to its end, and passes each line that it prints to `read`, with the time since the start.
///
/// Standard output is read; standard error too if the command has it piped. The child gets its own process group, so
/// that an interruption reaches it and its descendants through this process, and only once.
pub(super) fn supervise(
    command: &mut Command,
    stop: &AtomicBool,
    stall_limit: Duration,
    mut read: impl FnMut(OutputStream, &str, Duration) -> LineProgress,
) -> io::Result<ChildOutcome> {
    let started = Instant::now();
    let mut child = command.stdin(Stdio::null()).stdout(Stdio::piped()).process_group(0).spawn()?;
    let lines = spawn_line_readers(&mut child);
    let mut last_progress = started;
    loop {
        if stop.load(Ordering::Relaxed) {
            end_group(&mut child)?;
            return Ok(ChildOutcome::Interrupted);
        }
        if last_progress.elapsed() > stall_limit {
            end_group(&mut child)?;
            return Ok(ChildOutcome::Stalled);
        }
        match lines.recv_timeout(POLL_INTERVAL) {
            Ok((stream, line, at)) => {
                if read(stream, &line, at.saturating_duration_since(started)) == LineProgress::Made {
                    last_progress = Instant::now();
                }
            }
            // Processes that outlive the child may hold its outputs open, so the end of the outputs is not awaited. A
            // child that has closed them may still run.
            Err(error) => {
                if let Some(status) = child.try_wait()? {
                    // It may have printed its last lines since the poll.
                    let ended = Instant::now();
                    while ended.elapsed() < DRAIN_LIMIT
                        && let Ok((stream, line, at)) = lines.recv_timeout(POLL_INTERVAL)
                    {
                        read(stream, &line, at.saturating_duration_since(started));
                    }
                    return Ok(ChildOutcome::Exited(status));
                }
                if error == RecvTimeoutError::Disconnected {
                    std::thread::sleep(POLL_INTERVAL);
                }
            }
        }
    }
}

/// A line of an output, and when it was read.
type OutputLine = (OutputStream, String, Instant);

/// Sends the lines of a child's outputs as they arrive. Each thread ends with the last process that holds the output
/// open.
fn spawn_line_readers(child: &mut Child) -> Receiver<OutputLine> {
    let (send, lines) = mpsc::channel();
    if let Some(stdout) = child.stdout.take() {
        let send = send.clone();
        std::thread::spawn(move || read_lines(OutputStream::Stdout, stdout, &send));
    }
    if let Some(stderr) = child.stderr.take() {
        std::thread::spawn(move || read_lines(OutputStream::Stderr, stderr, &send));
    }
    lines
}

fn read_lines(stream: OutputStream, output: impl Read, send: &Sender<OutputLine>) {
    let mut output = BufReader::new(output);
    let mut line = Vec::new();
    while output.read_until(b'\n', &mut line).is_ok_and(|read| read > 0) {
        let text = String::from_utf8_lossy(&line).trim_end_matches('\n').to_string();
        if send.send((stream, text, Instant::now())).is_err() {
            break;
        }
        line.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NO_STALL: Duration = Duration::from_secs(600);

    fn shell(script: &str) -> Command {
        let mut command = Command::new("sh");
        command.args(["-c", script]).stderr(Stdio::piped());
        command
    }

    #[test]
    fn lines_of_both_outputs_and_the_exit_status_are_reported() {
        let mut printed = Vec::new();
        let mut command = shell("echo one; printf 'two, \\377'; echo three >&2; exit 3");
        let outcome = supervise(&mut command, &AtomicBool::new(false), NO_STALL, |stream, line, _| {
            printed.push((stream, line.to_string()));
            LineProgress::Made
        });
        let Ok(ChildOutcome::Exited(status)) = outcome else { panic!("{outcome:?}") };
        assert_eq!(status.code(), Some(3));
        printed.sort_by_key(|(_, line)| line.clone());
        let expected = [
            (OutputStream::Stdout, "one"),
            (OutputStream::Stderr, "three"),
            (OutputStream::Stdout, "two, \u{fffd}"),
        ];
        assert_eq!(printed, expected.map(|(stream, line)| (stream, line.to_string())));
    }

    #[test]
    fn child_that_makes_no_progress_is_killed_with_its_descendants() {
        let mut descendant = String::new();
        let mut command = shell("sleep 600 & echo $!; while :; do echo nothing; sleep 0.01; done");
        let outcome =
            supervise(&mut command, &AtomicBool::new(false), Duration::from_millis(300), |_, line, _| {
                if line != "nothing" {
                    descendant = line.to_string();
                }
                LineProgress::None
            });
        assert_eq!(outcome.unwrap(), ChildOutcome::Stalled);
        // The signal was sent; the kernel delivers it soon. The process remains a zombie until init reaps it.
        let stat = || std::fs::read_to_string(format!("/proc/{descendant}/stat")).unwrap_or_default();
        while !stat().is_empty() && !stat().contains(") Z ") {
            std::thread::sleep(POLL_INTERVAL);
        }
    }

    #[test]
    fn interruption_ends_the_child() {
        let stop = AtomicBool::new(false);
        let outcome = supervise(&mut shell("echo ready; sleep 600"), &stop, NO_STALL, |_, line, _| {
            stop.store(line == "ready", Ordering::Relaxed);
            LineProgress::Made
        });
        assert_eq!(outcome.unwrap(), ChildOutcome::Interrupted);
    }

    #[test]
    fn descendant_that_outlives_the_child_is_not_waited_for() {
        let mut descendant = String::new();
        let mut command = shell("sleep 600 & echo $!");
        let outcome = supervise(&mut command, &AtomicBool::new(false), NO_STALL, |_, line, _| {
            descendant = line.to_string();
            LineProgress::Made
        });
        assert!(matches!(outcome, Ok(ChildOutcome::Exited(status)) if status.success()));
        let killed = Command::new("kill").arg(&descendant).status().unwrap();
        assert!(killed.success(), "the descendant must still be running");
    }
}
