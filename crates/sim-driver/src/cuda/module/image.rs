//! Images of device code: how long one is, and what can be read of it without running it.

use std::ffi::{CStr, CString};

/// What is kept of an image.
pub(super) struct Image {
    bytes: usize,
    /// The functions of PTX, which is text; nothing for binaries, which have every function asked for.
    functions: Option<Vec<CString>>,
    globals: Vec<(CString, usize)>,
}

const ELF: [u8; 4] = *b"\x7fELF";
const FAT_BINARY: u32 = 0xba55_ed50;
const FAT_WRAPPER: u32 = 0x4662_43b1;

/// No PTX is longer; what has no end by then is no text.
const LONGEST: usize = 256 << 20;

/// The size of a variable that a binary image is asked for.
const PAGE: usize = 4096;

impl Image {
    /// Reads the image at the address.
    ///
    /// # Safety
    /// The program's image: a cubin, a fat binary or a text that ends in zero.
    pub(super) unsafe fn at(image: *const u8) -> Option<Self> {
        if image.is_null() {
            return None;
        }
        // SAFETY: the shortest text is its end; the other bytes are read only if there are any before them.
        let first = unsafe { image.read() };
        let binary = |bytes| Some(Self { bytes, functions: None, globals: Vec::new() });
        match first {
            0x7f => {
                // SAFETY: a text does not begin with this byte, so a whole ELF header follows.
                let header: [u8; 64] = unsafe { image.cast::<[u8; 64]>().read_unaligned() };
                if header[..4] != ELF {
                    return binary(header.len());
                }
                let field = |at: usize, bytes: usize| {
                    header[at..at + bytes].iter().rev().fold(0u64, |sum, &byte| sum << 8 | u64::from(byte))
                };
                let end = field(40, 8).saturating_add(field(58, 2) * field(60, 2));
                binary(usize::try_from(end).unwrap_or(0).min(LONGEST))
            }
            0x50 | 0xb1 => {
                // SAFETY: as above; a fat binary begins with at least sixteen bytes.
                let head: [u8; 16] = unsafe { image.cast::<[u8; 16]>().read_unaligned() };
                let word = u32::from_le_bytes([head[0], head[1], head[2], head[3]]);
                let rest = u64::from_le_bytes([
                    head[8], head[9], head[10], head[11], head[12], head[13], head[14], head[15],
                ]);
                match word {
                    FAT_BINARY => binary(usize::try_from(rest).unwrap_or(0).min(LONGEST) + 16),
                    // SAFETY: the wrapper's third field is the address of the fat binary.
                    FAT_WRAPPER if rest != 0 => unsafe { Self::at(rest as *const u8) },
                    // SAFETY: the caller's promise: then it is a text.
                    _ => Some(unsafe { Self::text(image) }),
                }
            }
            // SAFETY: the caller's promise: then it is a text.
            _ => Some(unsafe { Self::text(image) }),
        }
    }

    /// # Safety
    /// A text that ends in zero.
    unsafe fn text(image: *const u8) -> Self {
        // SAFETY: the caller's promise; it stops at the zero.
        let length = unsafe { libc::strnlen(image.cast(), LONGEST) };
        // SAFETY: as many bytes were looked at above.
        let text = unsafe { std::slice::from_raw_parts(image, length) };
        Self::read(text)
    }

    /// Reads an image of known length.
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

    /// Bytes of it.
    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }

    /// Whether it has the function.
    pub(super) fn has_function(&self, name: &CStr) -> bool {
        self.functions.as_ref().is_none_or(|functions| functions.iter().any(|own| own.as_c_str() == name))
    }

    /// The functions it is known to have.
    pub(super) fn functions(&self) -> &[CString] {
        self.functions.as_deref().unwrap_or_default()
    }

    /// The size of a variable, if it has it.
    pub(super) fn global(&self, name: &CStr) -> Option<usize> {
        if self.functions.is_none() {
            return Some(PAGE);
        }
        self.globals.iter().find(|(own, _)| own.as_c_str() == name).map(|(_, size)| *size)
    }
}

/// The names after `.entry`.
fn functions(ptx: &str) -> Vec<CString> {
    ptx.split(".entry").skip(1).filter_map(|rest| CString::new(identifier(rest)?).ok()).collect()
}

/// The variables: `.global .align 4 .f32 name[16];` and `.const` likewise.
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
    fn ptx_says_what_it_has() {
        let image = Image::read(PTX.as_bytes());
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
    fn a_binary_has_what_is_asked_for() {
        let mut elf = [0u8; 128];
        elf[..4].copy_from_slice(&ELF);
        elf[40] = 100;
        elf[58] = 7;
        elf[60] = 4;
        // SAFETY: longer than the header it begins with.
        let image = unsafe { Image::at(elf.as_ptr()) }.unwrap();
        assert_eq!(image.bytes(), 128);
        assert!(image.has_function(c"anything"));
        // SAFETY: null is refused.
        assert!(unsafe { Image::at(std::ptr::null()) }.is_none());
    }

    proptest! {
        #[test]
        fn any_text_is_taken(text in "\\PC{0,200}|(\\.global |\\.entry |\\.version |\\.target |[a-z\\[\\]0-9 ;]){0,20}") {
            let image = Image::read(text.as_bytes());
            prop_assert_eq!(image.bytes(), text.len());
        }
    }
}
