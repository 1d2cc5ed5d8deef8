from dataclasses import replace

import pytest
from hypothesis import given
from tests.algorithms.strategies import make_rollout, make_turn, steps

from pilotage.algorithms import BatchRules, build_batch
from pilotage.types import OUTCOME_RULES, Outcome, Rollout

MASK_CUT_SHORT = BatchRules(
    outcomes={
        **OUTCOME_RULES,
        Outcome.TURNS_EXHAUSTED: replace(
            OUTCOME_RULES[Outcome.TURNS_EXHAUSTED], is_trained=False, in_baseline=False
        ),
    }
)
PICKY = replace(MASK_CUT_SHORT, max_rollout_tokens=4, min_group_reward=0.2, max_group_reward=0.8)


def test_groups_with_equal_prompts_have_baselines_of_their_own() -> None:
    # Sixteen zeros and sixteen ones over the same prompt: in one group, 1/2 would be everyone's baseline.
    rollouts = [make_rollout(f"a{i}", reward=0.0, group_id="a") for i in range(16)]
    rollouts += [make_rollout(f"b{i}", reward=1.0, group_id="b") for i in range(16)]

    batch = build_batch(rollouts, BatchRules())

    assert batch.samples == ()
    assert batch.num_groups_without_spread == 2
    assert batch.ledger.dropped_tokens == {"no_spread": 96}  # 32 rollouts of 3 tokens


def test_a_long_rollout_counts_once_in_the_baseline() -> None:
    long = [make_turn(None, [1], [2]), *(make_turn(i, [3], [4]) for i in range(29))]
    rollouts = [make_rollout("long", *long, reward=1.0), make_rollout("short", reward=0.0)]

    batch = build_batch(rollouts, BatchRules())

    assert batch.advantages == {"long": 0.5, "short": -0.5}
    assert [sample.trained_tokens for sample in batch.samples] == [30, 3]


def test_a_rollout_without_a_reward_is_dropped_and_spoils_nobody() -> None:
    rollouts = [
        make_rollout("lost", reward=None, outcome=Outcome.ENVIRONMENT_ERROR),
        make_rollout("good", reward=1.0),
        make_rollout("bad", reward=0.0),
    ]

    batch = build_batch(rollouts, BatchRules())

    assert batch.advantages == {"good": 0.5, "bad": -0.5}
    assert batch.ledger.dropped_tokens == {"environment_error": 3}
    assert batch.ledger.trained_tokens == 6
    assert batch.num_groups_trained == 1


def test_tokens_of_a_retried_attempt_stay_in_the_ledger() -> None:
    retried = replace(
        make_rollout("second try", reward=1.0), attempt=1, discarded_tokens={"environment_error": 7}
    )

    batch = build_batch([retried, make_rollout("other", reward=0.0)], BatchRules())

    assert batch.ledger.sampled_tokens == 13  # two rollouts of 3 tokens, and 7 of the attempt that failed
    assert batch.ledger.trained_tokens == 6
    assert batch.ledger.dropped_tokens == {"environment_error": 7}


def test_one_reward_among_failures_is_too_few() -> None:
    rollouts = [make_rollout(f"lost{i}", reward=None, outcome=Outcome.AGENT_ERROR) for i in range(7)]
    rollouts.append(make_rollout("alone", reward=1.0))

    batch = build_batch(rollouts, BatchRules())

    assert batch.samples == ()
    assert batch.advantages == {}
    assert batch.num_groups_too_small == 1
    assert batch.ledger.dropped_tokens == {"agent_error": 21, "group_too_small": 3}


def test_a_group_of_failures_only_is_too_small() -> None:
    batch = build_batch([make_rollout("lost", reward=None, outcome=Outcome.CANCELLED)], BatchRules())

    assert (batch.num_groups, batch.num_groups_too_small, batch.num_groups_trained) == (1, 1, 0)
    assert batch.ledger.dropped_tokens == {"cancelled": 3}


def test_a_masked_rollout_is_absent_from_the_baseline_and_from_the_loss() -> None:
    rollouts = [
        make_rollout("cut", reward=9.0, outcome=Outcome.TURNS_EXHAUSTED),
        make_rollout("good", reward=1.0),
        make_rollout("bad", reward=0.0),
    ]

    batch = build_batch(rollouts, MASK_CUT_SHORT)

    assert batch.advantages == {"cut": 8.5, "good": 0.5, "bad": -0.5}
    assert {sample.sequence_id for sample in batch.samples} == {"good", "bad"}
    assert batch.ledger.masked_tokens == {"turns_exhausted": 3}


