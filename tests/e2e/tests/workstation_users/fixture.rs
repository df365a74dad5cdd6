//! A machine with several users: programs that all of them can start, and a home.
#![allow(unsafe_code)]

use crate::support::{Home, Running, eventually, install, sample};
use std::fs;
use std::os::unix::fs::{PermissionsExt, chown};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

/// Users that no machine has: their numbers are their names.
pub(crate) const ADA: u32 = 61_001;
pub(crate) const BOB: u32 = 61_002;
pub(crate) const EVE: u32 = 61_003;

/// A home, and programs beside it that everybody may execute: the ones that cargo built may lie where only root can go.
pub(crate) struct Place {
    pub(crate) home: Home,
    folder: tempfile::TempDir,
}

impl Place {
    /// A home that is not there yet.
    fn new() -> Place {
        let folder = tempfile::Builder::new().prefix("p").tempdir_in("/tmp").unwrap();
        fs::set_permissions(folder.path(), fs::Permissions::from_mode(0o755)).unwrap();
        let built = Path::new(partage_e2e::partage());
        let beside = built.parent().unwrap();
        let libraries = ["libpartage_shim.so", "libpartage_sim.so"].map(|name| {
            let places = [beside.join(name), beside.join("deps").join(name)];
            places.into_iter().find(|file| file.exists()).unwrap()
        });
        for file in libraries.into_iter().chain([built.into(), PathBuf::from(sample())]) {
            let to = folder.path().join(file.file_name().unwrap());
            if fs::hard_link(&file, &to).is_err() {
                install(&file, &to);
            }
        }
        Place { home: Home::at(folder.path().join("h")), folder }
    }

    /// A home that root keeps, with settings.
    pub(crate) fn kept(settings: &str) -> (Place, Running) {
        Place::kept_under("022", settings)
    }

    /// As [`Place::kept`], by a root who lets others read what it writes, or not.
    pub(crate) fn kept_under(umask: &str, settings: &str) -> (Place, Running) {
        let place = Place::new();
        fs::create_dir(place.home.path()).unwrap();
        let file = place.home.settings(&format!("driver: simulated\n{settings}"));
        let arguments = ["up", "--plain", "--metrics", "off", "--settings", file.to_str().unwrap()];
        let mut command = Command::new("sh");
        command.args(["-c", "umask $0; exec \"$@\"", umask, partage_e2e::partage()]).args(arguments);
        given_environment(&mut command, &place.home);
        let mut up = Running::start(command);
        let socket = place.home.path().join("keeper.sock");
        eventually("it answers", || {
            assert!(up.goes_on(), "{:?}", up.rest());
            UnixStream::connect(&socket).ok()
        });
        (place, up)
    }

    /// A home that a user will keep, and has settings for.
    pub(crate) fn of(uid: u32) -> Place {
        let place = Place::new();
        fs::create_dir(place.home.path()).unwrap();
        chown(place.home.path(), Some(uid), Some(uid)).unwrap();
        let settings = place.folder.path().join("config/partage");
        fs::create_dir_all(&settings).unwrap();
        fs::write(settings.join("partage.yaml"), "driver: simulated\n").unwrap();
        place
    }

    pub(crate) fn sample(&self) -> String {
        self.folder.path().join("partage-sample").to_str().unwrap().into()
    }

    /// `partage …` as a user types it.
    pub(crate) fn partage(&self, uid: u32, arguments: &[&str]) -> Command {
        let mut command = Command::new(self.folder.path().join("partage"));
        command.args(arguments).uid(uid).gid(uid).current_dir("/");
        given_environment(&mut command, &self.home);
        command.env("HOME", "/").env("XDG_CONFIG_HOME", self.folder.path().join("config"));
        command.stdin(std::process::Stdio::null());
        command
    }

    pub(crate) fn output(&self, uid: u32, arguments: &[&str]) -> Output {
        self.partage(uid, arguments).output().unwrap()
    }

    pub(crate) fn fine(&self, uid: u32, arguments: &[&str]) -> String {
        let output = self.output(uid, arguments);
        assert!(output.status.success(), "{uid}: {arguments:?}: {output:?}");
        String::from_utf8(output.stdout).unwrap()
    }

    /// The exit code, and what was said about it.
    pub(crate) fn refused(&self, uid: u32, arguments: &[&str]) -> (i32, String) {
        let output = self.output(uid, arguments);
        assert!(!output.status.success(), "{uid}: {arguments:?}: {output:?}");
        (output.status.code().unwrap(), String::from_utf8(output.stderr).unwrap())
    }

    /// A user's share whose command does nothing; returns what was said when it runs.
    pub(crate) fn sleeper(&self, uid: u32, name: &str, options: &[&str]) -> (Running, String) {
        let script = ["--", "sh", "-c", "echo runs; exec sleep 1000"];
        let arguments = [&["run", "--name", name], options, &script].concat();
        let mut running = Running::start(self.partage(uid, &arguments));
        // The two outputs are read by two threads: either may be first.
        let said = running.says(&format!("partage: {name}: "));
        eventually(&format!("{name} runs"), || {
            assert!(running.goes_on(), "{said}");
            self.home.find(name).filter(|share| share["stage"] == "running")
        });
        (running, said)
    }
}

/// What a command about a home finds in its environment.
fn given_environment(command: &mut Command, home: &Home) {
    for (name, value) in home.partage(&[]).get_envs() {
        match value {
            Some(value) => command.env(name, value),
            None => command.env_remove(name),
        };
    }
}

/// Makes a command one of a system that lets nobody make a user namespace: it is in one, where that is forbidden.
pub(crate) fn without_namespaces(command: &mut Command, uid: u32) {
    let maps = [
        ("/proc/self/setgroups\0", "deny".to_string()),
        ("/proc/self/uid_map\0", format!("{uid} {uid} 1")),
        ("/proc/self/gid_map\0", format!("{uid} {uid} 1")),
        ("/proc/sys/user/max_user_namespaces\0", "0".to_string()),
    ];
    let enter = move || {
        let failed = std::io::Error::last_os_error;
        // SAFETY: it changes a flag of this process: its files in /proc are its own again, after it became the user.
        if unsafe { libc::prctl(libc::PR_SET_DUMPABLE, 1) } < 0 {
            return Err(failed());
        }
        // SAFETY: nothing is shared with another thread: this is a fresh child.
        if unsafe { libc::unshare(libc::CLONE_NEWUSER) } < 0 {
            return Err(failed());
        }
        for (path, text) in &maps {
            // SAFETY: the path ends with a zero.
            let file = unsafe { libc::open(path.as_ptr().cast(), libc::O_WRONLY | libc::O_CLOEXEC) };
            // SAFETY: the bytes are there for as long as it takes.
            if file < 0 || unsafe { libc::write(file, text.as_ptr().cast(), text.len()) } < 0 {
                return Err(failed());
            }
        }
        Ok(())
    };
    // SAFETY: between fork and exec it makes system calls and takes no memory.
    unsafe { command.pre_exec(enter) };
}

/// Does something as a user: only this thread is that user, and only meanwhile.
pub(crate) fn as_user<T: Send>(uid: u32, work: impl FnOnce() -> T + Send) -> T {
    std::thread::scope(|scope| {
        let thread = scope.spawn(|| {
            // SAFETY: three numbers. The call itself is about this thread, unlike the one of the C library.
            assert_eq!(unsafe { libc::syscall(libc::SYS_setresuid, -1, uid, -1) }, 0);
            work()
        });
        thread.join().unwrap()
    })
}
