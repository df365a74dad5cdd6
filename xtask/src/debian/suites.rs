//! Suites of Debian's archive besides the machine's own. Their lists are private, so the system's stay as they are, and nobody
//! has to be root.

use super::Debian;
use crate::machine;
use crate::missing::Missing;
use std::fs;
use std::path::Path;

/// Signs the archive; every Debian has it.
const KEYRING: &str = "/usr/share/keyrings/debian-archive-keyring.gpg";

/// Suites with their components, for the machine's architecture and for others.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Suites {
    pub(crate) suites: &'static [(&'static str, &'static str)],
    pub(crate) foreign: &'static [&'static str],
}

impl<'a> Debian<'a> {
    /// Fetches the lists of suites into the work folder, with the mirror and the proxy that the machine's own apt uses.
    pub(crate) fn with_suites(self, suites: Suites) -> Result<Debian<'a>, Missing> {
        let work = &self.work;
        let making = || Missing::io(format!("making {}", work.display()));
        for folder in ["state/lists/partial", "cache/archives/partial"] {
            fs::create_dir_all(work.join(folder)).map_err(making())?;
        }
        let mirror = mirror(&self.sources()?, machine::debian_codename().as_deref());
        let mirror = mirror.ok_or_else(|| Missing::Failed {
            doing: "looking for a Debian archive among apt's sources".into(),
            said: format!("there is none; add one, or {}", self.instead),
        })?;
        fs::write(work.join("sources.list"), suites.sources(&mirror, Path::new(KEYRING).exists()))
            .map_err(making())?;
        let private = work.join("apt.conf");
        fs::write(&private, suites.configuration(work)).map_err(making())?;
        let debian = Debian { private: Some(private), ..self };
        debian.update()?;
        Ok(debian)
    }
}

impl Suites {
    fn architectures(&self) -> Vec<&'static str> {
        [&[machine::architecture()], self.foreign].concat()
    }

    fn sources(&self, mirror: &str, signed: bool) -> String {
        let signed = if signed { format!(" signed-by={KEYRING}") } else { String::new() };
        let architectures = self.architectures().join(",");
        let line = |(suite, components): &(&str, &str)| {
            format!("deb [target=Packages arch={architectures}{signed}] {mirror} {suite} {components}\n")
        };
        self.suites.iter().map(line).collect()
    }

    /// apt's configuration, read after the system's: proxies stay, everything with a place goes into `work`.
    fn configuration(&self, work: &Path) -> String {
        let work = work.display();
        let architectures: String =
            self.architectures().iter().map(|name| format!("APT::Architectures:: \"{name}\";\n")).collect();
        format!(
            "Dir::State \"{work}/state\";\n\
             Dir::State::status \"/dev/null\";\n\
             Dir::Cache \"{work}/cache\";\n\
             Dir::Etc::sourcelist \"{work}/sources.list\";\n\
             Dir::Etc::sourceparts \"/dev/null\";\n\
             Dir::Etc::preferences \"/dev/null\";\n\
             Dir::Etc::preferencesparts \"/dev/null\";\n\
             Acquire::Languages \"none\";\n\
             #clear APT::Architectures;\n\
             {architectures}\
             APT::Update::Error-Mode \"any\";\n\
             APT::Sandbox::User \"root\";\n\
             #clear APT::Update::Post-Invoke;\n\
             #clear APT::Update::Post-Invoke-Success;\n"
        )
    }
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

#[cfg(test)]
mod tests {
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
    fn sources_are_signed_and_name_their_architectures() {
        let suites = Suites { suites: &[("trixie", "non-free")], foreign: &["i386"] };
        let said = suites.sources("http://m/debian/", true);
        let own = machine::architecture();
        let line = format!(
            "deb [target=Packages arch={own},i386 signed-by={KEYRING}] http://m/debian/ trixie non-free\n"
        );
        assert_eq!(said, line);
        let said = suites.configuration(Path::new("/work"));
        assert!(said.contains("APT::Architectures:: \"i386\";\n"), "{said}");
    }
}
