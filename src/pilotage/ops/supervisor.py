"""What keeps a launched run going: starts its driver again after a crash, and stops it when asked.

    launcher (tmux pane or systemd unit) = supervisor --signals--> driver: `pilotage train`
                                               |  <--output-- rotated into RUN/log/driver.log
                                               +-- alarms, every half minute

Invariant: the supervisor ends after its driver, whatever ends either. A driver whose supervisor is killed
gets SIGTERM from the kernel and stops cleanly; one that does not stop in `STOP_S` is killed and swept.
"""

import logging
import logging.handlers
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from pilotage.errors import ConfigError
from pilotage.loops.run_directory import RunDirectory
from pilotage.ops.watch import AlarmWatch
from pilotage.pid_lock import PidLock, acquire, holder
from pilotage.rollouts.register import default_directory, private_directory, sweep

STOP_S = 150.0
"""A driver has this long to drop its rollouts, save and cancel its job; it needs seconds."""
_WATCH_S = 30.0
_BACKOFF_S = 2.0
_LOG_BYTES, _LOG_FILES = 16 * 1024 * 1024, 8
_USAGE, _INTERRUPTED = 2, 130
"""Exit codes after which another start would end the same way, or is not wanted."""
PROGRAM = "pilotage.cli.supervisor"
"""Module that a launcher starts: `python -m PROGRAM RUN RESTARTS ARGUMENTS...`."""
_DRIVER = "pilotage.cli.driver"
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def host_lock_path() -> Path:
    """Return the file that the one launched run of this user on this host holds."""
    return private_directory(default_directory()) / "launch.lock"


def launched_run(pid: int) -> Path | None:
    """Return the run that the supervisor `pid` was started for, or None where that cannot be said."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return None
    return Path(words[words.index(PROGRAM) + 1]) if PROGRAM in words else None


def refuse_second_launch() -> None:
    """Raise ConfigError where a launched run of this user is alive on this host; it names the owner."""
    pid = holder(host_lock_path())
    if pid is not None:
        run = launched_run(pid)
        raise ConfigError(
            f"{run or 'a run'} is launched on this host already, by process {pid}: two runs would share its"
            f" cores, memory and ports; wait for it, or `pilotage stop {run or 'RUN'}`"
        )


class Supervisor:
    """Runs one run's driver until it is finished, stopped, or has crashed too often."""

    def __init__(self, path: Path, command: Sequence[str], *, restarts: int) -> None:
        """Args:
        command: arguments of `pilotage` that train, without --resume.
        restarts: crashes in a row, without a new checkpoint between them, after which it gives up.
        """
        self._run = RunDirectory(path)
        self._command = list(command)
        self._restarts = restarts
        self._driver: subprocess.Popen[bytes] | None = None
        self._is_stopping = False
        self._log = _rotating_log(path / "log" / "driver.log")

    def run(self) -> int:
        """Return the exit code of the last driver.

        Raises:
            ConfigError: another launcher has this run, or this host.
        """
        locks = self._acquire()
        for number in _SIGNALS:
            signal.signal(number, self._on_signal)
        threading.Thread(target=self._watch, daemon=True).start()
        try:
            return self._keep_going()
        finally:
            for lock in locks:
                lock.release()

    def _acquire(self) -> list[PidLock]:
        launcher = acquire(self._run.launcher_path)
        if launcher is None:
            pid = holder(self._run.launcher_path)
            raise ConfigError(f"{self._run.path} is launched already, by process {pid or 'unknown'}")
        host = acquire(host_lock_path())
        if host is None:
            launcher.release()
            refuse_second_launch()
            raise ConfigError("another launch on this host was faster; try again")
        return [host, launcher]

    def _keep_going(self) -> int:
        crashes = 0
        while True:
            before = self._run.newest_checkpoint()
            code = self._drive()
            if self._is_stopping or code in (0, _USAGE, _INTERRUPTED):
                self._say(f"the driver ended with exit code {code}")
                return code
            swept = sweep()
            crashes = 1 if self._run.newest_checkpoint() != before else crashes + 1
            self._event("driver_crashed", exit_code=code, swept_holdings=swept.holdings)
            if crashes > self._restarts:
                self._event("gave_up", crashes=crashes)
                self._say(f"the driver crashed {crashes} times without a new checkpoint; giving up")
                return code
            self._say(f"the driver crashed with exit code {code}; starting it again")
            time.sleep(_BACKOFF_S)

    def _drive(self) -> int:
        """Run one driver to its end, with everything it prints in the log."""
        resume = ["--resume"] if self._run.events_path.is_file() else []
        with subprocess.Popen(
            [sys.executable, "-m", _DRIVER, str(os.getpid()), *self._command, *resume],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C in the pane reaches it through us
        ) as driver:
            self._driver = driver
            if self._is_stopping:
                driver.terminate()
            assert driver.stdout is not None
            for line in driver.stdout:
                self._say(line.decode(errors="replace").rstrip("\n"))
        self._driver = None
        return driver.returncode

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        """Ask the driver to stop; a second request changes nothing."""
        if self._is_stopping:
            return
        self._is_stopping = True
        driver = self._driver
        if driver is None:
            return
        driver.terminate()
        killer = threading.Timer(STOP_S, self._kill, [driver])
        killer.daemon = True
        killer.start()

    def _kill(self, driver: subprocess.Popen[bytes]) -> None:
        driver.kill()
        driver.wait()
        sweep()

    def _watch(self) -> None:
        watch = AlarmWatch(self._run)
        while True:
            time.sleep(_WATCH_S)
            if not self._run.events_path.is_file():
                continue
            for alarm in watch.look():
                self._say(f"ALARM {alarm.name} at step {alarm.step}: {alarm.evidence}")

    def _event(self, name: str, **facts: str | float | None) -> None:
        # A run without events has nothing worth keeping, and is begun anew.
        if self._run.events_path.is_file():
            self._run.event(name, **facts)

    def _say(self, line: str) -> None:
        self._log.info("%s", line)
        try:
            sys.stdout.write(line + "\n")
            sys.stdout.flush()
        except OSError:  # the pane is gone; the log has it
            pass


def _rotating_log(path: Path) -> logging.Logger:
    """Return a logger of its own that writes lines with their time, and never more than a few files."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handler = logging.handlers.RotatingFileHandler(
        path, maxBytes=_LOG_BYTES, backupCount=_LOG_FILES, encoding="utf-8"
    )
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
    log = logging.Logger("pilotage.driver", logging.INFO)
    log.addHandler(handler)
    return log
