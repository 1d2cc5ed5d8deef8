"""Summaries of rollouts: the run's own lines; for older runs, which have none, read once and kept in a cache.

    page asks for a folder -> what is known, and what a short wait brings -> the rest by a later request
    background             -> every folder of the runs that were looked at, newest first

Invariant: nothing is written into a run. An entry holds for one size and modification time of its file; a
run that was rewound and went on is read again. Files are read in worker processes, so that pages stay fast.
"""

import asyncio
import hashlib
import os
from concurrent.futures import BrokenExecutor
from dataclasses import dataclass, field
from pathlib import Path

import orjson
from pydantic import TypeAdapter

from pilotage.files import write_atomically
from pilotage.loops.summaries import Summary, SummaryLine, read_summaries
from pilotage.ops.view.library import Run, rollout_id
from pilotage.ops.view.summaries import Match, PolicyText, find_text, summarise_files
from pilotage.ops.view.workers import Workers

_FORMAT = "1"
"""Of the cache; another number makes old entries unread."""
_CHUNK_FILES = 2
"""Files that a worker reads at once: few enough that a page's own files come soon."""
_BACKGROUND_PAUSE_S = 2.0
_SUMMARIES = TypeAdapter(list[Summary])
"""Reads and writes what the cache keeps."""

type _Stamp = tuple[int, int]


def cache_directory() -> Path:
    """Return where indexes are kept."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "pilotage" / "view"


@dataclass(frozen=True, slots=True, kw_only=True)
class Listing:
    """What is known of some rollouts, in order of folder and id."""

    summaries: list[Summary]
    total: int
    """Files that there are."""

    @property
    def is_complete(self) -> bool:
        """Whether every file has been read."""
        return len(self.summaries) == self.total


@dataclass(slots=True)
class _Folder:
    """One folder's files as they were seen last, and what was read of them."""

    seen_ns: int = -1
    files: dict[str, _Stamp] = field(default_factory=dict[str, "_Stamp"])
    entries: dict[str, tuple[_Stamp, Summary]] = field(default_factory=dict[str, "tuple[_Stamp, Summary]"])
    is_loaded: bool = False
    lines: dict[str, SummaryLine] = field(default_factory=dict[str, SummaryLine])
    """What the run itself says, by name of the rollout's file."""
    lines_end: int = 0
    """How far its file of summaries was read."""

    def take_lines(self, directory: Path) -> None:
        """Believe the run's own lines about files that are missing here and of the size that a line names."""
        missing = self.missing()
        if not missing:
            return
        found, self.lines_end = read_summaries(directory, start=self.lines_end)
        self.lines |= {f"{line.summary.id}.json.gz": line for line in found}
        for name in missing:
            line = self.lines.get(name)
            if line is not None and line.file_bytes == self.files[name][0]:
                self.entries[name] = (self.files[name], line.summary)

    def missing(self) -> list[str]:
        return [name for name, stamp in self.files.items() if self._stamp(name) != stamp]

    def known(self) -> list[Summary]:
        return [self.entries[name][1] for name in sorted(self.files) if self._stamp(name) == self.files[name]]

    def _stamp(self, name: str) -> _Stamp | None:
        entry = self.entries.get(name)
        return None if entry is None else entry[0]


