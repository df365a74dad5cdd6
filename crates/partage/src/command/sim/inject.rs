//! `partage sim inject`: injects faults into the GPUs of a simulated node, and clears them.

use super::super::{CommandExit, write_error};
use super::{counted, open_node};
use crate::output::write_line;
use anyhow::{bail, ensure};
use clap::{Args, Subcommand, ValueEnum};
use partage_sim_node::node::{NodeConfig, NodeDir};
use partage_sim_node::state::{GpuFault, SimNodeState};
use std::io::{self, Write};
use std::path::PathBuf;

/// Inject a fault into a simulated GPU, or clear it
///
/// Programs on the node see the fault as on real hardware: in NVML events and counters, and in the errors of CUDA calls.
#[derive(Args)]
#[command(
    after_help = EXAMPLES,
    subcommand_value_name = "FAULT",
    subcommand_help_heading = "Faults",
    disable_help_subcommand = true
)]
pub(crate) struct SimInjectCommand {
    /// Directory of the node [default: $PARTAGE_SIM_DIR]
    #[arg(long, value_name = "DIR", global = true)]
    dir: Option<PathBuf>,

    /// GPU: its index, its UUID or a prefix of it, or all [default: the only GPU]
    #[arg(long, value_name = "GPU", global = true, allow_hyphen_values = true)]
    gpu: Option<String>,

    #[command(subcommand)]
    fault: FaultCommand,
}

const EXAMPLES: &str = "\
Examples:
  partage sim inject lost                           the only GPU falls off the bus
  partage sim inject back                           and returns
  partage sim inject --gpu 3 xid 13
  partage sim inject --gpu all slow 2.5
  partage sim inject --gpu GPU-513536b6 ecc --uncorrected 1
  partage sim inject --gpu 1 mig on
  partage sim inject driver unload

Exit code: 0 success, 2 the node or GPU does not exist, or the GPU cannot have this fault";

