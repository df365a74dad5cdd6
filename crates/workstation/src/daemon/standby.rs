//! Who goes on when a daemon dies: a process that waits for its lock, and nothing else.

use super::Daemon;
use crate::home::Home;
use crate::log_file::RotatingLog;
use crate::machine::PROGRAM;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::sync::{Mutex, PoisonError};

/// The hidden command of the program that keeps in the background.
pub const COMMAND: &str = "keep";
/// Its option for waiting until nobody else keeps.
const STANDBY: &str = "--standby";

/// The one who waits, if it was called.
#[derive(Default)]
pub(super) struct Successor(Mutex<Option<Child>>);

impl Successor {
    fn child(&self) -> std::sync::MutexGuard<'_, Option<Child>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sends it away.
    pub(super) fn dismiss(&self) {
        if let Some(mut child) = self.child().take() {
            // It may have ended; what counts is that it has.
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

impl Daemon {
    /// Sees to it that somebody waits, also if the one who did was killed. Called when there is something to go on with.
    pub(super) fn call_successor(&self) {
        let mut child = self.standby.child();
        // Another daemon is about to come, and needs the lock. Looked at while nobody can be sent away.
        if self.state().handed_over {
            return;
        }
        if child.as_mut().is_some_and(|child| matches!(child.try_wait(), Ok(None))) {
            return;
        }
        // One that ended by itself has said why in the log, and would again.
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

/// The program as a daemon in the background, with its words in the home's log. It goes by the settings that were last in
/// force, as long as there is something that was given under them.
pub(crate) fn background(home: &Home) -> Command {
    let mut command = Command::new(PROGRAM);
    // The link is what is started; this is what people see.
    command.arg0("partage");
    command.arg(COMMAND).current_dir("/").stdin(Stdio::null());
    if home.is_named() {
        command.arg("--home").arg(home.path());
    }
    if home.settings_in_force().exists() {
        command.arg("--settings").arg(home.settings_in_force());
    }
    // The daemon logs into the file by itself; what the runtime writes when it aborts comes there, too.
    let log = RotatingLog::new(home.log()).open();
    command.stderr(log.map_or_else(|_| Stdio::null(), Stdio::from));
    command
}
