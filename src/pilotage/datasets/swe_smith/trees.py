"""Where the tree of a row comes from: a clone, an image, or its package's source archives."""

import io
import re
import shutil
import subprocess
import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path, PurePosixPath
from typing import Protocol

from pilotage.datasets.patches import Patch, PatchError, apply_patch, git_blob
from pilotage.datasets.sdists import fetch_sdist, list_sdists
from pilotage.datasets.swe_smith.rows import Orientation, Row
from pilotage.errors import ConfigError, PackageError

_MIRRORS_MADE = datetime(2024, 10, 1, tzinfo=UTC)
"""SWE-smith mirrored its repositories around then: archives of that time are tried first."""
_MAX_VERSIONS = 16
"""Archives that are tried for one repository."""
_PACKAGE_NAMES = {
    "Red-DiscordBot": "red-discordbot",
    "python-colorlog": "colorlog",
    "python-qrcode": "qrcode",
    "pyopenssl": "pyopenssl",
}
"""Repository -> package, where the names differ."""
_ARCHIVE_ONLY = re.compile(r"(^PKG-INFO$|(^|/)[^/]+\.egg-info/)")
"""What a source archive has and the repository has not."""
_ENGINES = ("docker", "podman")
_TESTBED = PurePosixPath("testbed")
"""Where SWE-smith's images hold the repository."""
_MADE_IN_IMAGE = re.compile(r"(^|/)(\.git|__pycache__|[^/]+\.egg-info)(/|$)|\.py[co]$")
"""What cloning and installing leave in a tree."""


class NoTreeError(Exception):
    """There is no tree for a row; the message is the reason, the same for every row that has it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tree:
    """A repository's files as they were without the bug, or before the fix: what the patch applies to."""

    files: Mapping[str, bytes]
    """Path -> content; links left out."""
    origin: str
    """The package and version, or the repository and commit."""
    is_exact: bool
    """Whether every file that the patch touches is, by git's hash, the one that the patch was made for."""


class TreeSource(Protocol):
    """Finds trees."""

    def tree_of(self, row: Row) -> Tree:
        """Return the tree that the row's patch applies to.

        Raises:
            NoTreeError: there is none.
        """
        ...


def _is_exact(patch: Patch, files: Mapping[str, bytes]) -> bool:
    return all(
        file.is_added
        or (file.clean_blob and file.path in files and git_blob(files[file.path]).startswith(file.clean_blob))
        for file in patch.files
    )


def _applies(patch: Patch, files: Mapping[str, bytes]) -> bool:
    try:
        apply_patch(patch, files)
    except PatchError:
        return False
    return True


class SdistTrees:
    """Trees from the package index: the archive whose files are those of the patch, else one it applies to.

    Archives are kept for one repository at a time: ask for the rows of a repository one after another.
    """

    def __init__(self, *, index_url: str, cache: Path) -> None:
        self._index_url = index_url
        self._cache = cache
        self._repository = ""
        self._versions: list[str] = []
        self._loaded: dict[str, Mapping[str, bytes]] = {}
        self._problem = ""

    def tree_of(self, row: Row) -> Tree:
        """As of `TreeSource`."""
        if row.repository != self._repository:
            self._open(row)
        if self._problem:
            raise NoTreeError(self._problem)
        package = _package_of(row)
        nearest = ""
        # An archive that was right for one row of the commit is likely to be right for the next.
        for version in sorted(self._versions, key=lambda version: version not in self._loaded):
            files = self._files(package, version)
            if _is_exact(row.patch, files):
                return Tree(files=files, origin=f"{package}=={version}", is_exact=True)
            if not nearest and _applies(row.patch, files):
                nearest = version
        if not nearest:
            raise NoTreeError("the patch applies to no source archive of the package")
        return Tree(files=self._loaded[nearest], origin=f"{package}=={nearest}", is_exact=False)

    def _open(self, row: Row) -> None:
        self._repository, self._loaded, self._problem = row.repository, {}, ""
        try:
            listed = list_sdists(_package_of(row), index_url=self._index_url)
        except PackageError:
            self._versions, self._problem = [], "the index has no package of the repository's name"
            return
        by_age = sorted(listed, key=lambda sdist: abs((sdist.uploaded or _MIRRORS_MADE) - _MIRRORS_MADE))
        self._versions = [sdist.version for sdist in by_age[:_MAX_VERSIONS]]
        if not self._versions:
            self._problem = "the package has no source archive"

    def _files(self, package: str, version: str) -> Mapping[str, bytes]:
        if version not in self._loaded:
            try:
                files = fetch_sdist(package, version, index_url=self._index_url, cache=self._cache).files
            except PackageError:
                files = {}
            self._loaded[version] = {p: c for p, c in files.items() if not _ARCHIVE_ONLY.search(p)}
        return self._loaded[version]


def _package_of(row: Row) -> str:
    return _PACKAGE_NAMES.get(row.name, row.name)


