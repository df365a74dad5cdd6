//! Execution of copies and fills, synchronous and in stream order.
//!
//! As in the real driver, a call without a stream waits for a copy that involves host memory; a copy within the card
//! is only queued in the default stream. Asynchronous copies read pageable host memory before the call returns, and
//! complete before the call returns if they write it.
//!
//! A copy or fill that is large enough takes time on a [copy engine](super::engine).

mod copy_functions;

use super::context::{self, Context};
use super::engine::StreamOp;
use super::memory::{self, MemoryOp, MemoryPlace};
use super::stream::{self, Stream};
use super::*;
use crate::state::now;

fn on_host(place: MemoryPlace) -> bool {
    matches!(place, MemoryPlace::Pageable | MemoryPlace::Pinned)
}

/// Runs the operation on the current context's default stream.
fn run_now(op: MemoryOp) -> Result<(), CudaError> {
    let stream = stream::resolve(std::ptr::null_mut())?;
    stream.check_not_capturing()?;
    memory::check(stream.context().device)?;
    if op.is_empty() {
        return Ok(());
    }
    if on_host(op.to_place()) || op.from_place().is_some_and(on_host) {
        wait_until_idle(stream)?;
        let (device, started) = (stream.context().device, now());
        op.run();
        if let Some(time) = op.time(device) {
            device.wait_for_copy(time, started);
        }
        return Ok(());
    }
    enqueue(stream, op)
}

/// Waits for a stream unless it is already idle.
fn wait_until_idle(stream: &'static Stream) -> Result<(), CudaError> {
    let (context, timeline) = stream.context_and_timeline();
    let idle = context.device.engine().is_idle(timeline)?;
    if idle {
        pools::trim_after_sync(context.device);
        return Ok(());
    }
    stream.sync()
}

/// Runs the operation in stream order.
fn run_async(op: MemoryOp, stream: CUstream) -> Result<(), CudaError> {
    let stream = stream::resolve(stream)?;
    if let Some(capture) = stream.capture() {
        return capture.add_memory_op(op);
    }
    memory::check(stream.context().device)?;
    if op.is_empty() {
        return Ok(());
    }
    let op = if op.from_place() == Some(MemoryPlace::Pageable) { op.staged() } else { op };
    let wait = op.to_place() == MemoryPlace::Pageable;
    enqueue(stream, op)?;
    if wait { stream.sync() } else { Ok(()) }
}

fn enqueue(stream: &'static Stream, op: MemoryOp) -> Result<(), CudaError> {
    let (pending, time) = (memory::begin_operation(), op.time(stream.context().device));
    let work = move || {
        op.run();
        drop(pending);
    };
    stream.submit(match time {
        Some(time) => StreamOp::Copy(time, Box::new(work)),
        None => StreamOp::HostWork(Box::new(work)),
    })
}

/// Runs a copy between two contexts after all work in both.
fn run_between_contexts(op: MemoryOp, contexts: [&'static Context; 2]) -> Result<(), CudaError> {
    context::current()?;
    for context in contexts {
        let stream = context.legacy()?;
        stream.check_not_capturing()?;
        memory::check(context.device)?;
        stream.sync()?;
    }
    let (device, started) = (contexts[1].device, now());
    op.run();
    if let Some(time) = op.time(device) {
        device.wait_for_copy(time, started);
    }
    Ok(())
}
