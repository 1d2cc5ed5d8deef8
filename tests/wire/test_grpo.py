import json
import os
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.algorithms.plain_losses import Trained, plain_gradient, plain_loss
from tests.wire.stock_batches import Row, evaluate, places, random_rows, stock_tree

from pilotage.errors import InvalidBodyError
from pilotage.types import Denominators, PolicyLoss, Reduction
from pilotage.wire.frames import decode_frame, encode_frame
from pilotage.wire.grpo import from_stock, read_rows, to_rows

TWO_ROWS = [
    #   prompt 7 8, sampled 9 4: the entries at 8 and 9 speak of 9 and 4
    Row(ids=[7, 8, 9, 4], mask=[0, 1, 1, 0], old=[0, -1, -2, 0], advantages=[0, 0.5, 0.5, 0]),
    Row(ids=[1, 2, 3], mask=[0, 1, 0], old=[0, -3, 0], advantages=[0, -1, 0]),
]


def edited(tree: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    """Set one value of a tree; `...` takes the key away."""
    *parents, last = path.split(".")
    at = tree
    for name in parents:
        at = at.setdefault(name, {})
    if value is ...:
        del at[last]
    else:
        at[last] = value
    return tree


@pytest.mark.parametrize("packed", [False, True])
def test_entries_move_from_where_a_token_is_predicted_to_the_token(packed: bool) -> None:
    batch = from_stock(decode_frame(encode_frame(stock_tree(TWO_ROWS, packed=packed))))

    one, two = batch.samples
    assert one.token_ids.tolist() == [7, 8, 9, 4]
    assert one.loss_mask.tolist() == [False, False, True, True]
    assert one.sampler_logprobs.tolist() == [0, 0, -1, -2]
    assert one.advantages.tolist() == [0, 0, 0.5, 0.5]
    assert two.token_ids.tolist() == [1, 2, 3]
    assert two.loss_mask.tolist() == [False, False, True]
    assert (two.sampler_logprobs[2], two.advantages[2]) == (-3, -1)
    assert one.sequence_id != two.sequence_id
    assert batch.denominators is None
    # padded to width 5, or one after the other
    assert places(batch.layout) == ([(0, 4), (4, 3)] if packed else [(0, 4), (5, 3)])


@pytest.mark.parametrize(
    ("packed", "expected"),
    [
        (False, [[-0.1, -0.2, -0.3, 0, 0], [-0.4, -0.5, 0, 0, 0]]),
        (True, [[-0.1, -0.2, -0.3, 0, -0.4, -0.5, 0]]),
    ],
)
def test_log_probs_go_back_to_where_a_token_is_predicted(packed: bool, expected: list[list[float]]) -> None:
    rows = read_rows({"args": (), **_model_inputs(stock_tree(TWO_ROWS, packed=packed))})

    assert [sample.loss_mask.tolist() for sample in rows.samples] == [
        [False, True, True, True],
        [False, True, True],
    ]
    logprobs = [np.array([0, -0.1, -0.2, -0.3], np.float32), np.array([0, -0.4, -0.5], np.float32)]
    result = to_rows(rows.layout, logprobs)
    assert result.dtype == np.float32
    np.testing.assert_array_equal(result, np.array(expected, np.float32))


def _model_inputs(tree: dict[str, Any]) -> dict[str, Any]:
    context = {key: value for key, value in tree["context"].items() if key == "cu_seqlens"}
    return {"kwargs": tree["kwargs"], "context": context}


def test_a_row_of_padding_alone_is_no_sequence() -> None:
    tree = stock_tree(TWO_ROWS)
    tree["kwargs"]["attention_mask"][1] = 0
    tree["context"]["loss_mask"][1] = 0
    batch = from_stock(tree)

    assert len(batch.samples) == 1
    assert to_rows(batch.layout, [np.zeros(4, np.float32)]).shape == (2, 5)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, (PolicyLoss.GRPO, Reduction.TOKEN_MEAN, 0.2, 0.2)),
        ({"eps_clip": 0.1, "eps_clip_higher": 0.3}, (PolicyLoss.GRPO, Reduction.TOKEN_MEAN, 0.1, 0.3)),
        ({"eps_clip": 1.0, "eps_clip_higher": 3e38}, (PolicyLoss.GRPO, Reduction.TOKEN_MEAN, 1.0, 3e38)),
        ({"eps_clip": 2.0}, (PolicyLoss.GRPO, Reduction.TOKEN_MEAN, 1.0, 2.0)),
        (
            {"importance_sampling_level": "sequence", "loss_agg_mode": "seq-mean-token-mean"},
            (PolicyLoss.GSPO, Reduction.SEQUENCE_MEAN, 0.2, 0.2),
        ),
        (
            {"use_cispo_loss": True, "is_weight_clip_max": 5.0},
            (PolicyLoss.CISPO, Reduction.TOKEN_MEAN, 1.0, 4.0),
        ),
    ],
)
def test_modes_of_grpo_become_losses(config: dict[str, Any], expected: tuple[object, ...]) -> None:
    loss = from_stock(stock_tree(TWO_ROWS, **config)).loss
    assert (loss.policy_loss, loss.reduction, loss.clip_low, loss.clip_high) == expected


