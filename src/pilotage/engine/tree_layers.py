"""How the layers of a module take a packed prefix tree, which travels beside the hidden states as a keyword.

Attention over a tree is registered with transformers as one more attention function, so that a module's own
layers run unchanged; without a tree it is transformers' own for torch. A module with layers that are no full
attention has a state that would run over a node's border: it is not packed.

The last layer is ours, for the tokens whose output is read. Log-probs of trained tokens need the last hidden
state of the tokens before them and of no other: all tokens give keys and values, but queries, projections and
the MLP of those that nobody reads would be computed for nothing. In rollouts of agents they are six in seven,
and a small policy has few layers.
"""

import logging
from functools import cache
from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask
from transformers.models.llama.modeling_llama import rotate_half

from pilotage.engine.modules import PLAIN_DECODERS
from pilotage.engine.tree_attention import TreePass

_log = logging.getLogger(__name__)
_NAME = "pilotage_tree"


def enable_trees(module: PreTrainedModel) -> bool:
    """Let a module take packed trees; returns whether it can, and says why where it cannot."""
    reason = _why_not(module.config)
    if reason is not None:
        _log.warning("%s: every sample is computed whole, also what it shares with others", reason)
        return False
    module.set_attn_implementation(_NAME)
    layers: Any = module.base_model.layers
    layers[-1].__class__ = _reading(type(layers[-1]))
    return True


def _why_not(config: Any) -> str | None:
    """Say why a module is left as it is."""
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    if kinds != {"full_attention"}:
        others = ", ".join(sorted(kinds - {"full_attention"}))
        return f"this {config.model_type} has layers with {others}, where samples would not stay apart"
    if config.model_type not in PLAIN_DECODERS:
        return f"{config.model_type} is none of {', '.join(sorted(PLAIN_DECODERS))}"
    if getattr(config, "sliding_window", None) is not None:
        return f"this {config.model_type} attends in a window"
    return None


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    tree: TreePass | None = None,
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
    return tree.attend(query, key, value, scaling).transpose(1, 2).contiguous(), None


@cache
def _reading(layer_class: Any) -> Any:
    """Return the class of a decoder layer that computes, in a pass over a tree, what is read of it.

    A class, because hooks, copies and recomputing of activations go by it.
    """

    class Reading(layer_class):
        def forward(self, hidden_states: Tensor, *, tree: TreePass | None = None, **rest: Any) -> Tensor:
            if tree is None:
                return super().forward(hidden_states, **rest)
            return _read(self, hidden_states, tree, *rest["position_embeddings"])

    return Reading


def _read(layer: Any, hidden_states: Tensor, tree: TreePass, cos: Tensor, sin: Tensor) -> Tensor:
    """Return [B, R, hidden] from [B, T, hidden] and the rotations [B, T, D] of their positions."""
    attention = layer.self_attn
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    normed = layer.input_layernorm(hidden_states)
    query = _heads(attention, "q", normed[:, tree.read_R])
    key = _heads(attention, "k", normed)
    value = _heads(attention, "v", normed)
    attended = tree.attend_read(
        _rotate(query, cos[:, :, tree.read_R], sin[:, :, tree.read_R]),
        _rotate(key, cos, sin),
        value,
        attention.scaling,
    )
    residual = hidden_states[:, tree.read_R] + attention.o_proj(attended.transpose(1, 2).flatten(2))
    return residual + layer.mlp(layer.post_attention_layernorm(residual))


def _heads(attention: Any, which: str, states: Tensor) -> Tensor:
    """Return [B, heads, tokens, D], normalised where the family does so."""
    heads = getattr(attention, f"{which}_proj")(states).unflatten(-1, (-1, attention.head_dim))
    norm: nn.Module | None = getattr(attention, f"{which}_norm", None)
    return (heads if norm is None else norm(heads)).transpose(1, 2)


def _rotate(states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return states * cos + rotate_half(states) * sin


AttentionInterface.register(_NAME, _attend)
AttentionMaskInterface.register(_NAME, sdpa_mask)  # the sampler may use the same module, with padded rows
