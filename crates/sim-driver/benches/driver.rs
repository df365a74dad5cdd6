//! Measures what calls into the simulated driver cost and how exact its simulated time is. Run by `make bench`.
#![allow(
    unsafe_code,
    clippy::unwrap_used,
    clippy::multiple_unsafe_ops_per_block,
    clippy::print_stdout,
    missing_docs
)]

#[path = "../tests/support/driver.rs"]
mod driver;

use driver::cuda::*;
use partage_driver_api::exports::DriverVersion;
use partage_sim_node::node::{NodeConfig, NodeDir};
use partage_sim_node::state::SimNodeState;
use partage_sim_node::{install, profile};
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, ChildStdout, Command, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

fn main() {
    let arguments: Vec<String> = std::env::args().collect();
    match arguments.iter().position(|word| word == "client") {
        Some(at) => client(&arguments[at + 1..]),
        None => benches(),
    }
}

fn benches() {
    println!("call                     1 process   32 processes   (median ns of CPU time)");
    for call in ["alloc-free", "launch", "launch-queued", "write-word", "write-queued", "mem-get-info"] {
        println!("{call:<24} {:>9.1} {:>14.1}", costs(call, 1), costs(call, 32));
    }
    println!();
    println!("kernels on an idle GPU   asked ms   took ms   off");
    for (count, micros) in [(1000, 100), (100, 1000), (5000, 20)] {
        let node = node();
        let took: f64 = clients(node.path(), 1, &["kernels", &count.to_string(), &micros.to_string()])[0];
        let asked = f64::from(count * micros) / 1000.0;
        println!(
            "{:<24} {asked:>8.1} {took:>9.2} {:>+5.2} %",
            format!("{count} x {micros} us"),
            (took / asked - 1.0) * 100.0
        );
        NodeDir::remove(node.path()).unwrap();
    }
    println!();
    println!(
        "words behind a kernel    median us late   99 % us late   (seen by a thread that sleeps 10 us at a time)"
    );
    for micros in [200, 2000] {
        let node = node();
        let (mut children, mut outputs) = start(node.path(), 1, &["words", &micros.to_string()]);
        begin(&mut children, &mut outputs);
        let words = line(&mut outputs[0]);
        println!("{:<24} {words}", format!("{micros} us"));
        assert!(children[0].wait().unwrap().success());
        NodeDir::remove(node.path()).unwrap();
    }
    println!();
    println!("processes that saturate  least %   most %   ideal %   (of GPU time, as simulated)");
    for processes in [2, 8] {
        let node = node();
        let shares = shares(&node, processes);
        let least = shares.iter().copied().fold(f64::MAX, f64::min);
        let most = shares.iter().copied().fold(0.0, f64::max);
        println!("{processes:<24} {least:>7.2} {most:>8.2} {:>9.2}", 100.0 / processes as f64);
        NodeDir::remove(node.path()).unwrap();
    }
}

/// Returns the percentage of GPU time that each process got over two seconds in which all of them had work.
fn shares(node: &NodeDir, processes: usize) -> Vec<f64> {
    let (mut children, mut outputs) = start(node.path(), processes, &["saturate", "200"]);
    begin(&mut children, &mut outputs);
    let state = SimNodeState::attach(node.path()).unwrap();
    // After this delay every process has started.
    std::thread::sleep(Duration::from_millis(200));
    let served = || -> Vec<u64> { state.usage(0).processes.iter().map(|(_, served)| *served).collect() };
    let before = served();
    std::thread::sleep(Duration::from_secs(2));
    let gained: Vec<u64> = served().into_iter().zip(before).map(|(after, before)| after - before).collect();
    for child in &mut children {
        child.kill().unwrap();
        child.wait().unwrap();
    }
    assert_eq!(gained.len(), processes);
    let all: u64 = gained.iter().sum();
    gained.into_iter().map(|part| part as f64 / all as f64 * 100.0).collect()
}

fn node() -> NodeDir {
    let config = NodeConfig::new(DriverVersion::R550, &profile::A100_SXM4_40GB, 1, 7).unwrap();
    let node = NodeDir::create_temporary(&config).unwrap();
    let object = install::shared_object().unwrap();
    install::write_libraries(&object, &node.libraries(), DriverVersion::R550, node.path()).unwrap();
    node
}

/// Returns the median over all processes of what a call costs, in nanoseconds.
fn costs(call: &str, processes: usize) -> f64 {
    let node = node();
    let mut costs = clients(node.path(), processes, &["cost", call]);
    NodeDir::remove(node.path()).unwrap();
    costs.sort_by(f64::total_cmp);
    costs[costs.len() / 2]
}

/// Standard outputs of the client processes.
type ClientOutputs = Vec<BufReader<ChildStdout>>;

