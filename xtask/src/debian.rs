//! Uses Debian's tools: fetches and unpacks packages privately, and installs packages that a build needs.

mod suites;

pub(crate) use suites::DebianSuites;

use crate::prerequisites::MissingPrerequisite;
use crate::process::{ProcessEnd, last_lines, run, run_into};
use std::fs::{self, File};
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::AtomicBool;

/// Requirements for linking runc: a command that succeeds if one is installed, and the packages that provide it.
const BUILD_REQUIREMENTS: &[(&[&str], &[&str])] = &[
    (&["gcc", "--version"], &["gcc", "libc6-dev"]),
    (&["pkg-config", "--version"], &["pkg-config"]),
    (&["pkg-config", "--exists", "libseccomp"], &["libseccomp-dev"]),
];

/// Requirements of a bed, and of the commands that its documentation uses. Everything else is in packages that every
/// Debian has.
const BED_REQUIREMENTS: &[(&[&str], &[&str])] =
    &[(&["ip", "-V"], &["iproute2"]), (&["curl", "--version"], &["curl"])];

/// Debian's tools, working in one directory.
pub(crate) struct DebianTools<'a> {
    pub(crate) work: PathBuf,
    pub(crate) stop: &'a AtomicBool,
    /// Returns the error for an interruption, which includes the caller's progress.
    pub(crate) interrupted: &'a dyn Fn() -> MissingPrerequisite,
    /// What to do on a machine without Debian's tools.
    pub(crate) alternative: &'static str,
    /// Path of a private apt configuration with its own sources and lists; `None` uses the system's.
    pub(crate) private_config: Option<PathBuf>,
}

