"""The reward graph of one or more runs."""

import io
from collections.abc import Mapping, Sequence
from pathlib import Path

from pilotage.files import write_atomically
from pilotage.ops.report import Record, training_steps, window_means

_COLOURS = ("#1f5fa8", "#c2571a", "#2b8a3e", "#8e44ad")


def write_reward_graph(
    path: Path,
    runs: Mapping[str, Sequence[Record]],
    *,
    window: int,
    maximum: float | None = None,
    anchors: Mapping[str, float] | None = None,
) -> None:
    """Write an SVG: per-step means, window means, and held-out points with 95 % intervals.

    Args:
        runs: name -> records; up to four are told apart by colour.
        maximum: highest possible reward, drawn as the top of the axis.
        anchors: name -> mean reward of what needs no training, drawn as a line across.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    for (name, records), colour in zip(runs.items(), _COLOURS * len(runs), strict=False):
        steps = training_steps(records)
        x, y = [r["step"] for r in steps], [r["reward/mean"] for r in steps]
        axes.plot(x, y, color=colour, alpha=0.3, linewidth=1)
        windows = window_means(records, window)
        centres = [(part.first_step + part.last_step) / 2 for part in windows]
        means = [part.mean for part in windows]
        axes.plot(centres, means, color=colour, linewidth=2, label=f"{name}: {window}-step mean")
        held_out = [record for record in records if "eval/reward_mean" in record]
        axes.errorbar(
            [record["step"] for record in held_out],
            [record["eval/reward_mean"] for record in held_out],
            yerr=[record.get("eval/reward_ci95", 0.0) for record in held_out],
            fmt="o",
            color=colour,
            markerfacecolor="white",
            capsize=3,
            label=f"{name}: held-out, greedy",
        )
    for name, reward in (anchors or {}).items():
        axes.axhline(reward, color="#666666", linewidth=1, linestyle=(0, (4, 3)))
        axes.annotate(
            f"{name} {reward:.2f}",
            (1, reward),
            xycoords=("axes fraction", "data"),
            xytext=(-2, 2),
            textcoords="offset points",
            ha="right",
            fontsize="x-small",
            color="#666666",
        )
    axes.set_xlabel("step")
    axes.set_ylabel("reward")
    axes.margins(x=0.02)
    axes.set_ylim(bottom=0, top=maximum)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="upper left", fontsize="small")
    with io.BytesIO() as image:
        figure.savefig(image, format="svg")
        write_atomically(path, image.getvalue())
