//! The files of one layer: held in memory, kept by path, so that the same files make the same layer.

use crate::missing::Missing;
use std::collections::BTreeMap;
use std::fs;
use std::io::{self, Read};
use std::path::Path;
use std::sync::Arc;
use tar::{Builder, EntryType, Header};

/// Folders of the root that are links into `/usr`. Packages of older Debian releases still name them directly.
const MERGED: [&str; 6] = ["bin", "lib", "lib32", "lib64", "libx32", "sbin"];

/// Parts of packages that no container of ours reads. Licence texts stay.
const LEFT_OUT: &[&str] = &[
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
/// `/bin`, `/sbin` and `/lib*` are links into `/usr`: what is put there goes to `/usr`, and the link is made. Owner and
/// group are root unless said otherwise. Folders above a file are made.
#[derive(Clone, Debug, Default)]
pub struct Layer {
    nodes: BTreeMap<String, Node>,
}

#[derive(Clone, Debug)]
struct Node {
    kind: Kind,
    mode: u32,
    owner: u64,
    group: u64,
}

#[derive(Clone, Debug)]
enum Kind {
    Folder,
    File(Arc<[u8]>),
    Link(String),
}

impl Kind {
    fn root(self, mode: u32) -> Node {
        Node { kind: self, mode, owner: 0, group: 0 }
    }
}

impl Layer {
    /// No files yet.
    pub fn new() -> Self {
        Self::default()
    }

    /// A folder.
    pub fn folder(&mut self, path: &str, mode: u32) -> Result<&mut Self, Missing> {
        let path = place(path)?;
        match self.nodes.get_mut(&path) {
            Some(node) if matches!(node.kind, Kind::Folder) => node.mode = mode,
            _ => self.put(path, Kind::Folder.root(mode))?,
        }
        Ok(self)
    }

    /// A file with these contents.
    pub fn text(&mut self, path: &str, mode: u32, contents: impl AsRef<[u8]>) -> Result<&mut Self, Missing> {
        self.put(place(path)?, Kind::File(contents.as_ref().into()).root(mode))?;
        Ok(self)
    }

    /// A copy of a file of this machine.
    pub fn file(&mut self, path: &str, mode: u32, from: &Path) -> Result<&mut Self, Missing> {
        let refused = |why: &str| refused(&from.display().to_string(), why);
        match fs::metadata(from) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Err(refused("it is not there")),
            Ok(found) if !found.is_file() => return Err(refused("it is no file")),
            _ => {}
        }
        let contents = fs::read(from).map_err(Missing::io(format!("reading {}", from.display())))?;
        self.text(path, mode, contents)
    }

    /// A symbolic link; the target stands as given.
    pub fn link(&mut self, path: &str, target: &str) -> Result<&mut Self, Missing> {
        self.put(place(path)?, Kind::Link(target.to_string()).root(0o777))?;
        Ok(self)
    }

    /// Gives what is at the path to an owner and a group, by number.
    pub fn owner(&mut self, path: &str, owner: u64, group: u64) -> Result<&mut Self, Missing> {
        let node = self.nodes.get_mut(&place(path)?);
        let node = node.ok_or_else(|| refused(path, "nothing is there to be given to an owner"))?;
        (node.owner, node.group) = (owner, group);
        Ok(self)
    }

    /// The files of a Debian package, as `dpkg-deb --fsys-tarfile` gives them, with the package's owners and modes.
    pub fn package(&mut self, tar: impl Read) -> Result<&mut Self, Missing> {
        let broken = || Missing::io("reading the files of a package");
        for entry in tar::Archive::new(tar).entries().map_err(broken())? {
            let mut entry = entry.map_err(broken())?;
            let said = text_of(&entry.path_bytes())?;
            let bare = said.trim_start_matches("./").trim_end_matches('/').to_string();
            let header = entry.header();
            let (kind, mode) = (header.entry_type(), header.mode().map_err(broken())? & 0o7777);
            let (owner, group) = (header.uid().map_err(broken())?, header.gid().map_err(broken())?);
            let target = entry.link_name_bytes().map(|target| text_of(&target)).transpose()?;
            // Newer releases bring the links that are made here anyway.
            let merged_link = kind.is_symlink() && MERGED.contains(&bare.as_str());
            if bare.is_empty() || bare == "." || merged_link || left_out(&bare) {
                continue;
            }
            let path = place(&bare)?;
            let kind = match (kind, target) {
                (EntryType::Directory, _) => {
                    // The first package that has a folder says how it is.
                    if self.nodes.get(&path).is_some_and(|node| matches!(node.kind, Kind::Folder)) {
                        continue;
                    }
                    Kind::Folder
                }
                (EntryType::Regular, _) => {
                    let mut contents = Vec::new();
                    entry.read_to_end(&mut contents).map_err(broken())?;
                    Kind::File(contents.into())
                }
                (EntryType::Symlink, Some(target)) => Kind::Link(moved(&bare, &path, target)),
                (EntryType::Link, Some(target)) => match self.nodes.get(&place(&target)?).map(|n| &n.kind) {
                    Some(Kind::File(contents)) => Kind::File(Arc::clone(contents)),
                    _ => return Err(refused(&said, "it is a second name of a file that is not there")),
                },
                _ => return Err(refused(&said, "it is a device, a pipe or the like")),
            };
            self.put(path, Node { kind, mode, owner, group })?;
        }
        Ok(self)
    }

    /// The contents of a file of the layer.
    pub fn contents(&self, path: &str) -> Option<&[u8]> {
        match &self.nodes.get(&place(path).ok()?)?.kind {
            Kind::File(contents) => Some(contents),
            _ => None,
        }
    }

    fn put(&mut self, path: String, node: Node) -> Result<(), Missing> {
        for (end, _) in path.match_indices('/') {
            let above = &path[..end];
            match self.nodes.get(above) {
                Some(node) if matches!(node.kind, Kind::Folder) => {}
                Some(_) => return Err(refused(&path, &format!("{above} is no folder in the image"))),
                None => {
                    self.nodes.insert(above.to_string(), Kind::Folder.root(0o755));
                    self.merged_link(above);
                }
            }
        }
        if self.nodes.contains_key(&path) {
            return Err(refused(&path, "there is something in its place already"));
        }
        self.merged_link(&path);
        self.nodes.insert(path, node);
        Ok(())
    }

    /// What comes into `/usr` under a merged name has its link in the root.
    fn merged_link(&mut self, path: &str) {
        if let Some(name) = path.strip_prefix("usr/").filter(|name| MERGED.contains(name)) {
            self.nodes.insert(name.to_string(), Kind::Link(path.to_string()).root(0o777));
        }
    }

    /// The layer as a tar file: in the order of the paths, without times and without names of people.
    pub(super) fn tar(&self) -> io::Result<Vec<u8>> {
        let mut tar = Builder::new(Vec::new());
        for (path, node) in &self.nodes {
            let mut header = Header::new_gnu();
            header.set_mode(node.mode);
            header.set_uid(node.owner);
            header.set_gid(node.group);
            header.set_mtime(0);
            header.set_size(0);
            match &node.kind {
                Kind::Folder => {
                    header.set_entry_type(EntryType::Directory);
                    tar.append_data(&mut header, format!("{path}/"), io::empty())?;
                }
                Kind::File(contents) => {
                    header.set_entry_type(EntryType::Regular);
                    header.set_size(contents.len() as u64);
                    tar.append_data(&mut header, path, &**contents)?;
                }
                Kind::Link(target) => {
                    header.set_entry_type(EntryType::Symlink);
                    tar.append_link(&mut header, path, target)?;
                }
            }
        }
        tar.into_inner()
    }

    /// Writes those files and links that `wanted` names into a folder of this machine, modes and owners aside.
    pub(super) fn unpack(&self, folder: &Path, wanted: impl Fn(&str) -> bool) -> io::Result<()> {
        for (path, node) in self.nodes.iter().filter(|(path, _)| wanted(path)) {
            let to = folder.join(path);
            // No folder above is a link: `put` saw to it.
            fs::create_dir_all(to.parent().unwrap_or(folder))?;
            match &node.kind {
                Kind::Folder => fs::create_dir_all(&to)?,
                Kind::File(contents) => fs::write(&to, contents)?,
                Kind::Link(target) => std::os::unix::fs::symlink(target, &to)?,
            }
        }
        Ok(())
    }
}