def test_the_clamps_of_k3_and_the_constant_temperature_are_taken_over() -> None:
    tree = stock_tree(TWO_ROWS, use_kl_loss=True, kl_loss_coef=0.01)
    temperature = np.full((2, 5), 0.5, np.float32)
    temperature[1, 3:] = 1.0  # padding
    batch = from_stock(edited(tree, "kwargs.temperature", temperature))

    assert (batch.loss.kl_coef, batch.loss.kl_cap, batch.loss.temperature) == (0.01, 10.0, 0.5)


@pytest.mark.parametrize("packed", [False, True])
def test_a_sequence_ratio_has_the_mean_advantage_of_its_trained_tokens(packed: bool) -> None:
    row = Row(ids=[1, 2, 3, 4], mask=[0, 1, 1, 0], advantages=[9, 1, 3, 9], old=[0, -1, -1, 0])
    batch = from_stock(stock_tree([row], packed=packed, importance_sampling_level="sequence"))

    assert batch.samples[0].advantages.tolist() == [0, 0, 2, 2]


def test_on_policy_is_stated_and_then_behaviour_may_be_absent() -> None:
    extras: dict[str, Any] = {"x-on-policy": True, "x-note": "mine"}
    batch = from_stock(stock_tree(TWO_ROWS, **extras))
    assert batch.loss.on_policy


# --- denominators ---


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, None),
        ({"dp_size": 1}, None),
        ({"batch_num_tokens": 8, "dp_size": 4}, Denominators(trained_tokens=8, num_sequences=2)),
        ({"batch_num_tokens": 1}, Denominators(trained_tokens=1, num_sequences=2)),
        (
            {"global_batch_size": 16, "dp_size": 2, "loss_agg_mode": "seq-mean-token-sum"},
            Denominators(trained_tokens=3, num_sequences=16),
        ),
        ({"batch_num_tokens": 8.0, "global_batch_size": 6}, Denominators(trained_tokens=8, num_sequences=6)),
    ],
)
def test_the_three_counts_become_the_denominators_of_the_batch(
    config: dict[str, Any], expected: Denominators | None
) -> None:
    assert from_stock(stock_tree(TWO_ROWS, **config)).denominators == expected


def test_counts_may_stand_in_the_context_but_must_agree() -> None:
    tree = edited(stock_tree(TWO_ROWS), "context.batch_num_tokens", np.array([8]))
    assert from_stock(tree).denominators == Denominators(trained_tokens=8, num_sequences=2)

    tree = edited(stock_tree(TWO_ROWS, batch_num_tokens=9), "context.batch_num_tokens", 8)
    with pytest.raises(InvalidBodyError, match=r"is 8, but processing\.config\.batch_num_tokens is 9"):
        from_stock(tree)


