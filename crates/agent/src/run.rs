//! The agent from its start to its end: what is there is found, what was is known again, and the loops begin.

use crate::api_server::ApiServer;
use crate::checkpoint::Checkpoint;
use crate::identity::{self, Kubelet, Runtime};
use crate::inject::Materials;
use crate::mounted::Mounted;
use crate::node::{NodeState, Parts};
use crate::offers::{self, Plugins};
use crate::progress::{Progress, keep_telling};
use crate::regions::Regions;
use crate::settings::{Followed, Settings};
use crate::{find, look, node, other_runtime, plugin, publish, resources, sweep, uncounted, wishes};
use partage_cluster::{ClusterError, PodCache, Severity};
use partage_core::model::NodeName;
use partage_enforce::context_sizes::ContextSizes;
use partage_enforce::error_chain::describe;
use partage_enforce::gpus::{DiscoveredGpus, Inventory};
use partage_enforce::instance_lock::InstanceLock;
use partage_host::cdi;
use partage_host::files;
use partage_host::process::boot_id;
use partage_host::process_setup;
use partage_host::root::Root;
use partage_host::selinux;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::pin::pin;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

/// How often the settings' file is looked at: kubelet itself takes a minute to bring a changed ConfigMap.
const GLANCE: Duration = Duration::from_secs(2);
/// How often everything is offered and published anew, whether or not something has changed.
const AGAIN: Duration = Duration::from_secs(30);
/// How long what ends may take: an event to be written, duties to come to their end.
const FAREWELL: Duration = Duration::from_secs(5);
/// The lock file of the agent, in its runtime directory.
const LOCK_FILE: &str = "agent.lock";

/// Where everything is.
#[derive(Clone, Debug)]
pub struct Options {
    /// The node's name.
    pub node: NodeName,
    /// The settings' file; absent = all as by default.
    pub settings: Option<PathBuf>,
    /// How the API server is reached; absent = as a pod of the cluster.
    pub kubeconfig: Option<PathBuf>,
    /// Where the host's files are seen.
    pub host_root: PathBuf,
    /// Kubelet's folder.
    pub kubelet: PathBuf,
    /// Where the runtime looks for CDI files.
    pub cdi: PathBuf,
    /// What outlives a boot.
    pub state: PathBuf,
    /// What does not.
    pub run: PathBuf,
    /// The container runtime's socket; absent = where one is.
    pub runtime_socket: Option<PathBuf>,
}

impl Options {
    /// With the links of paths below the host's root followed as the host follows them.
    fn followed(mut self) -> Options {
        let root = Root::new(&self.host_root);
        let paths = [&mut self.kubelet, &mut self.cdi, &mut self.state, &mut self.run];
        for path in paths.into_iter().chain(&mut self.runtime_socket) {
            *path = root.follow(path);
        }
        self
    }
}

