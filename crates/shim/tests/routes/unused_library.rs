//! A process that loads the stand-ins and never calls the driver behaves like one that loads the driver's own
//! libraries.

use super::*;
use linker::run;
use program::{ProgramBuilder, stdout_of};

/// Returns the two libraries of a directory.
fn both(folder: &Path) -> [PathBuf; 2] {
    ["libcuda.so.1", "libnvidia-ml.so.1"].map(|name| folder.join(name))
}

/// Returns a program's output with the driver's own libraries loaded, and with the stand-ins.
fn outputs(container: &TestContainer<'_>, program: &Path, arguments: &[&str]) -> [std::process::Output; 2] {
    [container.node.0.libraries(), container.libraries()].map(|folder| {
        let [cuda, nvml] = both(&folder);
        run(container, &[&cuda, &nvml], program).args(arguments).output().unwrap()
    })
}

#[test]
fn process_without_driver_calls_is_not_changed() {
    let (node, folder) = (node(), tempfile::tempdir().unwrap());
    let container = TestContainer::with_memory(&node, CONTEXT_BYTES + FREE_BYTES);
    let program =
        ProgramBuilder { folder: folder.path() }.build_program("quiet", include_str!("quiet.c"), &[]);
    let [alone, with] = outputs(&container, &program, &[]);
    assert_eq!(alone.status.code(), Some(42));
    assert_eq!(with.status.code(), Some(42), "{with:?}");
    // Only the loaded files differ.
    let about = |output: &std::process::Output| {
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        text.lines().filter(|line| !line.starts_with("drivers")).map(String::from).collect::<Vec<_>>()
    };
    assert_eq!(about(&with), about(&alone));
    assert!(with.stderr.is_empty(), "{with:?}");
    let text = String::from_utf8_lossy(&with.stdout);
    assert!(text.contains("errno 0 77") && text.contains("regions 0"), "{with:?}");
    assert_eq!(container.reader().snapshot().unwrap().processes, []);
    // Not a byte was written: the process did not even look for a slot.
    let untouched = TestContainer::with_memory(&node, CONTEXT_BYTES + FREE_BYTES);
    let contents = |container: &TestContainer<'_>| std::fs::read(container.region().join("usage")).unwrap();
    assert!(contents(&container) == contents(&untouched));
}

#[test]
fn everyday_programs_are_not_affected() {
    let node = node();
    let container = TestContainer::with_memory(&node, CONTEXT_BYTES + FREE_BYTES);
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
        let [_, with] = outputs(&container, Path::new(program), arguments);
        if program == "ls" {
            stdout_of(&with);
            continue;
        }
        assert_eq!(with, alone, "{program} {arguments:?}");
    }
}
