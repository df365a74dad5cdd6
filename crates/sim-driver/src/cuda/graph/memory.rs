//! Memory that graphs allocate and free themselves.
//!
//! A node's address is fixed when the node is added. Memory of the card is taken when an executable graph first needs
//! it, and stays with the device's graphs until it is trimmed.

use super::super::device::Device;
use super::super::session::device;
use super::work::Foreign;
use super::*;
use std::collections::BTreeMap;
use std::sync::Weak;
use std::sync::atomic::{AtomicBool, Ordering};

/// Memory is mapped in pieces of this size.
const PIECE: u64 = 2 << 20;

/// What a node allocates.
pub(in crate::cuda) struct Allocation {
    pointer: CUdeviceptr,
    bytes: usize,
    device: &'static Device,
    pool: Foreign<CUmemPoolProps>,
    access: Box<[CUmemAccessDesc]>,
    /// Allocated by a launch and not freed by it.
    live: AtomicBool,
    /// Live, and its executable graph is gone: its memory goes with it.
    orphan: AtomicBool,
}

/// Every address that a node has.
static ALLOCATIONS: Mutex<BTreeMap<CUdeviceptr, Weak<Allocation>>> = Mutex::new(BTreeMap::new());

/// What is live, which may outlive every graph.
static LIVE: Mutex<BTreeMap<CUdeviceptr, Arc<Allocation>>> = Mutex::new(BTreeMap::new());

/// What the graphs of a device have, in bytes.
#[derive(Clone, Copy, Default)]
struct Account {
    used: u64,
    used_high: u64,
    reserved: u64,
    reserved_high: u64,
}

static ACCOUNTS: Mutex<BTreeMap<i32, Account>> = Mutex::new(BTreeMap::new());

impl Allocation {
    /// Takes an address, and no memory yet.
    ///
    /// The caller's structure leads to as many descriptions of access as it says.
    pub(super) fn new(params: &CUDA_MEM_ALLOC_NODE_PARAMS) -> Result<Arc<Self>, CudaError> {
        let pool = params.poolProps;
        let plain = pool.allocType == CU_MEM_ALLOCATION_TYPE_PINNED
            && pool.handleTypes == CU_MEM_HANDLE_TYPE_NONE
            && pool.location.type_ == CU_MEM_LOCATION_TYPE_DEVICE;
        if !plain || params.bytesize == 0 || params.accessDescCount > 0 && params.accessDescs.is_null() {
            return Err(CudaError::INVALID_VALUE);
        }
        let device = device(pool.location.id).map_err(|_| CudaError::INVALID_VALUE)?;
        let access = match params.accessDescCount {
            0 => Box::default(),
            // SAFETY: not null, and as many as the caller says.
            count => unsafe { std::slice::from_raw_parts(params.accessDescs, count) }.into(),
        };
        Self::reserve(params.bytesize, device, Foreign(pool), access)
    }

    /// The same for a captured allocation.
    pub(in crate::cuda) fn on(device: &'static Device, bytes: usize) -> Result<Arc<Self>, CudaError> {
        if bytes == 0 {
            return Err(CudaError::INVALID_VALUE);
        }
        let mut pool = CUmemPoolProps { allocType: CU_MEM_ALLOCATION_TYPE_PINNED, ..Default::default() };
        pool.location = CUmemLocation { type_: CU_MEM_LOCATION_TYPE_DEVICE, id: device.ordinal };
        Self::reserve(bytes, device, Foreign(pool), Box::default())
    }

    fn reserve(
        bytes: usize,
        device: &'static Device,
        pool: Foreign<CUmemPoolProps>,
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

    /// What it takes of the card.
    pub(super) fn size(&self) -> u64 {
        (self.bytes as u64).next_multiple_of(PIECE)
    }

    /// As programs read it back.
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
        locked(&LIVE).insert(self.pointer, Arc::clone(self));
    }

