"""A run's rollouts and one rollout's tree, as a person reads them."""

from dataclasses import replace
from pathlib import Path

from tests.algorithms.strategies import make_rollout, make_turn
from tests.ops.records import make_evaluation, make_record

from pilotage.ops.show import format_rollout, format_run
from pilotage.types import BranchCause, Outcome, Reward, RolloutFailure, TokenIds


def decode(ids: TokenIds) -> str:
    return "".join(f"<{i}>" for i in ids.tolist())


def test_a_run_is_listed_step_by_step_with_what_was_measured() -> None:
    records = [make_evaluation(0, 0.5), make_record(1, 1.25)]
    files = [Path(f"rollouts/step-0001/step-0001-00-0{index}.json.gz") for index in (0, 1)]
    assert format_run(records, files).splitlines() == [
        " step   reward  held-out  trained tokens  seconds",
        "    0        -     0.500               -        -",
        "    1    1.250         -              24      1.0",
        "2 rollouts: step-0001-00-00 ... step-0001-00-01",
    ]


def test_a_run_without_rollouts_says_so() -> None:
    assert format_run([], []).splitlines()[-1] == "0 rollouts: none yet"


def test_a_rollout_is_shown_with_masks_branches_and_causes() -> None:
    rollout = make_rollout(
        "r1",
        make_turn(None, [1, 2], [10, 20]),
        make_turn(0, [3], [30]),
        replace(make_turn(0, [4], [40], version=2), branch_cause=BranchCause.HISTORY_REWRITTEN),
        make_turn(2, [5], [50], is_delivered=False),
        replace(make_turn(None, [6], [60]), branch_cause=BranchCause.NEW_CONVERSATION),
        reward=1.5,
    )
    rollout = replace(
        rollout,
        reward=Reward(value=1.5, key="reward", source="verifier/reward.json", components={"file_f1": 1.0}),
        timings_s={"agent": 1.234, "total": 2.0},
    )
    assert format_rollout(rollout, decode).splitlines() == [
        "rollout r1, task task, attempt 0",
        "outcome completed, reward 1.5 (verifier/reward.json)",
        "parts: file_f1 1",
        "seconds: agent 1.23, total 2.00",
        "",
        "turn 0 from the start: context 2 tokens mask 0, sampled 2 tokens mask 1, mean log-prob -0.150,"
        " weights [0], stop",
        "| <1><2>>><10><20><<",
        "",
        "turn 1 after turn 0: context 1 tokens mask 0, sampled 1 tokens mask 1, mean log-prob -0.300,"
        " weights [0], stop",
        "| <3>>><30><<",
        "",
        "  turn 2 after turn 0, branch: history_rewritten: context 1 tokens mask 0, sampled 1 tokens mask 1,"
        " mean log-prob -0.400, weights [2], stop",
        "  | <4>>><40><<",
        "",
        "  turn 3 after turn 2: context 1 tokens mask 0, sampled 1 tokens mask 0 (orphan: never delivered),"
        " mean log-prob -0.500, weights [0], stop",
        "  | <5>>><50><<",
        "",
        "turn 4 from the start, branch: new_conversation: context 1 tokens mask 0, sampled 1 tokens mask 1,"
        " mean log-prob -0.600, weights [0], stop",
        "| <6>>><60><<",
    ]


def test_a_rollout_without_a_reward_is_masked_with_its_outcome() -> None:
    failure = RolloutFailure(where="agent", message="it crashed", advice="read its log")
    rollout = replace(make_rollout("r1", reward=None, outcome=Outcome.AGENT_ERROR), failure=failure)
    lines = format_rollout(rollout, decode).splitlines()
    assert lines[1:5] == [
        "outcome agent_error, reward none",
        "failure in agent: it crashed",
        "what to do: read its log",
        "seconds: not measured",
    ]
    assert "sampled 3 tokens mask 0 (agent_error)" in lines[6]


def test_every_line_of_a_turns_text_is_marked() -> None:
    rollout = make_rollout("r1", make_turn(None, [1], [2]), reward=0.0)
    lines = format_rollout(rollout, lambda ids: f"a\nb{ids[0]}").splitlines()
    assert lines[-3:] == ["| a", "| b1>>a", "| b2<<"]