class CloneTrees:
    """Trees from one bare clone for each repository: `git archive` of its default branch, without history.

    SWE-smith keeps a mirror for each repository and commit, `swesmith/<owner>__<name>.<commit>`, whose
    default branch is the clean tree.
    """

    def __init__(self, *, base_url: str, clones: Path) -> None:
        """Args:
        base_url: what a mirror's name follows, `https://github.com/swesmith/` for one.
        clones: directory of the clones; one that is there is not fetched again.
        """
        self._base_url = base_url
        self._clones = clones

    def tree_of(self, row: Row) -> Tree:
        """As of `TreeSource`."""
        mirror = f"{row.owner}__{row.name}.{row.commit}"
        clone = self._clones / f"{mirror}.git"
        if not clone.is_dir():
            partial = clone.with_suffix(".partial")
            _git("clone", "--bare", "--depth=1", "--quiet", f"{self._base_url}{mirror}", str(partial))
            partial.rename(clone)
        files = _files_of_tar(_git("-C", str(clone), "archive", "--format=tar", "HEAD"))
        return Tree(files=files, origin=mirror, is_exact=_is_exact(row.patch, files))


class ImageTrees:
    """Trees from SWE-smith's container images: `/testbed`, copied out of a container that is never started.

    The tree of one image is kept at a time: ask for the rows of a repository one after another. Images that
    the engine fetches stay with it.
    """

    def __init__(self, *, prefix: str) -> None:
        """Look for an engine that answers, docker before podman.

        Args:
            prefix: what an image's name follows, `docker.io/swebench/swesmith.x86_64.` for one.

        Raises:
            ConfigError: there is none.
        """
        self._prefix = prefix
        self._engine = _working_engine()
        self._image = ""
        self._files: Mapping[str, bytes] = {}
        self._problem = ""

    def tree_of(self, row: Row) -> Tree:
        """As of `TreeSource`."""
        # SWE-smith's own rule for names: 1776 stands for the double underscore, which Docker Hub refuses.
        image = f"{self._prefix}{row.owner}_1776_{row.name}.{row.commit}".lower()
        if image != self._image:
            self._image, self._files, self._problem = image, {}, ""
            try:
                self._files = _tree_in_image(self._engine, image)
            except NoTreeError as error:
                self._problem = str(error)
        if self._problem:
            raise NoTreeError(self._problem)
        return Tree(files=self._files, origin=image, is_exact=_is_exact(row.patch, self._files))


def _working_engine() -> str:
    for engine in _ENGINES:
        if shutil.which(engine) and _ask(engine, "version").returncode == 0:
            return engine
    raise ConfigError(
        f"trees from images need a container engine that answers `version`: {' or '.join(_ENGINES)}"
    )


def _tree_in_image(engine: str, image: str) -> dict[str, bytes]:
    created = _ask(engine, "create", image, "true")  # an image need not name a command; none is run
    if created.returncode != 0:
        raise NoTreeError("the container engine cannot get the image")
    container = created.stdout.decode().split()[-1]
    try:
        copied = _ask(engine, "cp", f"{container}:/{_TESTBED}", "-")
    finally:
        _ask(engine, "rm", container)
    if copied.returncode != 0:
        raise NoTreeError("the image has no /testbed that can be copied")
    return _repository_files(_files_of_tar(copied.stdout))


def _repository_files(copied: Mapping[str, bytes]) -> dict[str, bytes]:
    """Return the files under `testbed/` that are the repository's; names that lead out of it are left out."""
    files: dict[str, bytes] = {}
    for name, content in copied.items():
        path = PurePosixPath(name)
        if path.is_relative_to(_TESTBED) and ".." not in path.parts:
            inside = str(path.relative_to(_TESTBED))
            if not _MADE_IN_IMAGE.search(inside):
                files[inside] = content
    return files


def _ask(engine: str, *arguments: str) -> subprocess.CompletedProcess[bytes]:
    command = [engine, *arguments]
    return subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, check=False)


def _git(*arguments: str) -> bytes:
    done = subprocess.run(["git", *arguments], capture_output=True, check=False)
    if done.returncode != 0:
        raise NoTreeError("git cannot clone the repository")
    return done.stdout


def _files_of_tar(content: bytes) -> dict[str, bytes]:
    files: dict[str, bytes] = {}
    with tarfile.open(fileobj=io.BytesIO(content), mode="r:") as tar:
        for member in tar:
            if member.isreg() and (file := tar.extractfile(member)) is not None:
                files[member.name] = file.read()
    return files


def two_versions(row: Row, tree: Tree) -> tuple[dict[str, bytes], dict[str, bytes]]:
    """Return (buggy, fixed) trees of a row.

    Raises:
        NoTreeError: the patch does not apply.
    """
    try:
        patched = apply_patch(row.patch, tree.files)
    except PatchError as error:
        raise NoTreeError(str(error)) from None
    given = dict(tree.files)
    return (patched, given) if row.orientation == Orientation.INTRODUCES_BUG else (given, patched)


def sources_of(files: Mapping[str, bytes], paths: Sequence[str]) -> dict[str, str]:
    """Return path -> text of the named Python files that are there."""
    return {p: files[p].decode(errors="surrogateescape") for p in paths if p in files and p.endswith(".py")}
