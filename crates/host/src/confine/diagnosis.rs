//! Explains why a namespace cannot be created, and what an administrator can change.

use super::namespace::{NamespaceStep, StepFailure};
use rustix::io::Errno;
use std::fs;

/// Sysctls that keep users from creating namespaces: the name, the value that forbids it, and what to report.
const RESTRICTING_SYSCTLS: [(&str, &str, &str); 3] = [
    ("kernel.unprivileged_userns_clone", "0", "this kernel does not let users create namespaces"),
    ("user.max_user_namespaces", "0", "this kernel does not allow user namespaces"),
    (
        "kernel.apparmor_restrict_unprivileged_userns",
        "1",
        "AppArmor restricts user namespaces that users create",
    ),
];

pub(super) fn explain_mount_namespace(error: Errno) -> String {
    format!(
        "the kernel refuses a mount namespace to root ({error}); a container's seccomp or AppArmor profile may forbid it: \
         start the container without that profile"
    )
}

pub(super) fn explain_user_namespace(failed: StepFailure) -> String {
    explain(failed, &|name| {
        let path = format!("/proc/sys/{}", name.replace('.', "/"));
        Some(fs::read_to_string(path).ok()?.trim().into())
    })
}

fn explain((step, error): StepFailure, setting: &dyn Fn(&str) -> Option<String>) -> String {
    if step == NamespaceStep::Fork {
        return format!("cannot start a process to test user namespaces: {error}");
    }
    if step == NamespaceStep::Unshare && error == Errno::INVAL {
        return "the kernel does not support user namespaces (CONFIG_USER_NS), or this process has several threads"
            .into();
    }
    for (name, forbids, why) in RESTRICTING_SYSCTLS {
        if setting(name).as_deref() == Some(forbids) {
            return format!("{why}: {name} is {forbids}; root can change it with `sysctl {name}=…`");
        }
    }
    let what = match step {
        NamespaceStep::Fork | NamespaceStep::Unshare => "create user namespaces",
        NamespaceStep::Map => "map their ids in a user namespace",
        NamespaceStep::Mount => "change mounts in a user namespace",
    };
    let why = match error {
        Errno::NOSPC | Errno::USERS => {
            "too many namespaces exist, or too many are nested (user.max_user_namespaces)"
        }
        _ => "a container's seccomp profile, a security module or a chroot may forbid it",
    };
    format!("this system does not let users {what} ({error}): {why}")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn with(name: &'static str, value: &'static str) -> impl Fn(&str) -> Option<String> {
        move |asked| (asked == name).then(|| value.to_string())
    }

    #[test]
    fn restricting_sysctl_is_named() {
        for (name, forbids, _) in RESTRICTING_SYSCTLS {
            let words = explain((NamespaceStep::Unshare, Errno::PERM), &with(name, forbids));
            assert!(words.contains(&format!("{name} is {forbids}")), "{words}");
        }
    }

    #[test]
    fn permissive_sysctl_is_not_named() {
        let settings = with("kernel.unprivileged_userns_clone", "1");
        let words = explain((NamespaceStep::Map, Errno::PERM), &settings);
        assert!(!words.contains("unprivileged_userns_clone"), "{words}");
        assert!(words.contains("Operation not permitted"), "{words}");
    }

    #[test]
    fn exhausted_namespaces_and_threads_are_explained() {
        let none = |_: &str| None;
        assert!(explain((NamespaceStep::Unshare, Errno::NOSPC), &none).contains("too many"));
        assert!(explain((NamespaceStep::Unshare, Errno::INVAL), &none).contains("threads"));
    }
}
