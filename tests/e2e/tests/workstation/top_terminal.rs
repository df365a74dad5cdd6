//! `partage top` on a terminal: the screen, keys and signals, and that the terminal is restored.
#![allow(unsafe_code)]

use rustix::termios::{LocalModes, Winsize, tcgetattr, tcsetwinsize};
use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::FromRawFd;
use std::process::{Child, Command, Stdio};
use std::ptr::null_mut;
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

/// How long a condition may take on a busy machine.
const TIMEOUT: Duration = Duration::from_secs(120);

fn size(rows: u16, columns: u16) -> Winsize {
    Winsize { ws_row: rows, ws_col: columns, ws_xpixel: 0, ws_ypixel: 0 }
}

/// A program on a terminal of its own.
struct TopTerminal {
    controller_end: File,
    terminal_end: File,
    child: Child,
    /// The modes before any change.
    before: LocalModes,
    reads: Receiver<Vec<u8>>,
    shown: String,
}

impl TopTerminal {
    fn spawn(state_dir: &tempfile::TempDir, columns: u16, variables: &[(&str, &str)]) -> TopTerminal {
        let (mut controller_end, mut terminal_end) = (0, 0);
        // SAFETY: the two pointers are to local variables; no name, modes or size are passed.
        let made = unsafe {
            libc::openpty(&mut controller_end, &mut terminal_end, null_mut(), null_mut(), null_mut())
        };
        assert_eq!(made, 0);
        // SAFETY: the descriptor was just opened, and has no other owner.
        let controller_end = unsafe { File::from_raw_fd(controller_end) };
        // SAFETY: the descriptor was just opened, and has no other owner.
        let terminal_end = unsafe { File::from_raw_fd(terminal_end) };
        tcsetwinsize(&terminal_end, size(24, columns)).unwrap();
        let mut command = Command::new(partage_e2e::partage());
        command.args(["top", "--interval", "100ms"]).env("PARTAGE_STATE_DIR", state_dir.path());
        command.env("LC_ALL", "C.UTF-8").env("TERM", "xterm").env_remove("NO_COLOR");
        command.envs(variables.iter().copied());
        command
            .stdin(terminal_end.try_clone().unwrap())
            .stdout(terminal_end.try_clone().unwrap())
            .stderr(Stdio::piped());
        let before = tcgetattr(&terminal_end).unwrap().local_modes;
        let child = command.spawn().unwrap();
        let (send, reads) = channel();
        let mut reader = controller_end.try_clone().unwrap();
        std::thread::spawn(move || {
            let mut bytes = [0; 4096];
            while let Ok(read) = reader.read(&mut bytes) {
                if read == 0 || send.send(bytes[..read].to_vec()).is_err() {
                    break;
                }
            }
        });
        TopTerminal { controller_end, terminal_end, child, before, reads, shown: String::new() }
    }

    /// Reads until the condition holds, and removes what was shown.
    fn read_until(&mut self, what: impl Fn(&str) -> bool) -> String {
        let deadline = Instant::now() + TIMEOUT;
        let mut bytes = Vec::new();
        while !what(&self.shown) {
            let left = deadline.saturating_duration_since(Instant::now());
            bytes.extend(
                self.reads.recv_timeout(left).unwrap_or_else(|_| panic!("not shown, only: {:?}", self.shown)),
            );
            // A character may arrive in two parts.
            if let Ok(text) = std::str::from_utf8(&bytes) {
                self.shown.push_str(text);
                bytes.clear();
            }
        }
        std::mem::take(&mut self.shown)
    }

    fn read_frame(&mut self, what: &str) -> String {
        self.read_until(|shown| shown.contains(what) && shown.ends_with("\x1b[J"))
    }

    fn modes(&self) -> LocalModes {
        tcgetattr(&self.terminal_end).unwrap().local_modes
    }

    fn type_keys(&mut self, keys: &str) {
        self.controller_end.write_all(keys.as_bytes()).unwrap();
    }

    /// Checks that it exits with 0, and that the terminal is restored.
    fn assert_restored(mut self) {
        self.read_until(|shown| shown.ends_with("\x1b[?25h\x1b[?1049l"));
        assert!(self.child.wait().unwrap().success());
        assert_eq!(self.modes(), self.before);
    }
}

