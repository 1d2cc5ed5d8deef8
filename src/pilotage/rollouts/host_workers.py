"""Workers on the hosts of a cluster: a few on each, started there, that call back.

    cluster: which hosts are there --> start_workers on a host --> worker --TCP--> rendezvous
        ^                                                             |
        +-- looked at every few seconds: a host that came, a worker that is lost

Trials wait only where no host has a worker. Invariant: a host that cannot be used costs its own workers and
delays nobody else's.
"""

import asyncio
import contextlib
import logging
import secrets
from collections.abc import AsyncGenerator, Generator, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from pilotage.errors import ConfigError
from pilotage.rollouts.hosted_worker import HostOrder, SharedPath, digest_of
from pilotage.rollouts.register import remove_tree
from pilotage.rollouts.rendezvous import Guest, Rendezvous
from pilotage.rollouts.runner import RunnerSettings
from pilotage.rollouts.trial import TrialSpec
from pilotage.rollouts.workers import Worker

_log = logging.getLogger(__name__)

_LOOK_S = 3.0
"""How often the cluster's hosts are looked at."""
_RETRY_S = 60.0
"""How long a host that could not be used, or a cluster that did not answer, is left alone."""
_START_S = 180.0
"""For a host to check itself and start processes; the first import from a slow disk takes most of it."""
_MEET_S = 60.0
"""For a process that was started to call back."""
_READY_S = 300.0
"""For a worker to import what trials need."""


class Cluster(Protocol):
    """Machines that can be told to do something."""

    @property
    def address(self) -> str:
        """Address of this machine, at which the hosts reach it."""
        ...

    async def hosts(self) -> Mapping[str, str]:
        """Return the hosts that are there now: id to name.

        Raises:
            ConnectionError: nobody can say.
        """
        ...

    async def start_workers(self, host: str, order: HostOrder) -> None:
        """Call the function of this name on a host.

        Raises:
            ConfigError: it failed there.
            ConnectionError: the host is gone.
        """
        ...


class _RemoteProcess:
    """A worker of a host: it ends with its connection.

    Its host sweeps when it starts the next; but a host that was switched off has forgotten what it held, so
    directories of trials, which are shared, are removed from here too.
    """

    def __init__(self, host: str) -> None:
        self._host = host

    async def ended(self, lost: Sequence[TrialSpec]) -> str:
        """See `WorkerProcess`."""
        for spec in lost:
            with contextlib.suppress(OSError):  # a host that was cut off still writes, and removes it itself
                if not spec.keep_directory:
                    await asyncio.to_thread(remove_tree, spec.directory)
        return f"its connection ended: it died, or its host {self._host} did"

    def kill(self) -> None:
        """See `WorkerProcess`."""


@contextlib.asynccontextmanager
async def _within(seconds: float, failure: str) -> AsyncGenerator[None]:
    try:
        async with asyncio.timeout(seconds):
            yield
    except TimeoutError:
        raise TimeoutError(f"{failure} in {seconds:g} s") from None


