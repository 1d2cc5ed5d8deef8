"""What can happen to a run's files and to its machine, and what must come of it.

Each fault strikes a small run (real loop, real files, a trainer of one number) that is then resumed. It must
end as the run that nobody disturbed, or say in one line what is damaged.
"""

import asyncio
import contextlib
import json
import os
import random
import resource
import socket
import struct
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Awaitable, Callable, Generator, Mapping
from pathlib import Path
from types import MappingProxyType

from tests.engine.models import write_model
from tests.engine.test_checkpoints import open_engine, train
from tests.integration.test_driver_death import on_a_socket
from tests.loops.rig import CountingTrainer, Rig
from tests.service.rig import PREFIX
from tests.service.rig import rig as service_rig

from pilotage.engine.checkpoint import OPTIMIZER_FILE
from pilotage.errors import ConfigError, PilotageError, RunDirectoryError, TrainerError
from pilotage.loops import EvaluationSettings, LoopSettings, RunDirectory, read_rollout
from pilotage.loops.summaries import SUMMARY_FILE, read_summaries

SETTINGS = LoopSettings(
    num_steps=5,
    tasks_per_step=2,
    group_size=2,
    checkpoint_every_steps=2,
    evaluation=EvaluationSettings(every_steps=3),
)
_ROOT = Path(__file__).resolve().parents[2]
_SERVICE_ANSWERS_S = 5.0
_NUM_TRIES = 5

type Kind = Callable[[Path, random.Random], Awaitable[list[str]]]
"""Does it in an empty directory, and returns what was not as it should be."""


def damaged(content: bytes, rng: random.Random) -> bytes:
    """Tear off the end, put noise or zeros over a piece, or leave nothing."""
    at = rng.randrange(max(1, len(content)))
    size = rng.randint(1, 40)
    how = rng.choice(("torn", "noise", "zeros", "empty"))
    if how == "torn":
        return content[:at]
    if how == "empty":
        return b""
    piece = rng.randbytes(size) if how == "noise" else bytes(size)
    return content[:at] + piece + content[at + size :]


async def crashed_run(path: Path, rng: random.Random) -> None:
    """Begin a run whose trainer fails in a step."""
    rig = Rig(settings=SETTINGS, trainer=CountingTrainer(fails_in_step=rng.randint(2, 5)))
    with contextlib.suppress(TrainerError):
        await rig.run(path)


async def _whole(path: Path) -> float:
    rig = Rig(settings=SETTINGS)
    await rig.run(path)
    return rig.trainer.weights


async def resumed(path: Path, whole: Path) -> list[str]:
    """Resume, and say what differs from a run that nobody disturbed."""
    expected = await _whole(whole)
    rig = Rig(settings=SETTINGS)
    await rig.run(path, resume=(path / "events.jsonl").is_file())
    problems: list[str] = []
    if rig.trainer.weights != expected:
        problems.append(f"the weights are {rig.trainer.weights!r}, not {expected!r}")
    run = RunDirectory(path)
    names = [file.relative_to(path) for file in run.rollout_files()]
    if names != [file.relative_to(whole) for file in RunDirectory(whole).rollout_files()]:
        problems.append("its rollouts differ")
    steps = {int(record["step"]) for record in run.metrics()}
    lost = {int(n) for e in run.events() if e["event"] == "records_lost" for n in e["steps"].split(", ")}
    if steps | lost != set(range(SETTINGS.num_steps + 1)) or steps & lost:
        problems.append(
            f"metrics.jsonl has the steps {sorted(steps)}, and {sorted(lost)} were said to be lost"
        )
    if [event["event"] for event in run.events()][-1] != "finished":
        problems.append("its last event does not say that it has finished")
    return problems


def _lines_of(name: str) -> Kind:
    """Damage a file of lines."""

    async def strike(directory: Path, rng: random.Random) -> list[str]:
        path = directory / "run"
        await crashed_run(path, rng)
        (path / name).write_bytes(damaged((path / name).read_bytes(), rng))
        return await resumed(path, directory / "whole")

    return strike


async def _config(directory: Path, rng: random.Random) -> list[str]:
    path = directory / "run"
    await crashed_run(path, rng)
    config = path / "config.toml"
    content = config.read_bytes()
    config.write_bytes(damaged(content, rng))
    is_same = False
    with contextlib.suppress(ValueError):  # an end of line that was torn off changes nothing
        is_same = tomllib.loads(config.read_text()) == tomllib.loads(content.decode())
    if is_same:
        return await resumed(path, directory / "whole")
    try:
        problems = await resumed(path, directory / "whole")
    except RunDirectoryError as error:
        problems = [] if "\n" not in str(error) else [f"its error has several lines: {error}"]
        config.write_bytes(content)
        return problems + await resumed(path, directory / "whole-again")
    return [*problems, "a damaged config was taken for the run's own"]


