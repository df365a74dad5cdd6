//! The files of one layer, held in memory and sorted by path, so that equal files make equal layers.

use crate::prerequisites::MissingPrerequisite;
use std::collections::BTreeMap;
use std::fs;
use std::io::{self, Read};
use std::path::Path;
use std::sync::Arc;
use tar::{Builder, EntryType, Header};

/// Root directories that are links into `/usr`. Packages of older Debian releases still name them directly.
const MERGED_DIRS: [&str; 6] = ["bin", "lib", "lib32", "lib64", "libx32", "sbin"];

/// Parts of packages that no container of the bed reads. License texts are kept.
const EXCLUDED_PREFIXES: &[&str] = &[
    "usr/share/bash-completion/",
    "usr/share/bug/",
    "usr/share/doc/",
    "usr/share/doc-base/",
    "usr/share/info/",
    "usr/share/lintian/",
    "usr/share/locale/",
    "usr/share/man/",
];

/// The files of one layer of an image.
///
/// `/bin`, `/sbin` and `/lib*` are links into `/usr`: their files go to `/usr`, and the link is created. Owner and
/// group are root by default. Directories above a file are created.
#[derive(Clone, Debug, Default)]
pub struct ImageLayer {
    entries: BTreeMap<String, LayerEntry>,
}

#[derive(Clone, Debug)]
struct LayerEntry {
    kind: EntryKind,
    mode: u32,
    owner: u64,
    group: u64,
}

#[derive(Clone, Debug)]
enum EntryKind {
    Folder,
    File(Arc<[u8]>),
    Link(String),
}

impl EntryKind {
    fn root(self, mode: u32) -> LayerEntry {
        LayerEntry { kind: self, mode, owner: 0, group: 0 }
    }
}

impl ImageLayer {
    /// Creates an empty layer.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a directory to the layer.
    pub fn folder(&mut self, path: &str, mode: u32) -> Result<&mut Self, MissingPrerequisite> {
        let path = image_path(path)?;
        match self.entries.get_mut(&path) {
            Some(entry_node) if matches!(entry_node.kind, EntryKind::Folder) => entry_node.mode = mode,
            _ => self.insert(path, EntryKind::Folder.root(mode))?,
        }
        Ok(self)
    }

    /// Adds a file with these contents.
    pub fn text(
        &mut self,
        path: &str,
        mode: u32,
        contents: impl AsRef<[u8]>,
    ) -> Result<&mut Self, MissingPrerequisite> {
        self.insert(image_path(path)?, EntryKind::File(contents.as_ref().into()).root(mode))?;
        Ok(self)
    }

