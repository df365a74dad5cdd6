//! `partage up`: its view, its lines, its metrics, and that shares outlive it.

use crate::support::{GIB, Home, Running, Terminal, eventually, sample, signal};
use std::io::{ErrorKind, Read, Write};
use std::net::TcpStream;
use std::os::unix::net::UnixStream;
use std::os::unix::process::ExitStatusExt;

const SIMULATED: &str = "driver: simulated\n";

#[test]
fn the_view_is_live_and_ends_with_ctrl_c() {
    let home = Home::new();
    let settings = home.settings(SIMULATED);
    let arguments = ["up", "--settings", settings.to_str().unwrap(), "--metrics", "off"];
    let mut up = Terminal::start(home.partage(&arguments), 30, 110);
    let before = up.before.local_modes;
    // One read may bring both.
    up.until(|shown| {
        shown.contains("2 x NVIDIA A100-SXM4-40GB are simulated") && shown.contains("\u{1b}[?1049h")
    });
    let mut share = home.share("view", &["--memory", "4Gi", "--cores", "30"], &["sleep", "1000"]);
    // In the table, and below it as news.
    up.shows("share granted share=view grant=4 GiB and 30 % of GPU ");
    assert_ne!(up.modes().local_modes, before);
    up.strike("m");
    up.shows("sorted by memory");
    up.strike("\u{3}");
    let last = up.shows("1 share goes on, kept in the background");
    assert!(last.contains("\u{1b}[?1049l"), "{last:?}");
    assert!(up.ended().success());
    assert_eq!(up.modes().local_modes, before);
    assert!(share.goes_on() && home.find("view").is_some());
    home.fine(&["stop", "view"]);
    home.nothing_left();
}

#[test]
fn lines_say_what_happens() {
    let home = Home::new();
    let mut up = home.up(SIMULATED, &["--metrics", "127.0.0.1:0"]);
    up.says("no NVIDIA driver in use: 2 x NVIDIA A100-SXM4-40GB are simulated");
    up.says("metrics: http://127.0.0.1:");
    up.says("Ctrl-C ends this one");
    home.fine(&["run", "--memory", "4Gi", "--cores", "30", "--name", "lines", "--", "true"]);
    up.says("share granted share=lines grant=4 GiB and 30 % of GPU 0 user=root");
    up.says("share ended share=lines");
    let (code, words) = home.refused(&["up", "--metrics", "off"]);
    let expected = format!("error: partage up already runs here, as process {}: ", up.pid());
    assert!(code == 1 && words.starts_with(&expected), "{words}");
    up.signal(libc::SIGINT);
    assert!(up.ended().success());
    assert_eq!(up.rest(), Vec::<String>::new());
    assert_eq!(home.processes(), Vec::<u32>::new());
}

#[test]
fn json_lines_carry_fields_and_spans() {
    let home = Home::new();
    let mut up = home.up(SIMULATED, &["--metrics", "off", "--json"]);
    home.fine(&["run", "--memory", "4Gi", "--name", "json", "--", "true"]);
    let read = |line: String| -> serde_json::Value { serde_json::from_str(&line).unwrap() };
    let granted = read(up.says("share granted"));
    assert_eq!((&granted["level"], &granted["fields"]["share"]), (&"INFO".into(), &"json".into()));
    assert_eq!((&granted["span"]["name"], &granted["span"]["kind"]), (&"request".into(), &"run".into()));
    assert_eq!(granted["span"]["uid"], 0);
    assert_eq!(read(up.says("share ended"))["fields"]["share"], "json");
    up.signal(libc::SIGINT);
    assert!(up.ended().success());
    // Nothing else is between them.
    up.rest().into_iter().for_each(|line| drop(read(line)));
}

/// A thread that does not end in time would be logged.
#[test]
fn open_connections_do_not_delay_the_end() {
    let home = Home::new();
    let mut up = home.up(SIMULATED, &["--metrics", "127.0.0.1:0"]);
    let line = up.says("metrics: http://");
    let address = line.trim_start_matches("metrics: http://").trim_end_matches("/metrics").to_string();
    up.says("Ctrl-C ends this one");
    let _scraper = TcpStream::connect(address).unwrap();
    let silent = UnixStream::connect(home.path().join("keeper.sock")).unwrap();
    let mut unfinished = UnixStream::connect(home.path().join("keeper.sock")).unwrap();
    unfinished.write_all(b"{\"ask\":").unwrap();
    up.signal(libc::SIGINT);
    assert!(up.ended().success());
    assert_eq!(up.rest(), Vec::<String>::new());
    for mut stream in [silent, unfinished] {
        let mut answer = Vec::new();
        // Bytes that were not read are reported as a reset.
        let read = stream.read_to_end(&mut answer);
        assert!(read.is_ok() || read.is_err_and(|error| error.kind() == ErrorKind::ConnectionReset));
        assert_eq!(answer, b"", "no answer: the caller asks the next daemon");
    }
}

