//! Debian's archive, with the suites that contain the clients.

use super::MissingPrerequisite;
use super::catalog::{EXCLUDED_PACKAGES, PackagedClient, SUITES};
use crate::debian::DebianTools;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;

/// What to do on a machine without Debian's tools.
pub(crate) const NO_DEBIAN_HINT: &str = "fetch on Debian or a derivative";

/// The archive, with its package lists fetched.
pub(super) struct DebianArchive<'a> {
    debian: DebianTools<'a>,
}

impl<'a> DebianArchive<'a> {
    /// Fetches the package lists.
    pub(super) fn open(
        work: &Path,
        stop: &'a AtomicBool,
        interrupted: &'a dyn Fn() -> MissingPrerequisite,
    ) -> Result<Self, MissingPrerequisite> {
        let (work, alternative) = (work.join("archive"), NO_DEBIAN_HINT);
        let system = DebianTools { work, stop, interrupted, alternative, private_config: None };
        Ok(Self { debian: system.with_suites(SUITES)? })
    }

    /// Fetches a program into a directory, with its libraries if requested.
    pub(super) fn fetch(
        &self,
        packaged: &PackagedClient,
        unfinished: &Path,
    ) -> Result<FetchedClient, MissingPrerequisite> {
        let version = self.choose_version(packaged)?;
        let mut packages = vec![(packaged.package.to_string(), version.clone())];
        if packaged.libraries {
            let wanted = format!("{}={version}", packaged.package);
            let needed = self.debian.resolve(&[&wanted])?.into_iter();
            packages.extend(
                needed.filter(|(name, _)| {
                    name != packaged.package && !EXCLUDED_PACKAGES.contains(&name.as_str())
                }),
            );
        }
        let (archives, tree) = (unfinished.join("archives"), unfinished.join("tree"));
        let failed = || MissingPrerequisite::io(format!("unpacking {}", packaged.package));
        fs::create_dir_all(&archives).map_err(failed())?;
        self.debian.download(&packages, &archives)?;
        for archive in fs::read_dir(&archives).map_err(failed())? {
            self.debian.extract(&archive.map_err(failed())?.path(), &tree, packaged.package)?;
        }
        Ok(FetchedClient { version, program: tree.join(packaged.file), tree })
    }

    /// Returns the pinned version, or the newest of its branch.
    fn choose_version(&self, packaged: &PackagedClient) -> Result<String, MissingPrerequisite> {
        let offered = self.debian.versions(packaged.package)?;
        choose_version(packaged, &offered).map(str::to_string).ok_or_else(|| MissingPrerequisite::Failed {
            doing: format!("looking for {} {} in Debian", packaged.package, packaged.version),
            message: if offered.is_empty() {
                "no version is available".to_string()
            } else {
                format!("only {} are available, none of {}x", offered.join(", "), packaged.branch)
            },
        })
    }
}

/// A package that was fetched and unpacked.
pub(super) struct FetchedClient {
    pub(super) version: String,
    pub(super) program: PathBuf,
    /// Root directory of the unpacked files.
    pub(super) tree: PathBuf,
}

fn choose_version<'a>(packaged: &PackagedClient, offered: &'a [String]) -> Option<&'a str> {
    let pinned = offered.iter().find(|version| *version == packaged.version);
    let newest = || offered.iter().find(|version| version.starts_with(packaged.branch));
    pinned.or_else(newest).map(String::as_str)
}

#[cfg(test)]
mod tests {
    use super::super::catalog::ClientBundle;
    use super::*;

    #[test]
    fn removed_version_is_replaced_by_the_newest_of_its_branch() {
        let packaged = ClientBundle::NvidiaSmi(super::super::DriverBranch::R535).packaged().unwrap();
        let offered = |versions: &[&str]| versions.iter().map(|v| (*v).to_string()).collect::<Vec<_>>();
        let both = offered(&["550.1-1", "535.309.01-1", "535.261.03-1"]);
        assert_eq!(choose_version(packaged, &both), Some("535.261.03-1"));
        assert_eq!(choose_version(packaged, &both[..2]), Some("535.309.01-1"));
        assert_eq!(choose_version(packaged, &both[..1]), None);
    }
}
