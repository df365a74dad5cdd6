//! Memory that goes to other processes, or comes from them.
//!
//! What a process exports moves into a file of the node's `shared/` folder that is mapped at the same address; others
//! map the file. As with the real driver, small allocations take the whole block along that they lie in. The exporter
//! holds a lock on the file as long as it lives: a file that can be locked is nobody's any more.

mod calls;

use super::context::Context;
use super::memory::{self, Found, Kind, MOVING};
use super::session::session;
use super::*;
use rustix::fs::{FlockOperation, Mode, OFlags};
use std::collections::BTreeMap;
use std::fs::File;
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// What the files are called.
const PREFIX: &str = "memory-";

/// What a handle begins with.
const MARK: u64 = u64::from_ne_bytes(*b"sim-ipc1");

/// Exported memory comes in whole blocks.
const BLOCK: u64 = 2 << 20;

/// A file of this process that holds exported memory.
struct Export {
    number: u64,
    bytes: usize,
    path: PathBuf,
    /// Allocations in it that were exported.
    allocations: u32,
    /// Keeps the lock.
    file: File,
}

/// A file of another process that is mapped here.
struct Opened {
    number: u64,
    offset: u64,
    context: u64,
    map: u64,
    map_bytes: usize,
    times: u32,
}

struct Shared {
    /// By the address of the first block.
    exports: BTreeMap<u64, Export>,
    /// By the address that programs know.
    opened: BTreeMap<u64, Opened>,
}

static SHARED: Mutex<Shared> = Mutex::new(Shared { exports: BTreeMap::new(), opened: BTreeMap::new() });

fn shared() -> MutexGuard<'static, Shared> {
    SHARED.lock().unwrap_or_else(PoisonError::into_inner)
}

/// What a handle says.
struct Handle {
    number: u64,
    gpu: u64,
    offset: u64,
    bytes: u64,
    file_bytes: u64,
}

impl Handle {
    fn write(&self) -> CUipcMemHandle {
        let words = [MARK, self.number, self.gpu, self.offset, self.bytes, self.file_bytes, 0, 0];
        let mut handle = CUipcMemHandle::default();
        let bytes = words.iter().flat_map(|word| word.to_ne_bytes());
        for (to, byte) in handle.reserved.iter_mut().zip(bytes) {
            *to = byte as c_char;
        }
        handle
    }

    fn read(handle: &CUipcMemHandle) -> Option<Self> {
        let bytes = handle.reserved.map(|byte| byte as u8);
        let mut words = bytes.chunks_exact(8).map(|word| word.try_into().map_or(0, u64::from_ne_bytes));
        let mut next = || words.next().unwrap_or(0);
        let mark = next();
        let read = Self { number: next(), gpu: next(), offset: next(), bytes: next(), file_bytes: next() };
        let end = read.offset.checked_add(read.bytes)?;
        (mark == MARK && read.bytes > 0 && end <= read.file_bytes).then_some(read)
    }
}

fn path(folder: &Path, number: u64) -> PathBuf {
    folder.join(format!("{PREFIX}{number:016x}"))
}

/// Whether somebody holds the lock on the file.
fn is_held(file: &File) -> bool {
    rustix::fs::flock(file, FlockOperation::NonBlockingLockShared).is_err()
}

/// Removes the files of processes that are gone.
pub(super) fn sweep(folder: &Path) {
    let Ok(entries) = std::fs::read_dir(folder) else { return };
    for entry in entries.flatten() {
        let ours = entry.file_name().to_str().is_some_and(|name| name.starts_with(PREFIX));
        if ours
            && let Ok(file) = File::open(entry.path())
            && !is_held(&file)
        {
            let _ = std::fs::remove_file(entry.path());
        }
    }
}

