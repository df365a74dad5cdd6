use super::*;
use proptest::prelude::*;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command};

fn line(name: &[u8], state: &str, threads: u64, started: u64) -> Vec<u8> {
    let mut line = b"77 (".to_vec();
    line.extend(name);
    line.extend(
        format!(") {state} 1 77 77 0 -1 4194304 1 0 0 0 0 0 0 0 20 0 {threads} 0 {started} 8 9").bytes(),
    );
    line
}

fn sleeper() -> Child {
    Command::new("sleep").arg("1000").spawn().unwrap()
}

#[test]
fn zombie_has_ended_unless_other_threads_run() {
    assert_eq!(parse_stat(&line(b"a", "Z", 1, 5)), Some(ProcessStat { started: 5, ended: true }));
    assert_eq!(parse_stat(&line(b"a", "Z", 2, 5)), Some(ProcessStat { started: 5, ended: false }));
    assert_eq!(parse_stat(&line(b"a", "D", 1, 5)), Some(ProcessStat { started: 5, ended: false }));
}

proptest! {
    #[test]
    fn command_name_cannot_forge_other_fields(name in proptest::collection::vec(any::<u8>(), 0..16), started: u64) {
        prop_assert_eq!(parse_stat(&line(&name, "S", 1, started)), Some(ProcessStat { started, ended: false }));
    }

    #[test]
    fn arbitrary_bytes_do_not_panic(text in proptest::collection::vec(any::<u8>(), 0..200)) {
        let _ = parse_stat(&text);
    }
}

#[test]
fn command_name_that_looks_like_fields_is_skipped() {
    let name = b"x) Z 1 1 1 1 1";
    assert_eq!(parse_stat(&line(name, "R", 1, 9)), Some(ProcessStat { started: 9, ended: false }));
}

#[test]
fn zombie_is_not_running() {
    let mut child = sleeper();
    let identity = ProcessIdentity::of(child.id()).unwrap();
    assert!(identity.is_running());
    let fd = identity.pidfd().unwrap();
    identity.signal(Signal::KILL).unwrap();
    rustix::event::poll(&mut [rustix::event::PollFd::new(&fd, rustix::event::PollFlags::IN)], None).unwrap();
    // It was not waited for, so its pid still exists.
    assert!(ProcessIdentity::of(child.id()).is_ok());
    assert!(!identity.is_running());
    child.wait().unwrap();
    assert!(!identity.is_running());
    assert_eq!(identity.pidfd().unwrap_err().kind(), ErrorKind::NotFound);
}

#[test]
fn later_process_with_the_same_pid_is_not_signaled() {
    let mut child = sleeper();
    let now = ProcessIdentity::of(child.id()).unwrap();
    let earlier = ProcessIdentity { started: now.started - 1, ..now };
    assert!(!earlier.is_running());
    assert_eq!(earlier.signal(Signal::KILL).unwrap_err().kind(), ErrorKind::NotFound);
    assert!(now.is_running(), "the signal reached the other process");
    child.kill().unwrap();
    child.wait().unwrap();
}

#[test]
fn invalid_pids_are_not_found() {
    for pid in [0, u32::MAX] {
        let missing = ProcessIdentity { pid, started: 0 };
        assert!(!missing.is_running() && missing.signal(Signal::KILL).is_err());
        assert!(ProcessIdentity::of(pid).is_err() && real_uid(pid).is_err() && command_name(pid).is_none());
    }
}

#[test]
fn user_and_command_of_this_process_are_read() {
    let own = std::process::id();
    assert_eq!(real_uid(own).unwrap(), rustix::process::getuid().as_raw());
    assert_eq!(command_name(own).unwrap(), std::env::args().next().unwrap());
    assert_eq!(ProcessIdentity::current().unwrap(), ProcessIdentity::of(own).unwrap());
}

#[test]
fn control_characters_of_a_command_are_replaced() {
    let mut child = Command::new("sleep").arg0("evil\x1b[2J\nname").arg("1000").spawn().unwrap();
    // Until `execve` the child has the command line of its parent.
    let until = std::time::Instant::now() + std::time::Duration::from_secs(60);
    while command_name(child.id()).unwrap() != "evil?[2J?name" {
        assert!(std::time::Instant::now() < until, "{:?}", command_name(child.id()));
        std::thread::yield_now();
    }
    child.kill().unwrap();
    child.wait().unwrap();
    assert_eq!(sanitize(&[b'x'; 5000]).len(), MAX_COMMAND_CHARS);
    assert_eq!(sanitize(b"\xff"), "\u{fffd}");
}
