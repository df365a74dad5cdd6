//! `partage top`: who uses what on this machine, live.

mod document;
mod rates;
pub(super) mod view;

pub(crate) use view::{Options, foot, lines};

use super::home::HomeArgs;
use super::{Outcome, Output, says};
use crate::amounts;
use crate::screen::{self, Kind, Line, Screen, Style, Wake};
use clap::Args;
use partage_enforce::error_chain::describe;
use partage_workstation::client::{Client, ClientError};
use partage_workstation::report::Report;
use std::io::{self, Write};
use std::time::{Duration, Instant};

/// Show who uses what on this machine, live
///
/// The first table has a bar for each GPU's memory and one for its compute: full blocks are in use, half ones promised to
/// shares. The second has what each share uses of its limit, which part of the GPU's time it got, and for which part
/// it was kept waiting by its limit. Elsewhere than on a terminal one table follows the other.
#[derive(Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Top {
    /// How to answer; json is one document, as with --once
    #[arg(short, long, value_enum, default_value_t = Output::Table)]
    output: Output,

    /// One table, after one interval
    #[arg(long)]
    once: bool,

    /// Time that rates are taken over, and between tables: 2s, 500ms; a bare number is seconds
    #[arg(long, value_name = "TIME", value_parser = amounts::interval, default_value = "1s")]
    interval: Duration,

    #[command(flatten)]
    home: HomeArgs,
}

const EXAMPLES: &str = "\
Keys: m, c, n, t sort by memory, cores, name, time throttled; r reverses; ? shows the keys; q, Esc or Ctrl-C end it

Examples:
  partage top
  partage top --once --interval 5s
  partage top -o json | jq '.shares[] | {name, got: .parts[0].gotPercent}'

Exit code: 0 done, 2 there is nobody to ask";

impl Top {
    pub(crate) fn run(&self, out: &mut dyn Write, err: &mut dyn Write) -> io::Result<Outcome> {
        let client = match self.home.client() {
            Ok(client) => client,
            Err(error) => {
                says(err, &error)?;
                return Ok(Outcome::Unreadable);
            }
        };
        let done = match self.output {
            Output::Table if !self.once => self.go_on(&client, out)?,
            _ => self.one(&client, out)?,
        };
        match done {
            Ok(()) => Ok(Outcome::Fine),
            Err(error) => {
                says(err, &error)?;
                Ok(Outcome::Unreadable)
            }
        }
    }

    /// One table or document, with the rates of one interval.
    fn one(&self, client: &Client, out: &mut dyn Write) -> io::Result<Result<(), ClientError>> {
        let two = client.report().and_then(|before| {
            std::thread::sleep(self.interval);
            client.report().map(|now| (before, now))
        });
        let (before, now) = match two {
            Ok(two) => two,
            Err(error) => return Ok(Err(error)),
        };
        match self.output {
            Output::Json => {
                serde_json::to_writer_pretty(&mut *out, &document::document(&before, &now)?)?;
                writeln!(out)?;
            }
            Output::Table => {
                let options = Options::new(usize::MAX, screen::has_blocks());
                Screen::open(Kind::Stream).show(
                    &lines(Some(&before), &now, &options),
                    &Line::default(),
                    out,
                )?;
            }
        }
        Ok(Ok(()))
    }

    /// Table after table, until somebody has seen enough.
    fn go_on(&self, client: &Client, out: &mut dyn Write) -> io::Result<Result<(), ClientError>> {
        /// Nobody likes to look at nothing for a whole interval.
        const FIRST: Duration = Duration::from_millis(200);
        // Whatever is wrong from the start is better said on a terminal as it was.
        let mut now = match client.report() {
            Ok(report) => report,
            Err(error) => return Ok(Err(error)),
        };
        let mut before: Option<Report> = None;
        let mut trouble: Option<ClientError> = None;
        let mut screen = Screen::open(Kind::Full.on_terminal());
        let mut options = Options::new(usize::MAX, screen::has_blocks());
        let mut next =
            Instant::now() + if screen.is_live() { self.interval.min(FIRST) } else { self.interval };
        if screen.is_live() {
            draw(&mut screen, None, &now, None, &mut options, out)?;
        }
        loop {
            match screen.wait(next.saturating_duration_since(Instant::now())) {
                Wake::End => return Ok(Ok(())),
                Wake::Key(key) if !options.key(key) => continue,
                Wake::Key(_) | Wake::Resized => {}
                Wake::Time => {
                    next = Instant::now() + self.interval;
                    match client.report() {
                        Ok(report) => {
                            before = Some(std::mem::replace(&mut now, report));
                            trouble = None;
                        }
                        // Who looks on sees when it is back.
                        Err(error) if screen.is_live() => trouble = Some(error),
                        Err(error) => return Ok(Err(error)),
                    }
                }
            }
            draw(&mut screen, before.as_ref(), &now, trouble.as_ref(), &mut options, out)?;
        }
    }
}

fn draw(
    screen: &mut Screen,
    before: Option<&Report>,
    now: &Report,
    trouble: Option<&ClientError>,
    options: &mut Options,
    out: &mut dyn Write,
) -> io::Result<()> {
    (_, options.width) = screen.size();
    let mut lines = lines(before, now, options);
    if let Some(trouble) = trouble {
        lines.insert(0, Line::plain(Style::Bad, format_args!("not of now: {}", describe(trouble))));
    }
    screen.show(&lines, &foot(options), out)
}

#[cfg(test)]
mod tests;
