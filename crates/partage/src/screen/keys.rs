//! The keys of a terminal.

use super::timespec;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::termios::{self, LocalModes, OptionalActions, Termios};
use std::collections::VecDeque;
use std::io::{self, IsTerminal};
use std::time::Duration;

const ESCAPE: char = '\u{1b}';
const CTRL_C: char = '\u{3}';
const CTRL_D: char = '\u{4}';

/// How long after an escape the rest of a longer key may take to come, from far away too.
const REST: Duration = Duration::from_millis(50);

/// A terminal that gives every key at once and shows none, until dropped. Ctrl-C is a key like another, so that
/// nothing ends before the terminal is as it was.
pub(super) struct Keys(Termios);

impl Keys {
    pub(super) fn take() -> Option<Keys> {
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

/// Whether this key says that somebody has seen enough.
pub(super) fn is_end(key: char) -> bool {
    matches!(key, 'q' | 'Q' | ESCAPE | CTRL_C | CTRL_D)
}

/// Takes what was struck; says whether more can come.
pub(super) fn read(into: &mut VecDeque<char>) -> bool {
    let stdin = io::stdin();
    let mut bytes = [0; 64];
    let read = match rustix::io::read(&stdin, &mut bytes) {
        Ok(0) => return false,
        Ok(read) => read,
        Err(error) => return error == rustix::io::Errno::INTR,
    };
    let mut all = bytes[..read].to_vec();
    if all.last() == Some(&0x1b) && more_comes(&stdin) {
        let mut rest = [0; 16];
        let read = rustix::io::read(&stdin, &mut rest).unwrap_or(0);
        all.extend(&rest[..read]);
    }
    keys(&all, into);
    true
}

fn more_comes(stdin: &io::Stdin) -> bool {
    let mut files = [PollFd::new(stdin, PollFlags::IN)];
    poll(&mut files, Some(&timespec(REST))).is_ok_and(|ready| ready > 0)
}

/// The keys that have a letter. Those that send more than that, like arrows, mean nothing here.
fn keys(mut bytes: &[u8], into: &mut VecDeque<char>) {
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
    fn an_arrow_is_no_escape() {
        let struck = |bytes: &[u8]| {
            let mut into = VecDeque::new();
            keys(bytes, &mut into);
            into.into_iter().collect::<String>()
        };
        assert_eq!(struck(b"mr"), "mr");
        assert_eq!(struck(b"\x1b"), "\x1b");
        assert_eq!(struck(b"\x1b[Am\x1b[15~c\x1bOPn\x1b"), "mcn\x1b");
        assert_eq!(struck(b"\x1b[1;5"), "");
        assert_eq!(struck("é?".as_bytes()), "?");
        assert!(is_end('q') && is_end('\u{1b}') && is_end('\u{3}') && !is_end('m'));
    }
}
