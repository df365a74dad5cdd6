//! `partage sim inject`: breaks the GPUs of a simulated node, and mends them.

use super::super::Outcome;
use super::{attach, counted};
use crate::output::line;
use clap::{Args, Subcommand, ValueEnum};
use partage_sim_node::node::{NodeConfig, NodeDir};
use partage_sim_node::state::{Fault, State};
use std::io::{self, Write};
use std::path::PathBuf;

/// Break a simulated GPU, or mend it
///
/// What programs on the node see from then on is what they would see of a real card: through NVML's events and
/// counters, and through the errors of CUDA calls.
#[derive(Args)]
#[command(
    after_help = EXAMPLES,
    subcommand_value_name = "FAULT",
    subcommand_help_heading = "Faults",
    disable_help_subcommand = true
)]
pub(crate) struct Inject {
    /// The folder of the node [default: $PARTAGE_SIM_DIR]
    #[arg(long, value_name = "DIR", global = true)]
    dir: Option<PathBuf>,

    /// Which GPU: its index, its UUID or the beginning of one, or all [default: the only one]
    #[arg(long, value_name = "GPU", global = true, allow_hyphen_values = true)]
    gpu: Option<String>,

    #[command(subcommand)]
    fault: What,
}

const EXAMPLES: &str = "\
Examples:
  partage sim inject lost                           the node's only GPU falls off the bus
  partage sim inject back                           and is there again
  partage sim inject --gpu 3 xid 13
  partage sim inject --gpu all slow 2.5
  partage sim inject --gpu GPU-513536b6 ecc --uncorrected 1
  partage sim inject --gpu 1 mig on
  partage sim inject driver unload

Exit code: 0 it is so, 2 there is no such node or GPU, or it cannot have this fault";

