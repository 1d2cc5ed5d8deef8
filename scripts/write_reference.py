"""Write what docs/reference.md and docs/troubleshooting.md say of the code: keys, outcomes, findings, alarms.

Each table stands between two marker lines; what is around them is written by people. A test compares the
tables with the code, so they cannot differ for long.

    python scripts/write_reference.py
"""

import ast
import dataclasses
import inspect
import re
import textwrap
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from pilotage.loops import LoopSettings
from pilotage.ops.alarms import GUIDES
from pilotage.ops.doctor.findings import FindingName
from pilotage.recipes import Recipe
from pilotage.rollouts.outcomes import ADVICE
from pilotage.types import OUTCOME_RULES

_DOCS = Path(__file__).resolve().parent.parent / "docs"
REFERENCE, TROUBLESHOOTING = _DOCS / "reference.md", _DOCS / "troubleshooting.md"
_BOUNDS = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """One field of a recipe section."""

    name: str
    annotation: Any
    default: Any
    """`dataclasses.MISSING` where a value is required."""
    bounds: str
    meaning: str


def sections(cls: type, prefix: str = "") -> Iterator[tuple[str, type, list[Key]]]:
    """Yield (dotted name, class, own keys) of a section and of those inside it, in the order of the code."""
    keys = list(_keys(cls))
    yield prefix, cls, [key for key in keys if _section(key.annotation) is None]
    for key in keys:
        if (section := _section(key.annotation)) is not None:
            yield from sections(section, f"{prefix}.{key.name}".lstrip("."))


def _section(annotation: Any) -> type | None:
    """Return the class of a section, also of one that may be absent; None for a plain key."""
    is_union = typing.get_origin(annotation) in (types.UnionType, typing.Union)
    for item in typing.get_args(annotation) if is_union else (annotation,):
        if inspect.isclass(item) and (issubclass(item, BaseModel) or dataclasses.is_dataclass(item)):
            return item
    return None


def _keys(cls: type) -> Iterator[Key]:
    docs = _field_docs(cls)
    if issubclass(cls, BaseModel):
        for name, info in cls.model_fields.items():
            yield Key(
                name=name,
                annotation=info.annotation,
                default=_pydantic_default(info),
                bounds=_bounds(info),
                meaning=docs.get(name, ""),
            )
        return
    hints = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        yield Key(
            name=field.name,
            annotation=hints[field.name],
            default=field.default,
            bounds="",
            meaning=docs.get(field.name, ""),
        )


def _pydantic_default(info: FieldInfo) -> Any:
    return dataclasses.MISSING if info.is_required() else info.get_default(call_default_factory=True)


def _bounds(info: FieldInfo) -> str:
    found = [
        f" {sign} {getattr(item, name)}"
        for item in info.metadata
        for name, sign in _BOUNDS.items()
        if getattr(item, name, None) is not None
    ]
    return "".join(found)


def _field_docs(cls: type) -> dict[str, str]:
    """Return the text that follows each field in the source of a class."""
    body = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0]
    assert isinstance(body, ast.ClassDef)
    docs: dict[str, str] = {}
    for field, after in zip(body.body, body.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
            match after:
                case ast.Expr(value=ast.Constant(value=str(text))):
                    docs[field.target.id] = " ".join(inspect.cleandoc(text).split())
                case _:
                    pass
    return docs


def type_text(annotation: Any) -> str:
    """Return a type as a person writes it in TOML."""
    if isinstance(annotation, typing.TypeAliasType):
        return type_text(annotation.__value__)
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Literal:
        return " or ".join(default_text(value) for value in arguments)
    if origin in (types.UnionType, typing.Union):
        return " or ".join(type_text(item) for item in arguments if item is not types.NoneType)
    if origin is tuple:
        return f"list of {type_text(arguments[0])}"
    if origin is dict:
        return "table"
    if issubclass(annotation, Enum):
        return " or ".join(f'`"{item.value}"`' for item in annotation)
    names: Mapping[type, str] = {bool: "boolean", int: "integer", float: "number", str: "text", Path: "path"}
    return names[annotation]


def default_text(value: Any) -> str:
    """Return a default as TOML; absent where there is none."""
    if value is dataclasses.MISSING:
        return "required"
    if value is None:
        return "absent"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, Enum | str):
        return f'`"{value}"`'
    if isinstance(value, tuple | list):
        items = ", ".join(default_text(item).strip("`") for item in value)
        return f"`[{items}]`"
    return "`{}`" if isinstance(value, dict) else f"`{value:g}`"


