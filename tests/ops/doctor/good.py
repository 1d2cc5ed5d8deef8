"""A machine on which all is well, to break one fact of."""

from pathlib import Path

from pilotage.ops.doctor.facts import DiskFact, MachineFacts, PackageFact
from pilotage.ops.doctor.leftovers import Leftovers
from pilotage.ops.doctor.need import MachineNeed

NEED = MachineNeed(concurrency=8, extras=("agents", "local"))


def package(name: str, *, installed: str | None, extra: str = "", is_tested: bool = True) -> PackageFact:
    return PackageFact(
        name=name,
        wanted=">=1,<2",
        installed=installed,
        extra=extra,
        is_tested=is_tested and installed is not None,
    )


GOOD = MachineFacts(
    python="3.12.1",
    python_wanted=">=3.12,<3.14",
    packages=(package("numpy", installed="1.5"), package("torch", installed="1.1", extra="local")),
    open_files_limit=4096,
    open_files_most=None,
    inotify_in_use=3,
    inotify_instances=128,
    inotify_watches=65536,
    user_namespaces=15000,
    may_unshare=True,
    sandbox_complaint=None,
    terminals_in_use=12,
    terminals_limit=4096,
    disks=(DiskFact(path=Path("runs"), free_bytes=100 * 2**30),),
    leftovers=Leftovers(),
    drivers=(),
    left_networks=(),
    newest_file_ahead_s=0.0,
)
