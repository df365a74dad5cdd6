//! `partage sim top` and `partage sim inject` while programs use the driver: this test's own binary, started again,
//! which opens libcuda.so.1 and libnvidia-ml.so.1 as any program does.
#![allow(unsafe_code, clippy::print_stdout)]

#[path = "../../../../crates/sim-driver/tests/support/driver.rs"]
mod driver;

use driver::{Library, cuda::*, nvml::*};
use serde_json::Value;
use std::fs::File;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::fd::FromRawFd;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::ptr::null_mut;

const GIB: u64 = 1 << 30;

/// A node of the test's own.
struct Node {
    path: PathBuf,
    _folder: tempfile::TempDir,
}

impl Node {
    fn new(arguments: &[&str]) -> Node {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("node");
        let mut command = Command::new(partage_e2e::partage());
        command.args(["sim", "env", "--dir"]).arg(&path).args(arguments);
        assert!(command.output().unwrap().status.success());
        Node { path, _folder: folder }
    }

    fn partage(&self, arguments: &[&str]) -> String {
        let mut command = Command::new(partage_e2e::partage());
        let output = command.arg("sim").args(arguments).env("PARTAGE_SIM_DIR", &self.path).output().unwrap();
        assert!(output.status.success(), "{output:?}");
        String::from_utf8(output.stdout).unwrap()
    }

    fn top(&self) -> Value {
        serde_json::from_str(&self.partage(&["top", "-o", "json", "--interval", "0.5"])).unwrap()
    }

    /// Starts a program on the node.
    fn program(&self, does: &str) -> Program {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["programs::program", "--exact", "--ignored", "--nocapture"])
            .env("PARTAGE_TEST_PROGRAM", does)
            .env("PARTAGE_SIM_DIR", &self.path)
            .env("LD_LIBRARY_PATH", self.path.join("lib"))
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let said = BufReader::new(child.stdout.take().unwrap());
        Program { child, said }
    }
}

/// A program that runs; it ends with the test.
struct Program {
    child: Child,
    said: BufReader<ChildStdout>,
}

