"""The run directory: what it refuses, what survives a kill, what a rewind forgets."""

import gzip
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.algorithms.strategies import make_rollout

from pilotage.errors import RunDirectoryError
from pilotage.files import append_line
from pilotage.loops import RunDirectory, read_rollout
from pilotage.loops.run_directory import config_digest
from pilotage.loops.schedule import Position
from pilotage.types import (
    Outcome,
    Reward,
    Rollout,
    RolloutFailure,
    RolloutRequest,
    Sample,
    SamplingParams,
    Task,
    Trajectory,
)

CONFIG = {"name": "demo", "loop": {"seed": 0, "num_steps": 5}}
HOLD = """
import sys
from pathlib import Path
from pilotage.loops import RunDirectory
with RunDirectory.open(Path(sys.argv[1]), {"name": "demo"}, resume=False):
    print("held", flush=True)
    sys.stdin.read()
"""


def refusal(path: Path, config: Mapping[str, object], *, resume: bool) -> str:
    with pytest.raises(RunDirectoryError) as caught:
        RunDirectory.open(path, config, resume=resume)
    message = str(caught.value)
    assert "\n" not in message
    return message


def started(path: Path) -> Path:
    with RunDirectory.open(path, CONFIG, resume=False):
        pass
    return path


# --- opening ---


def test_a_new_run_holds_its_config_and_the_directories_of_a_run(tmp_path: Path) -> None:
    with RunDirectory.open(tmp_path / "run", CONFIG, resume=False) as run:
        assert run.config() == CONFIG
        assert (run.path / "launcher.pid").read_text() == f"{os.getpid()}\n"
        names = {path.name for path in run.path.iterdir() if path.is_dir()}
    assert names == {"rollouts", "errors", "checkpoints"}
    assert not (tmp_path / "run" / "launcher.pid").exists()


def test_a_run_that_failed_before_it_began_can_be_started_again(tmp_path: Path) -> None:
    path = started(tmp_path / "run")

    with RunDirectory.open(path, {"name": "corrected"}, resume=False) as run:
        assert run.config() == {"name": "corrected"}


def test_a_run_that_exists_is_not_started_again(tmp_path: Path) -> None:
    path = started(tmp_path / "run")
    append_line(path / "events.jsonl", b'{"event":"started"}')
    expected = f"{path} holds a run already; give --resume to go on with it, or another run name"
    assert refusal(path, CONFIG, resume=False) == expected


def test_what_is_no_run_is_not_resumed_and_not_made(tmp_path: Path) -> None:
    path = tmp_path / "run"
    expected = f"{path} holds no run to resume; leave out --resume to start one"
    assert refusal(path, CONFIG, resume=True) == expected
    assert not path.exists()


def test_a_run_of_another_config_is_refused_with_the_keys_that_differ(tmp_path: Path) -> None:
    path = started(tmp_path / "run")
    other = {"name": "demo", "loop": {"seed": 1, "group_size": 4}}
    assert refusal(path, other, resume=True) == (
        f"{path} was started with another config: loop.group_size was None, is 4,"
        " loop.num_steps was 5, is None, loop.seed was 0, is 1"
    )
    assert RunDirectory(path).config() == CONFIG


def test_the_order_of_keys_is_no_difference(tmp_path: Path) -> None:
    path = started(tmp_path / "run")
    reordered = {"loop": {"num_steps": 5, "seed": 0}, "name": "demo"}
    with RunDirectory.open(path, reordered, resume=True):
        pass


@settings(deadline=None)
@given(st.dictionaries(st.text(max_size=3), st.integers(0, 3) | st.booleans(), max_size=4))
def test_a_digest_is_of_the_content_and_not_of_the_order(config: dict[str, int]) -> None:
    assert config_digest(config) == config_digest(dict(reversed(config.items())))
    assert config_digest(config) != config_digest({**config, "more": 1})


def test_a_run_in_use_names_its_process_and_is_free_once_that_was_killed(tmp_path: Path) -> None:
    path = tmp_path / "run"
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        assert refusal(path, {"name": "demo"}, resume=True) == f"{path} is in use by process {holder.pid}"
    finally:
        holder.kill()
        holder.communicate()
    with RunDirectory.open(path, {"name": "demo"}, resume=True):
        pass


# --- records ---


def test_a_torn_last_line_is_dropped(tmp_path: Path) -> None:
    with RunDirectory.open(tmp_path / "run", CONFIG, resume=False) as run:
        run.write({"step": 0, "reward/mean": 0.1})
        run.write({"step": 1, "reward/mean": 1 / 3})
        with (run.path / "metrics.jsonl").open("ab") as file:
            file.write(b'{"step":2,"reward/me')
        assert run.metrics() == [{"step": 0, "reward/mean": 0.1}, {"step": 1, "reward/mean": 1 / 3}]


def test_a_run_without_metrics_has_no_records(tmp_path: Path) -> None:
    assert RunDirectory(tmp_path).metrics() == []