async def _rollout(directory: Path, rng: random.Random) -> list[str]:
    path = directory / "run"
    await _whole(path)
    file = rng.choice(RunDirectory(path).rollout_files())
    content = file.read_bytes()
    file.write_bytes(damaged(content, rng))
    try:
        found = read_rollout(file)
    except RunDirectoryError as error:
        return [] if str(file) in str(error) else [f"{error} does not name the file"]
    file.write_bytes(content)
    return [] if found == found and found.id == read_rollout(file).id else ["it was read as another rollout"]


async def _summaries(directory: Path, rng: random.Random) -> list[str]:
    path = directory / "run"
    await _whole(path)
    folder = rng.choice(sorted((path / "rollouts").iterdir()))
    before = {line.summary.id: line for line in read_summaries(folder)[0]}
    summaries = folder / SUMMARY_FILE
    summaries.write_bytes(damaged(summaries.read_bytes(), rng))
    after = {line.summary.id: line for line in read_summaries(folder)[0]}
    wrong = [
        name for name in after.keys() & before.keys() if after[name].summary.task != before[name].summary.task
    ]
    return [f"{name} was read as another rollout" for name in wrong]


async def _trainer_logprobs(directory: Path, rng: random.Random) -> list[str]:
    """A page is shown without them; what is read has the right form, or is nothing."""
    path = directory / "run"
    await _whole(path)
    run = RunDirectory(path)
    file = rng.choice(sorted((path / "trainer_logprobs").iterdir()))
    step = int(file.stem.rpartition("-")[2])
    trained = [file.name.removesuffix(".json.gz") for file in run.rollout_files()]
    given = {name: run.trainer_logprobs(step, name) for name in trained}
    file.write_bytes(damaged(file.read_bytes(), rng))
    problems: list[str] = []
    for name, before in given.items():
        after = run.trainer_logprobs(step, name)
        if after is not None and (before is None or after.dtype != before.dtype or after.ndim != 1):
            problems.append(f"{name} was read as {after!r}")
    return problems


async def _checkpoint(directory: Path, rng: random.Random) -> list[str]:
    """It is refused in one line that says where, or gives what was saved."""
    model, saved = write_model(directory / "model", "qwen3"), directory / "saved"
    engine = await open_engine(model)
    try:
        await train(engine, rng.randrange(1 << 16))
        await engine.save(saved)
        before = {name: (saved / name).read_bytes() for name in ("model.safetensors", OPTIMIZER_FILE)}
        file = rng.choice(sorted(saved.iterdir()))
        if rng.random() < 0.2:
            file.unlink()
        else:
            file.write_bytes(damaged(file.read_bytes(), rng))
        await train(engine, rng.randrange(1 << 16))
        try:
            await engine.load(saved)
        except ConfigError as error:
            is_clear = str(saved) in str(error) and "\n" not in str(error)
            return [] if is_clear else [f"{file.name}: {error}"]
        await engine.save(directory / "again")
        return [
            f"{file.name}: {name} was loaded as something else"
            for name, content in before.items()
            if (directory / "again" / name).read_bytes() != content
        ]
    finally:
        await engine.close()


@contextlib.contextmanager
def _small_disk(directory: Path, size_kib: int) -> Generator[Callable[[], object]]:
    """Mount a file system of that size; yields what makes it large."""
    directory.mkdir()

    def mount(*options: str) -> None:
        subprocess.run(["mount", "-t", "tmpfs", "-o", ",".join(options), "chaos", str(directory)], check=True)

    mount(f"size={size_kib}k")
    try:
        yield lambda: mount("remount", "size=64m")
    finally:
        subprocess.run(["umount", str(directory)], check=True)


async def _full_disk(directory: Path, rng: random.Random) -> list[str]:
    disk = directory / "disk"
    with _small_disk(disk, size_kib=rng.randrange(16, 240, 4)) as enlarge:
        for _ in range(_NUM_TRIES):
            with contextlib.suppress(OSError):  # also where several tasks raise it together
                await Rig(settings=SETTINGS).run(
                    disk / "run", resume=(disk / "run" / "events.jsonl").is_file()
                )
        enlarge()
        return await resumed(disk / "run", directory / "whole")


async def _few_descriptors(directory: Path, rng: random.Random) -> list[str]:
    path = directory / "run"
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    opened = len(os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (opened + rng.randint(-3, 4), hard))
    try:
        with contextlib.suppress(OSError):
            await Rig(settings=SETTINGS).run(path)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return await resumed(path, directory / "whole")


