//! The standby process: waits for the daemon's lock, and takes over when the daemon is killed.

use super::Daemon;
use crate::log_file::RotatingLog;
use crate::machine::PROGRAM;
use crate::state_dir::StateDir;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::sync::{Mutex, PoisonError};

/// The hidden command of the program that runs a daemon in the background.
pub const DAEMON_COMMAND: &str = "daemon";
/// The command's option to wait until no other daemon runs.
const STANDBY: &str = "--standby";

/// The standby process, if one was started.
#[derive(Default)]
pub(super) struct Successor(Mutex<Option<Child>>);

impl Successor {
    fn child(&self) -> std::sync::MutexGuard<'_, Option<Child>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Ends the standby process.
    pub(super) fn dismiss(&self) {
        if let Some(mut child) = self.child().take() {
            // Fails only if it has ended already.
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

impl Daemon {
    /// Starts a standby process unless one runs. Called when there are shares that it would adopt.
    pub(super) fn call_successor(&self) {
        let mut child = self.standby.child();
        // The daemon that takes over needs the lock. Checked while the child is locked, so that no standby process is
        // started after the last one was dismissed.
        if self.state().handed_over {
            return;
        }
        if child.as_mut().is_some_and(|child| matches!(child.try_wait(), Ok(None))) {
            return;
        }
        // A standby process that exited by itself logged why, and would do so again.
        let failed =
            child.take().and_then(|mut child| child.wait().ok()).is_some_and(|ended| ended.code().is_some());
        let called = if failed {
            Err(std::io::Error::other(format!("it exited; see {}", self.state_dir.log().display())))
        } else {
            background(&self.state_dir).arg(STANDBY).stdout(Stdio::null()).spawn()
        };
        match called {
            Ok(new) => *child = Some(new),
            Err(error) => {
                drop(child);
                self.warnings.add(&format!("no standby process for this daemon: {error}"));
            }
        }
    }
}

/// Returns the command that runs a daemon in the background and logs into the state directory. It uses the settings
/// that were last in force, for as long as shares exist that were granted under them.
pub(crate) fn background(state_dir: &StateDir) -> Command {
    let mut command = Command::new(PROGRAM);
    // The program is executed by a link; process lists show this name.
    command.arg0("partage");
    command.arg(DAEMON_COMMAND).current_dir("/").stdin(Stdio::null());
    if state_dir.is_named() {
        command.arg("--state-dir").arg(state_dir.path());
    }
    if state_dir.settings_in_force().exists() {
        command.arg("--settings").arg(state_dir.settings_in_force());
    }
    // The daemon logs to the same file; the Rust runtime writes to standard error when it aborts.
    let log = RotatingLog::new(state_dir.log()).open();
    command.stderr(log.map_or_else(|_| Stdio::null(), Stdio::from));
    command
}