#[derive(Subcommand)]
enum What {
    /// The driver reports an XID, and nothing else changes
    Xid {
        /// The XID, as in NVIDIA's list
        #[arg(value_name = "CODE", value_parser = xid)]
        code: u32,
    },
    /// Memory errors; uncorrected ones come with XID 48
    #[command(group = clap::ArgGroup::new("errors").required(true).multiple(true))]
    Ecc {
        /// So many errors that the card mended
        #[arg(long, value_name = "N", group = "errors", value_parser = errors)]
        corrected: Option<u64>,
        /// So many errors that it could not mend
        #[arg(long, value_name = "N", group = "errors", value_parser = errors)]
        uncorrected: Option<u64>,
    },
    /// Falls off the bus, with XID 79
    Lost,
    /// Is on the bus again, for processes that start anew
    Back,
    /// Takes so many times as long for everything
    Slow {
        /// 1 to 1000, thousandths included; 1 is as usual
        #[arg(value_name = "FACTOR", value_parser = factor)]
        factor: u32,
    },
    /// Switches MIG mode, at once; the card is not cut in instances
    Mig {
        /// How it is to be
        to: Mode,
    },
    /// Unloads or loads the node's kernel driver
    Driver {
        /// What to do with it
        to: Driver,
    },
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Driver {
    /// As after rmmod: programs that start find no driver
    Unload,
    /// As after modprobe
    Load,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Mode {
    /// Programs that start do not see the GPU
    On,
    /// As usual
    Off,
}

fn xid(text: &str) -> Result<u32, String> {
    text.parse().ok().filter(|&code| code > 0).ok_or_else(|| "use the number of an XID, such as 79".into())
}

fn errors(text: &str) -> Result<u64, String> {
    let errors = text.parse().ok().filter(|errors| (1..=u64::from(u32::MAX)).contains(errors));
    errors.ok_or_else(|| "use a whole number, 1 or more".into())
}

/// A factor in thousandths.
fn factor(text: &str) -> Result<u32, String> {
    let wrong = || "use 1 (as usual) to 1000, such as 2.5".to_string();
    let factor: f64 = text.parse().map_err(|_| wrong())?;
    // What is no number is in no range.
    if (1.0..=1000.0).contains(&factor) { Ok((factor * 1000.0).round() as u32) } else { Err(wrong()) }
}

impl Inject {
    pub(crate) fn run(&self, out: &mut dyn Write, err: &mut dyn Write) -> io::Result<Outcome> {
        match self.happen() {
            Ok(words) => {
                for words in words {
                    line(out, format_args!("{words}"))?;
                }
                Ok(Outcome::Fine)
            }
            Err(what) => {
                line(err, format_args!("error: {what}"))?;
                Ok(Outcome::Unreadable)
            }
        }
    }

    /// Makes it happen and says so, a line for every GPU; or what is wrong, and nothing happened.
    fn happen(&self) -> Result<Vec<String>, String> {
        let (node, state) = attach(self.dir.as_deref())?;
        if let What::Driver { to } = self.fault {
            if self.gpu.is_some() {
                return Err("the driver is the whole node's: leave --gpu out".into());
            }
            return Ok(vec![set_driver(&state, to)]);
        }
        let gpus = which(node.config(), self.gpu.as_deref())?;
        if matches!(self.fault, What::Ecc { .. })
            && let Some((gpu, name)) = gpus.iter().find_map(|&gpu| without_ecc(&node, gpu))
        {
            return Err(format!("GPU {gpu} is a {name}, which has no ECC memory: nothing was injected"));
        }
        if matches!(self.fault, What::Mig { .. })
            && let Some((gpu, name)) = gpus.iter().find_map(|&gpu| without_mig(&node, gpu))
        {
            return Err(format!("GPU {gpu} is a {name}, which has no MIG mode: nothing was injected"));
        }
        Ok(gpus.into_iter().map(|gpu| format!("GPU {gpu}: {}", self.on(&node, &state, gpu))).collect())
    }

    /// Makes it happen on one GPU and says so.
    fn on(&self, node: &NodeDir, state: &State, gpu: usize) -> String {
        match self.fault {
            What::Xid { code } => {
                state.inject(gpu, Fault::Xid(code));
                format!("XID {code} is reported")
            }
            What::Ecc { corrected, uncorrected } => {
                let mut words = Vec::new();
                if let Some(errors) = corrected {
                    state.inject(gpu, Fault::CorrectedErrors(errors));
                    words.push(format!("{} counted", errors_words(errors, "corrected")));
                }
                if let Some(errors) = uncorrected {
                    state.inject(gpu, Fault::UncorrectedErrors(errors));
                    words.push(format!(
                        "{} counted, and XID 48 is reported",
                        errors_words(errors, "uncorrected")
                    ));
                }
                words.join("; ")
            }
            What::Lost if state.is_lost(gpu) => "is off the bus already".into(),
            What::Lost => {
                let there = state.processes(gpu).len();
                state.inject(gpu, Fault::Lost);
                match there {
                    0 => "fell off the bus; XID 79 is reported".into(),
                    _ => format!(
                        "fell off the bus under {}; XID 79 is reported",
                        counted(there, "process", "processes")
                    ),
                }
            }
            What::Back if !state.is_lost(gpu) => "is on the bus already".into(),
            What::Back => {
                state.inject(gpu, Fault::Returned);
                match state.processes(gpu).len() {
                    0 => "is on the bus again".into(),
                    there => format!(
                        "is on the bus again; {} that lost it must start anew",
                        counted(there, "process", "processes")
                    ),
                }
            }
            What::Slow { factor } => {
                state.inject(gpu, Fault::Slow(factor));
                match factor {
                    1000 => "is as fast as usual".into(),
                    _ => format!("takes {} times as long from now on", f64::from(factor) / 1000.0),
                }
            }
            What::Mig { to } => {
                let (enabled, mode) = (to == Mode::On, if to == Mode::On { "enabled" } else { "disabled" });
                if node.is_split(state, gpu) == enabled {
                    return format!("MIG mode is {mode} already");
                }
                state.inject(gpu, Fault::Mig(enabled));
                format!("MIG mode is {mode}")
            }
            // It is no GPU's.
            What::Driver { to } => set_driver(state, to),
        }
    }
}

fn set_driver(state: &State, to: Driver) -> String {
    let loaded = to == Driver::Load;
    if state.is_loaded() == loaded {
        return format!("the driver is {} already", if loaded { "loaded" } else { "unloaded" });
    }
    state.set_loaded(loaded);
    if loaded {
        return "the driver is loaded".into();
    }
    "the driver is unloaded: NVML says so, and programs that start find no GPU".into()
}

fn errors_words(errors: u64, kind: &str) -> String {
    format!("{errors} {kind} error{}", if errors == 1 { "" } else { "s" })
}

fn without_ecc(node: &NodeDir, gpu: usize) -> Option<(usize, String)> {
    let profile = node.config().profile(gpu)?;
    (!profile.memory.ecc).then(|| (gpu, profile.name.to_string()))
}

fn without_mig(node: &NodeDir, gpu: usize) -> Option<(usize, String)> {
    let profile = node.config().profile(gpu)?;
    (profile.mig_instances == 0).then(|| (gpu, profile.name.to_string()))
}

/// The GPUs that are meant.
fn which(config: &NodeConfig, asked: Option<&str>) -> Result<Vec<usize>, String> {
    let all: Vec<usize> = (0..config.gpus.len()).collect();
    let last = all.len().saturating_sub(1);
    let asked = match asked {
        Some(asked) => asked,
        None if all.len() == 1 => return Ok(all),
        None => return Err(format!("which of the {} GPUs? Use --gpu 0 to {last}, or --gpu all", all.len())),
    };
    if asked.eq_ignore_ascii_case("all") {
        return Ok(all);
    }
    if let Ok(index) = asked.parse::<usize>() {
        if all.contains(&index) {
            return Ok(vec![index]);
        }
    } else if asked.len() > 4 && asked.get(..4).is_some_and(|start| start.eq_ignore_ascii_case("GPU-")) {
        let begins = |gpu: &usize| {
            let uuid = config.gpus[*gpu].uuid.as_str();
            uuid.get(..asked.len()).is_some_and(|start| start.eq_ignore_ascii_case(asked))
        };
        let found: Vec<usize> = all.iter().copied().filter(begins).collect();
        match found.len() {
            0 => {}
            1 => return Ok(found),
            many => return Err(format!("{many} UUIDs begin with {asked}: write more of it")),
        }
    }
    let there = if last == 0 { "0".to_string() } else { format!("0 to {last}") };
    Err(format!("the node has no GPU \"{asked}\": use {there}, a UUID, or all"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use partage_driver_api::exports::DriverVersion;
    use partage_sim_node::profile;

    #[test]
    fn factors_are_exact_to_the_thousandth() {
        assert_eq!((factor("1"), factor("2.5"), factor("1000")), (Ok(1000), Ok(2500), Ok(1_000_000)));
        for wrong in ["0.9", "-1", "NaN", "inf", "1001", "fast", ""] {
            assert!(factor(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn gpus_are_named_in_several_ways() {
        let config = NodeConfig::new(DriverVersion::R550, &profile::T4, 3, 7).unwrap();
        let which = |asked| super::which(&config, asked);
        let uuid = &config.gpus[1].uuid;
        let beginning = uuid[..12].to_uppercase();
        assert_eq!((which(Some("2")), which(Some("ALL"))), (Ok(vec![2]), Ok(vec![0, 1, 2])));
        assert_eq!((which(Some(uuid)), which(Some(&beginning))), (Ok(vec![1]), Ok(vec![1])));
        for wrong in [None, Some("3"), Some("-1"), Some("GPU-"), Some(""), Some("GPU-x"), Some("é-é-é")] {
            assert!(which(wrong).is_err(), "{wrong:?}");
        }
        let one = NodeConfig::new(DriverVersion::R550, &profile::T4, 1, 7).unwrap();
        assert_eq!(super::which(&one, None), Ok(vec![0]));
    }
}
