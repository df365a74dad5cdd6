//! Kubernetes quantities: no text causes a panic, and the displayed form parses to the same value.
#![no_main]

use libfuzzer_sys::fuzz_target;
use partage_core::quantity::Quantity;

fuzz_target!(|text: &str| {
    let Ok(quantity) = text.parse::<Quantity>() else { return };
    let shown = quantity.to_string();
    assert_eq!(shown.parse::<Quantity>(), Ok(quantity), "{text:?} shown as {shown:?}");
    let _ = (quantity.to_count(), quantity.to_milli(), quantity.to_units());
});
