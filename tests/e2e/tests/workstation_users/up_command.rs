//! `partage up`: its screen, its log lines, its metrics, and that shares outlive it.

use crate::support::{BackgroundProcess, GIB, TerminalProgram, TestStateDir, eventually, sample, signal};
use std::io::{ErrorKind, Read, Write};
use std::net::TcpStream;
use std::os::unix::net::UnixStream;
use std::os::unix::process::ExitStatusExt;

const SIMULATED_SETTINGS: &str = "driver: simulated\n";

#[test]
fn view_updates_live_and_ends_with_ctrl_c() {
    let state_dir = TestStateDir::new();
    let settings = state_dir.write_settings(SIMULATED_SETTINGS);
    let arguments = ["up", "--settings", settings.to_str().unwrap(), "--metrics", "off"];
    let mut up = TerminalProgram::start(state_dir.partage(&arguments), 30, 110);
    let before = up.before.local_modes;
    // One read may contain both.
    up.read_until(|shown| {
        shown.contains("simulating 2 x NVIDIA A100-SXM4-40GB") && shown.contains("\u{1b}[?1049h")
    });
    let mut share = state_dir.start_share("view", &["--memory", "4Gi", "--cores", "30"], &["sleep", "1000"]);
    // In the table, and below it as an event.
    up.wait_for_text("share granted share=view grant=4 GiB and 30 % of GPU ");
    assert_ne!(up.modes().local_modes, before);
    up.type_keys("m");
    up.wait_for_text("sorted by memory");
    up.type_keys("\u{3}");
    let last = up.wait_for_text("1 share continues in the background");
    assert!(last.contains("\u{1b}[?1049l"), "{last:?}");
    assert!(up.wait_for_exit().success());
    assert_eq!(up.modes().local_modes, before);
    assert!(share.is_running() && state_dir.find_share("view").is_some());
    state_dir.run_ok(&["stop", "view"]);
    state_dir.wait_until_clean();
}

#[test]
fn plain_output_logs_share_events() {
    let state_dir = TestStateDir::new();
    let mut up = state_dir.start_up(SIMULATED_SETTINGS, &["--metrics", "127.0.0.1:0"]);
    up.wait_for_line("no NVIDIA driver in use: simulating 2 x NVIDIA A100-SXM4-40GB");
    up.wait_for_line("metrics: http://127.0.0.1:");
    up.wait_for_line("stop with Ctrl-C");
    state_dir.run_ok(&["run", "--memory", "4Gi", "--cores", "30", "--name", "lines", "--", "true"]);
    up.wait_for_line("share granted share=lines grant=4 GiB and 30 % of GPU 0 user=root");
    up.wait_for_line("share released share=lines");
    let (code, message) = state_dir.run_err(&["up", "--metrics", "off"]);
    let expected = format!("error: partage up is already running here, as process {}: ", up.pid());
    assert!(code == 1 && message.starts_with(&expected), "{message}");
    up.signal(libc::SIGINT);
    assert!(up.wait_for_exit().success());
    assert_eq!(up.remaining_lines(), Vec::<String>::new());
    assert_eq!(state_dir.processes(), Vec::<u32>::new());
}

#[test]
fn json_lines_carry_fields_and_spans() {
    let state_dir = TestStateDir::new();
    let mut up = state_dir.start_up(SIMULATED_SETTINGS, &["--metrics", "off", "--json"]);
    state_dir.run_ok(&["run", "--memory", "4Gi", "--name", "json", "--", "true"]);
    let read = |line: String| -> serde_json::Value { serde_json::from_str(&line).unwrap() };
    let granted = read(up.wait_for_line("share granted"));
    assert_eq!((&granted["level"], &granted["fields"]["share"]), (&"INFO".into(), &"json".into()));
    assert_eq!((&granted["span"]["name"], &granted["span"]["kind"]), (&"request".into(), &"run".into()));
    assert_eq!(granted["span"]["uid"], 0);
    assert_eq!(read(up.wait_for_line("share released"))["fields"]["share"], "json");
    up.signal(libc::SIGINT);
    assert!(up.wait_for_exit().success());
    // Every line is JSON.
    up.remaining_lines().into_iter().for_each(|line| drop(read(line)));
}

