"""Attention over a packed prefix tree: a token sees the nodes above its own, and its own up to itself.

Registered with transformers as one more attention function, so that a module's own layers run unchanged; the
tree travels beside the hidden states as a keyword. Without a tree it is transformers' own for torch.
A module with layers that are no full attention has a state that would run over a node's border: it is not
packed.

The row is in depth-first order, so everything below a node is one span behind it. On a CPU that makes two
calls of torch's flash kernel a node, neither with a mask: its own tokens, causal, and all tokens below it
over its keys. What a token gets from the nodes above and from its own is joined by the logarithms of the sums
of exponentials, as between the blocks of flash attention (arXiv 2205.14135, 2310.01889); the backward pass of
each call takes the joined output and logarithm, which makes its gradients those of the whole. On an
accelerator it is FlexAttention with the same rule as a block mask.
"""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, override

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from pilotage.engine.modules import PLAIN_DECODERS
from pilotage.engine.prefix_tree import PrefixTree, Span

_NAME = "pilotage_tree"

type TreeAttention = Callable[[Tensor, Tensor, Tensor, float | None], Tensor]
"""Query [B, H, T, D], key and value [B, G, T, D], the scores' scale; returns [B, H, T, D]."""
type _Call = tuple[slice, slice, bool]
"""Which tokens read which, and whether each reads only up to itself."""


def enable_trees(module: PreTrainedModel) -> bool:
    """Let a module take packed trees; returns whether it can, and leaves it as it is where it cannot."""
    config: Any = module.config
    layers = set(getattr(config, "layer_types", None) or ["full_attention"])
    window = getattr(config, "sliding_window", None)
    if config.model_type not in PLAIN_DECODERS or layers != {"full_attention"} or window is not None:
        return False
    module.set_attn_implementation(_NAME)
    return True


def attention_over(tree: PrefixTree, device: torch.device) -> TreeAttention:
    """Return attention over `tree`, prepared once for all layers."""
    return spanwise_attention(tree) if device.type == "cpu" else flex_tree_attention(tree, device)


def spanwise_attention(tree: PrefixTree) -> TreeAttention:
    """Return attention by two calls a node, for a CPU."""
    calls = _calls(tree.spans)

    def attend(query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
        shared = query.shape[1] // key.shape[1]
        if shared > 1:
            key, value = key.repeat_interleave(shared, 1), value.repeat_interleave(shared, 1)
        joined: Any = _Spanwise.apply(query, key, value, calls, scale)
        return joined

    return attend


def flex_tree_attention(tree: PrefixTree, device: torch.device, *, compiled: bool = True) -> TreeAttention:
    """Return FlexAttention.

    Args:
        compiled: whether the kernel is compiled; without it everything is computed densely, in a test.
    """
    below_T = torch.from_numpy(tree.ends_below_T).to(device)

    def is_seen(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & (query < below_T[key])

    size = tree.num_tokens
    mask: BlockMask = create_block_mask(
        is_seen, None, None, size, size, device=str(device), _compile=compiled
    )
    kernel: Any = _compiled_flex() if compiled else flex_attention

    def attend(query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
        return kernel(query, key, value, block_mask=mask, scale=scale, enable_gqa=True)

    return attend


@cache
def _compiled_flex() -> Any:
    return torch.compile(flex_attention, dynamic=True)


class _Spanwise(torch.autograd.Function):
    """Attention of every node's tokens to the nodes above and to their own."""

    @override
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, calls: Sequence[_Call], scale: float | None
    ) -> Tensor:
        """Return [B, H, T, D]; query, key and value have the same shape."""
        joined = torch.zeros(query.shape, dtype=torch.float32)
        logsum_BHT = torch.full(query.shape[:3], -torch.inf)
        for reading, read, is_causal in calls:
            part, part_logsum = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                query[:, :, reading], key[:, :, read], value[:, :, read], 0.0, is_causal, scale=scale
            )
            before = logsum_BHT[:, :, reading]
            after = torch.logaddexp(before, part_logsum)
            span = joined[:, :, reading]
            span.mul_((before - after).exp().unsqueeze(-1))
            span.addcmul_(part.float(), (part_logsum - after).exp().unsqueeze(-1))
            logsum_BHT[:, :, reading] = after
        joined = joined.to(query.dtype)
        ctx.save_for_backward(query, key, value, joined, logsum_BHT)
        ctx.calls, ctx.scale = calls, scale
        return joined

    @override
    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of query, key and value."""
        query, key, value, joined, logsum_BHT = ctx.saved_tensors
        (gradient,) = grad_outputs
        d_query, d_key, d_value = (torch.zeros(query.shape, dtype=torch.float32) for _ in range(3))
        for reading, read, is_causal in ctx.calls:
            parts = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                gradient[:, :, reading],
                query[:, :, reading],
                key[:, :, read],
                value[:, :, read],
                joined[:, :, reading],
                logsum_BHT[:, :, reading],
                0.0,
                is_causal,
                scale=ctx.scale,
            )
            for whole, part, span in zip(
                (d_query, d_key, d_value), parts, (reading, read, read), strict=True
            ):
                whole[:, :, span] += part
        return *(whole.to(query.dtype) for whole in (d_query, d_key, d_value)), None, None


def _calls(spans: Sequence[Span]) -> list[_Call]:
    calls: list[_Call] = []
    for span in spans:
        own = slice(span.start, span.end)
        calls.append((own, own, True))
        if span.end_below > span.end:
            calls.append((slice(span.end, span.end_below), own, False))
    return calls


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    tree: TreeAttention | None = None,
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
    return tree(query, key, value, scaling).transpose(1, 2).contiguous(), None


AttentionInterface.register(_NAME, _attend)
AttentionMaskInterface.register(_NAME, sdpa_mask)  # the sampler may use the same module, with padded rows
