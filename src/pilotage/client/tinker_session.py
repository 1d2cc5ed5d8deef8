"""A session at a Tinker server, from the first sign of life to its end."""

import asyncio
import contextlib
import logging
import os
from collections.abc import AsyncGenerator
from typing import Literal

import httpx
import tinker
from tinker.types import GetServerCapabilitiesResponse

from pilotage.client.tinker_engine import TinkerEngine, TinkerPlan
from pilotage.client.tinker_errors import attributed, service_error
from pilotage.client.tinker_losses import check_loss
from pilotage.client.tinker_sdk import TinkerConnection
from pilotage.errors import ConfigError

_log = logging.getLogger(__name__)

_HEALTH_S = 10.0
"""Longest that the server may take to say that it is there; the SDK itself would try for five minutes."""
_WATCH_S = 10.0
_LOST_S = 300.0
"""A server that has been silent for so long is given up; a restart takes less."""
_CLOSE_S = 10.0
"""Longest that the end of the session is waited for; else the server ends it when the heartbeat stops."""


@contextlib.asynccontextmanager
async def open_tinker(connection: TinkerConnection, plan: TinkerPlan) -> AsyncGenerator[TinkerEngine]:
    """Open a session and use it while the context is open; at its end the server frees what it holds.

    A model is made when it is first trained or published, or loaded from a checkpoint.

    Raises:
        ConfigError: there is no Tinker server, or it cannot do what the plan asks.
        ServiceError: the server refused.
    """
    check_loss(plan.loss)
    await _require_server(connection)
    with attributed(f"{connection.base_url} refused", connection.key, service_error):
        _check_model(await _capabilities(connection), plan, connection)
    os.environ.setdefault("TINKER_TELEMETRY", "0")  # the SDK would send tracebacks, with what is in them
    service = tinker.ServiceClient(base_url=connection.base_url, api_key=connection.key.reveal())
    engine = TinkerEngine(service, connection, plan)
    status: Literal["success", "errored", "interrupted"] = "errored"
    try:
        async with _watched(connection, engine):
            yield engine
        status = "success"
    except asyncio.CancelledError:
        status = "interrupted"
        raise
    finally:
        try:
            async with asyncio.timeout(_CLOSE_S):
                await service.close(status)
        except Exception as error:  # noqa: BLE001 - the end: the server frees what it has by itself
            _log.warning("the session at %s could not be finished: %s", connection.base_url, error)


@contextlib.asynccontextmanager
async def _watched(connection: TinkerConnection, engine: TinkerEngine) -> AsyncGenerator[None]:
    """Fail the engine's calls when its server is lost; what the body raises comes out as it is."""

    async def watch() -> None:
        loop = asyncio.get_running_loop()
        seen_at = loop.time()
        while loop.time() - seen_at < _LOST_S:
            await asyncio.sleep(_WATCH_S)
            with contextlib.suppress(ConfigError):
                await _require_server(connection)
                seen_at = loop.time()
        engine.lose(f"{connection.base_url} has not answered for {_LOST_S:g} s")

    watching = asyncio.create_task(watch())
    try:
        yield
    finally:
        watching.cancel()


async def _require_server(connection: TinkerConnection) -> None:
    """Ask for a sign of life, because the SDK waits long for a server that is not there.

    Raises:
        ConfigError: nobody answers, or somebody else does.
    """
    url = f"{connection.base_url}/api/v1/healthz"
    try:
        async with httpx.AsyncClient(timeout=_HEALTH_S) as http:
            reply = await http.get(url)
    except httpx.HTTPError as error:
        raise ConfigError(
            f"no Tinker server answers at {connection.base_url} ({error or type(error).__name__}); is"
            " TINKER_BASE_URL right?"
        ) from None
    if not reply.is_success:
        raise ConfigError(f"{url} answers {reply.status_code}: no Tinker server; is TINKER_BASE_URL right?")


async def _capabilities(connection: TinkerConnection) -> GetServerCapabilitiesResponse:
    rest = await asyncio.to_thread(  # it waits for the SDK's own thread
        tinker.RestClient, base_url=connection.base_url, api_key=connection.key.reveal()
    )
    return await rest.get_server_capabilities()


def _check_model(
    capabilities: GetServerCapabilitiesResponse, plan: TinkerPlan, connection: TinkerConnection
) -> None:
    """Refuse a model that the server does not train, or whose context is shorter than the recipe's."""
    models = {model.model_name: model for model in capabilities.supported_models}
    model = models.get(plan.base_model)
    if model is None:
        names = ", ".join(sorted(name for name in models if name)) or "none"
        raise ConfigError(
            f"{connection.base_url} has no model {plan.base_model}; set tinker.model_name to one of: {names}"
        )
    if model.trainable is False or model.sampleable is False:
        raise ConfigError(
            f"{connection.base_url} does not train and sample {plan.base_model}; use another model"
        )
    longest = model.max_context_length
    if longest is not None and longest < plan.max_context_tokens:
        raise ConfigError(
            f"policy.max_context_tokens is {plan.max_context_tokens}, and {plan.base_model} at"
            f" {connection.base_url} has {longest}; lower it"
        )
