//! Becoming the command of a share: ask, bind this very process, and give it over to the command.
//!
//! There is no process in between: the command has the terminal, the signals and the exit code because it is the process that
//! `partage run` was.

use crate::client::{ANSWERING, BETWEEN_TRIES, Client, ClientError, TRIES, Talk};
use crate::home::Home;
use crate::wire::{Answer, Bound, Granted, Places, Question, RunRequest, say};
use partage_host::binding::{self, BindError, Binding, Plan};
use std::ffi::{OsStr, OsString};
use std::io::ErrorKind;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

/// The variable that tells a command which share it is in.
pub const SHARE_VARIABLE: &str = "PARTAGE_SHARE";

/// The variable by which processes are known that nothing else holds. Nobody else knows its value.
pub(crate) const ID_VARIABLE: &str = "PARTAGE_SHARE_ID";

/// How long a keeper may be silent: one that waits hears of nothing for days.
const FOR_EVER: Duration = Duration::from_secs(1 << 30);

/// What is said on the way.
pub enum News<'a> {
    /// There is no room yet.
    Queued {
        /// Which place in the queue.
        place: usize,
        /// How many wait.
        of: usize,
        /// Why.
        why: &'a str,
    },
    /// The command is about to start.
    Bound {
        /// The share's name.
        name: &'a str,
        /// What it is.
        words: &'a str,
        /// How it is bound.
        binding: Binding,
        /// Why not better.
        why: Option<&'a str>,
    },
    /// Something worth knowing.
    Note(&'a str),
}

/// Why a command could not be run in a share.
#[derive(Debug, thiserror::Error)]
pub enum RunError {
    /// No share.
    #[error(transparent)]
    Client(#[from] ClientError),
    /// This process is in one.
    #[error(
        "this is already inside share {0}, and shares do not nest: leave it, or run the command as it is"
    )]
    Nested(String),
    /// The process could not be confined.
    #[error("this process cannot be bound to its share")]
    Binding(#[source] BindError),
    /// The daemon went away after the process was confined: it cannot ask another one.
    #[error("this process cannot be bound to its share: the keeper was killed meanwhile: run it again")]
    DaemonLost,
    /// There is no such command.
    #[error("{}: {error}", command.to_string_lossy())]
    Command {
        /// Which.
        command: OsString,
        /// What the system said.
        #[source]
        error: std::io::Error,
    },
}

/// The share that this process is in.
pub fn inside(home: &Home) -> Option<String> {
    let named = std::env::var(SHARE_VARIABLE).ok();
    if home.region_at().join(partage_region::LIMITS).exists() {
        return Some(named.unwrap_or_else(|| "of another command".into()));
    }
    // Without a mount namespace the variable is all there is.
    named.filter(|_| crate::store::is_any(home))
}

