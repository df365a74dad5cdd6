//! Arguments of NVML functions: resolution of device handles, and reads and writes through the program's pointers.

use super::session::{GpuCard, Session, session};
use super::{NvmlError, c_char, nvmlDevice_st, nvmlDevice_t};
use crate::state::{GpuCounter, GpuSetting, MAX_GPUS};
use std::sync::atomic::AtomicU8;

/// The result of an NVML function.
pub(super) type NvmlResult = Result<(), NvmlError>;

/// A device handle is the address of one of these bytes: constant while the library is loaded, and never
/// dereferenced.
static HANDLES: [AtomicU8; MAX_GPUS] = [const { AtomicU8::new(0) }; MAX_GPUS];

/// Returns the device handle of a GPU.
pub(super) fn handle(gpu: usize) -> nvmlDevice_t {
    let byte: *const AtomicU8 = &HANDLES[gpu % MAX_GPUS];
    byte.cast_mut().cast::<nvmlDevice_st>()
}

/// A GPU that this process may use.
#[derive(Clone, Copy)]
pub(super) struct VisibleGpu {
    pub(super) session: &'static Session,
    /// Its index on the node, which differs from the program's index if some GPUs are hidden.
    pub(super) index: usize,
}

impl VisibleGpu {
    pub(super) fn card(self) -> &'static GpuCard {
        &self.session.cards[self.index]
    }

    /// Returns the GPU's index as the program counts it.
    pub(super) fn number(self) -> u32 {
        self.session.visible.iter().take_while(|&&gpu| gpu != self.index).count() as u32
    }

    pub(super) fn profile(self) -> &'static crate::profile::GpuProfile {
        &self.card().profile
    }

    pub(super) fn setting(self, setting: GpuSetting) -> Option<u64> {
        self.session.state.setting(self.index, setting)
    }

    pub(super) fn set(self, setting: GpuSetting, value: Option<u64>) {
        self.session.state.set_setting(self.index, setting, value);
    }

    pub(super) fn counter(self, counter: GpuCounter) -> u64 {
        self.session.state.counter(self.index, counter)
    }

    pub(super) fn is_lost(self) -> bool {
        self.session.state.is_lost(self.index)
    }

    /// Returns whether the GPU is in MIG mode.
    pub(super) fn is_mig_enabled(self) -> bool {
        self.session.node.is_mig_enabled(&self.session.state, self.index)
    }
}

/// Resolves a device handle, even of a lost GPU.
pub(super) fn gpu_even_if_lost(device: nvmlDevice_t) -> Result<VisibleGpu, NvmlError> {
    let session = session()?;
    let offset = (device as usize).wrapping_sub(HANDLES.as_ptr() as usize);
    if session.visible.contains(&offset) {
        Ok(VisibleGpu { session, index: offset })
    } else {
        Err(NvmlError::INVALID_ARGUMENT)
    }
}

/// Resolves a device handle; fails if the GPU is lost.
pub(super) fn gpu(device: nvmlDevice_t) -> Result<VisibleGpu, NvmlError> {
    let gpu = gpu_even_if_lost(device)?;
    if gpu.is_lost() { Err(NvmlError::GPU_IS_LOST) } else { Ok(gpu) }
}

/// Resolves a device handle for a change of settings; fails unless the caller is root.
pub(super) fn gpu_as_root(device: nvmlDevice_t) -> Result<VisibleGpu, NvmlError> {
    let gpu = gpu(device)?;
    if is_root() { Ok(gpu) } else { Err(NvmlError::NO_PERMISSION) }
}

#[cfg(not(test))]
fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

#[cfg(test)]
pub(super) fn is_root() -> bool {
    super::session::tests::IS_ROOT.get()
}

/// Writes a result through an output pointer; fails if it is null.
///
/// # Safety
/// `to` is null or valid for unaligned writes.
pub(super) unsafe fn write_value<T>(to: *mut T, value: T) -> NvmlResult {
    if to.is_null() {
        return Err(NvmlError::INVALID_ARGUMENT);
    }
    // SAFETY: non-null, and the caller guarantees validity. Unaligned, because programs pass packed structures.
    unsafe { to.write_unaligned(value) };
    Ok(())
}

