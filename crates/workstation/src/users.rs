//! Resolves the names and ids of users and groups.

use std::collections::BTreeMap;
use std::fs;
use std::process::{Command, Stdio};
use std::sync::{Mutex, PoisonError};

/// The user of a request, as reported by the kernel.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct UserIdentity {
    /// The id of the user.
    pub uid: u32,
    /// The ids of all groups.
    pub gids: Vec<u32>,
}

impl UserIdentity {
    /// Returns whether this is root or the user of this daemon, who may do everything.
    pub fn is_daemon_user(&self) -> bool {
        self.uid == 0 || self.uid == rustix::process::geteuid().as_raw()
    }

    /// Returns a user with the groups of one of its processes; only the given group if the process has exited.
    pub(crate) fn of(uid: u32, gid: u32, pid: u32) -> UserIdentity {
        let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
        let groups = status.lines().find_map(|line| line.strip_prefix("Groups:")).unwrap_or_default();
        let mut gids: Vec<u32> = groups.split_whitespace().filter_map(|word| word.parse().ok()).collect();
        if !gids.contains(&gid) {
            gids.push(gid);
        }
        UserIdentity { uid, gids }
    }
}

/// Returns the name of a user, or the id if it has none.
pub fn user_name(uid: u32) -> String {
    // A network directory may be slow, so results are cached.
    static KNOWN: Mutex<BTreeMap<u32, String>> = Mutex::new(BTreeMap::new());
    let known = || KNOWN.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(name) = known().get(&uid) {
        return name.clone();
    }
    let name = lookup("passwd", &uid.to_string(), 2, 0).unwrap_or_else(|| uid.to_string());
    known().insert(uid, name.clone());
    name
}

/// Returns the id of a user, given by name or id.
pub(crate) fn uid(name: &str) -> Option<u32> {
    name.parse().ok().or_else(|| lookup("passwd", name, 0, 2)?.parse().ok())
}

/// Returns the id of a group, given by name or id.
pub(crate) fn gid(name: &str) -> Option<u32> {
    name.parse().ok().or_else(|| lookup("group", name, 0, 2)?.parse().ok())
}

/// Returns a field of the entry whose field `by` is the key. An entry that is not in the file may be in a network
/// directory.
fn lookup(table: &str, key: &str, by: usize, field: usize) -> Option<String> {
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
    fn users_and_groups_are_resolved_by_name_and_id() {
        assert_eq!((user_name(0).as_str(), uid("root"), gid("root")), ("root", Some(0), Some(0)));
        assert_eq!(
            (user_name(3_999_999_999).as_str(), uid("12"), uid("no such one")),
            ("3999999999", Some(12), None)
        );
        let own = UserIdentity::of(0, 7, std::process::id());
        assert!(own.gids.contains(&7), "{own:?}");
    }
}
