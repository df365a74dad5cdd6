//! `kubectl exec`, `logs` and `port-forward`: from a client through the API server and kubelet into a container.

use partage_testkit::bed::{BedProfile, TestBed};
use std::io::{BufRead, BufReader, Read, Write};
use std::process::Stdio;
use tokio::io::{AsyncReadExt, AsyncWriteExt};

const POD: &str = r#"{"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "web"}, "spec": {"containers": [
    {"name": "web", "image": "localhost/debian:bed", "imagePullPolicy": "Never",
     "command": ["sh", "-c", "echo first; while ! [ -e /go ]; do sleep 0.1; done; echo second; exec sleep 1000"]},
    {"name": "httpd", "image": "localhost/busybox:bed", "imagePullPolicy": "Never",
     "command": ["sh", "-c", "echo hello > /index.html; exec httpd -f -p 8080 -h /"]}]}}"#;

#[test]
fn exec_logs_and_port_forward_reach_a_container() {
    let Some(bed) = TestBed::for_test(BedProfile::one_node().debian()) else { return };
    bed.kubectl_with(&["apply", "-f", "-"], POD).unwrap();
    bed.kubectl(&["wait", "--for=condition=Ready", "pod/web", "--timeout=300s"]).unwrap();
    exec_forwards_stdin_stdout_and_exit_code(&bed);
    exec_allocates_a_terminal(&bed);
    logs_are_followed(&bed);
    port_forward_reaches_the_container(&bed);
}

fn exec_forwards_stdin_stdout_and_exit_code(bed: &TestBed) {
    let message =
        bed.kubectl_with(&["exec", "-i", "web", "-c", "web", "--", "tr", "a-z", "A-Z"], "quiet\n").unwrap();
    assert_eq!(message, "QUIET\n");
    let mut command = bed.kubectl_command();
    command.args(["exec", "web", "-c", "web", "--", "sh", "-c", "echo out; echo err >&2; exit 42"]);
    let output = command.output().unwrap();
    assert_eq!(output.status.code(), Some(42));
    assert_eq!(output.stdout, b"out\n");
    let err = String::from_utf8(output.stderr).unwrap();
    assert!(err.starts_with("err\n"), "{err}");
}

/// `script` gives kubectl its own terminal, as an interactive shell would.
fn exec_allocates_a_terminal(bed: &TestBed) {
    let kubectl = bed.kubectl_command();
    let words: Vec<_> = kubectl.get_args().map(|word| word.to_string_lossy().into_owned()).collect();
    let line = format!("nsenter {} exec -it web -c web -- tty", words.join(" "));
    let mut script = std::process::Command::new("script");
    script.envs(kubectl.get_envs().filter_map(|(name, value)| Some((name, value?))));
    let output = script.args(["-qec", &line, "/dev/null"]).output().unwrap();
    let message = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(message.contains("/dev/pts/"), "{message}");
}

fn logs_are_followed(bed: &TestBed) {
    let mut command = bed.kubectl_command();
    let mut follow = command
        .args(["logs", "-f", "web", "-c", "web"])
        .stdout(Stdio::piped())
        .spawn()
        .expect("kubectl runs");
    let mut lines = BufReader::new(follow.stdout.take().unwrap()).lines();
    assert_eq!(lines.next().unwrap().unwrap(), "first");
    bed.kubectl(&["exec", "web", "-c", "web", "--", "touch", "/go"]).unwrap();
    assert_eq!(lines.next().unwrap().unwrap(), "second");
    follow.kill().unwrap();
    follow.wait().unwrap();
}

fn port_forward_reaches_the_container(bed: &TestBed) {
    let mut command = bed.kubectl_command();
    let mut forward = command
        .args(["port-forward", "pod/web", ":8080"])
        .stdout(Stdio::piped())
        .spawn()
        .expect("kubectl runs");
    let mut first = String::new();
    let mut output = BufReader::new(forward.stdout.take().unwrap());
    output.read_line(&mut first).unwrap();
    let port: u16 = first
        .strip_prefix("Forwarding from 127.0.0.1:")
        .and_then(|rest| rest.split(' ').next()?.parse().ok())
        .unwrap_or_else(|| panic!("no port in {first:?}"));
    let page = bed.block_on(async {
        let mut stream = tokio::net::TcpStream::connect(("127.0.0.1", port)).await.unwrap();
        stream.write_all(b"GET / HTTP/1.0\r\n\r\n").await.unwrap();
        let mut page = String::new();
        stream.read_to_string(&mut page).await.unwrap();
        page
    });
    assert!(page.starts_with("HTTP/1.1 200") || page.starts_with("HTTP/1.0 200"), "{page}");
    assert!(page.ends_with("hello\n"), "{page}");
    forward.kill().unwrap();
    forward.wait().unwrap();
    let mut rest = String::new();
    let _ = output.read_to_string(&mut rest);
    std::io::stdout().flush().unwrap();
}
