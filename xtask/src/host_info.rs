//! Properties of this machine.

use std::fs;

/// Returns the architecture by its name in Go and OCI.
pub(crate) fn architecture() -> &'static str {
    match std::env::consts::ARCH {
        "x86_64" => "amd64",
        "aarch64" => "arm64",
        other => other,
    }
}

/// Returns the distribution and release: `debian 12`. Programs and packages of one release are compatible.
pub(crate) fn release() -> String {
    release_in(&fs::read_to_string("/etc/os-release").unwrap_or_default())
}

/// Returns the code name of a Debian release, such as `bookworm`; `None` on other distributions.
pub(crate) fn debian_codename() -> Option<String> {
    debian_codename_in(&fs::read_to_string("/etc/os-release").unwrap_or_default())
}

fn release_in(text: &str) -> String {
    let field = |name| field(text, name).unwrap_or("unknown");
    format!("{} {}", field("ID"), field("VERSION_ID"))
}

fn debian_codename_in(text: &str) -> Option<String> {
    (field(text, "ID")? == "debian").then(|| field(text, "VERSION_CODENAME").map(str::to_string)).flatten()
}

fn field<'a>(text: &'a str, name: &str) -> Option<&'a str> {
    let value = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix('='));
    value.map(|value| value.trim_matches('"'))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_release_has_two_words() {
        assert_eq!(release_in("NAME=\"Debian\"\nVERSION_ID=\"12\"\nID=debian\n"), "debian 12");
        assert_eq!(release_in(""), "unknown unknown");
    }

    #[test]
    fn only_debian_has_its_codename() {
        assert_eq!(debian_codename_in("ID=debian\nVERSION_CODENAME=bookworm\n").unwrap(), "bookworm");
        assert_eq!(debian_codename_in("ID=ubuntu\nVERSION_CODENAME=noble\n"), None);
        assert_eq!(debian_codename_in("ID=debian\n"), None);
    }
}
