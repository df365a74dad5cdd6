//! Resizing a running share.

use super::support::*;
use std::io::Write;

#[test]
fn running_program_follows_resizes() {
    let state_dir = TestStateDir::new();
    let mut greedy = state_dir.start_share("greedy", &["--memory", "2Gi"], &[sample(), "greedy"]);
    greedy.wait_for_line("refused at 1.5 GiB");
    state_dir.run_ok(&["resize", "greedy", "--memory", "3Gi"]);
    greedy.wait_for_line("refused at 2.5 GiB");
    // It has freed half of its memory; what it still holds is more than 1 GiB.
    let (code, message) = state_dir.run_err(&["resize", "greedy", "--memory", "600Mi"]);
    assert!(code == 1 && message.contains("now, which is more than 600 MiB"), "{message}");
    assert!(message.contains("\n  try: free memory in the program first, or use --memory "), "{message}");
    assert_eq!(state_dir.find_share("greedy").unwrap()["gpuShares"][0]["memoryBytes"], 3 * GIB);
    // It allocates more every few seconds, and then frees half of it: at some point less is possible.
    let less = ["resize", "greedy", "--memory", "2Gi"];
    eventually("it holds less than 2 GiB", || state_dir.output(&less).status.success().then_some(()));
    greedy.wait_for_line("refused at 1.5 GiB");
    let gpu_share = state_dir.find_share("greedy").unwrap()["gpuShares"][0].clone();
    assert!(gpu_share["usedBytes"].as_u64().unwrap() <= 2 * GIB, "{gpu_share}");
    greedy.signal(libc::SIGINT);
    let last = greedy.wait_for_line("ended after");
    assert!(last.contains("held at most 2.5 GiB"), "{last}");
    state_dir.wait_until_clean();
}

#[test]
fn programs_see_the_resized_total() {
    let state_dir = TestStateDir::new();
    let mut shell = state_dir.start_share("shell", &["--memory", "2Gi", "--cores", "20"], &["sh"]);
    // It allocates too much, and prints the total.
    let total = |shell: &mut BackgroundProcess| {
        let line = format!("{} trainer --memory 39Gi 2>&1\n", sample());
        shell.input.as_mut().unwrap().write_all(line.as_bytes()).unwrap();
        shell.wait_for_line("out of memory")
    };
    assert!(total(&mut shell).contains(" of 2.0 GiB only "));
    let output = state_dir.run_ok(&["resize", "shell", "--memory", "6Gi", "--cores", "50"]);
    assert_eq!(output, "shell: memory 2 GiB → 6 GiB, cores 20 % ≤100 % → 50 % ≤100 %\n");
    assert!(total(&mut shell).contains(" of 6.0 GiB only "));
    state_dir.run_ok(&["resize", "shell", "--memory-percent", "25"]);
    assert!(total(&mut shell).contains(" of 9.8 GiB only "));
    shell.input.as_mut().unwrap().write_all(b"exit 0\n").unwrap();
    assert!(shell.wait_for_exit().success());
    state_dir.wait_until_clean();
}

#[test]
fn resize_that_does_not_fit_is_refused_with_the_reason() {
    let state_dir = TestStateDir::new();
    let _up = state_dir.start_up("driver: simulated\nmetrics: off\nsimulated:\n  gpus: 1\n", &[]);
    let (_a, _b) = (state_dir.start_sleeper("first"), state_dir.start_sleeper("second"));
    let before = state_dir.find_share("first").unwrap()["gpuShares"].clone();
    for (change, code, expected) in [
        (&["--memory", "90Gi"][..], 1, "39.39 GiB"),
        (&["--memory", "38Gi"], 1, "35.39 GiB"),
        (&["--cores", "80"], 1, "70 %"),
        (&["--memory", "5gb"], 2, "write 5Gi"),
        (&["--cores", "0"], 2, "0"),
        (&["--memory", "1Gi", "--memory-percent", "5"], 2, "cannot be used with"),
        (&[], 2, "nothing to change"),
    ] {
        let (was, message) = state_dir.run_err(&[&["resize", "first"], change].concat());
        assert!(
            was == code && message.starts_with("error: ") && message.contains(expected),
            "{change:?}: {was} {message}"
        );
    }
    assert_eq!(state_dir.find_share("first").unwrap()["gpuShares"], before);
    state_dir.run_ok(&["resize", "first", "--memory", "35Gi", "--cores", "70"]);
    state_dir.run_ok(&["stop", "--all"]);
    state_dir.wait_until_clean();
}
