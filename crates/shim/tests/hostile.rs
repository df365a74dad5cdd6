//! A tenant that writes arbitrary data into its container's `usage` while others work: processes of its own container
//! neither crash nor hang, and the limits and shares of other containers do not change.
#![allow(unsafe_code, unreachable_pub, missing_docs)]
#![allow(clippy::unwrap_used, clippy::multiple_unsafe_ops_per_block)]

#[path = "support/container.rs"]
mod container;
#[path = "../../sim-driver/tests/support/driver.rs"]
mod driver;
#[path = "../../sim-driver/tests/support/node.rs"]
mod node;

use container::{MIB, REGION_VARIABLE, TestContainer, shares, true_usage};
use driver::cuda::*;
use driver::nvml::{NvmlLibrary, nvmlMemory_t};
use node::{TestNode, print_line, role, wait_for_resume};
use partage_driver_api::exports::DriverVersion;
use partage_region::RegionPolicy;
use partage_region::arbiter::Arbiter;
use std::fs::{File, OpenOptions};
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::Command;
use std::ptr::null_mut;
use std::time::{Duration, Instant};

/// The program that every test here runs in the container.
#[test]
fn client() {
    let Some(role) = role() else { return };
    let words: Vec<&str> = role.iter().map(String::as_str).collect();
    match words[..] {
        ["attacker"] => attacker(),
        ["limits_writer"] => limits_writer(),
        ["victim", rounds] => victim(rounds.parse().unwrap()),
        ["steady"] => steady(),
        ref other => panic!("{other:?}"),
    }
}

const GPU_MODEL: &str = "A100-SXM4-40GB";
const CONTEXT_BYTES: u64 = 414 * MIB;
const FREE_BYTES: u64 = 64 * MIB;

/// Ends a process that hangs, and the test with it.
fn set_hang_timeout() {
    // SAFETY: the call takes no pointers; its signal ends this process.
    unsafe { libc::alarm(600) };
}

fn region() -> PathBuf {
    PathBuf::from(std::env::var_os(REGION_VARIABLE).unwrap())
}

#[test]
fn hostile_tenant_harms_only_itself() {
    let node = TestNode::new(GPU_MODEL, 1, DriverVersion::R550);
    let contain = |cores: u32| {
        let mut all = shares(&node, 2 * CONTEXT_BYTES + FREE_BYTES);
        (all[0].cores, all[0].ceiling, all[0].waits_for_turns) = (cores, cores, true);
        TestContainer::new(&node, &all, RegionPolicy::default())
    };
    let (hostile, other) = (contain(30_000), contain(60_000));
    let (arbiter, state) = (Arbiter::new(), node.state());
    arbiter.add(hostile.handle()).unwrap();
    arbiter.add(other.handle()).unwrap();
    let began = Instant::now();
    let mut steady = other.start("steady");
    steady.wait_for_line("steady");
    let mut attacker = hostile.start("attacker");
    attacker.wait_for_line("attacks");
    let pid = steady.child.id();
    let served = || {
        let slot = state.processes(0).iter().find(|process| process.pid == pid).map(|process| process.slot);
        state.service_time(0, slot.unwrap())
    };
    let idle = served();
    steady.resume();
    // Work before it saturates its share says nothing about its share.
    let until = Instant::now() + Duration::from_secs(60);
    while served().0 < idle.0 + 20_000_000 {
        assert!(Instant::now() < until, "it did no work");
        std::thread::sleep(Duration::from_millis(1));
    }
    let before = served();
    let (mut own, mut all) = (0, 0);
    for round in 1..=20 {
        // One process after the other attaches to the region under attack.
        hostile.run_role("victim 40");
        let after = served();
        (own, all) = (after.0 - before.0, after.1 - before.1);
        // A process that got no CPU for a while catches up.
        if round >= 3 && own * 10 > all {
            break;
        }
    }
    steady.resume();
    // It has checked its own limits all the time.
    steady.wait_for_line("held");
    attacker.kill();
    // The account of the other container is untouched.
    let snapshot = other.reader().snapshot().unwrap();
    assert_eq!(snapshot.forged, []);
    assert_eq!(snapshot.gpus[0].used, CONTEXT_BYTES + 10 * MIB);
    assert_eq!(true_usage(&state, 0), CONTEXT_BYTES + 10 * MIB);
    // At most one container is charged at any time, so both together are charged no more than has passed.
    let charged = [&hostile, &other].map(|container| container.owner.limits(0).unwrap().charged());
    let passed = began.elapsed().as_nanos();
    assert!(u128::from(charged[0]) + u128::from(charged[1]) <= passed, "{charged:?} ns in {passed} ns");
    // Forged markers hide work, so that the hostile container takes time that it is not charged for, until the bypass
    // audit reports it. The other container still proceeds: the driver gives it time slices.
    assert!(own * 10 > all, "{own} of {all}");
    steady.end();
}

