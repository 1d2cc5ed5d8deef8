"""A starting point for a tiny policy: attention that can look up what followed a word.

Learning to copy from random weights costs a tiny model more compute than all the rest of its training. As
in mimetic initialisation (arXiv:2305.09828), the first two layers start near what trained models show:
one head of layer 0 attends to the token before and writes it beside the token, and the heads of layer 1
match the current token with such notes and copy what they find (an induction head, arXiv:2209.11895).
Everything else starts small and random, and every weight is trained.
"""

from collections.abc import Mapping

import torch
from torch import Tensor
from transformers import PreTrainedModel

EMBEDDING_STD = 0.1
OTHER_STD = 0.02
_BIAS = 0.5
"""A constant in dimension 0 of every embedding, so that a head can attend by position alone."""
_SHARPNESS = 3.0
"""Gain of the queries of both layers."""
_NOTE_SCALE = 0.3
_COPY_SCALE = 0.5
_POSITION_PLANES = 4
"""Rotary planes of highest frequency, by which neighbours are told apart."""
_REACH_TOKENS = 150
"""Planes that turn less than one radian over this distance carry what is matched."""


def _orthonormal(size: int, generator: torch.Generator) -> Tensor:
    return torch.linalg.qr(torch.randn(size, size, generator=generator))[0]


@torch.no_grad()
def install_copy_prior(module: PreTrainedModel, *, seed: int) -> None:
    """Overwrite the weights of a Qwen3 model of at least two layers; the same seed gives the same weights.

    Raises:
        ValueError: fewer than two layers, grouped key-value heads, or heads too small for its width.
    """
    config = module.config
    width, size = config.hidden_size, config.head_dim
    theta = config.rope_parameters["rope_theta"]
    planes = [p for p in range(size // 2) if theta ** (-2 * p / size) * _REACH_TOKENS < 1]
    content = [*planes, *(plane + size // 2 for plane in planes)]  # both halves of a plane
    if config.num_hidden_layers < 2 or config.num_key_value_heads != config.num_attention_heads:
        raise ValueError("a copy prior needs two layers or more, and as many key-value heads as heads")
    if not 0 < 2 * len(content) < width:
        raise ValueError(
            f"{len(content)} dimensions of a head carry content, a width of {width} holds twice that"
        )
    generator = torch.Generator().manual_seed(seed)
    weights = dict(module.named_parameters())
    for name, weight in weights.items():
        if weight.dim() == 2:
            std = EMBEDDING_STD if "embed_tokens" in name else OTHER_STD
            weight.copy_(torch.randn(weight.shape, generator=generator) * std)
    weights["model.embed_tokens.weight"][:, 0] = _BIAS
    basis = _orthonormal(width, generator)
    read, note = basis[: len(content)].clone(), basis[len(content) : 2 * len(content)]
    read[:, 0] = 0  # the constant is no content
    first, second = (
        {part: weights[f"model.layers.{layer}.self_attn.{part}.weight"] for part in _PARTS}
        for layer in (0, 1)
    )
    _attend_to_previous(first, size=size, theta=theta)
    first["v_proj"][:size] = 0
    first["o_proj"][:, :size] = 0
    first["v_proj"][content] = read
    first["o_proj"][:, content] = note.T * _NOTE_SCALE
    for head in range(config.num_attention_heads):
        rows = [head * size + row for row in content]
        second["q_proj"][rows] = read
        second["k_proj"][rows] = note
    second["q_norm"].fill_(_SHARPNESS)
    copied = min(width, second["v_proj"].shape[0])
    second["v_proj"][:copied] = basis[:copied]
    second["o_proj"][:, :copied] = basis[:copied].T * _COPY_SCALE


_PARTS = ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm")


def _attend_to_previous(layer: Mapping[str, Tensor], *, size: int, theta: float) -> None:
    """Make head 0 look one token back: its query and key are constants, one position apart."""
    layer["q_proj"][:size] = 0
    layer["k_proj"][:size] = 0
    for plane in range(_POSITION_PLANES):
        angle = torch.tensor(theta ** (-2 * plane / size))
        layer["q_proj"][plane, 0] = 1
        layer["k_proj"][plane, 0] = torch.cos(angle)
        layer["k_proj"][plane + size // 2, 0] = torch.sin(angle)
    layer["q_norm"].fill_(_SHARPNESS)
