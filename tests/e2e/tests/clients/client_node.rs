//! A node, the clients, and a workload for them to show.

use crate::shim_container::ShimContainer;
use partage_driver_api::exports::DriverVersion;
use partage_testkit::clients::{Clients, DriverBranch};
use partage_testkit::sim_node::{SimNode, WorkloadProcess};
use partage_testkit::skip_or_fail;
use partage_testkit::workload::WorkloadOptions;
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// A node with the clients of its driver.
pub(crate) struct ClientNode {
    pub(crate) node: SimNode,
    pub(crate) clients: Clients,
    /// Where its programs run; on the node itself if `None`.
    pub(crate) shim_container: Option<ShimContainer>,
}

/// Exit code and output of a client.
#[derive(Debug)]
pub(crate) struct ClientOutput {
    pub(crate) code: Option<i32>,
    pub(crate) out: String,
    pub(crate) err: String,
}

impl ClientOutput {
    /// Returns the output of a client, and fails unless it succeeded.
    #[track_caller]
    pub(crate) fn success(self) -> String {
        assert_eq!(self.code, Some(0), "{self:#?}");
        self.out
    }
}

impl ClientNode {
    /// Returns one test node per model and driver, each created when the iterator reaches it. Empty if the clients are
    /// missing: the test is skipped, which is reported once.
    pub(crate) fn on_node(models: &[&str], count: usize) -> impl Iterator<Item = Self> {
        let clients = Clients::ready().map_err(|missing| skip_or_fail(&missing)).ok();
        let kinds = models.iter().flat_map(|model| DriverVersion::ALL.map(|driver| (*model, driver)));
        kinds.filter_map(move |(model, driver)| {
            let clients = clients.clone()?;
            Some(Self { node: SimNode::new(model, count, driver).unwrap(), clients, shim_container: None })
        })
    }

    /// Returns the same nodes, and then all of them once more in a container without a limit: there the cards must look
    /// as outside, and the shim must not be noticeable.
    pub(crate) fn on_node_and_in_container(models: &[&str], count: usize) -> impl Iterator<Item = Self> {
        let container_limits =
            Self::on_node(models, count).map(|client_node| client_node.in_container(u64::MAX));
        Self::on_node(models, count).chain(container_limits)
    }

    /// Moves the node's programs into a container with `memory` bytes of each GPU.
    pub(crate) fn in_container(mut self, memory: u64) -> Self {
        self.shim_container = Some(ShimContainer::new(&self.node, memory));
        self
    }

    /// Returns one node per driver, with one model.
    pub(crate) fn one_model(model: &str, count: usize) -> impl Iterator<Item = Self> {
        Self::on_node_and_in_container(&[model], count).collect::<Vec<_>>().into_iter()
    }

    pub(crate) fn driver(&self) -> DriverVersion {
        self.node.config().driver
    }

    /// Starts a program that uses a GPU.
    pub(crate) fn workload(&self, gpu: u32, memory_mib: u64, busy: u32) -> WorkloadProcess {
        self.workload_in(self.shim_container.as_ref(), WorkloadOptions { gpu, memory_mib, busy })
    }

    /// Starts one in a container, which need not be the node's own.
    pub(crate) fn workload_in(
        &self,
        shim_container: Option<&ShimContainer>,
        load: WorkloadOptions,
    ) -> WorkloadProcess {
        let program = Path::new(partage_e2e::testkit());
        match shim_container {
            Some(shim_container) => self.node.workload_with(program, load, &shim_container.libraries()),
            None => self.node.workload(program, load),
        }
        .unwrap()
    }

    /// Sets the environment of the node's programs on a command.
    pub(crate) fn env<'a>(&self, command: &'a mut Command) -> &'a mut Command {
        self.node.env(command);
        match &self.shim_container {
            Some(shim_container) => command.env("LD_LIBRARY_PATH", shim_container.libraries()),
            None => command,
        }
    }

    /// Returns the common name of its cards.
    pub(crate) fn model(&self) -> &str {
        &self.node.card(0).unwrap().model
    }

    /// Returns the bytes of a GPU that a workload process uses: what it allocated, and its context.
    pub(crate) fn memory_with_context(&self, memory_mib: u64) -> u64 {
        self.node.card(0).unwrap().memory.context + (memory_mib << 20)
    }

    /// Returns the driver's own `nvidia-smi`.
    pub(crate) fn nvidia_smi_program(&self) -> PathBuf {
        let branch = match self.driver() {
            DriverVersion::R535 => DriverBranch::R535,
            DriverVersion::R550 => DriverBranch::R550,
        };
        self.clients.nvidia_smi(branch)
    }

    /// Runs the driver's own `nvidia-smi`.
    pub(crate) fn nvidia_smi(&self, arguments: &[&str]) -> ClientOutput {
        self.run(&self.nvidia_smi_program(), arguments)
    }

    /// Runs Python with these arguments.
    pub(crate) fn python(&self, arguments: &[&str]) -> ClientOutput {
        self.run(&self.clients.python(), arguments)
    }

    /// Runs a script of these tests, and returns its JSON output.
    #[track_caller]
    pub(crate) fn script(&self, name: &str, arguments: &[&str]) -> Value {
        let script: PathBuf = [env!("CARGO_MANIFEST_DIR"), "tests/clients", name].iter().collect();
        let mut all = vec![script.to_str().unwrap()];
        all.extend(arguments);
        let output = self.python(&all);
        serde_json::from_str(&output.out).unwrap_or_else(|error| panic!("{error}: {output:#?}"))
    }

    fn run(&self, program: &Path, arguments: &[&str]) -> ClientOutput {
        let mut command = Command::new(program);
        command.args(arguments).stdin(Stdio::null());
        // No bytecode is written next to the scripts.
        command.env("PYTHONDONTWRITEBYTECODE", "1").env("LC_ALL", "C.UTF-8").env("TERM", "vt100");
        let output = self.env(&mut command).output().unwrap();
        let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
        ClientOutput { code: output.status.code(), out: text(output.stdout), err: text(output.stderr) }
    }
}

/// Returns bytes in MiB, as tables show them.
pub(crate) fn mib(bytes: u64) -> u64 {
    bytes >> 20
}
