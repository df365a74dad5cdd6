//! What the samples have in common: when to end, what to say, kernels back to back.

use clap::Args;
use partage_core::quantity::Quantity;
use partage_samples::driver::{Done, DriverError, Gpu, Kernel};
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::flag;
use std::collections::VecDeque;
use std::fmt;
use std::io::{self, ErrorKind, Write};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// How long a kernel takes: short beside a turn of a second, long beside the call that launches it.
pub(crate) const KERNEL: Duration = Duration::from_millis(4);
/// Kernels on their way: the GPU has its next one before it needs it.
const AHEAD: usize = 4;
/// How often somebody who waits looks whether it is over.
const GLANCE: Duration = Duration::from_millis(20);

/// What every sample can be told.
#[derive(Args)]
pub(crate) struct Usual {
    /// The GPU's number among those the program sees
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub(crate) gpu: u32,

    /// End after so many seconds [default: go on until Ctrl-C]
    #[arg(long, value_name = "N", value_parser = seconds)]
    seconds: Option<Duration>,
}

/// Seconds, also half ones.
pub(crate) fn seconds(text: &str) -> Result<Duration, String> {
    let wrong = || format!("\"{text}\" is no number of seconds: use one above 0, like 30 or 0.5");
    let seconds = text.parse::<f64>().map_err(|_| wrong())?;
    match Duration::try_from_secs_f64(seconds) {
        Ok(duration) if !duration.is_zero() => Ok(duration),
        _ => Err(wrong()),
    }
}

/// An amount of memory, in bytes.
pub(crate) fn memory(text: &str) -> Result<u64, String> {
    let bytes = text.parse::<Quantity>().and_then(Quantity::to_units).map_err(|error| error.to_string())?;
    if bytes == 0 { Err("nothing is no amount of memory: use one like 4Gi".to_string()) } else { Ok(bytes) }
}

/// `4.0 GiB`
pub(crate) fn gib(bytes: u64) -> String {
    format!("{:.1} GiB", bytes as f64 / (1u64 << 30) as f64)
}

/// Why a sample ends that was not told to.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Ended {
    /// Nobody reads what it says.
    #[error("nobody reads")]
    Unheard,
    /// It cannot go on.
    #[error("{0}")]
    Failed(String),
}

impl From<DriverError> for Ended {
    fn from(error: DriverError) -> Self {
        Ended::Failed(error.to_string())
    }
}

impl From<io::Error> for Ended {
    fn from(error: io::Error) -> Self {
        match error.kind() {
            ErrorKind::BrokenPipe => Ended::Unheard,
            _ => Ended::Failed(format!("the output cannot be written: {error}")),
        }
    }
}

/// A sample on its way.
pub(crate) struct Act<'a> {
    out: &'a mut dyn Write,
    stop: Arc<AtomicBool>,
    begun: Instant,
    seconds: Option<Duration>,
    /// The GPU's time that its kernels took.
    computed: Duration,
}

impl<'a> Act<'a> {
    /// From here on a signal is a wish to end, and the second one ends the program whatever it waits for.
    pub(crate) fn begin(usual: &Usual, out: &'a mut dyn Write) -> io::Result<Self> {
        let stop = Arc::new(AtomicBool::new(false));
        for signal in [SIGINT, SIGTERM] {
            flag::register_conditional_shutdown(signal, 128 + signal, Arc::clone(&stop))?;
            flag::register(signal, Arc::clone(&stop))?;
        }
        Ok(Self { out, stop, begun: Instant::now(), seconds: usual.seconds, computed: Duration::ZERO })
    }

    /// Whether it is to end.
    pub(crate) fn is_over(&self) -> bool {
        self.stop.load(Ordering::Relaxed) || self.seconds.is_some_and(|seconds| self.lasted() >= seconds)
    }

    /// How long it goes on already.
    pub(crate) fn lasted(&self) -> Duration {
        self.begun.elapsed()
    }

    /// The GPU's time that its kernels took so far.
    pub(crate) fn computed(&self) -> Duration {
        self.computed
    }

