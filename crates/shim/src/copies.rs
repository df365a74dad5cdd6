//! Copies and fills, which wait for turns only if the region's policy enables it: they use the GPU's copy engines, not
//! its cores. Otherwise they are boundaries, because a stream that copies does not occupy the GPU.
//!
//! All functions of the family are hooked in the same way, from the table of `driver-api`.
#![allow(unsafe_code)]

use crate::hook::{StreamVariant, hooks};
use crate::process;
use crate::throttle::boundaries::{self, WaitScope};
use crate::throttle::{self, Submission, submit};
use partage_driver_api::cuda::*;

/// Returns whether copies of this process wait for turns, or matter to the markers of its streams.
#[inline]
fn needed() -> bool {
    process::attached().is_some() && (boundaries::marked() || (is_throttled() && throttle::needed()))
}

fn is_throttled() -> bool {
    process::attached().is_some_and(|process| process.region.policy().throttle_copies)
}

/// Copies with the driver's call. A copy that is not asynchronous waits for the work before it.
fn copy(name: &str, stream: CUstream, variant: StreamVariant, call: impl FnOnce() -> CUresult) -> CUresult {
    if is_throttled() {
        return submit(|| Submission { stream, variant, launches: 1 }, call);
    }
    if name.contains("Async") {
        boundaries::put_boundary(stream, variant);
        return call();
    }
    boundaries::wait_for_work(WaitScope::Other, call)
}

/// Selects the family from the table and hooks every function of it.
macro_rules! families {
    ($($(#[$doc:meta])* trait $family:ident { $($functions:tt)* })*) => {
        $(families! { @family $family { $($functions)* } })*
    };
    (@family CopyApi { $(fn $name:ident $args:tt $(twin $twin:ident)?;)* }) => {
        hooks! { cuda;
            $(fn $name $args $(twin $twin)? |next, variant| if needed {
                copy(
                    stringify!($name),
                    families!(@stream $args),
                    variant,
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
