"""Log-probs of trained tokens under a torch module, differentiable, without ever holding all logits."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from pilotage.engine.modules import PLAIN_DECODERS
from pilotage.engine.prefix_tree import PrefixTree
from pilotage.engine.tree_attention import attention_over
from pilotage.types import Mask, TokenIds

_CHUNK_LOGITS = 1 << 24
"""Logits held at a time, 64 MiB in float32; more is computed in chunks, again in the backward pass."""


def batch_logprobs(
    module: PreTrainedModel,
    ids: Sequence[TokenIds],
    masks: Sequence[Mask],
    *,
    temperature: float,
    as_tree: bool,
) -> tuple[Tensor, int]:
    """Return [n] log-probs of the masked tokens, sample after sample, and how many tokens were forwarded.

    Args:
        as_tree: whether as one prefix tree; the module is then one that `enable_trees` has prepared.
    """
    if as_tree:
        tree = PrefixTree.of(ids, masks)
        return tree_logprobs(module, tree, temperature=temperature), tree.num_tokens
    return trained_logprobs(module, ids, masks, temperature=temperature), sum(array.size for array in ids)


def trained_logprobs(
    module: PreTrainedModel, ids: Sequence[TokenIds], masks: Sequence[Mask], *, temperature: float
) -> Tensor:
    """Return [n] log-probs of the masked tokens, sample after sample, at the sampling temperature.

    Sequences are padded on the right, where causal attention never looks, so no attention mask is
    needed. Logits are computed only where a trained token follows.
    """
    width = max(array.size for array in ids)
    padded = np.zeros((len(ids), width), np.int64)
    is_trained = np.zeros((len(ids), width), np.bool_)
    for row, (array, mask) in enumerate(zip(ids, masks, strict=True)):
        padded[row, : array.size] = array
        is_trained[row, : array.size] = mask
    input_ids = torch.from_numpy(padded).to(module.device)
    before = torch.from_numpy(is_trained[:, 1:]).to(module.device)
    targets_n = torch.from_numpy(padded[is_trained]).to(module.device)
    if module.config.model_type not in PLAIN_DECODERS:
        logits = module(input_ids=input_ids, use_cache=False).logits[:, :-1][before]
        return _gather(logits, targets_n, temperature)
    hidden = module.base_model(input_ids=input_ids, use_cache=False).last_hidden_state[:, :-1][before]
    return project(hidden, _head(module), targets_n, temperature=temperature)


def tree_logprobs(module: PreTrainedModel, tree: PrefixTree, *, temperature: float) -> Tensor:
    """Return what `trained_logprobs` does, with every distinct token forwarded once.

    Args:
        module: one that `enable_trees` has prepared.
    """
    hidden = module.base_model(
        input_ids=torch.from_numpy(tree.token_ids_T).to(module.device).unsqueeze(0),
        position_ids=torch.from_numpy(tree.positions_T).to(module.device).unsqueeze(0),
        attention_mask=torch.zeros(
            (1, 1, 1, 1), device=module.device
        ),  # made already: none of T x T is wanted
        use_cache=False,
        tree=attention_over(tree, module.device),
    ).last_hidden_state[0]
    predictors_n = torch.from_numpy(np.searchsorted(tree.read_R, tree.predictors_n)).to(module.device)
    targets_n = torch.from_numpy(tree.targets_n).to(module.device)
    return project(hidden.index_select(0, predictors_n), _head(module), targets_n, temperature=temperature)


def _head(module: PreTrainedModel) -> nn.Module:
    head = module.get_output_embeddings()
    assert head is not None
    return head


def project(
    hidden_nh: Tensor,
    head: nn.Module,
    targets_n: Tensor,
    *,
    temperature: float,
    chunk_logits: int = _CHUNK_LOGITS,
) -> Tensor:
    """Return [n] log-probs of targets from hidden states, holding at most `chunk_logits` logits at a time."""
    num_logits: int = head.out_features  # pyright: ignore[reportAssignmentType]
    size = max(1, chunk_logits // num_logits)
    if targets_n.numel() <= size:
        return _gather(head(hidden_nh), targets_n, temperature)

    def part(states: Tensor, targets: Tensor) -> Tensor:
        return _gather(head(states), targets, temperature)

    parts = zip(hidden_nh.split(size), targets_n.split(size), strict=True)
    chunks: list[Tensor] = [
        checkpoint(part, states, targets, use_reentrant=False) for states, targets in parts
    ]
    return torch.cat(chunks)


def _gather(logits: Tensor, targets_n: Tensor, temperature: float) -> Tensor:
    scaled = logits.float() if temperature == 1 else logits.float() / temperature
    return torch.log_softmax(scaled, dim=-1).gather(1, targets_n.unsqueeze(1)).squeeze(1)