MODES = ["token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm", "seq-mean-token-mean"]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("mode", [MODES[0], MODES[1], MODES[3]])
def test_two_ranks_that_share_a_batch_add_up_to_one(mode: str, packed: bool) -> None:
    rows = random_rows(np.random.default_rng(3))
    whole, gradient = evaluate(stock_tree(rows, packed=packed, loss_agg_mode=mode), rows)
    tokens = sum(sum(row.mask) for row in rows)
    sequences = sum(any(row.mask) for row in rows)
    counts = {"dp_size": 2, "batch_num_tokens": tokens, "global_batch_size": sequences}
    ranks = [rows[:1], rows[1:]]
    parts = [evaluate(stock_tree(r, packed=packed, loss_agg_mode=mode, **counts), r) for r in ranks]

    assert sum(part.loss for part, _ in parts) == pytest.approx(whole.loss, abs=1e-12)
    together = [grad for _, grads in parts for grad in grads]
    for got, expected in zip(together, gradient, strict=True):
        np.testing.assert_allclose(got, expected, atol=1e-12, rtol=0)


# --- what is refused ---

FAULTS: list[tuple[str, Any, str]] = [
    ("processing.config.entropy_coeff", 0.01, "adds no gradient"),
    ("processing.config.use_sapo_loss", True, "SAPO is not supported"),
    ("processing.config.use_decoupled_loss", True, "send the behaviour log-probs"),
    ("processing.config.prox_logp_method", "loglinear", "decoupled"),
    ("processing.config.m2_threshold", 0.04, "M2PO"),
    ("processing.config.behav_imp_weight_cap", 5.0, "decoupled"),
    ("processing.config.teacher_tau", 1.0, "teacher"),
    ("processing.config.aux_ce_weight", 0.1, "echo"),
    ("processing.config.eps_clp", 0.2, "unknown key"),
    ("processing.config.eps_clip", None, "null is no value"),
    ("processing.config.eps_clip", 0.0, "greater than 0"),
    ("processing.config.c_clip", 0.9, "greater than 1"),
    ("processing.config.is_weight_clip_max", 4.0, "use_cispo_loss only"),
    ("processing.config.kl_loss_type", "k1", "low_var_kl"),
    ("processing.config.loss_agg_mode", "prompt-mean", "token-mean"),
    ("processing.config.dp_size", 2, "multiplies the loss"),
    ("processing.config.batch_num_tokens", 0, "from 1 on"),
    ("processing.config.batch_num_tokens", True, "whole number"),
    ("processing.config.entropy_coeff", np.zeros(2), "adds no gradient"),
    ("processing.config", 3, "expected an object"),
    ("processing.loss_fn", "verl_grpo", "expected one of grpo"),
    ("processing.loss_fn", np.zeros(2), "expected a string"),
    ("processing.pst", [], "unknown key"),
    ("context.old_log_probs_shifted", ..., "x-on-policy: true"),
    ("context.loss_mask", ..., "missing"),
    ("context.advantages", ..., "missing"),
    ("context.prox_logp_shifted", np.zeros((2, 5)), "decoupled"),
    ("context.prompt_group_ids", np.zeros(2), "prompt-mean"),
    ("context.ref_log_probs_shifted", np.zeros((2, 5)), "use_kl_loss"),
    ("context.advantage", np.zeros((2, 5)), "unknown key"),
    ("context.input_ids", np.zeros((2, 5), np.int64), "differ from kwargs.input_ids"),
    ("context.advantages", np.zeros((2, 4), np.float32), "has shape"),
    ("context.advantages", np.zeros((2, 5), np.bool_), "dtype bool"),
    ("kwargs.input_ids", ..., "missing"),
    ("kwargs.input_ids", np.full((2, 5), -1), "token ids lie in"),
    ("kwargs.temperature", 0.0, "positive and finite"),
    ("kwargs.temperature", np.linspace(0.1, 1, 10).reshape(2, 5), "from token to token"),
    ("kwargs.position_ids", np.ones((2, 5), np.int64), "0, 1, 2"),
    ("kwargs.labels", np.ones((2, 5), np.int64), "not the next tokens"),
    ("kwargs.use_cache", True, "keeps no cache"),
    ("args", (1,), "positional arguments"),
    ("rr_sample_ids", ["a"], "router replay"),
    ("extra", 1, "unknown key"),
]


