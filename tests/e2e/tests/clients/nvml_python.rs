//! The Python clients of NVML: nvidia-ml-py, gpustat, nvitop.

use crate::client_node::{ClientNode, mib};
use partage_testkit::eventually;
use partage_testkit::sim_node::WorkloadProcess;
use serde_json::{Value, json};

const A100: &str = "A100-SXM4-40GB";

#[test]
fn nvidia_ml_py_matches_the_node_config() {
    for client_node in
        ClientNode::on_node_and_in_container(&["T4", "V100-SXM2-32GB", A100, "H100-SXM5-80GB"], 2)
    {
        let model = client_node.model();
        let output = client_node.script("nvml_values.py", &[]);
        let driver = client_node.driver();
        assert_eq!(output["driver"], driver.version());
        assert_eq!(output["nvml"], format!("12.{}", driver.version()));
        assert_eq!(output["cuda"], driver.cuda());
        assert_eq!(output["beyond"], "Invalid Argument");
        assert_eq!(output["after"], "Uninitialized");
        assert_eq!(output["gpus"].as_array().unwrap().len(), 2);
        for index in 0..2 {
            let shown = &output["gpus"][index];
            for (name, value) in expected_values(&client_node, index).as_object().unwrap() {
                assert_eq!(shown[name], *value, "{model} {driver:?}: {name} of {shown:#}");
            }
        }
        let level = client_node.node.config().pci_path(0, 1).unwrap().nvml();
        assert_eq!(output["levels"], json!([[0, level], [level, 0]]), "{model}");
    }
}

/// Returns what NVML should report of an idle GPU.
fn expected_values(client_node: &ClientNode, index: usize) -> Value {
    let (gpu, card) = (&client_node.node.config().gpus[index], client_node.node.card(index).unwrap());
    let (compute, memory, clocks, power) = (&card.compute, &card.memory, &card.clocks, &card.power);
    let unsupported = || json!("Not Supported");
    let links = card.nvlink.as_ref().map_or(0, |nvlink| nvlink.links);
    let ends = gpu.links.len() as u32;
    let link = |number: u32| match number {
        number if number < ends => json!(1),
        // The card has the link, and nothing is connected to it.
        number if number < links => json!(0),
        number if number < 18 => unsupported(),
        _ => json!("Invalid Argument"),
    };
    let mut cpus = [0; 8];
    gpu.cpus.fill_mask(&mut cpus);
    let mut memory_nodes = [0_u64; 4];
    memory_nodes[gpu.numa as usize / 64] |= 1 << (gpu.numa % 64);
    json!({
        "Name": card.name,
        "UUID": gpu.uuid,
        "Serial": gpu.serial,
        "Index": index,
        "ByUUID": index,
        "ByPciBusId": index,
        "MinorNumber": gpu.minor,
        "Brand": card.brand.nvml(),
        "Architecture": card.architecture.nvml(),
        "BoardId": gpu.board_id(),
        "BoardPartNumber": card.board.part,
        "VbiosVersion": card.board.vbios,
        "InforomImageVersion": card.board.inforom,
        "PciInfo": {
            "busIdLegacy": format!("{:04X}:{:02X}:{:02X}.0", gpu.pci.domain, gpu.pci.bus, gpu.pci.device),
            "busId": gpu.pci.to_string(),
            "domain": gpu.pci.domain,
            "bus": gpu.pci.bus,
            "device": gpu.pci.device,
            "pciDeviceId": card.pci.device,
            "pciSubSystemId": card.pci.subsystem,
        },
        // Version 1 of the call counts the driver's reserved memory as used.
        "MemoryInfo": { "total": memory.total, "free": memory.usable(), "used": memory.reserved },
        "MemoryInfo_v2": {
            "version": 0x0200_0028, "total": memory.total, "reserved": memory.reserved,
            "free": memory.usable(), "used": 0,
        },
        "UtilizationRates": { "gpu": 0, "memory": 0 },
        "EncoderUtilization": [0, card.sample_period_micros],
        "PowerUsage": power.idle,
        "EnforcedPowerLimit": power.default_limit,
        "PowerManagementLimit": power.default_limit,
        "PowerManagementDefaultLimit": power.default_limit,
        "PowerManagementLimitConstraints": [power.min_limit, power.max_limit],
        "PerformanceState": card.idle_state,
        "ComputeMode": 0,
        "PersistenceMode": 0,
        "EccMode": [1, 1],
        "TotalEccErrors": 0,
        "MigMode": if card.mig_instances > 0 { json!([0, 0]) } else { unsupported() },
        "FanSpeed": if card.fan { json!(0) } else { unsupported() },
        "NumGpuCores": compute.multiprocessors * compute.cores_per_multiprocessor,
        "MemoryBusWidth": memory.bus_width,
        "CudaComputeCapability": [compute.capability / 10, compute.capability % 10],
        "MaxPcieLinkGeneration": card.pci.generation,
        "MaxPcieLinkWidth": card.pci.width,
        "CurrPcieLinkGeneration": card.pci.generation_idle,
        "Temperature": card.temperature.idle,
        "Threshold_SHUTDOWN": card.temperature.shutdown,
        "Threshold_SLOWDOWN": card.temperature.slowdown,
        "Threshold_GPU_MAX": card.temperature.max_operating,
        "Clock_GRAPHICS": clocks.graphics_idle,
        "Clock_SM": clocks.graphics_idle,
        "Clock_MEM": clocks.memory_idle,
        "Clock_VIDEO": clocks.video_idle,
        "MaxClock_GRAPHICS": clocks.graphics_max,
        "MaxClock_SM": clocks.graphics_max,
        "MaxClock_MEM": clocks.memory_max,
        "MaxClock_VIDEO": clocks.video_max,
        "CurrentClocksThrottleReasons": 1,
        "VirtualizationMode": 0,
        "ComputeRunningProcesses": [],
        "GraphicsRunningProcesses": [],
        "MPSComputeRunningProcesses": [],
        "CpuAffinity": cpus,
        "MemoryAffinity": memory_nodes,
        "NvLinks": (0..36).map(link).collect::<Vec<_>>(),
        "Fields": [links, power.default_limit],
    })
}

