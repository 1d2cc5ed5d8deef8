"""MLflow: a SQLite store in the run directory, or the server of MLFLOW_TRACKING_URI.

MLflow's records cannot be changed. A resumed run is continued where that is enough; where it holds steps that
will be done again, it is marked as deleted, and another of the same name gets the history and goes on.
"""

import os
import time
from collections.abc import Mapping

from mlflow import MlflowClient  # pyright: ignore[reportMissingImports]
from mlflow.entities import Metric, Param  # pyright: ignore[reportMissingImports]
from mlflow.exceptions import MlflowException  # pyright: ignore[reportMissingImports]

from pilotage.files import write_atomically
from pilotage.trackers.tracker import TrackedRun

_MAX_PARAMS = 100
"""That MLflow takes in one call."""
_MAX_VALUE_CHARS = 500


def _flat(config: Mapping[str, object], prefix: str = "") -> dict[str, str]:
    flat: dict[str, str] = {}
    for key, value in config.items():
        if isinstance(value, Mapping):
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = str(value)[:_MAX_VALUE_CHARS]
    return flat


class MlflowTracker:
    """A `Tracker`; look at it with `mlflow ui --backend-store-uri sqlite:///RUN/trackers/mlflow.db`."""

    def __init__(self, run: TrackedRun) -> None:
        run.directory.mkdir(parents=True, exist_ok=True)
        local = f"sqlite:///{(run.directory / 'mlflow.db').absolute()}"
        self._client = MlflowClient(tracking_uri=os.environ.get("MLFLOW_TRACKING_URI") or local)
        id_file = run.directory / "mlflow_run"
        self._run_id = id_file.read_text().strip() if id_file.is_file() else ""
        last_wanted = max((int(record["step"]) for record in run.records), default=-1)
        last = self._last_step() if self._run_id else -1
        if self._run_id and last > last_wanted:
            self._client.delete_run(self._run_id)
            self._run_id = ""
        if not self._run_id:
            self._run_id, last = self._create(run), -1
            write_atomically(id_file, f"{self._run_id}\n".encode())
        self._client.update_run(self._run_id, status="RUNNING")
        for record in run.records:
            if record["step"] > last:
                self.write(record)

    def _create(self, run: TrackedRun) -> str:
        experiment = self._client.get_experiment_by_name(run.project)
        experiment_id = (
            experiment.experiment_id if experiment else self._client.create_experiment(run.project)
        )
        run_id = self._client.create_run(experiment_id, run_name=run.name).info.run_id
        params = [Param(key, value) for key, value in _flat(run.config).items()]
        for start in range(0, len(params), _MAX_PARAMS):
            self._client.log_batch(run_id, params=params[start : start + _MAX_PARAMS])
        return run_id

    def _last_step(self) -> int:
        """Return the last step of the run that was kept, or -1 where the store has no such run any more."""
        try:
            history = self._client.get_metric_history(self._run_id, "step")
        except MlflowException:
            self._run_id = ""
            return -1
        return max((metric.step for metric in history), default=-1)

    def write(self, record: Mapping[str, float | int]) -> None:
        """See `MetricSink`; the step is a metric too, the last of a record: it tells how far a run got."""
        now_ms, step = int(time.time() * 1000), int(record["step"])
        names = [*(name for name in record if name != "step"), "step"]
        metrics = [Metric(name, float(record[name]), now_ms, step) for name in names]
        self._client.log_batch(self._run_id, metrics=metrics)

    def close(self) -> None:
        """See `Tracker`."""
        self._client.set_terminated(self._run_id)


def open_tracker(run: TrackedRun) -> MlflowTracker:
    """Open it."""
    return MlflowTracker(run)
