//! What the bodies of all families begin and end with: whose card is meant, and where the answer goes.

use super::session::{Card, Session, session};
use super::{NvmlError, c_char, nvmlDevice_st, nvmlDevice_t};
use crate::state::{Counter, MAX_GPUS, Setting};
use std::sync::atomic::AtomicU8;

/// What a function comes to.
pub(super) type Answer = Result<(), NvmlError>;

/// A handle is the address of one of these bytes: the same for as long as the library is loaded, and never
/// read through.
static HANDLES: [AtomicU8; MAX_GPUS] = [const { AtomicU8::new(0) }; MAX_GPUS];

/// The handle of a GPU.
pub(super) fn handle(gpu: usize) -> nvmlDevice_t {
    let byte: *const AtomicU8 = &HANDLES[gpu % MAX_GPUS];
    byte.cast_mut().cast::<nvmlDevice_st>()
}

/// A GPU of the node.
#[derive(Clone, Copy)]
pub(super) struct Gpu {
    pub(super) session: &'static Session,
    /// Its place on the node, which is its number for the program only where that may use all of them.
    pub(super) index: usize,
}

impl Gpu {
    pub(super) fn card(self) -> &'static Card {
        &self.session.cards[self.index]
    }

    /// Its number for the program.
    pub(super) fn number(self) -> u32 {
        self.session.shown.iter().take_while(|&&gpu| gpu != self.index).count() as u32
    }

    pub(super) fn profile(self) -> &'static crate::profile::Profile {
        &self.card().profile
    }

    pub(super) fn setting(self, setting: Setting) -> Option<u64> {
        self.session.state.setting(self.index, setting)
    }

    pub(super) fn set(self, setting: Setting, value: Option<u64>) {
        self.session.state.set(self.index, setting, value);
    }

    pub(super) fn counter(self, counter: Counter) -> u64 {
        self.session.state.counter(self.index, counter)
    }

    pub(super) fn is_lost(self) -> bool {
        self.session.state.is_lost(self.index)
    }

    /// Whether it is in MIG mode.
    pub(super) fn is_split(self) -> bool {
        self.session.node.is_split(&self.session.state, self.index)
    }
}

/// The GPU that a handle stands for, be it on the bus or not.
pub(super) fn known(device: nvmlDevice_t) -> Result<Gpu, NvmlError> {
    let session = session()?;
    let offset = (device as usize).wrapping_sub(HANDLES.as_ptr() as usize);
    if session.shown.contains(&offset) {
        Ok(Gpu { session, index: offset })
    } else {
        Err(NvmlError::INVALID_ARGUMENT)
    }
}

/// The GPU that a handle stands for, which must answer.
pub(super) fn gpu(device: nvmlDevice_t) -> Result<Gpu, NvmlError> {
    let gpu = known(device)?;
    if gpu.is_lost() { Err(NvmlError::GPU_IS_LOST) } else { Ok(gpu) }
}

/// The GPU, for somebody who may change it.
pub(super) fn owned(device: nvmlDevice_t) -> Result<Gpu, NvmlError> {
    let gpu = gpu(device)?;
    if is_root() { Ok(gpu) } else { Err(NvmlError::NO_PERMISSION) }
}

#[cfg(not(test))]
fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

#[cfg(test)]
pub(super) fn is_root() -> bool {
    super::session::tests::ROOT.get()
}

/// Puts an answer where the program wants it.
///
/// # Safety
/// `to` is null or may be written to.
pub(super) unsafe fn put<T>(to: *mut T, value: T) -> Answer {
    if to.is_null() {
        return Err(NvmlError::INVALID_ARGUMENT);
    }
    // SAFETY: not null, so the caller promised it. Programs do pass packed structures.
    unsafe { to.write_unaligned(value) };
    Ok(())
}

