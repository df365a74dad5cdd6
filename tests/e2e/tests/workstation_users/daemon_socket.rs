//! The daemon's socket: no input harms other users.

use crate::shared_machine::{ADA, BOB, SharedMachine, as_user};
use crate::support::{BackgroundProcess, TIMEOUT, eventually, is_root, skip_or_fail};
use serde_json::{Value, json};
use std::io::{BufRead, BufReader, ErrorKind, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

fn connect(machine: &SharedMachine) -> UnixStream {
    connect_to(&machine.state_dir.path().join("daemon.sock"))
}

fn connect_to(socket: &Path) -> UnixStream {
    let stream = UnixStream::connect(socket).unwrap();
    stream.set_read_timeout(Some(TIMEOUT)).unwrap();
    stream
}

/// Sends bytes, and returns the response until the daemon closes the connection.
fn send_and_receive(machine: &SharedMachine, bytes: &[u8]) -> String {
    let mut stream = connect(machine);
    // The daemon may close it before all is sent.
    let _ = stream.write_all(bytes);
    let _ = stream.shutdown(std::net::Shutdown::Write);
    let mut answer = Vec::new();
    if let Err(error) = stream.read_to_end(&mut answer) {
        assert_eq!(error.kind(), ErrorKind::ConnectionReset);
    }
    String::from_utf8(answer).unwrap()
}

#[test]
fn malformed_requests_are_answered_and_harm_no_other_user() {
    if !is_root() {
        return skip_or_fail(&"acting as several users needs root");
    }
    let (machine, mut up) = SharedMachine::managed_by_root("");
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
        let answer = send_and_receive(&machine, bytes);
        let shown = String::from_utf8_lossy(&bytes[..bytes.len().min(40)]);
        let answer: Value = serde_json::from_str(&answer).unwrap_or_else(|_| panic!("{shown:?}: {answer:?}"));
        assert_eq!((&answer["answer"], &answer["kind"]), (&"refused".into(), &"invalid".into()), "{shown:?}");
    }
    assert_eq!(send_and_receive(&machine, b""), "");
    // Names are not used as paths.
    let path = json!({"ask": "stop", "name": "../../etc", "grace_millis": 0}).to_string() + "\n";
    assert!(send_and_receive(&machine, path.as_bytes()).contains("share ../../etc not found"));
    let (code, message) = machine.state_dir.run_err(&["run", "--name", "../x", "--", "true"]);
    assert!(code == 125 && message.contains("invalid name"), "{message}");
    assert!(up.is_running());
    machine.state_dir.run_ok(&["ps"]);
}

const SOCKET_VARIABLE: &str = "PARTAGE_TEST_SOCKET";

/// Sends the lines of its input to the daemon, and prints the responses; an empty line closes the connection.
#[test]
#[ignore = "the process that another test starts"]
fn misreporting_client() {
    // All ignored tests are being run.
    let Some(socket) = std::env::var_os(SOCKET_VARIABLE) else { return };
    let mut connection = None;
    for line in std::io::stdin().lines().map(Result::unwrap) {
        if line.is_empty() {
            connection = None;
            continue;
        }
        let reader = connection.get_or_insert_with(|| BufReader::new(connect_to(socket.as_ref())));
        reader.get_mut().write_all((line + "\n").as_bytes()).unwrap();
        let mut response = String::new();
        // There may be no response.
        let _ = reader.read_line(&mut response);
        writeln!(std::io::stdout(), "received {}", response.trim_end()).unwrap();
    }
}

