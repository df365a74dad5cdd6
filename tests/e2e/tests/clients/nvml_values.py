"""Prints every value of every GPU from nvidia-ml-py as JSON. A value that a GPU does not support is the error's text."""

import ctypes
import json
import sys

import pynvml as nvml


def ask(function, *arguments):
    try:
        return plain(function(*arguments))
    except nvml.NVMLError as error:
        return str(error)


def plain(value):
    if isinstance(value, bytes):
        return value.decode()
    if isinstance(value, (list, tuple, ctypes.Array)):
        return [plain(each) for each in value]
    if hasattr(value, "_fields_"):
        return {name: plain(getattr(value, name)) for name, *_ in value._fields_}
    if hasattr(value, "__dict__"):
        return {name: plain(each) for name, each in vars(value).items()}
    return value


def of_gpu(gpu):
    values = {
        name: ask(getattr(nvml, f"nvmlDeviceGet{name}"), gpu)
        for name in (
            "Name UUID Serial Index MinorNumber Brand Architecture BoardId BoardPartNumber VbiosVersion PciInfo ModuleId "
            "MemoryInfo BAR1MemoryInfo UtilizationRates EncoderUtilization PowerUsage EnforcedPowerLimit "
            "PowerManagementLimit PowerManagementDefaultLimit PowerManagementLimitConstraints PerformanceState ComputeMode "
            "PersistenceMode EccMode MigMode FanSpeed NumGpuCores MemoryBusWidth CudaComputeCapability "
            "MaxPcieLinkGeneration MaxPcieLinkWidth CurrPcieLinkGeneration TotalEnergyConsumption "
            "ComputeRunningProcesses GraphicsRunningProcesses MPSComputeRunningProcesses "
            "CurrentClocksThrottleReasons VirtualizationMode InforomImageVersion NumaNodeId"
        ).split()
    }
    values["MemoryInfo_v2"] = ask(nvml.nvmlDeviceGetMemoryInfo, gpu, nvml.nvmlMemory_v2)
    values["Temperature"] = ask(nvml.nvmlDeviceGetTemperature, gpu, nvml.NVML_TEMPERATURE_GPU)
    for name in ("SHUTDOWN", "SLOWDOWN", "GPU_MAX"):
        kind = getattr(nvml, f"NVML_TEMPERATURE_THRESHOLD_{name}")
        values[f"Threshold_{name}"] = ask(nvml.nvmlDeviceGetTemperatureThreshold, gpu, kind)
    for name in ("GRAPHICS", "SM", "MEM", "VIDEO"):
        kind = getattr(nvml, f"NVML_CLOCK_{name}")
        values[f"Clock_{name}"] = ask(nvml.nvmlDeviceGetClockInfo, gpu, kind)
        values[f"MaxClock_{name}"] = ask(nvml.nvmlDeviceGetMaxClockInfo, gpu, kind)
    volatile, uncorrected = nvml.NVML_VOLATILE_ECC, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED
    values["TotalEccErrors"] = ask(nvml.nvmlDeviceGetTotalEccErrors, gpu, uncorrected, volatile)
    values["CpuAffinity"] = ask(nvml.nvmlDeviceGetCpuAffinity, gpu, 8)
    values["MemoryAffinity"] = ask(nvml.nvmlDeviceGetMemoryAffinity, gpu, 4, nvml.NVML_AFFINITY_SCOPE_NODE)
    links = range(nvml.NVML_NVLINK_MAX_LINKS)
    values["NvLinks"] = [ask(nvml.nvmlDeviceGetNvLinkState, gpu, link) for link in links]
    fields = [nvml.NVML_FI_DEV_NVLINK_LINK_COUNT, nvml.NVML_FI_DEV_POWER_CURRENT_LIMIT]
    values["Fields"] = [field.value.uiVal for field in nvml.nvmlDeviceGetFieldValues(gpu, fields)]
    values["ByUUID"] = ask(lambda: nvml.nvmlDeviceGetIndex(nvml.nvmlDeviceGetHandleByUUID(values["UUID"])))
    address = values["PciInfo"]["busId"]
    values["ByPciBusId"] = ask(lambda: nvml.nvmlDeviceGetIndex(nvml.nvmlDeviceGetHandleByPciBusId(address)))
    return values


nvml.nvmlInit()
count = nvml.nvmlDeviceGetCount()
gpus = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(count)]
answer = {
    "driver": ask(nvml.nvmlSystemGetDriverVersion),
    "nvml": ask(nvml.nvmlSystemGetNVMLVersion),
    "cuda": ask(nvml.nvmlSystemGetCudaDriverVersion),
    "gpus": [of_gpu(gpu) for gpu in gpus],
    "levels": [[ask(nvml.nvmlDeviceGetTopologyCommonAncestor, a, b) for b in gpus] for a in gpus],
    "beyond": ask(nvml.nvmlDeviceGetHandleByIndex, count),
    "names": [ask(nvml.nvmlSystemGetProcessName, int(pid)) for pid in sys.argv[1:]],
}
nvml.nvmlShutdown()
answer["after"] = ask(nvml.nvmlDeviceGetCount)
json.dump(answer, sys.stdout)
