//! Shares to start with `partage up`, from a file.

use super::News;
use partage_workstation::client::Client;
use partage_workstation::home::Home;
use serde::Deserialize;
use std::collections::BTreeSet;
use std::io::{BufRead, BufReader, Read};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

/// What the file says.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub(super) struct Workloads {
    shares: Vec<Workload>,
}

/// One share and its command, in the words of `partage run`.
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
    pub(super) mode: Option<String>,
    #[serde(default)]
    pub(super) model: Option<String>,
    command: Vec<String>,
}

impl Workloads {
    pub(super) fn load(path: &Path) -> Result<Workloads, String> {
        let place = path.display();
        let text = crate::input::text(path).map_err(|what| format!("{place}: {what}"))?;
        let workloads: Workloads =
            serde_saphyr::from_str(&text).map_err(|error| format!("{place}: {error}"))?;
        let mut names = BTreeSet::new();
        for workload in &workloads.shares {
            if !names.insert(&workload.name) {
                return Err(format!(
                    "{place}: two shares are called {}: give each its own name",
                    workload.name
                ));
            }
            if workload.command.is_empty() {
                return Err(format!(
                    "{place}: {} has no command: write one, as a list of words",
                    workload.name
                ));
            }
        }
        Ok(workloads)
    }

    /// Starts all of them, as `partage run` would.
    pub(super) fn start(self, home: &Home, news: &Arc<News>) -> Started {
        let started = self.shares.into_iter().map(|workload| {
            let child = workload.start(home, news);
            if let Err(error) = &child {
                news.tell(&format!("{}: cannot be started: {error}", workload.name));
            }
            (workload, child.ok())
        });
        Started(started.collect())
    }
}

impl Workload {
    fn start(&self, home: &Home, news: &Arc<News>) -> std::io::Result<Child> {
        let mut command = Command::new("/proc/self/exe");
        command.arg0("partage").arg("run").args(["--name", &self.name]);
        command.arg("--home").arg(home.path());
        let options = [
            ("--gpus", self.gpus.map(|gpus| gpus.to_string())),
            ("--memory", self.memory.clone()),
            ("--memory-percent", self.memory_percent.map(|percent| percent.to_string())),
            ("--cores", self.cores.map(|cores| cores.to_string())),
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
        // Ctrl-C is for who started them: it ends them in order.
        command.process_group(0);
        let mut child = command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn()?;
        let outputs: [Option<Box<dyn Read + Send>>; 2] = [
            child.stdout.take().map(|out| Box::new(out) as _),
            child.stderr.take().map(|err| Box::new(err) as _),
        ];
        for output in outputs.into_iter().flatten() {
            let (name, news) = (self.name.clone(), Arc::clone(news));
            std::thread::spawn(move || {
                for words in BufReader::new(output).lines().map_while(Result::ok) {
                    let words =
                        words.strip_prefix(&format!("partage: {name}: ")).unwrap_or(&words).to_string();
                    news.tell(&format!("{name}: {words}"));
                }
            });
        }
        Ok(child)
    }
}

/// Shares that were started here.
pub(super) struct Started(Vec<(Workload, Option<Child>)>);

impl Started {
    pub(super) fn workloads(&self) -> impl Iterator<Item = &Workload> {
        self.0.iter().map(|(workload, _)| workload)
    }

    /// Ends all that still run.
    pub(super) fn end(&mut self, client: &Client, grace: Duration) {
        std::thread::scope(|scope| {
            for (workload, child) in &mut self.0 {
                scope.spawn(move || {
                    // One that has ended by itself is no share any more.
                    let _ = client.stop(&workload.name, grace);
                    if let Some(child) = child {
                        let _ = child.wait();
                    }
                });
            }
        });
    }
}
