//! Programs that earlier throttles held to less or more than their shares, one row each.

use crate::Options;
use crate::measure::{Access, BusyProcesses, Received, TenantSpec, load, measure};
use std::time::Duration;

/// What a row must reach.
enum Bound {
    /// Each tenant gets its hard share, or what it gets on the bare driver if that is less.
    Share,
    /// At least 97 % of what the bare driver gives.
    AsBare,
    /// At least 90 % of the bare steps together, split as asked within 2 points.
    Gang,
    /// At least 97 % of the steps on the bare driver.
    Steps,
    /// Two captures keep all their kernels.
    Intact,
    /// Microseconds of queuing.
    Immediate,
    /// Saturating tenants get their shares of what is used within 3 points, and 95 % of what they use without shares.
    Proportion,
}

struct Row {
    name: &'static str,
    tenants: Vec<TenantSpec>,
    /// Milliseconds of the longest kernel.
    kernel_ms: f64,
    bound: Bound,
    /// Spinning processes, if not those of the command line.
    busy: Option<usize>,
    most_seconds: u64,
}

fn row(name: &'static str, tenants: Vec<TenantSpec>, kernel_ms: f64, bound: Bound) -> Row {
    Row { name, tenants, kernel_ms, bound, busy: None, most_seconds: u64::MAX }
}

fn rows() -> Vec<Row> {
    use Bound::*;
    let hard = TenantSpec::hard;
    let processes = |count| TenantSpec { processes: count, ..hard("streams 1 200", 30) };
    let two_gpus = |micros: u32| TenantSpec { gpus: 2, ..hard(&format!("collective {micros}"), 50) };
    let churn = |cores| TenantSpec { short_lived: true, ..hard("churn 200000", cores) };
    let saturate = |cores| hard("streams 1 200", cores);
    let mut rows = vec![
        row("100 kernels x 50 grid sizes", vec![hard("many 100 50", 10)], 0.0, Share),
        row("100 kernels x 50 grid sizes", vec![hard("many 100 50", 30)], 0.0, Share),
        row("100 x 50, work-conserving, alone", vec![TenantSpec::lending("many 100 50", 30)], 0.0, AsBare),
        Row {
            most_seconds: 5,
            ..row("500 distinct kernels, first seconds", vec![hard("distinct 500 50", 30)], 0.0, Share)
        },
        row("1 stream", vec![saturate(30)], 0.2, Share),
        row("2 streams", vec![hard("streams 2 200", 30)], 0.2, Share),
        row("4 streams", vec![hard("streams 4 200", 30)], 0.2, Share),
        row("8 streams", vec![hard("streams 8 200", 30)], 0.2, Share),
        row("2 threads", vec![hard("threads 2 200", 30)], 0.2, Share),
        row("16 threads", vec![hard("threads 16 200", 30)], 0.2, Share),
        row("8 processes", vec![processes(8)], 0.2, Share),
        row("8 streams, --cores 100 hard, alone", vec![hard("streams 8 200", 100)], 0.2, AsBare),
        row("8 streams, work-conserving, alone", vec![TenantSpec::lending("streams 8 200", 30)], 0.2, AsBare),
        row("wait after every 31 kernels", vec![hard("sync-every 31 200", 30)], 0.2, Share),
        row("wait after every 32 kernels", vec![hard("sync-every 32 200", 30)], 0.2, Share),
        row("wait after every 33 kernels", vec![hard("sync-every 33 200", 30)], 0.2, Share),
        row("compute + communication stream", vec![hard("overlap", 30)], 2.0, Share),
        row("two 2-GPU jobs, 5 ms + collective", vec![two_gpus(5_000), two_gpus(5_000)], 5.0, Gang),
        row("two 2-GPU jobs, 1 ms + collective", vec![two_gpus(1_000), two_gpus(1_000)], 1.0, Gang),
        row("two 2-GPU jobs, 0.3 ms + collective", vec![two_gpus(300), two_gpus(300)], 0.3, Gang),
        row("capture open on another stream, 0.2 ms", vec![hard("capture-open 200", 30)], 0.2, Share),
        row("another thread captures graphs", vec![hard("capture-thread", 30)], 0.2, Share),
        row("capture open, kernels of 200 ms", vec![hard("capture-open 200000", 30)], 200.0, Share),
        row(
            "capture open, 200 ms, and a neighbor",
            vec![hard("capture-open 200000", 30), saturate(70)],
            200.0,
            Share,
        ),
        row("captures ended and forked unusually", vec![hard("capture-intact", 30)], 0.0, Intact),
        row("short-lived processes, 200 ms each", vec![churn(30)], 200.0, Share),
        row("short-lived processes and a neighbor", vec![churn(30), saturate(70)], 200.0, Share),
        row("graph handles used again", vec![hard("graph-reuse", 30)], 5.0, Share),
        row("new shapes behind a blocked stream", vec![hard("blocked-stream", 30)], 20.0, Share),
        row("kernel 0.2 ms + host callback 5 ms", vec![hard("host-callback", 30)], 0.2, Steps),
        Row {
            most_seconds: 3,
            ..row("20 new kernels behind an own flag", vec![hard("own-flag", 30)], 0.0, Immediate)
        },
        row("30/70", vec![saturate(30), saturate(70)], 0.2, Proportion),
    ];
    for busy in [4, 8] {
        rows.push(Row {
            busy: Some(busy),
            ..row("30/70 beside spinning processes", vec![saturate(30), saturate(70)], 0.2, Proportion)
        });
    }
    rows
}

