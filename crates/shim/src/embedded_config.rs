//! The configuration that [`install`](crate::install) writes into the file that is loaded: the region and the driver's
//! libraries.
//!
//! A tenant can change the environment and most files of its container, but not this file, which is mounted read-only.
//! So no configuration is read from anywhere else.
#![allow(unsafe_code)]

use std::ffi::{CStr, OsStr};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

/// Bytes of a path, including the terminating zero.
pub const PATH_CAPACITY: usize = 512;

/// The library that a file replaces.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LibraryRole {
    /// The file replaces the CUDA driver library, `libcuda.so.1`.
    Cuda,
    /// The file replaces the management library (NVML), `libnvidia-ml.so.1`.
    Nvml,
}

impl LibraryRole {
    /// All libraries that are replaced.
    pub const ALL: [LibraryRole; 2] = [LibraryRole::Cuda, LibraryRole::Nvml];

    /// Returns the number that is written into the file. Zero marks the shared object as it was linked.
    pub(crate) const fn number(self) -> u32 {
        match self {
            LibraryRole::Cuda => 1,
            LibraryRole::Nvml => 2,
        }
    }
}

/// The configuration in the file. It consists of bytes only, because [`install`](crate::install) writes it into the
/// binary.
#[derive(Debug)]
#[repr(C)]
pub struct EmbeddedConfig {
    /// Bytes by which the configuration is found. Another layout has another number in it.
    marker: [u8; 32],
    region: [u8; PATH_CAPACITY],
    real_cuda: [u8; PATH_CAPACITY],
    real_nvml: [u8; PATH_CAPACITY],
    /// Zero; a flag of earlier releases.
    _reserved: [u8; 4],
    role: [u8; 4],
}

/// The marker must occur only once in the shared object: code that needs it takes it from here.
#[used]
static EMBEDDED: EmbeddedConfig = EmbeddedConfig {
    marker: *b"partage shim: its settings, 1 \x03\x1a",
    region: [0; PATH_CAPACITY],
    real_cuda: [0; PATH_CAPACITY],
    real_nvml: [0; PATH_CAPACITY],
    _reserved: [0; 4],
    role: [0; 4],
};

/// A reference through which the value is read, so that the compiler does not assume the linked value of `EMBEDDED`.
#[used]
static EMBEDDED_REF: &EmbeddedConfig = &EMBEDDED;

/// Returns the configuration of this file. Costs one read and does not allocate.
pub fn get() -> &'static EmbeddedConfig {
    // SAFETY: the pointer is to a static, which no code writes while the process runs.
    unsafe { std::ptr::read_volatile(&raw const EMBEDDED_REF) }
}

impl EmbeddedConfig {
    /// Returns the directory of the container's region; `None` in a file that was not installed.
    pub fn region(&self) -> Option<&Path> {
        path_in(&self.region).map(|text| Path::new(OsStr::from_bytes(text.to_bytes())))
    }

    /// Returns the path of the driver's own `libcuda.so.1`.
    pub fn real_cuda(&self) -> Option<&CStr> {
        path_in(&self.real_cuda)
    }

    /// Returns the path of the driver's own `libnvidia-ml.so.1`.
    pub fn real_nvml(&self) -> Option<&CStr> {
        path_in(&self.real_nvml)
    }

    /// Returns the library that the file replaces; `None` in the shared object as it was linked.
    pub fn role(&self) -> Option<LibraryRole> {
        let number = u32::from_le_bytes(self.role);
        LibraryRole::ALL.into_iter().find(|role| role.number() == number)
    }

    pub(crate) fn marker(&self) -> &[u8] {
        &self.marker
    }
}

/// Returns the path in a field; `None` if it is empty or not terminated.
fn path_in(place: &[u8; PATH_CAPACITY]) -> Option<&CStr> {
    CStr::from_bytes_until_nul(place).ok().filter(|text| !text.is_empty())
}

/// Encodes the configuration that follows the marker. Each field ends with a zero: the callers' paths are shorter.
pub(crate) fn encode(region: &[u8], real_cuda: &[u8], real_nvml: &[u8], role: LibraryRole) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(size_of::<EmbeddedConfig>());
    for text in [region, real_cuda, real_nvml] {
        let mut place = [0; PATH_CAPACITY];
        for (to, from) in place[..PATH_CAPACITY - 1].iter_mut().zip(text) {
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

    /// Decodes the configuration as the shim would read it.
    fn decode(bytes: &[u8]) -> EmbeddedConfig {
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
            region: [0; PATH_CAPACITY],
            real_cuda: [0; PATH_CAPACITY],
            real_nvml: [0; PATH_CAPACITY],
            _reserved: [0; 4],
            role: [0; 4],
        }
    }

    #[test]
    fn field_offsets_match_the_encoding() {
        assert_eq!(std::mem::offset_of!(EmbeddedConfig, region), 32);
        assert_eq!(std::mem::offset_of!(EmbeddedConfig, real_nvml), 32 + 2 * PATH_CAPACITY);
        assert_eq!(std::mem::offset_of!(EmbeddedConfig, role), 32 + 3 * PATH_CAPACITY + 4);
        assert_eq!(size_of::<EmbeddedConfig>(), 32 + encode(b"", b"", b"", LibraryRole::Cuda).len());
    }

    #[test]
    fn encoded_config_round_trips() {
        let config = decode(&encode(b"/r", b"/c", b"/n", LibraryRole::Nvml));
        assert_eq!(config.region(), Some(Path::new("/r")));
        assert_eq!((config.real_cuda(), config.real_nvml()), (Some(c"/c"), Some(c"/n")));
        assert_eq!(config.role(), Some(LibraryRole::Nvml));
    }

    #[test]
    fn linked_object_has_no_config() {
        let config = get();
        assert_eq!((config.region(), config.real_cuda(), config.real_nvml()), (None, None, None));
        assert_eq!(config.role(), None);
    }

    #[test]
    fn invalid_config_is_ignored() {
        let config = EmbeddedConfig { region: [b'x'; PATH_CAPACITY], role: [9; 4], ..empty() };
        assert_eq!((config.region(), config.role()), (None, None));
    }
}
