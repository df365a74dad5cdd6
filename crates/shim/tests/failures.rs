//! A region that is missing or broken, and calls without a place for the result.
#![allow(unsafe_code, unreachable_pub, missing_docs)]
// Many calls of C functions: their safety is explained once, in `ok!`.
#![allow(clippy::unwrap_used, clippy::multiple_unsafe_ops_per_block, clippy::macro_metavars_in_unsafe)]

#[path = "support/container.rs"]
mod container;
#[path = "../../sim-driver/tests/support/driver.rs"]
mod driver;
#[path = "../../sim-driver/tests/support/node.rs"]
mod node;

#[path = "failures/null_outputs.rs"]
mod null_outputs;

use container::{MIB, TestContainer, shares};
use driver::cuda::*;
use driver::nvml::{NVML_ERROR_NO_PERMISSION, NVML_SUCCESS, NvmlLibrary, nvmlMemory_t};
use node::{TestNode, print_line, role, wait_for_resume};
use partage_driver_api::exports::DriverVersion;
use partage_region::{RegionOwner, RegionPolicy};
use std::fs::{self, File};
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::path::Path;
use std::ptr::null_mut;

/// Fails with the call and its error code.
#[macro_export]
macro_rules! ok {
    ($call:expr) => {{
        // SAFETY: every pointer in these calls is null or to a variable that lives through them.
        let code = unsafe { $call };
        assert_eq!(code, 0, "{}", stringify!($call));
    }};
}

/// The program that every test here runs in the container.
#[test]
fn client() {
    let Some(role) = role() else { return };
    let words: Vec<&str> = role.iter().map(String::as_str).collect();
    match words[..] {
        ["refused"] => refused(),
        ["late"] => late(),
        ["broken_later"] => broken_later(),
        ["null_outputs", state] => null_outputs::client(state),
        ref other => panic!("{other:?}"),
    }
}

const GPU_MODEL: &str = "A100-SXM4-40GB";
const CONTEXT_BYTES: u64 = 414 * MIB;
const MEMORY_LIMIT: u64 = CONTEXT_BYTES + 64 * MIB;

fn node() -> TestNode {
    TestNode::new(GPU_MODEL, 1, DriverVersion::R550)
}

fn broken<'a>(node: &'a TestNode, break_it: &dyn Fn(&Path)) -> TestContainer<'a> {
    let container = TestContainer::with_memory(node, MEMORY_LIMIT);
    break_it(&container.region());
    container
}

/// A function that breaks a region, or a file of it.
type BreakFn = Box<dyn Fn(&Path)>;

/// Returns all tested ways to break a file of the region.
fn ways_to_break_a_region() -> Vec<(String, BreakFn)> {
    let mut ways: Vec<(String, BreakFn)> = vec![(
        "no folder".into(),
        Box::new(|region: &Path| {
            fs::remove_dir_all(region).unwrap();
        }),
    )];
    for file in ["limits", "usage"] {
        let mut way = |name: &str, break_it: Box<dyn Fn(&Path)>| {
            ways.push((
                format!("{file}: {name}"),
                Box::new(move |region: &Path| break_it(&region.join(file))),
            ));
        };
        way("missing", Box::new(|file| fs::remove_file(file).unwrap()));
        way(
            "a folder",
            Box::new(|file| {
                fs::remove_file(file).unwrap();
                fs::create_dir(file).unwrap();
            }),
        );
        way(
            "a pipe",
            Box::new(|file| {
                fs::remove_file(file).unwrap();
                let path = std::ffi::CString::new(file.to_str().unwrap()).unwrap();
                // SAFETY: the path is a C string.
                assert_eq!(unsafe { libc::mkfifo(path.as_ptr(), 0o666) }, 0);
            }),
        );
        way(
            "a link to nowhere",
            Box::new(|file| {
                fs::remove_file(file).unwrap();
                std::os::unix::fs::symlink("/nowhere/at/all", file).unwrap();
            }),
        );
        way("empty", Box::new(|file| File::options().write(true).open(file).unwrap().set_len(0).unwrap()));
        way(
            "cut",
            Box::new(|file| {
                let open = File::options().write(true).open(file).unwrap();
                open.set_len(open.metadata().unwrap().len() - 1).unwrap();
            }),
        );
        way("zeros", Box::new(|file| overwrite(file, |_| 0)));
        way("ones", Box::new(|file| overwrite(file, |_| 0xff)));
        way("text", Box::new(|file| overwrite(file, |at| b"not what you think "[at % 19])));
        // The header: magic, version, count, size.
        way(
            "another magic",
            Box::new(|file| File::options().write(true).open(file).unwrap().write_all_at(&[7], 0).unwrap()),
        );
        way("a newer version", Box::new(|file| write_number(file, 8, 99)));
        way("an older version", Box::new(|file| write_number(file, 8, 0)));
    }
    ways
}