/// A new file under a number that nobody has.
fn new_file(folder: &Path, bytes: usize) -> Option<(u64, File)> {
    for _ in 0..16 {
        let mut number = 0u64;
        // SAFETY: fills as many bytes as the number has.
        if unsafe { libc::getrandom((&raw mut number).cast(), size_of::<u64>(), 0) }
            != size_of::<u64>() as isize
        {
            return None;
        }
        let flags = OFlags::RDWR | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
        let Ok(file) = rustix::fs::open(path(folder, number), flags, Mode::from_raw_mode(0o600)) else {
            continue;
        };
        let file = File::from(file);
        rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive).ok()?;
        // Somebody who swept may have come between the two.
        if rustix::fs::fstat(&file).is_ok_and(|data| data.st_nlink == 0) {
            continue;
        }
        // Like the memory of a card, it is for whoever has the handle.
        rustix::fs::fchmod(&file, Mode::from_raw_mode(0o666)).ok()?;
        rustix::fs::ftruncate(&file, bytes as u64).ok()?;
        return Some((number, file));
    }
    None
}

/// Puts a file behind addresses of the arena.
fn map_over(start: u64, bytes: usize, file: &File) -> bool {
    // SAFETY: whole blocks of the arena, whose bytes the file has.
    let address = unsafe {
        libc::mmap(
            start as *mut c_void,
            bytes,
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_SHARED | libc::MAP_FIXED | libc::MAP_NORESERVE,
            file.as_raw_fd(),
            0,
        )
    };
    address != libc::MAP_FAILED
}

/// The bytes of pages that are not all zeros, and where they are.
fn pages(start: u64, bytes: usize) -> impl Iterator<Item = (u64, &'static [u8])> {
    const PAGE: usize = 4096;
    (0..bytes).step_by(PAGE).filter_map(move |offset| {
        let address = (start + offset as u64) as *const u8;
        // SAFETY: memory of the arena; nobody moves bytes meanwhile.
        let page = unsafe { std::slice::from_raw_parts(address, PAGE) };
        (page != [0; PAGE]).then_some((offset as u64, page))
    })
}

/// Moves the blocks that an allocation lies in into a file.
fn export(found: &Found, touched: bool, folder: &Path) -> Result<(), CudaError> {
    use std::os::unix::fs::FileExt;
    let first = found.start / BLOCK * BLOCK;
    let bytes = (found.end().next_multiple_of(BLOCK) - first) as usize;
    let mut shared = shared();
    if let Some(export) = shared.exports.get_mut(&first) {
        export.allocations += 1;
        return Ok(());
    }
    let (number, file) = new_file(folder, bytes).ok_or(CudaError::OPERATING_SYSTEM)?;
    {
        let _nobody_moves = MOVING.write();
        memory::note_file();
        // What nobody wrote to is zeros, as a new file is.
        let written = if touched || bytes as u64 == BLOCK { bytes } else { 0 };
        for (offset, page) in pages(first, written) {
            file.write_all_at(page, offset).map_err(|_| CudaError::OUT_OF_MEMORY)?;
        }
        if !map_over(first, bytes, &file) {
            return Err(CudaError::MAP_FAILED);
        }
    }
    let path = path(folder, number);
    shared.exports.insert(first, Export { number, bytes, path, allocations: 1, file });
    Ok(())
}

/// An exported allocation is freed: the last one of a file takes it back.
pub(super) fn withdraw(start: u64) {
    let first = start / BLOCK * BLOCK;
    let mut shared = shared();
    let Some(export) = shared.exports.get_mut(&first) else { return };
    export.allocations -= 1;
    if export.allocations > 0 {
        return;
    }
    let Some(export) = shared.exports.remove(&first) else { return };
    let _ = std::fs::remove_file(&export.path);
    let _nobody_moves = MOVING.write();
    if export.bytes as u64 > BLOCK {
        memory::renew(first, export.bytes);
        return;
    }
    // Others may lie in the block, and keep their bytes.
    let kept: Vec<(u64, Vec<u8>)> =
        pages(first, export.bytes).map(|(offset, page)| (offset, page.to_vec())).collect();
    memory::renew(first, export.bytes);
    for (offset, page) in kept {
        let to = (first + offset) as *mut u8;
        // SAFETY: a page of the block that was just mapped anew.
        unsafe { std::ptr::copy_nonoverlapping(page.as_ptr(), to, page.len()) };
    }
    drop(export.file);
}