    /// Adds a copy of a file of this machine.
    pub fn file(&mut self, path: &str, mode: u32, from: &Path) -> Result<&mut Self, MissingPrerequisite> {
        let refused = |why: &str| refused(&from.display().to_string(), why);
        match fs::metadata(from) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                return Err(refused("it does not exist"));
            }
            Ok(found) if !found.is_file() => return Err(refused("it is not a file")),
            _ => {}
        }
        let contents =
            fs::read(from).map_err(MissingPrerequisite::io(format!("reading {}", from.display())))?;
        self.text(path, mode, contents)
    }

    /// Adds a symbolic link; the target is used unchanged.
    pub fn link(&mut self, path: &str, target: &str) -> Result<&mut Self, MissingPrerequisite> {
        self.insert(image_path(path)?, EntryKind::Link(target.to_string()).root(0o777))?;
        Ok(self)
    }

    /// Sets owner and group of a path, by number.
    pub fn owner(&mut self, path: &str, owner: u64, group: u64) -> Result<&mut Self, MissingPrerequisite> {
        let entry_node = self.entries.get_mut(&image_path(path)?);
        let entry_node = entry_node.ok_or_else(|| refused(path, "it does not exist in the layer"))?;
        (entry_node.owner, entry_node.group) = (owner, group);
        Ok(self)
    }

    /// Adds the files of a Debian package from the output of `dpkg-deb --fsys-tarfile`, with the package's owners and
    /// modes.
    pub fn package(&mut self, tar: impl Read) -> Result<&mut Self, MissingPrerequisite> {
        let broken = || MissingPrerequisite::io("reading the files of a package");
        for entry in tar::Archive::new(tar).entries().map_err(broken())? {
            let mut entry = entry.map_err(broken())?;
            let message = utf8_text(&entry.path_bytes())?;
            let bare = message.trim_start_matches("./").trim_end_matches('/').to_string();
            let header = entry.header();
            let (kind, mode) = (header.entry_type(), header.mode().map_err(broken())? & 0o7777);
            let (owner, group) = (header.uid().map_err(broken())?, header.gid().map_err(broken())?);
            let target = entry.link_name_bytes().map(|target| utf8_text(&target)).transpose()?;
            // Newer releases contain the links that are created here anyway.
            let merged_link = kind.is_symlink() && MERGED_DIRS.contains(&bare.as_str());
            if bare.is_empty() || bare == "." || merged_link || is_excluded(&bare) {
                continue;
            }
            let path = image_path(&bare)?;
            let kind = match (kind, target) {
                (EntryType::Directory, _) => {
                    // The first package with a directory sets its mode.
                    if self
                        .entries
                        .get(&path)
                        .is_some_and(|entry_node| matches!(entry_node.kind, EntryKind::Folder))
                    {
                        continue;
                    }
                    EntryKind::Folder
                }
                (EntryType::Regular, _) => {
                    let mut contents = Vec::new();
                    entry.read_to_end(&mut contents).map_err(broken())?;
                    EntryKind::File(contents.into())
                }
                (EntryType::Symlink, Some(target)) => EntryKind::Link(relocated_target(&bare, &path, target)),
                (EntryType::Link, Some(target)) => {
                    match self.entries.get(&image_path(&target)?).map(|n| &n.kind) {
                        Some(EntryKind::File(contents)) => EntryKind::File(Arc::clone(contents)),
                        _ => return Err(refused(&message, "it is a hard link to a missing file")),
                    }
                }
                _ => return Err(refused(&message, "it is a device, pipe or socket")),
            };
            self.insert(path, LayerEntry { kind, mode, owner, group })?;
        }
        Ok(self)
    }

    /// Returns the contents of a file of the layer.
    pub fn contents(&self, path: &str) -> Option<&[u8]> {
        match &self.entries.get(&image_path(path).ok()?)?.kind {
            EntryKind::File(contents) => Some(contents),
            _ => None,
        }
    }

    fn insert(&mut self, path: String, entry_node: LayerEntry) -> Result<(), MissingPrerequisite> {
        for (end, _) in path.match_indices('/') {
            let above = &path[..end];
            match self.entries.get(above) {
                Some(entry_node) if matches!(entry_node.kind, EntryKind::Folder) => {}
                Some(_) => return Err(refused(&path, &format!("{above} is not a directory in the image"))),
                None => {
                    self.entries.insert(above.to_string(), EntryKind::Folder.root(0o755));
                    self.merged_link(above);
                }
            }
        }
        if self.entries.contains_key(&path) {
            return Err(refused(&path, "the path already exists"));
        }
        self.merged_link(&path);
        self.entries.insert(path, entry_node);
        Ok(())
    }

    /// Adds the link in the root for a path below `/usr` with a merged name.
    fn merged_link(&mut self, path: &str) {
        if let Some(name) = path.strip_prefix("usr/").filter(|name| MERGED_DIRS.contains(name)) {
            self.entries.insert(name.to_string(), EntryKind::Link(path.to_string()).root(0o777));
        }
    }

    /// Returns the layer as a tar file: sorted by path, without times and user names.
    pub(super) fn tar(&self) -> io::Result<Vec<u8>> {
        let mut tar = Builder::new(Vec::new());
        for (path, entry_node) in &self.entries {
            let mut header = Header::new_gnu();
            header.set_mode(entry_node.mode);
            header.set_uid(entry_node.owner);
            header.set_gid(entry_node.group);
            header.set_mtime(0);
            header.set_size(0);
            match &entry_node.kind {
                EntryKind::Folder => {
                    header.set_entry_type(EntryType::Directory);
                    tar.append_data(&mut header, format!("{path}/"), io::empty())?;
                }
                EntryKind::File(contents) => {
                    header.set_entry_type(EntryType::Regular);
                    header.set_size(contents.len() as u64);
                    tar.append_data(&mut header, path, &**contents)?;
                }
                EntryKind::Link(target) => {
                    header.set_entry_type(EntryType::Symlink);
                    tar.append_link(&mut header, path, target)?;
                }
            }
        }
        tar.into_inner()
    }

    /// Writes the files and links that `wanted` selects into a directory of this machine, without modes and owners.
    pub(super) fn unpack(&self, folder: &Path, wanted: impl Fn(&str) -> bool) -> io::Result<()> {
        for (path, entry_node) in self.entries.iter().filter(|(path, _)| wanted(path)) {
            let to = folder.join(path);
            // No directory above is a link: `insert` checks this.
            fs::create_dir_all(to.parent().unwrap_or(folder))?;
            match &entry_node.kind {
                EntryKind::Folder => fs::create_dir_all(&to)?,
                EntryKind::File(contents) => fs::write(&to, contents)?,
                EntryKind::Link(target) => std::os::unix::fs::symlink(target, &to)?,
            }
        }
        Ok(())
    }
}

