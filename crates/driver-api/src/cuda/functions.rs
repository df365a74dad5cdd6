//! The functions of libcuda.

/// Passes all functions of libcuda to the given macro, grouped in families; see the [crate documentation](crate)
/// for the format. All functions return a [`CUresult`](crate::cuda::CUresult). The types of
/// [`cuda`](crate::cuda) must be in scope.
#[macro_export]
macro_rules! cuda_functions {
    ($($expand:tt)+) => {
        $($expand)+! {
            /// The library: initialization, version, error texts, symbol lookup, profiler, core dumps.
            trait DriverApi {
                fn cuCoredumpGetAttribute(
                    attribute: CUcoredumpSettings,
                    value: *mut c_void,
                    size: *mut usize,
                );
                fn cuCoredumpGetAttributeGlobal(
                    attribute: CUcoredumpSettings,
                    value: *mut c_void,
                    size: *mut usize,
                );
                fn cuCoredumpSetAttribute(
                    attribute: CUcoredumpSettings,
                    value: *mut c_void,
                    size: *mut usize,
                );
                fn cuCoredumpSetAttributeGlobal(
                    attribute: CUcoredumpSettings,
                    value: *mut c_void,
                    size: *mut usize,
                );
                fn cuDriverGetVersion(version: *mut i32);
                fn cuGetErrorName(error: CUresult, text: *mut *const c_char);
                fn cuGetErrorString(error: CUresult, text: *mut *const c_char);
                fn cuGetExportTable(table: *mut *const c_void, id: *const CUuuid);
                fn cuGetProcAddress(
                    name: *const c_char,
                    function: *mut *mut c_void,
                    cuda_version: i32,
                    flags: u64,
                );
                fn cuGetProcAddress_v2(
                    name: *const c_char,
                    function: *mut *mut c_void,
                    cuda_version: i32,
                    flags: u64,
                    symbol_status: *mut CUdriverProcAddressQueryResult,
                );
                fn cuInit(flags: u32);
                fn cuProfilerInitialize(
                    config_file: *const c_char,
                    output_file: *const c_char,
                    output_mode: CUoutput_mode,
                );
                fn cuProfilerStart();
                fn cuProfilerStop();
            }
            /// Properties, names, identities and peers of devices.
            trait DeviceApi {
                fn cuDeviceCanAccessPeer(can_access: *mut i32, device: CUdevice, peer: CUdevice);
                fn cuDeviceComputeCapability(major: *mut i32, minor: *mut i32, device: CUdevice);
                fn cuDeviceGet(device: *mut CUdevice, ordinal: i32);
                fn cuDeviceGetAttribute(value: *mut i32, attribute: CUdevice_attribute, device: CUdevice);
                fn cuDeviceGetByPCIBusId(device: *mut CUdevice, pci_bus_id: *const c_char);
                fn cuDeviceGetCount(count: *mut i32);
                fn cuDeviceGetExecAffinitySupport(
                    value: *mut i32,
                    kind: CUexecAffinityType,
                    device: CUdevice,
                );
                fn cuDeviceGetLuid(luid: *mut c_char, device_node_mask: *mut u32, device: CUdevice);
                fn cuDeviceGetName(name: *mut c_char, length: i32, device: CUdevice);
                fn cuDeviceGetNvSciSyncAttributes(
                    nv_sci_sync_attr_list: *mut c_void,
                    device: CUdevice,
                    flags: i32,
                );
                fn cuDeviceGetP2PAttribute(
                    value: *mut i32,
                    attribute: CUdevice_P2PAttribute,
                    from: CUdevice,
                    to: CUdevice,
                );
                fn cuDeviceGetPCIBusId(pci_bus_id: *mut c_char, length: i32, device: CUdevice);
                fn cuDeviceGetProperties(properties: *mut CUdevprop, device: CUdevice);
                fn cuDeviceGetTexture1DLinearMaxWidth(
                    max_width_in_elements: *mut usize,
                    format: CUarray_format,
                    num_channels: u32,
                    device: CUdevice,
                );
                fn cuDeviceGetUuid(uuid: *mut CUuuid, device: CUdevice);
                fn cuDeviceGetUuid_v2(uuid: *mut CUuuid, device: CUdevice);
                fn cuDeviceRegisterAsyncNotification(
                    device: CUdevice,
                    callback_func: CUasyncCallback,
                    user_data: *mut c_void,
                    callback: *mut CUasyncCallbackHandle,
                );
                fn cuDeviceTotalMem(bytes: *mut u32, device: CUdevice);
                fn cuDeviceTotalMem_v2(bytes: *mut usize, device: CUdevice);
                fn cuDeviceUnregisterAsyncNotification(device: CUdevice, callback: CUasyncCallbackHandle);
                fn cuFlushGPUDirectRDMAWrites(
                    target: CUflushGPUDirectRDMAWritesTarget,
                    scope: CUflushGPUDirectRDMAWritesScope,
                );
            }
            /// Contexts, primary contexts, green contexts, and peer access.
            trait ContextApi {
                fn cuCtxAttach(context: *mut CUcontext, flags: u32);
                fn cuCtxCreate(context: *mut CUcontext, flags: u32, device: CUdevice);
                fn cuCtxCreate_v2(context: *mut CUcontext, flags: u32, device: CUdevice);
                fn cuCtxCreate_v3(
                    context: *mut CUcontext,
                    params_array: *mut CUexecAffinityParam,
                    num_params: i32,
                    flags: u32,
                    device: CUdevice,
                );
                fn cuCtxDestroy(context: CUcontext);
                fn cuCtxDestroy_v2(context: CUcontext);
                fn cuCtxDetach(context: CUcontext);
                fn cuCtxDisablePeerAccess(peer_context: CUcontext);
                fn cuCtxEnablePeerAccess(peer_context: CUcontext, flags: u32);
                fn cuCtxFromGreenCtx(context: *mut CUcontext, green: CUgreenCtx);
                fn cuCtxGetApiVersion(context: CUcontext, version: *mut u32);
                fn cuCtxGetCacheConfig(config: *mut CUfunc_cache);
                fn cuCtxGetCurrent(context: *mut CUcontext);
                fn cuCtxGetDevResource(
                    context: CUcontext,
                    resource: *mut CUdevResource,
                    kind: CUdevResourceType,
                );
                fn cuCtxGetDevice(device: *mut CUdevice);
                fn cuCtxGetExecAffinity(exec_affinity: *mut CUexecAffinityParam, kind: CUexecAffinityType);
                fn cuCtxGetFlags(flags: *mut u32);
                fn cuCtxGetId(context: CUcontext, id: *mut u64);
                fn cuCtxGetLimit(value: *mut usize, limit: CUlimit);
                fn cuCtxGetSharedMemConfig(config: *mut CUsharedconfig);
                fn cuCtxGetStreamPriorityRange(least_priority: *mut i32, greatest_priority: *mut i32);
                fn cuCtxPopCurrent(context: *mut CUcontext);
                fn cuCtxPopCurrent_v2(context: *mut CUcontext);
                fn cuCtxPushCurrent(context: CUcontext);
                fn cuCtxPushCurrent_v2(context: CUcontext);
                fn cuCtxResetPersistingL2Cache();
                fn cuCtxSetCacheConfig(config: CUfunc_cache);
                fn cuCtxSetCurrent(context: CUcontext);
                fn cuCtxSetFlags(flags: u32);
                fn cuCtxSetLimit(limit: CUlimit, value: usize);
                fn cuCtxSetSharedMemConfig(config: CUsharedconfig);
                fn cuCtxSynchronize();
                fn cuDevResourceGenerateDesc(
                    descriptor: *mut CUdevResourceDesc,
                    resources: *mut CUdevResource,
                    resource_count: u32,
                );
                fn cuDevSmResourceSplitByCount(
                    result: *mut CUdevResource,
                    group_count: *mut u32,
                    input: *const CUdevResource,
                    remaining: *mut CUdevResource,
                    use_flags: u32,
                    min_count: u32,
                );
                fn cuDeviceGetDevResource(
                    device: CUdevice,
                    resource: *mut CUdevResource,
                    kind: CUdevResourceType,
                );
                fn cuDevicePrimaryCtxGetState(device: CUdevice, flags: *mut u32, active: *mut i32);
                fn cuDevicePrimaryCtxRelease(device: CUdevice);
                fn cuDevicePrimaryCtxRelease_v2(device: CUdevice);
                fn cuDevicePrimaryCtxReset(device: CUdevice);
                fn cuDevicePrimaryCtxReset_v2(device: CUdevice);
                fn cuDevicePrimaryCtxRetain(context: *mut CUcontext, device: CUdevice);
                fn cuDevicePrimaryCtxSetFlags(device: CUdevice, flags: u32);
                fn cuDevicePrimaryCtxSetFlags_v2(device: CUdevice, flags: u32);
                fn cuGreenCtxCreate(
                    context: *mut CUgreenCtx,
                    descriptor: CUdevResourceDesc,
                    device: CUdevice,
                    flags: u32,
                );
                fn cuGreenCtxDestroy(context: CUgreenCtx);
                fn cuGreenCtxGetDevResource(
                    context: CUgreenCtx,
                    resource: *mut CUdevResource,
                    kind: CUdevResourceType,
                );
                fn cuGreenCtxRecordEvent(context: CUgreenCtx, event: CUevent);
                fn cuGreenCtxWaitEvent(context: CUgreenCtx, event: CUevent);
                fn cuStreamGetGreenCtx(stream: CUstream, context: *mut CUgreenCtx);
            }
            /// Modules, functions and the linker.
            trait ModuleApi {
                fn cuLinkAddData(
                    state: CUlinkState,
                    kind: CUjitInputType,
                    data: *mut c_void,
                    size: usize,
                    name: *const c_char,
                    num_options: u32,
                    options: *mut CUjit_option,
                    option_values: *mut *mut c_void,
                );
                fn cuLinkAddData_v2(
                    state: CUlinkState,
                    kind: CUjitInputType,
                    data: *mut c_void,
                    size: usize,
                    name: *const c_char,
                    num_options: u32,
                    options: *mut CUjit_option,
                    option_values: *mut *mut c_void,
                );
                fn cuLinkAddFile(
                    state: CUlinkState,
                    kind: CUjitInputType,
                    path: *const c_char,
                    num_options: u32,
                    options: *mut CUjit_option,
                    option_values: *mut *mut c_void,
                );
                fn cuLinkAddFile_v2(
                    state: CUlinkState,
                    kind: CUjitInputType,
                    path: *const c_char,
                    num_options: u32,
                    options: *mut CUjit_option,
                    option_values: *mut *mut c_void,
                );
                fn cuLinkComplete(state: CUlinkState, cubin_out: *mut *mut c_void, size: *mut usize);
                fn cuLinkCreate(
                    num_options: u32,
                    options: *mut CUjit_option,
                    option_values: *mut *mut c_void,
                    state_out: *mut CUlinkState,
                );
                fn cuLinkCreate_v2(
                    num_options: u32,
                    options: *mut CUjit_option,
                    option_values: *mut *mut c_void,
                    state_out: *mut CUlinkState,
                );
                fn cuLinkDestroy(state: CUlinkState);
                fn cuModuleEnumerateFunctions(
                    functions: *mut CUfunction,
                    num_functions: u32,
                    module: CUmodule,
                );
                fn cuModuleGetFunction(function: *mut CUfunction, module: CUmodule, name: *const c_char);
                fn cuModuleGetFunctionCount(count: *mut u32, module: CUmodule);
                fn cuModuleGetGlobal(
                    pointer: *mut CUdeviceptr_v1,
                    bytes: *mut u32,
                    module: CUmodule,
                    name: *const c_char,
                );
                fn cuModuleGetGlobal_v2(
                    pointer: *mut CUdeviceptr,
                    bytes: *mut usize,
                    module: CUmodule,
                    name: *const c_char,
                );
                fn cuModuleGetLoadingMode(mode: *mut CUmoduleLoadingMode);
                fn cuModuleGetSurfRef(surf_ref: *mut CUsurfref, module: CUmodule, name: *const c_char);
                fn cuModuleGetTexRef(tex_ref: *mut CUtexref, module: CUmodule, name: *const c_char);
                fn cuModuleLoad(module: *mut CUmodule, path: *const c_char);
                fn cuModuleLoadData(module: *mut CUmodule, image: *const c_void);
                fn cuModuleLoadDataEx(
                    module: *mut CUmodule,
                    image: *const c_void,
                    num_options: u32,
                    options: *mut CUjit_option,
                    option_values: *mut *mut c_void,
                );
                fn cuModuleLoadFatBinary(module: *mut CUmodule, fat_cubin: *const c_void);
                fn cuModuleUnload(module: CUmodule);
            }
            /// Libraries and their kernels, and the functions of modules.
            trait KernelApi {
                fn cuFuncGetAttribute(value: *mut i32, attribute: CUfunction_attribute, function: CUfunction);
                fn cuFuncGetModule(module: *mut CUmodule, function: CUfunction);
                fn cuFuncGetName(name: *mut *const c_char, function: CUfunction);
                fn cuFuncGetParamInfo(
                    function: CUfunction,
                    param_index: usize,
                    param_offset: *mut usize,
                    param_size: *mut usize,
                );
                fn cuFuncIsLoaded(state: *mut CUfunctionLoadingState, function: CUfunction);
                fn cuFuncLoad(function: CUfunction);
                fn cuFuncSetAttribute(function: CUfunction, attribute: CUfunction_attribute, value: i32);
                fn cuFuncSetCacheConfig(function: CUfunction, config: CUfunc_cache);
                fn cuFuncSetSharedMemConfig(function: CUfunction, config: CUsharedconfig);
                fn cuKernelGetAttribute(
                    value: *mut i32,
                    attribute: CUfunction_attribute,
                    kernel: CUkernel,
                    device: CUdevice,
                );
                fn cuKernelGetFunction(function: *mut CUfunction, kernel: CUkernel);
                fn cuKernelGetName(name: *mut *const c_char, function: CUkernel);
                fn cuKernelGetParamInfo(
                    kernel: CUkernel,
                    param_index: usize,
                    param_offset: *mut usize,
                    param_size: *mut usize,
                );
                fn cuKernelSetAttribute(
                    attribute: CUfunction_attribute,
                    value: i32,
                    kernel: CUkernel,
                    device: CUdevice,
                );
                fn cuKernelSetCacheConfig(kernel: CUkernel, config: CUfunc_cache, device: CUdevice);
                fn cuLibraryEnumerateKernels(kernels: *mut CUkernel, num_kernels: u32, library: CUlibrary);
                fn cuLibraryGetGlobal(
                    pointer: *mut CUdeviceptr,
                    bytes: *mut usize,
                    library: CUlibrary,
                    name: *const c_char,
                );
                fn cuLibraryGetKernel(kernel: *mut CUkernel, library: CUlibrary, name: *const c_char);
                fn cuLibraryGetKernelCount(count: *mut u32, library: CUlibrary);
                fn cuLibraryGetManaged(
                    pointer: *mut CUdeviceptr,
                    bytes: *mut usize,
                    library: CUlibrary,
                    name: *const c_char,
                );
                fn cuLibraryGetModule(module: *mut CUmodule, library: CUlibrary);
                fn cuLibraryGetUnifiedFunction(
                    value: *mut *mut c_void,
                    library: CUlibrary,
                    name: *const c_char,
                );
                fn cuLibraryLoadData(
                    library: *mut CUlibrary,
                    code: *const c_void,
                    jit_options: *mut CUjit_option,
                    jit_options_values: *mut *mut c_void,
                    num_jit_options: u32,
                    library_options: *mut CUlibraryOption,
                    library_option_values: *mut *mut c_void,
                    num_library_options: u32,
                );
                fn cuLibraryLoadFromFile(
                    library: *mut CUlibrary,
                    file_name: *const c_char,
                    jit_options: *mut CUjit_option,
                    jit_options_values: *mut *mut c_void,
                    num_jit_options: u32,
                    library_options: *mut CUlibraryOption,
                    library_option_values: *mut *mut c_void,
                    num_library_options: u32,
                );
                fn cuLibraryUnload(library: CUlibrary);
            }
            /// Texture and surface references (deprecated by CUDA).
            trait TextureReferenceApi {
                fn cuSurfRefGetArray(array: *mut CUarray, surface: CUsurfref);
                fn cuSurfRefSetArray(surface: CUsurfref, array: CUarray, flags: u32);
                fn cuTexRefCreate(tex_ref: *mut CUtexref);
                fn cuTexRefDestroy(texture: CUtexref);
                fn cuTexRefGetAddress(pointer: *mut CUdeviceptr_v1, texture: CUtexref);
                fn cuTexRefGetAddressMode(mode: *mut CUaddress_mode, texture: CUtexref, dim: i32);
                fn cuTexRefGetAddress_v2(pointer: *mut CUdeviceptr, texture: CUtexref);
                fn cuTexRefGetArray(array: *mut CUarray, texture: CUtexref);
                fn cuTexRefGetBorderColor(border_color: *mut f32, texture: CUtexref);
                fn cuTexRefGetFilterMode(mode: *mut CUfilter_mode, texture: CUtexref);
                fn cuTexRefGetFlags(flags: *mut u32, texture: CUtexref);
                fn cuTexRefGetFormat(format: *mut CUarray_format, num_channels: *mut i32, texture: CUtexref);
                fn cuTexRefGetMaxAnisotropy(max_aniso: *mut i32, texture: CUtexref);
                fn cuTexRefGetMipmapFilterMode(mode: *mut CUfilter_mode, texture: CUtexref);
                fn cuTexRefGetMipmapLevelBias(bias: *mut f32, texture: CUtexref);
                fn cuTexRefGetMipmapLevelClamp(
                    min_mipmap_level_clamp: *mut f32,
                    max_mipmap_level_clamp: *mut f32,
                    texture: CUtexref,
                );
                fn cuTexRefGetMipmappedArray(mipmapped_array: *mut CUmipmappedArray, texture: CUtexref);
                fn cuTexRefSetAddress(
                    byte_offset: *mut u32,
                    texture: CUtexref,
                    pointer: CUdeviceptr_v1,
                    bytes: u32,
                );
                fn cuTexRefSetAddress2D(
                    texture: CUtexref,
                    descriptor: *const CUDA_ARRAY_DESCRIPTOR_v1,
                    pointer: CUdeviceptr_v1,
                    pitch: u32,
                );
                fn cuTexRefSetAddress2D_v2(
                    texture: CUtexref,
                    descriptor: *const CUDA_ARRAY_DESCRIPTOR,
                    pointer: CUdeviceptr,
                    pitch: usize,
                );
                fn cuTexRefSetAddress2D_v3(
                    texture: CUtexref,
                    descriptor: *const CUDA_ARRAY_DESCRIPTOR,
                    pointer: CUdeviceptr,
                    pitch: usize,
                );
                fn cuTexRefSetAddressMode(texture: CUtexref, dim: i32, mode: CUaddress_mode);
                fn cuTexRefSetAddress_v2(
                    byte_offset: *mut usize,
                    texture: CUtexref,
                    pointer: CUdeviceptr,
                    bytes: usize,
                );
                fn cuTexRefSetArray(texture: CUtexref, array: CUarray, flags: u32);
                fn cuTexRefSetBorderColor(texture: CUtexref, border_color: *mut f32);
                fn cuTexRefSetFilterMode(texture: CUtexref, mode: CUfilter_mode);
                fn cuTexRefSetFlags(texture: CUtexref, flags: u32);
                fn cuTexRefSetFormat(texture: CUtexref, format: CUarray_format, num_packed_components: i32);
                fn cuTexRefSetMaxAnisotropy(texture: CUtexref, max_aniso: u32);
                fn cuTexRefSetMipmapFilterMode(texture: CUtexref, mode: CUfilter_mode);
                fn cuTexRefSetMipmapLevelBias(texture: CUtexref, bias: f32);
                fn cuTexRefSetMipmapLevelClamp(
                    texture: CUtexref,
                    min_mipmap_level_clamp: f32,
                    max_mipmap_level_clamp: f32,
                );
                fn cuTexRefSetMipmappedArray(
                    texture: CUtexref,
                    mipmapped_array: CUmipmappedArray,
                    flags: u32,
                );
            }
            /// Device, pitched, managed and host memory; attributes of addresses.
            trait MemoryApi {
                fn cuMemAdvise(pointer: CUdeviceptr, count: usize, advice: CUmem_advise, device: CUdevice);
                fn cuMemAdvise_v2(
                    pointer: CUdeviceptr,
                    count: usize,
                    advice: CUmem_advise,
                    location: CUmemLocation,
                );
                fn cuMemAlloc(pointer: *mut CUdeviceptr_v1, bytes: u32);
                fn cuMemAllocHost(pointer: *mut *mut c_void, bytes: u32);
                fn cuMemAllocHost_v2(pointer: *mut *mut c_void, bytes: usize);
                fn cuMemAllocManaged(pointer: *mut CUdeviceptr, bytes: usize, flags: u32);
                fn cuMemAllocPitch(
                    pointer: *mut CUdeviceptr_v1,
                    pitch: *mut u32,
                    width_in_bytes: u32,
                    height: u32,
                    element_size_bytes: u32,
                );
                fn cuMemAllocPitch_v2(
                    pointer: *mut CUdeviceptr,
                    pitch: *mut usize,
                    width_in_bytes: usize,
                    height: usize,
                    element_size_bytes: u32,
                );
                fn cuMemAlloc_v2(pointer: *mut CUdeviceptr, bytes: usize);
                fn cuMemFree(pointer: CUdeviceptr_v1);
                fn cuMemFreeHost(host: *mut c_void);
                fn cuMemFree_v2(pointer: CUdeviceptr);
                fn cuMemGetAddressRange(base: *mut CUdeviceptr_v1, size: *mut u32, pointer: CUdeviceptr_v1);
                fn cuMemGetAddressRange_v2(base: *mut CUdeviceptr, size: *mut usize, pointer: CUdeviceptr);
                fn cuMemGetInfo(free: *mut u32, total: *mut u32);
                fn cuMemGetInfo_v2(free: *mut usize, total: *mut usize);
                fn cuMemHostAlloc(pointer: *mut *mut c_void, bytes: usize, flags: u32);
                fn cuMemHostGetDevicePointer(pointer: *mut CUdeviceptr_v1, host: *mut c_void, flags: u32);
                fn cuMemHostGetDevicePointer_v2(pointer: *mut CUdeviceptr, host: *mut c_void, flags: u32);
                fn cuMemHostGetFlags(flags: *mut u32, host: *mut c_void);
                fn cuMemHostRegister(host: *mut c_void, bytes: usize, flags: u32);
                fn cuMemHostRegister_v2(host: *mut c_void, bytes: usize, flags: u32);
                fn cuMemHostUnregister(host: *mut c_void);
                fn cuMemPrefetchAsync(
                    pointer: CUdeviceptr,
                    count: usize,
                    to: CUdevice,
                    stream: CUstream,
                ) twin cuMemPrefetchAsync_ptsz;
                fn cuMemPrefetchAsync_v2(
                    pointer: CUdeviceptr,
                    count: usize,
                    location: CUmemLocation,
                    flags: u32,
                    stream: CUstream,
                ) twin cuMemPrefetchAsync_v2_ptsz;
                fn cuMemRangeGetAttribute(
                    data: *mut c_void,
                    data_size: usize,
                    attribute: CUmem_range_attribute,
                    pointer: CUdeviceptr,
                    count: usize,
                );
                fn cuMemRangeGetAttributes(
                    data: *mut *mut c_void,
                    data_sizes: *mut usize,
                    attributes: *mut CUmem_range_attribute,
                    num_attributes: usize,
                    pointer: CUdeviceptr,
                    count: usize,
                );
                fn cuPointerGetAttribute(
                    data: *mut c_void,
                    attribute: CUpointer_attribute,
                    pointer: CUdeviceptr,
                );
                fn cuPointerGetAttributes(
                    num_attributes: u32,
                    attributes: *mut CUpointer_attribute,
                    data: *mut *mut c_void,
                    pointer: CUdeviceptr,
                );
                fn cuPointerSetAttribute(
                    value: *const c_void,
                    attribute: CUpointer_attribute,
                    pointer: CUdeviceptr,
                );
            }
            /// Memory copies and fills.
            trait CopyApi {
                fn cuMemcpy(to: CUdeviceptr, from: CUdeviceptr, bytes: usize) twin cuMemcpy_ptds;
                fn cuMemcpy2D(copy: *const CUDA_MEMCPY2D_v1);
                fn cuMemcpy2DAsync(copy: *const CUDA_MEMCPY2D_v1, stream: CUstream);
                fn cuMemcpy2DAsync_v2(
                    copy: *const CUDA_MEMCPY2D,
                    stream: CUstream,
                ) twin cuMemcpy2DAsync_v2_ptsz;
                fn cuMemcpy2DUnaligned(copy: *const CUDA_MEMCPY2D_v1);
                fn cuMemcpy2DUnaligned_v2(copy: *const CUDA_MEMCPY2D) twin cuMemcpy2DUnaligned_v2_ptds;
                fn cuMemcpy2D_v2(copy: *const CUDA_MEMCPY2D) twin cuMemcpy2D_v2_ptds;
                fn cuMemcpy3D(copy: *const CUDA_MEMCPY3D_v1);
                fn cuMemcpy3DAsync(copy: *const CUDA_MEMCPY3D_v1, stream: CUstream);
                fn cuMemcpy3DAsync_v2(
                    copy: *const CUDA_MEMCPY3D,
                    stream: CUstream,
                ) twin cuMemcpy3DAsync_v2_ptsz;
                fn cuMemcpy3DPeer(copy: *const CUDA_MEMCPY3D_PEER) twin cuMemcpy3DPeer_ptds;
                fn cuMemcpy3DPeerAsync(
                    copy: *const CUDA_MEMCPY3D_PEER,
                    stream: CUstream,
                ) twin cuMemcpy3DPeerAsync_ptsz;
                fn cuMemcpy3D_v2(copy: *const CUDA_MEMCPY3D) twin cuMemcpy3D_v2_ptds;
                fn cuMemcpyAsync(
                    to: CUdeviceptr,
                    from: CUdeviceptr,
                    bytes: usize,
                    stream: CUstream,
                ) twin cuMemcpyAsync_ptsz;
                fn cuMemcpyAtoA(to: CUarray, to_offset: u32, from: CUarray, from_offset: u32, bytes: u32);
                fn cuMemcpyAtoA_v2(
                    to: CUarray,
                    to_offset: usize,
                    from: CUarray,
                    from_offset: usize,
                    bytes: usize,
                ) twin cuMemcpyAtoA_v2_ptds;
                fn cuMemcpyAtoD(to: CUdeviceptr_v1, from: CUarray, from_offset: u32, bytes: u32);
                fn cuMemcpyAtoD_v2(
                    to: CUdeviceptr,
                    from: CUarray,
                    from_offset: usize,
                    bytes: usize,
                ) twin cuMemcpyAtoD_v2_ptds;
                fn cuMemcpyAtoH(to: *mut c_void, from: CUarray, from_offset: u32, bytes: u32);
                fn cuMemcpyAtoHAsync(
                    to: *mut c_void,
                    from: CUarray,
                    from_offset: u32,
                    bytes: u32,
                    stream: CUstream,
                );
                fn cuMemcpyAtoHAsync_v2(
                    to: *mut c_void,
                    from: CUarray,
                    from_offset: usize,
                    bytes: usize,
                    stream: CUstream,
                ) twin cuMemcpyAtoHAsync_v2_ptsz;
                fn cuMemcpyAtoH_v2(
                    to: *mut c_void,
                    from: CUarray,
                    from_offset: usize,
                    bytes: usize,
                ) twin cuMemcpyAtoH_v2_ptds;
                fn cuMemcpyDtoA(to: CUarray, to_offset: u32, from: CUdeviceptr_v1, bytes: u32);
                fn cuMemcpyDtoA_v2(
                    to: CUarray,
                    to_offset: usize,
                    from: CUdeviceptr,
                    bytes: usize,
                ) twin cuMemcpyDtoA_v2_ptds;
                fn cuMemcpyDtoD(to: CUdeviceptr_v1, from: CUdeviceptr_v1, bytes: u32);
                fn cuMemcpyDtoDAsync(to: CUdeviceptr_v1, from: CUdeviceptr_v1, bytes: u32, stream: CUstream);
                fn cuMemcpyDtoDAsync_v2(
                    to: CUdeviceptr,
                    from: CUdeviceptr,
                    bytes: usize,
                    stream: CUstream,
                ) twin cuMemcpyDtoDAsync_v2_ptsz;
                fn cuMemcpyDtoD_v2(
                    to: CUdeviceptr,
                    from: CUdeviceptr,
                    bytes: usize,
                ) twin cuMemcpyDtoD_v2_ptds;
                fn cuMemcpyDtoH(to: *mut c_void, from: CUdeviceptr_v1, bytes: u32);
                fn cuMemcpyDtoHAsync(to: *mut c_void, from: CUdeviceptr_v1, bytes: u32, stream: CUstream);
                fn cuMemcpyDtoHAsync_v2(
                    to: *mut c_void,
                    from: CUdeviceptr,
                    bytes: usize,
                    stream: CUstream,
                ) twin cuMemcpyDtoHAsync_v2_ptsz;
                fn cuMemcpyDtoH_v2(
                    to: *mut c_void,
                    from: CUdeviceptr,
                    bytes: usize,
                ) twin cuMemcpyDtoH_v2_ptds;
                fn cuMemcpyHtoA(to: CUarray, to_offset: u32, from: *const c_void, bytes: u32);
                fn cuMemcpyHtoAAsync(
                    to: CUarray,
                    to_offset: u32,
                    from: *const c_void,
                    bytes: u32,
                    stream: CUstream,
                );
                fn cuMemcpyHtoAAsync_v2(
                    to: CUarray,
                    to_offset: usize,
                    from: *const c_void,
                    bytes: usize,
                    stream: CUstream,
                ) twin cuMemcpyHtoAAsync_v2_ptsz;
                fn cuMemcpyHtoA_v2(
                    to: CUarray,
                    to_offset: usize,
                    from: *const c_void,
                    bytes: usize,
                ) twin cuMemcpyHtoA_v2_ptds;
                fn cuMemcpyHtoD(to: CUdeviceptr_v1, from: *const c_void, bytes: u32);
                fn cuMemcpyHtoDAsync(to: CUdeviceptr_v1, from: *const c_void, bytes: u32, stream: CUstream);
                fn cuMemcpyHtoDAsync_v2(
                    to: CUdeviceptr,
                    from: *const c_void,
                    bytes: usize,
                    stream: CUstream,
                ) twin cuMemcpyHtoDAsync_v2_ptsz;
                fn cuMemcpyHtoD_v2(
                    to: CUdeviceptr,
                    from: *const c_void,
                    bytes: usize,
                ) twin cuMemcpyHtoD_v2_ptds;
                fn cuMemcpyPeer(
                    to: CUdeviceptr,
                    to_context: CUcontext,
                    from: CUdeviceptr,
                    from_context: CUcontext,
                    bytes: usize,
                ) twin cuMemcpyPeer_ptds;
                fn cuMemcpyPeerAsync(
                    to: CUdeviceptr,
                    to_context: CUcontext,
                    from: CUdeviceptr,
                    from_context: CUcontext,
                    bytes: usize,
                    stream: CUstream,
                ) twin cuMemcpyPeerAsync_ptsz;
                fn cuMemsetD16(to: CUdeviceptr_v1, value: u16, count: u32);
                fn cuMemsetD16Async(
                    to: CUdeviceptr,
                    value: u16,
                    count: usize,
                    stream: CUstream,
                ) twin cuMemsetD16Async_ptsz;
                fn cuMemsetD16_v2(to: CUdeviceptr, value: u16, count: usize) twin cuMemsetD16_v2_ptds;
                fn cuMemsetD2D16(to: CUdeviceptr_v1, pitch: u32, value: u16, width: u32, height: u32);
                fn cuMemsetD2D16Async(
                    to: CUdeviceptr,
                    pitch: usize,
                    value: u16,
                    width: usize,
                    height: usize,
                    stream: CUstream,
                ) twin cuMemsetD2D16Async_ptsz;
                fn cuMemsetD2D16_v2(
                    to: CUdeviceptr,
                    pitch: usize,
                    value: u16,
                    width: usize,
                    height: usize,
                ) twin cuMemsetD2D16_v2_ptds;
                fn cuMemsetD2D32(to: CUdeviceptr_v1, pitch: u32, value: u32, width: u32, height: u32);
                fn cuMemsetD2D32Async(
                    to: CUdeviceptr,
                    pitch: usize,
                    value: u32,
                    width: usize,
                    height: usize,
                    stream: CUstream,
                ) twin cuMemsetD2D32Async_ptsz;
                fn cuMemsetD2D32_v2(
                    to: CUdeviceptr,
                    pitch: usize,
                    value: u32,
                    width: usize,
                    height: usize,
                ) twin cuMemsetD2D32_v2_ptds;
                fn cuMemsetD2D8(to: CUdeviceptr_v1, pitch: u32, value: u8, width: u32, height: u32);
                fn cuMemsetD2D8Async(
                    to: CUdeviceptr,
                    pitch: usize,
                    value: u8,
                    width: usize,
                    height: usize,
                    stream: CUstream,
                ) twin cuMemsetD2D8Async_ptsz;
                fn cuMemsetD2D8_v2(
                    to: CUdeviceptr,
                    pitch: usize,
                    value: u8,
                    width: usize,
                    height: usize,
                ) twin cuMemsetD2D8_v2_ptds;
                fn cuMemsetD32(to: CUdeviceptr_v1, value: u32, count: u32);
                fn cuMemsetD32Async(
                    to: CUdeviceptr,
                    value: u32,
                    count: usize,
                    stream: CUstream,
                ) twin cuMemsetD32Async_ptsz;
                fn cuMemsetD32_v2(to: CUdeviceptr, value: u32, count: usize) twin cuMemsetD32_v2_ptds;
                fn cuMemsetD8(to: CUdeviceptr_v1, value: u8, count: u32);
                fn cuMemsetD8Async(
                    to: CUdeviceptr,
                    value: u8,
                    count: usize,
                    stream: CUstream,
                ) twin cuMemsetD8Async_ptsz;
                fn cuMemsetD8_v2(to: CUdeviceptr, value: u8, count: usize) twin cuMemsetD8_v2_ptds;
            }
            /// Stream-ordered memory and memory pools.
            trait MemoryPoolApi {
                fn cuDeviceGetDefaultMemPool(pool_out: *mut CUmemoryPool, device: CUdevice);
                fn cuDeviceGetMemPool(pool: *mut CUmemoryPool, device: CUdevice);
                fn cuDeviceSetMemPool(device: CUdevice, pool: CUmemoryPool);
                fn cuMemAllocAsync(
                    pointer: *mut CUdeviceptr,
                    bytes: usize,
                    stream: CUstream,
                ) twin cuMemAllocAsync_ptsz;
                fn cuMemAllocFromPoolAsync(
                    pointer: *mut CUdeviceptr,
                    bytes: usize,
                    pool: CUmemoryPool,
                    stream: CUstream,
                ) twin cuMemAllocFromPoolAsync_ptsz;
                fn cuMemFreeAsync(pointer: CUdeviceptr, stream: CUstream) twin cuMemFreeAsync_ptsz;
                fn cuMemPoolCreate(pool: *mut CUmemoryPool, pool_props: *const CUmemPoolProps);
                fn cuMemPoolDestroy(pool: CUmemoryPool);
                fn cuMemPoolExportPointer(share_data_out: *mut CUmemPoolPtrExportData, pointer: CUdeviceptr);
                fn cuMemPoolExportToShareableHandle(
                    handle_out: *mut c_void,
                    pool: CUmemoryPool,
                    handle_type: CUmemAllocationHandleType,
                    flags: u64,
                );
                fn cuMemPoolGetAccess(
                    flags: *mut CUmemAccess_flags,
                    mem_pool: CUmemoryPool,
                    location: *mut CUmemLocation,
                );
                fn cuMemPoolGetAttribute(
                    pool: CUmemoryPool,
                    attribute: CUmemPool_attribute,
                    value: *mut c_void,
                );
                fn cuMemPoolImportFromShareableHandle(
                    pool_out: *mut CUmemoryPool,
                    handle: *mut c_void,
                    handle_type: CUmemAllocationHandleType,
                    flags: u64,
                );
                fn cuMemPoolImportPointer(
                    pointer: *mut CUdeviceptr,
                    pool: CUmemoryPool,
                    share_data: *mut CUmemPoolPtrExportData,
                );
                fn cuMemPoolSetAccess(pool: CUmemoryPool, map: *const CUmemAccessDesc, count: usize);
                fn cuMemPoolSetAttribute(
                    pool: CUmemoryPool,
                    attribute: CUmemPool_attribute,
                    value: *mut c_void,
                );
                fn cuMemPoolTrimTo(pool: CUmemoryPool, min_bytes_to_keep: usize);
            }
            /// Virtual memory management and multicast objects.
            trait VirtualMemoryApi {
                fn cuMemAddressFree(pointer: CUdeviceptr, size: usize);
                fn cuMemAddressReserve(
                    pointer: *mut CUdeviceptr,
                    size: usize,
                    alignment: usize,
                    address: CUdeviceptr,
                    flags: u64,
                );
                fn cuMemCreate(
                    handle: *mut CUmemGenericAllocationHandle,
                    size: usize,
                    properties: *const CUmemAllocationProp,
                    flags: u64,
                );
                fn cuMemExportToShareableHandle(
                    shareable_handle: *mut c_void,
                    handle: CUmemGenericAllocationHandle,
                    handle_type: CUmemAllocationHandleType,
                    flags: u64,
                );
                fn cuMemGetAccess(flags: *mut u64, location: *const CUmemLocation, pointer: CUdeviceptr);
                fn cuMemGetAllocationGranularity(
                    granularity: *mut usize,
                    properties: *const CUmemAllocationProp,
                    option: CUmemAllocationGranularity_flags,
                );
                fn cuMemGetAllocationPropertiesFromHandle(
                    properties: *mut CUmemAllocationProp,
                    handle: CUmemGenericAllocationHandle,
                );
                fn cuMemGetHandleForAddressRange(
                    handle: *mut c_void,
                    pointer: CUdeviceptr,
                    size: usize,
                    handle_type: CUmemRangeHandleType,
                    flags: u64,
                );
                fn cuMemImportFromShareableHandle(
                    handle: *mut CUmemGenericAllocationHandle,
                    os_handle: *mut c_void,
                    sh_handle_type: CUmemAllocationHandleType,
                );
                fn cuMemMap(
                    pointer: CUdeviceptr,
                    size: usize,
                    offset: usize,
                    handle: CUmemGenericAllocationHandle,
                    flags: u64,
                );
                fn cuMemRelease(handle: CUmemGenericAllocationHandle);
                fn cuMemRetainAllocationHandle(
                    handle: *mut CUmemGenericAllocationHandle,
                    address: *mut c_void,
                );
                fn cuMemSetAccess(
                    pointer: CUdeviceptr,
                    size: usize,
                    descriptor: *const CUmemAccessDesc,
                    count: usize,
                );
                fn cuMemUnmap(pointer: CUdeviceptr, size: usize);
                fn cuMulticastAddDevice(mc_handle: CUmemGenericAllocationHandle, device: CUdevice);
                fn cuMulticastBindAddr(
                    mc_handle: CUmemGenericAllocationHandle,
                    mc_offset: usize,
                    pointer: CUdeviceptr,
                    size: usize,
                    flags: u64,
                );
                fn cuMulticastBindMem(
                    mc_handle: CUmemGenericAllocationHandle,
                    mc_offset: usize,
                    mem_handle: CUmemGenericAllocationHandle,
                    mem_offset: usize,
                    size: usize,
                    flags: u64,
                );
                fn cuMulticastCreate(
                    mc_handle: *mut CUmemGenericAllocationHandle,
                    properties: *const CUmulticastObjectProp,
                );
                fn cuMulticastGetGranularity(
                    granularity: *mut usize,
                    properties: *const CUmulticastObjectProp,
                    option: CUmulticastGranularity_flags,
                );
                fn cuMulticastUnbind(
                    mc_handle: CUmemGenericAllocationHandle,
                    device: CUdevice,
                    mc_offset: usize,
                    size: usize,
                );
            }
            /// Arrays, mipmapped arrays, and the texture and surface objects over them.
            trait ArrayApi {
                fn cuArray3DCreate(handle: *mut CUarray, allocate_array: *const CUDA_ARRAY3D_DESCRIPTOR_v1);
                fn cuArray3DCreate_v2(handle: *mut CUarray, allocate_array: *const CUDA_ARRAY3D_DESCRIPTOR);
                fn cuArray3DGetDescriptor(array_descriptor: *mut CUDA_ARRAY3D_DESCRIPTOR_v1, array: CUarray);
                fn cuArray3DGetDescriptor_v2(array_descriptor: *mut CUDA_ARRAY3D_DESCRIPTOR, array: CUarray);
                fn cuArrayCreate(handle: *mut CUarray, allocate_array: *const CUDA_ARRAY_DESCRIPTOR_v1);
                fn cuArrayCreate_v2(handle: *mut CUarray, allocate_array: *const CUDA_ARRAY_DESCRIPTOR);
                fn cuArrayDestroy(array: CUarray);
                fn cuArrayGetDescriptor(array_descriptor: *mut CUDA_ARRAY_DESCRIPTOR_v1, array: CUarray);
                fn cuArrayGetDescriptor_v2(array_descriptor: *mut CUDA_ARRAY_DESCRIPTOR, array: CUarray);
                fn cuArrayGetMemoryRequirements(
                    memory_requirements: *mut CUDA_ARRAY_MEMORY_REQUIREMENTS,
                    array: CUarray,
                    device: CUdevice,
                );
                fn cuArrayGetPlane(plane_array: *mut CUarray, array: CUarray, plane_idx: u32);
                fn cuArrayGetSparseProperties(
                    sparse_properties: *mut CUDA_ARRAY_SPARSE_PROPERTIES,
                    array: CUarray,
                );
                fn cuMemMapArrayAsync(
                    map_info_list: *mut CUarrayMapInfo,
                    count: u32,
                    stream: CUstream,
                ) twin cuMemMapArrayAsync_ptsz;
                fn cuMipmappedArrayCreate(
                    handle: *mut CUmipmappedArray,
                    mipmapped_array_desc: *const CUDA_ARRAY3D_DESCRIPTOR,
                    num_mipmap_levels: u32,
                );
                fn cuMipmappedArrayDestroy(mipmapped_array: CUmipmappedArray);
                fn cuMipmappedArrayGetLevel(
                    level_array: *mut CUarray,
                    mipmapped_array: CUmipmappedArray,
                    level: u32,
                );
                fn cuMipmappedArrayGetMemoryRequirements(
                    memory_requirements: *mut CUDA_ARRAY_MEMORY_REQUIREMENTS,
                    mipmap: CUmipmappedArray,
                    device: CUdevice,
                );
                fn cuMipmappedArrayGetSparseProperties(
                    sparse_properties: *mut CUDA_ARRAY_SPARSE_PROPERTIES,
                    mipmap: CUmipmappedArray,
                );
                fn cuSurfObjectCreate(surf_object: *mut CUsurfObject, res_desc: *const CUDA_RESOURCE_DESC);
                fn cuSurfObjectDestroy(surf_object: CUsurfObject);
                fn cuSurfObjectGetResourceDesc(res_desc: *mut CUDA_RESOURCE_DESC, surf_object: CUsurfObject);
                fn cuTensorMapEncodeIm2col(
                    tensor_map: *mut CUtensorMap,
                    tensor_data_type: CUtensorMapDataType,
                    tensor_rank: u32,
                    global_address: *mut c_void,
                    global_dim: *const u64,
                    global_strides: *const u64,
                    pixel_box_lower_corner: *const i32,
                    pixel_box_upper_corner: *const i32,
                    channels_per_pixel: u32,
                    pixels_per_column: u32,
                    element_strides: *const u32,
                    interleave: CUtensorMapInterleave,
                    swizzle: CUtensorMapSwizzle,
                    l2_promotion: CUtensorMapL2promotion,
                    oob_fill: CUtensorMapFloatOOBfill,
                );
                fn cuTensorMapEncodeTiled(
                    tensor_map: *mut CUtensorMap,
                    tensor_data_type: CUtensorMapDataType,
                    tensor_rank: u32,
                    global_address: *mut c_void,
                    global_dim: *const u64,
                    global_strides: *const u64,
                    box_dim: *const u32,
                    element_strides: *const u32,
                    interleave: CUtensorMapInterleave,
                    swizzle: CUtensorMapSwizzle,
                    l2_promotion: CUtensorMapL2promotion,
                    oob_fill: CUtensorMapFloatOOBfill,
                );
                fn cuTensorMapReplaceAddress(tensor_map: *mut CUtensorMap, global_address: *mut c_void);
                fn cuTexObjectCreate(
                    tex_object: *mut CUtexObject,
                    res_desc: *const CUDA_RESOURCE_DESC,
                    tex_desc: *const CUDA_TEXTURE_DESC,
                    res_view_desc: *const CUDA_RESOURCE_VIEW_DESC,
                );
                fn cuTexObjectDestroy(tex_object: CUtexObject);
                fn cuTexObjectGetResourceDesc(res_desc: *mut CUDA_RESOURCE_DESC, tex_object: CUtexObject);
                fn cuTexObjectGetResourceViewDesc(
                    res_view_desc: *mut CUDA_RESOURCE_VIEW_DESC,
                    tex_object: CUtexObject,
                );
                fn cuTexObjectGetTextureDesc(tex_desc: *mut CUDA_TEXTURE_DESC, tex_object: CUtexObject);
            }
            /// Memory, events and semaphores that are shared with other processes or APIs.
            trait SharingApi {
                fn cuDestroyExternalMemory(ext_mem: CUexternalMemory);
                fn cuDestroyExternalSemaphore(ext_sem: CUexternalSemaphore);
                fn cuExternalMemoryGetMappedBuffer(
                    pointer: *mut CUdeviceptr,
                    ext_mem: CUexternalMemory,
                    buffer_desc: *const CUDA_EXTERNAL_MEMORY_BUFFER_DESC,
                );
                fn cuExternalMemoryGetMappedMipmappedArray(
                    mipmap: *mut CUmipmappedArray,
                    ext_mem: CUexternalMemory,
                    mipmap_desc: *const CUDA_EXTERNAL_MEMORY_MIPMAPPED_ARRAY_DESC,
                );
                fn cuImportExternalMemory(
                    ext_mem_out: *mut CUexternalMemory,
                    mem_handle_desc: *const CUDA_EXTERNAL_MEMORY_HANDLE_DESC,
                );
                fn cuImportExternalSemaphore(
                    ext_sem_out: *mut CUexternalSemaphore,
                    sem_handle_desc: *const CUDA_EXTERNAL_SEMAPHORE_HANDLE_DESC,
                );
                fn cuIpcCloseMemHandle(pointer: CUdeviceptr);
                fn cuIpcGetEventHandle(handle: *mut CUipcEventHandle, event: CUevent);
                fn cuIpcGetMemHandle(handle: *mut CUipcMemHandle, pointer: CUdeviceptr);
                fn cuIpcOpenEventHandle(event: *mut CUevent, handle: CUipcEventHandle);
                fn cuIpcOpenMemHandle(pointer: *mut CUdeviceptr, handle: CUipcMemHandle, flags: u32);
                fn cuIpcOpenMemHandle_v2(pointer: *mut CUdeviceptr, handle: CUipcMemHandle, flags: u32);
                fn cuSignalExternalSemaphoresAsync(
                    ext_sem_array: *const CUexternalSemaphore,
                    params_array: *const CUDA_EXTERNAL_SEMAPHORE_SIGNAL_PARAMS,
                    num_ext_sems: u32,
                    stream: CUstream,
                ) twin cuSignalExternalSemaphoresAsync_ptsz;
                fn cuWaitExternalSemaphoresAsync(
                    ext_sem_array: *const CUexternalSemaphore,
                    params_array: *const CUDA_EXTERNAL_SEMAPHORE_WAIT_PARAMS,
                    num_ext_sems: u32,
                    stream: CUstream,
                ) twin cuWaitExternalSemaphoresAsync_ptsz;
            }
            /// Streams, stream capture, stream-ordered waits and writes, host callbacks.
            trait StreamApi {
                fn cuLaunchHostFunc(
                    stream: CUstream,
                    function: CUhostFn,
                    user_data: *mut c_void,
                ) twin cuLaunchHostFunc_ptsz;
                fn cuStreamAddCallback(
                    stream: CUstream,
                    callback: CUstreamCallback,
                    user_data: *mut c_void,
                    flags: u32,
                ) twin cuStreamAddCallback_ptsz;
                fn cuStreamAttachMemAsync(
                    stream: CUstream,
                    pointer: CUdeviceptr,
                    length: usize,
                    flags: u32,
                ) twin cuStreamAttachMemAsync_ptsz;
                fn cuStreamBatchMemOp(
                    stream: CUstream,
                    count: u32,
                    param_array: *mut CUstreamBatchMemOpParams,
                    flags: u32,
                ) twin cuStreamBatchMemOp_ptsz;
                fn cuStreamBatchMemOp_v2(
                    stream: CUstream,
                    count: u32,
                    param_array: *mut CUstreamBatchMemOpParams,
                    flags: u32,
                ) twin cuStreamBatchMemOp_v2_ptsz;
                fn cuStreamBeginCapture(stream: CUstream) twin cuStreamBeginCapture_ptsz;
                fn cuStreamBeginCaptureToGraph(
                    stream: CUstream,
                    graph: CUgraph,
                    dependencies: *const CUgraphNode,
                    dependency_data: *const CUgraphEdgeData,
                    num_dependencies: usize,
                    mode: CUstreamCaptureMode,
                ) twin cuStreamBeginCaptureToGraph_ptsz;
                fn cuStreamBeginCapture_v2(
                    stream: CUstream,
                    mode: CUstreamCaptureMode,
                ) twin cuStreamBeginCapture_v2_ptsz;
                fn cuStreamCopyAttributes(
                    dst_stream: CUstream,
                    src_stream: CUstream,
                ) twin cuStreamCopyAttributes_ptsz;
                fn cuStreamCreate(stream: *mut CUstream, flags: u32);
                fn cuStreamCreateWithPriority(stream: *mut CUstream, flags: u32, priority: i32);
                fn cuStreamDestroy(stream: CUstream);
                fn cuStreamDestroy_v2(stream: CUstream);
                fn cuStreamEndCapture(stream: CUstream, graph: *mut CUgraph) twin cuStreamEndCapture_ptsz;
                fn cuStreamGetAttribute(
                    stream: CUstream,
                    attribute: CUstreamAttrID,
                    value: *mut CUstreamAttrValue,
                ) twin cuStreamGetAttribute_ptsz;
                fn cuStreamGetCaptureInfo(
                    stream: CUstream,
                    capture_status_out: *mut CUstreamCaptureStatus,
                    id_out: *mut u64,
                ) twin cuStreamGetCaptureInfo_ptsz;
                fn cuStreamGetCaptureInfo_v2(
                    stream: CUstream,
                    capture_status_out: *mut CUstreamCaptureStatus,
                    id_out: *mut u64,
                    graph_out: *mut CUgraph,
                    dependencies_out: *mut *const CUgraphNode,
                    num_dependencies_out: *mut usize,
                ) twin cuStreamGetCaptureInfo_v2_ptsz;
                fn cuStreamGetCaptureInfo_v3(
                    stream: CUstream,
                    capture_status_out: *mut CUstreamCaptureStatus,
                    id_out: *mut u64,
                    graph_out: *mut CUgraph,
                    dependencies_out: *mut *const CUgraphNode,
                    edge_data_out: *mut *const CUgraphEdgeData,
                    num_dependencies_out: *mut usize,
                ) twin cuStreamGetCaptureInfo_v3_ptsz;
                fn cuStreamGetCtx(stream: CUstream, context: *mut CUcontext) twin cuStreamGetCtx_ptsz;
                fn cuStreamGetFlags(stream: CUstream, flags: *mut u32) twin cuStreamGetFlags_ptsz;
                fn cuStreamGetId(stream: CUstream, stream_id: *mut u64) twin cuStreamGetId_ptsz;
                fn cuStreamGetPriority(stream: CUstream, priority: *mut i32) twin cuStreamGetPriority_ptsz;
                fn cuStreamIsCapturing(
                    stream: CUstream,
                    capture_status: *mut CUstreamCaptureStatus,
                ) twin cuStreamIsCapturing_ptsz;
                fn cuStreamQuery(stream: CUstream) twin cuStreamQuery_ptsz;
                fn cuStreamSetAttribute(
                    stream: CUstream,
                    attribute: CUstreamAttrID,
                    param: *const CUstreamAttrValue,
                ) twin cuStreamSetAttribute_ptsz;
                fn cuStreamSynchronize(stream: CUstream) twin cuStreamSynchronize_ptsz;
                fn cuStreamUpdateCaptureDependencies(
                    stream: CUstream,
                    dependencies: *mut CUgraphNode,
                    num_dependencies: usize,
                    flags: u32,
                ) twin cuStreamUpdateCaptureDependencies_ptsz;
                fn cuStreamUpdateCaptureDependencies_v2(
                    stream: CUstream,
                    dependencies: *mut CUgraphNode,
                    dependency_data: *const CUgraphEdgeData,
                    num_dependencies: usize,
                    flags: u32,
                ) twin cuStreamUpdateCaptureDependencies_v2_ptsz;
                fn cuStreamWaitEvent(
                    stream: CUstream,
                    event: CUevent,
                    flags: u32,
                ) twin cuStreamWaitEvent_ptsz;
                fn cuStreamWaitValue32(
                    stream: CUstream,
                    address: CUdeviceptr,
                    value: u32,
                    flags: u32,
                ) twin cuStreamWaitValue32_ptsz;
                fn cuStreamWaitValue32_v2(
                    stream: CUstream,
                    address: CUdeviceptr,
                    value: u32,
                    flags: u32,
                ) twin cuStreamWaitValue32_v2_ptsz;
                fn cuStreamWaitValue64(
                    stream: CUstream,
                    address: CUdeviceptr,
                    value: u64,
                    flags: u32,
                ) twin cuStreamWaitValue64_ptsz;
                fn cuStreamWaitValue64_v2(
                    stream: CUstream,
                    address: CUdeviceptr,
                    value: u64,
                    flags: u32,
                ) twin cuStreamWaitValue64_v2_ptsz;
                fn cuStreamWriteValue32(
                    stream: CUstream,
                    address: CUdeviceptr,
                    value: u32,
                    flags: u32,
                ) twin cuStreamWriteValue32_ptsz;
                fn cuStreamWriteValue32_v2(
                    stream: CUstream,
                    address: CUdeviceptr,
                    value: u32,
                    flags: u32,
                ) twin cuStreamWriteValue32_v2_ptsz;
                fn cuStreamWriteValue64(
                    stream: CUstream,
                    address: CUdeviceptr,
                    value: u64,
                    flags: u32,
                ) twin cuStreamWriteValue64_ptsz;
                fn cuStreamWriteValue64_v2(
                    stream: CUstream,
                    address: CUdeviceptr,
                    value: u64,
                    flags: u32,
                ) twin cuStreamWriteValue64_v2_ptsz;
                fn cuThreadExchangeStreamCaptureMode(mode: *mut CUstreamCaptureMode);
            }
            /// Creation, recording and timing of events.
            trait EventApi {
                fn cuEventCreate(event: *mut CUevent, flags: u32);
                fn cuEventDestroy(event: CUevent);
                fn cuEventDestroy_v2(event: CUevent);
                fn cuEventElapsedTime(milliseconds: *mut f32, start: CUevent, end: CUevent);
                fn cuEventQuery(event: CUevent);
                fn cuEventRecord(event: CUevent, stream: CUstream) twin cuEventRecord_ptsz;
                fn cuEventRecordWithFlags(
                    event: CUevent,
                    stream: CUstream,
                    flags: u32,
                ) twin cuEventRecordWithFlags_ptsz;
                fn cuEventSynchronize(event: CUevent);
            }
            /// Kernel launches and occupancy.
            trait LaunchApi {
                fn cuFuncSetBlockShape(function: CUfunction, x: i32, y: i32, z: i32);
                fn cuFuncSetSharedSize(function: CUfunction, bytes: u32);
                fn cuLaunch(function: CUfunction);
                fn cuLaunchCooperativeKernel(
                    function: CUfunction,
                    grid_dim_x: u32,
                    grid_dim_y: u32,
                    grid_dim_z: u32,
                    block_dim_x: u32,
                    block_dim_y: u32,
                    block_dim_z: u32,
                    shared_mem_bytes: u32,
                    stream: CUstream,
                    kernel_params: *mut *mut c_void,
                ) twin cuLaunchCooperativeKernel_ptsz;
                fn cuLaunchCooperativeKernelMultiDevice(
                    launch_params_list: *mut CUDA_LAUNCH_PARAMS,
                    num_devices: u32,
                    flags: u32,
                );
                fn cuLaunchGrid(function: CUfunction, grid_width: i32, grid_height: i32);
                fn cuLaunchGridAsync(
                    function: CUfunction,
                    grid_width: i32,
                    grid_height: i32,
                    stream: CUstream,
                );
                fn cuLaunchKernel(
                    function: CUfunction,
                    grid_dim_x: u32,
                    grid_dim_y: u32,
                    grid_dim_z: u32,
                    block_dim_x: u32,
                    block_dim_y: u32,
                    block_dim_z: u32,
                    shared_mem_bytes: u32,
                    stream: CUstream,
                    kernel_params: *mut *mut c_void,
                    extra: *mut *mut c_void,
                ) twin cuLaunchKernel_ptsz;
                fn cuLaunchKernelEx(
                    config: *const CUlaunchConfig,
                    function: CUfunction,
                    kernel_params: *mut *mut c_void,
                    extra: *mut *mut c_void,
                ) twin cuLaunchKernelEx_ptsz;
                fn cuOccupancyAvailableDynamicSMemPerBlock(
                    dynamic_shared_size: *mut usize,
                    function: CUfunction,
                    num_blocks: i32,
                    block_size: i32,
                );
                fn cuOccupancyMaxActiveBlocksPerMultiprocessor(
                    num_blocks: *mut i32,
                    function: CUfunction,
                    block_size: i32,
                    dynamic_shared_size: usize,
                );
                fn cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(
                    num_blocks: *mut i32,
                    function: CUfunction,
                    block_size: i32,
                    dynamic_shared_size: usize,
                    flags: u32,
                );
                fn cuOccupancyMaxActiveClusters(
                    num_clusters: *mut i32,
                    function: CUfunction,
                    config: *const CUlaunchConfig,
                );
                fn cuOccupancyMaxPotentialBlockSize(
                    min_grid_size: *mut i32,
                    block_size: *mut i32,
                    function: CUfunction,
                    block_size_to_dynamic_shared_size: CUoccupancyB2DSize,
                    dynamic_shared_size: usize,
                    block_size_limit: i32,
                );
                fn cuOccupancyMaxPotentialBlockSizeWithFlags(
                    min_grid_size: *mut i32,
                    block_size: *mut i32,
                    function: CUfunction,
                    block_size_to_dynamic_shared_size: CUoccupancyB2DSize,
                    dynamic_shared_size: usize,
                    block_size_limit: i32,
                    flags: u32,
                );
                fn cuOccupancyMaxPotentialClusterSize(
                    cluster_size: *mut i32,
                    function: CUfunction,
                    config: *const CUlaunchConfig,
                );
                fn cuParamSetSize(function: CUfunction, bytes: u32);
                fn cuParamSetTexRef(function: CUfunction, texunit: i32, texture: CUtexref);
                fn cuParamSetf(function: CUfunction, offset: i32, value: f32);
                fn cuParamSeti(function: CUfunction, offset: i32, value: u32);
                fn cuParamSetv(function: CUfunction, offset: i32, pointer: *mut c_void, bytes: u32);
            }
            /// Graphs, user objects and graph memory.
            trait GraphApi {
                fn cuDeviceGetGraphMemAttribute(
                    device: CUdevice,
                    attribute: CUgraphMem_attribute,
                    value: *mut c_void,
                );
                fn cuDeviceGraphMemTrim(device: CUdevice);
                fn cuDeviceSetGraphMemAttribute(
                    device: CUdevice,
                    attribute: CUgraphMem_attribute,
                    value: *mut c_void,
                );
                fn cuGraphAddDependencies(
                    graph: CUgraph,
                    from: *const CUgraphNode,
                    to: *const CUgraphNode,
                    num_dependencies: usize,
                );
                fn cuGraphAddDependencies_v2(
                    graph: CUgraph,
                    from: *const CUgraphNode,
                    to: *const CUgraphNode,
                    edge_data: *const CUgraphEdgeData,
                    num_dependencies: usize,
                );
                fn cuGraphClone(graph_clone: *mut CUgraph, original_graph: CUgraph);
                fn cuGraphConditionalHandleCreate(
                    handle_out: *mut CUgraphConditionalHandle,
                    graph: CUgraph,
                    context: CUcontext,
                    default_launch_value: u32,
                    flags: u32,
                );
                fn cuGraphCreate(graph: *mut CUgraph, flags: u32);
                fn cuGraphDebugDotPrint(graph: CUgraph, path: *const c_char, flags: u32);
                fn cuGraphDestroy(graph: CUgraph);
                fn cuGraphDestroyNode(node: CUgraphNode);
                fn cuGraphExternalSemaphoresSignalNodeGetParams(
                    node: CUgraphNode,
                    params_out: *mut CUDA_EXT_SEM_SIGNAL_NODE_PARAMS,
                );
                fn cuGraphExternalSemaphoresSignalNodeSetParams(
                    node: CUgraphNode,
                    node_params: *const CUDA_EXT_SEM_SIGNAL_NODE_PARAMS,
                );
                fn cuGraphExternalSemaphoresWaitNodeGetParams(
                    node: CUgraphNode,
                    params_out: *mut CUDA_EXT_SEM_WAIT_NODE_PARAMS,
                );
                fn cuGraphExternalSemaphoresWaitNodeSetParams(
                    node: CUgraphNode,
                    node_params: *const CUDA_EXT_SEM_WAIT_NODE_PARAMS,
                );
                fn cuGraphGetEdges(
                    graph: CUgraph,
                    from: *mut CUgraphNode,
                    to: *mut CUgraphNode,
                    num_edges: *mut usize,
                );
                fn cuGraphGetEdges_v2(
                    graph: CUgraph,
                    from: *mut CUgraphNode,
                    to: *mut CUgraphNode,
                    edge_data: *mut CUgraphEdgeData,
                    num_edges: *mut usize,
                );
                fn cuGraphGetNodes(graph: CUgraph, nodes: *mut CUgraphNode, num_nodes: *mut usize);
                fn cuGraphGetRootNodes(
                    graph: CUgraph,
                    root_nodes: *mut CUgraphNode,
                    num_root_nodes: *mut usize,
                );
                fn cuGraphNodeFindInClone(
                    node: *mut CUgraphNode,
                    original_node: CUgraphNode,
                    cloned_graph: CUgraph,
                );
                fn cuGraphNodeGetDependencies(
                    node: CUgraphNode,
                    dependencies: *mut CUgraphNode,
                    num_dependencies: *mut usize,
                );
                fn cuGraphNodeGetDependencies_v2(
                    node: CUgraphNode,
                    dependencies: *mut CUgraphNode,
                    edge_data: *mut CUgraphEdgeData,
                    num_dependencies: *mut usize,
                );
                fn cuGraphNodeGetDependentNodes(
                    node: CUgraphNode,
                    dependent_nodes: *mut CUgraphNode,
                    num_dependent_nodes: *mut usize,
                );
                fn cuGraphNodeGetDependentNodes_v2(
                    node: CUgraphNode,
                    dependent_nodes: *mut CUgraphNode,
                    edge_data: *mut CUgraphEdgeData,
                    num_dependent_nodes: *mut usize,
                );
                fn cuGraphNodeGetType(node: CUgraphNode, kind: *mut CUgraphNodeType);
                fn cuGraphReleaseUserObject(graph: CUgraph, object: CUuserObject, count: u32);
                fn cuGraphRemoveDependencies(
                    graph: CUgraph,
                    from: *const CUgraphNode,
                    to: *const CUgraphNode,
                    num_dependencies: usize,
                );
                fn cuGraphRemoveDependencies_v2(
                    graph: CUgraph,
                    from: *const CUgraphNode,
                    to: *const CUgraphNode,
                    edge_data: *const CUgraphEdgeData,
                    num_dependencies: usize,
                );
                fn cuGraphRetainUserObject(graph: CUgraph, object: CUuserObject, count: u32, flags: u32);
                fn cuUserObjectCreate(
                    object_out: *mut CUuserObject,
                    pointer: *mut c_void,
                    destroy: CUhostFn,
                    initial_refcount: u32,
                    flags: u32,
                );
                fn cuUserObjectRelease(object: CUuserObject, count: u32);
                fn cuUserObjectRetain(object: CUuserObject, count: u32);
            }
            /// Creation and parameters of graph nodes.
            trait GraphNodeApi {
                fn cuGraphAddBatchMemOpNode(
                    graph_node: *mut CUgraphNode,
                    graph: CUgraph,
                    dependencies: *const CUgraphNode,
                    num_dependencies: usize,
                    node_params: *const CUDA_BATCH_MEM_OP_NODE_PARAMS,
                );
                fn cuGraphAddChildGraphNode(
                    graph_node: *mut CUgraphNode,
                    graph: CUgraph,
                    dependencies: *const CUgraphNode,
                    num_dependencies: usize,
                    child_graph: CUgraph,
                );
                fn cuGraphAddEmptyNode(
                    graph_node: *mut CUgraphNode,
                    graph: CUgraph,
                    dependencies: *const CUgraphNode,
                    num_dependencies: usize,
                );
                fn cuGraphAddEventRecordNode(
                    graph_node: *mut CUgraphNode,
                    graph: CUgraph,
                    dependencies: *const CUgraphNode,
                    num_dependencies: usize,
                    event: CUevent,
                );
                fn cuGraphAddEventWaitNode(
                    graph_node: *mut CUgraphNode,
                    graph: CUgraph,
                    dependencies: *const CUgraphNode,
                    num_dependencies: usize,
                    event: CUevent,
                );
                fn cuGraphAddExternalSemaphoresSignalNode(
                    graph_node: *mut CUgraphNode,
                    graph: CUgraph,
                    dependencies: *const CUgraphNode,
                    num_dependencies: usize,
                    node_params: *const CUDA_EXT_SEM_SIGNAL_NODE_PARAMS,
                );
                fn cuGraphAddExternalSemaphoresWaitNode(
                    graph_node: *mut CUgraphNode,
                    graph: CUgraph,
                    dependencies: *const CUgraphNode,
                    num_dependencies: usize,
                    node_params: *const CUDA_EXT_SEM_WAIT_NODE_PARAMS,
                );
                fn cuGraphAddHostNode(
                    graph_node: *mut CUgraphNode,
                    graph: CUgraph,
                    dependencies: *const CUgraphNode,
                    num_dependencies: usize,
                    node_params: *const CUDA_HOST_NODE_PARAMS,
                );
                fn cuGraphAddKernelNode(
                    graph_node: *mut CUgraphNode,
                    graph: CUgraph,
                    dependencies: *const CUgraphNode,
                    num_dependencies: usize,
                    node_params: *const CUDA_KERNEL_NODE_PARAMS_v1,
                );
                fn cuGraphAddKernelNode_v2(
                    graph_node: *mut CUgraphNode,
                    graph: CUgraph,
                    dependencies: *const CUgraphNode,
                    num_dependencies: usize,
                    node_params: *const CUDA_KERNEL_NODE_PARAMS,
                );
                fn cuGraphAddMemAllocNode(
                    graph_node: *mut CUgraphNode,
                    graph: CUgraph,
                    dependencies: *const CUgraphNode,
                    num_dependencies: usize,
                    node_params: *mut CUDA_MEM_ALLOC_NODE_PARAMS,
                );
                fn cuGraphAddMemFreeNode(
                    graph_node: *mut CUgraphNode,
                    graph: CUgraph,
                    dependencies: *const CUgraphNode,
                    num_dependencies: usize,
                    pointer: CUdeviceptr,
                );
                fn cuGraphAddMemcpyNode(
                    graph_node: *mut CUgraphNode,
                    graph: CUgraph,
                    dependencies: *const CUgraphNode,
                    num_dependencies: usize,
                    copy_params: *const CUDA_MEMCPY3D,
                    context: CUcontext,
                );
                fn cuGraphAddMemsetNode(
                    graph_node: *mut CUgraphNode,
                    graph: CUgraph,
                    dependencies: *const CUgraphNode,
                    num_dependencies: usize,
                    memset_params: *const CUDA_MEMSET_NODE_PARAMS,
                    context: CUcontext,
                );
                fn cuGraphAddNode(
                    graph_node: *mut CUgraphNode,
                    graph: CUgraph,
                    dependencies: *const CUgraphNode,
                    num_dependencies: usize,
                    node_params: *mut CUgraphNodeParams,
                );
                fn cuGraphAddNode_v2(
                    graph_node: *mut CUgraphNode,
                    graph: CUgraph,
                    dependencies: *const CUgraphNode,
                    dependency_data: *const CUgraphEdgeData,
                    num_dependencies: usize,
                    node_params: *mut CUgraphNodeParams,
                );
                fn cuGraphBatchMemOpNodeGetParams(
                    node: CUgraphNode,
                    node_params_out: *mut CUDA_BATCH_MEM_OP_NODE_PARAMS,
                );
                fn cuGraphBatchMemOpNodeSetParams(
                    node: CUgraphNode,
                    node_params: *const CUDA_BATCH_MEM_OP_NODE_PARAMS,
                );
                fn cuGraphChildGraphNodeGetGraph(node: CUgraphNode, graph: *mut CUgraph);
                fn cuGraphEventRecordNodeGetEvent(node: CUgraphNode, event_out: *mut CUevent);
                fn cuGraphEventRecordNodeSetEvent(node: CUgraphNode, event: CUevent);
                fn cuGraphEventWaitNodeGetEvent(node: CUgraphNode, event_out: *mut CUevent);
                fn cuGraphEventWaitNodeSetEvent(node: CUgraphNode, event: CUevent);
                fn cuGraphHostNodeGetParams(node: CUgraphNode, node_params: *mut CUDA_HOST_NODE_PARAMS);
                fn cuGraphHostNodeSetParams(node: CUgraphNode, node_params: *const CUDA_HOST_NODE_PARAMS);
                fn cuGraphKernelNodeCopyAttributes(to: CUgraphNode, from: CUgraphNode);
                fn cuGraphKernelNodeGetAttribute(
                    node: CUgraphNode,
                    attribute: CUkernelNodeAttrID,
                    value_out: *mut CUkernelNodeAttrValue,
                );
                fn cuGraphKernelNodeGetParams(
                    node: CUgraphNode,
                    node_params: *mut CUDA_KERNEL_NODE_PARAMS_v1,
                );
                fn cuGraphKernelNodeGetParams_v2(
                    node: CUgraphNode,
                    node_params: *mut CUDA_KERNEL_NODE_PARAMS,
                );
                fn cuGraphKernelNodeSetAttribute(
                    node: CUgraphNode,
                    attribute: CUkernelNodeAttrID,
                    value: *const CUkernelNodeAttrValue,
                );
                fn cuGraphKernelNodeSetParams(
                    node: CUgraphNode,
                    node_params: *const CUDA_KERNEL_NODE_PARAMS_v1,
                );
                fn cuGraphKernelNodeSetParams_v2(
                    node: CUgraphNode,
                    node_params: *const CUDA_KERNEL_NODE_PARAMS,
                );
                fn cuGraphMemAllocNodeGetParams(
                    node: CUgraphNode,
                    params_out: *mut CUDA_MEM_ALLOC_NODE_PARAMS,
                );
                fn cuGraphMemFreeNodeGetParams(node: CUgraphNode, pointer: *mut CUdeviceptr);
                fn cuGraphMemcpyNodeGetParams(node: CUgraphNode, node_params: *mut CUDA_MEMCPY3D);
                fn cuGraphMemcpyNodeSetParams(node: CUgraphNode, node_params: *const CUDA_MEMCPY3D);
                fn cuGraphMemsetNodeGetParams(node: CUgraphNode, node_params: *mut CUDA_MEMSET_NODE_PARAMS);
                fn cuGraphMemsetNodeSetParams(node: CUgraphNode, node_params: *const CUDA_MEMSET_NODE_PARAMS);
                fn cuGraphNodeSetParams(node: CUgraphNode, node_params: *mut CUgraphNodeParams);
            }
            /// Instantiation, update and launch of executable graphs.
            trait GraphExecApi {
                fn cuGraphExecBatchMemOpNodeSetParams(
                    graph_exec: CUgraphExec,
                    node: CUgraphNode,
                    node_params: *const CUDA_BATCH_MEM_OP_NODE_PARAMS,
                );
                fn cuGraphExecChildGraphNodeSetParams(
                    graph_exec: CUgraphExec,
                    node: CUgraphNode,
                    child_graph: CUgraph,
                );
                fn cuGraphExecDestroy(graph_exec: CUgraphExec);
                fn cuGraphExecEventRecordNodeSetEvent(
                    graph_exec: CUgraphExec,
                    node: CUgraphNode,
                    event: CUevent,
                );
                fn cuGraphExecEventWaitNodeSetEvent(
                    graph_exec: CUgraphExec,
                    node: CUgraphNode,
                    event: CUevent,
                );
                fn cuGraphExecExternalSemaphoresSignalNodeSetParams(
                    graph_exec: CUgraphExec,
                    node: CUgraphNode,
                    node_params: *const CUDA_EXT_SEM_SIGNAL_NODE_PARAMS,
                );
                fn cuGraphExecExternalSemaphoresWaitNodeSetParams(
                    graph_exec: CUgraphExec,
                    node: CUgraphNode,
                    node_params: *const CUDA_EXT_SEM_WAIT_NODE_PARAMS,
                );
                fn cuGraphExecGetFlags(graph_exec: CUgraphExec, flags: *mut u64);
                fn cuGraphExecHostNodeSetParams(
                    graph_exec: CUgraphExec,
                    node: CUgraphNode,
                    node_params: *const CUDA_HOST_NODE_PARAMS,
                );
                fn cuGraphExecKernelNodeSetParams(
                    graph_exec: CUgraphExec,
                    node: CUgraphNode,
                    node_params: *const CUDA_KERNEL_NODE_PARAMS_v1,
                );
                fn cuGraphExecKernelNodeSetParams_v2(
                    graph_exec: CUgraphExec,
                    node: CUgraphNode,
                    node_params: *const CUDA_KERNEL_NODE_PARAMS,
                );
                fn cuGraphExecMemcpyNodeSetParams(
                    graph_exec: CUgraphExec,
                    node: CUgraphNode,
                    copy_params: *const CUDA_MEMCPY3D,
                    context: CUcontext,
                );
                fn cuGraphExecMemsetNodeSetParams(
                    graph_exec: CUgraphExec,
                    node: CUgraphNode,
                    memset_params: *const CUDA_MEMSET_NODE_PARAMS,
                    context: CUcontext,
                );
                fn cuGraphExecNodeSetParams(
                    graph_exec: CUgraphExec,
                    node: CUgraphNode,
                    node_params: *mut CUgraphNodeParams,
                );
                fn cuGraphExecUpdate(
                    graph_exec: CUgraphExec,
                    graph: CUgraph,
                    error_node_out: *mut CUgraphNode,
                    update_result_out: *mut CUgraphExecUpdateResult,
                );
                fn cuGraphExecUpdate_v2(
                    graph_exec: CUgraphExec,
                    graph: CUgraph,
                    result_info: *mut CUgraphExecUpdateResultInfo,
                );
                fn cuGraphInstantiate(
                    graph_exec: *mut CUgraphExec,
                    graph: CUgraph,
                    error_node: *mut CUgraphNode,
                    log_buffer: *mut c_char,
                    length: usize,
                );
                fn cuGraphInstantiateWithFlags(graph_exec: *mut CUgraphExec, graph: CUgraph, flags: u64);
                fn cuGraphInstantiateWithParams(
                    graph_exec: *mut CUgraphExec,
                    graph: CUgraph,
                    instantiate_params: *mut CUDA_GRAPH_INSTANTIATE_PARAMS,
                ) twin cuGraphInstantiateWithParams_ptsz;
                fn cuGraphInstantiate_v2(
                    graph_exec: *mut CUgraphExec,
                    graph: CUgraph,
                    error_node: *mut CUgraphNode,
                    log_buffer: *mut c_char,
                    length: usize,
                );
                fn cuGraphLaunch(graph: CUgraphExec, stream: CUstream) twin cuGraphLaunch_ptsz;
                fn cuGraphNodeGetEnabled(graph_exec: CUgraphExec, node: CUgraphNode, is_enabled: *mut u32);
                fn cuGraphNodeSetEnabled(graph_exec: CUgraphExec, node: CUgraphNode, is_enabled: u32);
                fn cuGraphUpload(graph: CUgraphExec, stream: CUstream) twin cuGraphUpload_ptsz;
            }
            /// Interoperability with OpenGL, EGL and VDPAU.
            trait GraphicsApi {
                fn cuEGLStreamConsumerAcquireFrame(
                    connection: *mut CUeglStreamConnection,
                    cuda_resource: *mut CUgraphicsResource,
                    stream: *mut CUstream,
                    timeout: u32,
                );
                fn cuEGLStreamConsumerConnect(connection: *mut CUeglStreamConnection, stream: EGLStreamKHR);
                fn cuEGLStreamConsumerConnectWithFlags(
                    connection: *mut CUeglStreamConnection,
                    stream: EGLStreamKHR,
                    flags: u32,
                );
                fn cuEGLStreamConsumerDisconnect(connection: *mut CUeglStreamConnection);
                fn cuEGLStreamConsumerReleaseFrame(
                    connection: *mut CUeglStreamConnection,
                    cuda_resource: CUgraphicsResource,
                    stream: *mut CUstream,
                );
                fn cuEGLStreamProducerConnect(
                    connection: *mut CUeglStreamConnection,
                    stream: EGLStreamKHR,
                    width: EGLint,
                    height: EGLint,
                );
                fn cuEGLStreamProducerDisconnect(connection: *mut CUeglStreamConnection);
                fn cuEGLStreamProducerPresentFrame(
                    connection: *mut CUeglStreamConnection,
                    frame: CUeglFrame,
                    stream: *mut CUstream,
                );
                fn cuEGLStreamProducerReturnFrame(
                    connection: *mut CUeglStreamConnection,
                    frame: *mut CUeglFrame,
                    stream: *mut CUstream,
                );
                fn cuGLCtxCreate(context: *mut CUcontext, flags: u32, device: CUdevice);
                fn cuGLCtxCreate_v2(context: *mut CUcontext, flags: u32, device: CUdevice);
                fn cuGLGetDevices(
                    cuda_device_count: *mut u32,
                    cuda_devices: *mut CUdevice,
                    room: u32,
                    device_list: CUGLDeviceList,
                );
                fn cuGLGetDevices_v2(
                    cuda_device_count: *mut u32,
                    cuda_devices: *mut CUdevice,
                    room: u32,
                    device_list: CUGLDeviceList,
                );
                fn cuGLInit();
                fn cuGLMapBufferObject(pointer: *mut CUdeviceptr_v1, size: *mut u32, buffer: GLuint);
                fn cuGLMapBufferObjectAsync(
                    pointer: *mut CUdeviceptr_v1,
                    size: *mut u32,
                    buffer: GLuint,
                    stream: CUstream,
                );
                fn cuGLMapBufferObjectAsync_v2(
                    pointer: *mut CUdeviceptr,
                    size: *mut usize,
                    buffer: GLuint,
                    stream: CUstream,
                ) twin cuGLMapBufferObjectAsync_v2_ptsz;
                fn cuGLMapBufferObject_v2(
                    pointer: *mut CUdeviceptr,
                    size: *mut usize,
                    buffer: GLuint,
                ) twin cuGLMapBufferObject_v2_ptds;
                fn cuGLRegisterBufferObject(buffer: GLuint);
                fn cuGLSetBufferObjectMapFlags(buffer: GLuint, flags: u32);
                fn cuGLUnmapBufferObject(buffer: GLuint);
                fn cuGLUnmapBufferObjectAsync(buffer: GLuint, stream: CUstream);
                fn cuGLUnregisterBufferObject(buffer: GLuint);
                fn cuGraphicsEGLRegisterImage(
                    cuda_resource: *mut CUgraphicsResource,
                    image: EGLImageKHR,
                    flags: u32,
                );
                fn cuGraphicsGLRegisterBuffer(
                    cuda_resource: *mut CUgraphicsResource,
                    buffer: GLuint,
                    flags: u32,
                );
                fn cuGraphicsGLRegisterImage(
                    cuda_resource: *mut CUgraphicsResource,
                    image: GLuint,
                    target: GLenum,
                    flags: u32,
                );
                fn cuGraphicsMapResources(
                    count: u32,
                    resources: *mut CUgraphicsResource,
                    stream: CUstream,
                ) twin cuGraphicsMapResources_ptsz;
                fn cuGraphicsResourceGetMappedEglFrame(
                    frame: *mut CUeglFrame,
                    resource: CUgraphicsResource,
                    index: u32,
                    mip_level: u32,
                );
                fn cuGraphicsResourceGetMappedMipmappedArray(
                    mipmapped_array: *mut CUmipmappedArray,
                    resource: CUgraphicsResource,
                );
                fn cuGraphicsResourceGetMappedPointer(
                    pointer: *mut CUdeviceptr_v1,
                    size: *mut u32,
                    resource: CUgraphicsResource,
                );
                fn cuGraphicsResourceGetMappedPointer_v2(
                    pointer: *mut CUdeviceptr,
                    size: *mut usize,
                    resource: CUgraphicsResource,
                );
                fn cuGraphicsResourceSetMapFlags(resource: CUgraphicsResource, flags: u32);
                fn cuGraphicsResourceSetMapFlags_v2(resource: CUgraphicsResource, flags: u32);
                fn cuGraphicsSubResourceGetMappedArray(
                    array: *mut CUarray,
                    resource: CUgraphicsResource,
                    array_index: u32,
                    mip_level: u32,
                );
                fn cuGraphicsUnmapResources(
                    count: u32,
                    resources: *mut CUgraphicsResource,
                    stream: CUstream,
                ) twin cuGraphicsUnmapResources_ptsz;
                fn cuGraphicsUnregisterResource(resource: CUgraphicsResource);
                fn cuGraphicsVDPAURegisterOutputSurface(
                    cuda_resource: *mut CUgraphicsResource,
                    vdp_surface: VdpOutputSurface,
                    flags: u32,
                );
                fn cuGraphicsVDPAURegisterVideoSurface(
                    cuda_resource: *mut CUgraphicsResource,
                    vdp_surface: VdpVideoSurface,
                    flags: u32,
                );
                fn cuVDPAUCtxCreate(
                    context: *mut CUcontext,
                    flags: u32,
                    device: CUdevice,
                    vdp_device: VdpDevice,
                    vdp_get_proc_address: *mut c_void,
                );
                fn cuVDPAUCtxCreate_v2(
                    context: *mut CUcontext,
                    flags: u32,
                    device: CUdevice,
                    vdp_device: VdpDevice,
                    vdp_get_proc_address: *mut c_void,
                );
                fn cuVDPAUGetDevice(
                    device: *mut CUdevice,
                    vdp_device: VdpDevice,
                    vdp_get_proc_address: *mut c_void,
                );
            }
            /// Entry points of the debugger, and functions whose arguments are not public.
            trait DebuggerApi {
                fn cuEGLApiInit();
                fn cuMemGetAttribute();
                fn cuMemGetAttribute_v2();
                fn cudbgApiAttach();
                fn cudbgApiClientPid();
                fn cudbgApiClientRevision();
                fn cudbgApiDetach();
                fn cudbgApiInit();
                fn cudbgAttachHandlerAvailable();
                fn cudbgDebuggerCapabilities();
                fn cudbgDebuggerInitialized();
                fn cudbgDetachSuspendedDevicesMask();
                fn cudbgEnableIntegratedMemcheck();
                fn cudbgEnableLaunchBlocking();
                fn cudbgEnablePreemptionDebugging();
                fn cudbgGetAPI();
                fn cudbgGetAPIVersion();
                fn cudbgInjectionPath();
                fn cudbgIpcFlag();
                fn cudbgMain();
                fn cudbgReportDriverApiError();
                fn cudbgReportDriverApiErrorFlags();
                fn cudbgReportDriverInternalError();
                fn cudbgReportedDriverApiErrorCode();
                fn cudbgReportedDriverApiErrorFuncNameAddr();
                fn cudbgReportedDriverApiErrorFuncNameSize();
                fn cudbgReportedDriverInternalErrorCode();
                fn cudbgResumeForAttachDetach();
                fn cudbgRpcEnabled();
                fn cudbgSessionId();
                fn cudbgUseExternalDebugger();
            }
        }
    };
}
