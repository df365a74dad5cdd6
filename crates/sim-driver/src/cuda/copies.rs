//! Copies and fills.
//!
//! As with the real driver: what the host takes part in is over when a call without a stream returns, what stays on the
//! card only keeps its place in the default stream. Copies in a stream read the program's unregistered memory at once,
//! and are over at once if they write it.

mod calls;

use super::context::{self, Context};
use super::memory::{self, MemoryOp, Place};
use super::stream::{self, Stream};
use super::*;

fn on_host(place: Place) -> bool {
    matches!(place, Place::Pageable | Place::Pinned)
}

/// Done on the default stream of the calling thread's context.
fn now(op: MemoryOp) -> Result<(), CudaError> {
    let stream = stream::resolve(std::ptr::null_mut())?;
    stream.outside_capture()?;
    memory::check(stream.context().device)?;
    if op.is_empty() {
        return Ok(());
    }
    if on_host(op.to_place()) || op.from_place().is_some_and(on_host) {
        wait(stream)?;
        op.run();
        return Ok(());
    }
    in_order(stream, op)
}

/// Waits for a stream, if there is anything to wait for.
fn wait(stream: &'static Stream) -> Result<(), CudaError> {
    let (context, track) = stream.place();
    let idle = context.device.engine().is_idle(track)?;
    if idle {
        pools::at_sync(context.device);
        return Ok(());
    }
    stream.sync()
}

/// Done in the order of a stream.
fn later(op: MemoryOp, stream: CUstream) -> Result<(), CudaError> {
    let stream = stream::resolve(stream)?;
    if let Some(capture) = stream.capture() {
        return capture.memory(op);
    }
    memory::check(stream.context().device)?;
    if op.is_empty() {
        return Ok(());
    }
    let op = if op.from_place() == Some(Place::Pageable) { op.staged() } else { op };
    let wait = op.to_place() == Place::Pageable;
    in_order(stream, op)?;
    if wait { stream.sync() } else { Ok(()) }
}

fn in_order(stream: &'static Stream, op: MemoryOp) -> Result<(), CudaError> {
    let under_way = memory::under_way();
    stream.in_order(move || {
        op.run();
        drop(under_way);
    })
}

/// Between two contexts, behind and before everything in both.
fn between(op: MemoryOp, contexts: [&'static Context; 2]) -> Result<(), CudaError> {
    context::current()?;
    for context in contexts {
        let stream = context.legacy()?;
        stream.outside_capture()?;
        memory::check(context.device)?;
        stream.sync()?;
    }
    op.run();
    Ok(())
}
