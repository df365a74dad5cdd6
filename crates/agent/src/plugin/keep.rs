//! Keeping a plugin served and known: at start, with every new kubelet, when kubelet let go, and when our socket was removed.

use super::folder::Folder;
use super::serve::{OPTIONS, Service};
use super::{Giver, Shared};
use partage_kubelet_api::deviceplugin::device_plugin_server::DevicePluginServer;
use partage_kubelet_api::deviceplugin::registration_client::RegistrationClient;
use partage_kubelet_api::deviceplugin::{RegisterRequest, VERSION};
use partage_kubelet_api::unix::{self, SocketFile};
use std::error::Error;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tonic::transport::Server;

/// How often the sockets are looked at though nothing was noticed.
const BEAT: Duration = Duration::from_secs(1);
/// How soon a failure is tried again. Kubelet's socket is there a moment before kubelet listens on it.
const FIRST_RETRY: Duration = Duration::from_millis(5);
/// How long kubelet takes to notice that a stream ended. Until then it would drop a new connection in its place.
const SETTLE: Duration = Duration::from_millis(20);
/// How long kubelet may take from a registration to its watch of the list, and a server to its end.
const PATIENCE: Duration = Duration::from_secs(2);
/// How long kubelet may take to answer a registration. It calls back first.
const ANSWER: Duration = Duration::from_secs(10);

/// Serves and registers until told to stop.
pub(super) async fn keep<G: Giver>(shared: Arc<Shared<G>>, mut stop: watch::Receiver<bool>) {
    let mut watched = shared.watched.subscribe();
    let mut keeper = Keeper {
        folder: Folder::new(&shared.folder),
        shared,
        serving: None,
        standing: Standing::Unknown,
        retry: FIRST_RETRY,
        settle: SETTLE,
        complaint: String::new(),
    };
    loop {
        // What changes from here on ends the wait below.
        keeper.folder.arm();
        watched.mark_unchanged();
        let pause = tokio::select! {
            pause = keeper.look() => pause,
            _ = stop.wait_for(|stop| *stop) => break,
        };
        tokio::select! {
            () = keeper.folder.changed() => keeper.retry = FIRST_RETRY,
            _ = watched.changed() => {}
            () = tokio::time::sleep(pause) => {}
            _ = stop.wait_for(|stop| *stop) => break,
        }
    }
    if let Some(serving) = keeper.serving {
        serving.end().await;
    }
}

struct Keeper<G> {
    shared: Arc<Shared<G>>,
    folder: Folder,
    serving: Option<Serving>,
    standing: Standing,
    /// How soon the next failure is tried again.
    retry: Duration,
    /// How long kubelet is left alone after it let go.
    settle: Duration,
    /// What was complained of last: the same is not said again.
    complaint: String,
}

/// How we stand with kubelet.
enum Standing {
    /// It was told nothing yet.
    Unknown,
    /// It took a registration.
    Told {
        /// Which kubelet.
        kubelet: SocketFile,
        /// With which of our sockets.
        ours: SocketFile,
        at: Instant,
        /// How many streams had been opened before.
        opened: u64,
    },
    /// The streams it had have ended. It has to notice that before it is told again, or it drops the new connection in the place
    /// of the old one.
    LetGo {
        /// Which kubelet.
        kubelet: SocketFile,
        until: Instant,
    },
}

/// What became of a registration.
enum Registration {
    Taken,
    /// A socket went away meanwhile: kubelet would call back in vain.
    Overtaken,
}

