//! libnvidia-ml beside nvml-wrapper-sys.

mod layouts;
mod values;

use crate::shape::{Form, Missing, Shape, agree, inferred, shape_of};
use nvml_wrapper_sys::bindings::NvmlLib;
use partage_driver_api::nvml::*;

macro_rules! fallback {
    ($name:ident($($arg:ident: $type:ty),* $(,)?)) => {
        unsafe fn $name(&self, $(_: $type),*) -> Missing {
            unreachable!("only its type is looked at")
        }
    };
}
macro_rules! fallbacks {
    ($($(#[$doc:meta])* trait $family:ident { $(fn $name:ident $args:tt $(twin $twin:ident)?;)* })*) => {
        /// Every function as if nvml-wrapper-sys did not declare it: its own methods go before a trait's.
        #[allow(dead_code, clippy::too_many_arguments)]
        trait Fallback {
            $($(fallback! { $name $args })*)*
        }
    };
}
partage_driver_api::nvml_functions!(fallbacks);

impl Fallback for NvmlLib {}

/// The shape of every function here.
fn ours() -> Vec<(&'static str, (Vec<Form>, Form))> {
    macro_rules! function {
        ($name:ident($($arg:ident: $type:ty),* $(,)?)) => {
            (stringify!($name), <unsafe fn($($type),*) -> nvmlReturn_t as Shape>::shape())
        };
    }
    macro_rules! expand {
        ($($(#[$doc:meta])* trait $family:ident { $(fn $name:ident $args:tt $(twin $twin:ident)?;)* })*) => {
            vec![$($(function! { $name $args }),*),*]
        };
    }
    partage_driver_api::nvml_functions!(expand)
}

/// The shape of every function at nvml-wrapper-sys, in the same order.
fn theirs() -> Vec<(Vec<Form>, Form)> {
    macro_rules! function {
        ($name:ident($($arg:ident: $type:ty),* $(,)?)) => {{
            let (mut arguments, result) = shape_of(NvmlLib::$name as inferred!(library $($arg)*));
            arguments.remove(0);
            (arguments, result)
        }};
    }
    macro_rules! expand {
        ($($(#[$doc:meta])* trait $family:ident { $(fn $name:ident $args:tt $(twin $twin:ident)?;)* })*) => {
            vec![$($(function! { $name $args }),*),*]
        };
    }
    partage_driver_api::nvml_functions!(expand)
}

#[test]
fn signatures() {
    let mut missing = Vec::new();
    let mut compared = 0;
    for ((name, ours), theirs) in ours().into_iter().zip(theirs()) {
        match agree(&ours, &theirs) {
            Some(agree) => {
                assert!(agree, "{name}: {ours:?} is not {theirs:?}");
                compared += 1;
            }
            None => missing.push(name),
        }
    }
    // Not in any public header; the two others are an old name of nvmlGetExcludedDevice*.
    let expected =
        ["nvmlInternalGetExportTable", "nvmlGetBlacklistDeviceCount", "nvmlGetBlacklistDeviceInfoByIndex"];
    assert_eq!(missing, expected);
    assert_eq!(compared, 346);
}
