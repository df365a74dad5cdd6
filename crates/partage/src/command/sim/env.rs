//! `partage sim env`: makes a simulated node and says what programs need to find it.

use super::super::Outcome;
use crate::input;
use crate::output::line;
use clap::{Args, ValueEnum};
use partage_driver_api::exports::DriverVersion;
use partage_sim_node::install::{self, InstallError};
use partage_sim_node::node::{self, NodeConfig, NodeDir, Settings};
use partage_sim_node::profile::Profile;
use std::ffi::{OsStr, OsString};
use std::io::{self, ErrorKind, Write};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};

/// Print the variables that make programs see simulated GPUs
///
/// Makes a simulated node and prints export lines for a shell to evaluate. Without --dir the node is a new one, in
/// memory where that is possible; with --dir it is the one in that folder, which is made where there is none. Every
/// program that has the variables sees the node's GPUs, and all of them share it.
#[derive(Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Env {
    /// How many GPUs, 1 to 16 [default: 1]
    #[arg(long, value_name = "N")]
    gpus: Option<usize>,

    /// Which card: a name of `partage sim list` or a JSON file [default: A100-SXM4-40GB]
    #[arg(long, value_name = "MODEL|FILE")]
    model: Option<String>,

    /// Which driver: 535 or 550 [default: 550]
    #[arg(long, value_name = "BRANCH", value_parser = driver)]
    driver: Option<DriverVersion>,

    /// The folder of the node
    #[arg(long, value_name = "DIR")]
    dir: Option<PathBuf>,

    /// What UUIDs and serial numbers are made from [default: the folder's name; anything in a new one]
    #[arg(long, value_name = "N")]
    seed: Option<u64>,

    /// How to answer
    #[arg(short, long, value_enum, default_value_t = Form::Shell)]
    output: Form,

    #[command(flatten)]
    time: Time,
}

/// How long things take on a node.
#[derive(Args)]
#[command(next_help_heading = "Settings of the node")]
struct Time {
    /// How long a process has a GPU before the next one's turn, in microseconds [default: 2000]
    #[arg(long, value_name = "N")]
    slice_micros: Option<u32>,

    /// How long a kernel takes whose name does not say so, in microseconds [default: 10]
    #[arg(long, value_name = "N")]
    kernel_micros: Option<u32>,

    /// How many launches can wait before the next one has to [default: 1024]
    #[arg(long, value_name = "N")]
    queue: Option<u32>,
}

impl Time {
    /// What was asked for, in place of what is there.
    fn over(&self, there: &Settings) -> Settings {
        Settings {
            slice_micros: self.slice_micros.unwrap_or(there.slice_micros),
            kernel_micros: self.kernel_micros.unwrap_or(there.kernel_micros),
            queue: self.queue.unwrap_or(there.queue),
        }
    }
}

const EXAMPLES: &str = "\
Examples:
  eval \"$(partage sim env)\"
  eval \"$(partage sim env --gpus 8 --model H100-SXM5-80GB --driver 535)\"
  eval \"$(partage sim env --dir /tmp/node)\"     again in another terminal: the same node
  partage sim env --model my-card.json -o json

A node stays until it is removed: partage sim rm \"$PARTAGE_SIM_DIR\"

Exit code: 0 done, 2 it cannot be made, or the folder holds something else than asked for";

#[derive(Clone, Copy, ValueEnum)]
enum Form {
    /// Lines for a shell
    Shell,
    /// For programs
    Json,
}

fn driver(text: &str) -> Result<DriverVersion, String> {
    let known = || DriverVersion::ALL.map(|driver| driver.branch().to_string()).join(" or ");
    node::driver(text).ok_or_else(|| format!("use {}", known()))
}

