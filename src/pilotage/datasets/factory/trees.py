"""What of an sdist is the package, what are its tests, and what the agent of a task may see.

The agent sees the package and its licence. No test is left, not even those that pass: a test beside the one
that failed imports the module that the issue must not name. Documents, changelog and PKG-INFO are left out
because they are no code and tell the version, which is the way to the clean source.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath

from pilotage.errors import PackageError

_NO_PACKAGES = frozenset({
    "benchmark", "benchmarks", "bench", "build", "demo", "demos", "dist", "doc", "docs", "example",
    "examples", "extras", "misc", "scripts", "test", "testing", "tests", "tools",
})  # fmt: skip
_TEST_DIRECTORIES = frozenset({"test", "tests"})
_TEST_FILE = re.compile(r"(test_.*|.*_test|conftest)\.py")
_LICENCE = re.compile(r"(licen[cs]e|copying|notice|authors)([.-].*)?", re.IGNORECASE)
_SCRIPTS = frozenset({"setup.py", "conftest.py", "noxfile.py", "tasks.py", "versioneer.py", "runtests.py"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Where things are in an sdist's tree."""

    source_root: str
    """Directory from which the package is imported: `.` or `src`."""
    modules: tuple[str, ...]
    """Sorted top-level names that can be imported from there."""
    sources: tuple[str, ...]
    """Sorted paths of the package's own Python files, tests left out: where bugs may be."""
    visible: tuple[str, ...]
    """Sorted paths of what the agent sees."""


def is_test(path: str) -> bool:
    """Return whether a file belongs to the tests, by the names of its directories or its own."""
    parts = PurePosixPath(path).parts
    return bool(_TEST_DIRECTORIES & set(parts[:-1])) or _TEST_FILE.fullmatch(parts[-1]) is not None


def find_layout(label: str, files: Iterable[str]) -> Layout:
    """Return the layout of a tree.

    Args:
        label: of the package, for the message.

    Raises:
        PackageError: no importable package is in the tree.
    """
    paths = sorted(files)
    for root in ("src", "."):
        modules = sorted(set(_modules(paths, root)))
        if modules:
            break
    else:
        raise PackageError(f"{label}: its source archive holds no Python package")
    prefix = "" if root == "." else f"{root}/"
    starts = tuple(f"{prefix}{module}/" for module in modules)
    single = {f"{prefix}{module}.py" for module in modules}
    own = [path for path in paths if (path.startswith(starts) or path in single) and not is_test(path)]
    own = [path for path in own if not path.endswith((".pyc", ".pyo")) and "__pycache__" not in path]
    licences = [path for path in paths if "/" not in path and _LICENCE.fullmatch(path)]
    return Layout(
        source_root=root,
        modules=tuple(modules),
        sources=tuple(path for path in own if path.endswith(".py")),
        visible=tuple(sorted({*own, *licences})),
    )


def _modules(paths: list[str], root: str) -> Iterable[str]:
    prefix = "" if root == "." else f"{root}/"
    for path in paths:
        parts = path.removeprefix(prefix).split("/")
        if not path.startswith(prefix):
            continue
        if len(parts) == 2 and parts[1] == "__init__.py" and parts[0] not in _NO_PACKAGES:
            yield parts[0]
        if len(parts) == 1 and parts[0].endswith(".py") and parts[0] not in _SCRIPTS and not is_test(path):
            yield parts[0].removesuffix(".py")


def decoded(files: Mapping[str, bytes], paths: Iterable[str]) -> dict[str, str]:
    """Return path -> text of Python files; what is no UTF-8 is left out, since no bug is put there."""
    texts: dict[str, str] = {}
    for path in paths:
        try:
            texts[path] = files[path].decode()
        except UnicodeDecodeError:
            continue
    return texts
