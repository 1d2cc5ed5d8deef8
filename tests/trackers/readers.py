"""What a tracker holds, read with the tracker's own reader, as step -> (name -> value)."""

import struct
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

import orjson

type History = dict[int, dict[str, float]]

_BLOCK_BYTES, _FILE_HEADER_BYTES, _HEADER = 32_768, 7, struct.Struct("<IHB")


def read_tensorboard(path: Path) -> History:
    """Through TensorBoard's accumulator; a step that is there twice is refused."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(path / "trackers" / "tensorboard"), size_guidance={"scalars": 0})
    accumulator.Reload()
    scalars: list[str] = list(accumulator.Tags()["scalars"])  # pyright: ignore[reportGeneralTypeIssues, reportArgumentType]
    points = [(tag, event) for tag in scalars for event in accumulator.Scalars(tag)]
    return _once((event.step, tag, event.value) for tag, event in points)


def read_trackio(path: Path) -> History:
    """Through Trackio's storage, which the run was written to in this process."""
    from trackio.sqlite_storage import SQLiteStorage  # pyright: ignore[reportMissingImports]

    rows = SQLiteStorage.get_logs("demo", path.name)
    return _once(
        (row["step"], name, value)
        for row in rows
        for name, value in row.items()
        if name not in ("step", "timestamp")
    )


def read_mlflow(path: Path) -> History:
    """Through MLflow's client, of the one run that is not deleted."""
    from mlflow import MlflowClient  # pyright: ignore[reportMissingImports]

    client = MlflowClient(tracking_uri=f"sqlite:///{path / 'trackers' / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("demo")
    [run] = client.search_runs([experiment.experiment_id])
    assert run.info.status == "FINISHED"
    assert run.data.params["loop.seed"] == "0"
    names = [name for name in run.data.metrics if name != "step"]
    return _once(
        (point.step, name, point.value)
        for name in names
        for point in client.get_metric_history(run.info.run_id, name)
    )


def read_wandb(path: Path) -> History:
    """Through wandb's own records; the file is a log of blocks that a record may span."""
    from wandb.proto.wandb_internal_pb2 import Record  # pyright: ignore[reportAttributeAccessIssue]

    [file] = (path / "trackers" / "wandb").glob("offline-run-*/*.wandb")
    rows: list[tuple[int, str, float]] = []
    for raw in _log_records(file.read_bytes()):
        record = Record.FromString(raw)
        if record.WhichOneof("record_type") == "history":
            items = {
                "".join(item.nested_key) or item.key: orjson.loads(item.value_json)
                for item in record.history.item
            }
            step = items.pop("_step")
            rows += [(step, name, value) for name, value in items.items() if not name.startswith("_")]
    return _once(rows)


def _log_records(content: bytes) -> list[bytes]:
    """Read LevelDB's log format: 7 bytes of header, then blocks of records whole, first, middle or last."""
    records: list[bytes] = []
    at = _FILE_HEADER_BYTES
    parts = b""
    while at + _HEADER.size <= len(content):
        room = _BLOCK_BYTES - at % _BLOCK_BYTES
        if room < _HEADER.size:
            at += room
            continue
        _, size, kind = _HEADER.unpack_from(content, at)
        parts += content[at + _HEADER.size : at + _HEADER.size + size]
        at += _HEADER.size + size
        if kind in (1, 4):
            records.append(parts)
            parts = b""
    return records


def _once(points: Iterable[tuple[int, str, float]]) -> History:
    history: defaultdict[int, dict[str, float]] = defaultdict(dict)
    for step, name, value in points:
        assert name not in history[step], f"step {step} has {name} twice"
        history[step][name] = value
    return dict(history)
