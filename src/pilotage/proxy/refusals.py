"""What the proxy answers instead of a completion, in OpenAI's error shape."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import orjson


@dataclass(eq=False)
class Refusal(Exception):
    """A request that gets an error body; raised and answered inside the proxy, never outside it."""

    status: int
    code: str
    message: str
    param: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict[str, str])

    @property
    def kind(self) -> str:
        """The `type` that OpenAI's clients expect beside the status."""
        kinds = {
            401: "authentication_error",
            429: "rate_limit_error",
            500: "server_error",
            503: "server_error",
        }
        return kinds.get(self.status, "invalid_request_error")

    def body(self) -> bytes:
        """Return the JSON error object; it never holds anything of the request's headers."""
        error = {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}
        return orjson.dumps({"error": error})


def bad_request(message: str, param: str | None = None, code: str = "invalid_request") -> Refusal:
    """Return a 400; agents do not repeat it."""
    return Refusal(400, code, message, param)


def unknown_key() -> Refusal:
    """Return a 401 that says the same for a missing, unknown, expired and closed key."""
    message = "The bearer key names no open session: it is unknown, has expired, or its session was closed."
    return Refusal(401, "invalid_api_key", message, headers={"www-authenticate": "Bearer"})


def context_exceeded(window_tokens: int, prompt_tokens: int) -> Refusal:
    """Return a 400 in the wording that LiteLLM and agent SDKs recognise."""
    message = (
        f"This model's maximum context length is {window_tokens} tokens. However, your messages resulted in"
        f" {prompt_tokens} tokens. Please reduce the length of the messages."
    )
    return bad_request(message, "messages", "context_length_exceeded")


def turns_exhausted(max_turns: int) -> Refusal:
    """Return a 400 that says that the rollout's turn budget is spent."""
    message = f"This rollout's budget of {max_turns} model calls is spent; no further call will be answered."
    return bad_request(message, None, "turn_budget_exhausted")
