//! How exact shares of compute are for programs of many kinds, compared with the bare simulated driver in the same run.
//! Run by `make bench-compute`; `cargo bench -p partage-shim --bench compute -- rows` runs one part.
#![allow(
    unsafe_code,
    dead_code,
    clippy::unwrap_used,
    clippy::multiple_unsafe_ops_per_block,
    clippy::macro_metavars_in_unsafe,
    clippy::print_stdout,
    unreachable_pub,
    missing_docs
)]

#[path = "../shim/calls.rs"]
mod calls;
#[path = "../../../sim-driver/tests/support/driver.rs"]
mod driver;
mod handover;
mod measure;
mod pairs;
mod programs;
mod row_programs;
mod rows;
#[path = "../shim/setup.rs"]
mod setup;
#[path = "../shim/tenant.rs"]
mod tenant;
mod zoo;

const USAGE: &str = "usage: compute [rows] [zoo] [handover] [--seconds N] [--pair-seconds N] [--pairs all|quick] \
                     [--busy N] [--only TEXT] [--strict]";

/// The command line.
pub struct Options {
    /// Seconds of each row.
    pub seconds: u64,
    /// Seconds of each program and pair of the zoo.
    pub pair_seconds: u64,
    /// Whether to run only the fixed pairs of the zoo.
    pub quick_pairs: bool,
    /// Spinning processes during the rows.
    pub busy: usize,
    /// Part of the names of what is run.
    pub only: Option<String>,
    pub strict: bool,
    parts: Vec<String>,
}

impl Options {
    fn parse(arguments: impl Iterator<Item = String>) -> Result<Self, String> {
        let mut options = Self {
            seconds: 10,
            pair_seconds: 3,
            quick_pairs: false,
            busy: 0,
            only: None,
            strict: false,
            parts: Vec::new(),
        };
        let mut arguments = arguments.filter(|word| word != "--bench");
        while let Some(word) = arguments.next() {
            let mut value = || arguments.next().ok_or_else(|| format!("{word} needs a value\n{USAGE}"));
            let number = |text: String| text.parse().map_err(|_| format!("{text}: not a number"));
            match word.as_str() {
                "--seconds" => options.seconds = number(value()?)?,
                "--pair-seconds" => options.pair_seconds = number(value()?)?,
                "--pairs" => options.quick_pairs = value()? == "quick",
                "--busy" => options.busy = number(value()?)? as usize,
                "--only" => options.only = Some(value()?),
                "--strict" => options.strict = true,
                "rows" | "zoo" | "handover" => options.parts.push(word),
                _ => return Err(format!("unknown argument {word}\n{USAGE}")),
            }
        }
        Ok(options)
    }

    fn wants(&self, part: &str) -> bool {
        self.parts.is_empty() || self.parts.iter().any(|word| word == part)
    }
}

/// Returns a command that runs a tenant.
fn tenant_command(arguments: &[&str]) -> std::process::Command {
    let mut command = std::process::Command::new(std::env::current_exe().unwrap());
    command.arg("tenant").args(arguments);
    command
}

fn main() -> std::process::ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    if let Some((first, rest)) = arguments.split_first()
        && first == "tenant"
    {
        if rest.first().is_some_and(|word| word == "cost" || word == "step") {
            tenant::play(rest);
        } else {
            row_programs::run(&rest.iter().map(String::as_str).collect::<Vec<_>>());
        }
        return std::process::ExitCode::SUCCESS;
    }
    let options = match Options::parse(arguments.into_iter()) {
        Ok(options) => options,
        Err(text) => {
            println!("{text}");
            return std::process::ExitCode::from(2);
        }
    };
    let mut missed = 0;
    if options.wants("rows") {
        missed += rows::all(&options);
    }
    if options.wants("zoo") {
        missed += zoo::all(&options);
    }
    if options.wants("handover") {
        missed += handover::all(&options);
    }
    std::process::ExitCode::from(u8::from(options.strict && missed > 0))
}