fn refused(path: &str, why: &str) -> Missing {
    Missing::Refused { path: path.to_string(), why: why.to_string() }
}

fn text_of(bytes: &[u8]) -> Result<String, Missing> {
    let text = std::str::from_utf8(bytes).map(str::to_string);
    text.map_err(|_| refused(&String::from_utf8_lossy(bytes), "its name is not UTF-8"))
}

/// Where a path stands in the image: from the root, without a leading slash, inside `/usr` where it is merged.
fn place(path: &str) -> Result<String, Missing> {
    let mut parts: Vec<_> = path.split('/').filter(|part| !matches!(*part, "" | ".")).collect();
    if parts.contains(&"..") {
        return Err(refused(path, "a path with `..` could leave the image"));
    }
    if path.contains('\0') {
        return Err(refused(path, "a path has no zero bytes"));
    }
    let first = *parts.first().ok_or_else(|| refused(path, "it names the root itself"))?;
    if MERGED.contains(&first) {
        parts.insert(0, "usr");
    }
    Ok(parts.join("/"))
}

fn left_out(path: &str) -> bool {
    // Conversions between old character sets, half the size of glibc.
    if path.contains("/gconv/") {
        return true;
    }
    let licence = path.starts_with("usr/share/doc/") && path.ends_with("/copyright");
    !licence && LEFT_OUT.iter().any(|prefix| path.starts_with(prefix))
}

