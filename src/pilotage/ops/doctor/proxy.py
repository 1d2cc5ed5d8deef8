"""Judge whether the proxy answers where the agent runs, before there is a sampler behind it."""

import contextlib
from collections.abc import AsyncGenerator
from dataclasses import dataclass

import httpx

from pilotage.errors import SamplerError
from pilotage.interfaces import Renderer
from pilotage.ops.doctor.findings import Finding, FindingName, error, ok
from pilotage.proxy import ChatCompletionsProxy, serve
from pilotage.types import Completion, ProxyAddress, SamplingParams, SessionAccess, SessionSpec, TokenIds

_KEY_TTL_S = 600.0
_ANSWER_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class _NoSampler:
    """A sampler that is never asked: the proxy is tried without a policy."""

    max_context_tokens: int

    async def sample(
        self, prompt_ids: TokenIds, params: SamplingParams, *, session_id: str, turn_index: int
    ) -> Completion:
        raise SamplerError("the doctor's proxy has no policy behind it")


@contextlib.asynccontextmanager
async def open_proxy(
    renderer: Renderer, *, max_context_tokens: int, address: ProxyAddress | None = None
) -> AsyncGenerator[SessionAccess]:
    """Serve a proxy as a run does, while the context is open; yields a session of it.

    Raises:
        ConfigError: the address cannot be bound.
    """
    proxy = ChatCompletionsProxy(_NoSampler(max_context_tokens=max_context_tokens), renderer)
    async with serve(proxy, address):
        spec = SessionSpec(rollout_id="doctor", sampling=SamplingParams(), ttl_s=_KEY_TTL_S)
        access = proxy.open(spec)
        try:
            yield access
        finally:
            await proxy.close(access)


async def check_proxy(access: SessionAccess) -> Finding:
    """Ask a proxy for its health, and for its models with and without the session's key, from here."""
    origin = access.base_url.removesuffix("/v1")
    key = {"authorization": f"Bearer {access.api_key}"}
    try:
        async with httpx.AsyncClient(timeout=_ANSWER_S, trust_env=False) as client:
            health = await client.get(f"{origin}/health")
            known = await client.get(f"{access.base_url}/models", headers=key)
            unknown = await client.get(f"{access.base_url}/models")
    except httpx.HTTPError as raised:
        return error(
            FindingName.PROXY,
            f"{origin} does not answer: {raised or type(raised).__name__}",
            fix="see what holds connections back: a firewall, an ended tunnel, or a full table of sockets",
        )
    statuses = (health.status_code, known.status_code, unknown.status_code)
    evidence = f"{origin}: health {statuses[0]}, with a key {statuses[1]}, without one {statuses[2]}"
    if statuses != (200, 200, 401):
        return error(
            FindingName.PROXY,
            f"{evidence}; 200, 200 and 401 were expected",
            fix="see what else answers on this address: a web proxy, or an older run's server",
        )
    return ok(FindingName.PROXY, evidence)
