//! Compares libcuda with cudarc.

mod layouts;
mod values;

use crate::shape::{FunctionShape, MissingFunction, TypeShape, compare_shapes, inferred, shape_of};
use fallback::*;
use partage_driver_api::cuda::*;
use partage_driver_api::exports::{DriverLibraryKind, DriverVersion, exports};

/// Fallbacks for functions that cudarc does not declare.
#[allow(dead_code, clippy::too_many_arguments)]
mod fallback {
    use super::*;

    macro_rules! function {
        ($name:ident($($arg:ident: $type:ty),* $(,)?)) => {
            pub(super) unsafe fn $name($(_: $type),*) -> MissingFunction {
                unreachable!("only its type is used")
            }
        };
    }
    macro_rules! expand {
        ($($(#[$doc:meta])* trait $family:ident { $(fn $name:ident $args:tt $(twin $twin:ident)?;)* })*) => {
            $($(function! { $name $args })*)*
        };
    }
    partage_driver_api::cuda_functions!(expand);
}

/// Returns the shapes of all functions of the table.
fn ours() -> Vec<(&'static str, (Vec<TypeShape>, TypeShape))> {
    macro_rules! function {
        ($name:ident($($arg:ident: $type:ty),* $(,)?)) => {
            (stringify!($name), <unsafe fn($($type),*) -> CUresult as FunctionShape>::shape())
        };
    }
    macro_rules! expand {
        ($($(#[$doc:meta])* trait $family:ident { $(fn $name:ident $args:tt $(twin $twin:ident)?;)* })*) => {
            vec![$($(function! { $name $args }),*),*]
        };
    }
    partage_driver_api::cuda_functions!(expand)
}

/// Returns the shapes of cudarc's functions, in the same order.
fn theirs() -> Vec<(Vec<TypeShape>, TypeShape)> {
    // The declarations of cudarc shadow the fallbacks, because this scope is the inner one.
    use cudarc::driver::sys::*;
    macro_rules! function {
        ($name:ident($($arg:ident: $type:ty),* $(,)?)) => { shape_of($name as inferred!($($arg)*)) };
    }
    macro_rules! expand {
        ($($(#[$doc:meta])* trait $family:ident { $(fn $name:ident $args:tt $(twin $twin:ident)?;)* })*) => {
            vec![$($(function! { $name $args }),*),*]
        };
    }
    partage_driver_api::cuda_functions!(expand)
}

/// Returns why cudarc does not declare a function.
fn reason(name: &str) -> Option<&'static str> {
    let newer = |version| exports(DriverLibraryKind::Cuda, DriverVersion::R550).any(|other| other == version);
    let plain = name.split_once("_v").map_or(name, |(plain, _)| plain);
    if (2..4).any(|version| format!("{plain}_v{version}") != name && newer(format!("{plain}_v{version}"))) {
        return Some("cuda.h gives its name to a newer version");
    }
    if ["cuGL", "cuEGL", "cuVDPAU", "cuGraphicsGL", "cuGraphicsEGL", "cuGraphicsVDPAU"]
        .iter()
        .any(|start| name.starts_with(start))
    {
        return Some("declared in headers of their own");
    }
    if name.starts_with("cudbg") {
        return Some("not in any public header");
    }
    match name {
        "cuGraphInstantiate" | "cuGraphInstantiate_v2" => {
            Some("cuda.h gives its name to cuGraphInstantiateWithFlags")
        }
        "cuGraphicsResourceGetMappedEglFrame" => Some("declared in a header of its own"),
        "cuDeviceGetNvSciSyncAttributes" => Some("left out by cudarc"),
        "cuEGLApiInit" | "cuMemGetAttribute" | "cuMemGetAttribute_v2" => Some("not in any public header"),
        _ => None,
    }
}

#[test]
fn signatures_match() {
    let mut compared = 0;
    for ((name, ours), theirs) in ours().into_iter().zip(theirs()) {
        match compare_shapes(&ours, &theirs) {
            Some(agree) => {
                assert!(agree, "{name}: {ours:?} is not {theirs:?}");
                compared += 1;
            }
            None => assert!(reason(name).is_some(), "{name} is not declared by cudarc"),
        }
    }
    assert_eq!(compared, 431);
}
