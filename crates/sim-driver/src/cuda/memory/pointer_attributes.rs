//! Attributes of pointers: what the driver knows about an address.

use super::lookup::{MemoryKind, MemoryRange};
use super::*;

/// The value of an attribute, in the size that CUDA defines for it.
enum AttributeValue {
    Word(u32),
    Long(u64),
}

/// Returns the value of an attribute of a memory range.
fn value(
    attribute: CUpointer_attribute,
    found: &MemoryRange,
    pointer: u64,
) -> Result<AttributeValue, CudaError> {
    let plain = matches!(found.kind, MemoryKind::Plain | MemoryKind::Global);
    let flag = |on: bool| AttributeValue::Word(u32::from(on));
    Ok(match attribute {
        CU_POINTER_ATTRIBUTE_CONTEXT => {
            // Mappings and pool allocations belong to no context.
            let of_none = matches!(found.kind, MemoryKind::Pool | MemoryKind::Mapped);
            let context = found.context.filter(|_| !of_none);
            AttributeValue::Long(context.map_or(0, |context| context.handle() as u64))
        }
        CU_POINTER_ATTRIBUTE_MEMORY_TYPE => {
            AttributeValue::Word(if found.kind.is_host() { CU_MEMORYTYPE_HOST } else { CU_MEMORYTYPE_DEVICE })
        }
        CU_POINTER_ATTRIBUTE_DEVICE_POINTER => AttributeValue::Long(pointer),
        CU_POINTER_ATTRIBUTE_HOST_POINTER if found.kind.is_host() || found.kind == MemoryKind::Managed => {
            AttributeValue::Long(pointer)
        }
        CU_POINTER_ATTRIBUTE_HOST_POINTER => return Err(CudaError::INVALID_VALUE),
        CU_POINTER_ATTRIBUTE_SYNC_MEMOPS => flag(found.sync_memops),
        CU_POINTER_ATTRIBUTE_BUFFER_ID | CU_POINTER_ATTRIBUTE_MEMORY_BLOCK_ID => {
            AttributeValue::Long(found.id)
        }
        CU_POINTER_ATTRIBUTE_IS_MANAGED => flag(found.kind == MemoryKind::Managed),
        CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL => {
            AttributeValue::Word(found.device.map_or(0, |device| device.ordinal as u32))
        }
        CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE => flag(found.kind == MemoryKind::Plain),
        CU_POINTER_ATTRIBUTE_RANGE_START_ADDR | CU_POINTER_ATTRIBUTE_MAPPING_BASE_ADDR => {
            AttributeValue::Long(found.start)
        }
        CU_POINTER_ATTRIBUTE_RANGE_SIZE | CU_POINTER_ATTRIBUTE_MAPPING_SIZE => {
            AttributeValue::Long(found.bytes as u64)
        }
        CU_POINTER_ATTRIBUTE_MAPPED => flag(true),
        CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES => AttributeValue::Long(match found.kind {
            MemoryKind::Mapped => virtual_memory::handle_types(found.owner),
            MemoryKind::Pool => pools::handle_types(found.owner),
            _ => 0,
        }),
        CU_POINTER_ATTRIBUTE_IS_GPU_DIRECT_RDMA_CAPABLE => flag(plain || found.kind == MemoryKind::Mapped),
        CU_POINTER_ATTRIBUTE_ACCESS_FLAGS => AttributeValue::Word(CU_POINTER_ATTRIBUTE_ACCESS_FLAG_READWRITE),
        CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE => {
            AttributeValue::Long(if found.kind == MemoryKind::Pool { found.owner as u64 } else { 0 })
        }
        // The kernel modules that use P2P tokens are not simulated.
        CU_POINTER_ATTRIBUTE_P2P_TOKENS => return Err(CudaError::NOT_SUPPORTED),
        _ => return Err(CudaError::INVALID_VALUE),
    })
}

/// Writes the value of an attribute.
///
/// # Safety
/// `data` is valid for writes of the attribute's size.
unsafe fn write(data: *mut c_void, value: &AttributeValue) {
    match *value {
        // SAFETY: the caller guarantees room for the attribute.
        AttributeValue::Word(word) => unsafe { data.cast::<u32>().write_unaligned(word) },
        // SAFETY: the caller guarantees room for the attribute.
        AttributeValue::Long(long) => unsafe { data.cast::<u64>().write_unaligned(long) },
    }
}

/// Writes one attribute of a pointer.
///
/// # Safety
/// `data` is null or valid for writes of the attribute's size.
pub(super) unsafe fn get(
    data: *mut c_void,
    attribute: CUpointer_attribute,
    pointer: u64,
) -> Result<(), CudaError> {
    if data.is_null() {
        return Err(CudaError::INVALID_VALUE);
    }
    let found = lookup::find(pointer).ok_or(CudaError::INVALID_VALUE)?;
    let value = value(attribute, &found, pointer)?;
    // SAFETY: non-null, and the caller guarantees room for the attribute.
    unsafe { write(data, &value) };
    Ok(())
}

/// Writes one of several attributes of a pointer. An attribute that the memory does not have is zero, and so are all
/// attributes of an unknown pointer.
///
/// # Safety
/// `data` is null or valid for writes of the attribute's size.
pub(super) unsafe fn get_one_of_many(
    data: *mut c_void,
    attribute: CUpointer_attribute,
    pointer: u64,
) -> Result<(), CudaError> {
    let nothing = match attribute {
        CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL => AttributeValue::Word((-2i32) as u32),
        CU_POINTER_ATTRIBUTE_MEMORY_TYPE
        | CU_POINTER_ATTRIBUTE_SYNC_MEMOPS
        | CU_POINTER_ATTRIBUTE_IS_MANAGED
        | CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE
        | CU_POINTER_ATTRIBUTE_MAPPED
        | CU_POINTER_ATTRIBUTE_IS_GPU_DIRECT_RDMA_CAPABLE
        | CU_POINTER_ATTRIBUTE_ACCESS_FLAGS => AttributeValue::Word(0),
        CU_POINTER_ATTRIBUTE_P2P_TOKENS => return Err(CudaError::NOT_SUPPORTED),
        CU_POINTER_ATTRIBUTE_CONTEXT..=CU_POINTER_ATTRIBUTE_MEMORY_BLOCK_ID => AttributeValue::Long(0),
        _ => return Err(CudaError::INVALID_VALUE),
    };
    let known = lookup::find(pointer).and_then(|found| value(attribute, &found, pointer).ok());
    if data.is_null() {
        return Err(CudaError::INVALID_VALUE);
    }
    // SAFETY: non-null, and the caller guarantees room for the attribute.
    unsafe { write(data, &known.unwrap_or(nothing)) };
    Ok(())
}