#[derive(Subcommand)]
enum FaultCommand {
    /// Report an XID without any other change
    Xid {
        /// XID number, as documented by NVIDIA
        #[arg(value_name = "CODE", value_parser = parse_xid)]
        code: u32,
    },
    /// Count memory errors; uncorrected ones also report XID 48
    #[command(group = clap::ArgGroup::new("errors").required(true).multiple(true))]
    Ecc {
        /// Number of corrected errors
        #[arg(long, value_name = "N", group = "errors", value_parser = parse_error_count)]
        corrected: Option<u64>,
        /// Number of uncorrected errors
        #[arg(long, value_name = "N", group = "errors", value_parser = parse_error_count)]
        uncorrected: Option<u64>,
    },
    /// Drop the GPU off the bus, with XID 79
    Lost,
    /// Return a lost GPU to the bus, for new processes
    Back,
    /// Slow the GPU down by a factor
    Slow {
        /// Factor from 1 (normal speed) to 1000, with at most three decimals
        #[arg(value_name = "FACTOR", value_parser = parse_factor)]
        factor: u32,
    },
    /// Switch MIG mode at once, without creating instances
    Mig {
        /// New mode
        to: MigMode,
    },
    /// Load or unload the kernel driver of the node
    Driver {
        /// Action
        to: DriverAction,
    },
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum DriverAction {
    /// Unload the kernel module; new programs find no driver
    Unload,
    /// Load it again
    Load,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum MigMode {
    /// New programs do not see the GPU
    On,
    /// New programs see the GPU
    Off,
}

fn parse_xid(text: &str) -> Result<u32, String> {
    text.parse().ok().filter(|&code| code > 0).ok_or_else(|| "use an XID number, such as 79".into())
}

fn parse_error_count(text: &str) -> Result<u64, String> {
    let errors = text.parse().ok().filter(|errors| (1..=u64::from(u32::MAX)).contains(errors));
    errors.ok_or_else(|| "use a whole number, 1 or more".into())
}

/// Parses a factor as thousandths.
fn parse_factor(text: &str) -> Result<u32, String> {
    let invalid = || "use 1 (normal speed) to 1000, such as 2.5".to_string();
    let factor: f64 = text.parse().map_err(|_| invalid())?;
    // NaN is in no range.
    if (1.0..=1000.0).contains(&factor) { Ok((factor * 1000.0).round() as u32) } else { Err(invalid()) }
}

impl SimInjectCommand {
    pub(crate) fn run(&self, out: &mut dyn Write, err: &mut dyn Write) -> io::Result<CommandExit> {
        match self.inject() {
            Ok(lines) => {
                for text in lines {
                    write_line(out, format_args!("{text}"))?;
                }
                Ok(CommandExit::Success)
            }
            Err(error) => {
                write_error(err, &error)?;
                Ok(CommandExit::InputError)
            }
        }
    }

    /// Injects the fault and returns a line for each GPU. Injects nothing if there is an error.
    fn inject(&self) -> anyhow::Result<Vec<String>> {
        let (node, state) = open_node(self.dir.as_deref())?;
        if let FaultCommand::Driver { to } = self.fault {
            ensure!(self.gpu.is_none(), "the driver belongs to the whole node: omit --gpu");
            return Ok(vec![set_driver(&state, to)]);
        }
        let gpus = select_gpus(node.config(), self.gpu.as_deref())?;
        if matches!(self.fault, FaultCommand::Ecc { .. })
            && let Some((gpu, name)) = gpus.iter().find_map(|&gpu| without_ecc(&node, gpu))
        {
            bail!("GPU {gpu} is a {name}, which has no ECC memory: nothing was injected");
        }
        if matches!(self.fault, FaultCommand::Mig { .. })
            && let Some((gpu, name)) = gpus.iter().find_map(|&gpu| without_mig(&node, gpu))
        {
            bail!("GPU {gpu} is a {name}, which has no MIG mode: nothing was injected");
        }
        Ok(gpus
            .into_iter()
            .map(|gpu| format!("GPU {gpu}: {}", self.inject_into(&node, &state, gpu)))
            .collect())
    }

    /// Injects the fault into one GPU and describes the result.
    fn inject_into(&self, node: &NodeDir, state: &SimNodeState, gpu: usize) -> String {
        match self.fault {
            FaultCommand::Xid { code } => {
                state.inject(gpu, GpuFault::Xid(code));
                format!("XID {code} reported")
            }
            FaultCommand::Ecc { corrected, uncorrected } => {
                let mut results = Vec::new();
                if let Some(errors) = corrected {
                    state.inject(gpu, GpuFault::CorrectedErrors(errors));
                    results.push(format!("{} counted", count_errors(errors, "corrected")));
                }
                if let Some(errors) = uncorrected {
                    state.inject(gpu, GpuFault::UncorrectedErrors(errors));
                    results.push(format!("{} counted, XID 48 reported", count_errors(errors, "uncorrected")));
                }
                results.join("; ")
            }
            FaultCommand::Lost if state.is_lost(gpu) => "already lost".into(),
            FaultCommand::Lost => {
                let processes = state.processes(gpu).len();
                state.inject(gpu, GpuFault::Lost);
                match processes {
                    0 => "lost, XID 79 reported".into(),
                    _ => format!("lost by {}, XID 79 reported", counted(processes, "process", "processes")),
                }
            }
            FaultCommand::Back if !state.is_lost(gpu) => "not lost".into(),
            FaultCommand::Back => {
                state.inject(gpu, GpuFault::Returned);
                match state.processes(gpu).len() {
                    0 => "back on the bus".into(),
                    processes => format!(
                        "back on the bus; {} that lost it must be restarted",
                        counted(processes, "process", "processes")
                    ),
                }
            }
            FaultCommand::Slow { factor } => {
                state.inject(gpu, GpuFault::Slow(factor));
                match factor {
                    1000 => "normal speed".into(),
                    _ => format!("{} times slower", f64::from(factor) / 1000.0),
                }
            }
            FaultCommand::Mig { to } => {
                let enabled = to == MigMode::On;
                let mode = if enabled { "enabled" } else { "disabled" };
                if node.is_mig_enabled(state, gpu) == enabled {
                    return format!("MIG mode is already {mode}");
                }
                state.inject(gpu, GpuFault::Mig(enabled));
                format!("MIG mode {mode}")
            }
            // Handled before: the driver belongs to the node and not to a GPU.
            FaultCommand::Driver { to } => set_driver(state, to),
        }
    }
}

fn set_driver(state: &SimNodeState, to: DriverAction) -> String {
    let loaded = to == DriverAction::Load;
    if state.is_loaded() == loaded {
        return format!("the driver is already {}", if loaded { "loaded" } else { "unloaded" });
    }
    state.set_loaded(loaded);
    if loaded {
        return "driver loaded".into();
    }
    "driver unloaded: NVML reports it, and new programs find no GPU".into()
}

fn count_errors(errors: u64, kind: &str) -> String {
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

/// Returns the indices of the selected GPUs.
fn select_gpus(config: &NodeConfig, selector: Option<&str>) -> anyhow::Result<Vec<usize>> {
    let all: Vec<usize> = (0..config.gpus.len()).collect();
    let last = all.len().saturating_sub(1);
    let selector = match selector {
        Some(selector) => selector,
        None if all.len() == 1 => return Ok(all),
        None => {
            bail!("the node has {} GPUs: select one with --gpu 0 to {last}, or all with --gpu all", all.len())
        }
    };
    if selector.eq_ignore_ascii_case("all") {
        return Ok(all);
    }
    if let Ok(index) = selector.parse::<usize>() {
        if all.contains(&index) {
            return Ok(vec![index]);
        }
    } else if selector.len() > 4 && selector.get(..4).is_some_and(|start| start.eq_ignore_ascii_case("GPU-"))
    {
        let begins = |gpu: &usize| {
            let uuid = config.gpus[*gpu].uuid.as_str();
            uuid.get(..selector.len()).is_some_and(|start| start.eq_ignore_ascii_case(selector))
        };
        let found: Vec<usize> = all.iter().copied().filter(begins).collect();
        match found.len() {
            0 => {}
            1 => return Ok(found),
            count => bail!("{count} UUIDs begin with {selector}: use a longer prefix"),
        }
    }
    let indices = if last == 0 { "0".to_string() } else { format!("0 to {last}") };
    bail!("the node has no GPU \"{selector}\": use {indices}, a UUID, or all")
}

#[cfg(test)]
mod tests {
    use super::*;
    use partage_driver_api::exports::DriverVersion;
    use partage_sim_node::profile;

    #[test]
    fn factor_is_parsed_to_three_decimals() {
        assert_eq!(
            (parse_factor("1"), parse_factor("2.5"), parse_factor("1000")),
            (Ok(1000), Ok(2500), Ok(1_000_000))
        );
        for wrong in ["0.9", "-1", "NaN", "inf", "1001", "fast", ""] {
            assert!(parse_factor(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn gpus_are_selected_by_index_uuid_prefix_or_all() {
        let config = NodeConfig::new(DriverVersion::R550, &profile::T4, 3, 7).unwrap();
        let select = |selector| select_gpus(&config, selector).ok();
        let uuid = &config.gpus[1].uuid;
        let prefix = uuid[..12].to_uppercase();
        assert_eq!((select(Some("2")), select(Some("ALL"))), (Some(vec![2]), Some(vec![0, 1, 2])));
        assert_eq!((select(Some(uuid)), select(Some(&prefix))), (Some(vec![1]), Some(vec![1])));
        for wrong in [None, Some("3"), Some("-1"), Some("GPU-"), Some(""), Some("GPU-x"), Some("é-é-é")] {
            assert!(select(wrong).is_none(), "{wrong:?}");
        }
        let one = NodeConfig::new(DriverVersion::R550, &profile::T4, 1, 7).unwrap();
        assert_eq!(select_gpus(&one, None).unwrap(), [0]);
    }
}
