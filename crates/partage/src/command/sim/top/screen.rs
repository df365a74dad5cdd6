//! Where the tables go: drawn over each other on a terminal, one after the other elsewhere.

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::termios::{self, LocalModes, OptionalActions, Termios};
use std::io::{self, IsTerminal, Write};
use std::time::{Duration, Instant};

/// Standard output, and the keys of a terminal.
pub(super) struct Screen {
    live: bool,
    /// Lines of the table that is there.
    drawn: usize,
    tables: usize,
    keys: Option<Keys>,
}

impl Screen {
    pub(super) fn open(live: bool) -> Screen {
        Screen { live, drawn: 0, tables: 0, keys: live.then(Keys::take).flatten() }
    }

    /// Whether tables are drawn over each other.
    pub(super) fn is_live(&self) -> bool {
        self.live
    }

    pub(super) fn show(&mut self, lines: &[String], out: &mut dyn Write) -> io::Result<()> {
        if self.live {
            let (rows, columns) = size();
            let mut lines: Vec<String> = lines.iter().map(|line| clipped(line, columns)).collect();
            let fits = rows.saturating_sub(2).max(1);
            if lines.len() > fits {
                let more = lines.len() - (fits - 1);
                lines.truncate(fits - 1);
                lines.push(clipped(&format!("... {more} lines more"), columns));
            }
            if self.keys.is_some() {
                lines.push(clipped("q ends", columns));
            }
            if self.drawn > 0 {
                // Up to the first line of the last table, and everything below is gone.
                write!(out, "\x1b[{}F\x1b[J", self.drawn)?;
            }
            for line in &lines {
                crate::output::line(out, format_args!("{line}"))?;
            }
            self.drawn = lines.len();
        } else {
            if self.tables > 0 {
                writeln!(out)?;
            }
            for line in lines {
                crate::output::line(out, format_args!("{line}"))?;
            }
        }
        self.tables += 1;
        out.flush()
    }

    /// Waits so long, and says whether somebody has seen enough: by a key, or by not reading any more.
    pub(super) fn wait(&self, at_most: Duration) -> bool {
        let deadline = Instant::now() + at_most;
        let (stdin, stdout) = (io::stdin(), io::stdout());
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            // A reader that leaves is told without being asked for.
            let mut files = vec![PollFd::new(&stdout, PollFlags::empty())];
            if self.keys.is_some() {
                files.push(PollFd::new(&stdin, PollFlags::IN));
            }
            let timeout = Timespec {
                tv_sec: i64::try_from(left.as_secs()).unwrap_or(i64::MAX),
                tv_nsec: i64::from(left.subsec_nanos()),
            };
            match poll(&mut files, Some(&timeout)) {
                Ok(0) => return false,
                Ok(_) => {}
                Err(rustix::io::Errno::INTR) => continue,
                Err(_) => return true,
            }
            if files[0].revents().intersects(PollFlags::ERR | PollFlags::HUP | PollFlags::NVAL) {
                return true;
            }
            if files.get(1).is_some_and(|keys| !keys.revents().is_empty()) && is_end(&stdin) {
                return true;
            }
        }
    }
}

/// Whether one of the keys that were struck ends it, or no more can come.
fn is_end(stdin: &io::Stdin) -> bool {
    const CTRL_C: u8 = 3;
    const CTRL_D: u8 = 4;
    let mut keys = [0; 64];
    match rustix::io::read(stdin, &mut keys) {
        Ok(0) => true,
        Ok(read) => keys[..read].iter().any(|key| [b'q', b'Q', CTRL_C, CTRL_D].contains(key)),
        Err(error) => error != rustix::io::Errno::INTR,
    }
}

/// A terminal that gives every key at once and shows none, until dropped. Ctrl-C is a key like another, so that
/// nothing ends before the terminal is as it was.
struct Keys(Termios);

impl Keys {
    fn take() -> Option<Keys> {
        let stdin = io::stdin();
        if !stdin.is_terminal() {
            return None;
        }
        let before = termios::tcgetattr(&stdin).ok()?;
        let mut now = before.clone();
        now.local_modes -= LocalModes::ICANON | LocalModes::ECHO | LocalModes::ISIG;
        termios::tcsetattr(&stdin, OptionalActions::Now, &now).ok()?;
        Some(Keys(before))
    }
}

impl Drop for Keys {
    fn drop(&mut self) {
        // A terminal that is gone has nothing to restore.
        let _ = termios::tcsetattr(io::stdin(), OptionalActions::Now, &self.0);
    }
}

/// Rows and columns, or what terminals usually have.
fn size() -> (usize, usize) {
    match termios::tcgetwinsize(io::stdout()) {
        Ok(size) if size.ws_row > 0 && size.ws_col > 0 => (size.ws_row.into(), size.ws_col.into()),
        _ => (24, 80),
    }
}

/// As much of the line as fits: one that goes on in the next row could not be drawn over.
fn clipped(line: &str, columns: usize) -> String {
    // Other letters may be wider than one column.
    let plain = |letter: char| if letter == ' ' || letter.is_ascii_graphic() { letter } else { '?' };
    line.chars().map(plain).take(columns).collect()
}
