import numpy as np
import pytest
from hypothesis import given
from tests.algorithms.strategies import make_turn, trajectories

from pilotage.algorithms import to_samples
from pilotage.types import Sample, Trajectory


def samples_of(trajectory: Trajectory, advantage: float = 0.5) -> list[Sample]:
    return to_samples(trajectory, sequence_id="s", group_id="g", advantage=advantage)


def test_a_conversation_becomes_one_sample_with_only_sampled_tokens_trained() -> None:
    trajectory = Trajectory(
        turns=(
            make_turn(None, [1, 2], [4, 5], version=6),
            make_turn(0, [9], [7], version=7),
            make_turn(1, [8], [3], version=7),
        )
    )

    [sample] = samples_of(trajectory)

    #                                     P  P  A0 A0 T  A1 T  A2
    assert sample.token_ids.tolist() == [1, 2, 4, 5, 9, 7, 8, 3]
    assert sample.loss_mask.tolist() == [False, False, True, True, False, True, False, True]
    assert sample.advantages.tolist() == [0, 0, 0.5, 0.5, 0, 0.5, 0, 0.5]
    assert sample.weights_versions.tolist() == [-1, -1, 6, 6, -1, 7, -1, 7]
    expected = np.array([0, 0, -0.04, -0.05, 0, -0.07, 0, -0.03], np.float32)
    assert sample.sampler_logprobs.tolist() == expected.tolist()


def test_a_shared_turn_is_trained_in_the_first_branch_and_is_context_in_the_next() -> None:
    root, left, right = make_turn(None, [1], [2, 3]), make_turn(0, [4], [5]), make_turn(0, [6], [7])

    first, second = samples_of(Trajectory(turns=(root, left, right)))

    assert first.token_ids.tolist() == [1, 2, 3, 4, 5]
    assert first.loss_mask.tolist() == [False, True, True, False, True]
    assert second.token_ids.tolist() == [1, 2, 3, 6, 7]
    assert second.loss_mask.tolist() == [False, False, False, False, True]


def test_an_orphaned_turn_gives_no_sample_but_its_delivered_parent_is_trained() -> None:
    orphan = make_turn(0, [3], [4], is_delivered=False)

    [sample] = samples_of(Trajectory(turns=(make_turn(None, [1], [2]), orphan)))

    assert sample.token_ids.tolist() == [1, 2]
    assert sample.loss_mask.tolist() == [False, True]


def test_an_orphan_that_the_agent_went_on_from_is_context() -> None:
    orphan, follower = make_turn(None, [1], [2], is_delivered=False), make_turn(0, [3], [4])

    [sample] = samples_of(Trajectory(turns=(orphan, follower)))

    assert sample.token_ids.tolist() == [1, 2, 3, 4]
    assert sample.loss_mask.tolist() == [False, False, False, True]


def test_the_first_token_of_a_sequence_is_never_trained() -> None:
    [sample] = samples_of(Trajectory(turns=(make_turn(None, [], [7, 8]),)))

    assert sample.loss_mask.tolist() == [False, True]


@pytest.mark.parametrize(
    "turns",
    [(), (make_turn(None, [1], []),), (make_turn(None, [], [7]),)],
    ids=["no turn", "no token", "only 0"],
)
def test_nothing_to_train_is_no_sample(turns: tuple[()]) -> None:
    assert samples_of(Trajectory(turns=turns)) == []


@given(trajectories)
def test_every_delivered_token_that_has_a_predecessor_is_trained_exactly_once(trajectory: Trajectory) -> None:
    trainable = 0
    for index, turn in enumerate(trajectory.turns):
        is_first = turn.completion_ids.size > 0 and trajectory.prompt_ids(index).size == 0
        trainable += (turn.completion_ids.size - is_first) if turn.is_delivered else 0

    assert sum(sample.trained_tokens for sample in samples_of(trajectory)) == trainable


@given(trajectories)
def test_samples_replay_what_the_sampler_saw_and_drew(trajectory: Trajectory) -> None:
    seen = {
        (*trajectory.prompt_ids(index).tolist(), *turn.completion_ids.tolist())
        for index, turn in enumerate(trajectory.turns)
    }

    for sample in samples_of(trajectory):
        assert tuple(sample.token_ids.tolist()) in seen
        trained = sample.loss_mask
        # make_turn gives token t the log-prob -t / 100
        np.testing.assert_allclose(
            sample.sampler_logprobs[trained], -sample.token_ids[trained] / 100, rtol=1e-6
        )
        assert (sample.weights_versions[trained] >= 0).all()
        assert not sample.sampler_logprobs[~trained].any()
        assert not sample.advantages[~trained].any()
