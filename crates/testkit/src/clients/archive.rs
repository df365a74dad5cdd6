//! Debian's archive with the suites that have the clients: its lists are private, so the system's stay as they are, and
//! nobody has to be root.

use super::Missing;
use super::catalog::{NOT_UNPACKED, Packaged, SUITES};
use crate::debian::Debian;
use crate::machine;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;

/// Signs the archive; every Debian has it.
const KEYRING: &str = "/usr/share/keyrings/debian-archive-keyring.gpg";
/// What to do where there is no Debian.
pub(crate) const WITHOUT_DEBIAN: &str = "fetch on Debian or on a system made from it";

/// The archive, with its lists fetched.
pub(super) struct Archive<'a> {
    debian: Debian<'a>,
}

impl<'a> Archive<'a> {
    /// Uses the mirror and the proxy that the machine's own apt uses.
    pub(super) fn open(
        work: &Path,
        stop: &'a AtomicBool,
        interrupted: &'a dyn Fn() -> Missing,
    ) -> Result<Self, Missing> {
        let work = work.join("archive");
        let making = || Missing::io(format!("making {}", work.display()));
        for folder in ["state/lists/partial", "cache/archives/partial"] {
            fs::create_dir_all(work.join(folder)).map_err(making())?;
        }
        let instead = WITHOUT_DEBIAN;
        let system = Debian { work: work.clone(), stop, interrupted, instead, private: None };
        let mirror = mirror(&system.sources()?, machine::debian_codename().as_deref());
        let mirror = mirror.ok_or_else(|| Missing::Failed {
            doing: "looking for a Debian archive among apt's sources".into(),
            said: format!("there is none; add one, or {WITHOUT_DEBIAN}"),
        })?;
        fs::write(work.join("sources.list"), sources(&mirror, Path::new(KEYRING).exists()))
            .map_err(making())?;
        let private = work.join("apt.conf");
        fs::write(&private, configuration(&work)).map_err(making())?;
        let debian = Debian { private: Some(private), ..system };
        debian.update()?;
        Ok(Self { debian })
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

/// The address of Debian's archive, among `address release` lines; nothing where there is none.
fn mirror(sources: &str, codename: Option<&str>) -> Option<String> {
    let codename = codename?;
    let lines = || sources.lines().filter_map(|line| line.rsplit_once(' '));
    let of_release = lines().find(|(_, release)| *release == codename);
    // Sources may call the release `stable`; security updates are elsewhere.
    let by_name = || lines().find(|(address, _)| address.trim_end_matches('/').ends_with("/debian"));
    of_release.or_else(by_name).map(|(address, _)| address.to_string())
}

fn sources(mirror: &str, signed: bool) -> String {
    let signed = if signed { format!(" signed-by={KEYRING}") } else { String::new() };
    let line = |(suite, components): &(&str, &str)| {
        let options = format!("target=Packages arch={}{signed}", machine::architecture());
        format!("deb [{options}] {mirror} {suite} {components}\n")
    };
    SUITES.iter().map(line).collect()
}

/// apt's configuration, read after the system's: proxies stay, everything with a place goes into `work`.
fn configuration(work: &Path) -> String {
    let work = work.display();
    format!(
        "Dir::State \"{work}/state\";\n\
         Dir::State::status \"/dev/null\";\n\
         Dir::Cache \"{work}/cache\";\n\
         Dir::Etc::sourcelist \"{work}/sources.list\";\n\
         Dir::Etc::sourceparts \"/dev/null\";\n\
         Dir::Etc::preferences \"/dev/null\";\n\
         Dir::Etc::preferencesparts \"/dev/null\";\n\
         Acquire::Languages \"none\";\n\
         APT::Update::Error-Mode \"any\";\n\
         APT::Sandbox::User \"root\";\n\
         #clear APT::Update::Post-Invoke;\n\
         #clear APT::Update::Post-Invoke-Success;\n"
    )
}

#[cfg(test)]
mod tests {
    use super::super::catalog::Part;
    use super::*;

    #[test]
    fn the_mirror_is_the_one_of_the_machine() {
        let said = "http://security.example/debian-security/ bookworm-security\n\
                    http://mirror.example/some/path/ bookworm\n";
        assert_eq!(mirror(said, Some("bookworm")).unwrap(), "http://mirror.example/some/path/");
        let said = "http://a.example/debian-security/ stable-security\nhttp://b.example/debian/ stable\n";
        assert_eq!(mirror(said, Some("trixie")).unwrap(), "http://b.example/debian/");
        assert_eq!(mirror("", Some("trixie")), None);
        assert_eq!(mirror("http://archive.example/ubuntu/ noble\n", None), None);
    }

    #[test]
    fn a_version_that_is_gone_has_a_successor() {
        let packaged = Part::NvidiaSmi(super::super::Branch::R535).packaged().unwrap();
        let offered = |versions: &[&str]| versions.iter().map(|v| (*v).to_string()).collect::<Vec<_>>();
        let both = offered(&["550.1-1", "535.309.01-1", "535.261.03-1"]);
        assert_eq!(choose(packaged, &both), Some("535.261.03-1"));
        assert_eq!(choose(packaged, &both[..2]), Some("535.309.01-1"));
        assert_eq!(choose(packaged, &both[..1]), None);
    }

    #[test]
    fn sources_are_signed() {
        let said = sources("http://m/debian/", true);
        assert!(said.contains(&format!("signed-by={KEYRING}] http://m/debian/ trixie non-free\n")), "{said}");
    }
}
