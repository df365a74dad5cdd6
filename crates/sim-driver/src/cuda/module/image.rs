//! Images of device code: their size, and what can be read from them without running them.

use std::ffi::{CStr, CString};

/// The properties of an image that the driver keeps.
pub(super) struct ModuleImage {
    bytes: usize,
    /// The functions that PTX declares; `None` for binaries, which have every function.
    functions: Option<Vec<CString>>,
    globals: Vec<(CString, usize)>,
}

const ELF_MAGIC: [u8; 4] = *b"\x7fELF";
const FAT_BINARY_MAGIC: u32 = 0xba55_ed50;
const FAT_WRAPPER_MAGIC: u32 = 0x4662_43b1;

/// Maximum size of PTX; a text without a terminator by then is truncated.
const MAX_IMAGE_BYTES: usize = 256 << 20;

/// Size of a global variable of a binary image.
const DEFAULT_GLOBAL_BYTES: usize = 4096;

impl ModuleImage {
    /// Reads the image at an address; `None` if it is null.
    ///
    /// # Safety
    /// `image` is null, or points to a cubin, a fat binary or a NUL-terminated text.
    pub(super) unsafe fn at(image: *const u8) -> Option<Self> {
        if image.is_null() {
            return None;
        }
        // SAFETY: every image has at least one byte, a text its terminator.
        let first = unsafe { image.read() };
        let binary = |bytes| Some(Self { bytes, functions: None, globals: Vec::new() });
        match first {
            0x7f => {
                // SAFETY: no text begins with this byte, so a whole ELF header follows.
                let header: [u8; 64] = unsafe { image.cast::<[u8; 64]>().read_unaligned() };
                if header[..4] != ELF_MAGIC {
                    return binary(header.len());
                }
                let field = |at: usize, bytes: usize| {
                    header[at..at + bytes].iter().rev().fold(0u64, |sum, &byte| sum << 8 | u64::from(byte))
                };
                let end = field(40, 8).saturating_add(field(58, 2) * field(60, 2));
                binary(usize::try_from(end).unwrap_or(0).min(MAX_IMAGE_BYTES))
            }
            0x50 | 0xb1 => {
                // SAFETY: the caller guarantees an image; a fat binary begins with at least 16 bytes.
                let head: [u8; 16] = unsafe { image.cast::<[u8; 16]>().read_unaligned() };
                let word = u32::from_le_bytes([head[0], head[1], head[2], head[3]]);
                let rest = u64::from_le_bytes([
                    head[8], head[9], head[10], head[11], head[12], head[13], head[14], head[15],
                ]);
                match word {
                    FAT_BINARY_MAGIC => binary(usize::try_from(rest).unwrap_or(0).min(MAX_IMAGE_BYTES) + 16),
                    // SAFETY: the third field of the wrapper is the address of the fat binary.
                    FAT_WRAPPER_MAGIC if rest != 0 => unsafe { Self::at(rest as *const u8) },
                    // SAFETY: neither ELF nor a fat binary, so the caller guarantees a NUL-terminated text.
                    _ => Some(unsafe { Self::text(image) }),
                }
            }
            // SAFETY: neither ELF nor a fat binary, so the caller guarantees a NUL-terminated text.
            _ => Some(unsafe { Self::text(image) }),
        }
    }

    /// Reads a text image.
    ///
    /// # Safety
    /// `image` points to a NUL-terminated text.
    unsafe fn text(image: *const u8) -> Self {
        // SAFETY: the caller guarantees a NUL-terminated text, and `strnlen` stops at the terminator.
        let length = unsafe { libc::strnlen(image.cast(), MAX_IMAGE_BYTES) };
        // SAFETY: `strnlen` has read this many bytes.
        let text = unsafe { std::slice::from_raw_parts(image, length) };
        Self::read(text)
    }

    /// Parses an image of known length.
    pub(super) fn read(text: &[u8]) -> Self {
        let ptx = std::str::from_utf8(text)
            .ok()
            .filter(|text| text.contains(".version") && text.contains(".target"));
        Self {
            bytes: text.len(),
            functions: ptx.map(functions),
            globals: ptx.map(globals).unwrap_or_default(),
        }
    }

