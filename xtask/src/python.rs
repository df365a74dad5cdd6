//! Creates private Python environments for packages from pip.

use crate::debian::DebianTools;
use crate::prerequisites::MissingPrerequisite;
use crate::process::{ProcessEnd, last_lines, run};
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

/// Minimum version that the packages require.
const MIN_VERSION: &str = "3.11";
const MIN_VERSION_NUMBERS: (u32, u32) = (3, 11);
/// Programs to try; the plain name first, which is the user's choice.
const CANDIDATES: [&str; 6] =
    ["python3", "/usr/bin/python3", "python3.14", "python3.13", "python3.12", "python3.11"];
/// Prints the version, and then whether environments can be created.
const PROBE_SCRIPT: &str = "import sys; print(*sys.version_info[:2]); import venv, ensurepip; print('venv')";
/// Time limit for a Python to print its version.
const PROBE_TIMEOUT: Duration = Duration::from_secs(20);
/// Debian packages that provide Python with venv.
const DEBIAN_PACKAGES: [&str; 2] = ["python3", "python3-venv"];

/// The inputs for creating an environment.
pub(crate) struct PythonEnv<'a> {
    /// Name of the installed software, for messages.
    pub(crate) what: &'static str,
    pub(crate) work: PathBuf,
    pub(crate) stop: &'a AtomicBool,
    pub(crate) interrupted: &'a dyn Fn() -> MissingPrerequisite,
}

impl PythonEnv<'_> {
    /// Finds a suitable Python on this machine, and installs Debian's if there is none.
    pub(crate) fn find(&self, debian: &DebianTools<'_>) -> Result<String, MissingPrerequisite> {
        if let Ok(found) = self.find_installed()? {
            return Ok(found);
        }
        debian.install(self.what, &DEBIAN_PACKAGES)?;
        self.find_installed()?.map_err(|found| MissingPrerequisite::NoPython {
            what: self.what,
            needed: MIN_VERSION,
            found,
        })
    }

    /// Returns the first suitable Python, or a list of unsuitable ones.
    fn find_installed(&self) -> Result<Result<String, String>, MissingPrerequisite> {
        let mut seen = Vec::new();
        for name in CANDIDATES {
            let mut command = Command::new(name);
            let message =
                match run(command.args(["-c", PROBE_SCRIPT]), &self.log(), self.stop, Some(PROBE_TIMEOUT)) {
                    Ok(ProcessEnd::Interrupted) => return Err((self.interrupted)()),
                    Ok(ProcessEnd::Succeeded(message) | ProcessEnd::Failed(message)) => message,
                    Ok(ProcessEnd::TimedOut) | Err(_) => continue,
                };
            match check_version(&message) {
                Some(Ok(())) => return Ok(Ok(name.to_string())),
                Some(Err(found)) => seen.push(format!("{name} ({found})")),
                None => {}
            }
        }
        Ok(Err(if seen.is_empty() { "none".to_string() } else { seen.join(", ") }))
    }

    /// Creates an environment in a directory and installs the requirements in it.
    pub(crate) fn create(
        &self,
        python: &str,
        folder: &Path,
        required: &str,
    ) -> Result<(), MissingPrerequisite> {
        let requirements = self.work.join("requirements.txt");
        let writing = MissingPrerequisite::io(format!("writing {}", requirements.display()));
        fs::write(&requirements, required).map_err(writing)?;
        self.run(
            Command::new(python).args(["-m", "venv", "--clear"]).arg(folder),
            "creating the environment",
        )?;
        let mut pip = Command::new(folder.join("bin/python3"));
        pip.args(["-m", "pip", "install", "--quiet", "--no-input", "--no-deps", "--progress-bar", "off"]);
        pip.args(["--disable-pip-version-check", "--no-warn-script-location", "--requirement"]);
        self.run(pip.arg(&requirements), "pip")
    }

    fn run(&self, command: &mut Command, doing: &str) -> Result<(), MissingPrerequisite> {
        clear_python_variables(command);
        match run(command, &self.log(), self.stop, None) {
            Err(error) => Err(MissingPrerequisite::io(format!("{}: {doing}", self.what))(error)),
            Ok(ProcessEnd::Succeeded(_)) => Ok(()),
            Ok(ProcessEnd::Interrupted | ProcessEnd::TimedOut) => Err((self.interrupted)()),
            Ok(ProcessEnd::Failed(message)) => Err(classify_failure(self.what, doing, &message)),
        }
    }

    fn log(&self) -> PathBuf {
        self.work.join("python.log")
    }
}

/// Removes variables for the user's own Python.
pub(crate) fn clear_python_variables(command: &mut Command) -> &mut Command {
    command.env_remove("PYTHONHOME").env_remove("PYTHONPATH").env_remove("PIP_USER").env_remove("PIP_TARGET")
}

/// Returns whether a Python is suitable by its output; `None` if the program is not a Python.
fn check_version(message: &str) -> Option<Result<(), String>> {
    let mut numbers = message.lines().next()?.split(' ').map(str::parse);
    let (Some(Ok(major)), Some(Ok(minor))) = (numbers.next(), numbers.next()) else { return None };
    let fits = (major, minor) >= MIN_VERSION_NUMBERS;
    Some(match (fits, message.lines().nth(1) == Some("venv")) {
        (true, true) => Ok(()),
        (true, false) => Err(format!("{major}.{minor}, without venv")),
        (false, _) => Err(format!("{major}.{minor}")),
    })
}

/// Classifies an error of pip by its output.
fn classify_failure(what: &str, doing: &str, message: &str) -> MissingPrerequisite {
    let has = |words: &[&str]| words.iter().any(|word| message.contains(word));
    if has(&["No space left on device"]) {
        return MissingPrerequisite::io(format!("installing {what}"))(io::ErrorKind::StorageFull.into());
    }
    let said_last = last_lines(message);
    if has(&["Could not find a version", "No matching distribution", "ConnectionError", "Connection broken"])
    {
        MissingPrerequisite::NoNetwork {
            what: what.to_string(),
            asked: "pip's index and proxy",
            message: said_last,
        }
    } else {
        MissingPrerequisite::Failed { doing: format!("{what}: {doing}"), message: said_last }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn python_version_and_venv_are_checked() {
        assert_eq!(check_version("3 11\nvenv\n"), Some(Ok(())));
        assert_eq!(
            check_version("3 13\nTraceback\nNo module named ensurepip"),
            Some(Err("3.13, without venv".into()))
        );
        assert_eq!(check_version("3 9\nvenv\n"), Some(Err("3.9".into())));
        assert_eq!(check_version("pyenv: python3.12: command not found\n"), None);
        assert_eq!(check_version(""), None);
    }

    #[test]
    fn pip_errors_are_classified() {
        let error = classify_failure(
            "the Python clients",
            "pip",
            "ERROR: Could not find a version that satisfies x\n",
        )
        .to_string();
        assert!(error.starts_with("cannot download the Python clients: ERROR:"), "{error}");
        assert!(error.contains("pip's index and proxy"), "{error}");
        let error =
            classify_failure("the Python clients", "pip", "OSError: [Errno 28] No space left on device")
                .to_string();
        assert!(error.starts_with("disk full while installing the Python clients"), "{error}");
        assert_eq!(
            classify_failure("the Python clients", "pip", "boom").to_string(),
            "the Python clients: pip failed: boom"
        );
    }
}
