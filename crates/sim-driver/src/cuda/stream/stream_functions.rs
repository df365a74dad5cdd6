//! Exported functions for streams and stream capture.

use super::super::capture::{self, CaptureInfoOutputs};
use super::super::context::write_out;
use super::super::{Library, StreamApi, event, graph};
use super::memory_ops::{self, WaitCondition};
use super::*;
use partage_driver_api::cuda::*;

/// The user data of a callback.
struct CallbackArgument(*mut c_void);

// SAFETY: the pointer is only passed back to the program, which must expect a driver thread.
unsafe impl Send for CallbackArgument {}

impl CallbackArgument {
    fn get(&self) -> *mut c_void {
        self.0
    }
}

fn create_for(stream: *mut CUstream, flags: u32, priority: i32) -> Result<(), CudaError> {
    let context = context::current()?;
    if stream.is_null() || flags & !NON_BLOCKING != 0 {
        return Err(CudaError::INVALID_VALUE);
    }
    // SAFETY: non-null, and the program passes a pointer valid for writes.
    unsafe { write_out(stream, create(context, flags, priority)?.handle()) }
}

fn destroy(handle: CUstream) -> Result<(), CudaError> {
    if handle as usize <= 2 {
        return Err(CudaError::INVALID_HANDLE);
    }
    let stream = resolve(handle)?;
    if let Some(capture) = stream.capture() {
        capture.remove_stream();
    }
    let (context, timeline) = stream.context_and_timeline();
    if !STREAMS.drop(handle) {
        return Err(CudaError::INVALID_HANDLE);
    }
    context.device.engine().close_timeline(timeline);
    Ok(())
}

impl StreamApi for Library {
    unsafe fn cuStreamCreate(stream: *mut CUstream, flags: u32) -> Result<(), CudaError> {
        create_for(stream, flags, 0)
    }

    unsafe fn cuStreamCreateWithPriority(
        stream: *mut CUstream,
        flags: u32,
        priority: i32,
    ) -> Result<(), CudaError> {
        create_for(stream, flags, priority)
    }

    unsafe fn cuStreamDestroy(stream: CUstream) -> Result<(), CudaError> {
        destroy(stream)
    }

    unsafe fn cuStreamDestroy_v2(stream: CUstream) -> Result<(), CudaError> {
        destroy(stream)
    }

    unsafe fn cuStreamQuery(stream: CUstream) -> Result<(), CudaError> {
        let stream = resolve(stream)?;
        stream.check_not_capturing()?;
        capture::check_unsafe_call()?;
        let (context, timeline) = stream.context_and_timeline();
        if context.device.engine().is_idle(timeline)? { Ok(()) } else { Err(CudaError::NOT_READY) }
    }

    unsafe fn cuStreamSynchronize(stream: CUstream) -> Result<(), CudaError> {
        let stream = resolve(stream)?;
        stream.check_not_capturing()?;
        capture::check_unsafe_call()?;
        stream.sync()
    }

    unsafe fn cuStreamWaitEvent(stream: CUstream, event: CUevent, flags: u32) -> Result<(), CudaError> {
        let (stream, event) = (resolve(stream)?, event::resolve(event)?);
        if flags & !CU_EVENT_WAIT_EXTERNAL != 0 {
            return Err(CudaError::INVALID_VALUE);
        }
        if capture::wait_event(stream, event, flags)? {
            return Ok(());
        }
        stream.submit(StreamOp::WaitEvent(event, event.ticket()))
    }

    unsafe fn cuStreamAddCallback(
        stream: CUstream,
        callback: CUstreamCallback,
        user_data: *mut c_void,
        flags: u32,
    ) -> Result<(), CudaError> {
        let stream = resolve(stream)?;
        let Some(callback) = callback else { return Err(CudaError::INVALID_VALUE) };
        if flags != 0 {
            return Err(CudaError::INVALID_VALUE);
        }
        stream.check_not_capturing()?;
        let (handle, argument) = (stream.handle() as usize, CallbackArgument(user_data));
        // SAFETY: the program passed the function to be called with these arguments.
        stream.submit(StreamOp::Callback(Box::new(move || unsafe {
            callback(handle as CUstream, CUDA_SUCCESS, argument.get())
        })))
    }

