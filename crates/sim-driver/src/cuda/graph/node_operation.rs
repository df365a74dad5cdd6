//! The operation of a graph node, and its conversion from and to CUDA's structures.

use super::super::context::{self, Context};
use super::super::event::{self, Event};
use super::super::launch::LaunchShape;
use super::super::memory::{MemoryNodeParams, MemoryOp};
use super::super::module::{Function, function};
use super::graph_memory::GraphAllocation;
use super::*;
use std::collections::BTreeMap;

/// Data from the program that is only returned to it, never dereferenced.
#[derive(Clone, Copy)]
pub(in crate::cuda) struct UserData<T>(pub(in crate::cuda) T);

// SAFETY: the driver never follows the pointers; the program decides which threads use the data.
unsafe impl<T: Copy> Send for UserData<T> {}
// SAFETY: the driver never follows the pointers, so shared access does not reach the data.
unsafe impl<T: Copy> Sync for UserData<T> {}

/// A function of the program and its argument.
#[derive(Clone, Copy)]
pub(in crate::cuda) struct HostCallback {
    pub(super) function: unsafe extern "C" fn(*mut c_void),
    pub(super) argument: UserData<*mut c_void>,
}

impl HostCallback {
    pub(in crate::cuda) fn new(function: CUhostFn, argument: *mut c_void) -> Result<Self, CudaError> {
        let function = function.ok_or(CudaError::INVALID_VALUE)?;
        Ok(Self { function, argument: UserData(argument) })
    }

    pub(super) fn run(self) {
        // SAFETY: the program passed the function and the argument to be called like this.
        unsafe { (self.function)(self.argument.0) }
    }
}

/// The parameters of a kernel node.
#[derive(Clone)]
pub(in crate::cuda) struct KernelNode {
    pub(super) function: &'static Function,
    pub(super) context: &'static Context,
    pub(super) shape: LaunchShape,
    /// Whether the program named the kernel by a `CUkernel` instead of a `CUfunction`.
    pub(super) is_library_kernel: bool,
    /// Attributes that the program set. They have no effect on simulated kernels.
    pub(super) attributes: BTreeMap<u32, [u8; 64]>,
}