#[test]
fn unconfined_share_is_released() {
    if !is_root() {
        return skip_or_fail(&"acting as several users needs root");
    }
    let (machine, _up) = SharedMachine::managed_by_root("");
    let request = json!({
        "ask": "run", "name": "misreport", "gpus": null, "memory": 1u64 << 30, "memoryPercent": null, "cores": null,
        "whole": false, "mode": null, "models": [], "wait": false, "command": ["misreport"],
    });
    // A process of its own: the caller is moved into the share's cgroup, and processes that it starts meanwhile are in
    // it, too.
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", "daemon_socket::misreporting_client", "--ignored", "--nocapture"]);
    command.env(SOCKET_VARIABLE, machine.state_dir.path().join("daemon.sock"));
    let mut misreporting_client = BackgroundProcess::start(command);
    let cgroup = format!("/proc/{}/cgroup", misreporting_client.pid());
    let cgroups = || std::fs::read_to_string(&cgroup).unwrap();
    let before = cgroups();
    let send = |client: &mut BackgroundProcess, line: &str| {
        writeln!(client.input.as_mut().unwrap(), "{line}").unwrap()
    };
    let receive = |client: &mut BackgroundProcess, line: &str| {
        send(client, line);
        client.wait_for_line("received ").split_once("received ").unwrap().1.to_string()
    };
    let request_share = |client: &mut BackgroundProcess| {
        let granted: Value = serde_json::from_str(&receive(client, &request.to_string())).unwrap();
        assert_eq!(
            (&granted["answer"], &granted["name"]),
            (&"granted".into(), &"misreport".into()),
            "{granted}"
        );
    };
    let wait_until_released = || {
        eventually("the share is released", || {
            machine.state_dir.find_share("misreport").is_none().then_some(())
        });
        // The caller is unchanged.
        eventually("the caller is in its former cgroup", || (cgroups() == before).then_some(()));
    };
    // It reports a confinement that it does not have.
    for binding in ["mountNamespace", "userNamespace"] {
        request_share(&mut misreporting_client);
        assert!(machine.state_dir.find_share("misreport").is_some());
        let line = receive(&mut misreporting_client, &json!({"binding": binding}).to_string());
        assert!(line.contains("the process is not confined: its region is not visible"), "{line}");
        wait_until_released();
        send(&mut misreporting_client, "");
    }
    // It closes the connection.
    request_share(&mut misreporting_client);
    send(&mut misreporting_client, "");
    wait_until_released();
    // It sends an invalid message.
    request_share(&mut misreporting_client);
    receive(&mut misreporting_client, "{}");
    wait_until_released();
    assert!(misreporting_client.is_running());
    machine.state_dir.wait_until_clean();
}

#[test]
fn connection_flood_does_not_block_other_users() {
    if !is_root() {
        return skip_or_fail(&"acting as several users needs root");
    }
    let (machine, _up) = SharedMachine::managed_by_root("");
    // A client that never finishes its request.
    let mut slow = as_user(ADA, || connect(&machine));
    let mut hears = slow.try_clone().unwrap();
    let slowly = std::thread::spawn(move || {
        let begun = std::time::Instant::now();
        while begun.elapsed() < TIMEOUT {
            if slow.write_all(b" ").is_err() {
                return true;
            }
            std::thread::sleep(Duration::from_millis(100));
        }
        false
    });
    // Many clients that send nothing.
    let silent: Vec<UnixStream> = as_user(ADA, || (0..600).map(|_| connect(&machine)).collect());
    // First: silent connections are closed after a while.
    let (code, message) = machine.run_err(ADA, &["ps"]);
    assert!(code != 0 && message.contains("connections to the daemon"), "{code} {message}");
    for uid in [BOB, 0] {
        machine.run_ok(uid, &["ps"]);
        machine.run_ok(uid, &["run", "-q", "--memory", "1Gi", "--", "true"]);
    }
    drop(silent);
    eventually("the user can connect again", || machine.output(ADA, &["ps"]).status.success().then_some(()));
    let mut last = String::new();
    // The bytes were no request, or there was no response.
    let _ = hears.read_to_string(&mut last);
    assert!(slowly.join().unwrap(), "a client that sends one byte at a time is never disconnected");
    machine.state_dir.wait_until_clean();
}
