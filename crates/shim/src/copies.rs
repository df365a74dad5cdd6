//! Copies and fills, which wait for turns only if the region's policy says so: they use the GPU's copy engines, not its
//! cores.
//!
//! All functions of the family are hooked in the same way, from the table of `driver-api`. A function is one kind of
//! work, whatever the size of the copy: each call is charged what calls of the function take on average.
#![allow(unsafe_code)]

use crate::hook::{StreamVariant, hooks};
use crate::process;
use crate::throttle::{self, SubmittedWork, WorkKey, submit};
use partage_driver_api::cuda::*;

/// Kind of work in a [`WorkKey`] that stands for copies.
const COPY_KIND: u64 = 2;

/// Returns whether copies of this process are throttled.
#[inline]
fn needed() -> bool {
    process::attached().is_some_and(|process| process.region.policy().throttle_copies) && throttle::needed()
}

fn copy_work(name: &'static str, stream: CUstream, variant: StreamVariant) -> SubmittedWork {
    SubmittedWork { key: WorkKey::other(COPY_KIND, name.as_ptr().addr() as u64), stream, variant }
}

/// Selects the family from the table and hooks every function of it.
macro_rules! families {
    ($($(#[$doc:meta])* trait $family:ident { $($functions:tt)* })*) => {
        $(families! { @family $family { $($functions)* } })*
    };
    (@family CopyApi { $(fn $name:ident $args:tt $(twin $twin:ident)?;)* }) => {
        hooks! { cuda;
            $(fn $name $args $(twin $twin)? |next, variant| if needed {
                submit(
                    || copy_work(stringify!($name), families!(@stream $args), variant),
                    // SAFETY: the application's arguments, passed on unchanged under the driver function's own
                    // contract.
                    || unsafe { families!(@call next $args) },
                )
            })*
        }
    };
    (@family $other:ident $functions:tt) => {};
    (@call $next:ident ($($arg:ident: $type:ty),* $(,)?)) => { $next($($arg),*) };
    // The stream is always the last argument; a function without one uses the default stream.
    (@stream ($($any:tt)*)) => { families!(@find $($any)*) };
    (@find $stream:ident: CUstream $(,)?) => { $stream };
    (@find $any:tt $($rest:tt)*) => { families!(@find $($rest)*) };
    (@find) => { std::ptr::null_mut() };
}

macro_rules! expand { ($($table:tt)*) => { families! { $($table)* } }; }
partage_driver_api::cuda_functions!(expand);
