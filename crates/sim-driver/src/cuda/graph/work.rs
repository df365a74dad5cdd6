//! What a node does, from and to the driver's structures.

use super::super::context::{self, Context};
use super::super::event::{self, Event};
use super::super::launch::Shape;
use super::super::memory::{MemoryOp, Params};
use super::super::module::{Function, function};
use super::memory::Allocation;
use super::*;
use std::collections::BTreeMap;

/// Something of the program's that is only handed back to it.
#[derive(Clone, Copy)]
pub(in crate::cuda) struct Foreign<T>(pub(in crate::cuda) T);

// SAFETY: nobody here looks at what its pointers lead to; the program knows from which thread it may.
unsafe impl<T: Copy> Send for Foreign<T> {}
// SAFETY: likewise.
unsafe impl<T: Copy> Sync for Foreign<T> {}

/// A function of the program and what it is called with.
#[derive(Clone, Copy)]
pub(in crate::cuda) struct Call {
    pub(super) function: unsafe extern "C" fn(*mut c_void),
    pub(super) argument: Foreign<*mut c_void>,
}

impl Call {
    pub(in crate::cuda) fn new(function: CUhostFn, argument: *mut c_void) -> Result<Self, CudaError> {
        let function = function.ok_or(CudaError::INVALID_VALUE)?;
        Ok(Self { function, argument: Foreign(argument) })
    }

    pub(super) fn run(self) {
        // SAFETY: the program gave both for this.
        unsafe { (self.function)(self.argument.0) }
    }
}

/// A launch as a node.
#[derive(Clone)]
pub(in crate::cuda) struct Kernel {
    pub(super) function: &'static Function,
    pub(super) context: &'static Context,
    pub(super) shape: Shape,
    /// Whether the program named it by a kernel of a library.
    pub(super) by_kernel: bool,
    /// What the program set; kernels here heed none of it.
    pub(super) attributes: BTreeMap<u32, [u8; 64]>,
}

