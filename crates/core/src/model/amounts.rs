//! Units: memory in bytes, compute in percent of one GPU, CPU in thousandths.

use serde::{Deserialize, Deserializer, Serialize, Serializer};
use std::fmt;
use std::iter::Sum;
use std::str::FromStr;

/// An amount of memory in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Bytes(pub u64);

impl Bytes {
    /// Zero bytes of memory.
    pub const ZERO: Bytes = Bytes(0);

    /// Returns `n` MiB, or `None` on overflow.
    pub fn mib(n: u64) -> Option<Bytes> {
        n.checked_mul(1 << 20).map(Bytes)
    }

    /// Returns `n` GiB, or `None` on overflow.
    pub fn gib(n: u64) -> Option<Bytes> {
        n.checked_mul(1 << 30).map(Bytes)
    }

    /// Returns `percent` of this amount, rounded down to whole bytes.
    pub fn percent(self, percent: u32) -> Bytes {
        // The product cannot overflow 128 bits. A percentage up to 100 always fits 64 bits again.
        let part = u128::from(self.0) * u128::from(percent) / 100;
        Bytes(u64::try_from(part).unwrap_or(u64::MAX))
    }
}

impl fmt::Display for Bytes {
    /// Formats with the largest binary unit that gives at least 1: `8 GiB`, `6.5 GiB`, `700 MiB`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const UNITS: [(&str, u32); 4] = [("TiB", 40), ("GiB", 30), ("MiB", 20), ("KiB", 10)];
        let Some((unit, shift)) = UNITS.into_iter().find(|&(_, shift)| self.0 >> shift > 0) else {
            return write!(f, "{} B", self.0);
        };
        // Two decimals, rounded down: free memory is never shown as more than is free.
        let hundredths = (u128::from(self.0) * 100) >> shift;
        let (whole, rest) = (hundredths / 100, hundredths % 100);
        match rest {
            0 => write!(f, "{whole} {unit}"),
            r if r % 10 == 0 => write!(f, "{whole}.{} {unit}", r / 10),
            r => write!(f, "{whole}.{r:02} {unit}"),
        }
    }
}

/// Compute of one GPU, in thousandths of a percent.
///
/// The resolution is sufficient for one of 48 slots and for the per-mille values of public traces.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Cores(u32);

/// How many of the unit of [`Cores`] are one percent.
const MILLIPERCENT_PER_PERCENT: u32 = 1000;

impl Cores {
    /// Zero percent of compute.
    pub const NONE: Cores = Cores(0);
    /// All compute of one GPU.
    pub const WHOLE: Cores = Cores(100 * MILLIPERCENT_PER_PERCENT);

    /// Converts a whole percentage, or returns `None` above 100.
    pub fn percent(percent: u32) -> Option<Cores> {
        (percent <= 100).then(|| Cores(percent * MILLIPERCENT_PER_PERCENT))
    }

    /// Converts thousandths of a percent, or returns `None` above one GPU.
    pub fn millipercent(millipercent: u32) -> Option<Cores> {
        (millipercent <= Cores::WHOLE.0).then_some(Cores(millipercent))
    }

    /// Returns the amount in thousandths of a percent.
    pub const fn as_millipercent(self) -> u32 {
        self.0
    }

    /// Returns the amount in percent, rounded down: for interfaces that count whole percentages.
    pub const fn as_whole_percent(self) -> u32 {
        self.0 / MILLIPERCENT_PER_PERCENT
    }

    /// Returns the compute of `taken` slots of a GPU with `slots` slots.
    ///
    /// A slot is rounded down, so that all slots together never exceed the GPU. All slots are the whole GPU.
    pub fn of_slots(taken: u32, slots: u32) -> Cores {
        if taken >= slots { Cores::WHOLE } else { Cores(Cores::WHOLE.0 / slots * taken) }
    }
}

impl fmt::Display for Cores {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} %", decimal_percent(u64::from(self.0)))
    }
}

/// Compute of several GPUs together, in thousandths of a percent of one GPU: 150 % is one and a half GPUs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TotalCores(u64);

impl TotalCores {
    /// Returns the sum of two amounts.
    #[must_use]
    pub fn saturating_add(self, other: TotalCores) -> TotalCores {
        TotalCores(self.0.saturating_add(other.0))
    }
}

impl Sum<Cores> for TotalCores {
    fn sum<I: Iterator<Item = Cores>>(cores: I) -> TotalCores {
        cores.fold(TotalCores::default(), |sum, cores| sum.saturating_add(TotalCores(u64::from(cores.0))))
    }
}

impl fmt::Display for TotalCores {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} %", decimal_percent(self.0))
    }
}

/// Why a text is not an amount of compute.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("invalid percentage {0}: write a number with at most three decimals, such as 150")]
pub struct TotalCoresError(String);

impl FromStr for TotalCores {
    type Err = TotalCoresError;

    fn from_str(text: &str) -> Result<Self, TotalCoresError> {
        parse_millipercent(text)
            .map(|millipercent| TotalCores(u64::from(millipercent)))
            .ok_or_else(|| TotalCoresError(text.into()))
    }
}

