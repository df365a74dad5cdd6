//! Whose a process is, by its cgroup: the kernel keeps it, and no environment or name of a process can feign it.

use std::fs::File;
use std::io::{self, Read};
use std::path::Path;

/// No process is in as many hierarchies, and no path is as long.
const MOST: u64 = 64 << 10;

/// The digits of a container's id, as every container runtime has them.
const ID: usize = 64;

/// The container's id in `/proc/<pid>/cgroup`; none if it is in no container, or gone.
pub fn container_of(proc: &Path, pid: u32) -> io::Result<Option<String>> {
    let mut text = Vec::new();
    File::open(proc.join(pid.to_string()).join("cgroup"))?.take(MOST).read_to_end(&mut text)?;
    Ok(container_in(&text).map(String::from))
}

/// The container's id in what such a file says, in either form:
///
/// ```text
/// 0::/kubepods.slice/kubepods-pod1234.slice/cri-containerd-<id>.scope            (v2)
/// 5:memory:/kubepods/burstable/pod1234/<id>                                      (v1)
/// ```
///
/// A tenant may be free to make cgroups, and to call them as it likes, below its own: so the outermost id is the one. Of
/// several hierarchies that one counts which limits most surely: the unified one, then memory's, then any.
#[must_use]
pub fn container_in(text: &[u8]) -> Option<&str> {
    let lines = || text.split(|&byte| byte == b'\n').filter_map(|line| std::str::from_utf8(line).ok());
    let of = |rank: u8| {
        lines().filter_map(hierarchy).filter(move |(found, _)| *found == rank).find_map(|(_, path)| id(path))
    };
    (0..=3).find_map(of)
}

/// A line's rank and path. Paths may have colons in them.
fn hierarchy(line: &str) -> Option<(u8, &str)> {
    let mut parts = line.splitn(3, ':');
    let (number, controllers, path) = (parts.next()?, parts.next()?, parts.next()?);
    let rank = match controllers {
        "" if number == "0" => 0,
        _ if controllers.split(',').any(|controller| controller == "memory") => 1,
        _ if controllers.split(',').any(|controller| controller == "devices") => 2,
        _ => 3,
    };
    Some((rank, path))
}

/// The first id in a path: a part of it that is one, or begins or ends with one at a word's edge.
fn id(path: &str) -> Option<&str> {
    path.split('/').find_map(|part| {
        let words = part.split(|letter: char| !letter.is_ascii_alphanumeric());
        words.into_iter().find(|word| {
            word.len() == ID && word.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'))
        })
    })
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const A: &str = "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa";
    const B: &str = "bbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbb";

    #[test]
    fn ids_are_found_in_every_usual_form() {
        for path in [
            "/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod12_3.slice/cri-containerd-@.scope",
            "/kubepods.slice/kubepods-pod12_3.slice/crio-@.scope",
            "/system.slice/docker-@.scope",
            "/docker/@",
            "/kubepods/besteffort/pod0f-1/@",
            "/kubelet/kubepods/pod0f-1/@",
            "/machine.slice/libpod-@.scope/container",
            "/../../kubepods/pod1/@",
            "/system.slice/containerd.service/kubepods-pod1.slice:cri-containerd:@",
        ] {
            let path = path.replace('@', A);
            assert_eq!(container_in(format!("0::{path}\n").as_bytes()), Some(A), "{path}");
            let old = format!("12:pids:{path}\n5:cpu,memory:{path}\n1:name=systemd:{path}\n0::/\n");
            assert_eq!(container_in(old.as_bytes()), Some(A), "{path}");
        }
    }

    #[test]
    fn what_is_in_no_container_has_none() {
        let upper = A.to_uppercase();
        for path in ["/", "", "/user.slice/user-0.slice/session-1.scope", &A[1..], &format!("{A}a"), &upper] {
            assert_eq!(container_in(format!("0::/{path}\n3:memory:/{path}").as_bytes()), None, "{path}");
        }
    }

    #[test]
    fn the_outermost_counts() {
        let nested = format!("0::/kubepods/pod1/{A}/docker/{B}\n");
        assert_eq!(container_in(nested.as_bytes()), Some(A), "a tenant names what is below its own");
        let mixed = format!("9:cpu:/docker/{B}\n4:devices:/docker/{B}\n3:memory:/docker/{A}\n");
        assert_eq!(container_in(mixed.as_bytes()), Some(A));
        let hybrid = format!("3:memory:/docker/{B}\n0::/docker/{A}\n");
        assert_eq!(container_in(hybrid.as_bytes()), Some(A));
    }

    #[test]
    fn this_process_is_read_and_nobody_is_not() {
        assert!(container_of(Path::new("/proc"), std::process::id()).is_ok());
        assert!(container_of(Path::new("/proc"), u32::MAX).is_err());
    }

    #[test]
    fn an_endless_file_is_not_read_to_its_end() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::create_dir(folder.path().join("7")).unwrap();
        std::os::unix::fs::symlink("/dev/zero", folder.path().join("7/cgroup")).unwrap();
        assert_eq!(container_of(folder.path(), 7).unwrap(), None);
    }

    proptest! {
        #[test]
        fn anything_can_be_read(text in proptest::collection::vec(any::<u8>(), 0..400)) {
            if let Some(id) = container_in(&text) {
                prop_assert_eq!(id.len(), ID);
            }
        }

        /// Whatever a tenant calls the cgroups that it makes, it stays itself.
        #[test]
        fn names_below_change_nothing(below in "[ -~/:]{0,80}", again in "[0-9a-f]{64}") {
            let text = format!("0::/kubepods/pod1/{A}/{below}/{again}\n");
            prop_assert_eq!(container_in(text.as_bytes()), Some(A));
        }
    }
}
