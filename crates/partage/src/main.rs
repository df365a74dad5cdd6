//! The `partage` program: parses the command line, runs one command and maps its result to an exit code.

mod command;
mod logging;
mod manifest_files;
mod output;
mod plot;
mod terminal;
mod value_parsers;
mod yaml;

use clap::{CommandFactory, FromArgMatches, Parser};
use command::Command;
use std::io::{self, Write};
use std::process::ExitCode;

/// Share NVIDIA GPUs with exact memory and compute limits
#[derive(Parser)]
#[command(name = "partage", version = env!("PARTAGE_VERSION"), after_help = "Run 'partage COMMAND --help' for options and examples.")]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

/// Returns the command line with its commands listed in groups, which clap does not support for subcommands.
fn grouped_command_line() -> clap::Command {
    let cli = Cli::command();
    let groups = command::group_list(&cli);
    cli.help_template(format!(
        "{{about-with-newline}}\n{{usage-heading}} {{usage}}\n\n{groups}Options:\n{{options}}{{after-help}}\n"
    ))
}

fn main() -> ExitCode {
    let matches = grouped_command_line().get_matches();
    let cli = Cli::from_arg_matches(&matches).unwrap_or_else(|error| error.exit());
    let mut out = output::PipeTolerantWriter::new(io::BufWriter::new(io::stdout().lock()));
    let mut err = output::PipeTolerantWriter::new(io::stderr());
    let result = cli.command.run(&mut out, &mut err).and_then(|exit| out.flush().map(|()| exit));
    match result {
        Ok(exit) => exit.into(),
        Err(error) => {
            // If standard error cannot be written either, the exit code is the only report.
            let _ = writeln!(err, "error: cannot write the output: {error}");
            command::CommandExit::InputError.into()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_visible_command_is_in_one_help_group() {
        let cli = Cli::command();
        let visible: Vec<&str> = cli
            .get_subcommands()
            .filter(|command| !command.is_hide_set())
            .map(clap::Command::get_name)
            .collect();
        let mut grouped: Vec<&str> =
            command::GROUPS.iter().flat_map(|(_, commands)| commands.iter().copied()).collect();
        for name in &visible {
            let times = grouped.iter().filter(|grouped| *grouped == name).count();
            assert_eq!(times, 1, "{name} must be in exactly one group of command::GROUPS");
        }
        grouped.retain(|name| !visible.contains(name));
        assert!(grouped.is_empty(), "groups list commands that do not exist: {grouped:?}");
    }

    #[test]
    fn summaries_are_imperative_and_fit_one_line() {
        fn check(command: &clap::Command) {
            for command in command.get_subcommands() {
                let name = command.get_name();
                let about = command.get_about().map(ToString::to_string).unwrap_or_default();
                assert!(!about.is_empty() && about.len() <= 80, "{name}: {about:?}");
                assert!(!about.ends_with('.'), "{name}: {about:?}");
                let verb = about.split(' ').next().unwrap_or_default();
                assert!(!verb.ends_with('s'), "{name}: {about:?} is not imperative");
                check(command);
            }
        }
        check(&Cli::command());
    }
}
