//! The same clients in a container, beside another container on the same GPU: each shows the limit, the container's own
//! memory, processes and utilisation, and nothing of the neighbour's. What a card is they show as they did.

use crate::container::Container;
use crate::cuda::launched;
use crate::nvidia_smi::{cells, watched};
use crate::screen::OnScreen;
use crate::stage::{Stage, mib};
use partage_testkit::eventually;
use partage_testkit::sim_node::Workload;
use partage_testkit::workload::Load;
use serde_json::{Value, json};
use std::process::Command;

const A100: &str = "A100-SXM4-40GB";
const LIMIT: u64 = 4 << 30;

/// A stage in a container of 4 GiB, a workload of its own on GPU 1, and a neighbour there who does more of everything.
struct Shared {
    stage: Stage,
    own: Workload,
    neighbour: Workload,
    other: Container,
}

impl Shared {
    /// One per driver. Either this container's workload is busy or the neighbour's.
    fn both(busy: bool) -> impl Iterator<Item = Self> {
        Stage::bare(&[A100], 2).map(move |stage| {
            let stage = stage.contained(LIMIT);
            let other = Container::new(&stage.node, 3 * LIMIT);
            let load = |memory_mib, busy: bool| Load { gpu: 1, memory_mib, busy: if busy { 100 } else { 0 } };
            let own = stage.workload_in(stage.container.as_ref(), load(1024, busy));
            let neighbour = stage.workload_in(Some(&other), load(5000, !busy));
            Self { stage, own, neighbour, other }
        })
    }

    /// Bytes that its workload holds: by the container's account, which is as much as the driver says.
    fn held(&self) -> u64 {
        let held = self.stage.container.as_ref().unwrap().used(1);
        let truth = self.stage.node.state().processes(1);
        let own = truth.iter().find(|process| process.pid == self.own.pid()).unwrap();
        assert_eq!(held, own.used * partage_region::UNIT);
        assert!(held >= self.stage.held(1024));
        assert!(self.other.used(1) >= self.stage.held(5000));
        held
    }

    /// Fails if anything of the neighbour's is to be seen.
    #[track_caller]
    fn alone(&self, text: &str) {
        let pid = self.neighbour.pid().to_string();
        let words = text.split(|letter: char| !letter.is_alphanumeric());
        assert!(words.into_iter().all(|word| word != pid), "the neighbour is {pid}:\n{text}");
    }
}

#[test]
fn nvidia_smi_shows_the_limit_and_own_processes() {
    for shared in Shared::both(false) {
        let (stage, held) = (&shared.stage, mib(shared.held()));
        let table = stage.smi(&[]).well();
        shared.alone(&table);
        for (index, used) in [(0, 0), (1, held)] {
            let start = format!("|   {index}  NVIDIA A100-SXM4-40GB ");
            let figures = table.lines().skip_while(|line| !line.starts_with(&start)).nth(1).expect(&table);
            let memory = figures.split('|').nth(2).unwrap().replace(' ', "");
            assert_eq!(memory, format!("{used}MiB/4096MiB"), "{table}");
            assert!(
                figures.contains("    0%      Default |"),
                "the neighbour works, this container does not: {table}"
            );
        }
        let process = table.lines().rev().nth(1).unwrap();
        let words: Vec<&str> = cells(process)[0].split_whitespace().collect();
        let (pid, memory) = (shared.own.pid().to_string(), format!("{held}MiB"));
        assert_eq!(words, ["1", "N/A", "N/A", &pid, "C", Workload::NAME, &memory], "{table}");
        let apps =
            stage.smi(&["--query-compute-apps=pid,name,used_memory", "--format=csv,noheader,nounits"]).well();
        assert_eq!(apps, format!("{pid}, {}, {held}\n", Workload::NAME));
        let fields =
            "--query-gpu=index,memory.total,memory.used,memory.free,memory.reserved,utilization.gpu,name";
        let gpus = stage.smi(&[fields, "--format=csv,noheader,nounits"]).well();
        let row = |index, used: u64| {
            format!("{index}, 4096, {used}, {}, 0, 0, NVIDIA A100-SXM4-40GB\n", 4096 - used)
        };
        assert_eq!(gpus, row(0, 0) + &row(1, held));
        let all = stage.smi(&["-q"]).well();
        shared.alone(&all);
        assert!(all.contains(&pid) && all.contains("4096 MiB"), "{all}");
        let list = stage.smi(&["-L"]).well();
        let uuid = |index: usize| stage.node.config().gpus[index].uuid.clone();
        assert!(list.contains(&uuid(0)) && list.contains(&uuid(1)), "{list}");
        let Shared { stage, own, neighbour, .. } = shared;
        drop(own);
        assert!(stage.smi(&[]).well().contains("No running processes found"));
        drop(neighbour);
    }
}