impl Program {
    /// The next thing it says.
    fn says(&mut self) -> String {
        loop {
            let mut line = String::new();
            assert!(self.said.read_line(&mut line).unwrap() > 0, "the program is gone");
            if let Some(words) = line.trim().strip_prefix("program: ") {
                return words.to_string();
            }
        }
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
#[ignore = "it is the program that the other tests start"]
fn program() {
    match std::env::var("PARTAGE_TEST_PROGRAM").as_deref() {
        Ok("compute") => compute(),
        Ok("watch") => watch(),
        // Somebody runs all tests that are ignored.
        _ => {}
    }
}

/// Holds a GiB and computes until something goes wrong.
fn compute() {
    let cuda = Cuda(Library::open("libcuda.so.1").unwrap());
    // SAFETY: no pointers.
    let code = unsafe { cuda.cuInit(0) };
    if code != CUDA_SUCCESS {
        println!("program: cuInit {code}");
        return;
    }
    let (mut context, mut pointer, mut module, mut function) = (null_mut(), 0, null_mut(), null_mut());
    // SAFETY: the pointer is to a variable.
    assert_eq!(unsafe { cuda.cuCtxCreate_v2(&mut context, 0, 0) }, CUDA_SUCCESS);
    // SAFETY: likewise.
    assert_eq!(unsafe { cuda.cuMemAlloc_v2(&mut pointer, GIB as usize) }, CUDA_SUCCESS);
    // SAFETY: likewise; any image will do.
    assert_eq!(unsafe { cuda.cuModuleLoadData(&mut module, c"image".as_ptr().cast()) }, CUDA_SUCCESS);
    // SAFETY: likewise.
    let found = unsafe { cuda.cuModuleGetFunction(&mut function, module, c"busy_200us".as_ptr()) };
    assert_eq!(found, CUDA_SUCCESS);
    let mut event = null_mut();
    // SAFETY: likewise.
    assert_eq!(unsafe { cuda.cuEventCreate(&mut event, 0) }, CUDA_SUCCESS);
    let mut rounds = 0;
    let code = loop {
        let launched = (0..50).find_map(|_| {
            let (none, nothing) = (null_mut(), null_mut());
            // SAFETY: no arguments, no stream.
            let code = unsafe {
                cuda.cuLaunchKernel(function, 4096, 1, 1, 1024, 1, 1, 0, null_mut(), none, nothing)
            };
            (code != CUDA_SUCCESS).then_some(code)
        });
        // SAFETY: the event is there.
        unsafe { cuda.cuEventRecord(event, null_mut()) };
        // SAFETY: no pointers.
        let done = unsafe { cuda.cuCtxSynchronize() };
        if rounds == 1 {
            println!("program: computes");
        }
        rounds += 1;
        match done {
            CUDA_SUCCESS => assert_eq!(launched, None),
            wrong => break wrong,
        }
    };
    // SAFETY: the event is there.
    let never = unsafe { cuda.cuEventSynchronize(event) };
    println!("program: cuCtxSynchronize {code} cuEventSynchronize {never}");
}

/// Watches a GPU through NVML and says what changes.
fn watch() {
    let nvml = Nvml::open();
    let mut device = null_mut();
    // SAFETY: no pointers.
    assert_eq!(unsafe { nvml.nvmlInit_v2() }, NVML_SUCCESS);
    // SAFETY: the pointer is to a variable.
    assert_eq!(unsafe { nvml.nvmlDeviceGetHandleByIndex_v2(0, &mut device) }, NVML_SUCCESS);
    let mut last = None;
    loop {
        let mut temperature = 0;
        // SAFETY: likewise.
        let code = unsafe { nvml.nvmlDeviceGetTemperature(device, NVML_TEMPERATURE_GPU, &mut temperature) };
        if last.replace(code) != Some(code) {
            println!("program: nvml {code}");
        }
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
}

#[test]
fn top_shows_who_uses_what() {
    let node = Node::new(&["--gpus", "2"]);
    let (mut one, mut two) = (node.program("compute"), node.program("compute"));
    assert_eq!((one.says().as_str(), two.says().as_str()), ("computes", "computes"));
    // On a busy machine one of them may have got no processor in the time that is looked at.
    let all_worked = |top: &Value| {
        let mut all = top["gpus"][0]["processes"].as_array().unwrap().iter();
        all.all(|process| process["sharePercent"].as_f64().unwrap() > 0.0)
    };
    let mut top = node.top();
    for _ in 1..10 {
        if all_worked(&top) {
            break;
        }
        top = node.top();
    }
    let (busy, idle) = (&top["gpus"][0], &top["gpus"][1]);
    let processes = busy["processes"].as_array().unwrap();
    let pids: Vec<u64> = processes.iter().map(|process| process["pid"].as_u64().unwrap()).collect();
    let mut expected = [one.child.id(), two.child.id()].map(u64::from);
    expected.sort_unstable();
    let mut found = pids.clone();
    found.sort_unstable();
    assert_eq!(found, expected, "{top:#}");
    let sum = |field: &str| processes.iter().map(|process| process[field].as_f64().unwrap()).sum::<f64>();
    for process in processes {
        assert!(process["name"].as_str().unwrap().contains("simulated_driver"), "{top:#}");
        assert!(process["usedBytes"].as_u64().unwrap() > GIB && process["contexts"] == 1, "{top:#}");
        assert!(process["gpuSeconds"].as_f64().unwrap() > 0.0, "{top:#}");
        assert!(process["sharePercent"].as_f64().unwrap() > 0.0, "{top:#}");
    }
    // Parts of what there is: all that was served is theirs, and no more than there was time.
    assert_eq!(sum("usedBytes"), busy["usedBytes"].as_f64().unwrap());
    assert!(
        sum("sharePercent") <= 100.1 && sum("sharePercent") <= busy["busyPercent"].as_f64().unwrap() + 0.2
    );
    assert_eq!((&idle["processes"], &idle["usedBytes"]), (&Value::Array(Vec::new()), &Value::from(0)));
    assert_eq!(idle["busySeconds"], 0.0);
    // A killed process is gone at the next look, with what it held.
    drop(one);
    let top = node.top();
    assert_eq!(top["gpus"][0]["processes"].as_array().unwrap().len(), 1, "{top:#}");
    assert!((GIB..2 * GIB).contains(&top["gpus"][0]["usedBytes"].as_u64().unwrap()), "{top:#}");
    let table = node.partage(&["top", "--once", "--interval", "0.1"]);
    assert!(table.contains(&format!("{}", two.child.id())), "{table}");
}

#[test]
fn a_lost_gpu_is_lost_for_those_on_it_and_there_again_for_new_ones() {
    let node = Node::new(&[]);
    let (mut program, mut watcher) = (node.program("compute"), node.program("watch"));
    assert_eq!((program.says().as_str(), watcher.says()), ("computes", format!("nvml {NVML_SUCCESS}")));
    let words = node.partage(&["inject", "lost"]);
    assert_eq!(words, "GPU 0: fell off the bus under 1 process; XID 79 is reported\n");
    let gone = CUDA_ERROR_UNKNOWN;
    assert_eq!(program.says(), format!("cuCtxSynchronize {gone} cuEventSynchronize {gone}"));
    assert_eq!(watcher.says(), format!("nvml {NVML_ERROR_GPU_IS_LOST}"));
    let top = node.top();
    assert_eq!((&top["gpus"][0]["lost"], &top["gpus"][0]["lastXid"]), (&true.into(), &79.into()));
    assert_eq!(top["gpus"][0]["busyPercent"], 0.0, "{top:#}");
    // It is the node's only one.
    assert_eq!(node.program("compute").says(), format!("cuInit {CUDA_ERROR_NO_DEVICE}"));

    assert!(node.partage(&["inject", "back"]).starts_with("GPU 0: is on the bus again"));
    assert_eq!(watcher.says(), format!("nvml {NVML_SUCCESS}"));
    assert_eq!(node.program("compute").says(), "computes");
}

#[test]
fn a_slow_gpu_serves_less_in_the_same_time() {
    let node = Node::new(&[]);
    let mut program = node.program("compute");
    assert_eq!(program.says(), "computes");
    assert_eq!(node.partage(&["inject", "slow", "4"]), "GPU 0: takes 4 times as long from now on\n");
    let (before, mut after) = (node.top(), node.top());
    let figure = |top: &Value, field: &str| top["gpus"][0][field].as_f64().unwrap();
    let work = |top: &Value| top["gpus"][0]["processes"][0]["gpuSeconds"].as_f64().unwrap();
    let busy = |after: &Value| figure(after, "busySeconds") - figure(&before, "busySeconds");
    // Next to nothing, where the program got no processor, cannot be compared.
    for _ in 1..10 {
        if busy(&after) > 0.05 {
            break;
        }
        after = node.top();
    }
    let (served, busy) = (work(&after) - work(&before), busy(&after));
    assert!((served * 4.0 / busy - 1.0).abs() < 0.01, "{served} s of work in {busy} s");
    assert_eq!(figure(&after, "slowness"), 4.0);
    assert!(node.partage(&["top", "--once", "--interval", "0.1"]).contains("4 times slower"));
}

#[test]
fn a_gpu_in_mig_mode_is_no_programs() {
    let node = Node::new(&[]);
    assert_eq!(node.partage(&["inject", "mig", "off"]), "GPU 0: MIG mode is disabled already\n");
    assert_eq!(node.partage(&["inject", "mig", "on"]), "GPU 0: MIG mode is enabled\n");
    assert_eq!(node.program("compute").says(), format!("cuInit {CUDA_ERROR_NO_DEVICE}"));
    assert_eq!(node.program("watch").says(), format!("nvml {NVML_SUCCESS}"));
    assert_eq!(node.top()["gpus"][0]["mig"], true);
    assert!(node.partage(&["top", "--once", "--interval", "0.1"]).contains("MIG mode"));
    node.partage(&["inject", "mig", "off"]);
    assert_eq!(node.program("compute").says(), "computes");
}

#[test]
fn without_a_driver_programs_find_no_gpu() {
    let node = Node::new(&[]);
    node.partage(&["inject", "driver", "unload"]);
    assert_eq!(node.program("compute").says(), format!("cuInit {CUDA_ERROR_NO_DEVICE}"));
    assert_eq!(node.top()["loaded"], false);
    node.partage(&["inject", "driver", "load"]);
    assert_eq!(node.program("compute").says(), "computes");
}

#[test]
fn errors_are_counted_and_told() {
    let node = Node::new(&["--gpus", "2", "--model", "T4"]);
    let words = node.partage(&["inject", "ecc", "--corrected", "3", "--uncorrected", "1", "--gpu", "1"]);
    let counted = "GPU 1: 3 corrected errors counted; 1 uncorrected error counted, and XID 48 is reported\n";
    assert_eq!(words, counted);
    assert_eq!(node.partage(&["inject", "--gpu", "0", "xid", "13"]), "GPU 0: XID 13 is reported\n");
    let top = node.top();
    let condition = |gpu: usize| {
        ["correctedErrors", "uncorrectedErrors", "lastXid"].map(|field| top["gpus"][gpu][field].as_u64())
    };
    assert_eq!(condition(0), [Some(0), Some(0), Some(13)]);
    assert_eq!(condition(1), [Some(3), Some(1), Some(48)]);
}

#[test]
fn nodes_do_not_see_each_other() {
    let (a, b) = (Node::new(&[]), Node::new(&["--model", "T4", "--driver", "535"]));
    let mut program = a.program("compute");
    assert_eq!(program.says(), "computes");
    b.partage(&["inject", "lost"]);
    assert_eq!(b.top()["gpus"][0]["processes"], Value::Array(Vec::new()));
    let top = a.top();
    assert_eq!(top["gpus"][0]["processes"].as_array().unwrap().len(), 1);
    assert_eq!((&top["gpus"][0]["lost"], &top["gpus"][0]["lastXid"]), (&false.into(), &Value::Null));
    remove(&b.path);
    assert_eq!(a.top()["gpus"][0]["processes"].as_array().unwrap().len(), 1);
}

fn remove(node: &Path) {
    let removed = Command::new(partage_e2e::partage()).args(["sim", "rm"]).arg(node).status().unwrap();
    assert!(removed.success() && !node.exists());
}

#[test]
fn a_table_follows_the_other_until_nobody_reads() {
    let node = Node::new(&[]);
    let mut top = Command::new(partage_e2e::partage())
        .args(["sim", "top", "--interval", "0.05"])
        .env("PARTAGE_SIM_DIR", &node.path)
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut said = BufReader::new(top.stdout.take().unwrap());
    let mut tables = 0;
    while tables < 3 {
        let mut line = String::new();
        assert!(said.read_line(&mut line).unwrap() > 0 && !line.contains('\u{1b}'), "{line}");
        tables += usize::from(line.starts_with("GPU "));
    }
    drop(said);
    assert!(top.wait().unwrap().success());
    // Nor does it go on with a node that is gone.
    let mut top = Command::new(partage_e2e::partage())
        .args(["sim", "top", "--interval", "0.05"])
        .env("PARTAGE_SIM_DIR", &node.path)
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut line = String::new();
    BufReader::new(top.stdout.as_mut().unwrap()).read_line(&mut line).unwrap();
    remove(&node.path);
    let output = top.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(2));
    assert!(String::from_utf8(output.stderr).unwrap().ends_with("was removed\n"));
}

/// A terminal of its own: what a program on it writes and reads, and the end that programs have.
fn terminal() -> (File, File) {
    let (mut ours, mut theirs) = (0, 0);
    let size = libc::winsize { ws_row: 6, ws_col: 40, ws_xpixel: 0, ws_ypixel: 0 };
    // SAFETY: two variables for the two ends; no name and no modes are asked for.
    let made = unsafe { libc::openpty(&mut ours, &mut theirs, null_mut(), null_mut(), &size) };
    assert_eq!(made, 0);
    // SAFETY: it was opened just now, and is nobody else's.
    let ours = unsafe { File::from_raw_fd(ours) };
    // SAFETY: likewise.
    (ours, unsafe { File::from_raw_fd(theirs) })
}

#[test]
fn on_a_terminal_a_table_is_drawn_over_the_other_until_a_key() {
    let node = Node::new(&["--gpus", "4"]);
    for key in ["q", "\u{3}"] {
        let (mut ours, theirs) = terminal();
        let modes = || rustix::termios::tcgetattr(&theirs).unwrap().local_modes;
        let before = modes();
        let mut top = Command::new(partage_e2e::partage())
            .args(["sim", "top", "--interval", "0.05"])
            .env("PARTAGE_SIM_DIR", &node.path)
            .stdin(theirs.try_clone().unwrap())
            .stdout(theirs.try_clone().unwrap())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let mut shown = String::new();
        while shown.matches("\u{1b}[").count() < 4 {
            let mut bytes = [0; 4096];
            let read = ours.read(&mut bytes).unwrap();
            shown.push_str(std::str::from_utf8(&bytes[..read]).unwrap());
        }
        assert_ne!(modes(), before);
        ours.write_all(key.as_bytes()).unwrap();
        assert!(top.wait().unwrap().success());
        assert_eq!(modes(), before);
        // No line is longer than a row and no table higher than the screen, or it could not be drawn over.
        let table = shown.split("\u{1b}[J").nth(1).unwrap().split('\u{1b}').next().unwrap();
        let lines: Vec<&str> = table.lines().collect();
        assert!(lines.len() <= 5 && lines.iter().all(|line| line.len() <= 40), "{table}");
        assert!(
            table.contains("... ") && table.contains(" lines more") && table.contains("q ends"),
            "{table}"
        );
    }
}
