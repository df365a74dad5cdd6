//! Memory that graphs allocate and free themselves.
//!
//! The address of an allocation node is fixed when the node is added. Memory is charged to the card when an
//! executable graph first needs it, and stays reserved for the device's graphs until it is trimmed.

use super::super::device::Device;
use super::super::session::device;
use super::node_operation::UserData;
use super::*;
use std::collections::BTreeMap;
use std::sync::Weak;
use std::sync::atomic::{AtomicBool, Ordering};

/// Graph memory is mapped in multiples of this size.
const MAPPING_BYTES: u64 = 2 << 20;

/// The allocation of a graph node.
pub(in crate::cuda) struct GraphAllocation {
    pointer: CUdeviceptr,
    bytes: usize,
    device: &'static Device,
    pool: UserData<CUmemPoolProps>,
    access: Box<[CUmemAccessDesc]>,
    /// Allocated by a launch that did not free it.
    live: AtomicBool,
    /// Still allocated although its executable graph is gone: freeing it releases the memory.
    orphan: AtomicBool,
}

/// All allocation nodes, by address.
static ALLOCATIONS: Mutex<BTreeMap<CUdeviceptr, Weak<GraphAllocation>>> = Mutex::new(BTreeMap::new());

/// Live allocations, which may outlive every graph.
static LIVE_ALLOCATIONS: Mutex<BTreeMap<CUdeviceptr, Arc<GraphAllocation>>> = Mutex::new(BTreeMap::new());

/// Graph memory of one device, in bytes.
#[derive(Clone, Copy, Default)]
struct GraphMemoryUsage {
    used: u64,
    used_high: u64,
    reserved: u64,
    reserved_high: u64,
}

static MEMORY_USAGE: Mutex<BTreeMap<i32, GraphMemoryUsage>> = Mutex::new(BTreeMap::new());

impl GraphAllocation {
    /// Reserves an address, but no memory yet.
    ///
    /// The program's structure must refer to as many access descriptors as it states.
    pub(super) fn new(params: &CUDA_MEM_ALLOC_NODE_PARAMS) -> Result<Arc<Self>, CudaError> {
        let pool = params.poolProps;
        let plain = pool.allocType == CU_MEM_ALLOCATION_TYPE_PINNED
            && pool.handleTypes == CU_MEM_HANDLE_TYPE_NONE
            && pool.location.type_ == CU_MEM_LOCATION_TYPE_DEVICE;
        if !plain || params.accessDescCount > 0 && params.accessDescs.is_null() {
            return Err(CudaError::INVALID_VALUE);
        }
        let device = device(pool.location.id).map_err(|_| CudaError::INVALID_VALUE)?;
        let access = match params.accessDescCount {
            0 => Box::default(),
            // SAFETY: non-null, and the program passes an array of the stated length.
            count => unsafe { std::slice::from_raw_parts(params.accessDescs, count) }.into(),
        };
        Self::reserve(params.bytesize.max(1), device, UserData(pool), access)
    }

    /// Reserves an address for a captured allocation.
    pub(in crate::cuda) fn for_capture(
        device: &'static Device,
        bytes: usize,
    ) -> Result<Arc<Self>, CudaError> {
        let mut pool = CUmemPoolProps { allocType: CU_MEM_ALLOCATION_TYPE_PINNED, ..Default::default() };
        pool.location = CUmemLocation { type_: CU_MEM_LOCATION_TYPE_DEVICE, id: device.ordinal };
        Self::reserve(bytes.max(1), device, UserData(pool), Box::default())
    }

    fn reserve(
        bytes: usize,
        device: &'static Device,
        pool: UserData<CUmemPoolProps>,
        access: Box<[CUmemAccessDesc]>,
    ) -> Result<Arc<Self>, CudaError> {
        let pointer = super::super::memory::reserve(device, bytes)?;
        let (live, orphan) = (AtomicBool::new(false), AtomicBool::new(false));
        let made = Arc::new(Self { pointer, bytes, device, pool, access, live, orphan });
        locked(&ALLOCATIONS).insert(pointer, Arc::downgrade(&made));
        Ok(made)
    }

    pub(in crate::cuda) fn pointer(&self) -> CUdeviceptr {
        self.pointer
    }

