"""The command tree: arguments, and which function runs. No work happens here."""

import argparse
import asyncio
import errno
import importlib
import logging
import os
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path

from pilotage import __version__
from pilotage.errors import PilotageError

type Command = Callable[[argparse.Namespace], Coroutine[object, object, int]]

_EXTRAS = {
    "harbor": "agents",
    "openhands": "agents",
    "litellm": "agents",
    "datasets": "data",
    "unidiff": "data",
    "pyarrow": "data",
    "libcst": "factory",
    "pytest": "factory",
}
"""Module that may be missing -> extra that brings it; any other is of `local`."""
_EXHAUSTED = {
    errno.ENOSPC: "free space on its disk",
    errno.EDQUOT: "free space, or ask for a larger quota",
    errno.EFBIG: "raise the limit of a file's size (ulimit -f)",
    errno.EMFILE: "raise the limit of open files (ulimit -n)",
    errno.ENFILE: "close files of other programs, or raise fs.file-max",
}
"""What a person does where the machine has run out of something; a run is then resumed."""
_DEFAULT_RECIPE = Path("recipes/demo.toml")


def run(argv: list[str]) -> int:
    """Parse, run, and turn errors into one line and an exit code."""
    arguments = _parse(argv)
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    for handler in logging.root.handlers:
        handler.setLevel(logging.WARNING)  # Harbor's loggers set levels of their own
    module, function = arguments.command
    command: Command = getattr(importlib.import_module(f"pilotage.cli.{module}"), function)
    try:
        return asyncio.run(command(arguments))
    except KeyboardInterrupt:
        return _fail("interrupted", 130)
    except PilotageError as error:
        return _fail(str(error), error.exit_code)
    except BrokenPipeError:
        # The reader of our output, `head` for one, has enough; what is still buffered must not raise again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        return _fail_exhausted(error)
    except BaseExceptionGroup as group:
        return _fail_group(group)
    except ModuleNotFoundError as error:
        extra = _EXTRAS.get((error.name or "").partition(".")[0], "local")
        return _fail(f"{error}; install it with `pip install 'pilotage[{extra}]'` or `make install`", 2)


def _parse(argv: list[str]) -> argparse.Namespace:
    """Parse, with overrides anywhere: argparse hands back as unknown those that follow an option."""
    parser = _parser()
    arguments, rest = parser.parse_known_args(argv)
    if rest and ("overrides" not in arguments or any(word.startswith("-") for word in rest)):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if rest:
        arguments.overrides = [*arguments.overrides, *rest]
    return arguments


def _fail(message: str, code: int) -> int:
    sys.stderr.write(f"pilotage: {message}\n")
    return code


def _fail_group(group: BaseExceptionGroup[BaseException]) -> int:
    """Report the first deliberate error of tasks that failed together; anything else is our bug."""
    ours, others = group.split((PilotageError, OSError))
    if ours is None or others is not None:
        raise group
    first: BaseException = ours.subgroup(PilotageError) or ours
    while isinstance(first, BaseExceptionGroup):
        first = first.exceptions[0]
    if isinstance(first, OSError):
        return _fail_exhausted(first)
    assert isinstance(first, PilotageError)
    return _fail(str(first), first.exit_code)


