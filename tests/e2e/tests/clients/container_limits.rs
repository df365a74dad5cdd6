//! Runs the clients in a container, next to another container on the same GPU: each shows the limit, the container's
//! own memory, processes and utilization, and nothing of the other container. Facts about the card itself do not
//! change.

use crate::client_node::{ClientNode, mib};
use crate::cuda_python::assert_launches;
use crate::nvidia_smi::{parse_monitor_rows, table_cells};
use crate::shim_container::ShimContainer;
use crate::terminal::TerminalProgram;
use partage_testkit::eventually;
use partage_testkit::sim_node::WorkloadProcess;
use partage_testkit::workload::WorkloadOptions;
use serde_json::{Value, json};
use std::process::Command;

const A100: &str = "A100-SXM4-40GB";
const MEMORY_LIMIT: u64 = 4 << 30;

/// A test node in a container of 4 GiB, its workload on GPU 1, and the workload of another container there that uses
/// more of everything.
struct SharedGpu {
    client_node: ClientNode,
    own: WorkloadProcess,
    neighbor: WorkloadProcess,
    other: ShimContainer,
}

impl SharedGpu {
    /// Returns one per driver. Either this container's workload is busy or the other container's.
    fn for_each_driver(busy: bool) -> impl Iterator<Item = Self> {
        ClientNode::on_node(&[A100], 2).map(move |client_node| {
            let client_node = client_node.in_container(MEMORY_LIMIT);
            let other = ShimContainer::new(&client_node.node, 3 * MEMORY_LIMIT);
            let load = |memory_mib, busy: bool| WorkloadOptions {
                gpu: 1,
                memory_mib,
                busy: if busy { 100 } else { 0 },
            };
            let own = client_node.workload_in(client_node.shim_container.as_ref(), load(1024, busy));
            let neighbor = client_node.workload_in(Some(&other), load(5000, !busy));
            Self { client_node, own, neighbor, other }
        })
    }

    /// Returns the bytes that its workload holds by the container's accounting, which must equal the driver's number.
    fn held_bytes(&self) -> u64 {
        let held = self.client_node.shim_container.as_ref().unwrap().used(1);
        let truth = self.client_node.node.state().processes(1);
        let own = truth.iter().find(|process| process.pid == self.own.pid()).unwrap();
        assert_eq!(held, own.used * partage_region::MEMORY_UNIT);
        assert!(held >= self.client_node.memory_with_context(1024));
        assert!(self.other.used(1) >= self.client_node.memory_with_context(5000));
        held
    }

    /// Fails if the text contains the process of the other container.
    #[track_caller]
    fn assert_neighbor_hidden(&self, text: &str) {
        let pid = self.neighbor.pid().to_string();
        let words = text.split(|letter: char| !letter.is_alphanumeric());
        assert!(words.into_iter().all(|word| word != pid), "the other container's process is {pid}:\n{text}");
    }
}

#[test]
fn nvidia_smi_shows_the_limit_and_own_processes() {
    for shared in SharedGpu::for_each_driver(false) {
        let (client_node, held) = (&shared.client_node, mib(shared.held_bytes()));
        let table = client_node.nvidia_smi(&[]).success();
        shared.assert_neighbor_hidden(&table);
        for (index, used) in [(0, 0), (1, held)] {
            let start = format!("|   {index}  NVIDIA A100-SXM4-40GB ");
            let figures = table.lines().skip_while(|line| !line.starts_with(&start)).nth(1).expect(&table);
            let memory = figures.split('|').nth(2).unwrap().replace(' ', "");
            assert_eq!(memory, format!("{used}MiB/4096MiB"), "{table}");
            assert!(figures.contains("    0%      Default |"), "only the other container is busy: {table}");
        }
        let process = table.lines().rev().nth(1).unwrap();
        let words: Vec<&str> = table_cells(process)[0].split_whitespace().collect();
        let (pid, memory) = (shared.own.pid().to_string(), format!("{held}MiB"));
        assert_eq!(words, ["1", "N/A", "N/A", &pid, "C", WorkloadProcess::PROCESS_NAME, &memory], "{table}");
        let apps = client_node
            .nvidia_smi(&["--query-compute-apps=pid,name,used_memory", "--format=csv,noheader,nounits"])
            .success();
        assert_eq!(apps, format!("{pid}, {}, {held}\n", WorkloadProcess::PROCESS_NAME));
        let fields =
            "--query-gpu=index,memory.total,memory.used,memory.free,memory.reserved,utilization.gpu,name";
        let gpus = client_node.nvidia_smi(&[fields, "--format=csv,noheader,nounits"]).success();
        let row = |index, used: u64| {
            format!("{index}, 4096, {used}, {}, 0, 0, NVIDIA A100-SXM4-40GB\n", 4096 - used)
        };
        assert_eq!(gpus, row(0, 0) + &row(1, held));
        let all = client_node.nvidia_smi(&["-q"]).success();
        shared.assert_neighbor_hidden(&all);
        assert!(all.contains(&pid) && all.contains("4096 MiB"), "{all}");
        let list = client_node.nvidia_smi(&["-L"]).success();
        let uuid = |index: usize| client_node.node.config().gpus[index].uuid.clone();
        assert!(list.contains(&uuid(0)) && list.contains(&uuid(1)), "{list}");
        let SharedGpu { client_node, own, neighbor, .. } = shared;
        drop(own);
        assert!(client_node.nvidia_smi(&[]).success().contains("No running processes found"));
        drop(neighbor);
    }
}