/// Why the agent cannot be.
#[derive(Debug, thiserror::Error)]
pub enum AgentError {
    /// The settings cannot be used.
    #[error("the settings cannot be used: {0}")]
    Settings(#[from] crate::settings::SettingsError),
    /// The API server cannot even be looked for.
    #[error(transparent)]
    Cluster(#[from] ClusterError),
    /// A folder or file cannot be used.
    #[error("{}: {error}", path.display())]
    Io {
        /// Which.
        path: PathBuf,
        /// What the system said.
        #[source]
        error: io::Error,
    },
    /// This node cannot share its GPUs.
    #[error("{0}")]
    Cannot(String),
}

/// Runs until told to stop. Containers go on as they are.
pub async fn run(options: Options, stop: CancellationToken) -> Result<(), AgentError> {
    partage_region::failpoint::arm_from_environment();
    let options = options.followed();
    let checkpoint = Checkpoint::open(&options.state, &options.run)
        .map_err(|error| AgentError::Io { path: options.state.clone(), error })?;
    let mut followed = Followed::new(options.settings.clone(), &options.node, &checkpoint);
    let read = followed.read();
    let cluster = match ApiServer::connect(options.kubeconfig.as_deref(), &options.node).await {
        Ok(cluster) => cluster,
        Err(error) => {
            read?;
            return Err(error.into());
        }
    };
    let settings = match read {
        Ok(settings) => settings,
        Err(error) => match instead(&cluster, &followed, &error.to_string()).await {
            Some(settings) => settings,
            None => return Err(error.into()),
        },
    };
    let progress = Arc::new(Progress::default());
    // From here on probes are answered: a driver may take its time to come.
    tokio::spawn(keep_telling(
        Arc::clone(&progress),
        cluster.clone(),
        settings.metrics.clone(),
        stop.clone(),
    ));
    let pods = cluster.watch_pods();
    let runtime = find::runtime(&options)?;
    let about = find::insist(&stop, "the container runtime", || async {
        runtime.about().await.map_err(|error| error.to_string())
    })
    .await;
    let Some(about) = about else { return Ok(()) };
    find::check_cdi(&options.cdi, &about)?;
    let lock = instance_lock(&stop, &options.run).await;
    let Some(_lock) = lock else { return Ok(()) };
    let boot = boot_id();
    let mut agent = Agent {
        options,
        checkpoint,
        followed,
        settings,
        cluster,
        pods,
        runtime,
        about,
        boot,
        progress,
        stop,
    };
    agent.live().await
}

/// Waits until no other agent manages this node; `None` if the agent is stopped before.
async fn instance_lock(stop: &CancellationToken, runtime_dir: &Path) -> Option<InstanceLock> {
    let path = runtime_dir.join(LOCK_FILE);
    find::insist(stop, "the node", || async {
        InstanceLock::try_acquire(&path).map_err(|error| describe(&error))
    })
    .await
}

/// What the settings' file says cannot be used: what was last in force is, where anything was. Either is told.
async fn instead(cluster: &ApiServer, followed: &Followed, why: &str) -> Option<Settings> {
    let earlier = followed.earlier();
    let note = match &earlier {
        Some(_) => format!("the settings cannot be used, those that were last in force are: {why}"),
        None => {
            format!("the settings cannot be used, and the agent ends, since none were in force before: {why}")
        }
    };
    tracing::error!("{note}");
    cluster.node_event(Severity::Warning, "SettingsRefused", &note);
    if earlier.is_none() {
        cluster.recorder.flush(FAREWELL).await;
    }
    earlier
}

/// What outlives a change of the node's GPUs.
struct Agent {
    options: Options,
    checkpoint: Checkpoint,
    followed: Followed,
    /// Those in force.
    settings: Settings,
    cluster: ApiServer,
    pods: PodCache,
    runtime: Runtime,
    about: identity::About,
    boot: String,
    progress: Arc<Progress>,
    stop: CancellationToken,
}

/// Why nothing is served any more.
enum Ended {
    /// As it was told.
    Told,
    /// The GPUs are no longer those that everything was counted by.
    Changed(String),
}

impl Agent {
    /// Counts everything by the GPUs that there are, serves, and begins anew when these are others.
    async fn live(&mut self) -> Result<(), AgentError> {
        let mut pauses = Pauses::default();
        let mut patience = Duration::ZERO;
        loop {
            let Some(hardware) = self.find().await? else { return Ok(()) };
            let state = tokio::task::block_in_place(|| self.rebuild(hardware))?;
            remove_stale(&state);
            tell_boot(&state);
            self.progress.found(&state);
            let what = match self.serve(&state, patience).await? {
                Ended::Told => return Ok(()),
                Ended::Changed(what) => what,
            };
            self.progress.lost();
            let note = format!(
                "the node's GPUs have changed: {what}; everything is counted anew, and containers go on as they are"
            );
            tracing::warn!("{note}");
            self.cluster.node_event(Severity::Normal, "GpusChanged", &note);
            if !is_gone(state).await {
                // Two who deal out the same GPUs would be worse than none for a while.
                return Err(AgentError::Cannot(format!(
                    "{note}; not all of what was begun has ended: the agent must be started anew"
                )));
            }
            patience = pauses.next(Instant::now());
        }
    }

    /// The GPUs and settings that fit them, as soon as there are any; none where it was told to stop before.
    async fn find(&mut self) -> Result<Option<DiscoveredGpus>, AgentError> {
        let root = Root::new(&self.options.host_root);
        let mut waiting = find::Waiting::new("the driver");
        loop {
            // What was written while others were waited for.
            match self.followed.news() {
                Some(Ok(settings)) => self.settings = settings,
                Some(Err(error)) => self.refuse(&error.to_string()),
                None => {}
            }
            let found = tokio::task::block_in_place(|| {
                find::gpus(&self.options, &self.settings, &root, &self.checkpoint, &self.boot)
            });
            let why = found.as_ref().err().map(find::explain).unwrap_or_default();
            self.progress.nothing(found.as_ref().err().map(|_| why.as_str()));
            let hardware = match found {
                Ok(hardware) => hardware,
                Err(error) => {
                    if waiting.tell(&why) && error.needs_attention() {
                        let note = format!("the node's GPUs cannot be shared yet: {why}; it is tried again");
                        self.cluster.node_event(Severity::Warning, "DriverUnusable", &note);
                    }
                    match waiting.again(&self.stop).await {
                        true => continue,
                        false => return Ok(None),
                    }
                }
            };
            let Err(why) = self.fits(&self.settings, &hardware.inventory) else {
                self.followed.keep(&self.settings);
                return Ok(Some(hardware));
            };
            match instead(&self.cluster, &self.followed, &why).await {
                Some(settings) if settings != self.settings => self.settings = settings,
                _ => return Err(AgentError::Cannot(why)),
            }
        }
    }

    /// Whether settings can be used on this machine, or why not.
    fn fits(&self, settings: &Settings, inventory: &Inventory) -> Result<(), String> {
        resources::check(settings, &inventory.counted_node())?;
        find::check_sockets(&self.options.kubelet, settings)
    }

    fn refuse(&self, why: &str) {
        let note = format!("the changed settings cannot be used, the old ones stay: {why}");
        tracing::error!("{note}");
        self.cluster.node_event(Severity::Warning, "SettingsRefused", &note);
    }

    /// Everything that is known of these GPUs, in its place.
    fn rebuild(&self, hardware: DiscoveredGpus) -> Result<Arc<NodeState>, AgentError> {
        let DiscoveredGpus { driver, session: gpus, inventory, previously_unhealthy: were_ill } = hardware;
        let (options, node) = (&self.options, &inventory.node);
        let version = gpus.driver_version().to_string();
        tracing::info!(
            gpus = node.gpus.len(),
            driver = version,
            runtime = self.about.name,
            "the node's GPUs are found"
        );
        for gpu in node.gpus.iter().filter_map(|gpu| gpu.withheld.as_ref().map(|why| (gpu, why))) {
            let note = format!("GPU {} ({}) is listed and not offered: {}", gpu.0.uuid, gpu.0.model, gpu.1);
            tracing::warn!("{note}");
            self.cluster.node_event(Severity::Warning, "GpuNotOffered", &note);
        }
        let folder = |path: &Path| {
            fs::create_dir_all(path).map_err(|error| AgentError::Io { path: path.into(), error })
        };
        [&options.state, &options.run, &options.cdi].into_iter().try_for_each(|path| folder(path))?;
        let io = |path: &Path| {
            let path = path.to_path_buf();
            move |error| AgentError::Io { path, error }
        };
        let mut sizes = ContextSizes::read(options.state.join("contexts.json"), &version);
        for warning in sizes.measure_unknown(node, &driver) {
            tracing::warn!("{warning}");
        }
        let root = Root::new(&options.host_root);
        let (lib, regions) = (options.state.join("lib"), options.run.join("regions"));
        // Before there is anything in them: what is made there has their label.
        for path in [Some(&lib), Some(&regions), driver.simulated.as_ref()].into_iter().flatten() {
            folder(path)?;
            selinux::open_to_containers(&root, path).map_err(io(path))?;
        }
        let materials = Materials::gather(&root, &driver, &version, &lib)
            .map_err(|error| AgentError::Cannot(error.to_string()))?;
        let cdi = cdi::Folder::new(&options.cdi);
        cdi.remove_unfinished().map_err(io(&options.cdi))?;
        // The spec must exist before kubelet learns the name of its device.
        cdi.put_shared(&materials.shared_edits()).map_err(io(&options.cdi))?;
        files::remove_unfinished(&options.state, "").map_err(io(&options.state))?;
        let parts = Parts {
            kubelet: Kubelet::new(&options.kubelet, self.runtime.clone()),
            regions: Regions::new(&regions, sizes).map_err(io(&regions))?,
            checkpoint: self.checkpoint.clone(),
            boot: self.boot.clone(),
            nvidia_runtime: self.about.nvidia.into(),
            simulated: driver.simulated.clone(),
            cluster: self.cluster.clone(),
            pods: self.pods.clone(),
            runtime: self.runtime.clone(),
            gpus,
            materials,
            cdi,
            inventory,
            were_ill,
        };
        NodeState::recover(parts, self.settings.clone()).map_err(io(&options.state)).map(Arc::new)
    }

    /// Serves kubelet and does what there is to do, until told to stop or until the GPUs are others. A change of these is let
    /// be for a while.
    async fn serve(&mut self, state: &Arc<NodeState>, patience: Duration) -> Result<Ended, AgentError> {
        let stop = self.stop.child_token();
        let devices = self.options.kubelet.join("device-plugins");
        let mounted = self.mounted(&devices);
        let mut plugins = Plugins::new(&devices);
        // Before all else: kubelet fails pods that it looks at before it knows us.
        plugins.follow(state).await;
        // Whole libraries were read on the way here.
        process_setup::trim_heap();
        let (publication, wanted) = watch::channel(None);
        let mut duties = Duties::default();
        duties.begin(sweep::keep_sweeping(Arc::clone(state), stop.clone()));
        duties.begin(wishes::keep_answering(Arc::clone(state), stop.clone()));
        duties.begin(publish::keep_published(state.cluster.clone(), wanted));
        duties.begin(uncounted::keep_telling(Arc::clone(state), stop.clone()));
        duties.begin(other_runtime::keep_asking(Arc::clone(state), self.options.cdi.clone(), stop.clone()));
        duties.begin(node::keep_saving(Arc::clone(state), stop.clone()));
        duties.begin(look::keep_watch(Arc::clone(state), stop.clone()));
        duties.0.spawn(look::keep_looking(Arc::clone(state), stop.clone(), Instant::now() + patience));
        let mut pods = state.pods.changed();
        let (mut glance, mut again) = (tokio::time::interval(GLANCE), tokio::time::interval(AGAIN));
        let ended = 'served: loop {
            let looked = tokio::time::Instant::now();
            // What changes while we look is noticed.
            let mut changed = pin!(state.changed.notified());
            pods.borrow_and_update();
            plugins.follow(state).await;
            self.progress.serves(plugins.watched());
            let next = offers::publication(state);
            publication.send_if_modified(|now| offers::replace(now, next));
            loop {
                tokio::select! {
                    () = &mut changed => break,
                    _ = pods.changed() => break,
                    _ = again.tick() => break,
                    _ = glance.tick() => {
                        self.reread(state);
                        let there = mounted.iter().try_for_each(Mounted::check).and_then(|()| state.materials.is_there());
                        if let Err(why) = there {
                            // Kubelet starts us again, and we find the new one.
                            break 'served Err(AgentError::Cannot(why));
                        }
                    }
                    why = duties.ended() => {
                        break 'served if self.stop.is_cancelled() { Ok(Ended::Told) } else { why };
                    }
                    () = self.stop.cancelled() => break 'served Ok(Ended::Told),
                }
            }
            tokio::time::sleep_until(looked + node::CROWD).await;
        };
        self.progress.serves(Vec::new());
        plugins.stop().await;
        stop.cancel();
        drop(publication);
        duties.end().await;
        ended
    }

    /// The folders that could be replaced behind our back.
    fn mounted(&self, devices: &Path) -> Vec<Mounted> {
        let root = Root::new(&self.options.host_root);
        // Kubelet makes its own again; for CDI files nobody does.
        let folders = [(devices, true), (self.options.cdi.as_path(), false)];
        folders.into_iter().filter_map(|(folder, by_others)| Mounted::new(folder, &root, by_others)).collect()
    }

    /// Reads the settings again where the file changed.
    fn reread(&mut self, state: &NodeState) {
        let Some(read) = self.followed.news() else { return };
        let read = read.map_err(|error| error.to_string());
        match read.and_then(|settings| self.fits(&settings, &state.inventory).map(|()| settings)) {
            Ok(settings) => {
                self.followed.keep(&settings);
                // Other GPUs than those of containers that run would be no machine's, and an address is taken once.
                let Settings { driver, simulated, metrics, .. } = self.settings.clone();
                let kept = Settings { driver, simulated, metrics, ..settings.clone() };
                if kept != settings {
                    tracing::warn!(
                        "driver, simulated and metrics are taken from the settings at the next start"
                    );
                }
                self.settings = kept.clone();
                state.refresh(Some(kept));
                tracing::info!("the settings have changed");
            }
            Err(why) => self.refuse(&why),
        }
    }
}

/// Whether everything that used a state has ended, soon.
async fn is_gone(state: Arc<NodeState>) -> bool {
    let left = Arc::downgrade(&state);
    drop(state);
    let until = Instant::now() + FAREWELL;
    while left.strong_count() > 0 {
        if Instant::now() >= until {
            return false;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    true
}

/// How long a change of the node's GPUs is let be: not at all at first, and longer and longer for a card that comes and goes.
#[derive(Default)]
struct Pauses {
    last: Option<Instant>,
    pause: Duration,
}

impl Pauses {
    /// After this there is nothing to be feared of a card.
    const CALM: Duration = Duration::from_secs(300);
    const FIRST: Duration = Duration::from_secs(1);
    const LONGEST: Duration = Duration::from_secs(60);

    /// They have changed now: how long the next change is let be.
    fn next(&mut self, now: Instant) -> Duration {
        let calm = self.last.is_none_or(|last| now.duration_since(last) >= Pauses::CALM);
        self.last = Some(now);
        self.pause =
            if calm { Duration::ZERO } else { (self.pause * 2).clamp(Pauses::FIRST, Pauses::LONGEST) };
        self.pause
    }
}

/// Removes what earlier versions put before the driver, and no container has any more.
fn remove_stale(state: &NodeState) {
    let files = state.cdi.all().unwrap_or_default().into_iter().filter_map(|found| found.content.ok());
    let used = files.flat_map(node::used_paths).collect();
    for folder in state.materials.stale(&used).unwrap_or_default() {
        if let Err(error) = fs::remove_dir_all(&folder) {
            tracing::warn!("{}: cannot be removed: {error}", folder.display());
        }
    }
}

/// Says what becomes of the pods that were here before the node was booted.
fn tell_boot(state: &NodeState) {
    let before = state.containers().grants().records().filter(|record| record.boot != state.boot).count();
    if before == 0 {
        return;
    }
    let note = format!(
        "the node was booted, and {before} of its pods held shares of GPUs before: those that kubelet starts again get theirs, and those \
         that it failed because it looked for their GPUs before Partage was there are made again by their controllers"
    );
    tracing::info!("{note}");
    state.tell_node(Severity::Normal, "Booted", &note);
}

/// Takes back what the node says, and removes everything that an agent keeps on it.
pub async fn withdraw(options: Options) -> Result<(), AgentError> {
    let options = options.followed();
    let cluster = ApiServer::connect(options.kubeconfig.as_deref(), &options.node).await?;
    // An agent that has not ended yet would say and write again what goes here. Where its folder is gone, there is none.
    let never = CancellationToken::new();
    let _lock = if options.run.exists() { instance_lock(&never, &options.run).await } else { None };
    publish::withdraw(&cluster).await?;
    let io = |path: &Path| {
        let path = path.to_path_buf();
        move |error| AgentError::Io { path, error }
    };
    let cdi = cdi::Folder::new(&options.cdi);
    cdi.remove_unfinished().map_err(io(&options.cdi))?;
    for found in cdi.all().map_err(io(&options.cdi))? {
        cdi.remove(&found.name).map_err(io(&options.cdi))?;
    }
    cdi.remove_shared().map_err(io(&options.cdi))?;
    // The folders themselves may be mounted, and then stay: what is in them goes.
    for folder in [&options.run, &options.state] {
        for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
            let path = entry.path();
            let removed = if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
                fs::remove_dir_all(&path)
            } else {
                fs::remove_file(&path)
            };
            removed.map_err(io(&path))?;
        }
        let _ = fs::remove_dir(folder);
    }
    // An agent that was killed could not remove its own.
    plugin::remove_sockets(&options.kubelet.join("device-plugins"))
        .map_err(io(&options.kubelet.join("device-plugins")))?;
    tracing::info!("nothing of Partage is left on node {}", options.node);
    Ok(())
}

/// What the agent does all the time. One that ends before the others leaves half an agent: kubelet starts a whole one.
#[derive(Default)]
struct Duties(JoinSet<Option<String>>);

impl Duties {
    fn begin(&mut self, duty: impl Future<Output = ()> + Send + 'static) {
        self.0.spawn(async {
            duty.await;
            None
        });
    }

