"""Weights and moments of one rank's slices, and the files that they are kept in.

A checkpoint is what the embedded engine writes: whole tensors in safetensors files, whichever number of
ranks wrote them. Each rank writes its slices by torch.distributed.checkpoint, which joins them; a load reads
the slices that a rank holds. So any number of ranks, and one process, continue each other's runs. All ranks
must see one file system.

With LoRA a checkpoint is a peft adapter directory, with moments of the adapter's weights.
"""

import shutil
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from transformers import PreTrainedModel

from pilotage.engine.adapter_checkpoint import ADAPTER_FILE, require_adapter, write_adapter_config
from pilotage.engine.checkpoint import MOMENTS, OPTIMIZER_FILE, stored
from pilotage.engine.lora import LoraOptions, trained_weights
from pilotage.engine.modules import load_module
from pilotage.engine.policy import copy_tokenizer
from pilotage.types import AdamParams

WEIGHTS_FILE = "model.safetensors"
_JOINED_FILE = "model-00001-of-00001.safetensors"


class ShardedState:
    """The trained weights of a sharded module with their AdamW moments; every method is a collective."""

    def __init__(
        self,
        module: PreTrainedModel,
        *,
        source_dir: Path,
        lora: LoraOptions | None,
        group: dist.ProcessGroup | None,
    ) -> None:
        """Start with fresh moments.

        Args:
            module: sharded already.
            source_dir: the model that it was loaded from, for the tokenizer and the adapter's config.
            group: over which ranks agree on what to write; its tensors are on the CPU.
        """
        self._module = module
        self._source_dir = source_dir
        self._lora = lora
        self._group = group
        self._optimizer = self._fresh()

    def step(self, params: AdamParams) -> None:
        """Apply the gradients with these settings and no others."""
        for group in self._optimizer.param_groups:
            group.update(
                lr=params.learning_rate,
                betas=(params.beta1, params.beta2),
                eps=params.eps,
                weight_decay=params.weight_decay,
            )
        self._optimizer.step()

    def zero_grad(self) -> None:
        """Forget the gradients."""
        self._optimizer.zero_grad(set_to_none=True)

    def write(self, directory: Path, *, weights_only: bool) -> None:
        """Write weights, config and, unless `weights_only`, moments into an existing directory."""
        trained = trained_weights(self._module)
        _write_tensors(
            directory,
            WEIGHTS_FILE if self._lora is None else ADAPTER_FILE,
            {name: parameter.detach() for name, parameter in trained.items()},
            self._group,
        )
        moments = {
            f"{name}/{moment}": stored(moment, self._optimizer.state[parameter][moment])
            for name, parameter in trained.items()
            if parameter in self._optimizer.state
            for moment in MOMENTS
        }
        if moments and not weights_only:
            _write_tensors(directory, OPTIMIZER_FILE, moments, self._group)
        if dist.get_rank() == 0:
            self._write_config(directory)
        dist.barrier(self._group)

    def read(self, directory: Path, *, weights_only: bool = False) -> None:
        """Read weights and, where there are some and unless `weights_only`, moments.

        Raises:
            ConfigError: the directory is no usable model, or no adapter where one is trained.
        """
        if self._lora is None:
            module = load_module(directory, device=torch.device("cpu"))
            options = StateDictOptions(full_state_dict=True)
            set_model_state_dict(self._module, module.state_dict(), options=options)
        else:
            weights = {name: p.detach() for name, p in trained_weights(self._module).items()}
            _read_tensors(require_adapter(directory, self._lora), weights, self._group)
        self._optimizer = self._fresh()
        if not weights_only and (directory / OPTIMIZER_FILE).is_file():
            self._read_moments(directory)

    def _fresh(self) -> torch.optim.AdamW:
        return torch.optim.AdamW(trained_weights(self._module).values(), foreach=True)

    def _read_moments(self, directory: Path) -> None:
        """Fill the moments of every weight that the file names; a weight that was never stepped has none."""
        with safe_open(directory / OPTIMIZER_FILE, framework="pt") as file:
            in_file = set(file.keys())
        tensors: dict[str, Tensor] = {}
        for name, parameter in trained_weights(self._module).items():
            if f"{name}/step" not in in_file:
                continue
            slices = parameter.detach()
            state = {
                "exp_avg": torch.zeros_like(slices),
                "exp_avg_sq": torch.zeros_like(slices),
                "step": torch.zeros(()),
            }
            self._optimizer.state[parameter] = state
            tensors |= {f"{name}/{moment}": stored(moment, value) for moment, value in state.items()}  # views
        _read_tensors(directory, tensors, self._group)

    def _write_config(self, directory: Path) -> None:
        """Write what a reader of the weights needs beside them."""
        if self._lora is not None:
            write_adapter_config(directory, self._lora, base_dir=self._source_dir)
            return
        self._module.config.save_pretrained(directory)
        if (generation := self._module.generation_config) is not None:  # pyright: ignore[reportUnnecessaryComparison]
            generation.save_pretrained(directory)
        copy_tokenizer(self._source_dir, directory)


def _write_tensors(
    directory: Path, file_name: str, tensors: dict[str, Tensor], group: dist.ProcessGroup | None
) -> None:
    """Write tensors, in slices or the same on every rank, whole into one file."""
    parts = directory / f".{file_name}.parts"
    writer = HuggingFaceStorageWriter(path=str(parts), save_distributed=True, enable_consolidation=True)
    save(tensors, storage_writer=writer, process_group=group)
    if dist.get_rank() == 0:
        (parts / _JOINED_FILE).rename(directory / file_name)
        shutil.rmtree(parts)
    dist.barrier(group)


def _read_tensors(directory: Path, tensors: dict[str, Tensor], group: dist.ProcessGroup | None) -> None:
    """Fill tensors, each rank its slices, from the safetensors files of a directory."""
    reader = HuggingFaceStorageReader(path=str(directory))
    load(tensors, storage_reader=reader, process_group=group)