def _fail_exhausted(error: OSError) -> int:
    """Report that the machine has run out of something; any other error of the system is our bug."""
    advice = _EXHAUSTED.get(error.errno or 0)
    if advice is None:
        raise error
    where = f" ({error.filename})" if error.filename else ""
    return _fail(f"{error.strerror}{where}: {advice}, then give the command again", 1)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="pilotage", description="RL post-training for coding agents.")
    parser.add_argument("--version", action="version", version=f"pilotage {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    _add_training(commands)
    _add_operations(commands)
    _add_reading(commands)
    _add_service(commands)
    _add_service_clients(commands)
    _add_data(commands)
    return parser


type _Commands = "argparse._SubParsersAction[argparse.ArgumentParser]"


def _add_data(commands: _Commands) -> None:
    data = commands.add_parser("data", help="make tasks").add_subparsers(metavar="KIND", required=True)
    demo = data.add_parser("demo", help="localization tasks from installed packages")
    demo.add_argument("--out", type=Path, required=True, help="new directory: train/ and held_out/ go there")
    demo.add_argument("--train", type=int, default=160, metavar="N", help="training tasks (%(default)s)")
    demo.add_argument("--held-out", type=int, default=32, metavar="N", help="held-out tasks (%(default)s)")
    demo.add_argument("--seed", type=int, default=0)
    demo.set_defaults(command=("data", "demo"))
    check = data.add_parser("check", help="run each task's oracle, and look for what gives it away")
    check.add_argument("tasks", type=Path, nargs="+", metavar="TASKS", help="directories of tasks")
    check.add_argument("--environment", default="host", metavar="NAME", help="as in a recipe (%(default)s)")
    check.add_argument("--concurrency", type=int, default=4, metavar="N", help="tasks at once (%(default)s)")
    check.set_defaults(command=("data", "check"))
    _add_swe_smith(data)
    _add_make_bugs(data)


def _add_make_bugs(data: _Commands) -> None:
    bugs = data.add_parser("make-bugs", help="localization tasks from source archives, proven by their tests")
    bugs.add_argument("packages", nargs="+", metavar="PACKAGE==VERSION", help="its own tests are run here")
    bugs.add_argument("--out", type=Path, required=True, metavar="DIR", help="new, or of a run to go on with")
    bugs.add_argument("--tasks", type=int, default=300, metavar="N", help="over all packages (%(default)s)")
    bugs.add_argument("--seed", type=int, default=0)
    bugs.add_argument(
        "--bare-issue",
        action="store_true",
        help="tell the issue alone, not how to hand in; for the tiny policy",
    )
    bugs.add_argument("--workers", type=int, metavar="N", help="processes that run tests; default: the cores")
    bugs.set_defaults(command=("data", "make_bugs"))
    repairs = data.add_parser("make-repairs", help="repair tasks from bugs that make-bugs has proven")
    repairs.add_argument("bugs", type=Path, metavar="DIR", help="what make-bugs wrote")
    repairs.add_argument("--out", type=Path, required=True, metavar="DIR")
    repairs.set_defaults(command=("data", "make_repairs"))


def _add_swe_smith(data: _Commands) -> None:
    swe_smith = data.add_parser("swe-smith", help="localization tasks from SWE-smith rows")
    swe_smith.add_argument(
        "--out", type=Path, required=True, metavar="DIR", help="summary.json, train/, held_out/"
    )
    swe_smith.add_argument(
        "--export-swe-smith-to", type=Path, metavar="DIR", help="put train/ and held_out/ there instead"
    )
    rows = swe_smith.add_mutually_exclusive_group(required=True)
    rows.add_argument("--parquet", type=Path, nargs="+", default=[], metavar="FILE", help="rows on this disk")
    rows.add_argument("--revision", metavar="SHA", help="full commit of the data set on the hub")
    swe_smith.add_argument("--limit", type=int, metavar="N", help="read only the first rows")
    trees = swe_smith.add_mutually_exclusive_group()
    trees.add_argument(
        "--clone-from",
        metavar="URL",
        help="what the mirrors' names follow, to clone trees; default: source archives of the package index",
    )
    trees.add_argument(
        "--images-from", metavar="PREFIX", help="what the images' names follow, to copy trees out of images"
    )
    swe_smith.add_argument(
        "--held-out", type=float, default=0.1, metavar="SHARE", help="of the repositories (%(default)s)"
    )
    swe_smith.add_argument(
        "--empty",
        choices=("zero", "match"),
        default="zero",
        help="worth of a level without gold (%(default)s)",
    )
    swe_smith.add_argument("--seed", type=int, default=0, help="of the split")
    swe_smith.set_defaults(command=("data", "swe_smith"))


def _recipe_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipe", type=Path, metavar="RECIPE.toml")
    parser.add_argument("overrides", nargs="*", metavar="a.b=value", help="override a key of the recipe")


def _run_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--run-name", metavar="NAME", help="directory under runs/; default: the recipe's name"
    )
    parser.add_argument("--runs-dir", type=Path, default=Path("runs"), metavar="DIR")
    parser.add_argument(
        "--launch-environment",
        action="store_true",
        help="take the variables and override names of the Arctic launch blocks (docs/reference.md)",
    )


