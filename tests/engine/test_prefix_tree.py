"""A batch as one tree: the same log-probs and gradients as row by row, and no token computed twice."""

import copy
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.engine.models import write_model
from transformers import PreTrainedModel, Qwen2Config

from pilotage.engine.logprobs import trained_logprobs, tree_logprobs
from pilotage.engine.micro_batches import cost, passes, samples_of
from pilotage.engine.modules import PLAIN_DECODERS, load_module
from pilotage.engine.prefix_tree import PrefixTree
from pilotage.engine.trainer import TorchTrainer
from pilotage.engine.tree_attention import flex_attention_over, spanwise_attention
from pilotage.engine.tree_layers import enable_trees
from pilotage.types import LossConfig, PolicyLoss, Sample, TokenIds, token_ids

CPU = torch.device("cpu")
TREE_FAMILIES = sorted(PLAIN_DECODERS)


@pytest.fixture(scope="module")
def modules(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[PreTrainedModel, PreTrainedModel]]:
    """By family: the module as it is, and one that takes trees."""
    directory = tmp_path_factory.mktemp("models")
    pairs: dict[str, tuple[PreTrainedModel, PreTrainedModel]] = {}
    for name in TREE_FAMILIES:
        path = write_model(directory / name, name)
        pairs[name] = load_module(path, device=CPU), load_module(path, device=CPU)
        assert enable_trees(pairs[name][1])
    return pairs


@st.composite
def batches(draw: st.DrawFn) -> list[tuple[TokenIds, np.ndarray]]:
    """Sequences over three tokens, so that they share prefixes of every length, or are equal or contained."""
    rows: list[tuple[TokenIds, np.ndarray]] = []
    for _ in range(draw(st.integers(1, 7))):
        ids = draw(st.lists(st.integers(1, 3), min_size=2, max_size=12))
        mask = np.array([False, *draw(st.lists(st.booleans(), min_size=len(ids) - 1, max_size=len(ids) - 1))])
        mask[draw(st.integers(1, len(ids) - 1))] = True
        rows.append((token_ids(ids), mask))
    return rows


def contexts_of(rows: Sequence[tuple[TokenIds, np.ndarray]]) -> set[tuple[int, ...]]:
    """Everything that must be forwarded: each beginning of a sequence before its last trained token."""
    return {tuple(ids[: end + 1].tolist()) for ids, mask in rows for end in range(int(mask.nonzero()[0][-1]))}


@given(batches())
@settings(max_examples=300, deadline=None)
def test_every_distinct_beginning_is_in_the_row_once_behind_the_tokens_that_lead_to_it(
    rows: list[tuple[TokenIds, np.ndarray]],
) -> None:
    tree = PrefixTree.of([ids for ids, _ in rows], [mask for _, mask in rows])
    tokens = tree.token_ids_T.tolist()
    found: list[tuple[int, ...]] = []
    for span in tree.spans:
        above = [other for other in tree.spans if other.end <= span.start < other.end_below]
        before = [token for other in above for token in tokens[other.start : other.end]]
        found += [(*before, *tokens[span.start : end]) for end in range(span.start + 1, span.end + 1)]
    assert len(found) == len(set(found)) == tree.num_tokens
    assert set(found) == contexts_of(rows)
    assert tree.positions_T.tolist() == [len(beginning) - 1 for beginning in found]
    expected = [tuple(ids[:at].tolist()) for ids, mask in rows for at in mask.nonzero()[0]]
    assert [found[index] for index in tree.predictors_n] == expected
    assert tree.targets_n.tolist() == [token for ids, mask in rows for token in ids[mask].tolist()]


@pytest.mark.parametrize("family", TREE_FAMILIES)
@given(rows=batches(), temperature=st.sampled_from([1.0, 0.7]))
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_log_probs_and_gradients_are_those_of_single_rows(
    modules: dict[str, tuple[PreTrainedModel, PreTrainedModel]],
    family: str,
    rows: list[tuple[TokenIds, np.ndarray]],
    temperature: float,
) -> None:
    plain, packed = modules[family]
    ids, masks = [row for row, _ in rows], [mask for _, mask in rows]
    wanted = trained_logprobs(plain, ids, masks, temperature=temperature)
    got = tree_logprobs(packed, PrefixTree.of(ids, masks), temperature=temperature)
    weights = torch.linspace(-1, 1, wanted.numel())
    for module, values in ((plain, wanted), (packed, got)):
        module.zero_grad()
        (values * weights).sum().backward()
    torch.testing.assert_close(got, wanted, atol=1e-5, rtol=1e-5)
    for (name, one), other in zip(plain.named_parameters(), packed.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, atol=1e-5, rtol=1e-4, msg=name)