fn start(node: &Path, processes: usize, arguments: &[&str]) -> (Vec<Child>, ClientOutputs) {
    let start = |_| {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.arg("client").args(arguments);
        command.env("PARTAGE_SIM_DIR", node).env("LD_LIBRARY_PATH", node.join("lib"));
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap()
    };
    let mut children: Vec<Child> = (0..processes).map(start).collect();
    let outputs = children.iter_mut().map(|child| BufReader::new(child.stdout.take().unwrap())).collect();
    (children, outputs)
}

fn line(output: &mut BufReader<ChildStdout>) -> String {
    let mut line = String::new();
    output.read_line(&mut line).unwrap();
    line.trim().to_string()
}

/// Waits until every client is ready, then starts all of them together.
fn begin(children: &mut [Child], outputs: &mut ClientOutputs) {
    for output in outputs {
        assert_eq!(line(output), "ready");
    }
    for child in children {
        child.stdin.take().unwrap().write_all(b"wait_for_start\n").unwrap();
    }
}

/// Starts clients together and returns the number that each one printed.
fn clients(node: &Path, processes: usize, arguments: &[&str]) -> Vec<f64> {
    let (mut children, mut outputs) = start(node, processes, arguments);
    begin(&mut children, &mut outputs);
    let results = outputs.iter_mut().map(|output| line(output).parse().unwrap()).collect();
    for child in &mut children {
        assert!(child.wait().unwrap().success());
    }
    results
}

fn client(arguments: &[String]) {
    let cuda = CudaLibrary::started();
    let mut context = std::ptr::null_mut();
    // SAFETY: all pointers refer to local variables that outlive the calls.
    unsafe {
        assert_eq!(cuda.cuCtxCreate_v2(&mut context, 0, 0), CUDA_SUCCESS);
    }
    let result = match arguments {
        [kind, call] if kind == "cost" => cost(&cuda, call),
        [kind, count, micros] if kind == "kernels" => kernels(&cuda, count.parse().unwrap(), micros),
        [kind, micros] if kind == "saturate" => saturate(&cuda, micros),
        [kind, micros] if kind == "words" => return words(&cuda, micros),
        other => panic!("{other:?}"),
    };
    println!("{result}");
}

/// Reports that the client is ready and waits for the parent process to start it.
fn wait_for_start() {
    println!("ready");
    let mut line = String::new();
    std::io::stdin().read_line(&mut line).unwrap();
}

fn function(cuda: &CudaLibrary, name: &str) -> CUfunction {
    let (mut module, mut function) = (std::ptr::null_mut(), std::ptr::null_mut());
    let name = std::ffi::CString::new(name).unwrap();
    // SAFETY: all pointers refer to local variables that outlive the calls.
    unsafe {
        assert_eq!(cuda.cuModuleLoadData(&mut module, c"any".as_ptr().cast()), CUDA_SUCCESS);
        assert_eq!(cuda.cuModuleGetFunction(&mut function, module, name.as_ptr()), CUDA_SUCCESS);
    }
    function
}

fn launch(cuda: &CudaLibrary, function: CUfunction) {
    let none = std::ptr::null_mut();
    // SAFETY: the launch passes no kernel arguments and uses the default stream.
    let code =
        unsafe { cuda.cuLaunchKernel(function, 1 << 20, 1, 1, 256, 1, 1, 0, none, none.cast(), none.cast()) };
    assert_eq!(code, CUDA_SUCCESS);
}

fn processor_time() -> f64 {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    time.tv_sec as f64 * 1e9 + time.tv_nsec as f64
}

/// Returns the median cost of a call over several rounds, in nanoseconds of CPU time.
fn cost(cuda: &CudaLibrary, call: &str) -> f64 {
    const ROUNDS: usize = 21;
    const CALLS: u32 = 50_000;
    let (nothing, something) = (function(cuda, "busy_0us"), function(cuda, "busy_1us"));
    let (_, word) = pinned_word(cuda);
    match call {
        "launch-queued" => return queued_cost(cuda, something, || launch(cuda, something)),
        "write-queued" => return queued_cost(cuda, something, || write_word(cuda, word, 1)),
        _ => {}
    }
    let round = || {
        let start = processor_time();
        for _ in 0..CALLS {
            match call {
                "launch" => launch(cuda, nothing),
                "write-word" => write_word(cuda, word, 1),
                "mem-get-info" => {
                    let (mut free, mut total) = (0, 0);
                    // SAFETY: the outputs are local variables.
                    assert_eq!(unsafe { cuda.cuMemGetInfo_v2(&mut free, &mut total) }, CUDA_SUCCESS);
                }
                "alloc-free" => {
                    let mut pointer = 0;
                    // SAFETY: the output is a local variable, valid for writes during the call.
                    assert_eq!(unsafe { cuda.cuMemAlloc_v2(&mut pointer, 1 << 20) }, CUDA_SUCCESS);
                    // SAFETY: the pointer was allocated by the call above.
                    assert_eq!(unsafe { cuda.cuMemFree_v2(pointer) }, CUDA_SUCCESS);
                }
                other => panic!("{other}"),
            }
        }
        (processor_time() - start) / f64::from(CALLS)
    };
    round();
    wait_for_start();
    let mut rounds: Vec<f64> = (0..ROUNDS).map(|_| round()).collect();
    rounds.sort_by(f64::total_cmp);
    rounds[ROUNDS / 2]
}

