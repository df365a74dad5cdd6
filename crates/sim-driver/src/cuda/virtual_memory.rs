//! Virtual memory management: handles of physical memory that are mapped at reserved addresses.
//!
//! The bytes of a handle are in a memfd, so that they can be mapped at several addresses and in several processes.
//! Memory is charged from its creation until the last reference or mapping of any of its handles in the creating
//! process is gone, imported handles included. Memory of another process is charged there, and released when that
//! process releases it: unlike the real driver, this one does not see whether other processes still have it open.

mod virtual_memory_functions;

use super::device::Device;
use super::handle::{HandleArena, handle_of};
use super::memory::{self, MemoryKind, MemoryRange, REMAP_LOCK};
use super::session::session;
use super::*;
use rustix::fd::{AsRawFd, OwnedFd};
use rustix::fs::MemfdFlags;
use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

/// Granularity of allocations and mappings, in bytes.
const GRANULARITY_BYTES: usize = 2 << 20;

/// Prefix of the memfd names, which `/proc` shows; the GPU's index on the node follows.
const MEMFD_PREFIX: &str = "partage-sim-memory-";

/// A handle of physical memory.
#[derive(Default)]
pub(super) struct PhysicalMemory {
    inner: Mutex<Option<PhysicalState>>,
}

/// The properties and reference counts of physical memory.
#[derive(Clone)]
struct PhysicalState {
    /// The device; `None` for host memory.
    device: Option<&'static Device>,
    bytes: usize,
    /// `None` for host memory and memory of another process, which charges it. Dropped before the file.
    _charge: Option<Arc<MemoryCharge>>,
    file: Arc<OwnedFd>,
    handle_types: u32,
    location: CUmemLocation,
    compression: u8,
    rdma: u8,
    usage: u16,
    references: u32,
    mappings: u32,
}

/// Memory charged to the card while any handle of it exists in this process.
struct MemoryCharge {
    device: &'static Device,
    bytes: u64,
    file: FileIdentity,
}

/// Device and inode number of a file, the same for all of its descriptors.
type FileIdentity = (u64, u64);

/// Charges for memory that this process created, by file.
static CHARGES: Mutex<Option<HashMap<FileIdentity, Weak<MemoryCharge>>>> = Mutex::new(None);

/// Physical memory mapped at an address.
struct Mapping {
    bytes: usize,
    handle: &'static PhysicalMemory,
    /// Access rights by device ordinal; the host is -1.
    access: BTreeMap<i32, u64>,
}

/// Reserved address ranges, and what is mapped in them.
#[derive(Default)]
struct Addresses {
    reserved: BTreeMap<u64, usize>,
    mapped: BTreeMap<u64, Mapping>,
}

static PHYSICAL_HANDLES: HandleArena<PhysicalMemory> = HandleArena::new();
static ADDRESSES: Mutex<Addresses> =
    Mutex::new(Addresses { reserved: BTreeMap::new(), mapped: BTreeMap::new() });

fn addresses() -> MutexGuard<'static, Addresses> {
    ADDRESSES.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Resolves a handle of physical memory.
fn resolve(handle: CUmemGenericAllocationHandle) -> Result<&'static PhysicalMemory, CudaError> {
    session()?;
    PHYSICAL_HANDLES
        .get(handle as *mut u8)
        .filter(|handle| handle.inner().is_some())
        .ok_or(CudaError::INVALID_VALUE)
}

impl MemoryCharge {
    fn all() -> MutexGuard<'static, Option<HashMap<FileIdentity, Weak<MemoryCharge>>>> {
        CHARGES.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn take(device: &'static Device, bytes: u64, file: FileIdentity) -> Result<Arc<Self>, CudaError> {
        memory::check(device)?;
        device.charge(bytes)?;
        let made = Arc::new(Self { device, bytes, file });
        Self::all().get_or_insert_default().insert(file, Arc::downgrade(&made));
        Ok(made)
    }

    /// Returns the charge of a file that this process created.
    fn find(file: FileIdentity) -> Option<Arc<Self>> {
        Self::all().as_ref()?.get(&file)?.upgrade()
    }
}

