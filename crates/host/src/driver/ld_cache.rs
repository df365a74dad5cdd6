//! Reads the dynamic loader's cache, `/etc/ld.so.cache`, which maps library names to files. The file is parsed
//! directly, because `ldconfig` is not installed everywhere, and that of a container does not know the host's
//! libraries.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;

/// The path of the cache.
pub(super) const LD_CACHE_FILE: &str = "/etc/ld.so.cache";

/// The magic of glibc's format. The caches of older systems have another format before it.
const MAGIC: &[u8] = b"glibc-ld.so.cache1.1";
/// The size of the header. The number of entries follows the magic, and the entries follow the header.
const HEADER_BYTES: usize = 48;
/// The size of an entry: flags, name, file, OS version, processor. Name and file are offsets of strings.
const ENTRY_BYTES: usize = 24;

/// Returns the files of libraries with one of these names, in the order of the cache; none if the bytes are not a
/// cache.
pub(super) fn find_libraries(bytes: &[u8], names: &[&str]) -> Vec<PathBuf> {
    let Some(start) = bytes.windows(MAGIC.len()).position(|part| part == MAGIC) else { return Vec::new() };
    let cache = &bytes[start..];
    let count = read_u32(cache, MAGIC.len()).unwrap_or(0);
    let entries = cache.get(HEADER_BYTES..).unwrap_or_default().chunks_exact(ENTRY_BYTES).take(count);
    let file = |entry: &[u8]| {
        let name = read_string(cache, read_u32(entry, 4)?)?;
        let file = read_string(cache, read_u32(entry, 8)?)?;
        names.iter().any(|wanted| wanted.as_bytes() == name).then(|| PathBuf::from(OsStr::from_bytes(file)))
    };
    entries.filter_map(file).collect()
}

fn read_u32(bytes: &[u8], at: usize) -> Option<usize> {
    let bytes = bytes.get(at..)?.first_chunk::<4>()?;
    usize::try_from(u32::from_ne_bytes(*bytes)).ok()
}

fn read_string(bytes: &[u8], at: usize) -> Option<&[u8]> {
    bytes.get(at..)?.split(|&byte| byte == 0).next()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::process::Command;

    /// Builds a cache with these names and files.
    fn cache(before: &[u8], entries: &[(&str, &str)]) -> Vec<u8> {
        let mut texts = Vec::new();
        let first = HEADER_BYTES + ENTRY_BYTES * entries.len();
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
        header.resize(HEADER_BYTES, 0);
        [before, &header, &table, &texts].concat()
    }

    #[test]
    fn libraries_are_found_in_the_order_of_the_cache() {
        let entries = [
            ("libcudart.so.12", "/usr/lib/libcudart.so.12"),
            ("libcuda.so.1", "/usr/lib/x86_64-linux-gnu/libcuda.so.1"),
            ("libcuda.so.1", "/usr/lib/i386-linux-gnu/libcuda.so.1"),
            ("libcuda.so", "/usr/lib/x86_64-linux-gnu/libcuda.so"),
            ("libnvidia-ml.so.1", "/a folder/libnvidia-ml.so.1"),
        ];
        for before in [&b""[..], b"ld.so-1.7.0\0\0\0\0\0"] {
            let found = find_libraries(&cache(before, &entries), &["libcuda.so.1", "libnvidia-ml.so.1"]);
            let expected = [entries[1].1, entries[2].1, entries[4].1];
            assert_eq!(found, expected.map(PathBuf::from));
        }
    }

    #[test]
    fn cache_of_this_machine_is_read_as_by_ldconfig() {
        let (Ok(bytes), Ok(run)) =
            (std::fs::read(LD_CACHE_FILE), Command::new("/sbin/ldconfig").arg("-p").output())
        else {
            return;
        };
        let output = String::from_utf8_lossy(&run.stdout);
        let named = |line: &&str| line.trim_start().starts_with("libc.so.6 ");
        let expected =
            output.lines().filter(named).filter_map(|line| line.split_once(" => ").map(|(_, file)| file));
        let expected: Vec<PathBuf> = expected.map(PathBuf::from).collect();
        assert_eq!(find_libraries(&bytes, &["libc.so.6"]), expected);
        assert!(!expected.is_empty(), "{output}");
    }

    proptest! {
        #[test]
        fn arbitrary_bytes_do_not_panic(start in prop::collection::vec(any::<u8>(), 0..40), rest in prop::collection::vec(any::<u8>(), 0..200)) {
            let found = find_libraries(&[&start, MAGIC, &rest].concat(), &[""]);
            prop_assert!(found.len() <= rest.len() / ENTRY_BYTES);
            prop_assert!(find_libraries(&rest, &["libcuda.so.1"]).is_empty());
        }
    }
}
