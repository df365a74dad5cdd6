//! Runs the samples on a simulated node, without shares.
#![allow(clippy::unwrap_used, clippy::expect_used)]

use partage_driver_api::exports::DriverVersion;
use partage_sim_node::install;
use partage_sim_node::node::{NODE_DIR_VARIABLE, NodeConfig, NodeDir};
use partage_sim_node::profile::GpuProfile;
use partage_sim_node::state::{GpuFault, SimNodeState, UNIT};
use std::io::{BufRead, BufReader, Read};
use std::process::{Child, Command, Output, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

const GIB: u64 = 1 << 30;
/// Longer than any step takes on a busy machine.
const TIMEOUT: Duration = Duration::from_secs(120);

/// A simulated node that is removed on drop.
struct SimulatedNode {
    dir: NodeDir,
    state: SimNodeState,
}

impl SimulatedNode {
    fn of(card: &GpuProfile, gpus: usize) -> SimulatedNode {
        let config = NodeConfig::new(DriverVersion::R550, card, gpus, 3).unwrap();
        let dir = NodeDir::create_temporary(&config).unwrap();
        let object = install::shared_object().unwrap();
        install::write_libraries(&object, &dir.libraries(), config.driver, dir.path()).unwrap();
        let state = SimNodeState::attach(dir.path()).unwrap();
        SimulatedNode { dir, state }
    }

    fn a100(gpus: usize) -> SimulatedNode {
        SimulatedNode::of(GpuProfile::named("A100-SXM4-40GB").unwrap(), gpus)
    }

    /// Creates a node with a T4 that has less memory.
    fn small(mib: u64) -> SimulatedNode {
        let text = format!(r#"{{"base": "T4", "model": "T4-small", "memory": {{"total": {}}}}}"#, mib << 20);
        SimulatedNode::of(&GpuProfile::from_json(&text).unwrap(), 1)
    }

    fn sample(&self, arguments: &str) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_partage-sample"));
        command.args(arguments.split(' ')).env("LD_LIBRARY_PATH", self.dir.libraries());
        command.env_remove(NODE_DIR_VARIABLE).env_remove("CUDA_VISIBLE_DEVICES");
        command
    }

    fn start(&self, arguments: &str) -> RunningSample {
        RunningSample::of(self.sample(arguments))
    }

    fn used(&self, gpu: usize) -> u64 {
        self.state.used_memory(gpu) * UNIT
    }
}

impl Drop for SimulatedNode {
    fn drop(&mut self) {
        let _ = NodeDir::remove(self.dir.path());
    }
}

/// A running sample and its output lines.
struct RunningSample {
    child: Child,
    lines: Receiver<String>,
}

impl RunningSample {
    fn of(mut command: Command) -> RunningSample {
        let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let (says, lines) = channel();
        let out = BufReader::new(child.stdout.take().unwrap());
        std::thread::spawn(move || out.lines().map_while(Result::ok).try_for_each(|line| says.send(line)));
        RunningSample { child, lines }
    }

    /// Waits for the next line.
    fn next_line(&self) -> String {
        self.lines.recv_timeout(TIMEOUT).expect("the sample prints a line")
    }

    fn signal(&self, name: &str) {
        let kill = Command::new("kill").args(["-s", name, &self.child.id().to_string()]).status();
        assert!(kill.unwrap().success());
    }

    /// Waits for the end and returns the exit code, the last line of output, and standard error.
    fn wait(mut self) -> (Option<i32>, String, String) {
        let (mut last, mut errors) = (String::new(), String::new());
        while let Ok(line) = self.lines.recv_timeout(TIMEOUT) {
            last = line;
        }
        self.child.stderr.take().unwrap().read_to_string(&mut errors).unwrap();
        (self.child.wait().unwrap().code(), last, errors)
    }
}

impl Drop for RunningSample {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn wait_until(what: &str, mut holds: impl FnMut() -> bool) {
    let deadline = Instant::now() + TIMEOUT;
    while !holds() {
        assert!(Instant::now() < deadline, "never: {what}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

fn lines(output: &Output) -> Vec<String> {
    String::from_utf8_lossy(&output.stdout).lines().map(String::from).collect()
}

/// Returns the number before a word: `step 12, 31 % of the GPU` has 31 before `%`.
fn number_before(line: &str, word: &str) -> u64 {
    let words: Vec<&str> = line.split([' ', ',']).filter(|word| !word.is_empty()).collect();
    let at = words.iter().position(|there| *there == word).unwrap_or_else(|| panic!("{line}"));
    words[at - 1].parse().unwrap_or_else(|_| panic!("{line}"))
}

#[test]
fn trainer_with_a_time_limit_computes_and_exits() {
    let node = SimulatedNode::a100(1);
    let output = node.sample("trainer --memory 1Gi --seconds 1.5").output().unwrap();
    assert_eq!(output.status.code(), Some(0), "{output:?}");
    let printed = lines(&output);
    assert_eq!(printed[0], "the model takes 1.0 GiB");
    let last = printed.last().unwrap();
    assert!(last.starts_with("ended after ") && number_before(last, "steps") > 0, "{printed:?}");
    assert_eq!(node.used(0), 0);
}

#[test]
fn trainer_holds_its_model_until_a_signal() {
    let node = SimulatedNode::a100(2);
    for signal in ["TERM", "INT"] {
        let trainer = node.start("trainer --memory 6Gi --every 0.1 --gpu 1");
        assert_eq!(trainer.next_line(), "the model takes 6.0 GiB");
        assert!((6 * GIB..7 * GIB).contains(&node.used(1)));
        assert_eq!(node.used(0), 0);
        let step = trainer.next_line();
        assert!(step.starts_with("step ") && number_before(&step, "%") <= 100, "{step}");
        trainer.signal(signal);
        let (code, last, errors) = trainer.wait();
        assert_eq!((code, errors.as_str()), (Some(0), ""));
        assert!(last.starts_with("ended after "), "{last}");
    }
}

#[test]
fn model_that_does_not_fit_is_reported() {
    let node = SimulatedNode::small(4096);
    let output = node.sample("trainer --memory 6Gi").output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    let message = String::from_utf8_lossy(&output.stderr);
    assert!(message.starts_with("error: out of memory: the model takes 6.0 GiB, but of "), "{message}");
    assert!(message.contains("use less --memory"), "{message}");
}

#[test]
fn notebook_releases_memory_after_each_cell() {
    let node = SimulatedNode::a100(1);
    let notebook = node.start("notebook --memory 4Gi --seed 5");
    wait_until("a cell has memory", || node.used(0) > GIB);
    let cell = notebook.next_line();
    assert!(cell.starts_with("cell 1: ") && cell.contains(" s of kernels in "), "{cell}");
    wait_until("the memory is freed", || node.used(0) < GIB);
    assert!(node.used(0) > 0, "the context stays");
    let cell = notebook.next_line();
    assert!(cell.starts_with("cell 2: "), "{cell}");
    notebook.signal("INT");
    let (code, last, errors) = notebook.wait();
    assert_eq!((code, errors.as_str()), (Some(0), ""));
    assert!(number_before(&last, "cells") >= 2 && number_before(&last, "refused") == 0, "{last}");
}

#[test]
fn notebook_skips_a_cell_that_does_not_fit() {
    let node = SimulatedNode::small(2048);
    let output = node.sample("notebook --memory 64Gi --seconds 1").output().unwrap();
    assert_eq!((output.status.code(), output.stderr.as_slice()), (Some(0), [].as_slice()));
    let printed = lines(&output);
    assert!(
        printed[0].starts_with("cell 1: ") && printed[0].ends_with(" refused: out of memory"),
        "{printed:?}"
    );
    assert_eq!((number_before(&printed[1], "cells"), number_before(&printed[1], "refused")), (0, 1));
}

#[test]
fn greedy_continues_after_a_refusal() {
    let node = SimulatedNode::small(3072);
    let greedy = node.start("greedy");
    assert_eq!(greedy.next_line(), "refused at 2.0 GiB: out of memory; freeing half");
    wait_until("half is freed", || node.used(0) < 2 * GIB);
    assert!(node.used(0) > GIB, "half is kept");
    assert_eq!(greedy.next_line(), "refused at 2.0 GiB: out of memory; freeing half", "it allocates again");
    greedy.signal("TERM");
    let (code, last, errors) = greedy.wait();
    assert_eq!((code, errors.as_str()), (Some(0), ""));
    assert!(number_before(&last, "times") >= 2 && last.contains(" times, held at most 2.0 GiB, "), "{last}");
    assert!(number_before(&last, "%") > 0, "it computes: {last}");
}

#[test]
fn greedy_retries_when_its_context_does_not_fit() {
    let node = SimulatedNode::small(1024);
    let card = &node.dir.config().profiles[0].memory;
    // Half of the memory of a context is left.
    let room = card.total - card.reserved - card.context - card.context / 2;
    let other = node.start(&format!("trainer --memory {room}"));
    other.next_line();
    let greedy = node.start("greedy");
    assert_eq!(greedy.next_line(), "refused at 0.0 GiB: out of memory; retrying later");
    greedy.signal("TERM");
    let (code, last, errors) = greedy.wait();
    assert_eq!((code, errors.as_str()), (Some(0), ""));
    assert!(last.contains(", held at most 0.0 GiB"), "{last}");
}

#[test]
fn lost_gpu_is_reported() {
    let node = SimulatedNode::a100(1);
    for sample in ["trainer --every 0.1", "greedy"] {
        let running = node.start(sample);
        wait_until("it computes", || node.state.processes(0).len() == 1 && node.used(0) > GIB);
        node.state.inject(0, GpuFault::Lost);
        let (code, _, errors) = running.wait();
        assert_eq!(code, Some(1), "{sample}: {errors}");
        assert!(errors.starts_with("error: cu") && errors.contains("CUDA_ERROR_UNKNOWN"), "{errors}");
        node.state.inject(0, GpuFault::Returned);
    }
}

#[test]
fn missing_driver_or_gpu_is_reported() {
    let node = SimulatedNode::a100(1);
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("libcuda.so.1"), "no library").unwrap();
    let none = node.sample("greedy").env("LD_LIBRARY_PATH", folder.path()).output().unwrap();
    let unnamed = node.sample("notebook").env(NODE_DIR_VARIABLE, "/nonexistent").output().unwrap();
    let third = node.sample("trainer --gpu 2").output().unwrap();
    for (output, expected) in [
        (none, "error: cannot load the driver: "),
        (unnamed, "error: cuInit failed: no CUDA-capable device is detected"),
        (third, "error: cuDeviceGet failed: invalid device ordinal"),
    ] {
        assert_eq!((output.status.code(), output.stdout.as_slice()), (Some(1), [].as_slice()));
        let message = String::from_utf8_lossy(&output.stderr);
        assert!(message.starts_with(expected), "{message}");
    }
}

#[test]
fn closed_output_ends_the_sample() {
    let node = SimulatedNode::a100(1);
    let mut command = node.sample("trainer --memory 1Gi --every 0.05");
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut first = String::new();
    BufReader::new(child.stdout.take().unwrap()).read_line(&mut first).unwrap();
    assert_eq!(first, "the model takes 1.0 GiB\n");
    let output = child.wait_with_output().unwrap();
    assert_eq!((output.status.code(), output.stderr.as_slice()), (Some(0), [].as_slice()));
}

#[test]
fn invalid_arguments_and_help_are_answered() {
    let node = SimulatedNode::a100(1);
    for (arguments, expected) in [
        ("trainer --memory 5gb", "ends in \"gb\", which is not a Kubernetes suffix"),
        ("trainer --seconds 0", "invalid number of seconds \"0\""),
        ("trainer --every never", "invalid number of seconds \"never\""),
        ("notebook --memory 0", "the amount of memory must be positive"),
        ("gambler", "unrecognized subcommand 'gambler'"),
    ] {
        let output = node.sample(arguments).output().unwrap();
        let message = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.code() == Some(2) && message.contains(expected), "{message}");
    }
    for arguments in ["--help", "trainer --help", "notebook --help", "greedy --help"] {
        let output = node.sample(arguments).output().unwrap();
        assert!(lines(&output).iter().any(|line| line == "Examples:"), "{output:?}");
    }
}
