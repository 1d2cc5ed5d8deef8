"""Unified diffs of git: what they touch, and their application to a few files. git itself applies them."""

import hashlib
import os
import re
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePosixPath

from unidiff.errors import UnidiffParseError
from unidiff.patch import PatchedFile, PatchSet

_INDEX = re.compile(r"^index ([0-9a-f]{7,40})\.\.([0-9a-f]{7,40})(?: (\d{6}))?$", re.MULTILINE)
_LINK_MODE = "120000"


class PatchError(ValueError):
    """A patch that cannot be used; the message is the reason, without a name or a path of this machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FilePatch:
    """What a patch does to one file."""

    path: str
    """Relative to the tree."""
    is_added: bool
    clean_blob: str
    """First digits of git's hash of the file before the patch; empty where the patch does not say."""
    is_blank: bool
    """Whether only blank lines and the ends of lines change."""


@dataclass(frozen=True)
class Patch:
    """A diff that can be read, of text files inside the tree."""

    text: str
    files: tuple[FilePatch, ...]

    @cached_property
    def paths(self) -> frozenset[str]:
        """Every file that it touches."""
        return frozenset(file.path for file in self.files)


def _checked_path(path: str) -> str:
    parts = PurePosixPath(path).parts
    if not parts or path.startswith("/") or ".." in parts or ".git" in parts:
        raise PatchError("the patch leaves the tree")
    return path


def read_patch(text: str) -> Patch:
    """Read a patch.

    Raises:
        PatchError: it does not parse, is empty, or touches a binary file, a link or a path outside the tree.
    """
    if "GIT binary patch" in text:
        raise PatchError("the patch holds a binary file")
    try:
        parsed = PatchSet(text)
    except UnidiffParseError:
        raise PatchError("the patch does not parse") from None
    if any(file.is_binary_file for file in parsed):
        raise PatchError("the patch holds a binary file")
    if not parsed:
        raise PatchError("the patch is empty")
    files: list[FilePatch] = []
    for file in parsed:
        header = str(file.patch_info)
        index = _INDEX.search(header)
        if _LINK_MODE in header:
            raise PatchError("the patch holds a symbolic link")
        files.append(
            FilePatch(
                path=_checked_path(file.path),
                is_added=file.is_added_file,
                clean_blob=index.group(1) if index else "",
                is_blank=_is_blank(file),
            )
        )
    return Patch(text=text, files=tuple(files))


def _is_blank(file: PatchedFile) -> bool:
    # With the lines around: one that moves is removed and added unchanged.
    lines = [line for hunk in file for line in hunk if line.value.strip() and line.line_type != "\\"]
    before = [line.value.rstrip() for line in lines if not line.is_added]
    return before == [line.value.rstrip() for line in lines if not line.is_removed]


def git_blob(content: bytes) -> str:
    """Return git's hash of a file's content."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()


def apply_patch(patch: Patch, tree: Mapping[str, bytes], *, reverse: bool = False) -> dict[str, bytes]:
    """Return the tree with the patch applied; exactly, context included.

    Raises:
        PatchError: it does not apply.
    """
    with tempfile.TemporaryDirectory(prefix="pilotage-patch-") as name:
        root = Path(name)
        for path in patch.paths & tree.keys():
            target = root / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(tree[path])
        done = subprocess.run(
            ["git", "apply", "--whitespace=nowarn", *(["--reverse"] if reverse else []), "-"],
            input=patch.text.encode() + (b"" if patch.text.endswith("\n") else b"\n"),
            cwd=root,
            env={"PATH": os.environ["PATH"], "GIT_CEILING_DIRECTORIES": str(root.parent), "HOME": name},
            capture_output=True,
            check=False,
        )
        if done.returncode != 0:
            raise PatchError("the patch does not apply")
        patched = {path: (root / path).read_bytes() for path in patch.paths if (root / path).is_file()}
    return {path: content for path, content in tree.items() if path not in patch.paths} | patched
