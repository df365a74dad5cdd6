//! A temporary state directory, programs, and a pseudo-terminal for each test.
#![allow(dead_code, unsafe_code)] // Each test file uses a part of it.

pub(crate) use partage_e2e::sample;
pub(crate) use partage_testkit::skip_or_fail;

use rustix::termios::{Termios, Winsize, tcgetattr, tcsetwinsize};
use serde_json::Value;
use std::fs::{self, File};
use std::io::{BufRead, BufReader, Read, Write};
use std::os::fd::FromRawFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Output, Stdio};
use std::ptr::null_mut;
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

/// How long a condition may take on a busy machine.
pub(crate) const TIMEOUT: Duration = Duration::from_secs(90);
/// How often a condition is checked.
const POLL_INTERVAL: Duration = Duration::from_millis(20);

pub(crate) const GIB: u64 = 1 << 30;

/// Calls a function until it returns a value.
pub(crate) fn eventually<T>(what: &str, mut ask: impl FnMut() -> Option<T>) -> T {
    let deadline = Instant::now() + TIMEOUT;
    loop {
        if let Some(answer) = ask() {
            return answer;
        }
        assert!(Instant::now() < deadline, "timeout of {} s: {what}", TIMEOUT.as_secs());
        std::thread::sleep(POLL_INTERVAL);
    }
}

pub(crate) fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

/// Copies a program to where every user can start it. Another process makes the copy: a program that is open for
/// writing, even in a child of another test before its exec, cannot be run.
pub(crate) fn install_program(program: impl AsRef<Path>, to: &Path) {
    let mut copy = Command::new("install");
    copy.args(["-m", "755"]).arg(program.as_ref()).arg(to);
    assert!(copy.status().unwrap().success());
}

/// Sends a signal to a process.
pub(crate) fn signal(pid: u32, signal: i32) {
    // SAFETY: kill takes a process id and a signal; it touches no memory of this process.
    let sent = unsafe { libc::kill(i32::try_from(pid).unwrap(), signal) };
    assert!(sent == 0 || !is_alive(pid), "process {pid} cannot be signaled");
}

/// Returns whether a process runs; a zombie does not.
pub(crate) fn is_alive(pid: u32) -> bool {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit(')')
        .next()
        .and_then(|rest| rest.trim().chars().next())
        .is_some_and(|state| !"ZX".contains(state))
}

/// The state directory of one test. All its processes end with it.
pub(crate) struct TestStateDir {
    folder: PathBuf,
}

impl TestStateDir {
    /// Creates a new one. Its path is short, as a socket's must be, and open to all users.
    pub(crate) fn new() -> TestStateDir {
        let folder = tempfile::Builder::new().prefix("p").tempdir_in("/tmp").unwrap().keep();
        fs::set_permissions(&folder, fs::Permissions::from_mode(0o755)).unwrap();
        TestStateDir::at(folder)
    }

    /// Uses an existing directory, which is removed on drop.
    pub(crate) fn at(folder: PathBuf) -> TestStateDir {
        TestStateDir { folder }
    }

    pub(crate) fn path(&self) -> &Path {
        &self.folder
    }

    /// Returns a `partage` command for this state directory, as a user types it.
    pub(crate) fn partage(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(partage_e2e::partage());
        command.args(arguments).env("PARTAGE_STATE_DIR", &self.folder).env("LC_ALL", "C.UTF-8");
        for variable in ["PARTAGE_SHARE", "LD_LIBRARY_PATH", "PARTAGE_SIM_DIR", "CUDA_VISIBLE_DEVICES"] {
            command.env_remove(variable);
        }
        command.stdin(Stdio::null());
        command
    }

    pub(crate) fn output(&self, arguments: &[&str]) -> Output {
        self.partage(arguments).output().unwrap()
    }

    /// Returns the output of a command, and fails unless it succeeded.
    pub(crate) fn run_ok(&self, arguments: &[&str]) -> String {
        let output = self.output(arguments);
        assert!(output.status.success(), "{arguments:?}: {output:?}");
        String::from_utf8(output.stdout).unwrap()
    }