#[tokio::test]
async fn nvidia_smi_shows_own_utilisation() {
    for shared in Shared::both(true) {
        let query = ["-i", "1", "--query-gpu=utilization.gpu", "--format=csv,noheader,nounits"];
        eventually("the container uses all of GPU 1", async || {
            let said = shared.stage.smi(&query).well();
            if said.trim() == "100" { Ok(()) } else { Err(said) }
        })
        .await;
        let said = eventually("the last second is full", async || {
            let said = shared.stage.smi(&["pmon", "-c", "2", "-s", "um"]).well();
            let pid = shared.own.pid().to_string();
            let full = watched(&said).iter().any(|row| row["pid"] == pid && row["sm"] == "100");
            if full { Ok(said) } else { Err(said) }
        })
        .await;
        shared.alone(&said);
        let (pid, held) = (shared.own.pid().to_string(), mib(shared.held()).to_string());
        for row in watched(&said).iter().filter(|row| row["gpu"] == "1") {
            assert_eq!([row["pid"], row["fb"]], [&pid, &held], "{said}");
        }
        let said = eventually("the last moment is full", async || {
            let said = shared.stage.smi(&["dmon", "-c", "1", "-s", "um"]).well();
            let full = watched(&said).get(1).is_some_and(|row| row["sm"] == "100");
            if full { Ok(said) } else { Err(said) }
        })
        .await;
        let rows = watched(&said);
        assert_eq!([rows[0]["sm"], rows[0]["fb"]], ["0", "0"], "{said}");
        // One version rounds up, the other down.
        let memory: u64 = rows[1]["fb"].parse().unwrap();
        assert!(memory == mib(shared.held()) || memory == shared.held().div_ceil(1 << 20), "{said}");
    }
}

#[tokio::test]
async fn nvidia_smi_does_not_show_what_the_neighbour_does() {
    for shared in Shared::both(false) {
        eventually("the neighbour uses all of GPU 1", async || {
            // From outside, where all is seen.
            let mut command = Command::new(shared.stage.smi_program());
            command.args(["-i", "1", "--query-gpu=utilization.gpu", "--format=csv,noheader,nounits"]);
            let said = shared.stage.node.env(&mut command).output().unwrap().stdout;
            let said = String::from_utf8(said).unwrap();
            if said.trim() == "100" { Ok(()) } else { Err(said) }
        })
        .await;
        for arguments in [&["pmon", "-c", "1", "-s", "um"][..], &["dmon", "-c", "1", "-s", "um"]] {
            let said = shared.stage.smi(arguments).well();
            shared.alone(&said);
            let rows = watched(&said);
            assert!(rows.iter().all(|row| ["0", "-"].contains(&row["sm"])), "{said}");
        }
    }
}

