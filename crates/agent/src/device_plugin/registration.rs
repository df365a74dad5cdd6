//! Keeps a plugin served and registered: at start, with every new kubelet, when kubelet closed its stream, and when the plugin's
//! socket was removed.

use super::dir_watch::DirWatch;
use super::service::{OPTIONS, PluginService};
use super::{DeviceAllocator, PluginContext};
use partage_enforce::error_chain::describe;
use partage_kubelet_api::deviceplugin::device_plugin_server::DevicePluginServer;
use partage_kubelet_api::deviceplugin::registration_client::RegistrationClient;
use partage_kubelet_api::deviceplugin::{RegisterRequest, VERSION};
use partage_kubelet_api::unix::{self, SocketFile};
use std::error::Error;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio::time::Instant;
use tonic::transport::Server;

/// Interval between two checks of the sockets when no change of the directory was noticed.
const POLL_INTERVAL: Duration = Duration::from_secs(1);
/// Delay before the first retry. Kubelet's socket exists a moment before kubelet listens on it.
const FIRST_RETRY_DELAY: Duration = Duration::from_millis(5);
/// Time that kubelet takes to notice that a stream ended. Until then it would drop a new connection in its place.
const STREAM_CLOSE_DELAY: Duration = Duration::from_millis(20);
/// Maximum time from a registration to kubelet's `ListAndWatch`.
const WATCH_TIMEOUT: Duration = Duration::from_secs(2);
/// Maximum time for kubelet's answer to a registration. Kubelet calls the plugin back before it answers.
const REGISTER_TIMEOUT: Duration = Duration::from_secs(10);

/// Serves and registers the plugin until `stop` has a deadline; requests in progress have until then.
pub(super) async fn run<A: DeviceAllocator>(
    context: Arc<PluginContext<A>>,
    mut stop: watch::Receiver<Option<Instant>>,
) {
    let mut streams = context.streams.subscribe();
    let mut registrar = Registrar {
        directory: DirWatch::new(&context.directory),
        context,
        server: None,
        state: RegistrationState::Unregistered,
        retry_delay: FIRST_RETRY_DELAY,
        close_delay: STREAM_CLOSE_DELAY,
        last_error: String::new(),
    };
    loop {
        // Changes from here on end the wait below.
        registrar.directory.arm();
        streams.mark_unchanged();
        let pause = tokio::select! {
            pause = registrar.reconcile() => pause,
            _ = stop.wait_for(Option::is_some) => break,
        };
        tokio::select! {
            () = registrar.directory.changed() => registrar.retry_delay = FIRST_RETRY_DELAY,
            _ = streams.changed() => {}
            () = tokio::time::sleep(pause) => {}
            _ = stop.wait_for(Option::is_some) => break,
        }
    }
    // A handle that was dropped together with its runtime leaves no deadline.
    let deadline = (*stop.borrow()).unwrap_or_else(Instant::now);
    if let Some(server) = registrar.server {
        server.shut_down(deadline).await;
    }
}

/// Keeps one plugin registered.
struct Registrar<A> {
    context: Arc<PluginContext<A>>,
    directory: DirWatch,
    server: Option<PluginServer>,
    state: RegistrationState,
    /// Delay before the next retry after a failure.
    retry_delay: Duration,
    /// Delay before the next registration after kubelet closed its stream.
    close_delay: Duration,
    /// The error that was logged last: the same one is not logged again.
    last_error: String,
}

/// Whether the plugin is registered with kubelet.
enum RegistrationState {
    /// No registration was accepted yet.
    Unregistered,
    /// Kubelet accepted a registration.
    Registered {
        /// The kubelet that accepted it.
        kubelet: SocketFile,
        /// The plugin's socket at that time.
        plugin: SocketFile,
        at: Instant,
        /// How many streams had been opened before.
        opened: u64,
    },
    /// The streams that kubelet had open were closed. Kubelet has to notice that before it gets another registration, or it
    /// drops the new connection in place of the old one.
    Closed {
        /// The kubelet that had the streams.
        kubelet: SocketFile,
        until: Instant,
    },
}

/// The result of a registration request.
enum RegisterOutcome {
    Accepted,
    /// A socket was replaced meanwhile: kubelet would call back in vain.
    Superseded,
}