    pub(crate) fn run_json(&self, arguments: &[&str]) -> Value {
        serde_json::from_str(&self.run_ok(arguments)).unwrap()
    }

    /// Returns the exit code and the message of a command, and fails if it succeeded.
    pub(crate) fn run_err(&self, arguments: &[&str]) -> (i32, String) {
        let output = self.output(arguments);
        assert!(!output.status.success(), "{arguments:?}: {output:?}");
        (output.status.code().unwrap(), String::from_utf8(output.stderr).unwrap())
    }

    /// Returns all shares, as `ps` lists them.
    pub(crate) fn shares(&self) -> Vec<Value> {
        self.run_json(&["ps", "-o", "json"])["shares"].as_array().unwrap().clone()
    }

    /// Returns one share, as `ps` lists it.
    pub(crate) fn find_share(&self, name: &str) -> Option<Value> {
        self.shares().into_iter().find(|share| share["name"] == name)
    }

    /// Starts `partage run` with options and a command whose output is read; returns when the command runs.
    pub(crate) fn start_share(&self, name: &str, options: &[&str], command: &[&str]) -> BackgroundProcess {
        let arguments = [&["run", "-q", "--name", name], options, &["--"], command].concat();
        let mut running = BackgroundProcess::start(self.partage(&arguments));
        eventually(&format!("{name} is running"), || {
            if let Some(status) = running.child.try_wait().unwrap() {
                panic!("{name} ended with {status}: {:?}", running.remaining_lines());
            }
            self.find_share(name).filter(|share| share["stage"] == "running")
        });
        running
    }

    /// Starts a share whose command does nothing until it is stopped.
    pub(crate) fn start_sleeper(&self, name: &str) -> BackgroundProcess {
        self.start_share(name, &["--memory", "4Gi", "--cores", "30"], &["sleep", "1000"])
    }

    /// Starts `partage up --plain` with settings; returns when it is the daemon.
    pub(crate) fn start_up(&self, settings: &str, options: &[&str]) -> BackgroundProcess {
        let file = self.write_settings(settings);
        let arguments = [&["up", "--plain", "--settings", file.to_str().unwrap()], options].concat();
        let mut up = BackgroundProcess::start(self.partage(&arguments));
        eventually("up is the daemon", || {
            if let Some(status) = up.child.try_wait().unwrap() {
                panic!("up ended with {status}: {:?}", up.remaining_lines());
            }
            self.daemon_pid().filter(|pid| *pid == up.pid())
        });
        up
    }

    /// Writes a settings file into the state directory.
    pub(crate) fn write_settings(&self, text: &str) -> PathBuf {
        let file = self.folder.join("settings.yaml");
        fs::write(&file, text).unwrap();
        file
    }

    /// Returns the daemon's process: the one that has the lock.
    pub(crate) fn daemon_pid(&self) -> Option<u32> {
        self.lock_process(false)
    }

    /// Returns the standby, which takes over if the daemon dies: the process that waits for the lock. A process that
    /// does not wait yet may be too late.
    pub(crate) fn standby_pid(&self) -> Option<u32> {
        self.lock_process(true)
    }

    fn lock_process(&self, waits: bool) -> Option<u32> {
        use std::os::unix::fs::MetadataExt;
        let inode = fs::metadata(self.folder.join("daemon.lock")).ok()?.ino().to_string();
        let locks = fs::read_to_string("/proc/locks").unwrap();
        locks.lines().find_map(|line| {
            let mut words: Vec<&str> = line.split_whitespace().collect();
            // A process that waits is marked with an arrow.
            let is_behind = words.get(1) == Some(&"->");
            if is_behind {
                words.remove(1);
            }
            let is_ours =
                words.get(1) == Some(&"FLOCK") && words[5].rsplit(':').next() == Some(inode.as_str());
            let pid = (is_ours && is_behind == waits).then(|| words[4].parse().ok())?;
            pid.filter(|pid| self.processes().contains(pid))
        })
    }

