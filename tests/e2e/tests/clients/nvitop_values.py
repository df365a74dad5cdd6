"""Prints the values of every GPU from nvitop's Python API, as JSON."""

import json
import sys

from nvitop import Device, libnvml

json.dump(
    {
        "driver": Device.driver_version(),
        "cuda": Device.cuda_driver_version(),
        "gpus": [
            {
                "name": gpu.name(),
                "uuid": gpu.uuid(),
                "busId": gpu.bus_id(),
                "total": gpu.memory_total(),
                "used": gpu.memory_used(),
                "percent": gpu.gpu_utilization(),
                "temperature": gpu.temperature(),
                "power": gpu.power_usage(),
                "limit": gpu.power_limit(),
                "capability": gpu.cuda_compute_capability(),
                "mig": gpu.is_mig_mode_enabled(),
                "processes": [
                    {
                        "pid": process.pid,
                        "type": process.type,
                        "memory": process.gpu_memory(),
                        "command": process.command(),
                        "percent": None if process.gpu_sm_utilization() is libnvml.NA else process.gpu_sm_utilization(),
                    }
                    for process in gpu.processes().values()
                ],
            }
            for gpu in Device.all()
        ],
    },
    sys.stdout,
)
