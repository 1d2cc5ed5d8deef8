"""Read a verifier's reward strictly: one number grammar, a named key, and where it came from.

Harbor's order: `reward.json` wins over `reward.txt`, and the exit code of the verifier's script says
nothing. What Harbor lets through by accident (unicode digits, `1_0`, booleans) is refused here, each with
its own message. Invariant: what cannot be read is a `RewardError`, never a number.
"""

import json
import logging
import math
import os
import re
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pilotage.errors import RewardError
from pilotage.types import Reward

_log = logging.getLogger(__name__)

JSON_NAME = "reward.json"
TEXT_NAME = "reward.txt"
TEXT_KEY = "reward"
"""What Harbor calls the number of a text file."""
MAX_BYTES = 65_536
_NUMBER = re.compile(r"[+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?")


def read_reward(
    verifier_directory: Path, *, key: str = TEXT_KEY, harbor_rewards: Mapping[str, float] | None = None
) -> Reward:
    """Read the reward that a verifier left in its directory of a trial.

    Args:
        key: which entry of `reward.json` is the reward; never guessed from the others.
        harbor_rewards: what Harbor itself read, where it did; the only source where there is no file.

    Raises:
        RewardError: missing, too large, malformed, not finite, without the key, or not what Harbor read.
    """
    text = _text_of(verifier_directory / TEXT_NAME)
    body = _text_of(verifier_directory / JSON_NAME)
    if body is not None:
        rewards, source = _json_rewards(body), JSON_NAME
        _report_disagreement(rewards.get(key), text)
    elif text is not None:
        rewards, source = {TEXT_KEY: _text_number(text)}, TEXT_NAME
    elif harbor_rewards is not None:
        rewards, source = (
            {name: _number(name, value) for name, value in harbor_rewards.items()},
            "result.json",
        )
    else:
        raise RewardError(f"no reward: the verifier wrote neither {JSON_NAME} nor {TEXT_NAME}")
    if key not in rewards:
        raise RewardError(f"{source} has no key {key!r}, but {sorted(rewards)}; name one in the recipe")
    if harbor_rewards is not None and harbor_rewards.get(key) != rewards[key]:
        raise RewardError(f"{source} says {rewards[key]}, but Harbor read {harbor_rewards.get(key)}")
    components = {name: value for name, value in rewards.items() if name != key}
    return Reward(value=rewards[key], key=key, source=f"verifier/{source}", components=components)


def _text_of(path: Path) -> str | None:
    """Return a file's text, or None where there is none; never follows a link or reads a large file."""
    omitted = path.with_name(f"{path.name}.omitted")
    if omitted.exists():
        raise RewardError(f"{path.name} is too large to read: {omitted.read_text(errors='replace').strip()}")
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise RewardError(f"{path.name} cannot be read: {error.strerror}; is it a link?") from error
    with open(descriptor, "rb") as file:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise RewardError(f"{path.name} is not a plain file")
        if found.st_size > MAX_BYTES:
            raise RewardError(f"{path.name} has {found.st_size} bytes; a reward has at most {MAX_BYTES}")
        data = file.read(MAX_BYTES)
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise RewardError(f"{path.name} is not UTF-8 text") from error


def _text_number(text: str) -> float:
    token = text.strip(" \t\r\n")
    if not token:
        raise RewardError(f"{TEXT_NAME} is empty")
    if token.startswith("\ufeff"):
        raise RewardError(f"{TEXT_NAME} starts with a byte order mark; write plain UTF-8")
    if not _NUMBER.fullmatch(token):
        raise RewardError(f"{TEXT_NAME} holds {token[:40]!r}, which is not one plain number such as 0.5")
    return _number(TEXT_KEY, float(token))


def _json_rewards(body: str) -> dict[str, float]:
    if not body.strip():
        raise RewardError(f"{JSON_NAME} is empty")
    try:
        record = json.loads(body, parse_constant=_refuse_constant, object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise RewardError(f"{JSON_NAME} is not JSON: {error}") from error
    if not isinstance(record, dict):
        raise RewardError(f"{JSON_NAME} must hold an object of numbers, got {type(record).__name__}")
    if not record:
        raise RewardError(f"{JSON_NAME} is an empty object: no reward key")
    return {name: _number(name, value) for name, value in record.items()}


def _refuse_constant(name: str) -> float:
    raise RewardError(f"{JSON_NAME} holds {name}, which is not finite")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    record = dict(pairs)
    if len(record) != len(pairs):
        raise RewardError(f"{JSON_NAME} names a key twice")
    return record


def _number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise RewardError(f"key {name!r} holds {str(value)[:40]!r} ({type(value).__name__}), not a number")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise RewardError(f"key {name!r} holds {str(value)[:40]}, which is not finite")
    return number


def _report_disagreement(reward: float | None, text: str | None) -> None:
    if text is None:
        return
    try:
        other = _text_number(text)
    except RewardError as error:
        _log.warning("%s wins; beside it %s", JSON_NAME, error)
        return
    if other != reward:
        _log.warning("%s says %s and wins; %s says %s", JSON_NAME, reward, TEXT_NAME, other)