#[test]
fn nvidia_ml_py_reads_the_limit_and_own_processes() {
    for shared in Shared::both(false) {
        let (stage, held) = (&shared.stage, shared.held());
        let said = stage.script("nvml_values.py", &[&shared.own.pid().to_string()]);
        shared.alone(&said.to_string());
        for (index, used) in [(0, 0), (1, held)] {
            let gpu = &said["gpus"][index];
            assert_eq!(gpu["MemoryInfo"], json!({ "total": LIMIT, "free": LIMIT - used, "used": used }));
            assert_eq!(gpu["MemoryInfo_v2"]["total"], LIMIT);
            assert_eq!([&gpu["MemoryInfo_v2"]["used"], &gpu["MemoryInfo_v2"]["reserved"]], [used, 0]);
            assert_eq!(gpu["UtilizationRates"], json!({ "gpu": 0, "memory": 0 }), "the neighbour works");
            assert_eq!(gpu["UUID"], stage.node.config().gpus[index].uuid);
            assert_eq!(
                [&gpu["GraphicsRunningProcesses"], &gpu["MPSComputeRunningProcesses"]],
                [&json!([]); 2]
            );
        }
        assert_eq!(said["gpus"][0]["ComputeRunningProcesses"], json!([]));
        let processes = said["gpus"][1]["ComputeRunningProcesses"].as_array().unwrap();
        assert_eq!(processes.len(), 1, "{processes:#?}");
        assert_eq!(
            [&processes[0]["pid"], &processes[0]["usedGpuMemory"]],
            [u64::from(shared.own.pid()), held]
        );
    }
}

#[tokio::test]
async fn gpustat_shows_the_limit_and_own_processes() {
    for shared in Shared::both(true) {
        let (stage, held) = (&shared.stage, mib(shared.held()));
        let said = eventually("the container uses all of GPU 1", async || {
            let said: Value =
                serde_json::from_str(&stage.python(&["-m", "gpustat", "--json"]).well()).unwrap();
            if said["gpus"][1]["utilization.gpu"] == 100 { Ok(said) } else { Err(said) }
        })
        .await;
        shared.alone(&said.to_string());
        for (index, used) in [(0, 0), (1, held)] {
            assert_eq!(
                [&said["gpus"][index]["memory.total"], &said["gpus"][index]["memory.used"]],
                [4096, used]
            );
        }
        assert_eq!(said["gpus"][0]["utilization.gpu"], 0);
        let processes = said["gpus"][1]["processes"].as_array().unwrap();
        assert_eq!(processes.len(), 1, "{processes:#?}");
        assert_eq!(
            [&processes[0]["pid"], &processes[0]["gpu_memory_usage"]],
            [u64::from(shared.own.pid()), held]
        );
    }
}

#[tokio::test]
async fn nvitop_shows_the_limit_and_own_processes() {
    for shared in Shared::both(true) {
        let (stage, held) = (&shared.stage, mib(shared.held()));
        let said = eventually("the container uses all of GPU 1", async || {
            let said = stage.script("nvitop_values.py", &[]);
            if said["gpus"][1]["percent"] == 100 { Ok(said) } else { Err(said) }
        })
        .await;
        shared.alone(&said.to_string());
        for (index, used) in [(0, 0), (1, shared.held())] {
            assert_eq!(
                [&said["gpus"][index]["total"], &said["gpus"][index]["used"]],
                [LIMIT, used],
                "{said:#}"
            );
        }
        let processes = said["gpus"][1]["processes"].as_array().unwrap();
        assert_eq!(processes.len(), 1, "{processes:#?}");
        assert_eq!(
            [&processes[0]["pid"], &processes[0]["memory"]],
            [u64::from(shared.own.pid()), shared.held()]
        );
        let table = stage.python(&["-m", "nvitop", "--once", "--no-unicode"]).well();
        shared.alone(&table);
        assert!(table.contains(&format!("{held}MiB / 4096MiB")), "{table}");
    }
}

