//! Kubernetes quantities (`8Gi`, `500m`, `1e3`), parsed as the API server parses them.
//!
//! Values are exact, in nano units. As in Kubernetes, finer digits are rounded away from zero. Kubernetes silently caps a
//! value at 2^63 - 1; here such a value is an error, because a capped amount is never intended.

use crate::truncate::shorten;
use std::fmt;
use std::str::FromStr;

/// Number of nano units in one unit.
const NANOS_PER_UNIT: u128 = 1_000_000_000;
/// The largest value that Kubernetes supports.
const MAX_UNITS: u128 = i64::MAX as u128;

/// An exact Kubernetes quantity.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Quantity {
    nanos: i128,
}

/// Why a text is not a valid quantity.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum QuantityError {
    /// The text does not start with a number.
    #[error(
        "\"{0}\" is not a Kubernetes quantity: write a number with an optional suffix, like 8Gi, 8G, 500m or 1e3"
    )]
    NotANumber(String),
    /// The text is a placeholder of an unrendered template.
    #[error("\"{0}\" is a template, not an amount: render it first (helm template … | partage check -f -)")]
    Template(String),
    /// The number is followed by an unknown suffix.
    #[error(
        "\"{text}\" ends in \"{suffix}\", which is not a Kubernetes suffix: use Ki Mi Gi Ti Pi Ei, n u m k M G T P E, or an exponent like e3"
    )]
    UnknownSuffix {
        /// The whole text of the quantity.
        text: String,
        /// The text after the number.
        suffix: String,
    },
    /// The value exceeds the maximum of Kubernetes.
    #[error("\"{0}\" is larger than 9223372036854775807, the maximum in Kubernetes")]
    TooLarge(String),
    /// The value does not fit into 64 bits in the unit that it is counted in.
    #[error("{quantity} is too large to count in {steps}: write less")]
    TooMany {
        /// The value that is too large.
        quantity: Quantity,
        /// The name of the unit.
        steps: &'static str,
    },
    /// The value is a fraction, but a whole number is required.
    #[error("{0} is not a whole number")]
    NotWhole(Quantity),
    /// The value is negative.
    #[error("{0} is negative")]
    Negative(Quantity),
}

impl Quantity {
    /// Returns the value as a whole, non-negative number. Fractions such as `500m` are errors.
    pub fn to_count(self) -> Result<u64, QuantityError> {
        if self.nanos < 0 {
            return Err(QuantityError::Negative(self));
        }
        if self.nanos % NANOS_PER_UNIT as i128 != 0 {
            return Err(QuantityError::NotWhole(self));
        }
        Ok((self.nanos / NANOS_PER_UNIT as i128) as u64)
    }

    /// Returns the value in thousandths, rounded up, as Kubernetes counts CPU.
    pub fn to_milli(self) -> Result<u64, QuantityError> {
        self.scaled_up(NANOS_PER_UNIT / 1000, "thousandths")
    }

    /// Returns the value in whole units, rounded up, as Kubernetes counts memory.
    pub fn to_units(self) -> Result<u64, QuantityError> {
        self.scaled_up(NANOS_PER_UNIT, "units")
    }

    fn scaled_up(self, nanos_per_step: u128, steps: &'static str) -> Result<u64, QuantityError> {
        let nanos = u128::try_from(self.nanos).map_err(|_| QuantityError::Negative(self))?;
        u64::try_from(nanos.div_ceil(nanos_per_step))
            .map_err(|_| QuantityError::TooMany { quantity: self, steps })
    }
}

impl fmt::Display for Quantity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let sign = if self.nanos < 0 { "-" } else { "" };
        let magnitude = self.nanos.unsigned_abs();
        let (units, nanos) = (magnitude / NANOS_PER_UNIT, magnitude % NANOS_PER_UNIT);
        if nanos == 0 {
            return write!(f, "{sign}{units}");
        }
        // The canonical form of Kubernetes has no fractions: use the largest suffix with a whole number.
        match nanos {
            n if n % 1_000_000 == 0 => write!(f, "{sign}{}m", magnitude / 1_000_000),
            n if n % 1_000 == 0 => write!(f, "{sign}{}u", magnitude / 1_000),
            _ => write!(f, "{sign}{magnitude}n"),
        }
    }
}

impl FromStr for Quantity {
    type Err = QuantityError;

    fn from_str(text: &str) -> Result<Self, QuantityError> {
        // The API server trims quantities.
        let text = text.trim();
        let (negative, unsigned) = match text.as_bytes().first() {
            Some(b'-') => (true, &text[1..]),
            Some(b'+') => (false, &text[1..]),
            _ => (false, text),
        };
        let number_end = unsigned.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(unsigned.len());
        let (number, suffix) = unsigned.split_at(number_end);
        let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
        if text.starts_with("{{") {
            return Err(QuantityError::Template(shorten(text)));
        }
        if whole.len() + fraction.len() == 0 || fraction.contains('.') {
            return Err(QuantityError::NotANumber(shorten(text)));
        }
        let scale = SuffixScale::of_suffix(suffix).ok_or_else(|| match suffix.chars().next() {
            Some(c) if c.is_ascii_alphabetic() => {
                QuantityError::UnknownSuffix { text: shorten(text), suffix: shorten(suffix) }
            }
            _ => QuantityError::NotANumber(shorten(text)),
        })?;
        let too_large = || QuantityError::TooLarge(shorten(text));
        let magnitude = scale.apply(whole, fraction).ok_or_else(too_large)?;
        let nanos = i128::try_from(magnitude).map_err(|_| too_large())?;
        Ok(Quantity { nanos: if negative { -nanos } else { nanos } })
    }
}

