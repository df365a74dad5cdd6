//! What [`install`](crate::install) wrote into the file that was loaded: which node's library it is.
//!
//! A program that starts with an empty environment (`env -i`, `su`, a login shell) finds its node by it, as a real
//! library finds its device files wherever it is loaded.
#![allow(unsafe_code)]

use std::ffi::{CStr, OsStr};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

/// The bytes of a path, with the zero that ends it.
pub(crate) const PLACE: usize = 512;

/// Bytes only: they are written by [`install`](crate::install), not by the compiler.
#[repr(C)]
struct Written {
    /// How the place is found. Another layout has another number in it.
    marker: [u8; 32],
    node: [u8; PLACE],
}

/// The marker must be nowhere else in the shared object: whoever needs it takes it from here.
#[used]
static WRITTEN: Written = Written { marker: *b"partage driver: its node, 1   \x03\x1a", node: [0; PLACE] };

/// The compiler knows what `WRITTEN` was linked with, and must not believe it.
#[used]
static WHERE: &Written = &WRITTEN;

fn get() -> &'static Written {
    // SAFETY: it is a static that nothing writes to while the process runs.
    unsafe { std::ptr::read_volatile(&raw const WHERE) }
}

/// What stands before the place.
pub(crate) fn marker() -> &'static [u8] {
    &get().marker
}

/// The folder of the node. None in the shared object as it was linked, and in every program of ours.
pub(crate) fn node() -> Option<&'static Path> {
    text(&get().node)
}

/// What stands behind the marker. None where the path is too long.
pub(crate) fn bytes(node: &Path) -> Option<[u8; PLACE]> {
    let path = node.as_os_str().as_bytes();
    let mut place = [0; PLACE];
    // One byte stays zero.
    place[..PLACE - 1].get_mut(..path.len())?.copy_from_slice(path);
    Some(place)
}

/// A path that ends in its place and is not empty.
fn text(place: &[u8; PLACE]) -> Option<&Path> {
    let text = CStr::from_bytes_until_nul(place).ok().filter(|text| !text.is_empty())?;
    Some(Path::new(OsStr::from_bytes(text.to_bytes())))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn the_place_is_right_behind_the_marker() {
        assert_eq!((std::mem::offset_of!(Written, node), size_of::<Written>()), (32, 32 + PLACE));
    }

    #[test]
    fn what_is_written_is_read() {
        let longest = format!("/{}", "x".repeat(PLACE - 2));
        for path in ["/a node", longest.as_str()] {
            assert_eq!(text(&bytes(Path::new(path)).unwrap()), Some(Path::new(path)));
        }
        assert_eq!(bytes(Path::new(&format!("{longest}x"))), None);
    }

    #[test]
    fn nobody_wrote_into_this_one() {
        assert_eq!(node(), None);
        assert_eq!(text(&[b'x'; PLACE]), None);
    }
}
