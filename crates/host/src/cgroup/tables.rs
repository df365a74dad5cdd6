//! The kernel's tables: what is mounted where, and which cgroups a process is in.

use std::ffi::OsString;
use std::os::unix::ffi::OsStringExt;
use std::path::{Component, Path, PathBuf};

/// One line of `/proc/<pid>/mountinfo`.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Mount {
    /// The folder of the file system that is mounted.
    pub(crate) root: PathBuf,
    /// Where it is mounted.
    pub(super) at: PathBuf,
    /// The kind of file system.
    pub(super) kind: String,
    /// The file system's own options.
    pub(super) options: Vec<String>,
}

/// One line of `/proc/<pid>/cgroup`.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Membership {
    /// Zero for cgroup v2.
    pub(super) id: u32,
    /// The controllers of this tree.
    pub(super) controllers: Vec<String>,
    /// The cgroup's path within the tree.
    pub(super) path: PathBuf,
}

impl Mount {
    /// Where a path of the file system is to be found; none if it is not below what is mounted.
    pub(super) fn find(&self, path: &Path) -> Option<PathBuf> {
        let below = path.strip_prefix(&self.root).ok()?;
        // A cgroup outside of this process's cgroup namespace is written with `..`.
        let plain = below.components().all(|part| matches!(part, Component::Normal(_)));
        plain.then(|| self.at.join(below))
    }
}

/// All lines that can be read.
pub(crate) fn mounts(table: &[u8]) -> Vec<Mount> {
    lines(table).filter_map(mount).collect()
}

/// All lines that can be read.
pub(super) fn memberships(table: &[u8]) -> Vec<Membership> {
    lines(table).filter_map(membership).collect()
}

fn lines(table: &[u8]) -> impl Iterator<Item = &[u8]> {
    table.split(|byte| *byte == b'\n').filter(|line| !line.is_empty())
}

fn mount(line: &[u8]) -> Option<Mount> {
    let mut words = line.split(|byte| *byte == b' ');
    let root = path(words.nth(3)?)?;
    let at = path(words.next()?)?;
    // The mount's own options, then any number of fields up to a dash.
    words.next()?;
    words.find(|word| *word == b"-")?;
    let kind = text(words.next()?)?;
    words.next()?;
    let options = text(words.next()?)?.split(',').map(String::from).collect();
    Some(Mount { root, at, kind, options })
}

fn membership(line: &[u8]) -> Option<Membership> {
    // The path is the last field and may have colons.
    let mut fields = line.splitn(3, |byte| *byte == b':');
    let id = text(fields.next()?)?.parse().ok()?;
    let names = text(fields.next()?)?;
    let controllers = names.split(',').filter(|name| !name.is_empty()).map(String::from).collect();
    let path = fields.next()?;
    path.starts_with(b"/").then(|| Membership {
        id,
        controllers,
        path: OsString::from_vec(path.into()).into(),
    })
}

fn text(word: &[u8]) -> Option<String> {
    Some(str::from_utf8(word).ok()?.into())
}

/// Blanks, tabs, line ends and backslashes are written as three octal digits.
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