@pytest.mark.parametrize(("path", "value", "reason"), FAULTS)
def test_what_would_not_have_its_effect_is_refused_with_path_and_reason(
    path: str, value: Any, reason: str
) -> None:
    with pytest.raises(InvalidBodyError) as caught:
        from_stock(edited(stock_tree(TWO_ROWS), path, value))

    assert caught.value.path == path
    assert reason in str(caught.value)


def test_an_unknown_post_processor_is_refused_by_name() -> None:
    with pytest.raises(InvalidBodyError, match=r"processing\.post\.1: expected one of identity"):
        from_stock(edited(stock_tree(TWO_ROWS), "processing.post", ["identity", "entropy"]))


@pytest.mark.parametrize(
    ("config", "path"),
    [
        ({"use_cispo_loss": True, "c_clip": 3.0}, "c_clip"),
        ({"use_cispo_loss": True, "importance_sampling_level": "sequence"}, "importance_sampling_level"),
        ({"use_cispo_loss": True, "is_weight_clip_max": 1.0}, "is_weight_clip_max"),
    ],
)
def test_cispo_with_what_it_does_not_have_is_refused(config: dict[str, Any], path: str) -> None:
    with pytest.raises(InvalidBodyError) as caught:
        from_stock(stock_tree(TWO_ROWS, **config))
    assert caught.value.path == f"processing.config.{path}"


def test_a_packed_row_has_no_width_to_divide_by() -> None:
    with pytest.raises(InvalidBodyError, match="width of padded rows"):
        from_stock(stock_tree(TWO_ROWS, packed=True, loss_agg_mode="seq-mean-token-sum-norm"))


def test_left_padding_is_refused_with_its_row() -> None:
    tree = stock_tree(TWO_ROWS)
    tree["kwargs"]["attention_mask"][1] = [0, 0, 1, 1, 1]
    with pytest.raises(InvalidBodyError, match=r"attention_mask\.1: its tokens are not the leading columns"):
        from_stock(tree)


@pytest.mark.parametrize("column", [3, 4])
def test_a_mask_that_was_not_shifted_is_found_where_no_token_follows(column: int) -> None:
    tree = stock_tree(TWO_ROWS)
    tree["context"]["loss_mask"][0, column] = 1
    with pytest.raises(InvalidBodyError, match=rf"loss_mask\.0\.{column}: .*shift the mask"):
        from_stock(tree)


@pytest.mark.parametrize("bounds", [[0, 4], [0, 4, 8], [1, 4, 7], [0, 4, 4, 7], [7]])
def test_boundaries_that_do_not_cover_the_packed_row_are_refused(bounds: list[int]) -> None:
    tree = edited(stock_tree(TWO_ROWS, packed=True), "context.cu_seqlens", np.array(bounds, np.int32))
    with pytest.raises(InvalidBodyError, match=r"context\.cu_seqlens: boundaries rise"):
        from_stock(tree)


def test_a_value_that_is_not_finite_is_refused_under_the_mask_only() -> None:
    tree = stock_tree(TWO_ROWS)
    tree["context"]["advantages"][0, 0] = np.nan  # a prompt token
    from_stock(tree)
    tree["context"]["advantages"][1, 1] = np.inf
    with pytest.raises(InvalidBodyError, match=r"context\.advantages\.1\.1: not finite"):
        from_stock(tree)


