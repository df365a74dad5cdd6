//! Other programs: run, waited for, stopped.

use rustix::process::{Pid, Signal, kill_process_group};
use std::fs::File;
use std::io;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// How often we look whether something ended.
const GLANCE: Duration = Duration::from_millis(50);
/// The first look comes sooner, and each later one half as soon: many small programs run one after the other.
const FIRST_GLANCE: Duration = Duration::from_millis(1);
/// How long a program may take to tidy up after an interruption.
const GRACE: Duration = Duration::from_secs(5);

/// How a program ended.
#[derive(Debug)]
pub(crate) enum End {
    Well(String),
    Badly(String),
    Interrupted,
    TooLate,
}

/// Runs a program to its end and takes what it says, at most for `patience`.
///
/// It has a process group of its own: an interruption reaches it, and what it started, through us and once.
pub(crate) fn run(
    command: &mut Command,
    log: &Path,
    stop: &AtomicBool,
    patience: Option<Duration>,
) -> io::Result<End> {
    // A file, because a pipe that nobody reads while we wait would fill up.
    let said = File::create(log)?;
    command.stdout(said.try_clone()?).stderr(said);
    wait(command, log, stop, patience)
}

/// Runs a program whose output is a file of its own; its words are only what it complains of.
pub(crate) fn run_into(command: &mut Command, out: File, log: &Path, stop: &AtomicBool) -> io::Result<End> {
    command.stdout(out).stderr(File::create(log)?);
    wait(command, log, stop, None)
}

fn wait(command: &mut Command, log: &Path, stop: &AtomicBool, patience: Option<Duration>) -> io::Result<End> {
    command.stdin(Stdio::null()).process_group(0);
    let start = Instant::now();
    let mut pause = FIRST_GLANCE;
    let mut child = command.spawn()?;
    let end = loop {
        if let Some(status) = child.try_wait()? {
            let said = String::from_utf8_lossy(&std::fs::read(log)?).into_owned();
            break if status.success() { End::Well(said) } else { End::Badly(said) };
        }
        if stop.load(Ordering::Relaxed) {
            end_group(&mut child)?;
            break End::Interrupted;
        }
        if patience.is_some_and(|patience| start.elapsed() > patience) {
            end_group(&mut child)?;
            break End::TooLate;
        }
        std::thread::sleep(pause);
        pause = GLANCE.min(pause * 2);
    };
    // A tool may end on the very signal that we see a moment later.
    Ok(if stop.load(Ordering::Relaxed) { End::Interrupted } else { end })
}

/// Ends a child and its process group: SIGTERM, then SIGKILL after [`GRACE`]. The child must lead a group of its own.
pub(crate) fn end_group(child: &mut Child) -> io::Result<()> {
    let group = Pid::from_child(child);
    // Errors are ignored: the group may have ended just now.
    // Not SIGINT: a process that was started in the background ignores it, and so do its children.
    let _ = kill_process_group(group, Signal::TERM);
    let start = Instant::now();
    while child.try_wait()?.is_none() {
        if start.elapsed() > GRACE {
            let _ = kill_process_group(group, Signal::KILL);
        }
        std::thread::sleep(GLANCE);
    }
    Ok(())
}

/// Sleeps a glance; false where we were interrupted.
pub(crate) fn wait_a_glance(stop: &AtomicBool) -> bool {
    std::thread::sleep(GLANCE);
    !stop.load(Ordering::Relaxed)
}

/// The last lines of what a tool said, on one line: the reason stands at the end.
pub(crate) fn last_words(said: &str) -> String {
    let lines: Vec<_> = said.lines().map(str::trim).filter(|line| !line.is_empty()).collect();
    let from = lines.len().saturating_sub(4);
    match lines.get(from..) {
        Some(last) if !last.is_empty() => last.join(" / "),
        _ => "it said nothing".to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sh(script: &str, stop: &AtomicBool, patience: Option<Duration>) -> End {
        let log = std::env::temp_dir().join(format!(
            "partage-process-{}-{:?}",
            std::process::id(),
            std::thread::current().id()
        ));
        let end = run(Command::new("sh").args(["-c", script]), &log, stop, patience).unwrap();
        std::fs::remove_file(log).unwrap();
        end
    }

    #[test]
    fn says_how_it_ended() {
        let go_on = AtomicBool::new(false);
        assert!(
            matches!(sh("echo out; echo err >&2", &go_on, None), End::Well(said) if said == "out\nerr\n")
        );
        assert!(matches!(sh("echo why; exit 3", &go_on, None), End::Badly(said) if said == "why\n"));
        assert!(matches!(sh("sleep 60", &go_on, Some(GLANCE)), End::TooLate));
    }

    #[test]
    fn an_interruption_ends_the_whole_group() {
        let marker = std::env::temp_dir().join(format!("partage-interrupted-{}", std::process::id()));
        // The inner shell is not our child: only the group reaches it.
        let (ready, marker_path) = (marker.with_extension("ready"), marker.display());
        let script = format!(
            "sh -c 'trap \"echo told > {marker_path}; exit\" TERM; echo > {}; sleep 60 & wait'; true",
            ready.display()
        );
        let stop = std::sync::Arc::new(AtomicBool::new(false));
        let later = std::sync::Arc::clone(&stop);
        let waited_for = ready.clone();
        let thread = std::thread::spawn(move || {
            // Not before the shell listens: a signal that comes earlier proves nothing.
            while !waited_for.exists() {
                std::thread::sleep(GLANCE);
            }
            later.store(true, Ordering::Relaxed);
        });
        assert!(matches!(sh(&script, &stop, None), End::Interrupted));
        thread.join().unwrap();
        assert!(marker.exists());
        std::fs::remove_file(marker).unwrap();
        std::fs::remove_file(ready).unwrap();
    }

    #[test]
    fn the_end_of_the_words() {
        assert_eq!(last_words("a\nb\n\nc\nd\n e \n"), "b / c / d / e");
        assert_eq!(last_words("\n"), "it said nothing");
    }
}