impl<G: Giver> Keeper<G> {
    /// Does what has to be done now. Returns how long nothing has to be done, if nothing happens.
    async fn look(&mut self) -> Duration {
        let kubelet = SocketFile::at(self.shared.kubelet_socket()).ok();
        let in_place = self.serving.as_ref().is_some_and(|serving| serving.file.is_in_place());
        // Without a kubelet to register with, the connections that it may still have are all there is.
        if !in_place && (kubelet.is_some() || self.serving.is_none()) {
            match Serving::start(&self.shared).await {
                // The streams of the one before end with it.
                Ok(serving) => self.serving = Some(serving),
                Err(error) => return self.failed("cannot be served", &error),
            }
        }
        let (Some(kubelet), Some(serving)) = (kubelet, &self.serving) else { return BEAT };
        let ours = serving.file.clone();
        let watched = *self.shared.watched.borrow() > 0;
        match &self.standing {
            Standing::Told { kubelet: told, ours: with, at, opened } if *told == kubelet => {
                if *with == ours && watched {
                    return BEAT;
                }
                let left = PATIENCE.saturating_sub(at.elapsed());
                let never_watched = self.shared.opened.load(Ordering::SeqCst) == *opened;
                if *with == ours && never_watched && !left.is_zero() {
                    return left;
                }
                // A kubelet that lets go again and again is not asked at every instant.
                self.settle = if left.is_zero() { SETTLE } else { (self.settle * 2).min(BEAT) };
                return self.let_go(kubelet, self.settle);
            }
            Standing::LetGo { kubelet: told, until } if *told == kubelet && !watched => {
                let left = until.saturating_duration_since(Instant::now());
                if !left.is_zero() {
                    return left;
                }
            }
            // Streams of a kubelet before, or of a server before.
            _ if watched => return self.let_go(kubelet, SETTLE),
            _ => {}
        }
        let opened = self.shared.opened.load(Ordering::SeqCst);
        match self.register(&kubelet, &ours).await {
            Ok(Registration::Taken) => {
                tracing::info!(resource = self.shared.resource, "registered with kubelet");
                self.standing = Standing::Told { kubelet, ours, at: Instant::now(), opened };
                self.retry = FIRST_RETRY;
                self.complaint.clear();
                PATIENCE
            }
            Ok(Registration::Overtaken) => {
                self.let_go(kubelet, SETTLE);
                Duration::ZERO
            }
            Err(error) => self.failed("kubelet does not take the registration", error.as_ref()),
        }
    }

    /// Ends the streams that are open, and leaves kubelet alone for a while.
    fn let_go(&mut self, kubelet: SocketFile, pause: Duration) -> Duration {
        if let Some(serving) = &self.serving {
            serving.streams.send_replace(());
        }
        self.standing = Standing::LetGo { kubelet, until: Instant::now() + pause };
        pause
    }

    async fn register(
        &self,
        kubelet: &SocketFile,
        ours: &SocketFile,
    ) -> Result<Registration, Box<dyn Error + Send + Sync>> {
        let request = RegisterRequest {
            version: VERSION.to_string(),
            endpoint: self.shared.endpoint(),
            resource_name: self.shared.resource.clone(),
            options: Some(OPTIONS),
        };
        let asked = async {
            let channel = unix::connect(self.shared.kubelet_socket()).await?;
            // It was there before and it is there now: this is whom we are connected to.
            if !kubelet.is_in_place() {
                return Ok(Registration::Overtaken);
            }
            RegistrationClient::new(channel).register(request).await?;
            Ok(Registration::Taken)
        };
        let overtaken = async {
            while kubelet.is_in_place() && ours.is_in_place() {
                self.folder.changed().await;
            }
        };
        tokio::select! {
            answer = asked => answer,
            () = overtaken => Ok(Registration::Overtaken),
            () = tokio::time::sleep(ANSWER) => Err(format!("no answer within {} s", ANSWER.as_secs()).into()),
        }
    }

    /// Says so, once for each cause, and when to try again.
    fn failed(&mut self, what: &str, error: &(dyn Error + 'static)) -> Duration {
        let causes = std::iter::successors(Some(error), |&error| error.source());
        let why = causes.map(|cause| cause.to_string()).collect::<Vec<_>>().join(": ");
        if self.complaint != why {
            tracing::warn!(resource = self.shared.resource, why, "{what}; it is tried again");
            self.complaint = why;
        }
        let pause = self.retry;
        self.retry = (self.retry * 2).min(BEAT);
        pause
    }
}

/// A server on our socket. Dropping it ends the streams; calls that are under way are answered.
struct Serving {
    file: SocketFile,
    /// What is sent ends the streams that are open.
    streams: watch::Sender<()>,
    task: JoinHandle<()>,
}

impl Serving {
    async fn start<G: Giver>(shared: &Arc<Shared<G>>) -> Result<Serving, unix::SocketError> {
        let listener = unix::listen(shared.socket()).await?;
        let file = listener.file().clone();
        let (streams, open) = watch::channel(());
        let service = DevicePluginServer::new(Service { shared: shared.clone(), streams: open.clone() });
        let mut open = open;
        let end = async move { while open.changed().await.is_ok() {} };
        let server = Server::builder().serve_with_incoming_shutdown(service, listener, end);
        let resource = shared.resource.clone();
        let task = tokio::spawn(async move {
            if let Err(error) = server.await {
                tracing::warn!(resource, error = &error as &dyn Error, "the server of a plugin ended");
            }
        });
        Ok(Serving { file, streams, task })
    }

    /// Ends, and waits until the socket is gone.
    async fn end(self) {
        let Serving { streams, mut task, .. } = self;
        drop(streams);
        if tokio::time::timeout(PATIENCE, &mut task).await.is_err() {
            task.abort();
            // Cancelled, as it was told.
            let _ = task.await;
        }
    }
}
