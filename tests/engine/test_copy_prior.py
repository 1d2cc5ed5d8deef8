"""The copy prior: before any training, a phrase that was seen before is continued as it was."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from tests.engine.models import module_logprobs, write_tokenizer
from transformers import Qwen3Config, Qwen3ForCausalLM

from pilotage.engine import PolicyConfig, create_policy
from pilotage.engine.copy_prior import install_copy_prior

VOCAB_SIZE = 32
NUM_PHRASES, REPEATS = 6, 3


def config(*, has_copy_prior: bool) -> PolicyConfig:
    """The sizes of the demo's policy."""
    return PolicyConfig(
        hidden_size=96,
        num_layers=3,
        num_heads=2,
        num_kv_heads=2,
        head_size=64,
        intermediate_size=288,
        rope_theta=100_000.0,
        has_copy_prior=has_copy_prior,
    )


@pytest.fixture(scope="module")
def policies(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Path]:
    root = tmp_path_factory.mktemp("policies")
    tokenizer = write_tokenizer(root / "tokenizer")
    return {
        has_prior: create_policy(
            root / str(has_prior), config=config(has_copy_prior=has_prior), tokenizer_dir=tokenizer, seed=0
        )
        for has_prior in (False, True)
    }


def repeated_phrases(seed: int) -> tuple[list[int], list[int]]:
    """Return ids, and the positions that repeat the inside of a phrase seen before.

    All 18 tokens are different, so a token is enough to tell what followed it.
    """
    rng = np.random.default_rng(seed)
    phrases: NDArray[np.int64] = rng.permutation(VOCAB_SIZE)[: 3 * NUM_PHRASES].reshape(NUM_PHRASES, 3)
    order = np.concatenate([rng.permutation(NUM_PHRASES) for _ in range(REPEATS)])
    known = [at for at in range(3 * NUM_PHRASES, 3 * order.size) if at % 3]
    return phrases[order].reshape(-1).tolist(), known


def loss_of(policy: Path) -> float:
    losses: list[float] = []
    for seed in range(4):
        ids, known = repeated_phrases(seed)
        logprobs = module_logprobs(policy, ids)
        losses += [-float(logprobs[at - 1, ids[at]]) for at in known]
    return float(np.mean(losses))


def test_an_untrained_policy_with_the_prior_continues_phrases_that_it_has_seen(
    policies: dict[bool, Path],
) -> None:
    random, prior = loss_of(policies[False]), loss_of(policies[True])
    assert random == pytest.approx(np.log(VOCAB_SIZE), rel=0.1)  # it knows nothing: 3.47 nats of 32 tokens
    assert prior < 0.6 * random


def test_the_prior_knows_no_phrase_that_it_has_not_seen(policies: dict[bool, Path]) -> None:
    ids, _ = repeated_phrases(0)
    logprobs = module_logprobs(policies[True], ids)
    fresh = [-float(logprobs[at - 1, ids[at]]) for at in range(1, 3 * NUM_PHRASES)]
    assert np.mean(fresh) > 0.9 * np.log(VOCAB_SIZE)


def make_module(**shape: int) -> Qwen3ForCausalLM:
    sizes: dict[str, Any] = {
        "vocab_size": 16,
        "hidden_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "intermediate_size": 32,
    }
    sizes |= shape
    rope = {"rope_type": "default", "rope_theta": 100_000.0}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Qwen3ForCausalLM(Qwen3Config(**sizes, rope_parameters=rope, tie_word_embeddings=True))


def test_the_same_seed_gives_the_same_weights_and_another_seed_others() -> None:
    weights: list[dict[str, torch.Tensor]] = []
    for seed in (0, 0, 1):
        module = make_module()
        install_copy_prior(module, seed=seed)
        weights.append(dict(module.named_parameters()))
    one, same, other = weights
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert any(not torch.equal(one[name], other[name]) for name in one)
    assert all(weight.requires_grad and torch.isfinite(weight).all() for weight in one.values())


@pytest.mark.parametrize(
    "shape", [{"num_hidden_layers": 1}, {"num_attention_heads": 4, "num_key_value_heads": 2}]
)
def test_a_model_without_two_layers_or_with_grouped_heads_is_refused(shape: dict[str, int]) -> None:
    with pytest.raises(
        ValueError, match=r"^a copy prior needs two layers or more, and as many key-value heads"
    ):
        install_copy_prior(make_module(**shape), seed=0)


def test_a_width_that_cannot_hold_what_the_heads_match_is_refused() -> None:
    # Planes p of 64 with 150 < 100,000 ** (p / 32): 14 to 31, so 36 dimensions, of which 48 holds no two.
    with pytest.raises(
        ValueError, match=r"^36 dimensions of a head carry content, a width of 48 holds twice"
    ):
        install_copy_prior(make_module(hidden_size=48), seed=0)


def test_heads_without_slow_planes_are_refused() -> None:
    # A head of four has planes 0 and 1; plane 1 turns 1 / 316 a token, slow enough, but a head of two has
    # plane 0 alone, which turns one radian a token.
    with pytest.raises(ValueError, match=r"^0 dimensions of a head carry content"):
        install_copy_prior(make_module(head_dim=2), seed=0)
