//! Hooks on calls that make a stream or a thread wait.
//!
//! A stream that waits for an event, a value or a host function does not occupy the GPU: a boundary is put into it. And
//! before a thread waits for work, the work gets a marker, because no thread of the program may be there to put it later.
#![allow(unsafe_code)]

use super::marked_stream::MarkedStream;
use super::streams::StreamKey;
use super::{any_marked, needed};
use crate::hook::{StreamVariant, hooks};
use crate::process::{self, Process};
use partage_driver_api::cuda::*;
use partage_region::futex::preserve_errno;

/// The work that a thread waits for.
#[derive(Clone, Copy)]
pub(crate) enum WaitScope {
    /// All work of a stream.
    Stream(CUstream, StreamVariant),
    /// All work of the thread's context.
    Context,
    /// Something else, such as an event.
    Other,
}

fn find(process: &Process, stream: CUstream, variant: StreamVariant) -> Option<&'static MarkedStream> {
    let gpu = process.devices.current_for_launch(&process.region)?;
    process.throttle.streams.find(StreamKey::new(stream, variant, gpu))
}

/// Records that a stream waits for something other than kernels from here on.
#[cold]
pub(crate) fn put_boundary(stream: CUstream, variant: StreamVariant) {
    if let Some(process) = process::attached()
        && let Some(marked) = find(process, stream, variant)
    {
        preserve_errno(|| marked.put_boundary(&process.throttle));
    }
}

/// Marks the work of this process before a thread waits, and records afterwards that it has ended.
#[cold]
pub(crate) fn wait_for_work(scope: WaitScope, call: impl FnOnce() -> CUresult) -> CUresult {
    // What a thread waits for counts as running until it returns. Other work may take long, and no thread may be there to
    // put a marker later.
    call_with_markers(scope, matches!(scope, WaitScope::Other), call)
}

/// Marks the work of this process before a call that waits for it implicitly.
#[inline]
pub(crate) fn mark_before_implicit_wait() {
    if marked() {
        mark_work(true);
    }
}

#[cold]
fn mark_work(always: bool) {
    let Some(process) = process::attached() else { return };
    let throttle = &process.throttle;
    preserve_errno(|| throttle.streams.matching(|_| true).iter().for_each(|one| one.flush(throttle, always)));
}

/// Asks for the state of work. A program that asks often gets few markers.
#[cold]
fn query_work(scope: WaitScope, call: impl FnOnce() -> CUresult) -> CUresult {
    call_with_markers(scope, false, call)
}

fn call_with_markers(scope: WaitScope, always: bool, call: impl FnOnce() -> CUresult) -> CUresult {
    let Some(process) = process::attached() else { return call() };
    let throttle = &process.throttle;
    mark_work(always);
    let awaited = preserve_errno(|| {
        let awaited: Vec<&'static MarkedStream> = match scope {
            WaitScope::Stream(stream, variant) => find(process, stream, variant).into_iter().collect(),
            WaitScope::Context => {
                let context = super::streams::current_context();
                throttle
                    .streams
                    .matching(|stream| context.is_some_and(|context| stream.is_in_context(context)))
            }
            WaitScope::Other => Vec::new(),
        };
        awaited.iter().for_each(|stream| stream.begin_wait());
        awaited.into_iter().map(|stream| (stream, stream.launch_stamp())).collect::<Vec<_>>()
    });
    let answer = call();
    let has_ended = answer == CUDA_SUCCESS;
    preserve_errno(|| awaited.into_iter().for_each(|(stream, stamp)| stream.end_wait(stamp, has_ended)));
    answer
}

/// Returns whether streams of this process are marked, and still need to be.
#[inline]
pub(crate) fn marked() -> bool {
    any_marked() && needed()
}

/// Hooks functions whose first argument is a stream, which waits from there on.
macro_rules! boundary_hooks {
    ($(fn $name:ident($stream:ident: CUstream, $($arg:ident: $type:ty),* $(,)?) twin $twin:ident;)*) => {
        hooks! { cuda;
            $(fn $name($stream: CUstream, $($arg: $type),*) twin $twin |next, variant| if marked {
                put_boundary($stream, variant);
                // SAFETY: the application's arguments, passed on unchanged under the driver function's own contract.
                unsafe { next($stream, $($arg),*) }
            })*

            fn cuStreamQuery(stream: CUstream) twin cuStreamQuery_ptsz |next, variant| if marked {
                // SAFETY: the application's arguments, passed on unchanged under the driver function's own contract.
                query_work(WaitScope::Stream(stream, variant), || unsafe { next(stream) })
            }

            fn cuEventQuery(event: CUevent) |next, _variant| if marked {
                // SAFETY: the application's arguments, passed on unchanged under the driver function's own contract.
                query_work(WaitScope::Other, || unsafe { next(event) })
            }
        }
    };
}

boundary_hooks! {
    fn cuStreamWaitEvent(stream: CUstream, event: CUevent, flags: u32) twin cuStreamWaitEvent_ptsz;
    fn cuStreamWaitValue32(stream: CUstream, address: CUdeviceptr, value: u32, flags: u32) twin cuStreamWaitValue32_ptsz;
    fn cuStreamWaitValue32_v2(stream: CUstream, address: CUdeviceptr, value: u32, flags: u32) twin cuStreamWaitValue32_v2_ptsz;
    fn cuStreamWaitValue64(stream: CUstream, address: CUdeviceptr, value: u64, flags: u32) twin cuStreamWaitValue64_ptsz;
    fn cuStreamWaitValue64_v2(stream: CUstream, address: CUdeviceptr, value: u64, flags: u32) twin cuStreamWaitValue64_v2_ptsz;
    fn cuStreamBatchMemOp(stream: CUstream, count: u32, list: *mut CUstreamBatchMemOpParams, flags: u32) twin cuStreamBatchMemOp_ptsz;
    fn cuStreamBatchMemOp_v2(stream: CUstream, count: u32, list: *mut CUstreamBatchMemOpParams, flags: u32) twin cuStreamBatchMemOp_v2_ptsz;
    fn cuLaunchHostFunc(stream: CUstream, function: CUhostFn, user_data: *mut c_void) twin cuLaunchHostFunc_ptsz;
    fn cuStreamAddCallback(stream: CUstream, callback: CUstreamCallback, user_data: *mut c_void, flags: u32) twin cuStreamAddCallback_ptsz;
}
