//! Debian packages for images: chosen once, then kept. What is kept decides what is built, so the same packages can be
//! used again, without the network and when Debian has newer ones.

use crate::debian::{Debian, Suites};
use crate::missing::Missing;
use crate::{digest, machine};
use serde::{Deserialize, Serialize};
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

/// Packages that are asked for together.
#[derive(Debug)]
pub(super) struct Packages {
    /// By name; what they need comes with them.
    pub(super) wanted: &'static [&'static str],
    /// What they need only to be installed, which never happens to an image.
    pub(super) without: &'static [&'static str],
    /// Where they come from, unless from the machine's own sources. What they need does not come with them then: it is
    /// another release's, or another architecture's.
    pub(super) elsewhere: Option<Suites>,
}

/// One package as it was fetched.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Package {
    pub(super) name: String,
    pub(super) version: String,
    pub(super) sha256: String,
    file: String,
}

const RECORD: &str = "packages.json";

impl Packages {
    /// Where they are kept; another release of the distribution has a place of its own.
    fn folder(&self, root: &Path) -> PathBuf {
        let mut parts = vec![machine::release(), machine::architecture().to_string()];
        parts.extend(self.wanted.iter().map(|name| (*name).to_string()));
        parts.extend(self.without.iter().map(|name| format!("-{name}")));
        let suites = self.elsewhere.iter().flat_map(|suites| suites.suites);
        parts.extend(suites.map(|(suite, components)| format!("{suite} {components}")));
        root.join("packages").join(digest::key(parts))
    }

    /// What was fetched, if it was.
    pub(super) fn kept(&self, root: &Path) -> Option<Vec<Package>> {
        let text = fs::read(self.folder(root).join(RECORD)).ok()?;
        serde_json::from_slice(&text).ok()
    }

    /// The same, each file held against its checksum.
    pub(super) fn kept_whole(&self, root: &Path) -> Option<Vec<Package>> {
        let folder = self.folder(root);
        let whole = |package: &Package| {
            digest::of_file(&folder.join(&package.file)).is_ok_and(|(sha256, _)| sha256 == package.sha256)
        };
        self.kept(root).filter(|packages| packages.iter().all(whole))
    }

    /// Asks Debian for them, with all they need, and keeps them in the place of what was kept.
    pub(super) fn fetch(&self, root: &Path, debian: &Debian<'_>) -> Result<Vec<Package>, Missing> {
        let half = debian.work.join("packages");
        let folder = self.folder(root);
        let failed = || Missing::io(format!("keeping packages in {}", folder.display()));
        // An earlier set of this run may have left something.
        let _ = fs::remove_dir_all(&half);
        fs::create_dir_all(&half).map_err(failed())?;
        let mut chosen = self.choose(debian)?;
        match debian.download(&chosen, &half) {
            // The lists were old, and have been fetched since.
            Err(Missing::Failed { said, .. }) if said.contains("was not found") => {
                chosen = self.choose(debian)?;
                debian.download(&chosen, &half)?;
            }
            done => done?,
        }
        let files = fs::read_dir(&half).map_err(failed())?;
        let mut files: Vec<_> = files.filter_map(|file| file.ok()?.file_name().into_string().ok()).collect();
        files.sort();
        let mut packages = Vec::new();
        for (name, version) in chosen {
            let plain = name.split(':').next();
            let file = files.iter().find(|file| file.split('_').next() == plain);
            let file = file.ok_or_else(|| Missing::Failed {
                doing: format!("downloading {name}"),
                said: "apt-get left no package behind".to_string(),
            })?;
            let (sha256, _) = digest::of_file(&half.join(file)).map_err(failed())?;
            packages.push(Package { name, version, sha256, file: file.clone() });
        }
        let record = serde_json::to_string_pretty(&packages).map_err(io::Error::other).map_err(failed())?;
        fs::write(half.join(RECORD), record + "\n").map_err(failed())?;
        if folder.exists() {
            fs::remove_dir_all(&folder).map_err(failed())?;
        }
        fs::create_dir_all(root.join("packages")).map_err(failed())?;
        fs::rename(&half, &folder).map_err(failed())?;
        Ok(packages)
    }

    /// Names and versions, in the order of the names.
    fn choose(&self, debian: &Debian<'_>) -> Result<Vec<(String, String)>, Missing> {
        if self.elsewhere.is_some() {
            let newest = |name: &&str| {
                let version = debian.versions(name)?.into_iter().next();
                let version = version.ok_or_else(|| Missing::Failed {
                    doing: format!("looking for {name} in Debian"),
                    said: "it has none".to_string(),
                })?;
                Ok((name.to_string(), version))
            };
            return self.wanted.iter().map(newest).collect();
        }
        let mut chosen = debian.resolve(self.wanted)?;
        chosen.retain(|(name, _)| !self.without.contains(&name.as_str()));
        chosen.sort();
        Ok(chosen)
    }

    /// Where a kept package is.
    pub(super) fn path(&self, root: &Path, package: &Package) -> PathBuf {
        self.folder(root).join(&package.file)
    }
}
