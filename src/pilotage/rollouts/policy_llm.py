"""`PolicyLLM`: the SDK's LLM with a short way to an OpenAI-compatible endpoint.

The SDK builds each request, validates each reply and retries, as ever; only the transport between the two is
replaced: LiteLLM and the OpenAI client spend 12 ms of CPU a call on logging, prices and conversions of a
request that is plain JSON already. Invariant: the endpoint gets the same body, the SDK the same response
object and the same exceptions as through LiteLLM; a request of any other kind goes through LiteLLM.
"""

from functools import cache
from ssl import SSLContext
from typing import Any, cast, override

import httpx
import orjson
from litellm import exception_type
from litellm.litellm_core_utils.llm_response_utils.convert_dict_to_response import (
    convert_to_model_response_object,
)
from litellm.llms.openai.common_utils import OpenAIError
from litellm.types.utils import ModelResponse
from openhands.sdk import LLM
from pydantic import PrivateAttr

_PROVIDER = "openai/"
_PLAIN_PARAMETERS = frozenset({"tools", "prompt_cache_key", "extra_headers"})
"""What the SDK adds to the messages of an agent that leaves sampling to the endpoint."""
_FREE_OF_CHARGE = {"llm_provider-x-litellm-response-cost": "0"}
"""Where the SDK looks for a price before it computes one, which takes longer than the call."""


@cache
def _ssl_context() -> SSLContext:
    return httpx.create_ssl_context()  # reads the certificates: 20 ms


def open_client() -> httpx.AsyncClient:
    """Return a client for the calls of one conversation; the caller closes it."""
    return httpx.AsyncClient(verify=_ssl_context())


class PolicyLLM(LLM):
    """Asks an OpenAI-compatible endpoint itself where it has one: `base_url`, and `model="openai/NAME"`."""

    _client: httpx.AsyncClient | None = PrivateAttr(default=None)

    def call_through(self, client: httpx.AsyncClient) -> None:
        """Use `client` from now on; until then LiteLLM does."""
        self._client = client

    @override
    async def _atransport_call(
        self,
        *,
        messages: list[dict[str, Any]],
        enable_streaming: bool = False,
        on_token: Any = None,
        **kwargs: Any,
    ) -> ModelResponse:
        given = {name: value for name, value in kwargs.items() if value is not None}
        client = self._client
        if client is None or enable_streaming or not self._is_plain(given):
            return await super()._atransport_call(
                messages=messages, enable_streaming=enable_streaming, on_token=on_token, **kwargs
            )
        headers = cast(dict[str, str], given.pop("extra_headers", {}))
        try:
            return await self._answer(client, {"messages": messages, "model": self._model, **given}, headers)
        except Exception as error:
            # LiteLLM's own table, which the SDK's retries go by; it raises.
            raise exception_type(
                model=self._model, original_exception=error, custom_llm_provider="openai"
            ) from error

    def _is_plain(self, given: dict[str, Any]) -> bool:
        has_endpoint = self.base_url is not None and self.model.startswith(_PROVIDER)
        return has_endpoint and not self.is_subscription and given.keys() <= _PLAIN_PARAMETERS

    @property
    def _model(self) -> str:
        return self.model.removeprefix(_PROVIDER)

    async def _answer(
        self, client: httpx.AsyncClient, body: dict[str, Any], headers: dict[str, str]
    ) -> ModelResponse:
        assert self.base_url is not None
        key = self._get_api_key_value() or ""
        try:
            reply = await client.post(
                f"{self.base_url.rstrip('/')}/chat/completions",
                content=orjson.dumps(body),
                headers={"content-type": "application/json", "authorization": f"Bearer {key}", **headers},
                timeout=self.timeout,
            )
        except httpx.TimeoutException as error:
            raise OpenAIError(status_code=408, message="Request timed out.") from error
        except httpx.TransportError as error:
            raise OpenAIError(status_code=500, message="Connection error.") from error
        response = convert_to_model_response_object(
            response_object=_record(reply), model_response_object=ModelResponse()
        )
        assert isinstance(response, ModelResponse)
        response._hidden_params["additional_headers"] = dict(_FREE_OF_CHARGE)
        return response


def _record(reply: httpx.Response) -> dict[str, Any]:
    """Return the body of a reply.

    Raises:
        OpenAIError: an error status, or no chat completion; as LiteLLM raises it.
    """
    try:
        body: Any = orjson.loads(reply.content)
    except orjson.JSONDecodeError:
        body = None
    if not reply.is_success:
        message = reply.text if body is None else f"{body}"
        raise OpenAIError(
            status_code=reply.status_code,
            message=message or f"Error code: {reply.status_code}",
            headers=reply.headers,
            body=body.get("error", body) if isinstance(body, dict) else None,
        )
    if not isinstance(body, dict) or not (isinstance(body.get("choices"), list) or "error" in body):
        raise OpenAIError(
            status_code=500, message=f"no chat completion came from {reply.url}: {reply.text[:200]}"
        )
    return cast(dict[str, Any], body)
