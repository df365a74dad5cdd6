//! `cuGetProcAddress`: the route to a function that is not a plain symbol.
//!
//! The driver answers first. Which hook stands for its answer is told by the address that it gave: so a hook always has the
//! version and the default stream that the program asked for, whatever rule the driver went by.
#![allow(unsafe_code)]

mod libc_dlsym;

use crate::driver::Library;
use crate::hook::{Hook, hooks};
pub(crate) use libc_dlsym::libc_dlsym;
use partage_driver_api::cuda::*;
use partage_driver_api::exports::DriverVersion;
use partage_driver_api::proc_address::{Lookup, proc_address};
use std::ffi::{CStr, c_void};
use std::sync::OnceLock;

/// The newest CUDA version that `driver-api` knows the names of.
const NEWEST_KNOWN: i32 = 12040;

/// Every hook there is.
fn all() -> impl Iterator<Item = &'static Hook> {
    crate::HOOKS.iter().copied().flatten()
}

/// The hook of a symbol.
fn hook_named(name: &str) -> Option<*const c_void> {
    all().find(|hook| hook.name.strip_suffix('\0') == Some(name)).map(|hook| hook.address)
}

/// The hook that stands for a function of the driver's.
fn hook_of(address: *const c_void) -> Option<*const c_void> {
    static BY_ADDRESS: OnceLock<Box<[(usize, &'static Hook)]>> = OnceLock::new();
    let sorted = BY_ADDRESS.get_or_init(|| {
        let of_cuda = all().filter(|hook| hook.library == Library::Cuda);
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

/// Puts our hook in the place of the driver's answer.
///
/// # Safety
///
/// What `cuGetProcAddress` was called with, and it succeeded.
unsafe fn route(name: *const c_char, function: *mut *mut c_void, cuda_version: i32, flags: u64) {
    if function.is_null() || name.is_null() {
        return;
    }
    // SAFETY: the driver has just written there.
    let found = unsafe { *function };
    if found.is_null() {
        return;
    }
    let hook = hook_of(found).or_else(|| {
        // A driver that gives addresses it does not export: by the rule that real drivers follow. Names that are newer than
        // the rule may mean functions of another form.
        if !(0..=NEWEST_KNOWN).contains(&cuda_version) {
            return None;
        }
        // SAFETY: a text that ends in zero: the driver has read it.
        let name = unsafe { CStr::from_ptr(name) }.to_str().ok()?;
        match proc_address(DriverVersion::R550, name, cuda_version, flags) {
            Lookup::Symbol(symbol) => hook_named(symbol),
            _ => None,
        }
    });
    if let Some(hook) = hook {
        // SAFETY: the driver has just written there.
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
        // SAFETY: the program's promise.
        let answer = unsafe { next(name, function, cuda_version, flags) };
        if answer == CUDA_SUCCESS {
            // SAFETY: as it was called.
            unsafe { route(name, function, cuda_version, flags) };
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
        // SAFETY: the program's promise.
        let answer = unsafe { next(name, function, cuda_version, flags, symbol_status) };
        if answer == CUDA_SUCCESS {
            // SAFETY: as it was called.
            unsafe { route(name, function, cuda_version, flags) };
        }
        answer
    }
}
