//! Green contexts: a part of a GPU's multiprocessors under a name. Here they stand on the primary context, and kernels
//! take as much of the GPU as they would without.

use super::calls::release_primary;
use super::*;
use crate::cuda::session::device;
use partage_driver_api::cuda::*;
use std::collections::BTreeMap;
use std::sync::MutexGuard;

/// What a descriptor or a green context has.
#[derive(Clone, Copy)]
struct Part {
    device: &'static Device,
    multiprocessors: u32,
}

/// A green context.
struct Green {
    part: Part,
    context: &'static Context,
}

static DESCRIPTORS: Arena<u64> = Arena::new();
static HANDLES: Arena<u64> = Arena::new();
static PARTS: Mutex<BTreeMap<usize, Part>> = Mutex::new(BTreeMap::new());
static GREENS: Mutex<BTreeMap<usize, Green>> = Mutex::new(BTreeMap::new());

const BAD: CudaError = CudaError::INVALID_VALUE;
/// How a resource of ours begins, in the bytes that are the driver's own.
const MARK: u32 = 0x9e11_7a6e;

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

/// The fewest multiprocessors of a part, and what their number is a multiple of.
fn grain(device: &Device) -> (u32, u32) {
    match device.profile.compute.major_and_minor().0 {
        ..=6 => (1, 1),
        7 => (2, 2),
        8 => (4, 2),
        _ => (8, 8),
    }
}

impl Part {
    /// `whole`: whether it can be split, as what comes from a split cannot before it is a green context's.
    fn resource(self, whole: bool) -> CUdevResource {
        let mut resource = CUdevResource { type_: CU_DEV_RESOURCE_TYPE_SM, ..CUdevResource::default() };
        for (index, word) in [MARK, self.device.ordinal as u32, u32::from(whole)].into_iter().enumerate() {
            resource._internal_padding[index * 4..index * 4 + 4].copy_from_slice(&word.to_ne_bytes());
        }
        resource.resource.sm = CUdevSmResource { smCount: self.multiprocessors };
        resource
    }

    /// What a resource says, and whether it can be split.
    fn of(resource: &CUdevResource) -> Result<(Self, bool), CudaError> {
        if resource.type_ != CU_DEV_RESOURCE_TYPE_SM {
            return Err(CudaError::INVALID_RESOURCE_TYPE);
        }
        let word = |index: usize| {
            let mut bytes = [0; 4];
            bytes.copy_from_slice(&resource._internal_padding[index * 4..index * 4 + 4]);
            u32::from_ne_bytes(bytes)
        };
        if word(0) != MARK {
            return Err(BAD);
        }
        let device = device(word(1) as i32).map_err(|_| BAD)?;
        // SAFETY: every bit pattern is a number.
        let multiprocessors = unsafe { resource.resource.sm }.smCount;
        Ok((Self { device, multiprocessors }, word(2) != 0))
    }
}

/// All of a device.
pub(super) fn of_device(
    device: &'static Device,
    kind: CUdevResourceType,
) -> Result<CUdevResource, CudaError> {
    if kind != CU_DEV_RESOURCE_TYPE_SM {
        return Err(CudaError::INVALID_RESOURCE_TYPE);
    }
    Ok(Part { device, multiprocessors: device.profile.compute.multiprocessors }.resource(true))
}

/// Equal parts of a resource, `wanted` at most, and what is left.
pub(super) fn split(
    input: &CUdevResource,
    at_least: u32,
    wanted: Option<u32>,
) -> Result<(Vec<CUdevResource>, CUdevResource), CudaError> {
    let (part, whole) = Part::of(input)?;
    if !whole {
        return Err(CudaError::INVALID_RESOURCE_CONFIGURATION);
    }
    let (fewest, multiple) = grain(part.device);
    let each = at_least.max(fewest).checked_next_multiple_of(multiple).ok_or(BAD)?;
    let groups = part.multiprocessors / each;
    if groups == 0 {
        return Err(CudaError::INVALID_RESOURCE_CONFIGURATION);
    }
    let groups = wanted.map_or(groups, |wanted| wanted.min(groups));
    let made = vec![Part { multiprocessors: each, ..part }.resource(false); groups as usize];
    let left = match part.multiprocessors - each * groups {
        0 => CUdevResource::default(),
        left => Part { multiprocessors: left, ..part }.resource(false),
    };
    Ok((made, left))
}

/// A descriptor of resources, all of one device.
pub(super) fn describe(resources: &[CUdevResource]) -> Result<CUdevResourceDesc, CudaError> {
    let parts = resources.iter().map(|resource| Part::of(resource).map(|(part, _)| part));
    let parts: Vec<Part> = parts.collect::<Result<_, _>>()?;
    let first = *parts.first().ok_or(BAD)?;
    let multiprocessors = parts.iter().map(|part| part.multiprocessors).sum::<u32>();
    let all = first.device.profile.compute.multiprocessors;
    if parts.iter().any(|part| !std::ptr::eq(part.device, first.device)) || multiprocessors > all {
        return Err(CudaError::INVALID_RESOURCE_CONFIGURATION);
    }
    let handle = new_handle(&DESCRIPTORS)?;
    locked(&PARTS).insert(handle, Part { device: first.device, multiprocessors });
    Ok(handle as CUdevResourceDesc)
}

fn new_handle(arena: &'static Arena<u64>) -> Result<usize, CudaError> {
    let tag = arena.make(|| 0, |_| ()).ok_or(CudaError::OUT_OF_MEMORY)?;
    Ok(handle_of::<_, u8>(tag) as usize)
}

/// Makes a green context.
pub(super) fn create(
    descriptor: CUdevResourceDesc,
    ordinal: CUdevice,
    flags: u32,
) -> Result<CUgreenCtx, CudaError> {
    let device = device(ordinal)?;
    let part = locked(&PARTS).get(&(descriptor as usize)).copied().ok_or(BAD)?;
    if flags != CU_GREEN_CTX_DEFAULT_STREAM || !std::ptr::eq(part.device, device) {
        return Err(BAD);
    }
    let context = retain_primary(device)?;
    let handle = new_handle(&HANDLES)?;
    locked(&GREENS).insert(handle, Green { part, context });
    Ok(handle as CUgreenCtx)
}

pub(super) fn destroy(green: CUgreenCtx) -> Result<(), CudaError> {
    session()?;
    let green_context = locked(&GREENS).remove(&(green as usize)).ok_or(CudaError::INVALID_CONTEXT)?;
    HANDLES.drop(green);
    release_primary(green_context.part.device.ordinal)
}

/// The context that a green context stands on.
pub(super) fn context(green: CUgreenCtx) -> Result<&'static Context, CudaError> {
    session()?;
    let context = locked(&GREENS).get(&(green as usize)).map(|green| green.context);
    context.ok_or(CudaError::INVALID_CONTEXT)
}

/// What a green context has.
pub(super) fn resource(green: CUgreenCtx, kind: CUdevResourceType) -> Result<CUdevResource, CudaError> {
    session()?;
    if kind != CU_DEV_RESOURCE_TYPE_SM {
        return Err(CudaError::INVALID_RESOURCE_TYPE);
    }
    let part = locked(&GREENS).get(&(green as usize)).map(|green| green.part);
    part.map(|part| part.resource(true)).ok_or(CudaError::INVALID_CONTEXT)
}