#[tokio::test]
async fn nvidia_smi_shows_own_utilization() {
    for shared in SharedGpu::for_each_driver(true) {
        let query = ["-i", "1", "--query-gpu=utilization.gpu", "--format=csv,noheader,nounits"];
        eventually("utilization of GPU 1 is 100 %", async || {
            let output = shared.client_node.nvidia_smi(&query).success();
            if output.trim() == "100" { Ok(()) } else { Err(output) }
        })
        .await;
        let output = eventually("pmon shows 100 %", async || {
            let output = shared.client_node.nvidia_smi(&["pmon", "-c", "2", "-s", "um"]).success();
            let pid = shared.own.pid().to_string();
            let full = parse_monitor_rows(&output).iter().any(|row| row["pid"] == pid && row["sm"] == "100");
            if full { Ok(output) } else { Err(output) }
        })
        .await;
        shared.assert_neighbor_hidden(&output);
        let (pid, held) = (shared.own.pid().to_string(), mib(shared.held_bytes()).to_string());
        for row in parse_monitor_rows(&output).iter().filter(|row| row["gpu"] == "1") {
            assert_eq!([row["pid"], row["fb"]], [&pid, &held], "{output}");
        }
        let output = eventually("dmon shows 100 %", async || {
            let output = shared.client_node.nvidia_smi(&["dmon", "-c", "1", "-s", "um"]).success();
            let full = parse_monitor_rows(&output).get(1).is_some_and(|row| row["sm"] == "100");
            if full { Ok(output) } else { Err(output) }
        })
        .await;
        let rows = parse_monitor_rows(&output);
        assert_eq!([rows[0]["sm"], rows[0]["fb"]], ["0", "0"], "{output}");
        // One version rounds up, the other down.
        let memory: u64 = rows[1]["fb"].parse().unwrap();
        assert!(
            memory == mib(shared.held_bytes()) || memory == shared.held_bytes().div_ceil(1 << 20),
            "{output}"
        );
    }
}

#[tokio::test]
async fn nvidia_smi_hides_the_neighbors_utilization() {
    for shared in SharedGpu::for_each_driver(false) {
        eventually("utilization of GPU 1 is 100 % on the node", async || {
            // Outside of containers, where everything is visible.
            let mut command = Command::new(shared.client_node.nvidia_smi_program());
            command.args(["-i", "1", "--query-gpu=utilization.gpu", "--format=csv,noheader,nounits"]);
            let output = shared.client_node.node.env(&mut command).output().unwrap().stdout;
            let output = String::from_utf8(output).unwrap();
            if output.trim() == "100" { Ok(()) } else { Err(output) }
        })
        .await;
        for arguments in [&["pmon", "-c", "1", "-s", "um"][..], &["dmon", "-c", "1", "-s", "um"]] {
            let output = shared.client_node.nvidia_smi(arguments).success();
            shared.assert_neighbor_hidden(&output);
            let rows = parse_monitor_rows(&output);
            assert!(rows.iter().all(|row| ["0", "-"].contains(&row["sm"])), "{output}");
        }
    }
}

