//! Where the keeper and its shares live.
//!
//! | what | where | why there |
//! |---|---|---|
//! | `keeper.sock`, `keeper.lock`, `keeper.log` | run | |
//! | `shares/NAME/` | run | the record of a share, its region, its device files |
//! | `region/`, `driver/` | run | empty: a share's own appear there, in its mount namespace |
//! | `gpus/` | lib | the simulated machine, where there is no driver |
//! | `stand-ins/BUILD/`, `shares/NAME/` | lib | libraries: what lies in `/run` may not be executed on many machines |

use std::fs::{self, DirBuilder};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// The variable that names a home.
pub const VARIABLE: &str = "PARTAGE_HOME";

/// The longest path that a socket can have.
const SOCKET_PATH: usize = 107;

/// How long it takes at most until one keeper follows another.
const FOLLOWING: Duration = Duration::from_secs(10);

/// Where the machine's own keeper lives: that of root, for everybody.
const MACHINE_RUN: &str = "/run/partage";
const MACHINE_LIB: &str = "/var/lib/partage";

/// Why there is no home.
#[derive(Debug, thiserror::Error)]
pub enum HomeError {
    /// The path is too long for a socket.
    #[error("{}: a socket in it would have a path of more than {SOCKET_PATH} bytes: use a shorter one", .0.display())]
    TooLong(PathBuf),
    /// A path is not absolute, or libraries could not be found in it.
    #[error("{}: {why}", path.display())]
    Unusable {
        /// Which.
        path: PathBuf,
        /// Why.
        why: &'static str,
    },
    /// A folder cannot be made or is not as it should be.
    #[error("{}: {what}: {error}", path.display())]
    Io {
        /// Which.
        path: PathBuf,
        /// What was tried.
        what: &'static str,
        /// What the system said.
        #[source]
        error: io::Error,
    },
    /// The folder is somebody else's.
    #[error(
        "{} belongs to user {owner}, not to you ({own}): who keeps shares there could read and change yours; \
         use another with --home",
        path.display()
    )]
    NotYours {
        /// Which.
        path: PathBuf,
        /// Whose.
        owner: u32,
        /// Who asks.
        own: u32,
    },
}

/// Two folders: one that a restart of the machine may empty, one that libraries can be loaded from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Home {
    run: PathBuf,
    lib: PathBuf,
    /// Whether somebody chose it; else it is where one looks by oneself.
    named: bool,
}

impl Home {
    /// Everything in one folder.
    pub fn at(folder: &Path) -> Result<Home, HomeError> {
        let folder = std::path::absolute(folder).map_err(|error| HomeError::Io {
            path: folder.into(),
            what: "cannot be named",
            error,
        })?;
        Home { lib: folder.join("lib"), run: folder, named: true }.checked()
    }

