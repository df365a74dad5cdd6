//! Denies devices to a cgroup: by a BPF program in cgroup v2, by the deny list in v1.
#![allow(unsafe_code)]

use rustix::fs::{Mode, OFlags, open};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use std::ffi::CStr;
use std::fs;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::path::Path;

/// A BPF instruction, as `struct bpf_insn` of the kernel.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Instruction {
    pub(super) code: u8,
    /// The destination register in the lower four bits, the source register in the upper four.
    pub(super) registers: u8,
    pub(super) offset: i16,
    pub(super) value: i32,
}

/// Loads 32 bits from memory.
pub(super) const LOAD: u8 = 0x61;
/// Computes the bitwise `and` with an immediate value, in 32 bits.
pub(super) const AND: u8 = 0x54;
/// Moves an immediate value into a register, in 64 bits.
pub(super) const SET: u8 = 0xb7;
/// Jumps if a register equals an immediate value, in 32 bits.
pub(super) const IF_EQUAL: u8 = 0x16;
/// Jumps if a register differs from an immediate value, in 32 bits.
pub(super) const IF_OTHER: u8 = 0x56;
/// Returns the value of register 0.
pub(super) const EXIT: u8 = 0x95;

/// The device type `BPF_DEVCG_DEV_CHAR` of the kernel.
pub(super) const CHARACTER_DEVICE: i32 = 2;

/// Builds the program that the kernel runs at each open and mknod: it returns 0 to deny, 1 to allow. Register 1 holds
/// the address of `struct bpf_cgroup_dev_ctx`: kind (lower half: block or character), major, minor, 32 bits each.
pub(super) fn filter_program(devices: &[(u32, u32)]) -> Vec<Instruction> {
    let [result, context, kind, major, minor] = [0, 1, 2, 3, 4];
    let load = |to: u8, offset| Instruction { code: LOAD, registers: context << 4 | to, offset, value: 0 };
    let with = |code, register: u8, offset, value| Instruction { code, registers: register, offset, value };
    let exit = with(EXIT, 0, 0, 0);
    let mut all = vec![
        load(kind, 0),
        with(AND, kind, 0, 0xffff),
        load(major, 4),
        load(minor, 8),
        with(IF_EQUAL, kind, 2, CHARACTER_DEVICE),
        with(SET, result, 0, 1),
        exit,
    ];
    for (denied_major, denied_minor) in devices {
        all.extend([
            with(IF_OTHER, major, 3, denied_major.cast_signed()),
            with(IF_OTHER, minor, 2, denied_minor.cast_signed()),
            with(SET, result, 0, 0),
            exit,
        ]);
    }
    all.extend([with(SET, result, 0, 1), exit]);
    all
}

/// Denies devices in cgroup v1, by one line for each.
pub(super) fn deny_v1(folder: &Path, devices: &[(u32, u32)]) -> io::Result<()> {
    let list = folder.join("devices.deny");
    // The file is not created: it exists, or this directory is not a cgroup.
    devices.iter().try_for_each(|(major, minor)| {
        let mut file = fs::OpenOptions::new().write(true).open(&list)?;
        io::Write::write_all(&mut file, format!("c {major}:{minor} rwm").as_bytes())
    })
}

/// Denies devices in cgroup v2. The program stays attached to the cgroup when its descriptor is closed.
pub(super) fn attach_v2(folder: &Path, devices: &[(u32, u32)]) -> io::Result<()> {
    let cgroup = open(folder, OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())?;
    let instructions = filter_program(devices);
    let program = match load(&instructions) {
        Err(error) if error.raw_os_error() == Some(libc::EPERM) => {
            with_unlimited_memlock(|| load(&instructions))?
        }
        other => other?,
    };
    let attach = AttachAttributes {
        target: cgroup.as_raw_fd(),
        program: program.as_raw_fd(),
        kind: CGROUP_DEVICE,
        flags: ALLOW_MULTI,
    };
    // SAFETY: `attach` has the layout of `BPF_PROG_ATTACH`, and the kernel reads no more than its size.
    unsafe { bpf(PROG_ATTACH, &attach) }.map(|_| ())
}

const PROG_LOAD: libc::c_int = 5;
const PROG_ATTACH: libc::c_int = 8;
const TYPE_CGROUP_DEVICE: u32 = 15;
const CGROUP_DEVICE: u32 = 6;
/// The programs of this cgroup and of all its parents run, and each can deny.
const ALLOW_MULTI: u32 = 2;
/// The kernel requires a license; the program calls no function that depends on it.
const LICENSE: &CStr = c"Apache-2.0";

/// The part of `union bpf_attr` for `BPF_PROG_LOAD`.
#[repr(C)]
struct LoadAttributes {
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

/// The part of `union bpf_attr` for `BPF_PROG_ATTACH`.
#[repr(C)]
struct AttachAttributes {
    target: RawFd,
    program: RawFd,
    kind: u32,
    flags: u32,
}

fn load(instructions: &[Instruction]) -> io::Result<OwnedFd> {
    let count = u32::try_from(instructions.len()).map_err(|_| io::Error::from_raw_os_error(libc::E2BIG))?;
    let attributes = LoadAttributes {
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
    // SAFETY: `attributes` has the layout of `BPF_PROG_LOAD`; the instructions and the license that it points to
    // outlive the call.
    let fd = unsafe { bpf(PROG_LOAD, &attributes) }?;
    // SAFETY: the kernel returned a new descriptor, which nothing else owns.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Makes the system call `bpf(2)`.
///
/// # Safety
/// `attributes` must have the layout of the part of `union bpf_attr` that belongs to `command`, and its addresses must
/// be valid.
unsafe fn bpf<T>(command: libc::c_int, attributes: &T) -> io::Result<RawFd> {
    // SAFETY: the caller passes attributes that fit the command, and the size is that of the attributes.
    let result = unsafe { libc::syscall(libc::SYS_bpf, command, attributes, size_of::<T>()) };
    RawFd::try_from(result).ok().filter(|fd| *fd >= 0).ok_or_else(io::Error::last_os_error)
}

/// Runs a function without a limit on locked memory. Kernels before 5.11 count BPF programs as locked memory, and the
/// default limit is low.
fn with_unlimited_memlock<T>(run: impl FnOnce() -> io::Result<T>) -> io::Result<T> {
    let before = getrlimit(Resource::Memlock);
    setrlimit(Resource::Memlock, Rlimit { current: None, maximum: None })?;
    let result = run();
    setrlimit(Resource::Memlock, before)?;
    result
}
