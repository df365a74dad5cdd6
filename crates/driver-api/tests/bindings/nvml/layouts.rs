//! Compares size, alignment and field offsets of NVML structures with those of nvml-wrapper-sys.

use nvml_wrapper_sys::bindings as theirs;
use partage_driver_api::nvml as ours;

#[test]
fn layouts_match() {
    same_layout! {
        nvmlHwbcEntry_t { hwbcId firmwareVersion }
        nvmlUnitFanInfo_t { speed state }
        nvmlUnitFanSpeeds_t { fans count }
        nvmlLedState_t { cause color }
        nvmlPSUInfo_t { state current voltage power }
        nvmlUnitInfo_t { name id serial firmwareVersion }
        nvmlDeviceAttributes_t {
            multiprocessorCount sharedCopyEngineCount sharedDecoderCount sharedEncoderCount sharedJpegCount
            sharedOfaCount gpuInstanceSliceCount computeInstanceSliceCount memorySizeMB
        }
        nvmlBridgeChipInfo_t { type_ fwVersion }
        nvmlBridgeChipHierarchy_t { bridgeCount bridgeChipInfo }
        nvmlPciInfo_t { busIdLegacy domain bus device pciDeviceId pciSubSystemId busId }
        nvmlPciInfoExt_v1_t { version domain bus device pciDeviceId pciSubSystemId baseClass subClass busId }
        nvmlBAR1Memory_t { bar1Total bar1Free bar1Used }
        nvmlClkMonFaultInfo_t { clkApiDomain clkDomainFaultMask }
        nvmlClkMonStatus_t { bGlobalStatus clkMonListSize clkMonList }
        nvmlGpuDynamicPstatesInfo_t_utilization = nvmlGpuDynamicPstatesInfo_st__bindgen_ty_1 {
            bIsPresent percentage incThreshold decThreshold
        }
        nvmlGpuDynamicPstatesInfo_t { flags utilization }
        nvmlValue_t { dVal siVal uiVal ulVal ullVal sllVal usVal }
        nvmlFieldValue_t { fieldId scopeId timestamp latencyUsec valueType nvmlReturn value }
        nvmlMemory_t { total free used }
        nvmlMemory_v2_t { version total reserved free used }
        nvmlSample_t { timeStamp sampleValue }
        nvmlGpuThermalSettings_t_sensor = nvmlGpuThermalSettings_t__bindgen_ty_1 {
            controller defaultMinTemp defaultMaxTemp currentTemp target
        }
        nvmlGpuThermalSettings_t { count sensor }
        nvmlUtilization_t { gpu memory }
        nvmlViolationTime_t { referenceTime violationTime }
        nvmlEccErrorCounts_t { l1Cache l2Cache deviceMemory registerFile }
        nvmlRowRemapperHistogramValues_t { max high partial low none }
        nvmlEccSramErrorStatus_v1_t {
            version aggregateUncParity aggregateUncSecDed aggregateCor volatileUncParity volatileUncSecDed
            volatileCor aggregateUncBucketL2 aggregateUncBucketSm aggregateUncBucketPcie
            aggregateUncBucketMcu aggregateUncBucketOther bThresholdExceeded
        }
        nvmlAccountingStats_t {
            gpuUtilization memoryUtilization maxMemoryUsage time startTime isRunning reserved
        }
        nvmlProcessInfo_v1_t { pid usedGpuMemory }
        nvmlProcessInfo_v2_t { pid usedGpuMemory gpuInstanceId computeInstanceId }
        nvmlProcessUtilizationSample_t { pid timeStamp smUtil memUtil encUtil decUtil }
        nvmlProcessUtilizationInfo_v1_t { timeStamp pid smUtil memUtil encUtil decUtil jpgUtil ofaUtil }
        nvmlProcessesUtilizationInfo_v1_t { version processSamplesCount lastSeenTimeStamp procUtilArray }
        nvmlProcessDetail_v1_t { pid usedGpuMemory gpuInstanceId computeInstanceId usedGpuCcProtectedMemory }
        nvmlProcessDetailList_v1_t { version mode numProcArrayEntries procArray }
        nvmlNvLinkUtilizationControl_t { units pktfilter }
        nvmlNvLinkPowerThres_t { lowPwrThreshold }
        nvmlEventData_t { device eventType eventData gpuInstanceId computeInstanceId }
        nvmlPowerValue_v2_t { version powerScope powerValueMw }
        nvmlComputeInstancePlacement_t { start size }
        nvmlComputeInstanceInfo_t { device gpuInstance id profileId placement }
        nvmlGpuInstancePlacement_t { start size }
        nvmlGpuInstanceProfileInfo_t {
            id isP2pSupported sliceCount instanceCount multiprocessorCount copyEngineCount decoderCount
            encoderCount jpegCount ofaCount memorySizeMB
        }
        nvmlGpuInstanceProfileInfo_v2_t {
            version id isP2pSupported sliceCount instanceCount multiprocessorCount copyEngineCount
            decoderCount encoderCount jpegCount ofaCount memorySizeMB name
        }
        nvmlGpmMetric_t_metricInfo = nvmlGpmMetric_t__bindgen_ty_1 { shortName longName unit }
        nvmlGpmMetric_t { metricId nvmlReturn value metricInfo }
        nvmlGpmMetricsGet_t { version numMetrics sample1 sample2 metrics }
        nvmlGpmSupport_t { version isSupportedDevice }
        nvmlComputeInstanceProfileInfo_t {
            id sliceCount instanceCount multiprocessorCount sharedCopyEngineCount sharedDecoderCount
            sharedEncoderCount sharedJpegCount sharedOfaCount
        }
        nvmlComputeInstanceProfileInfo_v2_t {
            version id sliceCount instanceCount multiprocessorCount sharedCopyEngineCount
            sharedDecoderCount sharedEncoderCount sharedJpegCount sharedOfaCount name
        }
        nvmlGpuInstanceInfo_t { device id profileId placement }
        nvmlGridLicenseExpiry_t { year month day hour min sec status }
        nvmlGridLicensableFeature_t {
            featureCode featureState licenseInfo productName featureEnabled licenseExpiry
        }
        nvmlGridLicensableFeatures_t { isGridLicenseSupported licensableFeaturesCount gridLicensableFeatures }
        nvmlVgpuHeterogeneousMode_v1_t { version mode }
        nvmlVgpuInstanceUtilizationInfo_v1_t {
            timeStamp vgpuInstance smUtil memUtil encUtil decUtil jpgUtil ofaUtil
        }
        nvmlVgpuInstancesUtilizationInfo_v1_t {
            version sampleValType vgpuInstanceCount lastSeenTimeStamp vgpuUtilArray
        }
        nvmlVgpuVersion_t { minVersion maxVersion }
        nvmlVgpuPgpuMetadata_t {
            version revision hostDriverVersion pgpuVirtualizationCaps reserved hostSupportedVgpuRange
            opaqueDataSize opaqueData
        }
        nvmlVgpuProcessUtilizationSample_t {
            vgpuInstance pid processName timeStamp smUtil memUtil encUtil decUtil
        }
        nvmlVgpuProcessUtilizationInfo_v1_t {
            processName timeStamp vgpuInstance pid smUtil memUtil encUtil decUtil jpgUtil ofaUtil
        }
        nvmlVgpuProcessesUtilizationInfo_v1_t { version vgpuProcessCount lastSeenTimeStamp vgpuProcUtilArray }
        nvmlVgpuSchedulerCapabilities_t {
            supportedSchedulers maxTimeslice minTimeslice isArrModeSupported maxFrequencyForARR
            minFrequencyForARR maxAvgFactorForARR minAvgFactorForARR
        }
        nvmlVgpuSchedulerParams_t_vgpuSchedDataWithARR = nvmlVgpuSchedulerParams_t__bindgen_ty_1 {
            avgFactor timeslice
        }
        nvmlVgpuSchedulerParams_t_vgpuSchedData = nvmlVgpuSchedulerParams_t__bindgen_ty_2 { timeslice }
        nvmlVgpuSchedulerParams_t { vgpuSchedDataWithARR vgpuSchedData }
        nvmlVgpuSchedulerLogEntry_t {
            timestamp timeRunTotal timeRun swRunlistId targetTimeSlice cumulativePreemptionTime
        }
        nvmlVgpuSchedulerLog_t { engineId schedulerPolicy arrMode schedulerParams entriesCount logEntries }
        nvmlVgpuSchedulerGetState_t { schedulerPolicy arrMode schedulerParams }
        nvmlVgpuPlacementList_v2_t { version placementSize count placementIds mode }
        nvmlVgpuInstanceUtilizationSample_t { vgpuInstance timeStamp smUtil memUtil encUtil decUtil }
        nvmlVgpuSchedulerSetParams_t_vgpuSchedDataWithARR = nvmlVgpuSchedulerSetParams_t__bindgen_ty_1 {
            avgFactor frequency
        }
        nvmlVgpuSchedulerSetParams_t_vgpuSchedData = nvmlVgpuSchedulerSetParams_t__bindgen_ty_2 { timeslice }
        nvmlVgpuSchedulerSetParams_t { vgpuSchedDataWithARR vgpuSchedData }
        nvmlVgpuSchedulerSetState_t { schedulerPolicy enableARRMode schedulerParams }
        nvmlVgpuMetadata_t {
            version revision guestInfoState guestDriverVersion hostDriverVersion reserved
            vgpuVirtualizationCaps guestVgpuVersion opaqueDataSize opaqueData
        }
        nvmlVgpuPgpuCompatibility_t { vgpuVmCompatibility compatibilityLimitCode }
        nvmlEncoderSessionInfo_t {
            sessionId pid vgpuInstance codecType hResolution vResolution averageFps averageLatency
        }
        nvmlFBCSessionInfo_t {
            sessionId pid vgpuInstance displayOrdinal sessionType sessionFlags hMaxResolution
            vMaxResolution hResolution vResolution averageFPS averageLatency
        }
        nvmlFBCStats_t { sessionsCount averageFPS averageLatency }
        nvmlVgpuLicenseExpiry_t { year month day hour min sec status }
        nvmlVgpuLicenseInfo_t { isLicensed licenseExpiry currentState }
        nvmlVgpuPlacementId_v1_t { version placementId }
        nvmlC2cModeInfo_v1_t { isC2cEnabled }
        nvmlConfComputeGpuAttestationReport_t {
            isCecAttestationReportPresent attestationReportSize cecAttestationReportSize nonce
            attestationReport cecAttestationReport
        }
        nvmlConfComputeGpuCertificate_t {
            certChainSize attestationCertChainSize certChain attestationCertChain
        }
        nvmlConfComputeMemSizeInfo_t { protectedMemSizeKib unprotectedMemSizeKib }
        nvmlGpuFabricInfo_t { clusterUuid status cliqueId state }
        nvmlGpuFabricInfo_v2_t { version clusterUuid status cliqueId state healthMask }
        nvmlExcludedDeviceInfo_t { pciInfo uuid }
        nvmlConfComputeSystemCaps_t { cpuCaps gpusCaps }
        nvmlSystemConfComputeSettings_v1_t { version environment ccFeature devToolsMode multiGpuMode }
        nvmlConfComputeSystemState_t { environment ccFeature devToolsMode }
        nvmlGpuInstanceProfileInfo_v3_t {
            version id sliceCount instanceCount multiprocessorCount copyEngineCount decoderCount
            encoderCount jpegCount ofaCount memorySizeMB name capabilities
        }
        nvmlComputeInstanceProfileInfo_v3_t {
            version id sliceCount instanceCount multiprocessorCount sharedCopyEngineCount
            sharedDecoderCount sharedEncoderCount sharedJpegCount sharedOfaCount name capabilities
        }
    }
}

