//! Debian packages for images: resolved once and kept. The kept packages determine what is built, so an image can be
//! built again without the network, and when Debian has newer packages.

use crate::debian::{DebianSuites, DebianTools};
use crate::prerequisites::MissingPrerequisite;
use crate::{digest, host_info};
use serde::{Deserialize, Serialize};
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

/// Packages that are resolved together.
#[derive(Debug)]
pub(super) struct PackageSet {
    /// Names of the packages; their dependencies are added.
    pub(super) wanted: &'static [&'static str],
    /// Dependencies that are needed only for installation, which never happens in an image.
    pub(super) without: &'static [&'static str],
    /// Other suites to fetch them from. Their dependencies are not added then: they are of another release or
    /// architecture.
    pub(super) elsewhere: Option<DebianSuites>,
}

/// One package as it was fetched.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct FetchedPackage {
    pub(super) name: String,
    pub(super) version: String,
    pub(super) sha256: String,
    file: String,
}

const RECORD_FILE: &str = "packages.json";

impl PackageSet {
    /// Returns the directory of the packages; each release of the distribution has its own.
    fn folder(&self, root: &Path) -> PathBuf {
        let mut parts = vec![host_info::release(), host_info::architecture().to_string()];
        parts.extend(self.wanted.iter().map(|name| (*name).to_string()));
        parts.extend(self.without.iter().map(|name| format!("-{name}")));
        let suites = self.elsewhere.iter().flat_map(|suites| suites.suites);
        parts.extend(suites.map(|(suite, components)| format!("{suite} {components}")));
        root.join("packages").join(digest::key(parts))
    }

    /// Returns the fetched packages, if they are recorded.
    pub(super) fn recorded(&self, root: &Path) -> Option<Vec<FetchedPackage>> {
        let text = fs::read(self.folder(root).join(RECORD_FILE)).ok()?;
        serde_json::from_slice(&text).ok()
    }

    /// Returns the fetched packages if every file matches its checksum.
    pub(super) fn verified(&self, root: &Path) -> Option<Vec<FetchedPackage>> {
        let folder = self.folder(root);
        let whole = |package: &FetchedPackage| {
            digest::of_file(&folder.join(&package.file)).is_ok_and(|(sha256, _)| sha256 == package.sha256)
        };
        self.recorded(root).filter(|packages| packages.iter().all(whole))
    }

    /// Resolves and fetches the packages with their dependencies, and replaces the kept ones.
    pub(super) fn fetch(
        &self,
        root: &Path,
        debian: &DebianTools<'_>,
    ) -> Result<Vec<FetchedPackage>, MissingPrerequisite> {
        let unfinished = debian.work.join("packages");
        let folder = self.folder(root);
        let failed = || MissingPrerequisite::io(format!("storing packages in {}", folder.display()));
        // An earlier set of this run may have left files.
        let _ = fs::remove_dir_all(&unfinished);
        fs::create_dir_all(&unfinished).map_err(failed())?;
        let mut chosen = self.choose(debian)?;
        match debian.download(&chosen, &unfinished) {
            // The lists were old, and have been updated since.
            Err(MissingPrerequisite::Failed { message, .. }) if message.contains("was not found") => {
                chosen = self.choose(debian)?;
                debian.download(&chosen, &unfinished)?;
            }
            done => done?,
        }
        let files = fs::read_dir(&unfinished).map_err(failed())?;
        let mut files: Vec<_> = files.filter_map(|file| file.ok()?.file_name().into_string().ok()).collect();
        files.sort();
        let mut packages = Vec::new();
        for (name, version) in chosen {
            let plain = name.split(':').next();
            let file = files.iter().find(|file| file.split('_').next() == plain);
            let file = file.ok_or_else(|| MissingPrerequisite::Failed {
                doing: format!("downloading {name}"),
                message: "apt-get downloaded no package".to_string(),
            })?;
            let (sha256, _) = digest::of_file(&unfinished.join(file)).map_err(failed())?;
            packages.push(FetchedPackage { name, version, sha256, file: file.clone() });
        }
        let record = serde_json::to_string_pretty(&packages).map_err(io::Error::other).map_err(failed())?;
        fs::write(unfinished.join(RECORD_FILE), record + "\n").map_err(failed())?;
        if folder.exists() {
            fs::remove_dir_all(&folder).map_err(failed())?;
        }
        fs::create_dir_all(root.join("packages")).map_err(failed())?;
        fs::rename(&unfinished, &folder).map_err(failed())?;
        Ok(packages)
    }

    /// Returns names and versions, sorted by name.
    fn choose(&self, debian: &DebianTools<'_>) -> Result<Vec<(String, String)>, MissingPrerequisite> {
        if self.elsewhere.is_some() {
            let newest = |name: &&str| {
                let version = debian.versions(name)?.into_iter().next();
                let version = version.ok_or_else(|| MissingPrerequisite::Failed {
                    doing: format!("searching Debian for {name}"),
                    message: "no version is available".to_string(),
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

    /// Returns the path of a kept package.
    pub(super) fn path(&self, root: &Path, package: &FetchedPackage) -> PathBuf {
        self.folder(root).join(&package.file)
    }
}
