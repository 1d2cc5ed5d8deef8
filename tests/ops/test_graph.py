"""The reward graph is an SVG that a browser draws, with named axes and everything that was measured."""

import xml.etree.ElementTree as ElementTree
from pathlib import Path

from tests.ops.records import make_evaluation, make_record

from pilotage.ops.graph import write_reward_graph
from pilotage.ops.report import Record

SVG = "{http://www.w3.org/2000/svg}"
RUN: list[Record] = [
    {**make_evaluation(0, 0.5), "eval/reward_ci95": 0.1},
    make_record(1, 1.0),
    make_record(2, 2.0),
    {**make_record(3, 2.5), "eval/reward_mean": 1.5},
]


def drawn(path: Path) -> tuple[set[str], int]:
    """Ids of the drawing's groups, and how many lines with a stroke it has. Text is drawn as outlines."""
    root = ElementTree.parse(path).getroot()
    assert root.tag == f"{SVG}svg"
    ids = {group.get("id") or "" for group in root.iter(f"{SVG}g")}
    return ids, sum("stroke: #" in (node.get("style") or "") for node in root.iter(f"{SVG}path"))


def test_the_graph_is_an_svg_with_two_axes_named_step_and_reward(tmp_path: Path) -> None:
    path = tmp_path / "reward_graph.svg"
    write_reward_graph(path, {"demo": RUN}, window=2, maximum=3.0)
    ids, _ = drawn(path)
    assert {"axes_1", "matplotlib.axis_1", "matplotlib.axis_2", "legend_1"} <= ids
    text = path.read_text()
    for label in ("step", "reward", "demo: 2-step mean", "demo: held-out, greedy"):
        assert f"<!-- {label} -->" in text
    assert [p.name for p in tmp_path.iterdir()] == ["reward_graph.svg"]


def test_every_run_has_a_colour_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "graph.svg"
    write_reward_graph(path, {f"seed {seed}": RUN for seed in range(3)}, window=2)
    text = path.read_text()
    assert all(f"<!-- seed {seed}: 2-step mean -->" in text for seed in range(3))
    assert all(colour in text for colour in ("#1f5fa8", "#c2571a", "#2b8a3e"))


def test_a_longer_run_is_drawn_with_more(tmp_path: Path) -> None:
    for name, records in (("short", RUN), ("long", [*RUN, make_record(4, 1.0), make_record(5, 9.0)])):
        write_reward_graph(tmp_path / f"{name}.svg", {"demo": records}, window=2)
    assert (tmp_path / "short.svg").read_bytes() != (tmp_path / "long.svg").read_bytes()


def test_a_run_without_steps_has_an_empty_graph(tmp_path: Path) -> None:
    path = tmp_path / "graph.svg"
    write_reward_graph(path, {"demo": []}, window=5)
    assert {"matplotlib.axis_1", "matplotlib.axis_2"} <= drawn(path)[0]
