//! What the driver tells of a pointer.

use super::find::{Found, Kind};
use super::*;

/// A value of an attribute, in the size that programs expect.
enum Value {
    Word(u32),
    Long(u64),
}

/// The value of an attribute of memory.
fn value(attribute: CUpointer_attribute, found: &Found, pointer: u64) -> Result<Value, CudaError> {
    let plain = matches!(found.kind, Kind::Plain | Kind::Global);
    let flag = |on: bool| Value::Word(u32::from(on));
    Ok(match attribute {
        CU_POINTER_ATTRIBUTE_CONTEXT => {
            // What is mapped or from a pool is of no context.
            let of_none = matches!(found.kind, Kind::Pool | Kind::Mapped);
            let context = found.context.filter(|_| !of_none);
            Value::Long(context.map_or(0, |context| context.handle() as u64))
        }
        CU_POINTER_ATTRIBUTE_MEMORY_TYPE => {
            Value::Word(if found.kind.is_host() { CU_MEMORYTYPE_HOST } else { CU_MEMORYTYPE_DEVICE })
        }
        CU_POINTER_ATTRIBUTE_DEVICE_POINTER => Value::Long(pointer),
        CU_POINTER_ATTRIBUTE_HOST_POINTER if found.kind.is_host() || found.kind == Kind::Managed => {
            Value::Long(pointer)
        }
        CU_POINTER_ATTRIBUTE_HOST_POINTER => return Err(CudaError::INVALID_VALUE),
        CU_POINTER_ATTRIBUTE_SYNC_MEMOPS => flag(found.sync_memops),
        CU_POINTER_ATTRIBUTE_BUFFER_ID | CU_POINTER_ATTRIBUTE_MEMORY_BLOCK_ID => Value::Long(found.id),
        CU_POINTER_ATTRIBUTE_IS_MANAGED => flag(found.kind == Kind::Managed),
        CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL => {
            Value::Word(found.device.map_or(0, |device| device.ordinal as u32))
        }
        CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE => flag(found.kind == Kind::Plain),
        CU_POINTER_ATTRIBUTE_RANGE_START_ADDR | CU_POINTER_ATTRIBUTE_MAPPING_BASE_ADDR => {
            Value::Long(found.start)
        }
        CU_POINTER_ATTRIBUTE_RANGE_SIZE | CU_POINTER_ATTRIBUTE_MAPPING_SIZE => {
            Value::Long(found.bytes as u64)
        }
        CU_POINTER_ATTRIBUTE_MAPPED => flag(true),
        CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES => Value::Long(match found.kind {
            Kind::Mapped => virtual_memory::handle_types(found.owner),
            Kind::Pool => pools::handle_types(found.owner),
            _ => 0,
        }),
        CU_POINTER_ATTRIBUTE_IS_GPU_DIRECT_RDMA_CAPABLE => flag(plain || found.kind == Kind::Mapped),
        CU_POINTER_ATTRIBUTE_ACCESS_FLAGS => Value::Word(CU_POINTER_ATTRIBUTE_ACCESS_FLAG_READWRITE),
        CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE => {
            Value::Long(if found.kind == Kind::Pool { found.owner as u64 } else { 0 })
        }
        // The kernel modules that would use them are not there.
        CU_POINTER_ATTRIBUTE_P2P_TOKENS => return Err(CudaError::NOT_SUPPORTED),
        _ => return Err(CudaError::INVALID_VALUE),
    })
}

/// # Safety
/// `data` is the program's to write, as large as the attribute.
unsafe fn write(data: *mut c_void, value: &Value) {
    match *value {
        // SAFETY: the caller's promise.
        Value::Word(word) => unsafe { data.cast::<u32>().write_unaligned(word) },
        // SAFETY: the caller's promise.
        Value::Long(long) => unsafe { data.cast::<u64>().write_unaligned(long) },
    }
}

/// One attribute.
///
/// # Safety
/// `data` is null or the program's to write, as large as the attribute.
pub(super) unsafe fn get(
    data: *mut c_void,
    attribute: CUpointer_attribute,
    pointer: u64,
) -> Result<(), CudaError> {
    if data.is_null() {
        return Err(CudaError::INVALID_VALUE);
    }
    let found = find::find(pointer).ok_or(CudaError::INVALID_VALUE)?;
    let value = value(attribute, &found, pointer)?;
    // SAFETY: not null, and the caller's promise.
    unsafe { write(data, &value) };
    Ok(())
}

/// Several attributes at once. What a pointer does not have is zero, and a pointer that the driver does not know has
/// nothing.
///
/// # Safety
/// `data` is the program's to write, as large as the attribute.
pub(super) unsafe fn get_one_of_many(
    data: *mut c_void,
    attribute: CUpointer_attribute,
    pointer: u64,
) -> Result<(), CudaError> {
    let nothing = match attribute {
        CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL => Value::Word((-2i32) as u32),
        CU_POINTER_ATTRIBUTE_MEMORY_TYPE
        | CU_POINTER_ATTRIBUTE_SYNC_MEMOPS
        | CU_POINTER_ATTRIBUTE_IS_MANAGED
        | CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE
        | CU_POINTER_ATTRIBUTE_MAPPED
        | CU_POINTER_ATTRIBUTE_IS_GPU_DIRECT_RDMA_CAPABLE
        | CU_POINTER_ATTRIBUTE_ACCESS_FLAGS => Value::Word(0),
        CU_POINTER_ATTRIBUTE_P2P_TOKENS => return Err(CudaError::NOT_SUPPORTED),
        CU_POINTER_ATTRIBUTE_CONTEXT..=CU_POINTER_ATTRIBUTE_MEMORY_BLOCK_ID => Value::Long(0),
        _ => return Err(CudaError::INVALID_VALUE),
    };
    let known = find::find(pointer).and_then(|found| value(attribute, &found, pointer).ok());
    if data.is_null() {
        return Err(CudaError::INVALID_VALUE);
    }
    // SAFETY: not null, and the caller's promise.
    unsafe { write(data, &known.unwrap_or(nothing)) };
    Ok(())
}
