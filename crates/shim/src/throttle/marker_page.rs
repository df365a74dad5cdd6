//! Pages of the region that the driver may write to, and markers in streams.
//!
//! A page is registered with the context of the streams whose markers are on it. A driver that cannot register it, or
//! cannot write words in stream order, gets events instead, which threads of the program query whenever they are in the
//! shim anyway.
#![allow(unsafe_code)]

use crate::driver::cuda as driver;
use crate::hook::StreamVariant;
use crate::process::Process;
use crate::stream_event;
use partage_driver_api::cuda::*;
use partage_region::markers::{MarkerPage, MarkerValue, StreamMarkers};
use partage_region::protocol::{MARKER_PAGE_SIZE, STREAMS_PER_PAGE};
use std::collections::VecDeque;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;

/// A page of markers of one context.
pub(super) struct ContextPage {
    page: &'static MarkerPage,
    pub(super) context: CUcontext,
    pub(super) gpu: usize,
    /// Difference between the GPU's address of the page and the process's; `None` if the GPU cannot write to it.
    device_offset: Option<u64>,
    /// Words that are not in use, by index.
    free: Vec<usize>,
}

// SAFETY: context handles of the driver may be used from every thread.
unsafe impl Send for ContextPage {}

/// The words of one stream, and where the GPU sees them.
#[derive(Clone, Copy)]
pub(super) struct StreamWords {
    pub(super) words: &'static StreamMarkers,
    pub(super) index: usize,
    device_offset: Option<u64>,
}

impl StreamWords {
    /// Returns words that no GPU writes to.
    #[cfg(test)]
    pub(super) fn unregistered(words: &'static StreamMarkers) -> Self {
        Self { words, index: 0, device_offset: None }
    }
}

impl ContextPage {
    /// Takes a page and registers it with the calling thread's context.
    pub(super) fn take(process: &'static Process, context: CUcontext, gpu: usize) -> Option<Self> {
        let page = process.region.take_marker_page(gpu)?;
        let device_offset = register(page.address());
        Some(Self { page, context, gpu, device_offset, free: (0..STREAMS_PER_PAGE).rev().collect() })
    }

    /// Takes the words of a stream; `None` if all are in use.
    pub(super) fn take_words(&mut self) -> Option<StreamWords> {
        let index = self.free.pop()?;
        let words = self.page.stream(index)?;
        Some(StreamWords { words, index, device_offset: self.device_offset })
    }

    pub(super) fn return_words(&mut self, words: &StreamWords) {
        if self.has(words) {
            self.free.push(words.index);
        }
    }

    /// Returns whether the words are on this page.
    pub(super) fn has(&self, words: &StreamWords) -> bool {
        let at = std::ptr::from_ref(words.words).addr();
        (self.page.address()..self.page.address() + MARKER_PAGE_SIZE).contains(&at)
    }

    /// Gives the page up, after its context was destroyed.
    pub(super) fn release(self, process: &Process) {
        // It fails where the end of the context ended the registration.
        // SAFETY: the page was registered by this process, and no work that writes to it is left.
        let _ = unsafe { driver::cuMemHostUnregister(self.page.address() as *mut c_void) };
        process.region.return_marker_page(self.page);
    }
}

/// Makes driver calls that would invalidate captures of other threads, unless this thread says that it does not care.
pub(super) fn beside_captures<R>(calls: impl FnOnce() -> R) -> R {
    let mut mode = CU_STREAM_CAPTURE_MODE_RELAXED;
    // SAFETY: the pointer is to a local variable, which the driver reads and writes during the call.
    let exchanged = unsafe { driver::cuThreadExchangeStreamCaptureMode(&mut mode) } == CUDA_SUCCESS;
    let result = calls();
    if exchanged {
        // SAFETY: the pointer is to a local variable, which the driver reads and writes during the call.
        let _ = unsafe { driver::cuThreadExchangeStreamCaptureMode(&mut mode) };
    }
    result
}

/// Registers a page of the region. Returns the difference between the GPU's address and the process's.
fn register(page: usize) -> Option<u64> {
    beside_captures(|| register_page(page))
}

fn register_page(page: usize) -> Option<u64> {
    let host = page as *mut c_void;
    // SAFETY: the page is mapped for as long as the process is attached, and belongs to this process.
    let registered =
        unsafe { driver::cuMemHostRegister_v2(host, MARKER_PAGE_SIZE, CU_MEMHOSTREGISTER_DEVICEMAP) };
    let mut address = 0;
    let found = matches!(registered, CUDA_SUCCESS | CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED)
        // SAFETY: the memory was just registered, and the pointer is to a local variable.
        && unsafe { driver::cuMemHostGetDevicePointer_v2(&mut address, host, 0) } == CUDA_SUCCESS;
    found.then(|| address.wrapping_sub(page as u64))
}

