//! Amounts as people write them on the command line. A slip is answered with the right spelling.

use partage_core::model::{Bytes, Cores};
use partage_core::quantity::{Quantity, QuantityError};
use std::time::Duration;

/// Less memory than this was meant to be something else.
const LEAST_MEMORY: u64 = 1 << 20;
/// Letters that make amounts of memory larger, and the powers of two and ten they stand for.
const PREFIXES: [(char, u32, u32); 5] =
    [('K', 10, 3), ('M', 20, 6), ('G', 30, 9), ('T', 40, 12), ('P', 50, 15)];
/// Nobody waits longer than a week for anything here.
const LONGEST: Duration = Duration::from_secs(7 * 24 * 3600);

/// Memory: `4Gi`, `500Mi`, `4G`.
pub(crate) fn memory(text: &str) -> Result<Bytes, String> {
    let text = text.trim();
    let (number, unit) = parts(text);
    if let Some(percent) = unit.strip_suffix('%')
        && percent.trim().is_empty()
        && !number.is_empty()
    {
        return Err(format!("{text} is no amount of memory: use --memory-percent {number}"));
    }
    let bytes = match text.parse::<Quantity>().and_then(Quantity::to_units) {
        Ok(bytes) => bytes,
        Err(QuantityError::Negative(_)) => {
            return Err(format!("{text} is less than nothing: write it like 4Gi"));
        }
        Err(QuantityError::TooLarge(_) | QuantityError::TooMany { .. }) => {
            return Err(format!("{text} is more memory than can be counted: write it like 4Gi"));
        }
        Err(_) => return Err(misspelt_memory(text, &number, unit)),
    };
    if bytes >= LEAST_MEMORY {
        return Ok(Bytes(bytes));
    }
    // As with `500m`, which is half a byte to Kubernetes.
    let small = Bytes(bytes);
    match (bytes, unit) {
        (0, "") => Err("no memory is no share: write it like 4Gi, or leave it out".into()),
        (_, "m") => Err(misspelt_memory(text, &number, unit)),
        (_, "") if number.len() <= 3 => Err(format!("{text} is {small} of memory: did you mean {number}Gi?")),
        (_, "") => Err(format!("{text} is {small} of memory: did you mean {number}Mi?")),
        _ => Err(format!("{text} is {small} of memory, which no program can use: write it like 4Gi")),
    }
}

/// What `5gb` should have been.
fn misspelt_memory(text: &str, number: &str, unit: &str) -> String {
    let no = format!("{text} is no amount of memory");
    let spelling = unit.trim().to_ascii_lowercase();
    let known = PREFIXES.into_iter().find(|(letter, ..)| {
        let letter = letter.to_ascii_lowercase();
        let rest = spelling.strip_prefix(letter);
        rest.is_some_and(|rest| ["", "b", "i", "ib"].contains(&rest) || is_word(letter, rest))
    });
    match known {
        Some((letter, two, ten)) if !number.is_empty() => {
            // Kubernetes writes thousands small.
            let small = if letter == 'K' { 'k' } else { letter };
            format!(
                "{no}: write {number}{letter}i ({number} x 2^{two} bytes) or {number}{small} ({number} x 10^{ten})"
            )
        }
        _ => format!("{no}: write it like 4Gi (4 x 2^30 bytes), 500Mi or 4G (4 x 10^9 bytes)"),
    }
}

/// Whether it goes on as `gigabytes`, `gigs`, `mebibyte` or `meg` do.
fn is_word(letter: char, rest: &str) -> bool {
    let words: [&str; 3] = match letter {
        'k' => ["ilo", "ibi", "ilo"],
        'm' => ["ega", "ebi", "eg"],
        'g' => ["iga", "ibi", "ig"],
        't' => ["era", "ebi", "era"],
        _ => ["eta", "ebi", "eta"],
    };
    words
        .iter()
        .any(|word| rest.strip_prefix(word).is_some_and(|rest| ["", "s", "byte", "bytes"].contains(&rest)))
}

/// A whole percentage, 1 to 100: `25`, `25%`.
pub(crate) fn percent(text: &str) -> Result<u32, String> {
    let wrong = || format!("{} is no percentage: write a whole number from 1 to 100", text.trim());
    let number: u32 = without_percent(text).parse().map_err(|_| wrong())?;
    if (1..=100).contains(&number) { Ok(number) } else { Err(wrong()) }
}

/// Compute of each GPU of a new share: `30`, `30%`, `12.5`.
pub(crate) fn cores(text: &str) -> Result<Cores, String> {
    some_cores(text, |percent| {
        let gpus = percent.div_ceil(100);
        if gpus <= 16 {
            format!("use --gpus {gpus} --cores {}", percent.div_ceil(gpus))
        } else {
            "use 1 to 100, and --gpus for more than one".into()
        }
    })
}

