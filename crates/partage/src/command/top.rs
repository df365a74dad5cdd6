//! `partage top`: shows the usage of GPUs and shares, live.

mod json_report;
mod rates;
pub(super) mod view;

pub(crate) use view::{ViewOptions, footer, lines};

use super::state_dir::StateDirArgs;
use super::{CommandExit, OutputFormat, write_client_error};
use crate::terminal::{self, DisplayMode, LiveDisplay, StyledLine, TextStyle, WakeReason};
use crate::value_parsers;
use clap::Args;
use partage_enforce::error_chain::describe;
use partage_workstation::client::{ClientError, DaemonClient};
use partage_workstation::report::MachineReport;
use std::io::{self, Write};
use std::time::{Duration, Instant};

/// Show a live view of GPUs and shares
///
/// The first table has bars for the memory and the compute of each GPU: full blocks are used, half blocks are allocated to shares.
/// The second shows for each share its memory usage and limit, its share of GPU time, and the percentage of time in which it was
/// throttled. If standard output is not a terminal, a new table is printed after each interval.
#[derive(Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct TopCommand {
    /// Output format; json is one document, as with --once
    #[arg(short, long, value_enum, default_value_t = OutputFormat::Table)]
    output: OutputFormat,

    /// Print one table after one interval and exit
    #[arg(long)]
    once: bool,

    /// Refresh interval, over which rates are computed, such as 2s or 500ms; without a unit in seconds
    #[arg(long, value_name = "TIME", value_parser = value_parsers::parse_interval, default_value = "1s")]
    interval: Duration,

    #[command(flatten)]
    state_dir: StateDirArgs,
}

const EXAMPLES: &str = "\
Keys: m, c, n, t sort by memory, compute, name, throttling; r reverses; ? shows the keys; q, Esc or Ctrl-C quit

Examples:
  partage top
  partage top --once --interval 5s
  partage top -o json | jq '.shares[] | {name, used: .gpuShares[0].usedPercent}'

Exit code: 0 success, 2 no daemon is running";

impl TopCommand {
    pub(crate) fn run(&self, out: &mut dyn Write, err: &mut dyn Write) -> io::Result<CommandExit> {
        let client = match self.state_dir.client() {
            Ok(client) => client,
            Err(error) => {
                write_client_error(err, &error)?;
                return Ok(CommandExit::InputError);
            }
        };
        let result = match self.output {
            OutputFormat::Table if !self.once => self.run_live(&client, out)?,
            _ => self.run_once(&client, out)?,
        };
        match result {
            Ok(()) => Ok(CommandExit::Success),
            Err(error) => {
                write_client_error(err, &error)?;
                Ok(CommandExit::InputError)
            }
        }
    }

    /// Writes one table or document, with the rates of one interval.
    fn run_once(&self, client: &DaemonClient, out: &mut dyn Write) -> io::Result<Result<(), ClientError>> {
        let reports = client.report().and_then(|before| {
            std::thread::sleep(self.interval);
            client.report().map(|now| (before, now))
        });
        let (before, now) = match reports {
            Ok(reports) => reports,
            Err(error) => return Ok(Err(error)),
        };
        match self.output {
            OutputFormat::Json => {
                serde_json::to_writer_pretty(&mut *out, &json_report::json_report(&before, &now)?)?;
                writeln!(out)?;
            }
            OutputFormat::Table => {
                let options = ViewOptions::new(usize::MAX, terminal::supports_unicode());
                LiveDisplay::open(DisplayMode::Stream).show(
                    &lines(Some(&before), &now, &options),
                    &StyledLine::default(),
                    out,
                )?;
            }
        }
        Ok(Ok(()))
    }

    /// Shows tables until the user quits.
    fn run_live(&self, client: &DaemonClient, out: &mut dyn Write) -> io::Result<Result<(), ClientError>> {
        /// Maximum time until the first rates are shown on a terminal.
        const FIRST_INTERVAL: Duration = Duration::from_millis(200);
        // An error at the start is reported before the terminal is switched to the live view.
        let mut now = match client.report() {
            Ok(report) => report,
            Err(error) => return Ok(Err(error)),
        };
        let mut before: Option<MachineReport> = None;
        let mut last_error: Option<ClientError> = None;
        let mut display = LiveDisplay::open(DisplayMode::FullScreen.on_terminal());
        let mut options = ViewOptions::new(usize::MAX, terminal::supports_unicode());
        let mut next = Instant::now()
            + if display.is_live() { self.interval.min(FIRST_INTERVAL) } else { self.interval };
        if display.is_live() {
            draw(&mut display, None, &now, None, &mut options, out)?;
        }
        loop {
            match display.wait(next.saturating_duration_since(Instant::now())) {
                WakeReason::Quit => return Ok(Ok(())),
                WakeReason::Key(key) if !options.apply_key(key) => continue,
                WakeReason::Key(_) | WakeReason::Resized => {}
                WakeReason::Timeout => {
                    next = Instant::now() + self.interval;
                    match client.report() {
                        Ok(report) => {
                            before = Some(std::mem::replace(&mut now, report));
                            last_error = None;
                        }
                        // The view stays and recovers when the daemon is back.
                        Err(error) if display.is_live() => last_error = Some(error),
                        Err(error) => return Ok(Err(error)),
                    }
                }
            }
            draw(&mut display, before.as_ref(), &now, last_error.as_ref(), &mut options, out)?;
        }
    }
}

fn draw(
    display: &mut LiveDisplay,
    before: Option<&MachineReport>,
    now: &MachineReport,
    error: Option<&ClientError>,
    options: &mut ViewOptions,
    out: &mut dyn Write,
) -> io::Result<()> {
    (_, options.width) = display.size();
    let mut lines = lines(before, now, options);
    if let Some(error) = error {
        lines.insert(0, StyledLine::new(TextStyle::Error, format_args!("outdated: {}", describe(error))));
    }
    display.show(&lines, &footer(options), out)
}

#[cfg(test)]
mod tests;
