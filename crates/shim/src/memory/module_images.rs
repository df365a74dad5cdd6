//! Upper bounds of the GPU memory that an image of device code may take.
//!
//! An image is in the application's memory, and reporting its errors is left to the driver: nothing is read beyond what
//! an image of its kind must have, and no number in it is trusted.
#![allow(unsafe_code)]

use partage_driver_api::cuda::{c_char, c_void};
use partage_region::futex::preserve_errno;
use std::ffi::{CStr, OsStr};
use std::fs::{File, Metadata};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::FileExt;
use std::path::Path;

/// No image is longer, in bytes.
const MAX_IMAGE_BYTES: u64 = 256 << 20;

const ELF_MAGIC: [u8; 4] = *b"\x7fELF";
const ELF_HEADER_BYTES: usize = 64;
const FAT_BINARY_MAGIC: [u8; 4] = [0x50, 0xed, 0x55, 0xba];
const FAT_WRAPPER_MAGIC: [u8; 4] = [0xb1, 0x43, 0x62, 0x46];

/// Returns the most bytes that an image takes of a GPU: its length, and its zero-initialized variables.
///
/// # Safety
///
/// `image` must be null, or an image that the application passed to the driver: a cubin, a fat binary, its wrapper, or
/// text.
pub(super) unsafe fn max_device_bytes(image: *const c_void) -> u64 {
    if image.is_null() {
        return 0;
    }
    // SAFETY: not null, and an image by this function's safety contract.
    if unsafe { begins_with(image, FAT_WRAPPER_MAGIC) } {
        // SAFETY: a wrapper has a magic number, a version and the address of a fat binary.
        let inside = unsafe { image.cast::<[u64; 2]>().read_unaligned() }[1];
        let inside: *const c_void = std::ptr::with_exposed_provenance(inside as usize);
        // Images are not wrapped twice.
        // SAFETY: a wrapper's address is that of an image, and it is not null.
        return if inside.is_null() { 0 } else { unsafe { max_device_bytes_unwrapped(inside) } };
    }
    // SAFETY: not null, and an image by this function's safety contract.
    unsafe { max_device_bytes_unwrapped(image) }
}

/// Returns whether an image begins with these bytes. It reads byte by byte, up to the first that differs: text may end
/// there.
///
/// # Safety
///
/// `image` must be an image and not null.
unsafe fn begins_with(image: *const c_void, magic: [u8; 4]) -> bool {
    magic.iter().enumerate().all(|(at, &byte)| {
        let next = image.cast::<u8>().wrapping_add(at);
        // SAFETY: no byte before was the end of a text, because no byte of the magic numbers is zero.
        unsafe { next.read() == byte }
    })
}

/// Returns the most bytes that an image without a wrapper takes of a GPU.
///
/// # Safety
///
/// `image` must be an image and not null.
unsafe fn max_device_bytes_unwrapped(image: *const c_void) -> u64 {
    // SAFETY: the caller guarantees that `image` is an image and not null.
    if unsafe { begins_with(image, ELF_MAGIC) } {
        // SAFETY: an ELF file begins with a header of this size.
        let header = unsafe { image.cast::<[u8; ELF_HEADER_BYTES]>().read_unaligned() };
        let Some(sections) = SectionTable::parse(&header) else {
            return MAX_IMAGE_BYTES.min(end_of(&header));
        };
        let table = image.cast::<u8>().wrapping_add(sections.at as usize);
        // SAFETY: a cubin extends to the end of its section headers, which the driver reads, too.
        let table = unsafe { std::slice::from_raw_parts(table, sections.bytes() as usize) };
        return sections.end().saturating_add(sections.zero_initialized_bytes(table));
    }
    // SAFETY: the caller guarantees that `image` is an image and not null.
    if unsafe { begins_with(image, FAT_BINARY_MAGIC) } {
        // SAFETY: a fat binary has a header of 16 bytes, the second half of which is the length of the rest.
        let rest = unsafe { image.cast::<[u64; 2]>().read_unaligned() }[1];
        return rest.saturating_add(16).min(MAX_IMAGE_BYTES);
    }
    // SAFETY: an image of no other kind is a text, which ends with a zero.
    unsafe { libc::strnlen(image.cast(), MAX_IMAGE_BYTES as usize) as u64 }
}

