//! The C library's own `dlsym`, found in the C library's symbol table.
//!
//! Programs and their preloaded libraries may define a `dlsym` of their own (profilers do), and the loader binds this
//! library's reference to that one. It may answer a driver function's name with a wrapper that calls the hook again, so
//! the shim never looks the driver's functions up through it.
#![allow(unsafe_code)]

use std::ffi::{CStr, c_char, c_int, c_void};
use std::sync::atomic::{AtomicPtr, Ordering};

/// Looks a symbol up as the C library does.
pub(crate) fn libc_dlsym(handle: *mut c_void, name: &CStr) -> *mut c_void {
    let address = address();
    if address.is_null() {
        return address;
    }
    // SAFETY: it is the C library's dlsym.
    let dlsym = unsafe {
        std::mem::transmute::<*mut c_void, unsafe extern "C" fn(*mut c_void, *const c_char) -> *mut c_void>(
            address,
        )
    };
    // SAFETY: a handle of the dynamic linker's and a text that ends in zero.
    unsafe { dlsym(handle, name.as_ptr()) }
}

/// The address of the C library's `dlsym`, searched for once; null if it has none.
fn address() -> *mut c_void {
    static FOUND: AtomicPtr<c_void> = AtomicPtr::new(std::ptr::null_mut());
    let known = FOUND.load(Ordering::Acquire);
    if !known.is_null() {
        return known;
    }
    let mut search = Search { name: c"dlsym", address: std::ptr::null_mut() };
    // SAFETY: the callback has the type that it takes, and the data outlives the call.
    unsafe { libc::dl_iterate_phdr(Some(look), (&raw mut search).cast()) };
    FOUND.store(search.address, Ordering::Release);
    search.address
}

struct Search {
    name: &'static CStr,
    address: *mut c_void,
}

/// Files that may define it: glibc's (from 2.34 in libc itself, before in libdl), musl's.
fn is_c_library(path: &[u8]) -> bool {
    let name = path.rsplit(|&byte| byte == b'/').next().unwrap_or(path);
    [&b"libc.so.6"[..], b"libdl.so.2", b"ld-musl-", b"libc.musl-"].iter().any(|known| name.starts_with(known))
}

unsafe extern "C" fn look(object: *mut libc::dl_phdr_info, _size: usize, data: *mut c_void) -> c_int {
    // SAFETY: what `address` gave, for the time of the call.
    let search = unsafe { &mut *data.cast::<Search>() };
    // SAFETY: the linker's, for the time of the call.
    let object = unsafe { &*object };
    if object.dlpi_name.is_null() {
        return 0;
    }
    // SAFETY: a text that ends in zero.
    let path = unsafe { CStr::from_ptr(object.dlpi_name) };
    if !is_c_library(path.to_bytes()) {
        return 0;
    }
    // SAFETY: the headers of a loaded object.
    let headers = unsafe { std::slice::from_raw_parts(object.dlpi_phdr, usize::from(object.dlpi_phnum)) };
    let Some(dynamic) = headers.iter().find(|header| header.p_type == libc::PT_DYNAMIC) else { return 0 };
    let base = object.dlpi_addr as usize;
    // SAFETY: a C library that the linker has loaded: its tables are whole.
    let tables = unsafe { Tables::read(base, base + dynamic.p_vaddr as usize) };
    // SAFETY: likewise.
    let found = tables.and_then(|tables| unsafe { tables.find(search.name) });
    match found {
        Some(address) => {
            search.address = std::ptr::with_exposed_provenance_mut(address);
            1
        }
        None => 0,
    }
}

/// The tables of a loaded object, as addresses.
struct Tables {
    base: usize,
    symbols: usize,
    strings: usize,
    hash: usize,
}

const DT_STRTAB: usize = 5;
const DT_SYMTAB: usize = 6;
const DT_GNU_HASH: usize = 0x6fff_fef5;

/// Reads a value of the object's.
///
/// # Safety
///
/// The address is one of the object's tables.
unsafe fn read<T: Copy>(address: usize) -> T {
    // SAFETY: the caller's promise.
    unsafe { std::ptr::with_exposed_provenance::<T>(address).read_unaligned() }
}

impl Tables {
    /// # Safety
    ///
    /// A loaded object's base and dynamic section.
    unsafe fn read(base: usize, dynamic: usize) -> Option<Self> {
        let mut tables = Self { base, symbols: 0, strings: 0, hash: 0 };
        for at in (dynamic..).step_by(16) {
            // SAFETY: the dynamic section ends in a zero tag.
            let [tag, value] = unsafe { read::<[usize; 2]>(at) };
            // glibc has added the base, musl has not.
            let address = if value < base { base.wrapping_add(value) } else { value };
            match tag {
                0 => break,
                DT_STRTAB => tables.strings = address,
                DT_SYMTAB => tables.symbols = address,
                DT_GNU_HASH => tables.hash = address,
                _ => {}
            }
        }
        (tables.symbols != 0 && tables.strings != 0 && tables.hash != 0).then_some(tables)
    }

    /// # Safety
    ///
    /// The tables are those of a loaded object.
    unsafe fn find(&self, name: &CStr) -> Option<usize> {
        let wanted = name
            .to_bytes()
            .iter()
            .fold(5381_u32, |hash, &byte| hash.wrapping_mul(33).wrapping_add(u32::from(byte)));
        // SAFETY: the head of the hash table.
        let [buckets, first, filter_words, _] = unsafe { read::<[u32; 4]>(self.hash) };
        let start = self.hash + 16 + filter_words as usize * 8;
        let chains = start + buckets as usize * 4;
        // SAFETY: a bucket of the hash table.
        let mut index = unsafe { read::<u32>(start + (wanted.checked_rem(buckets)? as usize) * 4) };
        if index < first {
            return None;
        }
        loop {
            // SAFETY: a chain of the hash table.
            let hash = unsafe { read::<u32>(chains + (index - first) as usize * 4) };
            if hash | 1 == wanted | 1 {
                let symbol = self.symbols + index as usize * 24;
                // SAFETY: a symbol of the table.
                let text = unsafe { read::<u32>(symbol) };
                let text = std::ptr::with_exposed_provenance(self.strings + text as usize);
                // SAFETY: the symbol's name.
                let text = unsafe { CStr::from_ptr(text) };
                // SAFETY: the symbol's value.
                let value = unsafe { read::<usize>(symbol + 8) };
                if text == name && value != 0 {
                    return Some(self.base + value);
                }
            }
            if hash & 1 == 1 {
                return None;
            }
            index += 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_the_one_that_programs_use() {
        assert_eq!(address().addr(), libc::dlsym as *const () as usize);
        // SAFETY: a name that every C library has.
        assert!(!libc_dlsym(libc::RTLD_DEFAULT, c"malloc").is_null());
        assert!(libc_dlsym(libc::RTLD_DEFAULT, c"no such thing").is_null());
    }
}