/// The operation of a graph node.
#[derive(Clone)]
pub(in crate::cuda) enum NodeOperation {
    Empty,
    Kernel(KernelNode),
    Copy(MemoryOp, UserData<CUDA_MEMCPY3D>, &'static Context),
    Fill(MemoryOp, CUDA_MEMSET_NODE_PARAMS, &'static Context),
    Host(HostCallback),
    /// Runs a graph that the node owns.
    Child(GraphKey),
    Record(&'static Event),
    Wait(&'static Event),
    Alloc(Arc<GraphAllocation>),
    Free(CUdeviceptr),
}

impl NodeOperation {
    pub(super) fn kind(&self) -> CUgraphNodeType {
        match self {
            NodeOperation::Empty => CU_GRAPH_NODE_TYPE_EMPTY,
            NodeOperation::Kernel(_) => CU_GRAPH_NODE_TYPE_KERNEL,
            NodeOperation::Copy(..) => CU_GRAPH_NODE_TYPE_MEMCPY,
            NodeOperation::Fill(..) => CU_GRAPH_NODE_TYPE_MEMSET,
            NodeOperation::Host(_) => CU_GRAPH_NODE_TYPE_HOST,
            NodeOperation::Child(_) => CU_GRAPH_NODE_TYPE_GRAPH,
            NodeOperation::Record(_) => CU_GRAPH_NODE_TYPE_EVENT_RECORD,
            NodeOperation::Wait(_) => CU_GRAPH_NODE_TYPE_WAIT_EVENT,
            NodeOperation::Alloc(_) => CU_GRAPH_NODE_TYPE_MEM_ALLOC,
            NodeOperation::Free(_) => CU_GRAPH_NODE_TYPE_MEM_FREE,
        }
    }

    /// Returns whether the host takes part, so that the operation cannot be merged with kernels.
    pub(super) fn needs_host(&self) -> bool {
        matches!(
            self,
            NodeOperation::Copy(..)
                | NodeOperation::Fill(..)
                | NodeOperation::Host(_)
                | NodeOperation::Record(_)
                | NodeOperation::Wait(_)
        )
    }

    /// Returns the context in which the operation runs, if it matters.
    pub(super) fn context(&self) -> Option<&'static Context> {
        match self {
            NodeOperation::Kernel(kernel) => Some(kernel.context),
            NodeOperation::Copy(_, _, context) | NodeOperation::Fill(_, _, context) => Some(context),
            NodeOperation::Record(event) => event.context(),
            _ => None,
        }
    }

    pub(super) fn kernel(params: &CUDA_KERNEL_NODE_PARAMS) -> Result<Self, CudaError> {
        let is_library_kernel = params.func.is_null();
        let handle = if is_library_kernel { params.kern.cast() } else { params.func };
        if handle.is_null() {
            return Err(CudaError::INVALID_VALUE);
        }
        let function = function(handle)?;
        let context = match (params.ctx.is_null(), function.context()) {
            (false, _) => context::resolve(params.ctx)?,
            (true, Some(own)) if !is_library_kernel => own,
            (true, _) => context::current()?,
        };
        let shape = LaunchShape {
            grid: [params.gridDimX, params.gridDimY, params.gridDimZ],
            block: [params.blockDimX, params.blockDimY, params.blockDimZ],
            shared: params.sharedMemBytes,
        };
        Self::launch(function, shape, context, is_library_kernel)
    }

    pub(in crate::cuda) fn launch(
        function: &'static Function,
        shape: LaunchShape,
        context: &'static Context,
        is_library_kernel: bool,
    ) -> Result<Self, CudaError> {
        function.prepare_launch(context)?;
        shape.check(context.device)?;
        Ok(NodeOperation::Kernel(KernelNode {
            function,
            context,
            shape,
            is_library_kernel,
            attributes: BTreeMap::new(),
        }))
    }

    pub(super) fn copy(params: &CUDA_MEMCPY3D, context: CUcontext) -> Result<Self, CudaError> {
        Ok(NodeOperation::Copy(MemoryOp::copy_3d(params)?, UserData(*params), context_or_current(context)?))
    }

    pub(super) fn fill(params: &CUDA_MEMSET_NODE_PARAMS, context: CUcontext) -> Result<Self, CudaError> {
        Ok(NodeOperation::Fill(MemoryOp::memset(params)?, *params, context_or_current(context)?))
    }

    /// Converts a captured copy or fill.
    pub(in crate::cuda) fn memory(op: MemoryOp, context: &'static Context) -> Self {
        match op.params() {
            MemoryNodeParams::Copy(params) => NodeOperation::Copy(op, UserData(params), context),
            MemoryNodeParams::Fill(params) => NodeOperation::Fill(op, params, context),
        }
    }

    pub(super) fn host(params: &CUDA_HOST_NODE_PARAMS) -> Result<Self, CudaError> {
        HostCallback::new(params.fn_, params.userData).map(NodeOperation::Host)
    }

    pub(super) fn record(event: CUevent) -> Result<Self, CudaError> {
        event::resolve(event).map(NodeOperation::Record)
    }

    pub(super) fn wait(event: CUevent) -> Result<Self, CudaError> {
        event::resolve(event).map(NodeOperation::Wait)
    }

    /// Converts generic node parameters. Returns `None` for a child graph, which the store has to clone.
    ///
    /// # Safety
    /// The union holds the member that `type_` names, and pointers in it are valid as CUDA requires.
    pub(super) unsafe fn from_node_params(params: &mut CUgraphNodeParams) -> Result<Option<Self>, CudaError> {
        let own = &mut params.params;
        match params.type_ {
            CU_GRAPH_NODE_TYPE_KERNEL => {
                // SAFETY: the caller guarantees that the union holds the member named by `type_`.
                let kernel = unsafe { own.kernel };
                Self::kernel(&CUDA_KERNEL_NODE_PARAMS {
                    func: kernel.func,
                    gridDimX: kernel.gridDimX,
                    gridDimY: kernel.gridDimY,
                    gridDimZ: kernel.gridDimZ,
                    blockDimX: kernel.blockDimX,
                    blockDimY: kernel.blockDimY,
                    blockDimZ: kernel.blockDimZ,
                    sharedMemBytes: kernel.sharedMemBytes,
                    kernelParams: kernel.kernelParams,
                    extra: kernel.extra,
                    kern: kernel.kern,
                    ctx: kernel.ctx,
                })
            }
            CU_GRAPH_NODE_TYPE_MEMCPY => {
                // SAFETY: the caller guarantees that the union holds the member named by `type_`.
                let copy = unsafe { own.memcpy };
                Self::copy(&copy.copyParams, copy.copyCtx)
            }
            CU_GRAPH_NODE_TYPE_MEMSET => {
                // SAFETY: the caller guarantees that the union holds the member named by `type_`.
                let memset = unsafe { own.memset };
                let params = CUDA_MEMSET_NODE_PARAMS {
                    dst: memset.dst,
                    pitch: memset.pitch,
                    value: memset.value,
                    elementSize: memset.elementSize,
                    width: memset.width,
                    height: memset.height,
                };
                Self::fill(&params, memset.ctx)
            }
            CU_GRAPH_NODE_TYPE_HOST => {
                // SAFETY: the caller guarantees that the union holds the member named by `type_`.
                let host = unsafe { own.host };
                HostCallback::new(host.fn_, host.userData).map(NodeOperation::Host)
            }
            CU_GRAPH_NODE_TYPE_GRAPH => return Ok(None),
            CU_GRAPH_NODE_TYPE_EMPTY => Ok(NodeOperation::Empty),
            // SAFETY: the caller guarantees that the union holds the member named by `type_`.
            CU_GRAPH_NODE_TYPE_WAIT_EVENT => Self::wait(unsafe { own.eventWait }.event),
            // SAFETY: the caller guarantees that the union holds the member named by `type_`.
            CU_GRAPH_NODE_TYPE_EVENT_RECORD => Self::record(unsafe { own.eventRecord }.event),
            CU_GRAPH_NODE_TYPE_MEM_ALLOC => {
                // SAFETY: the caller guarantees that the union holds the member named by `type_`.
                let mut alloc = unsafe { own.alloc };
                let made = GraphAllocation::new(&CUDA_MEM_ALLOC_NODE_PARAMS {
                    poolProps: alloc.poolProps,
                    accessDescs: alloc.accessDescs,
                    accessDescCount: alloc.accessDescCount,
                    bytesize: alloc.bytesize,
                    dptr: 0,
                })?;
                alloc.dptr = made.pointer();
                own.alloc = alloc;
                Ok(NodeOperation::Alloc(made))
            }
            // SAFETY: the caller guarantees that the union holds the member named by `type_`.
            CU_GRAPH_NODE_TYPE_MEM_FREE => Ok(NodeOperation::Free(unsafe { own.free }.dptr)),
            CU_GRAPH_NODE_TYPE_EXT_SEMAS_SIGNAL
            | CU_GRAPH_NODE_TYPE_EXT_SEMAS_WAIT
            | CU_GRAPH_NODE_TYPE_BATCH_MEM_OP
            | CU_GRAPH_NODE_TYPE_CONDITIONAL => Err(CudaError::NOT_SUPPORTED),
            _ => Err(CudaError::INVALID_VALUE),
        }
        .map(Some)
    }
}

impl KernelNode {
    /// Returns the node parameters as programs read them back. Kernel arguments are not kept, because kernels compute
    /// nothing.
    pub(super) fn params(&self) -> CUDA_KERNEL_NODE_PARAMS {
        let LaunchShape { grid, block, shared } = self.shape;
        let handle: CUfunction = handle_of(self.function);
        let null = std::ptr::null_mut();
        CUDA_KERNEL_NODE_PARAMS {
            func: if self.is_library_kernel { null } else { handle },
            gridDimX: grid[0],
            gridDimY: grid[1],
            gridDimZ: grid[2],
            blockDimX: block[0],
            blockDimY: block[1],
            blockDimZ: block[2],
            sharedMemBytes: shared,
            kernelParams: std::ptr::null_mut(),
            extra: std::ptr::null_mut(),
            kern: if self.is_library_kernel { handle.cast() } else { std::ptr::null_mut() },
            ctx: self.context.handle(),
        }
    }
}

/// Converts version 1 parameters to the current structure.
pub(super) fn upgrade_params(params: &CUDA_KERNEL_NODE_PARAMS_v1) -> CUDA_KERNEL_NODE_PARAMS {
    CUDA_KERNEL_NODE_PARAMS {
        func: params.func,
        gridDimX: params.gridDimX,
        gridDimY: params.gridDimY,
        gridDimZ: params.gridDimZ,
        blockDimX: params.blockDimX,
        blockDimY: params.blockDimY,
        blockDimZ: params.blockDimZ,
        sharedMemBytes: params.sharedMemBytes,
        kernelParams: params.kernelParams,
        extra: params.extra,
        kern: std::ptr::null_mut(),
        ctx: std::ptr::null_mut(),
    }
}

/// Converts parameters to version 1, which supports functions but no library kernels.
pub(super) fn downgrade_params(params: &CUDA_KERNEL_NODE_PARAMS) -> CUDA_KERNEL_NODE_PARAMS_v1 {
    CUDA_KERNEL_NODE_PARAMS_v1 {
        func: if params.func.is_null() { params.kern.cast() } else { params.func },
        gridDimX: params.gridDimX,
        gridDimY: params.gridDimY,
        gridDimZ: params.gridDimZ,
        blockDimX: params.blockDimX,
        blockDimY: params.blockDimY,
        blockDimZ: params.blockDimZ,
        sharedMemBytes: params.sharedMemBytes,
        kernelParams: params.kernelParams,
        extra: params.extra,
    }
}

/// Resolves a context handle; null means the current context.
fn context_or_current(handle: CUcontext) -> Result<&'static Context, CudaError> {
    if handle.is_null() { context::current() } else { context::resolve(handle) }
}