#[test]
fn nvidia_ml_py_reports_the_limit_and_own_processes() {
    for shared in SharedGpu::for_each_driver(false) {
        let (client_node, held) = (&shared.client_node, shared.held_bytes());
        let output = client_node.script("nvml_values.py", &[&shared.own.pid().to_string()]);
        shared.assert_neighbor_hidden(&output.to_string());
        for (index, used) in [(0, 0), (1, held)] {
            let gpu = &output["gpus"][index];
            assert_eq!(
                gpu["MemoryInfo"],
                json!({ "total": MEMORY_LIMIT, "free": MEMORY_LIMIT - used, "used": used })
            );
            assert_eq!(gpu["MemoryInfo_v2"]["total"], MEMORY_LIMIT);
            assert_eq!([&gpu["MemoryInfo_v2"]["used"], &gpu["MemoryInfo_v2"]["reserved"]], [used, 0]);
            assert_eq!(
                gpu["UtilizationRates"],
                json!({ "gpu": 0, "memory": 0 }),
                "only the other container is busy"
            );
            assert_eq!(gpu["UUID"], client_node.node.config().gpus[index].uuid);
            assert_eq!(
                [&gpu["GraphicsRunningProcesses"], &gpu["MPSComputeRunningProcesses"]],
                [&json!([]); 2]
            );
        }
        assert_eq!(output["gpus"][0]["ComputeRunningProcesses"], json!([]));
        let processes = output["gpus"][1]["ComputeRunningProcesses"].as_array().unwrap();
        assert_eq!(processes.len(), 1, "{processes:#?}");
        assert_eq!(
            [&processes[0]["pid"], &processes[0]["usedGpuMemory"]],
            [u64::from(shared.own.pid()), held]
        );
    }
}

#[tokio::test]
async fn gpustat_shows_the_limit_and_own_processes() {
    for shared in SharedGpu::for_each_driver(true) {
        let (client_node, held) = (&shared.client_node, mib(shared.held_bytes()));
        let output = eventually("utilization of GPU 1 is 100 %", async || {
            let output: Value =
                serde_json::from_str(&client_node.python(&["-m", "gpustat", "--json"]).success()).unwrap();
            if output["gpus"][1]["utilization.gpu"] == 100 { Ok(output) } else { Err(output) }
        })
        .await;
        shared.assert_neighbor_hidden(&output.to_string());
        for (index, used) in [(0, 0), (1, held)] {
            assert_eq!(
                [&output["gpus"][index]["memory.total"], &output["gpus"][index]["memory.used"]],
                [4096, used]
            );
        }
        assert_eq!(output["gpus"][0]["utilization.gpu"], 0);
        let processes = output["gpus"][1]["processes"].as_array().unwrap();
        assert_eq!(processes.len(), 1, "{processes:#?}");
        assert_eq!(
            [&processes[0]["pid"], &processes[0]["gpu_memory_usage"]],
            [u64::from(shared.own.pid()), held]
        );
    }
}

#[tokio::test]
async fn nvitop_shows_the_limit_and_own_processes() {
    for shared in SharedGpu::for_each_driver(true) {
        let (client_node, held) = (&shared.client_node, mib(shared.held_bytes()));
        let output = eventually("utilization of GPU 1 is 100 %", async || {
            let output = client_node.script("nvitop_values.py", &[]);
            if output["gpus"][1]["percent"] == 100 { Ok(output) } else { Err(output) }
        })
        .await;
        shared.assert_neighbor_hidden(&output.to_string());
        for (index, used) in [(0, 0), (1, shared.held_bytes())] {
            assert_eq!(
                [&output["gpus"][index]["total"], &output["gpus"][index]["used"]],
                [MEMORY_LIMIT, used],
                "{output:#}"
            );
        }
        let processes = output["gpus"][1]["processes"].as_array().unwrap();
        assert_eq!(processes.len(), 1, "{processes:#?}");
        assert_eq!(
            [&processes[0]["pid"], &processes[0]["memory"]],
            [u64::from(shared.own.pid()), shared.held_bytes()]
        );
        let table = client_node.python(&["-m", "nvitop", "--once", "--no-unicode"]).success();
        shared.assert_neighbor_hidden(&table);
        assert!(table.contains(&format!("{held}MiB / 4096MiB")), "{table}");
    }
}

