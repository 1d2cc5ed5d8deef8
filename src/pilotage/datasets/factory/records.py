"""A proven bug as a localization task, and as a record from which other tasks are made."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from difflib import unified_diff

from pilotage.datasets.factory.issue import issue_text, leaks
from pilotage.datasets.factory.package_bugs import ProvenBug
from pilotage.datasets.factory.trees import Layout
from pilotage.datasets.localization_tasks import LocalizationTask, localization_instruction
from pilotage.datasets.sdists import Sdist

_LINE = re.compile(rb"[^\n]*\n|[^\n]+")


def unified_patch(clean: Mapping[str, bytes], buggy: Mapping[str, bytes]) -> str:
    """Return the unified diff from the clean files to the buggy ones, as `git apply` reads it.

    Args:
        buggy: path -> content of the files that change; each is UTF-8, and in `clean` too.
    """
    return "".join(
        part for path in sorted(buggy) for part in _diff(path, _lines(clean[path]), _lines(buggy[path]))
    )


def _lines(content: bytes) -> list[str]:
    # Not splitlines, which knows more line ends than a diff does.
    return [line.decode() for line in _LINE.findall(content)]


def _diff(path: str, clean: Sequence[str], buggy: Sequence[str]) -> Iterator[str]:
    for line in unified_diff(clean, buggy, f"a/{path}", f"b/{path}"):
        yield line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n"


def task_of(
    name: str, bug: ProvenBug, sdist: Sdist, layout: Layout, *, seed: int, bare_issue: bool = False
) -> LocalizationTask:
    """Return the localization task of a bug; see `trees` for what its agent sees."""
    text = issue_text(bug.told)
    leaked = leaks(text, bug.gold)
    return LocalizationTask(
        name=name,
        description=f"Find the place of a bug in {sdist.name}",
        instruction=text if bare_issue else localization_instruction(text),
        tree={path: bug.changed.get(path, sdist.files[path]) for path in layout.visible},
        gold=bug.gold,
        empty="match",
        metadata={
            "package": sdist.name,
            "version": sdist.version,
            "kinds": kinds_of(bug),
            "num_places": len(bug.parts),
            "leaks_function": leaked.function,
            "leaks_module": leaked.module,
            "leaks_file": leaked.file,
            "errors": sorted({symptom.error for symptom in bug.told}),
            "fail_to_pass": sorted(bug.verdict.fail_to_pass),
            "seed": seed,
        },
    )


def kinds_of(bug: ProvenBug) -> list[str]:
    """Return the kind of each part, sorted."""
    return sorted(part.kind for part in bug.parts)


def record_of(name: str, bug: ProvenBug, sdist: Sdist, *, seed: int) -> dict[str, object]:
    """Return the bug's line of `bugs.jsonl`, in plain values.

    `pass_to_pass` are tests that pass the changed lines and do not break; tests that never come there are
    left out. The tests are in the sdist, whose SHA-256 the record has.
    """
    text = issue_text(bug.told)
    return {
        "name": name,
        "package": sdist.name,
        "version": sdist.version,
        "sdist_sha256": sdist.sha256,
        "seed": seed,
        "kinds": kinds_of(bug),
        "places": [f"{part.path}:{part.place}" for part in bug.parts],
        "num_places": len(bug.parts),
        "patch": unified_patch(sdist.files, bug.changed),
        "fail_to_pass": sorted(bug.verdict.fail_to_pass),
        "pass_to_pass": list(bug.verdict.pass_to_pass),
        "told_tests": [symptom.test for symptom in bug.told],
        "errors": [symptom.error for symptom in bug.told],
        "gold": bug.gold.to_record(),
        "issue": text,
        "leaks": asdict(leaks(text, bug.gold)),
    }


def package_record(sdist: Sdist, layout: Layout, stable: Iterable[str]) -> dict[str, object]:
    """Return what all bugs of a package share: how its tests are run, and which are stable."""
    return {
        "package": sdist.name,
        "version": sdist.version,
        "sdist_sha256": sdist.sha256,
        "source_root": layout.source_root,
        "sources": list(layout.sources),
        "visible": list(layout.visible),
        "stable_tests": list(stable),
    }