impl<A: DeviceAllocator> Registrar<A> {
    /// Serves and registers the plugin if that is needed now. Returns after what time to check again if nothing happens.
    async fn reconcile(&mut self) -> Duration {
        let kubelet = SocketFile::at(self.context.kubelet_socket()).ok();
        let is_in_place = self.server.as_ref().is_some_and(|server| server.file.is_in_place());
        // While there is no kubelet to register with, a server whose socket was removed still has kubelet's old connections.
        if !is_in_place && (kubelet.is_some() || self.server.is_none()) {
            match PluginServer::start(&self.context).await {
                // The streams of the previous server end with it.
                Ok(server) => self.server = Some(server),
                Err(error) => return self.log_failure("cannot serve the device plugin, retrying", &error),
            }
        }
        let (Some(kubelet), Some(server)) = (kubelet, &self.server) else { return POLL_INTERVAL };
        let plugin = server.file.clone();
        let has_streams = *self.context.streams.borrow() > 0;
        match &self.state {
            RegistrationState::Registered { kubelet: known, plugin: known_plugin, at, opened }
                if *known == kubelet =>
            {
                let is_same_plugin = *known_plugin == plugin;
                if is_same_plugin && has_streams {
                    return POLL_INTERVAL;
                }
                let remaining = WATCH_TIMEOUT.saturating_sub(at.elapsed());
                let never_opened = self.context.opened.load(Ordering::SeqCst) == *opened;
                if is_same_plugin && never_opened && !remaining.is_zero() {
                    return remaining;
                }
                // Back off from a kubelet that closes its streams again and again.
                self.close_delay = if remaining.is_zero() {
                    STREAM_CLOSE_DELAY
                } else {
                    (self.close_delay * 2).min(POLL_INTERVAL)
                };
                return self.close_streams(kubelet, self.close_delay);
            }
            RegistrationState::Closed { kubelet: known, until } if *known == kubelet && !has_streams => {
                let remaining = until.saturating_duration_since(Instant::now());
                if !remaining.is_zero() {
                    return remaining;
                }
            }
            // Streams of a previous kubelet or a previous server.
            _ if has_streams => return self.close_streams(kubelet, STREAM_CLOSE_DELAY),
            _ => {}
        }
        let opened = self.context.opened.load(Ordering::SeqCst);
        match self.register(&kubelet, &plugin).await {
            Ok(RegisterOutcome::Accepted) => {
                tracing::info!(resource = self.context.resource, "registered with kubelet");
                self.state = RegistrationState::Registered { kubelet, plugin, at: Instant::now(), opened };
                self.retry_delay = FIRST_RETRY_DELAY;
                self.last_error.clear();
                WATCH_TIMEOUT
            }
            Ok(RegisterOutcome::Superseded) => {
                self.close_streams(kubelet, STREAM_CLOSE_DELAY);
                Duration::ZERO
            }
            Err(error) => self.log_failure("cannot register with kubelet, retrying", error.as_ref()),
        }
    }

    /// Closes the open streams, and gives kubelet time to notice that.
    fn close_streams(&mut self, kubelet: SocketFile, pause: Duration) -> Duration {
        if let Some(server) = &self.server {
            server.streams.send_replace(());
        }
        self.state = RegistrationState::Closed { kubelet, until: Instant::now() + pause };
        pause
    }

    async fn register(
        &self,
        kubelet: &SocketFile,
        plugin: &SocketFile,
    ) -> Result<RegisterOutcome, Box<dyn Error + Send + Sync>> {
        let request = RegisterRequest {
            version: VERSION.to_string(),
            endpoint: self.context.endpoint(),
            resource_name: self.context.resource.clone(),
            options: Some(OPTIONS),
        };
        let answer = async {
            let channel = unix::connect(self.context.kubelet_socket()).await?;
            // The socket was the same before and after connecting, so the connection is to this kubelet.
            if !kubelet.is_in_place() {
                return Ok(RegisterOutcome::Superseded);
            }
            RegistrationClient::new(channel).register(request).await?;
            Ok(RegisterOutcome::Accepted)
        };
        let superseded = async {
            while kubelet.is_in_place() && plugin.is_in_place() {
                self.directory.changed().await;
            }
        };
        tokio::select! {
            answer = answer => answer,
            () = superseded => Ok(RegisterOutcome::Superseded),
            () = tokio::time::sleep(REGISTER_TIMEOUT) => {
                Err(format!("no response within {} s", REGISTER_TIMEOUT.as_secs()).into())
            }
        }
    }

    /// Logs a failure, once for each cause. Returns the delay before the next attempt.
    fn log_failure(&mut self, message: &'static str, error: &(dyn Error + 'static)) -> Duration {
        let error = describe(error);
        if self.last_error != error {
            tracing::warn!(resource = self.context.resource, error, "{message}");
            self.last_error = error;
        }
        let pause = self.retry_delay;
        self.retry_delay = (self.retry_delay * 2).min(POLL_INTERVAL);
        pause
    }
}

/// A server on the plugin's socket. Dropping it ends the streams; requests in progress are answered.
struct PluginServer {
    file: SocketFile,
    /// Sending a value closes the open streams.
    streams: watch::Sender<()>,
    task: JoinHandle<()>,
}

impl PluginServer {
    async fn start<A: DeviceAllocator>(
        context: &Arc<PluginContext<A>>,
    ) -> Result<PluginServer, unix::SocketError> {
        let listener = unix::listen(context.socket()).await?;
        let file = listener.file().clone();
        let (streams, open) = watch::channel(());
        let service = PluginService { context: context.clone(), streams: open.clone() };
        let service = DevicePluginServer::new(service);
        let mut open = open;
        let shutdown = async move { while open.changed().await.is_ok() {} };
        let server = Server::builder().serve_with_incoming_shutdown(service, listener, shutdown);
        let resource = context.resource.clone();
        let task = tokio::spawn(async move {
            if let Err(error) = server.await {
                tracing::warn!(resource, error = &error as &dyn Error, "device plugin server failed");
            }
        });
        Ok(PluginServer { file, streams, task })
    }

    /// Shuts the server down, and waits until its socket is removed. Requests in progress are aborted at the deadline.
    async fn shut_down(self, deadline: Instant) {
        let PluginServer { streams, mut task, .. } = self;
        drop(streams);
        if tokio::time::timeout_at(deadline, &mut task).await.is_err() {
            task.abort();
            // The error only reports that it was aborted.
            let _ = task.await;
        }
    }
}