fn refused(path: &str, why: &str) -> MissingPrerequisite {
    MissingPrerequisite::Refused { path: path.to_string(), why: why.to_string() }
}

fn utf8_text(bytes: &[u8]) -> Result<String, MissingPrerequisite> {
    let text = std::str::from_utf8(bytes).map(str::to_string);
    text.map_err(|_| refused(&String::from_utf8_lossy(bytes), "its name is not UTF-8"))
}

/// Returns the path in the image: relative to the root, and inside `/usr` for merged directories.
fn image_path(path: &str) -> Result<String, MissingPrerequisite> {
    let mut parts: Vec<_> = path.split('/').filter(|part| !matches!(*part, "" | ".")).collect();
    if parts.contains(&"..") {
        return Err(refused(path, "a path with `..` could leave the image"));
    }
    if path.contains('\0') {
        return Err(refused(path, "the path contains a zero byte"));
    }
    let first = *parts.first().ok_or_else(|| refused(path, "it names the root itself"))?;
    if MERGED_DIRS.contains(&first) {
        parts.insert(0, "usr");
    }
    Ok(parts.join("/"))
}

fn is_excluded(path: &str) -> bool {
    // Conversions between old character sets are half the size of glibc.
    if path.contains("/gconv/") {
        return true;
    }
    let license = path.starts_with("usr/share/doc/") && path.ends_with("/copyright");
    !license && EXCLUDED_PREFIXES.iter().any(|prefix| path.starts_with(prefix))
}

/// Returns the target of a link that moved from `from` to `to`: a relative one may have to be rewritten.
fn relocated_target(from: &str, to: &str, target: String) -> String {
    if target.starts_with('/') {
        return target;
    }
    let (meant, leads) = (resolve_relative(from, &target), resolve_relative(to, &target));
    match image_path(&meant) {
        Ok(meant) if leads != meant && image_path(&leads).is_ok_and(|leads| leads != meant) => {
            format!("/{meant}")
        }
        _ => target,
    }
}

/// Resolves a relative target textually.
fn resolve_relative(link: &str, target: &str) -> String {
    let mut parts: Vec<_> = link.split('/').collect();
    parts.pop();
    for part in target.split('/') {
        match part {
            "" | "." => {}
            ".." => drop(parts.pop()),
            part => parts.push(part),
        }
    }
    parts.join("/")
}

#[cfg(test)]
mod tests {
    use super::*;

    type TestEntry<'a> = (&'a str, EntryType, &'a str);

