//! Memory amounts in the units of a dialect: conversion to bytes, and suggestions for amounts in the wrong unit.

use super::resource_list::{ResourceList, UnclearAsk};
use crate::model::Bytes;
use crate::quantity::Quantity;
use crate::truncate::shorten;

/// Maximum amount of memory per GPU. Larger requests are mistakes in the unit: no GPU has as much.
pub(crate) const MAX_MEMORY: Bytes = Bytes(1 << 40);

/// A resource that counts memory in a unit.
pub(super) struct MemoryCounter<'a> {
    pub(super) resource: &'a str,
    /// Bytes in one unit.
    pub(super) unit: u64,
    /// Number of GPUs that the amount is divided over.
    pub(super) gpus: u64,
    /// Additional advice if the author probably meant MiB.
    pub(super) mib_advice: &'a str,
}

impl<'a> MemoryCounter<'a> {
    /// Describes a resource that counts the memory of each GPU.
    pub(super) fn per_gpu(resource: &'a str, unit: u64) -> MemoryCounter<'a> {
        MemoryCounter { resource, unit, gpus: 1, mib_advice: "" }
    }

    /// Converts `units` to bytes on one GPU. More than [`MAX_MEMORY`] is a problem.
    pub(super) fn bytes(&self, units: u64, list: &mut ResourceList<'_>) -> Result<Bytes, UnclearAsk> {
        let each = u128::from(units / self.gpus) * u128::from(self.unit);
        match u64::try_from(each).map(Bytes) {
            Ok(bytes) if bytes <= MAX_MEMORY => Ok(bytes),
            _ => Err(list.problem(self.resource, self.too_much(units, each, list.text(self.resource)))),
        }
    }

    fn too_much(&self, units: u64, each: u128, text: &str) -> String {
        let text = shorten(text);
        if self.unit == 1 {
            return format!("\"{text}\" is more memory than any GPU has: write {MAX_MEMORY} or less");
        }
        let counts = match self.unit {
            0x4000_0000 => "GiB".to_string(),
            0x10_0000 => "MiB".to_string(),
            unit => format!("blocks of {}", Bytes(unit)),
        };
        // In a quantity, a suffix multiplies. Here the author meant it as the unit.
        if text.ends_with(|letter: char| letter.is_ascii_alphabetic()) {
            let size = text.parse::<Quantity>().and_then(Quantity::to_count).ok();
            if let Some(right) = size.and_then(|size| self.units_for(u128::from(size))) {
                return format!("this resource counts {counts}: for {text} write {right}");
            }
        }
        let of = if self.gpus > 1 { format!("each of {} GPUs", self.gpus) } else { "one GPU".into() };
        let is = match u64::try_from(each) {
            Ok(bytes) => format!("is {} of {of}", Bytes(bytes)),
            Err(_) => "is far more than any GPU has".to_string(),
        };
        let meant = [("MiB", 20), ("KiB", 10), ("bytes", 0)].into_iter().find_map(|(name, shift)| {
            let right = self.units_for(u128::from(units) << shift).filter(|_| 1 << shift < self.unit)?;
            let advice = if shift == 20 { self.mib_advice } else { "" };
            Some(format!("for {units} {name} write {right}{advice}"))
        });
        let meant =
            meant.unwrap_or_else(|| format!("write {} or less", MAX_MEMORY.0 / self.unit * self.gpus));
        format!("this resource counts {counts}: {units} {is}; {meant}")
    }

    /// Returns the number of units for an amount in bytes, or `None` if no GPU has as much.
    fn units_for(&self, bytes: u128) -> Option<u128> {
        let spread = u128::from(self.gpus);
        let units = bytes.div_ceil(u128::from(self.unit)).next_multiple_of(spread);
        (units > 0 && units / spread * u128::from(self.unit) <= u128::from(MAX_MEMORY.0)).then_some(units)
    }
}
