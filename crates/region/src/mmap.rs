//! Opens, verifies and maps the files of a region.
#![allow(unsafe_code)]

use crate::error::RegionError;
use crate::layout::{
    FileHeader, LIMITS_SIZE, LayoutVersion, LimitsFile, MARKERS_OFFSET, SUPPORTED_LAYOUTS, UsageFile,
};
use crate::markers::MarkerArea;
use crate::owner::effective_user;
use crate::protocol::{LIMITS_MAGIC, USAGE_MAGIC};
use std::fs::{File, OpenOptions};
use std::io;
use std::ops::Deref;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::Path;
use std::ptr::NonNull;

/// A type that describes a part of a file of the region.
///
/// # Safety
/// The type must have no invalid bit pattern, contain nothing but atomics, and be aligned to at most a page.
pub(crate) unsafe trait MappedLayout {
    /// Offset of the part in its file; a multiple of a page.
    const OFFSET: usize;
}

/// A type that describes the first part of a file of the region, with its header.
pub(crate) trait FileLayout: MappedLayout {
    /// First word of the file.
    const MAGIC: u64;

    /// Returns the length of the file in bytes.
    fn size(layout: LayoutVersion) -> usize;
}

// SAFETY: nothing but atomics of integers, aligned to a page.
unsafe impl MappedLayout for LimitsFile {
    const OFFSET: usize = 0;
}

impl FileLayout for LimitsFile {
    const MAGIC: u64 = LIMITS_MAGIC;

    fn size(_layout: LayoutVersion) -> usize {
        LIMITS_SIZE
    }
}

// SAFETY: nothing but atomics of integers, aligned to a page.
unsafe impl MappedLayout for UsageFile {
    const OFFSET: usize = 0;
}

impl FileLayout for UsageFile {
    const MAGIC: u64 = USAGE_MAGIC;

    fn size(layout: LayoutVersion) -> usize {
        layout.usage_size()
    }
}

// SAFETY: nothing but atomics of integers, aligned to a page.
unsafe impl MappedLayout for MarkerArea {
    const OFFSET: usize = MARKERS_OFFSET;
}

const _: () = assert!(MARKERS_OFFSET.is_multiple_of(4096));

/// A mapped file. Truncating the file removes the memory; only the container itself can do that, to `usage`.
#[derive(Debug)]
pub(crate) struct MappedFile<T> {
    address: NonNull<T>,
}

// SAFETY: the mapping is shared memory that holds nothing but atomics, which any thread may use.
unsafe impl<T: MappedLayout> Send for MappedFile<T> {}
// SAFETY: the mapping is shared memory that holds nothing but atomics, which any thread may use.
unsafe impl<T: MappedLayout> Sync for MappedFile<T> {}

impl<T: MappedLayout> MappedFile<T> {
    /// Maps a file that passed [`check`], for reading or also for writing.
    pub(crate) fn new(file: &File, path: &Path, writable: bool) -> Result<Self, RegionError> {
        let protection = libc::PROT_READ | if writable { libc::PROT_WRITE } else { 0 };
        // SAFETY: this creates a new mapping at an address that the kernel chooses; it replaces no other.
        let address = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                size_of::<T>(),
                protection,
                libc::MAP_SHARED | libc::MAP_NORESERVE,
                file.as_raw_fd(),
                // A few megabytes, so it fits.
                T::OFFSET as libc::off_t,
            )
        };
        match NonNull::new(address.cast::<T>()) {
            Some(address) if address.as_ptr().cast() != libc::MAP_FAILED => Ok(Self { address }),
            _ => Err(RegionError::io("map", path, io::Error::last_os_error())),
        }
    }
}

impl<T: MappedLayout> MappedFile<T> {
    /// Maps zeroed memory of this process, in place of a part that the file lacks.
    pub(crate) fn private(path: &Path) -> Result<Self, RegionError> {
        // SAFETY: this creates a new mapping at an address that the kernel chooses; it replaces no other.
        let address = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                size_of::<T>(),
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE,
                -1,
                0,
            )
        };
        match NonNull::new(address.cast::<T>()) {
            Some(address) if address.as_ptr().cast() != libc::MAP_FAILED => Ok(Self { address }),
            _ => Err(RegionError::io("map", path, io::Error::last_os_error())),
        }
    }
}

impl<T> Deref for MappedFile<T> {
    type Target = T;

    #[inline]
    fn deref(&self) -> &T {
        // SAFETY: the mapping is page-aligned, as long as the type, and lasts until this value is dropped; every bit
        // pattern is a valid value of the type (see `MappedLayout`).
        unsafe { self.address.as_ref() }
    }
}

impl<T> Drop for MappedFile<T> {
    fn drop(&mut self) {
        // SAFETY: this is exactly the mapping that `new` created; references into it borrow this value, so none is
        // left.
        unsafe { libc::munmap(self.address.as_ptr().cast(), size_of::<T>()) };
    }
}

