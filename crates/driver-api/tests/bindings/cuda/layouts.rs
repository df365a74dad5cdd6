//! Compares size, alignment and field offsets of CUDA structures with cudarc's.

use cudarc::driver::sys as theirs;
use partage_driver_api::cuda as ours;

#[test]
fn layouts_match() {
    same_layout! {
        CUuuid { bytes }
        CUdevprop_v1 {
            maxThreadsPerBlock maxThreadsDim maxGridSize sharedMemPerBlock totalConstantMemory SIMDWidth
            memPitch regsPerBlock clockRate textureAlign
        }
        CUasyncNotificationInfo_info_overBudget = CUasyncNotificationInfo_st__bindgen_ty_1__bindgen_ty_1 {
            bytesOverBudget
        }
        CUasyncNotificationInfo_info = CUasyncNotificationInfo_st__bindgen_ty_1 { overBudget }
        CUasyncNotificationInfo { type_ info }
        CUexecAffinitySmCount_v1 { val }
        CUexecAffinityParam_v1_param = CUexecAffinityParam_st__bindgen_ty_1 { smCount }
        CUexecAffinityParam_v1 { type_ param }
        CUdevSmResource { smCount }
        CUdevResource_v1_resource = CUdevResource_st__bindgen_ty_1 { sm _oversize }
        CUdevResource_v1 { type_ _internal_padding resource=__bindgen_anon_1 }
        CUDA_ARRAY_DESCRIPTOR_v2 { Width Height Format NumChannels }
        CUmemLocation_v1 { type_ id }
        CUDA_MEMCPY2D_v2 {
            srcXInBytes srcY srcMemoryType srcHost srcDevice srcArray srcPitch dstXInBytes dstY
            dstMemoryType dstHost dstDevice dstArray dstPitch WidthInBytes Height
        }
        CUDA_MEMCPY3D_v2 {
            srcXInBytes srcY srcZ srcLOD srcMemoryType srcHost srcDevice srcArray reserved0 srcPitch
            srcHeight dstXInBytes dstY dstZ dstLOD dstMemoryType dstHost dstDevice dstArray reserved1
            dstPitch dstHeight WidthInBytes Height Depth
        }
        CUDA_MEMCPY3D_PEER_v1 {
            srcXInBytes srcY srcZ srcLOD srcMemoryType srcHost srcDevice srcArray srcContext srcPitch
            srcHeight dstXInBytes dstY dstZ dstLOD dstMemoryType dstHost dstDevice dstArray dstContext
            dstPitch dstHeight WidthInBytes Height Depth
        }
        CUmemPoolProps_v1 { allocType handleTypes location win32SecurityAttributes maxSize usage reserved }
        CUmemPoolPtrExportData_v1 { reserved }
        CUmemAccessDesc_v1 { location flags }
        CUmemAllocationProp_v1_allocFlags = CUmemAllocationProp_st__bindgen_ty_1 {
            compressionType gpuDirectRDMACapable usage reserved
        }
        CUmemAllocationProp_v1 { type_ requestedHandleTypes location win32HandleMetaData allocFlags }
        CUmulticastObjectProp_v1 { numDevices size handleTypes flags }
        CUDA_ARRAY3D_DESCRIPTOR_v2 { Width Height Depth Format NumChannels Flags }
        CUDA_ARRAY_MEMORY_REQUIREMENTS_v1 { size alignment reserved }
        CUDA_ARRAY_SPARSE_PROPERTIES_v1_tileExtent = CUDA_ARRAY_SPARSE_PROPERTIES_st__bindgen_ty_1 {
            width height depth
        }
        CUDA_ARRAY_SPARSE_PROPERTIES_v1 { tileExtent miptailFirstLevel miptailSize flags reserved }
        CUarrayMapInfo_v1_resource = CUarrayMapInfo_st__bindgen_ty_1 { mipmap array }
        CUarrayMapInfo_v1_subresource_sparseLevel = CUarrayMapInfo_st__bindgen_ty_2__bindgen_ty_1 {
            level layer offsetX offsetY offsetZ extentWidth extentHeight extentDepth
        }
        CUarrayMapInfo_v1_subresource_miptail = CUarrayMapInfo_st__bindgen_ty_2__bindgen_ty_2 {
            layer offset size
        }
        CUarrayMapInfo_v1_subresource = CUarrayMapInfo_st__bindgen_ty_2 { sparseLevel miptail }
        CUarrayMapInfo_v1_memHandle = CUarrayMapInfo_st__bindgen_ty_3 { memHandle }
        CUarrayMapInfo_v1 {
            resourceType resource subresourceType subresource memOperationType memHandleType memHandle
            offset deviceBitMask flags reserved
        }
        CUDA_RESOURCE_DESC_v1_res_array = CUDA_RESOURCE_DESC_st__bindgen_ty_1__bindgen_ty_1 { hArray }
        CUDA_RESOURCE_DESC_v1_res_mipmap = CUDA_RESOURCE_DESC_st__bindgen_ty_1__bindgen_ty_2 {
            hMipmappedArray
        }
        CUDA_RESOURCE_DESC_v1_res_linear = CUDA_RESOURCE_DESC_st__bindgen_ty_1__bindgen_ty_3 {
            devPtr format numChannels sizeInBytes
        }
        CUDA_RESOURCE_DESC_v1_res_pitch2D = CUDA_RESOURCE_DESC_st__bindgen_ty_1__bindgen_ty_4 {
            devPtr format numChannels width height pitchInBytes
        }
        CUDA_RESOURCE_DESC_v1_res_reserved = CUDA_RESOURCE_DESC_st__bindgen_ty_1__bindgen_ty_5 { reserved }
        CUDA_RESOURCE_DESC_v1_res = CUDA_RESOURCE_DESC_st__bindgen_ty_1 {
            array mipmap linear pitch2D reserved
        }
        CUDA_RESOURCE_DESC_v1 { resType res flags }
        CUtensorMap { opaque }
        CUDA_TEXTURE_DESC_v1 {
            addressMode filterMode flags maxAnisotropy mipmapFilterMode mipmapLevelBias minMipmapLevelClamp
            maxMipmapLevelClamp borderColor reserved
        }
        CUDA_RESOURCE_VIEW_DESC_v1 {
            format width height depth firstMipmapLevel lastMipmapLevel firstLayer lastLayer reserved
        }
        CUDA_EXTERNAL_MEMORY_BUFFER_DESC_v1 { offset size flags reserved }
        CUDA_EXTERNAL_MEMORY_MIPMAPPED_ARRAY_DESC_v1 { offset arrayDesc numLevels reserved }
        CUDA_EXTERNAL_MEMORY_HANDLE_DESC_v1_handle_win32 = CUDA_EXTERNAL_MEMORY_HANDLE_DESC_st__bindgen_ty_1__bindgen_ty_1 {
            handle name
        }
        CUDA_EXTERNAL_MEMORY_HANDLE_DESC_v1_handle = CUDA_EXTERNAL_MEMORY_HANDLE_DESC_st__bindgen_ty_1 {
            fd win32 nvSciBufObject
        }
        CUDA_EXTERNAL_MEMORY_HANDLE_DESC_v1 { type_ handle size flags reserved }
        CUDA_EXTERNAL_SEMAPHORE_HANDLE_DESC_v1_handle_win32 = CUDA_EXTERNAL_SEMAPHORE_HANDLE_DESC_st__bindgen_ty_1__bindgen_ty_1 {
            handle name
        }
        CUDA_EXTERNAL_SEMAPHORE_HANDLE_DESC_v1_handle = CUDA_EXTERNAL_SEMAPHORE_HANDLE_DESC_st__bindgen_ty_1 {
            fd win32 nvSciSyncObj
        }
        CUDA_EXTERNAL_SEMAPHORE_HANDLE_DESC_v1 { type_ handle flags reserved }
        CUipcEventHandle_v1 { reserved }
        CUipcMemHandle_v1 { reserved }
        CUDA_EXTERNAL_SEMAPHORE_SIGNAL_PARAMS_v1_params_fence = CUDA_EXTERNAL_SEMAPHORE_SIGNAL_PARAMS_st__bindgen_ty_1__bindgen_ty_1 {
            value
        }
        CUDA_EXTERNAL_SEMAPHORE_SIGNAL_PARAMS_v1_params_nvSciSync = CUDA_EXTERNAL_SEMAPHORE_SIGNAL_PARAMS_st__bindgen_ty_1__bindgen_ty_2 {
            fence reserved
        }
        CUDA_EXTERNAL_SEMAPHORE_SIGNAL_PARAMS_v1_params_keyedMutex = CUDA_EXTERNAL_SEMAPHORE_SIGNAL_PARAMS_st__bindgen_ty_1__bindgen_ty_3 {
            key
        }
        CUDA_EXTERNAL_SEMAPHORE_SIGNAL_PARAMS_v1_params = CUDA_EXTERNAL_SEMAPHORE_SIGNAL_PARAMS_st__bindgen_ty_1 {
            fence nvSciSync keyedMutex reserved
        }
        CUDA_EXTERNAL_SEMAPHORE_SIGNAL_PARAMS_v1 { params flags reserved }
        CUDA_EXTERNAL_SEMAPHORE_WAIT_PARAMS_v1_params_fence = CUDA_EXTERNAL_SEMAPHORE_WAIT_PARAMS_st__bindgen_ty_1__bindgen_ty_1 {
            value
        }
        CUDA_EXTERNAL_SEMAPHORE_WAIT_PARAMS_v1_params_nvSciSync = CUDA_EXTERNAL_SEMAPHORE_WAIT_PARAMS_st__bindgen_ty_1__bindgen_ty_2 {
            fence reserved
        }
        CUDA_EXTERNAL_SEMAPHORE_WAIT_PARAMS_v1_params_keyedMutex = CUDA_EXTERNAL_SEMAPHORE_WAIT_PARAMS_st__bindgen_ty_1__bindgen_ty_3 {
            key timeoutMs
        }
        CUDA_EXTERNAL_SEMAPHORE_WAIT_PARAMS_v1_params = CUDA_EXTERNAL_SEMAPHORE_WAIT_PARAMS_st__bindgen_ty_1 {
            fence nvSciSync keyedMutex reserved
        }
        CUDA_EXTERNAL_SEMAPHORE_WAIT_PARAMS_v1 { params flags reserved }
        CUstreamMemOpWaitValueParams_st_operand = CUstreamBatchMemOpParams_union_CUstreamMemOpWaitValueParams_st__bindgen_ty_1 {
            value value64
        }
        CUstreamMemOpWaitValueParams_st = CUstreamBatchMemOpParams_union_CUstreamMemOpWaitValueParams_st {
            operation address operand=__bindgen_anon_1 flags alias
        }
        CUstreamMemOpWriteValueParams_st_operand = CUstreamBatchMemOpParams_union_CUstreamMemOpWriteValueParams_st__bindgen_ty_1 {
            value value64
        }
        CUstreamMemOpWriteValueParams_st = CUstreamBatchMemOpParams_union_CUstreamMemOpWriteValueParams_st {
            operation address operand=__bindgen_anon_1 flags alias
        }
        CUstreamMemOpFlushRemoteWritesParams_st = CUstreamBatchMemOpParams_union_CUstreamMemOpFlushRemoteWritesParams_st {
            operation flags
        }
        CUstreamMemOpMemoryBarrierParams_st = CUstreamBatchMemOpParams_union_CUstreamMemOpMemoryBarrierParams_st {
            operation flags
        }
        CUstreamBatchMemOpParams_v1 { operation waitValue writeValue flushRemoteWrites memoryBarrier pad }
        CUgraphEdgeData { from_port to_port type_ reserved }
        CUaccessPolicyWindow_v1 { base_ptr num_bytes hitRatio hitProp missProp }
        CUlaunchMemSyncDomainMap { default_ remote }
        CUlaunchAttributeValue_clusterDim = CUlaunchAttributeValue_union__bindgen_ty_1 { x y z }
        CUlaunchAttributeValue_programmaticEvent = CUlaunchAttributeValue_union__bindgen_ty_2 {
            event flags triggerAtBlockStart
        }
        CUlaunchAttributeValue_launchCompletionEvent = CUlaunchAttributeValue_union__bindgen_ty_3 {
            event flags
        }
        CUlaunchAttributeValue_preferredClusterDim = CUlaunchAttributeValue_union__bindgen_ty_4 { x y z }
        CUlaunchAttributeValue_deviceUpdatableKernelNode = CUlaunchAttributeValue_union__bindgen_ty_5 {
            deviceUpdatable devNode
        }
        CUlaunchAttributeValue {
            pad accessPolicyWindow cooperative syncPolicy clusterDim clusterSchedulingPolicyPreference
            programmaticStreamSerializationAllowed programmaticEvent launchCompletionEvent priority
            memSyncDomainMap memSyncDomain preferredClusterDim deviceUpdatableKernelNode sharedMemCarveout
        }
        CUDA_LAUNCH_PARAMS_v1 {
            function gridDimX gridDimY gridDimZ blockDimX blockDimY blockDimZ sharedMemBytes hStream
            kernelParams
        }
        CUlaunchAttribute { id pad value }
        CUlaunchConfig {
            gridDimX gridDimY gridDimZ blockDimX blockDimY blockDimZ sharedMemBytes hStream attrs numAttrs
        }
        CUDA_BATCH_MEM_OP_NODE_PARAMS_v1 { ctx count paramArray flags }
        CUDA_EXT_SEM_SIGNAL_NODE_PARAMS_v1 { extSemArray paramsArray numExtSems }
        CUDA_EXT_SEM_WAIT_NODE_PARAMS_v1 { extSemArray paramsArray numExtSems }
        CUDA_HOST_NODE_PARAMS_v1 { fn_ userData }
        CUDA_KERNEL_NODE_PARAMS_v1 {
            func gridDimX gridDimY gridDimZ blockDimX blockDimY blockDimZ sharedMemBytes kernelParams extra
        }
        CUDA_KERNEL_NODE_PARAMS_v2 {
            func gridDimX gridDimY gridDimZ blockDimX blockDimY blockDimZ sharedMemBytes kernelParams extra
            kern ctx
        }
        CUDA_MEM_ALLOC_NODE_PARAMS_v1 { poolProps accessDescs accessDescCount bytesize dptr }
        CUDA_MEMSET_NODE_PARAMS_v1 { dst pitch value elementSize width height }
        CUDA_KERNEL_NODE_PARAMS_v3 {
            func gridDimX gridDimY gridDimZ blockDimX blockDimY blockDimZ sharedMemBytes kernelParams extra
            kern ctx
        }
        CUDA_MEMCPY_NODE_PARAMS { flags reserved copyCtx copyParams }
        CUDA_MEMSET_NODE_PARAMS_v2 { dst pitch value elementSize width height ctx }
        CUDA_HOST_NODE_PARAMS_v2 { fn_ userData }
        CUDA_CHILD_GRAPH_NODE_PARAMS { graph ownership }
        CUDA_EVENT_WAIT_NODE_PARAMS { event }
        CUDA_EVENT_RECORD_NODE_PARAMS { event }
        CUDA_EXT_SEM_SIGNAL_NODE_PARAMS_v2 { extSemArray paramsArray numExtSems }
        CUDA_EXT_SEM_WAIT_NODE_PARAMS_v2 { extSemArray paramsArray numExtSems }
        CUDA_MEM_ALLOC_NODE_PARAMS_v2 { poolProps accessDescs accessDescCount bytesize dptr }
        CUDA_MEM_FREE_NODE_PARAMS { dptr }
        CUDA_BATCH_MEM_OP_NODE_PARAMS_v2 { ctx count paramArray flags }
        CUDA_CONDITIONAL_NODE_PARAMS { handle type_ size phGraph_out ctx }
        CUgraphNodeParams_params = CUgraphNodeParams_st__bindgen_ty_1 {
            reserved1 kernel memcpy memset host graph eventWait eventRecord extSemSignal extSemWait alloc
            free memOp conditional
        }
        CUgraphNodeParams { type_ reserved0 params=__bindgen_anon_1 reserved2 }
        CUgraphExecUpdateResultInfo_v1 { result errorNode errorFromNode }
        CUDA_GRAPH_INSTANTIATE_PARAMS { flags hUploadStream hErrNode_out result_out }
        CUmemFabricHandle_v1 { data }
    }
}

/// Structures that cudarc lacks, with the sizes that a C compiler computes from cuda.h and cudaEGL.h.
#[test]
fn sizes_match() {
    assert_eq!(size_of::<ours::CUDA_ARRAY_DESCRIPTOR_v1>(), 16);
    assert_eq!(size_of::<ours::CUDA_ARRAY3D_DESCRIPTOR_v1>(), 24);
    assert_eq!(size_of::<ours::CUDA_MEMCPY2D_v1>(), 96);
    assert_eq!(size_of::<ours::CUDA_MEMCPY3D_v1>(), 144);
    assert_eq!(size_of::<ours::CUeglFrame>(), 64);
}