impl Env {
    pub(crate) fn run(&self, out: &mut dyn Write, err: &mut dyn Write) -> io::Result<Outcome> {
        let node = match self.node(err)? {
            Ok(node) => node,
            Err(what) => {
                line(err, format_args!("error: {what}"))?;
                return Ok(Outcome::Unreadable);
            }
        };
        let variables = [
            (node::VARIABLE, node.path().as_os_str().to_owned()),
            ("LD_LIBRARY_PATH", library_path(&node.libraries())),
        ];
        match self.output {
            Form::Shell => {
                for (name, value) in &variables {
                    write!(out, "export {name}=")?;
                    out.write_all(&quoted(value))?;
                    writeln!(out)?;
                }
            }
            Form::Json => {
                let text = |value: &OsString| value.to_string_lossy().into_owned();
                let variables = variables.iter().map(|(name, value)| (*name, text(value)));
                serde_json::to_writer_pretty(
                    &mut *out,
                    &variables.collect::<std::collections::BTreeMap<_, _>>(),
                )?;
                writeln!(out)?;
            }
        }
        // An evaluation by a shell reads only the lines above.
        line(
            err,
            format_args!("{}; remove it with: partage sim rm {}", words(&node), node.path().display()),
        )?;
        Ok(Outcome::Fine)
    }

    /// The node asked for, with the driver's libraries in it; or what is wrong.
    fn node(&self, err: &mut dyn Write) -> io::Result<Result<NodeDir, String>> {
        let (node, new) = match self.folder() {
            Ok(found) => found,
            Err(what) => return Ok(Err(what)),
        };
        let installed = install::shared_object().and_then(|object| {
            install::libraries(&object, &node.libraries(), node.config().driver, node.path())
        });
        match installed {
            Ok(()) => Ok(Ok(node)),
            // Somebody else's node: it has its libraries.
            Err(error) if !new && is_denied(&error) && node.libraries().join("libcuda.so.1").exists() => {
                line(err, format_args!("warning: the libraries stay as they are: {error}"))?;
                Ok(Ok(node))
            }
            Err(error) => {
                if new {
                    // What is of no use is not left behind; that it cannot be removed is not what went wrong.
                    let _ = NodeDir::remove(node.path());
                }
                Ok(Err(error.to_string()))
            }
        }
    }

    /// The node's folder, and whether it was made just now.
    fn folder(&self) -> Result<(NodeDir, bool), String> {
        // The loader ends a folder at the first two and replaces what follows the third.
        let special = |byte: &u8| b":;$".contains(byte);
        if let Some(dir) = self.dir.as_ref().filter(|dir| dir.as_os_str().as_bytes().iter().any(special)) {
            let dir = dir.display();
            return Err(format!(
                "{dir}: libraries are not found in a folder with :, ; or $ in its name: use another"
            ));
        }
        if let Some(dir) = &self.dir
            && let Ok(node) = NodeDir::open(dir)
        {
            return self.as_asked(node).map(|node| (node, false));
        }
        let seed = self.seed.unwrap_or_else(|| match &self.dir {
            Some(dir) => node::seed_of(dir),
            None => node::fresh_seed(),
        });
        let card = match &self.model {
            Some(model) => card(model)?,
            None => partage_sim_node::profile::A100_SXM4_40GB.clone(),
        };
        let driver = self.driver.unwrap_or(DriverVersion::R550);
        let config = NodeConfig::new(driver, &card, self.gpus.unwrap_or(1), seed);
        let mut config = config.map_err(|error| error.to_string())?;
        config.settings = self.time.over(&config.settings);
        config.validate().map_err(|error| error.to_string())?;
        let made = match &self.dir {
            Some(dir) => NodeDir::create(dir, &config),
            None => NodeDir::fresh(&config),
        };
        made.map(|node| (node, true)).map_err(|error| error.to_string())
    }

