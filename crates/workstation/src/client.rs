//! Who asks a keeper, and starts one where there is none.

use crate::daemon::background;
use crate::home::{Home, HomeError};
use crate::report::{Report, ShareReport};
use crate::wire::{Answer, Change, LONGEST_ANSWER, Question, hear, say};
use partage_enforce::refusal::Refusal;
use std::io::{self, BufRead, BufReader, ErrorKind};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::Stdio;
use std::time::{Duration, Instant};

/// How long a keeper may take to begin: where the driver is, contexts are measured the first time.
const BEGINNING: Duration = Duration::from_secs(90);
/// How long a keeper may take to answer.
pub(crate) const ANSWERING: Duration = Duration::from_secs(30);

/// How often one asks anew whose keeper went away before it answered.
pub(crate) const TRIES: usize = 20;
/// A keeper that ends needs a moment until it does not answer any more.
pub(crate) const BETWEEN_TRIES: Duration = Duration::from_millis(50);

/// Why there is no answer.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// The daemon refused the request.
    #[error(transparent)]
    Refused(Refusal),
    /// There is no home to look in.
    #[error(transparent)]
    Home(#[from] HomeError),
    /// No daemon runs, and none can be started.
    #[error("the keeper of shares cannot be started")]
    NotStarted(#[source] StartError),
    /// The keeper's socket cannot be used.
    #[error("{}: {error}", home.socket().display())]
    Io {
        /// Which home.
        home: Home,
        /// What the system said.
        #[source]
        error: io::Error,
    },
    /// Somebody else answers there.
    #[error(
        "{} is answered by user {uid}, who is neither you nor the administrator, and could make you run anything: use another \
         home with --home",
        home.socket().display()
    )]
    Impostor {
        /// Which home.
        home: Home,
        /// Who.
        uid: u32,
    },
    /// The keeper takes too long.
    #[error("the keeper of {} does not answer: it may be very busy; if this lasts, end it and look at its log", .0.path().display())]
    Silent(Home),
    /// The keeper answered something else than asked.
    #[error(
        "the keeper does not understand this program: it may be of another version; stop partage up and start it again"
    )]
    Misunderstood,
}

/// Why no daemon could be started.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// The home belongs to another user, and only that user can start its daemon.
    #[error(
        "{} is somebody else's, and nobody answers there: ask them to start partage up again, or use a home of your own with \
         --home",
        home.display()
    )]
    NotOwner {
        /// The home.
        home: PathBuf,
    },
    /// The home cannot be used.
    #[error(transparent)]
    Home(#[from] HomeError),
    /// The process cannot be started, or its answer cannot be read.
    #[error(transparent)]
    Process(#[from] io::Error),
    /// The process ended without an answer.
    #[error("it ended at once; see {}", log.display())]
    Exited {
        /// The daemon's log file.
        log: PathBuf,
    },
    /// The daemon said why it cannot run.
    #[error("{0}")]
    Failed(String),
    /// It was started again and again, and does not answer.
    #[error("it does not answer")]
    Unresponsive,
}

/// What became of a share's processes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stopped {
    /// Processes that ended when they were asked to.
    pub ended: usize,
    /// Processes that had to be killed.
    pub killed: usize,
}

/// A way to a home's keeper.
pub struct Client {
    home: Home,
}

/// A conversation.
pub(crate) struct Talk {
    pub(crate) reader: BufReader<UnixStream>,
    pub(crate) writer: UnixStream,
}

impl Client {
    /// For a home.
    pub fn new(home: Home) -> Client {
        Client { home }
    }

    /// How everything is.
    pub fn report(&self) -> Result<Report, ClientError> {
        match self.ask(&Question::Report, ANSWERING)? {
            Answer::Report(report) => Ok(*report),
            _ => Err(ClientError::Misunderstood),
        }
    }

    /// Gives a share that runs another size.
    pub fn resize(&self, name: &str, change: Change) -> Result<ShareReport, ClientError> {
        match self.ask(&Question::Resize { name: name.into(), change }, ANSWERING)? {
            Answer::Resized(share) => Ok(*share),
            _ => Err(ClientError::Misunderstood),
        }
    }

    /// Ends all processes of a share.
    pub fn stop(&self, name: &str, grace: Duration) -> Result<Stopped, ClientError> {
        let grace_millis = u64::try_from(grace.as_millis()).unwrap_or(u64::MAX);
        match self
            .ask(&Question::Stop { name: name.into(), grace_millis }, ANSWERING.saturating_add(grace))?
        {
            Answer::Stopped { ended, killed } => Ok(Stopped { ended, killed }),
            _ => Err(ClientError::Misunderstood),
        }
    }

    /// Asks a keeper in the background to make place; nothing where there is none.
    pub fn take_over(&self) -> Result<(), ClientError> {
        let stream = match connected(&self.home) {
            Ok(stream) => stream,
            Err(ClientError::Io { error, .. }) if is_absent(&error) => return Ok(()),
            Err(error) => return Err(error),
        };
        let mut talk = Talk::new(stream, ANSWERING).map_err(|error| self.io(error))?;
        match self.said(&mut talk, &Question::HandOver) {
            Ok(Answer::HandedOver) => Ok(()),
            Ok(_) => Err(ClientError::Misunderstood),
            // It ended just now.
            Err(ClientError::Io { .. }) => Ok(()),
            Err(error) => Err(error),
        }
    }

