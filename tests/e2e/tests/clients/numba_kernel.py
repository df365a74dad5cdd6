"""Compiles a kernel with numba, runs it on the GPU, and prints the results as JSON."""

import json
import sys

import numpy
from numba import cuda
from numba.cuda.cudadrv.driver import CudaAPIError


@cuda.jit
def double(x, y):
    i = cuda.grid(1)
    if i < x.size:
        y[i] = x[i] * 2


def refused(function, *arguments):
    try:
        function(*arguments)
    except CudaAPIError as error:
        return str(error)
    return "no error"


numbers = numpy.arange(100_000, dtype=numpy.float32).reshape(100, 1000)
gpu = cuda.get_current_device()
context = cuda.current_context()
free, total = context.get_memory_info()
there = cuda.to_device(numbers)
result = cuda.to_device(numpy.full(numbers.size, 3, dtype=numpy.float32))
less, _ = context.get_memory_info()
stream = cuda.stream()
start, end = cuda.event(), cuda.event()
start.record(stream)
double[numbers.size // 256 + 1, 256, stream](there.reshape(numbers.size), result)
end.record(stream)
stream.synchronize()
back = there.copy_to_host()
part = there[10:20].copy_to_host()
json.dump(
    {
        "available": cuda.is_available(),
        "name": gpu.name.decode() if isinstance(gpu.name, bytes) else gpu.name,
        "uuid": gpu.uuid,
        "capability": list(gpu.compute_capability),
        "multiprocessors": gpu.MULTIPROCESSOR_COUNT,
        "gpus": len(cuda.gpus),
        "free": free,
        "total": total,
        "taken": free - less,
        "shape": list(back.shape),
        "type": str(back.dtype),
        "same": bool((back == numbers).all()),
        # Simulated kernels compute nothing.
        "untouched": bool((result.copy_to_host() == 3).all()),
        "part": bool((part == numbers[10:20]).all()),
        "ptx": next(iter(double.inspect_asm().values())),
        "milliseconds": cuda.event_elapsed_time(start, end),
        "too much": refused(cuda.device_array, (total,), numpy.uint8),
    },
    sys.stdout,
)
