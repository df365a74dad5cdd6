//! Parses `/proc/<pid>/mountinfo` and `/proc/<pid>/cgroup`.
//!
//! The `procfs` crate does not replace this: it fails the whole table for one mount point that is not UTF-8, which a
//! tenant can create, and it does not decode escaped paths.

use std::ffi::OsString;
use std::os::unix::ffi::OsStringExt;
use std::path::{Component, Path, PathBuf};

/// One line of `/proc/<pid>/mountinfo`.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct MountEntry {
    /// The directory within the file system that is mounted.
    pub(crate) root: PathBuf,
    /// The path of the mount point.
    pub(super) at: PathBuf,
    /// The type of the file system.
    pub(super) kind: String,
    /// The options of the superblock.
    pub(super) options: Vec<String>,
}

/// One line of `/proc/<pid>/cgroup`.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct CgroupMembership {
    /// The id of the hierarchy, zero for cgroup v2.
    pub(super) id: u32,
    /// The controllers of the hierarchy.
    pub(super) controllers: Vec<String>,
    /// The path of the cgroup within the hierarchy.
    pub(super) path: PathBuf,
}

impl MountEntry {
    /// Returns where a path of the file system is visible; `None` if it is not below the mounted directory.
    pub(super) fn find(&self, path: &Path) -> Option<PathBuf> {
        let below = path.strip_prefix(&self.root).ok()?;
        // The path of a cgroup outside of this process's cgroup namespace starts with `..`.
        let plain = below.components().all(|part| matches!(part, Component::Normal(_)));
        plain.then(|| self.at.join(below))
    }
}

/// Parses `mountinfo`. Malformed lines are skipped.
pub(crate) fn parse_mountinfo(table: &[u8]) -> Vec<MountEntry> {
    lines(table).filter_map(mount).collect()
}

/// Parses `cgroup`. Malformed lines are skipped.
pub(super) fn parse_cgroups(table: &[u8]) -> Vec<CgroupMembership> {
    lines(table).filter_map(membership).collect()
}

fn lines(table: &[u8]) -> impl Iterator<Item = &[u8]> {
    table.split(|byte| *byte == b'\n').filter(|line| !line.is_empty())
}

fn mount(line: &[u8]) -> Option<MountEntry> {
    let mut words = line.split(|byte| *byte == b' ');
    let root = path(words.nth(3)?)?;
    let at = path(words.next()?)?;
    // The options of the mount, then any number of optional fields up to a dash.
    words.next()?;
    words.find(|word| *word == b"-")?;
    let kind = text(words.next()?)?;
    words.next()?;
    let options = text(words.next()?)?.split(',').map(String::from).collect();
    Some(MountEntry { root, at, kind, options })
}

fn membership(line: &[u8]) -> Option<CgroupMembership> {
    // The path is the last field and may contain colons.
    let mut fields = line.splitn(3, |byte| *byte == b':');
    let id = text(fields.next()?)?.parse().ok()?;
    let names = text(fields.next()?)?;
    let controllers = names.split(',').filter(|name| !name.is_empty()).map(String::from).collect();
    let path = fields.next()?;
    path.starts_with(b"/").then(|| CgroupMembership {
        id,
        controllers,
        path: OsString::from_vec(path.into()).into(),
    })
}

fn text(word: &[u8]) -> Option<String> {
    Some(str::from_utf8(word).ok()?.into())
}

/// Decodes a path, in which the kernel writes spaces, tabs, newlines and backslashes as three octal digits.
fn path(word: &[u8]) -> Option<PathBuf> {
    let mut bytes = Vec::with_capacity(word.len());
    let mut rest = word;
    while let Some((first, after)) = rest.split_first() {
        let octal = after.get(..3).filter(|digits| digits.iter().all(|digit| matches!(digit, b'0'..=b'7')));
        match octal {
            Some(digits) if *first == b'\\' => {
                let value = digits.iter().fold(0u32, |value, digit| value * 8 + u32::from(digit - b'0'));
                bytes.push(u8::try_from(value).ok()?);
                rest = &after[3..];
            }
            _ => {
                bytes.push(*first);
                rest = after;
            }
        }
    }
    bytes.starts_with(b"/").then(|| OsString::from_vec(bytes).into())
}

#[cfg(test)]
mod tests;
