//! Compares libnvidia-ml with nvml-wrapper-sys.

mod layouts;
mod values;

use crate::shape::{FunctionShape, MissingFunction, TypeShape, compare_shapes, inferred, shape_of};
use nvml_wrapper_sys::bindings::NvmlLib;
use partage_driver_api::nvml::*;

macro_rules! fallback {
    ($name:ident($($arg:ident: $type:ty),* $(,)?)) => {
        unsafe fn $name(&self, $(_: $type),*) -> MissingFunction {
            unreachable!("only its type is used")
        }
    };
}
macro_rules! fallbacks {
    ($($(#[$doc:meta])* trait $family:ident { $(fn $name:ident $args:tt $(twin $twin:ident)?;)* })*) => {
        /// Fallbacks for functions that nvml-wrapper-sys does not declare: inherent methods take precedence over those of
        /// a trait.
        #[allow(dead_code, clippy::too_many_arguments)]
        trait Fallback {
            $($(fallback! { $name $args })*)*
        }
    };
}
partage_driver_api::nvml_functions!(fallbacks);

impl Fallback for NvmlLib {}

/// Returns the shapes of all functions of the table.
fn ours() -> Vec<(&'static str, (Vec<TypeShape>, TypeShape))> {
    macro_rules! function {
        ($name:ident($($arg:ident: $type:ty),* $(,)?)) => {
            (stringify!($name), <unsafe fn($($type),*) -> nvmlReturn_t as FunctionShape>::shape())
        };
    }
    macro_rules! expand {
        ($($(#[$doc:meta])* trait $family:ident { $(fn $name:ident $args:tt $(twin $twin:ident)?;)* })*) => {
            vec![$($(function! { $name $args }),*),*]
        };
    }
    partage_driver_api::nvml_functions!(expand)
}

/// Returns the shapes of nvml-wrapper-sys' functions, in the same order.
fn theirs() -> Vec<(Vec<TypeShape>, TypeShape)> {
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
fn signatures_match() {
    let mut missing = Vec::new();
    let mut compared = 0;
    for ((name, ours), theirs) in ours().into_iter().zip(theirs()) {
        match compare_shapes(&ours, &theirs) {
            Some(agree) => {
                assert!(agree, "{name}: {ours:?} is not {theirs:?}");
                compared += 1;
            }
            None => missing.push(name),
        }
    }
    // The first is in no public header; the others are old names of nvmlGetExcludedDevice*.
    let expected =
        ["nvmlInternalGetExportTable", "nvmlGetBlacklistDeviceCount", "nvmlGetBlacklistDeviceInfoByIndex"];
    assert_eq!(missing, expected);
    assert_eq!(compared, 346);
}
