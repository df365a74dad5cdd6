//! Tests of which node a program uses, and which of its GPUs.

use super::*;
use crate::driver::nvml::{NVML_ERROR_NOT_FOUND, NvmlLibrary, nvmlDevice_t};
use crate::node::{ROLE_VARIABLE, RoleProcess, TestNode, print_line};
use partage_driver_api::exports::DriverVersion;
use partage_sim_node::node::NODE_DIR_VARIABLE;
use std::process::Command;

/// Returns the UUIDs that both libraries list, which must agree.
fn listed(command: Command) -> Vec<String> {
    let mut program = RoleProcess::spawn(command);
    let cuda = program.wait_for_line("cuda");
    let nvml = program.wait_for_line("nvml");
    program.end();
    assert_eq!(cuda, nvml, "libcuda and NVML list different GPUs");
    cuda.split_whitespace().map(String::from).collect()
}

fn uuids(node: &TestNode) -> Vec<String> {
    node.0.config().gpus.iter().map(|gpu| gpu.uuid.clone()).collect()
}

/// Returns a command with an empty environment, as after `env -i`: only the loader knows where the libraries are.
fn bare_command(node: &TestNode) -> Command {
    let mut command = node.command("devices list");
    command.env_clear().env(ROLE_VARIABLE, "devices list").env("LD_LIBRARY_PATH", node.0.libraries());
    command
}

#[test]
fn node_is_found_through_the_libraries() {
    let node = TestNode::new("T4", 2, DriverVersion::R550);
    assert_eq!(listed(bare_command(&node)), uuids(&node));
    let mut empty = bare_command(&node);
    empty.env(NODE_DIR_VARIABLE, "");
    assert_eq!(listed(empty), uuids(&node), "an empty variable counts as unset");
}

#[test]
fn environment_variable_overrides_the_libraries_node() {
    let (one, other) =
        (TestNode::new("T4", 1, DriverVersion::R550), TestNode::new("A10", 3, DriverVersion::R550));
    let mut command = bare_command(&one);
    command.env(NODE_DIR_VARIABLE, other.0.path());
    assert_eq!(listed(command), uuids(&other));
}

#[test]
fn gpu_without_device_file_is_hidden() {
    let node = TestNode::new("A100-SXM4-40GB", 4, DriverVersion::R550);
    let all = uuids(&node);
    let hidden = node.0.config().gpus[1].minor;
    std::fs::remove_file(node.0.devices().join(format!("nvidia{hidden}"))).unwrap();
    let left = [all[0].clone(), all[2].clone(), all[3].clone()];
    assert_eq!(listed(node.command("devices list")), left);
    // The variable counts the remaining GPUs.
    let mut command = node.command("devices first");
    command.env("CUDA_VISIBLE_DEVICES", "1");
    assert_eq!(RoleProcess::spawn(command).wait_for_line("first"), all[2]);
    node.run_role(&format!("devices unknown {} {}", all[1], all[3]));
    // A node of an older version has no device directory.
    std::fs::remove_dir_all(node.0.devices()).unwrap();
    assert_eq!(listed(node.command("devices list")), all);
}

pub fn client(arguments: &[&str]) {
    match arguments {
        ["list"] => {
            print_line(&format!("cuda {}", cuda_uuids().join(" ")));
            print_line(&format!("nvml {}", nvml_uuids(&started()).join(" ")));
        }
        ["first"] => print_line(&format!("first {}", cuda_uuids()[0])),
        ["unknown", hidden, shown] => {
            let nvml = started();
            let mut device: nvmlDevice_t = null_mut();
            let mut find = |uuid: &str| {
                let uuid = CString::new(uuid).unwrap();
                // SAFETY: a NUL-terminated string and a local variable.
                unsafe { nvml.nvmlDeviceGetHandleByUUID(uuid.as_ptr(), &mut device) }
            };
            assert_eq!(find(hidden), NVML_ERROR_NOT_FOUND);
            assert_eq!(find(shown), 0);
            let mut index = u32::MAX;
            // SAFETY: a handle from the library and a local variable.
            assert_eq!(unsafe { nvml.nvmlDeviceGetIndex(device, &mut index) }, 0);
            assert_eq!(index, 2, "index among the visible GPUs");
            let mut minor = u32::MAX;
            // SAFETY: a handle from the library and a local variable.
            assert_eq!(unsafe { nvml.nvmlDeviceGetMinorNumber(device, &mut minor) }, 0);
            assert!(minor < 4, "minor number {minor} is not that of the device file");
        }
        other => panic!("{other:?}"),
    }
}

fn cuda_uuids() -> Vec<String> {
    let cuda = CudaLibrary::started();
    let mut count = 0;
    ok!(cuda.cuDeviceGetCount(&mut count));
    let uuid = |ordinal| {
        let mut uuid = CUuuid { bytes: [0; 16] };
        ok!(cuda.cuDeviceGetUuid(&mut uuid, ordinal));
        let hex: String = uuid.bytes.iter().map(|&byte| format!("{:02x}", byte as u8)).collect();
        format!("GPU-{}-{}-{}-{}-{}", &hex[..8], &hex[8..12], &hex[12..16], &hex[16..20], &hex[20..])
    };
    (0..count).map(uuid).collect()
}

fn started() -> NvmlLibrary {
    let nvml = NvmlLibrary::open();
    // SAFETY: the function takes no arguments.
    assert_eq!(unsafe { nvml.nvmlInit_v2() }, 0);
    nvml
}

fn nvml_uuids(nvml: &NvmlLibrary) -> Vec<String> {
    let mut count = 0;
    // SAFETY: the output is a local variable, valid for writes during the call.
    assert_eq!(unsafe { nvml.nvmlDeviceGetCount_v2(&mut count) }, 0);
    let uuid = |index| {
        let (mut device, mut text) = (null_mut(), [0; 96]);
        // SAFETY: the output is a local variable, valid for writes during the call.
        assert_eq!(unsafe { nvml.nvmlDeviceGetHandleByIndex_v2(index, &mut device) }, 0);
        // SAFETY: a handle from the library and a buffer of the stated size.
        assert_eq!(unsafe { nvml.nvmlDeviceGetUUID(device, text.as_mut_ptr(), 96) }, 0);
        // SAFETY: the library has terminated the string.
        unsafe { std::ffi::CStr::from_ptr(text.as_ptr()) }.to_string_lossy().into_owned()
    };
    (0..count).map(uuid).collect()
}