#[test]
fn wrong_log_filter_is_refused() {
    let home = Home::new();
    for arguments in [&["up", "--plain", "--metrics", "off"][..], &["node", "--node-name", "n1"]] {
        let output = home.partage(arguments).env("PARTAGE_LOG", "partage=loud").output().unwrap();
        let words = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(2), "{arguments:?}: {words}");
        assert!(words.contains("PARTAGE_LOG=\"partage=loud\" is not a log filter"), "{words}");
    }
}

#[test]
fn background_daemon_logs_into_its_file() {
    let home = Home::new();
    let mut run = home.partage(&["run", "-q", "--memory", "4Gi", "--name", "logged", "--", "true"]);
    assert!(run.env("PARTAGE_LOG", "partage=debug").status().unwrap().success());
    let log = eventually("the share's end is logged", || {
        let log = std::fs::read_to_string(home.path().join("keeper.log")).ok()?;
        log.contains("share ended share=logged").then_some(log)
    });
    for part in ["daemon started", "share granted share=logged", "request{uid=0 ", "DEBUG"] {
        assert!(log.contains(part), "{part:?} is not in {log}");
    }
}

/// An answer's first line, and the rest.
fn get(address: &str, path: &str, host: &str) -> (String, String) {
    let mut stream = TcpStream::connect(address).unwrap();
    let request = format!("GET {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n");
    stream.write_all(request.as_bytes()).unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    let (first, rest) = answer.split_once("\r\n").unwrap();
    (first.into(), rest.into())
}

#[test]
fn metrics_tell_of_every_gpu_and_share() {
    let home = Home::new();
    let mut up = home.up(SIMULATED, &["--metrics", "127.0.0.1:0"]);
    let line = up.says("metrics: http://");
    let address = line.trim_start_matches("metrics: http://").trim_end_matches("/metrics").to_string();
    let options = ["--memory", "4Gi", "--cores", "30", "--mode", "hard"];
    let mut greedy = home.share("metered", &options, &[sample(), "greedy"]);
    greedy.says("refused at ");
    // Refused for the first time, it has computed before and been kept waiting.
    let (status, text) = get(&address, "/metrics", &address);
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
    assert_eq!((share("cores_promised_ratio"), share("cores_ceiling_ratio")), (0.3, 0.3));
    for gpu in ["gpu=\"0\"", "gpu=\"1\""] {
        let of = |name: &str| {
            value(&format!("partage_gpu_{name}"), gpu).unwrap_or_else(|| panic!("{name} is not in {text}"))
        };
        // What the driver keeps for itself is not shared.
        assert!(of("memory_bytes") > 39.0 * gib && of("memory_bytes") < 40.0 * gib);
        assert_eq!((of("healthy"), of("strangers")), (1.0, 0.0));
        assert!(of("utilisation_ratio") <= 1.0 && of("memory_used_bytes") <= 40.0 * gib);
        assert!(of("memory_promised_bytes") <= 4.0 * gib && of("cores_promised_ratio") <= 0.3);
        assert!(of("temperature_celsius") > 0.0 && of("power_watts") > 0.0);
    }
    assert!(text.contains("\npartage_waiting 0\n") && text.contains("simulated=\"true\""), "{text}");

    assert_eq!(get(&address, "/healthz", "localhost").0, "HTTP/1.1 200 OK");
    assert_eq!(get(&address, "/", "localhost").0, "HTTP/1.1 404 Not Found");
    // A page of the internet that points its name here is not answered.
    for path in ["/metrics", "/healthz"] {
        assert_eq!(get(&address, path, "evil.example:80").0, "HTTP/1.1 403 Forbidden");
    }
    // The port is taken.
    let other = Home::new();
    let (code, words) = other.refused(&["up", "--plain", "--metrics", &address]);
    assert!(code == 1 && words.contains(&address) && words.contains("use another address"), "{words}");
    let (code, words) = other.refused(&["up", "--plain", "--metrics", "0.0.0.0:9464"]);
    assert!(code == 1 && words.contains("can be reached from other machines"), "{words}");
    greedy.signal(libc::SIGTERM);
    assert!(greedy.ended().success());
}