/// Returns the rows of the last frame, without colors.
fn parse_rows(shown: &str) -> Vec<String> {
    let frame = shown.rsplit("\x1b[H").next().unwrap();
    let mut plain = String::new();
    let mut letters = frame.chars();
    while let Some(letter) = letters.next() {
        match letter {
            // The rest of the command may not have been read yet.
            '\x1b' => while letters.next().is_some_and(|letter| !letter.is_ascii_alphabetic()) {},
            '\r' => {}
            other => plain.push(other),
        }
    }
    plain.split('\n').map(str::to_string).collect()
}

impl TopTerminal {
    fn start(state_dir: &tempfile::TempDir, columns: u16) -> TopTerminal {
        let mut terminal = TopTerminal::spawn(state_dir, columns, &[]);
        // Keys are read only after the daemon's first response.
        let shown = terminal.read_frame("sorted by name");
        assert!(shown.starts_with("\x1b[?1049h\x1b[?25l"), "{shown:?}");
        assert_ne!(terminal.modes(), terminal.before);
        terminal
    }
}

#[test]
fn terminal_is_restored_on_every_exit() {
    let state_dir = tempfile::tempdir().unwrap();
    for key in ["q", "\u{3}", "\u{1b}"] {
        let mut terminal = TopTerminal::start(&state_dir, 100);
        terminal.type_keys(key);
        terminal.assert_restored();
    }
    for signal in [libc::SIGTERM, libc::SIGINT, libc::SIGHUP] {
        let terminal = TopTerminal::start(&state_dir, 100);
        // SAFETY: the child was not waited for, so its process id is still valid.
        assert_eq!(unsafe { libc::kill(i32::try_from(terminal.child.id()).unwrap(), signal) }, 0);
        terminal.assert_restored();
    }
}

#[test]
fn no_color_disables_colors_and_bold_text() {
    let state_dir = tempfile::tempdir().unwrap();
    let is_colored = |variables: &[(&str, &str)]| {
        let mut terminal = TopTerminal::spawn(&state_dir, 100, variables);
        let shown = terminal.read_frame("sorted by name");
        terminal.type_keys("q");
        terminal.assert_restored();
        ["\x1b[1m", "\x1b[2m", "\x1b[32m"].iter().any(|style| shown.contains(style))
    };
    assert!(is_colored(&[]) && is_colored(&[("NO_COLOR", "")]));
    assert!(!is_colored(&[("NO_COLOR", "1")]));
}

#[test]
fn keys_sort_and_narrow_windows_are_handled() {
    let state_dir = tempfile::tempdir().unwrap();
    let mut terminal = TopTerminal::start(&state_dir, 100);
    // An arrow key starts with Esc, but is not Esc, and has no function.
    terminal.type_keys("\u{1b}[Am");
    terminal.read_frame("sorted by memory");
    terminal.type_keys("tr");
    terminal.read_frame("sorted by throttled, reversed");
    terminal.type_keys("?");
    terminal.read_frame("sort by throttled time");
    terminal.type_keys("?");
    tcsetwinsize(&terminal.controller_end, size(8, 40)).unwrap();
    // SAFETY: the call passes no pointers, and the child has not been waited for, so the pid is its own. The terminal is not the child's controlling terminal, so the kernel does not send this signal.
    assert_eq!(unsafe { libc::kill(i32::try_from(terminal.child.id()).unwrap(), libc::SIGWINCH) }, 0);
    // The key and the size may be handled in any order.
    let narrow = terminal.read_until(|shown| {
        let rows = parse_rows(shown);
        let is_table = rows.iter().any(|row| row.starts_with("GPU  MEMORY") && row.contains("HEALTH"));
        shown.ends_with("\x1b[J") && is_table && rows.iter().all(|row| row.chars().count() <= 40)
    });
    let rows = parse_rows(&narrow);
    assert!(rows.len() <= 8, "{rows:?}");
    terminal.type_keys("q");
    terminal.assert_restored();
}