/// Opens a file of the region. Symbolic links are not followed: a user who may write in the directory must not redirect
/// the daemon.
pub(crate) fn open(path: &Path, writable: bool) -> Result<File, RegionError> {
    let opened = OpenOptions::new()
        .read(true)
        .write(writable)
        .custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK | libc::O_CLOEXEC | libc::O_NOCTTY)
        .open(path);
    opened.map_err(|error| match (error.kind(), error.raw_os_error()) {
        (io::ErrorKind::NotFound | io::ErrorKind::NotADirectory, _) => {
            RegionError::Missing(path.to_path_buf())
        }
        (_, Some(libc::ELOOP)) => RegionError::damaged(path, "it is a symbolic link"),
        // A FIFO without a reader and a directory cannot be opened for writing.
        (io::ErrorKind::IsADirectory, _) | (_, Some(libc::ENXIO)) => {
            RegionError::damaged(path, NOT_A_REGULAR_FILE)
        }
        _ => RegionError::io("open", path, error),
    })
}

const NOT_A_REGULAR_FILE: &str = "it is not a regular file";

/// Returns device and inode, which distinguish a file from others that had the same name.
pub(crate) fn identity(file: &File, path: &Path) -> Result<(u64, u64), RegionError> {
    let data = file.metadata().map_err(|error| RegionError::io("examine", path, error))?;
    Ok((data.dev(), data.ino()))
}

/// Returns whether a header has the magic number, a supported layout version and the size of its kind.
pub(crate) fn is_intact_header<T: FileLayout>(header: &[u8]) -> bool {
    let [magic, version, size] = [number(header, 0, 8), number(header, 8, 4), number(header, 16, 8)];
    // Four bytes were read, so it fits.
    let layout = LayoutVersion::from_number(version as u32);
    magic == T::MAGIC && layout.is_some_and(|layout| size == T::size(layout) as u64)
}

/// Returns whether only the calling user can create, replace and remove files in the directory.
pub(crate) fn is_private_directory(path: &Path) -> Result<bool, RegionError> {
    let data = std::fs::symlink_metadata(path).map_err(|error| RegionError::io("examine", path, error))?;
    Ok(data.is_dir() && data.uid() == effective_user() && data.mode() & 0o022 == 0)
}

/// Verifies that the file belongs to the expected user.
pub(crate) fn check_owner(file: &File, path: &Path, expected: u32) -> Result<(), RegionError> {
    let owner = file.metadata().map_err(|error| RegionError::io("examine", path, error))?.uid();
    if owner == expected {
        return Ok(());
    }
    Err(RegionError::ForeignOwner { path: path.to_path_buf(), owner, expected })
}

/// Verifies that the file is a regular file.
pub(crate) fn check_regular(file: &File, path: &Path) -> Result<(), RegionError> {
    let data = file.metadata().map_err(|error| RegionError::io("examine", path, error))?;
    if data.is_file() { Ok(()) } else { Err(RegionError::damaged(path, NOT_A_REGULAR_FILE)) }
}

/// Verifies that the file is of the expected kind, of a supported layout, and complete. Returns the layout.
pub(crate) fn check<T: FileLayout>(file: &File, path: &Path) -> Result<LayoutVersion, RegionError> {
    check_regular(file, path)?;
    let data = file.metadata().map_err(|error| RegionError::io("examine", path, error))?;
    let mut header = [0; size_of::<FileHeader>()];
    match file.read_exact_at(&mut header, 0) {
        Ok(()) => {}
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => {
            return Err(RegionError::damaged(path, "it is too short for a header"));
        }
        Err(error) => return Err(RegionError::io("read", path, error)),
    }
    let [magic, version, size] = [number(&header, 0, 8), number(&header, 8, 4), number(&header, 16, 8)];
    if magic != T::MAGIC {
        return Err(RegionError::damaged(path, "it does not begin with the magic number of its kind"));
    }
    // Four bytes were read, so it fits. Checked before the size: other layouts may have other sizes.
    let version = version as u32;
    let Some(layout) = LayoutVersion::from_number(version) else {
        return Err(RegionError::UnsupportedVersion {
            path: path.to_path_buf(),
            found: version,
            supported: SUPPORTED_LAYOUTS,
        });
    };
    if size != T::size(layout) as u64 {
        return Err(RegionError::damaged(path, "the size in its header differs from that of its layout"));
    }
    if data.len() < size {
        return Err(RegionError::damaged(path, "it has been truncated"));
    }
    Ok(layout)
}

/// Reads a little-endian number out of bytes; bytes beyond their end are zero.
pub(crate) fn number(bytes: &[u8], at: usize, length: usize) -> u64 {
    let found = at.checked_add(length).and_then(|end| bytes.get(at..end)).unwrap_or_default();
    found.iter().rev().fold(0, |number, &byte| number << 8 | u64::from(byte))
}

/// Allocates a range of the file on its file system: touching a page for which the file system has no space left would
/// kill the process.
pub(crate) fn allocate(file: &File, path: &Path, at: usize, length: usize) -> Result<(), RegionError> {
    // SAFETY: no pointers are passed.
    let answer = unsafe { libc::fallocate(file.as_raw_fd(), 0, at as libc::off_t, length as libc::off_t) };
    if answer == 0 {
        return Ok(());
    }
    let error = io::Error::last_os_error();
    match error.raw_os_error() {
        // A file system that cannot preallocate does not refuse pages later either.
        Some(libc::EOPNOTSUPP | libc::ENOSYS) => Ok(()),
        _ => Err(RegionError::io("allocate", path, error)),
    }
}
