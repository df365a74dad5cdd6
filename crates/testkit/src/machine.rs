//! What this machine is.

use std::fs;

/// The word of Go and of OCI for its architecture.
pub(crate) fn architecture() -> &'static str {
    match std::env::consts::ARCH {
        "x86_64" => "amd64",
        "aarch64" => "arm64",
        other => other,
    }
}

/// Its distribution and release: `debian 12`. Programs and packages of one release fit each other.
pub(crate) fn release() -> String {
    release_in(&fs::read_to_string("/etc/os-release").unwrap_or_default())
}

fn release_in(text: &str) -> String {
    let field = |name: &str| {
        let value = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix('='));
        value.map_or("unknown", |value| value.trim_matches('"'))
    };
    format!("{} {}", field("ID"), field("VERSION_ID"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_release_has_two_words() {
        assert_eq!(release_in("NAME=\"Debian\"\nVERSION_ID=\"12\"\nID=debian\n"), "debian 12");
        assert_eq!(release_in(""), "unknown unknown");
    }
}