impl DebianTools<'_> {
    /// Installs packages on the system, which requires root.
    pub(crate) fn install(&self, what: &str, packages: &[&str]) -> Result<(), MissingPrerequisite> {
        check_can_install(what, packages)?;
        let install = || {
            let mut command = self.apt_get();
            command.args(["install", "--yes", "--no-install-recommends", "-o", "DPkg::Lock::Timeout=300"]);
            command.args(packages).env("DEBIAN_FRONTEND", "noninteractive");
            command
        };
        self.with_fresh_lists(install, &packages.join(" ")).map(drop)
    }

    /// Fetches a package and unpacks it privately. Returns the program in it and the package's version.
    pub(crate) fn unpack(
        &self,
        package: &str,
        files: &[&str],
    ) -> Result<(PathBuf, String), MissingPrerequisite> {
        let folder = self.folder(package);
        fs::create_dir_all(&folder)
            .map_err(MissingPrerequisite::io(format!("creating {}", folder.display())))?;
        self.fetch(&[package.to_string()], &folder, package)?;
        let archive = self.archive(package)?;
        let version = self.field(package, &archive, "Version")?;
        let tree = folder.join("tree");
        self.extract(&archive, &tree, package)?;
        let program = files.iter().map(|file| tree.join(file)).find(|path| path.is_file());
        let program = program.ok_or_else(|| MissingPrerequisite::Failed {
            doing: format!("searching {package} {version}"),
            message: format!("it contains none of: {}", files.join(", ")),
        })?;
        Ok((program, version))
    }

    fn fetch(&self, packages: &[String], folder: &Path, what: &str) -> Result<(), MissingPrerequisite> {
        let download = || {
            let mut command = self.apt_get();
            // apt's own user cannot write into a private directory.
            command.args(["-o", "APT::Sandbox::User=root", "download"]).args(packages).current_dir(folder);
            command
        };
        self.with_fresh_lists(download, what).map(drop)
    }

    /// Resolves packages and all their dependencies to versions, independent of what is installed here.
    pub(crate) fn resolve(&self, wanted: &[&str]) -> Result<Vec<(String, String)>, MissingPrerequisite> {
        let ask = || {
            let mut command = self.apt_get();
            command.args(["--simulate", "--no-install-recommends", "-o", "Dir::State::status=/dev/null"]);
            command.arg("install").args(wanted);
            command
        };
        let message = self.with_fresh_lists(ask, &wanted.join(" "))?;
        Ok(message.lines().filter_map(parse_install_line).collect())
    }

    /// Fetches packages in these versions into a directory.
    pub(crate) fn download(
        &self,
        packages: &[(String, String)],
        folder: &Path,
    ) -> Result<(), MissingPrerequisite> {
        let packages: Vec<_> = packages.iter().map(|(name, version)| format!("{name}={version}")).collect();
        self.fetch(&packages, folder, "Debian packages")
    }

    /// Returns the versions of a package in the sources, the newest first.
    pub(crate) fn versions(&self, package: &str) -> Result<Vec<String>, MissingPrerequisite> {
        let message = self.run(self.apt("apt-cache").args(["madison", package]), "apt-cache", package)?;
        Ok(message.lines().filter_map(parse_madison_line).collect())
    }

    /// Unpacks a fetched package.
    pub(crate) fn extract(&self, archive: &Path, tree: &Path, what: &str) -> Result<(), MissingPrerequisite> {
        self.run(Command::new("dpkg-deb").arg("-x").arg(archive).arg(tree), "dpkg-deb", what).map(drop)
    }

    /// Returns the sources of the host's own packages, one `address release` per line.
    pub(crate) fn sources(&self) -> Result<String, MissingPrerequisite> {
        let mut command = self.apt_get();
        command.args(["indextargets", "--format", "$(REPO_URI) $(RELEASE)", "Identifier: Packages"]);
        self.run(&mut command, "apt-get", "apt's sources")
    }

    /// Writes the files of a package as a tar file, with their owners, which only root could unpack.
    pub(crate) fn files(&self, archive: &Path, tar: &Path, what: &str) -> Result<(), MissingPrerequisite> {
        let out = File::create(tar).map_err(MissingPrerequisite::io(format!("writing {}", tar.display())))?;
        let mut command = Command::new("dpkg-deb");
        command.arg("--fsys-tarfile").arg(archive);
        let end = run_into(&mut command, out, &self.log(), self.stop);
        self.interpret_exit(end, "dpkg-deb", what).map(drop)
    }

    /// Returns the packages that an unpacked one depends on, first alternatives only.
    pub(crate) fn dependencies(&self, package: &str) -> Result<Vec<String>, MissingPrerequisite> {
        let message = self.field(package, &self.archive(package)?, "Depends")?;
        Ok(message.split(',').filter_map(|one| Some(one.split_whitespace().next()?.to_string())).collect())
    }

    fn folder(&self, package: &str) -> PathBuf {
        self.work.join("debian").join(package)
    }

    /// Returns the downloaded package; its file name contains a version that is not known beforehand.
    fn archive(&self, package: &str) -> Result<PathBuf, MissingPrerequisite> {
        let folder = self.folder(package);
        let files = fs::read_dir(&folder)
            .map_err(MissingPrerequisite::io(format!("reading {}", folder.display())))?;
        let mut paths = files.filter_map(|file| Some(file.ok()?.path()));
        let archive = paths.find(|path| path.extension().is_some_and(|extension| extension == "deb"));
        archive.ok_or_else(|| MissingPrerequisite::Failed {
            doing: format!("downloading {package}"),
            message: "apt-get downloaded no package".to_string(),
        })
    }

    fn field(&self, package: &str, archive: &Path, name: &str) -> Result<String, MissingPrerequisite> {
        let message =
            self.run(Command::new("dpkg-deb").arg("-f").arg(archive).arg(name), "dpkg-deb", package)?;
        Ok(message.trim().to_string())
    }

    /// Runs a command; if package lists may be missing or old, fetches them and retries.
    fn with_fresh_lists(
        &self,
        command: impl Fn() -> Command,
        what: &str,
    ) -> Result<String, MissingPrerequisite> {
        let first = self.run(&mut command(), "apt-get", what);
        match first {
            Err(MissingPrerequisite::NoNetwork { .. } | MissingPrerequisite::Failed { .. })
                if self.private_config.is_some() || rustix::process::geteuid().is_root() =>
            {
                self.update()?;
                self.run(&mut command(), "apt-get", what)
            }
            first => first,
        }
    }

    /// Fetches the package lists.
    pub(crate) fn update(&self) -> Result<(), MissingPrerequisite> {
        self.run(self.apt_get().arg("update"), "apt-get", "Debian's package lists").map(drop)
    }

    fn apt_get(&self) -> Command {
        self.apt("apt-get")
    }

    /// Returns a command for one of apt's programs.
    fn apt(&self, program: &str) -> Command {
        let mut command = Command::new(program);
        // Its output is parsed below.
        command.arg("-qq").env("LC_ALL", "C");
        if let Some(configuration) = &self.private_config {
            command.arg("-c").arg(configuration);
        }
        command
    }

    fn run(
        &self,
        command: &mut Command,
        tool: &'static str,
        what: &str,
    ) -> Result<String, MissingPrerequisite> {
        let end = run(command, &self.log(), self.stop, None);
        self.interpret_exit(end, tool, what)
    }

    fn log(&self) -> PathBuf {
        self.work.join("debian.log")
    }

    fn interpret_exit(
        &self,
        end: io::Result<ProcessEnd>,
        tool: &'static str,
        what: &str,
    ) -> Result<String, MissingPrerequisite> {
        match end {
            Err(error) if error.kind() == ErrorKind::NotFound => Err(MissingPrerequisite::NoDebian {
                what: what.to_string(),
                tool,
                alternative: self.alternative,
            }),
            Err(error) => Err(MissingPrerequisite::io(format!("running {tool} for {what}"))(error)),
            Ok(ProcessEnd::Succeeded(message)) => Ok(message),
            Ok(ProcessEnd::Interrupted | ProcessEnd::TimedOut) => Err((self.interrupted)()),
            Ok(ProcessEnd::Failed(message)) => Err(classify_failure(tool, what, &message)),
        }
    }
}

