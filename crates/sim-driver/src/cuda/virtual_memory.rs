//! Addresses and physical memory apart: handles of memory that are mapped to addresses reserved before.
//!
//! A handle's bytes are in a file without a name, so that they can be at several addresses and in several processes.
//! The card counts memory from its making to the end of the last reference or mapping of any handle of it, be the handle the
//! maker's or imported. What another process made is counted there, and goes when that process lets go of it: who else has
//! it open is not seen across processes, though the real driver does.

mod calls;

use super::device::Device;
use super::handle::{Arena, handle_of};
use super::memory::{self, Found, Kind, MOVING};
use super::session::session;
use super::*;
use rustix::fd::{AsRawFd, OwnedFd};
use rustix::fs::MemfdFlags;
use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

/// Memory comes and is mapped in multiples of this.
const GRANULARITY: usize = 2 << 20;

/// How the nameless files are called where processes are looked at; the card's index on the node follows.
const FILE: &str = "partage-sim-memory-";

/// A handle of memory.
#[derive(Default)]
pub(super) struct Physical {
    inner: Mutex<Option<Inner>>,
}

#[derive(Clone)]
struct Inner {
    /// The card; nothing if it is the host's.
    device: Option<&'static Device>,
    bytes: usize,
    /// Nothing if it is the host's or another process's, who counts it. Goes before the file.
    _charge: Option<Arc<Charge>>,
    file: Arc<OwnedFd>,
    handle_types: u32,
    location: CUmemLocation,
    compression: u8,
    rdma: u8,
    usage: u16,
    references: u32,
    mappings: u32,
}

/// What the card counts for memory of this process, as long as any handle of it is there.
struct Charge {
    device: &'static Device,
    bytes: u64,
    file: FileId,
}

/// The device and the number of a file: the same for all descriptors of it.
type FileId = (u64, u64);

/// What this process has made and still counts.
static CHARGES: Mutex<Option<HashMap<FileId, Weak<Charge>>>> = Mutex::new(None);

/// A handle at an address.
struct Mapping {
    bytes: usize,
    handle: &'static Physical,
    /// What devices may do with it, by their number; the host is -1.
    access: BTreeMap<i32, u64>,
}

#[derive(Default)]
struct Addresses {
    reserved: BTreeMap<u64, usize>,
    mapped: BTreeMap<u64, Mapping>,
}

static HANDLES: Arena<Physical> = Arena::new();
static ADDRESSES: Mutex<Addresses> =
    Mutex::new(Addresses { reserved: BTreeMap::new(), mapped: BTreeMap::new() });

fn addresses() -> MutexGuard<'static, Addresses> {
    ADDRESSES.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The handle that a number means.
fn resolve(handle: CUmemGenericAllocationHandle) -> Result<&'static Physical, CudaError> {
    session()?;
    HANDLES.get(handle as *mut u8).filter(|handle| handle.inner().is_some()).ok_or(CudaError::INVALID_VALUE)
}

impl Charge {
    fn all() -> MutexGuard<'static, Option<HashMap<FileId, Weak<Charge>>>> {
        CHARGES.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn take(device: &'static Device, bytes: u64, file: FileId) -> Result<Arc<Self>, CudaError> {
        memory::check(device)?;
        device.take(bytes)?;
        let made = Arc::new(Self { device, bytes, file });
        Self::all().get_or_insert_default().insert(file, Arc::downgrade(&made));
        Ok(made)
    }

    /// That of a file, if this process has made it.
    fn find(file: FileId) -> Option<Arc<Self>> {
        Self::all().as_ref()?.get(&file)?.upgrade()
    }
}

impl Drop for Charge {
    fn drop(&mut self) {
        // A handle's charge goes before its file: no other file has the number yet.
        Self::all().get_or_insert_default().remove(&self.file);
        self.device.give(self.bytes);
    }
}

impl Physical {
    fn inner(&self) -> MutexGuard<'_, Option<Inner>> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn number(&'static self) -> CUmemGenericAllocationHandle {
        handle_of::<_, u8>(self) as u64
    }

    fn make(inner: Inner) -> Result<&'static Self, CudaError> {
        let made = HANDLES.make(Physical::default, |_| ()).ok_or(CudaError::OUT_OF_MEMORY)?;
        *made.inner() = Some(inner);
        Ok(made)
    }

    /// What there is to know of it.
    fn get(&self) -> Result<Inner, CudaError> {
        self.inner().clone().ok_or(CudaError::INVALID_VALUE)
    }

    /// Changes its references or mappings; the last one ends it.
    fn count(&'static self, change: impl FnOnce(&mut Inner)) -> Result<(), CudaError> {
        let mut guard = self.inner();
        let inner = guard.as_mut().ok_or(CudaError::INVALID_VALUE)?;
        change(inner);
        if inner.references > 0 || inner.mappings > 0 {
            return Ok(());
        }
        *guard = None;
        drop(guard);
        HANDLES.drop(self.number() as *mut u8);
        Ok(())
    }
}

