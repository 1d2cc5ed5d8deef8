"""Jobs: their states, who owns them, how many GPUs they hold, and when they end by themselves.

    pending -> placing -> initializing -> running -> terminated (idle)
       |          |            |            |
       +----------+------------+------------+--> cancelled (by its owner, or by its lease), failed (reason)

A job holds its GPUs from placing until its engine process is gone, whatever its status says; `reason` says
`cancelling` until then. Everything is in memory and, before anybody is told, on disk.
"""

import asyncio
import logging
import uuid
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

from pilotage.clock import steady_time
from pilotage.processes import ProcessIdentity
from pilotage.service.checkpoints import Checkpoints
from pilotage.service.engine_host import JobSpec
from pilotage.service.engines import Engine, EngineAddress, new_socket, start_engine
from pilotage.service.logs import tail
from pilotage.service.refusals import Refusal
from pilotage.service.store import Store
from pilotage.wire.core import ErrorCode, rfc3339
from pilotage.wire.jobs import (
    ACTIVE,
    ENDED,
    CapacityRecord,
    CreateJobBody,
    JobRecord,
    JobStatus,
    SubJobRecord,
    sub_job_ids,
)

_LOG = logging.getLogger(__name__)
_TICK_S = 0.2
_PLACEMENT_S = 900.0
"""An engine that is not open after so long is given up."""
_HEALTH_EVERY_S = 5.0
"""How often a running engine is asked; it ends itself when nobody asks for a minute."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a job belongs: whose it is, and under which database, schema and endpoint it was made."""

    owner: str
    database: str
    schema: str


@dataclass(slots=True, kw_only=True, eq=False)
class Job:
    """One job."""

    id: str
    place: Place
    body: CreateJobBody
    model_dir: Path
    source_checkpoint: Path | None
    created_at: float
    updated_at: float
    status: JobStatus = JobStatus.PENDING
    reason: str | None = None
    lease_expires_at: float | None = None
    address: EngineAddress | None = None
    engine: Engine | None = None
    last_activity_at: float = field(default_factory=steady_time)
    placed_at: float | None = None
    health_at: float = 0.0
    is_ending: bool = False
    """Its engine is being ended; the GPUs are held until that is done."""

    @property
    def holds_gpus(self) -> bool:
        """Whether its GPUs are taken."""
        return self.engine is not None or (self.status in ACTIVE and self.status is not JobStatus.PENDING)

    def to_json(self) -> str:
        """Return what is stored."""
        address = self.address
        content = {
            "id": self.id,
            "place": [self.place.owner, self.place.database, self.place.schema],
            "body": self.body.model_dump(mode="json", by_alias=True),
            "model_dir": str(self.model_dir),
            "source_checkpoint": None if self.source_checkpoint is None else str(self.source_checkpoint),
            "created_at": self.created_at,
            "updated_at": self.updated_at,
            "status": self.status,
            "reason": self.reason,
            "lease_expires_at": self.lease_expires_at,
            "engine": None
            if address is None
            else [address.process.pid, address.process.started_ticks, str(address.socket)],
        }
        return orjson.dumps(content).decode()

    @classmethod
    def from_json(cls, text: str) -> "Job":
        """Read what `to_json` wrote."""
        content: dict[str, Any] = orjson.loads(text)
        owner, database, schema = content["place"]
        source, engine = content["source_checkpoint"], content["engine"]
        address = None
        if engine is not None:
            process = ProcessIdentity(pid=engine[0], started_ticks=engine[1])
            address = EngineAddress(process=process, socket=Path(engine[2]))
        return cls(
            id=content["id"],
            place=Place(owner=owner, database=database, schema=schema),
            body=CreateJobBody.model_validate(content["body"]),
            model_dir=Path(content["model_dir"]),
            source_checkpoint=None if source is None else Path(source),
            created_at=content["created_at"],
            updated_at=content["updated_at"],
            status=JobStatus(content["status"]),
            reason=content["reason"],
            lease_expires_at=content["lease_expires_at"],
            address=address,
        )

    def record(self) -> JobRecord:
        """Return the job as clients see it."""
        names = sub_job_ids(self.id, self.body)
        sub_jobs = [
            SubJobRecord(
                sub_job_id=name,
                job_type=sub_job.job_type,
                status=self.status,
                model_name=sub_job.model_name,
                training_config=_config(sub_job.training_config),
                inference_config=_config(sub_job.inference_config),
            )
            for name, sub_job in zip(names, self.body.sub_job_configs, strict=True)
        ]
        return JobRecord(
            job_id=self.id,
            status=self.status,
            reason=self.reason,
            created_at=rfc3339(self.created_at),
            updated_at=rfc3339(self.updated_at),
            submitted_by=self.place.owner,
            hardware=self.body.hardware,
            idle_timeout_seconds=self.body.idle_timeout_seconds,
            pending_timeout_seconds=self.body.pending_timeout_seconds,
            comment=self.body.comment,
            experiment_name=self.body.experiment_name,
            sub_jobs=tuple(sub_jobs),
        )


