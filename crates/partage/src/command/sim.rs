//! `partage sim`: simulated nodes for machines without a GPU.

mod env;
mod inject;
mod list;
mod rm;
mod top;

use super::CommandExit;
use anyhow::anyhow;
use clap::{Args, Subcommand};
use partage_sim_node::node::{self, NodeDir};
use partage_sim_node::state::SimNodeState;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

/// Simulate NVIDIA GPUs on a machine without a GPU
///
/// A simulated node is a directory. Programs use its GPUs through simulated driver libraries, libcuda.so.1 and libnvidia-ml.so.1; no
/// process runs in the background.
#[derive(Args)]
#[command(after_help = "Start with: eval \"$(partage sim env)\"")]
pub(crate) struct SimCommand {
    #[command(subcommand)]
    command: SimSubcommand,
}

#[derive(Subcommand)]
enum SimSubcommand {
    Env(env::SimEnvCommand),
    Top(top::SimTopCommand),
    Inject(inject::SimInjectCommand),
    List(list::SimListCommand),
    Rm(rm::SimRmCommand),
}

impl SimCommand {
    pub(crate) fn run(&self, out: &mut dyn Write, err: &mut dyn Write) -> io::Result<CommandExit> {
        match &self.command {
            SimSubcommand::Env(env) => env.run(out, err),
            SimSubcommand::Top(top) => top.run(out, err),
            SimSubcommand::Inject(inject) => inject.run(out, err),
            SimSubcommand::List(list) => list.run(out),
            SimSubcommand::Rm(rm) => rm.run(err),
        }
    }
}

/// Opens the node in this directory, or in that of the environment variable.
fn open_node(dir: Option<&Path>) -> anyhow::Result<(NodeDir, SimNodeState)> {
    let from_env =
        || std::env::var_os(node::NODE_DIR_VARIABLE).filter(|dir| !dir.is_empty()).map(PathBuf::from);
    let dir = dir.map(Path::to_path_buf).or_else(from_env).ok_or_else(|| {
        anyhow!(
            "no simulated node specified: use --dir, or create a node with eval \"$(partage sim env)\", which sets {}",
            node::NODE_DIR_VARIABLE
        )
    })?;
    let node = NodeDir::open(&dir)?;
    let state = SimNodeState::attach(node.path())?;
    Ok((node, state))
}

/// Formats a count with its noun: `1 GPU`, `2 GPUs`.
fn counted(count: usize, singular: &str, plural: &str) -> String {
    format!("{count} {}", if count == 1 { singular } else { plural })
}
