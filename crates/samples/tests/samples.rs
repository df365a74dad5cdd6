//! The samples as a person runs them: bare, on a simulated node.
#![allow(clippy::unwrap_used, clippy::expect_used)]

use partage_driver_api::exports::DriverVersion;
use partage_sim_node::install;
use partage_sim_node::node::{NodeConfig, NodeDir, VARIABLE};
use partage_sim_node::profile::Profile;
use partage_sim_node::state::{Fault, State, UNIT};
use std::io::{BufRead, BufReader, Read};
use std::process::{Child, Command, Output, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

const GIB: u64 = 1 << 30;
/// Longer than anything here takes on a busy machine.
const PATIENCE: Duration = Duration::from_secs(120);

/// A node, gone with the test.
struct Node {
    dir: NodeDir,
    state: State,
}

impl Node {
    fn of(card: &Profile, gpus: usize) -> Node {
        let config = NodeConfig::new(DriverVersion::R550, card, gpus, 3).unwrap();
        let dir = NodeDir::fresh(&config).unwrap();
        let object = install::shared_object().unwrap();
        install::libraries(&object, &dir.libraries(), config.driver, dir.path()).unwrap();
        let state = State::attach(dir.path()).unwrap();
        Node { dir, state }
    }

    fn a100(gpus: usize) -> Node {
        Node::of(Profile::named("A100-SXM4-40GB").unwrap(), gpus)
    }

    /// A T4 with less memory.
    fn small(mib: u64) -> Node {
        let text = format!(r#"{{"base": "T4", "model": "T4-small", "memory": {{"total": {}}}}}"#, mib << 20);
        Node::of(&Profile::from_json(&text).unwrap(), 1)
    }

    fn sample(&self, arguments: &str) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_partage-sample"));
        command.args(arguments.split(' ')).env("LD_LIBRARY_PATH", self.dir.libraries());
        command.env_remove(VARIABLE).env_remove("CUDA_VISIBLE_DEVICES");
        command
    }

    fn start(&self, arguments: &str) -> Running {
        Running::of(self.sample(arguments))
    }

    fn used(&self, gpu: usize) -> u64 {
        self.state.used_memory(gpu) * UNIT
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        let _ = NodeDir::remove(self.dir.path());
    }
}

/// A sample that goes on, and what it says.
struct Running {
    child: Child,
    lines: Receiver<String>,
}

impl Running {
    fn of(mut command: Command) -> Running {
        let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let (says, lines) = channel();
        let out = BufReader::new(child.stdout.take().unwrap());
        std::thread::spawn(move || out.lines().map_while(Result::ok).try_for_each(|line| says.send(line)));
        Running { child, lines }
    }

    /// The next line.
    fn hears(&self) -> String {
        self.lines.recv_timeout(PATIENCE).expect("it says something")
    }

    fn signal(&self, name: &str) {
        let kill = Command::new("kill").args(["-s", name, &self.child.id().to_string()]).status();
        assert!(kill.unwrap().success());
    }

    /// Its exit code, the last line it said, and what it complained about.
    fn ends(mut self) -> (Option<i32>, String, String) {
        let (mut last, mut errors) = (String::new(), String::new());
        while let Ok(line) = self.lines.recv_timeout(PATIENCE) {
            last = line;
        }
        self.child.stderr.take().unwrap().read_to_string(&mut errors).unwrap();
        (self.child.wait().unwrap().code(), last, errors)
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn eventually(what: &str, mut holds: impl FnMut() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !holds() {
        assert!(Instant::now() < deadline, "never: {what}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

fn lines(output: &Output) -> Vec<String> {
    String::from_utf8_lossy(&output.stdout).lines().map(String::from).collect()
}

/// The number before a word: `step 12, 31 % of the GPU` has 31 before `%`.
fn before(line: &str, word: &str) -> u64 {
    let words: Vec<&str> = line.split([' ', ',']).filter(|word| !word.is_empty()).collect();
    let at = words.iter().position(|there| *there == word).unwrap_or_else(|| panic!("{line}"));
    words[at - 1].parse().unwrap_or_else(|_| panic!("{line}"))
}

#[test]
fn a_trainer_computes_for_as_long_as_it_is_told() {
    let node = Node::a100(1);
    let output = node.sample("trainer --memory 1Gi --seconds 1.5").output().unwrap();
    assert_eq!(output.status.code(), Some(0), "{output:?}");
    let said = lines(&output);
    assert_eq!(said[0], "the model takes 1.0 GiB");
    let last = said.last().unwrap();
    assert!(last.starts_with("ended after ") && before(last, "steps") > 0, "{said:?}");
    assert_eq!(node.used(0), 0);
}

#[test]
fn a_trainer_holds_its_model_until_it_is_told_to_end() {
    let node = Node::a100(2);
    for signal in ["TERM", "INT"] {
        let trainer = node.start("trainer --memory 6Gi --every 0.1 --gpu 1");
        assert_eq!(trainer.hears(), "the model takes 6.0 GiB");
        assert!((6 * GIB..7 * GIB).contains(&node.used(1)));
        assert_eq!(node.used(0), 0);
        let step = trainer.hears();
        assert!(step.starts_with("step ") && before(&step, "%") <= 100, "{step}");
        trainer.signal(signal);
        let (code, last, errors) = trainer.ends();
        assert_eq!((code, errors.as_str()), (Some(0), ""));
        assert!(last.starts_with("ended after "), "{last}");
    }
}

#[test]
fn a_model_that_does_not_fit_is_said() {
    let node = Node::small(4096);
    let output = node.sample("trainer --memory 6Gi").output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    let words = String::from_utf8_lossy(&output.stderr);
    assert!(words.starts_with("error: out of memory: the model takes 6.0 GiB, and of "), "{words}");
    assert!(words.contains("use less --memory"), "{words}");
}

#[test]
fn a_notebook_gives_back_what_a_cell_took() {
    let node = Node::a100(1);
    let notebook = node.start("notebook --memory 4Gi --seed 5");
    eventually("a cell has memory", || node.used(0) > GIB);
    let cell = notebook.hears();
    assert!(cell.starts_with("cell 1: ") && cell.contains(" s of kernels in "), "{cell}");
    eventually("the memory is back", || node.used(0) < GIB);
    assert!(node.used(0) > 0, "the program stays");
    let cell = notebook.hears();
    assert!(cell.starts_with("cell 2: "), "{cell}");
    notebook.signal("INT");
    let (code, last, errors) = notebook.ends();
    assert_eq!((code, errors.as_str()), (Some(0), ""));
    assert!(before(&last, "cells") >= 2 && before(&last, "refused") == 0, "{last}");
}

#[test]
fn a_notebook_lives_with_a_cell_that_does_not_fit() {
    let node = Node::small(2048);
    let output = node.sample("notebook --memory 64Gi --seconds 1").output().unwrap();
    assert_eq!((output.status.code(), output.stderr.as_slice()), (Some(0), [].as_slice()));
    let said = lines(&output);
    assert!(said[0].starts_with("cell 1: ") && said[0].ends_with(" refused: out of memory"), "{said:?}");
    assert_eq!((before(&said[1], "cells"), before(&said[1], "refused")), (0, 1));
}

#[test]
fn a_greedy_one_lives_with_its_refusal() {
    let node = Node::small(3072);
    let greedy = node.start("greedy");
    assert_eq!(greedy.hears(), "refused at 2.0 GiB: out of memory; giving half back");
    eventually("half is back", || node.used(0) < 2 * GIB);
    assert!(node.used(0) > GIB, "half is kept");
    assert_eq!(greedy.hears(), "refused at 2.0 GiB: out of memory; giving half back", "it asks again");
    greedy.signal("TERM");
    let (code, last, errors) = greedy.ends();
    assert_eq!((code, errors.as_str()), (Some(0), ""));
    assert!(before(&last, "times") >= 2 && last.contains(" times, held at most 2.0 GiB, "), "{last}");
    assert!(before(&last, "%") > 0, "it computes: {last}");
}

#[test]
fn a_greedy_one_waits_where_not_even_it_fits() {
    let node = Node::small(1024);
    let card = &node.dir.config().profiles[0].memory;
    // What is left is half of what the driver takes for a program.
    let room = card.total - card.reserved - card.context - card.context / 2;
    let other = node.start(&format!("trainer --memory {room}"));
    other.hears();
    let greedy = node.start("greedy");
    assert_eq!(greedy.hears(), "refused at 0.0 GiB: out of memory; asking again later");
    greedy.signal("TERM");
    let (code, last, errors) = greedy.ends();
    assert_eq!((code, errors.as_str()), (Some(0), ""));
    assert!(last.contains(", held at most 0.0 GiB"), "{last}");
}

#[test]
fn a_gpu_that_falls_off_the_bus_is_said() {
    let node = Node::a100(1);
    for sample in ["trainer --every 0.1", "greedy"] {
        let running = node.start(sample);
        eventually("it computes", || node.state.processes(0).len() == 1 && node.used(0) > GIB);
        node.state.inject(0, Fault::Lost);
        let (code, _, errors) = running.ends();
        assert_eq!(code, Some(1), "{sample}: {errors}");
        assert!(errors.starts_with("error: cu") && errors.contains("CUDA_ERROR_UNKNOWN"), "{errors}");
        node.state.inject(0, Fault::Returned);
    }
}

#[test]
fn without_a_driver_or_a_gpu_it_is_said() {
    let node = Node::a100(1);
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("libcuda.so.1"), "no library").unwrap();
    let none = node.sample("greedy").env("LD_LIBRARY_PATH", folder.path()).output().unwrap();
    let unnamed = node.sample("notebook").env(VARIABLE, "/nonexistent").output().unwrap();
    let third = node.sample("trainer --gpu 2").output().unwrap();
    for (output, words) in [
        (none, "error: the driver cannot be loaded: "),
        (unnamed, "error: cuInit was refused: no CUDA device was found"),
        (third, "error: cuDeviceGet was refused: no such device"),
    ] {
        assert_eq!((output.status.code(), output.stdout.as_slice()), (Some(1), [].as_slice()));
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(said.starts_with(words), "{said}");
    }
}

#[test]
fn who_reads_no_more_ends_it() {
    let node = Node::a100(1);
    let mut command = node.sample("trainer --memory 1Gi --every 0.05");
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut first = String::new();
    BufReader::new(child.stdout.take().unwrap()).read_line(&mut first).unwrap();
    assert_eq!(first, "the model takes 1.0 GiB\n");
    let output = child.wait_with_output().unwrap();
    assert_eq!((output.status.code(), output.stderr.as_slice()), (Some(0), [].as_slice()));
}

#[test]
fn mistakes_and_questions_get_words() {
    let node = Node::a100(1);
    for (arguments, words) in [
        ("trainer --memory 5gb", "ends in \"gb\", which is no Kubernetes suffix"),
        ("trainer --seconds 0", "\"0\" is no number of seconds"),
        ("trainer --every never", "\"never\" is no number of seconds"),
        ("notebook --memory 0", "nothing is no amount of memory"),
        ("gambler", "unrecognized subcommand 'gambler'"),
    ] {
        let output = node.sample(arguments).output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.code() == Some(2) && said.contains(words), "{said}");
    }
    for arguments in ["--help", "trainer --help", "notebook --help", "greedy --help"] {
        let output = node.sample(arguments).output().unwrap();
        assert!(lines(&output).iter().any(|line| line == "Examples:"), "{output:?}");
    }
}
