//! Another size for a share that runs.

use super::support::*;
use std::io::Write;

#[test]
fn a_running_program_gets_more_and_less() {
    let home = Home::new();
    let mut greedy = home.share("greedy", &["--memory", "2Gi"], &[sample(), "greedy"]);
    greedy.says("refused at 1.5 GiB");
    home.fine(&["resize", "greedy", "--memory", "3Gi"]);
    greedy.says("refused at 2.5 GiB");
    // Half of it was given back; what is held now is more than 1 GiB.
    let (code, words) = home.refused(&["resize", "greedy", "--memory", "600Mi"]);
    assert!(code == 1 && words.contains("right now, which is more than 600 MiB"), "{words}");
    assert!(words.contains("\n  try: free memory in the program first, or use --memory "), "{words}");
    assert_eq!(home.find("greedy").unwrap()["parts"][0]["memoryBytes"], 3 * GIB);
    // It takes more every few seconds, and gives half of it back: there is a moment for less.
    let less = ["resize", "greedy", "--memory", "2Gi"];
    eventually("it holds less than 2 GiB", || home.output(&less).status.success().then_some(()));
    greedy.says("refused at 1.5 GiB");
    let part = home.find("greedy").unwrap()["parts"][0].clone();
    assert!(part["usedBytes"].as_u64().unwrap() <= 2 * GIB, "{part}");
    greedy.signal(libc::SIGINT);
    let last = greedy.says("ended after");
    assert!(last.contains("held at most 2.5 GiB"), "{last}");
    home.nothing_left();
}

#[test]
fn programs_see_the_new_total() {
    let home = Home::new();
    let mut shell = home.share("shell", &["--memory", "2Gi", "--cores", "20"], &["sh"]);
    // It wants too much, and says of how much.
    let total = |shell: &mut Running| {
        let line = format!("{} trainer --memory 39Gi 2>&1\n", sample());
        shell.input.as_mut().unwrap().write_all(line.as_bytes()).unwrap();
        shell.says("out of memory")
    };
    assert!(total(&mut shell).contains(" of 2.0 GiB there are "));
    let said = home.fine(&["resize", "shell", "--memory", "6Gi", "--cores", "50"]);
    assert_eq!(said, "shell: memory 2 GiB → 6 GiB, cores 20 % ≤100 % → 50 % ≤100 %\n");
    assert!(total(&mut shell).contains(" of 6.0 GiB there are "));
    home.fine(&["resize", "shell", "--memory-percent", "25"]);
    assert!(total(&mut shell).contains(" of 9.8 GiB there are "));
    shell.input.as_mut().unwrap().write_all(b"exit 0\n").unwrap();
    assert!(shell.ended().success());
    home.nothing_left();
}

#[test]
fn what_does_not_fit_is_refused_in_words() {
    let home = Home::new();
    let _up = home.up("driver: simulated\nmetrics: off\nsimulated:\n  gpus: 1\n", &[]);
    let (_a, _b) = (home.sleeper("first"), home.sleeper("second"));
    let before = home.find("first").unwrap()["parts"].clone();
    for (change, code, words) in [
        (&["--memory", "90Gi"][..], 1, "39.39 GiB"),
        (&["--memory", "38Gi"], 1, "35.39 GiB"),
        (&["--cores", "80"], 1, "70 %"),
        (&["--memory", "5gb"], 2, "write 5Gi"),
        (&["--cores", "0"], 2, "0"),
        (&["--memory", "1Gi", "--memory-percent", "5"], 2, "cannot be used with"),
        (&[], 2, "nothing to change"),
    ] {
        let (was, said) = home.refused(&[&["resize", "first"], change].concat());
        assert!(
            was == code && said.starts_with("error: ") && said.contains(words),
            "{change:?}: {was} {said}"
        );
    }
    assert_eq!(home.find("first").unwrap()["parts"], before);
    home.fine(&["resize", "first", "--memory", "35Gi", "--cores", "70"]);
    home.fine(&["stop", "--all"]);
    home.nothing_left();
}
