"""GPU metrics, against a stand-in for NVML's C library: no test machine need have a GPU."""

import asyncio
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import orjson
import pytest
from tests.service.rig import PREFIX, rig

from pilotage.service.gpu_meter import GpuMeter, visible_devices

UUIDS = ["GPU-aaa1", "GPU-aab2", "GPU-ccc3"]


@dataclass
class Nvml:
    """The functions of pynvml that the meter calls; device 1 does not tell its power."""

    NVML_TEMPERATURE_GPU: int = 0
    NVMLError: type[Exception] = field(default=OSError)

    def nvmlDeviceGetCount(self) -> int:
        return len(UUIDS)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetUUID(self, handle: int) -> str:
        return UUIDS[handle]

    def nvmlDeviceGetUtilizationRates(self, handle: int) -> SimpleNamespace:
        return SimpleNamespace(gpu=10 * handle)

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> SimpleNamespace:
        return SimpleNamespace(used=2**30, free=2**31)

    def nvmlDeviceGetPowerUsage(self, handle: int) -> int:
        if handle == 1:
            raise self.NVMLError("not supported")
        return 250_000

    def nvmlDeviceGetTemperature(self, handle: int, sensor: int) -> int:
        assert sensor == self.NVML_TEMPERATURE_GPU
        return 60


@pytest.mark.parametrize(
    ("setting", "shown"),
    [
        (None, [0, 1, 2]),
        ("", []),
        ("2,0", [2, 0]),
        ("GPU-aab", [1]),
        ("0,7,1", [0]),
        ("GPU-ccc3, 1", [2, 1]),
        ("-1", []),
    ],
)
def test_devices_are_shown_as_cuda_shows_them(setting: str | None, shown: list[int]) -> None:
    assert visible_devices(UUIDS, setting) == shown


async def test_every_visible_device_is_recorded_in_watts_and_bytes_without_what_it_does_not_tell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,2")
    path = tmp_path / "gpu.jsonl"
    run = asyncio.create_task(GpuMeter(Nvml(), path).run())
    async with asyncio.timeout(5):
        while not path.exists() or path.read_bytes().count(b"\n") < 2:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    run.cancel()
    first, second = map(orjson.loads, path.read_bytes().splitlines())
    assert (first["verb"], second["verb"]) == ("gpu/GPU-aab2", "gpu/GPU-ccc3")
    assert "power_watts" not in first["values"]
    assert second["values"] == {
        "gpu_util_pct": 20.0,
        "fb_used_bytes": 2.0**30,
        "fb_free_bytes": 2.0**31,
        "power_watts": 250.0,
        "gpu_temp_c": 60.0,
    }


async def test_the_series_is_read_over_the_wire_from_a_cursor_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    async with rig(tmp_path) as service:
        job_id = await service.running()
        url = f"{PREFIX}/{job_id}/core/metrics"
        empty = (await service.http.get(url, params={"series": "gpu"})).json()
        assert empty == {"records": [], "next_cursor": 0}
        GpuMeter(Nvml(), tmp_path / "jobs" / job_id / "gpu.jsonl").record()
        page = (await service.http.get(url, params={"series": "gpu", "cursor": "1"})).json()
        assert [record["verb"] for record in page["records"]] == ["gpu/GPU-aab2", "gpu/GPU-ccc3"]
        assert page["next_cursor"] == 3
        refused = await service.http.get(url, params={"series": "cpu"})
        assert (refused.status_code, refused.json()["path"]) == (422, "series")
