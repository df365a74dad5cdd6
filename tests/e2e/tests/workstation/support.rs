//! A home of a test's own, programs to run in it, and a terminal to type on.
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

/// Nothing here takes long; on a busy machine everything may.
pub(crate) const PATIENCE: Duration = Duration::from_secs(90);
/// How often somebody who waits looks again.
const GLANCE: Duration = Duration::from_millis(20);

pub(crate) const GIB: u64 = 1 << 30;

/// Asks again until there is an answer.
pub(crate) fn eventually<T>(what: &str, mut ask: impl FnMut() -> Option<T>) -> T {
    let deadline = Instant::now() + PATIENCE;
    loop {
        if let Some(answer) = ask() {
            return answer;
        }
        assert!(Instant::now() < deadline, "not within {} s: {what}", PATIENCE.as_secs());
        std::thread::sleep(GLANCE);
    }
}

pub(crate) fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

/// Puts a program where every user can start it. Copied by another process: a program that is open for writing, were it only
/// in a child of another test that has not come to its exec, cannot be run.
pub(crate) fn install(program: impl AsRef<Path>, to: &Path) {
    let mut copy = Command::new("install");
    copy.args(["-m", "755"]).arg(program.as_ref()).arg(to);
    assert!(copy.status().unwrap().success());
}

/// Sends a signal to a process.
pub(crate) fn signal(pid: u32, signal: i32) {
    // SAFETY: a number and a signal; nothing of this process is touched.
    let sent = unsafe { libc::kill(i32::try_from(pid).unwrap(), signal) };
    assert!(sent == 0 || !lives(pid), "process {pid} cannot be signalled");
}

/// Whether a process runs; one that nobody waited for does not.
pub(crate) fn lives(pid: u32) -> bool {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit(')')
        .next()
        .and_then(|rest| rest.trim().chars().next())
        .is_some_and(|state| !"ZX".contains(state))
}

/// Where shares of one test are kept. Whatever runs there ends with it.
pub(crate) struct Home {
    folder: PathBuf,
}

impl Home {
    /// A fresh one. Its path is short, as a socket's must be, and open to all users.
    pub(crate) fn new() -> Home {
        let folder = tempfile::Builder::new().prefix("p").tempdir_in("/tmp").unwrap().keep();
        fs::set_permissions(&folder, fs::Permissions::from_mode(0o755)).unwrap();
        Home::at(folder)
    }

    /// In a folder that is the home's from now on, and goes with it.
    pub(crate) fn at(folder: PathBuf) -> Home {
        Home { folder }
    }

    pub(crate) fn path(&self) -> &Path {
        &self.folder
    }

    /// `partage …` about this home, as somebody types it.
    pub(crate) fn partage(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(partage_e2e::partage());
        command.args(arguments).env("PARTAGE_HOME", &self.folder).env("LC_ALL", "C.UTF-8");
        for variable in ["PARTAGE_SHARE", "LD_LIBRARY_PATH", "PARTAGE_SIM_DIR", "CUDA_VISIBLE_DEVICES"] {
            command.env_remove(variable);
        }
        command.stdin(Stdio::null());
        command
    }

    pub(crate) fn output(&self, arguments: &[&str]) -> Output {
        self.partage(arguments).output().unwrap()
    }

    /// What it printed, where it ended well.
    pub(crate) fn fine(&self, arguments: &[&str]) -> String {
        let output = self.output(arguments);
        assert!(output.status.success(), "{arguments:?}: {output:?}");
        String::from_utf8(output.stdout).unwrap()
    }

    pub(crate) fn json(&self, arguments: &[&str]) -> Value {
        serde_json::from_str(&self.fine(arguments)).unwrap()
    }

    /// The exit code, and what was said about it.
    pub(crate) fn refused(&self, arguments: &[&str]) -> (i32, String) {
        let output = self.output(arguments);
        assert!(!output.status.success(), "{arguments:?}: {output:?}");
        (output.status.code().unwrap(), String::from_utf8(output.stderr).unwrap())
    }

    /// All shares, as `ps` tells.
    pub(crate) fn shares(&self) -> Vec<Value> {
        self.json(&["ps", "-o", "json"])["shares"].as_array().unwrap().clone()
    }

    /// One share, as `ps` tells.
    pub(crate) fn find(&self, name: &str) -> Option<Value> {
        self.shares().into_iter().find(|share| share["name"] == name)
    }

    /// `partage run` with options, and a command whose output is read; returns when the command runs.
    pub(crate) fn share(&self, name: &str, options: &[&str], command: &[&str]) -> Running {
        let arguments = [&["run", "-q", "--name", name], options, &["--"], command].concat();
        let mut running = Running::start(self.partage(&arguments));
        eventually(&format!("{name} runs"), || {
            if let Some(status) = running.child.try_wait().unwrap() {
                panic!("{name} ended with {status}: {:?}", running.rest());
            }
            self.find(name).filter(|share| share["stage"] == "running")
        });
        running
    }

    /// A share whose command does nothing until it is stopped.
    pub(crate) fn sleeper(&self, name: &str) -> Running {
        self.share(name, &["--memory", "4Gi", "--cores", "30"], &["sleep", "1000"])
    }

