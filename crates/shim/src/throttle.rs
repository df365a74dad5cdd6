//! Holds back launches on a GPU until their container may launch there, and marks what was launched.
//!
//! The turn scheduler decides when launches may pass, and charges the container for the time that its work occupies the
//! GPU. It learns that from *markers*: words that the GPU writes in stream order (`partage_region::markers`). So no
//! charge depends on what the shim knows about a kernel.
//!
//! | file | content |
//! |---|---|
//! | `streams` | the streams of this process that are marked |
//! | `marked_stream` | one of them: lets launches pass, and puts markers behind them |
//! | `marker_pacing` | when a marker is due |
//! | `marker_page` | memory that the GPU writes markers to, and how to have it write them |
//! | `gate` | waits for the turn, and bounds the work that is queued |
//! | `self_limit` | limits the container's rate while there is no turn scheduler |
//! | `boundaries` | hooks on calls that make a stream or a thread wait |
//! | `capture` | stream captures, which markers must not enter |
//!
//! Usually a launch costs a few loads and stores of the process's own memory. A container that has the GPU to itself and
//! no ceiling is not gated: then a launch costs one load.
#![allow(unsafe_code)]

pub(crate) mod boundaries;
pub(crate) mod capture;
mod gate;
mod marked_stream;
mod marker_pacing;
mod marker_page;
mod self_limit;
mod streams;
mod ticks;

use crate::hook::StreamVariant;
use crate::process::{self, GrantStatus, Process};
use capture::OpenCaptures;
use marked_stream::MarkedStream;
use partage_driver_api::cuda::{CUDA_ERROR_NOT_PERMITTED, CUcontext, CUresult, CUstream};
use std::sync::atomic::Ordering::Relaxed;
use streams::{StreamKey, StreamTable};

/// State of a process's throttling.
#[derive(Default)]
pub(crate) struct Throttle {
    streams: StreamTable,
    captures: OpenCaptures,
}

/// Where work is submitted to.
#[derive(Clone, Copy)]
pub(crate) struct Submission {
    pub(crate) stream: CUstream,
    pub(crate) variant: StreamVariant,
    /// How many kernel launches it counts as, when markers are put.
    pub(crate) launches: u32,
}

/// Launches that a graph counts as: it has many kernels.
pub(crate) const LAUNCHES_PER_GRAPH: u32 = 32;

/// Submits work when it may run. `work` is called only if launches are gated.
#[inline]
pub(crate) fn submit(work: impl FnOnce() -> Submission, launch: impl FnOnce() -> CUresult) -> CUresult {
    match process::grant_status() {
        GrantStatus::Granted(process) => match gated_gpu(process) {
            None => launch(),
            Some(gpu) => process.throttle.launch(process, gpu, work(), launch),
        },
        GrantStatus::Refused => CUDA_ERROR_NOT_PERMITTED,
    }
}

/// Returns whether launches of this process need the hook: not if none of its GPUs is gated.
#[inline]
pub(crate) fn needed() -> bool {
    let Some(process) = process::attached() else { return true };
    let region = &process.region;
    match process.devices.only() {
        Some(gpu) => region.is_gated(gpu),
        None => (0..region.gpus()).any(|gpu| region.is_gated(gpu)),
    }
}

/// Returns whether some stream of this process is marked.
#[inline]
pub(crate) fn any_marked() -> bool {
    process::attached().is_some_and(|process| process.throttle.streams.any())
}

/// Returns the GPU of the thread's context, if launches on it are gated.
#[inline]
fn gated_gpu(process: &Process) -> Option<usize> {
    process.devices.current_for_launch(&process.region).filter(|&gpu| process.region.is_gated(gpu))
}

impl Throttle {
    #[inline]
    fn launch(
        &self,
        process: &'static Process,
        gpu: usize,
        work: Submission,
        launch: impl FnOnce() -> CUresult,
    ) -> CUresult {
        let key = StreamKey::new(work.stream, work.variant, gpu);
        if let Some(stream) = self.streams.cached(key)
            && process.region.limits(gpu).turn().is_open()
            && let Some(pass) = stream.pass_unmarked(work.launches)
        {
            let answer = launch();
            if stream.is_outdated(pass) {
                // Another thread put the last marker meanwhile, which does not cover this launch.
                stream.reopen();
            }
            return answer;
        }
        self.launch_marked(process, key, work, launch)
    }

    /// Launches work that may have to wait, or that a marker may follow.
    #[cold]
    fn launch_marked(
        &self,
        process: &'static Process,
        key: StreamKey,
        work: Submission,
        launch: impl FnOnce() -> CUresult,
    ) -> CUresult {
        if self.is_capturing() && capture::is_stream_captured(work.stream, work.variant) {
            // It is recorded, not run: its time is charged when the graph is launched.
            return launch();
        }
        let stream = self.prepare_launch(process, key);
        let answer = launch();
        if let Some(stream) = stream {
            partage_region::futex::preserve_errno(|| stream.finish_launch(self, work.launches));
        }
        answer
    }

    /// Waits until a launch may pass, and opens the stream for launches.
    fn prepare_launch(&self, process: &'static Process, key: StreamKey) -> Option<&'static MarkedStream> {
        partage_region::futex::preserve_errno(|| {
            let stream = self.streams.find_or_add(process, key);
            self.wait_for_turn(process, key.gpu, stream);
            if let Some(stream) = stream {
                stream.open(process, self);
            }
            stream
        })
    }

    /// Forgets the streams of a context that is about to be destroyed: no marker is put into them any more.
    pub(crate) fn forget_context(&self, context: CUcontext) {
        self.streams.forget_context(context);
    }

    /// Releases what belonged to a context that the driver has destroyed.
    pub(crate) fn context_destroyed(&self, process: &Process, context: CUcontext) {
        self.end_captures_of(context);
        self.streams.release_pages(process, context);
    }
}

/// Returns whether a GPU's turn scheduler has stopped reporting that it runs.
fn is_silent(process: &Process, gpu: usize, now: u64) -> bool {
    now.saturating_sub(process.region.heartbeat(gpu)) >= partage_region::protocol::SCHEDULER_SILENCE_NS
}

/// Adds to the time that threads have waited.
fn add_throttled(process: &Process, gpu: usize, nanoseconds: u64) {
    process.region.gpu_account(gpu).throttled().fetch_add(nanoseconds, Relaxed);
}
