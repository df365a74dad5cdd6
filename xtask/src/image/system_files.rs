//! Files that a Debian installation creates itself and an image must contain: users and their permissions.

use super::ImageLayer;
use crate::prerequisites::MissingPrerequisite;

/// A file that an image needs in addition to its packages.
pub(super) struct SystemFile {
    path: &'static str,
    mode: u32,
    contents: &'static str,
}

const fn text(path: &'static str, contents: &'static str) -> SystemFile {
    SystemFile { path, mode: 0o644, contents }
}

/// Users and groups, with Debian's numbers.
pub(super) const USER_FILES: &[SystemFile] = &[
    text(
        "/etc/passwd",
        "root:x:0:0:root:/root:/bin/sh\n\
         user:x:1000:1000:user:/home/user:/bin/sh\n\
         nobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin\n",
    ),
    text(
        "/etc/group",
        "root:x:0:\ntty:x:5:\nshadow:x:42:\nutmp:x:43:\nvideo:x:44:\nstaff:x:50:\nuser:x:1000:\nnogroup:x:65534:\n",
    ),
];

/// Files of an image without logins.
pub(super) const NO_LOGIN_FILES: &[SystemFile] = &[
    text("/etc/passwd", "root:x:0:0:root:/root:/sbin/nologin\nnobody:x:65534:65534:nobody:/:/sbin/nologin\n"),
    text("/etc/group", "root:x:0:\nnogroup:x:65534:\n"),
    text("/etc/nsswitch.conf", "passwd: files\ngroup: files\nhosts: files dns\n"),
];

/// Files that login shells and `su` read.
pub(super) const LOGIN_FILES: &[SystemFile] = &[
    // No password matches: only root can become another user.
    SystemFile {
        path: "/etc/shadow",
        mode: 0o640,
        contents: "root:*:::::::\nuser:*:::::::\nnobody:*:::::::\n",
    },
    text("/etc/nsswitch.conf", "passwd: files\ngroup: files\nshadow: files\nhosts: files dns\n"),
    text("/etc/shells", "/bin/sh\n/bin/bash\n/bin/dash\n"),
    text("/etc/environment", ""),
    text("/etc/hosts", "127.0.0.1 localhost\n::1 localhost\n"),
    text(
        "/etc/profile",
        "# Read by login shells.\n\
         if [ \"$(id -u)\" -eq 0 ]; then\n\
         \x20 PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin\n\
         else\n\
         \x20 PATH=/usr/local/bin:/usr/bin:/bin\n\
         fi\n\
         export PATH\n\
         for script in /etc/profile.d/*.sh; do\n\
         \x20 [ -r \"$script\" ] && . \"$script\"\n\
         done\n\
         unset script\n",
    ),
    text("/etc/pam.d/common-auth", "auth required pam_unix.so\n"),
    text("/etc/pam.d/common-account", "account required pam_unix.so\n"),
    text("/etc/pam.d/common-password", "password required pam_unix.so\n"),
    text("/etc/pam.d/common-session", "session required pam_unix.so\n"),
    text("/etc/pam.d/common-session-noninteractive", "session required pam_unix.so\n"),
];

/// Adds files to a layer.
pub(super) fn add_files(layer: &mut ImageLayer, texts: &[SystemFile]) -> Result<(), MissingPrerequisite> {
    texts.iter().try_for_each(|text| layer.text(text.path, text.mode, text.contents).map(drop))
}

/// Returns everything that determines the files.
pub(super) fn cache_key_parts(texts: &[SystemFile]) -> impl Iterator<Item = String> {
    texts.iter().map(|text| format!("{} {:o} {}", text.path, text.mode, text.contents))
}