/// A thread that does not end in time would be logged.
#[test]
fn open_connections_do_not_delay_the_end() {
    let state_dir = TestStateDir::new();
    let mut up = state_dir.start_up(SIMULATED_SETTINGS, &["--metrics", "127.0.0.1:0"]);
    let line = up.wait_for_line("metrics: http://");
    let address = line.trim_start_matches("metrics: http://").trim_end_matches("/metrics").to_string();
    up.wait_for_line("stop with Ctrl-C");
    let _scraper = TcpStream::connect(address).unwrap();
    let silent = UnixStream::connect(state_dir.path().join("daemon.sock")).unwrap();
    let mut unfinished = UnixStream::connect(state_dir.path().join("daemon.sock")).unwrap();
    unfinished.write_all(b"{\"ask\":").unwrap();
    up.signal(libc::SIGINT);
    assert!(up.wait_for_exit().success());
    assert_eq!(up.remaining_lines(), Vec::<String>::new());
    for mut stream in [silent, unfinished] {
        let mut answer = Vec::new();
        // Bytes that were not read cause a reset.
        let read = stream.read_to_end(&mut answer);
        assert!(read.is_ok() || read.is_err_and(|error| error.kind() == ErrorKind::ConnectionReset));
        assert_eq!(answer, b"", "no response: the client retries with the next daemon");
    }
}

#[test]
fn invalid_log_filter_is_refused() {
    let state_dir = TestStateDir::new();
    for arguments in [&["up", "--plain", "--metrics", "off"][..], &["node", "--node-name", "n1"]] {
        let output = state_dir.partage(arguments).env("PARTAGE_LOG", "partage=loud").output().unwrap();
        let message = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(2), "{arguments:?}: {message}");
        assert!(message.contains("PARTAGE_LOG=\"partage=loud\" is not a log filter"), "{message}");
    }
}

#[test]
fn background_daemon_logs_into_its_file() {
    let state_dir = TestStateDir::new();
    let mut run = state_dir.partage(&["run", "-q", "--memory", "4Gi", "--name", "logged", "--", "true"]);
    assert!(run.env("PARTAGE_LOG", "partage=debug").status().unwrap().success());
    let log = eventually("the share's end is logged", || {
        let log = std::fs::read_to_string(state_dir.path().join("daemon.log")).ok()?;
        log.contains("share released share=logged").then_some(log)
    });
    for part in ["daemon started", "share granted share=logged", "request{uid=0 ", "DEBUG"] {
        assert!(log.contains(part), "{part:?} is not in {log}");
    }
}

/// Returns the first line of a response, and the rest.
fn http_get(address: &str, path: &str, host: &str) -> (String, String) {
    let mut stream = TcpStream::connect(address).unwrap();
    let request = format!("GET {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n");
    stream.write_all(request.as_bytes()).unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    let (first, rest) = answer.split_once("\r\n").unwrap();
    (first.into(), rest.into())
}

