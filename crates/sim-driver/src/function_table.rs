//! Expands the function tables of `driver-api` into one trait per family of functions, whose default bodies return
//! `NOT_SUPPORTED`, and into the exported C functions.

/// Expands one library: `library! { Error, Code, table }`.
macro_rules! library {
    (
        $error:ident, $code:ident,
        $($(#[$doc:meta])* trait $family:ident {
            $(fn $name:ident $args:tt $(twin $twin:ident)?;)*
        })*
    ) => {
        $(
            $(#[$doc])*
            #[allow(unused_variables, clippy::missing_safety_doc, clippy::too_many_arguments)]
            pub(super) trait $family {
                $(library! { @body $name $args $error })*
            }
        )*

        /// The exported C functions.
        // Public only for the linker.
        #[allow(missing_docs, unreachable_pub, clippy::missing_safety_doc, clippy::too_many_arguments)]
        pub(super) mod exports {
            use super::*;
            $($(
                library! { @export $name $args $code, enter, $family $name }
                $(library! { @export $twin $args $code, enter_per_thread, $family $name })?
            )*)*
        }
    };

    (@body $name:ident($($arg:ident: $type:ty),* $(,)?) $error:ident) => {
        unsafe fn $name($($arg: $type),*) -> Result<(), $error> {
            Err($error::NOT_SUPPORTED)
        }
    };

    (@export $symbol:ident($($arg:ident: $type:ty),* $(,)?) $code:ident, $entry:ident, $family:ident $name:ident) => {
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $symbol($($arg: $type),*) -> $code {
            // SAFETY: this function's contract requires the same of its caller, and the arguments are passed on unchanged.
            entry::$entry(|| unsafe { <Library as $family>::$name($($arg),*) })
        }
    };
}

/// The address of an exported function.
#[derive(Clone, Copy)]
pub(crate) struct SymbolAddress(pub(crate) *const ());

#[allow(unsafe_code)]
// SAFETY: the address of immutable code.
unsafe impl Sync for SymbolAddress {}

/// Expands the same table into a list of all functions by name.
macro_rules! symbols {
    ($($(#[$doc:meta])* trait $family:ident {
        $(fn $name:ident $args:tt $(twin $twin:ident)?;)*
    })*) => {
        /// The address of every function by name.
        static SYMBOLS: &[(&str, SymbolAddress)] = &[$($(
            (stringify!($name), SymbolAddress(exports::$name as *const ())),
            $((stringify!($twin), SymbolAddress(exports::$twin as *const ())),)?
        )*)*];
    };
}

pub(crate) use {library, symbols};
