//! Runs a command in a share: requests the share, confines this process, and executes the command in it.
//!
//! There is no process in between: `partage run` becomes the command, so the command has its terminal, signals and exit
//! code.

use crate::client::{
    ClientError, DaemonClient, DaemonConnection, MAX_ATTEMPTS, RESPONSE_TIMEOUT, RETRY_INTERVAL,
};
use crate::protocol::{
    ConfinedNotice, DaemonRequest, DaemonResponse, GrantedShare, RunRequest, SharePaths, write_message,
};
use crate::state_dir::StateDir;
use partage_host::confine::{self, Confinement, ConfinementError, ConfinementPlan};
use std::ffi::{OsStr, OsString};
use std::fmt;
use std::io::ErrorKind;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

/// The environment variable with the name of the share, for the command.
pub const SHARE_VARIABLE: &str = "PARTAGE_SHARE";

/// The environment variable with the random id of the share, by which processes without a cgroup and a namespace are
/// found.
pub(crate) const ID_VARIABLE: &str = "PARTAGE_SHARE_ID";

/// The timeout of a request that waits in the queue: it may get no message for days.
const QUEUE_TIMEOUT: Duration = Duration::from_secs(1 << 30);

/// An event on the way to the command's start.
pub enum RunEvent<'a> {
    /// The request waits for capacity.
    Queued {
        /// The position in the queue, starting at 1.
        place: usize,
        /// The length of the queue.
        of: usize,
        /// Why the request does not fit yet.
        why: &'a str,
    },
    /// The command is about to start.
    Confined {
        /// The name of the share.
        name: &'a str,
        /// A description of the share.
        description: &'a str,
        /// The kind of confinement.
        confinement: Confinement,
        /// Why a stronger kind of confinement is not possible.
        why: Option<&'a str>,
    },
    /// A note for the user.
    Note(&'a str),
}

/// Why a command could not be run in a share.
#[derive(Debug, thiserror::Error)]
pub enum RunError {
    /// The share was not granted.
    #[error(transparent)]
    Client(#[from] ClientError),
    /// This process is in a share already.
    #[error(
        "this process is already in {0}, and shares do not nest: leave it, or run the command without partage run"
    )]
    Nested(CurrentShare),
    /// The process could not be confined.
    #[error("cannot confine this process to its share")]
    Confinement(#[source] ConfinementError),
    /// The daemon exited after the process was confined, so that the process cannot request another share.
    #[error(
        "cannot confine this process to its share: the daemon was killed meanwhile; run the command again"
    )]
    DaemonLost,
    /// The command cannot be executed.
    #[error("{}: {error}", command.to_string_lossy())]
    Command {
        /// The command that was to run.
        command: OsString,
        /// The error of the system.
        #[source]
        error: std::io::Error,
    },
}

/// The share that a process is in. Displayed as `share NAME`, or as `the share of another command`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CurrentShare {
    /// Its name; `None` if the environment variable that has it was removed.
    pub name: Option<String>,
}

impl fmt::Display for CurrentShare {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.name {
            Some(name) => write!(f, "share {name}"),
            None => f.write_str("the share of another command"),
        }
    }
}

/// Returns the share that this process is in.
pub fn current_share(state_dir: &StateDir) -> Option<CurrentShare> {
    let name = std::env::var(SHARE_VARIABLE).ok();
    if state_dir.region_at().join(partage_region::LIMITS_FILE).exists() {
        return Some(CurrentShare { name });
    }
    // Without a mount namespace, only the variable identifies the share.
    name.filter(|_| crate::share_store::has_shares(state_dir)).map(|name| CurrentShare { name: Some(name) })
}

