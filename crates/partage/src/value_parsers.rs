//! Parses amounts of the command line. Errors give the correct spelling; clap puts the option and its value before them.

use partage_core::model::{Bytes, Cores, MAX_PRIORITY};
use partage_core::quantity::{Quantity, QuantityError};
use std::time::Duration;

/// Minimum memory of a share; a smaller amount is a mistake, such as a missing unit.
const MIN_MEMORY_BYTES: u64 = 1 << 20;
/// Unit prefixes of memory amounts, with their powers of two and ten.
const UNIT_PREFIXES: [(char, u32, u32); 5] =
    [('K', 10, 3), ('M', 20, 6), ('G', 30, 9), ('T', 40, 12), ('P', 50, 15)];
/// Maximum of every duration option: one week.
const MAX_DURATION: Duration = Duration::from_secs(7 * 24 * 3600);

/// Parses an amount of memory as Kubernetes does: `4Gi`, `500Mi`, `4G`.
pub(crate) fn parse_memory(text: &str) -> Result<Bytes, String> {
    let text = text.trim();
    let (number, unit) = split_number(text);
    if let Some(percent) = unit.strip_suffix('%')
        && percent.trim().is_empty()
        && !number.is_empty()
    {
        return Err(format!("for a percentage use --memory-percent {number}"));
    }
    let bytes = match text.parse::<Quantity>().and_then(Quantity::to_units) {
        Ok(bytes) => bytes,
        Err(QuantityError::Negative(_)) => return Err("memory cannot be negative: write it like 4Gi".into()),
        Err(QuantityError::TooLarge(_) | QuantityError::TooMany { .. }) => {
            return Err("the amount is too large: write it like 4Gi".into());
        }
        Err(_) => return Err(memory_spelling_hint(&number, unit)),
    };
    if bytes >= MIN_MEMORY_BYTES {
        return Ok(Bytes(bytes));
    }
    let small = Bytes(bytes);
    match (bytes, unit) {
        (0, "") => Err("memory cannot be 0: write it like 4Gi, or omit the option".into()),
        // To Kubernetes `500m` is half a byte.
        (_, "m") => Err(memory_spelling_hint(&number, unit)),
        (_, "") if number.len() <= 3 => Err(format!("{small} is too little: did you mean {number}Gi?")),
        (_, "") => Err(format!("{small} is too little: did you mean {number}Mi?")),
        _ => {
            Err(format!("{small} is less than the minimum of {}: write it like 4Gi", Bytes(MIN_MEMORY_BYTES)))
        }
    }
}

/// Suggests the correct spelling of an amount such as `5gb`.
fn memory_spelling_hint(number: &str, unit: &str) -> String {
    let spelling = unit.trim().to_ascii_lowercase();
    let known = UNIT_PREFIXES.into_iter().find(|(letter, ..)| {
        let letter = letter.to_ascii_lowercase();
        let rest = spelling.strip_prefix(letter);
        rest.is_some_and(|rest| ["", "b", "i", "ib"].contains(&rest) || is_unit_word(letter, rest))
    });
    match known {
        Some((letter, two, ten)) if !number.is_empty() => {
            // Kubernetes has a lower-case `k` for 1000.
            let decimal = if letter == 'K' { 'k' } else { letter };
            format!(
                "write {number}{letter}i ({number} x 2^{two} bytes) or {number}{decimal} ({number} x 10^{ten} bytes)"
            )
        }
        _ => "write it like 4Gi (4 x 2^30 bytes), 500Mi or 4G (4 x 10^9 bytes)".into(),
    }
}

