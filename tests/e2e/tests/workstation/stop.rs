//! Ending shares.

use super::support::*;
use std::os::unix::process::{CommandExt, ExitStatusExt};

#[test]
fn who_is_asked_ends_and_who_does_not_is_killed() {
    let home = Home::new();
    let polite = "trap 'echo bye; exit 4' TERM; echo ready; while :; do sleep 0.05; done";
    let mut polite = home.share("polite", &["--memory", "1Gi"], &["sh", "-c", polite]);
    polite.says("ready");
    let said = home.fine(&["stop", "polite"]);
    assert!(said.starts_with("polite: stopped, ") && !said.contains("killed"), "{said}");
    polite.says("bye");
    assert_eq!(polite.ended().code(), Some(4));

    // Their children ignore it too.
    let stubborn = "trap '' TERM; echo ready; sleep 1000 & sleep 1000";
    let mut stubborn = home.share("stubborn", &["--memory", "1Gi"], &["sh", "-c", stubborn]);
    stubborn.says("ready");
    eventually("its children run", || (home.find("stubborn").unwrap()["members"] == 3).then_some(()));
    let said = home.fine(&["stop", "stubborn", "--grace", "200ms"]);
    assert_eq!(said, "stubborn: stopped, 3 processes had to be killed\n");
    assert_eq!(stubborn.ended().signal(), Some(libc::SIGKILL));
    home.nothing_left();
}

#[test]
fn what_was_left_behind_ends_too() {
    let home = Home::new();
    let script = "(setsid sh -c 'trap \"\" TERM; setsid sleep 1000 & sleep 1000' > /dev/null 2>&1 < /dev/null &) & wait";
    home.fine(&["run", "-q", "--memory", "1Gi", "--name", "parent", "--", "sh", "-c", script]);
    let members = || home.find("parent").unwrap()["members"].as_u64().unwrap();
    eventually("its descendants run", || (members() == 3).then_some(()));
    assert_eq!(home.find("parent").unwrap()["stage"], "lingering");
    home.fine(&["stop", "parent", "--grace", "100ms"]);
    assert_eq!(home.members(), Vec::<u32>::new());
    assert_eq!(home.shares().len(), 0);
    home.nothing_left();
}

#[test]
fn a_stopped_job_hears_of_it() {
    let home = Home::new();
    let mut running = home.sleeper("paused");
    running.signal(libc::SIGSTOP);
    home.fine(&["stop", "paused"]);
    assert_eq!(running.ended().signal(), Some(libc::SIGTERM));
    home.nothing_left();
}

#[test]
fn names_that_are_not_there() {
    let home = Home::new();
    assert_eq!(
        home.refused(&["stop", "x"]),
        (1, "error: no share is called x: there are no shares\n".into())
    );
    let mut trainer = home.sleeper("trainer");
    let (code, words) = home.refused(&["stop", "trianer"]);
    assert_eq!((code, words.as_str()), (1, "error: no share is called trianer: did you mean trainer?\n"));
    let (code, words) = home.refused(&["stop", "trainer", "--grace", "soon"]);
    assert!(code == 2 && words.contains("soon"), "{words}");
    assert!(trainer.goes_on());
    home.fine(&["stop", "--all"]);
    assert_eq!(home.fine(&["stop", "--all"]), "none of the shares is yours: nothing to stop\n");
    home.nothing_left();
}

#[test]
fn what_is_not_yours_stays() {
    if !is_root() {
        return skip_or_fail(&"becoming another user needs root");
    }
    let home = Home::new();
    let program = home.path().join("partage");
    install(partage_e2e::partage(), &program);
    let mut running = home.sleeper("roots");
    for command in [&["stop", "roots"][..], &["resize", "roots", "--memory", "1Gi"]] {
        let mut other = std::process::Command::new(&program);
        other.args(command).env("PARTAGE_HOME", home.path()).uid(61001).gid(61001);
        let output = other.output().unwrap();
        let words = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(1), "{words}");
        assert_eq!(
            words,
            "error: roots belongs to user root: only they and the administrator may change it\n"
        );
    }
    let mut all = std::process::Command::new(&program);
    all.args(["stop", "--all"]).env("PARTAGE_HOME", home.path()).uid(61001).gid(61001);
    assert_eq!(all.output().unwrap().stdout, b"none of the shares is yours: nothing to stop\n");
    assert!(running.goes_on());
    assert_eq!(home.find("roots").unwrap()["parts"][0]["memoryBytes"], 4 * GIB);
}
