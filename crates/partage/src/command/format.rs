//! Formats amounts, times and common lines that several commands show.

use super::CommandExit;
use crate::terminal::{StyledLine, TextStyle};
use partage_core::model::Cores;
use partage_enforce::refusal::RefusalReason;
use partage_workstation::client::ClientError;
use partage_workstation::report::{GpuShareReport, MachineReport};

/// Shown instead of an empty table of shares.
pub(super) const NO_SHARES_HINT: &str = "no shares; start one with: partage run --memory 4Gi -- COMMAND";

/// Returns the exit code of a command whose request failed.
pub(super) fn exit_of_error(error: &ClientError) -> CommandExit {
    match error {
        ClientError::Refused(refusal) => match refusal.reason {
            RefusalReason::Invalid | RefusalReason::Failed => CommandExit::InputError,
            RefusalReason::NoCapacity
            | RefusalReason::NotAllowed
            | RefusalReason::NotOwner
            | RefusalReason::NotFound => CommandExit::ProblemsFound,
        },
        _ => CommandExit::InputError,
    }
}

/// Formats bytes with at most one decimal, rounded down: `700 MiB`, `6.5 GiB`.
pub(super) fn format_bytes(bytes: u64) -> String {
    const UNITS: [(&str, u32); 4] = [("TiB", 40), ("GiB", 30), ("MiB", 20), ("KiB", 10)];
    let Some((unit, shift)) = UNITS.into_iter().find(|&(_, shift)| bytes >> shift > 0) else {
        return format!("{bytes} B");
    };
    let tenths = (u128::from(bytes) * 10) >> shift;
    match (tenths / 10, tenths % 10) {
        (whole, 0) => format!("{whole} {unit}"),
        // From a hundred on, the decimal is omitted.
        (whole, _) if whole >= 100 => format!("{whole} {unit}"),
        (whole, tenth) => format!("{whole}.{tenth} {unit}"),
    }
}

/// Formats guaranteed compute and its upper limit: `30 %`, `30 % ≤100 %`, `≤50 %`; `-` if there is neither.
pub(super) fn format_cores(gpu_share: &GpuShareReport, up_to: &str) -> String {
    if gpu_share.whole {
        return "whole".into();
    }
    let ceiling = gpu_share.ceiling.filter(|&ceiling| Some(ceiling) != gpu_share.cores);
    match (gpu_share.cores, ceiling) {
        (None, None | Some(Cores::WHOLE)) => "-".into(),
        (Some(cores), None) => cores.to_string(),
        (None, Some(ceiling)) => format!("{up_to}{ceiling}"),
        (Some(cores), Some(ceiling)) => format!("{cores} {up_to}{ceiling}"),
    }
}

/// Formats an age with one unit: `12s`, `5m`, `3h`, `2d`.
pub(super) fn format_age(since: u64, now: u64) -> String {
    match now.saturating_sub(since) {
        seconds @ 0..=99 => format!("{seconds}s"),
        seconds @ 100..=5999 => format!("{}m", seconds / 60),
        seconds @ 6000..=172_799 => format!("{}h", seconds / 3600),
        seconds => format!("{}d", seconds / 86400),
    }
}

/// Returns seconds since 1970; zero if the clock is set before that.
pub(super) fn unix_seconds() -> u64 {
    std::time::SystemTime::UNIX_EPOCH.elapsed().map_or(0, |time| time.as_secs())
}

/// Joins a command and its arguments, quoted so that a shell would run the same command.
pub(super) fn shell_quote(words: &[String]) -> String {
    let plain = |letter: char| letter.is_ascii_alphanumeric() || "-_./=:,@%+".contains(letter);
    let quoted = words.iter().map(|word| {
        if !word.is_empty() && word.chars().all(plain) {
            word.clone()
        } else {
            format!("'{}'", word.replace('\'', "'\\''"))
        }
    });
    quoted.collect::<Vec<_>>().join(" ")
}

/// Returns a line for each queued request, in the order of arrival.
pub(super) fn waiting_lines(report: &MachineReport) -> Vec<StyledLine> {
    let total = report.waiting.len();
    let lines = report.waiting.iter().enumerate().map(|(at, waiting)| {
        let mut line = StyledLine::new(TextStyle::Warning, format_args!("queued {} of {total}: ", at + 1));
        line.push(
            TextStyle::Plain,
            format_args!("{} ({}), {}: ", waiting.name, waiting.user, waiting.requested),
        );
        line.push(TextStyle::Dim, format_args!("{}", waiting.why));
        line
    });
    lines.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_are_rounded_down() {
        for (bytes, text) in [
            (0, "0 B"),
            (1023, "1023 B"),
            (700 << 20, "700 MiB"),
            (13 << 29, "6.5 GiB"),
            ((1 << 30) - 1, "1023 MiB"),
            ((40 << 30) - 1, "39.9 GiB"),
            (u64::MAX, "16777215 TiB"),
        ] {
            assert_eq!(format_bytes(bytes), text);
        }
    }

    #[test]
    fn quoted_command_can_be_run_by_a_shell() {
        let words = ["sh", "-c", "echo 'a b'", "", "x=1"].map(String::from);
        assert_eq!(shell_quote(&words), r"sh -c 'echo '\''a b'\''' '' x=1");
    }

    #[test]
    fn age_has_one_unit() {
        let ages = [0, 99, 100, 5999, 6000, 172_799, 172_800].map(|seconds| format_age(1000, 1000 + seconds));
        assert_eq!(ages, ["0s", "99s", "1m", "99m", "1h", "47h", "2d"]);
        assert_eq!(format_age(5, 3), "0s", "the clock was set back");
    }
}
