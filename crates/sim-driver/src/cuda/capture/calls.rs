//! What programs ask of a capture, and change in it.

use super::*;

/// Where the answers about a capture go; null where nobody wants one.
pub(in super::super) struct Info {
    pub(in super::super) status: *mut CUstreamCaptureStatus,
    pub(in super::super) id: *mut u64,
    pub(in super::super) graph: *mut CUgraph,
    pub(in super::super) dependencies: *mut *const CUgraphNode,
    pub(in super::super) data: *mut *const CUgraphEdgeData,
    pub(in super::super) count: *mut usize,
}

impl Info {
    pub(in super::super) fn status(to: *mut CUstreamCaptureStatus) -> Self {
        Self {
            status: to,
            id: std::ptr::null_mut(),
            graph: std::ptr::null_mut(),
            dependencies: std::ptr::null_mut(),
            data: std::ptr::null_mut(),
            count: std::ptr::null_mut(),
        }
    }
}

/// # Safety
/// `to` is null or the program's to write.
unsafe fn put<T>(to: *mut T, value: T) {
    if !to.is_null() {
        // SAFETY: not null, and the caller's promise.
        unsafe { to.write(value) };
    }
}

/// Tells all about the capture that a stream is in.
///
/// # Safety
/// What is not null is the program's to write.
pub(in super::super) unsafe fn info(stream: &'static Stream, to: Info) -> Result<(), CudaError> {
    if to.status.is_null() {
        return Err(CudaError::INVALID_VALUE);
    }
    let capture = stream.capture();
    let status = capture.as_ref().map_or(Ok(CU_STREAM_CAPTURE_STATUS_NONE), |capture| capture.status())?;
    // SAFETY: not null, and the caller's promise.
    unsafe { to.status.write(status) };
    let Some(Capture(Part::Member(sequence, _))) = capture.as_deref() else { return Ok(()) };
    if status != CU_STREAM_CAPTURE_STATUS_ACTIVE {
        return Ok(());
    }
    // SAFETY: the caller's promise.
    unsafe { put(to.id, sequence.id) };
    // SAFETY: likewise.
    unsafe { put(to.graph, sequence.graph.handle()) };
    let mut inner = sequence.inner();
    let Some(end) = inner.ends.iter_mut().find(|end| std::ptr::eq(end.stream, stream)) else { return Ok(()) };
    let special = end.after.iter().any(|&(_, port)| port != graph::Port::default());
    if special && to.data.is_null() && !to.dependencies.is_null() {
        return Err(CudaError::LOSSY_QUERY);
    }
    end.answer = end.after.iter().map(|(node, _)| node.handle() as usize).collect();
    end.data = end.after.iter().map(|(_, port)| port.data()).collect();
    // SAFETY: the caller's promise. The list stays where it is until the stream or the program changes it.
    unsafe { put(to.dependencies, end.answer.as_ptr().cast()) };
    // SAFETY: likewise.
    unsafe { put(to.data, end.data.as_ptr()) };
    // SAFETY: likewise.
    unsafe { put(to.count, end.answer.len()) };
    Ok(())
}

/// Changes what the stream's next operation comes after.
pub(in super::super) fn update(
    stream: &'static Stream,
    after: Vec<After>,
    flags: u32,
) -> Result<(), CudaError> {
    let capture = stream.capture().ok_or(CudaError::ILLEGAL_STATE)?;
    let Part::Member(sequence, _) = &capture.0 else { return Err(CudaError::STREAM_CAPTURE_IMPLICIT) };
    sequence.check()?;
    graph::check_after(sequence.graph()?, &after)?;
    let mut inner = sequence.inner();
    let Some(end) = inner.ends.iter_mut().find(|end| std::ptr::eq(end.stream, stream)) else {
        return Err(CudaError::ILLEGAL_STATE);
    };
    match flags {
        CU_STREAM_ADD_CAPTURE_DEPENDENCIES => end.extend(&after),
        CU_STREAM_SET_CAPTURE_DEPENDENCIES => end.after = after,
        _ => return Err(CudaError::INVALID_VALUE),
    }
    Ok(())
}