/// Returns the most bytes that an image in a file takes of a GPU.
///
/// # Safety
///
/// `path` must be null or a C string.
pub(super) unsafe fn max_device_bytes_of_path(path: *const c_char) -> u64 {
    if path.is_null() {
        return 0;
    }
    // SAFETY: not null, and a C string by this function's safety contract.
    let path = unsafe { CStr::from_ptr(path) };
    let path = Path::new(OsStr::from_bytes(path.to_bytes()));
    preserve_errno(|| max_device_bytes_of_file(path).unwrap_or(0))
}

/// Returns the bound for a file: its length if it cannot be parsed; `None` if it is not a file.
fn max_device_bytes_of_file(path: &Path) -> Option<u64> {
    let length = std::fs::metadata(path).ok().filter(Metadata::is_file)?.len().min(MAX_IMAGE_BYTES);
    let zero_initialized_bytes = || {
        let file = File::open(path).ok()?;
        let mut header = [0; ELF_HEADER_BYTES];
        file.read_exact_at(&mut header, 0).ok()?;
        let sections = SectionTable::parse(&header).filter(|_| header.starts_with(&ELF_MAGIC))?;
        let mut table = vec![0; usize::try_from(sections.bytes()).ok()?];
        file.read_exact_at(&mut table, sections.at).ok()?;
        Some(sections.zero_initialized_bytes(&table))
    };
    Some(length.saturating_add(zero_initialized_bytes().unwrap_or(0)))
}

fn number<const BYTES: usize>(of: &[u8], at: u64) -> Option<u64> {
    let at = usize::try_from(at).ok()?;
    let bytes = of.get(at..at.checked_add(BYTES)?)?;
    Some(bytes.iter().rev().fold(0, |sum, &byte| sum << 8 | u64::from(byte)))
}

/// Returns where a file's section headers end. They come last.
fn end_of(header: &[u8; ELF_HEADER_BYTES]) -> u64 {
    let field = |at| number::<2>(header, at).unwrap_or(0);
    number::<8>(header, 40).unwrap_or(0).saturating_add(field(58) * field(60))
}

/// The section headers of a cubin.
#[derive(Clone, Copy)]
struct SectionTable {
    at: u64,
    count: u64,
}

impl SectionTable {
    /// Bytes of one section header.
    const HEADER_BYTES: u64 = 64;

    /// Parses the header; `None` if the file is not a complete cubin.
    fn parse(header: &[u8; ELF_HEADER_BYTES]) -> Option<Self> {
        const ELFCLASS64: u8 = 2;
        const EM_CUDA: u64 = 190;
        let sections = Self { at: number::<8>(header, 40)?, count: number::<2>(header, 60)? };
        let whole = header[4] == ELFCLASS64
            && number::<2>(header, 18)? == EM_CUDA
            && number::<2>(header, 58)? == Self::HEADER_BYTES;
        (whole && sections.at >= ELF_HEADER_BYTES as u64 && sections.end() <= MAX_IMAGE_BYTES)
            .then_some(sections)
    }

    fn bytes(self) -> u64 {
        self.count * Self::HEADER_BYTES
    }

    fn end(self) -> u64 {
        self.at.saturating_add(self.bytes())
    }

