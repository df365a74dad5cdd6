//! `partage top` on a terminal: what is drawn, what keys and signals do, and that the terminal is given back.
#![allow(unsafe_code)]

use rustix::termios::{LocalModes, Winsize, tcgetattr, tcsetwinsize};
use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::FromRawFd;
use std::process::{Child, Command, Stdio};
use std::ptr::null_mut;
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

/// Nothing here takes long; on a busy machine everything may.
const PATIENCE: Duration = Duration::from_secs(120);

fn size(rows: u16, columns: u16) -> Winsize {
    Winsize { ws_row: rows, ws_col: columns, ws_xpixel: 0, ws_ypixel: 0 }
}

/// A program on a terminal of its own.
struct Terminal {
    ours: File,
    theirs: File,
    child: Child,
    /// The modes before anybody changed them.
    before: LocalModes,
    reads: Receiver<Vec<u8>>,
    shown: String,
}

impl Terminal {
    fn run(home: &tempfile::TempDir, columns: u16) -> Terminal {
        let (mut ours, mut theirs) = (0, 0);
        // SAFETY: two variables for the two ends; no name, modes or size are given.
        let made = unsafe { libc::openpty(&mut ours, &mut theirs, null_mut(), null_mut(), null_mut()) };
        assert_eq!(made, 0);
        // SAFETY: it was opened just now, and is nobody else's.
        let ours = unsafe { File::from_raw_fd(ours) };
        // SAFETY: likewise.
        let theirs = unsafe { File::from_raw_fd(theirs) };
        tcsetwinsize(&theirs, size(24, columns)).unwrap();
        let mut command = Command::new(partage_e2e::partage());
        command.args(["top", "--interval", "100ms"]).env("PARTAGE_HOME", home.path());
        command.env("LC_ALL", "C.UTF-8").env("TERM", "xterm").env_remove("NO_COLOR");
        command.stdin(theirs.try_clone().unwrap()).stdout(theirs.try_clone().unwrap()).stderr(Stdio::piped());
        let before = tcgetattr(&theirs).unwrap().local_modes;
        let child = command.spawn().unwrap();
        let (send, reads) = channel();
        let mut reader = ours.try_clone().unwrap();
        std::thread::spawn(move || {
            let mut bytes = [0; 4096];
            while let Ok(read) = reader.read(&mut bytes) {
                if read == 0 || send.send(bytes[..read].to_vec()).is_err() {
                    break;
                }
            }
        });
        Terminal { ours, theirs, child, before, reads, shown: String::new() }
    }

    /// Reads on until it is there, and forgets what was shown before.
    fn until(&mut self, what: impl Fn(&str) -> bool) -> String {
        let deadline = Instant::now() + PATIENCE;
        let mut bytes = Vec::new();
        while !what(&self.shown) {
            let left = deadline.saturating_duration_since(Instant::now());
            bytes.extend(self.reads.recv_timeout(left).unwrap_or_else(|_| panic!("only: {:?}", self.shown)));
            // A letter may come in two halves.
            if let Ok(text) = std::str::from_utf8(&bytes) {
                self.shown.push_str(text);
                bytes.clear();
            }
        }
        std::mem::take(&mut self.shown)
    }

    fn frame(&mut self, what: &str) -> String {
        self.until(|shown| shown.contains(what) && shown.ends_with("\x1b[J"))
    }

    fn modes(&self) -> LocalModes {
        tcgetattr(&self.theirs).unwrap().local_modes
    }

    fn strike(&mut self, keys: &str) {
        self.ours.write_all(keys.as_bytes()).unwrap();
    }

    /// It ends well, and the terminal is as it was.
    fn ended(mut self) {
        self.until(|shown| shown.ends_with("\x1b[?25h\x1b[?1049l"));
        assert!(self.child.wait().unwrap().success());
        assert_eq!(self.modes(), self.before);
    }
}

/// The rows of the last frame, without colours.
fn rows(shown: &str) -> Vec<String> {
    let frame = shown.rsplit("\x1b[H").next().unwrap();
    let mut plain = String::new();
    let mut letters = frame.chars();
    while let Some(letter) = letters.next() {
        match letter {
            // The rest of it may not have been read yet.
            '\x1b' => while letters.next().is_some_and(|letter| !letter.is_ascii_alphabetic()) {},
            '\r' => {}
            other => plain.push(other),
        }
    }
    plain.split('\n').map(str::to_string).collect()
}

impl Terminal {
    fn begun(home: &tempfile::TempDir, columns: u16) -> Terminal {
        let mut terminal = Terminal::run(home, columns);
        // Its keys are taken only once the keeper has answered.
        let shown = terminal.frame("sorted by name");
        assert!(shown.starts_with("\x1b[?1049h\x1b[?25l"), "{shown:?}");
        assert_ne!(terminal.modes(), terminal.before);
        terminal
    }
}

#[test]
fn every_way_to_end_it_gives_the_terminal_back() {
    let home = tempfile::tempdir().unwrap();
    for key in ["q", "\u{3}", "\u{1b}"] {
        let mut terminal = Terminal::begun(&home, 100);
        terminal.strike(key);
        terminal.ended();
    }
    for signal in [libc::SIGTERM, libc::SIGINT, libc::SIGHUP] {
        let terminal = Terminal::begun(&home, 100);
        // SAFETY: a child that was not waited for is still ours.
        assert_eq!(unsafe { libc::kill(i32::try_from(terminal.child.id()).unwrap(), signal) }, 0);
        terminal.ended();
    }
}

#[test]
fn keys_sort_and_the_window_may_become_narrow() {
    let home = tempfile::tempdir().unwrap();
    let mut terminal = Terminal::begun(&home, 100);
    // An arrow is no Esc, and means nothing.
    terminal.strike("\u{1b}[Am");
    terminal.frame("sorted by memory");
    terminal.strike("tr");
    terminal.frame("sorted by throttled, reversed");
    terminal.strike("?");
    terminal.frame("sort by time kept waiting");
    terminal.strike("?");
    tcsetwinsize(&terminal.ours, size(8, 40)).unwrap();
    // SAFETY: as above. The terminal is not the child's controlling one, or the kernel would tell it.
    assert_eq!(unsafe { libc::kill(i32::try_from(terminal.child.id()).unwrap(), libc::SIGWINCH) }, 0);
    // The key and the size come in any order.
    let narrow = terminal.until(|shown| {
        let rows = rows(shown);
        let is_table = rows.iter().any(|row| row.starts_with("GPU  MEMORY") && row.contains("HEALTH"));
        shown.ends_with("\x1b[J") && is_table && rows.iter().all(|row| row.chars().count() <= 40)
    });
    let rows = rows(&narrow);
    assert!(rows.len() <= 8, "{rows:?}");
    terminal.strike("q");
    terminal.ended();
}