    unsafe fn cuLaunchHostFunc(
        stream: CUstream,
        function: CUhostFn,
        user_data: *mut c_void,
    ) -> Result<(), CudaError> {
        let stream = resolve(stream)?;
        let Some(call) = function else { return Err(CudaError::INVALID_VALUE) };
        if let Some(capture) = stream.capture() {
            return capture.add_host_callback(function, user_data);
        }
        let argument = CallbackArgument(user_data);
        // SAFETY: the program passed the function to be called with this argument.
        stream.submit(StreamOp::Callback(Box::new(move || unsafe { call(argument.get()) })))
    }

    unsafe fn cuStreamAttachMemAsync(
        stream: CUstream,
        _pointer: CUdeviceptr,
        _length: usize,
        flags: u32,
    ) -> Result<(), CudaError> {
        resolve(stream)?;
        // Managed memory is accessible everywhere, so its attachment has no effect.
        if flags.is_power_of_two() && flags <= 4 { Ok(()) } else { Err(CudaError::INVALID_VALUE) }
    }

    unsafe fn cuStreamGetCtx(stream: CUstream, context: *mut CUcontext) -> Result<(), CudaError> {
        // SAFETY: CUDA requires output pointers to be null or valid for writes.
        unsafe { write_out(context, resolve(stream)?.context().handle()) }
    }

    unsafe fn cuStreamGetFlags(stream: CUstream, flags: *mut u32) -> Result<(), CudaError> {
        let own = resolve(stream)?.inner().flags;
        // SAFETY: CUDA requires output pointers to be null or valid for writes.
        unsafe { write_out(flags, own) }
    }

    unsafe fn cuStreamGetPriority(stream: CUstream, priority: *mut i32) -> Result<(), CudaError> {
        let own = resolve(stream)?.inner().priority;
        // SAFETY: CUDA requires output pointers to be null or valid for writes.
        unsafe { write_out(priority, own) }
    }

    unsafe fn cuStreamGetId(stream: CUstream, stream_id: *mut u64) -> Result<(), CudaError> {
        let own = resolve(stream)?.inner().id;
        // SAFETY: CUDA requires output pointers to be null or valid for writes.
        unsafe { write_out(stream_id, own) }
    }

    unsafe fn cuStreamCopyAttributes(dst_stream: CUstream, src_stream: CUstream) -> Result<(), CudaError> {
        resolve(src_stream)?;
        resolve(dst_stream).map(|_| ())
    }

    unsafe fn cuStreamGetAttribute(
        stream: CUstream,
        attribute: CUstreamAttrID,
        value: *mut CUstreamAttrValue,
    ) -> Result<(), CudaError> {
        let stream = resolve(stream)?;
        if value.is_null() {
            return Err(CudaError::INVALID_VALUE);
        }
        // SAFETY: non-null, and the program passes a pointer valid for writes.
        unsafe { value.write(CUstreamAttrValue::default()) };
        if attribute == CU_LAUNCH_ATTRIBUTE_PRIORITY {
            let priority = stream.inner().priority;
            // SAFETY: non-null, and every member of the union starts at its beginning.
            unsafe { value.cast::<i32>().write(priority) };
        }
        Ok(())
    }

    unsafe fn cuStreamSetAttribute(
        stream: CUstream,
        _attribute: CUstreamAttrID,
        param: *const CUstreamAttrValue,
    ) -> Result<(), CudaError> {
        resolve(stream)?;
        // The attributes are cache hints, which have no effect.
        if param.is_null() { Err(CudaError::INVALID_VALUE) } else { Ok(()) }
    }

    unsafe fn cuStreamWaitValue32(
        stream: CUstream,
        _address: CUdeviceptr,
        _value: u32,
        _flags: u32,
    ) -> Result<(), CudaError> {
        memory_ops::reject_version_1(resolve(stream)?)
    }

