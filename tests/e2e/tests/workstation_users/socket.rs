//! The keeper's socket: whatever is said there, others are not harmed.

use crate::fixture::{ADA, BOB, Place, as_user};
use crate::support::{PATIENCE, Running, eventually, is_root, skip_or_fail};
use serde_json::{Value, json};
use std::io::{BufRead, BufReader, ErrorKind, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

fn connect(place: &Place) -> UnixStream {
    connect_to(&place.home.path().join("keeper.sock"))
}

fn connect_to(socket: &Path) -> UnixStream {
    let stream = UnixStream::connect(socket).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    stream
}

/// Says something, and hears what is answered until the other side has enough.
fn answer(place: &Place, bytes: &[u8]) -> String {
    let mut stream = connect(place);
    // It may have enough before the end.
    let _ = stream.write_all(bytes);
    let _ = stream.shutdown(std::net::Shutdown::Write);
    let mut answer = Vec::new();
    if let Err(error) = stream.read_to_end(&mut answer) {
        assert_eq!(error.kind(), ErrorKind::ConnectionReset);
    }
    String::from_utf8(answer).unwrap()
}

#[test]
fn nonsense_is_answered_and_harms_nobody() {
    if !is_root() {
        return skip_or_fail(&"it takes root to be several users");
    }
    let (place, mut up) = Place::kept("");
    let deep = [vec![b'['; 500_000], b"\n".to_vec()].concat();
    let long = vec![b'x'; 3 << 20];
    let nonsense: [&[u8]; 9] = [
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"\n",
        b"{}\n",
        b"{\"ask\":\"dance\"}\n",
        b"{\"ask\":\"report\"",
        b"{\"ask\":\"stop\",\"name\":\"../..\",\"graceMillis\":-1}\n",
        b"\x00\xff\xfe\n",
        &deep,
        &long,
    ];
    for bytes in nonsense {
        let answer = answer(&place, bytes);
        let shown = String::from_utf8_lossy(&bytes[..bytes.len().min(40)]);
        let answer: Value = serde_json::from_str(&answer).unwrap_or_else(|_| panic!("{shown:?}: {answer:?}"));
        assert_eq!((&answer["answer"], &answer["kind"]), (&"refused".into(), &"wrong".into()), "{shown:?}");
    }
    assert_eq!(answer(&place, b""), "");
    // Names are no paths.
    let path = json!({"ask": "stop", "name": "../../etc", "grace_millis": 0}).to_string() + "\n";
    assert!(answer(&place, path.as_bytes()).contains("no share is called ../../etc"));
    let (code, words) = place.home.refused(&["run", "--name", "../x", "--", "true"]);
    assert!(code == 125 && words.contains("cannot be a name"), "{words}");
    assert!(up.goes_on());
    place.home.fine(&["ps"]);
}

const SOCKET: &str = "PARTAGE_TEST_SOCKET";

/// Says to the keeper what it is told to, and tells what is answered; an empty line ends the talk.
#[test]
#[ignore = "it is the process that another test starts"]
fn liar() {
    // Somebody runs all tests that are ignored.
    let Some(socket) = std::env::var_os(SOCKET) else { return };
    let mut talk = None;
    for line in std::io::stdin().lines().map(Result::unwrap) {
        if line.is_empty() {
            talk = None;
            continue;
        }
        let reader = talk.get_or_insert_with(|| BufReader::new(connect_to(socket.as_ref())));
        reader.get_mut().write_all((line + "\n").as_bytes()).unwrap();
        let mut answer = String::new();
        // There may be none.
        let _ = reader.read_line(&mut answer);
        writeln!(std::io::stdout(), "heard {}", answer.trim_end()).unwrap();
    }
}

#[test]
fn a_share_that_is_not_bound_is_given_back() {
    if !is_root() {
        return skip_or_fail(&"it takes root to be several users");
    }
    let (place, _up) = Place::kept("");
    let request = json!({
        "ask": "run", "name": "liar", "gpus": null, "memory": 1u64 << 30, "memoryPercent": null, "cores": null,
        "whole": false, "mode": null, "models": [], "wait": false, "command": ["liar"],
    });
    // A process of its own: who asks is moved to the share's cgroup, and what it starts meanwhile is born there.
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", "socket::liar", "--ignored", "--nocapture"]);
    command.env(SOCKET, place.home.path().join("keeper.sock"));
    let mut liar = Running::start(command);
    let cgroup = format!("/proc/{}/cgroup", liar.pid());
    let cgroups = || std::fs::read_to_string(&cgroup).unwrap();
    let before = cgroups();
    let tell = |liar: &mut Running, words: &str| writeln!(liar.input.as_mut().unwrap(), "{words}").unwrap();
    let hear = |liar: &mut Running, words: &str| {
        tell(liar, words);
        liar.says("heard ").split_once("heard ").unwrap().1.to_string()
    };
    let asked = |liar: &mut Running| {
        let granted: Value = serde_json::from_str(&hear(liar, &request.to_string())).unwrap();
        assert_eq!((&granted["answer"], &granted["name"]), (&"granted".into(), &"liar".into()), "{granted}");
    };
    let given_back = || {
        eventually("it is given back", || place.home.find("liar").is_none().then_some(()));
        // Who asked goes on as it was.
        eventually("its cgroup is the one it had", || (cgroups() == before).then_some(()));
    };
    // It says that it is bound and is not.
    for binding in ["mountNamespace", "userNamespace"] {
        asked(&mut liar);
        assert!(place.home.find("liar").is_some());
        let line = hear(&mut liar, &json!({"binding": binding}).to_string());
        assert!(line.contains("it says that it sees its region, and does not"), "{line}");
        given_back();
        tell(&mut liar, "");
    }
    // It goes away.
    asked(&mut liar);
    tell(&mut liar, "");
    given_back();
    // It talks nonsense.
    asked(&mut liar);
    hear(&mut liar, "{}");
    given_back();
    assert!(liar.goes_on());
    place.home.nothing_left();
}

#[test]
fn nobody_can_keep_others_from_asking() {
    if !is_root() {
        return skip_or_fail(&"it takes root to be several users");
    }
    let (place, _up) = Place::kept("");
    // One who never comes to the end.
    let mut slow = as_user(ADA, || connect(&place));
    let mut hears = slow.try_clone().unwrap();
    let slowly = std::thread::spawn(move || {
        let begun = std::time::Instant::now();
        while begun.elapsed() < PATIENCE {
            if slow.write_all(b" ").is_err() {
                return true;
            }
            std::thread::sleep(Duration::from_millis(100));
        }
        false
    });
    // One who has nothing to say, many times.
    let silent: Vec<UnixStream> = as_user(ADA, || (0..600).map(|_| connect(&place)).collect());
    // First: who says nothing for long is let go.
    let (code, words) = place.refused(ADA, &["ps"]);
    assert!(code != 0 && words.contains("commands of yours talk to the keeper already"), "{code} {words}");
    for uid in [BOB, 0] {
        place.fine(uid, &["ps"]);
        place.fine(uid, &["run", "-q", "--memory", "1Gi", "--", "true"]);
    }
    drop(silent);
    eventually("she can ask again", || place.output(ADA, &["ps"]).status.success().then_some(()));
    let mut last = String::new();
    // What it had said was no question, or nothing was answered.
    let _ = hears.read_to_string(&mut last);
    assert!(slowly.join().unwrap(), "a byte at a time, one is heard for ever");
    place.home.nothing_left();
}
