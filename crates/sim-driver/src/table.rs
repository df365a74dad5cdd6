//! Expands the tables of `driver-api`: a trait per family of functions, whose bodies answer "not supported" until a
//! module of the simulated driver writes them, and the C functions that programs call.

/// One library: `library! { Error, Code, the table }`.
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

        /// The functions by their C names.
        // Public to the linker only.
        #[allow(missing_docs, unreachable_pub, clippy::missing_safety_doc, clippy::too_many_arguments)]
        pub(super) mod exports {
            use super::*;
            $($(
                library! { @export $name $args $code, plain, $family $name }
                $(library! { @export $twin $args $code, per_thread, $family $name })?
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
            // SAFETY: the caller's promise is the same.
            entry::$entry(|| unsafe { <Library as $family>::$name($($arg),*) })
        }
    };
}

/// The address of a function.
#[derive(Clone, Copy)]
pub(crate) struct Symbol(pub(crate) *const ());

#[allow(unsafe_code)]
// SAFETY: the address of code, which nobody writes.
unsafe impl Sync for Symbol {}

/// The same table as a list of all functions by their names.
macro_rules! symbols {
    ($($(#[$doc:meta])* trait $family:ident {
        $(fn $name:ident $args:tt $(twin $twin:ident)?;)*
    })*) => {
        /// Every function by its name.
        static SYMBOLS: &[(&str, Symbol)] = &[$($(
            (stringify!($name), Symbol(exports::$name as *const ())),
            $((stringify!($twin), Symbol(exports::$twin as *const ())),)?
        )*)*];
    };
}

pub(crate) use {library, symbols};
