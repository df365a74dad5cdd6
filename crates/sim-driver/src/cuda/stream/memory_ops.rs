//! Stream memory operations: waiting for a value in memory, and writing one.
//!
//! Version 1 of the functions needs a parameter of NVIDIA's kernel module that is off by default, as it is here.

use super::super::engine::StreamOp;
use super::super::{CudaError, memory, session};
use super::Stream;
use partage_driver_api::cuda::*;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

/// The condition under which a wait ends.
#[derive(Clone, Copy)]
pub(super) enum WaitCondition {
    AtLeast,
    Equal,
    And,
    Nor,
}

impl WaitCondition {
    pub(super) fn from_flags(flags: u32) -> Result<Self, CudaError> {
        // The flush bit only orders writes of other devices.
        match flags & !CU_STREAM_WAIT_VALUE_FLUSH {
            CU_STREAM_WAIT_VALUE_GEQ => Ok(WaitCondition::AtLeast),
            CU_STREAM_WAIT_VALUE_EQ => Ok(WaitCondition::Equal),
            CU_STREAM_WAIT_VALUE_AND => Ok(WaitCondition::And),
            CU_STREAM_WAIT_VALUE_NOR => Ok(WaitCondition::Nor),
            _ => Err(CudaError::INVALID_VALUE),
        }
    }

    fn holds(self, word: u64, value: u64, is_32_bit: bool) -> bool {
        match self {
            // Compares the difference, so that counters may wrap around.
            WaitCondition::AtLeast if is_32_bit => (word as u32).wrapping_sub(value as u32) as i32 >= 0,
            WaitCondition::AtLeast => word.wrapping_sub(value) as i64 >= 0,
            WaitCondition::Equal => word == value,
            WaitCondition::And => word & value != 0,
            WaitCondition::Nor => {
                !(word | value) & if is_32_bit { u64::from(u32::MAX) } else { u64::MAX } != 0
            }
        }
    }
}

/// An aligned 32-bit or 64-bit value in memory.
#[derive(Clone, Copy)]
pub(in super::super) struct MemoryWord {
    address: usize,
    is_32_bit: bool,
}

impl MemoryWord {
    fn at(address: CUdeviceptr, is_32_bit: bool) -> Result<Self, CudaError> {
        let size = if is_32_bit { 4 } else { 8 };
        let address = memory::host_address(address, size)?;
        if !(address as usize).is_multiple_of(size) {
            return Err(CudaError::INVALID_VALUE);
        }
        Ok(Self { address: address as usize, is_32_bit })
    }

    fn load(self) -> u64 {
        if self.is_32_bit {
            // SAFETY: aligned memory, as `at` checked, that is still mapped, as the callers check.
            u64::from(unsafe { &*(self.address as *const AtomicU32) }.load(Ordering::Acquire))
        } else {
            // SAFETY: aligned memory, as `at` checked, that is still mapped, as the callers check.
            unsafe { &*(self.address as *const AtomicU64) }.load(Ordering::Acquire)
        }
    }

    /// Returns whether the two have a byte in common.
    pub(in super::super) fn overlaps(self, other: Self) -> bool {
        let size = |word: Self| if word.is_32_bit { 4 } else { 8 };
        self.address < other.address + size(other) && other.address < self.address + size(self)
    }

    /// Stores a value unless the memory was freed or unregistered since. The caller holds the engine's lock, without
    /// which no memory that the driver knew is unmapped.
    pub(in super::super) fn store_if_mapped(self, value: u64) {
        if memory::is_still_mapped(self.address as u64) {
            self.store(value);
        }
    }

    fn store(self, value: u64) {
        if self.is_32_bit {
            // SAFETY: aligned memory, as `at` checked, that is still mapped, as the callers check.
            unsafe { &*(self.address as *const AtomicU32) }.store(value as u32, Ordering::Release);
        } else {
            // SAFETY: aligned memory, as `at` checked, that is still mapped, as the callers check.
            unsafe { &*(self.address as *const AtomicU64) }.store(value, Ordering::Release);
        }
    }
}

/// A word that a stream waits for, and what must hold for it.
pub(in super::super) struct WordCondition {
    word: MemoryWord,
    value: u64,
    compare: WaitCondition,
}

