"""Commands that read: runs, templates, and what killed runs left."""

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from pilotage.cli.runs import open_run
from pilotage.errors import ConfigError
from pilotage.loops.run_directory import RunDirectory


async def show(arguments: argparse.Namespace) -> int:
    """Print a run, or one of its rollouts."""
    from pilotage.loops import read_rollout
    from pilotage.ops.show import format_rollout, format_run
    from pilotage.rendering import load_renderer

    run = open_run(arguments.run)
    files = run.rollout_files()
    if arguments.rollout is None:
        print(format_run(run.metrics(), files))
        return 0
    name = f"{arguments.rollout}.json.gz"
    found = next((path for path in files if path.name == name), None)
    if found is None:
        raise ConfigError(
            f"{arguments.run} has no rollout {arguments.rollout}; `pilotage show {arguments.run}` lists them"
        )
    renderer = load_renderer(Path(run.config()["policy"]["model"]))
    print(format_rollout(read_rollout(found), renderer.decode))
    return 0


async def view(arguments: argparse.Namespace) -> int:
    """Show runs on a local web page, or write one as a file."""
    from pilotage.ops.view import export, serve

    if arguments.export is not None:
        await export(arguments.runs, rollout=arguments.rollout, file=arguments.export)
        print(f"written: {arguments.export}")
        return 0
    if arguments.rollout is not None:
        raise ConfigError("--rollout goes with --export FILE.html; without it, open the rollout in the page")
    if not 0 <= arguments.port <= 65535:
        raise ConfigError(f"--port lies in 0 to 65535, got {arguments.port}")
    await serve(
        arguments.runs,
        host=arguments.host,
        port=arguments.port,
        on_ready=lambda url: print(f"{url}  (Ctrl-C ends it)", flush=True),
    )
    return 0


async def report(arguments: argparse.Namespace) -> int:
    """Print a run's report, or several side by side, and write the graph."""
    from pilotage.ops.graph import write_reward_graph

    if arguments.window < 1:
        raise ConfigError(f"--window must be positive, got {arguments.window}")
    runs = [open_run(path) for path in arguments.run]
    anchors = _anchors(arguments.anchors) if arguments.anchors is not None else {}
    if len({run.path.resolve() for run in runs}) != len(runs):
        raise ConfigError("the same run is named twice; name each run once")
    records = {str(run.path) if len(runs) > 1 else run.path.name: run.metrics() for run in runs}
    print(_comparison(records, arguments.window) if len(runs) > 1 else _whole(runs[0], arguments.window))
    for name, reward in anchors.items():
        print(f"anchor {name}: {reward:.3f}")
    graph = runs[0].path / "reward_graph.svg" if len(runs) == 1 else Path("comparison.svg")
    write_reward_graph(graph, records, window=arguments.window, anchors=anchors)
    print(f"graph: {graph}")
    return 0


def _comparison(records: Mapping[str, Sequence[Mapping[str, float]]], window: int) -> str:
    from pilotage.ops.report import format_comparison

    return format_comparison(records, window=window)


def _whole(run: RunDirectory, window: int) -> str:
    from pilotage.ops.alarms import find_alarms, format_alarms
    from pilotage.ops.report import format_report
    from pilotage.ops.status import format_status, read_status
    from pilotage.recipes.reference import describe_recipe

    records = run.metrics()
    return "\n".join(
        [
            *describe_recipe(run.config()),
            format_status(read_status(run)),
            "",
            format_report(records, window=window),
            *format_alarms(find_alarms(records)),
        ]
    )


def _anchors(path: Path) -> dict[str, float]:
    """Read the sums that `pilotage baseline --json` printed."""
    try:
        return {str(row["method"]): float(row["reward"]) for row in json.loads(path.read_bytes())}
    except OSError as error:
        raise ConfigError(f"--anchors {path}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError):
        raise ConfigError(f"--anchors {path} is not what `pilotage baseline --json` prints") from None


async def export(arguments: argparse.Namespace) -> int:
    """Write a run's samples or rollouts for other programs."""
    from pilotage.ops.export import write_atif, write_details, write_fine_tuning, write_samples

    run, out, least = open_run(arguments.run), arguments.out, arguments.min_reward
    if arguments.format == "samples" and least is not None:
        raise ConfigError(
            "--min-reward goes with --format sft, atif or details: samples are all that was trained"
        )
    if arguments.format == "samples":
        written = f"{write_samples(run, out)} samples"
    elif arguments.format == "sft":
        if least is None:
            raise ConfigError("--format sft needs --min-reward R: which rollouts are good enough to imitate")
        written = f"{write_fine_tuning(run, out, min_reward=least)} rows"
    else:
        write = write_atif if arguments.format == "atif" else write_details
        written = f"{write(run, out, min_reward=least)} rollouts"
    print(f"wrote {written} to {out}")
    return 0


async def verify(arguments: argparse.Namespace) -> int:
    """Say whether a template is append-only: exit code 0 if it can be used token-exactly, 1 if not."""
    from pilotage.rendering import format_report, verify_template

    found = verify_template(arguments.model)
    print(format_report(found))
    return 0 if found.is_usable else 1


async def sweep(arguments: argparse.Namespace) -> int:
    """Remove what dead drivers left."""
    from pilotage.rollouts import sweep as sweep_machine

    swept = sweep_machine()
    print(
        f"dead owners' holdings: {swept.holdings}; killed {swept.killed_processes} processes,"
        f" removed {swept.removed_trees} directories"
    )
    return 0
