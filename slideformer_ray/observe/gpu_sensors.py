"""The GPU's own utilisation and temperature, where its driver's library can be asked (NVML, or amdsmi on ROCm).

Tested by tests/observe/test_gpu_sensors.py.
"""

from __future__ import annotations

import torch


def read_gpu_sensors(device: torch.device) -> dict[str, float]:
    """utilisation_percent (of the last sample period, up to a second) and temperature_celsius; empty without either.

    PyTorch finds the device among the visible ones. It needs the module pynvml (package nvidia-ml-py), or amdsmi.
    """
    if device.type != "cuda":
        return {}
    try:
        return {
            "utilisation_percent": float(torch.cuda.utilization(device)),
            "temperature_celsius": float(torch.cuda.temperature(device)),
        }
    except (ImportError, RuntimeError, AttributeError):  # no module, no driver library, or a device that does not say
        return {}
    except Exception as error:
        if type(error).__module__.startswith(("pynvml", "amdsmi")):  # a device or container that does not let us ask
            return {}
        raise
