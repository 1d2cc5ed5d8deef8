"""Judge the training service: does it answer, does it take the token, has it what the recipe needs."""

import asyncio
import os
from dataclasses import dataclass
from datetime import datetime
from email.utils import parsedate_to_datetime

import httpx

from pilotage.client import Connection, Http, Jobs, Patience, default_comment, resolve_connection
from pilotage.client.token_expiry import expires_at
from pilotage.errors import AuthError, ConfigError, ServiceError
from pilotage.ops.doctor.findings import Finding, FindingName, error, from_error, ok, skipped, warning
from pilotage.ops.doctor.need import ServiceNeed
from pilotage.wire.jobs import ACTIVE, CapacityRecord, JobRecord

_ANSWER_S = 8.0
"""Longest that the service is waited for, over all calls."""
_SOON_S = 86_400.0
"""A token that expires sooner may expire within a run."""
_CLOCK_OFF_S = 30.0
"""Tokens and leases are judged by the service's clock; networks take less than this."""
_PATIENCE = Patience(total_s=2.0)


def find_connection(need: ServiceNeed) -> Connection | Finding:
    """Return the connection, or what is to say where there is none."""
    try:
        return resolve_connection()
    except ConfigError as raised:
        if need.is_required:
            return from_error(FindingName.LOGIN, raised)
        return skipped(FindingName.LOGIN, "no training service is configured, and none is needed")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceFacts:
    """What a service said."""

    capacity: CapacityRecord
    jobs: tuple[JobRecord, ...]
    """Those that are active."""
    clock: datetime | None
    """Its own, where it says."""


async def check_service(http: Http, need: ServiceNeed, *, has_live_driver: bool, now: float) -> list[Finding]:
    """Ask a service and judge what it says; findings of the clock only where it says what the time is.

    Args:
        has_live_driver: whether a job of mine may have its driver here.
        now: Unix seconds.
    """
    connection = http.connection
    expiry = _token_expiry(connection, now)
    try:
        async with asyncio.timeout(_ANSWER_S):
            facts = await _ask(http, need)
    except AuthError as raised:
        refused = error(
            FindingName.LOGIN,
            f"{connection.origin} refused the token of {connection.source}: {raised}",
            fix="make a new token and run `pilotage login`",
        )
        return [refused, expiry]
    except (ServiceError, TimeoutError) as raised:
        said = str(raised) or f"no answer within {_ANSWER_S:g} s"
        silent = error(
            FindingName.SERVICE,
            f"{connection.origin}: {said}",
            fix="see whether the service runs and this machine reaches it; `pilotage login` names another",
        )
        return [silent, expiry]
    findings = [
        ok(FindingName.SERVICE, f"{connection.origin} answers"),
        ok(FindingName.LOGIN, f"the login of {connection.source} is taken"),
        expiry,
        _capacity(facts.capacity, need),
        _jobs(facts.jobs, need, has_live_driver=has_live_driver),
    ]
    return findings if facts.clock is None else [*findings, _clock(facts.clock, now)]


async def _ask(http: Http, need: ServiceNeed) -> ServiceFacts:
    jobs = Jobs(http)
    # The first call is the one that is quick to say that nobody is there.
    capacity = (await jobs.capacity(need.hardware))[need.hardware]
    active = await jobs.find(statuses=frozenset(status.value for status in ACTIVE))
    return ServiceFacts(capacity=capacity, jobs=tuple(active), clock=await _date(http))


async def _date(http: Http) -> datetime | None:
    """Return the time that the service's answers carry."""
    try:
        async with http.stream(f"{http.connection.prefix}/capabilities") as response:
            return parsedate_to_datetime(response.headers["date"])
    except (httpx.TransportError, KeyError, ValueError):
        return None


def _token_expiry(connection: Connection, now: float) -> Finding:
    name = FindingName.TOKEN_EXPIRY
    if connection.token is None:
        return skipped(name, "this service is used without a token")
    at = expires_at(connection.token)
    if at is None:
        return ok(name, "the token states no expiry")
    fix = "make a new token and run `pilotage login`"
    if at <= now:
        return error(name, f"the token expired {_duration(now - at)} ago", fix=fix)
    if at - now < _SOON_S:
        return warning(name, f"the token expires in {_duration(at - now)}", fix=fix)
    return ok(name, f"the token expires in {_duration(at - now)}")


def _duration(seconds: float) -> str:
    hours = seconds / 3600
    return f"{hours / 24:.0f} days" if hours >= 48 else f"{hours:.1f} h"


def _capacity(found: CapacityRecord, need: ServiceNeed) -> Finding:
    name, wanted, kind = FindingName.CAPACITY, need.num_gpus, need.hardware
    free, total = found.available_gpus, found.max_total_gpus
    if free < 0 or total < 0:
        return ok(name, f"no limit of {kind}; the recipe needs {wanted}")
    evidence = f"{free} of {total} {kind} free"
    if wanted == 0:
        return ok(name, evidence)
    if wanted > total:
        return error(
            name,
            f"{evidence}, and the recipe needs {wanted}: it can never be placed",
            fix="job.training_gpus and job.sampling_gpus within the total, or another job.hardware",
        )
    if wanted > free:
        return warning(
            name,
            f"{evidence}, and the recipe needs {wanted}: the job would wait",
            fix="wait until GPUs are free (`pilotage capacity`), or cancel a job of yours"
            " (`pilotage jobs list --mine --status active`)",
        )
    return ok(name, f"{evidence}; the recipe needs {wanted}")


def _jobs(active: tuple[JobRecord, ...], need: ServiceNeed, *, has_live_driver: bool) -> Finding:
    comment = need.comment or os.environ.get("ARCTIC_CORTEX_JOB_COMMENT") or default_comment()
    mine = [job.job_id for job in active if job.comment == comment]
    evidence = f"{len(active)} active: {len(mine)} mine ({comment}), {len(active) - len(mine)} of others"
    if mine and not has_live_driver:
        return warning(
            FindingName.JOBS,
            f"{evidence}; no driver on this machine holds {', '.join(mine)}",
            fix="; ".join(f"pilotage jobs cancel {job_id}" for job_id in mine)
            + ", unless a driver on another machine holds it",
        )
    return ok(FindingName.JOBS, evidence)


def _clock(service: datetime, now: float) -> Finding:
    ahead_s = now - service.timestamp()
    if abs(ahead_s) > _CLOCK_OFF_S:
        return warning(
            FindingName.CLOCK,
            f"{abs(ahead_s):.0f} s {'ahead of' if ahead_s > 0 else 'behind'} the service's",
            fix="set the clock: turn on time synchronisation (timedatectl set-ntp true)",
        )
    return ok(FindingName.CLOCK, f"within {max(1, abs(ahead_s)):.0f} s of the service's")