    /// Ends it; false if it had ended.
    pub(super) fn free(&self) -> bool {
        let was_live = self.live.swap(false, Ordering::AcqRel);
        // Let go of when the lock is free: it may be the last hold on it.
        let _kept = if was_live { locked(&LIVE).remove(&self.pointer) } else { None };
        if was_live && self.orphan.swap(false, Ordering::AcqRel) {
            unmap(self.device, self.size());
        }
        was_live
    }

    /// Its executable graph goes; what is live stays. Says how much that is.
    pub(super) fn outlive(&self) -> u64 {
        if !self.is_live() || self.orphan.swap(true, Ordering::AcqRel) {
            return 0;
        }
        self.size()
    }
}

impl Drop for Allocation {
    fn drop(&mut self) {
        locked(&ALLOCATIONS).remove(&self.pointer);
        self.free();
        super::super::memory::unreserve(self.pointer);
    }
}

/// The allocation at an address.
pub(super) fn find(pointer: CUdeviceptr) -> Option<Arc<Allocation>> {
    locked(&ALLOCATIONS).get(&pointer)?.upgrade()
}

/// Frees what a graph allocated and left, as `cuMemFree` and `cuMemFreeAsync` may. False if no graph did.
pub(in crate::cuda) fn free(pointer: CUdeviceptr) -> bool {
    find(pointer).is_some_and(|allocation| allocation.free())
}

/// Takes memory for an executable graph: what is there already, and the rest from the card.
pub(super) fn map(device: &'static Device, bytes: u64) -> Result<(), CudaError> {
    let mut accounts = locked(&ACCOUNTS);
    let account = accounts.entry(device.ordinal).or_default();
    let more = (account.used + bytes).saturating_sub(account.reserved);
    if more > 0 {
        device.take(more)?;
    }
    account.used += bytes;
    account.reserved += more;
    account.used_high = account.used_high.max(account.used);
    account.reserved_high = account.reserved_high.max(account.reserved);
    Ok(())
}

/// Leaves it to other graphs of the device.
pub(super) fn unmap(device: &'static Device, bytes: u64) {
    let mut accounts = locked(&ACCOUNTS);
    let account = accounts.entry(device.ordinal).or_default();
    account.used = account.used.saturating_sub(bytes);
}

/// Gives back what no graph uses.
pub(super) fn trim(device: &'static Device) {
    let mut accounts = locked(&ACCOUNTS);
    let account = accounts.entry(device.ordinal).or_default();
    device.give(account.reserved - account.used.min(account.reserved));
    account.reserved = account.used.min(account.reserved);
}

pub(super) fn attribute(device: &Device, attribute: CUgraphMem_attribute) -> Result<u64, CudaError> {
    let account = locked(&ACCOUNTS).get(&device.ordinal).copied().unwrap_or_default();
    match attribute {
        CU_GRAPH_MEM_ATTR_USED_MEM_CURRENT => Ok(account.used),
        CU_GRAPH_MEM_ATTR_USED_MEM_HIGH => Ok(account.used_high),
        CU_GRAPH_MEM_ATTR_RESERVED_MEM_CURRENT => Ok(account.reserved),
        CU_GRAPH_MEM_ATTR_RESERVED_MEM_HIGH => Ok(account.reserved_high),
        _ => Err(CudaError::INVALID_VALUE),
    }
}

/// High marks can be set back, and only to zero, which means to what there is.
pub(super) fn reset(device: &Device, attribute: CUgraphMem_attribute, value: u64) -> Result<(), CudaError> {
    let mut accounts = locked(&ACCOUNTS);
    let account = accounts.entry(device.ordinal).or_default();
    match (attribute, value) {
        (CU_GRAPH_MEM_ATTR_USED_MEM_HIGH, 0) => account.used_high = account.used,
        (CU_GRAPH_MEM_ATTR_RESERVED_MEM_HIGH, 0) => account.reserved_high = account.reserved,
        _ => return Err(CudaError::INVALID_VALUE),
    }
    Ok(())
}