    pub(super) fn device(&self) -> &'static Device {
        self.device
    }

    /// Returns the bytes that the allocation takes on the card.
    pub(super) fn size(&self) -> u64 {
        (self.bytes as u64).next_multiple_of(MAPPING_BYTES)
    }

    /// Returns the node parameters as programs read them back.
    pub(super) fn params(&self) -> CUDA_MEM_ALLOC_NODE_PARAMS {
        CUDA_MEM_ALLOC_NODE_PARAMS {
            poolProps: self.pool.0,
            accessDescs: if self.access.is_empty() { std::ptr::null() } else { self.access.as_ptr() },
            accessDescCount: self.access.len(),
            bytesize: self.bytes,
            dptr: self.pointer,
        }
    }

    pub(super) fn is_live(&self) -> bool {
        self.live.load(Ordering::Acquire)
    }

    pub(super) fn set_live(self: &Arc<Self>) {
        self.live.store(true, Ordering::Release);
        locked(&LIVE_ALLOCATIONS).insert(self.pointer, Arc::clone(self));
    }

    /// Frees the allocation; returns false if it was not live.
    pub(super) fn free(&self) -> bool {
        let was_live = self.live.swap(false, Ordering::AcqRel);
        // Dropped after the lock is released: it may be the last reference.
        let _kept = if was_live { locked(&LIVE_ALLOCATIONS).remove(&self.pointer) } else { None };
        if was_live && self.orphan.swap(false, Ordering::AcqRel) {
            unmap(self.device, self.size());
        }
        was_live
    }

    /// Orphans a live allocation when its executable graph is destroyed; returns its size, or zero if it is not live.
    pub(super) fn orphan(&self) -> u64 {
        if !self.is_live() || self.orphan.swap(true, Ordering::AcqRel) {
            return 0;
        }
        self.size()
    }
}

impl Drop for GraphAllocation {
    fn drop(&mut self) {
        locked(&ALLOCATIONS).remove(&self.pointer);
        self.free();
        super::super::memory::unreserve(self.pointer);
    }
}

/// Returns the allocation node with this address.
pub(super) fn find(pointer: CUdeviceptr) -> Option<Arc<GraphAllocation>> {
    locked(&ALLOCATIONS).get(&pointer)?.upgrade()
}

/// Frees what a graph allocated and left, for `cuMemFree` and `cuMemFreeAsync`. Returns false if no graph did.
pub(in crate::cuda) fn free(pointer: CUdeviceptr) -> bool {
    find(pointer).is_some_and(|allocation| allocation.free())
}

/// Reserves memory for an executable graph, charging the card for what is not already reserved.
pub(super) fn map(device: &'static Device, bytes: u64) -> Result<(), CudaError> {
    let mut all = locked(&MEMORY_USAGE);
    let usage = all.entry(device.ordinal).or_default();
    let more = (usage.used + bytes).saturating_sub(usage.reserved);
    if more > 0 {
        device.charge(more)?;
    }
    usage.used += bytes;
    usage.reserved += more;
    usage.used_high = usage.used_high.max(usage.used);
    usage.reserved_high = usage.reserved_high.max(usage.reserved);
    Ok(())
}

/// Releases the memory to other graphs of the device.
pub(super) fn unmap(device: &'static Device, bytes: u64) {
    let mut all = locked(&MEMORY_USAGE);
    let usage = all.entry(device.ordinal).or_default();
    usage.used = usage.used.saturating_sub(bytes);
}

/// Returns unused reserved memory to the card.
pub(super) fn trim(device: &'static Device) {
    let mut all = locked(&MEMORY_USAGE);
    let usage = all.entry(device.ordinal).or_default();
    device.refund(usage.reserved - usage.used.min(usage.reserved));
    usage.reserved = usage.used.min(usage.reserved);
}

pub(super) fn attribute(device: &Device, attribute: CUgraphMem_attribute) -> Result<u64, CudaError> {
    let usage = locked(&MEMORY_USAGE).get(&device.ordinal).copied().unwrap_or_default();
    match attribute {
        CU_GRAPH_MEM_ATTR_USED_MEM_CURRENT => Ok(usage.used),
        CU_GRAPH_MEM_ATTR_USED_MEM_HIGH => Ok(usage.used_high),
        CU_GRAPH_MEM_ATTR_RESERVED_MEM_CURRENT => Ok(usage.reserved),
        CU_GRAPH_MEM_ATTR_RESERVED_MEM_HIGH => Ok(usage.reserved_high),
        _ => Err(CudaError::INVALID_VALUE),
    }
}

/// Resets a high-water mark; CUDA accepts only zero, which means the current value.
pub(super) fn reset(device: &Device, attribute: CUgraphMem_attribute, value: u64) -> Result<(), CudaError> {
    let mut all = locked(&MEMORY_USAGE);
    let usage = all.entry(device.ordinal).or_default();
    match (attribute, value) {
        (CU_GRAPH_MEM_ATTR_USED_MEM_HIGH, 0) => usage.used_high = usage.used,
        (CU_GRAPH_MEM_ATTR_RESERVED_MEM_HIGH, 0) => usage.reserved_high = usage.reserved,
        _ => return Err(CudaError::INVALID_VALUE),
    }
    Ok(())
}
