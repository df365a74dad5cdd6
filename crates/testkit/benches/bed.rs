//! How long a bed takes to come and to go, and what it weighs. `make bench` prints the table of `docs/benchmarks.md`.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::print_stdout)]

use partage_testkit::bed::{Bed, Cgroups, NodeProfile, Profile};
use std::time::{Duration, Instant};

const ROUNDS: usize = 5;

/// One bed: up, what its components weigh, first pod, down.
struct Measured {
    up: Duration,
    mebibytes: u64,
    pod: Option<Duration>,
    down: Duration,
}

fn measure(profile: Profile) -> Measured {
    let with_nodes = !profile.is_control_plane_only();
    let start = Instant::now();
    let bed = Bed::start(profile).expect("a bed comes up: make binaries, and be root");
    let up = start.elapsed();
    let mebibytes = bed.components().map(|component| component.resident_bytes()).sum::<u64>() >> 20;
    let pod = with_nodes.then(|| {
        let start = Instant::now();
        let image = "--image=localhost/busybox:bed";
        bed.kubectl(&["run", "one", image, "--image-pull-policy=Never", "--", "sleep", "1000"]).unwrap();
        bed.kubectl(&["wait", "--for=condition=Ready", "pod/one", "--timeout=60s"]).unwrap();
        start.elapsed()
    });
    let start = Instant::now();
    drop(bed);
    Measured { up, mebibytes, pod, down: start.elapsed() }
}

fn median(mut times: Vec<Duration>) -> f64 {
    times.sort();
    times[times.len() / 2].as_secs_f64()
}

fn main() {
    let v2 = || Profile::control_plane().node(NodeProfile::new("node1").cgroups(Cgroups::V2));
    let profiles: [(&str, &dyn Fn() -> Profile); 5] = [
        ("control plane only", &Profile::control_plane),
        ("one node", &Profile::one_node),
        ("one node, cgroup v2", &v2),
        ("two nodes", &|| Profile::nodes(2)),
        ("three nodes", &|| Profile::nodes(3)),
    ];
    println!("| bed | ready, s: median (worst) | resident, MiB | first pod, s | gone, s: median (worst) |");
    println!("|---|---|---|---|---|");
    for (name, profile) in profiles {
        let rounds: Vec<_> = (0..ROUNDS).map(|_| measure(profile())).collect();
        let all = |which: fn(&Measured) -> Duration| rounds.iter().map(which).collect::<Vec<_>>();
        let worst = |which: fn(&Measured) -> Duration| rounds.iter().map(which).max().unwrap().as_secs_f64();
        let pods: Vec<_> = rounds.iter().filter_map(|round| round.pod).collect();
        let pod = if pods.is_empty() { "-".to_string() } else { format!("{:.1}", median(pods)) };
        println!(
            "| {name} | {:.1} ({:.1}) | {} | {pod} | {:.2} ({:.2}) |",
            median(all(|round| round.up)),
            worst(|round| round.up),
            rounds.iter().map(|round| round.mebibytes).max().unwrap(),
            median(all(|round| round.down)),
            worst(|round| round.down),
        );
    }
}
