"""Workers on the hosts of a cluster: where trials go, and what the loss of a host costs."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncGenerator, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from tests.rollouts.rig import write_task
from tests.rollouts.test_rendezvous import SPEC

from pilotage.errors import ConfigError
from pilotage.processes import identify, wait_until_gone
from pilotage.rollouts.frames import Cancel, Done, Frames, Ready, Run
from pilotage.rollouts.host_workers import HostWorkers
from pilotage.rollouts.hosted_worker import HostOrder, SharedPath, digest_of, follow, written
from pilotage.rollouts.limits import PoolSlots
from pilotage.rollouts.ray_cluster import open_ray
from pilotage.rollouts.register import Holding, Register
from pilotage.rollouts.rendezvous import Invitation, meet
from pilotage.rollouts.report import TrialReport
from pilotage.rollouts.runner import RunnerSettings
from pilotage.rollouts.trial import TrialSpec
from pilotage.rollouts.workers import TrialWorkers


class Host:
    """One whose workers are tasks of this loop: a trial there is done when it is told to be."""

    def __init__(self, fault: Exception | None = None) -> None:
        self.fault = fault
        self.trials: list[list[str]] = []
        """Names of those that run, for each worker."""
        self.may_end = asyncio.Event()
        self._connections: list[Frames] = []
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, invitation: Invitation) -> None:
        task = asyncio.create_task(self._work(invitation))
        self._tasks.add(task)

    async def _work(self, invitation: Invitation) -> None:
        frames = await meet(invitation)
        self._connections.append(frames)
        running: list[str] = []
        self.trials.append(running)
        await frames.send(Ready())
        async for frame in frames:
            if isinstance(frame, Run):
                running.append(frame.spec.name)
                self._tasks.add(asyncio.create_task(self._run(frames, frame, running)))
            if isinstance(frame, Cancel):
                await frames.send(Done(number=frame.number, report=TrialReport(is_cancelled=True)))
        frames.close()

    async def _run(self, frames: Frames, order: Run, running: list[str]) -> None:
        await self.may_end.wait()
        running.remove(order.spec.name)
        await frames.send(Done(number=order.number, report=TrialReport(timings_s={"total": 1.0})))

    def switch_off(self) -> None:
        for frames in self._connections:
            frames.close()
        self.trials.clear()


class FakeCluster:
    """Hosts by name."""

    address = "127.0.0.1"

    def __init__(self, **hosts: Host) -> None:
        self.members = hosts

    async def hosts(self) -> Mapping[str, str]:
        return {name: name for name in self.members}

    async def start_workers(self, host: str, order: HostOrder) -> None:
        if (fault := self.members[host].fault) is not None:
            raise fault
        for invitation in order.invitations:
            self.members[host].start(invitation)


@contextlib.asynccontextmanager
async def opened(cluster: FakeCluster, root: Path, workers: int = 1) -> AsyncGenerator[TrialWorkers]:
    settings = RunnerSettings(trials_directory=root / "trials", workers=workers)
    trials = TrialWorkers(HostWorkers(cluster=cluster, settings=settings))
    await trials.start()
    try:
        yield trials
    finally:
        await trials.close()


def started(
    trials: TrialWorkers, root: Path, count: int, prefix: str = "t"
) -> list[asyncio.Task[TrialReport]]:
    specs = [replace(SPEC, name=f"{prefix}{n}", trials_directory=root / "trials") for n in range(count)]
    return [asyncio.create_task(trials.run(spec, PoolSlots({}, lambda _: None))) for spec in specs]


async def running(host: Host, count: int) -> None:
    async with asyncio.timeout(20):
        while sum(map(len, host.trials)) < count:  # noqa: ASYNC110  # it tells nobody
            await asyncio.sleep(0.01)


async def test_trials_go_to_the_least_loaded_worker_of_all_hosts(tmp_path: Path) -> None:
    one, two = Host(), Host()
    async with opened(FakeCluster(one=one, two=two), tmp_path, workers=2) as trials:
        tasks = started(trials, tmp_path, 8)
        await asyncio.gather(running(one, 4), running(two, 4))
        assert [len(found) for host in (one, two) for found in host.trials] == [2, 2, 2, 2]
        one.may_end.set()
        two.may_end.set()
        reports = await asyncio.gather(*tasks)
    assert reports == [TrialReport(timings_s={"total": 1.0})] * 8
    assert list((tmp_path / "trials").iterdir()) == []


async def test_a_lost_host_costs_its_trials_a_fault_and_is_used_again_when_it_is_back(tmp_path: Path) -> None:
    one, two = Host(), Host()
    cluster = FakeCluster(one=one, two=two)
    async with opened(cluster, tmp_path) as trials:
        tasks = started(trials, tmp_path, 4)
        await asyncio.gather(running(one, 2), running(two, 2))
        for name in [name for found in (*one.trials, *two.trials) for name in found]:
            (tmp_path / "trials" / name).mkdir()
        lost = list(two.trials[0])
        del cluster.members["two"]
        two.switch_off()
        one.may_end.set()
        reports = dict(zip(("t0", "t1", "t2", "t3"), await asyncio.gather(*tasks), strict=True))

        faults = {name: report.fault for name, report in reports.items() if report.fault is not None}
        assert faults.keys() == set(lost)
        assert {fault.kind for fault in faults.values()} == {"WorkerDied"}
        assert all("its host two did" in fault.message for fault in faults.values())
        left = {path.name for path in (tmp_path / "trials").iterdir()}
        assert left.isdisjoint(lost)  # a host that was switched off cannot clear them

        later = await asyncio.gather(*started(trials, tmp_path, 3, "later"))
        assert [report.fault for report in later] == [None] * 3
        cluster.members["two"] = back = Host()
        one.may_end.clear()
        async with asyncio.timeout(20):
            while not back.trials:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
            await asyncio.sleep(0.1)  # it said so, and the driver has read it
        again = started(trials, tmp_path, 2, "again")
        await asyncio.gather(running(one, 1), running(back, 1))
        one.may_end.set()
        back.may_end.set()
        await asyncio.gather(*again)


async def test_without_a_host_trials_wait_for_one(tmp_path: Path) -> None:
    one = Host()
    cluster = FakeCluster(one=one)
    async with opened(cluster, tmp_path) as trials:
        del cluster.members["one"]
        one.switch_off()
        await asyncio.sleep(0.1)
        [waiting, given_up] = started(trials, tmp_path, 2)
        await asyncio.sleep(0.1)
        given_up.cancel()
        assert not waiting.done()
        cluster.members["two"] = two = Host()
        two.may_end.set()
        assert (await asyncio.wait_for(waiting, 20)).fault is None
        with pytest.raises(asyncio.CancelledError):
            await given_up


async def test_a_host_that_is_lost_while_it_starts_does_not_stop_the_others(tmp_path: Path) -> None:
    one, two = Host(), Host(fault=ConnectionError("node died"))
    one.may_end.set()
    async with opened(FakeCluster(one=one, two=two), tmp_path) as trials:
        [report] = await asyncio.gather(*started(trials, tmp_path, 1))
    assert report.fault is None


@pytest.mark.parametrize(
    ("hosts", "message"),
    [
        ({}, "no host of the cluster has a CPU"),
        ({"one": None, "two": ConfigError("no bwrap")}, "host two cannot run rollouts: no bwrap"),
        ({"one": ConnectionError("died")}, "no host can run rollouts: one: died"),
    ],
)
async def test_a_run_does_not_start_where_hosts_cannot_run_it(
    tmp_path: Path, hosts: dict[str, Exception | None], message: str
) -> None:
    cluster = FakeCluster(**{name: Host(fault) for name, fault in hosts.items()})
    with pytest.raises(ConfigError, match=message):
        async with opened(cluster, tmp_path):
            pass


async def test_a_worker_that_sends_nonsense_is_lost_and_nothing_waits_for_it(tmp_path: Path) -> None:
    one = Host()
    async with opened(FakeCluster(one=one), tmp_path) as trials:
        [task] = started(trials, tmp_path, 1)
        await running(one, 1)
        one._connections[0]._writer.write((3).to_bytes(8) + b"[1]")
        report = await asyncio.wait_for(task, 10)
    assert report.fault is not None
    assert report.fault.kind == "WorkerDied"


# --- what a host looks at ---


def order_for(root: Path, **changes: object) -> HostOrder:
    (root / "trials").mkdir(exist_ok=True)
    (root / "tasks" / "a").mkdir(parents=True, exist_ok=True)
    settings = RunnerSettings(trials_directory=root / "trials")
    tasks = SharedPath(path=root / "tasks", digest=digest_of(root / "tasks"))
    (proof := root / "trials" / "proof").write_text("of sharing")
    order = HostOrder(
        invitations=(),
        settings=settings,
        proof=SharedPath(path=proof, digest=digest_of(proof)),
        shared=(tasks,),
        directory=root,
    )
    return replace(order, **changes)  # pyright: ignore[reportArgumentType]


def test_a_host_that_has_all_is_silent(tmp_path: Path) -> None:
    follow(written(order_for(tmp_path)))


def test_a_host_says_what_it_has_not(tmp_path: Path) -> None:
    order = order_for(tmp_path)
    (tmp_path / "tasks" / "b").mkdir()
    elsewhere = SharedPath(path=tmp_path / "trials" / "other", digest=digest_of(tmp_path))
    faults = {
        "trials is another directory there; set rollouts.trials_directory": order_for(
            tmp_path, proof=elsewhere
        ),
        "tasks is not there as on the driver's machine; put it on a file system": order,
        "it has Pilotage .*, the driver 0.0.7": order_for(tmp_path, version="0.0.7"),
        "it has no .*/gone; start the run from": order_for(tmp_path, directory=tmp_path / "gone"),
        "no trial can be written to .*/nowhere: No such file": order_for(
            tmp_path, settings=RunnerSettings(trials_directory=tmp_path / "nowhere")
        ),
    }
    for message, faulty in faults.items():
        with pytest.raises(ConfigError, match=message):
            follow(written(faulty))


async def test_a_machine_in_no_cluster_is_told_so() -> None:
    with pytest.raises(ConfigError, match=r'rollouts.ray_address = "127.0.0.1:1": .*`ray start`'):
        async with open_ray("127.0.0.1:1"):
            pass


# --- a worker process ---

DRIVER = """
import asyncio, sys
from pathlib import Path
from tests.rollouts.test_host_workers import OwnMachine, PoolSlots, opened, spec_of
async def main(root):
    async with opened(OwnMachine(), root) as trials:
        await trials.run(spec_of(root), PoolSlots({}, lambda _: None))