#[test]
fn metrics_cover_every_gpu_and_share() {
    let state_dir = TestStateDir::new();
    let mut up = state_dir.start_up(SIMULATED_SETTINGS, &["--metrics", "127.0.0.1:0"]);
    let line = up.wait_for_line("metrics: http://");
    let address = line.trim_start_matches("metrics: http://").trim_end_matches("/metrics").to_string();
    let options = ["--memory", "4Gi", "--cores", "30", "--mode", "hard"];
    let mut greedy = state_dir.start_share("metered", &options, &[sample(), "greedy"]);
    greedy.wait_for_line("refused at ");
    // By its first refusal it has computed, and was throttled.
    let (status, text) = http_get(&address, "/metrics", &address);
    assert_eq!(status, "HTTP/1.1 200 OK");
    assert!(text.contains("content-type: application/openmetrics-text; version=1.0.0"), "{text}");
    assert!(text.ends_with("# EOF\n"), "{text}");
    let value = |name: &str, of: &str| -> Option<f64> {
        let line = text.lines().find(|line| line.starts_with(&format!("{name}{{")) && line.contains(of))?;
        line.rsplit(' ').next()?.parse().ok()
    };
    let share = |name: &str| {
        value(&format!("partage_share_{name}"), "share=\"metered\"")
            .unwrap_or_else(|| panic!("{name} is not in {text}"))
    };
    let gib = GIB as f64;
    assert_eq!(share("memory_limit_bytes"), 4.0 * gib);
    assert!(share("memory_used_bytes") > gib && share("memory_used_bytes") <= 4.0 * gib);
    assert!(share("memory_peak_bytes") > 3.0 * gib && share("memory_peak_bytes") <= 4.0 * gib);
    assert!(share("throttled_seconds_total") > 0.0 && share("gpu_seconds_total") > 0.0);
    assert!(share("refusals_total") >= 1.0 && share("processes") == 1.0);
    assert_eq!(share("bypass_suspected"), 0.0);
    assert_eq!((share("cores_guaranteed_ratio"), share("cores_ceiling_ratio")), (0.3, 0.3));
    for gpu in ["gpu=\"0\"", "gpu=\"1\""] {
        let of = |name: &str| {
            value(&format!("partage_gpu_{name}"), gpu).unwrap_or_else(|| panic!("{name} is not in {text}"))
        };
        // Memory that the driver reserves is not shared.
        assert!(of("memory_bytes") > 39.0 * gib && of("memory_bytes") < 40.0 * gib);
        assert_eq!((of("healthy"), of("unowned_processes")), (1.0, 0.0));
        assert!(of("utilization_ratio") <= 1.0 && of("memory_used_bytes") <= 40.0 * gib);
        assert!(of("memory_granted_bytes") <= 4.0 * gib && of("cores_guaranteed_ratio") <= 0.3);
        assert!(of("temperature_celsius") > 0.0 && of("power_watts") > 0.0);
    }
    assert!(text.contains("\npartage_waiting 0\n") && text.contains("simulated=\"true\""), "{text}");

    assert_eq!(http_get(&address, "/healthz", "localhost").0, "HTTP/1.1 200 OK");
    assert_eq!(http_get(&address, "/", "localhost").0, "HTTP/1.1 404 Not Found");
    // A web page whose name resolves to this address is refused.
    for path in ["/metrics", "/healthz"] {
        assert_eq!(http_get(&address, path, "evil.example:80").0, "HTTP/1.1 403 Forbidden");
    }
    // The port is in use.
    let other = TestStateDir::new();
    let (code, words) = other.run_err(&["up", "--plain", "--metrics", &address]);
    assert!(code == 1 && words.contains(&address) && words.contains("use another address"), "{words}");
    let (code, words) = other.run_err(&["up", "--plain", "--metrics", "0.0.0.0:9464"]);
    assert!(code == 1 && words.contains("can be reached from other machines"), "{words}");
    greedy.signal(libc::SIGTERM);
    assert!(greedy.wait_for_exit().success());
}

#[test]
fn shares_survive_every_end_of_up() {
    let state_dir = TestStateDir::new();
    let mut greedy: Option<BackgroundProcess> = None;
    let mut pid = 0;
    for end in [libc::SIGKILL, libc::SIGTERM, libc::SIGKILL] {
        let mut up = state_dir.start_up(SIMULATED_SETTINGS, &["--metrics", "off"]);
        let greedy = greedy.get_or_insert_with(|| {
            state_dir.start_share("outlives", &["--memory", "4Gi"], &[sample(), "greedy"])
        });
        if pid == 0 {
            pid = greedy.pid();
        } else {
            up.wait_for_line("share adopted share=outlives");
        }
        // The daemon that adopted the share has a standby.
        eventually("a standby runs", || state_dir.standby_pid());
        up.signal(end);
        let status = up.wait_for_exit();
        match end {
            libc::SIGKILL => assert_eq!(status.signal(), Some(end)),
            _ => {
                assert!(status.success(), "{status}");
                up.wait_for_line("1 share continues in the background");
            }
        }
        // Without any request another daemon takes over.
        eventually("a daemon runs", || state_dir.daemon_pid());
        let share = state_dir.find_share("outlives").unwrap();
        assert_eq!((&share["stage"], &share["pid"]), (&"running".into(), &pid.into()), "{share}");
        greedy.wait_for_line("refused at 3.5 GiB");
        assert!(
            state_dir.find_share("outlives").unwrap()["gpuShares"][0]["peakBytes"].as_u64().unwrap()
                <= 4 * GIB
        );
    }
    state_dir.run_ok(&["stop", "outlives"]);
    state_dir.wait_until_clean();
}