/// Structures that nvml-wrapper-sys lacks, with the sizes that a C compiler computes from nvml.h of 12.9 and of older
/// versions.
#[test]
fn sizes_match() {
    assert_eq!(size_of::<ours::nvmlConfComputeGetKeyRotationThresholdInfo_v1_t>(), 16);
    assert_eq!(size_of::<ours::nvmlConfComputeSetKeyRotationThresholdInfo_v1_t>(), 16);
    assert_eq!(size_of::<ours::nvmlPciInfo_v1_t>(), 32);
    assert_eq!(size_of::<ours::nvmlPciInfo_v2_t>(), 52);
    assert_eq!(size_of::<ours::nvmlEventData_v1_t>(), 24);
}

/// The version of a structure consists of its size and a number.
#[test]
fn versions_match() {
    macro_rules! versions {
        ($($type:ident $version:ident $number:literal)*) => { $(
            assert_eq!(ours::$version as usize, size_of::<ours::$type>() | $number << 24, stringify!($version));
        )* };
    }
    versions! {
        nvmlPciInfoExt_v1_t nvmlPciInfoExt_v1 1
        nvmlMemory_v2_t nvmlMemory_v2 2
        nvmlProcessDetailList_v1_t nvmlProcessDetailList_v1 1
        nvmlC2cModeInfo_v1_t nvmlC2cModeInfo_v1 1
        nvmlProcessesUtilizationInfo_v1_t nvmlProcessesUtilizationInfo_v1 1
        nvmlEccSramErrorStatus_v1_t nvmlEccSramErrorStatus_v1 1
        nvmlPowerValue_v2_t nvmlPowerValue_v2 2
        nvmlGpuFabricInfo_v2_t nvmlGpuFabricInfo_v2 2
        nvmlGpuInstanceProfileInfo_v2_t nvmlGpuInstanceProfileInfo_v2 2
        nvmlGpuInstanceProfileInfo_v3_t nvmlGpuInstanceProfileInfo_v3 3
        nvmlComputeInstanceProfileInfo_v2_t nvmlComputeInstanceProfileInfo_v2 2
        nvmlComputeInstanceProfileInfo_v3_t nvmlComputeInstanceProfileInfo_v3 3
    }
}