/// Reads a value through an input pointer; fails if it is null.
///
/// # Safety
/// `from` is null or valid for unaligned reads.
pub(super) unsafe fn read_value<T: Copy>(from: *const T) -> Result<T, NvmlError> {
    if from.is_null() {
        return Err(NvmlError::INVALID_ARGUMENT);
    }
    // SAFETY: non-null, and the caller guarantees that it is valid for reads.
    Ok(unsafe { from.read_unaligned() })
}

/// Writes a NUL-terminated string into a buffer of `length` bytes.
///
/// # Safety
/// `to` is null or valid for writes of `length` bytes.
pub(super) unsafe fn write_text(to: *mut c_char, length: u32, text: &str) -> NvmlResult {
    if to.is_null() {
        return Err(NvmlError::INVALID_ARGUMENT);
    }
    if text.len() >= length as usize {
        return Err(NvmlError::INSUFFICIENT_SIZE);
    }
    // SAFETY: the buffer is longer than the text and does not overlap it.
    unsafe { to.cast::<u8>().copy_from_nonoverlapping(text.as_ptr(), text.len()) };
    // SAFETY: the text is shorter than the buffer.
    let end = unsafe { to.add(text.len()) };
    // SAFETY: `end` is inside the buffer.
    unsafe { end.write(0) };
    Ok(())
}

/// Writes a list into an array with room for `*count` entries and sets `*count` to the length of the list. Fails with
/// `INSUFFICIENT_SIZE` if the array is too small.
///
/// # Safety
/// `count` is null or valid for reads and writes, and `to` is null or valid for writes of `*count` entries.
pub(super) unsafe fn write_list<T: Copy>(count: *mut u32, to: *mut T, list: &[T]) -> NvmlResult {
    // SAFETY: the caller guarantees that `count` is null or valid.
    let room = unsafe { read_value(count.cast_const()) }? as usize;
    // SAFETY: the caller guarantees that `count` is null or valid.
    unsafe { write_value(count, list.len() as u32) }?;
    if room < list.len() {
        return Err(NvmlError::INSUFFICIENT_SIZE);
    }
    // An empty list needs no array.
    if to.is_null() && !list.is_empty() {
        return Err(NvmlError::INVALID_ARGUMENT);
    }
    for (index, &entry) in list.iter().enumerate() {
        // SAFETY: the array has room for at least `list.len()` entries.
        let place = unsafe { to.add(index) };
        // SAFETY: `place` is inside the array.
        unsafe { place.write_unaligned(entry) };
    }
    Ok(())
}

/// Converts to a fixed-size field: truncated and padded with NULs.
pub(super) fn fixed_text<const N: usize>(text: &str) -> [c_char; N] {
    let mut field = [0; N];
    for (to, from) in field.iter_mut().zip(text.bytes().take(N.saturating_sub(1))) {
        *to = from as c_char;
    }
    field
}

/// Writes results and returns: `write_out!(pointer => value, …)`.
macro_rules! write_out {
    ($($to:expr => $value:expr),+ $(,)?) => {{
        $(
            let value = $value;
            let to = $to;
            // SAFETY: NVML requires output pointers to be null or valid for writes.
            unsafe { $crate::nvml::arguments::write_value(to, value) }?;
        )+
        Ok(())
    }};
}

/// Writes a string result and returns.
macro_rules! write_out_text {
    ($to:expr, $length:expr, $text:expr) => {{
        let text: &str = &$text;
        let (to, length) = ($to, $length);
        // SAFETY: NVML requires the buffer to be null or as long as stated.
        unsafe { $crate::nvml::arguments::write_text(to, length, text) }
    }};
}

/// Writes a list result and returns.
macro_rules! write_out_list {
    ($count:expr, $to:expr, $list:expr) => {{
        let list = $list;
        let (count, to) = ($count, $to);
        // SAFETY: NVML requires both pointers to be null or valid, and the array to be as long as the count states.
        unsafe { $crate::nvml::arguments::write_list(count, to, &list) }
    }};
}

/// Reads an input argument that was passed by pointer.
macro_rules! read_in {
    ($from:expr) => {{
        let from = $from;
        // SAFETY: NVML requires input pointers to be null or valid for reads.
        unsafe { $crate::nvml::arguments::read_value(from) }?
    }};
}

pub(super) use {read_in, write_out, write_out_list, write_out_text};
