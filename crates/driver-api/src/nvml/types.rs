//! Handles and structures of NVML, under their C names.

use super::values::*;
use core::ffi::{c_char, c_ulong};

opaque! {
    nvmlComputeInstance_st,
    nvmlDevice_st,
    nvmlEventSet_st,
    nvmlGpmSample_st,
    nvmlGpuInstance_st,
    nvmlUnit_st,
}

pub type nvmlAffinityScope_t = u32;
pub type nvmlBusType_t = u32;
pub type nvmlComputeInstance_t = *mut nvmlComputeInstance_st;
pub type nvmlConfComputeGetKeyRotationThresholdInfo_t = nvmlConfComputeGetKeyRotationThresholdInfo_v1_t;
pub type nvmlConfComputeSetKeyRotationThresholdInfo_t = nvmlConfComputeSetKeyRotationThresholdInfo_v1_t;
pub type nvmlDeviceArchitecture_t = u32;
pub type nvmlDevice_t = *mut nvmlDevice_st;
pub type nvmlEccSramErrorStatus_t = nvmlEccSramErrorStatus_v1_t;
pub type nvmlEventSet_t = *mut nvmlEventSet_st;
pub type nvmlFanControlPolicy_t = u32;
pub type nvmlGpmSample_t = *mut nvmlGpmSample_st;
pub type nvmlGpuFabricInfoV_t = nvmlGpuFabricInfo_v2_t;
pub type nvmlGpuFabricState_t = u8;
pub type nvmlGpuInstance_t = *mut nvmlGpuInstance_st;
pub type nvmlPciInfoExt_t = nvmlPciInfoExt_v1_t;
pub type nvmlPowerScopeType_t = u8;
pub type nvmlPowerSource_t = u32;
pub type nvmlProcessDetailList_t = nvmlProcessDetailList_v1_t;
pub type nvmlProcessInfo_t = nvmlProcessInfo_v2_t;
pub type nvmlProcessesUtilizationInfo_t = nvmlProcessesUtilizationInfo_v1_t;
pub type nvmlSystemConfComputeSettings_t = nvmlSystemConfComputeSettings_v1_t;
pub type nvmlUnit_t = *mut nvmlUnit_st;
pub type nvmlVgpuHeterogeneousMode_t = nvmlVgpuHeterogeneousMode_v1_t;
pub type nvmlVgpuInstance_t = u32;
pub type nvmlVgpuInstancesUtilizationInfo_t = nvmlVgpuInstancesUtilizationInfo_v1_t;
pub type nvmlVgpuPlacementId_t = nvmlVgpuPlacementId_v1_t;
pub type nvmlVgpuPlacementList_t = nvmlVgpuPlacementList_v2_t;
pub type nvmlVgpuProcessesUtilizationInfo_t = nvmlVgpuProcessesUtilizationInfo_v1_t;
pub type nvmlVgpuTypeId_t = u32;