/// What a node does.
#[derive(Clone)]
pub(in crate::cuda) enum Work {
    Empty,
    Kernel(Kernel),
    Copy(MemoryOp, Foreign<CUDA_MEMCPY3D>, &'static Context),
    Fill(MemoryOp, CUDA_MEMSET_NODE_PARAMS, &'static Context),
    Host(Call),
    /// All of a graph that is the node's own.
    Child(GraphKey),
    Record(&'static Event),
    Wait(&'static Event),
    Alloc(Arc<Allocation>),
    Free(CUdeviceptr),
}

impl Work {
    pub(super) fn kind(&self) -> CUgraphNodeType {
        match self {
            Work::Empty => CU_GRAPH_NODE_TYPE_EMPTY,
            Work::Kernel(_) => CU_GRAPH_NODE_TYPE_KERNEL,
            Work::Copy(..) => CU_GRAPH_NODE_TYPE_MEMCPY,
            Work::Fill(..) => CU_GRAPH_NODE_TYPE_MEMSET,
            Work::Host(_) => CU_GRAPH_NODE_TYPE_HOST,
            Work::Child(_) => CU_GRAPH_NODE_TYPE_GRAPH,
            Work::Record(_) => CU_GRAPH_NODE_TYPE_EVENT_RECORD,
            Work::Wait(_) => CU_GRAPH_NODE_TYPE_WAIT_EVENT,
            Work::Alloc(_) => CU_GRAPH_NODE_TYPE_MEM_ALLOC,
            Work::Free(_) => CU_GRAPH_NODE_TYPE_MEM_FREE,
        }
    }

    /// Whether the host has a part in it, so that it cannot be placed together with kernels.
    pub(super) fn is_of_host(&self) -> bool {
        matches!(self, Work::Copy(..) | Work::Fill(..) | Work::Host(_) | Work::Record(_) | Work::Wait(_))
    }

    /// The context it is done in, where that matters.
    pub(super) fn context(&self) -> Option<&'static Context> {
        match self {
            Work::Kernel(kernel) => Some(kernel.context),
            Work::Copy(_, _, context) | Work::Fill(_, _, context) => Some(context),
            Work::Record(event) => event.context(),
            _ => None,
        }
    }

    pub(super) fn kernel(params: &CUDA_KERNEL_NODE_PARAMS) -> Result<Self, CudaError> {
        let by_kernel = params.func.is_null();
        let handle = if by_kernel { params.kern.cast() } else { params.func };
        if handle.is_null() {
            return Err(CudaError::INVALID_VALUE);
        }
        let function = function(handle)?;
        let context = match (params.ctx.is_null(), function.context()) {
            (false, _) => context::resolve(params.ctx)?,
            (true, Some(own)) if !by_kernel => own,
            (true, _) => context::current()?,
        };
        let shape = Shape {
            grid: [params.gridDimX, params.gridDimY, params.gridDimZ],
            block: [params.blockDimX, params.blockDimY, params.blockDimZ],
            shared: params.sharedMemBytes,
        };
        Self::launch(function, shape, context, by_kernel)
    }

    pub(in crate::cuda) fn launch(
        function: &'static Function,
        shape: Shape,
        context: &'static Context,
        by_kernel: bool,
    ) -> Result<Self, CudaError> {
        function.enter(context)?;
        shape.check(context.device)?;
        Ok(Work::Kernel(Kernel { function, context, shape, by_kernel, attributes: BTreeMap::new() }))
    }

    pub(super) fn copy(params: &CUDA_MEMCPY3D, context: CUcontext) -> Result<Self, CudaError> {
        Ok(Work::Copy(MemoryOp::copy_3d(params)?, Foreign(*params), given(context)?))
    }

    pub(super) fn fill(params: &CUDA_MEMSET_NODE_PARAMS, context: CUcontext) -> Result<Self, CudaError> {
        Ok(Work::Fill(MemoryOp::memset(params)?, *params, given(context)?))
    }

    /// A captured copy or fill.
    pub(in crate::cuda) fn memory(op: MemoryOp, context: &'static Context) -> Self {
        match op.params() {
            Params::Copy(params) => Work::Copy(op, Foreign(params), context),
            Params::Fill(params) => Work::Fill(op, params, context),
        }
    }

    pub(super) fn host(params: &CUDA_HOST_NODE_PARAMS) -> Result<Self, CudaError> {
        Call::new(params.fn_, params.userData).map(Work::Host)
    }

    pub(super) fn record(event: CUevent) -> Result<Self, CudaError> {
        event::resolve(event).map(Work::Record)
    }

    pub(super) fn wait(event: CUevent) -> Result<Self, CudaError> {
        event::resolve(event).map(Work::Wait)
    }

    /// What the structure for nodes of any kind says; nothing for a child graph, which the book has to copy.
    ///
    /// # Safety
    /// The structure is as its kind says, and so is what it leads to.
    pub(super) unsafe fn of(params: &mut CUgraphNodeParams) -> Result<Option<Self>, CudaError> {
        let own = &mut params.params;
        match params.type_ {
            CU_GRAPH_NODE_TYPE_KERNEL => {
                // SAFETY: of that kind, the caller says.
                let k = unsafe { own.kernel };
                Self::kernel(&CUDA_KERNEL_NODE_PARAMS {
                    func: k.func,
                    gridDimX: k.gridDimX,
                    gridDimY: k.gridDimY,
                    gridDimZ: k.gridDimZ,
                    blockDimX: k.blockDimX,
                    blockDimY: k.blockDimY,
                    blockDimZ: k.blockDimZ,
                    sharedMemBytes: k.sharedMemBytes,
                    kernelParams: k.kernelParams,
                    extra: k.extra,
                    kern: k.kern,
                    ctx: k.ctx,
                })
            }
            CU_GRAPH_NODE_TYPE_MEMCPY => {
                // SAFETY: likewise.
                let copy = unsafe { own.memcpy };
                Self::copy(&copy.copyParams, copy.copyCtx)
            }
            CU_GRAPH_NODE_TYPE_MEMSET => {
                // SAFETY: likewise.
                let m = unsafe { own.memset };
                let params = CUDA_MEMSET_NODE_PARAMS {
                    dst: m.dst,
                    pitch: m.pitch,
                    value: m.value,
                    elementSize: m.elementSize,
                    width: m.width,
                    height: m.height,
                };
                Self::fill(&params, m.ctx)
            }
            CU_GRAPH_NODE_TYPE_HOST => {
                // SAFETY: likewise.
                let host = unsafe { own.host };
                Call::new(host.fn_, host.userData).map(Work::Host)
            }
            CU_GRAPH_NODE_TYPE_GRAPH => return Ok(None),
            CU_GRAPH_NODE_TYPE_EMPTY => Ok(Work::Empty),
            // SAFETY: likewise.
            CU_GRAPH_NODE_TYPE_WAIT_EVENT => Self::wait(unsafe { own.eventWait }.event),
            // SAFETY: likewise.
            CU_GRAPH_NODE_TYPE_EVENT_RECORD => Self::record(unsafe { own.eventRecord }.event),
            CU_GRAPH_NODE_TYPE_MEM_ALLOC => {
                // SAFETY: likewise.
                let mut a = unsafe { own.alloc };
                let made = Allocation::new(&CUDA_MEM_ALLOC_NODE_PARAMS {
                    poolProps: a.poolProps,
                    accessDescs: a.accessDescs,
                    accessDescCount: a.accessDescCount,
                    bytesize: a.bytesize,
                    dptr: 0,
                })?;
                a.dptr = made.pointer();
                own.alloc = a;
                Ok(Work::Alloc(made))
            }
            // SAFETY: likewise.
            CU_GRAPH_NODE_TYPE_MEM_FREE => Ok(Work::Free(unsafe { own.free }.dptr)),
            CU_GRAPH_NODE_TYPE_EXT_SEMAS_SIGNAL
            | CU_GRAPH_NODE_TYPE_EXT_SEMAS_WAIT
            | CU_GRAPH_NODE_TYPE_BATCH_MEM_OP
            | CU_GRAPH_NODE_TYPE_CONDITIONAL => Err(CudaError::NOT_SUPPORTED),
            _ => Err(CudaError::INVALID_VALUE),
        }
        .map(Some)
    }
}

impl Kernel {
    /// As programs read it back. Arguments are not kept: nothing is computed with them.
    pub(super) fn params(&self) -> CUDA_KERNEL_NODE_PARAMS {
        let Shape { grid, block, shared } = self.shape;
        let handle: CUfunction = handle_of(self.function);
        let nothing = std::ptr::null_mut();
        CUDA_KERNEL_NODE_PARAMS {
            func: if self.by_kernel { nothing } else { handle },
            gridDimX: grid[0],
            gridDimY: grid[1],
            gridDimZ: grid[2],
            blockDimX: block[0],
            blockDimY: block[1],
            blockDimZ: block[2],
            sharedMemBytes: shared,
            kernelParams: std::ptr::null_mut(),
            extra: std::ptr::null_mut(),
            kern: if self.by_kernel { handle.cast() } else { std::ptr::null_mut() },
            ctx: self.context.handle(),
        }
    }
}

/// The older structure says less.
pub(super) fn newer(params: &CUDA_KERNEL_NODE_PARAMS_v1) -> CUDA_KERNEL_NODE_PARAMS {
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

/// And knows functions only.
pub(super) fn older(params: &CUDA_KERNEL_NODE_PARAMS) -> CUDA_KERNEL_NODE_PARAMS_v1 {
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

/// The context that was named, else the calling thread's.
fn given(handle: CUcontext) -> Result<&'static Context, CudaError> {
    if handle.is_null() { context::current() } else { context::resolve(handle) }
}