#[test]
fn shares_outlive_it_however_it_ends() {
    let home = Home::new();
    let mut greedy: Option<Running> = None;
    let mut pid = 0;
    for end in [libc::SIGKILL, libc::SIGTERM, libc::SIGKILL] {
        let mut up = home.up(SIMULATED, &["--metrics", "off"]);
        let greedy =
            greedy.get_or_insert_with(|| home.share("outlives", &["--memory", "4Gi"], &[sample(), "greedy"]));
        if pid == 0 {
            pid = greedy.pid();
        } else {
            up.says("share adopted share=outlives");
        }
        // Whoever took the share up has somebody who stands by.
        eventually("somebody stands by", || home.standby());
        up.signal(end);
        let status = up.ended();
        match end {
            libc::SIGKILL => assert_eq!(status.signal(), Some(end)),
            _ => {
                assert!(status.success(), "{status}");
                up.says("1 share goes on, kept in the background");
            }
        }
        // Nobody asks: it is kept all the same.
        eventually("somebody keeps", || home.keeper());
        let share = home.find("outlives").unwrap();
        assert_eq!((&share["stage"], &share["pid"]), (&"running".into(), &pid.into()), "{share}");
        greedy.says("refused at 3.5 GiB");
        assert!(home.find("outlives").unwrap()["parts"][0]["peakBytes"].as_u64().unwrap() <= 4 * GIB);
    }
    home.fine(&["stop", "outlives"]);
    home.nothing_left();
}

#[test]
fn one_who_stands_by_and_is_killed_is_replaced() {
    let home = Home::new();
    let _share = home.sleeper("guarded");
    for _ in 0..2 {
        let standby = eventually("somebody stands by", || home.standby());
        signal(standby, libc::SIGKILL);
        eventually("another stands by", || home.standby().filter(|pid| *pid != standby));
    }
    let keeper = eventually("somebody keeps", || home.keeper());
    signal(keeper, libc::SIGKILL);
    // Without anybody asking.
    eventually("another keeps", || home.keeper().filter(|pid| *pid != keeper));
    home.fine(&["stop", "guarded"]);
    home.nothing_left();
}

#[test]
fn settings_are_checked() {
    let home = Home::new();
    let check = |text: &str| {
        let file = home.settings(text);
        let output = home.output(&["up", "--check", "--settings", file.to_str().unwrap()]);
        let words = String::from_utf8([output.stdout, output.stderr].concat()).unwrap();
        (output.status.code().unwrap(), words)
    };
    let (code, words) = check("driver: simulated\nusers:\n- {who: root, shares: 2, memory: 8Gi}\n");
    assert!(code == 0 && words.starts_with("the settings are right ("), "{words}");
    for (text, what) in [
        ("driver: amd\n", "amd"),
        ("drivers: simulated\n", "drivers"),
        ("users: [{who: nobody-like-that}]\n", "there is no user nobody-like-that"),
        ("users: [{who: root, memory: 8gb}]\n", "8gb is no amount of memory"),
        ("users: [{who: root, shares: 0}]\n", "shares: 0 lets nobody run anything"),
        ("reservations: [{for: root, gpu: 0}]\n", "keeps nothing"),
        ("metrics: 0.0.0.0:9464\n", "can be reached from other machines"),
        ("users: [\n", "settings.yaml"),
    ] {
        let (code, words) = check(text);
        assert!(code == 1 && words.starts_with("error: ") && words.contains(what), "{text}: {words}");
    }
    // It did nothing.
    assert!(!home.path().join("keeper.sock").exists() && home.processes().is_empty());
    let (code, words) = home.refused(&["up", "--check", "--settings", "/nowhere/x.yaml"]);
    assert!(code == 1 && words.contains("/nowhere/x.yaml: cannot be read"), "{words}");
}

#[test]
fn programs_are_started_and_summed_up() {
    let home = Home::new();
    let sample = sample();
    let file = home.path().join("start.yaml");
    let text = format!(
        "shares:\n\
         - {{name: sum-trainer, memory: 4Gi, cores: 50, command: [{sample}, trainer, --memory, 2Gi]}}\n\
         - {{name: sum-greedy, memory: 2Gi, cores: 30, mode: hard, command: [{sample}, greedy]}}\n\
         - {{name: sum-huge, memory: 90Gi, command: [{sample}, greedy]}}\n"
    );
    std::fs::write(&file, text).unwrap();
    let mut up = home.up(SIMULATED, &["--metrics", "off", "--start", file.to_str().unwrap(), "--for", "20s"]);
    up.until(|line| line.starts_with("sum-huge: error: "));
    up.until(|line| line.starts_with("sum-greedy: refused at 1."));
    let head = up.says("memory at most");
    let columns: Vec<&str> = head.split("  ").map(str::trim).filter(|column| !column.is_empty()).collect();
    assert_eq!(columns, ["share", "asked", "got", "memory at most", "refused", "waited"]);
    let trainer = up.says("sum-trainer");
    assert!(trainer.contains("4Gi, 50 % of a GPU") && trainer.contains("nothing"), "{trainer}");
    assert!(!trainer.contains(" 0.0 % of GPU"), "{trainer}");
    let greedy = up.says("sum-greedy");
    assert!(greedy.contains("by its own limit") && greedy.contains("of 2 GiB"), "{greedy}");
    let huge = up.says("sum-huge");
    assert!(huge.contains("no share"), "{huge}");
    assert!(up.ended().success());
    home.nothing_left();
    assert_eq!(home.processes(), Vec::<u32>::new());
}