    /// Returns a package with these entries; the third field is a link's target or a file's contents.
    fn package(lines: &[TestEntry<'_>]) -> Vec<u8> {
        let mut tar = Builder::new(Vec::new());
        for (path, kind, word) in lines {
            let mut header = Header::new_gnu();
            header.set_entry_type(*kind);
            header.set_mode(0o755);
            header.set_uid(7);
            header.set_gid(8);
            header.set_mtime(1_700_000_000);
            header.set_size(0);
            match kind {
                EntryType::Regular => {
                    header.set_size(word.len() as u64);
                    tar.append_data(&mut header, path, word.as_bytes()).unwrap();
                }
                EntryType::Symlink | EntryType::Link => tar.append_link(&mut header, path, word).unwrap(),
                _ => tar.append_data(&mut header, path, io::empty()).unwrap(),
            }
        }
        tar.into_inner().unwrap()
    }

    fn listing(layer: &ImageLayer) -> Vec<String> {
        let tar = layer.tar().unwrap();
        let mut archive = tar::Archive::new(&tar[..]);
        let entries = archive.entries().unwrap().map(Result::unwrap);
        let lines = entries.map(|entry| {
            let header = entry.header();
            assert_eq!(header.mtime().unwrap(), 0);
            let target = entry.link_name().unwrap().map(|target| format!(" -> {}", target.display()));
            format!("{}{}", entry.path().unwrap().display(), target.unwrap_or_default())
        });
        lines.collect()
    }

    #[test]
    fn merged_and_unmerged_packages_unpack_to_the_same_paths() {
        let old = [
            ("./bin/", EntryType::Directory, ""),
            ("./bin/dash", EntryType::Regular, "dash"),
            ("./bin/sh", EntryType::Symlink, "dash"),
            ("./lib64/ld.so", EntryType::Symlink, "/lib/ld-2.so"),
            ("./sbin/tool", EntryType::Symlink, "../usr/lib/tool"),
            ("./lib/x.so", EntryType::Symlink, "../lib64/x.so.1"),
        ];
        let mut layer = ImageLayer::new();
        layer.package(&package(&old)[..]).unwrap();
        let listed = listing(&layer);
        let expected = [
            "bin -> usr/bin",
            "lib -> usr/lib",
            "lib64 -> usr/lib64",
            "sbin -> usr/sbin",
            "usr/",
            "usr/bin/",
            "usr/bin/dash",
            "usr/bin/sh -> dash",
            "usr/lib/",
            "usr/lib/x.so -> ../lib64/x.so.1",
            "usr/lib64/",
            "usr/lib64/ld.so -> /lib/ld-2.so",
            "usr/sbin/",
            // Relative to its new path it would lead to /usr/usr.
            "usr/sbin/tool -> /usr/lib/tool",
        ];
        assert_eq!(listed, expected);

        let new = [
            ("./bin", EntryType::Symlink, "usr/bin"),
            ("./usr/bin/dash", EntryType::Regular, "dash"),
            ("./usr/bin/sh", EntryType::Symlink, "dash"),
        ];
        let mut layer = ImageLayer::new();
        layer.package(&package(&new)[..]).unwrap();
        assert_eq!(
            listing(&layer),
            ["bin -> usr/bin", "usr/", "usr/bin/", "usr/bin/dash", "usr/bin/sh -> dash"]
        );
    }

    #[test]
    fn manuals_are_dropped_and_licenses_kept() {
        let lines = [
            ("./usr/share/man/man1/x.1", EntryType::Regular, "x"),
            ("./usr/share/doc/x/changelog", EntryType::Regular, "x"),
            ("./usr/share/doc/x/copyright", EntryType::Regular, "x"),
        ];
        let mut layer = ImageLayer::new();
        layer.package(&package(&lines)[..]).unwrap();
        assert_eq!(listing(&layer).last().unwrap(), "usr/share/doc/x/copyright");
        assert_eq!(listing(&layer).len(), 5);
    }

    #[test]
    fn package_owners_and_hard_links_are_kept() {
        let lines =
            [("./usr/bin/a", EntryType::Regular, "abc"), ("./usr/bin/b", EntryType::Link, "./usr/bin/a")];
        let mut layer = ImageLayer::new();
        layer.package(&package(&lines)[..]).unwrap();
        assert_eq!(layer.contents("/bin/b"), Some(&b"abc"[..]));
        let entry_node = &layer.entries["usr/bin/a"];
        assert_eq!((entry_node.mode, entry_node.owner, entry_node.group), (0o755, 7, 8));
    }

    fn refusal_text(done: Result<&mut ImageLayer, MissingPrerequisite>) -> String {
        done.unwrap_err().to_string()
    }

    #[test]
    fn invalid_entry_is_refused_with_the_reason() {
        let mut layer = ImageLayer::new();
        assert_eq!(
            refusal_text(layer.text("/etc/../../x", 0o644, "")),
            "/etc/../../x cannot be added to an image: a path with `..` could leave the image"
        );
        assert!(refusal_text(layer.folder("/", 0o755)).contains("names the root itself"));
        assert_eq!(
            refusal_text(layer.file("/x", 0o644, Path::new("/no/such"))),
            "/no/such cannot be added to an image: it does not exist"
        );
        assert!(refusal_text(layer.file("/x", 0o644, Path::new("/tmp"))).contains("it is not a file"));
        layer.link("/var/run", "/run").unwrap();
        assert!(
            refusal_text(layer.text("/var/run/x", 0o644, ""))
                .contains("var/run is not a directory in the image")
        );
        layer.text("/x", 0o644, "").unwrap();
        assert!(refusal_text(layer.text("x", 0o644, "")).contains("the path already exists"));
        let device = package(&[("./dev/null", EntryType::Char, "")]);
        assert!(
            refusal_text(layer.package(&device[..]))
                .contains("dev/null cannot be added to an image: it is a device")
        );
        let lost = package(&[("./a", EntryType::Link, "./b")]);
        assert!(refusal_text(layer.package(&lost[..])).contains("hard link to a missing file"));
    }

    #[test]
    fn directory_added_twice_gets_the_last_mode() {
        let mut layer = ImageLayer::new();
        layer.text("/tmp/x", 0o644, "").unwrap().folder("/tmp", 0o1777).unwrap();
        assert_eq!(layer.entries["tmp"].mode, 0o1777);
    }
}
