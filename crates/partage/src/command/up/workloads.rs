//! Workload files of `partage up --start`: shares to start, each with its command.

use super::ActivityLog;
use anyhow::{Context, ensure};
use partage_workstation::client::DaemonClient;
use partage_workstation::state_dir::StateDir;
use serde::Deserialize;
use std::collections::BTreeSet;
use std::io::{BufRead, BufReader, Read};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

/// The contents of a workload file.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub(super) struct Workloads {
    shares: Vec<Workload>,
}

/// One share and its command; the fields are options of `partage run`.
#[derive(Clone, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub(super) struct Workload {
    pub(super) name: String,
    #[serde(default)]
    pub(super) gpus: Option<u32>,
    #[serde(default)]
    pub(super) memory: Option<String>,
    #[serde(default)]
    pub(super) memory_percent: Option<u32>,
    #[serde(default)]
    pub(super) cores: Option<f64>,
    #[serde(default)]
    pub(super) whole: bool,
    #[serde(default)]
    pub(super) oversubscribe: bool,
    #[serde(default)]
    pub(super) latency: Option<String>,
    #[serde(default)]
    pub(super) priority: Option<u32>,
    #[serde(default)]
    pub(super) mode: Option<String>,
    #[serde(default)]
    pub(super) model: Option<String>,
    command: Vec<String>,
}

impl Workloads {
    /// Reads and validates a file.
    pub(super) fn load(path: &Path) -> anyhow::Result<Workloads> {
        Workloads::read(path).with_context(|| path.display().to_string())
    }

    fn read(path: &Path) -> anyhow::Result<Workloads> {
        let text = crate::manifest_files::read_text(path)?;
        let workloads: Workloads = serde_saphyr::from_str(&text)?;
        let mut names = BTreeSet::new();
        for Workload { name, command, .. } in &workloads.shares {
            ensure!(names.insert(name), "duplicate share name {name}: give each share its own name");
            ensure!(!command.is_empty(), "{name} has no command: write it as a list of words");
        }
        Ok(workloads)
    }

    /// Starts all workloads with `partage run`.
    pub(super) fn start(self, state_dir: &StateDir, log: &Arc<ActivityLog>) -> StartedWorkloads {
        let started = self.shares.into_iter().map(|workload| {
            let child = workload.start(state_dir, log);
            if let Err(error) = &child {
                log.push(&format!("{}: cannot start: {error}", workload.name));
            }
            (workload, child.ok())
        });
        StartedWorkloads(started.collect())
    }
}

impl Workload {
    fn start(&self, state_dir: &StateDir, log: &Arc<ActivityLog>) -> std::io::Result<Child> {
        let mut command = Command::new("/proc/self/exe");
        command.arg0("partage").arg("run").args(["--name", &self.name]);
        command.arg("--state-dir").arg(state_dir.path());
        let options = [
            ("--gpus", self.gpus.map(|gpus| gpus.to_string())),
            ("--memory", self.memory.clone()),
            ("--memory-percent", self.memory_percent.map(|percent| percent.to_string())),
            ("--cores", self.cores.map(|cores| cores.to_string())),
            ("--latency", self.latency.clone()),
            ("--priority", self.priority.map(|priority| priority.to_string())),
            ("--mode", self.mode.clone()),
            ("--model", self.model.clone()),
        ];
        for (option, value) in options {
            if let Some(value) = value {
                command.arg(format!("{option}={value}"));
            }
        }
        if self.whole {
            command.arg("--whole");
        }
        if self.oversubscribe {
            command.arg("--oversubscribe");
        }
        command.arg("--").args(&self.command);
        // In its own process group, so that Ctrl-C reaches only `partage up`, which stops the shares itself.
        command.process_group(0);
        let mut child = command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn()?;
        let outputs: [Option<Box<dyn Read + Send>>; 2] = [
            child.stdout.take().map(|out| Box::new(out) as _),
            child.stderr.take().map(|err| Box::new(err) as _),
        ];
        for output in outputs.into_iter().flatten() {
            let (name, log) = (self.name.clone(), Arc::clone(log));
            std::thread::spawn(move || {
                for line in BufReader::new(output).lines().map_while(Result::ok) {
                    let line = line.strip_prefix(&format!("partage: {name}: ")).unwrap_or(&line);
                    log.push(&format!("{name}: {line}"));
                }
            });
        }
        Ok(child)
    }
}

/// Workloads that were started, with their processes.
pub(super) struct StartedWorkloads(Vec<(Workload, Option<Child>)>);

impl StartedWorkloads {
    pub(super) fn workloads(&self) -> impl Iterator<Item = &Workload> {
        self.0.iter().map(|(workload, _)| workload)
    }

    /// Stops all workloads that still run.
    pub(super) fn stop(&mut self, client: &DaemonClient, grace: Duration) {
        std::thread::scope(|scope| {
            for (workload, child) in &mut self.0 {
                scope.spawn(move || {
                    // An error means that the share has already ended.
                    let _ = client.stop(&workload.name, grace);
                    if let Some(child) = child {
                        let _ = child.wait();
                    }
                });
            }
        });
    }
}
