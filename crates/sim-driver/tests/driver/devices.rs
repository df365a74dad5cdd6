//! Which node a program is on, and which of its GPUs it may use.

use super::*;
use crate::driver::nvml::{NVML_ERROR_NOT_FOUND, Nvml, nvmlDevice_t};
use crate::node::{Node, Player, ROLE, say};
use partage_driver_api::exports::DriverVersion;
use partage_sim_node::node::VARIABLE;
use std::process::Command;

/// UUIDs as both libraries list them, which must be the same.
fn listed(command: Command) -> Vec<String> {
    let mut program = Player::of(command);
    let cuda = program.hear("cuda");
    let nvml = program.hear("nvml");
    program.end();
    assert_eq!(cuda, nvml, "the two libraries agree");
    cuda.split_whitespace().map(String::from).collect()
}

fn uuids(node: &Node) -> Vec<String> {
    node.0.config().gpus.iter().map(|gpu| gpu.uuid.clone()).collect()
}

/// As after `env -i`: only the loader knows where the libraries are.
fn bare(node: &Node) -> Command {
    let mut command = node.command("devices list");
    command.env_clear().env(ROLE, "devices list").env("LD_LIBRARY_PATH", node.0.libraries());
    command
}

#[test]
fn a_program_finds_the_node_of_its_libraries() {
    let node = Node::new("T4", 2, DriverVersion::R550);
    assert_eq!(listed(bare(&node)), uuids(&node));
    let mut empty = bare(&node);
    empty.env(VARIABLE, "");
    assert_eq!(listed(empty), uuids(&node), "a variable that is empty names nothing");
}

#[test]
fn the_variable_wins() {
    let (one, other) = (Node::new("T4", 1, DriverVersion::R550), Node::new("A10", 3, DriverVersion::R550));
    let mut command = bare(&one);
    command.env(VARIABLE, other.0.path());
    assert_eq!(listed(command), uuids(&other));
}

#[test]
fn a_gpu_without_its_device_file_is_not_there() {
    let node = Node::new("A100-SXM4-40GB", 4, DriverVersion::R550);
    let all = uuids(&node);
    let hidden = node.0.config().gpus[1].minor;
    std::fs::remove_file(node.0.devices().join(format!("nvidia{hidden}"))).unwrap();
    let left = [all[0].clone(), all[2].clone(), all[3].clone()];
    assert_eq!(listed(node.command("devices list")), left);
    // The variable counts what is left.
    let mut command = node.command("devices first");
    command.env("CUDA_VISIBLE_DEVICES", "1");
    assert_eq!(Player::of(command).hear("first"), all[2]);
    node.play(&format!("devices unknown {} {}", all[1], all[3]));
    // A node of an older version has no such folder.
    std::fs::remove_dir_all(node.0.devices()).unwrap();
    assert_eq!(listed(node.command("devices list")), all);
}

pub fn client(arguments: &[&str]) {
    match arguments {
        ["list"] => {
            say(&format!("cuda {}", cuda_uuids().join(" ")));
            say(&format!("nvml {}", nvml_uuids(&started()).join(" ")));
        }
        ["first"] => say(&format!("first {}", cuda_uuids()[0])),
        ["unknown", hidden, shown] => {
            let nvml = started();
            let mut device: nvmlDevice_t = null_mut();
            let mut find = |uuid: &str| {
                let uuid = CString::new(uuid).unwrap();
                // SAFETY: a text that ends in zero and a variable.
                unsafe { nvml.nvmlDeviceGetHandleByUUID(uuid.as_ptr(), &mut device) }
            };
            assert_eq!(find(hidden), NVML_ERROR_NOT_FOUND);
            assert_eq!(find(shown), 0);
            let mut index = u32::MAX;
            // SAFETY: a handle of the library and a variable.
            assert_eq!(unsafe { nvml.nvmlDeviceGetIndex(device, &mut index) }, 0);
            assert_eq!(index, 2, "the program's own count");
            let mut minor = u32::MAX;
            // SAFETY: likewise.
            assert_eq!(unsafe { nvml.nvmlDeviceGetMinorNumber(device, &mut minor) }, 0);
            assert!(minor < 4, "the name of its device file stays: {minor}");
        }
        other => panic!("{other:?}"),
    }
}

fn cuda_uuids() -> Vec<String> {
    let cuda = Cuda::started();
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

fn started() -> Nvml {
    let nvml = Nvml::open();
    // SAFETY: no arguments.
    assert_eq!(unsafe { nvml.nvmlInit_v2() }, 0);
    nvml
}

fn nvml_uuids(nvml: &Nvml) -> Vec<String> {
    let mut count = 0;
    // SAFETY: a variable.
    assert_eq!(unsafe { nvml.nvmlDeviceGetCount_v2(&mut count) }, 0);
    let uuid = |index| {
        let (mut device, mut text) = (null_mut(), [0; 96]);
        // SAFETY: a variable.
        assert_eq!(unsafe { nvml.nvmlDeviceGetHandleByIndex_v2(index, &mut device) }, 0);
        // SAFETY: a handle of the library and an array of this size.
        assert_eq!(unsafe { nvml.nvmlDeviceGetUUID(device, text.as_mut_ptr(), 96) }, 0);
        // SAFETY: the library ended it with a zero.
        unsafe { std::ffi::CStr::from_ptr(text.as_ptr()) }.to_string_lossy().into_owned()
    };
    (0..count).map(uuid).collect()
}