def test_the_last_layer_computes_what_is_read_and_no_more(
    modules: dict[str, tuple[PreTrainedModel, PreTrainedModel]],
) -> None:
    """Long nodes of which more is read than one call of attention takes."""
    rng = np.random.default_rng(0)
    shared = rng.integers(1, 32, 100)
    ids = [token_ids(np.concatenate([shared, rng.integers(1, 32, 700)])) for _ in range(2)]
    masks = [(np.arange(800) > 0) & (rng.random(800) < 0.6) for _ in ids]
    tree = PrefixTree.of(ids, masks)
    plain, packed = modules["qwen3"]
    seen: list[int] = []

    def note(_: torch.nn.Module, taken: tuple[torch.Tensor]) -> None:
        seen.append(taken[0].shape[1])

    hook = packed.get_submodule("model.layers.1.mlp").register_forward_pre_hook(note)
    wanted = trained_logprobs(plain, ids, masks, temperature=1.0)
    got = tree_logprobs(packed, tree, temperature=1.0)
    hook.remove()
    assert seen == [tree.read_R.size]
    assert tree.read_R.size < 0.7 * tree.num_tokens
    torch.testing.assert_close(got, wanted, atol=1e-5, rtol=1e-5)
    for module, values in ((plain, wanted), (packed, got)):
        module.zero_grad()
        values.mean().backward()
    for (name, one), other in zip(plain.named_parameters(), packed.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, atol=1e-6, rtol=1e-4, msg=name)


@pytest.mark.parametrize("family", TREE_FAMILIES)
def test_in_bfloat16_a_tree_is_as_near_to_float32_as_single_rows_are(
    modules: dict[str, tuple[PreTrainedModel, PreTrainedModel]], family: str
) -> None:
    """The stated bound: a tree is off by at most 1.25 times what rows are off by."""
    samples = rollouts(groups=4, size=4, prompt=24, sampled=16)
    ids, masks = [s.token_ids for s in samples], [s.loss_mask for s in samples]
    tree = PrefixTree.of(ids, masks)
    plain, packed = (copy.deepcopy(module) for module in modules[family])

    def gradient(module: PreTrainedModel, dtype: torch.dtype) -> torch.Tensor:
        module.to(dtype).zero_grad()  # pyright: ignore[reportArgumentType]
        if module is packed:
            logprobs = tree_logprobs(module, tree, temperature=1.0)
        else:
            logprobs = trained_logprobs(module, ids, masks, temperature=1.0)
        (logprobs * torch.linspace(-1, 1, logprobs.numel())).sum().backward()
        return torch.cat([p.grad.double().flatten() for p in module.parameters() if p.grad is not None])

    exact = gradient(plain, torch.float32)
    of_rows, of_tree = (gradient(module, torch.bfloat16) - exact for module in (plain, packed))
    assert 0 < of_rows.norm() < 0.1 * exact.norm()
    assert of_tree.norm() < 1.25 * of_rows.norm()


@given(rows=batches())
@settings(max_examples=25, deadline=None)
def test_the_block_mask_of_an_accelerator_sees_what_the_spans_of_a_cpu_see(
    rows: list[tuple[TokenIds, np.ndarray]],
) -> None:
    tree = PrefixTree.of([ids for ids, _ in rows], [mask for _, mask in rows])
    torch.manual_seed(0)
    key, value = (torch.randn(1, 2, tree.num_tokens, 16) for _ in range(2))
    for of_Q, size in ((None, tree.num_tokens), (tree.read_R, tree.read_R.size)):
        query = torch.randn(1, 4, size, 16)
        flex = flex_attention_over(tree, CPU, of_Q, compiled=False)
        spanwise = spanwise_attention(tree, of_Q)
        torch.testing.assert_close(
            flex(query, key, value, 0.3), spanwise(query, key, value, 0.3), atol=1e-5, rtol=1e-5
        )