/// Writes all over the account of its container, forever. The header stays, so that attaching succeeds.
fn attacker() {
    let file = OpenOptions::new().write(true).open(region().join("usage")).unwrap();
    let length = file.metadata().unwrap().len();
    print_line("attacks");
    let mut random = 0x9e37_79b9_7f4a_7c15_u64;
    let mut next = || {
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        random
    };
    loop {
        let near = next() % 4 != 0;
        let at = (next() % if near { length.min(16 << 10) } else { length }).max(24);
        let value = match next() % 4 {
            0 => 0,
            1 => u64::MAX,
            2 => next() >> 40,
            _ => next(),
        };
        let times = if next() % 8 == 0 { 64 } else { 1 };
        let bytes = value.to_le_bytes().repeat(times);
        let room = usize::try_from(length - at).unwrap_or(usize::MAX).min(bytes.len());
        let _ = file.write_all_at(&bytes[..room], at);
    }
}

/// Does everything that a program does. Results do not matter, but every call must return.
fn victim(rounds: u32) {
    set_hang_timeout();
    let cuda = CudaLibrary::started();
    let nvml = NvmlLibrary::open();
    let (mut context, mut pointer, mut free, mut total) = (null_mut(), 0, 0, 0);
    let (mut module, mut kernel, mut device, mut memory) =
        (null_mut(), null_mut(), null_mut(), nvmlMemory_t::default());
    // SAFETY: all pointers are to local variables.
    unsafe {
        cuda.cuCtxCreate_v2(&mut context, 0, 0);
        nvml.nvmlInit_v2();
        nvml.nvmlDeviceGetHandleByIndex_v2(0, &mut device);
        let loaded = cuda.cuModuleLoadData(&mut module, c"any image".as_ptr().cast()) == CUDA_SUCCESS
            && cuda.cuModuleGetFunction(&mut kernel, module, c"busy_50us".as_ptr()) == CUDA_SUCCESS;
        // An attacker that writes that all time is spent has spent it, for its whole container: launches may wait
        // forever, in a thread of their own, and nothing else waits for them.
        let (kernel, context) = (kernel as usize, context as usize);
        let launching =
            &*Box::leak(Box::new(CudaLibrary(driver::LoadedLibrary::open("libcuda.so.1").unwrap())));
        std::thread::spawn(move || {
            launching.cuCtxSetCurrent(context as CUcontext);
            if !loaded {
                return;
            }
            loop {
                launching.cuLaunchKernel(
                    kernel as CUfunction,
                    1,
                    1,
                    1,
                    32,
                    1,
                    1,
                    0,
                    null_mut(),
                    null_mut(),
                    null_mut(),
                );
            }
        });
        for _ in 0..rounds {
            for size in [1, 4096, 1 << 20, 10 << 20, 1 << 40] {
                if cuda.cuMemAlloc_v2(&mut pointer, size) == CUDA_SUCCESS {
                    cuda.cuMemFree_v2(pointer);
                }
            }
            if cuda.cuMemGetInfo_v2(&mut free, &mut total) == CUDA_SUCCESS {
                // The total is in `limits`, which no process can write.
                assert_eq!(total as u64, 2 * CONTEXT_BYTES + FREE_BYTES);
                assert!(free <= total);
            }
            if nvml.nvmlDeviceGetMemoryInfo(device, &mut memory) == 0 {
                assert_eq!(memory.total, 2 * CONTEXT_BYTES + FREE_BYTES);
                assert_eq!(memory.used + memory.free, memory.total);
            }
            let mut count = 1000;
            let mut list = [driver::nvml::nvmlProcessInfo_v2_t::default(); 1000];
            nvml.nvmlDeviceGetComputeRunningProcesses_v3(device, &mut count, list.as_mut_ptr());
        }
    }
    // A thread may still be waiting.
    // SAFETY: ends this process, with nothing left to write.
    unsafe { libc::_exit(0) };
}

/// Saturates its share, and checks that its limits are exact.
fn steady() {
    set_hang_timeout();
    let ok = |code: CUresult| assert_eq!(code, CUDA_SUCCESS, "{:?}", name(code));
    let cuda = CudaLibrary::started();
    let (mut context, mut held, mut pointer, mut module, mut kernel) =
        (null_mut(), 0, 0, null_mut(), null_mut());
    let (mut free, mut total) = (0, 0);
    let is_told = || {
        let mut poll = libc::pollfd { fd: 0, events: libc::POLLIN, revents: 0 };
        // SAFETY: the pointer is to one local entry.
        unsafe { libc::poll(&mut poll, 1, 0) > 0 }
    };
    // SAFETY: all pointers are to local variables.
    unsafe {
        ok(cuda.cuCtxCreate_v2(&mut context, 0, 0));
        ok(cuda.cuModuleLoadData(&mut module, c"any image".as_ptr().cast()));
        ok(cuda.cuModuleGetFunction(&mut kernel, module, c"busy_500us".as_ptr()));
        ok(cuda.cuMemAlloc_v2(&mut held, 10 << 20));
        print_line("steady");
        wait_for_resume();
        ok(cuda.cuMemGetInfo_v2(&mut free, &mut total));
        assert_eq!(total as u64, 2 * CONTEXT_BYTES + FREE_BYTES);
        // Large allocations take whole blocks.
        free = free >> 21 << 21;
        while !is_told() {
            assert_eq!(cuda.cuMemAlloc_v2(&mut pointer, free + 1), CUDA_ERROR_OUT_OF_MEMORY);
            ok(cuda.cuMemAlloc_v2(&mut pointer, free));
            ok(cuda.cuMemFree_v2(pointer));
            for _ in 0..8 {
                ok(cuda.cuLaunchKernel(kernel, 1, 1, 1, 32, 1, 1, 0, null_mut(), null_mut(), null_mut()));
            }
        }
        wait_for_resume();
        ok(cuda.cuModuleUnload(module));
        print_line("held");
        wait_for_resume();
    }
}

