//! What the simulated driver's calls cost, and how exact its time is. Run by `make bench`.
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
use partage_sim_node::state::State;
use partage_sim_node::{install, profile};
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, ChildStdout, Command, Stdio};
use std::time::Duration;

fn main() {
    let arguments: Vec<String> = std::env::args().collect();
    match arguments.iter().position(|word| word == "client") {
        Some(at) => client(&arguments[at + 1..]),
        None => benches(),
    }
}

fn benches() {
    println!("call                     1 process   32 processes   (median ns of processor time)");
    for call in ["alloc-free", "launch", "launch-queued", "mem-get-info"] {
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
        "processes that saturate  least %   most %   ideal %   (of the GPU's time, in the simulated truth)"
    );
    for processes in [2, 8] {
        let node = node();
        let shares = shares(&node, processes);
        let least = shares.iter().copied().fold(f64::MAX, f64::min);
        let most = shares.iter().copied().fold(0.0, f64::max);
        println!("{processes:<24} {least:>7.2} {most:>8.2} {:>9.2}", 100.0 / processes as f64);
        NodeDir::remove(node.path()).unwrap();
    }
}

/// Percent of a GPU's time that each of so many processes got within two seconds in which all had work.
fn shares(node: &NodeDir, processes: usize) -> Vec<f64> {
    let (mut children, mut outputs) = start(node.path(), processes, &["saturate", "200"]);
    begin(&mut children, &mut outputs);
    let state = State::attach(node.path()).unwrap();
    // All have begun when this is over.
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
    let node = NodeDir::fresh(&config).unwrap();
    let object = install::shared_object().unwrap();
    install::libraries(&object, &node.libraries(), DriverVersion::R550, node.path()).unwrap();
    node
}

/// Median over the processes of what a call costs.
fn costs(call: &str, processes: usize) -> f64 {
    let node = node();
    let mut costs = clients(node.path(), processes, &["cost", call]);
    NodeDir::remove(node.path()).unwrap();
    costs.sort_by(f64::total_cmp);
    costs[costs.len() / 2]
}

type Outputs = Vec<BufReader<ChildStdout>>;

fn start(node: &Path, processes: usize, arguments: &[&str]) -> (Vec<Child>, Outputs) {
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

/// Lets them begin together.
fn begin(children: &mut [Child], outputs: &mut Outputs) {
    for output in outputs {
        assert_eq!(line(output), "ready");
    }
    for child in children {
        child.stdin.take().unwrap().write_all(b"go\n").unwrap();
    }
}

/// Starts clients, lets them begin together, and returns what each printed.
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
    let cuda = Cuda::started();
    let mut context = std::ptr::null_mut();
    // SAFETY: all pointers are to variables that live through the calls.
    unsafe {
        assert_eq!(cuda.cuCtxCreate_v2(&mut context, 0, 0), CUDA_SUCCESS);
    }
    let result = match arguments {
        [kind, call] if kind == "cost" => cost(&cuda, call),
        [kind, count, micros] if kind == "kernels" => kernels(&cuda, count.parse().unwrap(), micros),
        [kind, micros] if kind == "saturate" => saturate(&cuda, micros),
        other => panic!("{other:?}"),
    };
    println!("{result}");
}

/// The one who started this process says when.
fn go() {
    println!("ready");
    let mut line = String::new();
    std::io::stdin().read_line(&mut line).unwrap();
}

fn function(cuda: &Cuda, name: &str) -> CUfunction {
    let (mut module, mut function) = (std::ptr::null_mut(), std::ptr::null_mut());
    let name = std::ffi::CString::new(name).unwrap();
    // SAFETY: as above.
    unsafe {
        assert_eq!(cuda.cuModuleLoadData(&mut module, c"any".as_ptr().cast()), CUDA_SUCCESS);
        assert_eq!(cuda.cuModuleGetFunction(&mut function, module, name.as_ptr()), CUDA_SUCCESS);
    }
    function
}

fn launch(cuda: &Cuda, function: CUfunction) {
    let none = std::ptr::null_mut();
    // SAFETY: no arguments, no stream.
    let code =
        unsafe { cuda.cuLaunchKernel(function, 1 << 20, 1, 1, 256, 1, 1, 0, none, none.cast(), none.cast()) };
    assert_eq!(code, CUDA_SUCCESS);
}

fn processor_time() -> f64 {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    time.tv_sec as f64 * 1e9 + time.tv_nsec as f64
}

/// Median of rounds: what a call costs, in nanoseconds of processor time.
fn cost(cuda: &Cuda, call: &str) -> f64 {
    const ROUNDS: usize = 21;
    const CALLS: u32 = 50_000;
    let (nothing, something) = (function(cuda, "busy_0us"), function(cuda, "busy_1us"));
    if call == "launch-queued" {
        return queued_cost(cuda, something);
    }
    let round = || {
        let start = processor_time();
        for _ in 0..CALLS {
            match call {
                "launch" => launch(cuda, nothing),
                "mem-get-info" => {
                    let (mut free, mut total) = (0, 0);
                    // SAFETY: as above.
                    assert_eq!(unsafe { cuda.cuMemGetInfo_v2(&mut free, &mut total) }, CUDA_SUCCESS);
                }
                "alloc-free" => {
                    let mut pointer = 0;
                    // SAFETY: as above.
                    assert_eq!(unsafe { cuda.cuMemAlloc_v2(&mut pointer, 1 << 20) }, CUDA_SUCCESS);
                    // SAFETY: as above.
                    assert_eq!(unsafe { cuda.cuMemFree_v2(pointer) }, CUDA_SUCCESS);
                }
                other => panic!("{other}"),
            }
        }
        (processor_time() - start) / f64::from(CALLS)
    };
    round();
    go();
    let mut rounds: Vec<f64> = (0..ROUNDS).map(|_| round()).collect();
    rounds.sort_by(f64::total_cmp);
    rounds[ROUNDS / 2]
}

/// The same for kernels that wait in the queue, which must not be full.
fn queued_cost(cuda: &Cuda, function: CUfunction) -> f64 {
    go();
    let mut rounds: Vec<f64> = (0..501)
        .map(|_| {
            // SAFETY: no pointers.
            assert_eq!(unsafe { cuda.cuCtxSynchronize() }, CUDA_SUCCESS);
            let start = processor_time();
            for _ in 0..1000 {
                launch(cuda, function);
            }
            (processor_time() - start) / 1000.0
        })
        .collect();
    rounds.sort_by(f64::total_cmp);
    rounds[rounds.len() / 2]
}

/// Milliseconds between two events with `count` kernels between them.
fn kernels(cuda: &Cuda, count: u32, micros: &str) -> f64 {
    let busy = function(cuda, &format!("busy_{micros}us"));
    let (mut start, mut end) = (std::ptr::null_mut(), std::ptr::null_mut());
    let none = std::ptr::null_mut();
    go();
    let mut took = 0.0;
    // SAFETY: as above.
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

/// Always has work, until killed.
fn saturate(cuda: &Cuda, micros: &str) -> ! {
    let busy = function(cuda, &format!("busy_{micros}us"));
    go();
    loop {
        launch(cuda, busy);
    }
}