    unsafe fn cuStreamWaitValue32_v2(
        stream: CUstream,
        address: CUdeviceptr,
        value: u32,
        flags: u32,
    ) -> Result<(), CudaError> {
        memory_ops::wait(resolve(stream)?, address, u64::from(value), WaitCondition::from_flags(flags)?, true)
    }

    unsafe fn cuStreamWaitValue64(
        stream: CUstream,
        _address: CUdeviceptr,
        _value: u64,
        _flags: u32,
    ) -> Result<(), CudaError> {
        memory_ops::reject_version_1(resolve(stream)?)
    }

    unsafe fn cuStreamWaitValue64_v2(
        stream: CUstream,
        address: CUdeviceptr,
        value: u64,
        flags: u32,
    ) -> Result<(), CudaError> {
        memory_ops::wait(resolve(stream)?, address, value, WaitCondition::from_flags(flags)?, false)
    }

    unsafe fn cuStreamWriteValue32(
        stream: CUstream,
        _address: CUdeviceptr,
        _value: u32,
        _flags: u32,
    ) -> Result<(), CudaError> {
        memory_ops::reject_version_1(resolve(stream)?)
    }

    unsafe fn cuStreamWriteValue32_v2(
        stream: CUstream,
        address: CUdeviceptr,
        value: u32,
        flags: u32,
    ) -> Result<(), CudaError> {
        memory_ops::write(resolve(stream)?, address, u64::from(value), flags, true)
    }

    unsafe fn cuStreamWriteValue64(
        stream: CUstream,
        _address: CUdeviceptr,
        _value: u64,
        _flags: u32,
    ) -> Result<(), CudaError> {
        memory_ops::reject_version_1(resolve(stream)?)
    }

    unsafe fn cuStreamWriteValue64_v2(
        stream: CUstream,
        address: CUdeviceptr,
        value: u64,
        flags: u32,
    ) -> Result<(), CudaError> {
        memory_ops::write(resolve(stream)?, address, value, flags, false)
    }

    unsafe fn cuStreamBatchMemOp(
        stream: CUstream,
        _count: u32,
        _param_array: *mut CUstreamBatchMemOpParams,
        _flags: u32,
    ) -> Result<(), CudaError> {
        memory_ops::reject_version_1(resolve(stream)?)
    }

    unsafe fn cuStreamBatchMemOp_v2(
        stream: CUstream,
        count: u32,
        param_array: *mut CUstreamBatchMemOpParams,
        flags: u32,
    ) -> Result<(), CudaError> {
        // SAFETY: CUDA requires arrays of the stated length.
        unsafe { memory_ops::batch(resolve(stream)?, count, param_array, flags) }
    }

    unsafe fn cuStreamBeginCapture(stream: CUstream) -> Result<(), CudaError> {
        capture::begin(resolve(stream)?, CU_STREAM_CAPTURE_MODE_GLOBAL, None)
    }

    unsafe fn cuStreamBeginCapture_v2(stream: CUstream, mode: CUstreamCaptureMode) -> Result<(), CudaError> {
        capture::begin(resolve(stream)?, mode, None)
    }

    unsafe fn cuStreamBeginCaptureToGraph(
        stream: CUstream,
        graph: CUgraph,
        dependencies: *const CUgraphNode,
        dependency_data: *const CUgraphEdgeData,
        num_dependencies: usize,
        mode: CUstreamCaptureMode,
    ) -> Result<(), CudaError> {
        let (stream, graph) = (resolve(stream)?, graph::key(graph)?);
        // SAFETY: CUDA requires arrays of the stated length.
        let after = unsafe { graph::read_dependencies(dependencies, dependency_data, num_dependencies) }?;
        capture::begin(stream, mode, Some((graph, after)))
    }

    unsafe fn cuStreamEndCapture(stream: CUstream, graph: *mut CUgraph) -> Result<(), CudaError> {
        let stream = resolve(stream)?;
        if graph.is_null() {
            return Err(CudaError::INVALID_VALUE);
        }
        let ended = capture::end(stream);
        // SAFETY: non-null, and the program passes a pointer valid for writes.
        unsafe { graph.write(ended.unwrap_or(std::ptr::null_mut())) };
        ended.map(|_| ())
    }