/// The device that memory at a location is on; nothing for the host.
fn place(location: &CUmemLocation) -> Result<Option<&'static Device>, CudaError> {
    match location.type_ {
        CU_MEM_LOCATION_TYPE_DEVICE => session::device(location.id).map(Some),
        CU_MEM_LOCATION_TYPE_HOST
        | CU_MEM_LOCATION_TYPE_HOST_NUMA
        | CU_MEM_LOCATION_TYPE_HOST_NUMA_CURRENT => Ok(None),
        _ => Err(CudaError::INVALID_VALUE),
    }
}

fn check_properties(
    properties: *const CUmemAllocationProp,
) -> Result<(CUmemAllocationProp, Option<&'static Device>), CudaError> {
    session()?;
    if properties.is_null() {
        return Err(CudaError::INVALID_VALUE);
    }
    // SAFETY: not null, and the caller's to read.
    let properties = unsafe { properties.read() };
    if properties.type_ != CU_MEM_ALLOCATION_TYPE_PINNED {
        return Err(CudaError::INVALID_VALUE);
    }
    match properties.requestedHandleTypes {
        CU_MEM_HANDLE_TYPE_NONE | CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR => {}
        CU_MEM_HANDLE_TYPE_FABRIC => return Err(CudaError::NOT_SUPPORTED),
        _ => return Err(CudaError::INVALID_VALUE),
    }
    Ok((properties, place(&properties.location)?))
}

/// Which file it is, and how long.
fn file_id(file: &OwnedFd) -> Result<(FileId, usize), CudaError> {
    let status = rustix::fs::fstat(file).map_err(|_| CudaError::INVALID_VALUE)?;
    Ok(((status.st_dev, status.st_ino), status.st_size as usize))
}

/// Memory of a card or of the host, without an address.
fn create(bytes: usize, properties: *const CUmemAllocationProp) -> Result<&'static Physical, CudaError> {
    let (properties, device) = check_properties(properties)?;
    if bytes == 0 || !bytes.is_multiple_of(GRANULARITY) {
        return Err(CudaError::INVALID_VALUE);
    }
    let gpu = device.map_or_else(|| "host".to_owned(), |device| device.gpu.to_string());
    let file = rustix::fs::memfd_create(format!("{FILE}{gpu}"), MemfdFlags::CLOEXEC)
        .map_err(|_| CudaError::OPERATING_SYSTEM)?;
    // A size that no file can have, no card has.
    rustix::fs::ftruncate(&file, bytes as u64).map_err(|_| CudaError::OUT_OF_MEMORY)?;
    let charge = match device {
        Some(device) => Some(Charge::take(device, bytes as u64, file_id(&file)?.0)?),
        None => None,
    };
    Physical::make(Inner {
        device,
        bytes,
        file: Arc::new(file),
        handle_types: properties.requestedHandleTypes,
        location: properties.location,
        compression: properties.allocFlags.compressionType,
        rdma: properties.allocFlags.gpuDirectRDMACapable,
        usage: properties.allocFlags.usage,
        references: 1,
        mappings: 0,
        _charge: charge,
    })
}

/// Memory that another process, or this one, has made and sent as a file.
fn import(file: OwnedFd) -> Result<&'static Physical, CudaError> {
    let bad = CudaError::INVALID_VALUE;
    let name = std::fs::read_link(format!("/proc/self/fd/{}", file.as_raw_fd())).map_err(|_| bad)?;
    let name = name.to_string_lossy();
    let gpu = name.split_once(FILE).ok_or(bad)?.1.split(' ').next().unwrap_or_default();
    let device = match gpu.parse::<usize>() {
        Ok(gpu) => {
            let devices = &session()?.devices;
            Some(devices.iter().find(|device| device.gpu == gpu).ok_or(CudaError::INVALID_DEVICE)?)
        }
        Err(_) => None,
    };
    let (counted_as, bytes) = file_id(&file)?;
    let (type_, id) = match device {
        Some(device) => (CU_MEM_LOCATION_TYPE_DEVICE, device.ordinal),
        None => (CU_MEM_LOCATION_TYPE_HOST, 0),
    };
    Physical::make(Inner {
        device,
        bytes,
        file: Arc::new(file),
        handle_types: CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
        location: CUmemLocation { type_, id },
        compression: 0,
        rdma: 0,
        usage: 0,
        references: 1,
        mappings: 0,
        _charge: Charge::find(counted_as),
    })
}

