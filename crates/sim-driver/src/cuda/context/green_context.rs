//! Green contexts: named subsets of a GPU's multiprocessors. Here they are backed by the primary context, and kernels
//! take the same share of the GPU as without them.

use super::context_functions::release_primary;
use super::*;
use crate::cuda::session::device;
use partage_driver_api::cuda::*;
use std::collections::BTreeMap;
use std::sync::MutexGuard;

/// The multiprocessors of a resource descriptor or a green context.
#[derive(Clone, Copy)]
struct SmPartition {
    device: &'static Device,
    multiprocessors: u32,
}

/// A green context and the primary context that backs it.
struct GreenContext {
    partition: SmPartition,
    context: &'static Context,
}

static DESCRIPTORS: HandleArena<u64> = HandleArena::new();
static GREEN_HANDLES: HandleArena<u64> = HandleArena::new();
static PARTITIONS: Mutex<BTreeMap<usize, SmPartition>> = Mutex::new(BTreeMap::new());
static GREEN_CONTEXTS: Mutex<BTreeMap<usize, GreenContext>> = Mutex::new(BTreeMap::new());

const INVALID_VALUE: CudaError = CudaError::INVALID_VALUE;
/// Marks resources created by this driver, in their driver-private bytes.
const RESOURCE_MAGIC: u32 = 0x9e11_7a6e;

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

/// Returns the minimum number of multiprocessors of a partition and the multiple it must be.
fn partition_granularity(device: &Device) -> (u32, u32) {
    match device.profile.compute.major_and_minor().0 {
        ..=6 => (1, 1),
        7 => (2, 2),
        8 => (4, 2),
        _ => (8, 8),
    }
}

impl SmPartition {
    /// Converts to CUDA's structure. `whole` marks a resource that can be split; the result of a split cannot be
    /// split again until it belongs to a green context.
    fn resource(self, whole: bool) -> CUdevResource {
        let mut resource = CUdevResource { type_: CU_DEV_RESOURCE_TYPE_SM, ..CUdevResource::default() };
        for (index, word) in
            [RESOURCE_MAGIC, self.device.ordinal as u32, u32::from(whole)].into_iter().enumerate()
        {
            resource._internal_padding[index * 4..index * 4 + 4].copy_from_slice(&word.to_ne_bytes());
        }
        resource.resource.sm = CUdevSmResource { smCount: self.multiprocessors };
        resource
    }

    /// Parses CUDA's structure; the flag says whether the resource can be split.
    fn from_resource(resource: &CUdevResource) -> Result<(Self, bool), CudaError> {
        if resource.type_ != CU_DEV_RESOURCE_TYPE_SM {
            return Err(CudaError::INVALID_RESOURCE_TYPE);
        }
        let word = |index: usize| {
            let mut bytes = [0; 4];
            bytes.copy_from_slice(&resource._internal_padding[index * 4..index * 4 + 4]);
            u32::from_ne_bytes(bytes)
        };
        if word(0) != RESOURCE_MAGIC {
            return Err(INVALID_VALUE);
        }
        let device = device(word(1) as i32).map_err(|_| INVALID_VALUE)?;
        // SAFETY: the union member is an integer, for which every bit pattern is valid.
        let multiprocessors = unsafe { resource.resource.sm }.smCount;
        Ok((Self { device, multiprocessors }, word(2) != 0))
    }
}

/// Returns the multiprocessors of a whole device as a resource.
pub(super) fn of_device(
    device: &'static Device,
    kind: CUdevResourceType,
) -> Result<CUdevResource, CudaError> {
    if kind != CU_DEV_RESOURCE_TYPE_SM {
        return Err(CudaError::INVALID_RESOURCE_TYPE);
    }
    Ok(SmPartition { device, multiprocessors: device.profile.compute.multiprocessors }.resource(true))
}

