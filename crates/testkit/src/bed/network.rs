//! Addresses of a bed, and being inside its network.

use super::BedError;
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};
use std::fs::File;
use std::io::Write;
use std::net::Ipv4Addr;
use std::os::fd::AsFd;
use std::process::{Command, Stdio};
use std::sync::Arc;

/// The control plane's host; a test's own servers listen here too.
pub(super) const HOST: Ipv4Addr = Ipv4Addr::new(10, 200, 0, 1);
/// `kubernetes.default`. There is no kube-proxy: the host simply has this address.
pub(super) const KUBERNETES: Ipv4Addr = Ipv4Addr::new(10, 96, 0, 1);
/// Where pods ask for names.
pub(super) const DNS: Ipv4Addr = Ipv4Addr::new(10, 96, 0, 10);
/// Where services get their addresses from.
pub(super) const SERVICES: &str = "10.96.0.0/16";

/// The most nodes a bed has: their numbers are a byte of their addresses.
pub(super) const MOST_NODES: usize = 200;

/// Addresses of the node with this number, from 1.
pub(super) fn node_address(number: u8) -> Ipv4Addr {
    Ipv4Addr::new(10, 200, 1, number)
}

pub(super) fn pod_network(number: u8) -> String {
    format!("10.244.{number}.0/24")
}

/// A network namespace one can be in.
#[derive(Clone, Debug)]
pub(super) struct Network {
    namespace: Arc<File>,
    process: u32,
}

impl Network {
    /// The one this process is in.
    pub(super) fn of(process: u32) -> Result<Self, BedError> {
        let path = format!("/proc/{process}/ns/net");
        let namespace = File::open(&path).map_err(BedError::io(format!("opening {path}")))?;
        Ok(Self { namespace: Arc::new(namespace), process })
    }

    /// Brings the calling thread inside, until the visit is dropped.
    pub(super) fn visit(&self) -> Result<Visit, BedError> {
        let doing = "entering the bed's network";
        let home = File::open("/proc/thread-self/ns/net").map_err(BedError::io(doing))?;
        self.enter().map_err(BedError::io(doing))?;
        Ok(Visit { home })
    }

    /// Brings the calling thread inside for good: for threads that only ever work there.
    pub(super) fn enter(&self) -> std::io::Result<()> {
        Ok(move_into_link_name_space(self.namespace.as_fd(), Some(LinkNameSpaceType::Network))?)
    }

    /// Runs a batch of `ip` commands inside.
    pub(super) fn ip(&self, commands: &str) -> Result<(), BedError> {
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
            // Where it stopped reading, it says why.
            let _ = pipe.write_all(commands.as_bytes());
        }
        let output = child.wait_with_output().map_err(BedError::io(doing))?;
        if output.status.success() {
            return Ok(());
        }
        let said = String::from_utf8_lossy(&output.stderr);
        Err(BedError::Kernel {
            what: "make its network interfaces".to_string(),
            said: said.split_whitespace().collect::<Vec<_>>().join(" "),
            needs: "network namespaces, bridge and veth devices (CONFIG_NET_NS, CONFIG_BRIDGE, CONFIG_VETH)",
        })
    }
}

/// A thread's time inside; it is back home when this is dropped.
#[derive(Debug)]
#[must_use = "the thread goes home when this is dropped"]
pub(super) struct Visit {
    home: File,
}

impl Drop for Visit {
    fn drop(&mut self) {
        // The way in worked, and the way back is the same call; nothing could be done where it fails.
        let _ = move_into_link_name_space(self.home.as_fd(), Some(LinkNameSpaceType::Network));
    }
}

/// What the control plane's host needs.
pub(super) fn host_commands() -> String {
    format!(
        "link set lo up\n\
         addr add {KUBERNETES}/32 dev lo\n\
         addr add {DNS}/32 dev lo\n\
         link add nodes type bridge\n\
         addr add {HOST}/16 dev nodes\n\
         link set nodes up\n"
    )
}

/// The host's end of a node's cable; the node's first process is `process`.
pub(super) fn plug_commands(number: u8, process: u32) -> String {
    let (address, pods) = (node_address(number), pod_network(number));
    format!(
        "link add to-node{number} type veth peer name eth0 netns {process}\n\
         link set to-node{number} master nodes up\n\
         route replace {pods} via {address}\n"
    )
}

/// Takes the cable away, both ends.
pub(super) fn unplug_commands(number: u8) -> String {
    format!("link del to-node{number}\n")
}

/// The node's end.
pub(super) fn node_commands(number: u8) -> String {
    let address = node_address(number);
    format!(
        "link set lo up\n\
         addr add {address}/16 dev eth0\n\
         link set eth0 up\n\
         route add default via {HOST}\n"
    )
}
