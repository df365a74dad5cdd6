//! What this node has: a container runtime that knows CDI, a driver, its GPUs.

use crate::checkpoint::Checkpoint;
use crate::identity::{About, Runtime};
use crate::inventory::{Found, INVENTORY, Inventory};
use crate::memory;
use crate::plugin::endpoint;
use crate::resources::CountResource;
use crate::run::{AgentError, Options};
use crate::settings::{DriverChoice, Settings};
use partage_core::model::{GpuUuid, Node};
use partage_host::driver::Driver;
use partage_host::gpus::Gpus;
use partage_host::root::Root;
use partage_sim::install;
use partage_sim::node::NodeDir;
use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use tokio_util::sync::CancellationToken;

/// How long to wait for a driver or a runtime that is not there yet.
const LATER: Duration = Duration::from_secs(5);
/// The longest path of a socket, without the zero at its end.
const LONGEST_SOCKET: usize = 107;
/// Where container runtimes listen. Docker brings a containerd beside the one of the cluster, in the usual place.
const RUNTIMES: [&str; 3] =
    ["/run/k3s/containerd/containerd.sock", "/run/crio/crio.sock", "/run/containerd/containerd.sock"];

pub(crate) fn runtime(options: &Options) -> Result<Runtime, AgentError> {
    if let Some(socket) = &options.runtime_socket {
        return Ok(Runtime::new(socket));
    }
    let root = Root::new(&options.host_root);
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

/// What there is to share.
pub(crate) struct Hardware {
    pub(crate) driver: Driver,
    /// A session with it.
    pub(crate) gpus: Gpus,
    pub(crate) inventory: Inventory,
    /// GPUs that an earlier agent said are not to be used.
    pub(crate) were_ill: BTreeSet<GpuUuid>,
}

/// Why there is nothing to share, now.
pub(crate) struct NoGpus {
    pub(crate) why: String,
    /// Whether somebody has to look after the node.
    pub(crate) is_news: bool,
}

impl NoGpus {
    fn unusable(why: impl ToString) -> NoGpus {
        NoGpus { why: why.to_string(), is_news: true }
    }
}

/// The driver and the GPUs it has: those that do not answer are known from earlier, and so is what made GPUs
/// unusable in this boot.
pub(crate) fn gpus(
    options: &Options,
    settings: &Settings,
    root: &Root,
    checkpoint: &Checkpoint,
    boot: &str,
) -> Result<Hardware, NoGpus> {
    let kept: Option<Inventory> = checkpoint.one(INVENTORY).map_err(NoGpus::unusable)?;
    let driver = match settings.driver {
        DriverChoice::Nvidia => Driver::find_in(root).map_err(NoGpus::unusable)?.ok_or_else(|| NoGpus {
            why: format!(
                "no NVIDIA driver was found below {}: install it, or write `driver: simulated`",
                options.host_root.display()
            ),
            // Most nodes of a cluster have none, and never will. This one had.
            is_news: kept.is_some(),
        })?,
        DriverChoice::Simulated => simulated(options, settings).map_err(NoGpus::unusable)?,
    };
    let gpus = Gpus::open(&driver).map_err(NoGpus::unusable)?;
    let fatal = memory::recall(checkpoint, boot).map_err(NoGpus::unusable)?;
    let missed = kept.iter().flat_map(Inventory::missing);
    let were_ill = fatal.iter().filter(|one| one.is_fatal()).map(|one| &one.uuid);
    let were_ill = were_ill.chain(missed).cloned().collect();
    gpus.remember(fatal);
    let (node, none) = match gpus.node(options.node.as_str()) {
        Ok(node) => (node, None),
        Err(error) => (Node::new(options.node.as_str(), Vec::new()), Some(error)),
    };
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let now = i64::try_from(now.as_secs()).unwrap_or(i64::MAX);
    let found = Found { boot, settings, counted: gpus.counted().unwrap_or(node.gpus.len()), node, now };
    let inventory = Inventory::new(found, kept.as_ref());
    if let Some(error) = none.filter(|_| inventory.node.gpus.is_empty()) {
        return Err(NoGpus::unusable(error));
    }
    if kept.as_ref() != Some(&inventory)
        && let Err(error) = checkpoint.put_one(INVENTORY, &inventory)
    {
        tracing::warn!("the node's GPUs cannot be recorded: {error}");
    }
    Ok(Hardware { driver, gpus, inventory, were_ill })
}

fn simulated(options: &Options, settings: &Settings) -> Result<Driver, String> {
    let folder = options.state.join("simulated");
    fs::create_dir_all(&options.state).map_err(|error| format!("{}: {error}", options.state.display()))?;
    // The same GPUs after every start, and others on every node.
    let seed = partage_sim::node::seed_of(Path::new(options.node.as_str()));
    let config = settings.simulated.config(seed)?;
    let node = NodeDir::keep(&folder, &config, false).map_err(|error| error.to_string())?;
    let object = install::trusted_object().map_err(|error| error.to_string())?;
    install::libraries(&object, &node.libraries(), config.driver, node.path())
        .map_err(|error| error.to_string())?;
    Driver::simulated(node.path()).map_err(|error| error.to_string())
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

/// Which boot this is.
pub(crate) fn boot_id() -> String {
    fs::read_to_string("/proc/sys/kernel/random/boot_id")
        .map(|text| text.trim().to_string())
        .unwrap_or_default()
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
