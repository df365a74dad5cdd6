//! `partage resize`: other amounts for a share that runs.

use super::home::HomeArgs;
use super::inspect::nearest;
use super::run::Mode;
use super::words::{cores, outcome};
use super::{Outcome, Output, says};
use crate::amounts;
use crate::output::line;
use crate::screen;
use clap::Args;
use partage_core::model::{Bytes, Cores};
use partage_workstation::client::ClientError;
use partage_workstation::report::{PartReport, ShareReport};
use partage_workstation::wire::Change;
use serde::Serialize;
use std::io::{self, Write};

/// Give a share that runs another size
///
/// Its programs go on; they see the new size at once. A share can become smaller only down to what it uses, and larger only as
/// far as there is room on its GPUs. What is not given stays.
#[derive(Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Resize {
    /// The share's name
    name: String,

    /// Memory of each of its GPUs, such as 6Gi or 500Mi
    #[arg(long, value_name = "AMOUNT", value_parser = amounts::memory)]
    memory: Option<Bytes>,

    /// Memory of each of its GPUs, in percent of what it has
    #[arg(long, value_name = "N", value_parser = amounts::percent, conflicts_with = "memory")]
    memory_percent: Option<u32>,

    /// Percent of each GPU's time that is promised
    #[arg(long, value_name = "N", value_parser = amounts::cores_of_each)]
    cores: Option<Cores>,

    /// Whether time that nobody else wants may be used too
    #[arg(long, value_enum)]
    mode: Option<Mode>,

    /// How to answer; json has the share as it was and as it is
    #[arg(short, long, value_enum, default_value_t = Output::Table)]
    output: Output,

    #[command(flatten)]
    home: HomeArgs,
}

const EXAMPLES: &str = "\
Examples:
  partage resize trainer --memory 6Gi --cores 50
  partage resize trainer --memory-percent 25
  partage resize trainer --mode hard

Exit code: 0 done, 1 refused or no share of this name, 2 wrong arguments or nobody to ask";

/// What programs get.
#[derive(Serialize)]
struct Document<'a> {
    before: &'a ShareReport,
    after: &'a ShareReport,
}

impl Resize {
    pub(crate) fn run(&self, out: &mut dyn Write, err: &mut dyn Write) -> io::Result<Outcome> {
        let change = self.change();
        if change == Change::default() {
            let what = "nothing to change: give --memory, --memory-percent, --cores or --mode";
            line(err, format_args!("error: {what}"))?;
            return Ok(Outcome::Unreadable);
        }
        let failed = |err: &mut dyn Write, error: &ClientError| says(err, error).map(|()| outcome(error));
        let (client, report) = match self.home.report() {
            Ok(asked) => asked,
            Err(error) => return failed(err, &error),
        };
        let Some(before) = report.shares.iter().find(|share| share.name == self.name) else {
            line(err, format_args!("error: {}", nearest::unknown(&self.name, &report)))?;
            return Ok(Outcome::Problems);
        };
        let after = match client.resize(&self.name, change) {
            Ok(after) => after,
            Err(error) => return failed(err, &error),
        };
        match self.output {
            Output::Json => {
                serde_json::to_writer_pretty(&mut *out, &Document { before, after: &after })?;
                writeln!(out)?;
            }
            Output::Table => {
                for text in words(before, &after, screen::has_blocks()) {
                    line(out, format_args!("{text}"))?;
                }
            }
        }
        Ok(Outcome::Fine)
    }

    fn change(&self) -> Change {
        Change {
            memory: self.memory,
            memory_percent: self.memory_percent,
            cores: self.cores,
            mode: self.mode.map(Into::into),
        }
    }
}

/// What is other than before: one line where that is the same on all its GPUs.
fn words(before: &ShareReport, after: &ShareReport, blocks: bool) -> Vec<String> {
    let parts = after.parts.iter().map(|now| {
        let then = before.parts.iter().find(|then| then.uuid == now.uuid);
        (now.gpu, changed(then, now, blocks))
    });
    let mut parts: Vec<(u32, String)> = parts.collect();
    let same = parts.windows(2).all(|two| two[0].1 == two[1].1);
    if same {
        parts.truncate(1);
    }
    let words = parts.into_iter().map(|(gpu, words)| match same {
        true => format!("{}: {words}", after.name),
        false => format!("{}, GPU {gpu}: {words}", after.name),
    });
    words.collect()
}

fn changed(then: Option<&PartReport>, now: &PartReport, blocks: bool) -> String {
    let (arrow, up_to) = if blocks { ("\u{2192}", "\u{2264}") } else { ("->", "<=") };
    let memory =
        |part: &PartReport| part.memory_bytes.map_or_else(|| "no limit".into(), |bytes| bytes.to_string());
    let cores = |part: &PartReport| match cores(part, up_to) {
        none if none == "-" => "none promised".to_string(),
        some => some,
    };
    let each = |what: &str, then: Option<String>, now: String| match then {
        Some(then) if then != now => format!("{what} {then} {arrow} {now}"),
        _ => format!("{what} {now}"),
    };
    let memory = each("memory", then.map(memory), memory(now));
    let cores = each("cores", then.map(cores), cores(now));
    let same = if memory.contains(arrow) || cores.contains(arrow) { "" } else { ", as before" };
    format!("{memory}, {cores}{same}")
}

#[cfg(test)]
mod tests {
    use super::super::samples::share;
    use super::*;

    #[test]
    fn what_changed_is_said() {
        let before = share("pair", "ada", &[0, 1], 4, 0);
        let mut after = share("pair", "ada", &[0, 1], 6, 50);
        assert_eq!(words(&before, &after, true), ["pair: memory 4 GiB → 6 GiB, cores none promised → 50 %"]);
        after.parts[1].ceiling = Some(Cores::WHOLE);
        assert_eq!(
            words(&before, &after, false),
            [
                "pair, GPU 0: memory 4 GiB -> 6 GiB, cores none promised -> 50 %",
                "pair, GPU 1: memory 4 GiB -> 6 GiB, cores none promised -> 50 % <=100 %"
            ]
        );
        assert_eq!(words(&before, &before, true), ["pair: memory 4 GiB, cores none promised, as before"]);
    }
}
