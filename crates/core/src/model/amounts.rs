//! Units: bytes of memory, percent of one GPU's compute, thousandths of a CPU.

use serde::{Deserialize, Deserializer, Serialize, Serializer};
use std::fmt;
use std::str::FromStr;

/// An amount of memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Bytes(pub u64);

impl Bytes {
    /// No memory.
    pub const ZERO: Bytes = Bytes(0);

    /// `n` MiB, or `None` beyond what fits.
    pub fn mib(n: u64) -> Option<Bytes> {
        n.checked_mul(1 << 20).map(Bytes)
    }

    /// `n` GiB, or `None` beyond what fits.
    pub fn gib(n: u64) -> Option<Bytes> {
        n.checked_mul(1 << 30).map(Bytes)
    }

    /// `percent` of this amount, rounded down to whole bytes.
    pub fn percent(self, percent: u32) -> Bytes {
        // In 128 bits the product cannot overflow; a percentage of at most 100 fits back.
        let part = u128::from(self.0) * u128::from(percent) / 100;
        Bytes(u64::try_from(part).unwrap_or(u64::MAX))
    }
}

impl fmt::Display for Bytes {
    /// The largest binary unit that keeps it short: `8 GiB`, `6.5 GiB`, `700 MiB`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const UNITS: [(&str, u32); 4] = [("TiB", 40), ("GiB", 30), ("MiB", 20), ("KiB", 10)];
        let Some((unit, shift)) = UNITS.into_iter().find(|&(_, shift)| self.0 >> shift > 0) else {
            return write!(f, "{} B", self.0);
        };
        // Two decimals, cut not rounded: free memory is never shown as more than there is.
        let hundredths = (u128::from(self.0) * 100) >> shift;
        let (whole, rest) = (hundredths / 100, hundredths % 100);
        match rest {
            0 => write!(f, "{whole} {unit}"),
            r if r % 10 == 0 => write!(f, "{whole}.{} {unit}", r / 10),
            r => write!(f, "{whole}.{r:02} {unit}"),
        }
    }
}

/// A part of one GPU's compute, in thousandths of a percent.
///
/// The step is fine enough for one of 48 slots and for the per-mille figures of public traces.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Cores(u32);

impl Cores {
    /// Nothing.
    pub const NONE: Cores = Cores(0);
    /// All of one GPU.
    pub const WHOLE: Cores = Cores(100_000);

    /// Whole percents, or `None` above 100.
    pub fn percent(percent: u32) -> Option<Cores> {
        (percent <= 100).then(|| Cores(percent * 1000))
    }

    /// Thousandths of a percent, or `None` above one GPU.
    pub fn millipercent(millipercent: u32) -> Option<Cores> {
        (millipercent <= Cores::WHOLE.0).then_some(Cores(millipercent))
    }

    /// The amount in thousandths of a percent.
    pub const fn as_millipercent(self) -> u32 {
        self.0
    }

    /// The compute of `taken` slots of a GPU split in `slots`.
    ///
    /// A slot is rounded down to the step, so that all slots together never exceed the GPU; all of them are
    /// the whole of it.
    pub fn of_slots(taken: u32, slots: u32) -> Cores {
        if taken >= slots { Cores::WHOLE } else { Cores(Cores::WHOLE.0 / slots * taken) }
    }
}

impl fmt::Display for Cores {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", decimal_percent(self.0))?;
        f.write_str(" %")
    }
}

fn decimal_percent(millipercent: u32) -> String {
    let (whole, rest) = (millipercent / 1000, millipercent % 1000);
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
        let error = || CoresError(text.into());
        let (whole, rest) = text.split_once('.').unwrap_or((text, "0"));
        let digits = |s: &str| !s.is_empty() && s.bytes().all(|b| b.is_ascii_digit());
        if !digits(whole) || !digits(rest) || rest.len() > 3 {
            return Err(error());
        }
        let whole: u32 = whole.parse().map_err(|_| error())?;
        let rest: u32 = format!("{rest:0<3}").parse().map_err(|_| error())?;
        whole
            .checked_mul(1000)
            .and_then(|w| w.checked_add(rest))
            .and_then(Cores::millipercent)
            .ok_or_else(error)
    }
}

// Whole percents travel as a number, finer steps as text: never as a binary fraction.
impl Serialize for Cores {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        if self.0.is_multiple_of(1000) {
            serializer.serialize_u32(self.0 / 1000)
        } else {
            serializer.serialize_str(&decimal_percent(self.0))
        }
    }
}

impl<'de> Deserialize<'de> for Cores {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        #[derive(Deserialize)]
        #[serde(untagged)]
        enum Form {
            Number(u32),
            Text(String),
        }
        match Form::deserialize(deserializer)? {
            Form::Number(percent) => Cores::percent(percent).ok_or_else(|| CoresError(percent.to_string())),
            Form::Text(text) => text.parse(),
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
    fn bytes_are_shown_short_and_never_too_large() {
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
    fn slots_never_add_up_to_more_than_the_gpu() {
        for slots in 1..=48 {
            let one = Cores::of_slots(1, slots).as_millipercent();
            assert!(one * slots <= 100_000);
            // One more never fits beside a full set.
            assert!(one * (slots + 1) > 100_000, "{slots}");
            assert_eq!(Cores::of_slots(slots, slots), Cores::WHOLE);
        }
    }

    #[test]
    fn cores_read_percent_and_finer() {
        assert_eq!("30".parse(), Ok(Cores(30_000)));
        assert_eq!("2.083".parse(), Ok(Cores(2_083)));
        assert_eq!("100".parse(), Ok(Cores::WHOLE));
        for bad in ["", "-1", "101", "1.2345", "1.", ".5", "100.001", "1e1", "4294967296"] {
            assert!(bad.parse::<Cores>().is_err(), "{bad}");
        }
    }

    proptest! {
        #[test]
        fn cores_round_trip(milli in 0u32..=100_000) {
            let cores = Cores(milli);
            prop_assert_eq!(decimal_percent(milli).parse(), Ok(cores));
            let json = serde_json::to_string(&cores).unwrap();
            prop_assert_eq!(serde_json::from_str::<Cores>(&json).unwrap(), cores);
        }
    }
}
