"""Uses the GPUs through cuda-python's driver API, and prints the results as JSON."""

import ctypes
import json
import sys

from cuda.bindings import driver, nvrtc

MIB = 1 << 20
PTX = b"""
.version 7.0
.target sm_70
.address_size 64
.visible .entry busy_20000us() { ret; }
.visible .entry twice(.param .u64 where, .param .u32 count) { ret; }
\0"""
SOURCE = b'extern "C" __global__ void add(float *x, float y, int n) { int i = threadIdx.x; if (i < n) x[i] += y; }'


class Refused(Exception):
    pass


def well(answer):
    code, *values = answer
    if code.value != 0:
        raise Refused(code.name)
    return values[0] if len(values) == 1 else values


def refused(function, *arguments):
    try:
        well(function(*arguments))
    except Refused as error:
        return str(error)
    return "CUDA_SUCCESS"


def attribute(device, name):
    return well(driver.cuDeviceGetAttribute(getattr(driver.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}"), device))


def of_device(index):
    device = well(driver.cuDeviceGet(index))
    names = (
        "MULTIPROCESSOR_COUNT COMPUTE_CAPABILITY_MAJOR COMPUTE_CAPABILITY_MINOR MAX_THREADS_PER_BLOCK WARP_SIZE "
        "CLOCK_RATE MEMORY_CLOCK_RATE GLOBAL_MEMORY_BUS_WIDTH L2_CACHE_SIZE ECC_ENABLED PCI_BUS_ID PCI_DOMAIN_ID "
        "MAX_SHARED_MEMORY_PER_BLOCK MAX_SHARED_MEMORY_PER_MULTIPROCESSOR UNIFIED_ADDRESSING ASYNC_ENGINE_COUNT"
    ).split()
    return {
        "name": well(driver.cuDeviceGetName(96, device)).split(b"\0")[0].decode(),
        "uuid": well(driver.cuDeviceGetUuid_v2(device)).bytes.hex(),
        "busId": well(driver.cuDeviceGetPCIBusId(32, device)).split(b"\0")[0].decode(),
        "memory": well(driver.cuDeviceTotalMem(device)),
        **{name: attribute(device, name) for name in names},
    }


def copies():
    """Copies bytes to the GPU, to another buffer there, and back."""
    data = bytes(range(256)) * 16384
    here, there = well(driver.cuMemAlloc(len(data))), well(driver.cuMemAlloc(len(data)))
    well(driver.cuMemcpyHtoD(here, data, len(data)))
    well(driver.cuMemcpyDtoD(there, here, len(data)))
    back = bytearray(len(data))
    well(driver.cuMemcpyDtoH(back, there, len(data)))
    same = bytes(back) == data
    well(driver.cuMemsetD8(there, 0xA5, 1000))
    well(driver.cuMemcpyDtoH(back, there, len(data)))
    set_there = back[:1000] == b"\xa5" * 1000 and back[1000:] == data[1000:]
    well(driver.cuMemFree(here))
    well(driver.cuMemFree(there))
    return {"same": same, "set": set_there, "freed twice": refused(driver.cuMemFree, here)}


def memory():
    free, total = well(driver.cuMemGetInfo())
    pointer = well(driver.cuMemAlloc(512 * MIB))
    less, _ = well(driver.cuMemGetInfo())
    answers = {
        "free": free,
        "total": total,
        "taken": free - less,
        "more than the card": refused(driver.cuMemAlloc, total + MIB),
        "more than is left": refused(driver.cuMemAlloc, less + MIB),
        "nothing": refused(driver.cuMemAlloc, 0),
    }
    well(driver.cuMemFree(pointer))
    answers["given back"] = well(driver.cuMemGetInfo())[0] == free
    return answers


def compiled(capability):
    """Compiles code for exactly this GPU with NVRTC: a driver older than NVRTC would not accept its PTX."""
    program = well(nvrtc.nvrtcCreateProgram(SOURCE, b"add.cu", 0, [], []))
    well(nvrtc.nvrtcCompileProgram(program, 1, [f"--gpu-architecture=sm_{capability}".encode()]))
    code = b" " * well(nvrtc.nvrtcGetCUBINSize(program))
    well(nvrtc.nvrtcGetCUBIN(program, code))
    return code


def launches(capability):
    written = well(driver.cuModuleLoadData(PTX))
    busy = well(driver.cuModuleGetFunction(written, b"busy_20000us"))
    module = well(driver.cuModuleLoadData(compiled(capability)))
    add = well(driver.cuModuleGetFunction(module, b"add"))
    stream = well(driver.cuStreamCreate(0))
    start, end = well(driver.cuEventCreate(0)), well(driver.cuEventCreate(0))

    def run(kernels):
        for _ in range(kernels):
            well(driver.cuLaunchKernel(busy, 1 << 16, 1, 1, 1024, 1, 1, 0, stream, 0, 0))

    # A delay of the host leaves the GPU idle in between, so the shortest of several rounds counts. The first kernel
    # of a round is before its start event: the others are queued when it ends.
    rounds = []
    while len(rounds) < 2 or (min(rounds) > 60.6 and len(rounds) < 50):
        run(1)
        well(driver.cuEventRecord(start, stream))
        run(3)
        well(driver.cuEventRecord(end, stream))
        before = refused(driver.cuEventQuery, end)
        well(driver.cuStreamSynchronize(stream))
        rounds.append(well(driver.cuEventElapsedTime(start, end)))
    numbers = well(driver.cuMemAlloc(1024))
    well(driver.cuMemsetD32(numbers, 7, 256))
    arguments = ((int(numbers), 1.0, 256), (ctypes.c_void_p, ctypes.c_float, ctypes.c_int))
    launched = refused(driver.cuLaunchKernel, add, 1, 1, 1, 256, 1, 1, 0, stream, arguments, 0)
    well(driver.cuCtxSynchronize())
    back = bytearray(1024)
    well(driver.cuMemcpyDtoH(back, numbers, 1024))
    return {
        "milliseconds": min(rounds),
        "before": before,
        "after": refused(driver.cuEventQuery, end),
        "stream": refused(driver.cuStreamQuery, stream),
        "compiled": launched,
        "bytes stay": bytes(back) == (7).to_bytes(4, "little") * 256,
        "too large a block": refused(driver.cuLaunchKernel, busy, 1, 1, 1, 2048, 1, 1, 0, stream, 0, 0),
        "no such function": refused(driver.cuModuleGetFunction, written, b"absent"),
    }


before = refused(driver.cuDeviceGetCount)
well(driver.cuInit(0))
device = well(driver.cuDeviceGet(0))
context = well(driver.cuCtxCreate(0, device))
capability = f"{attribute(device, 'COMPUTE_CAPABILITY_MAJOR')}{attribute(device, 'COMPUTE_CAPABILITY_MINOR')}"
answer = {
    "before": before,
    "version": well(driver.cuDriverGetVersion()),
    "devices": [of_device(index) for index in range(well(driver.cuDeviceGetCount()))],
    "beyond": refused(driver.cuDeviceGet, well(driver.cuDeviceGetCount())),
    "copies": copies(),
    "memory": memory(),
    "launches": launches(capability),
}
well(driver.cuCtxDestroy(context))
answer["without a context"] = refused(driver.cuMemAlloc, MIB)
json.dump(answer, sys.stdout)
