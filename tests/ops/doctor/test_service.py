"""A real service, and what the doctor says of it: one broken thing gives its one finding."""

import base64
import contextlib
import json
import time
from collections.abc import AsyncGenerator, Callable
from datetime import UTC, datetime
from email.utils import format_datetime
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.service.rig import Rig, job_body, rig

from pilotage.client import Connection, Http, Patience, Secret, default_comment
from pilotage.client.token_expiry import expires_at
from pilotage.ops.doctor.findings import Finding, FindingName, Severity
from pilotage.ops.doctor.need import ServiceNeed
from pilotage.ops.doctor.service import check_service, find_connection
from pilotage.service.tokens import create_token

NEED = ServiceNeed(is_required=True, hardware="H200", num_gpus=8)
NOW = time.time()


def with_date(app: Any, at: Callable[[], float]) -> Any:
    """Return an app whose answers say that it is `at`, as a web server's do."""

    async def dated(scope: Any, receive: Any, send: Any) -> None:
        async def send_dated(message: Any) -> None:
            if message["type"] == "http.response.start":
                date = format_datetime(datetime.fromtimestamp(at(), UTC), usegmt=True)
                message["headers"] = [*message["headers"], (b"date", date.encode())]
            await send(message)

        await app(scope, receive, send_dated)

    return dated


def client(app: Any, token: str | None = None) -> Http:
    connection = Connection(
        origin="http://127.0.0.1",
        token=None if token is None else Secret(token),
        database="db",
        schema="public",
        source="a test",
    )
    return Http(connection, patience=Patience(total_s=0.2), transport=httpx.ASGITransport(app))


@contextlib.asynccontextmanager
async def served(directory: Path, *, capacity: int = 8) -> AsyncGenerator[tuple[Rig, str]]:
    async with rig(directory, capacity=capacity, with_auth=True) as service:
        yield service, create_token(service.store, "me")


async def findings_of(
    http: Http, *, need: ServiceNeed = NEED, has_live_driver: bool = False, now: float | None = None
) -> list[Finding]:
    async with http:
        return await check_service(
            http, need, has_live_driver=has_live_driver, now=time.time() if now is None else now
        )


def only(findings: list[Finding]) -> Finding:
    (found,) = [finding for finding in findings if finding.fix]
    return found


async def test_a_good_service_has_nothing_above_ok(tmp_path: Path) -> None:
    async with served(tmp_path) as (service, token):
        findings = await findings_of(client(with_date(service.app, time.time), token))
    assert [finding for finding in findings if finding.fix] == []
    assert {finding.name for finding in findings} == {
        FindingName.SERVICE,
        FindingName.LOGIN,
        FindingName.TOKEN_EXPIRY,
        FindingName.CAPACITY,
        FindingName.JOBS,
        FindingName.CLOCK,
    }


async def test_a_refused_token_is_a_finding_of_the_login(tmp_path: Path) -> None:
    async with served(tmp_path) as (service, _):
        found = only(await findings_of(client(service.app, "plt_wrong-token")))
    assert (found.name, found.severity) == (FindingName.LOGIN, Severity.ERROR)
    assert "pilotage login" in found.fix
    assert "plt_wrong-token" not in found.evidence


async def test_a_service_that_is_not_there_is_a_finding_of_the_service() -> None:
    connection = Connection(origin="http://127.0.0.1:9", source="a test")
    found = only(await findings_of(Http(connection, patience=Patience(total_s=0.2))))
    assert (found.name, found.severity) == (FindingName.SERVICE, Severity.ERROR)
    assert "see whether the service runs" in found.fix


def jwt(expiry: float) -> str:
    claims = base64.urlsafe_b64encode(json.dumps({"exp": expiry}).encode()).decode().rstrip("=")
    return f"e30.{claims}.c2ln"