/// Returns whether a prefix letter and the rest make a word such as `gigabytes`, `gigs`, `mebibyte` or `meg`.
fn is_unit_word(letter: char, rest: &str) -> bool {
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

/// Parses a whole percentage from 1 to 100: `25`, `25%`.
pub(crate) fn parse_percent(text: &str) -> Result<u32, String> {
    let number = trim_percent_sign(text).parse().ok().filter(|number| (1..=100).contains(number));
    number.ok_or_else(|| "use a whole number from 1 to 100".into())
}

/// Parses a priority among shares that want the same turn.
pub(crate) fn parse_priority(text: &str) -> Result<u32, String> {
    let is_number = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    let number = text.parse().ok().filter(|number| is_number && *number <= MAX_PRIORITY);
    number.ok_or_else(|| format!("use a whole number from 0 to {MAX_PRIORITY}"))
}

/// Parses the compute of each GPU of a new share, in percent: `30`, `30%`, `12.5`.
pub(crate) fn parse_cores(text: &str) -> Result<Cores, String> {
    parse_cores_or(text, |percent| {
        let gpus = percent.div_ceil(100);
        if gpus <= 16 {
            format!("use --gpus {gpus} --cores {}", percent.div_ceil(gpus))
        } else {
            "use 1 to 100, and --gpus for more than one GPU".into()
        }
    })
}

/// Parses the compute of each GPU of an existing share, whose GPUs cannot change.
pub(crate) fn parse_cores_per_gpu(text: &str) -> Result<Cores, String> {
    parse_cores_or(text, |_| "use 1 to 100; the value applies to each GPU of the share".into())
}

fn parse_cores_or(text: &str, too_large_hint: impl Fn(u64) -> String) -> Result<Cores, String> {
    let number = trim_percent_sign(text);
    let invalid = || "use a percentage from 1 to 100, such as 30 or 12.5 (at most 3 decimals)".to_string();
    if let Ok(cores) = number.parse::<Cores>() {
        return match cores.as_millipercent() {
            0 => Err("cores cannot be 0: use 1 to 100, or omit the option for no guarantee".into()),
            milli if milli < 1000 => {
                let meant = Cores::millipercent(milli * 100).map_or(String::new(), |cores| cores.to_string());
                let meant = meant.trim_end_matches(" %");
                Err(format!(
                    "less than 1 % of a GPU: did you mean {meant}? Cores are percentages from 1 to 100"
                ))
            }
            _ => Ok(cores),
        };
    }
    if number.contains(',') && number.replace(',', ".").parse::<Cores>().is_ok() {
        return Err(format!("write {}, with a decimal point", number.replace(',', ".")));
    }
    let (whole, rest) = number.split_once('.').unwrap_or((number, "0"));
    match whole.parse::<u64>() {
        Ok(percent) if percent >= 100 && rest.bytes().all(|digit| digit.is_ascii_digit()) => {
            let over = rest.bytes().any(|digit| digit != b'0');
            let percent = percent.saturating_add(u64::from(over));
            if percent == 100 {
                Err(invalid())
            } else {
                Err(format!("more than one GPU: {}", too_large_hint(percent)))
            }
        }
        _ => Err(invalid()),
    }
}

/// Parses a duration of at most a week: `10s`, `500ms`, `2m`, `1h`.
pub(crate) fn parse_duration(text: &str) -> Result<Duration, String> {
    let text = text.trim();
    let (number, unit) = split_number(text);
    let invalid = || "write it like 10s, 500ms or 2m".to_string();
    let (millis, spelling) = match unit.trim().to_ascii_lowercase().as_str() {
        "ms" | "millis" | "msec" | "milliseconds" => (1.0, "ms"),
        "s" | "sec" | "secs" | "second" | "seconds" => (1e3, "s"),
        "m" | "min" | "mins" | "minute" | "minutes" => (6e4, "m"),
        "h" | "hr" | "hour" | "hours" => (3.6e6, "h"),
        "" if !number.is_empty() => {
            return Err(format!(
                "the unit is missing: write {number}s for seconds, or {number}ms or {number}m"
            ));
        }
        _ => return Err(invalid()),
    };
    if number.is_empty() {
        return Err(invalid());
    }
    if unit != spelling || !text.starts_with(&number) {
        return Err(format!("write {number}{spelling}"));
    }
    let count: f64 = number.parse().map_err(|_| invalid())?;
    // The conversion saturates: a value that does not fit becomes the largest one, and is refused below.
    let time = Duration::from_millis((count * millis).round() as u64);
    if time <= MAX_DURATION { Ok(time) } else { Err("longer than the maximum of a week (168h)".into()) }
}

/// Parses a refresh interval: as [`parse_duration`], and a number without a unit is seconds.
pub(crate) fn parse_interval(text: &str) -> Result<Duration, String> {
    let has_no_unit = text.trim().bytes().all(|byte| byte.is_ascii_digit() || byte == b'.');
    let time = if has_no_unit { parse_duration(&format!("{}s", text.trim())) } else { parse_duration(text) }
        .map_err(|_| "write it like 2s, 500ms or 1m".to_string())?;
    let allowed = Duration::from_millis(50)..=Duration::from_secs(3600);
    if allowed.contains(&time) { Ok(time) } else { Err("use 50ms to 1h".into()) }
}

/// Splits a text into a number, with a decimal point, and the rest. The number is empty if the text has none.
fn split_number(text: &str) -> (String, &str) {
    let end =
        text.find(|letter: char| !letter.is_ascii_digit() && !".,".contains(letter)).unwrap_or(text.len());
    let (number, unit) = text.split_at(end);
    let number = number.replace(',', ".");
    if number.parse::<f64>().is_ok() { (number, unit) } else { (String::new(), unit) }
}

fn trim_percent_sign(text: &str) -> &str {
    let text = text.trim();
    text.strip_suffix('%').map_or(text, str::trim_end)
}

#[cfg(test)]
mod tests;