fn overwrite(file: &Path, byte: impl Fn(usize) -> u8) {
    let length = fs::metadata(file).unwrap().len() as usize;
    let bytes: Vec<u8> = (0..length).map(byte).collect();
    File::options().write(true).open(file).unwrap().write_all_at(&bytes, 0).unwrap();
}

fn write_number(file: &Path, at: u64, number: u32) {
    File::options().write(true).open(file).unwrap().write_all_at(&number.to_le_bytes(), at).unwrap();
}

#[test]
fn broken_region_refuses_everything() {
    let node = node();
    for (way, break_it) in ways_to_break_a_region() {
        eprintln!("{way}");
        broken(&node, &*break_it).run_role("refused");
    }
}

/// Files that a program may not read, as a user other than root.
#[test]
fn unreadable_region_refuses_everything() {
    let node = node();
    for (file, mode) in [("limits", 0o000), ("usage", 0o000), ("usage", 0o444)] {
        let container = broken(&node, &|region| {
            fs::set_permissions(region.join(file), fs::Permissions::from_mode(mode)).unwrap();
        });
        let mut command = container.command("refused");
        // SAFETY: the function takes no arguments and cannot fail.
        if unsafe { libc::geteuid() } == 0 {
            // The container's directory is accessible to its owner only, while the test's program is accessible to all
            // users.
            for folder in [container.region(), container.region().parent().unwrap().to_path_buf()] {
                fs::set_permissions(folder, fs::Permissions::from_mode(0o755)).unwrap();
            }
            std::os::unix::process::CommandExt::uid(&mut command, 65534);
            std::os::unix::process::CommandExt::gid(&mut command, 65534);
            let Ok(probe) = command.env(node::ROLE_VARIABLE, "refused").output() else {
                eprintln!("skipped: another user cannot run this test's program");
                return;
            };
            let (out, err) = (String::from_utf8_lossy(&probe.stdout), String::from_utf8_lossy(&probe.stderr));
            assert!(probe.status.success(), "{file} {mode:o}\n{out}\n{err}");
            continue;
        }
        assert!(command.output().unwrap().status.success(), "{file} {mode:o}");
    }
}

/// The region appears while the program runs: its limits apply from then on.
#[test]
fn late_region_is_enforced() {
    let node = node();
    let container = broken(&node, &|region| fs::remove_file(region.join("limits")).unwrap());
    let mut process = container.start("late");
    process.wait_for_line("without");
    let _owner =
        RegionOwner::create(&container.region(), &shares(&node, MEMORY_LIMIT), RegionPolicy::default())
            .unwrap();
    process.resume();
    process.wait_for_line("held");
    process.end();
}

/// A process that has its region mapped keeps it, whatever happens to the files' names.
#[test]
fn removed_region_stays_enforced() {
    let node = node();
    let container = TestContainer::with_memory(&node, MEMORY_LIMIT);
    let mut process = container.start("broken_later");
    process.wait_for_line("with");
    fs::remove_file(container.region().join("limits")).unwrap();
    fs::remove_file(container.region().join("usage")).unwrap();
    process.resume();
    process.end();
}

/// Checks that a program can always query the identity of its devices.
fn identity(cuda: &CudaLibrary) {
    let (mut count, mut version, mut name, mut uuid, mut bus) = (0, 0, [0; 100], CUuuid::default(), [0; 32]);
    ok!(cuda.cuDeviceGetCount(&mut count));
    ok!(cuda.cuDriverGetVersion(&mut version));
    ok!(cuda.cuDeviceGetName(name.as_mut_ptr(), 100, 0));
    ok!(cuda.cuDeviceGetUuid(&mut uuid, 0));
    ok!(cuda.cuDeviceGetPCIBusId(bus.as_mut_ptr(), 32, 0));
    assert_eq!((count, version), (1, 12040));
}

