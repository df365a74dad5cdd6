//! What [`install`](crate::install) wrote into the file that was loaded: whose region, which real libraries.
//!
//! A tenant can change the environment and most files of its container, not this: the file is mounted read-only. So
//! nothing is read from anywhere else.
#![allow(unsafe_code)]

use std::ffi::{CStr, OsStr};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

/// The bytes of a path, with the zero that ends it.
pub const PLACE: usize = 512;

/// Which library a file stands in for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LibraryRole {
    /// `libcuda.so.1`.
    Cuda,
    /// `libnvidia-ml.so.1`.
    Nvml,
}

impl LibraryRole {
    /// All of them.
    pub const ALL: [LibraryRole; 2] = [LibraryRole::Cuda, LibraryRole::Nvml];

    /// As it is written down. Zero is the shared object as it was linked.
    pub(crate) const fn number(self) -> u32 {
        match self {
            LibraryRole::Cuda => 1,
            LibraryRole::Nvml => 2,
        }
    }
}

/// What is known in the file. Bytes only: it is written by [`install`](crate::install), not by the compiler.
#[derive(Debug)]
#[repr(C)]
pub struct EmbeddedConfig {
    /// How the place is found. Another layout has another number in it.
    marker: [u8; 32],
    region: [u8; PLACE],
    real_cuda: [u8; PLACE],
    real_nvml: [u8; PLACE],
    /// Zero; a flag of earlier releases.
    _reserved: [u8; 4],
    role: [u8; 4],
}

/// The marker must be nowhere else in the shared object: whoever needs it takes it from here.
#[used]
static WRITTEN: EmbeddedConfig = EmbeddedConfig {
    marker: *b"partage shim: its settings, 1 \x03\x1a",
    region: [0; PLACE],
    real_cuda: [0; PLACE],
    real_nvml: [0; PLACE],
    _reserved: [0; 4],
    role: [0; 4],
};

/// The compiler knows what `WRITTEN` was linked with, and must not believe it.
#[used]
static WHERE: &EmbeddedConfig = &WRITTEN;

/// What was written into this file. Costs one read, allocates nothing.
pub fn get() -> &'static EmbeddedConfig {
    // SAFETY: it is a static that nothing writes to while the process runs.
    unsafe { std::ptr::read_volatile(&raw const WHERE) }
}

impl EmbeddedConfig {
    /// The folder of the container's region. None in a file that nobody wrote anything into.
    pub fn region(&self) -> Option<&Path> {
        text(&self.region).map(|text| Path::new(OsStr::from_bytes(text.to_bytes())))
    }

    /// The driver's own `libcuda.so.1`.
    pub fn real_cuda(&self) -> Option<&CStr> {
        text(&self.real_cuda)
    }

    /// The driver's own `libnvidia-ml.so.1`.
    pub fn real_nvml(&self) -> Option<&CStr> {
        text(&self.real_nvml)
    }

    /// What the file stands in for. None in the shared object as it was linked.
    pub fn role(&self) -> Option<LibraryRole> {
        let number = u32::from_le_bytes(self.role);
        LibraryRole::ALL.into_iter().find(|role| role.number() == number)
    }

    pub(crate) fn marker(&self) -> &[u8] {
        &self.marker
    }
}

/// A text that ends in its place and is not empty.
fn text(place: &[u8; PLACE]) -> Option<&CStr> {
    CStr::from_bytes_until_nul(place).ok().filter(|text| !text.is_empty())
}

/// What stands behind the marker. The places end with a zero: the callers' texts are shorter.
pub(crate) fn written(region: &[u8], real_cuda: &[u8], real_nvml: &[u8], role: LibraryRole) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(size_of::<EmbeddedConfig>());
    for text in [region, real_cuda, real_nvml] {
        let mut place = [0; PLACE];
        for (to, from) in place[..PLACE - 1].iter_mut().zip(text) {
            *to = *from;
        }
        bytes.extend(place);
    }
    bytes.extend([0; 4]);
    bytes.extend(role.number().to_le_bytes());
    bytes
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    /// What was written, as the shim would find it.
    fn read(bytes: &[u8]) -> EmbeddedConfig {
        let mut config = EmbeddedConfig { marker: [0; 32], ..empty() };
        let mut at = 0;
        let mut take = |field: &mut [u8]| {
            field.copy_from_slice(&bytes[at..at + field.len()]);
            at += field.len();
        };
        take(&mut config.region);
        take(&mut config.real_cuda);
        take(&mut config.real_nvml);
        take(&mut config._reserved);
        take(&mut config.role);
        assert_eq!(at, bytes.len());
        config
    }

    fn empty() -> EmbeddedConfig {
        EmbeddedConfig {
            marker: [0; 32],
            region: [0; PLACE],
            real_cuda: [0; PLACE],
            real_nvml: [0; PLACE],
            _reserved: [0; 4],
            role: [0; 4],
        }
    }

    #[test]
    fn fields_lie_as_they_are_written() {
        assert_eq!(std::mem::offset_of!(EmbeddedConfig, region), 32);
        assert_eq!(std::mem::offset_of!(EmbeddedConfig, real_nvml), 32 + 2 * PLACE);
        assert_eq!(std::mem::offset_of!(EmbeddedConfig, role), 32 + 3 * PLACE + 4);
        assert_eq!(size_of::<EmbeddedConfig>(), 32 + written(b"", b"", b"", LibraryRole::Cuda).len());
    }

    #[test]
    fn what_is_written_is_read() {
        let config = read(&written(b"/r", b"/c", b"/n", LibraryRole::Nvml));
        assert_eq!(config.region(), Some(Path::new("/r")));
        assert_eq!((config.real_cuda(), config.real_nvml()), (Some(c"/c"), Some(c"/n")));
        assert_eq!(config.role(), Some(LibraryRole::Nvml));
    }

    #[test]
    fn nobody_wrote_into_this_one() {
        let config = get();
        assert_eq!((config.region(), config.real_cuda(), config.real_nvml()), (None, None, None));
        assert_eq!(config.role(), None);
    }

    #[test]
    fn nonsense_is_nothing() {
        let config = EmbeddedConfig { region: [b'x'; PLACE], role: [9; 4], ..empty() };
        assert_eq!((config.region(), config.role()), (None, None));
    }
}