def test_an_empty_mask_is_refused() -> None:
    with pytest.raises(InvalidBodyError, match="nothing to compute"):
        from_stock(stock_tree([Row(ids=[1, 2], mask=[0, 0])]))


# --- cross entropy ---


@pytest.mark.parametrize(
    "labels",
    [
        [[-100, -100, 9, 4, -100], [1, 2, 3, -100, -100]],  # of the token itself
        [[-100, 9, 4, -100, -100], [2, 3, -100, -100, -100]],  # of the next token
    ],
)
@pytest.mark.parametrize("processing", [None, {"loss_fn": "sft_ce"}, {"loss_fn": "sft", "config": {}}])
def test_labels_of_either_frame_name_the_same_targets(
    labels: list[list[int]], processing: dict[str, Any] | None
) -> None:
    tree = stock_tree(TWO_ROWS)
    kwargs = {**tree["kwargs"], "labels": np.array(labels)}
    batch = from_stock({"args": (), "kwargs": kwargs, "processing": processing})

    assert batch.loss.policy_loss is PolicyLoss.CROSS_ENTROPY
    assert batch.samples[0].loss_mask.tolist() == [False, False, True, True]
    assert batch.samples[1].loss_mask.tolist() == [False, True, True]


@pytest.mark.parametrize(
    ("labels", "reason"),
    [
        (None, "missing"),
        ([[-100] * 5] * 2, "nothing to compute"),
        ([[7, -100, -100, -100, -100], [-100] * 5], "nothing predicts"),
        ([[6, 6, 6, 6, -100], [-100] * 5], "must be the row's own ids"),
        ([[-100, -100, -100, 4, 0], [-100] * 5], "must be the row's own ids"),
    ],
)
def test_labels_that_are_no_targets_are_refused(labels: list[list[int]] | None, reason: str) -> None:
    tree = stock_tree(TWO_ROWS)
    kwargs = {**tree["kwargs"], "labels": None if labels is None else np.array(labels)}
    with pytest.raises(InvalidBodyError, match=reason):
        from_stock({"args": (), "kwargs": kwargs})


# --- losses through the whole path ---

CONFIGS: list[dict[str, Any]] = [
    {},
    {"eps_clip": 0.1, "eps_clip_higher": 0.28},
    {"c_clip": 1.3},
    {"importance_sampling_level": "sequence"},
    {"importance_sampling_level": "sequence", "c_clip": 1.2, "eps_clip": 0.05},
    {"use_cispo_loss": True, "eps_clip_higher": 0.28},
    {"use_cispo_loss": True, "is_weight_clip_max": 1.2},
    {"use_kl_loss": True, "kl_loss_coef": 0.3},
    {"x-on-policy": True, "use_kl_loss": True},
]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("config", CONFIGS)
def test_losses_over_the_wire_are_those_of_plain_loops(
    config: dict[str, Any], mode: str, packed: bool
) -> None:
    if packed and mode == "seq-mean-token-sum-norm":
        return  # refused, see above
    rows = random_rows(np.random.default_rng(len(mode)), one_advantage=True)
    tree = stock_tree(rows, packed=packed, loss_agg_mode=mode, **config)
    result, gradient = evaluate(tree, rows)
    sequences = [
        Trained(
            logprobs=_under(row.mask, row.logprobs),
            behaviour=_under(row.mask, row.old),
            advantages=_under(row.mask, row.advantages),
            reference=_under(row.mask, row.reference),
        )
        for row in rows
    ]
    loss = from_stock(tree).loss

    assert result.loss == pytest.approx(plain_loss(sequences, loss), abs=1e-9)
    ours = np.concatenate([g[np.array(row.mask) == 1] for g, row in zip(gradient, rows, strict=True)])
    assert ours.tolist() == pytest.approx(plain_gradient(sequences, loss), abs=1e-5)