class Index:
    """Summaries of the rollouts of any number of runs."""

    def __init__(self, *, cache: Path, workers: Workers, num_workers: int = 1) -> None:
        """Args:
        workers: read files; the caller closes them.
        """
        self._cache = cache
        self._workers = workers
        self._num_workers = num_workers
        self._slots = asyncio.Semaphore(num_workers)
        self._folders: dict[tuple[Path, str], _Folder] = {}
        self._reading: dict[Path, asyncio.Task[None]] = {}
        self._watched: dict[Path, Run] = {}
        self._group: asyncio.TaskGroup | None = None

    async def follow(self) -> None:
        """Read ahead, newest folders first, until cancelled; also where chunks of pages run."""
        async with asyncio.TaskGroup() as group:
            self._group = group
            try:
                while True:
                    for run in list(self._watched.values()):
                        for folder in reversed(run.folders()):
                            await self._read_ahead(run, folder)
                    await asyncio.sleep(_BACKGROUND_PAUSE_S)
            finally:
                self._group = None

    async def folder(self, run: Run, name: str, *, wait_s: float = 0.0) -> Listing:
        """Return the summaries of one folder; those that are not known are read, and waited for a while."""
        self._watched[run.path] = run
        folder = self._scan(run, name)
        pending = self._start(run, name, folder)
        if pending and wait_s:
            await asyncio.wait(pending, timeout=wait_s)
        return Listing(summaries=folder.known(), total=len(folder.files))

    def whole_run(self, run: Run) -> Listing:
        """Return what is known of a run, at once."""
        self._watched[run.path] = run
        folders = [self._scan(run, name) for name in run.folders()]
        return Listing(
            summaries=[summary for folder in folders for summary in folder.known()],
            total=sum(len(folder.files) for folder in folders),
        )

    async def siblings(self, run: Run, name: str, group: str) -> list[Summary]:
        """Return the summaries of a group, all of them: an advantage depends on every one.

        Files that were not read yet are read here and now, without their text: the workers have a queue.
        Only those whose ids begin with the group's, as the loop makes them, can belong to it.
        """
        folder = self._scan(run, name)
        directory = run.path / "rollouts" / name
        missing = [directory / file for file in folder.missing() if file.startswith(group)]
        known = folder.known()
        if missing:
            known += await asyncio.to_thread(summarise_files, missing, PolicyText(model=""))
        return sorted(
            (summary for summary in known if summary.group == group), key=lambda summary: summary.id
        )

    async def search(
        self, run: Run, files: list[Path], wanted: str, *, wait_s: float
    ) -> tuple[list[Match], int]:
        """Search decoded text file by file, as far as `wait_s` goes; return matches and files searched."""
        matches: list[Match] = []
        deadline = asyncio.get_running_loop().time() + wait_s
        for start in range(0, len(files), 2 * _CHUNK_FILES):
            if asyncio.get_running_loop().time() > deadline:
                return matches, start
            chunk = files[start : start + 2 * _CHUNK_FILES]
            halves = (chunk[::2], chunk[1::2])
            for found in await asyncio.gather(*(self._call_find(run, half, wanted) for half in halves)):
                matches += found
        return sorted(matches, key=lambda match: (match.folder, match.id)), len(files)

    async def _call_find(self, run: Run, files: list[Path], wanted: str) -> list[Match]:
        return await self._workers.call(find_text, files, policy_text(run), wanted)

    # --- reading ---

    def _scan(self, run: Run, name: str) -> _Folder:
        """Look at the folder's files again if it has changed: files are renamed into place."""
        folder = self._folders.setdefault((run.path, name), _Folder())
        directory = run.path / "rollouts" / name
        try:
            seen_ns = directory.stat().st_mtime_ns
        except OSError:
            return _Folder()
        if seen_ns != folder.seen_ns:
            with os.scandir(directory) as entries:
                found = sorted((entry.name, entry.stat()) for entry in entries if _is_rollout(entry))
            folder.files = {file: (stat.st_size, stat.st_mtime_ns) for file, stat in found}
            folder.seen_ns = seen_ns
        folder.take_lines(directory)
        if not folder.is_loaded and folder.missing():
            folder.entries = self._load(run, name) | folder.entries
            folder.is_loaded = True
        return folder

    def _start(
        self, run: Run, name: str, folder: _Folder, *, most: int | None = None
    ) -> list[asyncio.Task[None]]:
        """Have what is missing read, at most `most` files of it; return the tasks that do so."""
        if self._group is None:
            return []
        directory = run.path / "rollouts" / name
        paths = [directory / file for file in folder.missing()][:most]
        fresh = [path for path in paths if path not in self._reading]
        for at in range(0, len(fresh), _CHUNK_FILES):
            chunk = fresh[at : at + _CHUNK_FILES]
            task = self._group.create_task(self._read(run, name, folder, chunk))
            self._reading |= dict.fromkeys(chunk, task)
        return [self._reading[path] for path in paths if path in self._reading]

    async def _read_ahead(self, run: Run, name: str) -> None:
        """Read a folder in small bites, so that what a page asks for does not wait behind it."""
        while pending := self._start(run, name, self._scan(run, name), most=self._num_workers * _CHUNK_FILES):
            await asyncio.wait(pending)

    async def _read(self, run: Run, name: str, folder: _Folder, paths: list[Path]) -> None:
        stamps = {path.name: folder.files[path.name] for path in paths}
        try:
            async with self._slots:
                read = await self._workers.call(summarise_files, paths, policy_text(run))
        except BrokenExecutor:
            fault = "the process that read it was killed, twice"
            read = [Summary(id=rollout_id(path), folder=name, counters={}, fault=fault) for path in paths]
        finally:
            for path in paths:
                self._reading.pop(path, None)
        for path, summary in zip(paths, read, strict=True):
            folder.entries[path.name] = (stamps[path.name], summary)
        if not folder.missing() and not any(summary.fault for summary in folder.known()):
            self._save(run, name, folder)

    # --- the cache on disk ---

    def _file(self, run: Run, name: str) -> Path:
        digest = hashlib.sha256(f"{_FORMAT}\0{run.path}\0{name}".encode()).hexdigest()
        return self._cache / f"{digest[:32]}.json"

    def _load(self, run: Run, name: str) -> dict[str, tuple[_Stamp, Summary]]:
        try:
            content = orjson.loads(self._file(run, name).read_bytes())
            summaries = _SUMMARIES.validate_python(content["summaries"])
            stamps = [(int(size), int(changed)) for size, changed in content["stamps"]]
        except (OSError, ValueError, KeyError, TypeError):
            return {}
        names = [f"{summary.id}.json.gz" for summary in summaries]
        return dict(zip(names, zip(stamps, summaries, strict=False), strict=False))

    def _save(self, run: Run, name: str, folder: _Folder) -> None:
        entries = [folder.entries[file] for file in folder.files]
        content = {
            "stamps": [stamp for stamp, _ in entries],
            "summaries": _SUMMARIES.dump_python([summary for _, summary in entries], mode="json"),
        }
        self._cache.mkdir(parents=True, exist_ok=True)
        write_atomically(self._file(run, name), orjson.dumps(content))


def policy_text(run: Run) -> PolicyText:
    """Return what turns the run's ids into text."""
    thinking = run.section("policy").get("enable_thinking")
    return PolicyText(model=run.model(), enable_thinking=thinking if isinstance(thinking, bool) else None)


def _is_rollout(entry: os.DirEntry[str]) -> bool:
    return entry.name.endswith(".json.gz") and not entry.name.startswith(".")


def find_rollout(run: Run, wanted: str) -> Path | None:
    """Return the file of a rollout by its id, or None; only what is listed becomes a path."""
    file = f"{wanted}.json.gz"
    folders = (run.path / "rollouts" / name for name in run.folders())
    return next((folder / file for folder in folders if file in os.listdir(folder)), None)