/// The target of a link that moved from `from` to `to`: relative ones may need a new beginning.
fn moved(from: &str, to: &str, target: String) -> String {
    if target.starts_with('/') {
        return target;
    }
    let (meant, leads) = (seen_from(from, &target), seen_from(to, &target));
    match place(&meant) {
        Ok(meant) if leads != meant && place(&leads).is_ok_and(|leads| leads != meant) => format!("/{meant}"),
        _ => target,
    }
}

/// Where a relative target leads, by its words alone.
fn seen_from(link: &str, target: &str) -> String {
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

    type Line<'a> = (&'a str, EntryType, &'a str);

    /// A package with these files; the third word is a link's target or a file's contents.
    fn package(lines: &[Line<'_>]) -> Vec<u8> {
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

    fn listing(layer: &Layer) -> Vec<String> {
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
    fn old_and_new_packages_come_to_the_same_places() {
        let old = [
            ("./bin/", EntryType::Directory, ""),
            ("./bin/dash", EntryType::Regular, "dash"),
            ("./bin/sh", EntryType::Symlink, "dash"),
            ("./lib64/ld.so", EntryType::Symlink, "/lib/ld-2.so"),
            ("./sbin/tool", EntryType::Symlink, "../usr/lib/tool"),
            ("./lib/x.so", EntryType::Symlink, "../lib64/x.so.1"),
        ];
        let mut layer = Layer::new();
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
            // Relative to its new place it would have led to /usr/usr.
            "usr/sbin/tool -> /usr/lib/tool",
        ];
        assert_eq!(listed, expected);

        let new = [
            ("./bin", EntryType::Symlink, "usr/bin"),
            ("./usr/bin/dash", EntryType::Regular, "dash"),
            ("./usr/bin/sh", EntryType::Symlink, "dash"),
        ];
        let mut layer = Layer::new();
        layer.package(&package(&new)[..]).unwrap();
        assert_eq!(
            listing(&layer),
            ["bin -> usr/bin", "usr/", "usr/bin/", "usr/bin/dash", "usr/bin/sh -> dash"]
        );
    }

    #[test]
    fn manuals_go_and_licences_stay() {
        let lines = [
            ("./usr/share/man/man1/x.1", EntryType::Regular, "x"),
            ("./usr/share/doc/x/changelog", EntryType::Regular, "x"),
            ("./usr/share/doc/x/copyright", EntryType::Regular, "x"),
        ];
        let mut layer = Layer::new();
        layer.package(&package(&lines)[..]).unwrap();
        assert_eq!(listing(&layer).last().unwrap(), "usr/share/doc/x/copyright");
        assert_eq!(listing(&layer).len(), 5);
    }

    #[test]
    fn a_package_keeps_its_owners_and_second_names() {
        let lines =
            [("./usr/bin/a", EntryType::Regular, "abc"), ("./usr/bin/b", EntryType::Link, "./usr/bin/a")];
        let mut layer = Layer::new();
        layer.package(&package(&lines)[..]).unwrap();
        assert_eq!(layer.contents("/bin/b"), Some(&b"abc"[..]));
        let node = &layer.nodes["usr/bin/a"];
        assert_eq!((node.mode, node.owner, node.group), (0o755, 7, 8));
    }

    fn why(done: Result<&mut Layer, Missing>) -> String {
        done.unwrap_err().to_string()
    }

    #[test]
    fn what_cannot_go_into_an_image_is_refused_in_words() {
        let mut layer = Layer::new();
        assert_eq!(
            why(layer.text("/etc/../../x", 0o644, "")),
            "/etc/../../x cannot go into an image: a path with `..` could leave the image"
        );
        assert!(why(layer.folder("/", 0o755)).contains("names the root itself"));
        assert_eq!(
            why(layer.file("/x", 0o644, Path::new("/no/such"))),
            "/no/such cannot go into an image: it is not there"
        );
        assert!(why(layer.file("/x", 0o644, Path::new("/tmp"))).contains("it is no file"));
        layer.link("/var/run", "/run").unwrap();
        assert!(why(layer.text("/var/run/x", 0o644, "")).contains("var/run is no folder in the image"));
        layer.text("/x", 0o644, "").unwrap();
        assert!(why(layer.text("x", 0o644, "")).contains("something in its place already"));
        let device = package(&[("./dev/null", EntryType::Char, "")]);
        assert!(why(layer.package(&device[..])).contains("dev/null cannot go into an image: it is a device"));
        let lost = package(&[("./a", EntryType::Link, "./b")]);
        assert!(why(layer.package(&lost[..])).contains("a file that is not there"));
    }

    #[test]
    fn a_folder_said_twice_has_the_last_mode() {
        let mut layer = Layer::new();
        layer.text("/tmp/x", 0o644, "").unwrap().folder("/tmp", 0o1777).unwrap();
        assert_eq!(layer.nodes["tmp"].mode, 0o1777);
    }
}
