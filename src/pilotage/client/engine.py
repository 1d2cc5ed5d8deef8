"""From a connection to an engine: a job is created, waited for, kept by its lease, cancelled at the end."""

import contextlib
import logging
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from pathlib import Path

import httpx

from pilotage.client.connection import Connection
from pilotage.client.core import CoreEngine
from pilotage.client.http import Http, Patience
from pilotage.client.jobs import Jobs, default_comment
from pilotage.client.lease import leased
from pilotage.client.plain import PlainEngine, check_plain
from pilotage.errors import ConfigError, ServiceError
from pilotage.files import write_atomically
from pilotage.interfaces import Engine
from pilotage.types import AdamParams, LossConfig, SamplingParams
from pilotage.wire.core import Capabilities
from pilotage.wire.jobs import CreateJobBody

_log = logging.getLogger(__name__)
JOB_ID_FILES = ("job_id", "cortex_job_id")
"""In the run directory; the second is the name that launchers of other programs look for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobPlan:
    """The job that a run needs."""

    body: CreateJobBody
    """Its `x-pilotage` has the lease that the driver keeps, and must name the stop tokens. A comment that is
    absent is ours."""
    loss: LossConfig
    adam: AdamParams
    sampling: SamplingParams
    """What the run will ask; a service that cannot honour it is refused before the job is made."""
    startup_timeout_s: float = 1800.0
    """A job that does not run by then is cancelled."""
    run_directory: Path | None = None
    """Gets the job's id before the job is asked for. A job that a killed driver left there is cancelled."""
    patience: Patience | None = None
    """With a network that fails, and a service that is restarted; None is the default one."""


@contextlib.asynccontextmanager
async def open_engine(
    connection: Connection, plan: JobPlan, *, transport: httpx.AsyncBaseTransport | None = None
) -> AsyncGenerator[Engine]:
    """Create a job and use it while the context is open; however the context ends, the job is cancelled.

    Where the server has the strict core, the engine uses it, or else the stock wire.

    Args:
        transport: see `Http`.

    Raises:
        ConfigError: the server cannot do what the plan asks.
        ServiceError: the job was refused, failed, or did not run in time.
    """
    async with Http(connection, patience=plan.patience, transport=transport) as http:
        jobs = Jobs(http)
        capabilities = await jobs.capabilities()
        _check(plan, capabilities)
        await _sweep(jobs, plan.run_directory)
        comment = plan.body.comment or default_comment()
        body = plan.body.model_copy(update={"comment": comment})
        job_id = ""

        def on_id(chosen: str) -> None:
            nonlocal job_id
            job_id = chosen
            for name in JOB_ID_FILES if plan.run_directory else ():
                assert plan.run_directory is not None
                write_atomically(plan.run_directory / name, f"{chosen}\n".encode())

        lease_s = body.extras.lease_s if capabilities is not None else None
        try:
            await jobs.create(body, on_id=on_id, is_strict=capabilities is not None)
            async with leased(http, job_id, lease_s=lease_s):
                await jobs.wait_running(job_id, timeout_s=plan.startup_timeout_s)
            if capabilities is not None:
                attached = CoreEngine.attach(
                    http,
                    job_id,
                    capabilities=capabilities,
                    stop_token_ids=body.extras.engine.stop_token_ids or (),
                    lease_s=lease_s,
                )
            else:
                attached = PlainEngine.attach(http, job_id, body=body)
            async with attached as engine:
                yield engine
        finally:
            if job_id:
                await _release(jobs, job_id)


def _check(plan: JobPlan, capabilities: Capabilities | None) -> None:
    """Refuse what the server cannot honour, before anything is started."""
    lease_s = plan.body.extras.lease_s
    if plan.body.extras.engine.stop_token_ids is None:
        raise ConfigError("the job's body names no stop_token_ids; say what ends a completion")
    if capabilities is None:
        check_plain(plan.body, loss=plan.loss, adam=plan.adam, sampling=plan.sampling)
        if lease_s is not None:
            _log.warning(
                "this service keeps no leases: if the driver is killed, its job runs until the idle timeout"
                " of %d s, or until the run is started again",
                plan.body.idle_timeout_seconds,
            )
        if plan.body.idle_timeout_seconds == 0:
            raise ConfigError(
                "this service keeps no leases, and idle_timeout_seconds = 0 would never free a job whose"
                " driver was killed; give a timeout"
            )
        return
    if lease_s is not None and lease_s < capabilities.min_lease_s:
        raise ConfigError(f"lease_s is at least {capabilities.min_lease_s:g} here, got {lease_s:g}")
    for name, wanted, offered in (
        ("policy_loss", plan.loss.policy_loss, capabilities.losses),
        ("reduction", plan.loss.reduction, capabilities.reductions),
    ):
        if wanted not in offered:
            raise ConfigError(f"loss.{name} is {wanted}; this service has {', '.join(offered)}")


async def _sweep(jobs: Jobs, run_directory: Path | None) -> None:
    """Cancel the job that a killed driver of this run left."""
    path = None if run_directory is None else run_directory / JOB_ID_FILES[0]
    if path is not None and path.exists():
        await _release(jobs, path.read_text(encoding="utf-8").strip())


async def _release(jobs: Jobs, job_id: str) -> None:
    try:
        await jobs.release(job_id)
    except ServiceError as error:
        _log.warning("job %s could not be cancelled and may hold its GPUs: %s", job_id, error)
