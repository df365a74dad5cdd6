//! `partage stop`: terminates all processes of shares.

use super::format::exit_of_error;
use super::share_not_found::not_found_message;
use super::state_dir::StateDirArgs;
use super::{CommandExit, OutputFormat, write_client_error};
use crate::output::write_line;
use crate::value_parsers;
use clap::Args;
use partage_enforce::error_chain::describe;
use partage_enforce::refusal::RefusalReason;
use partage_workstation::client::{ClientError, DaemonClient, StopOutcome};
use partage_workstation::report::MachineReport;
use serde::Serialize;
use std::io::{self, Write};
use std::time::Duration;

/// Stop shares and terminate their processes
///
/// Processes receive SIGTERM, and SIGKILL if they are still running after the grace period.
#[derive(Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct StopCommand {
    /// Names of shares
    #[arg(value_name = "NAME", required_unless_present = "all")]
    names: Vec<String>,

    /// All shares of the current user
    #[arg(long, conflicts_with = "names")]
    all: bool,

    /// Time between SIGTERM and SIGKILL, such as 10s, 500ms or 2m
    #[arg(long, value_name = "TIME", value_parser = value_parsers::parse_duration, default_value = "10s")]
    grace: Duration,

    /// Output format
    #[arg(short, long, value_enum, default_value_t = OutputFormat::Table)]
    output: OutputFormat,

    #[command(flatten)]
    state_dir: StateDirArgs,
}

const EXAMPLES: &str = "\
Examples:
  partage stop trainer
  partage stop trainer notebook --grace 1m
  partage stop --all

Exit code: 0 success, 1 a share was not found or could not be stopped, 2 wrong arguments or no daemon is running";

/// The document that `-o json` prints: every requested share is in one of the two lists.
#[derive(Default, Serialize)]
struct StopDocument {
    stopped: Vec<StoppedShare>,
    failed: Vec<FailedShare>,
}

#[derive(Serialize)]
struct StoppedShare {
    name: String,
    /// Number of processes that exited after SIGTERM.
    ended: usize,
    /// Number of processes that were killed.
    killed: usize,
}

#[derive(Serialize)]
struct FailedShare {
    name: String,
    error: String,
}

impl StopCommand {
    pub(crate) fn run(&self, out: &mut dyn Write, err: &mut dyn Write) -> io::Result<CommandExit> {
        let (client, report) = match self.state_dir.report() {
            Ok(connected) => connected,
            Err(error) => {
                write_client_error(err, &error)?;
                return Ok(exit_of_error(&error));
            }
        };
        let names = self.names(&report, rustix::process::getuid().as_raw());
        let mut document = StopDocument::default();
        let mut worst = CommandExit::Success;
        for (name, result) in stop_all(&client, &report, names, self.grace) {
            match result {
                Ok(StopOutcome { ended, killed }) => {
                    document.stopped.push(StoppedShare { name, ended, killed })
                }
                Err(StopFailure::NotFound) => {
                    let error = not_found_message(&name, &report);
                    write_line(err, format_args!("error: {error}"))?;
                    document.failed.push(FailedShare { name, error });
                    worst = worse_exit(worst, CommandExit::ProblemsFound);
                }
                Err(StopFailure::Client(error)) => {
                    write_client_error(err, &error)?;
                    document.failed.push(FailedShare { name, error: describe(&error) });
                    worst = worse_exit(worst, exit_of_error(&error));
                }
            }
        }
        match self.output {
            OutputFormat::Json => {
                serde_json::to_writer_pretty(&mut *out, &document)?;
                writeln!(out)?;
            }
            OutputFormat::Table if self.all && document.stopped.is_empty() && document.failed.is_empty() => {
                write_line(out, format_args!("you have no shares: nothing to stop"))?;
            }
            OutputFormat::Table => {
                for share in &document.stopped {
                    write_line(out, format_args!("{}", describe_stop(share)))?;
                }
            }
        }
        Ok(worst)
    }

    /// Returns the shares to stop, without duplicates.
    fn names(&self, report: &MachineReport, own: u32) -> Vec<String> {
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

/// The reason why a share was not stopped.
enum StopFailure {
    NotFound,
    Client(ClientError),
}

/// Stops shares concurrently, because each may take its whole grace period.
fn stop_all(
    client: &DaemonClient,
    report: &MachineReport,
    names: Vec<String>,
    grace: Duration,
) -> Vec<(String, Result<StopOutcome, StopFailure>)> {
    let one = |name: &str| {
        if !report.shares.iter().any(|share| share.name == name) {
            return Err(StopFailure::NotFound);
        }
        match client.stop(name, grace) {
            // The share ended before the request arrived.
            Err(ClientError::Refused(refusal)) if refusal.reason == RefusalReason::NotFound => {
                Ok(StopOutcome { ended: 0, killed: 0 })
            }
            other => other.map_err(StopFailure::Client),
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

fn worse_exit(a: CommandExit, b: CommandExit) -> CommandExit {
    if a == CommandExit::Success || b == CommandExit::InputError { b } else { a }
}

fn describe_stop(share: &StoppedShare) -> String {
    let processes = |count: usize| format!("{count} process{}", if count == 1 { "" } else { "es" });
    match (share.ended, share.killed) {
        (0, 0) => format!("{}: already ended", share.name),
        (ended, 0) => format!("{}: stopped, {} exited", share.name, processes(ended)),
        (0, killed) => format!("{}: stopped, {} killed", share.name, processes(killed)),
        (ended, killed) => format!("{}: stopped, {} exited, {killed} killed", share.name, processes(ended)),
    }
}

#[cfg(test)]
mod tests {
    use super::super::test_reports::report;
    use super::*;
    use clap::Parser;

    #[derive(Parser)]
    struct Cli {
        #[command(flatten)]
        stop: StopCommand,
    }

    fn names(arguments: &[&str], own: u32) -> Vec<String> {
        let all = std::iter::once("stop").chain(arguments.iter().copied());
        Cli::try_parse_from(all).unwrap().stop.names(&report(), own)
    }

    #[test]
    fn all_selects_shares_of_the_current_user() {
        assert_eq!(names(&["--all"], 1000), ["trainer", "notebook", "pair"]);
        assert!(names(&["--all"], 1001).is_empty());
        assert_eq!(names(&["pair", "x", "pair"], 1001), ["pair", "x"]);
        assert!(
            Cli::try_parse_from(["stop"]).is_err() && Cli::try_parse_from(["stop", "--all", "x"]).is_err()
        );
    }

    #[test]
    fn exited_and_killed_processes_are_counted() {
        let text = |ended, killed| describe_stop(&StoppedShare { name: "a".into(), ended, killed });
        assert_eq!(text(0, 0), "a: already ended");
        assert_eq!(text(1, 0), "a: stopped, 1 process exited");
        assert_eq!(text(0, 2), "a: stopped, 2 processes killed");
        assert_eq!(text(3, 1), "a: stopped, 3 processes exited, 1 killed");
    }
}
