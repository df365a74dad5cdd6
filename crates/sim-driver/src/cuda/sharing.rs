//! Memory shared with other processes by IPC handles.
//!
//! An exported allocation moves into a file in the node's `shared/` directory, mapped at the same address; other
//! processes map the file. As in the real driver, exporting a small allocation exports the whole block that contains
//! it. The exporter holds a lock on the file while it lives: a file that can be locked is orphaned.

mod sharing_functions;

use super::context::Context;
use super::memory::{self, MemoryKind, MemoryRange, REMAP_LOCK};
use super::session::session;
use super::*;
use rustix::fs::{FlockOperation, Mode, OFlags};
use std::collections::BTreeMap;
use std::fs::File;
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Prefix of the names of exported files.
const FILE_PREFIX: &str = "memory-";

/// Identifies IPC handles of this driver.
const HANDLE_MAGIC: u64 = u64::from_ne_bytes(*b"sim-ipc1");

/// Memory is exported in whole blocks of this size.
const BLOCK_BYTES: u64 = 2 << 20;

/// A file with exported memory of this process.
struct ExportedFile {
    number: u64,
    bytes: usize,
    path: PathBuf,
    /// Number of exported allocations in the file.
    allocations: u32,
    /// Holds the lock on the file.
    file: File,
}

/// A file of another process that is mapped here.
struct OpenedFile {
    number: u64,
    offset: u64,
    context: u64,
    map: u64,
    map_bytes: usize,
    times: u32,
}

/// Exported and opened files of this process.
struct SharedFiles {
    /// Exported files, by the address of their first block.
    exports: BTreeMap<u64, ExportedFile>,
    /// Opened files, by the address that the program has.
    opened: BTreeMap<u64, OpenedFile>,
}

static SHARED: Mutex<SharedFiles> =
    Mutex::new(SharedFiles { exports: BTreeMap::new(), opened: BTreeMap::new() });

fn shared() -> MutexGuard<'static, SharedFiles> {
    SHARED.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The contents of an IPC handle.
struct IpcHandle {
    number: u64,
    gpu: u64,
    offset: u64,
    bytes: u64,
    file_bytes: u64,
}

impl IpcHandle {
    fn write(&self) -> CUipcMemHandle {
        let words = [HANDLE_MAGIC, self.number, self.gpu, self.offset, self.bytes, self.file_bytes, 0, 0];
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
        (mark == HANDLE_MAGIC && read.bytes > 0 && end <= read.file_bytes).then_some(read)
    }
}

fn path(directory: &Path, number: u64) -> PathBuf {
    directory.join(format!("{FILE_PREFIX}{number:016x}"))
}

/// Returns whether another process holds the lock on the file.
fn is_held(file: &File) -> bool {
    rustix::fs::flock(file, FlockOperation::NonBlockingLockShared).is_err()
}

/// Removes files whose exporters have died.
pub(super) fn remove_orphaned_files(directory: &Path) {
    let Ok(entries) = std::fs::read_dir(directory) else { return };
    for entry in entries.flatten() {
        let ours = entry.file_name().to_str().is_some_and(|name| name.starts_with(FILE_PREFIX));
        if ours
            && let Ok(file) = File::open(entry.path())
            && !is_held(&file)
        {
            let _ = std::fs::remove_file(entry.path());
        }
    }
}

/// Creates a locked file with a unique random number.
fn new_file(directory: &Path, bytes: usize) -> Option<(u64, File)> {
    for _ in 0..16 {
        let mut number = 0u64;
        // SAFETY: `getrandom` fills exactly the bytes of `number`.
        if unsafe { libc::getrandom((&raw mut number).cast(), size_of::<u64>(), 0) }
            != size_of::<u64>() as isize
        {
            return None;
        }
        let flags = OFlags::RDWR | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
        let Ok(file) = rustix::fs::open(path(directory, number), flags, Mode::from_raw_mode(0o600)) else {
            continue;
        };
        let file = File::from(file);
        rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive).ok()?;
        // Another process may have removed it as orphaned before it was locked.
        if rustix::fs::fstat(&file).is_ok_and(|data| data.st_nlink == 0) {
            continue;
        }
        // Like memory of a card, it can be opened by every process that has the handle.
        rustix::fs::fchmod(&file, Mode::from_raw_mode(0o666)).ok()?;
        rustix::fs::ftruncate(&file, bytes as u64).ok()?;
        return Some((number, file));
    }
    None
}

