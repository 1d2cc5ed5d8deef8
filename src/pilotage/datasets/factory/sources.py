"""A source file as libcst sees it, with the byte span of every node, and its definitions.

A bug is a set of byte edits between spans, so every byte outside the edited nodes stays by construction.
"""

import bisect
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cache
from itertools import pairwise

import libcst as cst
from libcst.metadata import ByteSpanPositionProvider, CodeSpan, MetadataWrapper

_BLOCKS = (
    cst.BaseCompoundStatement,
    cst.BaseSuite,
    cst.Else,
    cst.Finally,
    cst.ExceptHandler,
    cst.MatchCase,
)

_NO_CODE = re.compile(r"whitespace|par$|comma|semicolon|lines|header|footer|colon|equal|bracket|asynchronous")

type Definition = cst.FunctionDef | cst.ClassDef


@dataclass(frozen=True, slots=True, order=True)
class Edit:
    """Replace the bytes from `start` to `end`, offsets in the clean file."""

    start: int
    end: int
    text: str


def applied(source: bytes, edits: Sequence[Edit]) -> bytes:
    """Return the file with all edits made; they must not overlap."""
    for edit in sorted(edits, reverse=True):
        source = source[: edit.start] + edit.text.encode() + source[edit.end :]
    return source


def overlap(edits: Sequence[Edit]) -> bool:
    """Return whether two of the edits touch the same bytes, or the same point between two."""
    ordered = sorted(edits)
    return any(left.end >= right.start for left, right in pairwise(ordered))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Scope:
    """What a modifier may know of the definition that it changes."""

    name: str
    """`function`, `Class.method` or `Class`: a place as gold names it."""
    node: Definition
    variables: Sequence[str]
    """Sorted: parameters and names that are assigned in the function."""
    attributes: Sequence[str]
    """Sorted: what the class assigns to `self`. One that is only read may not be there at run time, and the
    error would name it."""
    methods: Mapping[str, int] = field(default_factory=dict[str, int])
    """Of the class: name -> number of parameters; none with a leading underscore twice."""


class SourceFile:
    """One parsed file."""

    def __init__(self, path: str, content: bytes) -> None:
        """Raises:
        ValueError: the content is no Python in UTF-8, or has a mark or line ends that confuse offsets.
        """
        if content.startswith(b"\xef\xbb\xbf") or b"\f" in content or b"\r" in content.replace(b"\r\n", b""):
            raise ValueError(f"{path}: a byte order mark, form feed or lone carriage return")
        content.decode()
        self.path = path
        self.content = content
        try:
            module = cst.parse_module(content)
            wrapper = MetadataWrapper(module, unsafe_skip_copy=True)
        except (cst.ParserSyntaxError, RecursionError) as error:
            raise ValueError(f"{path}: {type(error).__name__}") from None
        self.module = wrapper.module
        self._spans: Mapping[cst.CSTNode, CodeSpan] = wrapper.resolve(ByteSpanPositionProvider)
        self._line_starts = [0]
        for line in content.split(b"\n"):
            self._line_starts.append(self._line_starts[-1] + len(line) + 1)

    def edit(self, first: cst.CSTNode, last: cst.CSTNode, text: str) -> Edit:
        """Return the edit that replaces all from the start of one node to the end of another, or itself."""
        end = self._spans[last]
        return Edit(self._spans[first].start, end.start + end.length, text)

    def start(self, node: cst.CSTNode) -> int:
        """Return the offset of a node's first byte."""
        return self._spans[node].start

    def text(self, node: cst.CSTNode) -> str:
        """Return a node's own characters, without the parentheses around it."""
        span = self._spans[node]
        return self.content[span.start : span.start + span.length].decode()

    def lines(self, node: cst.CSTNode) -> tuple[int, int]:
        """Return a node's first and last line, from 1."""
        span = self._spans[node]
        return self.line(span.start), self.line(span.start + max(0, span.length - 1))

    def line(self, offset: int) -> int:
        """Return the line, from 1, of a byte."""
        return bisect.bisect_right(self._line_starts, offset)

    def scopes(self) -> Iterator[Scope]:
        """Yield top-level functions, top-level classes and their methods, those under `if` included."""
        for member in members(self.module):
            if isinstance(member, cst.FunctionDef):
                yield _function(member, member.name.value, (), {})
            else:
                yield from _class(member)


@cache
def _child_fields(kind: type[cst.CSTNode]) -> tuple[str, ...]:
    """Return the fields that may hold code: not space, comments, commas and parentheses."""
    return tuple(field.name for field in fields(kind) if not _NO_CODE.search(field.name))


def children(node: cst.CSTNode) -> Iterator[cst.CSTNode]:
    """Yield a node's parts, in the order of its fields.

    (libcst's own `children` copies every node to find them, which takes longer than parsing the file.)
    """
    for name in _child_fields(type(node)):
        value = getattr(node, name)
        if isinstance(value, cst.CSTNode):
            yield value
        elif isinstance(value, tuple | list):
            yield from (part for part in value if isinstance(part, cst.CSTNode))


def members(node: cst.CSTNode) -> Iterator[Definition]:
    """Yield the definitions of a scope; those inside a definition are its own."""
    for child in children(node):
        if isinstance(child, cst.FunctionDef | cst.ClassDef):
            yield child
        elif isinstance(child, _BLOCKS):
            yield from members(child)


def walk(node: cst.CSTNode) -> Iterator[cst.CSTNode]:
    """Yield a node and everything in it but annotations."""
    yield node
    for child in children(node):
        if not isinstance(child, cst.Annotation):
            yield from walk(child)


def _function(
    node: cst.FunctionDef, name: str, attributes: Sequence[str], methods: Mapping[str, int]
) -> Scope:
    variables = {found.name.value for found in walk(node.params) if isinstance(found, cst.Param)}
    for found in walk(node.body):
        match found:
            case cst.AssignTarget(target=cst.Name(value=value)) | cst.CompFor(target=cst.Name(value=value)):
                variables.add(value)
            case cst.For(target=cst.Name(value=value)):
                variables.add(value)
            case _:
                pass
    return Scope(name=name, node=node, variables=sorted(variables), attributes=attributes, methods=methods)


def _class(node: cst.ClassDef) -> Iterator[Scope]:
    methods = {
        member.name.value: len(member.params.params)
        for member in members(node.body)
        if isinstance(member, cst.FunctionDef)
    }
    attributes = sorted(set(_assigned(node)) - methods.keys())
    yield Scope(name=node.name.value, node=node, variables=(), attributes=attributes, methods=methods)
    for member in members(node.body):
        if isinstance(member, cst.FunctionDef):
            yield _function(member, f"{node.name.value}.{member.name.value}", attributes, methods)


def _assigned(node: cst.ClassDef) -> Iterator[str]:
    for found in walk(node):
        match found:
            case cst.AssignTarget(target=cst.Attribute(value=cst.Name(value="self"), attr=name)):
                yield name.value
            case cst.AnnAssign(target=cst.Attribute(value=cst.Name(value="self"), attr=name)):
                yield name.value
            case _:
                pass
