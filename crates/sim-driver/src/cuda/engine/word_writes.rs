//! Words that streams write into memory (`cuStreamWriteValue64` and its family).
//!
//! A write has a position in service time and is stored when the GPU has reached it: by the thread that finds this
//! out, or by the [card thread](super::card_thread) while every thread of the program sleeps or runs its own code. A
//! pending write does not make its timeline unsettled, so later launches are placed as cheaply as without it.

use super::super::stream::MemoryWord;
use super::{CudaError, ExecutionEngine};
use std::collections::VecDeque;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Below this distance to the position that the GPU has reached, the submitter stores the word itself.
const IMMEDIATE_NANOS: u64 = 1000;

/// The number of engines that have pending writes.
static ENGINES_WITH_WRITES: AtomicUsize = AtomicUsize::new(0);

/// Returns whether any stream of the process has a pending write.
pub(in super::super) fn has_pending_writes() -> bool {
    ENGINES_WITH_WRITES.load(Ordering::Acquire) > 0
}

/// A write that the GPU has not reached.
struct PendingWrite {
    position: u64,
    word: MemoryWord,
    value: u64,
}

/// The pending writes of all streams on one GPU, by position and then in the order of submission.
#[derive(Default)]
pub(super) struct WordWrites(VecDeque<PendingWrite>);

impl WordWrites {
    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub(super) fn len(&self) -> usize {
        self.0.len()
    }

    /// Returns the position of the earliest write.
    pub(super) fn first_position(&self) -> Option<u64> {
        self.0.front().map(|write| write.position)
    }

    /// Returns whether a pending write changes the word.
    pub(super) fn will_change(&self, word: MemoryWord) -> bool {
        self.0.iter().any(|write| write.word.overlaps(word))
    }

    /// Adds a write; returns whether it is now the earliest one.
    fn add(&mut self, write: PendingWrite) -> bool {
        if self.0.is_empty() {
            ENGINES_WITH_WRITES.fetch_add(1, Ordering::Release);
        }
        // Nearly always the last one: submissions are in ascending order, except across streams.
        let later = self.0.iter().rev().take_while(|other| other.position > write.position).count();
        let index = self.0.len() - later;
        self.0.insert(index, write);
        index == 0
    }

    /// Stores the words whose position is at most `served`, in order; returns whether there were any.
    fn store_until(&mut self, served: u64) -> bool {
        let mut stored = false;
        while self.0.front().is_some_and(|first| first.position <= served) {
            if let Some(write) = self.0.pop_front() {
                write.word.store_if_mapped(write.value);
                stored = true;
            }
        }
        if stored && self.0.is_empty() {
            ENGINES_WITH_WRITES.fetch_sub(1, Ordering::Release);
        }
        stored
    }

    /// Drops all writes without storing them.
    fn clear(&mut self) {
        if !self.0.is_empty() {
            self.0.clear();
            ENGINES_WITH_WRITES.fetch_sub(1, Ordering::Release);
        }
    }
}

impl ExecutionEngine {
    /// Submits a write at `position`, which is placed and follows no host task of its stream.
    pub(super) fn add_word_write(
        &mut self,
        position: u64,
        word: MemoryWord,
        value: u64,
    ) -> Result<(), CudaError> {
        let is_first = self.word_writes.add(PendingWrite { position, word, value });
        if position.saturating_sub(self.lane()?.served()) < IMMEDIATE_NANOS {
            self.lane()?.refresh()?;
            self.store_reached_words();
        }
        if is_first && self.word_writes.first_position().is_some() {
            self.wake_card_thread(position);
        }
        Ok(())
    }

    /// Stores the words up to the position that the lane had reached when it was last updated. Every function that
    /// concludes from this position that an operation is complete must call it first.
    #[inline]
    pub(in super::super) fn store_reached_words(&mut self) -> bool {
        if self.word_writes.is_empty() {
            return false;
        }
        self.store_words_of_lane()
    }

    #[cold]
    fn store_words_of_lane(&mut self) -> bool {
        let Some(lane) = &mut self.lane else { return false };
        if lane.check().is_ok() {
            return self.word_writes.store_until(lane.served());
        }
        // Work that had finished has written its words; the rest is lost.
        let served = lane.served_when_lost();
        let stored = self.word_writes.store_until(served);
        self.word_writes.clear();
        stored
    }
}

/// Stores what the GPUs have reached, before the process exits.
pub(in super::super) extern "C" fn store_words_at_exit() {
    let Ok(session) = super::super::session::session() else { return };
    for device in &session.devices {
        // Another thread that holds the lock may never run again.
        let Some(mut engine) = device.try_engine() else { continue };
        if !engine.word_writes.is_empty() {
            if let Ok(lane) = engine.lane() {
                let _ = lane.refresh();
            }
            engine.store_reached_words();
        }
    }
}

/// Waits until no thread is storing a word, so that memory that the driver has just forgotten can be unmapped.
pub(in super::super) fn wait_for_stores() {
    if has_pending_writes()
        && let Ok(session) = super::super::session::session()
    {
        for device in &session.devices {
            drop(device.engine());
        }
    }
}

#[cfg(test)]
// The calls of C functions are justified together.
#[allow(clippy::multiple_unsafe_ops_per_block)]
mod tests {
    use super::super::super::exports::*;
    use super::super::super::{CUstream, session, test_node};
    use super::*;
    use partage_driver_api::cuda::CU_EVENT_DISABLE_TIMING;

    #[test]
    fn pending_words_leave_the_timeline_settled() {
        test_node::run(|| {
            let (mut context, mut word) = (std::ptr::null_mut(), std::ptr::null_mut());
            let (mut module, mut function) = (std::ptr::null_mut(), std::ptr::null_mut());
            let (none, mut event) = (std::ptr::null_mut::<*mut std::ffi::c_void>(), std::ptr::null_mut());
            // SAFETY: all outputs are local variables, and the image is a NUL-terminated text.
            unsafe {
                assert_eq!(cuInit(0), 0);
                assert_eq!(cuCtxCreate_v2(&mut context, 0, 0), 0);
                assert_eq!(cuMemHostAlloc(&mut word, 4096, 0), 0);
                assert_eq!(cuModuleLoadData(&mut module, c"any".as_ptr().cast()), 0);
                assert_eq!(cuModuleGetFunction(&mut function, module, c"busy_1000000us".as_ptr()), 0);
                assert_eq!(cuEventCreate(&mut event, CU_EVENT_DISABLE_TIMING), 0);
            }
            let stream: CUstream = std::ptr::null_mut();
            for value in 1..=3 {
                // SAFETY: the function takes no arguments, and the word is memory of the driver.
                unsafe {
                    assert_eq!(
                        cuLaunchKernel(
                            function,
                            1 << 20,
                            1,
                            1,
                            256,
                            1,
                            1,
                            0,
                            stream,
                            none.cast(),
                            none.cast()
                        ),
                        0
                    );
                    assert_eq!(cuStreamWriteValue64_v2(stream, word as u64, value, 0), 0);
                    assert_eq!(cuEventRecord(event, stream), 0);
                }
            }
            let device = session::device(0).unwrap();
            let engine = device.engine();
            assert!(!engine.unsettled.any() && !engine.worker && engine.host_tasks.is_empty());
            let positions: Vec<u64> = engine.word_writes.0.iter().map(|write| write.position).collect();
            assert_eq!(positions.len(), 3);
            assert!(positions.is_sorted() && positions[0] >= 1_000_000_000);
            assert!(has_pending_writes());
        });
    }
}
