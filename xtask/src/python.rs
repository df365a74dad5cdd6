//! A Python of its own for what comes from pip.

use crate::debian::Debian;
use crate::missing::Missing;
use crate::process::{End, last_words, run};
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

/// What the requirements need.
const NEEDED: &str = "3.11";
const NEEDED_NUMBERS: (u32, u32) = (3, 11);
/// The plain one first: it is the one a person chose.
const NAMES: [&str; 6] =
    ["python3", "/usr/bin/python3", "python3.14", "python3.13", "python3.12", "python3.11"];
/// Says the version, and then whether environments can be made.
const ASKED: &str = "import sys; print(*sys.version_info[:2]); import venv, ensurepip; print('venv')";
/// A Python that does not say its version by then hangs.
const PATIENCE: Duration = Duration::from_secs(20);
/// In which packages Debian has what is asked for.
const PACKAGES: [&str; 2] = ["python3", "python3-venv"];

/// The tools, working in one folder.
pub(crate) struct Python<'a> {
    /// What is installed with it, in words.
    pub(crate) what: &'static str,
    pub(crate) work: PathBuf,
    pub(crate) stop: &'a AtomicBool,
    pub(crate) interrupted: &'a dyn Fn() -> Missing,
}

impl Python<'_> {
    /// A Python on this machine that will do; where there is none, Debian's is installed.
    pub(crate) fn find(&self, debian: &Debian<'_>) -> Result<String, Missing> {
        if let Ok(found) = self.look()? {
            return Ok(found);
        }
        debian.install(self.what, &PACKAGES)?;
        self.look()?.map_err(|found| Missing::NoPython { what: self.what, needed: NEEDED, found })
    }

    /// The first that will do, or what there is instead.
    fn look(&self) -> Result<Result<String, String>, Missing> {
        let mut seen = Vec::new();
        for name in NAMES {
            let mut command = Command::new(name);
            let said = match run(command.args(["-c", ASKED]), &self.log(), self.stop, Some(PATIENCE)) {
                Ok(End::Interrupted) => return Err((self.interrupted)()),
                Ok(End::Well(said) | End::Badly(said)) => said,
                Ok(End::TooLate) | Err(_) => continue,
            };
            match judge(&said) {
                Some(Ok(())) => return Ok(Ok(name.to_string())),
                Some(Err(found)) => seen.push(format!("{name} ({found})")),
                None => {}
            }
        }
        Ok(Err(if seen.is_empty() { "none".to_string() } else { seen.join(", ") }))
    }

    /// Makes an environment in a folder and installs what is required in it.
    pub(crate) fn make(&self, python: &str, folder: &Path, required: &str) -> Result<(), Missing> {
        let requirements = self.work.join("requirements.txt");
        let writing = Missing::io(format!("writing {}", requirements.display()));
        fs::write(&requirements, required).map_err(writing)?;
        self.run(Command::new(python).args(["-m", "venv", "--clear"]).arg(folder), "making it")?;
        let mut pip = Command::new(folder.join("bin/python3"));
        pip.args(["-m", "pip", "install", "--quiet", "--no-input", "--no-deps", "--progress-bar", "off"]);
        pip.args(["--disable-pip-version-check", "--no-warn-script-location", "--requirement"]);
        self.run(pip.arg(&requirements), "pip")
    }

    fn run(&self, command: &mut Command, doing: &str) -> Result<(), Missing> {
        plain(command);
        match run(command, &self.log(), self.stop, None) {
            Err(error) => Err(Missing::io(format!("{}: {doing}", self.what))(error)),
            Ok(End::Well(_)) => Ok(()),
            Ok(End::Interrupted | End::TooLate) => Err((self.interrupted)()),
            Ok(End::Badly(said)) => Err(blame(self.what, doing, &said)),
        }
    }

    fn log(&self) -> PathBuf {
        self.work.join("python.log")
    }
}

/// What a person set for their own Python is not for this one.
pub(crate) fn plain(command: &mut Command) -> &mut Command {
    command.env_remove("PYTHONHOME").env_remove("PYTHONPATH").env_remove("PIP_USER").env_remove("PIP_TARGET")
}

/// Whether a Python will do, by what it said; nothing where it was none.
fn judge(said: &str) -> Option<Result<(), String>> {
    let mut numbers = said.lines().next()?.split(' ').map(str::parse);
    let (Some(Ok(major)), Some(Ok(minor))) = (numbers.next(), numbers.next()) else { return None };
    let fits = (major, minor) >= NEEDED_NUMBERS;
    Some(match (fits, said.lines().nth(1) == Some("venv")) {
        (true, true) => Ok(()),
        (true, false) => Err(format!("{major}.{minor}, without venv")),
        (false, _) => Err(format!("{major}.{minor}")),
    })
}

/// What pip's words mean.
fn blame(what: &str, doing: &str, said: &str) -> Missing {
    let has = |words: &[&str]| words.iter().any(|word| said.contains(word));
    if has(&["No space left on device"]) {
        return Missing::io(format!("installing {what}"))(io::ErrorKind::StorageFull.into());
    }
    let said_last = last_words(said);
    match has(&[
        "Could not find a version",
        "No matching distribution",
        "ConnectionError",
        "Connection broken",
    ]) {
        true => {
            Missing::NoNetwork { what: what.to_string(), asked: "pip's index and proxy", said: said_last }
        }
        false => Missing::Failed { doing: format!("{what}: {doing}"), said: said_last },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_python_is_judged_by_its_words() {
        assert_eq!(judge("3 11\nvenv\n"), Some(Ok(())));
        assert_eq!(
            judge("3 13\nTraceback\nNo module named ensurepip"),
            Some(Err("3.13, without venv".into()))
        );
        assert_eq!(judge("3 9\nvenv\n"), Some(Err("3.9".into())));
        assert_eq!(judge("pyenv: python3.12: command not found\n"), None);
        assert_eq!(judge(""), None);
    }

    #[test]
    fn words_of_pip_become_ours() {
        let error = blame("the Python clients", "pip", "ERROR: Could not find a version that satisfies x\n")
            .to_string();
        assert!(error.starts_with("the Python clients could not be downloaded: ERROR:"), "{error}");
        assert!(error.contains("pip's index and proxy"), "{error}");
        let error =
            blame("the Python clients", "pip", "OSError: [Errno 28] No space left on device").to_string();
        assert!(error.starts_with("the disk ran full while installing the Python clients"), "{error}");
        assert_eq!(
            blame("the Python clients", "pip", "boom").to_string(),
            "the Python clients: pip failed: boom"
        );
    }
}
