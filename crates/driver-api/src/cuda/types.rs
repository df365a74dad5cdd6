//! Handles, callbacks and structures of the CUDA driver interface, under their C names.

use super::values::*;
use core::ffi::{c_char, c_void};

opaque! {
    CUarray_st,
    CUasyncCallbackEntry_st,
    CUctx_st,
    CUdevResourceDesc_st,
    CUeglStreamConnection_st,
    CUevent_st,
    CUextMemory_st,
    CUextSemaphore_st,
    CUfunc_st,
    CUgraphDeviceUpdatableNode_st,
    CUgraphExec_st,
    CUgraphNode_st,
    CUgraph_st,
    CUgraphicsResource_st,
    CUgreenCtx_st,
    CUkern_st,
    CUlib_st,
    CUlinkState_st,
    CUmemPoolHandle_st,
    CUmipmappedArray_st,
    CUmod_st,
    CUstream_st,
    CUsurfref_st,
    CUtexref_st,
    CUuserObject_st,
}

pub type CUDA_ARRAY3D_DESCRIPTOR = CUDA_ARRAY3D_DESCRIPTOR_v2;
pub type CUDA_ARRAY_DESCRIPTOR = CUDA_ARRAY_DESCRIPTOR_v2;
pub type CUDA_ARRAY_MEMORY_REQUIREMENTS = CUDA_ARRAY_MEMORY_REQUIREMENTS_v1;
pub type CUDA_ARRAY_SPARSE_PROPERTIES = CUDA_ARRAY_SPARSE_PROPERTIES_v1;
pub type CUDA_BATCH_MEM_OP_NODE_PARAMS = CUDA_BATCH_MEM_OP_NODE_PARAMS_v1;
pub type CUDA_EXTERNAL_MEMORY_BUFFER_DESC = CUDA_EXTERNAL_MEMORY_BUFFER_DESC_v1;
pub type CUDA_EXTERNAL_MEMORY_HANDLE_DESC = CUDA_EXTERNAL_MEMORY_HANDLE_DESC_v1;
pub type CUDA_EXTERNAL_MEMORY_MIPMAPPED_ARRAY_DESC = CUDA_EXTERNAL_MEMORY_MIPMAPPED_ARRAY_DESC_v1;
pub type CUDA_EXTERNAL_SEMAPHORE_HANDLE_DESC = CUDA_EXTERNAL_SEMAPHORE_HANDLE_DESC_v1;
pub type CUDA_EXTERNAL_SEMAPHORE_SIGNAL_PARAMS = CUDA_EXTERNAL_SEMAPHORE_SIGNAL_PARAMS_v1;
pub type CUDA_EXTERNAL_SEMAPHORE_WAIT_PARAMS = CUDA_EXTERNAL_SEMAPHORE_WAIT_PARAMS_v1;
pub type CUDA_EXT_SEM_SIGNAL_NODE_PARAMS = CUDA_EXT_SEM_SIGNAL_NODE_PARAMS_v1;
pub type CUDA_EXT_SEM_WAIT_NODE_PARAMS = CUDA_EXT_SEM_WAIT_NODE_PARAMS_v1;
pub type CUDA_HOST_NODE_PARAMS = CUDA_HOST_NODE_PARAMS_v1;
pub type CUDA_KERNEL_NODE_PARAMS = CUDA_KERNEL_NODE_PARAMS_v2;
pub type CUDA_LAUNCH_PARAMS = CUDA_LAUNCH_PARAMS_v1;
pub type CUDA_MEMCPY2D = CUDA_MEMCPY2D_v2;
pub type CUDA_MEMCPY3D = CUDA_MEMCPY3D_v2;
pub type CUDA_MEMCPY3D_PEER = CUDA_MEMCPY3D_PEER_v1;
pub type CUDA_MEMSET_NODE_PARAMS = CUDA_MEMSET_NODE_PARAMS_v1;
pub type CUDA_MEM_ALLOC_NODE_PARAMS = CUDA_MEM_ALLOC_NODE_PARAMS_v1;
pub type CUDA_RESOURCE_DESC = CUDA_RESOURCE_DESC_v1;
pub type CUDA_RESOURCE_VIEW_DESC = CUDA_RESOURCE_VIEW_DESC_v1;
pub type CUDA_TEXTURE_DESC = CUDA_TEXTURE_DESC_v1;
pub type CUaccessPolicyWindow = CUaccessPolicyWindow_v1;
pub type CUarray = *mut CUarray_st;
pub type CUarrayMapInfo = CUarrayMapInfo_v1;
pub type CUasyncCallback =
    Option<unsafe extern "C" fn(*mut CUasyncNotificationInfo, *mut c_void, CUasyncCallbackHandle)>;
