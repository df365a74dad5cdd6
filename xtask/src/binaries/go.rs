//! The machine's Go compiler: found, asked, run.

use super::Missing;
use super::catalog::{GoSource, Module, go_needed};
use super::store::Store;
use crate::machine;
use crate::process::{End, last_words, run};
use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::AtomicBool;

/// From this version on, Go fetches a newer Go by itself.
const FETCHES_ITSELF: (u64, u64, u64) = (1, 21, 0);

/// A Go compiler that is new enough, or will be: then `toolchain` names the one it fetches.
#[derive(Debug)]
pub(super) struct Go {
    pub(super) version: String,
    toolchain: String,
    /// Where it keeps what it compiled.
    pub(super) cache: PathBuf,
    /// Where it keeps what it downloaded.
    pub(super) modules: PathBuf,
}

impl Go {
    /// Asks the `go` on the PATH. Downloads nothing.
    pub(super) fn find() -> Result<Self, Missing> {
        let needed = go_needed();
        let asked = Command::new("go")
            .args(["env", "GOVERSION", "GOTOOLCHAIN", "GOCACHE", "GOMODCACHE"])
            // A module file of the folder we stand in has no say.
            .current_dir("/")
            .output();
        let asked = match asked {
            Err(error) if error.kind() == ErrorKind::NotFound => return Err(Missing::NoGo { needed }),
            asked => asked.map_err(Missing::io("asking `go env`"))?,
        };
        let said = String::from_utf8_lossy(&asked.stdout);
        let mut lines = said.lines();
        let (Some(version), Some(toolchain), Some(cache), Some(modules)) =
            (lines.next(), lines.next(), lines.next(), lines.next())
        else {
            let said = last_words(&String::from_utf8_lossy(&asked.stderr));
            return Err(Missing::Failed { doing: "asking `go env`".to_string(), said });
        };
        let (version, toolchain) = choose(version, toolchain, needed)?;
        Ok(Self { version, toolchain, cache: cache.into(), modules: modules.into() })
    }

    /// A `go` command in a module's folder. Only what is set here, and nothing the user's settings add, shapes the
    /// program: the key must be true.
    fn command(&self, folder: &Path, work: &Path) -> Command {
        let mut command = Command::new("go");
        command
            .current_dir(folder)
            .env("GOTOOLCHAIN", &self.toolchain)
            .env("GOFLAGS", "-buildvcs=false")
            .env("GOWORK", "off")
            .env("GOOS", "linux")
            .env("GOARCH", machine::architecture())
            .env("CGO_ENABLED", "0")
            // Compiling leaves nothing elsewhere, even when it is killed.
            .env("GOTMPDIR", work);
        command
    }

    /// Fetches what a module needs. Quick where it was fetched before.
    pub(super) fn download(&self, module: &Module, store: &Store, stop: &AtomicBool) -> Result<(), Missing> {
        let folder = stage(module, store)?;
        let mut command = self.command(&folder, &store.work());
        self.finish(
            command.args(["mod", "download"]),
            store,
            stop,
            &format!("the modules of {}", module.name),
        )
    }

    /// Builds one program to `half`.
    pub(super) fn build(
        &self,
        source: &GoSource,
        half: &Path,
        store: &Store,
        stop: &AtomicBool,
    ) -> Result<(), Missing> {
        let folder = stage(source.module, store)?;
        let mut command = self.command(&folder, &store.work());
        if source.links_c {
            command.env("CGO_ENABLED", "1");
        }
        command.arg("build").args(source.flags()).arg("-o").arg(half).arg(source.package);
        self.finish(&mut command, store, stop, source.package)
    }

    fn finish(
        &self,
        command: &mut Command,
        store: &Store,
        stop: &AtomicBool,
        what: &str,
    ) -> Result<(), Missing> {
        let log = store.work().join("go.log");
        match run(command, &log, stop, None).map_err(Missing::io(format!("running go for {what}")))? {
            End::Well(_) => Ok(()),
            End::Interrupted | End::TooLate => Err(store.interrupted()),
            End::Badly(said) => Err(blame(what, &said)),
        }
    }
}

/// The module files, out of this program: it works in any checkout, and Go may write beside them.
fn stage(module: &Module, store: &Store) -> Result<PathBuf, Missing> {
    let folder = store.work().join("modules").join(module.name);
    let write = || {
        fs::create_dir_all(&folder)?;
        fs::write(folder.join("go.mod"), module.go_mod)?;
        fs::write(folder.join("go.sum"), module.go_sum)
    };
    write().map_err(Missing::io(format!("writing {}", folder.display())))?;
    Ok(folder)
}

