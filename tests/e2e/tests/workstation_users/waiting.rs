//! Those who wait for a share.

use crate::support::{GIB, Home, Running, Terminal, eventually, signal};
use serde_json::Value;
use std::os::unix::process::ExitStatusExt;

const ONE_GPU: &str = "driver: simulated\nsimulated: {gpus: 1}\n";

fn waits(home: &Home, name: &str, memory: &str) -> Running {
    let arguments = ["run", "--wait", "--name", name, "--memory", memory, "--", "sleep", "1000"];
    Running::start(home.partage(&arguments))
}

fn waiting(home: &Home) -> Vec<String> {
    let report = home.json(&["ps", "-o", "json"]);
    let names = report["waiting"].as_array().unwrap().iter().map(|one| one["name"].as_str().unwrap().into());
    names.collect()
}

fn runs(home: &Home, name: &str) -> Value {
    eventually(&format!("{name} runs"), || home.find(name).filter(|share| share["stage"] == "running"))
}

#[test]
fn who_came_first_is_served_first() {
    let home = Home::new();
    let _up = home.up(ONE_GPU, &["--metrics", "off"]);
    let first = home.share("wait-first", &["--memory", "30Gi"], &["sleep", "1000"]);
    let mut second = waits(&home, "wait-second", "20Gi");
    let said = second.says("partage: waiting, place 1 of 1: ");
    assert!(said.contains("9.39 GiB"), "{said}");
    let mut third = waits(&home, "wait-third", "25Gi");
    third.says("partage: waiting, place 2 of 2: ");
    second.says("partage: waiting, place 1 of 2: ");
    let mut fourth = waits(&home, "wait-fourth", "30Gi");
    fourth.says("partage: waiting, place 3 of 3: ");
    assert_eq!(waiting(&home), ["wait-second", "wait-third", "wait-fourth"]);
    let ps = home.fine(&["ps"]);
    assert!(ps.contains("wait-third") && ps.contains("25 GiB"), "{ps}");
    // A name is taken while its owner waits.
    let (code, words) = home.refused(&["run", "--name", "wait-third", "--memory", "1Gi", "--", "true"]);
    assert!(code == 125 && words.contains("a share called wait-third is there already"), "{words}");
    // What fits does not wait behind what does not.
    home.fine(&["run", "--wait", "--memory", "2Gi", "--", "true"]);
    // What never fits is not waited for.
    for never in [&["--memory", "90Gi"][..], &["--gpus", "2"], &["--model", "H100"]] {
        let (code, words) = home.refused(&[&["run", "--wait"], never, &["--", "true"]].concat());
        assert!(code == 125 && !words.contains("waiting"), "{never:?}: {words}");
    }
    // Ctrl-C leaves the queue.
    second.signal(libc::SIGINT);
    assert_eq!(second.ended().signal(), Some(libc::SIGINT));
    third.says("partage: waiting, place 1 of 2: ");
    fourth.says("partage: waiting, place 2 of 2: ");
    first.signal(libc::SIGTERM);
    third.says("partage: wait-third: 25 GiB of GPU 0; held by");
    assert_eq!(runs(&home, "wait-third")["parts"][0]["memoryBytes"], 25 * GIB);
    fourth.says("partage: waiting, place 1 of 1: ");
    assert_eq!(waiting(&home), ["wait-fourth"]);
    // Room is also made by one who needs less.
    home.fine(&["resize", "wait-third", "--memory", "8Gi"]);
    runs(&home, "wait-fourth");
    assert_eq!(waiting(&home), Vec::<String>::new());
    home.fine(&["stop", "--all"]);
    home.nothing_left();
}

#[test]
fn who_waits_goes_on_waiting_when_the_keeper_dies() {
    let home = Home::new();
    let up = home.up(ONE_GPU, &["--metrics", "off"]);
    let first = home.share("stay-first", &["--memory", "30Gi"], &["sleep", "1000"]);
    let mut second = waits(&home, "stay-second", "20Gi");
    second.says("place 1 of 1");
    eventually("somebody stands by", || home.standby());
    up.signal(libc::SIGKILL);
    second.says("place 1 of 1");
    assert_eq!(waiting(&home), ["stay-second"]);
    first.signal(libc::SIGTERM);
    second.says("partage: stay-second: 20 GiB of GPU 0; held by");
    runs(&home, "stay-second");
    home.fine(&["stop", "stay-second"]);
    assert!(!second.ended().success());
    home.nothing_left();
}

#[test]
fn on_a_terminal_the_place_is_one_line_and_ctrl_c_leaves() {
    let home = Home::new();
    let _up = home.up(ONE_GPU, &["--metrics", "off"]);
    let first = home.share("line-first", &["--memory", "30Gi"], &["sleep", "1000"]);
    let arguments = ["run", "--wait", "--name", "line-second", "--memory", "20Gi", "--", "echo", "hello"];
    let mut given_up = Terminal::start(home.partage(&arguments), 24, 60);
    let shown = given_up.shows("partage: waiting, place 1 of 1: ");
    assert!(!shown.contains('\n'), "{shown:?}");
    given_up.strike("\u{3}");
    assert_eq!(given_up.ended().signal(), Some(libc::SIGINT));
    eventually("the queue is empty", || waiting(&home).is_empty().then_some(()));

    let mut served = Terminal::start(home.partage(&arguments), 24, 60);
    served.shows("partage: waiting, place 1 of 1: ");
    signal(first.pid(), libc::SIGTERM);
    // The line is wiped before the next one is written.
    let shown = served.shows("hello");
    assert!(shown.contains("\r\u{1b}[Kpartage: line-second: 20 GiB of GPU 0; held by"), "{shown:?}");
    assert!(served.ended().success());
    home.nothing_left();
}
