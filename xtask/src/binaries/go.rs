//! Finds and runs the host's Go compiler.

use super::MissingPrerequisite;
use super::catalog::{GoModule, GoSource, required_go_version};
use super::store::BinaryStore;
use crate::host_info;
use crate::process::{ProcessEnd, last_lines, run};
use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::AtomicBool;

/// From this version on, Go can download a newer Go itself.
const MIN_SELF_UPDATING_VERSION: (u64, u64, u64) = (1, 21, 0);

/// A Go compiler that is new enough, or can download `toolchain`, which is.
#[derive(Debug)]
pub(super) struct GoToolchain {
    pub(super) version: String,
    toolchain: String,
    /// Directory of the build cache.
    pub(super) cache: PathBuf,
    /// Directory of downloaded modules.
    pub(super) modules: PathBuf,
}

impl GoToolchain {
    /// Finds the `go` on the PATH. Downloads nothing.
    pub(super) fn find() -> Result<Self, MissingPrerequisite> {
        let needed = required_go_version();
        let asked = Command::new("go")
            .args(["env", "GOVERSION", "GOTOOLCHAIN", "GOCACHE", "GOMODCACHE"])
            // A module file in the current directory must have no influence.
            .current_dir("/")
            .output();
        let asked = match asked {
            Err(error) if error.kind() == ErrorKind::NotFound => {
                return Err(MissingPrerequisite::NoGo { needed });
            }
            asked => asked.map_err(MissingPrerequisite::io("running `go env`"))?,
        };
        let message = String::from_utf8_lossy(&asked.stdout);
        let mut lines = message.lines();
        let (Some(version), Some(toolchain), Some(cache), Some(modules)) =
            (lines.next(), lines.next(), lines.next(), lines.next())
        else {
            let message = last_lines(&String::from_utf8_lossy(&asked.stderr));
            return Err(MissingPrerequisite::Failed { doing: "running `go env`".to_string(), message });
        };
        let (version, toolchain) = choose_toolchain(version, toolchain, needed)?;
        Ok(Self { version, toolchain, cache: cache.into(), modules: modules.into() })
    }

    /// Returns a `go` command in a module's directory. The program depends only on the variables set here, and not on
    /// the user's settings: the cache key must describe it completely.
    fn command(&self, folder: &Path, work: &Path) -> Command {
        let mut command = Command::new("go");
        command
            .current_dir(folder)
            .env("GOTOOLCHAIN", &self.toolchain)
            .env("GOFLAGS", "-buildvcs=false")
            .env("GOWORK", "off")
            .env("GOOS", "linux")
            .env("GOARCH", host_info::architecture())
            .env("CGO_ENABLED", "0")
            // Temporary files stay in the work directory, even if the compiler is killed.
            .env("GOTMPDIR", work);
        command
    }

    /// Downloads the dependencies of a module. Fast if they are cached.
    pub(super) fn download(
        &self,
        module: &GoModule,
        store: &BinaryStore,
        stop: &AtomicBool,
    ) -> Result<(), MissingPrerequisite> {
        let folder = write_module_files(module, store)?;
        let mut command = self.command(&folder, &store.work_dir());
        self.run_go(
            command.args(["mod", "download"]),
            store,
            stop,
            &format!("the modules of {}", module.name),
        )
    }

    /// Builds one program and writes it to `output`.
    pub(super) fn build(
        &self,
        source: &GoSource,
        output: &Path,
        store: &BinaryStore,
        stop: &AtomicBool,
    ) -> Result<(), MissingPrerequisite> {
        let folder = write_module_files(source.module, store)?;
        let mut command = self.command(&folder, &store.work_dir());
        if source.links_c {
            command.env("CGO_ENABLED", "1");
        }
        command.arg("build").args(source.flags()).arg("-o").arg(output).arg(source.package);
        self.run_go(&mut command, store, stop, source.package)
    }

    fn run_go(
        &self,
        command: &mut Command,
        store: &BinaryStore,
        stop: &AtomicBool,
        what: &str,
    ) -> Result<(), MissingPrerequisite> {
        let log = store.work_dir().join("go.log");
        match run(command, &log, stop, None)
            .map_err(MissingPrerequisite::io(format!("running go for {what}")))?
        {
            ProcessEnd::Succeeded(_) => Ok(()),
            ProcessEnd::Interrupted | ProcessEnd::TimedOut => Err(store.interrupted()),
            ProcessEnd::Failed(message) => Err(classify_failure(what, &message)),
        }
    }
}

