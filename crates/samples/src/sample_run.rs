//! Common parts of the samples: termination, output, and back-to-back kernels.

use clap::Args;
use partage_core::quantity::Quantity;
use partage_samples::cuda_driver::{CudaDriverError, GpuContext, KernelEvent, SpinKernel};
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::flag;
use std::collections::VecDeque;
use std::fmt;
use std::io::{self, ErrorKind, Write};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// The duration of a kernel: short compared to a second, long compared to the launch call.
pub(crate) const KERNEL_DURATION: Duration = Duration::from_millis(4);
/// The number of kernels that are launched ahead, so that the GPU never waits for a launch.
const MAX_QUEUED_KERNELS: usize = 4;
/// How often a pause checks whether the sample is to end.
const POLL_INTERVAL: Duration = Duration::from_millis(20);

/// Command-line options of all samples.
#[derive(Args)]
pub(crate) struct CommonArgs {
    /// Ordinal of the GPU among those visible to the program
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub(crate) gpu: u32,

    /// Stop after this many seconds [default: run until Ctrl-C]
    #[arg(long, value_name = "N", value_parser = seconds)]
    seconds: Option<Duration>,
}

/// Parses a positive number of seconds, which may have decimals.
pub(crate) fn seconds(text: &str) -> Result<Duration, String> {
    let invalid = || format!("invalid number of seconds \"{text}\": use a positive number such as 30 or 0.5");
    let seconds = text.parse::<f64>().map_err(|_| invalid())?;
    match Duration::try_from_secs_f64(seconds) {
        Ok(duration) if !duration.is_zero() => Ok(duration),
        _ => Err(invalid()),
    }
}

/// Parses a positive amount of memory and returns bytes.
pub(crate) fn memory(text: &str) -> Result<u64, String> {
    let bytes = text.parse::<Quantity>().and_then(Quantity::to_units).map_err(|error| error.to_string())?;
    if bytes == 0 {
        Err("the amount of memory must be positive: use an amount such as 4Gi".to_string())
    } else {
        Ok(bytes)
    }
}

/// Formats bytes as `4.0 GiB`.
pub(crate) fn gib(bytes: u64) -> String {
    format!("{:.1} GiB", bytes as f64 / (1u64 << 30) as f64)
}

/// Why a sample ended early.
#[derive(Debug, thiserror::Error)]
pub(crate) enum SampleError {
    /// The reader closed the output.
    #[error("the output was closed")]
    OutputClosed,
    /// The GPU cannot be used, or the output cannot be written.
    #[error("{0}")]
    Failed(String),
}

impl From<CudaDriverError> for SampleError {
    fn from(error: CudaDriverError) -> Self {
        SampleError::Failed(error.to_string())
    }
}

impl From<io::Error> for SampleError {
    fn from(error: io::Error) -> Self {
        match error.kind() {
            ErrorKind::BrokenPipe => SampleError::OutputClosed,
            _ => SampleError::Failed(format!("cannot write the output: {error}")),
        }
    }
}

/// The state of a running sample.
pub(crate) struct SampleRun<'a> {
    out: &'a mut dyn Write,
    stop: Arc<AtomicBool>,
    begun: Instant,
    seconds: Option<Duration>,
    /// The GPU time of its completed kernels.
    computed: Duration,
}

impl<'a> SampleRun<'a> {
    /// Installs signal handlers and starts the clock. The first SIGINT or SIGTERM ends the sample, the second one the
    /// process.
    pub(crate) fn begin(common: &CommonArgs, out: &'a mut dyn Write) -> io::Result<Self> {
        let stop = Arc::new(AtomicBool::new(false));
        for signal in [SIGINT, SIGTERM] {
            flag::register_conditional_shutdown(signal, 128 + signal, Arc::clone(&stop))?;
            flag::register(signal, Arc::clone(&stop))?;
        }
        Ok(Self { out, stop, begun: Instant::now(), seconds: common.seconds, computed: Duration::ZERO })
    }

    /// Returns whether the sample is to end, because of a signal or its time limit.
    pub(crate) fn is_over(&self) -> bool {
        self.stop.load(Ordering::Relaxed) || self.seconds.is_some_and(|seconds| self.elapsed() >= seconds)
    }

    /// Returns the time since the start.
    pub(crate) fn elapsed(&self) -> Duration {
        self.begun.elapsed()
    }

    /// Returns the GPU time of its completed kernels.
    pub(crate) fn computed(&self) -> Duration {
        self.computed
    }

