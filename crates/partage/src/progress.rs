//! A progress bar on the terminal, and nothing elsewhere.

use std::io::{IsTerminal, Write};
use std::sync::atomic::{AtomicUsize, Ordering};

/// Cells of the bar.
const WIDTH: usize = 30;

/// How far a piece of work has come; shown on standard error while it is a terminal, gone when dropped.
pub(crate) struct Progress {
    what: &'static str,
    total: usize,
    done: AtomicUsize,
    shown: bool,
}

impl Progress {
    pub(crate) fn new(what: &'static str, total: usize) -> Progress {
        let progress = Progress {
            what,
            total: total.max(1),
            done: AtomicUsize::new(0),
            shown: std::io::stderr().is_terminal(),
        };
        progress.draw(0);
        progress
    }

    /// So much more is done; may be called from any thread.
    pub(crate) fn add(&self, more: usize) {
        let before = self.done.fetch_add(more, Ordering::Relaxed);
        let percent = |done: usize| done * 100 / self.total;
        if percent(before) != percent(before + more) {
            self.draw(before + more);
        }
    }

    fn draw(&self, done: usize) {
        if self.shown {
            let filled = (done * WIDTH / self.total).min(WIDTH);
            let percent = (done * 100 / self.total).min(100);
            let bar = "#".repeat(filled) + &"-".repeat(WIDTH - filled);
            // A bar that cannot be drawn is no reason to stop working.
            let _ = write!(std::io::stderr(), "\r{} [{bar}] {percent:>3} %", self.what);
        }
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        if self.shown {
            let _ = write!(std::io::stderr(), "\r{}\r", " ".repeat(self.what.len() + WIDTH + 10));
        }
    }
}
