//! Who is who: names and numbers of users and groups, as the machine knows them.

use std::collections::BTreeMap;
use std::fs;
use std::process::{Command, Stdio};
use std::sync::{Mutex, PoisonError};

/// Who asks, as the kernel says.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Who {
    /// The user.
    pub uid: u32,
    /// All groups.
    pub gids: Vec<u32>,
}

impl Who {
    /// The one who runs this process's keeper: may do everything.
    pub fn is_keeper(&self) -> bool {
        self.uid == 0 || self.uid == rustix::process::geteuid().as_raw()
    }

    /// A user with the groups that a process of theirs has. A process that is gone has none but the given one.
    pub(crate) fn of(uid: u32, gid: u32, pid: u32) -> Who {
        let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
        let groups = status.lines().find_map(|line| line.strip_prefix("Groups:")).unwrap_or_default();
        let mut gids: Vec<u32> = groups.split_whitespace().filter_map(|word| word.parse().ok()).collect();
        if !gids.contains(&gid) {
            gids.push(gid);
        }
        Who { uid, gids }
    }
}

/// A user's name, or the number where there is none.
pub fn name(uid: u32) -> String {
    // A directory of the network may take its time, and is asked once.
    static KNOWN: Mutex<BTreeMap<u32, String>> = Mutex::new(BTreeMap::new());
    let known = || KNOWN.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(name) = known().get(&uid) {
        return name.clone();
    }
    let name = found("passwd", &uid.to_string(), 2, 0).unwrap_or_else(|| uid.to_string());
    known().insert(uid, name.clone());
    name
}

/// The number of a user.
pub(crate) fn uid(name: &str) -> Option<u32> {
    name.parse().ok().or_else(|| found("passwd", name, 0, 2)?.parse().ok())
}

/// The number of a group.
pub(crate) fn gid(name: &str) -> Option<u32> {
    name.parse().ok().or_else(|| found("group", name, 0, 2)?.parse().ok())
}

/// A field of the line whose field `by` is the key. What is not in the file may be in a directory of the network.
fn found(table: &str, key: &str, by: usize, field: usize) -> Option<String> {
    let in_lines = |text: &str| {
        let line = text.lines().find(|line| line.split(':').nth(by) == Some(key))?;
        line.split(':').nth(field).filter(|word| !word.is_empty()).map(str::to_string)
    };
    let file = fs::read_to_string(format!("/etc/{table}")).unwrap_or_default();
    in_lines(&file).or_else(|| {
        let answer = Command::new("getent")
            .args([table, "--", key])
            .stdin(Stdio::null())
            .stderr(Stdio::null())
            .output();
        in_lines(&String::from_utf8_lossy(&answer.ok()?.stdout))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_numbers() {
        assert_eq!((name(0).as_str(), uid("root"), gid("root")), ("root", Some(0), Some(0)));
        assert_eq!(
            (name(3_999_999_999).as_str(), uid("12"), uid("no such one")),
            ("3999999999", Some(12), None)
        );
        let own = Who::of(0, 7, std::process::id());
        assert!(own.gids.contains(&7), "{own:?}");
    }
}
