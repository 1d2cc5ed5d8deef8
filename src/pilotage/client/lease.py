"""Keeps a job's lease while its driver lives, and says when the job has ended."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass

from pilotage.client.http import Http, Patience, json_call
from pilotage.client.paths import segment
from pilotage.errors import AuthError, ConflictError, NotFoundError, ServiceError
from pilotage.wire.core import LeaseBody, LeaseState
from pilotage.wire.jobs import ENDED, normalised_status

_log = logging.getLogger(__name__)


async def keep_lease(http: Http, job_id: str, *, lease_s: float, on_ended: Callable[[str], None]) -> None:
    """Renew the lease three times in its length, until cancelled or the job has ended.

    A service that does not answer is asked again: whether the lease outlived the silence, the next answer
    says.

    Args:
        on_ended: called once with what the job became.
    """
    period_s = lease_s / 3
    call = json_call(
        "POST",
        f"/{segment(job_id)}/core/lease",
        LeaseBody(lease_s=lease_s).model_dump(),
        is_repeatable=True,
        timeout_s=period_s,
        patience=Patience(total_s=period_s),
    )
    while True:
        try:
            state = await http.call(call, lambda reply: LeaseState.model_validate(reply.json()))
        except (NotFoundError, ConflictError, AuthError) as error:
            on_ended(str(error))
            return
        except ServiceError as error:
            _log.warning("the lease of job %s was not renewed: %s", job_id, error)
        else:
            if normalised_status(state.status) in ENDED:
                on_ended(f"it is {normalised_status(state.status)}")
                return
        await asyncio.sleep(period_s)


@dataclass(slots=True, kw_only=True)
class Lease:
    """A lease that is being kept, and the tasks that live as long."""

    tasks: asyncio.TaskGroup
    on_ended: Callable[[str], None]
    """Told once when the job has ended; what the job became."""


@contextlib.asynccontextmanager
async def leased(http: Http, job_id: str, *, lease_s: float | None) -> AsyncGenerator[Lease]:
    """Keep a job's lease while the context is open; None is a job without one.

    What the body raises comes out as it is, not as a group.
    """
    raised: BaseException | None = None
    try:
        async with asyncio.TaskGroup() as tasks:
            lease = Lease(tasks=tasks, on_ended=lambda what: None)
            keeper = None
            if lease_s is not None:
                keeping = keep_lease(
                    http, job_id, lease_s=lease_s, on_ended=lambda what: lease.on_ended(what)
                )
                keeper = tasks.create_task(keeping)
            try:
                yield lease
            except BaseException as error:
                raised = error
                raise
            finally:
                if keeper is not None:
                    keeper.cancel()
    except BaseExceptionGroup:
        if raised is not None:
            raise raised from None
        raise