/// Runs a command in a share. Returns only if that cannot be.
pub fn run(
    home: &Home,
    request: &RunRequest,
    command: &[OsString],
    news: &mut dyn FnMut(News<'_>),
) -> RunError {
    if let Some(name) = inside(home) {
        return RunError::Nested(name);
    }
    let Some((program, arguments)) = command.split_first() else {
        let error = std::io::Error::new(ErrorKind::InvalidInput, "there is no command");
        return RunError::Command { command: OsString::new(), error };
    };
    // What is not there needs no share.
    if let Err(error) = find(program) {
        return RunError::Command { command: program.clone(), error };
    }
    let (granted, binding) = match bound(home, request, news) {
        Ok(bound) => bound,
        Err(error) => return error,
    };
    let mut command = Command::new(program);
    command.args(arguments);
    environment(&mut command, &granted, binding);
    let mut error = command.exec();
    if error.kind() == ErrorKind::NotFound {
        // The file itself was found before.
        error =
            std::io::Error::new(ErrorKind::NotFound, "what its first line says it is run by is not there");
    }
    RunError::Command { command: program.clone(), error }
}

fn bound(
    home: &Home,
    request: &RunRequest,
    news: &mut dyn FnMut(News<'_>),
) -> Result<(Granted, Binding), RunError> {
    let client = Client::new(home.clone());
    let mut tries = 0;
    loop {
        tries += 1;
        let mut talk = client.talk(if request.wait { FOR_EVER } else { ANSWERING })?;
        match granted(&client, &mut talk, request, news) {
            // The keeper was killed. Nothing has begun, so another one can be asked.
            Err(RunError::Client(ClientError::Io { .. })) if tries < TRIES => {
                std::thread::sleep(BETWEEN_TRIES);
            }
            Err(error) => return Err(error),
            Ok(granted) => return bind(&client, talk, granted, news),
        }
    }
}

fn granted(
    client: &Client,
    talk: &mut Talk,
    request: &RunRequest,
    news: &mut dyn FnMut(News<'_>),
) -> Result<Granted, RunError> {
    let question = Question::Run(request.clone());
    // A keeper that is gone is noticed when its answer is read.
    let _ = say(&mut talk.writer, &question);
    loop {
        match client.heard(talk)? {
            Answer::Queued { place, of, why } => news(News::Queued { place, of, why: &why }),
            Answer::Granted(granted) => return Ok(*granted),
            _ => return Err(ClientError::Misunderstood.into()),
        }
    }
}

fn bind(
    client: &Client,
    mut talk: Talk,
    granted: Granted,
    news: &mut dyn FnMut(News<'_>),
) -> Result<(Granted, Binding), RunError> {
    let entered = binding::enter(&plan(&granted.places));
    let (binding, why) = match entered {
        Ok(binding) => (binding, None),
        Err(BindError::Impossible(why)) => (Binding::LibraryPath, Some(why)),
        Err(error) => return Err(RunError::Binding(error)),
    };
    // A keeper that was killed here cannot be asked anew: this process is bound already.
    let _ = say(&mut talk.writer, &Bound { binding });
    let notes = match client.heard(&mut talk) {
        Ok(Answer::Go { notes }) => notes,
        Ok(_) => return Err(ClientError::Misunderstood.into()),
        Err(ClientError::Io { .. }) => {
            return Err(RunError::DaemonLost);
        }
        Err(error) => return Err(error.into()),
    };
    news(News::Bound { name: &granted.name, words: &granted.words, binding, why: why.as_deref() });
    for note in &notes {
        news(News::Note(note));
    }
    Ok((granted, binding))
}

fn plan(places: &Places) -> Plan {
    Plan {
        region: places.region.clone(),
        region_at: places.region_at.clone(),
        stand_ins: places.stand_ins.clone(),
        driver: places.driver.clone(),
        driver_at: places.driver_at.clone(),
        covers: places.covers.clone(),
    }
}

/// What the command finds in its environment. Nothing of it keeps the limits, but for the library path.
fn environment(command: &mut Command, granted: &Granted, binding: Binding) {
    command.env(SHARE_VARIABLE, &granted.name).env(ID_VARIABLE, &granted.id);
    // Whoever had chosen GPUs by their numbers chose among those of the machine.
    command.env("CUDA_VISIBLE_DEVICES", granted.gpus.join(","));
    let places = &granted.places;
    let folder = match binding {
        Binding::LibraryPath => Some(places.own_stand_ins.as_path()),
        // In its place the stand-ins are; programs find it even without the loader's cache.
        _ => places.simulated.as_ref().and(places.driver[0].parent()),
    };
    if let Some(folder) = folder {
        command.env("LD_LIBRARY_PATH", before(folder, std::env::var_os("LD_LIBRARY_PATH").as_deref()));
    }
}

/// A folder before others.
fn before(folder: &Path, others: Option<&OsStr>) -> OsString {
    let mut path = folder.as_os_str().as_bytes().to_vec();
    for other in others.unwrap_or_default().as_bytes().split(|byte| *byte == b':') {
        if !other.is_empty() && Path::new(OsStr::from_bytes(other)) != folder {
            path.push(b':');
            path.extend(other);
        }
    }
    OsString::from_vec(path)
}

/// The file of a command, as the system will look for it.
fn find(program: &OsStr) -> std::io::Result<PathBuf> {
    let is_command =
        |path: &Path| rustix::fs::access(path, rustix::fs::Access::EXEC_OK).is_ok() && path.is_file();
    let absent = || std::io::Error::new(ErrorKind::NotFound, "no such command");
    if program.as_bytes().contains(&b'/') {
        let path = PathBuf::from(program);
        return match std::fs::metadata(&path) {
            Ok(_) if is_command(&path) => Ok(path),
            Ok(_) => Err(std::io::Error::new(ErrorKind::PermissionDenied, "it cannot be executed")),
            Err(error) => Err(error),
        };
    }
    let path = std::env::var_os("PATH").unwrap_or_else(|| "/usr/local/bin:/usr/bin:/bin".into());
    std::env::split_paths(&path)
        .map(|folder| folder.join(program))
        .find(|file| is_command(file))
        .ok_or_else(absent)
}