impl WordCondition {
    pub(in super::super) fn word(&self) -> MemoryWord {
        self.word
    }

    /// Returns whether the word meets the condition now, or can no longer be read.
    pub(in super::super) fn is_met(&self) -> bool {
        let WordCondition { word, value, compare } = *self;
        !memory::is_still_mapped(word.address as u64) || compare.holds(word.load(), value, word.is_32_bit)
    }
}

/// Fails: version 1 of the functions is switched off.
pub(super) fn reject_version_1(_stream: &'static Stream) -> Result<(), CudaError> {
    Err(CudaError::NOT_SUPPORTED)
}

fn check_supported() -> Result<(), CudaError> {
    if session::has_stream_memory_operations() { Ok(()) } else { Err(CudaError::NOT_SUPPORTED) }
}

/// Blocks the stream until the value meets the condition.
pub(super) fn wait(
    stream: &'static Stream,
    address: CUdeviceptr,
    value: u64,
    compare: WaitCondition,
    is_32_bit: bool,
) -> Result<(), CudaError> {
    check_supported()?;
    let word = MemoryWord::at(address, is_32_bit)?;
    stream.check_not_capturing()?;
    stream.submit(StreamOp::WaitWord(WordCondition { word, value, compare }))
}

/// Writes the value in stream order.
pub(super) fn write(
    stream: &'static Stream,
    address: CUdeviceptr,
    value: u64,
    flags: u32,
    is_32_bit: bool,
) -> Result<(), CudaError> {
    if flags & !CU_STREAM_WRITE_VALUE_NO_MEMORY_BARRIER != 0 {
        return Err(CudaError::INVALID_VALUE);
    }
    check_supported()?;
    let word = MemoryWord::at(address, is_32_bit)?;
    stream.check_not_capturing()?;
    stream.submit(StreamOp::WriteWord(word, value))
}

/// Submits several memory operations in order.
///
/// # Safety
/// `list` is null or valid for reads of `count` entries.
pub(super) unsafe fn batch(
    stream: &'static Stream,
    count: u32,
    list: *const CUstreamBatchMemOpParams,
    flags: u32,
) -> Result<(), CudaError> {
    // The real driver's limit.
    const MAX_BATCH_OPS: u32 = 256;
    check_supported()?;
    if list.is_null() || count == 0 || count > MAX_BATCH_OPS || flags != 0 {
        return Err(CudaError::INVALID_VALUE);
    }
    for index in 0..count as usize {
        // SAFETY: `index` is below the `count` that the caller guarantees.
        let place = unsafe { list.add(index) };
        // SAFETY: `place` is inside the array.
        let one = unsafe { place.read() };
        // SAFETY: every member of the union begins with the operation.
        match unsafe { one.operation } {
            CU_STREAM_MEM_OP_WAIT_VALUE_32 | CU_STREAM_MEM_OP_WAIT_VALUE_64 => {
                // SAFETY: `operation` says that the union holds this member.
                let params = unsafe { one.waitValue };
                let is_32_bit = params.operation == CU_STREAM_MEM_OP_WAIT_VALUE_32;
                // SAFETY: the union is 64 bits wide; a 32-bit operation uses the lower half.
                let value = unsafe { params.operand.value64 };
                let value = if is_32_bit { value & u64::from(u32::MAX) } else { value };
                wait(stream, params.address, value, WaitCondition::from_flags(params.flags)?, is_32_bit)?;
            }
            CU_STREAM_MEM_OP_WRITE_VALUE_32 | CU_STREAM_MEM_OP_WRITE_VALUE_64 => {
                // SAFETY: `operation` says that the union holds this member.
                let params = unsafe { one.writeValue };
                let is_32_bit = params.operation == CU_STREAM_MEM_OP_WRITE_VALUE_32;
                // SAFETY: the union is 64 bits wide; a 32-bit operation uses the lower half.
                let value = unsafe { params.operand.value64 };
                write(stream, params.address, value, params.flags, is_32_bit)?;
            }
            // All writes are immediately visible to other threads and processes.
            CU_STREAM_MEM_OP_FLUSH_REMOTE_WRITES | CU_STREAM_MEM_OP_BARRIER => {}
            _ => return Err(CudaError::INVALID_VALUE),
        }
    }
    Ok(())
}