impl Drop for MemoryCharge {
    fn drop(&mut self) {
        // The charge is dropped before the file, so no other file can have the inode number yet.
        Self::all().get_or_insert_default().remove(&self.file);
        self.device.refund(self.bytes);
    }
}

impl PhysicalMemory {
    fn inner(&self) -> MutexGuard<'_, Option<PhysicalState>> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn number(&'static self) -> CUmemGenericAllocationHandle {
        handle_of::<_, u8>(self) as u64
    }

    fn make(inner: PhysicalState) -> Result<&'static Self, CudaError> {
        let made = PHYSICAL_HANDLES.make(PhysicalMemory::default, |_| ()).ok_or(CudaError::OUT_OF_MEMORY)?;
        *made.inner() = Some(inner);
        Ok(made)
    }

    /// Returns the properties of the memory.
    fn get(&self) -> Result<PhysicalState, CudaError> {
        self.inner().clone().ok_or(CudaError::INVALID_VALUE)
    }

    /// Changes the number of references or mappings; the memory is released when both are zero.
    fn adjust_counts(&'static self, change: impl FnOnce(&mut PhysicalState)) -> Result<(), CudaError> {
        let mut guard = self.inner();
        let inner = guard.as_mut().ok_or(CudaError::INVALID_VALUE)?;
        change(inner);
        if inner.references > 0 || inner.mappings > 0 {
            return Ok(());
        }
        *guard = None;
        drop(guard);
        PHYSICAL_HANDLES.drop(self.number() as *mut u8);
        Ok(())
    }
}

/// Returns the device of a location; `None` for the host.
fn location_device(location: &CUmemLocation) -> Result<Option<&'static Device>, CudaError> {
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
    // SAFETY: non-null, and the program passes a pointer valid for reads.
    let properties = unsafe { properties.read() };
    if properties.type_ != CU_MEM_ALLOCATION_TYPE_PINNED {
        return Err(CudaError::INVALID_VALUE);
    }
    match properties.requestedHandleTypes {
        CU_MEM_HANDLE_TYPE_NONE | CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR => {}
        CU_MEM_HANDLE_TYPE_FABRIC => return Err(CudaError::NOT_SUPPORTED),
        _ => return Err(CudaError::INVALID_VALUE),
    }
    Ok((properties, location_device(&properties.location)?))
}

/// Returns the identity and the size of a file.
fn file_id(file: &OwnedFd) -> Result<(FileIdentity, usize), CudaError> {
    let status = rustix::fs::fstat(file).map_err(|_| CudaError::INVALID_VALUE)?;
    Ok(((status.st_dev, status.st_ino), status.st_size as usize))
}

/// Creates physical memory on a card or on the host.
fn create(
    bytes: usize,
    properties: *const CUmemAllocationProp,
) -> Result<&'static PhysicalMemory, CudaError> {
    let (properties, device) = check_properties(properties)?;
    if bytes == 0 || !bytes.is_multiple_of(GRANULARITY_BYTES) {
        return Err(CudaError::INVALID_VALUE);
    }
    let gpu = device.map_or_else(|| "host".to_owned(), |device| device.gpu.to_string());
    let file = rustix::fs::memfd_create(format!("{MEMFD_PREFIX}{gpu}"), MemfdFlags::CLOEXEC)
        .map_err(|_| CudaError::OPERATING_SYSTEM)?;
    // A size that no file can have exceeds every card.
    rustix::fs::ftruncate(&file, bytes as u64).map_err(|_| CudaError::OUT_OF_MEMORY)?;
    let charge = match device {
        Some(device) => Some(MemoryCharge::take(device, bytes as u64, file_id(&file)?.0)?),
        None => None,
    };
    PhysicalMemory::make(PhysicalState {
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

/// Imports memory from a file that another process, or this one, exported.
fn import(file: OwnedFd) -> Result<&'static PhysicalMemory, CudaError> {
    let bad = CudaError::INVALID_VALUE;
    let name = std::fs::read_link(format!("/proc/self/fd/{}", file.as_raw_fd())).map_err(|_| bad)?;
    let name = name.to_string_lossy();
    let gpu = name.split_once(MEMFD_PREFIX).ok_or(bad)?.1.split(' ').next().unwrap_or_default();
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
    PhysicalMemory::make(PhysicalState {
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
        _charge: MemoryCharge::find(counted_as),
    })
}

/// Reserves an inaccessible address range.
fn reserve(bytes: usize, alignment: usize, wanted: u64) -> Result<u64, CudaError> {
    let alignment = alignment.max(GRANULARITY_BYTES);
    if bytes == 0 || !bytes.is_multiple_of(GRANULARITY_BYTES) || !alignment.is_power_of_two() {
        return Err(CudaError::INVALID_VALUE);
    }
    let length = bytes.checked_add(alignment).ok_or(CudaError::OUT_OF_MEMORY)?;
    // The address is only a hint, and useful only if it is aligned.
    let hint = if (wanted as usize).is_multiple_of(alignment) { wanted as usize } else { 0 };
    // SAFETY: a new inaccessible mapping that replaces no other.
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
            // SAFETY: the unaligned ends of the mapping made above, which are not in use.
            unsafe { libc::munmap(from as *mut c_void, to - from) };
        }
    }
    addresses().reserved.insert(start as u64, bytes);
    Ok(start as u64)
}

