//! The keeper's socket: whatever is said there, others are not harmed.

use crate::fixture::{ADA, BOB, Place, as_user};
use crate::support::{PATIENCE, eventually, is_root, skip};
use serde_json::{Value, json};
use std::io::{BufRead, BufReader, ErrorKind, Read, Write};
use std::os::unix::net::UnixStream;
use std::time::Duration;

fn connect(place: &Place) -> UnixStream {
    let stream = UnixStream::connect(place.home.path().join("keeper.sock")).unwrap();
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
        return skip("it takes root to be several users");
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

#[test]
fn a_share_that_is_not_bound_is_given_back() {
    if !is_root() {
        return skip("it takes root to be several users");
    }
    let (place, _up) = Place::kept("");
    let request = json!({
        "ask": "run", "name": "liar", "gpus": null, "memory": 1u64 << 30, "memoryPercent": null, "cores": null,
        "whole": false, "mode": null, "models": [], "wait": false, "command": ["liar"],
    });
    let cgroups = || std::fs::read_to_string("/proc/self/cgroup").unwrap();
    let before = cgroups();
    let asked = || {
        let mut stream = connect(&place);
        stream.write_all((request.to_string() + "\n").as_bytes()).unwrap();
        let mut reader = BufReader::new(stream);
        let mut line = String::new();
        reader.read_line(&mut line).unwrap();
        let granted: Value = serde_json::from_str(&line).unwrap();
        assert_eq!((&granted["answer"], &granted["name"]), (&"granted".into(), &"liar".into()), "{granted}");
        reader
    };
    let given_back = || {
        eventually("it is given back", || place.home.find("liar").is_none().then_some(()));
        // Who asked goes on as it was.
        eventually("its cgroup is the one it had", || (cgroups() == before).then_some(()));
    };
    // It says that it is bound and is not.
    for binding in ["mountNamespace", "userNamespace"] {
        let mut reader = asked();
        assert!(place.home.find("liar").is_some());
        let bound = json!({"binding": binding}).to_string() + "\n";
        reader.get_mut().write_all(bound.as_bytes()).unwrap();
        let mut line = String::new();
        reader.read_line(&mut line).unwrap();
        assert!(line.contains("it says that it sees its region, and does not"), "{line}");
        given_back();
    }
    // It goes away.
    drop(asked());
    given_back();
    // It talks nonsense.
    asked().get_mut().write_all(b"{}\n").unwrap();
    given_back();
    place.home.nothing_left();
}

#[test]
fn nobody_can_keep_others_from_asking() {
    if !is_root() {
        return skip("it takes root to be several users");
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
