"""SWE-smith rows as code-localization sets hold them: read, checked, and every drop counted by its reason.

A row is read from the hub at a pinned revision, or from local parquet files in the same schema, with explicit
features: a shard whose column is all null would otherwise have another type than its neighbour.
"""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from pilotage.datasets.patches import Patch, read_patch
from pilotage.errors import ConfigError
from pilotage.localization import Places, gold_of_changes

_COMMIT = re.compile(r"[0-9a-f]{40}")


class Orientation(StrEnum):
    """Which way a source's `patch` goes; declared by the source, never guessed."""

    INTRODUCES_BUG = "introduces_bug"
    """From the fixed tree to the buggy one, as in SWE-smith."""
    FIXES_BUG = "fixes_bug"
    """From the buggy tree to the fixed one, as in SWE-bench and SWE-Gym."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowSource:
    """A data set of the hub and what its columns mean."""

    hub_id: str
    orientation: Orientation


SWE_SMITH = RowSource(hub_id="OpenHands/SWE-smith-py-code-search", orientation=Orientation.INTRODUCES_BUG)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One bug that passed the checks."""

    instance_id: str
    owner: str
    name: str
    """Of the upstream repository."""
    commit: str
    """First 8 hexadecimal digits."""
    kind: str
    """How the bug was made: the part of the id before its last eight characters."""
    issue: str
    patch: Patch
    gold: Places
    """Of the row's `file_changes`."""
    orientation: Orientation

    @property
    def repository(self) -> str:
        """`owner/name`."""
        return f"{self.owner}/{self.name}"


@dataclass(slots=True)
class Rows:
    """What became of a source's rows."""

    rows: list[Row] = field(default_factory=list[Row])
    drops: Counter[str] = field(default_factory=Counter[str])
    """Reason -> number of rows."""


def read_instance_id(instance_id: str, repo: str) -> tuple[str, str, str, str]:
    """Return (owner, name, commit, kind) of `<owner>__<name>.<8 hex>.<kind>__<8 characters>`.

    Read from the right: a repository's name may hold dots.

    Raises:
        ValueError: another form, or `repo` (`swesmith/<owner>__<name>.<8 hex>`) speaks of another one.
    """
    found = re.fullmatch(
        r"(?P<owner>[^/]+?)__(?P<name>[^/]+)\.(?P<commit>[0-9a-f]{8})\.(?P<tail>[^./]+)", instance_id
    )
    if found is None:
        raise ValueError("instance_id is not owner__name.commit.kind")
    owner, name, commit, tail = found.group("owner", "name", "commit", "tail")
    if repo.rpartition("/")[2] != f"{owner}__{name}.{commit}":
        raise ValueError("repo and instance_id disagree")
    kind = "pr" if tail.startswith("pr_") else tail.rpartition("__")[0]
    return owner, name, commit, kind


def check_row(raw: Mapping[str, Any], orientation: Orientation) -> Row:
    """Return the row.

    Raises:
        ValueError: it is of no use; the message is the reason.
    """
    issue = raw.get("problem_statement") or ""
    if not issue.strip():
        raise ValueError("the issue text is blank")
    owner, name, commit, kind = read_instance_id(raw.get("instance_id") or "", raw.get("repo") or "")
    patch = read_patch(raw.get("patch") or "")
    return Row(
        instance_id=raw["instance_id"],
        owner=owner,
        name=name,
        commit=commit,
        kind=kind,
        issue=issue.strip(),
        patch=patch,
        gold=_checked_gold(raw.get("file_changes") or [], patch),
        orientation=orientation,
    )


def _checked_gold(file_changes: Sequence[Mapping[str, Any]], patch: Patch) -> Places:
    try:
        gold = gold_of_changes(file_changes)
    except ValueError:
        raise ValueError("a gold place is not in its own file") from None
    blank = {file.path for file in patch.files if file.is_blank}
    gold = Places(files=gold.files - blank, modules=gold.modules, functions=gold.functions)
    if not gold.files:
        raise ValueError("no gold file")
    if gold.files - patch.paths:
        raise ValueError("a gold file is not in the patch")
    if {path for path in patch.paths - blank if path.endswith(".py")} - gold.files:
        raise ValueError("the patch touches a file that is not gold")
    return gold


def check_rows(raw_rows: Iterable[Mapping[str, Any]], orientation: Orientation) -> Rows:
    """Check rows, count those of no use by their reason, and keep the first of two that share an id."""
    found = Rows()
    seen: set[str] = set()
    for raw in raw_rows:
        try:
            row = check_row(raw, orientation)
        except ValueError as error:
            found.drops[str(error)] += 1
            continue
        if row.instance_id in seen:
            found.drops["a second row with the same instance_id"] += 1
            continue
        seen.add(row.instance_id)
        found.rows.append(row)
    return found


def _features() -> Any:
    from datasets import Features, List, Value

    text = Value("string")
    changes = {
        name: List(text) for name in ("added_entities", "added_modules", "edited_entities", "edited_modules")
    }
    return Features(
        {
            "instance_id": text,
            "repo": text,
            "problem_statement": text,
            "patch": text,
            "file_changes": List({"file": text, "changes": changes}),
        }
    )


def read_rows(
    source: RowSource, *, parquet: Sequence[Path] = (), revision: str = ""
) -> Iterator[dict[str, Any]]:
    """Stream the rows of local parquet files, or of the hub at `revision`.

    Raises:
        ConfigError: a file is missing or of another schema, the revision is no
            full commit, or the hub cannot be reached.
    """
    from datasets import load_dataset

    for path in parquet:
        if not path.is_file():
            raise ConfigError(f"{path}: no such parquet file")
    if not parquet and not _COMMIT.fullmatch(revision):
        raise ConfigError(
            f"--revision needs a full commit of {source.hub_id}, 40 hexadecimal digits; got {revision!r}"
        )
    label = ", ".join(map(str, parquet)) or f"{source.hub_id} at {revision[:8]}"
    features = _features()
    try:
        yield from load_dataset(
            "parquet" if parquet else source.hub_id,
            data_files=[str(path) for path in parquet] or None,
            revision=revision or None,
            split="train",
            streaming=True,
            columns=list(features),
            features=features,
        )
    except Exception as error:  # noqa: BLE001  # the library raises what its many back ends raise
        raise ConfigError(
            f"{label} cannot be read: {type(error).__name__}: {str(error).splitlines()[0][:200]}"
        ) from None