/// Runs a command in a share. Returns only if that fails.
pub fn run(
    state_dir: &StateDir,
    request: &RunRequest,
    command: &[OsString],
    news: &mut dyn FnMut(RunEvent<'_>),
) -> RunError {
    if let Some(current) = current_share(state_dir) {
        return RunError::Nested(current);
    }
    let Some((program, arguments)) = command.split_first() else {
        let error = std::io::Error::new(ErrorKind::InvalidInput, "no command given");
        return RunError::Command { command: OsString::new(), error };
    };
    // A command that does not exist needs no share.
    if let Err(error) = find_command(program) {
        return RunError::Command { command: program.clone(), error };
    }
    let (granted, confinement) = match request_share(state_dir, request, news) {
        Ok(granted) => granted,
        Err(error) => return error,
    };
    let mut command = Command::new(program);
    command.args(arguments);
    set_environment(&mut command, &granted, confinement);
    let mut error = command.exec();
    if error.kind() == ErrorKind::NotFound {
        // The file itself exists, so its interpreter does not.
        error = std::io::Error::new(ErrorKind::NotFound, "the interpreter in its first line does not exist");
    }
    RunError::Command { command: program.clone(), error }
}

fn request_share(
    state_dir: &StateDir,
    request: &RunRequest,
    news: &mut dyn FnMut(RunEvent<'_>),
) -> Result<(GrantedShare, Confinement), RunError> {
    let client = DaemonClient::new(state_dir.clone());
    let mut tries = 0;
    loop {
        tries += 1;
        let mut connection = client.connect(if request.wait { QUEUE_TIMEOUT } else { RESPONSE_TIMEOUT })?;
        match wait_for_grant(&client, &mut connection, request, news) {
            // The daemon was killed. Nothing has started, so the next daemon can be asked.
            Err(RunError::Client(ClientError::Io { .. })) if tries < MAX_ATTEMPTS => {
                std::thread::sleep(RETRY_INTERVAL);
            }
            Err(error) => return Err(error),
            Ok(granted) => return confine(&client, connection, granted, news),
        }
    }
}

fn wait_for_grant(
    client: &DaemonClient,
    connection: &mut DaemonConnection,
    request: &RunRequest,
    news: &mut dyn FnMut(RunEvent<'_>),
) -> Result<GrantedShare, RunError> {
    let message = DaemonRequest::Run(request.clone());
    // An error is noticed when the response is read.
    let _ = write_message(&mut connection.writer, &message);
    loop {
        match client.receive(connection)? {
            DaemonResponse::Queued { place, of, why } => news(RunEvent::Queued { place, of, why: &why }),
            DaemonResponse::Granted(granted) => return Ok(*granted),
            _ => return Err(ClientError::UnexpectedResponse.into()),
        }
    }
}

fn confine(
    client: &DaemonClient,
    mut connection: DaemonConnection,
    granted: GrantedShare,
    news: &mut dyn FnMut(RunEvent<'_>),
) -> Result<(GrantedShare, Confinement), RunError> {
    let entered = confine::enter(&confinement_plan(&granted.places));
    let (confinement, why) = match entered {
        Ok(confinement) => (confinement, None),
        Err(ConfinementError::Unsupported(why)) => (Confinement::LibraryPath, Some(why)),
        Err(error) => return Err(RunError::Confinement(error)),
    };
    // If the daemon is killed here, this process cannot request another share, because it is confined already.
    let _ = write_message(&mut connection.writer, &ConfinedNotice { confinement });
    let notes = match client.receive(&mut connection) {
        Ok(DaemonResponse::Go { notes }) => notes,
        Ok(_) => return Err(ClientError::UnexpectedResponse.into()),
        Err(ClientError::Io { .. }) => {
            return Err(RunError::DaemonLost);
        }
        Err(error) => return Err(error.into()),
    };
    news(RunEvent::Confined {
        name: &granted.name,
        description: &granted.description,
        confinement,
        why: why.as_deref(),
    });
    for note in &notes {
        news(RunEvent::Note(note));
    }
    Ok((granted, confinement))
}

fn confinement_plan(places: &SharePaths) -> ConfinementPlan {
    ConfinementPlan {
        region: places.region.clone(),
        region_at: places.region_at.clone(),
        stand_ins: places.stand_ins.clone(),
        driver: places.driver.clone(),
        driver_at: places.driver_at.clone(),
        covers: places.covers.clone(),
    }
}

/// Sets the environment of the command. Only the library path enforces limits, and only without a mount namespace.
fn set_environment(command: &mut Command, granted: &GrantedShare, confinement: Confinement) {
    command.env(SHARE_VARIABLE, &granted.name).env(ID_VARIABLE, &granted.id);
    // An index in the caller's variable referred to all GPUs of the machine.
    command.env("CUDA_VISIBLE_DEVICES", granted.gpus.join(","));
    let places = &granted.places;
    let folder = match confinement {
        Confinement::LibraryPath => Some(places.own_stand_ins.as_path()),
        // The stand-ins are mounted there; with the variable, programs find them even without the loader's cache.
        _ => places.simulated.as_ref().and(places.driver[0].parent()),
    };
    if let Some(folder) = folder {
        command.env("LD_LIBRARY_PATH", prepend_path(folder, std::env::var_os("LD_LIBRARY_PATH").as_deref()));
    }
}

/// Prepends a directory to a library path, without duplicates.
fn prepend_path(folder: &Path, others: Option<&OsStr>) -> OsString {
    let mut path = folder.as_os_str().as_bytes().to_vec();
    for other in others.unwrap_or_default().as_bytes().split(|byte| *byte == b':') {
        if !other.is_empty() && Path::new(OsStr::from_bytes(other)) != folder {
            path.push(b':');
            path.extend(other);
        }
    }
    OsString::from_vec(path)
}

/// Finds the file of a command as `execvp` does.
fn find_command(program: &OsStr) -> std::io::Result<PathBuf> {
    let is_command =
        |path: &Path| rustix::fs::access(path, rustix::fs::Access::EXEC_OK).is_ok() && path.is_file();
    let absent = || std::io::Error::new(ErrorKind::NotFound, "command not found");
    if program.as_bytes().contains(&b'/') {
        let path = PathBuf::from(program);
        return match std::fs::metadata(&path) {
            Ok(_) if is_command(&path) => Ok(path),
            Ok(_) => Err(std::io::Error::new(ErrorKind::PermissionDenied, "not executable")),
            Err(error) => Err(error),
        };
    }
    let path = std::env::var_os("PATH").unwrap_or_else(|| "/usr/local/bin:/usr/bin:/bin".into());
    std::env::split_paths(&path)
        .map(|folder| folder.join(program))
        .find(|file| is_command(file))
        .ok_or_else(absent)
}