/// Parses a line of apt's simulation: `Inst name (version ...`.
fn parse_install_line(line: &str) -> Option<(String, String)> {
    let mut words = line.strip_prefix("Inst ")?.split_whitespace();
    let name = words.next()?.to_string();
    // The version that would be replaced comes first, in brackets.
    let version = words.find_map(|word| word.strip_prefix('('))?;
    Some((name, version.trim_end_matches(')').to_string()))
}

/// Parses a line of `apt-cache madison`: `name | version | source`.
fn parse_madison_line(line: &str) -> Option<String> {
    line.split('|').nth(1).map(|version| version.trim().to_string())
}

/// Returns the missing packages that a build needs.
pub(crate) fn missing_build_packages() -> Vec<&'static str> {
    missing_packages(BUILD_REQUIREMENTS)
}

/// Returns the missing packages that a bed needs.
pub(crate) fn missing_bed_packages() -> Vec<&'static str> {
    missing_packages(BED_REQUIREMENTS)
}

fn missing_packages(needs: &'static [(&[&str], &[&str])]) -> Vec<&'static str> {
    let answered = |question: &[&str]| {
        let mut command = Command::new(question[0]);
        command.args(&question[1..]).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        command.status().is_ok_and(|status| status.success())
    };
    let absent = needs.iter().filter(|(question, _)| !answered(question));
    absent.flat_map(|(_, packages)| packages.iter().copied()).collect()
}

/// Checks that packages can be installed: only root can do that.
pub(crate) fn check_can_install(what: &str, packages: &[&str]) -> Result<(), MissingPrerequisite> {
    if packages.is_empty() || rustix::process::geteuid().is_root() {
        Ok(())
    } else {
        Err(MissingPrerequisite::NotRoot { what: what.to_string(), packages: packages.join(" ") })
    }
}

/// Classifies an error of apt by its output.
fn classify_failure(tool: &str, what: &str, message: &str) -> MissingPrerequisite {
    let has = |words: &[&str]| words.iter().any(|word| message.contains(word));
    if has(&["No space left on device", "enough free space"]) {
        return MissingPrerequisite::DiskFull { doing: format!("unpacking {what}") };
    }
    let signs = [
        "Failed to fetch",
        "Could not resolve",
        "Could not connect",
        "Unable to connect",
        "Temporary failure",
    ];
    if has(&signs) {
        let reason = message.lines().find(|line| signs.iter().any(|sign| line.contains(sign)));
        let message = reason.unwrap_or(message).trim().to_string();
        return MissingPrerequisite::NoNetwork {
            what: what.to_string(),
            asked: "apt's sources and proxy",
            message,
        };
    }
    let message = last_lines(message);
    let hint = if has_no_candidate(&message) {
        "; update the package lists (as root: apt-get update) and try again"
    } else {
        ""
    };
    MissingPrerequisite::Failed { doing: format!("{tool} for {what}"), message: message + hint }
}

fn has_no_candidate(message: &str) -> bool {
    message.contains("Unable to locate package") || message.contains("no installation candidate")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn simulated_install_lines_are_parsed() {
        let read = |line| parse_install_line(line).map(|(name, version)| format!("{name} {version}"));
        let line = "Inst libattr1 (1:2.5.1-4 Debian:12.15/oldstable [amd64]) []";
        assert_eq!(read(line).unwrap(), "libattr1 1:2.5.1-4");
        assert_eq!(read("Inst login [1:4.13] (1:4.14 Debian:12 [amd64])").unwrap(), "login 1:4.14");
        assert_eq!(read("Conf login (1:4.14 Debian:12 [amd64])"), None);
        assert_eq!(read("Reading package lists..."), None);
    }

    #[test]
    fn madison_lines_are_parsed() {
        let line =
            "nvidia-smi | 535.261.03-1 | http://mirror.example/debian bookworm/non-free amd64 Packages";
        assert_eq!(parse_madison_line(line).unwrap(), "535.261.03-1");
        assert_eq!(parse_madison_line("N: nothing"), None);
    }

    #[test]
    fn apt_errors_are_classified() {
        let error = classify_failure("apt-get", "bpftool", "E: Failed to fetch x  Could not resolve 'y'\n")
            .to_string();
        assert_eq!(
            error,
            "cannot download bpftool: E: Failed to fetch x  Could not resolve 'y'; check the network and \
             apt's sources and proxy, and try again: finished parts are kept"
        );
        let error =
            classify_failure("apt-get", "bpftool", "E: Unable to locate package bpftool\n").to_string();
        assert!(error.ends_with("(as root: apt-get update) and try again"), "{error}");
    }
}
