//! Queries about a capture, and changes to its dependencies.

use super::*;

/// Output pointers of a capture query; each except `status` may be null.
pub(in super::super) struct CaptureInfoOutputs {
    pub(in super::super) status: *mut CUstreamCaptureStatus,
    pub(in super::super) id: *mut u64,
    pub(in super::super) graph: *mut CUgraph,
    pub(in super::super) dependencies: *mut *const CUgraphNode,
    pub(in super::super) data: *mut *const CUgraphEdgeData,
    pub(in super::super) count: *mut usize,
}

impl CaptureInfoOutputs {
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

/// Writes an output unless its pointer is null.
///
/// # Safety
/// `to` is null or valid for writes.
unsafe fn write_optional<T>(to: *mut T, value: T) {
    if !to.is_null() {
        // SAFETY: non-null, and the caller guarantees that it is valid for writes.
        unsafe { to.write(value) };
    }
}

/// Writes the properties of the capture that a stream takes part in.
///
/// # Safety
/// Each pointer is null or valid for writes.
pub(in super::super) unsafe fn write_capture_info(
    stream: &'static Stream,
    to: CaptureInfoOutputs,
) -> Result<(), CudaError> {
    if to.status.is_null() {
        return Err(CudaError::INVALID_VALUE);
    }
    let capture = stream.capture();
    let status = capture.as_ref().map_or(Ok(CU_STREAM_CAPTURE_STATUS_NONE), |capture| capture.status())?;
    // SAFETY: non-null, and the caller guarantees that it is valid for writes.
    unsafe { to.status.write(status) };
    let Some(Capture(CaptureRole::Member(sequence, _))) = capture.as_deref() else { return Ok(()) };
    if status != CU_STREAM_CAPTURE_STATUS_ACTIVE {
        return Ok(());
    }
    // SAFETY: the caller guarantees that the pointer is null or valid for writes.
    unsafe { write_optional(to.id, sequence.id) };
    // SAFETY: the caller guarantees that the pointer is null or valid for writes.
    unsafe { write_optional(to.graph, sequence.graph.handle()) };
    let mut inner = sequence.inner();
    let Some(end) = inner.ends.iter_mut().find(|end| std::ptr::eq(end.stream, stream)) else { return Ok(()) };
    let special = end.dependencies.iter().any(|&(_, port)| port != graph::EdgePort::default());
    if special && to.data.is_null() && !to.dependencies.is_null() {
        return Err(CudaError::LOSSY_QUERY);
    }
    end.reported_nodes = end.dependencies.iter().map(|(node, _)| node.handle() as usize).collect();
    end.reported_data = end.dependencies.iter().map(|(_, port)| port.data()).collect();
    // SAFETY: the pointer is null or valid for writes. The list stays in place until the next query or capture
    // change.
    unsafe { write_optional(to.dependencies, end.reported_nodes.as_ptr().cast()) };
    // SAFETY: the pointer is null or valid for writes. The list stays in place until the next query or capture
    // change.
    unsafe { write_optional(to.data, end.reported_data.as_ptr()) };
    // SAFETY: the caller guarantees that the pointer is null or valid for writes.
    unsafe { write_optional(to.count, end.reported_nodes.len()) };
    Ok(())
}

/// Changes the dependencies of the stream's next operation.
pub(in super::super) fn update_dependencies(
    stream: &'static Stream,
    dependencies: Vec<Dependency>,
    flags: u32,
) -> Result<(), CudaError> {
    let capture = stream.capture().ok_or(CudaError::ILLEGAL_STATE)?;
    let CaptureRole::Member(sequence, _) = &capture.0 else { return Err(CudaError::STREAM_CAPTURE_IMPLICIT) };
    sequence.check()?;
    graph::check_dependencies(sequence.graph()?, &dependencies)?;
    let mut inner = sequence.inner();
    let Some(end) = inner.ends.iter_mut().find(|end| std::ptr::eq(end.stream, stream)) else {
        return Err(CudaError::ILLEGAL_STATE);
    };
    match flags {
        CU_STREAM_ADD_CAPTURE_DEPENDENCIES => end.extend(&dependencies),
        CU_STREAM_SET_CAPTURE_DEPENDENCIES => end.dependencies = dependencies,
        _ => return Err(CudaError::INVALID_VALUE),
    }
    Ok(())
}