#[test]
fn nvidia_ml_py_lists_processes() {
    for client_node in ClientNode::one_model(A100, 2) {
        let workload = client_node.workload(1, 700, 0);
        let pid = workload.pid();
        let output = client_node.script("nvml_values.py", &[&pid.to_string()]);
        assert_eq!(output["names"], json!([WorkloadProcess::PROCESS_NAME]));
        assert_eq!(output["gpus"][0]["ComputeRunningProcesses"], json!([]));
        let process = &output["gpus"][1]["ComputeRunningProcesses"][0];
        let used = client_node.memory_with_context(700);
        assert_eq!(process["pid"], pid, "{process:#}");
        assert_eq!(process["usedGpuMemory"], used, "{process:#}");
        let memory = &output["gpus"][1]["MemoryInfo_v2"];
        assert_eq!(memory["used"], used);
        let all = ["used", "reserved", "free"].map(|part| memory[part].as_u64().unwrap());
        assert_eq!(all.iter().sum::<u64>(), memory["total"].as_u64().unwrap());
        // A context alone raises the clocks.
        let card = client_node.node.card(1).unwrap();
        assert_eq!(output["gpus"][1]["Clock_SM"], card.clocks.graphics_default);
        assert_eq!(output["gpus"][1]["CurrentClocksThrottleReasons"], 0);
    }
}

#[test]
fn nvidia_ml_py_reports_an_unloaded_driver() {
    for client_node in ClientNode::one_model("T4", 1) {
        client_node.node.state().set_loaded(false);
        let output = client_node.python(&["-c", "import pynvml; pynvml.nvmlInit()"]);
        assert_eq!(output.code, Some(1));
        assert!(
            output.err.trim_end().ends_with("NVMLError_DriverNotLoaded: Driver Not Loaded"),
            "{}",
            output.err
        );
    }
}

#[tokio::test]
async fn gpustat_shows_gpus_and_processes() {
    for client_node in ClientNode::one_model(A100, 2) {
        let workload = client_node.workload(1, 2048, 100);
        let output = eventually("utilization of GPU 1 is 100 %", async || {
            let output: Value =
                serde_json::from_str(&client_node.python(&["-m", "gpustat", "--json"]).success()).unwrap();
            if output["gpus"][1]["utilization.gpu"] == 100 { Ok(output) } else { Err(output) }
        })
        .await;
        let card = client_node.node.card(0).unwrap();
        assert_eq!(output["driver_version"], client_node.driver().version());
        let idle = json!({
            "index": 0,
            "uuid": client_node.node.config().gpus[0].uuid,
            "name": "NVIDIA A100-SXM4-40GB",
            "temperature.gpu": card.temperature.idle,
            "fan.speed": null,
            "utilization.gpu": 0,
            "utilization.enc": 0,
            "utilization.dec": 0,
            "power.draw": card.power.idle / 1000,
            "enforced.power.limit": card.power.default_limit / 1000,
            "memory.used": 0,
            "memory.total": 40960,
            "processes": [],
        });
        assert_eq!(output["gpus"][0], idle);
        let (busy, held) = (&output["gpus"][1], mib(client_node.memory_with_context(2048)));
        assert_eq!(busy["uuid"], client_node.node.config().gpus[1].uuid);
        assert_eq!(busy["memory.used"], held, "{busy:#}");
        let process = &busy["processes"][0];
        assert_eq!(process["pid"], workload.pid(), "{busy:#}");
        assert_eq!(process["gpu_memory_usage"], held, "{busy:#}");
        assert_eq!(process["full_command"][0], WorkloadProcess::PROCESS_NAME, "{busy:#}");
        let plain =
            client_node.python(&["-m", "gpustat", "--no-color", "--show-pid", "--no-header"]).success();
        let lines: Vec<&str> = plain.lines().collect();
        assert_eq!(
            lines[0].trim_end(),
            format!("[0] NVIDIA A100-SXM4-40GB | {}°C,   0 % |     0 / 40960 MB |", card.temperature.idle)
        );
        assert!(lines[1].starts_with("[1] NVIDIA A100-SXM4-40GB |"), "{plain}");
        assert!(lines[1].contains(&format!("|  {held} / 40960 MB |")), "{plain}");
        assert!(lines[1].trim_end().ends_with(&format!("/{}({held}M)", workload.pid())), "{plain}");
    }
}

