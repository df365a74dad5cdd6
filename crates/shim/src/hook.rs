//! The form of a hook.
//!
//! ```text
//! hooks! { cuda;
//!     /// What it does that the driver's does not.
//!     fn cuMemAlloc_v2(pointer: *mut CUdeviceptr, bytes: usize) |next, _variant| {
//!         …            // `next(pointer, bytes)` is the driver's own
//!     }
//!     fn cuLaunchKernel(…) twin cuLaunchKernel_ptsz |next, variant| { … }
//! }
//! ```
//!
//! `|next, variant| if needed { … }` asks `needed()` first, outside of everything, and goes straight to the driver's own if
//! the answer is no: for calls where a nanosecond counts.
//!
//! One `hooks!` per module; it also makes the module's list `HOOKS`. The symbol is `partage_hook_<name>`: what carries the
//! plain name is the file that [`crate::install`] writes. The compiler holds every hook against the driver's own type.

use std::ffi::c_void;

/// A hook by its name.
pub(crate) struct Hook {
    /// With a zero at its end.
    pub(crate) name: &'static str,
    pub(crate) library: crate::driver::Library,
    pub(crate) address: *const c_void,
}

#[allow(unsafe_code)]
// SAFETY: the address of code, which nobody writes.
unsafe impl Sync for Hook {}

/// Which default stream a function means by "no stream": its name tells.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Variant {
    /// The legacy one.
    Plain,
    /// The calling thread's own (`_ptsz`, `_ptds`).
    PerThread,
}

/// Runs a hook's body; a panic, which would be a bug of ours, ends here as an error of the driver's.
#[inline]
pub(crate) fn guarded<T>(on_panic: T, body: impl FnOnce() -> T) -> T {
    std::panic::catch_unwind(std::panic::AssertUnwindSafe(body)).unwrap_or(on_panic)
}

macro_rules! hooks {
    ($library:ident; $(
        $(#[$doc:meta])*
        fn $name:ident $args:tt $(twin $twin:ident)? |$next:ident, $variant:ident| $(if $needed:tt)? $body:block
    )*) => {
        $(hooks! { @both $library, $name $args $([$twin])? |$next, $variant| [$($needed)?] $body })*
        /// The hooks of this module.
        pub(crate) static HOOKS: &[$crate::hook::Hook] = &[$(
            hooks! { @entry $library $name },
            $(hooks! { @entry $library $twin },)?
        )*];
    };
    (@both $library:ident, $name:ident $args:tt |$next:ident, $variant:ident| $needed:tt $body:block) => {
        hooks! { @one $library, Plain, $name $args |$next, $variant| $needed $body }
    };
    (@both $library:ident, $name:ident $args:tt [$twin:ident] |$next:ident, $variant:ident| $needed:tt $body:block) => {
        hooks! { @one $library, Plain, $name $args |$next, $variant| $needed $body }
        hooks! { @one $library, PerThread, $twin $args |$next, $variant| $needed $body }
    };
    (@entry cuda $name:ident) => {
        $crate::hook::Hook { name: concat!(stringify!($name), "\0"), library: $crate::driver::Library::Cuda, address: $name as *const _ }
    };
    (@entry nvml $name:ident) => {
        $crate::hook::Hook { name: concat!(stringify!($name), "\0"), library: $crate::driver::Library::Nvml, address: $name as *const _ }
    };
    (@panic cuda) => { partage_driver_api::cuda::CUDA_ERROR_UNKNOWN };
    (@panic nvml) => { partage_driver_api::nvml::NVML_ERROR_UNKNOWN };
    (@code cuda) => { partage_driver_api::cuda::CUresult };
    (@code nvml) => { partage_driver_api::nvml::nvmlReturn_t };
    (@fast [] $next:ident $($arg:ident)*) => {};
    (@fast [$needed:tt] $next:ident $($arg:ident)*) => {
        if !$needed() {
            // SAFETY: the program's promise.
            return unsafe { $next($($arg),*) };
        }
    };
    (@one $library:ident, $is:ident, $name:ident($($arg:ident: $type:ty),* $(,)?) |$next:ident, $variant:ident| $needed:tt $body:block) => {
        #[allow(non_snake_case, clippy::too_many_arguments, clippy::missing_safety_doc)]
        #[unsafe(export_name = concat!("partage_hook_", stringify!($name)))]
        pub(crate) unsafe extern "C" fn $name($($arg: $type),*) -> hooks!(@code $library) {
            #[allow(unused_imports)]
            use $crate::driver::$library::$name as $next;
            hooks! { @fast $needed $next $($arg)* }
            #[allow(unused_variables)]
            let $variant = $crate::hook::Variant::$is;
            $crate::hook::guarded(hooks!(@panic $library), || $body)
        }
        const _: $crate::driver::$library::types::$name = $name;
    };
}

pub(crate) use hooks;
