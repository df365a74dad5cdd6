//! Debian's archive with the suites that have the clients.

use super::Missing;
use super::catalog::{NOT_UNPACKED, Packaged, SUITES};
use crate::debian::Debian;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;

/// What to do where there is no Debian.
pub(crate) const WITHOUT_DEBIAN: &str = "fetch on Debian or on a system made from it";

/// The archive, with its lists fetched.
pub(super) struct Archive<'a> {
    debian: Debian<'a>,
}

impl<'a> Archive<'a> {
    /// Fetches the lists.
    pub(super) fn open(
        work: &Path,
        stop: &'a AtomicBool,
        interrupted: &'a dyn Fn() -> Missing,
    ) -> Result<Self, Missing> {
        let (work, instead) = (work.join("archive"), WITHOUT_DEBIAN);
        let system = Debian { work, stop, interrupted, instead, private: None };
        Ok(Self { debian: system.with_suites(SUITES)? })
    }

    /// Fetches a program into a folder, with its libraries where they are wanted; its version.
    pub(super) fn fetch(&self, packaged: &Packaged, half: &Path) -> Result<Fetched, Missing> {
        let version = self.choose(packaged)?;
        let mut packages = vec![(packaged.package.to_string(), version.clone())];
        if packaged.libraries {
            let wanted = format!("{}={version}", packaged.package);
            let needed = self.debian.resolve(&[&wanted])?.into_iter();
            packages.extend(
                needed.filter(|(name, _)| name != packaged.package && !NOT_UNPACKED.contains(&name.as_str())),
            );
        }
        let (archives, tree) = (half.join("archives"), half.join("tree"));
        let failed = || Missing::io(format!("unpacking {}", packaged.package));
        fs::create_dir_all(&archives).map_err(failed())?;
        self.debian.download(&packages, &archives)?;
        for archive in fs::read_dir(&archives).map_err(failed())? {
            self.debian.extract(&archive.map_err(failed())?.path(), &tree, packaged.package)?;
        }
        Ok(Fetched { version, program: tree.join(packaged.file), tree })
    }

    /// The pinned version, or the newest of its branch.
    fn choose(&self, packaged: &Packaged) -> Result<String, Missing> {
        let offered = self.debian.versions(packaged.package)?;
        choose(packaged, &offered).map(str::to_string).ok_or_else(|| Missing::Failed {
            doing: format!("looking for {} {} in Debian", packaged.package, packaged.version),
            said: match offered.is_empty() {
                true => "it has none".to_string(),
                false => format!("it has {}, and none of {}x", offered.join(", "), packaged.branch),
            },
        })
    }
}

/// What was unpacked.
pub(super) struct Fetched {
    pub(super) version: String,
    pub(super) program: PathBuf,
    /// Everything, as it would stand from the root on.
    pub(super) tree: PathBuf,
}

fn choose<'a>(packaged: &Packaged, offered: &'a [String]) -> Option<&'a str> {
    let pinned = offered.iter().find(|version| *version == packaged.version);
    let newest = || offered.iter().find(|version| version.starts_with(packaged.branch));
    pinned.or_else(newest).map(String::as_str)
}

#[cfg(test)]
mod tests {
    use super::super::catalog::Part;
    use super::*;

    #[test]
    fn a_version_that_is_gone_has_a_successor() {
        let packaged = Part::NvidiaSmi(super::super::Branch::R535).packaged().unwrap();
        let offered = |versions: &[&str]| versions.iter().map(|v| (*v).to_string()).collect::<Vec<_>>();
        let both = offered(&["550.1-1", "535.309.01-1", "535.261.03-1"]);
        assert_eq!(choose(packaged, &both), Some("535.261.03-1"));
        assert_eq!(choose(packaged, &both[..2]), Some("535.309.01-1"));
        assert_eq!(choose(packaged, &both[..1]), None);
    }
}
