"""The training loop with a tiny trainer and runner: what it records, and what a crash costs."""

import asyncio
import json
from pathlib import Path

import numpy as np
import pytest
from tests.loops.rig import TOKENS_PER_ROLLOUT, CountingTrainer, Rig, Watcher, make_tasks

from pilotage.errors import ConfigError, SamplerError, TrainerError
from pilotage.loops import EvaluationSettings, LoopSettings, RunDirectory, TrainingLoop, read_rollout
from pilotage.loops.curriculum import CurriculumSettings
from pilotage.types import AdamParams, BranchCause, Ledger, Outcome

SETTINGS = LoopSettings(
    num_steps=5,
    tasks_per_step=2,
    group_size=2,
    checkpoint_every_steps=2,
    evaluation=EvaluationSettings(every_steps=3),
)
PROMISED = {
    "step", "weights_version", "reward/mean", "reward/count", "reward/none_count", "ledger/sampled_tokens",
    "ledger/trained_tokens", "ledger/masked_tokens", "ledger/dropped_tokens", "policy/logprob_gap_mean",
    "policy/logprob_gap_max", "policy/gap_k3", "policy/clip_fraction", "optim/grad_norm", "optim/lr",
    "lag/mean_versions", "time/step_s", "time/rollouts_s", "time/train_s", "time/publish_s",
    *(f"outcome/{outcome}" for outcome in Outcome), *(f"branch/{cause}" for cause in BranchCause),
}  # fmt: skip
PROMISED_OF_EVALUATION = {"eval/reward_mean", "eval/reward_ci95", "eval/count"}


def done(path: Path) -> list[tuple[str, int, str]]:
    """(task, attempt, folder and rollout) of every rollout of a run, as it stands on disk."""
    found = [(path.parent.name, read_rollout(path)) for path in RunDirectory(path).rollout_files()]
    return [(rollout.task_id, rollout.attempt, f"{folder}/{rollout.id}") for folder, rollout in found]


def without_times(records: list[dict[str, float]]) -> list[dict[str, float]]:
    return [{k: v for k, v in record.items() if not k.startswith("time/")} for record in records]


async def test_every_step_has_one_record_with_the_promised_keys(tmp_path: Path) -> None:
    rig = Rig(settings=SETTINGS)
    await rig.run(tmp_path / "run")
    records = RunDirectory(tmp_path / "run").metrics()
    assert [record["step"] for record in records] == [0, 1, 2, 3, 4, 5]
    for record in records[1:]:
        assert PROMISED - record.keys() == set()
        assert all(isinstance(value, int | float) for value in record.values())
    assert records == rig.watcher.records


async def test_a_record_counts_what_happened(tmp_path: Path) -> None:
    await Rig(settings=SETTINGS, failing=frozenset({"step-0001-00-00"})).run(tmp_path / "run")
    first = RunDirectory(tmp_path / "run").metrics()[1]
    # Four rollouts of five tokens; one fails, and its sibling is left alone in its group.
    expected = {
        "reward/count": 3, "reward/none_count": 1, "outcome/agent_error": 1, "outcome/completed": 3,
        "ledger/sampled_tokens": 20, "ledger/trained_tokens": 10, "ledger/masked_tokens": 0,
        "ledger/dropped_tokens": 10, "ledger/dropped_tokens/agent_error": 5,
        "ledger/dropped_tokens/group_too_small": 5, "branch/compaction": 4, "branch/retry": 0,
        "group/count": 2, "group/trained": 1, "group/too_small": 1, "proxy/requests": 8,
        "rollout/turns_mean": 2.0, "lag/mean_versions": 0.0, "weights_version": 2, "optim/lr": 1e-6,
    }  # fmt: skip
    assert {key: first[key] for key in expected} == expected
    assert first["reward/mean"] == pytest.approx(first["reward/f1"], rel=1e-12)


async def test_what_the_trainer_gave_to_the_trained_tokens_is_on_disk(tmp_path: Path) -> None:
    await Rig(settings=SETTINGS, failing=frozenset({"step-0001-00-00"})).run(tmp_path / "run")
    run = RunDirectory(tmp_path / "run")
    assert run.trainer_logprobs(1, "step-0001-00-01") is None  # alone in its group, and dropped
    for path in run.files_of_group("step-0001-01"):
        rollout = read_rollout(path)
        sampled = np.concatenate([turn.logprobs for turn in rollout.trajectory.turns])
        given = run.trainer_logprobs(1, rollout.id)
        assert given is not None
        np.testing.assert_allclose(np.sort(given), np.sort(sampled + np.float32(0.25)))


