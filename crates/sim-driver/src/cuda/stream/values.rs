//! Streams that wait for a word in memory, or write one.

use super::super::engine::Op;
use super::super::{CudaError, memory};
use super::Stream;
use partage_driver_api::cuda::*;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

/// What a word is waited to be.
#[derive(Clone, Copy)]
pub(super) enum Compare {
    AtLeast,
    Equal,
    And,
    Nor,
}

impl Compare {
    pub(super) fn of(flags: u32) -> Result<Self, CudaError> {
        // The flush bit only orders writes of other devices.
        match flags & !CU_STREAM_WAIT_VALUE_FLUSH {
            CU_STREAM_WAIT_VALUE_GEQ => Ok(Compare::AtLeast),
            CU_STREAM_WAIT_VALUE_EQ => Ok(Compare::Equal),
            CU_STREAM_WAIT_VALUE_AND => Ok(Compare::And),
            CU_STREAM_WAIT_VALUE_NOR => Ok(Compare::Nor),
            _ => Err(CudaError::INVALID_VALUE),
        }
    }

    fn holds(self, word: u64, value: u64, narrow: bool) -> bool {
        match self {
            // The difference counts, so that counters may go round.
            Compare::AtLeast if narrow => (word as u32).wrapping_sub(value as u32) as i32 >= 0,
            Compare::AtLeast => word.wrapping_sub(value) as i64 >= 0,
            Compare::Equal => word == value,
            Compare::And => word & value != 0,
            Compare::Nor => !(word | value) & if narrow { u64::from(u32::MAX) } else { u64::MAX } != 0,
        }
    }
}

/// A word of memory that a stream looks at.
#[derive(Clone, Copy)]
struct Word {
    address: usize,
    narrow: bool,
}

impl Word {
    fn at(address: CUdeviceptr, narrow: bool) -> Result<Self, CudaError> {
        let size = if narrow { 4 } else { 8 };
        let address = memory::host_address(address, size)?;
        if !(address as usize).is_multiple_of(size) {
            return Err(CudaError::INVALID_VALUE);
        }
        Ok(Self { address: address as usize, narrow })
    }

    fn load(self) -> u64 {
        if self.narrow {
            // SAFETY: aligned memory of the program's, checked when the operation was submitted.
            u64::from(unsafe { &*(self.address as *const AtomicU32) }.load(Ordering::Acquire))
        } else {
            // SAFETY: likewise.
            unsafe { &*(self.address as *const AtomicU64) }.load(Ordering::Acquire)
        }
    }

    fn store(self, value: u64) {
        if self.narrow {
            // SAFETY: likewise.
            unsafe { &*(self.address as *const AtomicU32) }.store(value as u32, Ordering::Release);
        } else {
            // SAFETY: likewise.
            unsafe { &*(self.address as *const AtomicU64) }.store(value, Ordering::Release);
        }
    }
}

/// The stream goes on when the word compares.
pub(super) fn wait(
    stream: &'static Stream,
    address: CUdeviceptr,
    value: u64,
    compare: Compare,
    narrow: bool,
) -> Result<(), CudaError> {
    let word = Word::at(address, narrow)?;
    stream.outside_capture()?;
    stream.submit(Op::Until(Box::new(move || compare.holds(word.load(), value, narrow))))
}

/// The stream writes the word.
pub(super) fn write(
    stream: &'static Stream,
    address: CUdeviceptr,
    value: u64,
    flags: u32,
    narrow: bool,
) -> Result<(), CudaError> {
    if flags & !CU_STREAM_WRITE_VALUE_NO_MEMORY_BARRIER != 0 {
        return Err(CudaError::INVALID_VALUE);
    }
    let word = Word::at(address, narrow)?;
    stream.outside_capture()?;
    stream.in_order(move || word.store(value))
}

/// Several of these, one after the other.
///
/// # Safety
/// `list` is null or has `count` entries.
pub(super) unsafe fn batch(
    stream: &'static Stream,
    count: u32,
    list: *const CUstreamBatchMemOpParams,
    flags: u32,
) -> Result<(), CudaError> {
    // As many as the driver takes.
    const MOST: u32 = 256;
    if list.is_null() || count == 0 || count > MOST || flags != 0 {
        return Err(CudaError::INVALID_VALUE);
    }
    for index in 0..count as usize {
        // SAFETY: one of those that the caller says there are.
        let place = unsafe { list.add(index) };
        // SAFETY: likewise.
        let one = unsafe { place.read() };
        // SAFETY: every member begins with the operation.
        match unsafe { one.operation } {
            CU_STREAM_MEM_OP_WAIT_VALUE_32 | CU_STREAM_MEM_OP_WAIT_VALUE_64 => {
                // SAFETY: of that kind, the operation says.
                let params = unsafe { one.waitValue };
                let narrow = params.operation == CU_STREAM_MEM_OP_WAIT_VALUE_32;
                // SAFETY: the wider value, of which a narrow operation has the first half.
                let value = unsafe { params.operand.value64 };
                let value = if narrow { value & u64::from(u32::MAX) } else { value };
                wait(stream, params.address, value, Compare::of(params.flags)?, narrow)?;
            }
            CU_STREAM_MEM_OP_WRITE_VALUE_32 | CU_STREAM_MEM_OP_WRITE_VALUE_64 => {
                // SAFETY: of that kind, the operation says.
                let params = unsafe { one.writeValue };
                let narrow = params.operation == CU_STREAM_MEM_OP_WRITE_VALUE_32;
                // SAFETY: as above.
                let value = unsafe { params.operand.value64 };
                write(stream, params.address, value, params.flags, narrow)?;
            }
            // Nothing here is written that others do not see at once.
            CU_STREAM_MEM_OP_FLUSH_REMOTE_WRITES | CU_STREAM_MEM_OP_BARRIER => {}
            _ => return Err(CudaError::INVALID_VALUE),
        }
    }
    Ok(())
}
