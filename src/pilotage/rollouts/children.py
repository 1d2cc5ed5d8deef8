"""Start a module of ours as a child process that is connected by a socket pair."""

import asyncio
import os
import socket
import sys

_LINE_BYTES = 1 << 20
"""Longest line that it may send."""


async def start_child(
    module: str, *words: str, is_quiet: bool = False
) -> tuple[asyncio.subprocess.Process, asyncio.StreamReader, asyncio.StreamWriter]:
    """Run `python -m MODULE SOCKET PID words...`, told its end of the pair and this process.

    It is in a session of its own, so that an interrupt at the terminal reaches it through us, in order.

    Args:
        is_quiet: what it prints goes nowhere.
    """
    ours, theirs = socket.socketpair()
    output = asyncio.subprocess.DEVNULL if is_quiet else None
    with theirs:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-m", module, str(theirs.fileno()), str(os.getpid()), *words),
            pass_fds=(theirs.fileno(),),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            start_new_session=True,
        )
    reader, writer = await asyncio.open_connection(sock=ours, limit=_LINE_BYTES)
    return process, reader, writer