/// Compute of each GPU of a share whose GPUs stay the same.
pub(crate) fn cores_of_each(text: &str) -> Result<Cores, String> {
    some_cores(text, |_| "use 1 to 100; it is meant of each GPU that the share has".into())
}

fn some_cores(text: &str, instead: impl Fn(u64) -> String) -> Result<Cores, String> {
    let text = text.trim();
    let number = without_percent(text);
    let wrong = || {
        format!(
            "{text} is no part of a GPU's compute: write percents from 1 to 100, like 30 or 12.5 (at most 3 decimals)"
        )
    };
    if let Ok(cores) = number.parse::<Cores>() {
        return match cores.as_millipercent() {
            0 => Err(format!("{text} is no compute at all: use 1 to 100, or leave it out to promise none")),
            milli if milli < 1000 => {
                let meant = Cores::millipercent(milli * 100).map_or(String::new(), |cores| cores.to_string());
                let meant = meant.trim_end_matches(" %");
                Err(format!(
                    "{text} is less than a percent of a GPU: did you mean {meant}? Cores are percents, from 1 to 100"
                ))
            }
            _ => Ok(cores),
        };
    }
    if number.contains(',') && number.replace(',', ".").parse::<Cores>().is_ok() {
        return Err(format!("{text} is written {} here", number.replace(',', ".")));
    }
    let (whole, rest) = number.split_once('.').unwrap_or((number, "0"));
    match whole.parse::<u64>() {
        Ok(percent) if percent >= 100 && rest.bytes().all(|digit| digit.is_ascii_digit()) => {
            let over = rest.bytes().any(|digit| digit != b'0');
            let percent = percent.saturating_add(u64::from(over));
            if percent == 100 {
                Err(wrong())
            } else {
                Err(format!("{text} is more than one GPU: {}", instead(percent)))
            }
        }
        _ => Err(wrong()),
    }
}

/// A time: `10s`, `500ms`, `2m`, `1h`.
pub(crate) fn duration(text: &str) -> Result<Duration, String> {
    let text = text.trim();
    let (number, unit) = parts(text);
    let no = format!("{text} is no time");
    let like = "write it like 10s, 500ms or 2m";
    let millis = match unit.trim().to_ascii_lowercase().as_str() {
        "ms" | "millis" | "msec" | "milliseconds" => (1.0, "ms"),
        "s" | "sec" | "secs" | "second" | "seconds" => (1e3, "s"),
        "m" | "min" | "mins" | "minute" | "minutes" => (6e4, "m"),
        "h" | "hr" | "hour" | "hours" => (3.6e6, "h"),
        "" if !number.is_empty() => {
            return Err(format!("{text} of what? Write {number}s for seconds, or {number}ms or {number}m"));
        }
        _ => return Err(format!("{no}: {like}")),
    };
    let (each, spelling) = millis;
    if number.is_empty() {
        return Err(format!("{no}: {like}"));
    }
    if unit != spelling || !text.starts_with(&number) {
        return Err(format!("{no}: write {number}{spelling}"));
    }
    let count: f64 = number.parse().map_err(|_| format!("{no}: {like}"))?;
    // In whole milliseconds; what is too large for them becomes the largest.
    let time = Duration::from_millis((count * each).round() as u64);
    if time <= LONGEST { Ok(time) } else { Err(format!("{text} is longer than a week: write less")) }
}

/// Time between two looks: as [`duration`], and a bare number is seconds.
pub(crate) fn interval(text: &str) -> Result<Duration, String> {
    let bare = text.trim().bytes().all(|byte| byte.is_ascii_digit() || byte == b'.');
    let time = if bare { duration(&format!("{}s", text.trim())) } else { duration(text) }
        .map_err(|_| format!("{} is no time: write it like 2s, 500ms or 1m", text.trim()))?;
    let (least, most) = (Duration::from_millis(50), Duration::from_secs(3600));
    if (least..=most).contains(&time) { Ok(time) } else { Err("use 50ms to 1h".into()) }
}

/// A number, with a point as its mark, and what follows it.
fn parts(text: &str) -> (String, &str) {
    let end =
        text.find(|letter: char| !letter.is_ascii_digit() && !".,".contains(letter)).unwrap_or(text.len());
    let (number, unit) = text.split_at(end);
    let number = number.replace(',', ".");
    // Only a number is repeated to people as one.
    if number.parse::<f64>().is_ok() { (number, unit) } else { (String::new(), unit) }
}

fn without_percent(text: &str) -> &str {
    let text = text.trim();
    text.strip_suffix('%').map_or(text, str::trim_end)
}

#[cfg(test)]
mod tests;