    unsafe fn cuStreamIsCapturing(
        stream: CUstream,
        capture_status: *mut CUstreamCaptureStatus,
    ) -> Result<(), CudaError> {
        let status = match resolve(stream)?.capture() {
            Some(capture) => capture.status()?,
            None => CU_STREAM_CAPTURE_STATUS_NONE,
        };
        // SAFETY: CUDA requires output pointers to be null or valid for writes.
        unsafe { write_out(capture_status, status) }
    }

    unsafe fn cuStreamGetCaptureInfo(
        stream: CUstream,
        capture_status_out: *mut CUstreamCaptureStatus,
        id_out: *mut u64,
    ) -> Result<(), CudaError> {
        let to = CaptureInfoOutputs { id: id_out, ..CaptureInfoOutputs::status(capture_status_out) };
        // SAFETY: CUDA requires output pointers to be null or valid for writes.
        unsafe { capture::write_capture_info(resolve(stream)?, to) }
    }

    unsafe fn cuStreamGetCaptureInfo_v2(
        stream: CUstream,
        capture_status_out: *mut CUstreamCaptureStatus,
        id_out: *mut u64,
        graph_out: *mut CUgraph,
        dependencies_out: *mut *const CUgraphNode,
        num_dependencies_out: *mut usize,
    ) -> Result<(), CudaError> {
        // SAFETY: this function's contract requires the same of its caller, and the arguments are passed on unchanged.
        unsafe {
            Self::cuStreamGetCaptureInfo_v3(
                stream,
                capture_status_out,
                id_out,
                graph_out,
                dependencies_out,
                std::ptr::null_mut(),
                num_dependencies_out,
            )
        }
    }

    unsafe fn cuStreamGetCaptureInfo_v3(
        stream: CUstream,
        capture_status_out: *mut CUstreamCaptureStatus,
        id_out: *mut u64,
        graph_out: *mut CUgraph,
        dependencies_out: *mut *const CUgraphNode,
        edge_data_out: *mut *const CUgraphEdgeData,
        num_dependencies_out: *mut usize,
    ) -> Result<(), CudaError> {
        let to = CaptureInfoOutputs {
            id: id_out,
            graph: graph_out,
            dependencies: dependencies_out,
            data: edge_data_out,
            count: num_dependencies_out,
            ..CaptureInfoOutputs::status(capture_status_out)
        };
        // SAFETY: CUDA requires output pointers to be null or valid for writes.
        unsafe { capture::write_capture_info(resolve(stream)?, to) }
    }

    unsafe fn cuStreamUpdateCaptureDependencies(
        stream: CUstream,
        dependencies: *mut CUgraphNode,
        num_dependencies: usize,
        flags: u32,
    ) -> Result<(), CudaError> {
        let no_data = std::ptr::null();
        // SAFETY: this function's contract requires the same of its caller, and the arguments are passed on unchanged.
        unsafe {
            Self::cuStreamUpdateCaptureDependencies_v2(stream, dependencies, no_data, num_dependencies, flags)
        }
    }

    unsafe fn cuStreamUpdateCaptureDependencies_v2(
        stream: CUstream,
        dependencies: *mut CUgraphNode,
        dependency_data: *const CUgraphEdgeData,
        num_dependencies: usize,
        flags: u32,
    ) -> Result<(), CudaError> {
        let stream = resolve(stream)?;
        // SAFETY: CUDA requires arrays of the stated length.
        let after = unsafe { graph::read_dependencies(dependencies, dependency_data, num_dependencies) }?;
        capture::update_dependencies(stream, after, flags)
    }

    unsafe fn cuThreadExchangeStreamCaptureMode(mode: *mut CUstreamCaptureMode) -> Result<(), CudaError> {
        session()?;
        if mode.is_null() {
            return Err(CudaError::INVALID_VALUE);
        }
        // SAFETY: non-null, and the program passes a pointer valid for reads and writes.
        let before = capture::exchange_mode(unsafe { mode.read() })?;
        // SAFETY: CUDA requires output pointers to be null or valid for writes.
        unsafe { write_out(mode, before) }
    }
}
