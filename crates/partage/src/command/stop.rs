//! `partage stop`: ends all processes of shares.

use super::home::HomeArgs;
use super::inspect::nearest;
use super::words::outcome;
use super::{Outcome, Output, says};
use crate::amounts;
use crate::output::line;
use clap::Args;
use partage_enforce::error_chain::describe;
use partage_enforce::refusal::RefusalReason;
use partage_workstation::client::{Client, ClientError, Stopped};
use partage_workstation::report::Report;
use serde::Serialize;
use std::io::{self, Write};
use std::time::Duration;

/// Stop shares: end all their processes and give everything back
///
/// The processes are asked to end (SIGTERM), and killed if they have not after the grace period.
#[derive(Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Stop {
    /// Names of shares
    #[arg(value_name = "NAME", required_unless_present = "all")]
    names: Vec<String>,

    /// All shares of one's own
    #[arg(long, conflicts_with = "names")]
    all: bool,

    /// How long processes may take to end by themselves: 10s, 500ms, 2m
    #[arg(long, value_name = "TIME", value_parser = amounts::duration, default_value = "10s")]
    grace: Duration,

    /// How to answer
    #[arg(short, long, value_enum, default_value_t = Output::Table)]
    output: Output,

    #[command(flatten)]
    home: HomeArgs,
}

const EXAMPLES: &str = "\
Examples:
  partage stop trainer
  partage stop trainer notebook --grace 1m
  partage stop --all

Exit code: 0 done, 1 one of them could not be stopped or there is none of this name, 2 wrong arguments or nobody to ask";

/// What programs get.
#[derive(Default, Serialize)]
struct Document {
    stopped: Vec<Done>,
    failed: Vec<Failed>,
}

#[derive(Serialize)]
struct Done {
    name: String,
    /// Processes that ended when they were asked to.
    ended: usize,
    /// Processes that had to be killed.
    killed: usize,
}

#[derive(Serialize)]
struct Failed {
    name: String,
    error: String,
}

impl Stop {
    pub(crate) fn run(&self, out: &mut dyn Write, err: &mut dyn Write) -> io::Result<Outcome> {
        let (client, report) = match self.home.report() {
            Ok(asked) => asked,
            Err(error) => {
                says(err, &error)?;
                return Ok(outcome(&error));
            }
        };
        let names = self.names(&report, rustix::process::getuid().as_raw());
        let mut document = Document::default();
        let mut worst = Outcome::Fine;
        for (name, result) in stopped(&client, &report, names, self.grace) {
            match result {
                Ok(Stopped { ended, killed }) => document.stopped.push(Done { name, ended, killed }),
                Err(No::Unknown) => {
                    let error = nearest::unknown(&name, &report);
                    line(err, format_args!("error: {error}"))?;
                    document.failed.push(Failed { name, error });
                    worst = worse(worst, Outcome::Problems);
                }
                Err(No::Client(error)) => {
                    says(err, &error)?;
                    document.failed.push(Failed { name, error: describe(&error) });
                    worst = worse(worst, outcome(&error));
                }
            }
        }
        match self.output {
            Output::Json => {
                serde_json::to_writer_pretty(&mut *out, &document)?;
                writeln!(out)?;
            }
            Output::Table if self.all && document.stopped.is_empty() && document.failed.is_empty() => {
                line(out, format_args!("none of the shares is yours: nothing to stop"))?;
            }
            Output::Table => {
                for done in &document.stopped {
                    line(out, format_args!("{}", words(done)))?;
                }
            }
        }
        Ok(worst)
    }

    /// Whom to stop, each once.
    fn names(&self, report: &Report, own: u32) -> Vec<String> {
        if self.all {
            let own = report.shares.iter().filter(|share| share.uid == own);
            return own.map(|share| share.name.clone()).collect();
        }
        let mut names: Vec<String> = Vec::new();
        for name in &self.names {
            if !names.contains(name) {
                names.push(name.clone());
            }
        }
        names
    }
}

/// Why a share was not stopped.
enum No {
    Unknown,
    Client(ClientError),
}

/// Stops them at the same time: each may take all of its grace period.
fn stopped(
    client: &Client,
    report: &Report,
    names: Vec<String>,
    grace: Duration,
) -> Vec<(String, Result<Stopped, No>)> {
    let one = |name: &str| {
        if !report.shares.iter().any(|share| share.name == name) {
            return Err(No::Unknown);
        }
        match client.stop(name, grace) {
            // It ended by itself just now, which is what was wanted.
            Err(ClientError::Refused(refusal)) if refusal.reason == RefusalReason::NotFound => {
                Ok(Stopped { ended: 0, killed: 0 })
            }
            other => other.map_err(No::Client),
        }
    };
    std::thread::scope(|scope| {
        let one = &one;
        let threads: Vec<_> = names.iter().map(|name| scope.spawn(move || one(name))).collect();
        let joined = threads.into_iter().map(|thread| match thread.join() {
            Ok(result) => result,
            Err(panic) => std::panic::resume_unwind(panic),
        });
        let results: Vec<_> = joined.collect();
        names.iter().cloned().zip(results).collect()
    })
}

fn worse(a: Outcome, b: Outcome) -> Outcome {
    if a == Outcome::Fine || b == Outcome::Unreadable { b } else { a }
}

fn words(done: &Done) -> String {
    let processes = |count: usize| format!("{count} process{}", if count == 1 { "" } else { "es" });
    match (done.ended, done.killed) {
        (0, 0) => format!("{}: it had ended already", done.name),
        (ended, 0) => format!("{}: stopped, {} ended", done.name, processes(ended)),
        (0, killed) => format!("{}: stopped, {} had to be killed", done.name, processes(killed)),
        (ended, killed) => {
            format!("{}: stopped, {} ended, {killed} had to be killed", done.name, processes(ended))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::samples::report;
    use super::*;
    use clap::Parser;

    #[derive(Parser)]
    struct Cli {
        #[command(flatten)]
        stop: Stop,
    }

    fn names(arguments: &[&str], own: u32) -> Vec<String> {
        let all = std::iter::once("stop").chain(arguments.iter().copied());
        Cli::try_parse_from(all).unwrap().stop.names(&report(), own)
    }

    #[test]
    fn all_are_ones_own() {
        assert_eq!(names(&["--all"], 1000), ["trainer", "notebook", "pair"]);
        assert!(names(&["--all"], 1001).is_empty());
        assert_eq!(names(&["pair", "x", "pair"], 1001), ["pair", "x"]);
        assert!(
            Cli::try_parse_from(["stop"]).is_err() && Cli::try_parse_from(["stop", "--all", "x"]).is_err()
        );
    }

    #[test]
    fn what_became_of_processes_is_said() {
        let said = |ended, killed| words(&Done { name: "a".into(), ended, killed });
        assert_eq!(said(0, 0), "a: it had ended already");
        assert_eq!(said(1, 0), "a: stopped, 1 process ended");
        assert_eq!(said(0, 2), "a: stopped, 2 processes had to be killed");
        assert_eq!(said(3, 1), "a: stopped, 3 processes ended, 1 had to be killed");
    }
}
