"""Repair tasks from proven bugs: the agent mends the code, and the package's own tests decide.

    NAME/environment/{Dockerfile,PACKAGE}     the buggy package, without its tests
         tests/{test.sh,selected.txt,tree/,site/}
         solution/{solve.sh,files/}           the clean files

`tests/` brings what the verifier needs, pytest included, so a task runs in any environment with Python and
without a network. The tests are laid over whatever the agent left there before they run.
"""

import importlib.metadata
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import orjson

from pilotage.datasets.localization_tasks import (
    BUILD_FILES,
    WORKDIR,
    dockerfile,
    harbor_settings,
    write_task_directory,
)
from pilotage.datasets.patches import apply_patch, read_patch
from pilotage.datasets.sdists import fetch_sdist
from pilotage.errors import ConfigError

_TEST_TOOLS = ("pytest", "pluggy", "iniconfig", "packaging", "pygments")
_UNUSED = re.compile(
    r"pygments/(lexers/(?!__init__|_mapping|diff|python)|styles/(?!__init__|_mapping|default)"
    r"|formatters/(?!__init__|_mapping|terminal))"
)
"""What pytest never imports of a library that is 15 times its own size."""
_VERIFIER_TIMEOUT_S = 300.0
_AGENT_TIMEOUT_S = 1200.0
_TEST_SH = f"""#!/bin/bash
cp -r /tests/tree/. {WORKDIR}/
cd {WORKDIR}
PYTHONPATH="{WORKDIR}/__ROOT__:/tests/site" PYTHONDONTWRITEBYTECODE=1 \\
    python3 -m pytest -q --color=no -p no:cacheprovider --rootdir=. -W ignore::pytest.PytestConfigWarning \\
        @/tests/selected.txt
if [ $? -eq 0 ]; then reward=1; else reward=0; fi
echo "{{\\"reward\\": $reward}}" > /logs/verifier/reward.json
"""
_SOLVE_SH = f"#!/bin/bash\ncp -r /solution/files/. {WORKDIR}/\n"
_INSTRUCTION = """The Python package in the working directory has a bug. This report shows what it does:

<issue>
{issue}
</issue>

Mend the package. Its own tests, which you do not see, will be run on what you leave in the working directory.
"""


@dataclass(frozen=True, kw_only=True)
class _Package:
    """What all bugs of one package share."""

    clean: Mapping[str, bytes]
    visible: frozenset[str]
    source_root: str
    stable_tests: tuple[str, ...]

    @cached_property
    def hidden(self) -> Mapping[str, bytes]:
        """What only the verifier has: tests, their data, and the settings of pytest."""
        return {path: content for path, content in self.clean.items() if path not in self.visible}


def _lines_of(path: Path) -> Iterator[dict[str, object]]:
    try:
        content = path.read_bytes()
    except OSError:
        raise ConfigError(
            f"{path} is missing; give a directory that `pilotage data make-bugs` wrote"
        ) from None
    yield from map(orjson.loads, content.splitlines())


def _packages(bugs: Path, *, index_url: str, cache: Path) -> dict[str, _Package]:
    packages: dict[str, _Package] = {}
    for record in _lines_of(bugs / "packages.jsonl"):
        name, version = str(record["package"]), str(record["version"])
        sdist = fetch_sdist(name, version, index_url=index_url, cache=cache)
        if sdist.sha256 != record["sdist_sha256"]:
            raise ConfigError(f"{name}=={version}: the index has another archive than the bugs were made of")
        packages[name] = _Package(
            clean=sdist.files,
            visible=frozenset(_texts(record["visible"])),
            source_root=str(record["source_root"]),
            stable_tests=tuple(_texts(record["stable_tests"])),
        )
    return packages


def _texts(value: object) -> list[str]:
    assert isinstance(value, list)
    return [str(item) for item in value]


def _test_tools() -> dict[str, bytes]:
    """Return path -> content of the test runner as it is installed here, pure Python all of it."""
    files: dict[str, bytes] = {}
    for name in _TEST_TOOLS:
        distribution = importlib.metadata.distribution(name)
        for path in distribution.files or ():
            is_needed = path.suffix == ".py" or path.name in ("METADATA", "entry_points.txt")
            if is_needed and ".." not in path.parts and not _UNUSED.match(path.as_posix()):
                files[path.as_posix()] = Path(str(distribution.locate_file(path))).read_bytes()
    return files


def _selected(record: Mapping[str, object], package: _Package) -> list[str]:
    """Return the tests that decide: those that fail with the bug, and all stable ones of the same files."""
    failing, passing = _texts(record["fail_to_pass"]), _texts(record["pass_to_pass"])
    files = {test.partition("::")[0] for test in (*failing, *passing)}
    return sorted({*failing, *(test for test in package.stable_tests if test.partition("::")[0] in files)})


def _task_files(
    record: Mapping[str, object], package: _Package, tools: Mapping[str, bytes]
) -> dict[str, bytes]:
    name = str(record["name"])
    patch = read_patch(str(record["patch"]))
    buggy = apply_patch(patch, package.clean)
    tree = {path: buggy[path] for path in sorted(package.visible) if path not in BUILD_FILES}
    metadata = {
        "package": str(record["package"]),
        "version": str(record["version"]),
        "kinds": _texts(record["kinds"]),
        "fail_to_pass": _texts(record["fail_to_pass"]),
    }
    settings = harbor_settings(
        f"{name}-repair",
        f"Mend a bug in {record['package']}",
        metadata,
        agent_timeout_s=_AGENT_TIMEOUT_S,
        verifier_timeout_s=_VERIFIER_TIMEOUT_S,
    )
    return {
        "task.toml": settings.encode(),
        "instruction.md": _INSTRUCTION.format(issue=str(record["issue"]).strip()).encode(),
        "environment/Dockerfile": dockerfile(tree).encode(),
        **{f"environment/{path}": content for path, content in tree.items()},
        "tests/test.sh": _TEST_SH.replace("__ROOT__", package.source_root).encode(),
        "tests/selected.txt": "\n".join(_selected(record, package)).encode(),
        **{f"tests/tree/{path}": content for path, content in package.hidden.items()},
        **{f"tests/site/{path}": content for path, content in tools.items()},
        "solution/solve.sh": _SOLVE_SH.encode(),
        **{f"solution/files/{path}": package.clean[path] for path in sorted(patch.paths)},
    }


def write_repair_tasks(bugs: Path, out: Path, *, index_url: str, cache: Path) -> int:
    """Write a repair task for each proven bug of `bugs` that is not in `out` yet; return how many there are.

    Args:
        bugs: directory that `pilotage data make-bugs` wrote.

    Raises:
        ConfigError: `bugs` is no such directory, or an archive cannot be had any more.
    """
    packages = _packages(bugs, index_url=index_url, cache=cache)
    tools = _test_tools()
    records: Sequence[dict[str, object]] = list(_lines_of(bugs / "bugs.jsonl"))
    for record in records:
        directory = out / f"{record['name']}-repair"
        if not directory.exists():
            write_task_directory(directory, _task_files(record, packages[str(record["package"])], tools))
    return len(records)