@pytest.mark.parametrize(
    ("schedule", "rates"), [("constant", [1e-4] * 5), ("linear", [1e-4, 8e-5, 6e-5, 4e-5, 2e-5])]
)
async def test_the_learning_rate_follows_its_schedule(
    tmp_path: Path, schedule: str, rates: list[float]
) -> None:
    settings = SETTINGS.model_copy(
        update={"lr_schedule": schedule, "optimizer": AdamParams(learning_rate=1e-4)}
    )
    await Rig(settings=settings).run(tmp_path / "run")
    records = RunDirectory(tmp_path / "run").metrics()
    assert [record["optim/lr"] for record in records[1:]] == pytest.approx(rates)


async def test_the_ledger_balances_in_every_step(tmp_path: Path) -> None:
    failing = frozenset({"step-0002-00-01", "step-0002-01-00", "step-0003-00-00"})
    await Rig(settings=SETTINGS, failing=failing).run(tmp_path / "run")
    for record in RunDirectory(tmp_path / "run").metrics()[1:]:
        reasons = {
            kind: {name: int(n) for name, n in record.items() if name.startswith(f"ledger/{kind}_tokens/")}
            for kind in ("masked", "dropped")
        }
        Ledger(
            sampled_tokens=4 * TOKENS_PER_ROLLOUT,
            trained_tokens=int(record["ledger/trained_tokens"]),
            masked_tokens=reasons["masked"],
            dropped_tokens=reasons["dropped"],
        )
        assert record["ledger/sampled_tokens"] == 4 * TOKENS_PER_ROLLOUT
        for kind, counts in reasons.items():
            assert record[f"ledger/{kind}_tokens"] == sum(counts.values())


async def test_evaluation_is_before_the_first_step_every_n_steps_and_after_the_last(tmp_path: Path) -> None:
    rig = Rig(settings=SETTINGS)
    await rig.run(tmp_path / "run")
    records = RunDirectory(tmp_path / "run").metrics()
    evaluated = [record for record in records if "eval/count" in record]
    assert [record["step"] for record in evaluated] == [0, 3, 5]
    for record in evaluated:
        assert PROMISED_OF_EVALUATION - record.keys() == set()
        assert record["eval/count"] == 2
    assert [phase for phase in rig.watcher.phases if phase[0] == "evaluation"] == [
        ("evaluation", 0, 2),
        ("evaluation", 3, 2),
        ("evaluation", 5, 2),
    ]


async def test_without_held_out_tasks_nothing_is_evaluated(tmp_path: Path) -> None:
    await Rig(settings=SETTINGS, num_held_out=0).run(tmp_path / "run")
    records = RunDirectory(tmp_path / "run").metrics()
    assert [name for record in records for name in record if name.startswith("eval/")] == []


async def test_one_held_out_task_has_a_mean_and_no_interval(tmp_path: Path) -> None:
    await Rig(settings=SETTINGS, num_held_out=1).run(tmp_path / "run")
    first = RunDirectory(tmp_path / "run").metrics()[0]
    assert first["eval/count"] == 1
    assert "eval/reward_ci95" not in first


async def test_checkpoints_are_every_n_steps_and_after_the_last(tmp_path: Path) -> None:
    await Rig(settings=SETTINGS).run(tmp_path / "run")
    names = {path.name for path in (tmp_path / "run" / "checkpoints").iterdir()}
    steps = ("step-0000", "step-0002", "step-0004", "step-0005")
    assert names == {*steps, *(f"{step}.json" for step in steps)}  # and where the run stood then