def test_scaling_by_deviation_reaches_the_samples() -> None:
    batch = build_batch(
        [make_rollout("good", reward=4.0), make_rollout("bad", reward=0.0)], BatchRules(scale_by_std=True)
    )
    # deviation 2, advantage 2 / (2 + 1e-6)
    assert batch.samples[0].advantages.max() == pytest.approx(1.0, abs=1e-5)


def test_orphaned_tokens_and_an_unpredicted_token_are_masked_with_their_reasons() -> None:
    turns = [make_turn(None, [], [1, 2]), make_turn(0, [3], [4, 5, 6], is_delivered=False)]
    rollouts = [make_rollout("odd", *turns, reward=1.0), make_rollout("even", reward=0.0)]

    ledger = build_batch(rollouts, BatchRules()).ledger

    assert ledger.masked_tokens == {"orphan": 3, "first_token": 1}
    assert (ledger.sampled_tokens, ledger.trained_tokens) == (8, 4)


def test_an_empty_step_is_an_empty_batch() -> None:
    batch = build_batch([], BatchRules())

    assert (batch.samples, batch.num_groups, batch.ledger.sampled_tokens) == ((), 0, 0)


def test_a_rollout_that_is_too_long_is_masked_and_moves_nobodys_baseline() -> None:
    long = make_rollout("long", make_turn(None, [1], [2, 3, 4, 5]), reward=9.0)
    rollouts = [long, make_rollout("good", reward=1.0), make_rollout("bad", reward=0.0)]

    batch = build_batch(rollouts, BatchRules(max_rollout_tokens=3))

    assert (batch.advantages["good"], batch.advantages["bad"]) == (0.5, -0.5)
    assert {sample.sequence_id for sample in batch.samples} == {"good", "bad"}
    assert batch.ledger.masked_tokens == {"too_long": 4}


@pytest.mark.parametrize(
    ("rules", "kept"),
    [
        (BatchRules(), ["easy", "hard", "middle"]),
        (BatchRules(max_group_reward=0.75), ["hard", "middle"]),
        (BatchRules(min_group_reward=0.26), ["easy", "middle"]),
        (BatchRules(min_group_reward=0.25, max_group_reward=0.5), ["hard", "middle"]),
    ],
)
def test_groups_that_are_too_easy_or_too_hard_are_dropped(rules: BatchRules, kept: list[str]) -> None:
    rewards = {"easy": [1, 1, 1, 0.5], "middle": [1, 1, 0, 0], "hard": [1, 0, 0, 0]}
    rollouts = [
        make_rollout(f"{group}{index}", reward=reward, group_id=group)
        for group, values in rewards.items()
        for index, reward in enumerate(values)
    ]

    batch = build_batch(rollouts, rules)

    assert sorted({sample.group_id for sample in batch.samples}) == kept
    assert batch.num_groups_filtered == 3 - len(kept)
    dropped = {"group_reward": 12 * (3 - len(kept))} if len(kept) < 3 else {}
    assert batch.ledger.dropped_tokens == dropped


@given(steps)
def test_the_ledger_balances_whatever_came_in(rollouts: list[Rollout]) -> None:
    ledger = build_batch(rollouts, PICKY).ledger  # refuses to exist where it does not balance

    assert ledger.sampled_tokens == sum(rollout.trajectory.sampled_tokens for rollout in rollouts)
    assert all(count > 0 for count in (*ledger.masked_tokens.values(), *ledger.dropped_tokens.values()))


@given(steps)
def test_the_order_of_rollouts_changes_nothing(rollouts: list[Rollout]) -> None:
    one, other = build_batch(rollouts, BatchRules()), build_batch(rollouts[::-1], BatchRules())

    assert one.ledger == other.ledger
    assert one.advantages == pytest.approx(other.advantages)
    assert sorted(s.token_ids.tolist() for s in one.samples) == sorted(
        s.token_ids.tolist() for s in other.samples
    )


@given(steps)
def test_trained_rollouts_come_from_groups_with_two_different_rewards(rollouts: list[Rollout]) -> None:
    batch = build_batch(rollouts, BatchRules())

    for group_id in {sample.group_id for sample in batch.samples}:
        rewards = {
            rollout.reward.value
            for rollout in rollouts
            if rollout.group_id == group_id and rollout.reward and OUTCOME_RULES[rollout.outcome].in_baseline
        }
        assert len(rewards) > 1