    /// Returns the bytes of zero-initialized variables.
    fn zero_initialized_bytes(self, table: &[u8]) -> u64 {
        const SHT_NOBITS: u64 = 8;
        const SHF_ALLOC: u64 = 2;
        let of = |section: u64| {
            let header = section * Self::HEADER_BYTES;
            let (kind, flags) = (number::<4>(table, header + 4)?, number::<8>(table, header + 8)?);
            let size = number::<8>(table, header + 32)?;
            (kind == SHT_NOBITS && flags & SHF_ALLOC != 0).then_some(size)
        };
        (0..self.count).filter_map(of).fold(0, u64::saturating_add)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Builds a file with sections of these kinds, flags and sizes.
    fn file(sections: &[(u32, u64, u64)]) -> Vec<u8> {
        let mut file = vec![0; ELF_HEADER_BYTES + 100];
        file[..4].copy_from_slice(&ELF_MAGIC);
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

    fn bytes_of(image: &[u8]) -> u64 {
        // SAFETY: the image lives through the call.
        unsafe { max_device_bytes(image.as_ptr().cast()) }
    }

    #[test]
    fn zero_initialized_variables_count() {
        let some = file(&[(1, 2, 1000), (8, 3, 5 << 30), (8, 1, 7), (8, 2, 11)]);
        assert_eq!(bytes_of(&some), some.len() as u64 + (5 << 30) + 11);
        let forged = file(&[(8, 2, u64::MAX), (8, 2, 1)]);
        assert_eq!(bytes_of(&forged), u64::MAX);
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("image");
        std::fs::write(&path, &some).unwrap();
        let path = std::ffi::CString::new(path.as_os_str().as_bytes()).unwrap();
        // SAFETY: the path is a C string that lives through the call.
        assert_eq!(unsafe { max_device_bytes_of_path(path.as_ptr()) }, bytes_of(&some));
    }

    /// Places the bytes at the end of a page whose successor cannot be read.
    fn at_the_end_of_a_page(bytes: &[u8], check: impl FnOnce(*const c_void)) {
        const PAGE: usize = 4096;
        let (both, shared) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
        // SAFETY: this creates a new mapping of two pages.
        let pages = unsafe { libc::mmap(std::ptr::null_mut(), 2 * PAGE, both, shared, -1, 0) };
        assert_ne!(pages, libc::MAP_FAILED);
        // SAFETY: the second page belongs to the mapping above.
        assert_eq!(unsafe { libc::mprotect(pages.wrapping_byte_add(PAGE), PAGE, libc::PROT_NONE) }, 0);
        let image = pages.wrapping_byte_add(PAGE - bytes.len());
        // SAFETY: the bytes fit into the end of the first page.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), image.cast(), bytes.len()) };
        check(image);
        // SAFETY: this is the mapping from above, and nothing refers to it any more.
        unsafe { libc::munmap(pages, 2 * PAGE) };
    }

    #[test]
    fn nothing_is_read_beyond_a_text_image() {
        for text in [&b"\0"[..], b"\x50\0", b"\x50\xed\x55\0", b"\xb1\x43\0", b"\x7fE\0"] {
            at_the_end_of_a_page(text, |image| {
                // SAFETY: the image is a text, and nothing follows it.
                assert_eq!(unsafe { max_device_bytes(image) }, text.len() as u64 - 1);
            });
        }
    }

    #[test]
    fn wrapper_is_opened_once() {
        let mut wrapper = [0u64; 3];
        wrapper[0] = u64::from(u32::from_le_bytes(FAT_WRAPPER_MAGIC)) | 1 << 32;
        wrapper[1] = wrapper.as_ptr().expose_provenance() as u64;
        // SAFETY: the wrapper points to itself. A wrapper is opened once, so its bytes are then read as a text, which ends
        // at a zero byte inside the array.
        assert_eq!(unsafe { max_device_bytes(wrapper.as_ptr().cast()) }, 5);
        let inside = [u64::from(u32::from_le_bytes(FAT_BINARY_MAGIC)), 1000];
        wrapper[1] = inside.as_ptr().expose_provenance() as u64;
        // SAFETY: the image is a wrapper of a fat binary.
        assert_eq!(unsafe { max_device_bytes(wrapper.as_ptr().cast()) }, 1016);
        wrapper[1] = 0;
        // SAFETY: the image is a wrapper whose pointer is null, which is not followed.
        assert_eq!(unsafe { max_device_bytes(wrapper.as_ptr().cast()) }, 0);
    }

    #[test]
    fn other_images_count_by_their_length() {
        for (at, byte) in [(4, 1), (18, 62), (58, 63), (47, 1)] {
            let mut other = file(&[(8, 2, 1 << 40)]);
            other[at] = byte;
            assert!(bytes_of(&other) <= MAX_IMAGE_BYTES, "{at}");
        }
    }
}