class Jobs:
    """All jobs of the service."""

    def __init__(
        self,
        store: Store,
        *,
        directory: Path,
        models: Path,
        capacity: dict[str, int],
        engine_command: Sequence[str],
        clock: Callable[[], float] = steady_time,
    ) -> None:
        """Args:
        directory: where jobs have their directories.
        models: `model_name` is a path below it.
        capacity: GPUs, or slots on a CPU, by kind.
        engine_command: program of an engine process; gets the job's directory.
        """
        self._store = store
        self._directory = directory
        self._models = models
        self._capacity = capacity
        self._engine_command = tuple(engine_command)
        self._clock = clock
        self._jobs: dict[str, Job] = {}
        self._endings: set[asyncio.Task[None]] = set()

    # --- what callers ask ---

    def create(self, place: Place, body: CreateJobBody) -> Job:
        """Queue a job; it is on disk when this returns.

        Raises:
            Refusal: no such model or checkpoint, an id that is taken, or more GPUs than there are.
        """
        job_id = body.job_id or uuid.uuid4().hex
        if job_id in self._jobs or (self._directory / job_id).exists():
            raise Refusal(ErrorCode.CONFLICT, f"job id {job_id} is taken", path="job_id")
        total = self._capacity.get(body.hardware, 0)
        if body.n_gpus > total:
            raise Refusal(
                ErrorCode.CAPACITY,
                f"the job wants {body.n_gpus} {body.hardware}; this service has {total} in all",
            )
        now = self._clock()
        job = Job(
            id=job_id,
            place=place,
            body=body,
            model_dir=self._model_dir(body),
            source_checkpoint=self._source_checkpoint(place, body),
            created_at=now,
            updated_at=now,
            last_activity_at=now,
        )
        if body.extras.lease_s is not None:
            job.lease_expires_at = now + body.extras.lease_s
        self._keep(job)  # before its directory: an id is taken only where there is a job of it
        self._jobs[job_id] = job
        self._place_waiting()
        return job

    def get(self, place: Place, job_id: str) -> Job:
        """Return a job.

        Raises:
            Refusal: there is none of that id here, or it is somebody else's; the two look alike.
        """
        job = self._jobs.get(job_id)
        if job is None or job.place != place:
            raise Refusal(ErrorCode.NOT_FOUND, f"no job {job_id} here")
        return job

    def list(self, place: Place) -> "list[Job]":
        """Return a place's jobs, oldest first."""
        return [job for job in self._jobs.values() if job.place == place]

    def list_of_owner(self, owner: str) -> "list[Job]":
        """Return an owner's jobs of all databases and schemas, oldest first."""
        return [job for job in self._jobs.values() if job.place.owner == owner]

    def models(self) -> dict[str, Path]:
        """Return name -> directory of the models that jobs may name, at most three levels down."""
        root = self._models.resolve()
        found = [path.parent for depth in range(1, 4) for path in root.glob("*/" * depth + "config.json")]
        return {path.relative_to(root).as_posix(): path for path in sorted(found)}

    def status_counts(self) -> Counter[str]:
        """Count jobs by status, over all owners."""
        return Counter(str(job.status) for job in self._jobs.values())

    def capacity(self, hardware: str) -> CapacityRecord:
        """Count GPUs of one kind, over all owners."""
        total = self._capacity.get(hardware, 0)
        in_use, pending = self._in_use(hardware), self._pending(hardware)
        return CapacityRecord(
            max_total_gpus=total,
            in_use_gpus=in_use,
            pending_gpus=pending,
            available_gpus=max(0, total - in_use - pending),
        )

    async def cancel(self, job: Job) -> None:
        """Cancel a job, and wait until its GPUs are free; again is fine.

        Raises:
            Refusal: it had ended otherwise.
        """
        if job.status in (JobStatus.FAILED, JobStatus.TERMINATED):
            raise Refusal(ErrorCode.CONFLICT, f"job {job.id} has ended: {job.status}")
        if job.status is not JobStatus.CANCELLED:
            await self._end(job, JobStatus.CANCELLED, "cancelled by its owner")

    def renew(self, job: Job, lease_s: float) -> float:
        """Renew a lease; returns the seconds until it expires."""
        if job.status in ENDED:
            return 0.0
        job.lease_expires_at = self._clock() + lease_s
        self._keep(job)
        return lease_s

    def touch(self, job: Job) -> None:
        """Note that a job is used."""
        job.last_activity_at = self._clock()

    def running_engine(self, job: Job) -> Engine:
        """Return the engine of a running job.

        Raises:
            Refusal: the job does not run, with what it does instead.
        """
        if job.status is JobStatus.RUNNING and job.engine is not None and not job.is_ending:
            return job.engine
        is_coming = job.status in ACTIVE and not job.is_ending
        code = ErrorCode.JOB_NOT_RUNNING if is_coming else ErrorCode.ENGINE_LOST
        reason = f" ({job.reason})" if job.reason else ""
        raise Refusal(code, f"job {job.id} is {job.status}{reason}", retryable=is_coming)

    def directory_of(self, job: Job) -> Path:
        """Return a job's directory."""
        return self._directory / job.id

    def log_of(self, job: Job) -> Path:
        """Return a job's log file."""
        return self.directory_of(job) / "logs" / "engine.log"

    def checkpoints_of(self, job: Job) -> Checkpoints:
        """Return a job's checkpoints; they outlive it."""
        return Checkpoints(self.directory_of(job) / "checkpoints")

    # --- life ---

    async def restore(self) -> None:
        """Read the jobs from disk and find their engines again."""
        for text in self._store.jobs():
            job = Job.from_json(text)
            self._jobs[job.id] = job
            now = self._clock()
            job.last_activity_at = now
            lease_s = job.body.extras.lease_s
            if lease_s is not None and job.lease_expires_at is not None:
                # Nobody could renew it while the service was down.
                job.lease_expires_at = max(job.lease_expires_at, now + lease_s)
            if job.address is None:
                continue
            job.engine = Engine(job.address)
            if job.status in ENDED:
                await self._end_engine(job)
            elif not job.engine.is_running:
                await self._end(job, JobStatus.FAILED, "engine_lost: it died while the service was down")

    async def supervise(self) -> None:
        """Move jobs on, until cancelled."""
        while True:
            for job in list(self._jobs.values()):
                if job.status in ACTIVE and not job.is_ending:
                    try:
                        await self._supervise(job)
                    except Exception as error:  # noqa: BLE001 - the boundary: one job never ends the service
                        _LOG.exception("job %s: supervision failed", job.id)
                        self._end_soon(job, JobStatus.FAILED, f"service: {type(error).__name__}: {error}")
            self._place_waiting()
            await asyncio.sleep(_TICK_S)

    async def close(self) -> None:
        """End all engines: the service stops for good, and its jobs with it."""
        active = [job for job in self._jobs.values() if job.status in ACTIVE]
        await asyncio.gather(
            *(self._end(job, JobStatus.TERMINATED, "the service was stopped") for job in active)
        )
        await asyncio.gather(*self._endings, return_exceptions=True)

    async def detach(self) -> None:
        """Let go of all engines without ending them; another front may find them."""
        for job in self._jobs.values():
            if job.engine is not None:
                await job.engine.http.aclose()

    # --- supervision ---

    async def _supervise(self, job: Job) -> None:
        now = self._clock()
        if job.lease_expires_at is not None and now > job.lease_expires_at:
            if job.body.extras.on_lost == "cancel":
                self._end_soon(job, JobStatus.CANCELLED, "lease_expired: its driver is gone")
                return
            job.lease_expires_at = None
        if job.status is JobStatus.PENDING:
            if now - job.created_at > job.body.pending_timeout_seconds:
                self._end_soon(job, JobStatus.FAILED, "pending_timeout")
            return
        idle_s = job.body.idle_timeout_seconds
        if job.status is JobStatus.RUNNING and idle_s and now - job.last_activity_at > idle_s:
            self._end_soon(job, JobStatus.TERMINATED, "idle_timeout")
            return
        if job.engine is None:  # a front was killed between placing and starting
            self._start(job)
        elif not job.engine.is_running:
            self._end_soon(job, JobStatus.FAILED, f"engine_lost: {self._last_words(job)}")
        elif job.status is not JobStatus.RUNNING or now - job.health_at > _HEALTH_EVERY_S:
            await self._ask(job, job.engine, now)

    async def _ask(self, job: Job, engine: Engine, now: float) -> None:
        job.health_at = now
        health = await engine.health()
        if job.is_ending or job.status in ENDED or job.status is JobStatus.RUNNING:
            return
        if health is None:
            if job.placed_at is not None and now - job.placed_at > _PLACEMENT_S:
                self._end_soon(job, JobStatus.FAILED, "placement_timeout")
        elif health["status"] == "failed":
            self._end_soon(job, JobStatus.FAILED, f"engine: {health['reason']}")
        elif health["status"] == "ready":
            job.last_activity_at = now
            self._move(job, JobStatus.RUNNING)
        elif job.status is JobStatus.PLACING:
            self._move(job, JobStatus.INITIALIZING)

    def _place_waiting(self) -> None:
        """Start pending jobs in order of age, per kind of hardware, while there is room."""
        full: set[str] = set()
        for job in list(self._jobs.values()):
            hardware = job.body.hardware
            if job.status is not JobStatus.PENDING or job.is_ending or hardware in full:
                continue
            if self._in_use(hardware) + job.body.n_gpus > self._capacity.get(hardware, 0):
                full.add(hardware)  # a smaller, younger job does not overtake
                continue
            self._move(job, JobStatus.PLACING)
            self._start(job)

    def _start(self, job: Job) -> None:
        socket = new_socket()
        spec = JobSpec(
            job_id=job.id,
            body=job.body,
            model_dir=job.model_dir,
            source_checkpoint=job.source_checkpoint,
            directory=self.directory_of(job),
            socket=socket,
        )
        spec.directory.mkdir(parents=True, exist_ok=True)
        spec.write()
        job.engine = start_engine(self._engine_command, spec.directory, socket, self.log_of(job))
        job.address, job.placed_at = job.engine.address, self._clock()
        self._keep(job)

    def _end_soon(self, job: Job, status: JobStatus, reason: str) -> None:
        job.is_ending = True
        task = asyncio.get_running_loop().create_task(self._end(job, status, reason))
        self._endings.add(task)
        task.add_done_callback(self._endings.discard)

    async def _end(self, job: Job, status: JobStatus, reason: str) -> None:
        """End a job: its engine first, then its status, so that freed GPUs are free indeed."""
        job.is_ending = True
        if job.engine is not None:
            job.reason = f"ending: {reason}"
        await asyncio.shield(self._end_engine(job))
        job.reason = reason
        self._move(job, status)
        job.is_ending = False
        _LOG.warning("job %s: %s (%s)", job.id, status, reason)
        self._place_waiting()

    async def _end_engine(self, job: Job) -> None:
        if job.engine is not None:
            await job.engine.end()
            job.engine = job.address = None
            self._keep(job)

    def _move(self, job: Job, status: JobStatus) -> None:
        job.status, job.updated_at = status, self._clock()
        self._keep(job)

    def _keep(self, job: Job) -> None:
        self._store.put_job(job.id, job.created_at, job.to_json())

    def _last_words(self, job: Job) -> str:
        return " | ".join(tail(self.log_of(job), 3))[-500:] or "it ended without a word"

    # --- sums and paths ---

    def _in_use(self, hardware: str) -> int:
        return sum(j.body.n_gpus for j in self._jobs.values() if j.holds_gpus and j.body.hardware == hardware)

    def _pending(self, hardware: str) -> int:
        waiting = [j for j in self._jobs.values() if j.status is JobStatus.PENDING]
        return sum(job.body.n_gpus for job in waiting if job.body.hardware == hardware)

    def _model_dir(self, body: CreateJobBody) -> Path:
        name = body.model_name
        root = self._models.resolve()
        path = (root / name).resolve()
        if not path.is_relative_to(root) or not (path / "config.json").is_file():
            raise Refusal(
                ErrorCode.INVALID,
                f"no model {name!r} below the service's --models directory",
                path="sub_job_configs.0.model_name",
            )
        return path

    def _source_checkpoint(self, place: Place, body: CreateJobBody) -> Path | None:
        sources = [s.source_checkpoint_info for s in body.sub_job_configs if s.source_checkpoint_info]
        if not sources:
            return None
        source = sources[0]
        if any(other != source for other in sources):
            raise Refusal(ErrorCode.INVALID, "the sub-jobs start from different checkpoints")
        checkpoints = self.checkpoints_of(self.get(place, source.source_job_id))
        checkpoints.get(source.checkpoint_id)
        return checkpoints.path_of(source.checkpoint_id)


def _config(config: Any) -> dict[str, Any] | None:
    return None if config is None else config.model_dump(mode="json", by_alias=True, exclude_none=True)