    /// Starts a keeper in the background again, if there is something to keep. Where that fails, the next command tries.
    pub fn resume(&self) {
        if crate::store::is_any(&self.home) {
            let _ = self.talk(ANSWERING);
        }
    }

    fn ask(&self, question: &Question, patience: Duration) -> Result<Answer, ClientError> {
        // A keeper may end just when it is asked: then the next one is.
        let mut last = None;
        for tried in 0..TRIES {
            if tried > 0 {
                std::thread::sleep(BETWEEN_TRIES);
            }
            let mut talk = self.talk(patience)?;
            match self.said(&mut talk, question) {
                Err(error @ ClientError::Io { .. }) => last = Some(error),
                other => return other,
            }
        }
        Err(last.unwrap_or(ClientError::Misunderstood))
    }

    fn said(&self, talk: &mut Talk, question: &Question) -> Result<Answer, ClientError> {
        // One that does not want to hear may have said why; one that is gone says nothing.
        let _ = say(&mut talk.writer, question);
        self.heard(talk)
    }

    pub(crate) fn heard(&self, talk: &mut Talk) -> Result<Answer, ClientError> {
        match hear(&mut talk.reader, LONGEST_ANSWER) {
            Ok(Some(Answer::Refused { kind, message, hints })) => {
                Err(ClientError::Refused(Refusal::new(kind, message).with_hints(hints)))
            }
            Ok(Some(answer)) => Ok(answer),
            Ok(None) => Err(self.io(ErrorKind::UnexpectedEof.into())),
            Err(error) if error.kind() == ErrorKind::InvalidData => Err(ClientError::Misunderstood),
            Err(error) => Err(self.io(error)),
        }
    }

    /// A conversation with the keeper, which is started where there is none.
    pub(crate) fn talk(&self, patience: Duration) -> Result<Talk, ClientError> {
        let deadline = Instant::now() + BEGINNING;
        loop {
            match connected(&self.home) {
                Ok(stream) => return Talk::new(stream, patience).map_err(|error| self.io(error)),
                // Only its own user can start it; where it was killed, another one is about to follow.
                Err(ClientError::Io { error, .. })
                    if is_absent(&error) && self.home.is_of_another() && self.home.answers() => {}
                Err(ClientError::Io { error, .. }) if is_absent(&error) => {
                    self.start().map_err(ClientError::NotStarted)?;
                }
                Err(error) => return Err(error),
            }
            if Instant::now() > deadline {
                return Err(ClientError::NotStarted(StartError::Unresponsive));
            }
        }
    }

    /// Starts a keeper in the background; returns when it answers, or another one does.
    fn start(&self) -> Result<(), StartError> {
        if self.home.is_of_another() {
            return Err(StartError::NotOwner { home: self.home.path().into() });
        }
        self.home.make()?;
        let mut child = background(&self.home).stdout(Stdio::piped()).spawn()?;
        let mut line = String::new();
        if let Some(out) = child.stdout.take() {
            BufReader::new(out).read_line(&mut line)?;
        }
        match line.trim() {
            READY => Ok(()),
            // Somebody else started one at the same time, and it may not be ready yet.
            BUSY => {
                std::thread::sleep(BETWEEN_TRIES);
                Ok(())
            }
            "" => Err(StartError::Exited { log: self.home.log() }),
            why => Err(StartError::Failed(why.to_string())),
        }
    }

    fn io(&self, error: io::Error) -> ClientError {
        match error.kind() {
            ErrorKind::WouldBlock | ErrorKind::TimedOut => ClientError::Silent(self.home.clone()),
            _ => ClientError::Io { home: self.home.clone(), error },
        }
    }
}

/// What a keeper that was started says first, on its standard output: this, the other, or why not.
pub const READY: &str = "ready";
/// See [`READY`].
pub const BUSY: &str = "busy";

fn is_absent(error: &io::Error) -> bool {
    matches!(error.kind(), ErrorKind::NotFound | ErrorKind::ConnectionRefused | ErrorKind::NotADirectory)
}

/// A connection to a keeper that may be believed: what it says decides what is mounted and loaded.
fn connected(home: &Home) -> Result<UnixStream, ClientError> {
    let failed = |error: io::Error| ClientError::Io { home: home.clone(), error };
    let stream = UnixStream::connect(home.socket()).map_err(failed)?;
    let peer = rustix::net::sockopt::socket_peercred(&stream).map_err(|error| failed(error.into()))?;
    let uid = peer.uid.as_raw();
    if uid != 0 && uid != rustix::process::geteuid().as_raw() {
        return Err(ClientError::Impostor { home: home.clone(), uid });
    }
    Ok(stream)
}

impl Talk {
    fn new(stream: UnixStream, patience: Duration) -> io::Result<Talk> {
        stream.set_read_timeout(Some(patience))?;
        let writer = stream.try_clone()?;
        Ok(Talk { reader: BufReader::new(stream), writer })
    }
}
