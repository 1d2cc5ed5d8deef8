"""Attention over a packed prefix tree: each node's queries see the keys of the nodes above and their own.

Registered with transformers as one more attention function, so that a module's own layers run unchanged; the
tree travels beside the hidden states as a keyword. Without a tree it is transformers' own for torch.
A module with layers that are no full attention has a state that would run over a node's border: it is not
packed.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from pilotage.engine.modules import PLAIN_DECODERS
from pilotage.engine.prefix_tree import Node, PrefixTree

_NAME = "pilotage_tree"


class TreeMasks:
    """Which keys the queries of each node see, made once for all layers."""

    def __init__(self, tree: PrefixTree, device: torch.device) -> None:
        self.tree = tree
        self.masks = [_mask(node, tree, device) for node in tree.nodes]


def enable_trees(module: PreTrainedModel) -> bool:
    """Let a module take packed trees; returns whether it can, and leaves it as it is where it cannot."""
    config: Any = module.config
    layers = set(getattr(config, "layer_types", None) or ["full_attention"])
    window = getattr(config, "sliding_window", None)
    if config.model_type not in PLAIN_DECODERS or layers != {"full_attention"} or window is not None:
        return False
    module.set_attn_implementation(_NAME)
    return True


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    tree: TreeMasks | None = None,
    **rest: Any,
) -> tuple[Tensor, None]:
    """Attend.

    Args:
        query: [B, H, T, D].
        key: [B, G, T, D], each for H / G heads; as `value`.
        attention_mask: what transformers made for scaled dot products; read without a tree only.

    Returns:
        [B, T, H, D], and None for the weights, which nobody reads.
    """
    if tree is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **rest)
    sizes = tree.tree.sizes
    # Splitting once, and not slicing per node, keeps the backward pass linear in the row's length.
    queries, keys, values = query.split(sizes, 2), key.split(sizes, 2), value.split(sizes, 2)
    parts: list[Tensor] = []
    for number, (node, mask) in enumerate(zip(tree.tree.nodes, tree.masks, strict=True)):
        seen = (*node.path, number)
        k, v = (torch.cat([pieces[each] for each in seen], 2) for pieces in (keys, values))
        parts.append(
            scaled_dot_product_attention(
                queries[number], k, v, attn_mask=mask, is_causal=mask is None, scale=scaling, enable_gqa=True
            )
        )
    return torch.cat(parts, 2).transpose(1, 2).contiguous(), None


def _mask(node: Node, tree: PrefixTree, device: torch.device) -> Tensor | None:
    """Return [size, above + size], or None where plain causal attention says the same."""
    if not node.path:
        return None
    above = sum(tree.nodes[each].size for each in node.path)
    seen = torch.ones(node.size, above + node.size, dtype=torch.bool, device=device)
    return seen.tril(above)


AttentionInterface.register(_NAME, _attend)
AttentionMaskInterface.register(_NAME, sdpa_mask)  # the sampler may use the same module, with padded rows
