"""An event loop whose clock jumps to the next timer: hours pass in milliseconds, the same way each time."""

import asyncio
import selectors
from collections.abc import Coroutine, Mapping
from typing import Any, override


class DeadlockError(AssertionError):
    """Every task waits for another, and no timer is left."""


class _Selector(selectors.BaseSelector):
    """Waits by moving the clock."""

    def __init__(self) -> None:
        self.now = 0.0
        self._keys: dict[Any, selectors.SelectorKey] = {}

    @override
    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        key = selectors.SelectorKey(
            fileobj, fileobj if isinstance(fileobj, int) else fileobj.fileno(), events, data
        )
        self._keys[fileobj] = key
        return key

    @override
    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        return self._keys.pop(fileobj)

    @override
    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise DeadlockError("nothing can happen any more")
        self.now += timeout
        return []

    @override
    def get_map(self) -> Mapping[Any, selectors.SelectorKey]:
        return self._keys

    @override
    def close(self) -> None:
        self._keys.clear()


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """Threads would finish outside its time, so what is handed to one runs at once."""

    def __init__(self) -> None:
        self._virtual = _Selector()
        super().__init__(self._virtual)

    @override
    def time(self) -> float:
        return self._virtual.now

    @override
    def run_in_executor(self, executor: Any, func: Any, *args: Any) -> asyncio.Future[Any]:
        done = self.create_future()
        try:
            done.set_result(func(*args))
        except Exception as error:  # noqa: BLE001  # as a thread hands it over
            done.set_exception(error)
        return done


def run_simulated[T](work: Coroutine[Any, Any, T]) -> tuple[T, float]:
    """Run to the end; returns the result and the seconds that would have passed.

    Raises:
        DeadlockError: it would have waited for ever.
    """
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        result = runner.run(work)
        return result, runner.get_loop().time()