/// Reads what the program passed by address.
///
/// # Safety
/// `from` is null or may be read.
pub(super) unsafe fn take<T: Copy>(from: *const T) -> Result<T, NvmlError> {
    if from.is_null() {
        return Err(NvmlError::INVALID_ARGUMENT);
    }
    // SAFETY: not null, so the caller promised it.
    Ok(unsafe { from.read_unaligned() })
}

/// Puts a text and its final zero into a buffer of `length` bytes.
///
/// # Safety
/// `to` is null or that many bytes from it may be written to.
pub(super) unsafe fn put_text(to: *mut c_char, length: u32, text: &str) -> Answer {
    if to.is_null() {
        return Err(NvmlError::INVALID_ARGUMENT);
    }
    if text.len() >= length as usize {
        return Err(NvmlError::INSUFFICIENT_SIZE);
    }
    // SAFETY: the buffer has room for the text, which nothing of it overlaps.
    unsafe { to.cast::<u8>().copy_from_nonoverlapping(text.as_ptr(), text.len()) };
    // SAFETY: and for one byte more.
    let end = unsafe { to.add(text.len()) };
    // SAFETY: which is this one.
    unsafe { end.write(0) };
    Ok(())
}

/// Puts a list into an array with room for `*count`, and says how many there are. Too little room is said by
/// `INSUFFICIENT_SIZE`, with the room it takes in `count`.
///
/// # Safety
/// `count` is null or a number that may be written to; `to` is null or has room for as many.
pub(super) unsafe fn put_list<T: Copy>(count: *mut u32, to: *mut T, list: &[T]) -> Answer {
    // SAFETY: the caller's promise.
    let room = unsafe { take(count.cast_const()) }? as usize;
    // SAFETY: the caller's promise.
    unsafe { put(count, list.len() as u32) }?;
    if room < list.len() {
        return Err(NvmlError::INSUFFICIENT_SIZE);
    }
    // Room for nothing needs no array.
    if to.is_null() && !list.is_empty() {
        return Err(NvmlError::INVALID_ARGUMENT);
    }
    for (index, &entry) in list.iter().enumerate() {
        // SAFETY: there is room for at least as many.
        let place = unsafe { to.add(index) };
        // SAFETY: inside the array.
        unsafe { place.write_unaligned(entry) };
    }
    Ok(())
}

/// A text in a structure: cut to its field, ended by zeros.
pub(super) fn letters<const N: usize>(text: &str) -> [c_char; N] {
    let mut field = [0; N];
    for (to, from) in field.iter_mut().zip(text.bytes().take(N.saturating_sub(1))) {
        *to = from as c_char;
    }
    field
}

/// Ends a function with its answers: `answer!(pointer = value, …)`.
macro_rules! answer {
    ($($to:expr => $value:expr),+ $(,)?) => {{
        $(
            let value = $value;
            let to = $to;
            // SAFETY: the program's pointer, which is null or where it wants the answer.
            unsafe { $crate::nvml::call::put(to, value) }?;
        )+
        Ok(())
    }};
}

/// Ends a function with a text.
macro_rules! answer_text {
    ($to:expr, $length:expr, $text:expr) => {{
        let text: &str = &$text;
        let (to, length) = ($to, $length);
        // SAFETY: the program's buffer, which is null or as long as it says.
        unsafe { $crate::nvml::call::put_text(to, length, text) }
    }};
}

/// Ends a function with a list.
macro_rules! answer_list {
    ($count:expr, $to:expr, $list:expr) => {{
        let list = $list;
        let (count, to) = ($count, $to);
        // SAFETY: the program's count and array, which are null or as long as it says.
        unsafe { $crate::nvml::call::put_list(count, to, &list) }
    }};
}

/// What the program passed by address.
macro_rules! passed {
    ($from:expr) => {{
        let from = $from;
        // SAFETY: the program's pointer, which is null or what it wants read.
        unsafe { $crate::nvml::call::take(from) }?
    }};
}

pub(super) use {answer, answer_list, answer_text, passed};
