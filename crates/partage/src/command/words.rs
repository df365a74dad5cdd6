//! Words and figures that several views of a report share.

use super::Outcome;
use crate::screen::{Line, Style};
use partage_core::model::Cores;
use partage_enforce::refusal::RefusalReason;
use partage_workstation::client::ClientError;
use partage_workstation::report::{PartReport, Report};

/// Said where there is nothing to show.
pub(super) const NO_SHARES: &str = "no shares: partage run --memory 4Gi -- COMMAND starts one";

/// The outcome of a command whose request failed.
pub(super) fn outcome(error: &ClientError) -> Outcome {
    match error {
        ClientError::Refused(refusal) => match refusal.reason {
            RefusalReason::Invalid | RefusalReason::Failed => Outcome::Unreadable,
            RefusalReason::NoCapacity
            | RefusalReason::NotAllowed
            | RefusalReason::NotOwner
            | RefusalReason::NotFound => Outcome::Problems,
        },
        _ => Outcome::Unreadable,
    }
}

/// Bytes in a few letters: `700 MiB`, `6.5 GiB`. Cut, not rounded.
pub(super) fn size(bytes: u64) -> String {
    const UNITS: [(&str, u32); 4] = [("TiB", 40), ("GiB", 30), ("MiB", 20), ("KiB", 10)];
    let Some((unit, shift)) = UNITS.into_iter().find(|&(_, shift)| bytes >> shift > 0) else {
        return format!("{bytes} B");
    };
    let tenths = (u128::from(bytes) * 10) >> shift;
    match (tenths / 10, tenths % 10) {
        (whole, 0) => format!("{whole} {unit}"),
        // Beside a hundred, a tenth is nothing.
        (whole, _) if whole >= 100 => format!("{whole} {unit}"),
        (whole, tenth) => format!("{whole}.{tenth} {unit}"),
    }
}

/// What is promised and how far it may go: `30 %`, `30 % ≤100 %`, `≤50 %`; `-` where nothing is said of it.
pub(super) fn cores(part: &PartReport, up_to: &str) -> String {
    if part.whole {
        return "whole".into();
    }
    let ceiling = part.ceiling.filter(|&ceiling| Some(ceiling) != part.cores);
    match (part.cores, ceiling) {
        (None, None | Some(Cores::WHOLE)) => "-".into(),
        (Some(cores), None) => cores.to_string(),
        (None, Some(ceiling)) => format!("{up_to}{ceiling}"),
        (Some(cores), Some(ceiling)) => format!("{cores} {up_to}{ceiling}"),
    }
}

/// How long ago, in one figure: `12s`, `5m`, `3h`, `2d`.
pub(super) fn age(since: u64, now: u64) -> String {
    match now.saturating_sub(since) {
        seconds @ 0..=99 => format!("{seconds}s"),
        seconds @ 100..=5999 => format!("{}m", seconds / 60),
        seconds @ 6000..=172_799 => format!("{}h", seconds / 3600),
        seconds => format!("{}d", seconds / 86400),
    }
}

/// Seconds since 1970; zero where the clock is before that.
pub(super) fn clock() -> u64 {
    std::time::SystemTime::UNIX_EPOCH.elapsed().map_or(0, |time| time.as_secs())
}

/// A command as a shell would take it.
pub(super) fn shell(words: &[String]) -> String {
    let plain = |letter: char| letter.is_ascii_alphanumeric() || "-_./=:,@%+".contains(letter);
    let quoted = words.iter().map(|word| match !word.is_empty() && word.chars().all(plain) {
        true => word.clone(),
        false => format!("'{}'", word.replace('\'', "'\\''")),
    });
    quoted.collect::<Vec<_>>().join(" ")
}

/// Who waits, in the order of arrival.
pub(super) fn waiting(report: &Report) -> Vec<Line> {
    let of = report.waiting.len();
    let who = report.waiting.iter().enumerate().map(|(at, waiting)| {
        let mut line = Line::plain(Style::Warn, format_args!("waits, {} of {of}: ", at + 1));
        line.push(Style::Plain, format_args!("{} ({}), {}: ", waiting.name, waiting.user, waiting.asked));
        line.push(Style::Faint, format_args!("{}", waiting.why));
        line
    });
    who.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_short_and_never_too_large() {
        for (bytes, text) in [
            (0, "0 B"),
            (1023, "1023 B"),
            (700 << 20, "700 MiB"),
            (13 << 29, "6.5 GiB"),
            ((1 << 30) - 1, "1023 MiB"),
            ((40 << 30) - 1, "39.9 GiB"),
            (u64::MAX, "16777215 TiB"),
        ] {
            assert_eq!(size(bytes), text);
        }
    }

    #[test]
    fn commands_can_be_typed_again() {
        let words = ["sh", "-c", "echo 'a b'", "", "x=1"].map(String::from);
        assert_eq!(shell(&words), r"sh -c 'echo '\''a b'\''' '' x=1");
    }

    #[test]
    fn ages_have_one_figure() {
        let ages = [0, 99, 100, 5999, 6000, 172_799, 172_800].map(|seconds| age(1000, 1000 + seconds));
        assert_eq!(ages, ["0s", "99s", "1m", "99m", "1h", "47h", "2d"]);
        assert_eq!(age(5, 3), "0s", "a clock that was set back");
    }
}
