//! Counts how many driver calls the shim adds, with a library between the two.

use crate::container::shares;
use crate::node::RoleProcess;
use crate::{exclusive_node, start_arbiter};
use partage_region::protocol::WHOLE_GPU;
use partage_region::{GpuShare, RegionHandle, RegionOwner, RegionPolicy};
use partage_shim::install::{self, StandInPaths};
use std::path::Path;
use std::process::Command;
use std::sync::Arc;

/// Functions that throttling may call; each appends to a file and calls the driver.
const COUNTED_FUNCTIONS: [(&str, &str, &str); 11] = [
    ("cuEventRecord", "void *a, void *b", "a, b"),
    ("cuEventRecord_ptsz", "void *a, void *b", "a, b"),
    ("cuEventElapsedTime", "void *a, void *b, void *c", "a, b, c"),
    ("cuEventCreate", "void *a, unsigned b", "a, b"),
    ("cuEventQuery", "void *a", "a"),
    ("cuEventSynchronize", "void *a", "a"),
    ("cuCtxGetCurrent", "void *a", "a"),
    ("cuCtxGetDevice", "void *a", "a"),
    ("cuStreamIsCapturing", "void *a, void *b", "a, b"),
    ("cuStreamQuery", "void *a", "a"),
    (
        "cuStreamWriteValue64_v2",
        "void *a, unsigned long long b, unsigned long long c, unsigned d",
        "a, b, c, d",
    ),
];

/// Builds a libcuda that counts calls and passes them to the given one.
fn counting(folder: &Path, real: &Path, counts: &Path) -> std::path::PathBuf {
    let mut text =
        String::from("#define _GNU_SOURCE\n#include <dlfcn.h>\n#include <fcntl.h>\n#include <unistd.h>\n");
    text += &format!(
        "static void count(void) {{ int f = open(\"{}\", O_WRONLY | O_APPEND | O_CREAT, 0666); (void)!write(f, \".\", 1); close(f); }}\n",
        counts.display()
    );
    for (name, parameters, arguments) in COUNTED_FUNCTIONS {
        text += &format!(
            "int {name}({parameters}) {{ static int (*f)({parameters}); if (!f) f = dlsym(RTLD_NEXT, \"{name}\"); count(); return f({arguments}); }}\n"
        );
    }
    let (source, library) = (folder.join("counting.c"), folder.join("libcounting.so"));
    std::fs::write(&source, text).unwrap();
    let mut cc = Command::new("cc");
    cc.args(["-shared", "-fPIC", "-Wl,--no-as-needed", "-o"])
        .arg(&library)
        .arg(&source)
        .arg(real)
        .arg("-ldl");
    assert!(cc.status().unwrap().success());
    library
}

#[test]
fn markers_add_few_calls() {
    const LAUNCHES: usize = 20_000;
    // A marker takes two calls and follows about half a millisecond of work.
    for (micros, launches_per_call) in [(20, 8), (5, 32)] {
        let added = count_added_calls(LAUNCHES, micros, 90_000);
        assert!(added > 0, "no marker was put, or no call was counted");
        assert!(
            added * launches_per_call <= LAUNCHES,
            "{added} calls were added to {LAUNCHES} launches of {micros} us"
        );
    }
}

#[test]
fn launches_that_are_not_gated_add_no_calls() {
    assert_eq!(count_added_calls(20_000, 20, 100_000), 0);
}

/// Returns the number of driver calls that the shim adds to this many launches of a container that has the GPU to
/// itself, up to this ceiling.
fn count_added_calls(launches: usize, micros: u32, ceiling: u32) -> usize {
    let node = exclusive_node();
    let folder = tempfile::tempdir().unwrap();
    let (region, lib, counts) =
        (folder.path().join("region"), folder.path().join("lib"), folder.path().join("counts"));
    std::fs::create_dir(&region).unwrap();
    std::fs::create_dir(&lib).unwrap();
    let [share] = shares(&node, u64::MAX).try_into().unwrap();
    let share = GpuShare { cores: 30_000, ceiling, waits_for_turns: true, ..share };
    let _owner = RegionOwner::create(&region, &[share], RegionPolicy::default()).unwrap();
    let real = partage_sim_node::install::shared_object().unwrap();
    let settings = StandInPaths {
        region: &region,
        // As it was linked, under its own name: "libcuda.so.1" would be the shim again.
        real_cuda: &counting(folder.path(), &real, &counts),
        real_nvml: &node.0.libraries().join("libnvidia-ml.so.1"),
        version: None,
    };
    install::write_stand_ins(&install::shared_object().unwrap(), &lib, &settings).unwrap();
    let arbiter = start_arbiter(&[]);
    let handle = Arc::new(RegionHandle::open(&region).unwrap());
    arbiter.add(Arc::clone(&handle)).unwrap();
    let mut command = node.command(&format!("launches {launches} {micros}"));
    let libraries = [lib.as_path(), real.parent().unwrap()];
    command.env("LD_LIBRARY_PATH", std::env::join_paths(libraries).unwrap());
    let mut process = RoleProcess::spawn(command);
    process.wait_for_line("ready");
    let counted = || std::fs::metadata(&counts).map_or(0, |file| file.len() as usize);
    assert_eq!(handle.owner().limits(0).unwrap().is_gated(), ceiling < WHOLE_GPU);
    let before = counted();
    process.resume();
    process.wait_for_line("done");
    counted() - before
}
