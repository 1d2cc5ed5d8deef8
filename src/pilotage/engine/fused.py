"""A decoder for the Llama and Qwen3 layouts that spends few operations on a token.

Below some five million parameters a step costs what its operations cost to start, about 9 us each, so this
reads the weights of the Hugging Face module into fused form: norms folded into the projection behind them;
query, key and value in one product, gate and up in another; rotary pairs interleaved, so that a rotation is
one complex product. The last prompt token is decoded, not prefilled, so prefill computes no logits.

It is checked against the module's own log-probs in tests, and by a canary after every weight change.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from pilotage.engine.kv_cache import KvCache, Lease
from pilotage.engine.lora import effective_weight
from pilotage.types import TokenIds


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The shapes that a decoder layer of either family has."""

    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    intermediate_size: int
    vocab_size: int
    rms_eps: float
    has_qk_norm: bool

    @classmethod
    def of(cls, config: PretrainedConfig) -> "Layout | None":
        """Read the layout; None where the model has something that the fused step does not compute."""
        heads = int(getattr(config, "num_attention_heads", 0))
        is_plain = (
            config.model_type in {"qwen3", "llama"}
            and config.hidden_act == "silu"
            and not config.attention_bias
            and not getattr(config, "mlp_bias", False)
            and not getattr(config, "use_sliding_window", False)
            and config.rope_parameters["rope_type"] in {"default", "linear", "llama3"}
        )
        if not is_plain:
            return None
        return cls(
            num_layers=config.num_hidden_layers,
            hidden_size=config.hidden_size,
            num_heads=heads,
            num_kv_heads=config.num_key_value_heads,
            head_size=getattr(config, "head_dim", None) or config.hidden_size // heads,
            intermediate_size=config.intermediate_size,
            vocab_size=config.vocab_size,
            rms_eps=config.rms_norm_eps,
            has_qk_norm=config.model_type == "qwen3",
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Layer:
    """Fused weights of one layer; H and J are the numbers of query and key heads, D the head size."""

    qkv: Tensor
    """[(H + 2J) D, hidden]"""
    qk_norm: Tensor | None
    """[H + J, D]"""
    out: Tensor
    """[H D, hidden]"""
    gate_up: Tensor
    """[2 intermediate, hidden]"""
    down: Tensor
    """[intermediate, hidden]"""


class FusedDecoder:
    """See the module's docstring; implements `Decoder`."""

    def __init__(
        self,
        module: PreTrainedModel,
        layout: Layout,
        *,
        max_context_tokens: int,
        max_batch: int,
        num_slots: int,
    ) -> None:
        self._layout = layout
        self.device = module.device
        self._cache = KvCache(
            num_layers=layout.num_layers,
            num_kv_heads=layout.num_kv_heads,
            head_size=layout.head_size,
            max_context_tokens=max_context_tokens,
            max_batch=max_batch,
            num_slots=num_slots,
            device=self.device,
        )
        self._rotations = _rotations(module, max_context_tokens)
        self._positions = torch.arange(max_context_tokens, device=self.device)
        heads = np.arange((max_batch + num_slots) * layout.num_kv_heads)
        self._head_starts = heads.reshape(-1, layout.num_kv_heads) * max_context_tokens
        self.load(module)

    @property
    def vocab_size(self) -> int:
        """Number of ids."""
        return self._layout.vocab_size

    @property
    def max_batch(self) -> int:
        """Most rows that decode together."""
        return self._cache.max_batch

    def load(self, module: PreTrainedModel) -> None:
        """Take over a module's weights and forget every context."""
        prefix = module.base_model_prefix
        self._embedding = module.get_parameter(f"{prefix}.embed_tokens.weight").detach().clone()
        self._layers = [
            _fuse(module.get_submodule(f"{prefix}.layers.{index}"), self._layout)
            for index in range(self._layout.num_layers)
        ]
        head = module.get_output_embeddings()
        assert head is not None
        self._head = effective_weight(head) * module.get_parameter(f"{prefix}.norm.weight").detach()
        self._cache.forget()

    def acquire(self, context_ids: TokenIds) -> Lease | None:
        """Make room for a context."""
        return self._cache.acquire(context_ids)

    def release(self, lease: Lease) -> None:
        """Give back a lease that did not enter."""
        self._cache.release(lease)

    def enter(self, lease: Lease) -> None:
        """Make a computed context the last row of the batch."""
        self._cache.enter(lease)

    def leave(self, row: int) -> None:
        """Take a row out; the last row takes its place."""
        self._cache.leave(row)

    def prefill(self, leases: Sequence[Lease], *, budget_tokens: int) -> None:
        """Compute contexts in one packed pass: products over all tokens, attention by sequence."""
        parts: list[tuple[Lease, int]] = []
        for lease in leases:
            count = min(lease.context_ids.size - lease.computed, budget_tokens)
            budget_tokens -= count
            if count:
                parts.append((lease, count))
        if not parts:
            return
        ids, positions, starts = [
            np.concatenate(arrays) for arrays in zip(*map(self._place, parts), strict=True)
        ]
        x = F.embedding(torch.from_numpy(ids).to(self.device), self._embedding)
        rotation = self._rotations[torch.from_numpy(positions).to(self.device)]
        where = torch.from_numpy((starts + positions[:, None]).ravel()).to(self.device)
        masks = [self._causal_mask(lease.computed, count) for lease, count in parts]
        last = self._layout.num_layers - 1
        for index, layer in enumerate(self._layers):
            q, kv = self._project(x, layer, rotation, where, index)
            if index < last:  # of the last layer only keys and values are ever read
                x = self._finish(x, self._attend_each(q, kv, parts, masks), layer)
        for lease, count in parts:
            self._cache.advance(lease, count)

    def decode(self, token_ids_B: NDArray[np.int64]) -> Tensor:
        """Append one token to every row, and return [B, V] logits of the next."""
        B = token_ids_B.size
        lengths_B = self._cache.lengths[:B]
        longest = int(lengths_B.max()) + 1
        positions = torch.from_numpy(lengths_B.copy()).to(self.device)
        where = torch.from_numpy((self._head_starts[:B] + lengths_B[:, None]).ravel()).to(self.device)
        rotation = self._rotations[positions]
        unseen = self._positions[:longest] > positions.unsqueeze(1)
        bias = torch.zeros(unseen.shape, device=self.device).masked_fill_(unseen, -torch.inf)
        bias = bias.repeat_interleave(self._layout.num_kv_heads, dim=0).unsqueeze(1)
        x = F.embedding(torch.from_numpy(token_ids_B).to(self.device), self._embedding)
        for index, layer in enumerate(self._layers):
            q, kv = self._project(x, layer, rotation, where, index)
            x = self._finish(x, self._attend_all(q, kv, bias), layer)
        self._cache.append(token_ids_B)
        return F.linear(self._norm(x), self._head)

    def _place(
        self, part: tuple[Lease, int]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Return ids [n], positions [n] and cache starts [n, J] of the next tokens of a lease."""
        lease, count = part
        start, end = lease.computed, lease.computed + count
        return (
            lease.context_ids[start:end].astype(np.int64),
            np.arange(start, end),
            np.repeat(self._head_starts[lease.slot : lease.slot + 1], count, axis=0),
        )

    def _project(
        self, x: Tensor, layer: _Layer, rotation: Tensor, where: Tensor, index: int
    ) -> tuple[Tensor, Tensor]:
        """Return rotated queries [n, H, D] and the layer's cache, with the new keys and values written."""
        H, J, D = self._layout.num_heads, self._layout.num_kv_heads, self._layout.head_size
        heads = F.linear(self._norm(x), layer.qkv).view(-1, H + 2 * J, D)
        qk = heads[:, : H + J]
        if layer.qk_norm is not None:
            qk = F.rms_norm(qk, (D,), None, self._layout.rms_eps) * layer.qk_norm
        pairs = torch.view_as_complex(qk.unflatten(-1, (D // 2, 2)))
        qk = torch.view_as_real(pairs * rotation).flatten(-2)
        kv = self._cache.kv[index]
        kv[0].view(-1, D).index_copy_(0, where, qk[:, H:].reshape(-1, D))
        kv[1].view(-1, D).index_copy_(0, where, heads[:, H + J :].reshape(-1, D))
        return qk[:, :H], kv

    def _attend_all(self, q: Tensor, kv: Tensor, bias: Tensor) -> Tensor:
        """Attend from one token in each of B rows: [B, H, D] and bias [B J, 1, L] give [B, H D]."""
        B, H, D = q.shape
        J, longest = self._layout.num_kv_heads, bias.shape[-1]
        keys, values = kv[:, :B, :, :longest].flatten(1, 2)  # [B J, L, D] each, as views
        queries = q.reshape(B * J, H // J, D)
        scores = torch.baddbmm(bias, queries, keys.transpose(1, 2), alpha=D**-0.5)
        return torch.bmm(torch.softmax(scores, dim=-1), values).view(B, H * D)

    def _attend_each(
        self, q: Tensor, kv: Tensor, parts: Sequence[tuple[Lease, int]], masks: Sequence[Tensor | None]
    ) -> Tensor:
        """Attend sequence by sequence: [n, H, D] gives [n, H D]."""
        outputs: list[Tensor] = []
        at = 0
        for (lease, count), mask in zip(parts, masks, strict=True):
            keys, values = kv[:, lease.slot : lease.slot + 1, :, : lease.computed + count]
            queries = q[at : at + count].transpose(0, 1).unsqueeze(0)
            attended = F.scaled_dot_product_attention(
                queries, keys, values, attn_mask=mask, is_causal=mask is None, enable_gqa=True
            )
            outputs.append(attended.squeeze(0).transpose(0, 1).flatten(1))
            at += count
        return torch.cat(outputs)

    def _finish(self, x: Tensor, attended: Tensor, layer: _Layer) -> Tensor:
        """Close a layer: output projection and feed-forward, each added to the stream."""
        x = torch.addmm(x, attended, layer.out)
        gate, up = F.linear(self._norm(x), layer.gate_up).chunk(2, dim=-1)
        return torch.addmm(x, F.silu(gate) * up, layer.down)

    def _norm(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (self._layout.hidden_size,), None, self._layout.rms_eps)

    def _causal_mask(self, start: int, count: int) -> Tensor | None:
        """Return [count, start + count], True where read; None from 0, where plain causality holds."""
        if start == 0:
            return None
        return self._positions[: start + count] <= self._positions[start : start + count].unsqueeze(1)


def _rotations(module: PreTrainedModel, max_context_tokens: int) -> Tensor:
    """Return [positions, 1, D/2] complex rotations, scaled as the module scales them."""
    rotary: Any = module.base_model.rotary_emb
    positions = torch.arange(max_context_tokens, device=module.device, dtype=torch.float32)
    angles = torch.outer(positions, rotary.inv_freq.float())
    return torch.polar(torch.full_like(angles, rotary.attention_scaling), angles).unsqueeze(1)


def _fuse(decoder_layer: nn.Module, layout: Layout) -> _Layer:
    """Fuse the weights of one layer, with its adapters merged."""

    def weight(name: str) -> Tensor:
        return effective_weight(decoder_layer.get_submodule(name))

    D = layout.head_size
    # The module rotates dimension i with i + D/2; here a pair is stored side by side.
    pairs = torch.arange(D, device=weight("input_layernorm").device).view(2, D // 2).t().flatten()
    q = weight("self_attn.q_proj").unflatten(0, (-1, D))[:, pairs].flatten(0, 1)
    k = weight("self_attn.k_proj").unflatten(0, (-1, D))[:, pairs].flatten(0, 1)
    qk_norm = None
    if layout.has_qk_norm:
        q_norm, k_norm = weight("self_attn.q_norm")[pairs], weight("self_attn.k_norm")[pairs]
        qk_norm = torch.cat([q_norm.expand(layout.num_heads, D), k_norm.expand(layout.num_kv_heads, D)])
    gate_up = torch.cat([weight("mlp.gate_proj"), weight("mlp.up_proj")])
    return _Layer(
        qkv=torch.cat([q, k, weight("self_attn.v_proj")]) * weight("input_layernorm"),
        qk_norm=qk_norm,
        out=weight("self_attn.o_proj").t().contiguous(),
        gate_up=gate_up * weight("post_attention_layernorm"),
        down=weight("mlp.down_proj").t().contiguous(),
    )