fn decimal_percent(millipercent: u64) -> String {
    let unit = u64::from(MILLIPERCENT_PER_PERCENT);
    let (whole, rest) = (millipercent / unit, millipercent % unit);
    if rest == 0 {
        return whole.to_string();
    }
    format!("{whole}.{rest:03}").trim_end_matches('0').to_string()
}

/// Why a text is not a percentage of one GPU.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("\"{0}\" is not a percentage of one GPU: write a number from 0 to 100 with at most three decimals")]
pub struct CoresError(String);

impl FromStr for Cores {
    type Err = CoresError;

    fn from_str(text: &str) -> Result<Self, CoresError> {
        parse_millipercent(text).and_then(Cores::millipercent).ok_or_else(|| CoresError(text.into()))
    }
}

/// Parses a percentage with at most three decimals.
fn parse_millipercent(text: &str) -> Option<u32> {
    let (whole, rest) = text.split_once('.').unwrap_or((text, "0"));
    let digits = |s: &str| !s.is_empty() && s.bytes().all(|b| b.is_ascii_digit());
    if !digits(whole) || !digits(rest) || rest.len() > 3 {
        return None;
    }
    let whole: u32 = whole.parse().ok()?;
    let rest: u32 = format!("{rest:0<3}").parse().ok()?;
    whole.checked_mul(MILLIPERCENT_PER_PERCENT)?.checked_add(rest)
}

// Whole percentages are serialized as a number and finer ones as text, never as a binary fraction.
impl Serialize for Cores {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        if self.0.is_multiple_of(MILLIPERCENT_PER_PERCENT) {
            serializer.serialize_u32(self.as_whole_percent())
        } else {
            serializer.serialize_str(&decimal_percent(u64::from(self.0)))
        }
    }
}

impl<'de> Deserialize<'de> for Cores {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        #[derive(Deserialize)]
        #[serde(untagged)]
        enum CoresForm {
            Number(u32),
            Text(String),
        }
        match CoresForm::deserialize(deserializer)? {
            CoresForm::Number(percent) => {
                Cores::percent(percent).ok_or_else(|| CoresError(percent.to_string()))
            }
            CoresForm::Text(text) => text.parse(),
        }
        .map_err(serde::de::Error::custom)
    }
}

/// CPU in thousandths of a core.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct MilliCpu(pub u64);

impl fmt::Display for MilliCpu {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 % 1000 {
            0 => write!(f, "{} CPU", self.0 / 1000),
            _ => write!(f, "{}m CPU", self.0),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn bytes_are_formatted_short_and_rounded_down() {
        for (bytes, text) in [
            (0, "0 B"),
            (1023, "1023 B"),
            (8 << 30, "8 GiB"),
            (13 << 29, "6.5 GiB"),
            ((1 << 30) - 1, "1023.99 MiB"),
            (40 << 40, "40 TiB"),
        ] {
            assert_eq!(Bytes(bytes).to_string(), text);
        }
    }

    #[test]
    fn all_slots_together_never_exceed_the_gpu() {
        for slots in 1..=48 {
            let one = Cores::of_slots(1, slots).as_millipercent();
            assert!(one * slots <= 100_000);
            // One more slot than a GPU has never fits.
            assert!(one * (slots + 1) > 100_000, "{slots}");
            assert_eq!(Cores::of_slots(slots, slots), Cores::WHOLE);
        }
    }

    #[test]
    fn cores_parse_percent_with_three_decimals() {
        assert_eq!("30".parse(), Ok(Cores(30_000)));
        assert_eq!("2.083".parse(), Ok(Cores(2_083)));
        assert_eq!("100".parse(), Ok(Cores::WHOLE));
        for bad in ["", "-1", "101", "1.2345", "1.", ".5", "100.001", "1e1", "4294967296"] {
            assert!(bad.parse::<Cores>().is_err(), "{bad}");
        }
    }

    #[test]
    fn compute_of_several_gpus_may_exceed_one() {
        let half_more: TotalCores = "150".parse().unwrap();
        assert_eq!(half_more, [Cores::WHOLE, Cores(50_000)].into_iter().sum());
        assert_eq!("33.5".parse(), Ok(TotalCores(33_500)));
        assert_eq!(
            (half_more.to_string(), TotalCores(33_500).to_string()),
            ("150 %".into(), "33.5 %".into())
        );
        for bad in ["", "-1", "many", "1.2345", "4294967296"] {
            assert!(bad.parse::<TotalCores>().is_err(), "{bad}");
        }
        assert_eq!(Cores(2_083).as_whole_percent(), 2);
    }

    proptest! {
        #[test]
        fn cores_round_trip(milli in 0u32..=100_000) {
            let cores = Cores(milli);
            prop_assert_eq!(decimal_percent(u64::from(milli)).parse(), Ok(cores));
            let json = serde_json::to_string(&cores).unwrap();
            prop_assert_eq!(serde_json::from_str::<Cores>(&json).unwrap(), cores);
        }
    }
}
