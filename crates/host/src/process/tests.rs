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
fn a_zombie_has_ended_unless_other_threads_work() {
    assert_eq!(parse(&line(b"a", "Z", 1, 5)), Some(Stat { started: 5, ended: true }));
    assert_eq!(parse(&line(b"a", "Z", 2, 5)), Some(Stat { started: 5, ended: false }));
    assert_eq!(parse(&line(b"a", "D", 1, 5)), Some(Stat { started: 5, ended: false }));
}

proptest! {
    #[test]
    fn a_name_cannot_forge_the_rest(name in proptest::collection::vec(any::<u8>(), 0..16), started: u64) {
        prop_assert_eq!(parse(&line(&name, "S", 1, started)), Some(Stat { started, ended: false }));
    }

    #[test]
    fn any_text_is_read_without_harm(text in proptest::collection::vec(any::<u8>(), 0..200)) {
        let _ = parse(&text);
    }
}

#[test]
fn a_name_that_looks_like_the_rest_of_the_line() {
    let name = b"x) Z 1 1 1 1 1";
    assert_eq!(parse(&line(name, "R", 1, 9)), Some(Stat { started: 9, ended: false }));
}

#[test]
fn a_process_lives_until_it_ends_even_if_nobody_waited() {
    let mut child = sleeper();
    let identity = Identity::of(child.id()).unwrap();
    assert!(identity.lives());
    let fd = identity.pidfd().unwrap();
    identity.signal(Signal::KILL).unwrap();
    rustix::event::poll(&mut [rustix::event::PollFd::new(&fd, rustix::event::PollFlags::IN)], None).unwrap();
    // Nobody waited for it: its number is still taken.
    assert!(Identity::of(child.id()).is_ok());
    assert!(!identity.lives());
    child.wait().unwrap();
    assert!(!identity.lives());
    assert_eq!(identity.pidfd().unwrap_err().kind(), ErrorKind::NotFound);
}

#[test]
fn a_later_process_with_the_number_is_another_one() {
    let mut child = sleeper();
    let now = Identity::of(child.id()).unwrap();
    let earlier = Identity { started: now.started - 1, ..now };
    assert!(!earlier.lives());
    assert_eq!(earlier.signal(Signal::KILL).unwrap_err().kind(), ErrorKind::NotFound);
    assert!(now.lives(), "the signal reached the other one");
    child.kill().unwrap();
    child.wait().unwrap();
}

#[test]
fn there_is_no_process_zero_and_none_beyond_the_last_number() {
    for pid in [0, u32::MAX] {
        let nobody = Identity { pid, started: 0 };
        assert!(!nobody.lives() && nobody.signal(Signal::KILL).is_err());
        assert!(Identity::of(pid).is_err() && owner(pid).is_err() && command(pid).is_none());
    }
}

#[test]
fn owner_and_name_of_this_process() {
    let own = std::process::id();
    assert_eq!(owner(own).unwrap(), rustix::process::getuid().as_raw());
    assert_eq!(command(own).unwrap(), std::env::args().next().unwrap());
    assert_eq!(Identity::own().unwrap(), Identity::of(own).unwrap());
}

#[test]
fn a_name_is_safe_to_show() {
    let mut child = Command::new("sleep").arg0("evil\x1b[2J\nname").arg("1000").spawn().unwrap();
    // For a moment it is still what it was started from.
    let until = std::time::Instant::now() + std::time::Duration::from_secs(60);
    while command(child.id()).unwrap() != "evil?[2J?name" {
        assert!(std::time::Instant::now() < until, "{:?}", command(child.id()));
        std::thread::yield_now();
    }
    child.kill().unwrap();
    child.wait().unwrap();
    assert_eq!(shown(&[b'x'; 5000]).len(), LONGEST_NAME);
    assert_eq!(shown(b"\xff"), "\u{fffd}");
}