/// Runs the rows; returns the number that miss their bounds.
pub fn all(options: &Options) -> usize {
    println!("rows: {} s each, {} spinning processes, load {}", options.seconds, options.busy, load());
    println!(
        "{:<40} {:>7} {:>8} {:>8} {:>8} {:>10} {:>10}  missed",
        "program", "asked %", "got %", "charged", "bare %", "steps/s", "bare"
    );
    let mut missed = 0;
    for row in rows() {
        if options.only.as_ref().is_some_and(|only| !row.name.contains(only.as_str())) {
            continue;
        }
        let length = Duration::from_secs(options.seconds.min(row.most_seconds));
        let busy = row.busy.unwrap_or(options.busy);
        let (bare, got) = {
            let _busy = BusyProcesses::start(busy);
            (measure(&row.tenants, Access::Bare, length), measure(&row.tenants, Access::Shares, length))
        };
        let wrong = row.missed(&got, &bare, length);
        let name = row.busy.map_or(row.name.to_string(), |busy| format!("{}: {busy}", row.name));
        for (at, tenant) in row.tenants.iter().enumerate() {
            println!(
                "{:<40} {:>7} {:>8.2} {:>8.2} {:>8.2} {:>10.1} {:>10.1}  {}",
                if at == 0 { name.as_str() } else { "  beside it" },
                tenant.cores,
                got[at].percent,
                got[at].charged_percent,
                bare[at].percent,
                got[at].steps_per_second,
                bare[at].steps_per_second,
                if at == 0 { wrong.as_deref().unwrap_or("") } else { "" },
            );
        }
        missed += usize::from(wrong.is_some());
    }
    println!("rows that miss their bounds: {missed}\n");
    missed
}

impl Row {
    /// Returns what is wrong with the results, if anything.
    fn missed(&self, got: &[Received], bare: &[Received], length: Duration) -> Option<String> {
        let sum = |all: &[Received]| all.iter().map(|it| it.percent).sum::<f64>();
        let steps = |all: &[Received]| all.iter().map(|it| it.steps_per_second).sum::<f64>();
        match self.bound {
            Bound::Share => {
                let kernel = self.kernel_ms / 10.0 / length.as_secs_f64();
                let error = |(at, got): (usize, &Received)| {
                    let asked = f64::from(self.tenants[at].cores);
                    let entitled = if self.tenants.len() == 1 { asked.min(bare[at].percent) } else { asked };
                    (got.percent - entitled).abs()
                };
                let worst = got.iter().enumerate().map(error).fold(0.0, f64::max);
                (worst > kernel.max(1.0)).then(|| format!("off by {worst:.1}"))
            }
            Bound::AsBare => {
                let ratio = sum(got) / sum(bare) * 100.0;
                (ratio < 97.0).then(|| format!("{ratio:.0} % of bare"))
            }
            Bound::Gang => {
                let ratio = steps(got) / steps(bare) * 100.0;
                let split = got[0].steps_per_second / steps(got).max(1e-9) * 100.0;
                (ratio < 90.0 || (split - 50.0).abs() > 2.0)
                    .then(|| format!("{ratio:.0} % of bare, {split:.0} % of it the first's"))
            }
            Bound::Steps => {
                let ratio = steps(got) / steps(bare) * 100.0;
                (ratio < 97.0).then(|| format!("{ratio:.0} % of bare"))
            }
            Bound::Intact => (got[0].steps != 2).then(|| format!("{} of 2 captures intact", got[0].steps)),
            Bound::Immediate => (!(1..50_000).contains(&got[0].steps))
                .then(|| format!("{} us to queue (0: not in time); bare {}", got[0].steps, bare[0].steps)),
            Bound::Proportion => {
                let ratio = sum(got) / sum(bare) * 100.0;
                let split = got[0].percent / sum(got) * 100.0;
                (ratio < 95.0 || (split - 30.0).abs() > 3.0)
                    .then(|| format!("{ratio:.0} % of bare, {split:.1} % of it the first's"))
            }
        }
    }
}