    /// Returns all processes of this state directory: daemons, commands, and their descendants.
    pub(crate) fn processes(&self) -> Vec<u32> {
        let folder = self.folder.as_os_str().as_bytes();
        let variable = [b"PARTAGE_STATE_DIR=", folder].concat();
        let region = self.folder.join("region/limits");
        let is_ours = |pid: u32| {
            let has = |file: &str, what: &dyn Fn(&[u8]) -> bool| {
                fs::read(format!("/proc/{pid}/{file}"))
                    .is_ok_and(|bytes| bytes.split(|byte| *byte == 0).any(what))
            };
            has("environ", &|one| one == variable)
                || has("cmdline", &|one| one.starts_with(folder))
                || fs::metadata(format!("/proc/{pid}/root{}", region.display())).is_ok()
        };
        let all =
            fs::read_dir("/proc").unwrap().filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok());
        all.filter(|pid| *pid != std::process::id() && is_ours(*pid) && is_alive(*pid)).collect()
    }

    /// Returns the processes that are in a share, or started by one.
    pub(crate) fn share_processes(&self) -> Vec<u32> {
        let is_daemon = |pid: &u32| {
            let words = arguments(*pid);
            words.get(1).is_some_and(|word| word == "daemon" || word == "up")
        };
        self.processes().into_iter().filter(|pid| !is_daemon(pid)).collect()
    }

    /// Describes what shares of this state directory left behind. Empty if nothing.
    pub(crate) fn leftovers(&self) -> Vec<String> {
        let mut left: Vec<String> = self
            .share_processes()
            .iter()
            .map(|pid| format!("process {pid}: {:?}", arguments(*pid)))
            .collect();
        for folder in ["shares", "lib/shares"] {
            let entries = fs::read_dir(self.folder.join(folder)).into_iter().flatten();
            left.extend(entries.map(|entry| entry.unwrap().path().display().to_string()));
        }
        let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap();
        let inside = format!(" {}/", self.folder.display());
        left.extend(mounts.lines().filter(|line| line.contains(&inside)).map(|line| format!("mount {line}")));
        left.extend(self.cgroups().iter().map(|folder| format!("cgroup {}", folder.display())));
        left
    }

    /// Returns the cgroups of its shares: they are named after the directory.
    pub(crate) fn cgroups(&self) -> Vec<PathBuf> {
        use std::os::unix::fs::MetadataExt;
        let Ok(about) = fs::metadata(&self.folder) else { return Vec::new() };
        let prefix = format!("partage-{:x}.{:x}-", about.dev(), about.ino());
        let (mut folders, mut found) = (vec![PathBuf::from("/sys/fs/cgroup")], Vec::new());
        while let Some(folder) = folders.pop() {
            let entries = fs::read_dir(&folder).into_iter().flatten().flatten();
            let below = entries.filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()));
            folders.extend(below.map(|entry| entry.path()));
            if folder.file_name().is_some_and(|name| name.to_string_lossy().starts_with(&prefix)) {
                found.push(folder);
            }
        }
        found
    }

    /// Waits until all shares have ended and been released, and left nothing.
    pub(crate) fn wait_until_clean(&self) {
        let mut left = Vec::new();
        let deadline = Instant::now() + TIMEOUT;
        while Instant::now() < deadline {
            left = self.leftovers();
            if left.is_empty() {
                return;
            }
            std::thread::sleep(POLL_INTERVAL);
        }
        panic!("left over: {left:#?}");
    }
}

fn arguments(pid: u32) -> Vec<String> {
    let bytes = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    bytes.split(|byte| *byte == 0).map(|word| String::from_utf8_lossy(word).into_owned()).collect()
}

