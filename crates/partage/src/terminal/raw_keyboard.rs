//! Reads single keys from the terminal.

use super::timespec;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::termios::{self, LocalModes, OptionalActions, Termios};
use std::collections::VecDeque;
use std::io::{self, IsTerminal};
use std::time::Duration;

const ESCAPE: char = '\u{1b}';
const CTRL_C: char = '\u{3}';
const CTRL_D: char = '\u{4}';

/// Time to wait after an escape character for the rest of its sequence, which may arrive late over a slow connection.
const ESCAPE_SEQUENCE_TIMEOUT: Duration = Duration::from_millis(50);

/// The modes of the terminal before it was switched to unbuffered input without echo; restored when dropped.
///
/// Ctrl-C arrives as a key and not as a signal, so that the terminal is restored before the process exits.
pub(super) struct RawKeyboard(Termios);

impl RawKeyboard {
    /// Changes the modes of standard input. Returns `None` if it is not a terminal.
    pub(super) fn enable() -> Option<RawKeyboard> {
        let stdin = io::stdin();
        if !stdin.is_terminal() {
            return None;
        }
        let before = termios::tcgetattr(&stdin).ok()?;
        let mut raw = before.clone();
        raw.local_modes -= LocalModes::ICANON | LocalModes::ECHO | LocalModes::ISIG;
        termios::tcsetattr(&stdin, OptionalActions::Now, &raw).ok()?;
        Some(RawKeyboard(before))
    }
}

impl Drop for RawKeyboard {
    fn drop(&mut self) {
        // An error means that the terminal is gone: there is nothing to restore.
        let _ = termios::tcsetattr(io::stdin(), OptionalActions::Now, &self.0);
    }
}

/// Returns whether this key quits a live view.
pub(super) fn is_quit_key(key: char) -> bool {
    matches!(key, 'q' | 'Q' | ESCAPE | CTRL_C | CTRL_D)
}

/// Reads the keys that were pressed. Returns `false` at the end of the input.
pub(super) fn read_keys(into: &mut VecDeque<char>) -> bool {
    let stdin = io::stdin();
    let mut bytes = [0; 64];
    let read = match rustix::io::read(&stdin, &mut bytes) {
        Ok(0) => return false,
        Ok(read) => read,
        Err(error) => return error == rustix::io::Errno::INTR,
    };
    let mut all = bytes[..read].to_vec();
    if all.last() == Some(&0x1b) && has_more_input(&stdin) {
        let mut rest = [0; 16];
        let read = rustix::io::read(&stdin, &mut rest).unwrap_or(0);
        all.extend(&rest[..read]);
    }
    parse_keys(&all, into);
    true
}

fn has_more_input(stdin: &io::Stdin) -> bool {
    let mut files = [PollFd::new(stdin, PollFlags::IN)];
    poll(&mut files, Some(&timespec(ESCAPE_SEQUENCE_TIMEOUT))).is_ok_and(|ready| ready > 0)
}

/// Extracts ASCII keys. Escape sequences, such as those of arrow keys, and other characters are skipped.
fn parse_keys(mut bytes: &[u8], into: &mut VecDeque<char>) {
    while let [first, rest @ ..] = bytes {
        bytes = rest;
        match (first, rest) {
            (0x1b, [b'[', after @ ..]) => {
                let end = after.iter().position(|byte| (0x40..=0x7e).contains(byte));
                bytes = &after[end.map_or(after.len(), |end| end + 1)..];
            }
            (0x1b, [b'O', _, after @ ..]) => bytes = after,
            (byte, _) if byte.is_ascii() => into.push_back(char::from(*byte)),
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arrow_key_is_not_the_escape_key() {
        let parsed = |bytes: &[u8]| {
            let mut keys = VecDeque::new();
            parse_keys(bytes, &mut keys);
            keys.into_iter().collect::<String>()
        };
        assert_eq!(parsed(b"mr"), "mr");
        assert_eq!(parsed(b"\x1b"), "\x1b");
        assert_eq!(parsed(b"\x1b[Am\x1b[15~c\x1bOPn\x1b"), "mcn\x1b");
        assert_eq!(parsed(b"\x1b[1;5"), "");
        assert_eq!(parsed("é?".as_bytes()), "?");
        assert!(is_quit_key('q') && is_quit_key('\u{1b}') && is_quit_key('\u{3}') && !is_quit_key('m'));
    }
}