/// The handle of an allocation, which is exported if it was not.
fn handle(pointer: u64) -> Result<CUipcMemHandle, CudaError> {
    let bad = CudaError::INVALID_VALUE;
    let found = memory::find(pointer).filter(|found| found.kind == Kind::Plain).ok_or(bad)?;
    let folder = session()?.node.shared();
    static EXPORTS: AtomicU32 = AtomicU32::new(0);
    if EXPORTS.fetch_add(1, Ordering::Relaxed).is_multiple_of(64) {
        sweep(&folder);
    }
    // Nobody frees it meanwhile, and what is freed later knows.
    let mut outcome = Err(bad);
    memory::update(found.start, |tag, touched| {
        outcome = if tag.is_exported() { Ok(()) } else { export(&found, *touched, &folder) };
        if outcome.is_ok() {
            tag.set_exported();
        }
    });
    outcome?;
    let first = found.start / BLOCK * BLOCK;
    let shared = shared();
    let export = shared.exports.get(&first).ok_or(bad)?;
    Ok(Handle {
        number: export.number,
        gpu: found.device.ok_or(bad)?.gpu as u64,
        offset: found.start - first,
        bytes: found.bytes as u64,
        file_bytes: export.bytes as u64,
    }
    .write())
}

/// Memory of another process.
fn open(context: &'static Context, handle: &CUipcMemHandle) -> Result<u64, CudaError> {
    let bad = CudaError::INVALID_VALUE;
    let handle = Handle::read(handle).ok_or(bad)?;
    let mut shared = shared();
    if shared.exports.values().any(|export| export.number == handle.number) {
        // A process cannot open what is its own.
        return Err(CudaError::INVALID_CONTEXT);
    }
    let same = |opened: &Opened| {
        (opened.number, opened.offset, opened.context) == (handle.number, handle.offset, context.id)
    };
    if let Some((&pointer, opened)) = shared.opened.iter_mut().find(|(_, opened)| same(opened)) {
        opened.times += 1;
        return Ok(pointer);
    }
    let session = session()?;
    let device = session.devices.iter().find(|device| device.gpu as u64 == handle.gpu);
    let device = device.ok_or(CudaError::INVALID_DEVICE)?;
    let file = path(&session.node.shared(), handle.number);
    let file = File::options().read(true).write(true).open(file).map_err(|_| bad)?;
    let size = file.metadata().map_err(|_| bad)?.len();
    if !is_held(&file) || size != handle.file_bytes {
        // Its exporter is gone.
        return Err(bad);
    }
    let map_bytes = size as usize;
    let map = memory::map(map_bytes, libc::MAP_SHARED | libc::MAP_NORESERVE, Some((file.as_raw_fd(), 0)));
    let map = map.ok_or(CudaError::MAP_FAILED)?;
    let pointer = map + handle.offset;
    memory::insert(Found {
        kind: Kind::Opened,
        start: pointer,
        bytes: handle.bytes as usize,
        device: Some(device),
        context: Some(context),
        id: memory::new_id(),
        flags: 0,
        owner: 0,
        sync_memops: false,
    });
    let opened = Opened {
        number: handle.number,
        offset: handle.offset,
        context: context.id,
        map,
        map_bytes,
        times: 1,
    };
    shared.opened.insert(pointer, opened);
    Ok(pointer)
}

/// Memory of another process is closed as often as it was opened.
fn close(pointer: u64) -> Result<(), CudaError> {
    let mut shared = shared();
    let opened = shared.opened.get_mut(&pointer).ok_or(CudaError::INVALID_VALUE)?;
    opened.times -= 1;
    if opened.times == 0 {
        drop(shared);
        memory::release(pointer, |found| found.kind == Kind::Opened)?;
    }
    Ok(())
}

/// The mapping of memory of another process ends.
pub(super) fn closed(range: &Found) {
    let gone = shared().opened.remove(&range.start);
    if let Some(gone) = gone {
        // SAFETY: mapped when it was opened; nobody finds it any more.
        unsafe { libc::munmap(gone.map as *mut c_void, gone.map_bytes) };
    }
}