    /// The part of the GPU that it had all in all.
    pub(crate) fn share(&self) -> Share {
        Share { computed: self.computed, of: self.lasted() }
    }

    /// Says a line, at once: somebody may be looking on.
    pub(crate) fn say(&mut self, words: fmt::Arguments<'_>) -> Result<(), Ended> {
        self.out.write_fmt(words)?;
        self.out.write_all(b"\n")?;
        Ok(self.out.flush()?)
    }

    /// The last line.
    pub(crate) fn sum_up(&mut self, words: &str) -> Result<(), Ended> {
        let lasted = self.lasted().as_secs_f64();
        self.say(format_args!("ended after {lasted:.1} s: {words}"))
    }

    /// Leaves the GPU alone for so long, or until it is to end.
    pub(crate) fn rest(&self, time: Duration) {
        let until = Instant::now() + time;
        while !self.is_over() {
            match until.checked_duration_since(Instant::now()) {
                Some(left) if !left.is_zero() => std::thread::sleep(left.min(GLANCE)),
                _ => return,
            }
        }
    }
}

/// A part of a GPU's time: `31 % of the GPU`.
pub(crate) struct Share {
    pub(crate) computed: Duration,
    pub(crate) of: Duration,
}

impl fmt::Display for Share {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let part = self.computed.as_secs_f64() / self.of.as_secs_f64().max(f64::MIN_POSITIVE);
        // Clocks of two sides: a little over the whole is the whole.
        write!(f, "{:.0} % of the GPU", (100.0 * part).min(100.0))
    }
}

/// Kernels, one after the other without a gap.
pub(crate) struct Kernels {
    kernel: Kernel,
    launched: VecDeque<Done>,
    idle: Vec<Done>,
}

impl Kernels {
    pub(crate) fn new(gpu: &Gpu) -> Result<Self, DriverError> {
        let kernel = gpu.kernel(KERNEL.as_micros() as u32)?;
        Ok(Self { kernel, launched: VecDeque::new(), idle: Vec::new() })
    }

    /// Runs the next one, and launches those that come after it if they will be wanted, up to `wanted` all in all.
    /// False when the sample is to end.
    pub(crate) fn step(&mut self, act: &mut Act<'_>, wanted: u64) -> Result<bool, DriverError> {
        while self.launched.len() < AHEAD.min(usize::try_from(wanted).unwrap_or(AHEAD)) {
            let done = match self.idle.pop() {
                Some(done) => self.kernel.launch_before(&done).map(|()| done)?,
                None => self.kernel.launch()?,
            };
            self.launched.push_back(done);
        }
        if let Some(done) = self.launched.pop_front() {
            done.wait()?;
            self.idle.push(done);
            act.computed += KERNEL;
        }
        Ok(!act.is_over())
    }

    /// Computes for so long of the GPU's own time. False when the sample is to end.
    pub(crate) fn compute(&mut self, act: &mut Act<'_>, time: Duration) -> Result<bool, DriverError> {
        let kernels = (time.as_micros() / KERNEL.as_micros()) as u64;
        for left in (1..=kernels).rev() {
            if !self.step(act, left)? {
                return Ok(false);
            }
        }
        Ok(!act.is_over())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn amounts_and_times_are_read() {
        assert_eq!(memory("6Gi"), Ok(6 << 30));
        assert!(memory("5gb").unwrap_err().contains("ends in \"gb\""));
        assert!(memory("0").is_err() && memory("-1Gi").is_err());
        assert_eq!(seconds("0.5"), Ok(Duration::from_millis(500)));
        for wrong in ["0", "-1", "soon", "inf", "NaN", "1e300"] {
            assert!(seconds(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn shares_are_parts_of_the_whole() {
        let share = |computed, of| {
            Share { computed: Duration::from_millis(computed), of: Duration::from_millis(of) }.to_string()
        };
        assert_eq!(share(310, 1000), "31 % of the GPU");
        assert_eq!(share(1004, 1000), "100 % of the GPU");
        assert_eq!(share(0, 0), "0 % of the GPU");
    }
}
