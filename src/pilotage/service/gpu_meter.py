"""What the GPUs that a job may use do, every few seconds: `gpu.jsonl` of the job's directory.

Read from NVML by the engine process; on a machine without it there is no file. A line has the shape of the
job's other metric series: `verb` names the device, `values` hold its figures in the units of their names.
"""

import asyncio
import contextlib
import logging
import os
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from pydantic_core import to_json

from pilotage.clock import steady_time

_LOG = logging.getLogger(__name__)
_INTERVAL_S = 5.0


class GpuMeter:
    """Reads the visible devices and appends what they say."""

    def __init__(self, nvml: Any, path: Path) -> None:
        """Args:
        nvml: the module `pynvml`, initialised.
        path: the file that grows.
        """
        self._nvml = nvml
        self._path = path
        handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
        uuids: list[str] = [nvml.nvmlDeviceGetUUID(handle) for handle in handles]
        wanted = visible_devices(uuids, os.environ.get("CUDA_VISIBLE_DEVICES"))
        self._devices = {uuids[index]: handles[index] for index in wanted}

    def record(self) -> None:
        """Append one line a device; a figure that the device does not tell is absent."""
        lines = [
            to_json({"at": steady_time(), "verb": f"gpu/{uuid}", "duration_s": _INTERVAL_S, "values": values})
            for uuid, handle in self._devices.items()
            if (values := self._figures(handle))
        ]
        with self._path.open("ab") as file:
            file.write(b"".join(line + b"\n" for line in lines))

    async def run(self) -> None:
        """Record until cancelled."""
        while True:
            await asyncio.to_thread(self.record)
            await asyncio.sleep(_INTERVAL_S)

    def _figures(self, handle: Any) -> dict[str, float]:
        nvml = self._nvml
        readings: dict[str, Callable[[], float]] = {
            "gpu_util_pct": lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu,
            "fb_used_bytes": lambda: nvml.nvmlDeviceGetMemoryInfo(handle).used,
            "fb_free_bytes": lambda: nvml.nvmlDeviceGetMemoryInfo(handle).free,
            "power_watts": lambda: nvml.nvmlDeviceGetPowerUsage(handle) / 1e3,
            "gpu_temp_c": lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU),
        }
        values: dict[str, float] = {}
        for name, read in readings.items():
            with contextlib.suppress(nvml.NVMLError):
                values[name] = float(read())
        return values


def open_meter(path: Path) -> GpuMeter | None:
    """Return a meter, or None where there is no NVML or no driver that answers."""
    try:
        nvml: Any = import_module("pynvml")
    except ImportError:
        return None
    try:
        nvml.nvmlInit()
        return GpuMeter(nvml, path)
    except nvml.NVMLError as error:
        _LOG.warning("GPU metrics are not recorded: %s", error)
        return None


def visible_devices(uuids: Sequence[str], setting: str | None) -> list[int]:
    """Return the indices of devices that CUDA shows, by the rule of CUDA_VISIBLE_DEVICES.

    Args:
        setting: the variable's value: numbers or beginnings of uuids; what follows an unknown one is hidden.
            None shows all.
    """
    if setting is None:
        return list(range(len(uuids)))
    shown: list[int] = []
    for word in setting.split(","):
        name = word.strip()
        if name.isdigit():
            found = [int(name)] if int(name) < len(uuids) else []
        else:
            found = [index for index, uuid in enumerate(uuids) if name and uuid.startswith(name)]
        if not found:
            break
        shown.append(found[0])
    return shown
