//! Which container a process of this node belongs to, by its cgroup: a tenant cannot forge that.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::fmt;
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

/// No process is in as many hierarchies, and no path is as long.
const MOST: u64 = 64 << 10;

/// A container, as its runtime calls it: 64 hexadecimal digits.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ContainerId(String);

impl ContainerId {
    /// The digits of an id, as every container runtime has them.
    const LENGTH: usize = 64;

    /// What a runtime says, if it is an id.
    pub fn new(text: &str) -> Option<ContainerId> {
        let is_digit = |byte: u8| matches!(byte, b'0'..=b'9' | b'a'..=b'f');
        (text.len() == Self::LENGTH && text.bytes().all(is_digit)).then(|| ContainerId(text.into()))
    }

    /// Its digits.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for ContainerId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// Whose processes are, for as long as one looks at them. Made anew for every look: a number passes on to another process,
/// and to remember who had it costs as much as to ask.
#[derive(Debug)]
pub struct Processes {
    proc: PathBuf,
    /// One process may be on several GPUs.
    known: RefCell<BTreeMap<u32, Option<ContainerId>>>,
}

impl Processes {
    /// As a folder tells of them: `/proc`, where this process sees all of the machine.
    pub fn new(proc: &Path) -> Processes {
        Processes { proc: proc.into(), known: RefCell::default() }
    }

    /// The container of a process; none if it is in no container, or gone.
    pub fn container(&self, pid: u32) -> Option<ContainerId> {
        self.known.borrow_mut().entry(pid).or_insert_with(|| self.read(pid)).clone()
    }

    fn read(&self, pid: u32) -> Option<ContainerId> {
        let mut text = Vec::new();
        let file = File::open(self.proc.join(pid.to_string()).join("cgroup")).ok()?;
        file.take(MOST).read_to_end(&mut text).ok()?;
        // A tenant may call a cgroup by bytes that are no letters.
        container_of(&String::from_utf8_lossy(&text))
    }
}

/// The container's id in what `/proc/<pid>/cgroup` says, in either form:
///
/// ```text
/// 0::/kubepods.slice/kubepods-pod1234.slice/cri-containerd-<id>.scope            (v2)
/// 5:memory:/kubepods/burstable/pod1234/<id>                                      (v1)
/// ```
///
/// A tenant may be free to make cgroups below its own, and to call them as it likes: so the outermost id of the outermost pod
/// is the one. What is around the pod does not matter: the node may itself be a container. Of several hierarchies that one
/// counts which limits most surely: the unified one, then memory's, then the devices', then any.
pub fn container_of(cgroup_file_text: &str) -> Option<ContainerId> {
    let all = || cgroup_file_text.split('\n').filter_map(hierarchy);
    let of = |rank: u8| all().filter(move |(found, _)| *found == rank).find_map(|(_, path)| id(path));
    (0..=3).find_map(of)
}

/// A line's rank and path. Paths may have colons in them.
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

/// The first id in a path, from the first pod on if there is one: a part of it that is an id, or that has one at a word's edge.
fn id(path: &str) -> Option<ContainerId> {
    let parts = || path.split('/');
    let pod = parts().position(is_pod).unwrap_or_default();
    parts().skip(pod).find_map(|part| {
        let mut words = part.split(|letter: char| !letter.is_ascii_alphanumeric());
        words.find_map(ContainerId::new)
    })
}

/// Whether a part of a path is what kubelet calls the cgroup of a pod: `pod<uid>`, or `kubepods-…-pod<uid>.slice`.
fn is_pod(part: &str) -> bool {
    let slice = part.strip_prefix("kubepods").and_then(|rest| rest.split_once("-pod")).map(|(_, uid)| uid);
    let uid = slice.or_else(|| part.strip_prefix("pod")).unwrap_or_default();
    uid.bytes().next().is_some_and(|byte| byte.is_ascii_hexdigit())
}

#[cfg(test)]
mod tests;
