//! The state directory: the files of a daemon and its shares.
//!
//! | files | directory | purpose |
//! |---|---|---|
//! | `daemon.sock`, `daemon.lock`, `daemon.log` | run | socket, lock file and log of the daemon |
//! | `shares/NAME/` | run | the record of a share, its region, its device files |
//! | `region/`, `driver/` | run | empty mount points: a share's own are mounted there in its mount namespace |
//! | `gpus/` | lib | the simulated machine, if the driver is simulated |
//! | `stand-ins/BUILD/`, `shares/NAME/` | lib | libraries: `/run` is mounted `noexec` on many machines |
//!
//! The socket and the lock file keep their names across versions: during an upgrade, daemons and commands of both
//! versions find each other by them.

use std::fs::{self, DirBuilder};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// The environment variable that names the state directory.
pub const STATE_DIR_VARIABLE: &str = "PARTAGE_STATE_DIR";

/// The maximum length of the path of a Unix socket.
const MAX_SOCKET_PATH_BYTES: usize = 107;

/// How long a standby process may take to take over from a killed daemon.
const TAKEOVER_TIMEOUT: Duration = Duration::from_secs(10);

/// The state directory of root's daemon, which serves all users.
const MACHINE_RUN_DIR: &str = "/run/partage";
const MACHINE_LIB_DIR: &str = "/var/lib/partage";

/// Why a state directory cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum StateDirError {
    /// The path is too long for a socket.
    #[error("{}: the path of the socket would exceed {MAX_SOCKET_PATH_BYTES} bytes: use a shorter path", .0.display())]
    TooLong(PathBuf),
    /// The path or the directory is unsuitable.
    #[error("{}: {why}", path.display())]
    Unusable {
        /// The path that the error is about.
        path: PathBuf,
        /// Why it is unsuitable, and what to do.
        why: &'static str,
    },
    /// A file or directory cannot be created or read.
    #[error("{}: {what}: {error}", path.display())]
    Io {
        /// The path that the error is about.
        path: PathBuf,
        /// The operation that failed.
        what: &'static str,
        /// The error of the system.
        #[source]
        error: io::Error,
    },
    /// The directory belongs to another user.
    #[error(
        "{} belongs to user {owner}, not to you ({own}), who could read and change your shares; \
         use another with --state-dir",
        path.display()
    )]
    NotOwner {
        /// The path that the error is about.
        path: PathBuf,
        /// The owner of the directory.
        owner: u32,
        /// The user of this process.
        own: u32,
    },
}

/// The state directory of a daemon. It consists of a directory that a reboot may empty, and one from which libraries
/// can be loaded.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StateDir {
    run: PathBuf,
    lib: PathBuf,
    /// Whether it was chosen explicitly, and is not a default location.
    named: bool,
}

impl StateDir {
    /// Returns the state directory at a path, with all files in it.
    pub fn at(folder: &Path) -> Result<StateDir, StateDirError> {
        let folder = std::path::absolute(folder).map_err(|error| StateDirError::Io {
            path: folder.into(),
            what: "cannot make the path absolute",
            error,
        })?;
        StateDir { lib: folder.join("lib"), run: folder, named: true }.validate()
    }