/// Maps a file over addresses of the arena.
fn map_over(start: u64, bytes: usize, file: &File) -> bool {
    // SAFETY: whole blocks of the arena, whose contents the file has.
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

/// Returns the pages that are not all zeros, with their offsets.
fn nonzero_pages(start: u64, bytes: usize) -> impl Iterator<Item = (u64, &'static [u8])> {
    const PAGE_BYTES: usize = 4096;
    (0..bytes).step_by(PAGE_BYTES).filter_map(move |offset| {
        let address = (start + offset as u64) as *const u8;
        // SAFETY: mapped memory of the arena; the remap lock keeps other threads from changing it.
        let page = unsafe { std::slice::from_raw_parts(address, PAGE_BYTES) };
        (page != [0; PAGE_BYTES]).then_some((offset as u64, page))
    })
}

/// Moves the blocks that contain an allocation into a file.
fn export(found: &MemoryRange, touched: bool, directory: &Path) -> Result<(), CudaError> {
    use std::os::unix::fs::FileExt;
    let first = found.start / BLOCK_BYTES * BLOCK_BYTES;
    let bytes = (found.end().next_multiple_of(BLOCK_BYTES) - first) as usize;
    let mut shared = shared();
    if let Some(export) = shared.exports.get_mut(&first) {
        export.allocations += 1;
        return Ok(());
    }
    let (number, file) = new_file(directory, bytes).ok_or(CudaError::OPERATING_SYSTEM)?;
    {
        let _guard = REMAP_LOCK.write();
        memory::note_file();
        // An allocation that was never written is zero, like a new file. Other allocations may share a single block.
        let written = if touched || bytes as u64 == BLOCK_BYTES { bytes } else { 0 };
        for (offset, page) in nonzero_pages(first, written) {
            file.write_all_at(page, offset).map_err(|_| CudaError::OUT_OF_MEMORY)?;
        }
        if !map_over(first, bytes, &file) {
            return Err(CudaError::MAP_FAILED);
        }
    }
    let path = path(directory, number);
    shared.exports.insert(first, ExportedFile { number, bytes, path, allocations: 1, file });
    Ok(())
}

/// Unexports a freed allocation; the last one of a file removes the file.
pub(super) fn unexport(start: u64) {
    let first = start / BLOCK_BYTES * BLOCK_BYTES;
    let mut shared = shared();
    let Some(export) = shared.exports.get_mut(&first) else { return };
    export.allocations -= 1;
    if export.allocations > 0 {
        return;
    }
    let Some(export) = shared.exports.remove(&first) else { return };
    let _ = std::fs::remove_file(&export.path);
    let _guard = REMAP_LOCK.write();
    if export.bytes as u64 > BLOCK_BYTES {
        memory::replace_pages(first, export.bytes);
        return;
    }
    // Other allocations in the block keep their bytes.
    let kept: Vec<(u64, Vec<u8>)> =
        nonzero_pages(first, export.bytes).map(|(offset, page)| (offset, page.to_vec())).collect();
    memory::replace_pages(first, export.bytes);
    for (offset, page) in kept {
        let to = (first + offset) as *mut u8;
        // SAFETY: a page of the block that was just mapped again.
        unsafe { std::ptr::copy_nonoverlapping(page.as_ptr(), to, page.len()) };
    }
    drop(export.file);
}

/// Returns the IPC handle of an allocation, exporting it if necessary.
fn export_handle(pointer: u64) -> Result<CUipcMemHandle, CudaError> {
    let bad = CudaError::INVALID_VALUE;
    let found = memory::find(pointer).filter(|found| found.kind == MemoryKind::Plain).ok_or(bad)?;
    let directory = session()?.node.shared_dir();
    static EXPORT_COUNT: AtomicU32 = AtomicU32::new(0);
    if EXPORT_COUNT.fetch_add(1, Ordering::Relaxed).is_multiple_of(64) {
        remove_orphaned_files(&directory);
    }
    // The callback runs under the lock, so the allocation cannot be freed concurrently; the tag makes a later free
    // unexport it.
    let mut outcome = Err(bad);
    memory::update(found.start, |tag, touched| {
        outcome = if tag.is_exported() { Ok(()) } else { export(&found, *touched, &directory) };
        if outcome.is_ok() {
            tag.set_exported();
        }
    });
    outcome?;
    let first = found.start / BLOCK_BYTES * BLOCK_BYTES;
    let shared = shared();
    let export = shared.exports.get(&first).ok_or(bad)?;
    Ok(IpcHandle {
        number: export.number,
        gpu: found.device.ok_or(bad)?.gpu as u64,
        offset: found.start - first,
        bytes: found.bytes as u64,
        file_bytes: export.bytes as u64,
    }
    .write())
}

/// Maps exported memory of another process.
fn open(context: &'static Context, handle: &CUipcMemHandle) -> Result<u64, CudaError> {
    let bad = CudaError::INVALID_VALUE;
    let handle = IpcHandle::read(handle).ok_or(bad)?;
    let mut shared = shared();
    if shared.exports.values().any(|export| export.number == handle.number) {
        // A process cannot open its own handles.
        return Err(CudaError::INVALID_CONTEXT);
    }
    let same = |opened: &OpenedFile| {
        (opened.number, opened.offset, opened.context) == (handle.number, handle.offset, context.id)
    };
    if let Some((&pointer, opened)) = shared.opened.iter_mut().find(|(_, opened)| same(opened)) {
        opened.times += 1;
        return Ok(pointer);
    }
    let session = session()?;
    let device = session.devices.iter().find(|device| device.gpu as u64 == handle.gpu);
    let device = device.ok_or(CudaError::INVALID_DEVICE)?;
    let file = path(&session.node.shared_dir(), handle.number);
    let file = File::options().read(true).write(true).open(file).map_err(|_| bad)?;
    let size = file.metadata().map_err(|_| bad)?.len();
    if !is_held(&file) || size != handle.file_bytes {
        // The exporter has died.
        return Err(bad);
    }
    let map_bytes = size as usize;
    let map = memory::map(map_bytes, libc::MAP_SHARED | libc::MAP_NORESERVE, Some((file.as_raw_fd(), 0)));
    let map = map.ok_or(CudaError::MAP_FAILED)?;
    let pointer = map + handle.offset;
    memory::insert(MemoryRange {
        kind: MemoryKind::Opened,
        start: pointer,
        bytes: handle.bytes as usize,
        device: Some(device),
        context: Some(context),
        id: memory::new_id(),
        flags: 0,
        owner: 0,
        sync_memops: false,
    });
    let opened = OpenedFile {
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

/// Closes memory of another process; it is unmapped when it was closed as often as it was opened.
fn close(pointer: u64) -> Result<(), CudaError> {
    let mut shared = shared();
    let opened = shared.opened.get_mut(&pointer).ok_or(CudaError::INVALID_VALUE)?;
    opened.times -= 1;
    if opened.times == 0 {
        drop(shared);
        memory::release(pointer, |found| found.kind == MemoryKind::Opened)?;
    }
    Ok(())
}

/// Unmaps memory of another process.
pub(super) fn unmap_opened(range: &MemoryRange) {
    let gone = shared().opened.remove(&range.start);
    if let Some(gone) = gone {
        // SAFETY: the range was mapped by `open` and is no longer found.
        unsafe { libc::munmap(gone.map as *mut c_void, gone.map_bytes) };
    }
}