/// Writes the module files, which are embedded in this program: it works in any checkout, and Go may write beside them.
fn write_module_files(module: &GoModule, store: &BinaryStore) -> Result<PathBuf, MissingPrerequisite> {
    let folder = store.work_dir().join("modules").join(module.name);
    let write = || {
        fs::create_dir_all(&folder)?;
        fs::write(folder.join("go.mod"), module.go_mod)?;
        fs::write(folder.join("go.sum"), module.go_sum)
    };
    write().map_err(MissingPrerequisite::io(format!("writing {}", folder.display())))?;
    Ok(folder)
}

/// Chooses the Go toolchain: the installed one, or the one it can download.
fn choose_toolchain(
    version: &str,
    toolchain: &str,
    needed: &'static str,
) -> Result<(String, String), MissingPrerequisite> {
    let found = version_numbers(version);
    if found >= version_numbers(needed) {
        return Ok((version.to_string(), "local".to_string()));
    }
    // `local` forbids downloading, and `path` only searches the PATH.
    if found >= MIN_SELF_UPDATING_VERSION && toolchain != "local" && toolchain != "path" {
        return Ok((format!("go{needed}"), format!("go{needed}")));
    }
    Err(MissingPrerequisite::GoTooOld { needed, found: version.trim_start_matches("go").to_string() })
}

/// Parses versions like `go1.26.8` into numbers, so that 1.9 is older than 1.26.
pub(super) fn version_numbers(version: &str) -> (u64, u64, u64) {
    let start = version.find(|c: char| c.is_ascii_digit()).unwrap_or(version.len());
    let mut parts = version[start..].split('.').map(|part| {
        let digits: String = part.chars().take_while(char::is_ascii_digit).collect();
        digits.parse().unwrap_or(0)
    });
    (parts.next().unwrap_or(0), parts.next().unwrap_or(0), parts.next().unwrap_or(0))
}

/// Classifies an error of the go command by its output.
fn classify_failure(what: &str, message: &str) -> MissingPrerequisite {
    let has = |words: &[&str]| words.iter().any(|word| message.contains(word));
    let reason = message
        .lines()
        .rev()
        .find(|line| !line.contains("go: downloading"))
        .map_or_else(|| "no output".to_string(), |line| line.trim().to_string());
    if has(&["no space left on device"]) {
        return MissingPrerequisite::DiskFull { doing: format!("building {what}") };
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
        return MissingPrerequisite::NoNetwork {
            what: what.to_string(),
            asked: "the proxy in `go env GOPROXY`",
            message: reason,
        };
    }
    MissingPrerequisite::Failed { doing: format!("building {what}"), message: last_lines(message) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_compare_numerically() {
        assert_eq!(version_numbers("go1.26.8"), (1, 26, 8));
        assert_eq!(version_numbers("go1.27rc1"), (1, 27, 0));
        assert_eq!(version_numbers("go1.26.8-X:nodwarf5"), (1, 26, 8));
        assert_eq!(version_numbers("devel go1.28-0a1b2c"), (1, 28, 0));
        assert_eq!(version_numbers("nonsense"), (0, 0, 0));
        assert!(version_numbers("1.9") < version_numbers("1.26.0"));
    }

    #[test]
    fn new_go_is_used_and_old_go_may_fetch_a_newer_one() {
        let pair = |version: &str, toolchain: &str| (version.to_string(), toolchain.to_string());
        assert_eq!(choose_toolchain("go1.26.8", "auto", "1.26.8").unwrap(), pair("go1.26.8", "local"));
        assert_eq!(choose_toolchain("go1.27.0", "local", "1.26.8").unwrap(), pair("go1.27.0", "local"));
        assert_eq!(choose_toolchain("go1.24.1", "auto", "1.26.8").unwrap(), pair("go1.26.8", "go1.26.8"));
        assert_eq!(
            choose_toolchain("go1.24.1", "local", "1.26.8").unwrap_err().to_string(),
            "Go 1.24.1 is too old: the programs of the test bed require 1.26.8 or newer; install it (https://go.dev/dl), or, \
             from Go 1.21 on, let Go download it: GOTOOLCHAIN=auto make binaries"
        );
        assert!(matches!(
            choose_toolchain("go1.19.8", "", "1.26.8"),
            Err(MissingPrerequisite::GoTooOld { .. })
        ));
    }

    #[test]
    fn go_errors_are_classified() {
        let refused = "go: downloading a v1\ngo: a@v1: Get \"proxy\": dial tcp: connection refused\n";
        let error = classify_failure("etcd", refused).to_string();
        assert!(error.starts_with("cannot download etcd: go: a@v1: Get"), "{error}");
        assert!(matches!(
            classify_failure("etcd", "write x: no space left on device"),
            MissingPrerequisite::DiskFull { .. }
        ));
        assert!(matches!(
            classify_failure("etcd", "x.go:1: undefined: y"),
            MissingPrerequisite::Failed { .. }
        ));
    }
}