def rollouts(*, groups: int, size: int, prompt: int, sampled: int) -> list[Sample]:
    """Groups with a prompt in common, each rollout with two branches that share its first half."""
    rng = np.random.default_rng(0)
    made: list[Sample] = []
    for group in range(groups):
        shared = rng.integers(1, 32, prompt)
        for member in range(size):
            first = rng.integers(1, 32, sampled // 2)
            for branch in range(2):
                ids = np.concatenate([shared, first, rng.integers(1, 32, sampled - sampled // 2)])
                mask = np.arange(ids.size) >= prompt + (0 if branch == 0 else sampled // 2)
                made.append(
                    Sample(
                        sequence_id=f"g{group}/{member}",
                        group_id=f"g{group}",
                        token_ids=ids.astype(np.int32),
                        loss_mask=mask,
                        sampler_logprobs=np.where(mask, rng.normal(-3, 0.3, ids.size), 0).astype(np.float32),
                        advantages=np.where(mask, np.float32(member - 1), np.float32(0)),
                        weights_versions=np.where(mask, 0, -1).astype(np.int32),
                    )
                )
    return made


@pytest.mark.parametrize("budget", [40, 100, 10_000])
def test_packs_keep_rollouts_whole_and_forward_less_than_rows_under_the_same_budget(budget: int) -> None:
    samples = rollouts(groups=3, size=4, prompt=20, sampled=10)
    packs = [samples_of(each) for each in passes(samples, budget_tokens=budget, trees=True)]
    assert sorted(map(id, (s for each in packs for s in each))) == sorted(map(id, samples))
    homes = [{s.sequence_id for s in each} for each in packs]
    assert sum(map(len, homes)) == len(set().union(*homes)) == 12
    trees = [PrefixTree.of([s.token_ids for s in each], [s.loss_mask for s in each]) for each in packs]
    assert all(tree.num_tokens <= budget or len(home) == 1 for tree, home in zip(trees, homes, strict=True))
    # What a pass costs counts the last trained token of each sample, which is not forwarded.
    for each, tree in zip(passes(samples, budget_tokens=budget, trees=True), trees, strict=True):
        assert cost(each, trees=True) - sum(len(r.samples) for r in each) == tree.num_tokens
    assert sum(tree.num_tokens for tree in trees) < sum(s.token_ids.size for s in samples)
    assert len(packs) <= len(passes(samples, budget_tokens=budget, trees=False))
    again = passes(samples[::-1], budget_tokens=budget, trees=True)
    assert [samples_of(each) for each in again] == packs


@pytest.mark.parametrize("policy_loss", [PolicyLoss.GRPO, PolicyLoss.GSPO])
def test_an_update_is_the_same_whatever_is_shared_and_says_what_it_forwarded(
    tmp_path: Path, policy_loss: PolicyLoss
) -> None:
    path = write_model(tmp_path / "model", "qwen3")
    samples = rollouts(groups=2, size=3, prompt=16, sampled=12)
    loss = LossConfig(policy_loss=policy_loss, clip_low=0.05, clip_high=0.05, kl_coef=0.1, temperature=0.9)
    gradients: list[list[torch.Tensor]] = []
    said = []
    for budget in (30, 10_000):
        trainer = TorchTrainer(path, device=CPU, micro_batch_tokens=budget)
        said.append(trainer.forward_backward(samples, loss))
        gradients.append([p.grad for p in trainer.module.parameters() if p.grad is not None])
    small, whole = said
    assert whole.forwarded_tokens == len(contexts_of([(s.token_ids, s.loss_mask) for s in samples]))
    assert small.forwarded_tokens > whole.forwarded_tokens
    assert small.loss == pytest.approx(whole.loss, abs=1e-6)
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-4)


def test_layers_with_a_window_or_a_state_are_not_packed_and_the_log_says_why(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    module = load_module(write_model(tmp_path / "gpt2", "gpt2"), device=CPU)
    assert not enable_trees(module)
    assert "gpt2 is none of llama, mistral, qwen2, qwen3" in caplog.text
    other = load_module(write_model(tmp_path / "qwen2", "qwen2"), device=CPU)
    config = other.config
    assert isinstance(config, Qwen2Config)
    for kind in ("sliding_attention", "linear_attention"):
        config.layer_types = ["full_attention", kind]
        assert not enable_trees(other)
        assert f"this qwen2 has layers with {kind}" in caplog.text
    config.layer_types = None
    config.sliding_window = 16
    assert not enable_trees(other)
    assert "this qwen2 attends in a window" in caplog.text
    assert config._attn_implementation == "sdpa"


def test_a_checkpoint_of_a_packed_module_names_no_attention_of_ours(tmp_path: Path) -> None:
    trainer = TorchTrainer(write_model(tmp_path / "model", "qwen3"), device=CPU, micro_batch_tokens=100)
    (tmp_path / "saved").mkdir()
    trainer.save_state(tmp_path / "saved", weights_only=True)
    assert "pilotage_tree" not in (tmp_path / "saved" / "config.json").read_text()
