//! Finds the container that a process of this node belongs to by its cgroup, which a tenant cannot forge.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::fmt;
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

/// The maximum number of bytes that are read of `/proc/<pid>/cgroup`.
const MAX_CGROUP_FILE_BYTES: u64 = 64 << 10;

/// The id of a container, as assigned by its runtime: 64 hexadecimal digits.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ContainerId(String);

impl ContainerId {
    /// The number of digits of an id, in all container runtimes.
    const LENGTH: usize = 64;

    /// Returns the id in a text, if it is one.
    pub fn new(text: &str) -> Option<ContainerId> {
        let is_digit = |byte: u8| matches!(byte, b'0'..=b'9' | b'a'..=b'f');
        (text.len() == Self::LENGTH && text.bytes().all(is_digit)).then(|| ContainerId(text.into()))
    }

    /// Returns the digits of the id.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for ContainerId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// The containers of processes, cached for one pass over them. Callers create a new one for every pass, because pids
/// are reused, and validating a cached entry costs as much as reading it.
#[derive(Debug)]
pub struct ProcessContainers {
    proc: PathBuf,
    /// The cached results: one process may be on several GPUs.
    known: RefCell<BTreeMap<u32, Option<ContainerId>>>,
}

impl ProcessContainers {
    /// Reads processes from a directory: `/proc`, if this process sees the host's pid namespace.
    pub fn new(proc: &Path) -> ProcessContainers {
        ProcessContainers { proc: proc.into(), known: RefCell::default() }
    }

    /// Returns the container of a process; `None` if it is in no container, or has exited.
    pub fn container(&self, pid: u32) -> Option<ContainerId> {
        self.known.borrow_mut().entry(pid).or_insert_with(|| self.read(pid)).clone()
    }

    fn read(&self, pid: u32) -> Option<ContainerId> {
        let mut text = Vec::new();
        let file = File::open(self.proc.join(pid.to_string()).join("cgroup")).ok()?;
        file.take(MAX_CGROUP_FILE_BYTES).read_to_end(&mut text).ok()?;
        // A tenant may name a cgroup with bytes that are not UTF-8.
        container_of(&String::from_utf8_lossy(&text))
    }
}

/// Returns the container id in the text of `/proc/<pid>/cgroup`, in either form:
///
/// ```text
/// 0::/kubepods.slice/kubepods-pod1234.slice/cri-containerd-<id>.scope            (v2)
/// 5:memory:/kubepods/burstable/pod1234/<id>                                      (v1)
/// ```
///
/// A tenant may create cgroups below its own and name them freely, so the outermost id in the outermost pod counts.
/// Cgroups above the pod do not matter, because the node may itself be a container. Of several hierarchies, the one
/// that is most likely to be enforced counts: the unified one, then that of memory, then that of devices, then any.
pub fn container_of(cgroup_file_text: &str) -> Option<ContainerId> {
    let all = || cgroup_file_text.split('\n').filter_map(hierarchy);
    let of = |rank: u8| all().filter(move |(found, _)| *found == rank).find_map(|(_, path)| id(path));
    (0..=3).find_map(of)
}

/// Returns the rank and the path of a line. Paths may contain colons.
fn hierarchy(line: &str) -> Option<(u8, &str)> {
    let mut parts = line.splitn(3, ':');
    let (number, controllers, path) = (parts.next()?, parts.next()?, parts.next()?);
    let has = |wanted: &str| controllers.split(',').any(|controller| controller == wanted);
    let rank = match controllers {
        "" if number == "0" => 0,
        _ if has("memory") => 1,
        _ if has("devices") => 2,
        _ => 3,
    };
    Some((rank, path))
}

/// Returns the first id in a path, starting at the first pod if there is one: a component that is an id, or contains
/// one as a word.
fn id(path: &str) -> Option<ContainerId> {
    let parts = || path.split('/');
    let pod = parts().position(is_pod).unwrap_or_default();
    parts().skip(pod).find_map(|part| {
        let mut words = part.split(|letter: char| !letter.is_ascii_alphanumeric());
        words.find_map(ContainerId::new)
    })
}

/// Returns whether a path component is kubelet's name for the cgroup of a pod: `pod<uid>`, or
/// `kubepods-…-pod<uid>.slice`.
fn is_pod(part: &str) -> bool {
    let slice = part.strip_prefix("kubepods").and_then(|rest| rest.split_once("-pod")).map(|(_, uid)| uid);
    let uid = slice.or_else(|| part.strip_prefix("pod")).unwrap_or_default();
    uid.bytes().next().is_some_and(|byte| byte.is_ascii_hexdigit())
}

#[cfg(test)]
mod tests;
