//! The C library's own `dlsym`, found in the C library's symbol table.
//!
//! Programs and their preloaded libraries may define a `dlsym` of their own (profilers do), and the loader binds this
//! library's reference to that one. It may answer a driver function's name with a wrapper that calls the hook again, so
//! the shim never looks the driver's functions up through it.
#![allow(unsafe_code)]

use std::ffi::{CStr, c_char, c_int, c_void};
use std::sync::atomic::{AtomicPtr, Ordering};

/// Looks up a symbol with the C library's own `dlsym`.
pub(crate) fn libc_dlsym(handle: *mut c_void, name: &CStr) -> *mut c_void {
    let address = address();
    if address.is_null() {
        return address;
    }
    // SAFETY: the address is that of the C library's `dlsym`, which has this type.
    let dlsym = unsafe {
        std::mem::transmute::<*mut c_void, unsafe extern "C" fn(*mut c_void, *const c_char) -> *mut c_void>(
            address,
        )
    };
    // SAFETY: the handle is one of the dynamic linker, and the name is a C string.
    unsafe { dlsym(handle, name.as_ptr()) }
}

/// Returns the address of the C library's `dlsym`, which is searched for once; null if there is none.
fn address() -> *mut c_void {
    static ADDRESS: AtomicPtr<c_void> = AtomicPtr::new(std::ptr::null_mut());
    let known = ADDRESS.load(Ordering::Acquire);
    if !known.is_null() {
        return known;
    }
    let mut search = SymbolSearch { name: c"dlsym", address: std::ptr::null_mut() };
    // SAFETY: the callback has the expected type, and `search` outlives the call.
    unsafe { libc::dl_iterate_phdr(Some(visit_object), (&raw mut search).cast()) };
    ADDRESS.store(search.address, Ordering::Release);
    search.address
}

struct SymbolSearch {
    name: &'static CStr,
    address: *mut c_void,
}

/// Returns whether a file may define `dlsym`: glibc's (libc itself from 2.34 on, libdl before) or musl's.
fn is_c_library(path: &[u8]) -> bool {
    let name = path.rsplit(|&byte| byte == b'/').next().unwrap_or(path);
    [&b"libc.so.6"[..], b"libdl.so.2", b"ld-musl-", b"libc.musl-"].iter().any(|known| name.starts_with(known))
}

unsafe extern "C" fn visit_object(object: *mut libc::dl_phdr_info, _size: usize, data: *mut c_void) -> c_int {
    // SAFETY: `data` is the `search` of `address`, which is borrowed by nothing else during the call.
    let search = unsafe { &mut *data.cast::<SymbolSearch>() };
    // SAFETY: the dynamic linker passes a valid structure for the duration of the call.
    let object = unsafe { &*object };
    if object.dlpi_name.is_null() {
        return 0;
    }
    // SAFETY: the dynamic linker's name of an object is a C string, and it is not null.
    let path = unsafe { CStr::from_ptr(object.dlpi_name) };
    if !is_c_library(path.to_bytes()) {
        return 0;
    }
    // SAFETY: the linker passes the address and the number of the object's program headers.
    let headers = unsafe { std::slice::from_raw_parts(object.dlpi_phdr, usize::from(object.dlpi_phnum)) };
    let Some(dynamic) = headers.iter().find(|header| header.p_type == libc::PT_DYNAMIC) else { return 0 };
    let base = object.dlpi_addr as usize;
    // SAFETY: the dynamic linker has loaded this C library, so its dynamic section is complete.
    let tables = unsafe { SymbolTables::read(base, base + dynamic.p_vaddr as usize) };
    // SAFETY: the tables were just read from a loaded object.
    let found = tables.and_then(|tables| unsafe { tables.find(search.name) });
    match found {
        Some(address) => {
            search.address = std::ptr::with_exposed_provenance_mut(address);
            1
        }
        None => 0,
    }
}

/// Addresses of the symbol tables of a loaded object.
struct SymbolTables {
    base: usize,
    symbols: usize,
    strings: usize,
    hash: usize,
}

const DT_STRTAB: usize = 5;
const DT_SYMTAB: usize = 6;
const DT_GNU_HASH: usize = 0x6fff_fef5;

/// Reads a value from the object's memory.
///
/// # Safety
///
/// The address must lie in one of the object's tables, with space for a `T`.
unsafe fn read<T: Copy>(address: usize) -> T {
    // SAFETY: the caller guarantees that a `T` lies at the address, in a table that is mapped for reading.
    unsafe { std::ptr::with_exposed_provenance::<T>(address).read_unaligned() }
}

impl SymbolTables {
    /// Reads the addresses of the tables from the dynamic section; `None` if one is missing.
    ///
    /// # Safety
    ///
    /// The arguments must be a loaded object's base address and the address of its dynamic section.
    unsafe fn read(base: usize, dynamic: usize) -> Option<Self> {
        let mut tables = Self { base, symbols: 0, strings: 0, hash: 0 };
        for at in (dynamic..).step_by(16) {
            // SAFETY: the dynamic section ends with a zero tag, at which the loop ends.
            let [tag, value] = unsafe { read::<[usize; 2]>(at) };
            // glibc has relocated the addresses, musl has not.
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

    /// Returns the address of a symbol that the object defines, by its GNU hash table.
    ///
    /// # Safety
    ///
    /// The tables must be those of a loaded object.
    unsafe fn find(&self, name: &CStr) -> Option<usize> {
        let wanted = name
            .to_bytes()
            .iter()
            .fold(5381_u32, |hash, &byte| hash.wrapping_mul(33).wrapping_add(u32::from(byte)));
        // SAFETY: the hash table begins with four words.
        let [buckets, first, filter_words, _] = unsafe { read::<[u32; 4]>(self.hash) };
        let start = self.hash + 16 + filter_words as usize * 8;
        let chains = start + buckets as usize * 4;
        // SAFETY: the bucket is one of the table's.
        let mut index = unsafe { read::<u32>(start + (wanted.checked_rem(buckets)? as usize) * 4) };
        if index < first {
            return None;
        }
        loop {
            // SAFETY: the index is in a chain of the hash table, whose end is marked.
            let hash = unsafe { read::<u32>(chains + (index - first) as usize * 4) };
            if hash | 1 == wanted | 1 {
                let symbol = self.symbols + index as usize * 24;
                // SAFETY: the index is that of a symbol in the table.
                let text = unsafe { read::<u32>(symbol) };
                let text = std::ptr::with_exposed_provenance(self.strings + text as usize);
                // SAFETY: the string table holds the symbol's name, with a terminating zero.
                let text = unsafe { CStr::from_ptr(text) };
                // SAFETY: the symbol's value is at offset 8 of its entry.
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
    fn libc_dlsym_is_the_one_that_programs_use() {
        assert_eq!(address().addr(), libc::dlsym as *const () as usize);
        // Every C library exports this name.
        assert!(!libc_dlsym(libc::RTLD_DEFAULT, c"malloc").is_null());
        assert!(libc_dlsym(libc::RTLD_DEFAULT, c"no such thing").is_null());
    }
}
