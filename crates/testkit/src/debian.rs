//! What comes from Debian: packages, fetched and unpacked privately, and what a build needs, installed.

use crate::missing::Missing;
use crate::process::{End, last_words, run};
use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::AtomicBool;

/// What linking runc needs: a question that is answered well where it is there, and the packages that have it.
const BUILD_NEEDS: &[(&[&str], &[&str])] = &[
    (&["gcc", "--version"], &["gcc", "libc6-dev"]),
    (&["pkg-config", "--version"], &["pkg-config"]),
    (&["pkg-config", "--exists", "libseccomp"], &["libseccomp-dev"]),
];

/// Debian's tools, working in one folder.
pub(crate) struct Debian<'a> {
    pub(crate) work: PathBuf,
    pub(crate) stop: &'a AtomicBool,
    /// The words for Ctrl-C: how far it went, only the caller knows.
    pub(crate) interrupted: &'a dyn Fn() -> Missing,
    /// What can be done where there is no Debian.
    pub(crate) instead: &'static str,
}

impl Debian<'_> {
    /// Installs packages on the system; only root may.
    pub(crate) fn install(&self, what: &str, packages: &[&str]) -> Result<(), Missing> {
        may_install(what, packages)?;
        let install = || {
            let mut command = apt_get();
            command.args(["install", "--yes", "--no-install-recommends", "-o", "DPkg::Lock::Timeout=300"]);
            command.args(packages).env("DEBIAN_FRONTEND", "noninteractive");
            command
        };
        self.with_fresh_lists(install, &packages.join(" "))
    }

    /// Fetches a package and unpacks it privately; the program in it and the package's version.
    pub(crate) fn unpack(&self, package: &str, files: &[&str]) -> Result<(PathBuf, String), Missing> {
        let folder = self.folder(package);
        fs::create_dir_all(&folder).map_err(Missing::io(format!("making {}", folder.display())))?;
        let download = || {
            let mut command = apt_get();
            // apt's own user may not write into a private folder.
            command.args(["-o", "APT::Sandbox::User=root", "download", package]).current_dir(&folder);
            command
        };
        self.with_fresh_lists(download, package)?;
        let archive = self.archive(package)?;
        let version = self.field(package, &archive, "Version")?;
        let tree = folder.join("tree");
        self.run(Command::new("dpkg-deb").arg("-x").arg(&archive).arg(&tree), "dpkg-deb", package)?;
        let program = files.iter().map(|file| tree.join(file)).find(|path| path.is_file());
        let program = program.ok_or_else(|| Missing::Failed {
            doing: format!("looking into {package} {version}"),
            said: format!("it has none of: {}", files.join(", ")),
        })?;
        Ok((program, version))
    }

    /// The packages an unpacked one depends on, first choices only.
    pub(crate) fn dependencies(&self, package: &str) -> Result<Vec<String>, Missing> {
        let said = self.field(package, &self.archive(package)?, "Depends")?;
        Ok(said.split(',').filter_map(|one| Some(one.split_whitespace().next()?.to_string())).collect())
    }

    fn folder(&self, package: &str) -> PathBuf {
        self.work.join("debian").join(package)
    }

    /// The package as it was downloaded; its file name has a version that we do not know before.
    fn archive(&self, package: &str) -> Result<PathBuf, Missing> {
        let folder = self.folder(package);
        let files = fs::read_dir(&folder).map_err(Missing::io(format!("reading {}", folder.display())))?;
        let mut paths = files.filter_map(|file| Some(file.ok()?.path()));
        let archive = paths.find(|path| path.extension().is_some_and(|extension| extension == "deb"));
        archive.ok_or_else(|| Missing::Failed {
            doing: format!("downloading {package}"),
            said: "apt-get left no package behind".to_string(),
        })
    }

    fn field(&self, package: &str, archive: &Path, name: &str) -> Result<String, Missing> {
        let said =
            self.run(Command::new("dpkg-deb").arg("-f").arg(archive).arg(name), "dpkg-deb", package)?;
        Ok(said.trim().to_string())
    }

    /// Tries, and where the package lists are absent or old, fetches them and tries again.
    fn with_fresh_lists(&self, command: impl Fn() -> Command, what: &str) -> Result<(), Missing> {
        let first = self.run(&mut command(), "apt-get", what);
        match first {
            Err(Missing::NoNetwork { .. } | Missing::Failed { .. })
                if rustix::process::geteuid().is_root() =>
            {
                self.run(apt_get().arg("update"), "apt-get", "Debian's package lists")?;
                self.run(&mut command(), "apt-get", what).map(drop)
            }
            first => first.map(drop),
        }
    }

    fn run(&self, command: &mut Command, tool: &'static str, what: &str) -> Result<String, Missing> {
        let log = self.work.join("debian.log");
        match run(command, &log, self.stop, None) {
            Err(error) if error.kind() == ErrorKind::NotFound => {
                Err(Missing::NoDebian { what: what.to_string(), tool, instead: self.instead })
            }
            Err(error) => Err(Missing::io(format!("running {tool} for {what}"))(error)),
            Ok(End::Well(said)) => Ok(said),
            Ok(End::Interrupted | End::TooLate) => Err((self.interrupted)()),
            Ok(End::Badly(said)) => Err(blame(tool, what, &said)),
        }
    }
}

