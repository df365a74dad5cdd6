//! Measures how long a bed takes to start and stop, and how much memory it uses. `make bench` prints the table of
//! `docs/benchmarks.md`.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::print_stdout)]

use partage_testkit::bed::{BedProfile, CgroupVersion, NodeProfile, TestBed};
use std::time::{Duration, Instant};

const ROUNDS: usize = 5;

/// The figures of one bed: start, resident memory of its components, first pod, stop.
struct BedMeasurement {
    up: Duration,
    mebibytes: u64,
    pod: Option<Duration>,
    down: Duration,
}

fn measure(profile: BedProfile) -> BedMeasurement {
    let with_nodes = !profile.is_control_plane_only();
    let start = Instant::now();
    let bed = TestBed::start(profile).expect("the bed starts; run `make binaries` first, as root");
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
    BedMeasurement { up, mebibytes, pod, down: start.elapsed() }
}

fn median(mut times: Vec<Duration>) -> f64 {
    times.sort();
    times[times.len() / 2].as_secs_f64()
}

fn main() {
    let v2 = || BedProfile::control_plane().node(NodeProfile::new("node1").cgroups(CgroupVersion::V2));
    let profiles: [(&str, &dyn Fn() -> BedProfile); 5] = [
        ("control plane only", &BedProfile::control_plane),
        ("one node", &BedProfile::one_node),
        ("one node, cgroup v2", &v2),
        ("two nodes", &|| BedProfile::nodes(2)),
        ("three nodes", &|| BedProfile::nodes(3)),
    ];
    println!(
        "| bed | ready, s: median (worst) | resident, MiB | first pod, s | stopped, s: median (worst) |"
    );
    println!("|---|---|---|---|---|");
    for (name, profile) in profiles {
        let rounds: Vec<_> = (0..ROUNDS).map(|_| measure(profile())).collect();
        let all = |which: fn(&BedMeasurement) -> Duration| rounds.iter().map(which).collect::<Vec<_>>();
        let worst =
            |which: fn(&BedMeasurement) -> Duration| rounds.iter().map(which).max().unwrap().as_secs_f64();
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
