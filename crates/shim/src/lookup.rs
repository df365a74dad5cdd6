//! `cuGetProcAddress`: the route to a function that is not a plain symbol.
//!
//! The driver answers first. The address that it returned determines which hook replaces it, so the hook always has the
//! version and the default stream that the program requested, whatever rule the driver applied.
#![allow(unsafe_code)]

mod libc_dlsym;

use crate::driver::Library;
use crate::hook::{HookEntry, hooks};
pub(crate) use libc_dlsym::libc_dlsym;
use partage_driver_api::cuda::*;
use partage_driver_api::exports::DriverVersion;
use partage_driver_api::proc_address::{ProcAddressLookup, proc_address};
use std::ffi::{CStr, c_void};
use std::sync::OnceLock;

/// Newest CUDA version whose names are in `driver-api`.
const NEWEST_KNOWN_CUDA_VERSION: i32 = 12040;

/// Returns the hooks of all modules, for both libraries.
fn all_hooks() -> impl Iterator<Item = &'static HookEntry> {
    crate::HOOKS.iter().copied().flatten()
}

/// Returns the hook for a symbol.
fn hook_named(name: &str) -> Option<*const c_void> {
    all_hooks().find(|hook| hook.name.strip_suffix('\0') == Some(name)).map(|hook| hook.address)
}

/// Returns the hook that replaces a function of the driver.
fn hook_for_address(address: *const c_void) -> Option<*const c_void> {
    static BY_ADDRESS: OnceLock<Box<[(usize, &'static HookEntry)]>> = OnceLock::new();
    let sorted = BY_ADDRESS.get_or_init(|| {
        let of_cuda = all_hooks().filter(|hook| hook.library == Library::Cuda);
        let mut sorted: Vec<_> = of_cuda
            .filter_map(|hook| {
                let name = CStr::from_bytes_with_nul(hook.name.as_bytes()).ok()?;
                let address = Library::Cuda.symbol(name).addr();
                (address != 0).then_some((address, hook))
            })
            .collect();
        sorted.sort_by_key(|(address, _)| *address);
        sorted.into()
    });
    let at = sorted.binary_search_by_key(&address.addr(), |(address, _)| *address).ok()?;
    sorted.get(at).map(|(_, hook)| hook.address)
}

/// Replaces the driver's answer by the matching hook.
///
/// # Safety
///
/// The arguments are those of a call of `cuGetProcAddress` that succeeded.
unsafe fn substitute_hook(name: *const c_char, function: *mut *mut c_void, cuda_version: i32, flags: u64) {
    if function.is_null() || name.is_null() {
        return;
    }
    // SAFETY: not null, and the call succeeded, so the driver has written there.
    let found = unsafe { *function };
    if found.is_null() {
        return;
    }
    let hook = hook_for_address(found).or_else(|| {
        // The driver returned an address that it does not export: apply the rule that real drivers follow. Names that
        // are newer than the rule may be functions with other types.
        if !(0..=NEWEST_KNOWN_CUDA_VERSION).contains(&cuda_version) {
            return None;
        }
        // SAFETY: not null, and a C string: the driver has read it.
        let name = unsafe { CStr::from_ptr(name) }.to_str().ok()?;
        match proc_address(DriverVersion::R550, name, cuda_version, flags) {
            ProcAddressLookup::Symbol(symbol) => hook_named(symbol),
            _ => None,
        }
    });
    if let Some(hook) = hook {
        // SAFETY: not null, and the driver has written there.
        unsafe { *function = hook.cast_mut() };
    }
}

hooks! { cuda;
    fn cuGetProcAddress(
        name: *const c_char,
        function: *mut *mut c_void,
        cuda_version: i32,
        flags: u64,
    ) |next, _variant| {
        // SAFETY: the application's arguments, passed on unchanged under the driver function's own contract.
        let answer = unsafe { next(name, function, cuda_version, flags) };
        if answer == CUDA_SUCCESS {
            // SAFETY: these are the arguments of the call that just succeeded.
            unsafe { substitute_hook(name, function, cuda_version, flags) };
        }
        answer
    }

    fn cuGetProcAddress_v2(
        name: *const c_char,
        function: *mut *mut c_void,
        cuda_version: i32,
        flags: u64,
        symbol_status: *mut CUdriverProcAddressQueryResult,
    ) |next, _variant| {
        // SAFETY: the application's arguments, passed on unchanged under the driver function's own contract.
        let answer = unsafe { next(name, function, cuda_version, flags, symbol_status) };
        if answer == CUDA_SUCCESS {
            // SAFETY: these are the arguments of the call that just succeeded.
            unsafe { substitute_hook(name, function, cuda_version, flags) };
        }
        answer
    }
}
