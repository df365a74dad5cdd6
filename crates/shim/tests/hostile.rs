//! A tenant that writes whatever it likes into its container's `usage` while others work: its own neighbours get no crash and
//! no hang, and of another container's limits and shares nothing changes.
#![allow(unsafe_code, unreachable_pub, missing_docs)]
#![allow(clippy::unwrap_used, clippy::multiple_unsafe_ops_per_block)]

#[path = "support/container.rs"]
mod container;
#[path = "../../sim-driver/tests/support/driver.rs"]
mod driver;
#[path = "../../sim-driver/tests/support/node.rs"]
mod node;

use container::{Container, MIB, REGION, shares, truth};
use driver::cuda::*;
use driver::nvml::{Nvml, nvmlMemory_t};
use node::{Node, role, say, wait_to_be_told};
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

/// The program in the container, of every test here.
#[test]
fn client() {
    let Some(role) = role() else { return };
    let words: Vec<&str> = role.iter().map(String::as_str).collect();
    match words[..] {
        ["attacker"] => attacker(),
        ["burglar"] => burglar(),
        ["victim", rounds] => victim(rounds.parse().unwrap()),
        ["steady"] => steady(),
        ref other => panic!("{other:?}"),
    }
}

const CARD: &str = "A100-SXM4-40GB";
const CONTEXT: u64 = 414 * MIB;
const ROOM: u64 = 64 * MIB;

/// Whoever hangs is ended by this, and the test with it.
fn guard() {
    // SAFETY: no pointers.
    unsafe { libc::alarm(600) };
}

fn region() -> PathBuf {
    PathBuf::from(std::env::var_os(REGION).unwrap())
}

#[test]
fn a_hostile_tenant_harms_only_itself() {
    let node = Node::new(CARD, 1, DriverVersion::R550);
    let contain = |cores: u32| {
        let mut all = shares(&node, 2 * CONTEXT + ROOM);
        (all[0].cores, all[0].ceiling, all[0].gated) = (cores, cores, true);
        Container::new(&node, &all, RegionPolicy::default())
    };
    let (hostile, other) = (contain(30_000), contain(60_000));
    let (arbiter, state) = (Arbiter::new(), node.state());
    arbiter.add(hostile.handle()).unwrap();
    let member = arbiter.add(other.handle()).unwrap();
    let mut steady = other.start("steady");
    steady.hear("steady");
    let mut attacker = hostile.start("attacker");
    attacker.hear("attacks");
    let pid = steady.child.id();
    let served = || {
        let slot = state.processes(0).iter().find(|process| process.pid == pid).map(|process| process.slot);
        state.service(0, slot.unwrap())
    };
    let idle = served();
    steady.tell();
    // What runs before it is at work says nothing about its part.
    let until = Instant::now() + Duration::from_secs(60);
    while served().0 < idle.0 + 20_000_000 {
        assert!(Instant::now() < until, "it does not work");
        std::thread::sleep(Duration::from_millis(1));
    }
    let before = served();
    let (mut own, mut all) = (0, 0);
    for round in 1..=20 {
        // One after the other attaches to what is being spoilt.
        hostile.play("victim 40");
        let after = served();
        (own, all) = (after.0 - before.0, after.1 - before.1);
        // A process that got no processor for a while catches up.
        if round >= 3 && own * 2 > all {
            break;
        }
    }
    steady.tell();
    // It has checked its own limits all the while.
    steady.hear("held");
    attacker.kill();
    // Nothing of the other container's account was touched, by anybody.
    let snapshot = other.reader().snapshot().unwrap();
    assert_eq!(snapshot.forged, []);
    assert_eq!(snapshot.gpus[0].used, CONTEXT + 10 * MIB);
    assert_eq!(truth(&state, 0), CONTEXT + 10 * MIB);
    let anomalies = arbiter.anomalies(member);
    assert_eq!((anomalies.backwards, anomalies.leaps), (0, 0));
    // It was promised twice as much as the hostile one: of what ran, the larger part is its own.
    assert!(own * 2 > all, "{own} of {all}");
    steady.end();
}

/// Writes all over the account of its container, for ever. It must be worth attaching to, so the head stays.
fn attacker() {
    let file = OpenOptions::new().write(true).open(region().join("usage")).unwrap();
    let length = file.metadata().unwrap().len();
    say("attacks");
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

/// Does all that a program does. The answers do not matter, but there must be some.
fn victim(rounds: u32) {
    guard();
    let cuda = Cuda::started();
    let nvml = Nvml::open();
    let (mut context, mut pointer, mut free, mut total) = (null_mut(), 0, 0, 0);
    let (mut module, mut kernel, mut device, mut memory) =
        (null_mut(), null_mut(), null_mut(), nvmlMemory_t::default());
    // SAFETY: variables of ours, all along.
    unsafe {
        cuda.cuCtxCreate_v2(&mut context, 0, 0);
        nvml.nvmlInit_v2();
        nvml.nvmlDeviceGetHandleByIndex_v2(0, &mut device);
        let loaded = cuda.cuModuleLoadData(&mut module, c"any image".as_ptr().cast()) == CUDA_SUCCESS
            && cuda.cuModuleGetFunction(&mut kernel, module, c"busy_50us".as_ptr()) == CUDA_SUCCESS;
        // Who writes that all time is spent has spent it, for all of its container: launches may wait for ever, in a thread
        // of their own, and nothing else waits for them.
        let (kernel, context) = (kernel as usize, context as usize);
        let launching = &*Box::leak(Box::new(Cuda(driver::Library::open("libcuda.so.1").unwrap())));
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
                // `limits` says how much there is, and nobody could write there.
                assert_eq!(total as u64, 2 * CONTEXT + ROOM);
                assert!(free <= total);
            }
            if nvml.nvmlDeviceGetMemoryInfo(device, &mut memory) == 0 {
                assert_eq!(memory.total, 2 * CONTEXT + ROOM);
                assert_eq!(memory.used + memory.free, memory.total);
            }
            let mut count = 1000;
            let mut list = [driver::nvml::nvmlProcessInfo_v2_t::default(); 1000];
            nvml.nvmlDeviceGetComputeRunningProcesses_v3(device, &mut count, list.as_mut_ptr());
        }
    }
    // With a thread that may wait for ever.
    // SAFETY: ends this process, with nothing left to write.
    unsafe { libc::_exit(0) };
}