/// The factor of a suffix: 10^ten x 2^two.
struct SuffixScale {
    ten: i64,
    two: u32,
}

impl SuffixScale {
    fn of_suffix(suffix: &str) -> Option<SuffixScale> {
        let decimal = |ten| Some(SuffixScale { ten, two: 0 });
        let binary = |two| Some(SuffixScale { ten: 0, two });
        match suffix {
            "n" => decimal(-9),
            "u" => decimal(-6),
            "m" => decimal(-3),
            "" => decimal(0),
            "k" => decimal(3),
            "M" => decimal(6),
            "G" => decimal(9),
            "T" => decimal(12),
            "P" => decimal(15),
            "E" => decimal(18),
            "Ki" => binary(10),
            "Mi" => binary(20),
            "Gi" => binary(30),
            "Ti" => binary(40),
            "Pi" => binary(50),
            "Ei" => binary(60),
            _ => {
                let exponent = suffix.strip_prefix(['e', 'E'])?;
                decimal_exponent(exponent).and_then(decimal)
            }
        }
    }

    /// Returns `whole.fraction` times this factor in nano units, or `None` if it exceeds the maximum of Kubernetes.
    fn apply(&self, whole: &str, fraction: &str) -> Option<u128> {
        let digits: Vec<u8> = whole.bytes().chain(fraction.bytes()).map(|b| b - b'0').collect();
        if digits.iter().all(|&d| d == 0) {
            return Some(0);
        }
        // A power of ten moves the decimal point. The value is then split into units and a fraction.
        let point = i64::try_from(whole.len()).ok()?.checked_add(self.ten)?;
        let units = digits_before(&digits, point)?;
        let mut limbs = limbs_after(&digits, point);
        let carry = double_fraction(&mut limbs, self.two);
        let units = units.checked_mul(1u128 << self.two)?.checked_add(carry)?;
        let nanos = limbs.first().copied().unwrap_or(0);
        let finer = limbs.iter().skip(1).any(|&limb| limb != 0);
        let total = units.checked_mul(NANOS_PER_UNIT)?.checked_add(u128::from(nanos) + u128::from(finer))?;
        (total <= MAX_UNITS * NANOS_PER_UNIT).then_some(total)
    }
}

/// Parses an exponent, a signed decimal integer of 64 bits as in Kubernetes. Extreme exponents are clamped: they all mean
/// zero, rounded up to one nano, or too large.
fn decimal_exponent(text: &str) -> Option<i64> {
    const MAX_EXPONENT: i64 = i64::MAX / 4;
    text.parse::<i64>().ok().map(|exponent| exponent.clamp(-MAX_EXPONENT, MAX_EXPONENT))
}

/// Returns the integer formed by the digits left of the decimal point.
fn digits_before(digits: &[u8], point: i64) -> Option<u128> {
    let mut units: u128 = 0;
    let Ok(point) = usize::try_from(point) else { return Some(0) };
    for digit in digits.iter().take(point) {
        units = units.checked_mul(10)?.checked_add(u128::from(*digit))?;
    }
    for _ in digits.len()..point {
        // Zeros appended by the exponent: stop as soon as the value is out of range.
        if units == 0 {
            break;
        }
        units = units.checked_mul(10)?;
        if units > MAX_UNITS {
            return None;
        }
    }
    Some(units)
}

/// Returns the digits right of the decimal point as base-10^9 limbs, the most significant first.
fn limbs_after(digits: &[u8], point: i64) -> Vec<u32> {
    // After 60 leading zeros, no binary suffix (at most 2^60) raises a digit above one nano.
    let leading_zeros = usize::try_from(-point).unwrap_or(0).min(60);
    let skipped = usize::try_from(point).unwrap_or(0).min(digits.len());
    let fraction: Vec<u8> =
        std::iter::repeat_n(0, leading_zeros).chain(digits[skipped..].iter().copied()).collect();
    fraction
        .chunks(9)
        .map(|chunk| {
            let value = chunk.iter().fold(0u32, |limb, &digit| limb * 10 + u32::from(digit));
            value * 10u32.pow(9 - chunk.len() as u32)
        })
        .collect()
}