/// The packages that a build needs and that are not there.
pub(crate) fn absent_build_needs() -> Vec<&'static str> {
    let answered = |question: &[&str]| {
        let mut command = Command::new(question[0]);
        command.args(&question[1..]).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        command.status().is_ok_and(|status| status.success())
    };
    let absent = BUILD_NEEDS.iter().filter(|(question, _)| !answered(question));
    absent.flat_map(|(_, packages)| packages.iter().copied()).collect()
}

/// Packages can be installed by root only.
pub(crate) fn may_install(what: &str, packages: &[&str]) -> Result<(), Missing> {
    match packages.is_empty() || rustix::process::geteuid().is_root() {
        true => Ok(()),
        false => Err(Missing::NotRoot { what: what.to_string(), packages: packages.join(" ") }),
    }
}

fn apt_get() -> Command {
    let mut command = Command::new("apt-get");
    // Its words are read below.
    command.arg("-qq").env("LC_ALL", "C");
    command
}

/// What apt's words mean.
fn blame(tool: &str, what: &str, said: &str) -> Missing {
    let has = |words: &[&str]| words.iter().any(|word| said.contains(word));
    if has(&["No space left on device", "enough free space"]) {
        return Missing::DiskFull { doing: format!("unpacking {what}") };
    }
    let signs = [
        "Failed to fetch",
        "Could not resolve",
        "Could not connect",
        "Unable to connect",
        "Temporary failure",
    ];
    if has(&signs) {
        let reason = said.lines().find(|line| signs.iter().any(|sign| line.contains(sign)));
        let said = reason.unwrap_or(said).trim().to_string();
        return Missing::NoNetwork { what: what.to_string(), asked: "apt's sources and proxy", said };
    }
    let said = last_words(said);
    let hint = match has_no_candidate(&said) {
        true => "; fetch the package lists (as root: apt-get update) and repeat",
        false => "",
    };
    Missing::Failed { doing: format!("{tool} for {what}"), said: said + hint }
}

fn has_no_candidate(said: &str) -> bool {
    said.contains("Unable to locate package") || said.contains("no installation candidate")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_of_apt_become_ours() {
        let error = blame("apt-get", "bpftool", "E: Failed to fetch x  Could not resolve 'y'\n").to_string();
        assert_eq!(
            error,
            "bpftool could not be downloaded: E: Failed to fetch x  Could not resolve 'y'; look at the network and at \
             apt's sources and proxy, then repeat: what is finished stays"
        );
        let error = blame("apt-get", "bpftool", "E: Unable to locate package bpftool\n").to_string();
        assert!(error.ends_with("(as root: apt-get update) and repeat"), "{error}");
    }
}
