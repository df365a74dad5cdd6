//! `dlsym` and `dlvsym`, for the file that is preloaded: a program that opens the driver's library and looks its functions
//! up there would otherwise go past the hooks.
//!
//! What is not the driver's goes on to the C library's own with the caller's return address untouched: `RTLD_NEXT` and
//! `RTLD_DEFAULT` mean what they mean for the caller, not for us.
#![allow(unsafe_code)]

use super::all;
use super::true_dlsym::{DLSYM, DLVSYM, found, true_dlsym};
use crate::driver::Library;
use std::arch::naked_asm;
use std::ffi::{CStr, c_char, c_void};
use std::sync::atomic::{AtomicPtr, Ordering};

/// `void *dlsym(void *handle, const char *name)`.
#[unsafe(naked)]
#[unsafe(export_name = "partage_hook_dlsym")]
pub(crate) unsafe extern "C" fn dlsym(handle: *mut c_void, name: *const c_char) -> *mut c_void {
    naked_asm!(
        "push rdi",
        "push rsi",
        "sub rsp, 8",
        "call {route}",
        "add rsp, 8",
        "pop rsi",
        "pop rdi",
        "test rax, rax",
        "jnz 2f",
        "jmp qword ptr [rip + {dlsym}]",
        "2:",
        "ret",
        route = sym route_dlsym,
        dlsym = sym DLSYM,
    )
}

/// `void *dlvsym(void *handle, const char *name, const char *version)`.
#[unsafe(naked)]
#[unsafe(export_name = "partage_hook_dlvsym")]
pub(crate) unsafe extern "C" fn dlvsym(
    handle: *mut c_void,
    name: *const c_char,
    version: *const c_char,
) -> *mut c_void {
    naked_asm!(
        "push rdi",
        "push rsi",
        "push rdx",
        "call {route}",
        "pop rdx",
        "pop rsi",
        "pop rdi",
        "test rax, rax",
        "jnz 2f",
        "jmp qword ptr [rip + {dlvsym}]",
        "2:",
        "ret",
        route = sym route_dlvsym,
        dlvsym = sym DLVSYM,
    )
}

unsafe extern "C" fn route_dlsym(handle: *mut c_void, name: *const c_char) -> *mut c_void {
    crate::hook::guarded(std::ptr::null_mut(), || {
        found(&DLSYM, c"dlsym");
        found(&DLVSYM, c"dlvsym");
        // SAFETY: the program's promise.
        unsafe { route(handle, name) }
    })
}

unsafe extern "C" fn route_dlvsym(handle: *mut c_void, name: *const c_char) -> *mut c_void {
    crate::hook::guarded(std::ptr::null_mut(), || {
        found(&DLSYM, c"dlsym");
        found(&DLVSYM, c"dlvsym");
        // The driver's names have no versions: with one they are either not there, or what they are without.
        // SAFETY: the program's promise.
        unsafe { route(handle, name) }
    })
}

/// The hook for this question; null where the C library is to answer.
///
/// # Safety
///
/// What `dlsym` was called with.
unsafe fn route(handle: *mut c_void, name: *const c_char) -> *mut c_void {
    let nothing = std::ptr::null_mut();
    if name.is_null() {
        return nothing;
    }
    // SAFETY: a text that ends in zero.
    let name = unsafe { CStr::from_ptr(name) };
    let bytes = name.to_bytes_with_nul();
    let library = match bytes {
        [b'c', b'u', ..] => Library::Cuda,
        [b'n', b'v', b'm', b'l', ..] => Library::Nvml,
        // A library that interposes these two asks for the next ones by name, and would go past us with the C library's.
        b"dlsym\0" => return lookup(handle, name, &DLSYM, (dlsym as *const c_void).cast_mut()),
        b"dlvsym\0" => return lookup(handle, name, &DLVSYM, (dlvsym as *const c_void).cast_mut()),
        _ => return nothing,
    };
    let hook = all().find(|hook| hook.name.as_bytes() == bytes).map(|hook| hook.address.cast_mut());
    if handle == libc::RTLD_DEFAULT || handle == libc::RTLD_NEXT {
        // "Whichever comes first" is this library; "the next one after me" must not be the driver itself either.
        return match hook {
            Some(hook) if !library.symbol(name).is_null() => hook,
            _ => nothing,
        };
    }
    let answer = true_dlsym(handle, name);
    if !is_drivers(answer) {
        return nothing;
    }
    // A second copy of the driver, in a namespace of its own or from another file, knows nothing of what the hooks do with
    // the first: all of it is the first one's.
    let first = library.symbol(name);
    match hook {
        Some(hook) => hook,
        None if first.is_null() => answer,
        None => first,
    }
}

/// Our own way to look names up, where the C library's would be the answer.
fn lookup(handle: *mut c_void, name: &CStr, theirs: &AtomicPtr<c_void>, ours: *mut c_void) -> *mut c_void {
    let first = handle == libc::RTLD_DEFAULT || handle == libc::RTLD_NEXT;
    let theirs = theirs.load(Ordering::Acquire);
    if first || !theirs.is_null() && true_dlsym(handle, name) == theirs { ours } else { std::ptr::null_mut() }
}

/// Whether an address lies in a library of the driver's, in whatever namespace it was loaded.
fn is_drivers(address: *mut c_void) -> bool {
    let mut object = libc::Dl_info {
        dli_fname: std::ptr::null(),
        dli_fbase: std::ptr::null_mut(),
        dli_sname: std::ptr::null(),
        dli_saddr: std::ptr::null_mut(),
    };
    // SAFETY: any address may be asked for; the struct is filled in.
    if address.is_null() || unsafe { libc::dladdr(address, &mut object) } == 0 || object.dli_fname.is_null() {
        return false;
    }
    // SAFETY: the linker's text, which ends in zero.
    let path = unsafe { CStr::from_ptr(object.dli_fname) }.to_bytes();
    let name = path.rsplit(|&byte| byte == b'/').next().unwrap_or(path);
    name.starts_with(b"libcuda.") || name.starts_with(b"libnvidia-ml.")
}
