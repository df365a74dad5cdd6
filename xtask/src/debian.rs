//! What comes from Debian: packages, fetched and unpacked privately, and what a build needs, installed.

mod suites;

pub(crate) use suites::Suites;

use crate::missing::Missing;
use crate::process::{End, last_words, run, run_into};
use std::fs::{self, File};
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::AtomicBool;

/// What linking runc needs: a question that is answered well where it is there, and the packages that have it.
const BUILD_NEEDS: &[(&[&str], &[&str])] = &[
    (&["gcc", "--version"], &["gcc", "libc6-dev"]),
    (&["pkg-config", "--version"], &["pkg-config"]),
    (&["pkg-config", "--exists", "libseccomp"], &["libseccomp-dev"]),
];

/// What a bed calls, and what the pages have people call in it, likewise. The rest is in packages that every Debian has.
const BED_NEEDS: &[(&[&str], &[&str])] =
    &[(&["ip", "-V"], &["iproute2"]), (&["curl", "--version"], &["curl"])];

/// Debian's tools, working in one folder.
pub(crate) struct Debian<'a> {
    pub(crate) work: PathBuf,
    pub(crate) stop: &'a AtomicBool,
    /// The words for Ctrl-C: how far it went, only the caller knows.
    pub(crate) interrupted: &'a dyn Fn() -> Missing,
    /// What can be done where there is no Debian.
    pub(crate) instead: &'static str,
    /// apt's configuration, where its sources and lists are private; else the system's are used.
    pub(crate) private: Option<PathBuf>,
}

