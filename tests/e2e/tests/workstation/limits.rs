//! Limits hold, whatever a command does with its processes, and each share has its own.

use super::support::*;
use std::fs;

/// One GPU, so that shares are on the same one.
const ONE_GPU: &str = "driver: simulated\nmetrics: off\nsimulated:\n  gpus: 1\n";

#[test]
fn greedy_share_is_refused_and_its_neighbor_is_not() {
    let state_dir = TestStateDir::new();
    let _up = state_dir.start_up(ONE_GPU, &[]);
    let trainer = [sample(), "trainer", "--memory", "30Gi", "--every", "0.3"];
    let mut trainer = state_dir.start_share("trainer", &["--memory", "32Gi", "--cores", "30"], &trainer);
    trainer.wait_for_line("step ");
    let mut greedy =
        state_dir.start_share("greedy", &["--memory", "4Gi", "--cores", "30"], &[sample(), "greedy"]);
    greedy.wait_for_line("refused at 3.5 GiB: out of memory");
    trainer.wait_for_line("step ");
    let gpu_share = |name: &str| state_dir.find_share(name).unwrap()["gpuShares"][0].clone();
    let (own, other) = (gpu_share("greedy"), gpu_share("trainer"));
    assert!(own["refusals"].as_u64().unwrap() >= 1, "{own}");
    assert!((7 * GIB / 2..=4 * GIB).contains(&own["peakBytes"].as_u64().unwrap()), "{own}");
    assert_eq!(other["refusals"], 0);
    assert!((30 * GIB..=32 * GIB).contains(&other["usedBytes"].as_u64().unwrap()), "{other}");
    assert_eq!(own["uuid"], other["uuid"]);
    // The driver's own count is not more than both limits.
    let top = state_dir.run_json(&["top", "-o", "json", "--interval", "50ms"]);
    assert!(top["gpus"][0]["usedMemoryBytes"].as_u64().unwrap() <= 36 * GIB, "{top}");
    for running in [&mut trainer, &mut greedy] {
        running.signal(libc::SIGTERM);
        running.wait_for_line("ended after");
        assert!(running.wait_for_exit().success());
    }
    state_dir.wait_until_clean();
}

#[test]
fn oversubscribed_share_allocates_above_its_limit_when_allowed() {
    let state_dir = TestStateDir::new();
    let up = state_dir.start_up(ONE_GPU, &[]);
    let large = [sample(), "trainer", "--memory", "3Gi", "--seconds", "0.2"];
    let run = |options: &[&str]| {
        state_dir.output(&[&["run", "-q", "--memory", "2Gi"], options, &["--"], &large].concat())
    };
    let refused = run(&[]);
    let output = String::from_utf8(refused.stderr).unwrap();
    assert!(refused.status.code() == Some(1) && output.contains("out of memory"), "{output}");
    let allowed = run(&["--oversubscribe"]);
    let output = String::from_utf8(allowed.stdout).unwrap();
    assert!(allowed.status.success() && output.contains("the model takes 3.0 GiB"), "{output}");

    // The limit on the GPU itself holds: memory above it is not on the GPU.
    let trainer = [sample(), "trainer", "--memory", "3Gi", "--every", "0.1"];
    let mut trainer = state_dir.start_share("beyond", &["--memory", "2Gi", "--oversubscribe"], &trainer);
    trainer.wait_for_line("step ");
    let share = state_dir.find_share("beyond").unwrap();
    assert_eq!(share["oversubscribe"], true, "{share}");
    assert!(share["gpuShares"][0]["usedBytes"].as_u64().unwrap() <= 2 * GIB, "{share}");
    let top = state_dir.run_json(&["top", "-o", "json", "--interval", "50ms"]);
    assert!(top["gpus"][0]["usedMemoryBytes"].as_u64().unwrap() <= 2 * GIB, "{top}");
    assert!(state_dir.run_ok(&["ps"]).contains(" / 2 GiB + host "));
    assert!(
        state_dir
            .run_ok(&["inspect", "beyond"])
            .contains("oversubscribed: memory above the limit is in host memory")
    );
    trainer.signal(libc::SIGTERM);
    assert!(trainer.wait_for_exit().success());
    state_dir.wait_until_clean();
    drop(up);

    let other = TestStateDir::new();
    let _up = other.start_up(&format!("{ONE_GPU}oversubscribe: refused\n"), &[]);
    let (code, message) = other.run_err(&["run", "--memory", "2Gi", "--oversubscribe", "--", "true"]);
    assert!(code == 125 && message.contains("oversubscription is not allowed on this machine"), "{message}");
    other.wait_until_clean();
}