/// Kills processes until none is left.
fn kill_all(all: impl Fn() -> Vec<u32>) {
    let deadline = Instant::now() + TIMEOUT;
    loop {
        let left = all();
        if left.is_empty() || Instant::now() > deadline {
            return;
        }
        for pid in left {
            // SAFETY: kill takes a process id and a signal; it touches no memory of this process.
            unsafe { libc::kill(i32::try_from(pid).unwrap(), libc::SIGKILL) };
        }
        std::thread::sleep(POLL_INTERVAL);
    }
}

impl Drop for TestStateDir {
    fn drop(&mut self) {
        // Commands first: daemons release what they had, and replace each other as long as there are shares.
        kill_all(|| self.share_processes());
        let fine = !std::thread::panicking();
        if fine && self.daemon_pid().is_some() {
            self.wait_until_clean();
        }
        kill_all(|| self.processes());
        let cgroups = self.cgroups();
        for folder in &cgroups {
            let _ = fs::remove_dir(folder);
        }
        let removed = fs::remove_dir_all(&self.folder);
        if fine {
            assert_eq!((self.processes(), cgroups), (Vec::new(), Vec::new()));
            removed.unwrap();
        }
    }
}

/// A program in the background whose lines are read. It is killed when dropped.
pub(crate) struct BackgroundProcess {
    pub(crate) child: Child,
    pub(crate) input: Option<std::process::ChildStdin>,
    lines: Receiver<String>,
    /// The lines that were read so far, for error messages.
    seen: Vec<String>,
}

impl BackgroundProcess {
    /// Starts the command. Both outputs are read line by line.
    pub(crate) fn start(mut command: Command) -> BackgroundProcess {
        let mut child =
            command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let (send, lines) = channel();
        let outputs: [Box<dyn Read + Send>; 2] =
            [Box::new(child.stdout.take().unwrap()), Box::new(child.stderr.take().unwrap())];
        for output in outputs {
            let send = send.clone();
            std::thread::spawn(move || {
                let lines = BufReader::new(output).lines();
                lines.map_while(Result::ok).take_while(|line| send.send(line.clone()).is_ok()).for_each(drop);
            });
        }
        let input = child.stdin.take();
        BackgroundProcess { child, input, lines, seen: Vec::new() }
    }

    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    pub(crate) fn signal(&self, signal: i32) {
        self::signal(self.pid(), signal);
    }

    /// Reads until a line matches, and returns it.
    pub(crate) fn read_until(&mut self, what: impl Fn(&str) -> bool) -> String {
        let deadline = Instant::now() + TIMEOUT;
        loop {
            match self.lines.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
                Ok(line) if what(&line) => return line,
                Ok(line) => self.seen.push(line),
                Err(_) => panic!("no such line: {:#?}", self.seen),
            }
        }
    }

    /// Reads until a line contains this text.
    pub(crate) fn wait_for_line(&mut self, what: &str) -> String {
        self.read_until(|line| line.contains(what))
    }

    /// Returns all lines until both outputs are closed.
    pub(crate) fn remaining_lines(&mut self) -> Vec<String> {
        let deadline = Instant::now() + TIMEOUT;
        let mut rest = Vec::new();
        loop {
            match self.lines.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
                Ok(line) => rest.push(line),
                Err(RecvTimeoutError::Disconnected) => return rest,
                Err(RecvTimeoutError::Timeout) => panic!("still running: {rest:#?}"),
            }
        }
    }

    pub(crate) fn wait_for_exit(&mut self) -> ExitStatus {
        eventually("the program ends", || self.child.try_wait().unwrap())
    }

    pub(crate) fn is_running(&mut self) -> bool {
        self.child.try_wait().unwrap().is_none()
    }
}

