import numpy as np
import pytest
import torch

from pilotage.engine.draws import RowSettings, choose, draw_key, uniforms
from pilotage.types import SamplingParams

CPU = torch.device("cpu")
LOGITS = torch.log(torch.tensor([0.5, 0.3, 0.15, 0.05]))


def chosen(params: SamplingParams, points: list[float]) -> tuple[list[int], list[float]]:
    """Choose from LOGITS at each point of the cumulative distribution."""
    settings = RowSettings.of([params] * len(points), vocab_size=4, device=CPU)
    ids, logprobs = choose(LOGITS.expand(len(points), 4), settings, np.array(points))
    return ids.tolist(), np.exp(logprobs).tolist()


def test_a_point_of_the_cumulative_distribution_chooses_the_token_that_covers_it() -> None:
    # borders at 0.5, 0.8, 0.95
    ids, probabilities = chosen(SamplingParams(), [0.0, 0.49, 0.51, 0.79, 0.81, 0.96, 1 - 2**-53])
    assert ids == [0, 0, 1, 1, 2, 3, 3]
    assert probabilities == pytest.approx([0.5, 0.5, 0.3, 0.3, 0.15, 0.05, 0.05])


def test_temperature_sharpens_choice_and_log_prob_alike() -> None:
    # squares 0.25, 0.09, 0.0225, 0.0025 sum to 0.365
    ids, probabilities = chosen(SamplingParams(temperature=0.5), [0.6, 0.7])
    assert ids == [0, 1]
    assert probabilities == pytest.approx([0.25 / 0.365, 0.09 / 0.365])


def test_greedy_takes_the_likeliest_with_its_log_prob_at_temperature_one() -> None:
    assert chosen(SamplingParams(temperature=0), [0.99]) == ([0], pytest.approx([0.5]))


def test_top_k_keeps_the_likeliest_ids_and_renormalises() -> None:
    ids, probabilities = chosen(SamplingParams(top_k=2), [0.6, 0.64, 0.999])
    assert ids == [0, 1, 1]  # border at 0.5 / 0.8 = 0.625
    assert probabilities == pytest.approx([0.625, 0.375, 0.375])


def test_top_p_keeps_the_fewest_ids_that_reach_the_mass() -> None:
    ids, probabilities = chosen(SamplingParams(top_p=0.81), [0.999, 0.9])
    assert ids == [2, 2]  # 0.5 + 0.3 does not reach 0.81, with 0.15 it does
    assert probabilities == pytest.approx([0.15 / 0.95, 0.15 / 0.95])
    assert chosen(SamplingParams(top_p=0.01), [0.999])[0] == [0]


def test_rows_of_a_batch_keep_their_own_settings() -> None:
    params = [
        SamplingParams(),
        SamplingParams(temperature=0),
        SamplingParams(top_k=1),
        SamplingParams(temperature=2),
    ]
    settings = RowSettings.of(params, vocab_size=4, device=CPU)
    ids, _ = choose(LOGITS.expand(4, 4), settings, np.full(4, 0.97))
    assert ids.tolist() == [3, 0, 0, 3]


def test_draws_are_uniform_and_unlike_each_other() -> None:
    keys = np.array([draw_key(seed, turn) for seed in range(100) for turn in range(10)], np.uint64)
    draws = np.stack([uniforms(keys, np.full(1000, j, np.uint64)) for j in range(20)])

    assert draws.min() >= 0
    assert draws.max() < 1
    assert np.unique(draws).size == draws.size
    # 20,000 draws: the standard error of the mean is 0.002, of a tenth's count 42
    assert abs(draws.mean() - 0.5) < 0.01
    counts, _ = np.histogram(draws, bins=10, range=(0, 1))
    assert (np.abs(counts - 2000) < 5 * 42).all()
    assert abs(np.corrcoef(draws[0], draws[1])[0, 1]) < 0.15
    assert abs(np.corrcoef(draws[0, :-1], draws[0, 1:])[0, 1]) < 0.15


def test_without_a_seed_each_request_draws_afresh() -> None:
    assert draw_key(None, 0) != draw_key(None, 0)
    assert draw_key(7, 0) == draw_key(7, 0)
    assert len({draw_key(7, 0), draw_key(7, 1), draw_key(8, 0), draw_key(-7, 0)}) == 4
