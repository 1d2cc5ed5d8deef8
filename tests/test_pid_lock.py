"""Locks that hold the process id of a living owner."""

import os
import signal
import subprocess
import sys
from pathlib import Path

from pilotage.pid_lock import acquire, holder

HOLD = """
import sys, time
from pathlib import Path
from pilotage.pid_lock import acquire
assert acquire(Path(sys.argv[1])) is not None
print("held", flush=True)
time.sleep(60)
"""


def test_a_lock_names_its_owner_and_is_gone_after_it(tmp_path: Path) -> None:
    lock = acquire(tmp_path / "lock")
    assert lock is not None
    assert holder(tmp_path / "lock") == os.getpid()
    assert acquire(tmp_path / "lock") is None
    lock.release()
    lock.release()
    assert holder(tmp_path / "lock") is None
    assert not (tmp_path / "lock").exists()


def test_the_file_of_a_killed_owner_holds_nobody(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with subprocess.Popen([sys.executable, "-c", HOLD, str(path)], stdout=subprocess.PIPE) as owner:
        assert owner.stdout is not None
        owner.stdout.readline()
        assert holder(path) == owner.pid
        assert acquire(path) is None
        owner.send_signal(signal.SIGKILL)
        owner.wait()
    assert path.read_text() == f"{owner.pid}\n"
    assert holder(path) is None
    lock = acquire(path)
    assert lock is not None
    assert holder(path) == os.getpid()
    lock.release()


def test_whoever_waited_on_a_removed_file_does_not_hold_the_new_one(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    first = acquire(path)
    assert first is not None
    path.unlink()
    second = acquire(path)
    assert second is not None, "the name was free"
    assert holder(path) == os.getpid()
    second.release()
    first.release()