    /// Returns the size of the image in bytes.
    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }

    /// Returns whether the image has the function.
    pub(super) fn has_function(&self, name: &CStr) -> bool {
        self.functions.as_ref().is_none_or(|functions| functions.iter().any(|own| own.as_c_str() == name))
    }

    /// Returns the functions that the image declares.
    pub(super) fn functions(&self) -> &[CString] {
        self.functions.as_deref().unwrap_or_default()
    }

    /// Returns the size of a global variable if the image has it.
    pub(super) fn global(&self, name: &CStr) -> Option<usize> {
        if self.functions.is_none() {
            return Some(DEFAULT_GLOBAL_BYTES);
        }
        self.globals.iter().find(|(own, _)| own.as_c_str() == name).map(|(_, size)| *size)
    }
}

/// Returns the names after `.entry`.
fn functions(ptx: &str) -> Vec<CString> {
    ptx.split(".entry").skip(1).filter_map(|rest| CString::new(identifier(rest)?).ok()).collect()
}

/// Returns the variables declared by `.global` or `.const`, as in `.global .align 4 .f32 name[16];`.
fn globals(ptx: &str) -> Vec<(CString, usize)> {
    let variable = |line: &str| {
        let line = line.trim().trim_start_matches(".visible ").trim_start_matches(".extern ").trim();
        let line = line.strip_prefix(".global ").or_else(|| line.strip_prefix(".const "))?;
        let declared = line.split(['=', ';']).next()?.trim();
        let element = declared.split_whitespace().find_map(|word| match word {
            ".b8" | ".u8" | ".s8" => Some(1),
            ".b16" | ".u16" | ".s16" | ".f16" => Some(2),
            ".b32" | ".u32" | ".s32" | ".f32" => Some(4),
            ".b64" | ".u64" | ".s64" | ".f64" => Some(8),
            _ => None,
        })?;
        let name = declared.split_whitespace().next_back()?;
        let (name, count) = match name.split_once('[') {
            Some((name, count)) => (name, count.trim_end_matches(']').parse::<usize>().unwrap_or(1)),
            None => (name, 1),
        };
        Some((CString::new(identifier(name)?).ok()?, element * count.clamp(1, 1 << 30)))
    };
    ptx.lines().filter_map(variable).collect()
}

fn identifier(text: &str) -> Option<&str> {
    let text = text.trim_start();
    let end = text.find(|c: char| !(c.is_ascii_alphanumeric() || "_$%".contains(c))).unwrap_or(text.len());
    (end > 0).then(|| &text[..end])
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const PTX: &str = "//\n.version 8.4\n.target sm_80\n.address_size 64\n.global .align 4 .f32 table[16];\n\
        .visible .const .align 8 .b64 one = 1;\n.visible .entry first(\n\t.param .u64 first_param_0\n)\n{ ret; }\n\
        .entry _Z6secondv() { ret; }\n";

    #[test]
    fn ptx_functions_and_globals_are_listed() {
        let image = ModuleImage::read(PTX.as_bytes());
        assert!(
            image.has_function(c"first")
                && image.has_function(c"_Z6secondv")
                && !image.has_function(c"third")
        );
        assert_eq!(image.global(c"table"), Some(64));
        assert_eq!(image.global(c"one"), Some(8));
        assert_eq!(image.global(c"none"), None);
        assert_eq!(image.bytes(), PTX.len());
    }

    #[test]
    fn binary_image_has_every_function() {
        let mut elf = [0u8; 128];
        elf[..4].copy_from_slice(&ELF_MAGIC);
        elf[40] = 100;
        elf[58] = 7;
        elf[60] = 4;
        // SAFETY: the array is longer than an ELF header.
        let image = unsafe { ModuleImage::at(elf.as_ptr()) }.unwrap();
        assert_eq!(image.bytes(), 128);
        assert!(image.has_function(c"anything"));
        // SAFETY: null is rejected.
        assert!(unsafe { ModuleImage::at(std::ptr::null()) }.is_none());
    }

    proptest! {
        #[test]
        fn arbitrary_text_is_accepted(text in "\\PC{0,200}|(\\.global |\\.entry |\\.version |\\.target |[a-z\\[\\]0-9 ;]){0,20}") {
            let image = ModuleImage::read(text.as_bytes());
            prop_assert_eq!(image.bytes(), text.len());
        }
    }
}
