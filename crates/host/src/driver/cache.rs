//! The loader's cache, `/etc/ld.so.cache`: which file is loaded under which name. Read as it lies, because `ldconfig` is not
//! everywhere, and that of a container knows nothing about the host's.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;

/// Where it is.
pub(super) const FILE: &str = "/etc/ld.so.cache";

/// How glibc's format begins. Caches of older systems have another one before it.
const MAGIC: &[u8] = b"glibc-ld.so.cache1.1";
/// The count of entries comes after the magic, and the entries after a header of this size.
const HEADER: usize = 48;
/// An entry: flags, name, file, version of the system, processor. Name and file are places of texts.
const ENTRY: usize = 24;

/// The files that have one of these names, in the cache's order. Whatever is no cache has none.
pub(super) fn files(bytes: &[u8], names: &[&str]) -> Vec<PathBuf> {
    let Some(start) = bytes.windows(MAGIC.len()).position(|part| part == MAGIC) else { return Vec::new() };
    let cache = &bytes[start..];
    let count = number(cache, MAGIC.len()).unwrap_or(0);
    let entries = cache.get(HEADER..).unwrap_or_default().chunks_exact(ENTRY).take(count);
    let file = |entry: &[u8]| {
        let name = text(cache, number(entry, 4)?)?;
        let file = text(cache, number(entry, 8)?)?;
        names.iter().any(|wanted| wanted.as_bytes() == name).then(|| PathBuf::from(OsStr::from_bytes(file)))
    };
    entries.filter_map(file).collect()
}

fn number(bytes: &[u8], at: usize) -> Option<usize> {
    let bytes = bytes.get(at..)?.first_chunk::<4>()?;
    usize::try_from(u32::from_ne_bytes(*bytes)).ok()
}

fn text(bytes: &[u8], at: usize) -> Option<&[u8]> {
    bytes.get(at..)?.split(|&byte| byte == 0).next()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::process::Command;

    /// A cache with these names and files.
    fn cache(before: &[u8], entries: &[(&str, &str)]) -> Vec<u8> {
        let mut texts = Vec::new();
        let first = HEADER + ENTRY * entries.len();
        let mut place = |text: &str| {
            let at = (first + texts.len()) as u32;
            texts.extend(text.as_bytes());
            texts.push(0);
            at
        };
        let mut table = Vec::new();
        for (name, file) in entries {
            table.extend([0x303, place(name), place(file), 0, 0, 0].map(u32::to_ne_bytes).as_flattened());
        }
        let mut header = MAGIC.to_vec();
        header.extend((entries.len() as u32).to_ne_bytes());
        header.resize(HEADER, 0);
        [before, &header, &table, &texts].concat()
    }

    #[test]
    fn names_have_their_files_in_order() {
        let entries = [
            ("libcudart.so.12", "/usr/lib/libcudart.so.12"),
            ("libcuda.so.1", "/usr/lib/x86_64-linux-gnu/libcuda.so.1"),
            ("libcuda.so.1", "/usr/lib/i386-linux-gnu/libcuda.so.1"),
            ("libcuda.so", "/usr/lib/x86_64-linux-gnu/libcuda.so"),
            ("libnvidia-ml.so.1", "/a folder/libnvidia-ml.so.1"),
        ];
        for before in [&b""[..], b"ld.so-1.7.0\0\0\0\0\0"] {
            let found = files(&cache(before, &entries), &["libcuda.so.1", "libnvidia-ml.so.1"]);
            let expected = [entries[1].1, entries[2].1, entries[4].1];
            assert_eq!(found, expected.map(PathBuf::from));
        }
    }

    #[test]
    fn this_machines_is_read_as_ldconfig_does() {
        let (Ok(bytes), Ok(run)) = (std::fs::read(FILE), Command::new("/sbin/ldconfig").arg("-p").output())
        else {
            return;
        };
        let said = String::from_utf8_lossy(&run.stdout);
        let named = |line: &&str| line.trim_start().starts_with("libc.so.6 ");
        let expected =
            said.lines().filter(named).filter_map(|line| line.split_once(" => ").map(|(_, file)| file));
        let expected: Vec<PathBuf> = expected.map(PathBuf::from).collect();
        assert_eq!(files(&bytes, &["libc.so.6"]), expected);
        assert!(!expected.is_empty(), "{said}");
    }

    proptest! {
        #[test]
        fn nothing_is_too_strange(start in prop::collection::vec(any::<u8>(), 0..40), rest in prop::collection::vec(any::<u8>(), 0..200)) {
            let found = files(&[&start, MAGIC, &rest].concat(), &[""]);
            prop_assert!(found.len() <= rest.len() / ENTRY);
            prop_assert!(files(&rest, &["libcuda.so.1"]).is_empty());
        }
    }
}