#[tokio::test]
async fn nvtop_draws_the_limit_and_own_processes() {
    for shared in SharedGpu::for_each_driver(true) {
        let client_node = &shared.client_node;
        let mut command = Command::new(client_node.clients.nvtop());
        let nowhere = client_node.node.path().join("home");
        command.env("HOME", &nowhere).env("XDG_CONFIG_HOME", &nowhere).env("LC_ALL", "C.UTF-8");
        let mut nvtop = TerminalProgram::start(client_node.env(&mut command));
        let pid = shared.own.pid().to_string();
        let screen = eventually("the process uses 100 % of GPU 1", async || {
            let screen = nvtop.text();
            assert_eq!(nvtop.exit_status(), None, "{screen}");
            let process = |line: &str| line.contains(&pid) && line.contains("100%");
            if screen.contains("|100%]") && screen.lines().any(process) { Ok(screen) } else { Err(screen) }
        })
        .await;
        shared.assert_neighbor_hidden(&screen);
        let used = shared.held_bytes() as f64 / f64::from(1 << 30);
        assert!(screen.contains("0.000Gi/4.000Gi]"), "{screen}");
        assert!(screen.contains(&format!("{used:.3}Gi/4.000Gi]")), "{screen}");
        nvtop.press("q");
        let status = eventually("nvtop ends", async || nvtop.exit_status().ok_or("still running")).await;
        assert!(status.success(), "{status}");
    }
}

#[test]
fn cuda_python_allocates_up_to_the_limit() {
    for client_node in ClientNode::on_node(&["T4", A100], 2) {
        let client_node = client_node.in_container(MEMORY_LIMIT);
        let other = ShimContainer::new(&client_node.node, MEMORY_LIMIT);
        let _neighbor =
            client_node.workload_in(Some(&other), WorkloadOptions { gpu: 0, memory_mib: 3000, busy: 0 });
        let output = client_node.script("cuda_python.py", &[]);
        assert_eq!(output["version"], client_node.driver().cuda());
        assert_eq!(output["before"], "CUDA_ERROR_NOT_INITIALIZED");
        assert_eq!(output["beyond"], "CUDA_ERROR_INVALID_DEVICE");
        assert_eq!(output["without a context"], "CUDA_ERROR_INVALID_CONTEXT");
        for index in 0..2 {
            let (shown, gpu) = (&output["devices"][index], &client_node.node.config().gpus[index]);
            assert_eq!(shown["memory"], MEMORY_LIMIT);
            assert_eq!(shown["uuid"], gpu.uuid.trim_start_matches("GPU-").replace('-', ""));
        }
        assert_eq!(
            output["copies"],
            json!({ "same": true, "set": true, "freed twice": "CUDA_ERROR_INVALID_VALUE" })
        );
        let memory = json!({
            "total": MEMORY_LIMIT,
            "free": MEMORY_LIMIT - client_node.node.card(0).unwrap().memory.context,
            "taken": 512 << 20,
            "more than the card": "CUDA_ERROR_OUT_OF_MEMORY",
            "more than is left": "CUDA_ERROR_OUT_OF_MEMORY",
            "nothing": "CUDA_ERROR_INVALID_VALUE",
            "given back": true,
        });
        assert_eq!(output["memory"], memory);
        assert_launches(&output["launches"]);
        assert_eq!(client_node.shim_container.as_ref().unwrap().used(0), 0, "all memory is freed");
    }
}

#[test]
fn numba_allocates_up_to_the_limit() {
    for client_node in ClientNode::on_node(&["T4", A100], 2) {
        let client_node = client_node.in_container(MEMORY_LIMIT);
        let output = client_node.script("numba_kernel.py", &[]);
        let card = client_node.node.card(0).unwrap();
        assert_eq!([&output["total"], &output["free"]], [MEMORY_LIMIT, MEMORY_LIMIT - card.memory.context]);
        assert_eq!(output["taken"], 2 << 20);
        assert_eq!([&output["same"], &output["part"], &output["untouched"]], [true; 3]);
        assert_eq!(output["uuid"], client_node.node.config().gpus[0].uuid);
        let refused = output["too much"].as_str().unwrap();
        assert!(refused.contains("Call to cuMemAlloc results in CUDA_ERROR_OUT_OF_MEMORY"), "{refused}");
        assert_eq!(client_node.shim_container.as_ref().unwrap().used(0), 0, "all memory is freed");
    }
}
