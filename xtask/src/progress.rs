//! What a person sees while they wait.

use std::io::Write;
use std::time::Instant;

/// One line per program. A reader who went away does not stop the build.
pub(crate) struct Progress<'a> {
    out: &'a mut dyn Write,
}

impl<'a> Progress<'a> {
    pub(crate) fn new(out: &'a mut dyn Write) -> Self {
        Self { out }
    }

    pub(crate) fn line(&mut self, text: &str) {
        let _ = writeln!(self.out, "{text}");
        let _ = self.out.flush();
    }

    /// Says what begins, does it, and says how long it took and what came of it.
    pub(crate) fn step<T, E>(
        &mut self,
        what: &str,
        work: impl FnOnce() -> Result<T, E>,
        came: impl FnOnce(&T) -> String,
    ) -> Result<T, E> {
        let _ = write!(self.out, "{what:<46}");
        let _ = self.out.flush();
        let start = Instant::now();
        let done = work();
        let seconds = start.elapsed().as_secs();
        let came = done.as_ref().map_or_else(|_| "not done".to_string(), came);
        self.line(format!(" {seconds:>4} s  {came}").trim_end());
        done
    }
}

/// A size for people.
pub(crate) fn mebibytes(bytes: u64) -> String {
    format!("{:>4} MiB", bytes.div_ceil(1 << 20))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_per_step() {
        let mut said = Vec::new();
        let mut progress = Progress::new(&mut said);
        let _ = progress.step("etcd v3.6.16", || Ok::<_, ()>(5 << 20), |size| mebibytes(*size));
        let _ = progress.step("runc v1.4.3", || Err::<u64, _>(()), |size| mebibytes(*size));
        let said = String::from_utf8(said).unwrap();
        assert_eq!(
            said,
            format!("{:<46}    0 s     5 MiB\n{:<46}    0 s  not done\n", "etcd v3.6.16", "runc v1.4.3")
        );
    }
}
