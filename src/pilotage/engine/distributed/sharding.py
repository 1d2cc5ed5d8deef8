"""A Hugging Face module as FSDP2 holds it: every weight in slices, one on each rank.

The root of the sharded tree is a scorer, whose forward pass goes from ids to log-probs, so that the hooks
that gather and free weights see every use of them. Gradients are summed over ranks, not averaged: the loss
is already divided by the counts of the whole batch.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
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
from pilotage.engine.tree_attention import enable_trees
from pilotage.errors import ConfigError
from pilotage.types import Mask, TokenIds

_ADAPTER = "default"
_ADAPTER_SEED = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraOptions:
    """Low-rank adapters on linear layers; the weights below them stay frozen."""

    rank: int = 32
    alpha: int = 32
    """The adapter's product is scaled by alpha / rank."""
    target_modules: str | tuple[str, ...] = "all-linear"

    def __post_init__(self) -> None:
        if self.rank < 1 or self.alpha < 1:
            raise ConfigError(f"LoRA needs a positive rank and alpha, got {self.rank} and {self.alpha}")

    @property
    def targets(self) -> str | list[str]:
        """The target modules as peft takes them."""
        return self.target_modules if isinstance(self.target_modules, str) else [*self.target_modules]


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


def add_adapters(module: PreTrainedModel, options: LoraOptions) -> None:
    """Put LoRA adapters into a module in place and freeze everything else; the same on every rank.

    Raises:
        ConfigError: peft is not installed, or no layer matches.
    """
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError as error:
        raise ConfigError("LoRA needs peft; install the extra pilotage[gpu]") from error
    config = LoraConfig(r=options.rank, lora_alpha=options.alpha, target_modules=options.targets)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(_ADAPTER_SEED)
        try:
            inject_adapter_in_model(config, module, adapter_name=_ADAPTER)
        except ValueError as error:
            raise ConfigError(f"LoRA cannot be put into this model: {error}") from error


def adapter_names(module: PreTrainedModel) -> dict[str, str]:
    """Map the module's names of adapter weights to those in an adapter file of peft."""
    return {
        name: "base_model.model." + name.replace(f".{_ADAPTER}.", ".")
        for name, _ in module.named_parameters()
        if f".{_ADAPTER}." in name
    }


def full_weights(module: PreTrainedModel, *, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Yield every weight whole under its checkpoint name, adapters merged; tied weights come once.

    A collective: every rank must exhaust it. One weight is whole at a time.
    """
    layers = dict(module.named_modules())
    adapters = adapter_names(module)
    for name, parameter in module.named_parameters():
        if name in adapters:
            continue
        weight = whole(parameter)
        owner, _, leaf = name.rpartition(".")
        if owner.endswith(".base_layer"):
            owner = owner.removesuffix(".base_layer")
            name = f"{owner}.{leaf}"
            if leaf == "weight":
                weight = weight + _product(layers[owner])
        yield name, weight.to(dtype)


def weight_shapes(module: PreTrainedModel) -> list[tuple[str, tuple[int, ...]]]:
    """Return name and shape of what `full_weights` yields, in its order; nothing is gathered."""
    adapters = adapter_names(module)
    return [
        (name.replace(".base_layer.", "."), tuple(parameter.shape))
        for name, parameter in module.named_parameters()
        if name not in adapters
    ]


def whole(tensor: Tensor) -> Tensor:
    """Gather a tensor that may be in slices; a collective."""
    detached = tensor.detach()
    return detached.full_tensor() if isinstance(detached, DTensor) else detached


def _product(layer: nn.Module) -> Tensor:
    """Return what an adapted layer adds to its frozen weight."""
    down: Tensor = layer.get_submodule(f"lora_A.{_ADAPTER}").get_parameter("weight")
    up: Tensor = layer.get_submodule(f"lora_B.{_ADAPTER}").get_parameter("weight")
    scaling: dict[str, float] = layer.scaling  # pyright: ignore[reportAssignmentType]
    return (whole(up) @ whole(down)) * scaling[_ADAPTER]
