//! The macro that defines hooks.
//!
//! ```text
//! hooks! { cuda;
//!     /// What it does in addition to the driver's function.
//!     fn cuMemAlloc_v2(pointer: *mut CUdeviceptr, bytes: usize) |next, _variant| {
//!         …            // `next(pointer, bytes)` is the driver's own
//!     }
//!     fn cuLaunchKernel(…) twin cuLaunchKernel_ptsz |next, variant| { … }
//! }
//! ```
//!
//! With `|next, variant| if needed { … }` the hook first calls `needed()`, outside of everything else, and calls the
//! driver's function directly if it returns false: for calls where a nanosecond counts.
//!
//! There is one `hooks!` per module; it also defines the module's list `HOOKS`. The exported symbol is
//! `partage_hook_<name>`; the files that [`crate::install`] writes carry the plain name. The compiler checks every hook
//! against the type of the driver's function.
//!
//! # Safety
//!
//! A hook has the contract of the driver function that it replaces: the application passes arguments that are valid for
//! that function, as the CUDA driver API and NVML document them. Where a SAFETY comment says that the application's
//! arguments are passed on unchanged, this contract is what makes the call of `next` sound: the driver's function
//! receives exactly what the application passed for it. Where a hook reads or writes through a pointer of the
//! application, it does so for the type and length for which the driver's function would, and only if the pointer is
//! not null.

use std::ffi::c_void;

/// A hook, by its name.
pub(crate) struct HookEntry {
    /// Name of the function, with a terminating zero.
    pub(crate) name: &'static str,
    pub(crate) library: crate::driver::Library,
    pub(crate) address: *const c_void,
}

#[allow(unsafe_code)]
// SAFETY: the pointer is the address of code, which is never written through it.
unsafe impl Sync for HookEntry {}

/// Which default stream a null stream handle means. The function's name determines it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum StreamVariant {
    /// The legacy default stream.
    Legacy,
    /// The calling thread's default stream (`_ptsz`, `_ptds`).
    PerThread,
}

/// Runs a hook's body. A panic, which would be a bug of the shim, is returned as an error of the driver.
#[inline]
pub(crate) fn catch_panic<T>(on_panic: T, body: impl FnOnce() -> T) -> T {
    std::panic::catch_unwind(std::panic::AssertUnwindSafe(body)).unwrap_or(on_panic)
}

macro_rules! hooks {
    ($library:ident; $(
        $(#[$doc:meta])*
        fn $name:ident $args:tt $(twin $twin:ident)? |$next:ident, $variant:ident| $(if $needed:tt)? $body:block
    )*) => {
        $(hooks! { @both $library, $name $args $([$twin])? |$next, $variant| [$($needed)?] $body })*
        /// The hooks of this module.
        pub(crate) static HOOKS: &[$crate::hook::HookEntry] = &[$(
            hooks! { @entry $library $name },
            $(hooks! { @entry $library $twin },)?
        )*];
    };
    (@both $library:ident, $name:ident $args:tt |$next:ident, $variant:ident| $needed:tt $body:block) => {
        hooks! { @one $library, Legacy, $name $args |$next, $variant| $needed $body }
    };
    (@both $library:ident, $name:ident $args:tt [$twin:ident] |$next:ident, $variant:ident| $needed:tt $body:block) => {
        hooks! { @one $library, Legacy, $name $args |$next, $variant| $needed $body }
        hooks! { @one $library, PerThread, $twin $args |$next, $variant| $needed $body }
    };
    (@entry cuda $name:ident) => {
        $crate::hook::HookEntry { name: concat!(stringify!($name), "\0"), library: $crate::driver::Library::Cuda, address: $name as *const _ }
    };
    (@entry nvml $name:ident) => {
        $crate::hook::HookEntry { name: concat!(stringify!($name), "\0"), library: $crate::driver::Library::Nvml, address: $name as *const _ }
    };
    (@panic cuda) => { partage_driver_api::cuda::CUDA_ERROR_UNKNOWN };
    (@panic nvml) => { partage_driver_api::nvml::NVML_ERROR_UNKNOWN };
    (@code cuda) => { partage_driver_api::cuda::CUresult };
    (@code nvml) => { partage_driver_api::nvml::nvmlReturn_t };
    (@fast [] $next:ident $($arg:ident)*) => {};
    (@fast [$needed:tt] $next:ident $($arg:ident)*) => {
        if !$needed() {
            // SAFETY: the application's arguments, passed on unchanged under the driver function's own contract.
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
            let $variant = $crate::hook::StreamVariant::$is;
            $crate::hook::catch_panic(hooks!(@panic $library), || $body)
        }
        const _: $crate::driver::$library::types::$name = $name;
    };
}

pub(crate) use hooks;