#[test]
fn two_halves_of_a_gpu_can_both_be_filled() {
    let state_dir = TestStateDir::new();
    let _up = state_dir.start_up(ONE_GPU, &[]);
    let top = state_dir.run_json(&["top", "-o", "json", "--interval", "50ms"]);
    // Minus the size of a context, and some reserve.
    let model = ((top["gpus"][0]["memoryBytes"].as_u64().unwrap() / 2) >> 20) - 450;
    let model = format!("{model}Mi");
    let mut halves = ["left", "right"].map(|name| {
        let trainer = [sample(), "trainer", "--memory", &model, "--every", "0.3"];
        state_dir.start_share(name, &["--memory-percent", "50", "--cores", "50"], &trainer)
    });
    for half in &mut halves {
        half.wait_for_line("the model takes");
    }
    for half in &mut halves {
        half.wait_for_line("step ");
    }
    for name in ["left", "right"] {
        assert_eq!(state_dir.find_share(name).unwrap()["gpuShares"][0]["refusals"], 0, "{name}");
    }
    state_dir.run_ok(&["stop", "--all"]);
    state_dir.wait_until_clean();
}

#[test]
fn limits_hold_for_every_way_to_start_a_program() {
    if !is_root() {
        return skip_or_fail(&"su and a mount namespace need root");
    }
    let state_dir = TestStateDir::new();
    // In a directory where every user can start it.
    let program = state_dir.path().join("too-large");
    install_program(sample(), &program);
    let program = program.to_str().unwrap();
    let large = format!("{program} trainer --memory 1Gi --seconds 0.1");
    let ways: [(&str, Vec<String>); 7] = [
        ("plain", large.split(' ').map(String::from).collect()),
        ("cleared", format!("env -i {large}").split(' ').map(String::from).collect()),
        ("login", vec!["sh".into(), "-l".into(), "-c".into(), large.clone()]),
        ("su", vec!["su".into(), "-s".into(), "/bin/sh".into(), "-c".into(), large.clone(), "nobody".into()]),
        (
            "su-login",
            vec!["su".into(), "-".into(), "-s".into(), "/bin/sh".into(), "-c".into(), large.clone()],
        ),
        ("grandchild", vec!["sh".into(), "-c".into(), format!("sh -c 'sh -c \"{large}\"; true'; true")]),
        (
            "library",
            vec![
                "env".into(),
                "LD_LIBRARY_PATH=/nowhere".into(),
                "CUDA_VISIBLE_DEVICES=0".into(),
                "sh".into(),
                "-c".into(),
                large.clone(),
            ],
        ),
    ];
    for (name, command) in ways {
        let words = ["run", "-q", "--memory", "1Gi", "--name", name, "--"].into_iter();
        let words: Vec<&str> = words.chain(command.iter().map(String::as_str)).collect();
        let output = state_dir.output(&words);
        let message = String::from_utf8(output.stderr.clone()).unwrap();
        assert!(
            message.contains("out of memory") && message.contains(" of 1.0 GiB only "),
            "{name}: {output:?}"
        );
    }
    state_dir.wait_until_clean();
}