/// Which Go to use: the one that is there, or the one it may fetch.
fn choose(version: &str, toolchain: &str, needed: &'static str) -> Result<(String, String), Missing> {
    let found = numbers(version);
    if found >= numbers(needed) {
        return Ok((version.to_string(), "local".to_string()));
    }
    // `local` forbids fetching, and so does `path`, which only looks around.
    if found >= FETCHES_ITSELF && toolchain != "local" && toolchain != "path" {
        return Ok((format!("go{needed}"), format!("go{needed}")));
    }
    Err(Missing::GoTooOld { needed, found: version.trim_start_matches("go").to_string() })
}

/// `go1.26.8` and the like as numbers, so that 1.9 is older than 1.26.
pub(super) fn numbers(version: &str) -> (u64, u64, u64) {
    let start = version.find(|c: char| c.is_ascii_digit()).unwrap_or(version.len());
    let mut parts = version[start..].split('.').map(|part| {
        let digits: String = part.chars().take_while(char::is_ascii_digit).collect();
        digits.parse().unwrap_or(0)
    });
    (parts.next().unwrap_or(0), parts.next().unwrap_or(0), parts.next().unwrap_or(0))
}

/// What Go's words mean.
fn blame(what: &str, said: &str) -> Missing {
    let has = |words: &[&str]| words.iter().any(|word| said.contains(word));
    let reason = said
        .lines()
        .rev()
        .find(|line| !line.contains("go: downloading"))
        .map_or_else(|| "it said nothing".to_string(), |line| line.trim().to_string());
    if has(&["no space left on device"]) {
        return Missing::DiskFull { doing: format!("building {what}") };
    }
    if has(&[
        "dial tcp",
        "no such host",
        "connection refused",
        "connection reset",
        "i/o timeout",
        "TLS handshake",
        "proxyconnect",
        "x509:",
        "unexpected EOF",
        "403 Forbidden",
        "404 Not Found",
        "407 Proxy",
        "410 Gone",
        "502 Bad Gateway",
        "503 Service",
        "disabled by GOPROXY=off",
    ]) {
        return Missing::NoNetwork {
            what: what.to_string(),
            asked: "the proxy of `go env GOPROXY`",
            said: reason,
        };
    }
    Missing::Failed { doing: format!("building {what}"), said: last_words(said) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_compare_as_numbers() {
        assert_eq!(numbers("go1.26.8"), (1, 26, 8));
        assert_eq!(numbers("go1.27rc1"), (1, 27, 0));
        assert_eq!(numbers("go1.26.8-X:nodwarf5"), (1, 26, 8));
        assert_eq!(numbers("devel go1.28-0a1b2c"), (1, 28, 0));
        assert_eq!(numbers("nonsense"), (0, 0, 0));
        assert!(numbers("1.9") < numbers("1.26.0"));
    }

    #[test]
    fn a_new_go_is_used_an_old_one_may_fetch() {
        let pair = |version: &str, toolchain: &str| (version.to_string(), toolchain.to_string());
        assert_eq!(choose("go1.26.8", "auto", "1.26.8").unwrap(), pair("go1.26.8", "local"));
        assert_eq!(choose("go1.27.0", "local", "1.26.8").unwrap(), pair("go1.27.0", "local"));
        assert_eq!(choose("go1.24.1", "auto", "1.26.8").unwrap(), pair("go1.26.8", "go1.26.8"));
        assert_eq!(
            choose("go1.24.1", "local", "1.26.8").unwrap_err().to_string(),
            "Go is 1.24.1, and the programs of the test bed need 1.26.8 or newer; install it (https://go.dev/dl), or, \
             from Go 1.21 on, let Go fetch it: GOTOOLCHAIN=auto make binaries"
        );
        assert!(matches!(choose("go1.19.8", "", "1.26.8"), Err(Missing::GoTooOld { .. })));
    }

    #[test]
    fn words_of_go_become_ours() {
        let refused = "go: downloading a v1\ngo: a@v1: Get \"proxy\": dial tcp: connection refused\n";
        let error = blame("etcd", refused).to_string();
        assert!(error.starts_with("etcd could not be downloaded: go: a@v1: Get"), "{error}");
        assert!(matches!(blame("etcd", "write x: no space left on device"), Missing::DiskFull { .. }));
        assert!(matches!(blame("etcd", "x.go:1: undefined: y"), Missing::Failed { .. }));
    }
}