async def _service_connections(directory: Path, rng: random.Random) -> list[str]:
    """Leave half-open, slow and reset connections at the service; it must go on answering others."""
    async with service_rig(directory) as service, on_a_socket(service) as url:
        port = int(url.rpartition(":")[2])
        held: list[socket.socket] = []
        for _ in range(rng.randint(5, 120)):
            held.append(socket.create_connection(("127.0.0.1", port), timeout=5))
            said = b"POST %b HTTP/1.1\r\nHost: x\r\nContent-Length: 5000\r\n\r\n{" % PREFIX.encode()
            held[-1].sendall(said[: rng.randrange(len(said))])
        started = time.monotonic()
        answer = await asyncio.wait_for(_answer(port, f"{PREFIX}/capacity"), _SERVICE_ANSWERS_S * 4)
        for connection in held:
            connection.close()
        problems = [] if b"200" in answer else [f"it answered {answer!r}"]
        if time.monotonic() - started > _SERVICE_ANSWERS_S:
            problems.append(f"it took {time.monotonic() - started:.1f} s to answer")
        return problems


def _clock_of(scenario: str) -> Kind:
    """Set the clock of a process and of all that it starts, from its first import on."""

    async def strike(directory: Path, rng: random.Random) -> list[str]:
        path = os.pathsep.join(map(str, (Path(__file__).parent / "set_clock", _ROOT)))
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "tests.chaos.under_set_clock"),
            *(scenario, str(directory), str(rng.randrange(1 << 30))),
            env=os.environ | {"PYTHONPATH": path},
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        said, complaint = await process.communicate()
        if process.returncode != 0:
            return [f"it ended with {process.returncode}: {complaint.decode()[-300:]}"]
        return json.loads(said.splitlines()[-1])

    return strike


async def _browsers_that_are_killed(directory: Path, rng: random.Random) -> list[str]:
    """Kill browsers in the middle of requests and of answers; the page goes on, and holds nothing of them."""
    await _whole(directory / "runs" / "one")
    command = (sys.executable, "-m", "pilotage", "view", str(directory / "runs"), "--port", "0")
    viewer = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    try:
        assert viewer.stdout is not None
        said = await asyncio.wait_for(viewer.stdout.readline(), 60)
        port = int(said.split()[0].rstrip(b"/").rpartition(b":")[2])
        if b"200" not in await _answer(port, "/runs/one"):
            return ["it does not answer"]
        descriptors = f"/proc/{viewer.pid}/fd"
        before = len(os.listdir(descriptors))
        for _ in range(rng.randint(20, 120)):
            browser = socket.create_connection(("127.0.0.1", port), timeout=5)
            asked = _request(rng.choice(("/", "/runs/one", "/runs/one/live", "/runs/one/export")))
            sent = rng.choice((len(asked), rng.randrange(len(asked))))
            browser.sendall(asked[:sent])
            if sent == len(asked) and rng.random() < 0.5:
                browser.recv(rng.randint(1, 400))
            browser.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            browser.close()  # the kernel resets it, as it does those of a process that was killed
        answer = await asyncio.wait_for(_answer(port, "/runs/one"), _SERVICE_ANSWERS_S)
        problems = [] if b"200" in answer else [f"it answered {answer!r}"]
        for _ in range(50):
            if len(os.listdir(descriptors)) <= before:
                break
            await asyncio.sleep(0.1)
        else:
            problems.append(f"it holds {len(os.listdir(descriptors))} descriptors, {before} before")
        return problems
    finally:
        viewer.terminate()
        await viewer.wait()


def _request(address: str) -> bytes:
    return f"GET {address} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode()


async def _answer(port: int, address: str) -> bytes:
    """Return the first line of the answer."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(_request(address))
    line = await reader.readline()
    writer.close()
    return line


KINDS: Mapping[str, Kind] = MappingProxyType(
    {
        "metrics.jsonl damaged": _lines_of("metrics.jsonl"),
        "events.jsonl damaged": _lines_of("events.jsonl"),
        "config.toml damaged": _config,
        "rollout file damaged": _rollout,
        "summaries.jsonl damaged": _summaries,
        "trainer's log-probs damaged": _trainer_logprobs,
        "checkpoint damaged": _checkpoint,
        "disk full": _full_disk,
        "descriptors exhausted": _few_descriptors,
        "half-open connections, service": _service_connections,
        "clock set, run": _clock_of("run"),
        "clock set, service": _clock_of("service"),
        "browsers killed, view": _browsers_that_are_killed,
    }
)


async def strike(kind: str, rng: random.Random) -> list[str]:
    """Do one fault and return what was not as it should be."""
    with tempfile.TemporaryDirectory(prefix="pilotage-fault-") as directory:
        try:
            return await KINDS[kind](Path(directory), rng)
        except PilotageError as error:
            return [f"it ended with {type(error).__name__}: {error}"]
        except Exception as error:  # noqa: BLE001 - the campaign's own boundary: a fault that nobody foresaw
            return [f"it raised {type(error).__name__}: {error}"]