/// Frees an address range, which must be a whole reservation without mappings.
fn unreserve(start: u64, bytes: usize) -> Result<(), CudaError> {
    let mut all = addresses();
    let mapped = all.mapped.range(start..start.saturating_add(bytes as u64)).next().is_some();
    if all.reserved.get(&start) != Some(&bytes) || mapped {
        return Err(CudaError::INVALID_VALUE);
    }
    all.reserved.remove(&start);
    // SAFETY: the range was reserved by `reserve`, and nothing is mapped in it.
    unsafe { libc::munmap(start as *mut c_void, bytes) };
    Ok(())
}

/// Maps memory at reserved addresses, or makes them inaccessible again.
fn map_fixed(start: u64, bytes: usize, file: Option<&OwnedFd>) -> bool {
    let (protection, flags, descriptor) = match file {
        Some(file) => (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED, file.as_raw_fd()),
        None => (libc::PROT_NONE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS, -1),
    };
    let _guard = REMAP_LOCK.write();
    // SAFETY: the addresses are reserved, and free or about to be freed.
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

fn map(start: u64, bytes: usize, handle: &'static PhysicalMemory) -> Result<(), CudaError> {
    let bad = CudaError::INVALID_VALUE;
    let mut all = addresses();
    let end = start.checked_add(bytes as u64).ok_or(bad)?;
    let inner = handle.get()?;
    let aligned = bytes > 0
        && bytes.is_multiple_of(GRANULARITY_BYTES)
        && start.is_multiple_of(GRANULARITY_BYTES as u64);
    let (&first, &length) = all.reserved.range(..=start).next_back().ok_or(bad)?;
    let before = all.mapped.range(..end).next_back();
    let taken = before.is_some_and(|(&at, mapping)| at + mapping.bytes as u64 > start);
    if !aligned || end > first + length as u64 || taken || bytes > inner.bytes {
        return Err(bad);
    }
    if !map_fixed(start, bytes, Some(&inner.file)) {
        return Err(CudaError::MAP_FAILED);
    }
    handle.adjust_counts(|inner| inner.mappings += 1)?;
    all.mapped.insert(start, Mapping { bytes, handle, access: BTreeMap::new() });
    memory::insert(MemoryRange {
        kind: MemoryKind::Mapped,
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

/// Returns the mappings that exactly cover a range.
fn whole_mappings(all: &Addresses, start: u64, bytes: usize) -> Result<Vec<u64>, CudaError> {
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
    for at in whole_mappings(&all, start, bytes)? {
        let Some(mapping) = all.mapped.remove(&at) else { continue };
        memory::remove(at, |_| true);
        map_fixed(at, mapping.bytes, None);
        mapping.handle.adjust_counts(|inner| inner.mappings -= 1)?;
    }
    Ok(())
}

/// Returns the handle types by which the memory can be exported.
pub(super) fn handle_types(handle: usize) -> u64 {
    let handle = PHYSICAL_HANDLES.get(handle as *mut u8);
    handle.and_then(|handle| handle.get().ok()).map_or(0, |inner| u64::from(inner.handle_types))
}
