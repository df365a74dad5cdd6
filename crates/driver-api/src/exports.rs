//! The names that each driver version exports.

use crate::cuda::CUresult;

/// One of the driver's two libraries.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum DriverLibraryKind {
    /// The CUDA driver library, `libcuda.so.1`.
    Cuda,
    /// The management library (NVML), `libnvidia-ml.so.1`.
    Nvml,
}

impl DriverLibraryKind {
    /// Both libraries, in declaration order.
    pub const ALL: [Self; 2] = [Self::Cuda, Self::Nvml];

    /// Returns the name under which programs load the library.
    pub const fn soname(self) -> &'static str {
        match self {
            Self::Cuda => "libcuda.so.1",
            Self::Nvml => "libnvidia-ml.so.1",
        }
    }
}

/// The driver versions of the table, oldest first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum DriverVersion {
    /// Driver 535.261.03, with CUDA 12.2.
    R535,
    /// Driver 550.163.01, with CUDA 12.4.
    R550,
}

impl DriverVersion {
    /// All versions, oldest first.
    pub const ALL: [Self; 2] = [Self::R535, Self::R550];

    /// Returns the driver branch: 535 or 550.
    pub const fn branch(self) -> u32 {
        match self {
            Self::R535 => 535,
            Self::R550 => 550,
        }
    }

    /// Returns the full version, as NVML reports it.
    pub const fn version(self) -> &'static str {
        match self {
            Self::R535 => "535.261.03",
            Self::R550 => "550.163.01",
        }
    }

    /// Returns the CUDA version, as `cuDriverGetVersion` reports it: 12020 is 12.2.
    pub const fn cuda(self) -> i32 {
        match self {
            Self::R535 => 12020,
            Self::R550 => 12040,
        }
    }

    /// Returns whether `cuGetErrorName` and `cuGetErrorString` of this version know a code. The table also has newer
    /// ones.
    pub fn knows(self, code: CUresult) -> bool {
        let newer = match self {
            Self::R535 => [226, 402, 721, 913, 914, 915, 916].as_slice(),
            Self::R550 => &[226, 721],
        };
        crate::cuda::name(code).is_some() && !newer.contains(&code)
    }
}

/// Returns the names that a library of a driver exports, in the order of the table.
pub fn exports(library: DriverLibraryKind, driver: DriverVersion) -> impl Iterator<Item = &'static str> {
    let (names, others) = match library {
        DriverLibraryKind::Cuda => (cuda::NAMES, [].as_slice()),
        // Not in the table, because it returns a string.
        DriverLibraryKind::Nvml => (nvml::NAMES, ["nvmlErrorString"].as_slice()),
    };
    names.iter().chain(others).copied().filter(move |name| since(library, name) <= driver)
}

/// Returns the first driver that exports a name of the table.
pub fn since(library: DriverLibraryKind, name: &str) -> DriverVersion {
    let new = match library {
        DriverLibraryKind::Cuda => CUDA_550,
        DriverLibraryKind::Nvml => NVML_550,
    };
    if new.binary_search(&name).is_ok() { DriverVersion::R550 } else { DriverVersion::R535 }
}

/// Returns the twin of a CUDA function: the variant that uses the per-thread default stream instead of the legacy
/// one.
pub fn twin(name: &str) -> Option<&'static str> {
    cuda::TWINS.iter().find(|pair| pair.0 == name).map(|pair| pair.1)
}

/// The names of libcuda that are variables of the debugger interface, with their sizes in bytes. The table has them
/// as functions without arguments, because only debuggers read them.
pub const VARIABLES: &[(&str, usize)] = &[
    ("cudbgApiClientPid", 4),
    ("cudbgApiClientRevision", 4),
    ("cudbgAttachHandlerAvailable", 4),
    ("cudbgDebuggerCapabilities", 4),
    ("cudbgDebuggerInitialized", 4),
    ("cudbgDetachSuspendedDevicesMask", 4),
    ("cudbgEnableIntegratedMemcheck", 4),
    ("cudbgEnableLaunchBlocking", 4),
    ("cudbgEnablePreemptionDebugging", 4),
    ("cudbgInjectionPath", 4096),
    ("cudbgIpcFlag", 4),
    ("cudbgReportDriverApiErrorFlags", 4),
    ("cudbgReportedDriverApiErrorCode", 8),
    ("cudbgReportedDriverApiErrorFuncNameAddr", 8),
    ("cudbgReportedDriverApiErrorFuncNameSize", 8),
    ("cudbgReportedDriverInternalErrorCode", 8),
    ("cudbgResumeForAttachDetach", 4),
    ("cudbgRpcEnabled", 4),
    ("cudbgSessionId", 4),
    ("cudbgUseExternalDebugger", 4),
];