    /// Returns the machine's state directory for root, or if the machine's daemon runs; else the user's own.
    pub fn default_location() -> Result<StateDir, StateDirError> {
        let uid = rustix::process::getuid().as_raw();
        let machine = StateDir { run: MACHINE_RUN_DIR.into(), lib: MACHINE_LIB_DIR.into(), named: false };
        // If the machine's daemon has shares and does not respond, another daemon would take their GPUs for free.
        if uid == 0 || machine.is_answering() || crate::share_store::has_shares(&machine) {
            return machine.validate();
        }
        let variable = |name| std::env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute());
        // Independent of the environment of a login, a cron job or `su`: two daemons of one user would grant the same
        // GPU twice.
        let run = Some(PathBuf::from(format!("/run/user/{uid}")));
        let run =
            run.filter(|path| fs::metadata(path).is_ok_and(|about| about.is_dir() && about.uid() == uid));
        let run = run.map_or_else(|| format!("/tmp/partage-{uid}").into(), |path| path.join("partage"));
        let lib = variable("XDG_STATE_HOME").or_else(|| Some(variable("HOME")?.join(".local/state")));
        let lib = lib.map_or_else(|| run.join("lib"), |path| path.join("partage"));
        StateDir { run, lib, named: false }.validate()
    }

    /// Returns whether the daemon accepts connections. If it does not and has shares, it was killed, and this waits
    /// until its standby process takes over: another daemon would take the same GPUs for free.
    pub(crate) fn is_answering(&self) -> bool {
        let until = Instant::now() + TAKEOVER_TIMEOUT;
        loop {
            if UnixStream::connect(self.socket()).is_ok() {
                return true;
            }
            if !crate::share_store::has_shares(self) || Instant::now() > until {
                return false;
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// Returns whether the directory belongs to another user, who alone can start its daemon.
    pub(crate) fn belongs_to_another_user(&self) -> bool {
        let own = rustix::process::geteuid().as_raw();
        fs::symlink_metadata(&self.run).is_ok_and(|folder| folder.uid() != own)
    }

    fn validate(self) -> Result<StateDir, StateDirError> {
        if self.socket().as_os_str().as_bytes().len() > MAX_SOCKET_PATH_BYTES {
            return Err(StateDirError::TooLong(self.run));
        }
        for path in [&self.run, &self.lib] {
            // In a library path, the loader splits at the first two and expands the third; the last ends a line of its
            // configuration.
            if path.as_os_str().as_bytes().iter().any(|byte| b":;$\n".contains(byte)) {
                return Err(StateDirError::Unusable {
                    path: path.clone(),
                    why: "the loader cannot find libraries in a path with :, ;, $ or a line break: use another path",
                });
            }
            if path.to_str().is_none() {
                return Err(StateDirError::Unusable {
                    path: path.clone(),
                    why: "path is not valid UTF-8: use another path",
                });
            }
        }
        Ok(self)
    }

    /// Returns the directory that identifies the daemon.
    pub fn path(&self) -> &Path {
        &self.run
    }

    /// Returns the path of the settings file, if the state directory was chosen explicitly: it has its own settings or
    /// none.
    pub(crate) fn settings(&self) -> Option<PathBuf> {
        self.named.then(|| self.run.join("partage.yaml"))
    }

    /// Returns the copy of the settings of the running or killed daemon, which the next daemon uses.
    pub(crate) fn settings_in_force(&self) -> PathBuf {
        self.run.join("settings.in-force.yaml")
    }

    pub(crate) fn is_named(&self) -> bool {
        self.named
    }

    /// Creates the directories. Only the daemon's user may write to them.
    pub(crate) fn create(&self) -> Result<(), StateDirError> {
        for folder in [&self.run, &self.lib] {
            create_own_directory(folder)?;
        }
        for folder in
            [self.shares(), self.region_at(), self.driver_at(), self.stand_ins(), self.own_stand_ins()]
        {
            create_directory(&folder)?;
        }
        for file in self.driver_files() {
            if !file.exists() {
                fs::write(&file, b"").map_err(failed(&file, "cannot create the file"))?;
            }
        }
        Ok(())
    }

    /// Returns whether the daemon serves all users: it does if it runs as root.
    pub(crate) fn is_for_all_users() -> bool {
        rustix::process::geteuid().is_root()
    }

    pub(crate) fn socket(&self) -> PathBuf {
        self.run.join("daemon.sock")
    }

    pub(crate) fn lock(&self) -> PathBuf {
        self.run.join("daemon.lock")
    }

    /// Returns the log file of a daemon in the background.
    pub fn log(&self) -> PathBuf {
        self.run.join("daemon.log")
    }

    pub(crate) fn shares(&self) -> PathBuf {
        self.run.join("shares")
    }

    pub(crate) fn share(&self, name: &str) -> PathBuf {
        self.shares().join(name)
    }

    /// Returns the name of a share's cgroup. Several state directories may have shares of the same name.
    pub(crate) fn cgroup(&self, name: &str, id: &str) -> String {
        let id = id.get(..8).unwrap_or(id);
        format!("{}{name}.{id}", self.cgroup_prefix())
    }

    /// Returns the prefix of the cgroups of all shares.
    pub(crate) fn cgroup_prefix(&self) -> String {
        let (device, number) = fs::metadata(&self.run).map_or((0, 0), |about| (about.dev(), about.ino()));
        format!("partage-{device:x}.{number:x}-")
    }

    pub(crate) fn region_at(&self) -> PathBuf {
        self.run.join("region")
    }

    fn driver_at(&self) -> PathBuf {
        self.run.join("driver")
    }

    /// Returns where the driver's own libraries are mounted in a share's mount namespace.
    pub(crate) fn driver_files(&self) -> [PathBuf; 2] {
        ["libcuda.so.1", "libnvidia-ml.so.1"].map(|name| self.driver_at().join(name))
    }

    pub(crate) fn stand_ins(&self) -> PathBuf {
        self.lib.join("stand-ins")
    }

    pub(crate) fn own_stand_ins(&self) -> PathBuf {
        self.lib.join("shares")
    }

    pub(crate) fn simulated(&self) -> PathBuf {
        self.lib.join("gpus")
    }

    pub(crate) fn lib(&self) -> &Path {
        &self.lib
    }
}

fn failed(path: &Path, what: &'static str) -> impl FnOnce(io::Error) -> StateDirError {
    let path = path.to_path_buf();
    move |error| StateDirError::Io { path, what, error }
}

fn create_directory(folder: &Path) -> Result<(), StateDirError> {
    match DirBuilder::new().mode(0o755).create(folder) {
        // The umask does not apply: programs of other users load these files.
        Ok(()) => fs::set_permissions(folder, fs::Permissions::from_mode(0o755))
            .map_err(failed(folder, "cannot set the permissions")),
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(()),
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            let above = folder.parent().unwrap_or(folder);
            DirBuilder::new()
                .recursive(true)
                .mode(0o755)
                .create(above)
                .map_err(failed(above, "cannot create the directory"))?;
            create_directory(folder)
        }
        Err(error) => Err(failed(folder, "cannot create the directory")(error)),
    }
}

/// Creates a directory of this user, or checks one that exists: in `/tmp` another user could have created it first.
fn create_own_directory(folder: &Path) -> Result<(), StateDirError> {
    create_directory(folder)?;
    let own = rustix::process::geteuid().as_raw();
    let there = fs::symlink_metadata(folder).map_err(failed(folder, "cannot read the metadata"))?;
    let unusable = |why| Err(StateDirError::Unusable { path: folder.into(), why });
    if !there.is_dir() {
        return unusable("not a directory");
    }
    if there.uid() != own {
        return Err(StateDirError::NotOwner { path: folder.into(), owner: there.uid(), own });
    }
    if there.mode() & 0o022 != 0 {
        return unusable(
            "other users can write to this directory, and could replace the daemon: use a directory of your own",
        );
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unsuitable_paths_are_refused() {
        let folder = tempfile::tempdir().unwrap();
        let state_dir = StateDir::at(&folder.path().join("a/b")).unwrap();
        state_dir.create().unwrap();
        state_dir.create().unwrap();
        assert!(state_dir.shares().is_dir() && state_dir.driver_files().iter().all(|file| file.is_file()));
        let long = StateDir::at(&folder.path().join("x".repeat(120))).unwrap_err().to_string();
        assert!(long.contains("use a shorter path"), "{long}");
        let special = StateDir::at(&folder.path().join("a:b")).unwrap_err().to_string();
        assert!(special.contains("with :, ;"), "{special}");
    }

    #[test]
    fn symbolic_link_is_not_followed() {
        let folder = tempfile::tempdir().unwrap();
        let (real, link) = (folder.path().join("real"), folder.path().join("link"));
        fs::create_dir(&real).unwrap();
        std::os::unix::fs::symlink(&real, &link).unwrap();
        let error = StateDir::at(&link).unwrap().create().unwrap_err().to_string();
        assert!(error.contains("not a directory"), "{error}");
    }
}
