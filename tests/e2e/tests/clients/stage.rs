//! A node, the clients, and a workload for them to see.

use crate::container::Container;
use partage_driver_api::exports::DriverVersion;
use partage_testkit::clients::{Branch, Clients};
use partage_testkit::sim_node::{SimNode, Workload};
use partage_testkit::skip_or_fail;
use partage_testkit::workload::Load;
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// A node with the clients of its driver.
pub(crate) struct Stage {
    pub(crate) node: SimNode,
    pub(crate) clients: Clients,
    /// Where its programs run; on the node itself if there is none.
    pub(crate) container: Option<Container>,
}

/// How a client ended, and what it printed.
#[derive(Debug)]
pub(crate) struct Said {
    pub(crate) code: Option<i32>,
    pub(crate) out: String,
    pub(crate) err: String,
}

impl Said {
    /// What it printed, from a client that was content.
    #[track_caller]
    pub(crate) fn well(self) -> String {
        assert_eq!(self.code, Some(0), "{self:#?}");
        self.out
    }
}

impl Stage {
    /// One stage per model and driver, each when its turn comes. None where the clients are missing: the test is skipped,
    /// and says so once.
    pub(crate) fn bare(models: &[&str], count: usize) -> impl Iterator<Item = Self> {
        let clients = Clients::ready().map_err(|missing| skip_or_fail(&missing)).ok();
        let kinds = models.iter().flat_map(|model| DriverVersion::ALL.map(|driver| (*model, driver)));
        kinds.filter_map(move |(model, driver)| {
            let clients = clients.clone()?;
            Some(Self { node: SimNode::new(model, count, driver).unwrap(), clients, container: None })
        })
    }

    /// The same, and then all once more in a container without a limit: there the cards are what they are outside, and the
    /// shim must not be noticed.
    pub(crate) fn each(models: &[&str], count: usize) -> impl Iterator<Item = Self> {
        let contained = Self::bare(models, count).map(|stage| stage.contained(u64::MAX));
        Self::bare(models, count).chain(contained)
    }

    /// All of it in a container with so many bytes of each GPU.
    pub(crate) fn contained(mut self, memory: u64) -> Self {
        self.container = Some(Container::new(&self.node, memory));
        self
    }

    /// One model, with both drivers.
    pub(crate) fn both(model: &str, count: usize) -> impl Iterator<Item = Self> {
        Self::each(&[model], count).collect::<Vec<_>>().into_iter()
    }

    pub(crate) fn driver(&self) -> DriverVersion {
        self.node.config().driver
    }

    /// Starts a program that uses a GPU.
    pub(crate) fn workload(&self, gpu: u32, memory_mib: u64, busy: u32) -> Workload {
        self.workload_in(self.container.as_ref(), Load { gpu, memory_mib, busy })
    }

    /// Starts one in a container, which need not be the stage's own.
    pub(crate) fn workload_in(&self, container: Option<&Container>, load: Load) -> Workload {
        let program = Path::new(partage_e2e::testkit());
        match container {
            Some(container) => self.node.workload_with(program, load, &container.libraries()),
            None => self.node.workload(program, load),
        }
        .unwrap()
    }

    /// Lets a program see what the stage's programs see.
    pub(crate) fn env<'a>(&self, command: &'a mut Command) -> &'a mut Command {
        self.node.env(command);
        match &self.container {
            Some(container) => command.env("LD_LIBRARY_PATH", container.libraries()),
            None => command,
        }
    }

    /// What people call its cards.
    pub(crate) fn model(&self) -> &str {
        &self.node.card(0).unwrap().model
    }

    /// What a process of the workload takes of a GPU, in bytes: what it asked for, and its context.
    pub(crate) fn held(&self, memory_mib: u64) -> u64 {
        self.node.card(0).unwrap().memory.context + (memory_mib << 20)
    }

    /// The driver's own `nvidia-smi`.
    pub(crate) fn smi_program(&self) -> PathBuf {
        let branch = match self.driver() {
            DriverVersion::R535 => Branch::R535,
            DriverVersion::R550 => Branch::R550,
        };
        self.clients.nvidia_smi(branch)
    }

    /// What it says.
    pub(crate) fn smi(&self, arguments: &[&str]) -> Said {
        self.run(&self.smi_program(), arguments)
    }

    /// Python with what is to be run.
    pub(crate) fn python(&self, arguments: &[&str]) -> Said {
        self.run(&self.clients.python(), arguments)
    }

    /// What a script beside these tests prints.
    #[track_caller]
    pub(crate) fn script(&self, name: &str, arguments: &[&str]) -> Value {
        let script: PathBuf = [env!("CARGO_MANIFEST_DIR"), "tests/clients", name].iter().collect();
        let mut all = vec![script.to_str().unwrap()];
        all.extend(arguments);
        let said = self.python(&all);
        serde_json::from_str(&said.out).unwrap_or_else(|error| panic!("{error}: {said:#?}"))
    }

    fn run(&self, program: &Path, arguments: &[&str]) -> Said {
        let mut command = Command::new(program);
        command.args(arguments).stdin(Stdio::null());
        // Nothing is compiled beside the scripts, and what numba compiles is compiled here.
        command.env("PYTHONDONTWRITEBYTECODE", "1").env("LC_ALL", "C.UTF-8").env("TERM", "vt100");
        let output = self.env(&mut command).output().unwrap();
        let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
        Said { code: output.status.code(), out: text(output.stdout), err: text(output.stderr) }
    }
}

/// Bytes in MiB, as tables have them.
pub(crate) fn mib(bytes: u64) -> u64 {
    bytes >> 20
}