    /// What the end of one means.
    async fn ended(&mut self) -> Result<Ended, AgentError> {
        match self.0.join_next().await {
            // What pods hold is counted by a list that is made at the start.
            Some(Ok(Some(what))) => Ok(Ended::Changed(what)),
            Some(Err(error)) => Err(AgentError::Cannot(format!("a duty of the agent has failed: {error}"))),
            Some(Ok(None)) | None => Err(AgentError::Cannot("a duty of the agent has ended".into())),
        }
    }

    /// Waits until all have ended that were told to. The others are left to themselves: one that waits for a driver which does not
    /// answer cannot be ended, and must not keep the agent from doing so.
    async fn end(mut self) {
        let all = async { while self.0.join_next().await.is_some() {} };
        if tokio::time::timeout(FAREWELL, all).await.is_err() {
            tracing::warn!("a duty of the agent does not end, and is left to itself");
            self.0.abort_all();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_card_that_comes_and_goes_is_let_be() {
        let (mut pauses, start) = (Pauses::default(), Instant::now());
        let mut at = |seconds| pauses.next(start + Duration::from_secs(seconds)).as_secs();
        assert_eq!([0, 10, 20, 30, 40, 50, 60, 70, 80].map(&mut at), [0, 1, 2, 4, 8, 16, 32, 60, 60]);
        assert_eq!([379, 700, 701].map(&mut at), [60, 0, 1], "until it was calm for a while");
    }
}
