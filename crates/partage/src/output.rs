//! Output to terminals and pipes: lines with escaped control characters, and a writer that tolerates closed pipes.

use std::fmt::{self, Write as _};
use std::io::{self, ErrorKind, Write};

/// A writer that drops its output once the reader has closed the pipe (`partage check … | head`), so that the exit
/// code stays that of the command.
pub(crate) struct PipeTolerantWriter<W> {
    inner: W,
    closed: bool,
}

impl<W> PipeTolerantWriter<W> {
    pub(crate) fn new(inner: W) -> PipeTolerantWriter<W> {
        PipeTolerantWriter { inner, closed: false }
    }

    fn ignore_broken_pipe<T>(&mut self, result: io::Result<T>, instead: T) -> io::Result<T> {
        match result {
            Err(error) if error.kind() == ErrorKind::BrokenPipe => {
                self.closed = true;
                Ok(instead)
            }
            other => other,
        }
    }
}

impl<W: Write> Write for PipeTolerantWriter<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.closed {
            return Ok(bytes.len());
        }
        let result = self.inner.write(bytes);
        self.ignore_broken_pipe(result, bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        if self.closed {
            return Ok(());
        }
        let result = self.inner.flush();
        self.ignore_broken_pipe(result, ())
    }
}

/// Writes one line of human-readable text. The text may contain input from other users: characters that would move the cursor,
/// break the line or change the writing direction are escaped as `\u{…}`.
pub(crate) fn write_line(out: &mut dyn Write, text: fmt::Arguments<'_>) -> io::Result<()> {
    let text = text.to_string();
    let mut plain = String::with_capacity(text.len() + 1);
    for letter in text.chars() {
        if is_invisible(letter) {
            // Writing to a String cannot fail.
            let _ = write!(plain, "{}", letter.escape_unicode());
        } else {
            plain.push(letter);
        }
    }
    plain.push('\n');
    out.write_all(plain.as_bytes())
}

/// Returns whether the character is a control, a direction mark, a line separator or has no width.
pub(crate) fn is_invisible(letter: char) -> bool {
    letter.is_control()
        || matches!(letter,
            '\u{61c}' | '\u{180e}' | '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2060}'..='\u{206f}'
            | '\u{feff}' | '\u{fff9}'..='\u{fffb}' | '\u{e0000}'..='\u{e007f}')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn control_characters_in_a_line_are_escaped() {
        let mut out = Vec::new();
        write_line(&mut out, format_args!("a\u{1b}[2J\nb\u{202e}\0 é 😀")).unwrap();
        assert_eq!(String::from_utf8(out).unwrap(), "a\\u{1b}[2J\\u{a}b\\u{202e}\\u{0} é 😀\n");
    }

    struct BrokenPipeWriter;

    impl Write for BrokenPipeWriter {
        fn write(&mut self, _: &[u8]) -> io::Result<usize> {
            Err(ErrorKind::BrokenPipe.into())
        }

        fn flush(&mut self) -> io::Result<()> {
            Err(ErrorKind::BrokenPipe.into())
        }
    }

    #[test]
    fn closed_pipe_is_not_an_error() {
        let mut out = PipeTolerantWriter::new(BrokenPipeWriter);
        assert!(out.write_all(b"text").is_ok() && out.flush().is_ok());
    }
}