class HostWorkers:
    """A pool of `settings.workers` processes on each host of a cluster."""

    def __init__(self, *, cluster: Cluster, settings: RunnerSettings, shared: Sequence[Path] = ()) -> None:
        """Start nothing yet.

        Args:
            shared: what trials read: directories, whose names are compared, and files.
        """
        self._cluster = cluster
        self._settings = settings
        self._shared = shared
        self._rendezvous = Rendezvous(cluster.address)
        self._workers: dict[str, list[Worker]] = {}
        self._filling: dict[str, asyncio.Task[None]] = {}
        self._came = asyncio.Event()
        self._watching: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Start workers on all hosts, and wait until they are ready.

        Raises:
            ConfigError: a host lacks something, there is none, or no worker called back.
        """
        try:
            await self._rendezvous.open()
            hosts = await self._cluster.hosts()
            if not hosts:
                raise ConfigError("no host of the cluster has a CPU to run rollouts on; `ray start` one")
            fillings = [asyncio.create_task(self._fill(*host)) for host in hosts.items()]
            done = await asyncio.gather(*fillings, return_exceptions=True)
            self._judge(list(hosts.values()), done)
        except BaseException as error:
            await self.close()
            if isinstance(error, OSError):
                raise ConfigError(f"the cluster cannot be used: {error}") from error
            raise
        self._watching = asyncio.create_task(self._watch())

    async def workers(self) -> Sequence[Worker]:
        """See `WorkerPool`."""
        while not (alive := [worker for host in self._workers for worker in self._alive(host)]):
            if self._came.is_set():
                self._came.clear()
                _log.warning("no host has a rollout worker; rollouts wait until one has")
            await self._came.wait()
        return alive

    async def close(self) -> None:
        """See `WorkerPool`."""
        tasks = [*self._filling.values(), *([self._watching] if self._watching is not None else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        workers = [worker for host in self._workers for worker in self._alive(host)]
        await asyncio.gather(*(worker.close() for worker in workers))
        await self._rendezvous.close()

    def _judge(self, names: Sequence[str], done: Sequence[BaseException | None]) -> None:
        """Raise what is the caller's to mend; warn of hosts that may come back."""
        for name, error in zip(names, done, strict=True):
            if isinstance(error, ConfigError):
                raise ConfigError(f"host {name} cannot run rollouts: {error}") from error
            if error is not None and not isinstance(error, OSError):
                raise error
            if error is not None:
                _log.warning("host %s is not used: %s", name, error)
        if not self._workers:
            faults = "; ".join(f"{name}: {error}" for name, error in zip(names, done, strict=True))
            raise ConfigError(f"no host can run rollouts: {faults}")

    def _alive(self, host: str) -> list[Worker]:
        return [worker for worker in self._workers.get(host, []) if not worker.is_gone]

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(_LOOK_S)
            try:
                hosts = await self._cluster.hosts()
            except (ConfigError, OSError) as error:
                _log.warning("the cluster does not say which hosts it has, workers go on: %s", error)
                await asyncio.sleep(_RETRY_S)
                continue
            for host, name in hosts.items():
                if host not in self._filling and len(self._alive(host)) < self._settings.workers:
                    task = self._filling[host] = asyncio.create_task(self._refill(host, name))
                    task.add_done_callback(lambda _, host=host: self._filling.pop(host))

    async def _refill(self, host: str, name: str) -> None:
        try:
            await self._fill(host, name)
            _log.info("host %s runs rollouts", name)
        except (ConfigError, OSError) as error:
            _log.warning("host %s is not used: %s", name, error)
            await asyncio.sleep(_RETRY_S)

    async def _fill(self, host: str, name: str) -> None:
        """Start the workers that a host lacks, and wait until they are ready.

        Raises:
            ConfigError: the host lacks something.
            OSError: it is gone, or a worker did not come.
        """
        missing = self._settings.workers - len(self._alive(host))
        guests = [self._rendezvous.invite() for _ in range(missing)]
        try:
            with self._proof_of_sharing() as proof:
                order = await asyncio.to_thread(self._order, proof, guests)
                async with _within(_START_S, "it started no workers"):
                    await self._cluster.start_workers(host, order)
            welcomes = (self._welcome(host, name, guest) for guest in guests)
            for fault in await asyncio.gather(*welcomes, return_exceptions=True):
                if fault is not None:
                    raise fault
        finally:
            for guest in guests:
                self._rendezvous.withdraw(guest)

    async def _welcome(self, host: str, name: str, guest: Guest) -> None:
        async with _within(_MEET_S, f"its worker did not get through to {self._rendezvous.address}"):
            frames = await guest.frames
        worker = Worker(_RemoteProcess(name), frames)
        try:
            async with _within(_READY_S, "its worker was not ready"):
                await asyncio.shield(worker.ready)
        except BaseException:
            frames.close()
            raise
        if worker.is_gone:
            raise ConnectionError("its worker ended while it started; what it said is in the host's own log")
        self._workers[host] = [*self._alive(host), worker]
        self._came.set()

    @contextlib.contextmanager
    def _proof_of_sharing(self) -> Generator[Path]:
        """Yield a new file beside the trials, which is on a host only where it is the same directory."""
        trials = self._settings.trials_directory.absolute()
        trials.mkdir(parents=True, exist_ok=True)
        proof = trials / f".shared-{secrets.token_hex(8)}"
        proof.write_text(secrets.token_hex(32))
        try:
            yield proof
        finally:
            proof.unlink(missing_ok=True)

    def _order(self, proof: Path, guests: Sequence[Guest]) -> HostOrder:
        def seen(path: Path) -> SharedPath:
            return SharedPath(path=path.absolute(), digest=digest_of(path))

        return HostOrder(
            invitations=tuple(guest.invitation for guest in guests),
            settings=self._settings,
            proof=seen(proof),
            shared=tuple(map(seen, self._shared)),
            directory=Path.cwd(),
        )
