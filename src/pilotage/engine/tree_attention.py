"""Attention over a packed prefix tree: a token sees the nodes above its own, and its own up to itself.

The row is in depth-first order, so everything below a node is one span behind it. On a CPU that makes two
calls of torch's flash kernel a node, neither with a mask: its own tokens, causal, and all tokens below it
over its keys. What a token gets from the nodes above and from its own is joined by the logarithms of the sums
of exponentials, as between the blocks of flash attention (arXiv 2205.14135, 2310.01889); the backward pass of
each call takes the joined output and logarithm, which makes its gradients those of the whole. On an
accelerator it is FlexAttention with the same rule as a block mask.

Attention can be asked for some of the tokens. Where those are some of a node, the call of its own tokens has
a mask.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, override

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from pilotage.engine.prefix_tree import PrefixTree, Span

_MASKED_QUERIES = 256
"""Queries of one call that has a mask, which is made anew each time and as wide as their node."""

type TreeAttention = Callable[[Tensor, Tensor, Tensor, float | None], Tensor]
"""Query [B, H, Q, D], key and value [B, G, T, D], the scores' scale; returns [B, H, Q, D]."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TreePass:
    """Attention over one tree, prepared once for all layers of a forward pass."""

    attend: TreeAttention
    """Of all tokens: Q is T."""
    attend_read: TreeAttention
    """Of those that are read: Q is R."""
    read_R: Tensor
    """Where in the row these are, ascending."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Call:
    """Which queries read which keys in one call of the kernel."""

    queries: slice
    keys: slice
    is_causal: bool = False
    """Each reads up to itself: the queries are those of the keys."""
    last_keys_Q: Tensor | None = None
    """For some queries of the keys' node: the place in the row up to which each reads."""

    def mask(self, dtype: torch.dtype) -> Tensor | None:
        """Return [Q, K], what is added to the scores."""
        if self.last_keys_Q is None:
            return None
        keys = torch.arange(self.keys.start, self.keys.stop)
        mask = torch.zeros(self.last_keys_Q.numel(), keys.numel(), dtype=dtype)
        return mask.masked_fill_(keys > self.last_keys_Q.unsqueeze(1), -torch.inf)


def attention_over(tree: PrefixTree, device: torch.device) -> TreePass:
    """Prepare attention over `tree`."""

    def over(of_Q: NDArray[np.int64] | None) -> TreeAttention:
        if device.type == "cpu":
            return spanwise_attention(tree, of_Q)
        return flex_attention_over(tree, device, of_Q)

    read_R = torch.from_numpy(tree.read_R).to(device)
    return TreePass(attend=over(None), attend_read=over(tree.read_R), read_R=read_R)


def spanwise_attention(tree: PrefixTree, of_Q: NDArray[np.int64] | None) -> TreeAttention:
    """Return attention by about two calls a node, for a CPU.

    Args:
        of_Q: the queries' places in the row, ascending; None for all tokens.
    """
    calls = _calls(tree.spans, np.arange(tree.num_tokens) if of_Q is None else of_Q)

    def attend(query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
        shared = query.shape[1] // key.shape[1]
        if shared > 1:
            key, value = key.repeat_interleave(shared, 1), value.repeat_interleave(shared, 1)
        joined: Any = _Spanwise.apply(query, key, value, calls, scale)
        return joined

    return attend


def flex_attention_over(
    tree: PrefixTree, device: torch.device, of_Q: NDArray[np.int64] | None, *, compiled: bool = True
) -> TreeAttention:
    """Return FlexAttention.

    Args:
        of_Q: the queries' places in the row, ascending; None for all tokens.
        compiled: whether the kernel is compiled; without it everything is computed densely, in a test.
    """
    below_T = torch.from_numpy(tree.ends_below_T).to(device)
    places_Q = None if of_Q is None else torch.from_numpy(of_Q).to(device)

    def is_seen(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        place = query if places_Q is None else places_Q[query]
        return (key <= place) & (place < below_T[key])

    size = tree.num_tokens
    mask: BlockMask = create_block_mask(
        is_seen, None, None, size if of_Q is None else of_Q.size, size, device=str(device), _compile=compiled
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
        """Return [B, H, Q, D]; keys and values have as many heads as queries."""
        joined = torch.zeros(query.shape, dtype=torch.float32)
        logsum_BHQ = torch.full(query.shape[:3], -torch.inf)
        for call in calls:
            part, part_logsum = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                query[:, :, call.queries],
                key[:, :, call.keys],
                value[:, :, call.keys],
                0.0,
                call.is_causal,
                attn_mask=call.mask(query.dtype),
                scale=scale,
            )
            before = logsum_BHQ[:, :, call.queries]
            after = torch.logaddexp(before, part_logsum)
            span = joined[:, :, call.queries]
            span.mul_((before - after).exp().unsqueeze(-1))
            span.addcmul_(part.float(), (part_logsum - after).exp().unsqueeze(-1))
            logsum_BHQ[:, :, call.queries] = after
        joined = joined.to(query.dtype)
        ctx.save_for_backward(query, key, value, joined, logsum_BHQ)
        ctx.calls, ctx.scale = calls, scale
        return joined

    @override
    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of query, key and value."""
        query, key, value, joined, logsum_BHQ = ctx.saved_tensors
        (gradient,) = grad_outputs
        wholes = d_query, d_key, d_value = [
            torch.zeros(of.shape, dtype=torch.float32) for of in (query, key, value)
        ]
        for call in ctx.calls:
            parts = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                gradient[:, :, call.queries],
                query[:, :, call.queries],
                key[:, :, call.keys],
                value[:, :, call.keys],
                joined[:, :, call.queries],
                logsum_BHQ[:, :, call.queries],
                0.0,
                call.is_causal,
                attn_mask=call.mask(query.dtype),
                scale=ctx.scale,
            )
            for whole, part, span in zip(wholes, parts, (call.queries, call.keys, call.keys), strict=True):
                whole[:, :, span] += part
        return *(whole.to(query.dtype) for whole in (d_query, d_key, d_value)), None, None


def _calls(spans: Sequence[Span], of_Q: NDArray[np.int64]) -> list[_Call]:
    calls: list[_Call] = []
    for span in spans:
        keys = slice(span.start, span.end)
        first, last, last_below = (
            int(place) for place in np.searchsorted(of_Q, (span.start, span.end, span.end_below))
        )
        if last - first == span.end - span.start:
            calls.append(_Call(queries=slice(first, last), keys=keys, is_causal=True))
        else:
            for start in range(first, last, _MASKED_QUERIES):
                places = of_Q[start : min(start + _MASKED_QUERIES, last)]
                calls.append(
                    _Call(
                        queries=slice(start, start + places.size),
                        keys=slice(span.start, int(places[-1]) + 1),
                        last_keys_Q=torch.from_numpy(places),
                    )
                )
        if last_below > last:
            calls.append(_Call(queries=slice(last, last_below), keys=keys))
    return calls
