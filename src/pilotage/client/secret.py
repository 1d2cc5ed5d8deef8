"""A token that shows itself only where it is asked to."""

import hmac
from typing import NoReturn, override
from urllib.parse import quote

_MASK = "***"


class Secret:
    """A secret text. `reveal` is the only way to its value; printing, formatting and pickling are not."""

    __slots__ = ("_value",)

    def __init__(self, value: str) -> None:
        if not value or not value.isascii() or any(c.isspace() or not c.isprintable() for c in value):
            raise ValueError("a token is printable ASCII without spaces, and not empty")
        self._value = value

    def reveal(self) -> str:
        """Return the value."""
        return self._value

    def redact(self, text: str) -> str:
        """Return `text` with every occurrence of the value, plain or percent-encoded, masked."""
        return text.replace(self._value, _MASK).replace(quote(self._value, safe=""), _MASK)

    @override
    def __eq__(self, other: object) -> bool:
        return isinstance(other, Secret) and hmac.compare_digest(self._value, other._value)

    @override
    def __hash__(self) -> int:
        return hash(self._value)

    @override
    def __repr__(self) -> str:
        return f"Secret({_MASK})"

    @override
    def __str__(self) -> str:
        return _MASK

    @override
    def __format__(self, format_spec: str) -> str:
        return _MASK

    @override
    def __reduce__(self) -> NoReturn:
        raise TypeError("a Secret is not pickled; give the other process a file or an environment variable")
