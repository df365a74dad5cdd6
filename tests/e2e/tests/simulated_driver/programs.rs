//! `partage sim top` and `partage sim inject` while programs use the driver: this test's own binary, started again,
//! which opens libcuda.so.1 and libnvidia-ml.so.1 as any program does.
#![allow(unsafe_code, clippy::print_stdout)]

#[path = "../../../../crates/sim-driver/tests/support/driver.rs"]
mod driver;

use driver::{LoadedLibrary, cuda::*, nvml::*};
use serde_json::Value;
use std::fs::File;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::fd::FromRawFd;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::ptr::null_mut;

const GIB: u64 = 1 << 30;

/// A node of the test's own.
struct SimulatedNode {
    path: PathBuf,
    _folder: tempfile::TempDir,
}

impl SimulatedNode {
    fn new(arguments: &[&str]) -> SimulatedNode {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("node");
        let mut command = Command::new(partage_e2e::partage());
        command.args(["sim", "env", "--dir"]).arg(&path).args(arguments);
        assert!(command.output().unwrap().status.success());
        SimulatedNode { path, _folder: folder }
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
    fn program(&self, does: &str) -> ChildProgram {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["programs::program", "--exact", "--ignored", "--nocapture"])
            .env("PARTAGE_TEST_PROGRAM", does)
            .env("PARTAGE_SIM_DIR", &self.path)
            .env("LD_LIBRARY_PATH", self.path.join("lib"))
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let output = BufReader::new(child.stdout.take().unwrap());
        ChildProgram { child, output }
    }
}

/// A running program, killed when dropped.
struct ChildProgram {
    child: Child,
    output: BufReader<ChildStdout>,
}

impl ChildProgram {
    /// Returns the next line that it prints.
    fn next_message(&mut self) -> String {
        loop {
            let mut line = String::new();
            assert!(self.output.read_line(&mut line).unwrap() > 0, "the program has ended");
            if let Some(words) = line.trim().strip_prefix("program: ") {
                return words.to_string();
            }
        }
    }
}