#[test]
fn daemonized_process_keeps_the_limits_and_the_share() {
    let state_dir = TestStateDir::new();
    let out = state_dir.path().join("out");
    // Forked twice, in a session of its own, without any open file of its command.
    let script =
        format!("(setsid {} greedy > {} 2>&1 < /dev/null &) & wait; echo left", sample(), out.display());
    let left =
        state_dir.run_ok(&["run", "-q", "--memory", "1Gi", "--name", "daemon", "--", "sh", "-c", &script]);
    assert_eq!(left, "left\n");
    let found = || fs::read_to_string(&out).unwrap_or_default();
    eventually("the daemon is refused", || found().contains("refused at 0.5 GiB").then_some(()));
    let share = state_dir.find_share("daemon").unwrap();
    assert_eq!((&share["stage"], &share["members"]), (&"lingering".into(), &1.into()));
    assert!(share["gpuShares"][0]["usedBytes"].as_u64().unwrap() <= GIB, "{share}");
    // Its name and its memory are in use for as long as it runs.
    let (code, message) = state_dir.run_err(&["run", "--memory", "1Gi", "--name", "daemon", "--", "true"]);
    assert!(code == 125 && message.contains("share daemon already exists"), "{message}");
    for pid in state_dir.share_processes() {
        signal(pid, libc::SIGTERM);
    }
    state_dir.wait_until_clean();
    eventually("the share is released", || state_dir.shares().is_empty().then_some(()));
}

#[test]
fn gpus_outside_the_share_are_not_visible() {
    let state_dir = TestStateDir::new();
    let greedy = |prefix: &[&str], options: &[&str]| {
        let sample = [sample(), "greedy", "--seconds", "0.2", "--gpu"];
        state_dir
            .output(&[&["run", "-q"], options, &["--memory", "1Gi", "--"], prefix, &sample, &["1"]].concat())
    };
    let everything = ["env", "CUDA_VISIBLE_DEVICES=0,1"];
    let ways: &[&[&str]] = if is_root() { &[&[], &everything, &["env", "-i"]] } else { &[&[], &everything] };
    for prefix in ways {
        let output = greedy(prefix, &[]);
        let message = String::from_utf8(output.stderr).unwrap();
        assert!(
            output.status.code() == Some(1) && message.contains("invalid device ordinal"),
            "{prefix:?}: {message}"
        );
    }
    // A share with both GPUs sees both.
    let output = greedy(&[], &["--gpus", "2"]);
    assert!(output.status.success(), "{output:?}");
    state_dir.wait_until_clean();
}

#[test]
fn hard_share_is_capped_on_an_idle_gpu() {
    let state_dir = TestStateDir::new();
    let percent = |options: &[&str]| {
        let sample = [sample(), "trainer", "--memory", "512Mi", "--seconds", "3"];
        let output =
            state_dir.run_ok(&[&["run", "-q", "--memory", "2Gi"], options, &["--"], &sample].concat());
        let last = output.lines().last().unwrap();
        let words: Vec<&str> = last.split_whitespace().collect();
        let at = words.iter().position(|word| *word == "%").unwrap_or_else(|| panic!("{output}"));
        words[at - 1].parse::<u32>().unwrap()
    };
    // On a busy machine it may have had no CPU time: one of several runs must be good enough.
    let most = |options: &[&str], enough: u32| {
        let mut most = 0;
        for _ in 0..5 {
            most = most.max(percent(options));
            if most > enough {
                break;
            }
        }
        most
    };
    let hard = most(&["--cores", "30", "--mode", "hard"], 15);
    assert!((15..=45).contains(&hard), "{hard} %");
    let lent = most(&["--cores", "30"], 60);
    assert!(lent > 60, "{lent} %");
    state_dir.wait_until_clean();
}

/// The limits of a share are in a file that its processes can only read.
#[test]
fn limits_are_read_only_inside() {
    let state_dir = TestStateDir::new();
    let limits = state_dir.path().join("region/limits");
    let script =
        format!("test -r {0} && ! (echo x >> {0}) 2>/dev/null && ! rm -f {0} 2>/dev/null", limits.display());
    let (code, message) = {
        let output = state_dir.output(&["run", "-q", "--memory", "1Gi", "--", "sh", "-c", &script]);
        (output.status.code(), String::from_utf8(output.stderr).unwrap())
    };
    assert_eq!(code, Some(0), "{message}");
    state_dir.wait_until_clean();
}