@pytest.mark.parametrize("crash", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("curriculum", [None, CurriculumSettings()])
async def test_a_run_that_crashed_and_was_resumed_equals_one_that_did_not(
    tmp_path: Path, crash: int, curriculum: CurriculumSettings | None
) -> None:
    settings = SETTINGS.model_copy(update={"curriculum": curriculum})
    whole = Rig(settings=settings)
    await whole.run(tmp_path / "whole")
    crashed = Rig(settings=settings, trainer=CountingTrainer(fails_in_step=crash))
    with pytest.raises(TrainerError, match=r"^the machine went away$"):
        await crashed.run(tmp_path / "run")
    assert len(done(tmp_path / "run")) < len(done(tmp_path / "whole"))

    resumed = Rig(settings=settings)
    await resumed.run(tmp_path / "run", resume=True)

    assert done(tmp_path / "run") == done(tmp_path / "whole")
    records = [without_times(RunDirectory(tmp_path / name).metrics()) for name in ("run", "whole")]
    assert records[0] == records[1]
    assert resumed.trainer.weights == whole.trainer.weights
    # What the crashed process trained after its last checkpoint was never saved, and is done again.
    saved = (crash - 1) // 2 * 2
    kept = [trained for trained in crashed.trainer.trained if trained[0] <= saved]
    assert sorted(kept + resumed.trainer.trained) == sorted(whole.trainer.trained)


async def test_a_finished_run_that_is_resumed_does_nothing_more(tmp_path: Path) -> None:
    await Rig(settings=SETTINGS).run(tmp_path / "run")
    before = RunDirectory(tmp_path / "run").metrics()
    again = Rig(settings=SETTINGS)
    await again.run(tmp_path / "run", resume=True)
    assert again.runner.requests == []
    assert RunDirectory(tmp_path / "run").metrics() == before


async def test_a_run_without_gradients_stops_and_says_what_to_change(tmp_path: Path) -> None:
    settings = SETTINGS.model_copy(update={"num_steps": 9, "max_idle_steps": 3})
    rig = Rig(settings=settings, spread=0.0)
    with pytest.raises(TrainerError) as caught:
        await rig.run(tmp_path / "run")
    assert str(caught.value) == (
        "no gradient in 3 steps: every group had equal rewards, or fewer than two."
        " Choose tasks that the policy solves sometimes, or a larger group_size"
    )
    records = RunDirectory(tmp_path / "run").metrics()
    assert [record["step"] for record in records] == [0, 1, 2, 3]
    assert all(record["weights_version"] == 1 for record in records)  # nothing to publish
    for record in records[1:]:
        assert record["ledger/dropped_tokens/no_spread"] == 4 * TOKENS_PER_ROLLOUT
        assert not {"optim/grad_norm", "policy/loss", "lag/mean_versions"} & record.keys()
    assert rig.trainer.num_steps == 0


async def test_idle_steps_count_only_in_a_row(tmp_path: Path) -> None:
    # Without its four rewards a step is idle: steps 1, 3 and 5 are, and no two follow each other.
    failing = frozenset(f"step-{s:04d}-{g:02d}-{i:02d}" for s in (1, 3, 5) for g in (0, 1) for i in (0, 1))
    settings = SETTINGS.model_copy(update={"max_idle_steps": 2})
    rig = Rig(settings=settings, failing=failing)
    await rig.run(tmp_path / "run")
    assert rig.trainer.num_steps == 2
    first = RunDirectory(tmp_path / "run").metrics()[1]
    assert first["reward/none_count"] == 4
    assert "reward/mean" not in first


async def test_a_failed_rollout_leaves_an_error_file_and_an_event(tmp_path: Path) -> None:
    await Rig(settings=SETTINGS, failing=frozenset({"step-0002-01-00"})).run(tmp_path / "run")
    (error,) = (tmp_path / "run" / "errors").iterdir()
    assert error.name == "step-0002-01-00.error"
    lines = error.read_text().splitlines()
    assert [line.partition(": ")[0] for line in lines] == [
        "outcome", "rollout", "task", "where", "message", "what to do",
    ]  # fmt: skip
    assert lines[0] == "outcome: agent_error"
    assert lines[3:] == ["where: agent", "message: it crashed", "what to do: read its log"]
    events = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    (event,) = (event for event in events if event["event"] == "rollout_failed")
    assert (event["rollout"], event["outcome"]) == ("step-0002-01-00", "agent_error")
    assert [event["event"] for event in events][0 :: len(events) - 1] == ["started", "finished"]


async def test_every_rollout_is_on_disk_and_was_shown(tmp_path: Path) -> None:
    rig = Rig(settings=SETTINGS)
    await rig.run(tmp_path / "run")
    ids = [name.rpartition("/")[2] for _, _, name in done(tmp_path / "run")]
    assert len(ids) == 5 * 4 + 3 * 2
    assert sorted(ids) == sorted(rig.watcher.rollouts) == sorted(r.id for r in rig.runner.requests)


def test_a_loop_without_training_tasks_is_refused(tmp_path: Path) -> None:
    rig = Rig(settings=SETTINGS)
    with pytest.raises(ConfigError, match=r"^there are no tasks to train on; give tasks\.train$"):
        TrainingLoop(
            trainer=rig.trainer,
            runner=rig.runner,
            run=RunDirectory(tmp_path),
            train_tasks=[],
            held_out_tasks=make_tasks("held_out", 1),
            settings=SETTINGS,
            observer=Watcher(),
        )


async def events_of_a_whole_run(path: Path) -> int:
    rig = Rig(settings=SETTINGS)
    await rig.run(path)
    return rig.watcher.num_events


async def stopped_at(path: Path, event: int) -> Rig:
    """Run until the n-th thing that a person sees, and stop there as Ctrl-C does."""
    rig = Rig(settings=SETTINGS)
    task = asyncio.create_task(rig.run(path))
    rig.watcher.on_event, rig.watcher.at_event = task.cancel, event
    with pytest.raises(asyncio.CancelledError):
        await task
    return rig


async def test_a_run_stopped_anywhere_keeps_every_finished_step(tmp_path: Path) -> None:
    whole = Rig(settings=SETTINGS)
    await whole.run(tmp_path / "whole")
    expected = {
        record["step"]: {k: v for k, v in record.items() if not k.startswith(("time/", "eval/"))}
        for record in RunDirectory(tmp_path / "whole").metrics()
    }
    for event in range(1, whole.watcher.num_events):
        path = tmp_path / f"stopped-{event}"
        stopped = await stopped_at(path, event)
        finished = int(stopped.watcher.records[-1]["step"]) if stopped.watcher.records else None
        assert RunDirectory(path).newest_checkpoint() == finished

        resumed = Rig(settings=SETTINGS)
        await resumed.run(path, resume=True)
        assert resumed.trainer.weights == whole.trainer.weights
        assert trained_on(path) == trained_on(tmp_path / "whole")
        assert sorted(stopped.trainer.trained + resumed.trainer.trained) == sorted(whole.trainer.trained)
        for record in RunDirectory(path).metrics():
            kept = {k: v for k, v in record.items() if not k.startswith(("time/", "eval/"))}
            assert kept == expected[record["step"]]


def trained_on(path: Path) -> list[tuple[str, int, str]]:
    """What `done` says of training; an evaluation under way when the run is stopped is not made up for."""
    return [found for found in done(path) if found[2].startswith("step-")]


async def test_a_stopped_run_says_so(tmp_path: Path) -> None:
    await stopped_at(tmp_path / "run", await events_of_a_whole_run(tmp_path / "whole") // 2)
    last = (tmp_path / "run" / "events.jsonl").read_text().splitlines()[-1]
    assert json.loads(last)["event"] == "stopped"


async def test_a_step_that_fails_while_the_run_is_stopped_is_reported_and_not_saved(tmp_path: Path) -> None:
    rig = Rig(settings=SETTINGS, trainer=CountingTrainer(fails_in_step=1))
    task = asyncio.create_task(rig.run(tmp_path / "run"))

    # Two held-out tasks and four rollouts, the phases before them, a record: training is next.
    rig.watcher.on_event, rig.watcher.at_event = task.cancel, 10
    with pytest.raises(TrainerError, match="went away"):
        await task
    assert rig.watcher.phases[-1][0] == "train"
    assert RunDirectory(tmp_path / "run").newest_checkpoint() == 0


def of_step(step: int, outcome: Outcome) -> dict[str, Outcome]:
    return {f"step-{step:04d}-{group:02d}-{index:02d}": outcome for group in (0, 1) for index in (0, 1)}


async def test_a_step_in_which_the_sampler_answered_nobody_ends_the_run_and_is_done_again(
    tmp_path: Path,
) -> None:
    whole = Rig(settings=SETTINGS)
    await whole.run(tmp_path / "whole")
    dead = Rig(settings=SETTINGS, ends=of_step(3, Outcome.SAMPLER_ERROR))
    with pytest.raises(
        SamplerError, match=r"failed in all rollouts of step 3: it crashed; mend it, then resume"
    ):
        await dead.run(tmp_path / "run")
    assert [record["step"] for record in RunDirectory(tmp_path / "run").metrics()] == [0, 1, 2]
    resumed = Rig(settings=SETTINGS)
    await resumed.run(tmp_path / "run", resume=True)
    assert done(tmp_path / "run") == done(tmp_path / "whole")
    assert resumed.trainer.weights == whole.trainer.weights


async def test_a_step_in_which_the_sampler_answered_somebody_goes_on(tmp_path: Path) -> None:
    ends = of_step(3, Outcome.SAMPLER_ERROR)
    del ends["step-0003-01-01"]
    await Rig(settings=SETTINGS, ends=ends).run(tmp_path / "run")
    assert RunDirectory(tmp_path / "run").metrics()[3]["outcome/sampler_error"] == 3