def _supervisor_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--systemd", action="store_true", help="as a unit of your systemd, instead of in tmux"
    )
    parser.add_argument(
        "--restarts",
        type=int,
        default=3,
        metavar="N",
        help="crashes in a row, without a checkpoint between them, to start again after (%(default)s)",
    )


def _add_operations(commands: _Commands) -> None:
    launch = commands.add_parser("launch", help="train in the background; one launched run a host")
    _recipe_arguments(launch)
    _run_arguments(launch)
    _supervisor_arguments(launch)
    launch.set_defaults(command=("runs", "launch"))

    resume = commands.add_parser("resume", help="go on with a run in the background")
    resume.add_argument("run", type=Path, metavar="RUN")
    _supervisor_arguments(resume)
    resume.set_defaults(command=("runs", "resume"))

    status = commands.add_parser("status", help="say where a run, or every run, stands")
    status.add_argument("run", type=Path, nargs="?", metavar="RUN")
    status.add_argument("--runs-dir", type=Path, default=Path("runs"), metavar="DIR")
    status.add_argument("--json", action="store_true", help="print JSON")
    status.set_defaults(command=("runs", "status"))

    stop = commands.add_parser("stop", help="stop a run: drop its rollouts, save, cancel its job, clean up")
    stop.add_argument("run", type=Path, metavar="RUN")
    stop.add_argument(
        "--timeout", type=float, default=180.0, metavar="SECONDS", help="of waiting for it (%(default)s)"
    )
    stop.set_defaults(command=("runs", "stop"))

    attach = commands.add_parser("attach", help="show a launched run's terminal; Ctrl-B D leaves it running")
    attach.add_argument("run", type=Path, metavar="RUN")
    attach.set_defaults(command=("runs", "attach"))


def _add_training(commands: _Commands) -> None:
    train = commands.add_parser("train", help="train a policy by a recipe")
    _recipe_arguments(train)
    _run_arguments(train)
    train.add_argument("--resume", action="store_true", help="go on from the newest checkpoint")
    train.set_defaults(command=("train", "train"))

    evaluate = commands.add_parser("eval", help="evaluate a policy on a recipe's held-out tasks")
    _recipe_arguments(evaluate)
    evaluate.add_argument(
        "--policy", type=Path, metavar="DIR", help="checkpoint; default: the recipe's model"
    )
    evaluate.set_defaults(command=("train", "evaluate"))

    rollout = commands.add_parser("rollout", help="run one trial and print what happened")
    rollout.add_argument("task", type=Path, metavar="TASK_DIR")
    rollout.add_argument("overrides", nargs="*", metavar="a.b=value", help="override a key of the recipe")
    rollout.add_argument("--recipe", type=Path, default=_DEFAULT_RECIPE, metavar="RECIPE.toml")
    rollout.add_argument("--policy", type=Path, metavar="DIR", help="checkpoint; default: the recipe's model")
    rollout.set_defaults(command=("train", "rollout"))

    warm_start = commands.add_parser("warmstart", help="build a policy for the demo to start from")
    _recipe_arguments(warm_start)
    warm_start.add_argument("--out", type=Path, required=True, metavar="DIR")
    warm_start.add_argument("--model", type=Path, metavar="DIR", help="imitates; default: a new tiny one")
    warm_start.set_defaults(command=("train", "warm_start"))