pub type CUasyncCallbackHandle = *mut CUasyncCallbackEntry_st;
pub type CUcontext = *mut CUctx_st;
pub type CUdevResource = CUdevResource_v1;
pub type CUdevResourceDesc = *mut CUdevResourceDesc_st;
pub type CUdevice = CUdevice_v1;
pub type CUdevice_v1 = i32;
pub type CUdeviceptr = CUdeviceptr_v2;
pub type CUdeviceptr_v1 = u32;
pub type CUdeviceptr_v2 = u64;
pub type CUdevprop = CUdevprop_v1;
pub type CUeglFrame = CUeglFrame_v1;
pub type CUeglStreamConnection = *mut CUeglStreamConnection_st;
pub type CUevent = *mut CUevent_st;
pub type CUexecAffinityParam = CUexecAffinityParam_v1;
pub type CUexecAffinitySmCount = CUexecAffinitySmCount_v1;
pub type CUexternalMemory = *mut CUextMemory_st;
pub type CUexternalSemaphore = *mut CUextSemaphore_st;
pub type CUfunction = *mut CUfunc_st;
pub type CUgraph = *mut CUgraph_st;
pub type CUgraphConditionalHandle = u64;
pub type CUgraphDeviceNode = *mut CUgraphDeviceUpdatableNode_st;
pub type CUgraphExec = *mut CUgraphExec_st;
pub type CUgraphExecUpdateResultInfo = CUgraphExecUpdateResultInfo_v1;
pub type CUgraphNode = *mut CUgraphNode_st;
pub type CUgraphicsResource = *mut CUgraphicsResource_st;
pub type CUgreenCtx = *mut CUgreenCtx_st;
pub type CUhostFn = Option<unsafe extern "C" fn(*mut c_void)>;
pub type CUipcEventHandle = CUipcEventHandle_v1;
pub type CUipcMemHandle = CUipcMemHandle_v1;
pub type CUkernel = *mut CUkern_st;
pub type CUkernelNodeAttrID = CUlaunchAttributeID;
pub type CUkernelNodeAttrValue = CUkernelNodeAttrValue_v1;
pub type CUkernelNodeAttrValue_v1 = CUlaunchAttributeValue;
pub type CUlibrary = *mut CUlib_st;
pub type CUlinkState = *mut CUlinkState_st;
pub type CUmemAccessDesc = CUmemAccessDesc_v1;
pub type CUmemAllocationProp = CUmemAllocationProp_v1;
pub type CUmemFabricHandle = CUmemFabricHandle_v1;
pub type CUmemGenericAllocationHandle = CUmemGenericAllocationHandle_v1;
pub type CUmemGenericAllocationHandle_v1 = u64;
pub type CUmemLocation = CUmemLocation_v1;
pub type CUmemPoolProps = CUmemPoolProps_v1;
pub type CUmemPoolPtrExportData = CUmemPoolPtrExportData_v1;
pub type CUmemoryPool = *mut CUmemPoolHandle_st;
pub type CUmipmappedArray = *mut CUmipmappedArray_st;
pub type CUmodule = *mut CUmod_st;
pub type CUmulticastObjectProp = CUmulticastObjectProp_v1;
pub type CUoccupancyB2DSize = Option<unsafe extern "C" fn(i32) -> usize>;
pub type CUstream = *mut CUstream_st;
pub type CUstreamAttrID = CUlaunchAttributeID;
pub type CUstreamAttrValue = CUstreamAttrValue_v1;
pub type CUstreamAttrValue_v1 = CUlaunchAttributeValue;
pub type CUstreamBatchMemOpParams = CUstreamBatchMemOpParams_v1;
pub type CUstreamCallback = Option<unsafe extern "C" fn(CUstream, CUresult, *mut c_void)>;
pub type CUsurfObject = CUsurfObject_v1;
pub type CUsurfObject_v1 = u64;
pub type CUsurfref = *mut CUsurfref_st;
pub type CUtexObject = CUtexObject_v1;
pub type CUtexObject_v1 = u64;
pub type CUtexref = *mut CUtexref_st;
pub type CUuserObject = *mut CUuserObject_st;
pub type EGLImageKHR = *mut c_void;
pub type EGLStreamKHR = *mut c_void;
pub type EGLint = i32;
pub type GLenum = u32;
pub type GLuint = u32;
pub type VdpDevice = u32;
pub type VdpOutputSurface = u32;
pub type VdpVideoSurface = u32;