impl Drop for ChildProgram {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
#[ignore = "the program that the other tests start"]
fn program() {
    match std::env::var("PARTAGE_TEST_PROGRAM").as_deref() {
        Ok("compute") => compute(),
        Ok("watch") => watch(),
        // All ignored tests are being run.
        _ => {}
    }
}

/// Holds a GiB and computes until an error occurs.
fn compute() {
    let cuda = CudaLibrary(LoadedLibrary::open("libcuda.so.1").unwrap());
    // SAFETY: the call takes no pointers.
    let code = unsafe { cuda.cuInit(0) };
    if code != CUDA_SUCCESS {
        println!("program: cuInit {code}");
        return;
    }
    let (mut context, mut pointer, mut module, mut function) = (null_mut(), 0, null_mut(), null_mut());
    // SAFETY: the pointer is to a local variable.
    assert_eq!(unsafe { cuda.cuCtxCreate_v2(&mut context, 0, 0) }, CUDA_SUCCESS);
    // SAFETY: the pointer is to a local variable.
    assert_eq!(unsafe { cuda.cuMemAlloc_v2(&mut pointer, GIB as usize) }, CUDA_SUCCESS);
    // SAFETY: the pointer is to a local variable; the simulated driver accepts any image.
    assert_eq!(unsafe { cuda.cuModuleLoadData(&mut module, c"image".as_ptr().cast()) }, CUDA_SUCCESS);
    // SAFETY: the pointer is to a local variable; the name is a C string.
    let found = unsafe { cuda.cuModuleGetFunction(&mut function, module, c"busy_200us".as_ptr()) };
    assert_eq!(found, CUDA_SUCCESS);
    let mut event = null_mut();
    // SAFETY: the pointer is to a local variable.
    assert_eq!(unsafe { cuda.cuEventCreate(&mut event, 0) }, CUDA_SUCCESS);
    let mut rounds = 0;
    let code = loop {
        let launched = (0..50).find_map(|_| {
            let (none, nothing) = (null_mut(), null_mut());
            // SAFETY: the function was returned by the driver; no arguments and no stream are passed.
            let code = unsafe {
                cuda.cuLaunchKernel(function, 4096, 1, 1, 1024, 1, 1, 0, null_mut(), none, nothing)
            };
            (code != CUDA_SUCCESS).then_some(code)
        });
        // SAFETY: the event was created above.
        unsafe { cuda.cuEventRecord(event, null_mut()) };
        // SAFETY: the call takes no pointers.
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
    // SAFETY: the event was created above.
    let never = unsafe { cuda.cuEventSynchronize(event) };
    println!("program: cuCtxSynchronize {code} cuEventSynchronize {never}");
}

/// Polls a GPU through NVML and prints changes.
fn watch() {
    let nvml = NvmlLibrary::open();
    let mut device = null_mut();
    // SAFETY: the call takes no pointers.
    assert_eq!(unsafe { nvml.nvmlInit_v2() }, NVML_SUCCESS);
    // SAFETY: the pointer is to a local variable.
    assert_eq!(unsafe { nvml.nvmlDeviceGetHandleByIndex_v2(0, &mut device) }, NVML_SUCCESS);
    let mut last = None;
    loop {
        let mut temperature = 0;
        // SAFETY: the handle is valid, and the pointer is to a local variable.
        let code = unsafe { nvml.nvmlDeviceGetTemperature(device, NVML_TEMPERATURE_GPU, &mut temperature) };
        if last.replace(code) != Some(code) {
            println!("program: nvml {code}");
        }
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
}

#[test]
fn top_shows_processes_and_their_usage() {
    let node = SimulatedNode::new(&["--gpus", "2"]);
    let (mut one, mut two) = (node.program("compute"), node.program("compute"));
    assert_eq!((one.next_message().as_str(), two.next_message().as_str()), ("computes", "computes"));
    // On a busy machine one of them may have had no CPU time during the interval.
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
    // Shares of the total: all GPU time belongs to the processes, and is not more than the elapsed time.
    assert_eq!(sum("usedBytes"), busy["usedBytes"].as_f64().unwrap());
    assert!(
        sum("sharePercent") <= 100.1 && sum("sharePercent") <= busy["busyPercent"].as_f64().unwrap() + 0.2
    );
    assert_eq!((&idle["processes"], &idle["usedBytes"]), (&Value::Array(Vec::new()), &Value::from(0)));
    assert_eq!(idle["busySeconds"], 0.0);
    // A killed process is missing in the next output, with its memory.
    drop(one);
    let top = node.top();
    assert_eq!(top["gpus"][0]["processes"].as_array().unwrap().len(), 1, "{top:#}");
    assert!((GIB..2 * GIB).contains(&top["gpus"][0]["usedBytes"].as_u64().unwrap()), "{top:#}");
    let table = node.partage(&["top", "--once", "--interval", "0.1"]);
    assert!(table.contains(&format!("{}", two.child.id())), "{table}");
}

#[test]
fn lost_gpu_fails_its_processes_and_serves_new_ones_after_return() {
    let node = SimulatedNode::new(&[]);
    let (mut program, mut watcher) = (node.program("compute"), node.program("watch"));
    assert_eq!(
        (program.next_message().as_str(), watcher.next_message()),
        ("computes", format!("nvml {NVML_SUCCESS}"))
    );
    let message = node.partage(&["inject", "lost"]);
    assert_eq!(message, "GPU 0: lost by 1 process, XID 79 reported\n");
    let gone = CUDA_ERROR_UNKNOWN;
    assert_eq!(program.next_message(), format!("cuCtxSynchronize {gone} cuEventSynchronize {gone}"));
    assert_eq!(watcher.next_message(), format!("nvml {NVML_ERROR_GPU_IS_LOST}"));
    let top = node.top();
    assert_eq!((&top["gpus"][0]["lost"], &top["gpus"][0]["lastXid"]), (&true.into(), &79.into()));
    assert_eq!(top["gpus"][0]["busyPercent"], 0.0, "{top:#}");
    // It is the node's only GPU.
    assert_eq!(node.program("compute").next_message(), format!("cuInit {CUDA_ERROR_NO_DEVICE}"));

    assert!(node.partage(&["inject", "back"]).starts_with("GPU 0: back on the bus"));
    assert_eq!(watcher.next_message(), format!("nvml {NVML_SUCCESS}"));
    assert_eq!(node.program("compute").next_message(), "computes");
}

#[test]
fn slow_gpu_completes_less_work_in_the_same_time() {
    let node = SimulatedNode::new(&[]);
    let mut program = node.program("compute");
    assert_eq!(program.next_message(), "computes");
    assert_eq!(node.partage(&["inject", "slow", "4"]), "GPU 0: 4 times slower\n");
    let (before, mut after) = (node.top(), node.top());
    let figure = |top: &Value, field: &str| top["gpus"][0][field].as_f64().unwrap();
    let work = |top: &Value| top["gpus"][0]["processes"][0]["gpuSeconds"].as_f64().unwrap();
    let busy = |after: &Value| figure(after, "busySeconds") - figure(&before, "busySeconds");
    // If the program had no CPU time, there is too little to compare.
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
fn gpu_in_mig_mode_is_not_usable() {
    let node = SimulatedNode::new(&[]);
    assert_eq!(node.partage(&["inject", "mig", "off"]), "GPU 0: MIG mode is already disabled\n");
    assert_eq!(node.partage(&["inject", "mig", "on"]), "GPU 0: MIG mode enabled\n");
    assert_eq!(node.program("compute").next_message(), format!("cuInit {CUDA_ERROR_NO_DEVICE}"));
    assert_eq!(node.program("watch").next_message(), format!("nvml {NVML_SUCCESS}"));
    assert_eq!(node.top()["gpus"][0]["mig"], true);
    assert!(node.partage(&["top", "--once", "--interval", "0.1"]).contains("MIG mode"));
    node.partage(&["inject", "mig", "off"]);
    assert_eq!(node.program("compute").next_message(), "computes");
}

#[test]
fn unloaded_driver_offers_no_gpu() {
    let node = SimulatedNode::new(&[]);
    node.partage(&["inject", "driver", "unload"]);
    assert_eq!(node.program("compute").next_message(), format!("cuInit {CUDA_ERROR_NO_DEVICE}"));
    assert_eq!(node.top()["loaded"], false);
    node.partage(&["inject", "driver", "load"]);
    assert_eq!(node.program("compute").next_message(), "computes");
}

#[test]
fn injected_errors_are_counted_and_reported() {
    let node = SimulatedNode::new(&["--gpus", "2", "--model", "T4"]);
    let message = node.partage(&["inject", "ecc", "--corrected", "3", "--uncorrected", "1", "--gpu", "1"]);
    let counted = "GPU 1: 3 corrected errors counted; 1 uncorrected error counted, XID 48 reported\n";
    assert_eq!(message, counted);
    assert_eq!(node.partage(&["inject", "--gpu", "0", "xid", "13"]), "GPU 0: XID 13 reported\n");
    let top = node.top();
    let condition = |gpu: usize| {
        ["correctedErrors", "uncorrectedErrors", "lastXid"].map(|field| top["gpus"][gpu][field].as_u64())
    };
    assert_eq!(condition(0), [Some(0), Some(0), Some(13)]);
    assert_eq!(condition(1), [Some(3), Some(1), Some(48)]);
}

#[test]
fn simulated_nodes_are_isolated() {
    let (a, b) = (SimulatedNode::new(&[]), SimulatedNode::new(&["--model", "T4", "--driver", "535"]));
    let mut program = a.program("compute");
    assert_eq!(program.next_message(), "computes");
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
fn piped_top_repeats_tables_until_the_reader_leaves() {
    let node = SimulatedNode::new(&[]);
    let mut top = Command::new(partage_e2e::partage())
        .args(["sim", "top", "--interval", "0.05"])
        .env("PARTAGE_SIM_DIR", &node.path)
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut message = BufReader::new(top.stdout.take().unwrap());
    let mut tables = 0;
    while tables < 3 {
        let mut line = String::new();
        assert!(message.read_line(&mut line).unwrap() > 0 && !line.contains('\u{1b}'), "{line}");
        tables += usize::from(line.starts_with("GPU "));
    }
    drop(message);
    assert!(top.wait().unwrap().success());
    // It also ends when its node is removed.
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

/// Opens a pseudoterminal: the test's end, and the program's end.
fn open_terminal() -> (File, File) {
    let (mut ours, mut theirs) = (0, 0);
    let size = libc::winsize { ws_row: 6, ws_col: 40, ws_xpixel: 0, ws_ypixel: 0 };
    // SAFETY: the two pointers are to local variables; no name and no modes are requested.
    let made = unsafe { libc::openpty(&mut ours, &mut theirs, null_mut(), null_mut(), &size) };
    assert_eq!(made, 0);
    // SAFETY: the descriptor was just opened, and has no other owner.
    let ours = unsafe { File::from_raw_fd(ours) };
    // SAFETY: the descriptor was just opened, and has no other owner.
    (ours, unsafe { File::from_raw_fd(theirs) })
}

#[test]
fn terminal_top_redraws_in_place_until_a_key() {
    let node = SimulatedNode::new(&["--gpus", "4"]);
    for key in ["q", "\u{3}"] {
        let (mut ours, theirs) = open_terminal();
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
        // No line is longer than a row and no table taller than the screen; otherwise it could not be redrawn.
        let table = shown.split("\u{1b}[J").nth(1).unwrap().split('\u{1b}').next().unwrap();
        let lines: Vec<&str> = table.lines().collect();
        assert!(lines.len() <= 5 && lines.iter().all(|line| line.len() <= 40), "{table}");
        assert!(
            table.contains("... ") && table.contains(" more lines") && table.contains("q quit"),
            "{table}"
        );
    }
}