#[tokio::test]
async fn nvtop_draws_the_limit_and_own_processes() {
    for shared in Shared::both(true) {
        let stage = &shared.stage;
        let mut command = Command::new(stage.clients.nvtop());
        let nowhere = stage.node.path().join("home");
        command.env("HOME", &nowhere).env("XDG_CONFIG_HOME", &nowhere).env("LC_ALL", "C.UTF-8");
        let mut nvtop = OnScreen::start(stage.env(&mut command));
        let pid = shared.own.pid().to_string();
        let screen = eventually("the process uses all of GPU 1", async || {
            let screen = nvtop.text();
            assert_eq!(nvtop.ended(), None, "{screen}");
            let process = |line: &str| line.contains(&pid) && line.contains("100%");
            if screen.contains("|100%]") && screen.lines().any(process) { Ok(screen) } else { Err(screen) }
        })
        .await;
        shared.alone(&screen);
        let used = shared.held() as f64 / f64::from(1 << 30);
        assert!(screen.contains("0.000Gi/4.000Gi]"), "{screen}");
        assert!(screen.contains(&format!("{used:.3}Gi/4.000Gi]")), "{screen}");
        nvtop.press("q");
        let status = eventually("nvtop ends", async || nvtop.ended().ok_or("it runs")).await;
        assert!(status.success(), "{status}");
    }
}

#[test]
fn cuda_python_gets_as_much_as_the_limit() {
    for stage in Stage::bare(&["T4", A100], 2) {
        let stage = stage.contained(LIMIT);
        let other = Container::new(&stage.node, LIMIT);
        let _neighbour = stage.workload_in(Some(&other), Load { gpu: 0, memory_mib: 3000, busy: 0 });
        let said = stage.script("cuda_python.py", &[]);
        assert_eq!(said["version"], stage.driver().cuda());
        assert_eq!(said["before"], "CUDA_ERROR_NOT_INITIALIZED");
        assert_eq!(said["beyond"], "CUDA_ERROR_INVALID_DEVICE");
        assert_eq!(said["without a context"], "CUDA_ERROR_INVALID_CONTEXT");
        for index in 0..2 {
            let (shown, gpu) = (&said["devices"][index], &stage.node.config().gpus[index]);
            assert_eq!(shown["memory"], LIMIT);
            assert_eq!(shown["uuid"], gpu.uuid.trim_start_matches("GPU-").replace('-', ""));
        }
        assert_eq!(
            said["copies"],
            json!({ "same": true, "set": true, "freed twice": "CUDA_ERROR_INVALID_VALUE" })
        );
        let memory = json!({
            "total": LIMIT,
            "free": LIMIT - stage.node.card(0).unwrap().memory.context,
            "taken": 512 << 20,
            "more than the card": "CUDA_ERROR_OUT_OF_MEMORY",
            "more than is left": "CUDA_ERROR_OUT_OF_MEMORY",
            "nothing": "CUDA_ERROR_INVALID_VALUE",
            "given back": true,
        });
        assert_eq!(said["memory"], memory);
        launched(&said["launches"]);
        assert_eq!(stage.container.as_ref().unwrap().used(0), 0, "all is given back");
    }
}

#[test]
fn numba_gets_as_much_as_the_limit() {
    for stage in Stage::bare(&["T4", A100], 2) {
        let stage = stage.contained(LIMIT);
        let said = stage.script("numba_kernel.py", &[]);
        let card = stage.node.card(0).unwrap();
        assert_eq!([&said["total"], &said["free"]], [LIMIT, LIMIT - card.memory.context]);
        assert_eq!(said["taken"], 2 << 20);
        assert_eq!([&said["same"], &said["part"], &said["untouched"]], [true; 3]);
        assert_eq!(said["uuid"], stage.node.config().gpus[0].uuid);
        let refused = said["too much"].as_str().unwrap();
        assert!(refused.contains("Call to cuMemAlloc results in CUDA_ERROR_OUT_OF_MEMORY"), "{refused}");
        assert_eq!(stage.container.as_ref().unwrap().used(0), 0, "all is given back");
    }
}