/// `limits` is mounted read-only inside a container: not even root can write it there.
#[test]
fn limits_cannot_be_written_inside_the_container() {
    let node = TestNode::new(GPU_MODEL, 1, DriverVersion::R550);
    let container = TestContainer::with_memory(&node, CONTEXT_BYTES + FREE_BYTES);
    let limits = std::ffi::CString::new(container.region().join("limits").to_str().unwrap()).unwrap();
    let contents = std::fs::read(container.region().join("limits")).unwrap();
    let mut command: Command = container.command("limits_writer");
    // SAFETY: only system calls are made between fork and exec.
    unsafe {
        command.pre_exec(move || {
            let (none, root) = (std::ptr::null(), c"/".as_ptr());
            let done = |answer: i32| if answer == 0 { Ok(()) } else { Err(std::io::Error::last_os_error()) };
            done(libc::unshare(libc::CLONE_NEWNS))?;
            done(libc::mount(none, root, none, libc::MS_REC | libc::MS_PRIVATE, null_mut()))?;
            done(libc::mount(limits.as_ptr(), limits.as_ptr(), none, libc::MS_BIND, null_mut()))?;
            let read_only = libc::MS_BIND | libc::MS_REMOUNT | libc::MS_RDONLY;
            done(libc::mount(none, limits.as_ptr(), none, read_only, null_mut()))
        });
    }
    match command.output() {
        Err(error) => eprintln!("skipped: mount namespaces are not available: {error}"),
        Ok(run) => {
            let (out, err) = (String::from_utf8_lossy(&run.stdout), String::from_utf8_lossy(&run.stderr));
            assert!(run.status.success(), "{out}\n{err}");
            assert!(contents == std::fs::read(container.region().join("limits")).unwrap());
        }
    }
}

fn limits_writer() {
    set_hang_timeout();
    let file = region().join("limits");
    for options in [
        OpenOptions::new().write(true),
        OpenOptions::new().append(true),
        OpenOptions::new().read(true).write(true),
        OpenOptions::new().write(true).truncate(true),
    ] {
        assert!(options.open(&file).is_err(), "{options:?}");
    }
    let mode = <std::fs::Permissions as std::os::unix::fs::PermissionsExt>::from_mode(0o777);
    assert!(std::fs::set_permissions(&file, mode).is_err());
    assert!(std::fs::rename(region().join("usage"), &file).is_err());
    assert!(std::fs::remove_file(&file).is_err());
    let open = File::open(&file).unwrap();
    let writable = libc::PROT_READ | libc::PROT_WRITE;
    // SAFETY: this creates a new mapping, which is not used.
    let map = unsafe { libc::mmap(null_mut(), 4096, writable, libc::MAP_SHARED, open.as_raw_fd(), 0) };
    assert_eq!(map, libc::MAP_FAILED);
    // The shim's own mapping cannot be made writable either.
    let cuda = CudaLibrary::started();
    let (mut context, mut pointer) = (null_mut(), 0);
    // SAFETY: the pointer is to a local variable.
    assert_eq!(unsafe { cuda.cuCtxCreate_v2(&mut context, 0, 0) }, CUDA_SUCCESS);
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    let mapped: Vec<_> = maps.lines().filter(|line| line.ends_with("/limits")).collect();
    assert!(!mapped.is_empty(), "{maps}");
    for line in mapped {
        let address = line.split('-').next().unwrap();
        let address = usize::from_str_radix(address, 16).unwrap() as *mut libc::c_void;
        // SAFETY: the call must fail, so it changes no mapping.
        assert_eq!(unsafe { libc::mprotect(address, 4096, writable) }, -1, "{line}");
    }
    // SAFETY: the pointer is to a local variable.
    let result = unsafe { cuda.cuMemAlloc_v2(&mut pointer, FREE_BYTES as usize + 1) };
    assert_eq!(result, CUDA_ERROR_OUT_OF_MEMORY);
}
