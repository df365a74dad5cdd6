//! The streams of this process that are marked.
#![allow(unsafe_code)]

use super::marked_stream::MarkedStream;
use super::marker_page::{ContextPage, StreamWords};
use crate::driver::cuda as driver;
use crate::hook::StreamVariant;
use crate::process::Process;
use partage_driver_api::cuda::*;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::sync::atomic::{AtomicPtr, AtomicUsize};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Identifies a stream: the handle, the thread if it is a thread's default stream, and the GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct StreamKey {
    pub(super) stream: usize,
    pub(super) thread: usize,
    pub(super) gpu: usize,
    pub(super) variant: StreamVariant,
}

/// Handles that stand for default streams.
pub(super) const LEGACY_STREAM: usize = 1;
const PER_THREAD_STREAM: usize = 2;

impl StreamKey {
    #[inline]
    pub(super) fn new(stream: CUstream, variant: StreamVariant, gpu: usize) -> Self {
        let handle = stream.addr();
        if handle > PER_THREAD_STREAM {
            return Self { stream: handle, thread: 0, gpu, variant: StreamVariant::Legacy };
        }
        let per_thread = handle == PER_THREAD_STREAM || (handle == 0 && variant == StreamVariant::PerThread);
        if per_thread {
            // SAFETY: the function takes no arguments and cannot fail.
            let thread = unsafe { libc::pthread_self() } as usize;
            return Self { stream: PER_THREAD_STREAM, thread, gpu, variant: StreamVariant::PerThread };
        }
        Self { stream: LEGACY_STREAM, thread: 0, gpu, variant: StreamVariant::Legacy }
    }

    /// Returns the handle to pass to the driver.
    pub(super) fn handle(self) -> CUstream {
        std::ptr::with_exposed_provenance_mut(self.stream)
    }

    /// Returns whether the stream can be used by the calling thread only.
    pub(super) fn is_of_another_thread(self) -> bool {
        // SAFETY: the function takes no arguments and cannot fail.
        self.thread != 0 && self.thread != unsafe { libc::pthread_self() } as usize
    }

    #[inline]
    fn hash(self) -> usize {
        let mixed = (self.stream ^ self.thread.rotate_left(17) ^ self.gpu.rotate_left(40)) as u64;
        (mixed.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> (64 - CACHE_BITS)) as usize
    }
}

const CACHE_BITS: u32 = 8;

/// All marked streams of the process. Entries are never freed, because other threads may use them without a lock; an
/// entry is used again for another stream.
pub(super) struct StreamTable {
    cache: [AtomicPtr<MarkedStream>; 1 << CACHE_BITS],
    count: AtomicUsize,
    list: Mutex<StreamList>,
}

#[derive(Default)]
struct StreamList {
    used: Vec<&'static MarkedStream>,
    unused: Vec<&'static MarkedStream>,
    /// Words of destroyed streams whose last markers may not have passed.
    draining: Vec<StreamWords>,
    pages: Vec<ContextPage>,
}

impl Default for StreamTable {
    fn default() -> Self {
        Self {
            cache: [const { AtomicPtr::new(std::ptr::null_mut()) }; 1 << CACHE_BITS],
            count: AtomicUsize::new(0),
            list: Mutex::default(),
        }
    }
}

pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl StreamTable {
    /// Returns the entry of a stream if it was looked up recently.
    #[inline]
    pub(super) fn cached(&self, key: StreamKey) -> Option<&'static MarkedStream> {
        let entry = self.cache[key.hash()].load(Acquire);
        // SAFETY: null, or a leaked box that was complete before it was stored.
        unsafe { entry.as_ref() }.filter(|entry| entry.is(key))
    }

    /// Returns whether any stream is marked.
    #[inline]
    pub(super) fn any(&self) -> bool {
        self.count.load(Relaxed) > 0
    }

    /// Returns the entry of a stream.
    pub(super) fn find(&self, key: StreamKey) -> Option<&'static MarkedStream> {
        if !self.any() {
            return None;
        }
        self.cached(key).or_else(|| lock(&self.list).used.iter().copied().find(|entry| entry.is(key)))
    }

    /// Returns the entry of a stream, which is added if need be. `None` if no words are left: then its work is not
    /// accounted for, which the bypass audit notices.
    pub(super) fn find_or_add(
        &self,
        process: &'static Process,
        key: StreamKey,
    ) -> Option<&'static MarkedStream> {
        if let Some(entry) = self.cached(key) {
            return Some(entry);
        }
        let context = current_context()?;
        let mut list = lock(&self.list);
        let known = list.used.iter().copied().find(|entry| entry.is(key));
        let entry = match known {
            Some(entry) => entry,
            None => {
                let words = list.take_words(process, context, key.gpu)?;
                let entry = list.unused.pop().unwrap_or_else(|| Box::leak(Box::new(MarkedStream::unused())));
                entry.set(&process.throttle, key, context, words);
                list.used.push(entry);
                self.count.store(list.used.len(), Relaxed);
                entry
            }
        };
        self.cache[key.hash()].store(std::ptr::from_ref(entry).cast_mut(), Release);
        Some(entry)
    }

    /// Returns the marked streams that `filter` accepts. The list is not locked while the caller uses them, because the
    /// driver may block.
    pub(super) fn matching(&self, filter: impl Fn(&MarkedStream) -> bool) -> Vec<&'static MarkedStream> {
        if !self.any() {
            return Vec::new();
        }
        lock(&self.list).used.iter().copied().filter(|entry| filter(entry)).collect()
    }

    /// Forgets a stream that the driver is about to destroy. Its queued work stays marked.
    pub(super) fn forget(&self, entry: &'static MarkedStream) {
        let mut list = lock(&self.list);
        list.used.retain(|other| !std::ptr::eq(*other, entry));
        self.count.store(list.used.len(), Relaxed);
        list.draining.extend(entry.retire());
        list.unused.push(entry);
    }

    /// Forgets the streams of a context that is about to be destroyed.
    pub(super) fn forget_context(&self, context: CUcontext) {
        let mut list = lock(&self.list);
        let StreamList { used, unused, .. } = &mut *list;
        used.retain(|entry| {
            let is_other = !entry.is_in_context(context);
            if !is_other {
                entry.retire();
                unused.push(entry);
            }
            is_other
        });
        self.count.store(used.len(), Relaxed);
    }

    /// Releases the pages of a context that the driver has destroyed.
    pub(super) fn release_pages(&self, process: &Process, context: CUcontext) {
        let mut list = lock(&self.list);
        let StreamList { draining, pages, .. } = &mut *list;
        draining.retain(|words| !pages.iter().any(|page| page.context == context && page.has(words)));
        for page in pages.extract_if(.., |page| page.context == context) {
            page.release(process);
        }
    }
}

impl StreamList {
    fn take_words(
        &mut self,
        process: &'static Process,
        context: CUcontext,
        gpu: usize,
    ) -> Option<StreamWords> {
        for words in self.draining.extract_if(.., |words| words.words.outstanding() == 0) {
            for page in &mut self.pages {
                page.return_words(&words);
            }
        }
        let mut own = self.pages.iter_mut().filter(|page| page.context == context && page.gpu == gpu);
        if let Some(words) = own.find_map(ContextPage::take_words) {
            return Some(words);
        }
        let mut page = ContextPage::take(process, context, gpu)?;
        let words = page.take_words();
        self.pages.push(page);
        words
    }
}

pub(super) fn current_context() -> Option<CUcontext> {
    let mut context = std::ptr::null_mut();
    // SAFETY: the pointer is to a local variable, which the driver fills in.
    let answer = unsafe { driver::cuCtxGetCurrent(&mut context) };
    (answer == CUDA_SUCCESS && !context.is_null()).then_some(context)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn default_streams_are_told_apart_by_thread() {
        let handle = |number: usize| std::ptr::without_provenance_mut(number);
        let key = |number, variant| StreamKey::new(handle(number), variant, 0);
        let (legacy, per_thread) = (StreamVariant::Legacy, StreamVariant::PerThread);
        assert_eq!(key(0, legacy), key(LEGACY_STREAM, per_thread));
        assert_eq!(key(0, per_thread), key(PER_THREAD_STREAM, legacy));
        assert_eq!(key(4096, per_thread), key(4096, legacy));
        let own = key(0, per_thread);
        assert!(!own.is_of_another_thread());
        let other = std::thread::scope(|scope| {
            scope
                .spawn(|| StreamKey::new(std::ptr::null_mut(), StreamVariant::PerThread, 0))
                .join()
                .expect("the thread does not panic")
        });
        assert!(other != own && other.is_of_another_thread());
    }
}
