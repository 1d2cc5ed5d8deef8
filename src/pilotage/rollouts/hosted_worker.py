"""Workers on a host that is not the driver's: what is checked there, and the program of one of them.

`start_workers` is called on the host, by whatever cluster it belongs to, and returns when the workers run by
themselves: a worker is bound to its connection to the driver and to nothing else. When that ends it cancels
its trials, clears what they held and exits.
"""

import contextlib
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from pydantic import TypeAdapter

import pilotage
from pilotage.errors import ConfigError
from pilotage.rollouts.register import sweep
from pilotage.rollouts.rendezvous import Invitation, meet
from pilotage.rollouts.runner import RunnerSettings, check_settings
from pilotage.rollouts.worker import run_worker

_NOTHING = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedPath:
    """Something that must be the same on the driver's machine and on a host."""

    path: Path
    """Absolute."""
    digest: str
    """See `digest_of`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostOrder:
    """What a host is asked to start, and what it must have to run trials as the driver's machine would."""

    invitations: tuple[Invitation, ...]
    """One for each worker."""
    settings: RunnerSettings
    proof: SharedPath
    """A file that the driver has just made where trials are made."""
    shared: tuple[SharedPath, ...]
    """What trials read."""
    directory: Path
    """Working directory of the driver, which relative paths and classes of the user are found from."""
    version: str = pilotage.__version__


_ORDERS = TypeAdapter(HostOrder)


def digest_of(path: Path) -> str:
    """Return a digest of the names in a directory, or of a file's bytes; empty where there is neither."""
    try:
        found = b"\0".join(sorted(os.listdir(os.fsencode(path)))) if path.is_dir() else path.read_bytes()
    except OSError:
        return _NOTHING
    return hashlib.sha256(found).hexdigest()


def start_workers(order: HostOrder) -> None:
    """Check this host, clear what dead workers left on it, and start workers.

    Raises:
        ConfigError: the host has not what it needs.
    """
    _check(order)
    sweep()
    # What lets this process into its cluster is nothing that a trial should find.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    for invitation in order.invitations:
        # Its output goes where the caller's goes. It leaves this process, and its session, by itself.
        subprocess.run(
            [sys.executable, "-m", "pilotage.rollouts.hosted_worker"],
            input=json.dumps(asdict(invitation)).encode(),
            cwd=order.directory,
            env={**environment, "OMP_NUM_THREADS": "1"},
            check=True,
        )


def written(order: HostOrder) -> str:
    """Return an order as text."""
    return json.dumps(_ORDERS.dump_python(order, mode="json"))


def follow(text: str) -> None:
    """Do what an order that was `written` says, see `start_workers`."""
    start_workers(_ORDERS.validate_python(json.loads(text)))


def _check(order: HostOrder) -> None:
    if pilotage.__version__ != order.version:
        raise ConfigError(f"it has Pilotage {pilotage.__version__}, the driver {order.version}")
    if digest_of(order.proof.path) != order.proof.digest:
        raise ConfigError(
            f"{order.proof.path.parent} is another directory there; set rollouts.trials_directory, or the"
            " directory of runs, to one on a file system that all hosts share"
        )
    for shared in order.shared:
        if digest_of(shared.path) != shared.digest:
            raise ConfigError(
                f"{shared.path} is not there as on the driver's machine; put it on a file system that all"
                " hosts share, under the same path"
            )
    if not order.directory.is_dir():
        raise ConfigError(f"it has no {order.directory}; start the run from a directory that all hosts share")
    trials = order.directory / order.settings.trials_directory
    try:
        with tempfile.TemporaryFile(dir=trials):
            pass
    except OSError as error:
        raise ConfigError(f"no trial can be written to {trials}: {error.strerror}") from None
    with contextlib.chdir(order.directory):
        check_settings(order.settings)


def main() -> None:
    """Read an invitation from standard input, leave the process that started this one, and follow it."""
    invitation = Invitation(**json.load(sys.stdin))
    if os.fork():
        os._exit(0)
    os.setsid()
    run_worker(partial(meet, invitation))


if __name__ == "__main__":
    main()
