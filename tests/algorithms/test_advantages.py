import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pilotage.algorithms import group_relative, has_spread

rewards = st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=8).map(lambda values: np.array(values))


def test_advantages_are_rewards_minus_their_mean() -> None:
    # mean (0 + 1 + 3 + 0) / 4 = 1
    assert group_relative(np.array([0.0, 1.0, 3.0, 0.0])).tolist() == [-1.0, 0.0, 2.0, -1.0]


def test_scaling_divides_by_the_population_deviation() -> None:
    # mean 2, deviations -1 and +1, population deviation 1, plus eps = 1
    assert group_relative(np.array([1.0, 3.0]), scale_by_std=True, eps=1.0).tolist() == [-0.5, 0.5]


def test_a_reward_outside_the_baseline_is_compared_with_it_and_does_not_move_it() -> None:
    in_baseline = np.array([True, True, False])
    # mean of 0 and 2 is 1
    assert group_relative(np.array([0.0, 2.0, 9.0]), in_baseline_G=in_baseline).tolist() == [-1.0, 1.0, 8.0]


def test_equal_rewards_give_exactly_zero() -> None:
    # 0.1 + 0.1 + 0.1 is not 0.3 in binary, so a mean would leave about 1e-17
    assert group_relative(np.full(3, 0.1), scale_by_std=True).tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("values", [[np.nan, 1.0], [np.inf, 1.0]])
def test_a_reward_that_is_not_finite_is_refused(values: list[float]) -> None:
    with pytest.raises(ValueError, match="finite"):
        group_relative(np.array(values))
    with pytest.raises(ValueError, match="finite"):
        has_spread(np.array(values))


def test_an_empty_baseline_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one reward"):
        group_relative(np.array([1.0]), in_baseline_G=np.array([False]))


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([1.0, 1.0], False),
        ([0.0, 0.0], False),
        ([0.0, 1e-9], True),  # relative: 1e-9 is all there is
        ([1e9, 1e9 + 1e-3], False),  # 1e-12 of the magnitude
        ([3.0, 2.9], True),
    ],
)
def test_spread_is_relative_to_the_largest_reward(values: list[float], expected: bool) -> None:
    assert has_spread(np.array(values)) is expected


@given(rewards, st.floats(-1e3, 1e3))
def test_advantages_sum_to_zero_and_ignore_a_common_shift(
    values: np.ndarray[tuple[int], np.dtype[np.float64]], shift: float
) -> None:
    advantages = group_relative(values)
    assert abs(advantages.sum()) < 1e-9
    np.testing.assert_allclose(group_relative(values + shift), advantages, atol=1e-9)
