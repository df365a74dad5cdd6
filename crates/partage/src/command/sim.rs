//! `partage sim`: simulated nodes, for machines without a GPU.

mod env;
mod inject;
mod list;
mod rm;
mod top;

use super::Outcome;
use clap::{Args, Subcommand};
use partage_sim_node::node::{self, NodeDir};
use partage_sim_node::state::State;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

/// Simulated NVIDIA GPUs that programs take for real ones
///
/// A simulated node is a folder; programs that are told of it find its GPUs through the driver's two libraries,
/// libcuda.so.1 and libnvidia-ml.so.1. Nothing runs in the background.
#[derive(Args)]
#[command(after_help = "Start with: eval \"$(partage sim env)\"")]
pub(crate) struct Sim {
    #[command(subcommand)]
    what: What,
}

#[derive(Subcommand)]
enum What {
    Env(env::Env),
    Top(top::Top),
    Inject(inject::Inject),
    List(list::List),
    Rm(rm::Rm),
}

impl Sim {
    pub(crate) fn run(&self, out: &mut dyn Write, err: &mut dyn Write) -> io::Result<Outcome> {
        match &self.what {
            What::Env(env) => env.run(out, err),
            What::Top(top) => top.run(out, err),
            What::Inject(inject) => inject.run(out, err),
            What::List(list) => list.run(out),
            What::Rm(rm) => rm.run(err),
        }
    }
}

/// The node that is meant: the one in the folder, or the one that the shell has.
fn attach(dir: Option<&Path>) -> Result<(NodeDir, State), String> {
    let named = || std::env::var_os(node::VARIABLE).filter(|dir| !dir.is_empty()).map(PathBuf::from);
    let dir = dir.map(Path::to_path_buf).or_else(named).ok_or_else(|| {
        format!(
            "which simulated node? Give its folder with --dir, or make one first: eval \"$(partage sim env)\" \
             sets {}",
            node::VARIABLE
        )
    })?;
    let node = NodeDir::open(&dir).map_err(|error| error.to_string())?;
    let state = State::attach(node.path()).map_err(|error| error.to_string())?;
    Ok((node, state))
}

/// `1 GPU`, `2 GPUs`.
fn counted(count: usize, what: &str, many: &str) -> String {
    format!("{count} {}", if count == 1 { what } else { many })
}