/// Addresses with nothing behind them.
fn reserve(bytes: usize, alignment: usize, wanted: u64) -> Result<u64, CudaError> {
    let alignment = alignment.max(GRANULARITY);
    if bytes == 0 || !bytes.is_multiple_of(GRANULARITY) || !alignment.is_power_of_two() {
        return Err(CudaError::INVALID_VALUE);
    }
    let length = bytes.checked_add(alignment).ok_or(CudaError::OUT_OF_MEMORY)?;
    // A hint is one, for the kernel too; it is of use only if it is aligned.
    let hint = if (wanted as usize).is_multiple_of(alignment) { wanted as usize } else { 0 };
    // SAFETY: a new mapping over no other, that nobody can look into.
    let address = unsafe {
        libc::mmap(
            hint as *mut c_void,
            length,
            libc::PROT_NONE,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE,
            -1,
            0,
        )
    };
    if address == libc::MAP_FAILED {
        return Err(CudaError::OUT_OF_MEMORY);
    }
    let first = address as usize;
    let start = first.next_multiple_of(alignment);
    for (from, to) in [(first, start), (start + bytes, first + length)] {
        if from < to {
            // SAFETY: ends of the mapping made above that nobody knows of.
            unsafe { libc::munmap(from as *mut c_void, to - from) };
        }
    }
    addresses().reserved.insert(start as u64, bytes);
    Ok(start as u64)
}

/// Gives addresses back, all that were reserved together.
fn unreserve(start: u64, bytes: usize) -> Result<(), CudaError> {
    let mut all = addresses();
    let mapped = all.mapped.range(start..start.saturating_add(bytes as u64)).next().is_some();
    if all.reserved.get(&start) != Some(&bytes) || mapped {
        return Err(CudaError::INVALID_VALUE);
    }
    all.reserved.remove(&start);
    // SAFETY: the reservation made above, with nothing mapped in it.
    unsafe { libc::munmap(start as *mut c_void, bytes) };
    Ok(())
}

/// Puts memory, or nothing, behind reserved addresses.
fn put(start: u64, bytes: usize, file: Option<&OwnedFd>) -> bool {
    let (protection, flags, descriptor) = match file {
        Some(file) => (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED, file.as_raw_fd()),
        None => (libc::PROT_NONE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS, -1),
    };
    let _nobody_moves = MOVING.write();
    // SAFETY: addresses that are reserved, and either free or about to be.
    let address = unsafe {
        libc::mmap(
            start as *mut c_void,
            bytes,
            protection,
            flags | libc::MAP_FIXED | libc::MAP_NORESERVE,
            descriptor,
            0,
        )
    };
    address != libc::MAP_FAILED
}

fn map(start: u64, bytes: usize, handle: &'static Physical) -> Result<(), CudaError> {
    let bad = CudaError::INVALID_VALUE;
    let mut all = addresses();
    let end = start.checked_add(bytes as u64).ok_or(bad)?;
    let inner = handle.get()?;
    let aligned = bytes > 0 && bytes.is_multiple_of(GRANULARITY) && start.is_multiple_of(GRANULARITY as u64);
    let (&first, &length) = all.reserved.range(..=start).next_back().ok_or(bad)?;
    let before = all.mapped.range(..end).next_back();
    let taken = before.is_some_and(|(&at, mapping)| at + mapping.bytes as u64 > start);
    if !aligned || end > first + length as u64 || taken || bytes > inner.bytes {
        return Err(bad);
    }
    if !put(start, bytes, Some(&inner.file)) {
        return Err(CudaError::MAP_FAILED);
    }
    handle.count(|inner| inner.mappings += 1)?;
    all.mapped.insert(start, Mapping { bytes, handle, access: BTreeMap::new() });
    memory::insert(Found {
        kind: Kind::Mapped,
        start,
        bytes,
        device: inner.device,
        context: None,
        id: memory::new_id(),
        flags: 0,
        owner: handle.number() as usize,
        sync_memops: false,
    });
    Ok(())
}

/// The mappings that fill a range, if they do, each as a whole.
fn whole(all: &Addresses, start: u64, bytes: usize) -> Result<Vec<u64>, CudaError> {
    let end = start.checked_add(bytes as u64).ok_or(CudaError::INVALID_VALUE)?;
    let (mut at, mut found) = (start, Vec::new());
    while at < end {
        let mapping = all.mapped.get(&at).ok_or(CudaError::INVALID_VALUE)?;
        found.push(at);
        at += mapping.bytes as u64;
    }
    if at == end && bytes > 0 { Ok(found) } else { Err(CudaError::INVALID_VALUE) }
}

fn unmap(start: u64, bytes: usize) -> Result<(), CudaError> {
    let mut all = addresses();
    for at in whole(&all, start, bytes)? {
        let Some(mapping) = all.mapped.remove(&at) else { continue };
        memory::remove(at, |_| true);
        put(at, mapping.bytes, None);
        mapping.handle.count(|inner| inner.mappings -= 1)?;
    }
    Ok(())
}

/// How memory of a handle can be given to other processes.
pub(super) fn handle_types(handle: usize) -> u64 {
    let handle = HANDLES.get(handle as *mut u8);
    handle.and_then(|handle| handle.get().ok()).map_or(0, |inner| u64::from(inner.handle_types))
}
