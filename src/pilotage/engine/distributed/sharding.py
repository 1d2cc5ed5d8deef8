"""A Hugging Face module as FSDP2 holds it: every weight in slices, one on each rank.

The root of the sharded tree is a scorer, whose forward pass goes from ids to log-probs, so that the hooks
that gather and free weights see every use of them. Gradients are summed over ranks, not averaged: the loss
is already divided by the counts of the whole batch.
"""

from collections.abc import Iterator, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from pilotage.engine.logprobs import batch_logprobs
from pilotage.engine.lora import merged_weights
from pilotage.engine.tree_layers import enable_trees
from pilotage.errors import ConfigError
from pilotage.types import Mask, TokenIds


class Scorer(nn.Module):
    """Log-probs of trained tokens as one forward pass."""

    def __init__(self, module: PreTrainedModel) -> None:
        super().__init__()
        self.module = module
        self.takes_trees = enable_trees(module)

    def forward(
        self, ids: Sequence[TokenIds], masks: Sequence[Mask], temperature: float
    ) -> tuple[Tensor, int]:
        """See `batch_logprobs`."""
        logprobs_n, forwarded_tokens = batch_logprobs(
            self.module, ids, masks, temperature=temperature, as_tree=self.takes_trees
        )
        return logprobs_n.clone(), forwarded_tokens  # a copy, because FSDP2's hooks do not survive on a view


def shard(
    module: PreTrainedModel, mesh: DeviceMesh, *, compute_dtype: torch.dtype, recompute: bool
) -> Scorer:
    """Shard a module over a mesh of one dimension, layer by layer, and return its scorer.

    Args:
        module: in float32, whole on every rank; its weights move to the mesh's device.
        compute_dtype: of activations and gathered weights; slices, gradients and their sums are float32.
        recompute: whether activations inside decoder layers are computed again in the backward pass.

    Raises:
        ConfigError: transformers knows no decoder layers in it.
    """
    layers = [part for part in module.modules() if isinstance(part, GradientCheckpointingLayer)]
    if not layers:
        raise ConfigError(f"{type(module).__name__} has no decoder layers that transformers can name")
    if recompute:
        for layer in layers:
            layer.gradient_checkpointing = True
            layer._gradient_checkpointing_func = partial(checkpoint, use_reentrant=False)  # pyright: ignore[reportArgumentType]
            layer.training = True  # the layer alone, as recomputing demands; dropout below it stays off
    policy = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32)
    scorer = Scorer(module)
    for part in (*layers, scorer):
        fully_shard(part, mesh=mesh, mp_policy=policy)
    for part in scorer.modules():
        if isinstance(part, FSDPModule):
            part.set_gradient_divide_factor(1.0)
            part.set_force_sum_reduction_for_comms(True)
    return scorer


def full_weights(module: PreTrainedModel, *, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Yield every weight whole under its checkpoint name, adapters merged; tied weights come once.

    A collective: every rank must exhaust it. One weight is whole at a time.
    """
    return ((name, weight.to(dtype)) for name, weight in merged_weights(module, whole=whole))


def whole(tensor: Tensor) -> Tensor:
    """Gather a tensor that may be in slices; a collective."""
    detached = tensor.detach()
    return detached.full_tensor() if isinstance(detached, DTensor) else detached
