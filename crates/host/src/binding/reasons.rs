//! Why a namespace is not possible, in words.

use super::namespace::{Failed, Step};
use rustix::io::Errno;
use std::fs;

/// The settings of systems that keep users from making namespaces: the file, the value that forbids it, and the step
/// that fails.
const SETTINGS: [(&str, &str, &str); 3] = [
    ("kernel.unprivileged_userns_clone", "0", "this kernel does not let users make namespaces"),
    ("user.max_user_namespaces", "0", "this kernel does not let anybody make user namespaces"),
    (
        "kernel.apparmor_restrict_unprivileged_userns",
        "1",
        "AppArmor does not let users do anything in a namespace they make",
    ),
];

pub(super) fn no_mount_namespace(error: Errno) -> String {
    format!(
        "the kernel refuses a mount namespace to root ({error}); a container's seccomp or AppArmor profile does that: \
         start it without"
    )
}

pub(super) fn no_user_namespace(failed: Failed) -> String {
    explain(failed, &|name| {
        let path = format!("/proc/sys/{}", name.replace('.', "/"));
        Some(fs::read_to_string(path).ok()?.trim().into())
    })
}

fn explain((step, error): Failed, setting: &dyn Fn(&str) -> Option<String>) -> String {
    if step == Step::Fork {
        return format!("no process could be started to try it: {error}");
    }
    if step == Step::Unshare && error == Errno::INVAL {
        return "the kernel has no user namespaces (CONFIG_USER_NS), or this process has several threads"
            .into();
    }
    for (name, forbids, why) in SETTINGS {
        if setting(name).as_deref() == Some(forbids) {
            return format!("{why}: {name} is {forbids}; root can change that with `sysctl {name}=…`");
        }
    }
    let what = match step {
        Step::Fork | Step::Unshare => "make user namespaces",
        Step::Map => "be anybody in the user namespace they make",
        Step::Mount => "change mounts in the user namespace they make",
    };
    let why = match error {
        Errno::NOSPC | Errno::USERS => "there are too many, or too deep, already (user.max_user_namespaces)",
        _ => "a container's seccomp profile, a security module or a chroot forbids it",
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
    fn the_setting_that_forbids_it_is_named() {
        for (name, forbids, _) in SETTINGS {
            let words = explain((Step::Unshare, Errno::PERM), &with(name, forbids));
            assert!(words.contains(&format!("{name} is {forbids}")), "{words}");
        }
    }

    #[test]
    fn a_setting_that_allows_it_is_not_blamed() {
        let settings = with("kernel.unprivileged_userns_clone", "1");
        let words = explain((Step::Map, Errno::PERM), &settings);
        assert!(!words.contains("unprivileged_userns_clone"), "{words}");
        assert!(words.contains("Operation not permitted"), "{words}");
    }

    #[test]
    fn a_full_count_and_threads_have_words_of_their_own() {
        let none = |_: &str| None;
        assert!(explain((Step::Unshare, Errno::NOSPC), &none).contains("too many"));
        assert!(explain((Step::Unshare, Errno::INVAL), &none).contains("threads"));
    }
}
