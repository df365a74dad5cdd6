//! Files that a Debian installation writes for itself, and that an image must bring: who there is, and who may do what.

use super::Layer;
use crate::missing::Missing;

/// What an image needs of its own, beside its packages.
pub(super) struct Text {
    path: &'static str,
    mode: u32,
    contents: &'static str,
}

const fn text(path: &'static str, contents: &'static str) -> Text {
    Text { path, mode: 0o644, contents }
}

/// Users and groups, by the numbers that Debian gives them.
pub(super) const PEOPLE: &[Text] = &[
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

/// An image in which nobody logs in.
pub(super) const SYSTEM: &[Text] = &[
    text("/etc/passwd", "root:x:0:0:root:/root:/sbin/nologin\nnobody:x:65534:65534:nobody:/:/sbin/nologin\n"),
    text("/etc/group", "root:x:0:\nnogroup:x:65534:\n"),
    text("/etc/nsswitch.conf", "passwd: files\ngroup: files\nhosts: files dns\n"),
];

/// What login shells and `su` read.
pub(super) const LOGIN: &[Text] = &[
    // No password fits any of them: root becomes another user without one.
    Text { path: "/etc/shadow", mode: 0o640, contents: "root:*:::::::\nuser:*:::::::\nnobody:*:::::::\n" },
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

/// Puts them into a layer.
pub(super) fn put(layer: &mut Layer, texts: &[Text]) -> Result<(), Missing> {
    texts.iter().try_for_each(|text| layer.text(text.path, text.mode, text.contents).map(drop))
}

/// All that decides what they are.
pub(super) fn parts(texts: &[Text]) -> impl Iterator<Item = String> {
    texts.iter().map(|text| format!("{} {:o} {}", text.path, text.mode, text.contents))
}
