"""What the proxy answers instead of a completion; each dialect has its own shape for it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

_OPENAI_KINDS = {
    401: "authentication_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "server_error",
}


@dataclass(eq=False)
class Refusal(Exception):
    """A request that gets an error body; raised and answered inside the proxy, never outside it."""

    status: int
    code: str
    message: str
    param: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict[str, str])


@dataclass(eq=False)
class ContextExceeded(Refusal):
    """A 400 for a prompt that leaves no room; dialects word it so that their SDKs know it for what it is."""

    window_tokens: int = 0
    prompt_tokens: int = 0


def openai_error(refusal: Refusal, *, message: str = "", param: str | None = None) -> dict[str, Any]:
    """Return the error object of OpenAI's APIs; it never holds anything of the request's headers.

    Args:
        message, param: instead of the refusal's own.
    """
    error = {
        "message": message or refusal.message,
        "type": _OPENAI_KINDS.get(refusal.status, "invalid_request_error"),
        "param": param or refusal.param,
        "code": refusal.code,
    }
    return {"error": error}


def bad_request(message: str, param: str | None = None, code: str = "invalid_request") -> Refusal:
    """Return a 400; agents do not repeat it."""
    return Refusal(400, code, message, param)


def unknown_key() -> Refusal:
    """Return a 401 that says the same for a missing, unknown, expired and closed key."""
    message = "The key names no open session: it is unknown, has expired, or its session was closed."
    return Refusal(401, "invalid_api_key", message, headers={"www-authenticate": "Bearer"})


def context_exceeded(window_tokens: int, prompt_tokens: int) -> ContextExceeded:
    """Return the 400 for a prompt that leaves no room in the window."""
    message = f"the prompt of {prompt_tokens} tokens leaves no room in the context window of {window_tokens}"
    return ContextExceeded(
        400,
        "context_length_exceeded",
        message,
        window_tokens=window_tokens,
        prompt_tokens=prompt_tokens,
    )


def turns_exhausted(max_turns: int) -> Refusal:
    """Return a 400 that says that the rollout's turn budget is spent."""
    message = f"This rollout's budget of {max_turns} model calls is spent; no further call will be answered."
    return bad_request(message, None, "turn_budget_exhausted")