/// Multiplies the fraction by 2^`twos` in place and returns the carry into the units.
fn double_fraction(limbs: &mut [u32], twos: u32) -> u128 {
    let mut carry_out: u128 = 0;
    let mut left = twos;
    while left > 0 {
        let step = left.min(30);
        let mut carry: u64 = 0;
        for limb in limbs.iter_mut().rev() {
            let value = (u64::from(*limb) << step) + carry;
            *limb = (value % NANOS_PER_UNIT as u64) as u32;
            carry = value / NANOS_PER_UNIT as u64;
        }
        carry_out = (carry_out << step) + u128::from(carry);
        left -= step;
    }
    carry_out
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn nanos(text: &str) -> i128 {
        text.parse::<Quantity>().unwrap_or_else(|e| panic!("{text}: {e}")).nanos
    }

    #[test]
    fn every_suffix_is_parsed() {
        for (text, units) in [
            ("0", 0),
            ("8Gi", 8 << 30),
            ("8G", 8_000_000_000),
            ("1e3", 1000),
            ("1E3", 1000),
            ("1E", 1_000_000_000_000_000_000),
            ("2e+2", 200),
            ("12k", 12_000),
            ("1.5Gi", 3 << 29),
            (".5Ki", 512),
            ("5.", 5),
            ("+7", 7),
            ("-7", -7),
            ("000100", 100),
            ("7Ei", 7 << 60),
            ("9223372036854775807", i64::MAX),
            ("1000m", 1),
            ("2000000u", 2),
            ("3000000000n", 3),
            ("0e999999999", 0),
            (" 1", 1),
            ("1\n", 1),
        ] {
            assert_eq!(nanos(text), i128::from(units) * NANOS_PER_UNIT as i128, "{text}");
        }
    }

    #[test]
    fn digits_finer_than_nano_are_rounded_up() {
        assert_eq!(nanos("0.1n"), 1);
        assert_eq!(nanos("-0.1n"), -1);
        assert_eq!(nanos("1e-300"), 1);
        assert_eq!(nanos("1.0000000001"), 1_000_000_001);
        // 2^-60 Ei is one unit: the fraction must survive the binary suffix exactly.
        assert_eq!(
            nanos("0.000000000000000000867361737988403547205962240695953369140625Ei"),
            NANOS_PER_UNIT as i128
        );
    }

    #[test]
    fn invalid_quantities_are_refused() {
        for text in ["", "+", "-", ".", "Gi", "1.1.1", "1 Gi", "NaN", "1,5", "--1", "é"] {
            assert!(matches!(text.parse::<Quantity>(), Err(QuantityError::NotANumber(_))), "{text:?}");
        }
        for text in [
            "1g",
            "1K",
            "1e",
            "1e+",
            "1e3Gi",
            "1Gib",
            "1mm",
            "1e1.5",
            "1inf",
            "0x10",
            "0e99999999999999999999",
        ] {
            assert!(matches!(text.parse::<Quantity>(), Err(QuantityError::UnknownSuffix { .. })), "{text:?}");
        }
        for text in
            ["9223372036854775808", "8Ei", "1e19", "1e999999999", "99999999999999999999999999999999999E"]
        {
            assert!(matches!(text.parse::<Quantity>(), Err(QuantityError::TooLarge(_))), "{text:?}");
        }
    }

    #[test]
    fn templates_are_recognized() {
        assert!(matches!("{{ .Values.gpus }}".parse::<Quantity>(), Err(QuantityError::Template(_))));
    }

    #[test]
    fn fractions_are_refused_as_counts_and_rounded_as_amounts() {
        let q: Quantity = "500m".parse().unwrap();
        assert_eq!(q.to_count().unwrap_err().to_string(), "500m is not a whole number");
        assert_eq!(q.to_milli(), Ok(500));
        assert_eq!(q.to_units(), Ok(1));
        assert_eq!("1.0".parse::<Quantity>().unwrap().to_count(), Ok(1));
        assert!(matches!("-1".parse::<Quantity>().unwrap().to_count(), Err(QuantityError::Negative(_))));
        let error = "9E".parse::<Quantity>().unwrap().to_milli().unwrap_err().to_string();
        assert_eq!(error, "9000000000000000000 is too large to count in thousandths: write less");
        assert!(matches!(".5e-9223372036854775808".parse::<Quantity>(), Ok(q) if q.nanos == 1));
    }

    proptest! {
        #[test]
        fn displayed_form_parses_to_the_same_value(nanos in -(MAX_UNITS as i128)..MAX_UNITS as i128) {
            let q = Quantity { nanos };
            prop_assert_eq!(q.to_string().parse::<Quantity>(), Ok(q));
        }

        #[test]
        fn parsing_any_text_does_not_panic(text in "[-+0-9.eEinumkKMGTP ]{0,24}") {
            let _ = text.parse::<Quantity>();
        }

        #[test]
        fn binary_suffix_multiplies(units in 0u64..1 << 33, suffix in 0usize..3) {
            let (name, shift) = [("Ki", 10), ("Mi", 20), ("Gi", 30)][suffix];
            let q: Quantity = format!("{units}{name}").parse().unwrap();
            prop_assert_eq!(q.to_count(), Ok(units << shift));
        }
    }
}