impl Drop for BackgroundProcess {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A program on a terminal of its own, as its session leader, so that keys send signals.
pub(crate) struct TerminalProgram {
    pub(crate) controller_end: File,
    pub(crate) terminal_end: File,
    pub(crate) child: Child,
    /// The modes before any change.
    pub(crate) before: Termios,
    reads: Receiver<Vec<u8>>,
    bytes: Vec<u8>,
    shown: String,
}

fn size(rows: u16, columns: u16) -> Winsize {
    Winsize { ws_row: rows, ws_col: columns, ws_xpixel: 0, ws_ypixel: 0 }
}

impl TerminalProgram {
    pub(crate) fn start(mut command: Command, rows: u16, columns: u16) -> TerminalProgram {
        let (mut controller_end, mut terminal_end) = (0, 0);
        // SAFETY: the two pointers are to local variables; no name, modes or size are passed.
        let made = unsafe {
            libc::openpty(&mut controller_end, &mut terminal_end, null_mut(), null_mut(), null_mut())
        };
        assert_eq!(made, 0);
        // SAFETY: the descriptor was just opened, and has no other owner.
        let controller_end = unsafe { File::from_raw_fd(controller_end) };
        // SAFETY: the descriptor was just opened, and has no other owner.
        let terminal_end = unsafe { File::from_raw_fd(terminal_end) };
        tcsetwinsize(&terminal_end, size(rows, columns)).unwrap();
        command.env("TERM", "xterm").env_remove("NO_COLOR");
        command.stdin(terminal_end.try_clone().unwrap()).stdout(terminal_end.try_clone().unwrap());
        command.stderr(terminal_end.try_clone().unwrap());
        let own = || {
            // SAFETY: the call has no arguments.
            if unsafe { libc::setsid() } < 0 {
                return Err(std::io::Error::last_os_error());
            }
            // SAFETY: standard input is the terminal by now.
            if unsafe { libc::ioctl(0, libc::TIOCSCTTY, 0) } < 0 {
                return Err(std::io::Error::last_os_error());
            }
            Ok(())
        };
        // SAFETY: between fork and exec it makes two system calls and allocates no memory.
        unsafe { command.pre_exec(own) };
        let before = tcgetattr(&terminal_end).unwrap();
        let child = command.spawn().unwrap();
        let (send, reads) = channel();
        let mut reader = controller_end.try_clone().unwrap();
        std::thread::spawn(move || {
            let mut bytes = [0; 4096];
            while let Ok(read) = reader.read(&mut bytes) {
                if read == 0 || send.send(bytes[..read].to_vec()).is_err() {
                    break;
                }
            }
        });
        TerminalProgram {
            controller_end,
            terminal_end,
            child,
            before,
            reads,
            bytes: Vec::new(),
            shown: String::new(),
        }
    }

    /// Reads until the condition holds, and removes what was shown.
    pub(crate) fn read_until(&mut self, what: impl Fn(&str) -> bool) -> String {
        let deadline = Instant::now() + TIMEOUT;
        while !what(&self.shown) {
            let left = deadline.saturating_duration_since(Instant::now());
            let read = self.reads.recv_timeout(left);
            self.bytes.extend(read.unwrap_or_else(|_| panic!("not shown, only: {:?}", self.shown)));
            // A character may arrive in two parts.
            if let Ok(text) = std::str::from_utf8(&self.bytes) {
                self.shown.push_str(text);
                self.bytes.clear();
            }
        }
        std::mem::take(&mut self.shown)
    }

    /// Reads until it shows this text. The rest of the same read is kept, because the next call may wait for it.
    pub(crate) fn wait_for_text(&mut self, what: &str) -> String {
        let mut shown = self.read_until(|shown| shown.contains(what));
        let end = shown.find(what).map_or(shown.len(), |at| at + what.len());
        self.shown = shown.split_off(end);
        shown
    }

    pub(crate) fn type_keys(&mut self, keys: &str) {
        self.controller_end.write_all(keys.as_bytes()).unwrap();
    }

    pub(crate) fn resize(&self, rows: u16, columns: u16) {
        tcsetwinsize(&self.controller_end, size(rows, columns)).unwrap();
    }

    pub(crate) fn modes(&self) -> Termios {
        tcgetattr(&self.terminal_end).unwrap()
    }

    pub(crate) fn wait_for_exit(&mut self) -> ExitStatus {
        eventually("the program on the terminal ends", || self.child.try_wait().unwrap())
    }
}

impl Drop for TerminalProgram {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
