//! Defines the addresses of a bed, and moves threads into its network.

use super::BedError;
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};
use std::fs::File;
use std::io::Write;
use std::net::Ipv4Addr;
use std::os::fd::AsFd;
use std::process::{Command, Stdio};
use std::sync::Arc;

/// Address of the control plane's host; servers of a test listen here too.
pub(super) const HOST_ADDRESS: Ipv4Addr = Ipv4Addr::new(10, 200, 0, 1);
/// Address of `kubernetes.default`. There is no kube-proxy: the host itself has this address.
pub(super) const KUBERNETES_ADDRESS: Ipv4Addr = Ipv4Addr::new(10, 96, 0, 1);
/// Address of the DNS server for pods.
pub(super) const DNS_ADDRESS: Ipv4Addr = Ipv4Addr::new(10, 96, 0, 10);
/// Address range of services.
pub(super) const SERVICE_CIDR: &str = "10.96.0.0/16";

/// Maximum number of nodes of a bed: the node number is one byte of its addresses.
pub(super) const MAX_NODES: usize = 200;

/// Returns the address of the node with this number, from 1.
pub(super) fn node_address(number: u8) -> Ipv4Addr {
    Ipv4Addr::new(10, 200, 1, number)
}

pub(super) fn pod_network(number: u8) -> String {
    format!("10.244.{number}.0/24")
}

/// A network namespace that threads can enter.
#[derive(Clone, Debug)]
pub(super) struct Network {
    namespace: Arc<File>,
    process: u32,
}

impl Network {
    /// Returns the network namespace of a process.
    pub(super) fn of_process(process: u32) -> Result<Self, BedError> {
        let path = format!("/proc/{process}/ns/net");
        let namespace = File::open(&path).map_err(BedError::io(format!("opening {path}")))?;
        Ok(Self { namespace: Arc::new(namespace), process })
    }

    /// Moves the calling thread into the namespace until the guard is dropped.
    pub(super) fn enter_temporarily(&self) -> Result<NetnsGuard, BedError> {
        let doing = "entering the bed's network";
        let previous = File::open("/proc/thread-self/ns/net").map_err(BedError::io(doing))?;
        self.enter_permanently().map_err(BedError::io(doing))?;
        Ok(NetnsGuard { previous })
    }

    /// Moves the calling thread into the namespace for its whole life.
    pub(super) fn enter_permanently(&self) -> std::io::Result<()> {
        Ok(move_into_link_name_space(self.namespace.as_fd(), Some(LinkNameSpaceType::Network))?)
    }

    /// Runs a batch of `ip` commands inside.
    pub(super) fn run_ip(&self, commands: &str) -> Result<(), BedError> {
        let doing = "setting up the bed's network";
        let mut child = Command::new("nsenter")
            .arg(format!("--net=/proc/{}/ns/net", self.process))
            .args(["ip", "-batch", "-"])
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .map_err(BedError::io(doing))?;
        if let Some(mut pipe) = child.stdin.take() {
            // If `ip` stopped reading, it prints why.
            let _ = pipe.write_all(commands.as_bytes());
        }
        let output = child.wait_with_output().map_err(BedError::io(doing))?;
        if output.status.success() {
            return Ok(());
        }
        let message = String::from_utf8_lossy(&output.stderr);
        Err(BedError::Kernel {
            what: "create its network interfaces".to_string(),
            message: message.split_whitespace().collect::<Vec<_>>().join(" "),
            needs: "network namespaces, bridge and veth devices (CONFIG_NET_NS, CONFIG_BRIDGE, CONFIG_VETH)",
        })
    }
}

/// Moves the thread back to its own network namespace on drop.
#[derive(Debug)]
#[must_use = "the thread leaves the namespace when this is dropped"]
pub(super) struct NetnsGuard {
    previous: File,
}

impl Drop for NetnsGuard {
    fn drop(&mut self) {
        // Entering worked, and leaving is the same call; there is no remedy if it fails.
        let _ = move_into_link_name_space(self.previous.as_fd(), Some(LinkNameSpaceType::Network));
    }
}

/// Returns the `ip` commands for the control plane's host.
pub(super) fn host_commands() -> String {
    format!(
        "link set lo up\n\
         addr add {KUBERNETES_ADDRESS}/32 dev lo\n\
         addr add {DNS_ADDRESS}/32 dev lo\n\
         link add nodes type bridge\n\
         addr add {HOST_ADDRESS}/16 dev nodes\n\
         link set nodes up\n"
    )
}

/// Returns the commands for the host's end of a node's veth pair; the node's first process is `process`.
pub(super) fn connect_commands(number: u8, process: u32) -> String {
    let (address, pods) = (node_address(number), pod_network(number));
    format!(
        "link add to-node{number} type veth peer name eth0 netns {process}\n\
         link set to-node{number} master nodes up\n\
         route replace {pods} via {address}\n"
    )
}

/// Returns the commands that remove both ends of the veth pair.
pub(super) fn disconnect_commands(number: u8) -> String {
    format!("link del to-node{number}\n")
}

/// Returns the commands for the node's end.
pub(super) fn node_commands(number: u8) -> String {
    let address = node_address(number);
    format!(
        "link set lo up\n\
         addr add {address}/16 dev eth0\n\
         link set eth0 up\n\
         route add default via {HOST_ADDRESS}\n"
    )
}