/// Names that libcuda exports since driver 550, sorted.
const CUDA_550: &[&str] = &[
    "cuCtxFromGreenCtx",
    "cuCtxGetDevResource",
    "cuDevResourceGenerateDesc",
    "cuDevSmResourceSplitByCount",
    "cuDeviceGetDevResource",
    "cuDeviceRegisterAsyncNotification",
    "cuDeviceUnregisterAsyncNotification",
    "cuFuncGetName",
    "cuFuncGetParamInfo",
    "cuFuncIsLoaded",
    "cuFuncLoad",
    "cuGraphAddDependencies_v2",
    "cuGraphAddNode_v2",
    "cuGraphConditionalHandleCreate",
    "cuGraphGetEdges_v2",
    "cuGraphNodeGetDependencies_v2",
    "cuGraphNodeGetDependentNodes_v2",
    "cuGraphRemoveDependencies_v2",
    "cuGreenCtxCreate",
    "cuGreenCtxDestroy",
    "cuGreenCtxGetDevResource",
    "cuGreenCtxRecordEvent",
    "cuGreenCtxWaitEvent",
    "cuKernelGetName",
    "cuKernelGetParamInfo",
    "cuLibraryEnumerateKernels",
    "cuLibraryGetKernelCount",
    "cuModuleEnumerateFunctions",
    "cuModuleGetFunctionCount",
    "cuStreamBeginCaptureToGraph",
    "cuStreamBeginCaptureToGraph_ptsz",
    "cuStreamGetCaptureInfo_v3",
    "cuStreamGetCaptureInfo_v3_ptsz",
    "cuStreamGetGreenCtx",
    "cuStreamUpdateCaptureDependencies_v2",
    "cuStreamUpdateCaptureDependencies_v2_ptsz",
];

/// Names that libnvidia-ml exports since driver 550, sorted.
const NVML_550: &[&str] = &[
    "nvmlDeviceGetC2cModeInfoV",
    "nvmlDeviceGetGpuFabricInfoV",
    "nvmlDeviceGetNumaNodeId",
    "nvmlDeviceGetPciInfoExt",
    "nvmlDeviceGetProcessesUtilizationInfo",
    "nvmlDeviceGetVgpuHeterogeneousMode",
    "nvmlDeviceGetVgpuInstancesUtilizationInfo",
    "nvmlDeviceGetVgpuProcessesUtilizationInfo",
    "nvmlDeviceGetVgpuTypeCreatablePlacements",
    "nvmlDeviceGetVgpuTypeSupportedPlacements",
    "nvmlDeviceSetVgpuCapabilities",
    "nvmlDeviceSetVgpuHeterogeneousMode",
    "nvmlSystemGetConfComputeKeyRotationThresholdInfo",
    "nvmlSystemGetConfComputeSettings",
    "nvmlSystemSetConfComputeKeyRotationThresholdInfo",
    "nvmlVgpuInstanceGetPlacementId",
    "nvmlVgpuTypeGetFbReservation",
    "nvmlVgpuTypeGetGspHeapSize",
];

macro_rules! names {
    ($($(#[$doc:meta])* trait $family:ident { $(fn $name:ident $args:tt $(twin $twin:ident)?;)* })*) => {
        pub(super) const NAMES: &[&str] = &[$($(stringify!($name), $(stringify!($twin),)?)*)*];
        pub(super) const TWINS: &[(&str, &str)] = &[$($($((stringify!($name), stringify!($twin)),)?)*)*];
    };
}

mod cuda {
    crate::cuda_functions!(names);
}

mod nvml {
    #![allow(dead_code)] // NVML has no streams, hence no twins.
    crate::nvml_functions!(names);
}