    /// `partage up --plain` with settings; returns when it keeps.
    pub(crate) fn up(&self, settings: &str, options: &[&str]) -> Running {
        let file = self.settings(settings);
        let arguments = [&["up", "--plain", "--settings", file.to_str().unwrap()], options].concat();
        let mut up = Running::start(self.partage(&arguments));
        eventually("up keeps", || {
            if let Some(status) = up.child.try_wait().unwrap() {
                panic!("up ended with {status}: {:?}", up.rest());
            }
            self.keeper().filter(|pid| *pid == up.pid())
        });
        up
    }

    /// A settings file beside what the home is made of.
    pub(crate) fn settings(&self, text: &str) -> PathBuf {
        let file = self.folder.join("settings.yaml");
        fs::write(&file, text).unwrap();
        file
    }

    /// Who keeps: the process that has the lock.
    pub(crate) fn keeper(&self) -> Option<u32> {
        self.at_the_lock(false)
    }

    /// Who stands by, should the keeper die: one that waits for the lock. One that is about to may come too late.
    pub(crate) fn standby(&self) -> Option<u32> {
        self.at_the_lock(true)
    }

    fn at_the_lock(&self, waits: bool) -> Option<u32> {
        use std::os::unix::fs::MetadataExt;
        let inode = fs::metadata(self.folder.join("keeper.lock")).ok()?.ino().to_string();
        let locks = fs::read_to_string("/proc/locks").unwrap();
        locks.lines().find_map(|line| {
            let mut words: Vec<&str> = line.split_whitespace().collect();
            // Who waits stands behind an arrow.
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

    /// All processes of this home: keepers, commands, and whatever those started.
    pub(crate) fn processes(&self) -> Vec<u32> {
        let folder = self.folder.as_os_str().as_bytes();
        let variable = [b"PARTAGE_HOME=", folder].concat();
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
        all.filter(|pid| *pid != std::process::id() && is_ours(*pid) && lives(*pid)).collect()
    }

    /// Processes that are in a share, or came from one.
    pub(crate) fn members(&self) -> Vec<u32> {
        let is_keeper = |pid: &u32| {
            let words = arguments(*pid);
            words.get(1).is_some_and(|word| word == "keep" || word == "up")
        };
        self.processes().into_iter().filter(|pid| !is_keeper(pid)).collect()
    }

    /// What shares of this home left behind, in words. Nothing where all is well.
    pub(crate) fn left(&self) -> Vec<String> {
        let mut left: Vec<String> =
            self.members().iter().map(|pid| format!("process {pid}: {:?}", arguments(*pid))).collect();
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

    /// The cgroups of its shares: they are called after the home's folder.
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

    /// All shares have ended and been given back, and left nothing.
    pub(crate) fn nothing_left(&self) {
        let mut left = Vec::new();
        let deadline = Instant::now() + PATIENCE;
        while Instant::now() < deadline {
            left = self.left();
            if left.is_empty() {
                return;
            }
            std::thread::sleep(GLANCE);
        }
        panic!("left: {left:#?}");
    }
}

fn arguments(pid: u32) -> Vec<String> {
    let bytes = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    bytes.split(|byte| *byte == 0).map(|word| String::from_utf8_lossy(word).into_owned()).collect()
}

/// Kills processes until none is left.
fn end_all(all: impl Fn() -> Vec<u32>) {
    let deadline = Instant::now() + PATIENCE;
    loop {
        let left = all();
        if left.is_empty() || Instant::now() > deadline {
            return;
        }
        for pid in left {
            // SAFETY: a number and a signal; nothing of this process is touched.
            unsafe { libc::kill(i32::try_from(pid).unwrap(), libc::SIGKILL) };
        }
        std::thread::sleep(GLANCE);
    }
}

impl Drop for Home {
    fn drop(&mut self) {
        // Commands first: keepers give back what they had, and start each other as long as there is something to keep.
        end_all(|| self.members());
        let fine = !std::thread::panicking();
        if fine && self.keeper().is_some() {
            self.nothing_left();
        }
        end_all(|| self.processes());
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

/// A program in the background whose lines are read. It ends with the test.
pub(crate) struct Running {
    pub(crate) child: Child,
    pub(crate) input: Option<std::process::ChildStdin>,
    lines: Receiver<String>,
    /// What was read so far, to say where something else was expected.
    seen: Vec<String>,
}

impl Running {
    /// Both outputs are read, each by the line.
    pub(crate) fn start(mut command: Command) -> Running {
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
        Running { child, input, lines, seen: Vec::new() }
    }

    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    pub(crate) fn signal(&self, signal: i32) {
        self::signal(self.pid(), signal);
    }

    /// Reads on until there is such a line, and returns it.
    pub(crate) fn until(&mut self, what: impl Fn(&str) -> bool) -> String {
        let deadline = Instant::now() + PATIENCE;
        loop {
            match self.lines.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
                Ok(line) if what(&line) => return line,
                Ok(line) => self.seen.push(line),
                Err(_) => panic!("only: {:#?}", self.seen),
            }
        }
    }

    /// Reads on until a line has this in it.
    pub(crate) fn says(&mut self, what: &str) -> String {
        self.until(|line| line.contains(what))
    }

    /// What it says until nobody writes there any more.
    pub(crate) fn rest(&mut self) -> Vec<String> {
        let deadline = Instant::now() + PATIENCE;
        let mut rest = Vec::new();
        loop {
            match self.lines.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
                Ok(line) => rest.push(line),
                Err(RecvTimeoutError::Disconnected) => return rest,
                Err(RecvTimeoutError::Timeout) => panic!("it goes on: {rest:#?}"),
            }
        }
    }

    pub(crate) fn ended(&mut self) -> ExitStatus {
        eventually("the program ends", || self.child.try_wait().unwrap())
    }

    pub(crate) fn goes_on(&mut self) -> bool {
        self.child.try_wait().unwrap().is_none()
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A program on a terminal of its own, as its leader: the keys that make signals do.
pub(crate) struct Terminal {
    pub(crate) ours: File,
    pub(crate) theirs: File,
    pub(crate) child: Child,
    /// The modes before anybody changed them.
    pub(crate) before: Termios,
    reads: Receiver<Vec<u8>>,
    bytes: Vec<u8>,
    shown: String,
}

fn size(rows: u16, columns: u16) -> Winsize {
    Winsize { ws_row: rows, ws_col: columns, ws_xpixel: 0, ws_ypixel: 0 }
}

impl Terminal {
    pub(crate) fn start(mut command: Command, rows: u16, columns: u16) -> Terminal {
        let (mut ours, mut theirs) = (0, 0);
        // SAFETY: two variables for the two ends; no name, modes or size are given.
        let made = unsafe { libc::openpty(&mut ours, &mut theirs, null_mut(), null_mut(), null_mut()) };
        assert_eq!(made, 0);
        // SAFETY: it was opened just now, and is nobody else's.
        let ours = unsafe { File::from_raw_fd(ours) };
        // SAFETY: likewise.
        let theirs = unsafe { File::from_raw_fd(theirs) };
        tcsetwinsize(&theirs, size(rows, columns)).unwrap();
        command.env("TERM", "xterm").env_remove("NO_COLOR");
        command.stdin(theirs.try_clone().unwrap()).stdout(theirs.try_clone().unwrap());
        command.stderr(theirs.try_clone().unwrap());
        let own = || {
            // SAFETY: it has no arguments.
            if unsafe { libc::setsid() } < 0 {
                return Err(std::io::Error::last_os_error());
            }
            // SAFETY: standard input is the terminal by now.
            if unsafe { libc::ioctl(0, libc::TIOCSCTTY, 0) } < 0 {
                return Err(std::io::Error::last_os_error());
            }
            Ok(())
        };
        // SAFETY: between fork and exec it makes two system calls and takes no memory.
        unsafe { command.pre_exec(own) };
        let before = tcgetattr(&theirs).unwrap();
        let child = command.spawn().unwrap();
        let (send, reads) = channel();
        let mut reader = ours.try_clone().unwrap();
        std::thread::spawn(move || {
            let mut bytes = [0; 4096];
            while let Ok(read) = reader.read(&mut bytes) {
                if read == 0 || send.send(bytes[..read].to_vec()).is_err() {
                    break;
                }
            }
        });
        Terminal { ours, theirs, child, before, reads, bytes: Vec::new(), shown: String::new() }
    }

    /// Reads on until it is there, and forgets what was shown before.
    pub(crate) fn until(&mut self, what: impl Fn(&str) -> bool) -> String {
        let deadline = Instant::now() + PATIENCE;
        while !what(&self.shown) {
            let left = deadline.saturating_duration_since(Instant::now());
            let read = self.reads.recv_timeout(left);
            self.bytes.extend(read.unwrap_or_else(|_| panic!("only: {:?}", self.shown)));
            // A letter may come in two halves.
            if let Ok(text) = std::str::from_utf8(&self.bytes) {
                self.shown.push_str(text);
                self.bytes.clear();
            }
        }
        std::mem::take(&mut self.shown)
    }

    /// Reads on until it shows this. What came in the same read is kept: it may be what is waited for next.
    pub(crate) fn shows(&mut self, what: &str) -> String {
        let mut shown = self.until(|shown| shown.contains(what));
        let end = shown.find(what).map_or(shown.len(), |at| at + what.len());
        self.shown = shown.split_off(end);
        shown
    }

    pub(crate) fn strike(&mut self, keys: &str) {
        self.ours.write_all(keys.as_bytes()).unwrap();
    }

    pub(crate) fn resize(&self, rows: u16, columns: u16) {
        tcsetwinsize(&self.ours, size(rows, columns)).unwrap();
    }

    pub(crate) fn modes(&self) -> Termios {
        tcgetattr(&self.theirs).unwrap()
    }

    pub(crate) fn ended(&mut self) -> ExitStatus {
        eventually("the program on the terminal ends", || self.child.try_wait().unwrap())
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