#[test]
fn killed_standby_is_replaced() {
    let state_dir = TestStateDir::new();
    let _share = state_dir.start_sleeper("guarded");
    for _ in 0..2 {
        let standby = eventually("a standby runs", || state_dir.standby_pid());
        signal(standby, libc::SIGKILL);
        eventually("another standby runs", || state_dir.standby_pid().filter(|pid| *pid != standby));
    }
    let daemon = eventually("a daemon runs", || state_dir.daemon_pid());
    signal(daemon, libc::SIGKILL);
    // Without any request.
    eventually("another daemon runs", || state_dir.daemon_pid().filter(|pid| *pid != daemon));
    state_dir.run_ok(&["stop", "guarded"]);
    state_dir.wait_until_clean();
}

#[test]
fn check_option_validates_settings() {
    let state_dir = TestStateDir::new();
    let check = |text: &str| {
        let file = state_dir.write_settings(text);
        let output = state_dir.output(&["up", "--check", "--settings", file.to_str().unwrap()]);
        let message = String::from_utf8([output.stdout, output.stderr].concat()).unwrap();
        (output.status.code().unwrap(), message)
    };
    let (code, message) = check("driver: simulated\nusers:\n- {applyTo: root, shares: 2, memory: 8Gi}\n");
    assert!(code == 0 && message.starts_with("the settings are valid ("), "{message}");
    for (text, what) in [
        ("driver: amd\n", "amd"),
        ("drivers: simulated\n", "drivers"),
        ("users: [{applyTo: no-such-user}]\n", "user no-such-user not found"),
        ("users: [{applyTo: root, memory: 8gb}]\n", "invalid amount of memory 8gb"),
        ("users: [{applyTo: root, shares: 0}]\n", "shares: 0 allows no shares"),
        ("reservations: [{applyTo: root, gpu: 0}]\n", "reserves nothing"),
        ("metrics: 0.0.0.0:9464\n", "can be reached from other machines"),
        ("users: [\n", "settings.yaml"),
    ] {
        let (code, message) = check(text);
        assert!(code == 1 && message.starts_with("error: ") && message.contains(what), "{text}: {message}");
    }
    // The check has no side effects.
    assert!(!state_dir.path().join("daemon.sock").exists() && state_dir.processes().is_empty());
    let (code, message) = state_dir.run_err(&["up", "--check", "--settings", "/nowhere/x.yaml"]);
    assert!(code == 1 && message.contains("cannot read /nowhere/x.yaml"), "{message}");
}

#[test]
fn started_programs_are_summarized() {
    let state_dir = TestStateDir::new();
    let sample = sample();
    let file = state_dir.path().join("start.yaml");
    let text = format!(
        "shares:\n\
         - {{name: sum-trainer, memory: 4Gi, cores: 50, command: [{sample}, trainer, --memory, 2Gi]}}\n\
         - {{name: sum-greedy, memory: 2Gi, cores: 30, mode: hard, command: [{sample}, greedy]}}\n\
         - {{name: sum-huge, memory: 90Gi, command: [{sample}, greedy]}}\n"
    );
    std::fs::write(&file, text).unwrap();
    let mut up = state_dir.start_up(
        SIMULATED_SETTINGS,
        &["--metrics", "off", "--start", file.to_str().unwrap(), "--for", "20s"],
    );
    up.read_until(|line| line.starts_with("sum-huge: error: "));
    up.read_until(|line| line.starts_with("sum-greedy: refused at 1."));
    let head = up.wait_for_line("PEAK MEMORY");
    let columns: Vec<&str> = head.split("  ").map(str::trim).filter(|column| !column.is_empty()).collect();
    assert_eq!(columns, ["SHARE", "REQUESTED", "USED", "PEAK MEMORY", "REFUSED", "THROTTLED"]);
    let trainer = up.wait_for_line("sum-trainer");
    assert!(trainer.contains("4Gi, 50 % of a GPU") && trainer.contains("none"), "{trainer}");
    assert!(!trainer.contains(" 0.0 % of GPU"), "{trainer}");
    let greedy = up.wait_for_line("sum-greedy");
    assert!(greedy.contains("above the limit") && greedy.contains("of 2 GiB"), "{greedy}");
    let huge = up.wait_for_line("sum-huge");
    assert!(huge.contains("no share"), "{huge}");
    assert!(up.wait_for_exit().success());
    state_dir.wait_until_clean();
    assert_eq!(state_dir.processes(), Vec::<u32>::new());
}