c_types! {
    pub struct nvmlHwbcEntry_t {
        pub hwbcId: u32,
        pub firmwareVersion: [c_char; 32],
    }

    pub struct nvmlUnitFanInfo_t {
        pub speed: u32,
        pub state: nvmlFanState_t,
    }

    pub struct nvmlUnitFanSpeeds_t {
        pub fans: [nvmlUnitFanInfo_t; 24],
        pub count: u32,
    }

    pub struct nvmlLedState_t {
        pub cause: [c_char; 256],
        pub color: nvmlLedColor_t,
    }

    pub struct nvmlPSUInfo_t {
        pub state: [c_char; 256],
        pub current: u32,
        pub voltage: u32,
        pub power: u32,
    }

    pub struct nvmlUnitInfo_t {
        pub name: [c_char; 96],
        pub id: [c_char; 96],
        pub serial: [c_char; 96],
        pub firmwareVersion: [c_char; 96],
    }

    pub struct nvmlDeviceAttributes_t {
        pub multiprocessorCount: u32,
        pub sharedCopyEngineCount: u32,
        pub sharedDecoderCount: u32,
        pub sharedEncoderCount: u32,
        pub sharedJpegCount: u32,
        pub sharedOfaCount: u32,
        pub gpuInstanceSliceCount: u32,
        pub computeInstanceSliceCount: u32,
        pub memorySizeMB: u64,
    }

    pub struct nvmlBridgeChipInfo_t {
        pub type_: nvmlBridgeChipType_t,
        pub fwVersion: u32,
    }

    pub struct nvmlBridgeChipHierarchy_t {
        pub bridgeCount: u8,
        pub bridgeChipInfo: [nvmlBridgeChipInfo_t; 128],
    }

    pub struct nvmlPciInfo_t {
        pub busIdLegacy: [c_char; 16],
        pub domain: u32,
        pub bus: u32,
        pub device: u32,
        pub pciDeviceId: u32,
        pub pciSubSystemId: u32,
        pub busId: [c_char; 32],
    }

    pub struct nvmlPciInfoExt_v1_t {
        pub version: u32,
        pub domain: u32,
        pub bus: u32,
        pub device: u32,
        pub pciDeviceId: u32,
        pub pciSubSystemId: u32,
        pub baseClass: u32,
        pub subClass: u32,
        pub busId: [c_char; 32],
    }

    pub struct nvmlBAR1Memory_t {
        pub bar1Total: u64,
        pub bar1Free: u64,
        pub bar1Used: u64,
    }

    pub struct nvmlClkMonFaultInfo_t {
        pub clkApiDomain: u32,
        pub clkDomainFaultMask: u32,
    }

    pub struct nvmlClkMonStatus_t {
        pub bGlobalStatus: u32,
        pub clkMonListSize: u32,
        pub clkMonList: [nvmlClkMonFaultInfo_t; 32],
    }

    pub struct nvmlGpuDynamicPstatesInfo_t_utilization {
        pub bIsPresent: u32,
        pub percentage: u32,
        pub incThreshold: u32,
        pub decThreshold: u32,
    }

    pub struct nvmlGpuDynamicPstatesInfo_t {
        pub flags: u32,
        pub utilization: [nvmlGpuDynamicPstatesInfo_t_utilization; 8],
    }

    pub union nvmlValue_t {
        pub dVal: f64,
        pub siVal: i32,
        pub uiVal: u32,
        pub ulVal: c_ulong,
        pub ullVal: u64,
        pub sllVal: i64,
        pub usVal: u16,
    }

    pub struct nvmlFieldValue_t {
        pub fieldId: u32,
        pub scopeId: u32,
        pub timestamp: i64,
        pub latencyUsec: i64,
        pub valueType: nvmlValueType_t,
        pub nvmlReturn: nvmlReturn_t,
        pub value: nvmlValue_t,
    }

    pub struct nvmlMemory_t {
        pub total: u64,
        pub free: u64,
        pub used: u64,
    }

    pub struct nvmlMemory_v2_t {
        pub version: u32,
        pub total: u64,
        pub reserved: u64,
        pub free: u64,
        pub used: u64,
    }

    pub struct nvmlSample_t {
        pub timeStamp: u64,
        pub sampleValue: nvmlValue_t,
    }

    pub struct nvmlGpuThermalSettings_t_sensor {
        pub controller: nvmlThermalController_t,
        pub defaultMinTemp: i32,
        pub defaultMaxTemp: i32,
        pub currentTemp: i32,
        pub target: nvmlThermalTarget_t,
    }

    pub struct nvmlGpuThermalSettings_t {
        pub count: u32,
        pub sensor: [nvmlGpuThermalSettings_t_sensor; 3],
    }

    pub struct nvmlUtilization_t {
        pub gpu: u32,
        pub memory: u32,
    }

    pub struct nvmlViolationTime_t {
        pub referenceTime: u64,
        pub violationTime: u64,
    }

    pub struct nvmlEccErrorCounts_t {
        pub l1Cache: u64,
        pub l2Cache: u64,
        pub deviceMemory: u64,
        pub registerFile: u64,
    }

    pub struct nvmlRowRemapperHistogramValues_t {
        pub max: u32,
        pub high: u32,
        pub partial: u32,
        pub low: u32,
        pub none: u32,
    }

    pub struct nvmlEccSramErrorStatus_v1_t {
        pub version: u32,
        pub aggregateUncParity: u64,
        pub aggregateUncSecDed: u64,
        pub aggregateCor: u64,
        pub volatileUncParity: u64,
        pub volatileUncSecDed: u64,
        pub volatileCor: u64,
        pub aggregateUncBucketL2: u64,
        pub aggregateUncBucketSm: u64,
        pub aggregateUncBucketPcie: u64,
        pub aggregateUncBucketMcu: u64,
        pub aggregateUncBucketOther: u64,
        pub bThresholdExceeded: u32,
    }

    pub struct nvmlAccountingStats_t {
        pub gpuUtilization: u32,
        pub memoryUtilization: u32,
        pub maxMemoryUsage: u64,
        pub time: u64,
        pub startTime: u64,
        pub isRunning: u32,
        pub reserved: [u32; 5],
    }

    pub struct nvmlProcessInfo_v1_t {
        pub pid: u32,
        pub usedGpuMemory: u64,
    }

    pub struct nvmlProcessInfo_v2_t {
        pub pid: u32,
        pub usedGpuMemory: u64,
        pub gpuInstanceId: u32,
        pub computeInstanceId: u32,
    }

    pub struct nvmlProcessUtilizationSample_t {
        pub pid: u32,
        pub timeStamp: u64,
        pub smUtil: u32,
        pub memUtil: u32,
        pub encUtil: u32,
        pub decUtil: u32,
    }

    pub struct nvmlProcessUtilizationInfo_v1_t {
        pub timeStamp: u64,
        pub pid: u32,
        pub smUtil: u32,
        pub memUtil: u32,
        pub encUtil: u32,
        pub decUtil: u32,
        pub jpgUtil: u32,
        pub ofaUtil: u32,
    }

    pub struct nvmlProcessesUtilizationInfo_v1_t {
        pub version: u32,
        pub processSamplesCount: u32,
        pub lastSeenTimeStamp: u64,
        pub procUtilArray: *mut nvmlProcessUtilizationInfo_v1_t,
    }

    pub struct nvmlProcessDetail_v1_t {
        pub pid: u32,
        pub usedGpuMemory: u64,
        pub gpuInstanceId: u32,
        pub computeInstanceId: u32,
        pub usedGpuCcProtectedMemory: u64,
    }

    pub struct nvmlProcessDetailList_v1_t {
        pub version: u32,
        pub mode: u32,
        pub numProcArrayEntries: u32,
        pub procArray: *mut nvmlProcessDetail_v1_t,
    }

    pub struct nvmlNvLinkUtilizationControl_t {
        pub units: nvmlNvLinkUtilizationCountUnits_t,
        pub pktfilter: nvmlNvLinkUtilizationCountPktTypes_t,
    }

    pub struct nvmlNvLinkPowerThres_t {
        pub lowPwrThreshold: u32,
    }

    pub struct nvmlEventData_t {
        pub device: nvmlDevice_t,
        pub eventType: u64,
        pub eventData: u64,
        pub gpuInstanceId: u32,
        pub computeInstanceId: u32,
    }

    pub struct nvmlPowerValue_v2_t {
        pub version: u32,
        pub powerScope: nvmlPowerScopeType_t,
        pub powerValueMw: u32,
    }

    pub struct nvmlComputeInstancePlacement_t {
        pub start: u32,
        pub size: u32,
    }

    pub struct nvmlComputeInstanceInfo_t {
        pub device: nvmlDevice_t,
        pub gpuInstance: nvmlGpuInstance_t,
        pub id: u32,
        pub profileId: u32,
        pub placement: nvmlComputeInstancePlacement_t,
    }

    pub struct nvmlGpuInstancePlacement_t {
        pub start: u32,
        pub size: u32,
    }

    pub struct nvmlGpuInstanceProfileInfo_t {
        pub id: u32,
        pub isP2pSupported: u32,
        pub sliceCount: u32,
        pub instanceCount: u32,
        pub multiprocessorCount: u32,
        pub copyEngineCount: u32,
        pub decoderCount: u32,
        pub encoderCount: u32,
        pub jpegCount: u32,
        pub ofaCount: u32,
        pub memorySizeMB: u64,
    }

    pub struct nvmlGpuInstanceProfileInfo_v2_t {
        pub version: u32,
        pub id: u32,
        pub isP2pSupported: u32,
        pub sliceCount: u32,
        pub instanceCount: u32,
        pub multiprocessorCount: u32,
        pub copyEngineCount: u32,
        pub decoderCount: u32,
        pub encoderCount: u32,
        pub jpegCount: u32,
        pub ofaCount: u32,
        pub memorySizeMB: u64,
        pub name: [c_char; 96],
    }

    pub struct nvmlGpmMetric_t_metricInfo {
        pub shortName: *mut c_char,
        pub longName: *mut c_char,
        pub unit: *mut c_char,
    }

    pub struct nvmlGpmMetric_t {
        pub metricId: u32,
        pub nvmlReturn: nvmlReturn_t,
        pub value: f64,
        pub metricInfo: nvmlGpmMetric_t_metricInfo,
    }

    pub struct nvmlGpmMetricsGet_t {
        pub version: u32,
        pub numMetrics: u32,
        pub sample1: nvmlGpmSample_t,
        pub sample2: nvmlGpmSample_t,
        pub metrics: [nvmlGpmMetric_t; 210],
    }

    pub struct nvmlGpmSupport_t {
        pub version: u32,
        pub isSupportedDevice: u32,
    }

    pub struct nvmlComputeInstanceProfileInfo_t {
        pub id: u32,
        pub sliceCount: u32,
        pub instanceCount: u32,
        pub multiprocessorCount: u32,
        pub sharedCopyEngineCount: u32,
        pub sharedDecoderCount: u32,
        pub sharedEncoderCount: u32,
        pub sharedJpegCount: u32,
        pub sharedOfaCount: u32,
    }

    pub struct nvmlComputeInstanceProfileInfo_v2_t {
        pub version: u32,
        pub id: u32,
        pub sliceCount: u32,
        pub instanceCount: u32,
        pub multiprocessorCount: u32,
        pub sharedCopyEngineCount: u32,
        pub sharedDecoderCount: u32,
        pub sharedEncoderCount: u32,
        pub sharedJpegCount: u32,
        pub sharedOfaCount: u32,
        pub name: [c_char; 96],
    }

    pub struct nvmlGpuInstanceInfo_t {
        pub device: nvmlDevice_t,
        pub id: u32,
        pub profileId: u32,
        pub placement: nvmlGpuInstancePlacement_t,
    }

    pub struct nvmlGridLicenseExpiry_t {
        pub year: u32,
        pub month: u16,
        pub day: u16,
        pub hour: u16,
        pub min: u16,
        pub sec: u16,
        pub status: u8,
    }

    pub struct nvmlGridLicensableFeature_t {
        pub featureCode: nvmlGridLicenseFeatureCode_t,
        pub featureState: u32,
        pub licenseInfo: [c_char; 128],
        pub productName: [c_char; 128],
        pub featureEnabled: u32,
        pub licenseExpiry: nvmlGridLicenseExpiry_t,
    }

    pub struct nvmlGridLicensableFeatures_t {
        pub isGridLicenseSupported: i32,
        pub licensableFeaturesCount: u32,
        pub gridLicensableFeatures: [nvmlGridLicensableFeature_t; 3],
    }

    pub struct nvmlVgpuHeterogeneousMode_v1_t {
        pub version: u32,
        pub mode: u32,
    }

    pub struct nvmlVgpuInstanceUtilizationInfo_v1_t {
        pub timeStamp: u64,
        pub vgpuInstance: nvmlVgpuInstance_t,
        pub smUtil: nvmlValue_t,
        pub memUtil: nvmlValue_t,
        pub encUtil: nvmlValue_t,
        pub decUtil: nvmlValue_t,
        pub jpgUtil: nvmlValue_t,
        pub ofaUtil: nvmlValue_t,
    }

    pub struct nvmlVgpuInstancesUtilizationInfo_v1_t {
        pub version: u32,
        pub sampleValType: nvmlValueType_t,
        pub vgpuInstanceCount: u32,
        pub lastSeenTimeStamp: u64,
        pub vgpuUtilArray: *mut nvmlVgpuInstanceUtilizationInfo_v1_t,
    }

    pub struct nvmlVgpuVersion_t {
        pub minVersion: u32,
        pub maxVersion: u32,
    }

    pub struct nvmlVgpuPgpuMetadata_t {
        pub version: u32,
        pub revision: u32,
        pub hostDriverVersion: [c_char; 80],
        pub pgpuVirtualizationCaps: u32,
        pub reserved: [u32; 5],
        pub hostSupportedVgpuRange: nvmlVgpuVersion_t,
        pub opaqueDataSize: u32,
        pub opaqueData: [c_char; 4],
    }

    pub struct nvmlVgpuProcessUtilizationSample_t {
        pub vgpuInstance: nvmlVgpuInstance_t,
        pub pid: u32,
        pub processName: [c_char; 64],
        pub timeStamp: u64,
        pub smUtil: u32,
        pub memUtil: u32,
        pub encUtil: u32,
        pub decUtil: u32,
    }

    pub struct nvmlVgpuProcessUtilizationInfo_v1_t {
        pub processName: [c_char; 64],
        pub timeStamp: u64,
        pub vgpuInstance: nvmlVgpuInstance_t,
        pub pid: u32,
        pub smUtil: u32,
        pub memUtil: u32,
        pub encUtil: u32,
        pub decUtil: u32,
        pub jpgUtil: u32,
        pub ofaUtil: u32,
    }

    pub struct nvmlVgpuProcessesUtilizationInfo_v1_t {
        pub version: u32,
        pub vgpuProcessCount: u32,
        pub lastSeenTimeStamp: u64,
        pub vgpuProcUtilArray: *mut nvmlVgpuProcessUtilizationInfo_v1_t,
    }

    pub struct nvmlVgpuSchedulerCapabilities_t {
        pub supportedSchedulers: [u32; 3],
        pub maxTimeslice: u32,
        pub minTimeslice: u32,
        pub isArrModeSupported: u32,
        pub maxFrequencyForARR: u32,
        pub minFrequencyForARR: u32,
        pub maxAvgFactorForARR: u32,
        pub minAvgFactorForARR: u32,
    }

    pub struct nvmlVgpuSchedulerParams_t_vgpuSchedDataWithARR {
        pub avgFactor: u32,
        pub timeslice: u32,
    }

    pub struct nvmlVgpuSchedulerParams_t_vgpuSchedData {
        pub timeslice: u32,
    }

    pub union nvmlVgpuSchedulerParams_t {
        pub vgpuSchedDataWithARR: nvmlVgpuSchedulerParams_t_vgpuSchedDataWithARR,
        pub vgpuSchedData: nvmlVgpuSchedulerParams_t_vgpuSchedData,
    }

    pub struct nvmlVgpuSchedulerLogEntry_t {
        pub timestamp: u64,
        pub timeRunTotal: u64,
        pub timeRun: u64,
        pub swRunlistId: u32,
        pub targetTimeSlice: u64,
        pub cumulativePreemptionTime: u64,
    }

    pub struct nvmlVgpuSchedulerLog_t {
        pub engineId: u32,
        pub schedulerPolicy: u32,
        pub arrMode: u32,
        pub schedulerParams: nvmlVgpuSchedulerParams_t,
        pub entriesCount: u32,
        pub logEntries: [nvmlVgpuSchedulerLogEntry_t; 200],
    }

    pub struct nvmlVgpuSchedulerGetState_t {
        pub schedulerPolicy: u32,
        pub arrMode: u32,
        pub schedulerParams: nvmlVgpuSchedulerParams_t,
    }

    pub struct nvmlVgpuPlacementList_v2_t {
        pub version: u32,
        pub placementSize: u32,
        pub count: u32,
        pub placementIds: *mut u32,
        pub mode: u32,
    }

    pub struct nvmlVgpuInstanceUtilizationSample_t {
        pub vgpuInstance: nvmlVgpuInstance_t,
        pub timeStamp: u64,
        pub smUtil: nvmlValue_t,
        pub memUtil: nvmlValue_t,
        pub encUtil: nvmlValue_t,
        pub decUtil: nvmlValue_t,
    }

    pub struct nvmlVgpuSchedulerSetParams_t_vgpuSchedDataWithARR {
        pub avgFactor: u32,
        pub frequency: u32,
    }

    pub struct nvmlVgpuSchedulerSetParams_t_vgpuSchedData {
        pub timeslice: u32,
    }

    pub union nvmlVgpuSchedulerSetParams_t {
        pub vgpuSchedDataWithARR: nvmlVgpuSchedulerSetParams_t_vgpuSchedDataWithARR,
        pub vgpuSchedData: nvmlVgpuSchedulerSetParams_t_vgpuSchedData,
    }

    pub struct nvmlVgpuSchedulerSetState_t {
        pub schedulerPolicy: u32,
        pub enableARRMode: u32,
        pub schedulerParams: nvmlVgpuSchedulerSetParams_t,
    }

    pub struct nvmlVgpuMetadata_t {
        pub version: u32,
        pub revision: u32,
        pub guestInfoState: nvmlVgpuGuestInfoState_t,
        pub guestDriverVersion: [c_char; 80],
        pub hostDriverVersion: [c_char; 80],
        pub reserved: [u32; 6],
        pub vgpuVirtualizationCaps: u32,
        pub guestVgpuVersion: u32,
        pub opaqueDataSize: u32,
        pub opaqueData: [c_char; 4],
    }

    pub struct nvmlVgpuPgpuCompatibility_t {
        pub vgpuVmCompatibility: nvmlVgpuVmCompatibility_t,
        pub compatibilityLimitCode: nvmlVgpuPgpuCompatibilityLimitCode_t,
    }

    pub struct nvmlEncoderSessionInfo_t {
        pub sessionId: u32,
        pub pid: u32,
        pub vgpuInstance: nvmlVgpuInstance_t,
        pub codecType: nvmlEncoderType_t,
        pub hResolution: u32,
        pub vResolution: u32,
        pub averageFps: u32,
        pub averageLatency: u32,
    }

    pub struct nvmlFBCSessionInfo_t {
        pub sessionId: u32,
        pub pid: u32,
        pub vgpuInstance: nvmlVgpuInstance_t,
        pub displayOrdinal: u32,
        pub sessionType: nvmlFBCSessionType_t,
        pub sessionFlags: u32,
        pub hMaxResolution: u32,
        pub vMaxResolution: u32,
        pub hResolution: u32,
        pub vResolution: u32,
        pub averageFPS: u32,
        pub averageLatency: u32,
    }

    pub struct nvmlFBCStats_t {
        pub sessionsCount: u32,
        pub averageFPS: u32,
        pub averageLatency: u32,
    }

    pub struct nvmlVgpuLicenseExpiry_t {
        pub year: u32,
        pub month: u16,
        pub day: u16,
        pub hour: u16,
        pub min: u16,
        pub sec: u16,
        pub status: u8,
    }

    pub struct nvmlVgpuLicenseInfo_t {
        pub isLicensed: u8,
        pub licenseExpiry: nvmlVgpuLicenseExpiry_t,
        pub currentState: u32,
    }

    pub struct nvmlVgpuPlacementId_v1_t {
        pub version: u32,
        pub placementId: u32,
    }

    pub struct nvmlC2cModeInfo_v1_t {
        pub isC2cEnabled: u32,
    }

    pub struct nvmlConfComputeGpuAttestationReport_t {
        pub isCecAttestationReportPresent: u32,
        pub attestationReportSize: u32,
        pub cecAttestationReportSize: u32,
        pub nonce: [u8; 32],
        pub attestationReport: [u8; 8192],
        pub cecAttestationReport: [u8; 4096],
    }

    pub struct nvmlConfComputeGpuCertificate_t {
        pub certChainSize: u32,
        pub attestationCertChainSize: u32,
        pub certChain: [u8; 4096],
        pub attestationCertChain: [u8; 5120],
    }

    pub struct nvmlConfComputeMemSizeInfo_t {
        pub protectedMemSizeKib: u64,
        pub unprotectedMemSizeKib: u64,
    }

    pub struct nvmlGpuFabricInfo_t {
        pub clusterUuid: [u8; 16],
        pub status: nvmlReturn_t,
        pub cliqueId: u32,
        pub state: nvmlGpuFabricState_t,
    }

    pub struct nvmlGpuFabricInfo_v2_t {
        pub version: u32,
        pub clusterUuid: [u8; 16],
        pub status: nvmlReturn_t,
        pub cliqueId: u32,
        pub state: nvmlGpuFabricState_t,
        pub healthMask: u32,
    }

    pub struct nvmlExcludedDeviceInfo_t {
        pub pciInfo: nvmlPciInfo_t,
        pub uuid: [c_char; 80],
    }

    pub struct nvmlConfComputeSystemCaps_t {
        pub cpuCaps: u32,
        pub gpusCaps: u32,
    }

    pub struct nvmlConfComputeGetKeyRotationThresholdInfo_v1_t {
        pub version: u32,
        pub attackerAdvantage: u64,
    }

    pub struct nvmlSystemConfComputeSettings_v1_t {
        pub version: u32,
        pub environment: u32,
        pub ccFeature: u32,
        pub devToolsMode: u32,
        pub multiGpuMode: u32,
    }

    pub struct nvmlConfComputeSystemState_t {
        pub environment: u32,
        pub ccFeature: u32,
        pub devToolsMode: u32,
    }

    pub struct nvmlConfComputeSetKeyRotationThresholdInfo_v1_t {
        pub version: u32,
        pub maxAttackerAdvantage: u64,
    }

    pub struct nvmlGpuInstanceProfileInfo_v3_t {
        pub version: u32,
        pub id: u32,
        pub sliceCount: u32,
        pub instanceCount: u32,
        pub multiprocessorCount: u32,
        pub copyEngineCount: u32,
        pub decoderCount: u32,
        pub encoderCount: u32,
        pub jpegCount: u32,
        pub ofaCount: u32,
        pub memorySizeMB: u64,
        pub name: [c_char; 96],
        pub capabilities: u32,
    }

    pub struct nvmlComputeInstanceProfileInfo_v3_t {
        pub version: u32,
        pub id: u32,
        pub sliceCount: u32,
        pub instanceCount: u32,
        pub multiprocessorCount: u32,
        pub sharedCopyEngineCount: u32,
        pub sharedDecoderCount: u32,
        pub sharedEncoderCount: u32,
        pub sharedJpegCount: u32,
        pub sharedOfaCount: u32,
        pub name: [c_char; 96],
        pub capabilities: u32,
    }
}

// The structures of functions without a version suffix. NVIDIA's current header declares these functions with the
// newest structure, but a program that uses the old symbol passes a buffer of this size.
c_types! {
    pub struct nvmlPciInfo_v1_t {
        pub busId: [c_char; 16],
        pub domain: u32,
        pub bus: u32,
        pub device: u32,
        pub pciDeviceId: u32,
    }

    pub struct nvmlPciInfo_v2_t {
        pub busId: [c_char; 16],
        pub domain: u32,
        pub bus: u32,
        pub device: u32,
        pub pciDeviceId: u32,
        pub pciSubSystemId: u32,
        pub reserved: [u32; 4],
    }

    pub struct nvmlEventData_v1_t {
        pub device: nvmlDevice_t,
        pub eventType: u64,
        pub eventData: u64,
    }
}
