"""LoRA adapters in a torch module: which weights they add, what they amount to, and the module without them.

peft puts a layer of its own around each adapted linear layer and keeps the module's class, so everything else
treats the module as before. The weight that a layer then computes with is W + alpha / rank * B A
(arXiv 2106.09685); B starts at 0, so a new adapter changes nothing.
"""

import contextlib
import warnings
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from pilotage.errors import ConfigError
from pilotage.wire.jobs import PeftConfig

_ADAPTER = "default"
"""peft's name of the one adapter that a module has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraOptions:
    """Low-rank adapters on linear layers; the weights below them stay frozen."""

    rank: int = 32
    alpha: int = 32
    """The adapter's product is scaled by alpha / rank."""
    target_modules: str | tuple[str, ...] = "all-linear"
    """Names of layers or their last parts, a regular expression of whole names, or `all-linear`: all but the
    output projection."""
    seed: int = 0
    """Of the first weights."""

    def __post_init__(self) -> None:
        if self.rank < 1 or self.alpha < 1:
            raise ConfigError(f"LoRA needs a positive rank and alpha, got {self.rank} and {self.alpha}")

    @classmethod
    def of(cls, config: PeftConfig | None, *, seed: int) -> "LoraOptions | None":
        """Read what a job or a recipe asks for; None where it asks for no adapter."""
        if config is None:
            return None
        return cls(rank=config.r, alpha=config.lora_alpha, target_modules=config.target_modules, seed=seed)

    @property
    def targets(self) -> str | list[str]:
        """The target modules as peft takes them."""
        return self.target_modules if isinstance(self.target_modules, str) else [*self.target_modules]


def add_adapters(module: PreTrainedModel, options: LoraOptions) -> None:
    """Put LoRA adapters into a module in place and freeze everything else.

    The same options give the same weights, on every device. An output projection that is adapted is no longer
    tied to the embedding, which stays as it is; the module's config then says so.

    Raises:
        ConfigError: peft is not installed, no layer matches, or one that is not linear does.
    """
    try:
        from peft import LoraConfig, inject_adapter_in_model
        from peft.tuners.lora import Linear, LoraLayer
    except ImportError as error:
        raise ConfigError("LoRA needs peft; install the extra pilotage[local]") from error
    config = LoraConfig(r=options.rank, lora_alpha=options.alpha, target_modules=options.targets)
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of ties and of Conv1D, both of which are dealt with
        torch.manual_seed(options.seed)
        try:
            inject_adapter_in_model(config, module, adapter_name=_ADAPTER)
        except ValueError as error:
            raise ConfigError(f"LoRA cannot be put into this model: {error}") from error
    for name, layer in module.named_modules():
        if isinstance(layer, LoraLayer) and not isinstance(layer, Linear):
            raise ConfigError(f"LoRA cannot be put into this model: {name} is no linear layer")
    if is_adapted(module.get_output_embeddings()):
        module.config.tie_word_embeddings = False


def is_adapted(layer: nn.Module | None) -> bool:
    """Whether a layer has an adapter."""
    return hasattr(layer, "base_layer")


def trained_weights(module: PreTrainedModel) -> dict[str, nn.Parameter]:
    """Return what is trained, under its names in a file: the adapter where there is one, as peft names it in
    an adapter file, or else every weight.
    """
    adapter = {
        "base_model.model." + name.replace(f".{_ADAPTER}.", "."): parameter
        for name, parameter in module.named_parameters()
        if _is_of_adapter(name)
    }
    return adapter or dict(module.named_parameters())


@contextlib.contextmanager
def without_adapters(module: PreTrainedModel) -> Generator[None]:
    """Let a module compute as if it had no adapters; outside of any forward pass."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers = [layer for layer in module.modules() if isinstance(layer, BaseTunerLayer)]
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)


def effective_weight(layer: nn.Module, *, whole: Callable[[Tensor], Tensor] = Tensor.detach) -> Tensor:
    """Return the weight that a layer computes with, its adapter merged; without one, a view of its own.

    Args:
        whole: makes a parameter a tensor that can be multiplied, where it is in slices.
    """
    if not is_adapted(layer):
        return whole(layer.get_parameter("weight"))
    down, up = (whole(layer.get_parameter(f"lora_{part}.{_ADAPTER}.weight")) for part in "AB")
    scaling: dict[str, float] = layer.scaling  # pyright: ignore[reportAssignmentType]
    product = (up @ down) * scaling[_ADAPTER]
    is_transposed: bool = layer.fan_in_fan_out  # pyright: ignore[reportAssignmentType]
    return whole(layer.get_parameter("base_layer.weight")) + (product.T if is_transposed else product)


def merged_weights(
    module: PreTrainedModel, *, whole: Callable[[Tensor], Tensor] = Tensor.detach
) -> Iterator[tuple[str, Tensor]]:
    """Yield every weight under its checkpoint name, adapters merged; tied weights come once.

    Args:
        whole: see `effective_weight`.
    """
    for name, parameter, adapted in _base_weights(module):
        yield name, whole(parameter) if adapted is None else effective_weight(adapted, whole=whole)


def merged_shapes(module: PreTrainedModel) -> list[tuple[str, tuple[int, ...]]]:
    """Return name and shape of what `merged_weights` yields, in its order; nothing is computed."""
    return [(name, tuple(parameter.shape)) for name, parameter, _ in _base_weights(module)]


def _base_weights(module: PreTrainedModel) -> Iterator[tuple[str, nn.Parameter, nn.Module | None]]:
    """Yield checkpoint name, parameter and, where an adapter adds to it, the layer of every frozen weight.

    A weight that layers share comes once, and once more for each of them that has an adapter of its own.
    """
    seen: set[int] = set()
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if _is_of_adapter(name):
            continue
        owner, _, leaf = name.rpartition(".")
        adapted: nn.Module | None = None
        if owner.endswith(".base_layer"):
            owner = owner.removesuffix(".base_layer")
            name = f"{owner}.{leaf}"
            adapted = module.get_submodule(owner) if leaf == "weight" else None
        if adapted is None:
            if id(parameter) in seen:
                continue
            seen.add(id(parameter))
        yield name, parameter, adapted


def _is_of_adapter(name: str) -> bool:
    return f".{_ADAPTER}." in name