def test_events_have_a_time_a_name_and_their_facts(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    run.event("checkpoint", step=5)
    run.event("finished")
    lines = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert [(line["event"], line.get("step")) for line in lines] == [("checkpoint", 5), ("finished", None)]
    assert lines[0]["at"] <= lines[1]["at"]


def failed(rollout_id: str, traceback: str = "") -> Rollout:
    failure = RolloutFailure(where="agent", message="it crashed", advice="read its log", traceback=traceback)
    return Rollout(
        id=rollout_id,
        group_id="g",
        task_id="train/a",
        attempt=1,
        outcome=Outcome.AGENT_ERROR,
        reward=None,
        trajectory=Trajectory(),
        failure=failure,
    )


def test_a_failed_rollout_leaves_a_file_that_says_what_where_and_what_to_do(tmp_path: Path) -> None:
    with RunDirectory.open(tmp_path / "run", CONFIG, resume=False) as run:
        run.add_rollout("step-0001", failed("step-0001-00-00", traceback="Traceback\n  boom"))
        run.add_rollout("step-0001", make_rollout("step-0001-00-01", reward=1.0))
        text = (run.path / "errors" / "step-0001-00-00.error").read_text()
        assert text == (
            "outcome: agent_error\nrollout: step-0001-00-00\ntask: train/a\nwhere: agent\n"
            "message: it crashed\nwhat to do: read its log\n\nTraceback\n  boom"
        )
        assert len(list((run.path / "errors").iterdir())) == 1
        assert [read_rollout(path).id for path in run.rollout_files()] == [
            "step-0001-00-00",
            "step-0001-00-01",
        ]


# --- checkpoints ---


def test_the_newest_checkpoint_is_the_one_of_the_highest_step(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    assert run.newest_checkpoint() is None
    for step in (0, 5, 10_000, 20):
        run.checkpoint(step).mkdir(parents=True)
    (tmp_path / "checkpoints" / ".step-99999.building").mkdir()
    assert run.newest_checkpoint() == 10_000


def test_a_rewind_forgets_records_and_evaluations_that_came_after_and_keeps_rollouts_to_train_on(
    tmp_path: Path,
) -> None:
    with RunDirectory.open(tmp_path / "run", CONFIG, resume=False) as run:
        for step in range(4):
            run.write({"step": step})
            run.add_rollout(f"eval-{step:04d}", failed(f"eval-{step:04d}-00"))
            run.add_rollout(f"step-{step:04d}", failed(f"step-{step:04d}-00-00"))
        with (run.path / "metrics.jsonl").open("ab") as file:
            file.write(b'{"st')

        run.rewind(1)

        kept = ["eval-0000-00", "eval-0001-00", *(f"step-{step:04d}-00-00" for step in range(4))]
        assert run.metrics() == [{"step": 0}, {"step": 1}]
        assert [path.name for path in run.rollout_files()] == [f"{name}.json.gz" for name in kept]
        assert sorted(path.name for path in (run.path / "errors").iterdir()) == [f"{n}.error" for n in kept]
        run.write({"step": 2})
        assert [record["step"] for record in run.metrics()] == [0, 1, 2]
        run.rewind(-1)
        assert run.metrics() == []
        assert {path.parent.name for path in run.rollout_files()} == {f"step-{step:04d}" for step in range(4)}


def test_a_step_keeps_what_the_trainer_gave_to_its_tokens_until_it_is_done_again(tmp_path: Path) -> None:
    with RunDirectory.open(tmp_path / "run", CONFIG, resume=False) as run:
        # Two branches of one rollout stand apart: what is one rollout's stays in the order of its samples.
        samples = [scored_sample("a", 2), scored_sample("b", 3), scored_sample("a", 1)]
        values = np.arange(6, dtype=np.float32)
        for step in (1, 2):
            run.write_trainer_logprobs(step, samples, values + step)

        assert run.trainer_logprobs(2, "nobody") is None
        assert run.trainer_logprobs(3, "a") is None
        kept = run.trainer_logprobs(2, "a")
        assert kept is not None
        np.testing.assert_array_equal(kept, np.array([2, 3, 7], np.float32))

        run.rewind(1)
        assert run.trainer_logprobs(2, "a") is None
        assert run.trainer_logprobs(1, "b") is not None


def scored_sample(name: str, num_trained: int) -> Sample:
    mask = np.arange(num_trained + 2) >= 2
    nothing = np.zeros(mask.size, np.float32)
    return Sample(
        sequence_id=name,
        group_id="g",
        token_ids=np.arange(mask.size, dtype=np.int32),
        loss_mask=mask,
        sampler_logprobs=nothing,
        advantages=nothing.copy(),
        weights_versions=np.where(mask, np.int32(0), np.int32(-1)),
    )


def request_of(rollout: Rollout, **changed: Any) -> RolloutRequest:
    task = Task(id=rollout.task_id, path=Path("/t"))
    request = RolloutRequest(id=rollout.id, group_id=rollout.group_id, task=task, sampling=SamplingParams())
    return replace(request, **changed)


def test_a_rollout_on_disk_is_kept_where_it_has_a_reward_and_is_of_the_same_task(tmp_path: Path) -> None:
    with RunDirectory.open(tmp_path / "run", CONFIG, resume=False) as run:
        crashed = failed("step-0001-00-00")
        scored = replace(
            crashed, outcome=Outcome.COMPLETED, failure=None, reward=Reward(value=1, key="r", source="s")
        )
        assert run.kept_rollout("step-0001", request_of(scored)) is None
        run.add_rollout("step-0001", crashed)
        assert run.kept_rollout("step-0001", request_of(scored)) is None
        assert list((run.path / "errors").iterdir()) != []
        run.add_rollout("step-0001", scored)
        assert list((run.path / "errors").iterdir()) == []  # its second try went well
        kept = run.kept_rollout("step-0001", request_of(scored))
        assert kept is not None
        assert (kept.id, kept.reward) == (scored.id, scored.reward)
        other = Task(id="another", path=Path("/t"))
        assert run.kept_rollout("step-0001", request_of(scored, task=other)) is None


@pytest.mark.parametrize(
    "damage",
    [b"", b"no gzip", gzip.compress(b"{}"), gzip.compress(b"[1")],
    ids=["nothing", "text", "an empty record", "torn JSON"],  # gzip writes the time into its bytes
)
def test_a_damaged_rollout_is_run_again_and_an_event_says_so(tmp_path: Path, damage: bytes) -> None:
    with RunDirectory.open(tmp_path / "run", CONFIG, resume=False) as run:
        rollout = failed("step-0001-00-00")
        run.add_rollout("step-0001", rollout)
        (run.path / "rollouts" / "step-0001" / "step-0001-00-00.json.gz").write_bytes(damage)
        assert run.kept_rollout("step-0001", request_of(rollout)) is None
        assert run.events()[-1]["event"] == "rollout_unreadable"
        assert run.events()[-1]["message"].endswith("it is run again")


def test_a_damaged_config_is_one_clear_line(tmp_path: Path) -> None:
    path = started(tmp_path / "run")
    append_line(path / "events.jsonl", b'{"event":"started"}')
    for damage in (b'name = "de', b"\xff\xfe\x00"):
        (path / "config.toml").write_bytes(damage)
        said = refusal(path, CONFIG, resume=True)
        assert said.startswith(f"{path / 'config.toml'} cannot be read: ")
        assert said.endswith("; restore it")


def test_records_that_were_lost_are_named_when_the_run_goes_on(tmp_path: Path) -> None:
    with RunDirectory.open(tmp_path / "run", CONFIG, resume=False) as run:
        for step in range(5):
            run.write({"step": step})
        lines = run.metrics_path.read_bytes().splitlines(keepends=True)
        run.metrics_path.write_bytes(b"".join([lines[0], b"\x00" * 12 + b"\n", *lines[2:]]))
        run.rewind(3)
        assert [record["step"] for record in run.metrics()] == [0, 2, 3]
        (event,) = run.events()
        assert (event["event"], event["count"], event["steps"]) == ("records_lost", 1, "1")
        run.rewind(-1)
        assert len(run.events()) == 1, "a run that begins has lost nothing"


def test_a_run_that_could_not_be_opened_is_held_by_nobody(tmp_path: Path) -> None:
    path = tmp_path / "run"
    (path / ".config.toml.partial").mkdir(parents=True)  # where the config would be written first
    with pytest.raises(OSError, match="config"):
        RunDirectory.open(path, CONFIG, resume=False)
    (path / ".config.toml.partial").rmdir()
    started(path)


def test_a_rewind_removes_what_a_killed_writer_left_of_an_error(tmp_path: Path) -> None:
    with RunDirectory.open(tmp_path / "run", CONFIG, resume=False) as run:
        (run.path / "errors" / ".step-0001-00-00.error.partial").touch()
        (run.path / "errors" / "step-0001-00-01.error").touch()
        run.write({"step": 0})
        run.write({"step": 1})
        run.rewind(1)
    assert [path.name for path in (run.path / "errors").iterdir()] == ["step-0001-00-01.error"]


@pytest.mark.parametrize("damage", [None, b"", b"{}", b'{"next_group": "x", "ahead": []}'])
def test_a_position_that_is_gone_or_damaged_is_one_clear_line(tmp_path: Path, damage: bytes | None) -> None:
    with RunDirectory.open(tmp_path / "run", CONFIG, resume=False) as run:
        position = Position(steps_done=3, next_group=5, ahead=frozenset({7}))
        run.write_position(position)
        assert run.position(3) == position
        path = run.path / "checkpoints" / "step-0003.json"
        path.unlink() if damage is None else path.write_bytes(damage)
        with pytest.raises(
            RunDirectoryError,
            match=r"step-0003\.json does not say where the run stood: .*; restore it, or remove ",
        ):
            run.position(3)
