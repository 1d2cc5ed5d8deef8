"""`python -m tests.chaos.forks`: starts `pilotage` commands as forks of a process with everything imported.

A run that is killed often spends most of its time importing torch. Here each line of standard input, a JSON
object of a log, variables and words, is answered with the process id of a fork that runs that command
as a process started from a shell would: its own session, its output in the log.
"""

import gc
import importlib
import json
import os
import signal
import sys
import tempfile
from pathlib import Path

_MODULES = (
    "pilotage.cli.progress",
    "pilotage.engine",
    "pilotage.loops",
    "pilotage.ops.graph",
    "pilotage.recipes.stack",
    "pilotage.trackers.prometheus",
    "harbor.llms.litellm_config",
    "harbor.trial.trial",
    "torch._dynamo",
    "transformers.core_model_loading",
    "transformers.integrations.finegrained_fp8",
    "transformers.models.qwen3.modeling_qwen3",
    "tests.chaos.agents",
)


def _become(log: str, environment: dict[str, str], words: list[str]) -> None:
    """Be the command."""
    os.setsid()
    os.environ.update(environment)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    from pilotage.cli import main

    code = 1
    try:
        code = main(words)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def serve() -> None:
    """Import, then fork for every line until standard input ends."""
    from pilotage.rollouts.third_party import prepare

    prepare()
    for module in _MODULES:
        importlib.import_module(module)
    from pilotage.ops.graph import write_reward_graph

    with tempfile.TemporaryDirectory() as directory:  # the first graph loads fonts
        write_reward_graph(
            Path(directory) / "graph.svg", {"run": [{"step": 0, "eval/reward_mean": 1.0}]}, window=5
        )
    gc.freeze()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel takes away what has ended
    for line in sys.stdin:
        order = json.loads(line)
        pid = os.fork()
        if pid == 0:
            _become(**order)
        sys.stdout.write(f"{pid}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    serve()
