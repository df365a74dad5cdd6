//! Closing devices to a cgroup: by a small program that the kernel asks (v2), by a list (v1).
#![allow(unsafe_code)]

use rustix::fs::{Mode, OFlags, open};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use std::ffi::CStr;
use std::fs;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::path::Path;

/// One instruction of the kernel's machine, as `struct bpf_insn`.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Instruction {
    pub(super) code: u8,
    /// The register that is written in the lower half, the one that is read in the upper.
    pub(super) registers: u8,
    pub(super) offset: i16,
    pub(super) value: i32,
}

/// Load 32 bits from memory.
pub(super) const LOAD: u8 = 0x61;
/// `and` with a value, in 32 bits.
pub(super) const AND: u8 = 0x54;
/// Set to a value, in 64 bits.
pub(super) const SET: u8 = 0xb7;
/// Jump if equal to a value, in 32 bits.
pub(super) const IF_EQUAL: u8 = 0x16;
/// Jump if different from a value, in 32 bits.
pub(super) const IF_OTHER: u8 = 0x56;
/// Return what register 0 has.
pub(super) const EXIT: u8 = 0x95;

/// `BPF_DEVCG_DEV_CHAR`.
pub(super) const CHARACTER: i32 = 2;

/// What the kernel asks at each open and mknod: 0 closes, 1 leaves open. Register 1 comes with the address of the
/// question: kind (lower half: block or character), major, minor, 32 bits each.
pub(super) fn program(devices: &[(u32, u32)]) -> Vec<Instruction> {
    let [answer, question, kind, major, minor] = [0, 1, 2, 3, 4];
    let load = |to: u8, offset| Instruction { code: LOAD, registers: question << 4 | to, offset, value: 0 };
    let with = |code, register: u8, offset, value| Instruction { code, registers: register, offset, value };
    let exit = with(EXIT, 0, 0, 0);
    let mut all = vec![
        load(kind, 0),
        with(AND, kind, 0, 0xffff),
        load(major, 4),
        load(minor, 8),
        with(IF_EQUAL, kind, 2, CHARACTER),
        with(SET, answer, 0, 1),
        exit,
    ];
    for (closed_major, closed_minor) in devices {
        all.extend([
            with(IF_OTHER, major, 3, closed_major.cast_signed()),
            with(IF_OTHER, minor, 2, closed_minor.cast_signed()),
            with(SET, answer, 0, 0),
            exit,
        ]);
    }
    all.extend([with(SET, answer, 0, 1), exit]);
    all
}

/// cgroup v1: one line for each device.
pub(super) fn deny(folder: &Path, devices: &[(u32, u32)]) -> io::Result<()> {
    let list = folder.join("devices.deny");
    // Never made: the kernel has it, or this is no cgroup.
    devices.iter().try_for_each(|(major, minor)| {
        let mut file = fs::OpenOptions::new().write(true).open(&list)?;
        io::Write::write_all(&mut file, format!("c {major}:{minor} rwm").as_bytes())
    })
}

/// cgroup v2: the program stays with the cgroup when its file is closed.
pub(super) fn attach(folder: &Path, devices: &[(u32, u32)]) -> io::Result<()> {
    let cgroup = open(folder, OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())?;
    let instructions = program(devices);
    let program = match load(&instructions) {
        Err(error) if error.raw_os_error() == Some(libc::EPERM) => with_more_memory(|| load(&instructions))?,
        other => other?,
    };
    let attach = Attach {
        target: cgroup.as_raw_fd(),
        program: program.as_raw_fd(),
        kind: CGROUP_DEVICE,
        flags: ALLOW_MULTI,
    };
    // SAFETY: the kernel reads `attach` only, as long as it is said to be.
    unsafe { bpf(PROG_ATTACH, &attach) }.map(|_| ())
}

const PROG_LOAD: libc::c_int = 5;
const PROG_ATTACH: libc::c_int = 8;
const TYPE_CGROUP_DEVICE: u32 = 15;
const CGROUP_DEVICE: u32 = 6;
/// Programs of this cgroup and of those above are all asked, and each can close.
const ALLOW_MULTI: u32 = 2;
/// The kernel wants one; the program uses nothing that depends on it.
const LICENSE: &CStr = c"Apache-2.0";

/// The part of `union bpf_attr` for loading.
#[repr(C)]
struct Load {
    kind: u32,
    count: u32,
    instructions: u64,
    license: u64,
    log_level: u32,
    log_size: u32,
    log: u64,
    kernel: u32,
    flags: u32,
}

/// The part of `union bpf_attr` for attaching.
#[repr(C)]
struct Attach {
    target: RawFd,
    program: RawFd,
    kind: u32,
    flags: u32,
}

fn load(instructions: &[Instruction]) -> io::Result<OwnedFd> {
    let count = u32::try_from(instructions.len()).map_err(|_| io::Error::from_raw_os_error(libc::E2BIG))?;
    let attributes = Load {
        kind: TYPE_CGROUP_DEVICE,
        count,
        instructions: instructions.as_ptr().expose_provenance() as u64,
        license: LICENSE.as_ptr().expose_provenance() as u64,
        log_level: 0,
        log_size: 0,
        log: 0,
        kernel: 0,
        flags: 0,
    };
    // SAFETY: the kernel reads `attributes` and the instructions and licence it points to, all alive here.
    let fd = unsafe { bpf(PROG_LOAD, &attributes) }?;
    // SAFETY: a new file that nobody else has.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// # Safety
/// `attributes` must be the part of `union bpf_attr` that belongs to the command, its addresses valid.
unsafe fn bpf<T>(command: libc::c_int, attributes: &T) -> io::Result<RawFd> {
    // SAFETY: the caller's promise; the size is that of the part.
    let result = unsafe { libc::syscall(libc::SYS_bpf, command, attributes, size_of::<T>()) };
    RawFd::try_from(result).ok().filter(|fd| *fd >= 0).ok_or_else(io::Error::last_os_error)
}

/// Kernels before 5.11 count programs as locked memory, of which there is little by default.
fn with_more_memory<T>(run: impl FnOnce() -> io::Result<T>) -> io::Result<T> {
    let before = getrlimit(Resource::Memlock);
    setrlimit(Resource::Memlock, Rlimit { current: None, maximum: None })?;
    let result = run();
    setrlimit(Resource::Memlock, before)?;
    result
}