@pytest.mark.parametrize(
    ("left_s", "severity", "evidence"),
    [(-7200.0, Severity.ERROR, "expired 2.0 h ago"), (3600.0, Severity.WARNING, "expires in 1.0 h")],
)
async def test_a_token_that_expires_within_a_run_is_told_before(
    left_s: float, severity: Severity, evidence: str, tmp_path: Path
) -> None:
    async with rig(tmp_path, with_auth=False) as service:
        found = only(await findings_of(client(service.app, jwt(NOW + left_s)), now=NOW))
    assert (found.name, found.severity) == (FindingName.TOKEN_EXPIRY, severity)
    assert evidence in found.evidence
    assert "make a new token" in found.fix


async def test_a_token_with_time_left_is_well(tmp_path: Path) -> None:
    async with rig(tmp_path, with_auth=False) as service:
        findings = await findings_of(client(service.app, jwt(NOW + 30 * 86_400)), now=NOW)
    assert {f.name: f.evidence for f in findings}[FindingName.TOKEN_EXPIRY] == "the token expires in 30 days"


@pytest.mark.parametrize("token", ["plt_abc", "a.b.c", "e30.e30.e30", "a.!.c", "e30.WzFd.e30"])
def test_a_token_that_states_no_expiry_has_none(token: str) -> None:
    assert expires_at(Secret(token)) is None


async def test_a_job_that_can_never_be_placed_is_an_error(tmp_path: Path) -> None:
    async with served(tmp_path, capacity=4) as (service, token):
        found = only(await findings_of(client(service.app, token)))
    assert (found.name, found.severity) == (FindingName.CAPACITY, Severity.ERROR)
    assert "4 of 4 H200 free, and the recipe needs 8: it can never be placed" in found.evidence
    assert "job.training_gpus" in found.fix


async def start_job(http: Http, comment: str) -> None:
    body = json.dumps({**job_body(), "comment": comment}).encode()
    url = http.connection.prefix
    reply = await http._client.post(url, content=body, headers={"content-type": "application/json"})
    assert reply.status_code == 200, reply.text


async def test_gpus_that_others_use_make_the_job_wait(tmp_path: Path) -> None:
    async with served(tmp_path) as (service, token):
        http = client(service.app, token)
        await start_job(http, "team-b")
        found = only(await findings_of(http))
    assert (found.name, found.severity) == (FindingName.CAPACITY, Severity.WARNING)
    assert "6 of 8 H200 free" in found.evidence
    assert "wait until GPUs are free" in found.fix


async def test_a_job_of_mine_without_a_driver_is_told_and_one_of_others_is_not_mine(tmp_path: Path) -> None:
    need = ServiceNeed()
    async with served(tmp_path) as (service, token):
        http = client(service.app, token)
        await start_job(http, "team-b")
        assert [f for f in await findings_of(client(service.app, token), need=need) if f.fix] == []
        await start_job(http, default_comment())
        found = only(await findings_of(client(service.app, token), need=need))
        with_driver = await findings_of(http, need=need, has_live_driver=True)
    assert (found.name, found.severity) == (FindingName.JOBS, Severity.WARNING)
    assert "2 active: 1 mine" in found.evidence
    assert "pilotage jobs cancel " in found.fix
    assert [finding for finding in with_driver if finding.fix] == []


@pytest.mark.parametrize(("off_s", "word"), [(-300.0, "ahead of"), (300.0, "behind")])
async def test_a_clock_that_differs_from_the_service_is_told(off_s: float, word: str, tmp_path: Path) -> None:
    async with served(tmp_path) as (service, token):
        app = with_date(service.app, lambda: time.time() + off_s)
        found = only(await findings_of(client(app, token)))
    assert (found.name, found.severity) == (FindingName.CLOCK, Severity.WARNING)
    assert word in found.evidence
    assert "timedatectl set-ntp true" in found.fix


def test_no_login_is_an_error_only_where_a_service_is_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("ARCTIC_CORTEX_HOST", "ARCTIC_CORTEX_BASE_URL", "CORTEX_TRAINING_CONFIG"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setenv("SNOWFLAKE_HOME", str(tmp_path))
    needed, idle = find_connection(NEED), find_connection(ServiceNeed())
    assert isinstance(needed, Finding)
    assert (needed.name, needed.severity) == (FindingName.LOGIN, Severity.ERROR)
    assert "`pilotage login`" in needed.fix
    assert isinstance(idle, Finding)
    assert idle.severity is Severity.SKIPPED
