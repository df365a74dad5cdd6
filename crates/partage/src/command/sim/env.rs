//! `partage sim env`: creates a simulated node and prints the environment variables that select it.

use super::super::{CommandExit, write_error};
use crate::manifest_files;
use crate::output::write_line;
use anyhow::{Context, bail};
use clap::{Args, ValueEnum};
use partage_driver_api::exports::DriverVersion;
use partage_sim_node::install::{self, InstallError};
use partage_sim_node::node::{self, NodeConfig, NodeDir, NodeSettings};
use partage_sim_node::profile::GpuProfile;
use std::ffi::{OsStr, OsString};
use std::io::{self, ErrorKind, Write};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};

/// Create a simulated node and print its environment variables
///
/// Prints export lines for a shell to evaluate. Without --dir a new node is created, in memory if possible; with --dir the node in
/// that directory is used, and created if it does not exist. All programs with these variables see and share the node's GPUs.
#[derive(Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct SimEnvCommand {
    /// Number of GPUs, 1 to 16 [default: 1]
    #[arg(long, value_name = "N")]
    gpus: Option<usize>,

    /// GPU model: a name from `partage sim list`, or a JSON file [default: A100-SXM4-40GB]
    #[arg(long, value_name = "MODEL|FILE")]
    model: Option<String>,

    /// Driver branch: 535 or 550 [default: 550]
    #[arg(long, value_name = "BRANCH", value_parser = parse_driver)]
    driver: Option<DriverVersion>,

    /// Directory of the node [default: a new temporary directory]
    #[arg(long, value_name = "DIR")]
    dir: Option<PathBuf>,

    /// Seed of UUIDs and serial numbers [default: derived from --dir, else random]
    #[arg(long, value_name = "N")]
    seed: Option<u64>,

    /// Output format
    #[arg(short, long, value_enum, default_value_t = EnvFormat::Shell)]
    output: EnvFormat,

    #[command(flatten)]
    time: TimingArgs,
}

/// Timing of the simulated GPUs.
#[derive(Args)]
#[command(next_help_heading = "Node settings")]
struct TimingArgs {
    /// Time slice of a process, in microseconds [default: 2000]
    #[arg(long, value_name = "N")]
    slice_micros: Option<u32>,

    /// Duration of kernels whose name does not specify one, in microseconds [default: 10]
    #[arg(long, value_name = "N")]
    kernel_micros: Option<u32>,

    /// Number of queued launches before a launch blocks [default: 1024]
    #[arg(long, value_name = "N")]
    queue: Option<u32>,
}

impl TimingArgs {
    /// Returns the settings with those of the command line applied.
    fn apply_to(&self, settings: &NodeSettings) -> NodeSettings {
        NodeSettings {
            slice_micros: self.slice_micros.unwrap_or(settings.slice_micros),
            kernel_micros: self.kernel_micros.unwrap_or(settings.kernel_micros),
            queue: self.queue.unwrap_or(settings.queue),
            ..settings.clone()
        }
    }
}

const EXAMPLES: &str = "\
Examples:
  eval \"$(partage sim env)\"
  eval \"$(partage sim env --gpus 8 --model H100-SXM5-80GB --driver 535)\"
  eval \"$(partage sim env --dir /tmp/node)\"     same node in several terminals
  partage sim env --model my-card.json -o json

Nodes are not removed automatically: partage sim rm \"$PARTAGE_SIM_DIR\"

Exit code: 0 success, 2 the node cannot be created, or the directory has a different node";

#[derive(Clone, Copy, ValueEnum)]
enum EnvFormat {
    /// Export lines for a shell
    Shell,
    /// One JSON document
    Json,
}

fn parse_driver(text: &str) -> Result<DriverVersion, String> {
    let known = || DriverVersion::ALL.map(|driver| driver.branch().to_string()).join(" or ");
    node::parse_driver_version(text).ok_or_else(|| format!("use {}", known()))
}

