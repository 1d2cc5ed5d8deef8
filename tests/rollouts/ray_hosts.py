"""Machines of a Ray cluster on one machine: each has a network, processes and a /tmp of its own.

The caller's machine is the head, at `HEAD`; a host shares one directory with it. A host that is switched off
is gone at once, with all its processes, as one whose power fails.
"""

import os
import secrets
import shutil
import subprocess
import sys
from pathlib import Path

_NET = "10.231.7"
HEAD = f"{_NET}.1"
_BRIDGE = "pilotage-br"
_PORT = 6390
ADDRESS = f"{HEAD}:{_PORT}"
_OBJECTS = "--object-store-memory=80000000"
_WITH_CALLER = ("setpriv", "--pdeathsig", "KILL")
_OWN_PROCESSES = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")
_ROOT = Path(__file__).resolve().parents[2]
_HOST = f"""
address=$1 && shift
mount -t tmpfs tmpfs /run && mkdir /run/outside && mount --bind /tmp /run/outside
mount -t tmpfs tmpfs /tmp
for shared in "$@"; do
    case $shared in
        /tmp/*) mkdir -p "$shared" && mount --bind "/run/outside/${{shared#/tmp/}}" "$shared" ;;
    esac
done
ray start --address={ADDRESS} --node-ip-address="$address" --num-cpus=1 {_OBJECTS} --disable-usage-stats
exec sleep infinity
"""


def can_be_made() -> bool:
    """Whether this process may make networks and mounts, and has the programs."""
    if any(shutil.which(program) is None for program in ("ip", "unshare", "setpriv")):
        return False
    in_its_own = ["unshare", "--net", "--mount", "--pid", "--fork", "bash", "-c"]
    trial = f"mount -t tmpfs tmpfs /mnt && ip link add {_BRIDGE} type bridge"
    return subprocess.run([*in_its_own, trial], capture_output=True, check=False).returncode == 0


class RayHosts:
    """The head, and hosts by their last number of four."""

    def __init__(self, shared: Path, sockets: Path) -> None:
        """Start nothing yet.

        Args:
            shared: the directory that all see.
            sockets: for the head's own files; its path is short, as those of sockets are.
        """
        self._shared = shared
        self._sockets = sockets
        self.environment = {
            **os.environ,
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": secrets.token_hex(32),
        }
        self._hosts: dict[int, subprocess.Popen[bytes]] = {}
        self._head: subprocess.Popen[bytes] | None = None

    def start_head(self) -> None:
        """Make the network, and a head that runs no rollouts."""
        _forget("link", "del", _BRIDGE)
        _ip("link", "add", _BRIDGE, "type", "bridge")
        _ip("addr", "add", f"{HEAD}/24", "dev", _BRIDGE)
        _ip("link", "set", _BRIDGE, "up")
        start = f"ray start --head --node-ip-address={HEAD} --port={_PORT} --num-cpus=0 {_OBJECTS}"
        start += f" --include-dashboard=false --disable-usage-stats --temp-dir={self._sockets}"
        command = [*_WITH_CALLER, *_OWN_PROCESSES, "bash", "-c", f"{start} && echo UP && exec sleep infinity"]
        self._head = subprocess.Popen(command, env=self.environment, stdout=subprocess.PIPE)
        assert self._head.stdout is not None
        assert b"UP\n" in iter(self._head.stdout.readline, b"")

    def switch_on(self, number: int) -> None:
        """Let a host join."""
        space, cable = f"pilotage-{number}", f"pilotage-v{number}"
        if number not in self._hosts:
            _forget("link", "del", cable)
            _forget("netns", "del", space)
            _ip("netns", "add", space)
            _ip("link", "add", cable, "type", "veth", "peer", "name", "eth0", "netns", space)
            _ip("link", "set", cable, "master", _BRIDGE, "up")
            _ip("-n", space, "addr", "add", f"{_NET}.{number}/24", "dev", "eth0")
            _ip("-n", space, "link", "set", "eth0", "up")
            _ip("-n", space, "link", "set", "lo", "up")
        # A checkout and an environment may lie in /tmp as well as anywhere else.
        shared = map(str, (self._shared, _ROOT, sys.prefix))
        program = ["bash", "-ec", _HOST, "host", f"{_NET}.{number}", *shared]
        command = [*_WITH_CALLER, "ip", "netns", "exec", space, *_OWN_PROCESSES, *program]
        self._hosts[number] = subprocess.Popen(command, env=self.environment, stdout=subprocess.DEVNULL)

    def switch_off(self, number: int) -> None:
        """Kill everything on a host."""
        self._hosts[number].kill()
        self._hosts[number].wait()

    def processes(self, number: int) -> list[str]:
        """Return the command lines of a host's processes."""
        found: list[str] = []
        for pid in _ip("netns", "pids", f"pilotage-{number}").split():
            try:
                found.append(Path("/proc", pid, "cmdline").read_bytes().replace(b"\0", b" ").decode())
            except OSError:  # it has just ended
                continue
        return found

    def close(self) -> None:
        """Switch everything off and remove the network."""
        for number in self._hosts:
            self.switch_off(number)
            _forget("netns", "del", f"pilotage-{number}")
            # The kernel keeps a network, and its end of a cable, until its sockets have closed.
            _forget("link", "del", f"pilotage-v{number}")
        if self._head is not None:
            self._head.kill()
            self._head.wait()
        _forget("link", "del", _BRIDGE)


def _ip(*arguments: str) -> str:
    return subprocess.run(["ip", *arguments], capture_output=True, text=True, check=True).stdout


def _forget(*arguments: str) -> None:
    """Remove what may be there or not."""
    subprocess.run(["ip", *arguments], capture_output=True, check=False)
