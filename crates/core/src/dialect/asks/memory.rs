//! Memory written in units of a dialect's own: so many, in bytes, and what was meant where that is too many.

use super::lines::{Lines, Unclear};
use crate::model::Bytes;
use crate::quantity::Quantity;
use crate::quote::short;

/// More memory than any GPU has: an ask above it is a slip in the unit.
pub(crate) const MOST: Bytes = Bytes(1 << 40);

/// A resource that counts memory.
pub(super) struct Counter<'a> {
    pub(super) resource: &'a str,
    /// Bytes in one unit.
    pub(super) unit: u64,
    /// Over how many GPUs the amount is spread.
    pub(super) spread: u64,
    /// What else to do where plain MiB were meant.
    pub(super) or: &'a str,
}

impl<'a> Counter<'a> {
    /// A resource that counts the memory of each GPU.
    pub(super) fn of_each(resource: &'a str, unit: u64) -> Counter<'a> {
        Counter { resource, unit, spread: 1, or: "" }
    }

    /// So many units on one GPU, in bytes.
    pub(super) fn bytes(&self, units: u64, lines: &mut Lines<'_>) -> Result<Bytes, Unclear> {
        let each = u128::from(units / self.spread) * u128::from(self.unit);
        match u64::try_from(each).map(Bytes) {
            Ok(bytes) if bytes <= MOST => Ok(bytes),
            _ => Err(lines.problem(self.resource, self.too_much(units, each, lines.text(self.resource)))),
        }
    }

    fn too_much(&self, units: u64, each: u128, text: &str) -> String {
        let text = short(text);
        if self.unit == 1 {
            return format!("\"{text}\" is more memory than any GPU has: write {MOST} or less");
        }
        let counts = match self.unit {
            0x4000_0000 => "GiB".to_string(),
            0x10_0000 => "MiB".to_string(),
            unit => format!("blocks of {}", Bytes(unit)),
        };
        // A suffix multiplies, and here it was meant as the unit.
        if text.ends_with(|letter: char| letter.is_ascii_alphabetic()) {
            let size = text.parse::<Quantity>().and_then(Quantity::to_count).ok();
            if let Some(right) = size.and_then(|size| self.right(u128::from(size))) {
                return format!("this resource counts {counts}: for {text} write {right}");
            }
        }
        let of = if self.spread > 1 { format!("each of {} GPUs", self.spread) } else { "one GPU".into() };
        let is = match u64::try_from(each) {
            Ok(bytes) => format!("is {} of {of}", Bytes(bytes)),
            Err(_) => "is far more than any GPU has".to_string(),
        };
        let meant = [("MiB", 20), ("KiB", 10), ("bytes", 0)].into_iter().find_map(|(name, shift)| {
            let right = self.right(u128::from(units) << shift).filter(|_| 1 << shift < self.unit)?;
            let or = if shift == 20 { self.or } else { "" };
            Some(format!("for {units} {name} write {right}{or}"))
        });
        let meant = meant.unwrap_or_else(|| format!("write {} or less", MOST.0 / self.unit * self.spread));
        format!("this resource counts {counts}: {units} {is}; {meant}")
    }

    /// What to write for so many bytes, if a GPU can have them.
    fn right(&self, bytes: u128) -> Option<u128> {
        let spread = u128::from(self.spread);
        let units = bytes.div_ceil(u128::from(self.unit)).next_multiple_of(spread);
        (units > 0 && units / spread * u128::from(self.unit) <= u128::from(MOST.0)).then_some(units)
    }
}