impl SimEnvCommand {
    pub(crate) fn run(&self, out: &mut dyn Write, err: &mut dyn Write) -> io::Result<CommandExit> {
        let node = match self.create_or_open(err) {
            Ok(node) => node,
            Err(error) => {
                write_error(err, &error)?;
                return Ok(CommandExit::InputError);
            }
        };
        let variables = [
            (node::NODE_DIR_VARIABLE, node.path().as_os_str().to_owned()),
            ("LD_LIBRARY_PATH", prepend_library_path(&node.libraries())),
        ];
        match self.output {
            EnvFormat::Shell => {
                for (name, value) in &variables {
                    write!(out, "export {name}=")?;
                    out.write_all(&shell_quote(value))?;
                    writeln!(out)?;
                }
            }
            EnvFormat::Json => {
                let text = |value: &OsString| value.to_string_lossy().into_owned();
                let variables = variables.iter().map(|(name, value)| (*name, text(value)));
                serde_json::to_writer_pretty(
                    &mut *out,
                    &variables.collect::<std::collections::BTreeMap<_, _>>(),
                )?;
                writeln!(out)?;
            }
        }
        // On standard error: the shell evaluates standard output.
        write_line(
            err,
            format_args!("{}; remove it with: partage sim rm {}", describe(&node), node.path().display()),
        )?;
        Ok(CommandExit::Success)
    }

    /// Opens or creates the node and installs the simulated driver's libraries in it.
    fn create_or_open(&self, err: &mut dyn Write) -> anyhow::Result<NodeDir> {
        let (node, new) = self.open_or_create_dir()?;
        let installed = install::shared_object().and_then(|object| {
            install::write_libraries(&object, &node.libraries(), node.config().driver, node.path())
        });
        match installed {
            Ok(()) => Ok(node),
            // A node of another user already has its libraries.
            Err(error) if !new && is_denied(&error) && node.libraries().join("libcuda.so.1").exists() => {
                write_line(err, format_args!("warning: the driver libraries were not updated: {error}"))?;
                Ok(node)
            }
            Err(error) => {
                if new {
                    // Removes the incomplete node. The error to report is the one above, whether this succeeds or not.
                    let _ = NodeDir::remove(node.path());
                }
                Err(error.into())
            }
        }
    }

    /// Returns the node, and whether it was created by this call.
    fn open_or_create_dir(&self) -> anyhow::Result<(NodeDir, bool)> {
        // In LD_LIBRARY_PATH the first two separate directories, and the third starts a variable.
        let special = |byte: &u8| b":;$".contains(byte);
        if let Some(dir) = self.dir.as_ref().filter(|dir| dir.as_os_str().as_bytes().iter().any(special)) {
            let dir = dir.display();
            bail!(
                "{dir}: the loader does not search directories with :, ; or $ in their path: use another directory"
            );
        }
        if let Some(dir) = &self.dir
            && let Ok(node) = NodeDir::open(dir)
        {
            return self.check_matches(node).map(|node| (node, false));
        }
        let seed = self.seed.unwrap_or_else(|| match &self.dir {
            Some(dir) => node::seed_for_dir(dir),
            None => node::random_seed(),
        });
        let profile = match &self.model {
            Some(model) => load_profile(model)?,
            None => partage_sim_node::profile::A100_SXM4_40GB.clone(),
        };
        let driver = self.driver.unwrap_or(DriverVersion::R550);
        let mut config = NodeConfig::new(driver, &profile, self.gpus.unwrap_or(1), seed)?;
        config.settings = self.time.apply_to(&config.settings);
        config.validate()?;
        let node = match &self.dir {
            Some(dir) => NodeDir::create(dir, &config)?,
            None => NodeDir::create_temporary(&config)?,
        };
        Ok((node, true))
    }

    /// Returns an existing node if it matches all options that were given.
    fn check_matches(&self, node: NodeDir) -> anyhow::Result<NodeDir> {
        let config = node.config();
        let mut differences = Vec::new();
        if let Some(gpus) = self.gpus.filter(|&gpus| gpus != config.gpus.len()) {
            differences.push(format!("it has {}, requested {gpus}", counted(config.gpus.len())));
        }
        if let Some(model) = &self.model {
            let requested = load_profile(model)?;
            if config.profiles.iter().any(|profile| *profile != requested) {
                let models: Vec<&str> =
                    config.profiles.iter().map(|profile| profile.model.as_ref()).collect();
                let models = models.join(" and ");
                differences.push(if models == requested.model {
                    format!("its {models} has other properties")
                } else {
                    format!("its model is {models}, requested {}", requested.model)
                });
            }
        }
        if let Some(driver) = self.driver.filter(|&driver| driver != config.driver) {
            differences.push(format!(
                "its driver is {}, requested {}",
                config.driver.version(),
                driver.version()
            ));
        }
        if let Some(seed) = self.seed.filter(|&seed| seed != config.seed) {
            differences.push(format!("its seed is {}, requested {seed}", config.seed));
        }
        let requested = self.time.apply_to(&config.settings);
        for (name, actual, requested) in [
            ("time slice", config.settings.slice_micros, requested.slice_micros),
            ("kernel time", config.settings.kernel_micros, requested.kernel_micros),
            ("queue", config.settings.queue, requested.queue),
        ] {
            if actual != requested {
                differences.push(format!("its {name} is {actual}, requested {requested}"));
            }
        }
        if differences.is_empty() {
            return Ok(node);
        }
        let path = node.path().to_path_buf();
        Err(node::NodeError::ConfigMismatch { path, what: differences.join("; ") }.into())
    }
}