fn refused() {
    let cuda = CudaLibrary::started();
    identity(&cuda);
    let (mut context, mut pointer, mut free, mut total) = (null_mut(), 0, 0, 0);
    // SAFETY: the pointers are to local variables.
    unsafe {
        assert_eq!(cuda.cuCtxCreate_v2(&mut context, 0, 0), CUDA_ERROR_NOT_PERMITTED);
        assert_eq!(cuda.cuDevicePrimaryCtxRetain(&mut context, 0), CUDA_ERROR_NOT_PERMITTED);
        assert_eq!(cuda.cuMemAlloc_v2(&mut pointer, 1 << 20), CUDA_ERROR_NOT_PERMITTED);
        assert_eq!(
            cuda.cuMemAllocManaged(&mut pointer, 1 << 20, CU_MEM_ATTACH_GLOBAL),
            CUDA_ERROR_NOT_PERMITTED
        );
        assert_eq!(cuda.cuMemGetInfo_v2(&mut free, &mut total), CUDA_ERROR_NOT_PERMITTED);
        let none = null_mut();
        let launch = cuda.cuLaunchKernel(null_mut(), 1, 1, 1, 1, 1, 1, 0, null_mut(), none, none);
        assert_eq!(launch, CUDA_ERROR_NOT_PERMITTED);
    }
    assert!(context.is_null() && pointer == 0);
    let nvml = NvmlLibrary::open();
    ok!(nvml.nvmlInit_v2());
    let (mut device, mut count, mut memory) = (null_mut(), 0, nvmlMemory_t::default());
    ok!(nvml.nvmlDeviceGetCount_v2(&mut count));
    ok!(nvml.nvmlDeviceGetHandleByIndex_v2(0, &mut device));
    assert_eq!(count, 1);
    // SAFETY: the pointer is to a local variable.
    assert_eq!(unsafe { nvml.nvmlDeviceGetMemoryInfo(device, &mut memory) }, NVML_ERROR_NO_PERMISSION);
}

fn late() {
    let cuda = CudaLibrary::started();
    let (mut context, mut pointer) = (null_mut(), 0);
    // SAFETY: the pointer is to a local variable.
    assert_eq!(unsafe { cuda.cuCtxCreate_v2(&mut context, 0, 0) }, CUDA_ERROR_NOT_PERMITTED);
    print_line("without");
    wait_for_resume();
    ok!(cuda.cuCtxCreate_v2(&mut context, 0, 0));
    // SAFETY: the pointer is to a local variable.
    let result = unsafe { cuda.cuMemAlloc_v2(&mut pointer, MEMORY_LIMIT as usize + 1) };
    assert_eq!(result, CUDA_ERROR_OUT_OF_MEMORY);
    ok!(cuda.cuMemAlloc_v2(&mut pointer, 64 << 20));
    print_line("held");
    wait_for_resume();
}

fn broken_later() {
    let cuda = CudaLibrary::started();
    let (mut context, mut pointer) = (null_mut(), 0);
    ok!(cuda.cuCtxCreate_v2(&mut context, 0, 0));
    print_line("with");
    wait_for_resume();
    // SAFETY: the pointer is to a local variable.
    assert_eq!(unsafe { cuda.cuMemAlloc_v2(&mut pointer, (64 << 20) + 1) }, CUDA_ERROR_OUT_OF_MEMORY);
    ok!(cuda.cuMemAlloc_v2(&mut pointer, 64 << 20));
    ok!(cuda.cuMemFree_v2(pointer));
    let nvml = NvmlLibrary::open();
    // The other library has no region mapped, and is refused.
    ok!(nvml.nvmlInit_v2());
    let (mut device, mut memory) = (null_mut(), nvmlMemory_t::default());
    ok!(nvml.nvmlDeviceGetHandleByIndex_v2(0, &mut device));
    // SAFETY: the pointer is to a local variable.
    let code = unsafe { nvml.nvmlDeviceGetMemoryInfo(device, &mut memory) };
    assert!(code == NVML_ERROR_NO_PERMISSION && code != NVML_SUCCESS);
}
