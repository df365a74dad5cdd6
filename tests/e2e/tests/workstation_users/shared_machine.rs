//! A machine with several users: programs that all of them can start, and a shared state directory.
#![allow(unsafe_code)]

use crate::support::{BackgroundProcess, TestStateDir, eventually, install_program, sample};
use std::fs;
use std::os::unix::fs::{PermissionsExt, chown};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

/// Users that exist on no machine: their ids are used as names.
pub(crate) const ADA: u32 = 61_001;
pub(crate) const BOB: u32 = 61_002;
pub(crate) const EVE: u32 = 61_003;

/// A state directory, and programs next to it that every user may execute: those that cargo built may be in a directory that only
/// root can enter.
pub(crate) struct SharedMachine {
    pub(crate) state_dir: TestStateDir,
    folder: tempfile::TempDir,
}

impl SharedMachine {
    /// Creates one with a state directory that does not exist yet.
    fn new() -> SharedMachine {
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
                install_program(&file, &to);
            }
        }
        SharedMachine { state_dir: TestStateDir::at(folder.path().join("h")), folder }
    }

    /// Starts root's daemon on a new state directory, with settings.
    pub(crate) fn managed_by_root(settings: &str) -> (SharedMachine, BackgroundProcess) {
        SharedMachine::managed_by_root_with_umask("022", settings)
    }

    /// As [`SharedMachine::managed_by_root`], with a umask that lets other users read its files, or not.
    pub(crate) fn managed_by_root_with_umask(
        umask: &str,
        settings: &str,
    ) -> (SharedMachine, BackgroundProcess) {
        let machine = SharedMachine::new();
        fs::create_dir(machine.state_dir.path()).unwrap();
        let file = machine.state_dir.write_settings(&format!("driver: simulated\n{settings}"));
        let arguments = ["up", "--plain", "--metrics", "off", "--settings", file.to_str().unwrap()];
        let mut command = Command::new("sh");
        command.args(["-c", "umask $0; exec \"$@\"", umask, partage_e2e::partage()]).args(arguments);
        set_environment(&mut command, &machine.state_dir);
        let mut up = BackgroundProcess::start(command);
        let socket = machine.state_dir.path().join("daemon.sock");
        eventually("the daemon responds", || {
            assert!(up.is_running(), "{:?}", up.remaining_lines());
            UnixStream::connect(&socket).ok()
        });
        (machine, up)
    }

    /// Creates a state directory for the daemon of a user, with settings.
    pub(crate) fn owned_by(uid: u32) -> SharedMachine {
        let machine = SharedMachine::new();
        fs::create_dir(machine.state_dir.path()).unwrap();
        chown(machine.state_dir.path(), Some(uid), Some(uid)).unwrap();
        let settings = machine.folder.path().join("config/partage");
        fs::create_dir_all(&settings).unwrap();
        fs::write(settings.join("partage.yaml"), "driver: simulated\n").unwrap();
        machine
    }

    pub(crate) fn sample(&self) -> String {
        self.folder.path().join("partage-sample").to_str().unwrap().into()
    }

    /// Returns a `partage` command of a user.
    pub(crate) fn partage(&self, uid: u32, arguments: &[&str]) -> Command {
        let mut command = Command::new(self.folder.path().join("partage"));
        command.args(arguments).uid(uid).gid(uid).current_dir("/");
        set_environment(&mut command, &self.state_dir);
        command.env("HOME", "/").env("XDG_CONFIG_HOME", self.folder.path().join("config"));
        command.stdin(std::process::Stdio::null());
        command
    }

    pub(crate) fn output(&self, uid: u32, arguments: &[&str]) -> Output {
        self.partage(uid, arguments).output().unwrap()
    }

    pub(crate) fn run_ok(&self, uid: u32, arguments: &[&str]) -> String {
        let output = self.output(uid, arguments);
        assert!(output.status.success(), "{uid}: {arguments:?}: {output:?}");
        String::from_utf8(output.stdout).unwrap()
    }

    /// Returns the exit code and the message of a command, and fails if it succeeded.
    pub(crate) fn run_err(&self, uid: u32, arguments: &[&str]) -> (i32, String) {
        let output = self.output(uid, arguments);
        assert!(!output.status.success(), "{uid}: {arguments:?}: {output:?}");
        (output.status.code().unwrap(), String::from_utf8(output.stderr).unwrap())
    }

    /// Starts a user's share whose command does nothing; returns its first message when it runs.
    pub(crate) fn start_sleeper(
        &self,
        uid: u32,
        name: &str,
        options: &[&str],
    ) -> (BackgroundProcess, String) {
        let script = ["--", "sh", "-c", "echo runs; exec sleep 1000"];
        let arguments = [&["run", "--name", name], options, &script].concat();
        let mut running = BackgroundProcess::start(self.partage(uid, &arguments));
        // The two outputs are read by two threads: either may be first.
        let output = running.wait_for_line(&format!("partage: {name}: "));
        eventually(&format!("{name} is running"), || {
            assert!(running.is_running(), "{output}");
            self.state_dir.find_share(name).filter(|share| share["stage"] == "running")
        });
        (running, output)
    }
}

/// Sets the environment of a command for a state directory.
fn set_environment(command: &mut Command, state_dir: &TestStateDir) {
    for (name, value) in state_dir.partage(&[]).get_envs() {
        match value {
            Some(value) => command.env(name, value),
            None => command.env_remove(name),
        };
    }
}

/// Makes a command run as on a system where no user may create a user namespace: it runs in a user namespace where that
/// is forbidden.
pub(crate) fn forbid_user_namespaces(command: &mut Command, uid: u32) {
    let maps = [
        ("/proc/self/setgroups\0", "deny".to_string()),
        ("/proc/self/uid_map\0", format!("{uid} {uid} 1")),
        ("/proc/self/gid_map\0", format!("{uid} {uid} 1")),
        ("/proc/sys/user/max_user_namespaces\0", "0".to_string()),
    ];
    let enter = move || {
        let failed = std::io::Error::last_os_error;
        // SAFETY: it changes a flag of this process: its files in /proc belong to the user again, after the change of
        // the user id.
        if unsafe { libc::prctl(libc::PR_SET_DUMPABLE, 1) } < 0 {
            return Err(failed());
        }
        // SAFETY: a new child has a single thread.
        if unsafe { libc::unshare(libc::CLONE_NEWUSER) } < 0 {
            return Err(failed());
        }
        for (path, text) in &maps {
            // SAFETY: the path ends with a zero byte.
            let file = unsafe { libc::open(path.as_ptr().cast(), libc::O_WRONLY | libc::O_CLOEXEC) };
            // SAFETY: the bytes are valid during the call.
            if file < 0 || unsafe { libc::write(file, text.as_ptr().cast(), text.len()) } < 0 {
                return Err(failed());
            }
        }
        Ok(())
    };
    // SAFETY: between fork and exec it makes system calls and allocates no memory.
    unsafe { command.pre_exec(enter) };
}

/// Runs a function as a user: only this thread has that user id, and only during the call.
pub(crate) fn as_user<T: Send>(uid: u32, work: impl FnOnce() -> T + Send) -> T {
    std::thread::scope(|scope| {
        let thread = scope.spawn(|| {
            // SAFETY: the call takes three numbers. The raw system call changes only this thread, unlike the function
            // of the C library.
            assert_eq!(unsafe { libc::syscall(libc::SYS_setresuid, -1, uid, -1) }, 0);
            work()
        });
        thread.join().unwrap()
    })
}
