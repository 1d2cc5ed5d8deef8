"""Reads the trees of frames and JSON bodies: every key at most once, every fault with its path."""

from collections.abc import Iterator
from typing import Any, NoReturn

import numpy as np
import orjson
from numpy.typing import NDArray
from pydantic import BaseModel, ValidationError

from pilotage.errors import InvalidBodyError
from pilotage.wire.frames import Tree

type Array = NDArray[Any]

EXTRA_PREFIX = "x-"
"""Keys that start so belong to the caller, and are not read."""


class Fields:
    """One dict of a decoded tree. A key that nothing has read when it is closed is unknown."""

    def __init__(self, value: Tree, path: str = "") -> None:
        """Raises InvalidBodyError where `value` is no dict."""
        if not isinstance(value, dict):
            raise InvalidBodyError(path, f"expected an object, got {_kind(value)}")
        self._values = value
        self._path = path
        self._seen: set[str] = set()

    def at(self, key: str) -> str:
        """Return the path of a key."""
        return f"{self._path}.{key}" if self._path else key

    def fail(self, key: str, message: str) -> NoReturn:
        """Raise InvalidBodyError for a key."""
        raise InvalidBodyError(self.at(key), message)

    def get(self, key: str) -> Tree:
        """Return a value; None where it is absent or null."""
        self._seen.add(key)
        return self._values.get(key)

    def need(self, key: str) -> Tree:
        """Return a value that must be there."""
        value = self.get(key)
        if value is None:
            self.fail(key, "missing")
        return value

    def __iter__(self) -> Iterator[str]:
        """Yield the keys that are there; none of them counts as read."""
        return iter(self._values)

    def is_null(self, key: str) -> bool:
        """Return whether a key is there without a value."""
        return key in self._values and self._values[key] is None

    def fields(self, key: str) -> "Fields":
        """Return a dict; an absent one is empty."""
        value = self.get(key)
        return Fields({} if value is None else value, self.at(key))

    def array(
        self, key: str, dtype: type[np.generic], size: int | None = None, *, finite: bool = True
    ) -> Array:
        """Return a one-dimensional array of exactly this dtype, and of `size` entries where given.

        Args:
            finite: whether NaN and the infinities are refused.
        """
        value = self.need(key)
        if not isinstance(value, np.ndarray) or value.ndim != 1 or value.dtype != dtype:
            self.fail(key, f"expected a one-dimensional {np.dtype(dtype)} array, got {_kind(value)}")
        if size is not None and value.size != size:
            self.fail(key, f"expected {size} entries, got {value.size}")
        if finite and value.dtype.kind == "f" and not np.isfinite(value).all():
            self.fail(f"{key}.{_first(~np.isfinite(value))}", "not finite")
        return value

    def optional_array(self, key: str, dtype: type[np.generic], size: int) -> Array | None:
        """Return what `array` returns, or None where the key is absent or null."""
        return None if self.get(key) is None else self.array(key, dtype, size)

    def text(self, key: str) -> str:
        """Return a string."""
        value = self.need(key)
        if not isinstance(value, str):
            self.fail(key, f"expected a string, got {_kind(value)}")
        return value

    def texts(self, key: str, size: int) -> list[str]:
        """Return `size` strings."""
        value = self.need(key)
        if not isinstance(value, list | tuple) or len(value) != size:
            self.fail(key, f"expected a list of {size} strings, got {_kind(value)}")
        for index, item in enumerate(value):
            if not isinstance(item, str):
                self.fail(f"{key}.{index}", f"expected a string, got {_kind(item)}")
        return [str(item) for item in value]

    def model[T: BaseModel](self, model_type: type[T], *keys: str) -> T:
        """Return a closed record of the given keys, read strictly; absent keys get the record's defaults."""
        values = {key: value for key in keys if (value := self.get(key)) is not None}
        try:
            return model_type.model_validate_json(orjson.dumps(values), strict=True)
        except TypeError as error:
            raise InvalidBodyError(self._path, f"not JSON: {error}") from None
        except ValidationError as error:
            raise invalid_body(error, self._path) from None

    def close(self) -> None:
        """Refuse keys that were not read."""
        for key in self._values:
            if key not in self._seen and not key.startswith(EXTRA_PREFIX):
                known = ", ".join(sorted(self._seen))
                self.fail(key, f"unknown key; there are {known}; keys of your own start with {EXTRA_PREFIX}")


def invalid_body(error: ValidationError, path: str = "") -> InvalidBodyError:
    """Return the first fault that pydantic found, with its path below `path`."""
    first = error.errors(include_url=False, include_input=False)[0]
    where = ".".join(str(part) for part in (path, *first["loc"]) if part != "")
    is_unknown = first["type"] in ("extra_forbidden", "unexpected_keyword_argument")
    return InvalidBodyError(
        where, "unknown key" if is_unknown else first["msg"].removeprefix("Value error, ")
    )


def _first(is_wrong: NDArray[np.bool_]) -> int:
    return int(np.argmax(is_wrong))


def _kind(value: Tree) -> str:
    if isinstance(value, np.ndarray):
        return f"a {value.dtype} array of shape {value.shape}"
    if isinstance(value, list | tuple):
        return f"a list of {len(value)}"
    return "nothing" if value is None else f"a {type(value).__name__}"