impl Debian<'_> {
    /// Installs packages on the system; only root may.
    pub(crate) fn install(&self, what: &str, packages: &[&str]) -> Result<(), Missing> {
        may_install(what, packages)?;
        let install = || {
            let mut command = self.apt_get();
            command.args(["install", "--yes", "--no-install-recommends", "-o", "DPkg::Lock::Timeout=300"]);
            command.args(packages).env("DEBIAN_FRONTEND", "noninteractive");
            command
        };
        self.with_fresh_lists(install, &packages.join(" ")).map(drop)
    }

    /// Fetches a package and unpacks it privately; the program in it and the package's version.
    pub(crate) fn unpack(&self, package: &str, files: &[&str]) -> Result<(PathBuf, String), Missing> {
        let folder = self.folder(package);
        fs::create_dir_all(&folder).map_err(Missing::io(format!("making {}", folder.display())))?;
        self.fetch(&[package.to_string()], &folder, package)?;
        let archive = self.archive(package)?;
        let version = self.field(package, &archive, "Version")?;
        let tree = folder.join("tree");
        self.extract(&archive, &tree, package)?;
        let program = files.iter().map(|file| tree.join(file)).find(|path| path.is_file());
        let program = program.ok_or_else(|| Missing::Failed {
            doing: format!("looking into {package} {version}"),
            said: format!("it has none of: {}", files.join(", ")),
        })?;
        Ok((program, version))
    }

    fn fetch(&self, packages: &[String], folder: &Path, what: &str) -> Result<(), Missing> {
        let download = || {
            let mut command = self.apt_get();
            // apt's own user may not write into a private folder.
            command.args(["-o", "APT::Sandbox::User=root", "download"]).args(packages).current_dir(folder);
            command
        };
        self.with_fresh_lists(download, what).map(drop)
    }

    /// Which packages, in which versions, these and all they need are; what is installed here has no say.
    pub(crate) fn resolve(&self, wanted: &[&str]) -> Result<Vec<(String, String)>, Missing> {
        let ask = || {
            let mut command = self.apt_get();
            command.args(["--simulate", "--no-install-recommends", "-o", "Dir::State::status=/dev/null"]);
            command.arg("install").args(wanted);
            command
        };
        let said = self.with_fresh_lists(ask, &wanted.join(" "))?;
        Ok(said.lines().filter_map(to_install).collect())
    }

    /// Fetches packages in these versions into a folder.
    pub(crate) fn download(&self, packages: &[(String, String)], folder: &Path) -> Result<(), Missing> {
        let packages: Vec<_> = packages.iter().map(|(name, version)| format!("{name}={version}")).collect();
        self.fetch(&packages, folder, "Debian packages")
    }

    /// The versions that the sources have of a package, the newest first.
    pub(crate) fn versions(&self, package: &str) -> Result<Vec<String>, Missing> {
        let said = self.run(self.apt("apt-cache").args(["madison", package]), "apt-cache", package)?;
        Ok(said.lines().filter_map(offered).collect())
    }

    /// Unpacks a package that was fetched.
    pub(crate) fn extract(&self, archive: &Path, tree: &Path, what: &str) -> Result<(), Missing> {
        self.run(Command::new("dpkg-deb").arg("-x").arg(archive).arg(tree), "dpkg-deb", what).map(drop)
    }

    /// Where the machine's own packages come from: a line each, `address release`.
    pub(crate) fn sources(&self) -> Result<String, Missing> {
        let mut command = self.apt_get();
        command.args(["indextargets", "--format", "$(REPO_URI) $(RELEASE)", "Identifier: Packages"]);
        self.run(&mut command, "apt-get", "apt's sources")
    }

    /// The files of a package, as a tar file: with their owners, which only root could unpack.
    pub(crate) fn files(&self, archive: &Path, tar: &Path, what: &str) -> Result<(), Missing> {
        let out = File::create(tar).map_err(Missing::io(format!("writing {}", tar.display())))?;
        let mut command = Command::new("dpkg-deb");
        command.arg("--fsys-tarfile").arg(archive);
        let end = run_into(&mut command, out, &self.log(), self.stop);
        self.came(end, "dpkg-deb", what).map(drop)
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
    fn with_fresh_lists(&self, command: impl Fn() -> Command, what: &str) -> Result<String, Missing> {
        let first = self.run(&mut command(), "apt-get", what);
        match first {
            Err(Missing::NoNetwork { .. } | Missing::Failed { .. })
                if self.private.is_some() || rustix::process::geteuid().is_root() =>
            {
                self.update()?;
                self.run(&mut command(), "apt-get", what)
            }
            first => first,
        }
    }

    /// Fetches the package lists.
    pub(crate) fn update(&self) -> Result<(), Missing> {
        self.run(self.apt_get().arg("update"), "apt-get", "Debian's package lists").map(drop)
    }

    fn apt_get(&self) -> Command {
        self.apt("apt-get")
    }

    /// One of apt's programs.
    fn apt(&self, program: &str) -> Command {
        let mut command = Command::new(program);
        // Its words are read below.
        command.arg("-qq").env("LC_ALL", "C");
        if let Some(configuration) = &self.private {
            command.arg("-c").arg(configuration);
        }
        command
    }

    fn run(&self, command: &mut Command, tool: &'static str, what: &str) -> Result<String, Missing> {
        let end = run(command, &self.log(), self.stop, None);
        self.came(end, tool, what)
    }

    fn log(&self) -> PathBuf {
        self.work.join("debian.log")
    }

    fn came(&self, end: io::Result<End>, tool: &'static str, what: &str) -> Result<String, Missing> {
        match end {
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

/// A line of apt's simulation: `Inst name (version ...`.
fn to_install(line: &str) -> Option<(String, String)> {
    let mut words = line.strip_prefix("Inst ")?.split_whitespace();
    let name = words.next()?.to_string();
    // What would be replaced stands in brackets between.
    let version = words.find_map(|word| word.strip_prefix('('))?;
    Some((name, version.trim_end_matches(')').to_string()))
}

/// A line of `apt-cache madison`: `name | version | source`.
fn offered(line: &str) -> Option<String> {
    line.split('|').nth(1).map(|version| version.trim().to_string())
}

/// The packages that a build needs and that are not there.
pub(crate) fn absent_build_needs() -> Vec<&'static str> {
    absent(BUILD_NEEDS)
}

/// The packages that a bed needs and that are not there.
pub(crate) fn absent_bed_needs() -> Vec<&'static str> {
    absent(BED_NEEDS)
}

fn absent(needs: &'static [(&[&str], &[&str])]) -> Vec<&'static str> {
    let answered = |question: &[&str]| {
        let mut command = Command::new(question[0]);
        command.args(&question[1..]).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        command.status().is_ok_and(|status| status.success())
    };
    let absent = needs.iter().filter(|(question, _)| !answered(question));
    absent.flat_map(|(_, packages)| packages.iter().copied()).collect()
}

/// Packages can be installed by root only.
pub(crate) fn may_install(what: &str, packages: &[&str]) -> Result<(), Missing> {
    match packages.is_empty() || rustix::process::geteuid().is_root() {
        true => Ok(()),
        false => Err(Missing::NotRoot { what: what.to_string(), packages: packages.join(" ") }),
    }
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
    fn what_apt_would_install() {
        let read = |line| to_install(line).map(|(name, version)| format!("{name} {version}"));
        let line = "Inst libattr1 (1:2.5.1-4 Debian:12.15/oldstable [amd64]) []";
        assert_eq!(read(line).unwrap(), "libattr1 1:2.5.1-4");
        assert_eq!(read("Inst login [1:4.13] (1:4.14 Debian:12 [amd64])").unwrap(), "login 1:4.14");
        assert_eq!(read("Conf login (1:4.14 Debian:12 [amd64])"), None);
        assert_eq!(read("Reading package lists..."), None);
    }

    #[test]
    fn what_apt_offers() {
        let line =
            "nvidia-smi | 535.261.03-1 | http://mirror.example/debian bookworm/non-free amd64 Packages";
        assert_eq!(offered(line).unwrap(), "535.261.03-1");
        assert_eq!(offered("N: nothing"), None);
    }

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
