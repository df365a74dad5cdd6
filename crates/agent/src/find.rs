//! What this node has: a container runtime that knows CDI, a driver, its GPUs.

use crate::config::{AgentError, Config};
use crate::identity::{About, Runtime};
use crate::plugin::endpoint;
use crate::resources::CountResource;
use crate::settings::{DriverChoice, Settings};
use crate::store::Store;
use partage_enforce::error_chain::describe;
use partage_enforce::gpus::{
    self as enforce_gpus, DiscoveredGpus, DiscoveryError, DiscoveryOptions, SimulatedMachine,
};
use partage_host::root::Root;
use std::path::Path;
use std::time::Duration;
use tokio_util::sync::CancellationToken;

/// How long to wait for a driver or a runtime that is not there yet.
const LATER: Duration = Duration::from_secs(5);
/// The longest path of a socket, without the zero at its end.
const LONGEST_SOCKET: usize = 107;
/// Where container runtimes listen. Docker brings a containerd beside the one of the cluster, in the usual place.
const RUNTIMES: [&str; 3] =
    ["/run/k3s/containerd/containerd.sock", "/run/crio/crio.sock", "/run/containerd/containerd.sock"];

pub(crate) fn runtime(config: &Config) -> Result<Runtime, AgentError> {
    if let Some(socket) = &config.runtime_socket {
        return Ok(Runtime::new(socket));
    }
    let root = Root::new(&config.host_root);
    let found = RUNTIMES.iter().map(|socket| root.at(Path::new(socket))).find(|socket| socket.exists());
    found.as_deref().map(Runtime::new).ok_or_else(|| {
        AgentError::Cannot(format!(
            "no container runtime listens at {}: name its socket with --runtime-socket",
            RUNTIMES.join(", ")
        ))
    })
}

/// The runtime must take CDI devices, and look where we write.
pub(crate) fn check_cdi(ours: &Path, about: &About) -> Result<(), AgentError> {
    let About { name, version, cdi, cdi_dirs: dirs, .. } = about;
    if let Err(why) = cdi {
        return Err(AgentError::Cannot(format!("{name} {version} cannot be used: {why}")));
    }
    // `/var/run` is `/run` everywhere, by a link that may not be in our own image.
    let plain = |path: &Path| {
        path.strip_prefix("/var/run").map_or_else(|_| path.to_path_buf(), |rest| Path::new("/run").join(rest))
    };
    if dirs.is_empty() || dirs.iter().any(|dir| plain(dir) == plain(ours)) {
        return Ok(());
    }
    let dirs: Vec<String> = dirs.iter().map(|dir| dir.display().to_string()).collect();
    Err(AgentError::Cannot(format!(
        "the container runtime looks for CDI files in {}, and not in {}: start the agent with --cdi and one of them",
        dirs.join(", "),
        ours.display()
    )))
}

/// Finds the driver and the GPUs that it has, with what earlier agents knew of them.
pub(crate) fn gpus(
    config: &Config,
    settings: &Settings,
    root: &Root,
    store: &Store,
    boot: &str,
) -> Result<DiscoveredGpus, DiscoveryError> {
    let folder = config.state.join("simulated");
    enforce_gpus::discover(&DiscoveryOptions {
        node_name: config.node.as_str(),
        driver: match settings.driver {
            DriverChoice::Nvidia => enforce_gpus::DriverChoice::Nvidia,
            DriverChoice::Simulated => enforce_gpus::DriverChoice::Simulated,
        },
        host_root: Some(root),
        simulated: &settings.simulated,
        simulated_machine: SimulatedMachine {
            folder: &folder,
            // The same GPUs after every start, and others on every node.
            seed: Path::new(config.node.as_str()),
            in_use: false,
            stamp: None,
        },
        records: store.singletons(),
        boot_id: boot,
    })
}

/// Why there is nothing to share, with what to do.
pub(crate) fn explain(error: &DiscoveryError) -> String {
    match error {
        DiscoveryError::NoDriver { .. } => format!("{error}: install it, or write `driver: simulated`"),
        error => describe(error),
    }
}

/// Tries until it works or is told to stop, and says why it does not, once for each reason.
pub(crate) async fn insist<T, F: Future<Output = Result<T, String>>>(
    stop: &CancellationToken,
    what: &'static str,
    mut work: impl FnMut() -> F,
) -> Option<T> {
    let mut waiting = Waiting::new(what);
    loop {
        match work().await {
            Ok(done) => return Some(done),
            Err(why) => waiting.tell(&why),
        };
        if !waiting.again(stop).await {
            return None;
        }
    }
}

/// Somebody waits for something.
pub(crate) struct Waiting {
    what: &'static str,
    told: String,
}

impl Waiting {
    pub(crate) fn new(what: &'static str) -> Waiting {
        Waiting { what, told: String::new() }
    }

    /// It is not there yet: says why, once for each reason. Whether it was news.
    pub(crate) fn tell(&mut self, why: &str) -> bool {
        let is_news = self.told != why;
        if is_news {
            tracing::error!("waiting for {}: {why}", self.what);
            self.told = why.into();
        }
        is_news
    }

    /// Returns when it is time to try again; false where it was told to stop.
    pub(crate) async fn again(&self, stop: &CancellationToken) -> bool {
        stop.run_until_cancelled(tokio::time::sleep(LATER)).await.is_some()
    }
}

/// The kernel must take the paths of all sockets in kubelet's folder.
pub(crate) fn check_sockets(kubelet: &Path, settings: &Settings) -> Result<(), String> {
    let folder = kubelet.join("device-plugins");
    let length = |resource: &String| folder.join(endpoint(resource)).as_os_str().len();
    let names = CountResource::enabled(settings).iter().map(CountResource::name).collect::<Vec<_>>();
    match names.iter().find(|resource| length(resource) > LONGEST_SOCKET) {
        None => Ok(()),
        Some(resource) => Err(format!(
            "{resource} would be served on a socket in {} whose path has {} bytes, and the kernel takes {LONGEST_SOCKET}: speak it in a \
             shorter domain (vcudaDomains), or have kubelet in a shorter folder",
            folder.display(),
            length(resource)
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sockets_have_paths_that_the_kernel_takes() {
        let of = |domain: &str| Settings::parse(&format!("vcudaDomains: [{domain}]"), &"n".into()).unwrap();
        let longest = of(&"a".repeat(51));
        assert_eq!(check_sockets(Path::new("/var/lib/kubelet"), &longest), Ok(()));
        let why = check_sockets(Path::new("/var/lib/k0s/kubelet"), &longest).unwrap_err();
        assert!(why.contains("/var/lib/k0s/kubelet/device-plugins whose path has 111 bytes"), "{why}");
        assert_eq!(check_sockets(Path::new("/var/lib/k0s/kubelet"), &of("tencent.com")), Ok(()));
    }
}
