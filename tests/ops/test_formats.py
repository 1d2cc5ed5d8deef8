"""Rollouts in other programs' formats: read back by these programs' own models, ids as they were recorded."""

import json
from pathlib import Path

import pytest
from benchmarks.bench_view import make_run

from pilotage.cli import main
from pilotage.loops import RunDirectory, read_rollout
from pilotage.ops.transcripts import read_messages
from pilotage.rendering import load_renderer
from pilotage.types import Message, Role, Rollout

POLICY = Path(__file__).resolve().parents[2] / "recipes" / "demo" / "policy"
HELD_OUT = "eval-0001-00"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    """Ten turns a rollout, the last of which starts a branch after the eighth; and one evaluation."""
    path = tmp_path_factory.mktemp("runs") / "small"
    make_run(path, steps=1, groups=2, group_size=4, tokens=800, policy=POLICY)
    (path / "rollouts" / "eval-0001").mkdir()
    best = max(rollouts(RunDirectory(path)), key=lambda rollout: reward_of(rollout) or 0.0)
    copy = path / "rollouts" / "eval-0001" / f"{HELD_OUT}.json.gz"
    copy.write_bytes((path / "rollouts" / "step-0001" / f"{best.id}.json.gz").read_bytes())
    return RunDirectory(path)


def rollouts(run: RunDirectory) -> list[Rollout]:
    return [read_rollout(path) for path in run.rollout_files() if path.parent.name == "step-0001"]


def reward_of(rollout: Rollout) -> float | None:
    return None if rollout.reward is None else rollout.reward.value


def test_an_atif_file_is_valid_for_harbor_and_has_every_sampled_token_once(
    run: RunDirectory, tmp_path: Path
) -> None:
    models = pytest.importorskip("harbor.models.trajectories", reason="harbor is not installed")
    assert main(["export", str(run.path), "--format", "atif", "--out", str(tmp_path / "atif")]) == 0
    for rollout in rollouts(run):
        document = json.loads((tmp_path / "atif" / f"{rollout.id}.json").read_text())
        trajectory = models.Trajectory.model_validate(document)
        branches = [trajectory, *trajectory.subagent_trajectories]
        assert len(branches) == 2
        fresh = [
            step.metrics.completion_token_ids
            for branch in branches
            for step in branch.steps
            if step.metrics is not None and not step.is_copied_context
        ]
        recorded = [turn.completion_ids.tolist() for turn in rollout.trajectory.turns]
        assert sorted(fresh) == sorted(recorded)
        assert trajectory.extra["reward"] == reward_of(rollout)
        first = next(step for step in trajectory.steps if step.source == "agent")
        assert first.tool_calls[0].function_name == "code_search"
        assert first.observation.results[0].source_call_id == first.tool_calls[0].tool_call_id


def test_details_hold_for_each_branch_the_prompts_and_completions_of_its_turns(
    run: RunDirectory, tmp_path: Path
) -> None:
    out = tmp_path / "details.jsonl"
    assert main(["export", str(run.path), "--format", "details", "--out", str(out)]) == 0
    lines = {line["rollout"]: line for line in map(json.loads, out.read_text().splitlines())}
    for rollout in rollouts(run):
        newest, other = lines[rollout.id]["rollout_details"]
        tree = rollout.trajectory
        assert newest["completion_token_ids"][-1] == tree.turns[9].completion_ids.tolist()
        assert newest["prompt_token_ids"][-1] == tree.prompt_ids(9).tolist()
        assert other["prompt_token_ids"][-1] == tree.prompt_ids(8).tolist()
        assert [len(part) for part in (newest["logprobs"], other["logprobs"])] == [9, 9]
        # A prompt goes on from the prompt and the completion before it.
        before = newest["prompt_token_ids"][0] + newest["completion_token_ids"][0]
        assert newest["prompt_token_ids"][1][: len(before)] == before


def test_fine_tuning_rows_are_of_good_training_rollouts_and_learn_each_sampled_token_once(
    run: RunDirectory, tmp_path: Path
) -> None:
    pq = pytest.importorskip("pyarrow.parquet", reason="pyarrow is not installed, see the extra `data`")
    least = sorted(reward for reward in map(reward_of, rollouts(run)) if reward is not None)[-3]
    out = tmp_path / "sft.parquet"
    command = ["export", str(run.path), "--format", "sft", "--out", str(out)]
    assert main([*command, "--min-reward", str(least)]) == 0
    rows = pq.read_table(out).to_pylist()
    good = {rollout.id: rollout for rollout in rollouts(run) if (reward_of(rollout) or -1.0) >= least}
    assert {row["rollout"] for row in rows} == good.keys()
    for name, rollout in good.items():
        own = [row for row in rows if row["rollout"] == name]
        learnt = sum(sum(row["assistant_masks"]) for row in own)
        assert learnt == rollout.trajectory.sampled_tokens
        assert own[0]["input_ids"] == [
            *rollout.trajectory.prompt_ids(8),
            *rollout.trajectory.turns[8].completion_ids,
        ]
        assert [message["role"] for message in own[0]["messages"][:2]] == ["system", "user"]
    assert HELD_OUT not in {row["rollout"] for row in rows}


def test_a_floor_that_nothing_reaches_or_that_is_missing_is_refused_in_one_line(
    run: RunDirectory, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("pyarrow.parquet", reason="pyarrow is not installed, see the extra `data`")
    command = ["export", str(run.path), "--format", "sft", "--out", str(tmp_path / "x")]
    assert main(command) == 2
    assert "needs --min-reward" in capsys.readouterr().err
    assert main([*command, "--min-reward", "99"]) == 2
    assert "no training rollout" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_the_messages_of_a_context_are_those_that_were_rendered() -> None:
    renderer = load_renderer(POLICY)
    sent = [Message(role=Role.SYSTEM, content="Find the bug."), Message(role=Role.USER, content="It is <b>.")]
    found = list(read_messages(renderer.read(renderer.render_prompt(sent, []))))
    assert [(message.role, message.text) for message in found] == [
        ("system", "Find the bug."),
        ("user", "It is <b>."),
    ]
