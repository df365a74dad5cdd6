//! The standby process: waits for the daemon's lock, and takes over when the daemon is killed.

use super::Daemon;
use crate::home::Home;
use crate::log_file::RotatingLog;
use crate::machine::PROGRAM;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::sync::{Mutex, PoisonError};

/// The hidden command of the program that runs a daemon in the background.
pub const COMMAND: &str = "keep";
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
        // The daemon that takes over needs the lock. Checked under the lock on the child, so that none is started after the last
        // was dismissed.
        if self.state().handed_over {
            return;
        }
        if child.as_mut().is_some_and(|child| matches!(child.try_wait(), Ok(None))) {
            return;
        }
        // A standby process that exited by itself logged why, and would do so again.
        let failed =
            child.take().and_then(|mut child| child.wait().ok()).is_some_and(|ended| ended.code().is_some());
        let called = match failed {
            true => Err(std::io::Error::other(format!("it ended; see {}", self.home.log().display()))),
            false => background(&self.home).arg(STANDBY).stdout(Stdio::null()).spawn(),
        };
        match called {
            Ok(new) => *child = Some(new),
            Err(error) => {
                drop(child);
                self.warnings.add(&format!("nobody stands by, in case this keeper is killed: {error}"));
            }
        }
    }
}

/// Returns the command that runs a daemon in the background and logs into the state directory. It uses the settings that were
/// last in force for as long as shares exist that were granted under them.
pub(crate) fn background(home: &Home) -> Command {
    let mut command = Command::new(PROGRAM);
    // The link is executed; process lists show this name.
    command.arg0("partage");
    command.arg(COMMAND).current_dir("/").stdin(Stdio::null());
    if home.is_named() {
        command.arg("--home").arg(home.path());
    }
    if home.settings_in_force().exists() {
        command.arg("--settings").arg(home.settings_in_force());
    }
    // The daemon writes its own log there; so does the Rust runtime when it aborts.
    let log = RotatingLog::new(home.log()).open();
    command.stderr(log.map_or_else(|_| Stdio::null(), Stdio::from));
    command
}
