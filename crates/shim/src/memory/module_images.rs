//! How much of a card an image of device code may take.
//!
//! An image is the program's own memory, and what is wrong with it is the driver's to say: nothing here is read beyond what
//! an image of its kind must have, and no number in it is trusted.
#![allow(unsafe_code)]

use partage_driver_api::cuda::{c_char, c_void};
use partage_region::futex::keeping_errno;
use std::ffi::{CStr, OsStr};
use std::fs::{File, Metadata};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::FileExt;
use std::path::Path;

/// No image is longer.
const LONGEST: u64 = 256 << 20;

const ELF: [u8; 4] = *b"\x7fELF";
const ELF_HEADER: usize = 64;
const FAT_BINARY: [u8; 4] = [0x50, 0xed, 0x55, 0xba];
const FAT_WRAPPER: [u8; 4] = [0xb1, 0x43, 0x62, 0x46];

/// Most that an image takes of a card: as much as it is long, and the variables that it does not have the values of.
///
/// # Safety
///
/// Null, or an image that the program gives to the driver: a cubin, a fat binary, its wrapper, or a text.
pub(super) unsafe fn most(image: *const c_void) -> u64 {
    if image.is_null() {
        return 0;
    }
    // SAFETY: the caller's promise.
    if unsafe { begins_with(image, FAT_WRAPPER) } {
        // SAFETY: a wrapper has a magic number, a version and the address of a fat binary.
        let inside = unsafe { image.cast::<[u64; 2]>().read_unaligned() }[1];
        let inside: *const c_void = std::ptr::with_exposed_provenance(inside as usize);
        // Nothing is wrapped twice.
        // SAFETY: the wrapper's promise.
        return if inside.is_null() { 0 } else { unsafe { most_unwrapped(inside) } };
    }
    // SAFETY: the caller's promise, and not null.
    unsafe { most_unwrapped(image) }
}

/// Whether an image begins so. Read byte by byte, and no further than the first that differs: a text may end there.
///
/// # Safety
///
/// An image, not null.
unsafe fn begins_with(image: *const c_void, magic: [u8; 4]) -> bool {
    magic.iter().enumerate().all(|(at, &byte)| {
        let next = image.cast::<u8>().wrapping_add(at);
        // SAFETY: no byte before was a text's end, because none in these numbers is zero.
        unsafe { next.read() == byte }
    })
}

/// # Safety
///
/// An image, not null.
unsafe fn most_unwrapped(image: *const c_void) -> u64 {
    // SAFETY: the caller's promise.
    if unsafe { begins_with(image, ELF) } {
        // SAFETY: an ELF file begins with its header.
        let header = unsafe { image.cast::<[u8; ELF_HEADER]>().read_unaligned() };
        let Some(sections) = Sections::of(&header) else { return LONGEST.min(end_of(&header)) };
        let table = image.cast::<u8>().wrapping_add(sections.at as usize);
        // SAFETY: the driver reads a cubin to the end of its sections' headers.
        let table = unsafe { std::slice::from_raw_parts(table, sections.bytes() as usize) };
        return sections.end().saturating_add(sections.without_values(table));
    }
    // SAFETY: the caller's promise.
    if unsafe { begins_with(image, FAT_BINARY) } {
        // SAFETY: a fat binary has a header of sixteen bytes, the second half of which says how long the rest is.
        let rest = unsafe { image.cast::<[u64; 2]>().read_unaligned() }[1];
        return rest.saturating_add(16).min(LONGEST);
    }
    // SAFETY: the program's promise: then it is a text.
    unsafe { libc::strnlen(image.cast(), LONGEST as usize) as u64 }
}

/// The same for an image in a file.
///
/// # Safety
///
/// Null, or a text that ends in zero.
pub(super) unsafe fn most_of_path(path: *const c_char) -> u64 {
    if path.is_null() {
        return 0;
    }
    // SAFETY: the caller's promise.
    let path = unsafe { CStr::from_ptr(path) };
    let path = Path::new(OsStr::from_bytes(path.to_bytes()));
    keeping_errno(|| most_of_file(path).unwrap_or(0))
}

/// What cannot be read takes what it is long; what is no file, nothing.
fn most_of_file(path: &Path) -> Option<u64> {
    let length = std::fs::metadata(path).ok().filter(Metadata::is_file)?.len().min(LONGEST);
    let without_values = || {
        let file = File::open(path).ok()?;
        let mut header = [0; ELF_HEADER];
        file.read_exact_at(&mut header, 0).ok()?;
        let sections = Sections::of(&header).filter(|_| header.starts_with(&ELF))?;
        let mut table = vec![0; usize::try_from(sections.bytes()).ok()?];
        file.read_exact_at(&mut table, sections.at).ok()?;
        Some(sections.without_values(&table))
    };
    Some(length.saturating_add(without_values().unwrap_or(0)))
}

fn number<const BYTES: usize>(of: &[u8], at: u64) -> Option<u64> {
    let at = usize::try_from(at).ok()?;
    let bytes = of.get(at..at.checked_add(BYTES)?)?;
    Some(bytes.iter().rev().fold(0, |sum, &byte| sum << 8 | u64::from(byte)))
}

/// Where a file's sections' headers end. They come last.
fn end_of(header: &[u8; ELF_HEADER]) -> u64 {
    let field = |at| number::<2>(header, at).unwrap_or(0);
    number::<8>(header, 40).unwrap_or(0).saturating_add(field(58) * field(60))
}

/// The headers of a cubin's sections.
#[derive(Clone, Copy)]
struct Sections {
    at: u64,
    count: u64,
}

impl Sections {
    /// Bytes of one.
    const EACH: u64 = 64;