asyncio.run(main(Path(sys.argv[1])))
"""


class OwnMachine(FakeCluster):
    """This machine is the host, and its workers are processes."""

    async def hosts(self) -> Mapping[str, str]:
        return {"own": "own"}

    async def start_workers(self, host: str, order: HostOrder) -> None:
        await asyncio.to_thread(follow, written(order))


def spec_of(root: Path) -> TrialSpec:
    return replace(
        SPEC,
        name=f"toy-{root.name}",
        task_path=root / "tasks" / "toy",
        trials_directory=root / "trials",
        agent=replace(SPEC.agent, name="nop", options={}, skills=()),
        environment=replace(SPEC.environment, options={}),
    )


def holdings_of(root: Path) -> list[Holding]:
    return [holding for holding in Register().holdings() if str(root) in holding.tree]


@pytest.mark.agents
@pytest.mark.slow
def test_workers_of_a_driver_that_was_killed_end_and_leave_nothing(tmp_path: Path) -> None:
    write_task(tmp_path / "tasks", test_sh="#!/bin/bash\nsleep 600\n")
    command = [sys.executable, "-c", DRIVER, str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(command, env=environment) as driver:
        while len(found := holdings_of(tmp_path)) < 1 or not list(tmp_path.glob("trials/*/*")):
            assert driver.poll() is None
            time.sleep(0.05)
        worker = found[0].owner
        assert identify(driver.pid) != worker
        driver.send_signal(signal.SIGKILL)
    assert wait_until_gone([worker], timeout_s=20) == []
    assert holdings_of(tmp_path) == []
    assert list((tmp_path / "trials").iterdir()) == []
