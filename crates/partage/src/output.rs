//! Writing to people and pipes.

use std::fmt::{self, Write as _};
use std::io::{self, ErrorKind, Write};

/// A writer whose reader may leave early (`partage check … | head`): what is left to say is then dropped, and
/// the exit code stays what it is.
pub(crate) struct Patient<W> {
    inner: W,
    left: bool,
}

impl<W> Patient<W> {
    pub(crate) fn new(inner: W) -> Patient<W> {
        Patient { inner, left: false }
    }

    fn forgive<T>(&mut self, result: io::Result<T>, instead: T) -> io::Result<T> {
        match result {
            Err(error) if error.kind() == ErrorKind::BrokenPipe => {
                self.left = true;
                Ok(instead)
            }
            other => other,
        }
    }
}

impl<W: Write> Write for Patient<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.left {
            return Ok(bytes.len());
        }
        let result = self.inner.write(bytes);
        self.forgive(result, bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        if self.left {
            return Ok(());
        }
        let result = self.inner.flush();
        self.forgive(result, ())
    }
}

/// Writes one line for people. It may quote anybody: what would move the cursor, break the line or turn its
/// direction is shown as `\u{…}` instead.
pub(crate) fn line(out: &mut dyn Write, text: fmt::Arguments<'_>) -> io::Result<()> {
    let text = text.to_string();
    let mut plain = String::with_capacity(text.len() + 1);
    for letter in text.chars() {
        if is_unseen(letter) {
            // A String takes everything.
            let _ = write!(plain, "{}", letter.escape_unicode());
        } else {
            plain.push(letter);
        }
    }
    plain.push('\n');
    out.write_all(plain.as_bytes())
}

/// Controls, marks of direction, line separators and letters without width.
pub(crate) fn is_unseen(letter: char) -> bool {
    letter.is_control()
        || matches!(letter,
            '\u{61c}' | '\u{180e}' | '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2060}'..='\u{206f}'
            | '\u{feff}' | '\u{fff9}'..='\u{fffb}' | '\u{e0000}'..='\u{e007f}')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_stays_one_plain_line() {
        let mut out = Vec::new();
        line(&mut out, format_args!("a\u{1b}[2J\nb\u{202e}\0 é 😀")).unwrap();
        assert_eq!(String::from_utf8(out).unwrap(), "a\\u{1b}[2J\\u{a}b\\u{202e}\\u{0} é 😀\n");
    }

    struct Gone;

    impl Write for Gone {
        fn write(&mut self, _: &[u8]) -> io::Result<usize> {
            Err(ErrorKind::BrokenPipe.into())
        }

        fn flush(&mut self) -> io::Result<()> {
            Err(ErrorKind::BrokenPipe.into())
        }
    }

    #[test]
    fn a_reader_who_left_is_no_error() {
        let mut out = Patient::new(Gone);
        assert!(out.write_all(b"text").is_ok() && out.flush().is_ok());
    }
}