def _add_reading(commands: _Commands) -> None:
    show = commands.add_parser("show", help="list a run's steps, or print one rollout's tree with masks")
    show.add_argument("run", type=Path, metavar="RUN")
    show.add_argument("rollout", nargs="?", metavar="ROLLOUT")
    show.set_defaults(command=("reading", "show"))

    view = commands.add_parser("view", help="show runs on a local web page, or write one as an HTML file")
    view.add_argument(
        "runs", type=Path, nargs="?", default=Path("runs"), metavar="RUNS_DIR", help="or one run"
    )
    view.add_argument(
        "--host", default="127.0.0.1", metavar="H", help="elsewhere a key is needed (%(default)s)"
    )
    view.add_argument("--port", type=int, default=7500, metavar="P", help="%(default)s; 0 takes a free one")
    view.add_argument("--export", type=Path, metavar="FILE.html", help="write one run there instead")
    view.add_argument("--rollout", metavar="ID", help="with --export: only this rollout, with its tokens")
    view.set_defaults(command=("reading", "view"))

    report = commands.add_parser("report", help="print a run in numbers, or several side by side; draw them")
    report.add_argument("run", type=Path, nargs="+", metavar="RUN")
    report.add_argument(
        "--window", type=int, default=10, metavar="STEPS", help="steps a mean covers (%(default)s)"
    )
    report.add_argument(
        "--anchors", type=Path, metavar="FILE", help="what `pilotage baseline --json` printed, to draw beside"
    )
    report.set_defaults(command=("reading", "report"))

    _add_export(commands)

    baseline = commands.add_parser("baseline", help="score search without a model on localization tasks")
    baseline.add_argument("tasks", type=Path, nargs="+", metavar="TASKS", help="directories of tasks")
    baseline.add_argument("--json", action="store_true", help="print JSON")
    baseline.add_argument(
        "--methods", type=lambda names: names.split(","), metavar="A,B", help="these alone; default: all"
    )
    baseline.set_defaults(command=("data", "baseline"))

    verify = commands.add_parser("verify-template", help="say whether a chat template is append-only")
    verify.add_argument("model", type=Path, metavar="MODEL_OR_DIR")
    verify.set_defaults(command=("reading", "verify"))

    doctor = commands.add_parser("doctor", help="look at everything that a run needs, before it starts")
    doctor.add_argument("recipe", type=Path, nargs="?", metavar="RECIPE.toml", help="default: this machine")
    doctor.add_argument("overrides", nargs="*", metavar="a.b=value", help="override a key of the recipe")
    doctor.add_argument("--runs-dir", type=Path, default=Path("runs"), metavar="DIR", help="(%(default)s)")
    doctor.add_argument("--fix", action="store_true", help="first remove what is surely left of dead runs")
    doctor.add_argument("--json", action="store_true", help="print JSON")
    doctor.set_defaults(command=("doctor", "doctor"))

    sweep = commands.add_parser("sweep", help="remove what killed runs left on this machine")
    sweep.set_defaults(command=("reading", "sweep"))


def _add_export(commands: _Commands) -> None:
    export = commands.add_parser(
        "export", help="write what a run trained on, or its rollouts, for other programs"
    )
    export.add_argument("run", type=Path, metavar="RUN")
    export.add_argument(
        "--format",
        choices=["samples", "sft", "atif", "details"],
        default="samples",
        help="samples as trained, or good rollouts for fine-tuning (parquet); Harbor's trajectories (a"
        " directory) or rollout details (JSON lines)",
    )
    export.add_argument("--out", type=Path, required=True, metavar="PATH", help="new file or directory")
    export.add_argument(
        "--min-reward", type=float, metavar="R", help="only rollouts with at least this; sft needs it"
    )
    export.set_defaults(command=("reading", "export"))


