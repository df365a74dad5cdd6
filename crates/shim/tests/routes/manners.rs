//! A process that never calls CUDA is as if the shim were not there, though it is preloaded.

use super::*;
use linker::{Way, run};
use program::{Maker, said};

#[test]
fn a_process_that_never_calls_is_left_alone() {
    let (node, folder) = (node(), tempfile::tempdir().unwrap());
    let container = Container::with_memory(&node, CONTEXT + ROOM);
    let program = Maker { folder: folder.path() }.program("quiet", include_str!("quiet.c"), &[]);
    let alone = Command::new(&program).env("LD_PRELOAD", "").output().unwrap();
    let with = run(&container, Way::Preloaded, &[], &[], &program).output().unwrap();
    assert_eq!(alone.status.code(), Some(42));
    assert_eq!(with.status.code(), Some(42), "{with:?}");
    assert_eq!(String::from_utf8_lossy(&with.stdout), String::from_utf8_lossy(&alone.stdout));
    assert!(with.stderr.is_empty(), "{with:?}");
    assert!(String::from_utf8_lossy(&with.stdout).contains("errno 0 77"), "{with:?}");
    assert_eq!(container.reader().snapshot().unwrap().processes, []);
    // Nobody wrote a byte: not even a slot was looked for.
    let untouched = Container::with_memory(&node, CONTEXT + ROOM);
    let contents = |container: &Container<'_>| std::fs::read(container.region().join("usage")).unwrap();
    assert!(contents(&container) == contents(&untouched));
}

#[test]
fn everyday_programs_do_as_ever() {
    let node = node();
    let container = Container::with_memory(&node, CONTEXT + ROOM);
    let python = "import ctypes, json, threading, socket, sys; t = threading.Thread(target=lambda: None); t.start(); t.join(); \
                  sys.stdout.write(str(ctypes.CDLL(None).abs(-3))); sys.exit(7)";
    let programs: [(&str, &[&str]); 6] = [
        ("ls", &["-la", "/proc/self/exe"]),
        ("sh", &["-c", "echo a | cat; (exit 3); echo $?; exit 5"]),
        ("cat", &["/nonexistent"]),
        ("env", &["printenv", "HOME"]),
        ("python3", &["-c", python]),
        ("sh", &["-c", "kill -TERM $$"]),
    ];
    for (program, arguments) in programs {
        let Ok(alone) = Command::new(program).args(arguments).env("LD_PRELOAD", "").output() else {
            continue;
        };
        let with =
            run(&container, Way::Preloaded, &[], &[], Path::new(program)).args(arguments).output().unwrap();
        if program == "ls" {
            said(&with);
            continue;
        }
        assert_eq!(with, alone, "{program} {arguments:?}");
    }
}

/// A preloaded file that finds no driver does no harm to who needs none.
#[test]
fn without_a_driver_nothing_is_missing() {
    let (node, folder) = (node(), tempfile::tempdir().unwrap());
    let settings = partage_shim::install::Settings {
        region: Path::new("/nowhere/region"),
        real_cuda: Path::new("/nowhere/libcuda.so.1"),
        real_nvml: Path::new("/nowhere/libnvidia-ml.so.1"),
        pass_when_broken: false,
        version: None,
    };
    let object = partage_shim::install::shared_object().unwrap();
    partage_shim::install::stand_in(&object, folder.path(), &settings).unwrap();
    let program = Maker { folder: folder.path() }.program("quiet", include_str!("quiet.c"), &[]);
    let preload = folder.path().join(partage_shim::install::PRELOAD);
    let output = Command::new(&program).env("LD_PRELOAD", preload).output().unwrap();
    assert_eq!(output.status.code(), Some(42), "{output:?}");
    drop(node);
}