/// How markers are put into a stream.
#[derive(Default)]
pub(super) enum MarkerMethod {
    /// The GPU writes words.
    #[default]
    Words,
    /// Events, with the markers that they stand for, in the order of the stream.
    Events(VecDeque<(CUevent, MarkerValue)>),
}

// SAFETY: event handles of the driver may be used from every thread.
unsafe impl Send for MarkerMethod {}

/// Whether any stream has events.
static ANY_EVENTS: AtomicBool = AtomicBool::new(false);

/// Returns whether any stream has events, which threads must query.
pub(super) fn any_events() -> bool {
    ANY_EVENTS.load(Relaxed)
}

/// Events that may be in a stream at once. Further markers are left to later launches.
const MAX_EVENTS: usize = 16;

impl MarkerMethod {
    /// Has the GPU write `value` to `passed` when it gets there.
    pub(super) fn put_passed(
        &mut self,
        words: &StreamWords,
        stream: CUstream,
        variant: StreamVariant,
        value: MarkerValue,
    ) -> bool {
        if let Self::Words = self {
            if write_word(words, words.words.passed_address(), stream, variant, value) {
                return true;
            }
            ANY_EVENTS.store(true, Relaxed);
            *self = Self::Events(VecDeque::new());
        }
        self.record_event(stream, variant, value)
    }

    /// Has the GPU write `value` to `begun` when it gets there. Returns false if it cannot: then waiting counts as work.
    pub(super) fn put_begun(
        &mut self,
        words: &StreamWords,
        stream: CUstream,
        variant: StreamVariant,
        value: MarkerValue,
    ) -> bool {
        matches!(self, Self::Words) && write_word(words, words.words.begun_address(), stream, variant, value)
    }

    pub(super) fn can_mark_boundaries(&self) -> bool {
        matches!(self, Self::Words)
    }

    fn record_event(&mut self, stream: CUstream, variant: StreamVariant, value: MarkerValue) -> bool {
        let Self::Events(events) = self else { return false };
        if events.len() >= MAX_EVENTS {
            return false;
        }
        let Some(event) = stream_event::record(stream, variant) else { return false };
        events.push_back((event, value));
        true
    }

    /// Notes the events that have passed. Words need no help.
    pub(super) fn poll(&mut self, words: &StreamWords) {
        let Self::Events(events) = self else { return };
        while let Some(&(event, value)) = events.front() {
            // SAFETY: the event was created here. If its context is gone, the driver returns an error.
            match beside_captures(|| unsafe { driver::cuEventQuery(event) }) {
                CUDA_ERROR_NOT_READY => return,
                CUDA_SUCCESS => stream_event::destroy(event),
                _ => {}
            }
            words.words.set_settled(value);
            events.pop_front();
        }
    }
}

/// Has the GPU write a word in stream order.
fn write_word(
    words: &StreamWords,
    address: u64,
    stream: CUstream,
    variant: StreamVariant,
    value: MarkerValue,
) -> bool {
    let Some(offset) = words.device_offset else { return false };
    let address = address.wrapping_add(offset);
    let current = match variant {
        // SAFETY: the stream is the application's; the address is that of a word in a page that was registered with the
        // stream's context, and stays mapped.
        StreamVariant::Legacy => unsafe { driver::cuStreamWriteValue64_v2(stream, address, value.0, 0) },
        // SAFETY: the stream is the application's; the address is that of a word in a page that was registered with the
        // stream's context, and stays mapped.
        StreamVariant::PerThread => unsafe {
            driver::cuStreamWriteValue64_v2_ptsz(stream, address, value.0, 0)
        },
    };
    if current != CUDA_ERROR_NOT_FOUND {
        return current == CUDA_SUCCESS;
    }
    // A driver before CUDA 11.7.
    let older = match variant {
        // SAFETY: as above: the application's stream, and a word of a registered page.
        StreamVariant::Legacy => unsafe { driver::cuStreamWriteValue64(stream, address, value.0, 0) },
        // SAFETY: as above: the application's stream, and a word of a registered page.
        StreamVariant::PerThread => unsafe { driver::cuStreamWriteValue64_ptsz(stream, address, value.0, 0) },
    };
    older == CUDA_SUCCESS
}
