//! Writing to people and pipes.

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

#[cfg(test)]
mod tests {
    use super::*;

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