c_types! {
    pub struct CUuuid {
        pub bytes: [c_char; 16],
    }

    pub struct CUdevprop_v1 {
        pub maxThreadsPerBlock: i32,
        pub maxThreadsDim: [i32; 3],
        pub maxGridSize: [i32; 3],
        pub sharedMemPerBlock: i32,
        pub totalConstantMemory: i32,
        pub SIMDWidth: i32,
        pub memPitch: i32,
        pub regsPerBlock: i32,
        pub clockRate: i32,
        pub textureAlign: i32,
    }

    pub struct CUasyncNotificationInfo_info_overBudget {
        pub bytesOverBudget: u64,
    }

    pub union CUasyncNotificationInfo_info {
        pub overBudget: CUasyncNotificationInfo_info_overBudget,
    }

    pub struct CUasyncNotificationInfo {
        pub type_: CUasyncNotificationType,
        pub info: CUasyncNotificationInfo_info,
    }

    pub struct CUexecAffinitySmCount_v1 {
        pub val: u32,
    }

    pub union CUexecAffinityParam_v1_param {
        pub smCount: CUexecAffinitySmCount,
    }

    pub struct CUexecAffinityParam_v1 {
        pub type_: CUexecAffinityType,
        pub param: CUexecAffinityParam_v1_param,
    }

    pub struct CUdevSmResource {
        pub smCount: u32,
    }

    pub union CUdevResource_v1_resource {
        pub sm: CUdevSmResource,
        pub _oversize: [u8; 48],
    }

    pub struct CUdevResource_v1 {
        pub type_: CUdevResourceType,
        pub _internal_padding: [u8; 92],
        pub resource: CUdevResource_v1_resource,
    }

    pub struct CUDA_ARRAY_DESCRIPTOR_v1 {
        pub Width: u32,
        pub Height: u32,
        pub Format: CUarray_format,
        pub NumChannels: u32,
    }

    pub struct CUDA_ARRAY_DESCRIPTOR_v2 {
        pub Width: usize,
        pub Height: usize,
        pub Format: CUarray_format,
        pub NumChannels: u32,
    }

    pub struct CUmemLocation_v1 {
        pub type_: CUmemLocationType,
        pub id: i32,
    }

    pub struct CUDA_MEMCPY2D_v1 {
        pub srcXInBytes: u32,
        pub srcY: u32,
        pub srcMemoryType: CUmemorytype,
        pub srcHost: *const c_void,
        pub srcDevice: CUdeviceptr_v1,
        pub srcArray: CUarray,
        pub srcPitch: u32,
        pub dstXInBytes: u32,
        pub dstY: u32,
        pub dstMemoryType: CUmemorytype,
        pub dstHost: *mut c_void,
        pub dstDevice: CUdeviceptr_v1,
        pub dstArray: CUarray,
        pub dstPitch: u32,
        pub WidthInBytes: u32,
        pub Height: u32,
    }

    pub struct CUDA_MEMCPY2D_v2 {
        pub srcXInBytes: usize,
        pub srcY: usize,
        pub srcMemoryType: CUmemorytype,
        pub srcHost: *const c_void,
        pub srcDevice: CUdeviceptr,
        pub srcArray: CUarray,
        pub srcPitch: usize,
        pub dstXInBytes: usize,
        pub dstY: usize,
        pub dstMemoryType: CUmemorytype,
        pub dstHost: *mut c_void,
        pub dstDevice: CUdeviceptr,
        pub dstArray: CUarray,
        pub dstPitch: usize,
        pub WidthInBytes: usize,
        pub Height: usize,
    }

    pub struct CUDA_MEMCPY3D_v1 {
        pub srcXInBytes: u32,
        pub srcY: u32,
        pub srcZ: u32,
        pub srcLOD: u32,
        pub srcMemoryType: CUmemorytype,
        pub srcHost: *const c_void,
        pub srcDevice: CUdeviceptr_v1,
        pub srcArray: CUarray,
        pub reserved0: *mut c_void,
        pub srcPitch: u32,
        pub srcHeight: u32,
        pub dstXInBytes: u32,
        pub dstY: u32,
        pub dstZ: u32,
        pub dstLOD: u32,
        pub dstMemoryType: CUmemorytype,
        pub dstHost: *mut c_void,
        pub dstDevice: CUdeviceptr_v1,
        pub dstArray: CUarray,
        pub reserved1: *mut c_void,
        pub dstPitch: u32,
        pub dstHeight: u32,
        pub WidthInBytes: u32,
        pub Height: u32,
        pub Depth: u32,
    }

    pub struct CUDA_MEMCPY3D_v2 {
        pub srcXInBytes: usize,
        pub srcY: usize,
        pub srcZ: usize,
        pub srcLOD: usize,
        pub srcMemoryType: CUmemorytype,
        pub srcHost: *const c_void,
        pub srcDevice: CUdeviceptr,
        pub srcArray: CUarray,
        pub reserved0: *mut c_void,
        pub srcPitch: usize,
        pub srcHeight: usize,
        pub dstXInBytes: usize,
        pub dstY: usize,
        pub dstZ: usize,
        pub dstLOD: usize,
        pub dstMemoryType: CUmemorytype,
        pub dstHost: *mut c_void,
        pub dstDevice: CUdeviceptr,
        pub dstArray: CUarray,
        pub reserved1: *mut c_void,
        pub dstPitch: usize,
        pub dstHeight: usize,
        pub WidthInBytes: usize,
        pub Height: usize,
        pub Depth: usize,
    }

    pub struct CUDA_MEMCPY3D_PEER_v1 {
        pub srcXInBytes: usize,
        pub srcY: usize,
        pub srcZ: usize,
        pub srcLOD: usize,
        pub srcMemoryType: CUmemorytype,
        pub srcHost: *const c_void,
        pub srcDevice: CUdeviceptr,
        pub srcArray: CUarray,
        pub srcContext: CUcontext,
        pub srcPitch: usize,
        pub srcHeight: usize,
        pub dstXInBytes: usize,
        pub dstY: usize,
        pub dstZ: usize,
        pub dstLOD: usize,
        pub dstMemoryType: CUmemorytype,
        pub dstHost: *mut c_void,
        pub dstDevice: CUdeviceptr,
        pub dstArray: CUarray,
        pub dstContext: CUcontext,
        pub dstPitch: usize,
        pub dstHeight: usize,
        pub WidthInBytes: usize,
        pub Height: usize,
        pub Depth: usize,
    }

    pub struct CUmemPoolProps_v1 {
        pub allocType: CUmemAllocationType,
        pub handleTypes: CUmemAllocationHandleType,
        pub location: CUmemLocation,
        pub win32SecurityAttributes: *mut c_void,
        pub maxSize: usize,
        pub usage: u16,
        pub reserved: [u8; 54],
    }

    pub struct CUmemPoolPtrExportData_v1 {
        pub reserved: [u8; 64],
    }

    pub struct CUmemAccessDesc_v1 {
        pub location: CUmemLocation,
        pub flags: CUmemAccess_flags,
    }

    pub struct CUmemAllocationProp_v1_allocFlags {
        pub compressionType: u8,
        pub gpuDirectRDMACapable: u8,
        pub usage: u16,
        pub reserved: [u8; 4],
    }

    pub struct CUmemAllocationProp_v1 {
        pub type_: CUmemAllocationType,
        pub requestedHandleTypes: CUmemAllocationHandleType,
        pub location: CUmemLocation,
        pub win32HandleMetaData: *mut c_void,
        pub allocFlags: CUmemAllocationProp_v1_allocFlags,
    }

    pub struct CUmulticastObjectProp_v1 {
        pub numDevices: u32,
        pub size: usize,
        pub handleTypes: u64,
        pub flags: u64,
    }

    pub struct CUDA_ARRAY3D_DESCRIPTOR_v1 {
        pub Width: u32,
        pub Height: u32,
        pub Depth: u32,
        pub Format: CUarray_format,
        pub NumChannels: u32,
        pub Flags: u32,
    }

    pub struct CUDA_ARRAY3D_DESCRIPTOR_v2 {
        pub Width: usize,
        pub Height: usize,
        pub Depth: usize,
        pub Format: CUarray_format,
        pub NumChannels: u32,
        pub Flags: u32,
    }

    pub struct CUDA_ARRAY_MEMORY_REQUIREMENTS_v1 {
        pub size: usize,
        pub alignment: usize,
        pub reserved: [u32; 4],
    }

    pub struct CUDA_ARRAY_SPARSE_PROPERTIES_v1_tileExtent {
        pub width: u32,
        pub height: u32,
        pub depth: u32,
    }

    pub struct CUDA_ARRAY_SPARSE_PROPERTIES_v1 {
        pub tileExtent: CUDA_ARRAY_SPARSE_PROPERTIES_v1_tileExtent,
        pub miptailFirstLevel: u32,
        pub miptailSize: u64,
        pub flags: u32,
        pub reserved: [u32; 4],
    }

    pub union CUarrayMapInfo_v1_resource {
        pub mipmap: CUmipmappedArray,
        pub array: CUarray,
    }

    pub struct CUarrayMapInfo_v1_subresource_sparseLevel {
        pub level: u32,
        pub layer: u32,
        pub offsetX: u32,
        pub offsetY: u32,
        pub offsetZ: u32,
        pub extentWidth: u32,
        pub extentHeight: u32,
        pub extentDepth: u32,
    }

    pub struct CUarrayMapInfo_v1_subresource_miptail {
        pub layer: u32,
        pub offset: u64,
        pub size: u64,
    }

    pub union CUarrayMapInfo_v1_subresource {
        pub sparseLevel: CUarrayMapInfo_v1_subresource_sparseLevel,
        pub miptail: CUarrayMapInfo_v1_subresource_miptail,
    }

    pub union CUarrayMapInfo_v1_memHandle {
        pub memHandle: CUmemGenericAllocationHandle,
    }

    pub struct CUarrayMapInfo_v1 {
        pub resourceType: CUresourcetype,
        pub resource: CUarrayMapInfo_v1_resource,
        pub subresourceType: CUarraySparseSubresourceType,
        pub subresource: CUarrayMapInfo_v1_subresource,
        pub memOperationType: CUmemOperationType,
        pub memHandleType: CUmemHandleType,
        pub memHandle: CUarrayMapInfo_v1_memHandle,
        pub offset: u64,
        pub deviceBitMask: u32,
        pub flags: u32,
        pub reserved: [u32; 2],
    }

    pub struct CUDA_RESOURCE_DESC_v1_res_array {
        pub hArray: CUarray,
    }

    pub struct CUDA_RESOURCE_DESC_v1_res_mipmap {
        pub hMipmappedArray: CUmipmappedArray,
    }

    pub struct CUDA_RESOURCE_DESC_v1_res_linear {
        pub devPtr: CUdeviceptr,
        pub format: CUarray_format,
        pub numChannels: u32,
        pub sizeInBytes: usize,
    }

    pub struct CUDA_RESOURCE_DESC_v1_res_pitch2D {
        pub devPtr: CUdeviceptr,
        pub format: CUarray_format,
        pub numChannels: u32,
        pub width: usize,
        pub height: usize,
        pub pitchInBytes: usize,
    }

    pub struct CUDA_RESOURCE_DESC_v1_res_reserved {
        pub reserved: [i32; 32],
    }

    pub union CUDA_RESOURCE_DESC_v1_res {
        pub array: CUDA_RESOURCE_DESC_v1_res_array,
        pub mipmap: CUDA_RESOURCE_DESC_v1_res_mipmap,
        pub linear: CUDA_RESOURCE_DESC_v1_res_linear,
        pub pitch2D: CUDA_RESOURCE_DESC_v1_res_pitch2D,
        pub reserved: CUDA_RESOURCE_DESC_v1_res_reserved,
    }

    pub struct CUDA_RESOURCE_DESC_v1 {
        pub resType: CUresourcetype,
        pub res: CUDA_RESOURCE_DESC_v1_res,
        pub flags: u32,
    }

    #[repr(align(64))]
    pub struct CUtensorMap {
        pub opaque: [u64; 16],
    }

    pub struct CUDA_TEXTURE_DESC_v1 {
        pub addressMode: [CUaddress_mode; 3],
        pub filterMode: CUfilter_mode,
        pub flags: u32,
        pub maxAnisotropy: u32,
        pub mipmapFilterMode: CUfilter_mode,
        pub mipmapLevelBias: f32,
        pub minMipmapLevelClamp: f32,
        pub maxMipmapLevelClamp: f32,
        pub borderColor: [f32; 4],
        pub reserved: [i32; 12],
    }

    pub struct CUDA_RESOURCE_VIEW_DESC_v1 {
        pub format: CUresourceViewFormat,
        pub width: usize,
        pub height: usize,
        pub depth: usize,
        pub firstMipmapLevel: u32,
        pub lastMipmapLevel: u32,
        pub firstLayer: u32,
        pub lastLayer: u32,
        pub reserved: [u32; 16],
    }

    pub struct CUDA_EXTERNAL_MEMORY_BUFFER_DESC_v1 {
        pub offset: u64,
        pub size: u64,
        pub flags: u32,
        pub reserved: [u32; 16],
    }

    pub struct CUDA_EXTERNAL_MEMORY_MIPMAPPED_ARRAY_DESC_v1 {
        pub offset: u64,
        pub arrayDesc: CUDA_ARRAY3D_DESCRIPTOR,
        pub numLevels: u32,
        pub reserved: [u32; 16],
    }

    pub struct CUDA_EXTERNAL_MEMORY_HANDLE_DESC_v1_handle_win32 {
        pub handle: *mut c_void,
        pub name: *const c_void,
    }

    pub union CUDA_EXTERNAL_MEMORY_HANDLE_DESC_v1_handle {
        pub fd: i32,
        pub win32: CUDA_EXTERNAL_MEMORY_HANDLE_DESC_v1_handle_win32,
        pub nvSciBufObject: *const c_void,
    }

    pub struct CUDA_EXTERNAL_MEMORY_HANDLE_DESC_v1 {
        pub type_: CUexternalMemoryHandleType,
        pub handle: CUDA_EXTERNAL_MEMORY_HANDLE_DESC_v1_handle,
        pub size: u64,
        pub flags: u32,
        pub reserved: [u32; 16],
    }

    pub struct CUDA_EXTERNAL_SEMAPHORE_HANDLE_DESC_v1_handle_win32 {
        pub handle: *mut c_void,
        pub name: *const c_void,
    }

    pub union CUDA_EXTERNAL_SEMAPHORE_HANDLE_DESC_v1_handle {
        pub fd: i32,
        pub win32: CUDA_EXTERNAL_SEMAPHORE_HANDLE_DESC_v1_handle_win32,
        pub nvSciSyncObj: *const c_void,
    }

    pub struct CUDA_EXTERNAL_SEMAPHORE_HANDLE_DESC_v1 {
        pub type_: CUexternalSemaphoreHandleType,
        pub handle: CUDA_EXTERNAL_SEMAPHORE_HANDLE_DESC_v1_handle,
        pub flags: u32,
        pub reserved: [u32; 16],
    }

    pub struct CUipcEventHandle_v1 {
        pub reserved: [c_char; 64],
    }

    pub struct CUipcMemHandle_v1 {
        pub reserved: [c_char; 64],
    }

    pub struct CUDA_EXTERNAL_SEMAPHORE_SIGNAL_PARAMS_v1_params_fence {
        pub value: u64,
    }

    pub union CUDA_EXTERNAL_SEMAPHORE_SIGNAL_PARAMS_v1_params_nvSciSync {
        pub fence: *mut c_void,
        pub reserved: u64,
    }

    pub struct CUDA_EXTERNAL_SEMAPHORE_SIGNAL_PARAMS_v1_params_keyedMutex {
        pub key: u64,
    }

    pub struct CUDA_EXTERNAL_SEMAPHORE_SIGNAL_PARAMS_v1_params {
        pub fence: CUDA_EXTERNAL_SEMAPHORE_SIGNAL_PARAMS_v1_params_fence,
        pub nvSciSync: CUDA_EXTERNAL_SEMAPHORE_SIGNAL_PARAMS_v1_params_nvSciSync,
        pub keyedMutex: CUDA_EXTERNAL_SEMAPHORE_SIGNAL_PARAMS_v1_params_keyedMutex,
        pub reserved: [u32; 12],
    }

    pub struct CUDA_EXTERNAL_SEMAPHORE_SIGNAL_PARAMS_v1 {
        pub params: CUDA_EXTERNAL_SEMAPHORE_SIGNAL_PARAMS_v1_params,
        pub flags: u32,
        pub reserved: [u32; 16],
    }

    pub struct CUDA_EXTERNAL_SEMAPHORE_WAIT_PARAMS_v1_params_fence {
        pub value: u64,
    }

    pub union CUDA_EXTERNAL_SEMAPHORE_WAIT_PARAMS_v1_params_nvSciSync {
        pub fence: *mut c_void,
        pub reserved: u64,
    }

    pub struct CUDA_EXTERNAL_SEMAPHORE_WAIT_PARAMS_v1_params_keyedMutex {
        pub key: u64,
        pub timeoutMs: u32,
    }

    pub struct CUDA_EXTERNAL_SEMAPHORE_WAIT_PARAMS_v1_params {
        pub fence: CUDA_EXTERNAL_SEMAPHORE_WAIT_PARAMS_v1_params_fence,
        pub nvSciSync: CUDA_EXTERNAL_SEMAPHORE_WAIT_PARAMS_v1_params_nvSciSync,
        pub keyedMutex: CUDA_EXTERNAL_SEMAPHORE_WAIT_PARAMS_v1_params_keyedMutex,
        pub reserved: [u32; 10],
    }

    pub struct CUDA_EXTERNAL_SEMAPHORE_WAIT_PARAMS_v1 {
        pub params: CUDA_EXTERNAL_SEMAPHORE_WAIT_PARAMS_v1_params,
        pub flags: u32,
        pub reserved: [u32; 16],
    }

    pub union CUstreamMemOpWaitValueParams_st_operand {
        pub value: u32,
        pub value64: u64,
    }

    pub struct CUstreamMemOpWaitValueParams_st {
        pub operation: CUstreamBatchMemOpType,
        pub address: CUdeviceptr,
        pub operand: CUstreamMemOpWaitValueParams_st_operand,
        pub flags: u32,
        pub alias: CUdeviceptr,
    }

    pub union CUstreamMemOpWriteValueParams_st_operand {
        pub value: u32,
        pub value64: u64,
    }

    pub struct CUstreamMemOpWriteValueParams_st {
        pub operation: CUstreamBatchMemOpType,
        pub address: CUdeviceptr,
        pub operand: CUstreamMemOpWriteValueParams_st_operand,
        pub flags: u32,
        pub alias: CUdeviceptr,
    }

    pub struct CUstreamMemOpFlushRemoteWritesParams_st {
        pub operation: CUstreamBatchMemOpType,
        pub flags: u32,
    }

    pub struct CUstreamMemOpMemoryBarrierParams_st {
        pub operation: CUstreamBatchMemOpType,
        pub flags: u32,
    }

    pub union CUstreamBatchMemOpParams_v1 {
        pub operation: CUstreamBatchMemOpType,
        pub waitValue: CUstreamMemOpWaitValueParams_st,
        pub writeValue: CUstreamMemOpWriteValueParams_st,
        pub flushRemoteWrites: CUstreamMemOpFlushRemoteWritesParams_st,
        pub memoryBarrier: CUstreamMemOpMemoryBarrierParams_st,
        pub pad: [u64; 6],
    }

    pub struct CUgraphEdgeData {
        pub from_port: u8,
        pub to_port: u8,
        pub type_: u8,
        pub reserved: [u8; 5],
    }

    pub struct CUaccessPolicyWindow_v1 {
        pub base_ptr: *mut c_void,
        pub num_bytes: usize,
        pub hitRatio: f32,
        pub hitProp: CUaccessProperty,
        pub missProp: CUaccessProperty,
    }

    pub struct CUlaunchAttributeValue_clusterDim {
        pub x: u32,
        pub y: u32,
        pub z: u32,
    }

    pub struct CUlaunchAttributeValue_programmaticEvent {
        pub event: CUevent,
        pub flags: i32,
        pub triggerAtBlockStart: i32,
    }

    pub struct CUlaunchAttributeValue_launchCompletionEvent {
        pub event: CUevent,
        pub flags: i32,
    }

    pub struct CUlaunchMemSyncDomainMap {
        pub default_: u8,
        pub remote: u8,
    }

    pub struct CUlaunchAttributeValue_preferredClusterDim {
        pub x: u32,
        pub y: u32,
        pub z: u32,
    }

    pub struct CUlaunchAttributeValue_deviceUpdatableKernelNode {
        pub deviceUpdatable: i32,
        pub devNode: CUgraphDeviceNode,
    }

    pub union CUlaunchAttributeValue {
        pub pad: [c_char; 64],
        pub accessPolicyWindow: CUaccessPolicyWindow,
        pub cooperative: i32,
        pub syncPolicy: CUsynchronizationPolicy,
        pub clusterDim: CUlaunchAttributeValue_clusterDim,
        pub clusterSchedulingPolicyPreference: CUclusterSchedulingPolicy,
        pub programmaticStreamSerializationAllowed: i32,
        pub programmaticEvent: CUlaunchAttributeValue_programmaticEvent,
        pub launchCompletionEvent: CUlaunchAttributeValue_launchCompletionEvent,
        pub priority: i32,
        pub memSyncDomainMap: CUlaunchMemSyncDomainMap,
        pub memSyncDomain: CUlaunchMemSyncDomain,
        pub preferredClusterDim: CUlaunchAttributeValue_preferredClusterDim,
        pub deviceUpdatableKernelNode: CUlaunchAttributeValue_deviceUpdatableKernelNode,
        pub sharedMemCarveout: u32,
    }

    pub struct CUDA_LAUNCH_PARAMS_v1 {
        pub function: CUfunction,
        pub gridDimX: u32,
        pub gridDimY: u32,
        pub gridDimZ: u32,
        pub blockDimX: u32,
        pub blockDimY: u32,
        pub blockDimZ: u32,
        pub sharedMemBytes: u32,
        pub hStream: CUstream,
        pub kernelParams: *mut *mut c_void,
    }

    pub struct CUlaunchAttribute {
        pub id: CUlaunchAttributeID,
        pub pad: [c_char; 4],
        pub value: CUlaunchAttributeValue,
    }

    pub struct CUlaunchConfig {
        pub gridDimX: u32,
        pub gridDimY: u32,
        pub gridDimZ: u32,
        pub blockDimX: u32,
        pub blockDimY: u32,
        pub blockDimZ: u32,
        pub sharedMemBytes: u32,
        pub hStream: CUstream,
        pub attrs: *mut CUlaunchAttribute,
        pub numAttrs: u32,
    }

    pub struct CUDA_BATCH_MEM_OP_NODE_PARAMS_v1 {
        pub ctx: CUcontext,
        pub count: u32,
        pub paramArray: *mut CUstreamBatchMemOpParams,
        pub flags: u32,
    }

    pub struct CUDA_EXT_SEM_SIGNAL_NODE_PARAMS_v1 {
        pub extSemArray: *mut CUexternalSemaphore,
        pub paramsArray: *const CUDA_EXTERNAL_SEMAPHORE_SIGNAL_PARAMS,
        pub numExtSems: u32,
    }

    pub struct CUDA_EXT_SEM_WAIT_NODE_PARAMS_v1 {
        pub extSemArray: *mut CUexternalSemaphore,
        pub paramsArray: *const CUDA_EXTERNAL_SEMAPHORE_WAIT_PARAMS,
        pub numExtSems: u32,
    }

    pub struct CUDA_HOST_NODE_PARAMS_v1 {
        pub fn_: CUhostFn,
        pub userData: *mut c_void,
    }

    pub struct CUDA_KERNEL_NODE_PARAMS_v1 {
        pub func: CUfunction,
        pub gridDimX: u32,
        pub gridDimY: u32,
        pub gridDimZ: u32,
        pub blockDimX: u32,
        pub blockDimY: u32,
        pub blockDimZ: u32,
        pub sharedMemBytes: u32,
        pub kernelParams: *mut *mut c_void,
        pub extra: *mut *mut c_void,
    }

    pub struct CUDA_KERNEL_NODE_PARAMS_v2 {
        pub func: CUfunction,
        pub gridDimX: u32,
        pub gridDimY: u32,
        pub gridDimZ: u32,
        pub blockDimX: u32,
        pub blockDimY: u32,
        pub blockDimZ: u32,
        pub sharedMemBytes: u32,
        pub kernelParams: *mut *mut c_void,
        pub extra: *mut *mut c_void,
        pub kern: CUkernel,
        pub ctx: CUcontext,
    }

    pub struct CUDA_MEM_ALLOC_NODE_PARAMS_v1 {
        pub poolProps: CUmemPoolProps,
        pub accessDescs: *const CUmemAccessDesc,
        pub accessDescCount: usize,
        pub bytesize: usize,
        pub dptr: CUdeviceptr,
    }

    pub struct CUDA_MEMSET_NODE_PARAMS_v1 {
        pub dst: CUdeviceptr,
        pub pitch: usize,
        pub value: u32,
        pub elementSize: u32,
        pub width: usize,
        pub height: usize,
    }

    pub struct CUDA_KERNEL_NODE_PARAMS_v3 {
        pub func: CUfunction,
        pub gridDimX: u32,
        pub gridDimY: u32,
        pub gridDimZ: u32,
        pub blockDimX: u32,
        pub blockDimY: u32,
        pub blockDimZ: u32,
        pub sharedMemBytes: u32,
        pub kernelParams: *mut *mut c_void,
        pub extra: *mut *mut c_void,
        pub kern: CUkernel,
        pub ctx: CUcontext,
    }

    pub struct CUDA_MEMCPY_NODE_PARAMS {
        pub flags: i32,
        pub reserved: i32,
        pub copyCtx: CUcontext,
        pub copyParams: CUDA_MEMCPY3D,
    }

    pub struct CUDA_MEMSET_NODE_PARAMS_v2 {
        pub dst: CUdeviceptr,
        pub pitch: usize,
        pub value: u32,
        pub elementSize: u32,
        pub width: usize,
        pub height: usize,
        pub ctx: CUcontext,
    }

    pub struct CUDA_HOST_NODE_PARAMS_v2 {
        pub fn_: CUhostFn,
        pub userData: *mut c_void,
    }

    pub struct CUDA_CHILD_GRAPH_NODE_PARAMS {
        pub graph: CUgraph,
        pub ownership: CUgraphChildGraphNodeOwnership,
    }

    pub struct CUDA_EVENT_WAIT_NODE_PARAMS {
        pub event: CUevent,
    }

    pub struct CUDA_EVENT_RECORD_NODE_PARAMS {
        pub event: CUevent,
    }

    pub struct CUDA_EXT_SEM_SIGNAL_NODE_PARAMS_v2 {
        pub extSemArray: *mut CUexternalSemaphore,
        pub paramsArray: *const CUDA_EXTERNAL_SEMAPHORE_SIGNAL_PARAMS,
        pub numExtSems: u32,
    }

    pub struct CUDA_EXT_SEM_WAIT_NODE_PARAMS_v2 {
        pub extSemArray: *mut CUexternalSemaphore,
        pub paramsArray: *const CUDA_EXTERNAL_SEMAPHORE_WAIT_PARAMS,
        pub numExtSems: u32,
    }

    pub struct CUDA_MEM_ALLOC_NODE_PARAMS_v2 {
        pub poolProps: CUmemPoolProps,
        pub accessDescs: *const CUmemAccessDesc,
        pub accessDescCount: usize,
        pub bytesize: usize,
        pub dptr: CUdeviceptr,
    }

    pub struct CUDA_MEM_FREE_NODE_PARAMS {
        pub dptr: CUdeviceptr,
    }

    pub struct CUDA_BATCH_MEM_OP_NODE_PARAMS_v2 {
        pub ctx: CUcontext,
        pub count: u32,
        pub paramArray: *mut CUstreamBatchMemOpParams,
        pub flags: u32,
    }

    pub struct CUDA_CONDITIONAL_NODE_PARAMS {
        pub handle: CUgraphConditionalHandle,
        pub type_: CUgraphConditionalNodeType,
        pub size: u32,
        pub phGraph_out: *mut CUgraph,
        pub ctx: CUcontext,
    }

    pub union CUgraphNodeParams_params {
        pub reserved1: [i64; 29],
        pub kernel: CUDA_KERNEL_NODE_PARAMS_v3,
        pub memcpy: CUDA_MEMCPY_NODE_PARAMS,
        pub memset: CUDA_MEMSET_NODE_PARAMS_v2,
        pub host: CUDA_HOST_NODE_PARAMS_v2,
        pub graph: CUDA_CHILD_GRAPH_NODE_PARAMS,
        pub eventWait: CUDA_EVENT_WAIT_NODE_PARAMS,
        pub eventRecord: CUDA_EVENT_RECORD_NODE_PARAMS,
        pub extSemSignal: CUDA_EXT_SEM_SIGNAL_NODE_PARAMS_v2,
        pub extSemWait: CUDA_EXT_SEM_WAIT_NODE_PARAMS_v2,
        pub alloc: CUDA_MEM_ALLOC_NODE_PARAMS_v2,
        pub free: CUDA_MEM_FREE_NODE_PARAMS,
        pub memOp: CUDA_BATCH_MEM_OP_NODE_PARAMS_v2,
        pub conditional: CUDA_CONDITIONAL_NODE_PARAMS,
    }

    pub struct CUgraphNodeParams {
        pub type_: CUgraphNodeType,
        pub reserved0: [i32; 3],
        pub params: CUgraphNodeParams_params,
        pub reserved2: i64,
    }

    pub struct CUgraphExecUpdateResultInfo_v1 {
        pub result: CUgraphExecUpdateResult,
        pub errorNode: CUgraphNode,
        pub errorFromNode: CUgraphNode,
    }

    pub struct CUDA_GRAPH_INSTANTIATE_PARAMS {
        pub flags: u64,
        pub hUploadStream: CUstream,
        pub hErrNode_out: CUgraphNode,
        pub result_out: CUgraphInstantiateResult,
    }

    pub union CUeglFrame_v1_frame {
        pub pArray: [CUarray; 3],
        pub pPitch: [*mut c_void; 3],
    }

    pub struct CUeglFrame_v1 {
        pub frame: CUeglFrame_v1_frame,
        pub width: u32,
        pub height: u32,
        pub depth: u32,
        pub pitch: u32,
        pub planeCount: u32,
        pub numChannels: u32,
        pub frameType: CUeglFrameType,
        pub eglColorFormat: CUeglColorFormat,
        pub cuFormat: CUarray_format,
    }

    pub struct CUmemFabricHandle_v1 {
        pub data: [u8; 64],
    }
}