    /// The machine's, where this is root or the machine's keeper runs; else the user's own.
    pub fn usual() -> Result<Home, HomeError> {
        let uid = rustix::process::getuid().as_raw();
        let machine = Home { run: MACHINE_RUN.into(), lib: MACHINE_LIB.into(), named: false };
        // Where shares run there and nobody answers, to go elsewhere would be to find their GPUs free.
        if uid == 0 || machine.answers() || crate::store::is_any(&machine) {
            return machine.checked();
        }
        let variable = |name| std::env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute());
        // The same for a login, a cron job and `su`: two homes of one user would give the same GPU twice.
        let run = Some(PathBuf::from(format!("/run/user/{uid}")));
        let run =
            run.filter(|path| fs::metadata(path).is_ok_and(|about| about.is_dir() && about.uid() == uid));
        let run = run.map_or_else(|| format!("/tmp/partage-{uid}").into(), |path| path.join("partage"));
        let lib = variable("XDG_STATE_HOME").or_else(|| Some(variable("HOME")?.join(".local/state")));
        let lib = lib.map_or_else(|| run.join("lib"), |path| path.join("partage"));
        Home { run, lib, named: false }.checked()
    }

    /// Whether its keeper answers. Where shares run and it does not, it was killed and another one is about to follow:
    /// who went elsewhere meanwhile would find the same GPUs free.
    pub(crate) fn answers(&self) -> bool {
        let until = Instant::now() + FOLLOWING;
        loop {
            if UnixStream::connect(self.socket()).is_ok() {
                return true;
            }
            if !crate::store::is_any(self) || Instant::now() > until {
                return false;
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// Whether somebody else's keeper has to start: theirs is the folder.
    pub(crate) fn is_of_another(&self) -> bool {
        let own = rustix::process::geteuid().as_raw();
        fs::symlink_metadata(&self.run).is_ok_and(|folder| folder.uid() != own)
    }

    fn checked(self) -> Result<Home, HomeError> {
        if self.socket().as_os_str().as_bytes().len() > SOCKET_PATH {
            return Err(HomeError::TooLong(self.run));
        }
        for path in [&self.run, &self.lib] {
            // The loader ends a folder at the first two and replaces what follows the third; the last ends a line.
            if path.as_os_str().as_bytes().iter().any(|byte| b":;$\n".contains(byte)) {
                return Err(HomeError::Unusable {
                    path: path.clone(),
                    why: "libraries are not found in a folder with :, ;, $ or a line break in its name: use another",
                });
            }
            if path.to_str().is_none() {
                return Err(HomeError::Unusable {
                    path: path.clone(),
                    why: "its name is no text: use another",
                });
            }
        }
        Ok(self)
    }

    /// The folder that tells it apart.
    pub fn path(&self) -> &Path {
        &self.run
    }

    /// Where its settings are, if it was chosen by name: such a home has its own or none.
    pub(crate) fn settings(&self) -> Option<PathBuf> {
        self.named.then(|| self.run.join("partage.yaml"))
    }

    /// The settings of the keeper that is there, or was killed: whoever follows goes by them.
    pub(crate) fn settings_in_force(&self) -> PathBuf {
        self.run.join("settings.in-force.yaml")
    }

    pub(crate) fn is_named(&self) -> bool {
        self.named
    }

    /// Makes the folders. Only who keeps shares may write there.
    pub(crate) fn make(&self) -> Result<(), HomeError> {
        for folder in [&self.run, &self.lib] {
            make_own(folder)?;
        }
        for folder in
            [self.shares(), self.region_at(), self.driver_at(), self.stand_ins(), self.own_stand_ins()]
        {
            make_folder(&folder)?;
        }
        for file in self.driver_files() {
            if !file.exists() {
                fs::write(&file, b"").map_err(failed(&file, "cannot be made"))?;
            }
        }
        Ok(())
    }

    /// Whether this home is everybody's: root's.
    pub(crate) fn is_for_everybody() -> bool {
        rustix::process::geteuid().is_root()
    }

    pub(crate) fn socket(&self) -> PathBuf {
        self.run.join("keeper.sock")
    }

    pub(crate) fn lock(&self) -> PathBuf {
        self.run.join("keeper.lock")
    }

    /// Where a keeper in the background writes what it has to say.
    pub fn log(&self) -> PathBuf {
        self.run.join("keeper.log")
    }

    pub(crate) fn shares(&self) -> PathBuf {
        self.run.join("shares")
    }

    pub(crate) fn share(&self, name: &str) -> PathBuf {
        self.shares().join(name)
    }

    /// What the cgroup of a share is called. There may be several homes, and shares of one name in them.
    pub(crate) fn cgroup(&self, name: &str, id: &str) -> String {
        let id = id.get(..8).unwrap_or(id);
        format!("{}{name}.{id}", self.cgroup_prefix())
    }

    /// How the cgroups of its shares begin.
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

    /// Where the driver's own libraries appear in a share's mount namespace.
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

fn failed(path: &Path, what: &'static str) -> impl FnOnce(io::Error) -> HomeError {
    let path = path.to_path_buf();
    move |error| HomeError::Io { path, what, error }
}

fn make_folder(folder: &Path) -> Result<(), HomeError> {
    match DirBuilder::new().mode(0o755).create(folder) {
        // Whatever the umask: other users' programs load what lies here.
        Ok(()) => fs::set_permissions(folder, fs::Permissions::from_mode(0o755))
            .map_err(failed(folder, "cannot be opened")),
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(()),
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            let above = folder.parent().unwrap_or(folder);
            DirBuilder::new()
                .recursive(true)
                .mode(0o755)
                .create(above)
                .map_err(failed(above, "cannot be made"))?;
            make_folder(folder)
        }
        Err(error) => Err(failed(folder, "cannot be made")(error)),
    }
}

/// A folder that is one's own: in `/tmp` anybody could have made it first. One that is there is left as it is, and must be
/// empty or a home: another's files are not to be among ours.
fn make_own(folder: &Path) -> Result<(), HomeError> {
    make_folder(folder)?;
    let own = rustix::process::geteuid().as_raw();
    let there = fs::symlink_metadata(folder).map_err(failed(folder, "cannot be seen"))?;
    let unusable = |why| Err(HomeError::Unusable { path: folder.into(), why });
    if !there.is_dir() {
        return unusable("is no folder");
    }
    if there.uid() != own {
        return Err(HomeError::NotYours { path: folder.into(), owner: there.uid(), own });
    }
    if there.mode() & 0o022 != 0 {
        return unusable(
            "others may write there, and could take the keeper's place: use a folder of your own",
        );
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_home_is_one_folder_or_none() {
        let folder = tempfile::tempdir().unwrap();
        let home = Home::at(&folder.path().join("a/b")).unwrap();
        home.make().unwrap();
        home.make().unwrap();
        assert!(home.shares().is_dir() && home.driver_files().iter().all(|file| file.is_file()));
        let long = Home::at(&folder.path().join("x".repeat(120))).unwrap_err().to_string();
        assert!(long.contains("use a shorter one"), "{long}");
        let special = Home::at(&folder.path().join("a:b")).unwrap_err().to_string();
        assert!(special.contains("with :, ;"), "{special}");
    }

    #[test]
    fn a_link_that_somebody_laid_is_not_followed() {
        let folder = tempfile::tempdir().unwrap();
        let (real, link) = (folder.path().join("real"), folder.path().join("link"));
        fs::create_dir(&real).unwrap();
        std::os::unix::fs::symlink(&real, &link).unwrap();
        let error = Home::at(&link).unwrap().make().unwrap_err().to_string();
        assert!(error.contains("is no folder"), "{error}");
    }
}
