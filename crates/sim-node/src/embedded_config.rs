//! The configuration that [`install`](crate::install) writes into a library file: the directory of its node.
//!
//! A program that starts with an empty environment (`env -i`, `su`, a login shell) finds its node through it, as a real
//! driver library finds its device files wherever it is loaded.
#![allow(unsafe_code)]

use std::ffi::{CStr, OsStr};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

/// The size of the path field in bytes, including the terminating zero.
pub(crate) const PATH_BYTES: usize = 512;

/// The embedded bytes. [`install`](crate::install) overwrites the path in the file after linking.
#[repr(C)]
struct EmbeddedConfig {
    /// The marker by which the installer finds the field. It contains a number that changes with the layout.
    marker: [u8; 32],
    node: [u8; PATH_BYTES],
}

/// The marker must occur only once in the shared object, so all code reads it from this static.
#[used]
static EMBEDDED_CONFIG: EmbeddedConfig =
    EmbeddedConfig { marker: *b"partage driver: its node, 1   \x03\x1a", node: [0; PATH_BYTES] };

/// A reference that is read with `read_volatile`: the compiler must not assume the linked value of `EMBEDDED_CONFIG`.
#[used]
static EMBEDDED_CONFIG_REF: &EmbeddedConfig = &EMBEDDED_CONFIG;

fn embedded_config() -> &'static EmbeddedConfig {
    // SAFETY: the pointer is that of a static, which is initialized, aligned and never written at run time.
    unsafe { std::ptr::read_volatile(&raw const EMBEDDED_CONFIG_REF) }
}

/// Returns the marker that precedes the path.
pub(crate) fn marker() -> &'static [u8] {
    &embedded_config().marker
}

/// Returns the directory of the node; `None` in the shared object as linked, and in all programs.
pub(crate) fn node_dir() -> Option<&'static Path> {
    decode_path(&embedded_config().node)
}

/// Encodes a path for the field after the marker; `None` if it is too long.
pub(crate) fn encode_path(node: &Path) -> Option<[u8; PATH_BYTES]> {
    let path = node.as_os_str().as_bytes();
    let mut field = [0; PATH_BYTES];
    // The last byte stays zero.
    field[..PATH_BYTES - 1].get_mut(..path.len())?.copy_from_slice(path);
    Some(field)
}

/// Decodes a path; `None` if it is empty or not terminated.
fn decode_path(field: &[u8; PATH_BYTES]) -> Option<&Path> {
    let text = CStr::from_bytes_until_nul(field).ok().filter(|text| !text.is_empty())?;
    Some(Path::new(OsStr::from_bytes(text.to_bytes())))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn path_directly_follows_the_marker() {
        assert_eq!(
            (std::mem::offset_of!(EmbeddedConfig, node), size_of::<EmbeddedConfig>()),
            (32, 32 + PATH_BYTES)
        );
    }

    #[test]
    fn paths_round_trip() {
        let longest = format!("/{}", "x".repeat(PATH_BYTES - 2));
        for path in ["/a node", longest.as_str()] {
            assert_eq!(decode_path(&encode_path(Path::new(path)).unwrap()), Some(Path::new(path)));
        }
        assert_eq!(encode_path(Path::new(&format!("{longest}x"))), None);
    }

    #[test]
    fn unpatched_program_has_no_node() {
        assert_eq!(node_dir(), None);
        assert_eq!(decode_path(&[b'x'; PATH_BYTES]), None);
    }
}
