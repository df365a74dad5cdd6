//! Suites of Debian's archive besides the host's own. Their lists are private: the system's stay unchanged, and root is
//! not required.

use super::DebianTools;
use crate::host_info;
use crate::prerequisites::MissingPrerequisite;
use std::fs;
use std::path::Path;

/// The keyring of the archive, which every Debian has.
const KEYRING: &str = "/usr/share/keyrings/debian-archive-keyring.gpg";

/// Suites with their components, for the host's architecture and for others.
#[derive(Clone, Copy, Debug)]
pub(crate) struct DebianSuites {
    pub(crate) suites: &'static [(&'static str, &'static str)],
    pub(crate) foreign: &'static [&'static str],
}

impl<'a> DebianTools<'a> {
    /// Fetches the lists of suites into the work directory, with the mirror and the proxy of the host's own apt.
    pub(crate) fn with_suites(self, suites: DebianSuites) -> Result<DebianTools<'a>, MissingPrerequisite> {
        let work = &self.work;
        let making = || MissingPrerequisite::io(format!("creating {}", work.display()));
        for folder in ["state/lists/partial", "cache/archives/partial"] {
            fs::create_dir_all(work.join(folder)).map_err(making())?;
        }
        let mirror = find_mirror(&self.sources()?, host_info::debian_codename().as_deref());
        let mirror = mirror.ok_or_else(|| MissingPrerequisite::Failed {
            doing: "searching apt's sources for a Debian archive".into(),
            message: format!("none found; add one, or {}", self.alternative),
        })?;
        fs::write(work.join("sources.list"), suites.sources(&mirror, Path::new(KEYRING).exists()))
            .map_err(making())?;
        let private_config = work.join("apt.conf");
        fs::write(&private_config, suites.configuration(work)).map_err(making())?;
        let debian = DebianTools { private_config: Some(private_config), ..self };
        debian.update()?;
        Ok(debian)
    }
}

impl DebianSuites {
    fn architectures(&self) -> Vec<&'static str> {
        [&[host_info::architecture()], self.foreign].concat()
    }

    fn sources(&self, mirror: &str, signed: bool) -> String {
        let signed = if signed { format!(" signed-by={KEYRING}") } else { String::new() };
        let architectures = self.architectures().join(",");
        let line = |(suite, components): &(&str, &str)| {
            format!("deb [target=Packages arch={architectures}{signed}] {mirror} {suite} {components}\n")
        };
        self.suites.iter().map(line).collect()
    }

    /// Returns apt's configuration, which is read after the system's: proxies stay, all paths are in `work`.
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

/// Returns the address of Debian's archive among `address release` lines.
fn find_mirror(sources: &str, codename: Option<&str>) -> Option<String> {
    let codename = codename?;
    let lines = || sources.lines().filter_map(|line| line.rsplit_once(' '));
    let of_release = lines().find(|(_, release)| *release == codename);
    // Sources may name the release `stable`; security updates have another address.
    let by_name = || lines().find(|(address, _)| address.trim_end_matches('/').ends_with("/debian"));
    of_release.or_else(by_name).map(|(address, _)| address.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mirror_is_taken_from_the_hosts_sources() {
        let message = "http://security.example/debian-security/ bookworm-security\n\
                    http://mirror.example/some/path/ bookworm\n";
        assert_eq!(find_mirror(message, Some("bookworm")).unwrap(), "http://mirror.example/some/path/");
        let message = "http://a.example/debian-security/ stable-security\nhttp://b.example/debian/ stable\n";
        assert_eq!(find_mirror(message, Some("trixie")).unwrap(), "http://b.example/debian/");
        assert_eq!(find_mirror("", Some("trixie")), None);
        assert_eq!(find_mirror("http://archive.example/ubuntu/ noble\n", None), None);
    }

    #[test]
    fn sources_are_signed_and_name_their_architectures() {
        let suites = DebianSuites { suites: &[("trixie", "non-free")], foreign: &["i386"] };
        let message = suites.sources("http://m/debian/", true);
        let own = host_info::architecture();
        let line = format!(
            "deb [target=Packages arch={own},i386 signed-by={KEYRING}] http://m/debian/ trixie non-free\n"
        );
        assert_eq!(message, line);
        let message = suites.configuration(Path::new("/work"));
        assert!(message.contains("APT::Architectures:: \"i386\";\n"), "{message}");
    }
}