    /// None for what is no cubin, or not a whole one.
    fn of(header: &[u8; ELF_HEADER]) -> Option<Self> {
        const WIDE: u8 = 2;
        const CUDA: u64 = 190;
        let sections = Self { at: number::<8>(header, 40)?, count: number::<2>(header, 60)? };
        let whole =
            header[4] == WIDE && number::<2>(header, 18)? == CUDA && number::<2>(header, 58)? == Self::EACH;
        (whole && sections.at >= ELF_HEADER as u64 && sections.end() <= LONGEST).then_some(sections)
    }

    fn bytes(self) -> u64 {
        self.count * Self::EACH
    }

    fn end(self) -> u64 {
        self.at.saturating_add(self.bytes())
    }

    /// Bytes of variables without values, by these headers.
    fn without_values(self, table: &[u8]) -> u64 {
        const NOBITS: u64 = 8;
        const ALLOC: u64 = 2;
        let of = |section: u64| {
            let header = section * Self::EACH;
            let (kind, flags) = (number::<4>(table, header + 4)?, number::<8>(table, header + 8)?);
            let size = number::<8>(table, header + 32)?;
            (kind == NOBITS && flags & ALLOC != 0).then_some(size)
        };
        (0..self.count).filter_map(of).fold(0, u64::saturating_add)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A file with sections of these kinds, flags and sizes.
    fn file(sections: &[(u32, u64, u64)]) -> Vec<u8> {
        let mut file = vec![0; ELF_HEADER + 100];
        file[..4].copy_from_slice(&ELF);
        let at = file.len() as u64;
        (file[4], file[18]) = (2, 190);
        file[40..48].copy_from_slice(&at.to_le_bytes());
        file[58..60].copy_from_slice(&64u16.to_le_bytes());
        file[60..62].copy_from_slice(&(sections.len() as u16).to_le_bytes());
        for (kind, flags, size) in sections {
            let mut header = [0; 64];
            header[4..8].copy_from_slice(&kind.to_le_bytes());
            header[8..16].copy_from_slice(&flags.to_le_bytes());
            header[32..40].copy_from_slice(&size.to_le_bytes());
            file.extend(header);
        }
        file
    }

    fn of(image: &[u8]) -> u64 {
        // SAFETY: an image that lives through the call.
        unsafe { most(image.as_ptr().cast()) }
    }

    #[test]
    fn variables_without_values_count() {
        let some = file(&[(1, 2, 1000), (8, 3, 5 << 30), (8, 1, 7), (8, 2, 11)]);
        assert_eq!(of(&some), some.len() as u64 + (5 << 30) + 11);
        let forged = file(&[(8, 2, u64::MAX), (8, 2, 1)]);
        assert_eq!(of(&forged), u64::MAX);
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("image");
        std::fs::write(&path, &some).unwrap();
        let path = std::ffi::CString::new(path.as_os_str().as_bytes()).unwrap();
        // SAFETY: a text that lives through the call.
        assert_eq!(unsafe { most_of_path(path.as_ptr()) }, of(&some));
    }

    /// A page whose successor cannot be read.
    fn at_the_end_of_a_page(bytes: &[u8], check: impl FnOnce(*const c_void)) {
        const PAGE: usize = 4096;
        let (both, shared) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
        // SAFETY: two new pages.
        let pages = unsafe { libc::mmap(std::ptr::null_mut(), 2 * PAGE, both, shared, -1, 0) };
        assert_ne!(pages, libc::MAP_FAILED);
        // SAFETY: the second of them.
        assert_eq!(unsafe { libc::mprotect(pages.wrapping_byte_add(PAGE), PAGE, libc::PROT_NONE) }, 0);
        let image = pages.wrapping_byte_add(PAGE - bytes.len());
        // SAFETY: the end of the first.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), image.cast(), bytes.len()) };
        check(image);
        // SAFETY: the two from above.
        unsafe { libc::munmap(pages, 2 * PAGE) };
    }

    #[test]
    fn nothing_is_read_beyond_a_text() {
        for text in [&b"\0"[..], b"\x50\0", b"\x50\xed\x55\0", b"\xb1\x43\0", b"\x7fE\0"] {
            at_the_end_of_a_page(text, |image| {
                // SAFETY: a text, and nothing behind it.
                assert_eq!(unsafe { most(image) }, text.len() as u64 - 1);
            });
        }
    }

    #[test]
    fn a_wrapper_is_opened_once() {
        let mut wrapper = [0u64; 3];
        wrapper[0] = u64::from(u32::from_le_bytes(FAT_WRAPPER)) | 1 << 32;
        wrapper[1] = wrapper.as_ptr().expose_provenance() as u64;
        // SAFETY: a wrapper, if a strange one: inside it is taken for a text.
        assert_eq!(unsafe { most(wrapper.as_ptr().cast()) }, 5);
        let inside = [u64::from(u32::from_le_bytes(FAT_BINARY)), 1000];
        wrapper[1] = inside.as_ptr().expose_provenance() as u64;
        // SAFETY: a wrapper of a fat binary.
        assert_eq!(unsafe { most(wrapper.as_ptr().cast()) }, 1016);
        wrapper[1] = 0;
        // SAFETY: likewise, of nothing.
        assert_eq!(unsafe { most(wrapper.as_ptr().cast()) }, 0);
    }

    #[test]
    fn what_is_no_cubin_takes_what_it_is_long() {
        for (at, byte) in [(4, 1), (18, 62), (58, 63), (47, 1)] {
            let mut other = file(&[(8, 2, 1 << 40)]);
            other[at] = byte;
            assert!(of(&other) <= LONGEST, "{at}");
        }
    }
}
