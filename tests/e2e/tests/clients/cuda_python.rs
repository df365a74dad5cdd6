//! The Python clients of the driver API: cuda-python, and numba with its compiler.

use crate::client_node::ClientNode;
use serde_json::{Value, json};

#[test]
fn cuda_python_sees_and_uses_the_gpus() {
    for client_node in ClientNode::on_node_and_in_container(&["T4", "A100-SXM4-40GB"], 2) {
        let model = client_node.model();
        let output = client_node.script("cuda_python.py", &[]);
        assert_eq!(output["version"], client_node.driver().cuda());
        assert_eq!(output["before"], "CUDA_ERROR_NOT_INITIALIZED");
        assert_eq!(output["beyond"], "CUDA_ERROR_INVALID_DEVICE");
        assert_eq!(output["without a context"], "CUDA_ERROR_INVALID_CONTEXT");
        assert_eq!(output["devices"].as_array().unwrap().len(), 2);
        for index in 0..2 {
            assert_eq!(output["devices"][index], expected_device(&client_node, index), "{model}");
        }
        let copies = json!({ "same": true, "set": true, "freed twice": "CUDA_ERROR_INVALID_VALUE" });
        assert_eq!(output["copies"], copies);
        let card = &client_node.node.card(0).unwrap().memory;
        let memory = json!({
            "total": card.usable(),
            "free": card.usable() - card.context,
            "taken": 512 << 20,
            "more than the card": "CUDA_ERROR_OUT_OF_MEMORY",
            "more than is left": "CUDA_ERROR_OUT_OF_MEMORY",
            "nothing": "CUDA_ERROR_INVALID_VALUE",
            "given back": true,
        });
        assert_eq!(output["memory"], memory, "{model}");
        assert_launches(&output["launches"]);
    }
}

/// Returns what the driver should report of a device.
fn expected_device(client_node: &ClientNode, index: usize) -> Value {
    let (gpu, card) = (&client_node.node.config().gpus[index], client_node.node.card(index).unwrap());
    let compute = &card.compute;
    json!({
        "name": card.name,
        "uuid": gpu.uuid.trim_start_matches("GPU-").replace('-', ""),
        "busId": format!("{:04X}:{:02X}:{:02X}.0", gpu.pci.domain, gpu.pci.bus, gpu.pci.device),
        "memory": card.memory.usable(),
        "MULTIPROCESSOR_COUNT": compute.multiprocessors,
        "COMPUTE_CAPABILITY_MAJOR": compute.capability / 10,
        "COMPUTE_CAPABILITY_MINOR": compute.capability % 10,
        "MAX_THREADS_PER_BLOCK": 1024,
        "WARP_SIZE": 32,
        "CLOCK_RATE": card.clocks.graphics_max * 1000,
        "MEMORY_CLOCK_RATE": card.clocks.memory_max * 1000,
        "GLOBAL_MEMORY_BUS_WIDTH": card.memory.bus_width,
        "L2_CACHE_SIZE": card.memory.l2,
        "ECC_ENABLED": 1,
        "PCI_BUS_ID": gpu.pci.bus,
        "PCI_DOMAIN_ID": gpu.pci.domain,
        "MAX_SHARED_MEMORY_PER_BLOCK": compute.shared_per_block,
        "MAX_SHARED_MEMORY_PER_MULTIPROCESSOR": compute.shared_per_multiprocessor,
        "UNIFIED_ADDRESSING": 1,
        "ASYNC_ENGINE_COUNT": compute.copy_engines,
    })
}

pub(crate) fn assert_launches(output: &Value) {
    // Three kernels of 20 ms: never less, and in at least one round no gap between them.
    let milliseconds = output["milliseconds"].as_f64().unwrap();
    assert!((59.99..60.61).contains(&milliseconds), "{output:#}");
    assert_eq!([&output["before"], &output["after"]], ["CUDA_ERROR_NOT_READY", "CUDA_SUCCESS"]);
    assert_eq!([&output["stream"], &output["compiled"]], ["CUDA_SUCCESS"; 2], "{output:#}");
    assert_eq!(output["bytes stay"], true, "a simulated kernel computes nothing");
    assert_eq!(output["too large a block"], "CUDA_ERROR_INVALID_VALUE");
    assert_eq!(output["no such function"], "CUDA_ERROR_NOT_FOUND");
}

#[test]
fn cuda_visible_devices_filters_the_gpus_of_cuda_python() {
    let script = "\
import os, sys
os.environ['CUDA_VISIBLE_DEVICES'] = sys.argv[1]
from cuda.bindings import driver
print(driver.cuInit(0)[0].name)
for index in range(driver.cuDeviceGetCount()[1] or 0): print(driver.cuDeviceGetUuid_v2(index)[1].bytes.hex())
";
    let Some(client_node) = ClientNode::on_node_and_in_container(&["A100-SXM4-40GB"], 3).next() else {
        return;
    };
    let seen = |visible: &str| {
        let output = client_node.python(&["-c", script, visible]).success();
        output.lines().map(str::to_string).collect::<Vec<_>>()
    };
    let gpus = &client_node.node.config().gpus;
    let uuid = |index: usize| gpus[index].uuid.trim_start_matches("GPU-").replace('-', "");
    assert_eq!(seen("2,0"), ["CUDA_SUCCESS".to_string(), uuid(2), uuid(0)]);
    assert_eq!(seen(&gpus[1].uuid), ["CUDA_SUCCESS".to_string(), uuid(1)]);
    assert_eq!(seen("")[0], "CUDA_ERROR_NO_DEVICE");
    client_node.node.state().set_loaded(false);
    assert_eq!(seen("0")[0], "CUDA_ERROR_NO_DEVICE");
}

#[test]
fn numba_compiles_and_runs_a_kernel() {
    for client_node in ClientNode::on_node_and_in_container(&["T4", "A100-SXM4-40GB"], 2) {
        let output = client_node.script("numba_kernel.py", &[]);
        let (gpu, card) = (&client_node.node.config().gpus[0], client_node.node.card(0).unwrap());
        assert_eq!(output["available"], true);
        assert_eq!(output["gpus"], 2);
        assert_eq!(output["name"], *card.name);
        assert_eq!(output["uuid"], gpu.uuid);
        assert_eq!(output["capability"], json!([card.compute.capability / 10, card.compute.capability % 10]));
        assert_eq!(output["multiprocessors"], card.compute.multiprocessors);
        assert_eq!(output["total"], card.memory.usable());
        assert_eq!(output["free"], card.memory.usable() - card.memory.context);
        // Two arrays of 400 kB share a page of the card.
        assert_eq!(output["taken"], 2 << 20);
        assert_eq!([&output["shape"], &output["type"]], [&json!([100, 1000]), &json!("float32")]);
        assert_eq!([&output["same"], &output["part"], &output["untouched"]], [true; 3]);
        assert!(
            output["ptx"].as_str().unwrap().contains(&format!(".target sm_{}", card.compute.capability)),
            "{}",
            output["ptx"]
        );
        // The node's setting for the duration of a kernel that does not define its own.
        let least = f64::from(client_node.node.config().settings.kernel_micros) / 1000.0;
        assert!(output["milliseconds"].as_f64().unwrap() >= least - 0.001, "{}", output["milliseconds"]);
        let refused = output["too much"].as_str().unwrap();
        assert!(refused.contains("Call to cuMemAlloc results in CUDA_ERROR_OUT_OF_MEMORY"), "{refused}");
    }
}