    /// A node that is there, if it is what was asked for; what was not asked for may be anything.
    fn as_asked(&self, node: NodeDir) -> Result<NodeDir, String> {
        let config = node.config();
        let mut differs = Vec::new();
        if let Some(gpus) = self.gpus.filter(|&gpus| gpus != config.gpus.len()) {
            differs.push(format!("it has {}, asked were {gpus}", counted(config.gpus.len())));
        }
        if let Some(model) = &self.model {
            let card = card(model)?;
            if config.profiles.iter().any(|there| *there != card) {
                let there: Vec<&str> = config.profiles.iter().map(|profile| profile.model.as_ref()).collect();
                let there = there.join(" and ");
                differs.push(match there == card.model {
                    true => format!("its {there} has other figures"),
                    false => format!("its model is {there}, asked was {}", card.model),
                });
            }
        }
        if let Some(driver) = self.driver.filter(|&driver| driver != config.driver) {
            let (is, asked) = (config.driver.version(), driver.version());
            differs.push(format!("its driver is {is}, asked was {asked}"));
        }
        if let Some(seed) = self.seed.filter(|&seed| seed != config.seed) {
            differs.push(format!("its seed is {}, asked was {seed}", config.seed));
        }
        let (is, asked) = (&config.settings, self.time.over(&config.settings));
        for (name, is, asked) in [
            ("slice", is.slice_micros, asked.slice_micros),
            ("kernel time", is.kernel_micros, asked.kernel_micros),
            ("queue", is.queue, asked.queue),
        ] {
            if is != asked {
                differs.push(format!("its {name} is {is}, asked was {asked}"));
            }
        }
        if differs.is_empty() {
            return Ok(node);
        }
        let path = node.path().to_path_buf();
        Err(node::NodeError::Another { path, what: differs.join("; ") }.to_string())
    }
}

/// A card by its name or from a file.
fn card(text: &str) -> Result<Profile, String> {
    let looks_like_a_file =
        text.contains('/') || text.ends_with(".json") || text == "-" || Path::new(text).exists();
    match Profile::named(text) {
        Some(card) => Ok(card.clone()),
        None if looks_like_a_file => {
            let name = if text == "-" { "standard input" } else { text };
            let contents = input::text(Path::new(text)).map_err(|what| format!("{name}: {what}"))?;
            Profile::from_json(&contents).map_err(|error| format!("{name}: {error}"))
        }
        None => Profile::find(text).cloned().map_err(|error| error.to_string()),
    }
}

fn is_denied(error: &InstallError) -> bool {
    let denied = [ErrorKind::PermissionDenied, ErrorKind::ReadOnlyFilesystem];
    matches!(error, InstallError::Io { error, .. } if denied.contains(&error.kind()))
}

fn counted(gpus: usize) -> String {
    super::counted(gpus, "GPU", "GPUs")
}

/// `simulated node: 2 GPUs, Tesla T4, driver 550.163.01`
fn words(node: &NodeDir) -> String {
    let config = node.config();
    let names: Vec<&str> = config.profiles.iter().map(|profile| profile.name.as_ref()).collect();
    let (gpus, names) = (counted(config.gpus.len()), names.join(" and "));
    format!("simulated node: {gpus}, {names}, driver {}", config.driver.version())
}

/// The folder before what is there, without the folder of the node that was there before.
fn library_path(folder: &Path) -> OsString {
    let before = std::env::var_os(node::VARIABLE).map(|dir| Path::new(&dir).join("lib"));
    let there = std::env::var_os("LD_LIBRARY_PATH").unwrap_or_default();
    let mut path = folder.as_os_str().as_bytes().to_vec();
    for part in there.as_bytes().split(|&byte| byte == b':') {
        let of_ours = [Some(folder), before.as_deref()].contains(&Some(Path::new(OsStr::from_bytes(part))));
        if !part.is_empty() && !of_ours {
            path.push(b':');
            path.extend(part);
        }
    }
    OsString::from_vec(path)
}

/// As one word of a shell, whatever is in it.
fn quoted(value: &OsStr) -> Vec<u8> {
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
    fn a_shell_reads_back_what_was_quoted() {
        for value in ["", "/plain/path", "a b", "it's", "$(touch x)`\\\"\n;&|<>*?[]#~!", "é\u{202e}"] {
            let script = [b"printf %s ".as_slice(), &quoted(OsStr::new(value))].concat();
            let script = OsString::from_vec(script);
            let output = std::process::Command::new("sh").arg("-c").arg(script).output().unwrap();
            assert_eq!(String::from_utf8(output.stdout).unwrap(), value);
        }
        assert_eq!(quoted(OsStr::new("/plain/path-1.0")), b"/plain/path-1.0");
    }
}