/// Splits a resource into equal partitions, at most `wanted`, and returns them and the remainder.
pub(super) fn split(
    input: &CUdevResource,
    at_least: u32,
    wanted: Option<u32>,
) -> Result<(Vec<CUdevResource>, CUdevResource), CudaError> {
    let (partition, whole) = SmPartition::from_resource(input)?;
    if !whole {
        return Err(CudaError::INVALID_RESOURCE_CONFIGURATION);
    }
    let (fewest, multiple) = partition_granularity(partition.device);
    let each = at_least.max(fewest).checked_next_multiple_of(multiple).ok_or(INVALID_VALUE)?;
    let groups = partition.multiprocessors / each;
    if groups == 0 {
        return Err(CudaError::INVALID_RESOURCE_CONFIGURATION);
    }
    let groups = wanted.map_or(groups, |wanted| wanted.min(groups));
    let made = vec![SmPartition { multiprocessors: each, ..partition }.resource(false); groups as usize];
    let left = match partition.multiprocessors - each * groups {
        0 => CUdevResource::default(),
        left => SmPartition { multiprocessors: left, ..partition }.resource(false),
    };
    Ok((made, left))
}

/// Creates a descriptor for resources of one device.
pub(super) fn describe(resources: &[CUdevResource]) -> Result<CUdevResourceDesc, CudaError> {
    let partitions =
        resources.iter().map(|resource| SmPartition::from_resource(resource).map(|(partition, _)| partition));
    let partitions: Vec<SmPartition> = partitions.collect::<Result<_, _>>()?;
    let first = *partitions.first().ok_or(INVALID_VALUE)?;
    let multiprocessors = partitions.iter().map(|partition| partition.multiprocessors).sum::<u32>();
    let all = first.device.profile.compute.multiprocessors;
    if partitions.iter().any(|partition| !std::ptr::eq(partition.device, first.device))
        || multiprocessors > all
    {
        return Err(CudaError::INVALID_RESOURCE_CONFIGURATION);
    }
    let handle = new_handle(&DESCRIPTORS)?;
    locked(&PARTITIONS).insert(handle, SmPartition { device: first.device, multiprocessors });
    Ok(handle as CUdevResourceDesc)
}

fn new_handle(arena: &'static HandleArena<u64>) -> Result<usize, CudaError> {
    let tag = arena.make(|| 0, |_| ()).ok_or(CudaError::OUT_OF_MEMORY)?;
    Ok(handle_of::<_, u8>(tag) as usize)
}

/// Creates a green context on the device's primary context.
pub(super) fn create(
    descriptor: CUdevResourceDesc,
    ordinal: CUdevice,
    flags: u32,
) -> Result<CUgreenCtx, CudaError> {
    let device = device(ordinal)?;
    let partition = locked(&PARTITIONS).get(&(descriptor as usize)).copied().ok_or(INVALID_VALUE)?;
    if flags != CU_GREEN_CTX_DEFAULT_STREAM || !std::ptr::eq(partition.device, device) {
        return Err(INVALID_VALUE);
    }
    let context = retain_primary(device)?;
    let handle = new_handle(&GREEN_HANDLES)?;
    locked(&GREEN_CONTEXTS).insert(handle, GreenContext { partition, context });
    Ok(handle as CUgreenCtx)
}

pub(super) fn destroy(green: CUgreenCtx) -> Result<(), CudaError> {
    session()?;
    let green_context =
        locked(&GREEN_CONTEXTS).remove(&(green as usize)).ok_or(CudaError::INVALID_CONTEXT)?;
    GREEN_HANDLES.drop(green);
    release_primary(green_context.partition.device.ordinal)
}

/// Returns the primary context that backs a green context.
pub(super) fn context(green: CUgreenCtx) -> Result<&'static Context, CudaError> {
    session()?;
    let context = locked(&GREEN_CONTEXTS).get(&(green as usize)).map(|green| green.context);
    context.ok_or(CudaError::INVALID_CONTEXT)
}

/// Returns the resource of a green context.
pub(super) fn resource(green: CUgreenCtx, kind: CUdevResourceType) -> Result<CUdevResource, CudaError> {
    session()?;
    if kind != CU_DEV_RESOURCE_TYPE_SM {
        return Err(CudaError::INVALID_RESOURCE_TYPE);
    }
    let partition = locked(&GREEN_CONTEXTS).get(&(green as usize)).map(|green| green.partition);
    partition.map(|partition| partition.resource(true)).ok_or(CudaError::INVALID_CONTEXT)
}