/// Saturates its share, and finds its limits exactly as they are.
fn steady() {
    guard();
    let ok = |code: CUresult| assert_eq!(code, CUDA_SUCCESS, "{:?}", name(code));
    let cuda = Cuda::started();
    let (mut context, mut held, mut pointer, mut module, mut kernel) =
        (null_mut(), 0, 0, null_mut(), null_mut());
    let (mut free, mut total) = (0, 0);
    let is_told = || {
        let mut poll = libc::pollfd { fd: 0, events: libc::POLLIN, revents: 0 };
        // SAFETY: one entry of ours.
        unsafe { libc::poll(&mut poll, 1, 0) > 0 }
    };
    // SAFETY: variables of ours, all along.
    unsafe {
        ok(cuda.cuCtxCreate_v2(&mut context, 0, 0));
        ok(cuda.cuModuleLoadData(&mut module, c"any image".as_ptr().cast()));
        ok(cuda.cuModuleGetFunction(&mut kernel, module, c"busy_500us".as_ptr()));
        ok(cuda.cuMemAlloc_v2(&mut held, 10 << 20));
        say("steady");
        wait_to_be_told();
        ok(cuda.cuMemGetInfo_v2(&mut free, &mut total));
        assert_eq!(total as u64, 2 * CONTEXT + ROOM);
        // What takes blocks of its own takes whole ones.
        free = free >> 21 << 21;
        while !is_told() {
            assert_eq!(cuda.cuMemAlloc_v2(&mut pointer, free + 1), CUDA_ERROR_OUT_OF_MEMORY);
            ok(cuda.cuMemAlloc_v2(&mut pointer, free));
            ok(cuda.cuMemFree_v2(pointer));
            for _ in 0..8 {
                ok(cuda.cuLaunchKernel(kernel, 1, 1, 1, 32, 1, 1, 0, null_mut(), null_mut(), null_mut()));
            }
        }
        wait_to_be_told();
        ok(cuda.cuModuleUnload(module));
        say("held");
        wait_to_be_told();
    }
}

/// `limits` inside a container is mounted read-only: not even root there writes it.
#[test]
fn nobody_inside_writes_the_limits() {
    let node = Node::new(CARD, 1, DriverVersion::R550);
    let container = Container::with_memory(&node, CONTEXT + ROOM);
    let limits = std::ffi::CString::new(container.region().join("limits").to_str().unwrap()).unwrap();
    let contents = std::fs::read(container.region().join("limits")).unwrap();
    let mut command: Command = container.command("burglar");
    // SAFETY: system calls only, between fork and exec.
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
        Err(error) => eprintln!("skipped: no namespace of mounts to be had: {error}"),
        Ok(run) => {
            let (out, err) = (String::from_utf8_lossy(&run.stdout), String::from_utf8_lossy(&run.stderr));
            assert!(run.status.success(), "{out}\n{err}");
            assert!(contents == std::fs::read(container.region().join("limits")).unwrap());
        }
    }
}

fn burglar() {
    guard();
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
    // SAFETY: a new mapping that is not used.
    let map = unsafe { libc::mmap(null_mut(), 4096, writable, libc::MAP_SHARED, open.as_raw_fd(), 0) };
    assert_eq!(map, libc::MAP_FAILED);
    // The shim's own mapping cannot be made writable, either.
    let cuda = Cuda::started();
    let (mut context, mut pointer) = (null_mut(), 0);
    // SAFETY: variables of ours.
    assert_eq!(unsafe { cuda.cuCtxCreate_v2(&mut context, 0, 0) }, CUDA_SUCCESS);
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    let mapped: Vec<_> = maps.lines().filter(|line| line.ends_with("/limits")).collect();
    assert!(!mapped.is_empty(), "{maps}");
    for line in mapped {
        let address = line.split('-').next().unwrap();
        let address = usize::from_str_radix(address, 16).unwrap() as *mut libc::c_void;
        // SAFETY: only tried: it must fail.
        assert_eq!(unsafe { libc::mprotect(address, 4096, writable) }, -1, "{line}");
    }
    // SAFETY: variables of ours.
    assert_eq!(unsafe { cuda.cuMemAlloc_v2(&mut pointer, ROOM as usize + 1) }, CUDA_ERROR_OUT_OF_MEMORY);
}