def _under(mask: list[int], values: list[float]) -> list[float]:
    return [value for value, is_on in zip(values, mask, strict=True) if is_on]


@pytest.mark.parametrize("packed", [False, True])
def test_masked_rows_and_masked_advantages_change_nothing(packed: bool) -> None:
    rows = random_rows(np.random.default_rng(1))
    plain, gradient = evaluate(stock_tree(rows, packed=packed), rows)
    noisy = [
        Row(
            ids=row.ids,
            mask=row.mask,
            logprobs=row.logprobs,
            old=row.old,
            advantages=[a if on else 1e6 for a, on in zip(row.advantages, row.mask, strict=True)],
        )
        for row in rows
    ]
    noisy.append(Row(ids=[5, 6, 7], mask=[0, 0, 0], advantages=[3, 3, 3], old=[-9, -9, -9]))
    result, noisy_gradient = evaluate(stock_tree(noisy, packed=packed), noisy)

    assert result.loss == plain.loss
    assert all(np.array_equal(a, b) for a, b in zip(gradient, noisy_gradient, strict=False))
    assert not noisy_gradient[-1].any()


def test_losses_over_the_wire_are_those_of_the_public_package() -> None:
    python = os.environ.get("PILOTAGE_STOCK_PYTHON")
    if python is None:
        pytest.skip("arctic-platform is not installed: set PILOTAGE_STOCK_PYTHON to a Python that has it")
    rng = np.random.default_rng(0)
    counts = {"dp_size": 1, "batch_num_tokens": 50, "global_batch_size": 9}
    settings: list[dict[str, Any]] = [
        {**c, **more, "loss_agg_mode": m} for c in CONFIGS for m in MODES for more in ({}, counts)
    ]
    batches = [random_rows(rng) for _ in settings]
    # the norm divides by the width of the rows: the longest of them, on both sides
    trees = [stock_tree(rows, padding=0, **config) for rows, config in zip(batches, settings, strict=True)]
    cases = [
        {
            "rows": [
                {
                    "logprobs": row.logprobs,
                    "old": row.old,
                    "advantages": row.advantages,
                    "reference": row.reference,
                    "mask": row.mask,
                }
                for row in rows
            ],
            "config": config,
        }
        for rows, config in zip(batches, settings, strict=True)
    ]
    peer = Path(__file__).parent / "stock_losses.py"
    done = subprocess.run(
        [python, str(peer)], input=json.dumps(cases), capture_output=True, text=True, check=False, timeout=280
    )
    assert done.returncode == 0, done.stderr
    for tree, rows, expected in zip(trees, batches, json.loads(done.stdout), strict=True):
        result, gradient = evaluate(tree, rows)
        assert result.loss == pytest.approx(expected["loss"], abs=1e-5), tree["processing"]
        for got, wanted in zip(gradient, expected["gradient"], strict=True):
            assert got.tolist() == pytest.approx(wanted, abs=1e-5), tree["processing"]


def test_the_frame_of_a_forward_backward_can_be_scored_as_it_is() -> None:
    ids = np.arange(1, 9).reshape(2, 4)
    context: dict[str, Any] = {
        "advantages": np.ones((2, 4), np.float32),
        "loss_mask": np.ones((2, 4), np.bool_),
    }
    config: dict[str, Any] = {"eps_clip": 0.1}
    processing: dict[str, Any] = {"loss_fn": "grpo", "config": config, "post": ["compute_logprobs"]}
    kwargs: dict[str, Any] = {"input_ids": ids}
    rows = read_rows({"args": (), "kwargs": kwargs, "context": context, "processing": processing})
    assert [sample.loss_mask.tolist() for sample in rows.samples] == [[False, True, True, True]] * 2
    with pytest.raises(InvalidBodyError, match=r"context\.advantage: unknown key"):
        read_rows({"kwargs": {"input_ids": ids}, "context": {"advantage": context["advantages"]}})