def _add_service(commands: _Commands) -> None:
    serve = commands.add_parser("serve", help="run the training service on this machine")
    serve.add_argument(
        "--models", type=Path, required=True, metavar="DIR", help="model names are paths below it"
    )
    serve.add_argument(
        "--data",
        type=Path,
        default=Path("service"),
        metavar="DIR",
        help="database, checkpoints, logs (%(default)s)",
    )
    serve.add_argument("--host", default="127.0.0.1", metavar="H")
    serve.add_argument("--port", type=int, default=7400, metavar="P", help="%(default)s; 0 takes a free one")
    serve.add_argument("--tls-cert", type=Path, metavar="F")
    serve.add_argument("--tls-key", type=Path, metavar="F")
    serve.add_argument("--no-auth", action="store_true", help="answer everybody; on loopback only")
    serve.add_argument(
        "--capacity",
        action="append",
        default=[],
        metavar="KIND=N",
        help="GPUs, or slots on a CPU; default: this machine's CUDA devices, else H200=8",
    )
    serve.add_argument(
        "--engine",
        choices=("local", "ray"),
        help="what holds a job's policy: one process, or Ray actors on many devices (FSDP2, vLLM); default:"
        " ray where there are CUDA devices and vLLM, else local",
    )
    serve.add_argument(
        "--tinker-gpus",
        default="1+1",
        metavar="TRAIN+SAMPLE",
        help="GPUs of a model's trainer and sampler where the Tinker wire makes it; default: 1+1",
    )
    serve.set_defaults(command=("service", "serve"))

    token = commands.add_parser("token", help="make or revoke tokens of the training service")
    token.add_argument("action", choices=("create", "revoke"))
    token.add_argument("owner", metavar="NAME")
    token.add_argument("--data", type=Path, default=Path("service"), metavar="DIR", help="as of serve")
    token.set_defaults(command=("service", "token"))


def _add_service_clients(commands: _Commands) -> None:
    login = commands.add_parser("login", help="keep the connection to a training service")
    login.add_argument("--host", help="account host of Snowflake, or a pasted URL")
    login.add_argument("--base-url", metavar="URL", help="of `pilotage serve`, as http://127.0.0.1:8080")
    login.add_argument("--database")
    login.add_argument("--schema")
    login.add_argument("--endpoint")
    login.add_argument("--ca-file", type=Path, metavar="PEM", help="CA of the server's certificate")
    login.add_argument("--pat-stdin", action="store_true", help="read the token from standard input")
    login.add_argument("--json", action="store_true")
    login.set_defaults(command=("login", "login"))

    capacity = commands.add_parser("capacity", help="print the GPUs of the training service")
    capacity.add_argument("--hardware", choices=("H200", "B200", "B300"))
    capacity.add_argument("--json", action="store_true")
    capacity.set_defaults(command=("jobs", "capacity"))

    jobs = commands.add_parser("jobs", help="jobs of the training service")
    verbs = jobs.add_subparsers(metavar="VERB", required=True)

    def add(name: str, text: str, function: str) -> argparse.ArgumentParser:
        verb = verbs.add_parser(name, help=text)
        verb.add_argument("--json", action="store_true", help="print JSON")
        verb.set_defaults(command=("jobs", function))
        return verb

    listing = add("list", "list jobs, oldest first", "list_jobs")
    listing.add_argument("--status", metavar="S,S", help="states, or the groups active and done")
    listing.add_argument("--mine", action="store_true", help="only jobs with my comment")
    add("get", "print one job", "get").add_argument("job", metavar="JOB")
    waiting = add("wait", "wait until a job runs", "wait")
    waiting.add_argument("job", metavar="JOB")
    waiting.add_argument("--timeout", type=float, default=1800.0, metavar="SECONDS", help="(%(default)s)")
    cancel = add("cancel", "cancel a job of mine", "cancel")
    cancel.add_argument("job", metavar="JOB")
    cancel.add_argument("--force", action="store_true", help="also a job with another comment")
    logs = add("logs", "print a job's log", "logs")
    logs.add_argument("job", metavar="JOB")
    logs.add_argument("--follow", action="store_true", help="until the job has ended")
    metrics = add("metrics", "print what the trainer measured", "metrics")
    metrics.add_argument("job", metavar="JOB")
    metrics.add_argument("--gpu", action="store_true", help="its GPUs instead, where the service has NVML")
    add("checkpoints", "list a job's checkpoints", "checkpoints").add_argument("job", metavar="JOB")
    export = add("export", "download a checkpoint", "export")
    export.add_argument("job", metavar="JOB")
    export.add_argument("checkpoint", nargs="?", metavar="CHECKPOINT", help="default: the newest")
    export.add_argument("--out", type=Path, required=True, metavar="DIR", help="new directory")