def recipe_tables() -> str:
    """Return one table for each section of a recipe."""
    parts: list[str] = []
    for name, cls, keys in sections(Recipe):
        title = f"`[{name}]`" if name else "Top of the file"
        rows = [
            f"| `{key.name}` | {type_text(key.annotation)}{key.bounds} | {default_text(key.default)}"
            f" | {_cell(key.meaning)} |"
            for key in keys
        ]
        intro = (inspect.getdoc(cls) or "").split("\n\n")[0].replace("\n", " ")
        parts += [f"### {title}", "", intro, "", "| key | type | default | meaning |", "|---|---|---|---|"]
        parts += [*rows, ""]
    return "\n".join(parts).rstrip()


def outcome_table() -> str:
    """Return the table of outcomes."""
    choices = LoopSettings.model_fields
    rows: list[str] = []
    for outcome, rule in OUTCOME_RULES.items():
        choice = choices.get(outcome.value)
        trained = _yes(rule.is_trained)
        baseline = _yes(rule.in_baseline)
        if choice is not None:
            trained = f"`loop.{outcome}`, by default {choice.default}"
            baseline = "where trained"
        reward = "verifier's" if rule.has_reward else "None"
        rows.append(f"| `{outcome}` | {reward} | {trained} | {baseline} | {_times(rule.max_retries)} |")
    head = "| outcome | reward | trained | in the baseline | tried again |"
    return "\n".join([head, "|---|---|---|---|---|", *rows])


def finding_table() -> str:
    """Return the table of what `pilotage doctor` looks at."""
    docs = _member_docs(FindingName)
    rows = [f"| `{name}` | {_cell(docs[name.name])} |" for name in FindingName]
    return "\n".join(["| finding | all is well if |", "|---|---|", *rows])


def _member_docs(cls: type[Enum]) -> dict[str, str]:
    """Return the text that follows each member in the source of an enum."""
    body = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0]
    assert isinstance(body, ast.ClassDef)
    docs: dict[str, str] = {}
    for member, after in zip(body.body, body.body[1:], strict=False):
        match member, after:
            case ast.Assign(targets=[ast.Name(id=name)]), ast.Expr(value=ast.Constant(value=str(text))):
                docs[name] = " ".join(inspect.cleandoc(text).split())
            case _:
                pass
    return docs


def _yes(value: bool) -> str:
    return "yes" if value else "no"


def _times(count: int) -> str:
    return {0: "no", 1: "once"}.get(count, f"{count} times")


def _cell(text: str) -> str:
    return re.sub(r"\|", r"\\|", text)


def alarm_sections() -> str:
    """Return one section for each alarm."""
    parts: list[str] = []
    for name, guide in GUIDES.items():
        causes = "\n".join(f"- {cause}" for cause in guide.causes)
        parts.append(f"### `{name}`\n\nIt rings when {guide.meaning}.\n\n{causes}\n\nRun `{guide.check}`.")
    return "\n\n".join(parts)


def failure_table() -> str:
    """Return the table of what `.error` files are about."""
    rows = [
        f"| `{outcome}` | {_times(rule.max_retries)} | {_cell(ADVICE[outcome])} |"
        for outcome, rule in OUTCOME_RULES.items()
        if not rule.has_reward
    ]
    return "\n".join(["| outcome | tried again | what to do |", "|---|---|---|", *rows])


TABLES = {
    REFERENCE: {"recipe": recipe_tables, "outcomes": outcome_table, "findings": finding_table},
    TROUBLESHOOTING: {"alarms": alarm_sections, "failures": failure_table},
}


def rendered(page: Path) -> str:
    """Return a page with every table written anew.

    Raises:
        ValueError: the page lacks the markers of a table.
    """
    text = page.read_text(encoding="utf-8")
    for name, table in TABLES[page].items():
        opening, closing = f"<!-- generated: {name} -->", f"<!-- end: {name} -->"
        head, found, rest = text.partition(opening)
        _, ended, tail = rest.partition(closing)
        if not found or not ended:
            raise ValueError(f"{page} lacks {opening} or {closing}")
        text = f"{head}{opening}\n{table()}\n{closing}{tail}"
    return text


if __name__ == "__main__":
    for changed in TABLES:
        changed.write_text(rendered(changed), encoding="utf-8")
