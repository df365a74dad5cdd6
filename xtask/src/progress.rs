//! Prints progress for users.

use std::io::Write;
use std::time::Instant;

/// Prints one line per step. A reader that has gone does not stop the build.
pub(crate) struct ProgressLines<'a> {
    out: &'a mut dyn Write,
}

impl<'a> ProgressLines<'a> {
    pub(crate) fn new(out: &'a mut dyn Write) -> Self {
        Self { out }
    }

    pub(crate) fn line(&mut self, text: &str) {
        let _ = writeln!(self.out, "{text}");
        let _ = self.out.flush();
    }

    /// Prints the step, runs it, and prints its duration and result.
    pub(crate) fn step<T, E>(
        &mut self,
        what: &str,
        work: impl FnOnce() -> Result<T, E>,
        summary: impl FnOnce(&T) -> String,
    ) -> Result<T, E> {
        let _ = write!(self.out, "{what:<46}");
        let _ = self.out.flush();
        let start = Instant::now();
        let done = work();
        let seconds = start.elapsed().as_secs();
        let summary = done.as_ref().map_or_else(|_| "failed".to_string(), summary);
        self.line(format!(" {seconds:>4} s  {summary}").trim_end());
        done
    }
}

/// Formats a size in MiB.
pub(crate) fn format_mebibytes(bytes: u64) -> String {
    format!("{:>4} MiB", bytes.div_ceil(1 << 20))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_step_prints_one_line() {
        let mut message = Vec::new();
        let mut progress = ProgressLines::new(&mut message);
        let _ = progress.step("etcd v3.6.16", || Ok::<_, ()>(5 << 20), |size| format_mebibytes(*size));
        let _ = progress.step("runc v1.4.3", || Err::<u64, _>(()), |size| format_mebibytes(*size));
        let message = String::from_utf8(message).unwrap();
        assert_eq!(
            message,
            format!("{:<46}    0 s     5 MiB\n{:<46}    0 s  failed\n", "etcd v3.6.16", "runc v1.4.3")
        );
    }
}