#[tokio::test]
async fn nvitop_shows_gpus_and_processes() {
    for client_node in ClientNode::one_model(A100, 2) {
        let workload = client_node.workload(1, 2048, 100);
        // The values are complete from the second run on: the first one asks for samples of a time before the process
        // ran.
        let table = eventually("the process uses 100 % of GPU 1", async || {
            let table = client_node.python(&["-m", "nvitop", "--once", "--no-unicode"]).success();
            let full = |line: &str| line.contains(&workload.pid().to_string()) && line.contains(" 100 ");
            let both = table.lines().any(full) && table.contains("100%      Default");
            if both { Ok(table) } else { Err(table) }
        })
        .await;
        let line = |expected: &str| {
            let found = table.lines().find(|line| line.contains(expected));
            found.unwrap_or_else(|| panic!("{expected}: {table}")).to_string()
        };
        let (driver, gpus) = (client_node.driver(), &client_node.node.config().gpus);
        assert!(line("NVITOP 1.7.2").contains(&format!("Driver Version: {}", driver.version())), "{table}");
        let cuda = format!("CUDA Driver Version: {}.{}", driver.cuda() / 1000, driver.cuda() % 1000 / 10);
        assert!(line("NVITOP 1.7.2").contains(&cuda), "{table}");
        assert!(line(&gpus[0].pci.to_string()).contains("A100-SXM4-40GB"), "{table}");
        assert!(line(&gpus[1].pci.to_string()).contains("A100-SXM4-40GB"), "{table}");
        let (card, held) =
            (client_node.node.card(1).unwrap(), format!("{}MiB", mib(client_node.memory_with_context(2048))));
        assert!(line(&format!(" {}C ", card.temperature.idle)).contains("0B / 40.00GiB"), "{table}");
        assert!(line("100%      Default").contains(&format!("{held} / 40.00GiB")), "{table}");
        let process = line(&format!(" {} C ", workload.pid()));
        assert!(process.contains(&held) && process.contains(WorkloadProcess::PROCESS_NAME), "{table}");
    }
}

#[tokio::test]
async fn nvitop_api_matches_the_node_config() {
    for client_node in ClientNode::one_model("V100-SXM2-32GB", 2) {
        let workload = client_node.workload(1, 2048, 100);
        let output = eventually("utilization of GPU 1 is 100 %", async || {
            let output = client_node.script("nvitop_values.py", &[]);
            if output["gpus"][1]["percent"] == 100 { Ok(output) } else { Err(output) }
        })
        .await;
        assert_eq!(output["driver"], client_node.driver().version());
        for index in 0..2 {
            let (gpu, card) = (&client_node.node.config().gpus[index], client_node.node.card(index).unwrap());
            let shown = &output["gpus"][index];
            assert_eq!(shown["name"], "Tesla V100-SXM2-32GB");
            assert_eq!(shown["uuid"], gpu.uuid);
            assert_eq!(shown["busId"], gpu.pci.to_string());
            assert_eq!(shown["total"], card.memory.total);
            assert_eq!(shown["limit"], card.power.default_limit);
            assert_eq!(shown["capability"], json!([7, 0]));
            assert_eq!(shown["mig"], false);
        }
        assert_eq!(output["gpus"][0]["processes"], json!([]));
        assert_eq!(output["gpus"][0]["used"], 0);
        let process = &output["gpus"][1]["processes"][0];
        assert_eq!(process["pid"], workload.pid());
        assert_eq!(process["type"], "C");
        assert!(process["memory"].as_u64().unwrap() >= client_node.memory_with_context(2048), "{process:#}");
        assert!(
            process["command"].as_str().unwrap().starts_with(WorkloadProcess::PROCESS_NAME),
            "{process:#}"
        );
    }
}
