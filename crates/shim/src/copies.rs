//! Copies and fills, which keep to turns only where the owner says so: they use the card's copy engines, not its cores.
//!
//! All functions of the family are hooked alike, straight from the table of `driver-api`. A function is one kind of work,
//! whatever its size: what its calls take on average is what each is charged.
#![allow(unsafe_code)]

use crate::hook::{Variant, hooks};
use crate::process;
use crate::throttle::{self, Key, Work, submit};
use partage_driver_api::cuda::*;

/// What stands for copies among the kinds of work.
const COPY: u64 = 2;

/// Whether copies of this process have to be looked at.
#[inline]
fn needed() -> bool {
    process::attached().is_some_and(|process| process.region.policy().gate_copies) && throttle::needed()
}

fn copy(name: &'static str, stream: CUstream, variant: Variant) -> Work {
    Work { key: Key::other(COPY, name.as_ptr().addr() as u64), stream, variant }
}

/// Picks the family out of the table and hooks every function of it.
macro_rules! families {
    ($($(#[$doc:meta])* trait $family:ident { $($functions:tt)* })*) => {
        $(families! { @family $family { $($functions)* } })*
    };
    (@family Copies { $(fn $name:ident $args:tt $(twin $twin:ident)?;)* }) => {
        hooks! { cuda;
            $(fn $name $args $(twin $twin)? |next, variant| if needed {
                submit(
                    || copy(stringify!($name), families!(@stream $args), variant),
                    // SAFETY: the program's promise.
                    || unsafe { families!(@call next $args) },
                )
            })*
        }
    };
    (@family $other:ident $functions:tt) => {};
    (@call $next:ident ($($arg:ident: $type:ty),* $(,)?)) => { $next($($arg),*) };
    // The stream is always the last argument; a function without one means the default stream.
    (@stream ($($any:tt)*)) => { families!(@find $($any)*) };
    (@find $stream:ident: CUstream $(,)?) => { $stream };
    (@find $any:tt $($rest:tt)*) => { families!(@find $($rest)*) };
    (@find) => { std::ptr::null_mut() };
}

macro_rules! expand { ($($table:tt)*) => { families! { $($table)* } }; }
partage_driver_api::cuda_functions!(expand);
