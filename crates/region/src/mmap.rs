//! Files as memory.
#![allow(unsafe_code)]

use crate::error::RegionError;
use crate::layout::{LIMITS_MAGIC, LimitsFile, Start, USAGE_MAGIC, UsageFile, VERSION};
use std::fs::{File, OpenOptions};
use std::io;
use std::ops::Deref;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::Path;
use std::ptr::NonNull;

/// A file of the region that can be mapped.
///
/// # Safety
/// The type must have no invalid bit pattern and nothing but atomics in it, and be aligned to no more than a page.
pub(crate) unsafe trait FileLayout {
    /// How the file begins.
    const MAGIC: u64;
}

// SAFETY: atomics of integers only.
unsafe impl FileLayout for LimitsFile {
    const MAGIC: u64 = LIMITS_MAGIC;
}

// SAFETY: atomics of integers only.
unsafe impl FileLayout for UsageFile {
    const MAGIC: u64 = USAGE_MAGIC;
}

/// A mapped file. Whoever cuts the file short takes the memory away: only the container's own can do that to `usage`.
#[derive(Debug)]
pub(crate) struct MappedFile<T> {
    address: NonNull<T>,
}

// SAFETY: shared memory of atomics, which any thread may use.
unsafe impl<T: FileLayout> Send for MappedFile<T> {}
// SAFETY: likewise.
unsafe impl<T: FileLayout> Sync for MappedFile<T> {}

impl<T: FileLayout> MappedFile<T> {
    /// Maps a file that was [`check`]ed, to be read or also written.
    pub(crate) fn new(file: &File, path: &Path, writable: bool) -> Result<Self, RegionError> {
        let protection = libc::PROT_READ | if writable { libc::PROT_WRITE } else { 0 };
        // SAFETY: a new mapping over no other.
        let address = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                size_of::<T>(),
                protection,
                libc::MAP_SHARED | libc::MAP_NORESERVE,
                file.as_raw_fd(),
                0,
            )
        };
        match NonNull::new(address.cast::<T>()) {
            Some(address) if address.as_ptr().cast() != libc::MAP_FAILED => Ok(Self { address }),
            _ => Err(RegionError::unreadable("map", path, io::Error::last_os_error())),
        }
    }
}

impl<T> Deref for MappedFile<T> {
    type Target = T;

    #[inline]
    fn deref(&self) -> &T {
        // SAFETY: page-aligned, as long as the type, mapped until dropped; any bits are a value (see `FileLayout`).
        unsafe { self.address.as_ref() }
    }
}

impl<T> Drop for MappedFile<T> {
    fn drop(&mut self) {
        // SAFETY: this mapping, whole, which nobody refers to any more.
        unsafe { libc::munmap(self.address.as_ptr().cast(), size_of::<T>()) };
    }
}

/// Opens a file of the region, following no link: who may write in the folder must not lead its owner elsewhere.
pub(crate) fn open(path: &Path, writable: bool) -> Result<File, RegionError> {
    let opened = OpenOptions::new()
        .read(true)
        .write(writable)
        .custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK | libc::O_CLOEXEC | libc::O_NOCTTY)
        .open(path);
    opened.map_err(|source| match source.kind() {
        io::ErrorKind::NotFound | io::ErrorKind::NotADirectory => RegionError::Missing(path.to_path_buf()),
        _ => RegionError::unreadable("open", path, source),
    })
}

/// What tells a file from others of the same name.
pub(crate) fn identity(file: &File, path: &Path) -> Result<(u64, u64), RegionError> {
    let data = file.metadata().map_err(|source| RegionError::unreadable("examine", path, source))?;
    Ok((data.dev(), data.ino()))
}

/// Whether the file is what its name says, of this version, and whole.
pub(crate) fn check<T: FileLayout>(file: &File, path: &Path) -> Result<(), RegionError> {
    let data = file.metadata().map_err(|source| RegionError::unreadable("examine", path, source))?;
    if !data.is_file() {
        return Err(RegionError::broken(path, "it is no ordinary file"));
    }
    let mut start = [0; size_of::<Start>()];
    match file.read_exact_at(&mut start, 0) {
        Ok(()) => {}
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => {
            return Err(RegionError::broken(path, "it is too short to say what it is"));
        }
        Err(source) => return Err(RegionError::unreadable("read", path, source)),
    }
    let [magic, version, size] = [number(&start, 0, 8), number(&start, 8, 4), number(&start, 16, 8)];
    if magic != T::MAGIC {
        return Err(RegionError::broken(path, "it does not begin as such a file does"));
    }
    if version != u64::from(VERSION) {
        // Four bytes were read.
        return Err(RegionError::Version { path: path.to_path_buf(), found: version as u32 });
    }
    if size != size_of::<T>() as u64 {
        return Err(RegionError::broken(path, "it says that it has another length than such a file has"));
    }
    if data.len() < size {
        return Err(RegionError::broken(path, "it has been cut short"));
    }
    Ok(())
}

/// The little-endian number at a place; what is not there is zero.
pub(crate) fn number(bytes: &[u8], at: usize, length: usize) -> u64 {
    let found = at.checked_add(length).and_then(|end| bytes.get(at..end)).unwrap_or_default();
    found.iter().rev().fold(0, |number, &byte| number << 8 | u64::from(byte))
}

/// Has the file system keep room for a part of the file: touching a page that it has none for would kill the process.
pub(crate) fn keep_room(file: &File, path: &Path, at: usize, length: usize) -> Result<(), RegionError> {
    // SAFETY: no pointers.
    let answer = unsafe { libc::fallocate(file.as_raw_fd(), 0, at as libc::off_t, length as libc::off_t) };
    if answer == 0 {
        return Ok(());
    }
    let error = io::Error::last_os_error();
    match error.raw_os_error() {
        // A file system that keeps no room has none to refuse.
        Some(libc::EOPNOTSUPP | libc::ENOSYS) => Ok(()),
        _ => Err(RegionError::unreadable("keep room in", path, error)),
    }
}