/// Returns a GPU model by its name or from a file.
fn load_profile(text: &str) -> anyhow::Result<GpuProfile> {
    let looks_like_a_file =
        text.contains('/') || text.ends_with(".json") || text == "-" || Path::new(text).exists();
    match GpuProfile::named(text) {
        Some(profile) => Ok(profile.clone()),
        None if looks_like_a_file => {
            let name = if text == "-" { "standard input" } else { text };
            let contents = manifest_files::read_text(Path::new(text)).with_context(|| name.to_string())?;
            GpuProfile::from_json(&contents).with_context(|| name.to_string())
        }
        None => Ok(GpuProfile::find(text)?.clone()),
    }
}

fn is_denied(error: &InstallError) -> bool {
    let denied = [ErrorKind::PermissionDenied, ErrorKind::ReadOnlyFilesystem];
    matches!(error, InstallError::Io { error, .. } if denied.contains(&error.kind()))
}

fn counted(gpus: usize) -> String {
    super::counted(gpus, "GPU", "GPUs")
}

/// Describes a node: `simulated node: 2 GPUs, Tesla T4, driver 550.163.01`.
fn describe(node: &NodeDir) -> String {
    let config = node.config();
    let names: Vec<&str> = config.profiles.iter().map(|profile| profile.name.as_ref()).collect();
    let (gpus, names) = (counted(config.gpus.len()), names.join(" and "));
    format!("simulated node: {gpus}, {names}, driver {}", config.driver.version())
}

/// Puts the directory before those of `LD_LIBRARY_PATH`, and drops the directory of the node that was selected before.
fn prepend_library_path(dir: &Path) -> OsString {
    let previous = std::env::var_os(node::NODE_DIR_VARIABLE).map(|dir| Path::new(&dir).join("lib"));
    let current = std::env::var_os("LD_LIBRARY_PATH").unwrap_or_default();
    let mut path = dir.as_os_str().as_bytes().to_vec();
    for part in current.as_bytes().split(|&byte| byte == b':') {
        let is_node = [Some(dir), previous.as_deref()].contains(&Some(Path::new(OsStr::from_bytes(part))));
        if !part.is_empty() && !is_node {
            path.push(b':');
            path.extend(part);
        }
    }
    OsString::from_vec(path)
}

/// Quotes any bytes as one word of a shell.
fn shell_quote(value: &OsStr) -> Vec<u8> {
    let bytes = value.as_bytes();
    let plain = |byte: &u8| byte.is_ascii_alphanumeric() || b"/._-+:,@%=".contains(byte);
    if !bytes.is_empty() && bytes.iter().all(plain) {
        return bytes.to_vec();
    }
    let mut quoted = vec![b'\''];
    for &byte in bytes {
        match byte {
            b'\'' => quoted.extend(b"'\\''"),
            byte => quoted.push(byte),
        }
    }
    quoted.push(b'\'');
    quoted
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shell_reads_back_quoted_value() {
        for value in ["", "/plain/path", "a b", "it's", "$(touch x)`\\\"\n;&|<>*?[]#~!", "é\u{202e}"] {
            let script = [b"printf %s ".as_slice(), &shell_quote(OsStr::new(value))].concat();
            let script = OsString::from_vec(script);
            let output = std::process::Command::new("sh").arg("-c").arg(script).output().unwrap();
            assert_eq!(String::from_utf8(output.stdout).unwrap(), value);
        }
        assert_eq!(shell_quote(OsStr::new("/plain/path-1.0")), b"/plain/path-1.0");
    }
}
