//! The tables expand in another crate into traits, exported functions and lists of names.
#![allow(non_snake_case, dead_code, unreachable_pub)]

/// Expands a table like the simulated driver: a trait per family, and C functions that call it.
///
/// The arguments of a function are matched as one token tree, because its twin needs them again.
macro_rules! driver {
    (
        $error:ident, $code:ident,
        $($(#[$doc:meta])* trait $family:ident {
            $(fn $name:ident $args:tt $(twin $twin:ident)?;)*
        })*
    ) => {
        $(
            $(#[$doc])*
            #[allow(unused_variables, clippy::missing_safety_doc, clippy::too_many_arguments)]
            pub trait $family {
                $(body! { $name $args $error })*
            }

            impl $family for super::UnsupportedDriver {}
        )*

        #[allow(clippy::missing_safety_doc, clippy::too_many_arguments)]
        pub mod exported {
            use super::*;
            $($(
                export! { $name $args $code, $family $name }
                $(export! { $twin $args $code, $family $name })?
            )*)*
        }

        pub const FAMILIES: &[&str] = &[$(stringify!($family)),*];
        pub const NAMES: &[&str] = &[$($(stringify!($name), $(stringify!($twin),)?)*)*];
    };
}

macro_rules! body {
    ($name:ident($($arg:ident: $type:ty),* $(,)?) $error:ident) => {
        unsafe fn $name($($arg: $type),*) -> Result<(), $error> {
            Err($error::NOT_SUPPORTED)
        }
    };
}

macro_rules! export {
    ($symbol:ident($($arg:ident: $type:ty),* $(,)?) $code:ident, $family:ident $name:ident) => {
        pub unsafe extern "C" fn $symbol($($arg: $type),*) -> $code {
            // SAFETY: the function has the same preconditions as the trait's function, and the caller upholds them.
            status(unsafe { <crate::UnsupportedDriver as $family>::$name($($arg),*) })
        }
    };
}

struct UnsupportedDriver;

#[allow(unsafe_code)]
mod cuda {
    use partage_driver_api::cuda::*;
    macro_rules! expand { ($($table:tt)*) => { driver! { CudaError, CUresult, $($table)* } }; }
    partage_driver_api::cuda_functions!(expand);
}

#[allow(unsafe_code)]
mod nvml {
    use partage_driver_api::nvml::*;
    macro_rules! expand { ($($table:tt)*) => { driver! { NvmlError, nvmlReturn_t, $($table)* } }; }
    partage_driver_api::nvml_functions!(expand);
}

#[test]
#[allow(unsafe_code)]
fn table_expands_to_traits_functions_and_names() {
    // SAFETY: the default body ignores its arguments.
    let code = unsafe { cuda::exported::cuMemAlloc_v2(std::ptr::null_mut(), 1) };
    assert_eq!(code, partage_driver_api::cuda::CUDA_ERROR_NOT_SUPPORTED);
    // SAFETY: the default body ignores its arguments.
    let code = unsafe { cuda::exported::cuMemcpyHtoD_v2_ptds(0, std::ptr::null(), 1) };
    assert_eq!(code, partage_driver_api::cuda::CUDA_ERROR_NOT_SUPPORTED);
    // SAFETY: the default body ignores its arguments.
    let code = unsafe { nvml::exported::nvmlInit_v2() };
    assert_eq!(code, partage_driver_api::nvml::NVML_ERROR_NOT_SUPPORTED);
    assert_eq!(cuda::NAMES.len(), 656);
    assert_eq!(nvml::NAMES.len(), 349);
    assert_eq!(cuda::FAMILIES.len(), 20);
    assert_eq!(nvml::FAMILIES.len(), 13);
}