/// Allocates a pinned word; returns it and its address for the driver.
fn pinned_word(cuda: &CudaLibrary) -> (&'static AtomicU64, CUdeviceptr) {
    let mut page = std::ptr::null_mut();
    // SAFETY: the output is a local variable, valid for writes during the call.
    assert_eq!(unsafe { cuda.cuMemHostAlloc(&mut page, 4096, 0) }, CUDA_SUCCESS);
    // SAFETY: page-aligned memory that is never freed and is accessed only atomically.
    (unsafe { &*page.cast() }, page as u64)
}

fn write_word(cuda: &CudaLibrary, address: CUdeviceptr, value: u64) {
    // SAFETY: the address is pinned memory of the driver.
    let code = unsafe { cuda.cuStreamWriteValue64_v2(std::ptr::null_mut(), address, value, 0) };
    assert_eq!(code, CUDA_SUCCESS);
}

/// Prints how late words behind a kernel appear to a thread that does not call the driver.
fn words(cuda: &CudaLibrary, micros: &str) {
    let busy = function(cuda, &format!("busy_{micros}us"));
    let (word, address) = pinned_word(cuda);
    wait_for_start();
    let wanted: f64 = micros.parse().unwrap();
    let mut late: Vec<f64> = (1..=400)
        .map(|value| {
            let start = Instant::now();
            launch(cuda, busy);
            write_word(cuda, address, value);
            while word.load(Ordering::Acquire) != value {
                std::thread::sleep(Duration::from_micros(10));
            }
            start.elapsed().as_secs_f64() * 1e6 - wanted
        })
        .collect();
    late.sort_by(f64::total_cmp);
    println!("{:>14.0} {:>14.0}", late[late.len() / 2], late[late.len() * 99 / 100]);
}

/// Returns the median cost of a call while the launch queue is busy but never full.
fn queued_cost(cuda: &CudaLibrary, function: CUfunction, call: impl Fn()) -> f64 {
    wait_for_start();
    let mut rounds: Vec<f64> = (0..501)
        .map(|_| {
            // SAFETY: no pointer is passed.
            assert_eq!(unsafe { cuda.cuCtxSynchronize() }, CUDA_SUCCESS);
            for _ in 0..100 {
                launch(cuda, function);
            }
            let start = processor_time();
            for _ in 0..900 {
                call();
            }
            (processor_time() - start) / 900.0
        })
        .collect();
    rounds.sort_by(f64::total_cmp);
    rounds[rounds.len() / 2]
}

/// Returns the milliseconds between two events that enclose `count` kernels.
fn kernels(cuda: &CudaLibrary, count: u32, micros: &str) -> f64 {
    let busy = function(cuda, &format!("busy_{micros}us"));
    let (mut start, mut end) = (std::ptr::null_mut(), std::ptr::null_mut());
    let none = std::ptr::null_mut();
    wait_for_start();
    let mut took = 0.0;
    // SAFETY: all pointers refer to local variables that outlive the calls.
    unsafe {
        assert_eq!(cuda.cuEventCreate(&mut start, 0), CUDA_SUCCESS);
        assert_eq!(cuda.cuEventCreate(&mut end, 0), CUDA_SUCCESS);
        assert_eq!(cuda.cuEventRecord(start, none), CUDA_SUCCESS);
        for _ in 0..count {
            launch(cuda, busy);
        }
        assert_eq!(cuda.cuEventRecord(end, none), CUDA_SUCCESS);
        assert_eq!(cuda.cuEventSynchronize(end), CUDA_SUCCESS);
        assert_eq!(cuda.cuEventElapsedTime(&mut took, start, end), CUDA_SUCCESS);
    }
    f64::from(took)
}

/// Launches kernels until the process is killed.
fn saturate(cuda: &CudaLibrary, micros: &str) -> ! {
    let busy = function(cuda, &format!("busy_{micros}us"));
    wait_for_start();
    loop {
        launch(cuda, busy);
    }
}