    /// Returns the share of the GPU's time since the start.
    pub(crate) fn share(&self) -> TimeShare {
        TimeShare { computed: self.computed, of: self.elapsed() }
    }

    /// Prints a line and flushes it, so that an observer sees it immediately.
    pub(crate) fn print_line(&mut self, line: fmt::Arguments<'_>) -> Result<(), SampleError> {
        self.out.write_fmt(line)?;
        self.out.write_all(b"\n")?;
        Ok(self.out.flush()?)
    }

    /// Prints the last line.
    pub(crate) fn print_summary(&mut self, summary: &str) -> Result<(), SampleError> {
        let lasted = self.elapsed().as_secs_f64();
        self.print_line(format_args!("ended after {lasted:.1} s: {summary}"))
    }

    /// Leaves the GPU idle for this time, or until the sample is to end.
    pub(crate) fn pause(&self, time: Duration) {
        let until = Instant::now() + time;
        while !self.is_over() {
            match until.checked_duration_since(Instant::now()) {
                Some(left) if !left.is_zero() => std::thread::sleep(left.min(POLL_INTERVAL)),
                _ => return,
            }
        }
    }
}

/// A share of a GPU's time, formatted as `31 % of the GPU`.
pub(crate) struct TimeShare {
    pub(crate) computed: Duration,
    pub(crate) of: Duration,
}

impl fmt::Display for TimeShare {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let part = self.computed.as_secs_f64() / self.of.as_secs_f64().max(f64::MIN_POSITIVE);
        // The two clocks may differ slightly: a little over 100 % is shown as 100 %.
        write!(f, "{:.0} % of the GPU", (100.0 * part).min(100.0))
    }
}

/// Runs kernels back to back.
pub(crate) struct KernelQueue {
    kernel: SpinKernel,
    launched: VecDeque<KernelEvent>,
    idle: Vec<KernelEvent>,
}

impl KernelQueue {
    pub(crate) fn new(gpu: &GpuContext) -> Result<Self, CudaDriverError> {
        let kernel = gpu.kernel(KERNEL_DURATION.as_micros() as u32)?;
        Ok(Self { kernel, launched: VecDeque::new(), idle: Vec::new() })
    }

    /// Waits for the next kernel and keeps further ones launched ahead, at most `wanted` including the next one.
    /// Returns false if the sample is to end.
    pub(crate) fn step(&mut self, run: &mut SampleRun<'_>, wanted: u64) -> Result<bool, CudaDriverError> {
        while self.launched.len()
            < MAX_QUEUED_KERNELS.min(usize::try_from(wanted).unwrap_or(MAX_QUEUED_KERNELS))
        {
            let done = match self.idle.pop() {
                Some(done) => self.kernel.launch_with_event(&done).map(|()| done)?,
                None => self.kernel.launch()?,
            };
            self.launched.push_back(done);
        }
        if let Some(done) = self.launched.pop_front() {
            done.wait()?;
            self.idle.push(done);
            run.computed += KERNEL_DURATION;
        }
        Ok(!run.is_over())
    }

    /// Computes for this GPU time. Returns false if the sample is to end.
    pub(crate) fn compute(
        &mut self,
        run: &mut SampleRun<'_>,
        time: Duration,
    ) -> Result<bool, CudaDriverError> {
        let kernels = (time.as_micros() / KERNEL_DURATION.as_micros()) as u64;
        for left in (1..=kernels).rev() {
            if !self.step(run, left)? {
                return Ok(false);
            }
        }
        Ok(!run.is_over())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_and_seconds_are_parsed() {
        assert_eq!(memory("6Gi"), Ok(6 << 30));
        assert!(memory("5gb").unwrap_err().contains("ends in \"gb\""));
        assert!(memory("0").is_err() && memory("-1Gi").is_err());
        assert_eq!(seconds("0.5"), Ok(Duration::from_millis(500)));
        for wrong in ["0", "-1", "soon", "inf", "NaN", "1e300"] {
            assert!(seconds(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn time_share_is_a_percentage() {
        let share = |computed, of| {
            TimeShare { computed: Duration::from_millis(computed), of: Duration::from_millis(of) }.to_string()
        };
        assert_eq!(share(310, 1000), "31 % of the GPU");
        assert_eq!(share(1004, 1000), "100 % of the GPU");
        assert_eq!(share(0, 0), "0 % of the GPU");
    }
}
