"""One rank of an FSDP2 trainer. All ranks call the same methods in the same order.

Rank 0 is given each batch and hands every rank its share. The loss and its gradient with respect to
log-probs are those of every trainer; their sums over ranks are those of one process, whatever the number of
ranks. Results are on every rank where they are cheap, else on rank 0.

A deliberate error (`PilotageError`) is raised on every rank alike, and the trainer stays usable. Any other
error may leave ranks waiting for each other: the caller must end them all.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Literal

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from pilotage.algorithms import aligned, in_order, split_trained
from pilotage.engine.checkpoint import Manifest, write_checkpoint
from pilotage.engine.distributed.packing import plan
from pilotage.engine.distributed.sharded_checkpoint import ShardedState
from pilotage.engine.distributed.sharding import Scorer, full_weights, shard
from pilotage.engine.gradients import Totals, propagate, require_applicable, summarise, to_numpy
from pilotage.engine.lora import LoraOptions, add_adapters, is_adapted, merged_shapes
from pilotage.engine.modules import load_module
from pilotage.errors import ConfigError, PilotageError, TrainerError
from pilotage.types import AdamParams, Denominators, ForwardBackwardResult, LossConfig, Sample, StepResult

type _Floats32 = NDArray[np.float32]

_NO_TOKEN = np.zeros(2, np.int32), np.array([False, True])
"""What a rank without a share of a pass forwards: one token, whose gradient is 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerOptions:
    """How a sharded trainer computes."""

    micro_batch_tokens: int = 8192
    """Tokens of one pass of one rank: distinct ones where layers take prefix trees, else padded ones."""
    compute_dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Of activations and gathered weights; master weights and gradients are float32."""
    recompute_activations: bool = True
    lora: LoraOptions | None = None
    """None trains every weight."""

    @property
    def dtype(self) -> torch.dtype:
        """The compute type as torch names it."""
        return torch.bfloat16 if self.compute_dtype == "bfloat16" else torch.float32


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Share:
    """What one rank forwards of a batch."""

    micro_batches: list[list[Sample]]
    """As many as on every other rank; an empty one only takes part."""
    denominators: Denominators
    needs_reference: bool


class FsdpTrainer:
    """A rank's slices of weights, gradients and moments."""

    def __init__(self, model_dir: Path, *, options: TrainerOptions, device: torch.device) -> None:
        """Load a model on a rank of the default process group, which exists already.

        Raises:
            ConfigError: the directory is no usable model, or the options do not fit it.
        """
        self._model_dir = model_dir
        self._options = options
        self._device = device
        self._mesh = init_device_mesh(device.type, (dist.get_world_size(),))
        # Objects travel over the CPU, whatever the weights are on.
        group = dist.group.WORLD if device.type == "cpu" else dist.new_group(backend="gloo")
        assert group is None or isinstance(group, dist.ProcessGroup)  # every rank is a member
        self._group = group
        module = load_module(model_dir, device=torch.device("cpu"))
        if options.lora is not None:
            add_adapters(module, options.lora)
            if is_adapted(module.get_output_embeddings()):
                raise ConfigError("the output projection can have an adapter on the local engine only")
        self._scorer = self._shard(module, recompute=options.recompute_activations)
        self._state = ShardedState(module, source_dir=model_dir, lora=options.lora, group=self._group)
        self._reference: Scorer | None = None
        self._num_backwards = 0

    @property
    def module(self) -> PreTrainedModel:
        """The sharded module."""
        return self._scorer.module

    @property
    def is_lead(self) -> bool:
        """Whether this is rank 0, which is given batches and gives results."""
        return dist.get_rank() == 0

    def forward_backward(
        self, samples: Sequence[Sample] | None, loss: LossConfig, *, denominators: Denominators | None = None
    ) -> ForwardBackwardResult | None:
        """Add the gradient of `loss`; a failure leaves no partial gradient.

        Args:
            samples: whole rollouts on rank 0, None elsewhere.
            denominators: counts of the batch that the samples are a piece of; None counts the samples.

        Returns:
            What was measured over all ranks on rank 0, None elsewhere.
        """
        trained = [sample for sample in samples or () if sample.trained_tokens]
        counts = Denominators.of(trained)
        share = self._hand_out(trained, denominators=denominators or counts)
        totals = Totals()
        forwarded_tokens = 0
        try:
            for micro_batch in share.micro_batches:
                forwarded_tokens += self._add_gradient(micro_batch, loss, share, totals)
        except BaseException:
            self.discard()
            raise
        self._num_backwards += 1
        parts = self._gather((totals, forwarded_tokens))
        if parts is None:
            return None
        totals_of_ranks, tokens_of_ranks = zip(*parts, strict=True)
        return summarise(
            Totals.of(totals_of_ranks),
            loss,
            counts,
            forwarded_tokens=sum(tokens_of_ranks),
            trainer_logprobs_n=self._in_order(trained, [each.trainer_logprobs for each in totals_of_ranks]),
        )

    def forward(self, samples: Sequence[Sample] | None, *, temperature: float) -> list[_Floats32] | None:
        """Return on rank 0, for each sample, [L] log-probs of its trained tokens, 0 elsewhere."""
        trained = [sample for sample in samples or () if sample.trained_tokens]
        share = self._hand_out(trained, denominators=Denominators.of(trained))
        scored: list[_Floats32] = []
        for micro_batch in share.micro_batches:
            with torch.no_grad():
                logprobs, _ = self._score(self._scorer, micro_batch, temperature)
            if micro_batch:
                scored.append(logprobs.float().cpu().numpy())
        parts = self._gather(scored)
        return None if parts is None else aligned(samples or (), self._in_order(trained, parts))

    def step(self, params: AdamParams) -> StepResult:
        """Clip to the norm over all ranks, apply and clear the accumulated gradient.

        Raises:
            TrainerError: nothing was accumulated, or the gradient is not finite; it is cleared, and the
                weights are as before.
        """
        if not self._num_backwards:
            raise TrainerError("step without forward_backward: no gradient was accumulated")
        num_backwards = self._num_backwards
        grads = [p.grad for p in self._scorer.parameters() if p.grad is not None]
        try:
            norm = _total_norm(grads)
            require_applicable(norm)
            if 0 < params.max_grad_norm < norm:
                factor = params.max_grad_norm / (norm + 1e-6)
                torch._foreach_mul_(grads, factor)  # pyright: ignore[reportPrivateImportUsage]
            self._state.step(params)
        finally:
            self.discard()
        return StepResult(grad_norm=norm, learning_rate=params.learning_rate, num_backwards=num_backwards)

    def discard(self) -> None:
        """Drop the accumulated gradient; on every rank at the same time."""
        self._state.zero_grad()
        self._num_backwards = 0

    @property
    def wire_dtype(self) -> torch.dtype:
        """Type of the weights that samplers are sent."""
        return self._options.dtype

    def weight_shapes(self) -> list[tuple[str, tuple[int, ...]]]:
        """Return name and shape of what `weights` yields, in its order."""
        return merged_shapes(self.module)

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield every weight whole, adapters merged, in the compute type; every rank must exhaust it."""
        return full_weights(self.module, dtype=self.wire_dtype)

    def gather_weights(self) -> dict[str, Tensor]:
        """Return the whole weights on the CPU on rank 0, nothing elsewhere."""
        kept: dict[str, Tensor] = {}
        for name, weight in self.weights():
            if self.is_lead:
                kept[name] = weight.cpu()
        return kept

    def save_state(self, directory: Path, manifest: Manifest, *, weights_only: bool = False) -> None:
        """Write a complete checkpoint into a new directory; with LoRA the adapter alone.

        Raises:
            TrainerError: the directory holds something already.
        """
        if not self.is_lead:
            partial = self._from_lead(None)
            assert partial is not None
            self._state.write(partial, weights_only=weights_only)
            return

        def write(partial: Path) -> None:
            self._from_lead(partial)
            self._state.write(partial, weights_only=weights_only)

        try:
            write_checkpoint(directory, manifest, write)
        except TrainerError as error:
            self._from_lead(error)

    def load_state(self, directory: Path, *, weights_only: bool = False) -> None:
        """Restore what a save wrote, by any number of ranks; without moments they start fresh.

        Args:
            weights_only: start fresh moments also where there are some.

        Raises:
            ConfigError: the directory is no usable model, or no adapter where one is trained.
        """
        self._state.read(directory, weights_only=weights_only)
        self.discard()

    def _shard(self, module: PreTrainedModel, *, recompute: bool) -> Scorer:
        return shard(module, self._mesh, compute_dtype=self._options.dtype, recompute=recompute)

    def _in_order[T: np.floating](
        self, trained: Sequence[Sample], scored: Sequence[list[NDArray[T]]]
    ) -> _Floats32:
        """Return [n] values in the order of `trained` from those of every rank's passes that have samples."""
        given = (micro_batch for of_rank in self._plan(trained) for micro_batch in of_rank if micro_batch)
        return in_order(trained, zip(given, chain.from_iterable(scored), strict=True))

    def _plan(self, trained: Sequence[Sample]) -> list[list[list[Sample]]]:
        return plan(
            trained,
            num_ranks=dist.get_world_size(),
            budget_tokens=self._options.micro_batch_tokens,
            trees=self._scorer.takes_trees,
        )

    def _hand_out(self, trained: Sequence[Sample], *, denominators: Denominators) -> _Share:
        """Scatter a batch from rank 0."""
        shares: list[_Share] | None = None
        if self.is_lead:
            shares = [
                _Share(
                    micro_batches=micro_batches,
                    denominators=denominators,
                    needs_reference=any(sample.reference_logprobs is None for sample in trained),
                )
                for micro_batches in self._plan(trained)
            ]
        received: list[_Share | None] = [None]
        dist.scatter_object_list(received, shares, src=0, group=self._group)
        [share] = received
        assert share is not None
        return share

    def _gather[T](self, value: T) -> list[T] | None:
        """Collect one object of every rank on rank 0; None elsewhere."""
        parts: list[T] | None = [value] * dist.get_world_size() if self.is_lead else None
        dist.gather_object(value, parts, dst=0, group=self._group)
        return parts

    def _from_lead[T](self, value: T | PilotageError | None) -> T | None:
        """Hand an object from rank 0 to all; an error is raised on all."""
        box: list[T | PilotageError | None] = [value]
        dist.broadcast_object_list(box, src=0, group=self._group)
        [received] = box
        if isinstance(received, PilotageError):
            raise received
        return received

    def _add_gradient(self, samples: list[Sample], loss: LossConfig, share: _Share, totals: Totals) -> int:
        """Run one pass forward and back; without samples, with a gradient of 0. Returns tokens forwarded."""
        reference: NDArray[np.float64] | None = None
        if loss.kl_coef:
            reference = self._reference_logprobs(samples, loss.temperature, share.needs_reference)
        logprobs, forwarded_tokens = self._score(self._scorer, samples, loss.temperature)
        if not samples:
            logprobs.backward(torch.zeros_like(logprobs))
            return 0
        propagate(
            logprobs,
            samples,
            loss,
            denominators=share.denominators,
            reference_logprobs_n=reference,
            totals=totals,
        )
        return forwarded_tokens

    def _reference_logprobs(
        self, samples: list[Sample], temperature: float, is_computed: bool
    ) -> NDArray[np.float64]:
        """Return [n] reference log-probs: those that a sample brings, or else the frozen reference's.

        Where any sample of the batch lacks them, every rank runs the reference in every pass.
        """
        computed = np.zeros(sum(sample.trained_tokens for sample in samples))
        if is_computed:
            with torch.no_grad():
                logprobs, _ = self._score(self._frozen_reference(), samples, temperature)
            computed = to_numpy(logprobs)[: computed.size]
        parts = split_trained(samples, computed)
        brought = [
            part if sample.reference_logprobs is None else sample.reference_logprobs[sample.loss_mask]
            for sample, part in zip(samples, parts, strict=True)
        ]
        return np.concatenate([np.zeros(0), *brought], dtype=np.float64)

    def _frozen_reference(self) -> Scorer:
        """Load and shard the weights that the trainer was opened with, the first time they are needed."""
        if self._reference is None:
            module = load_module(self._model_dir, device=torch.device("cpu"))
            module.requires_grad_(False)
            self._reference = self._shard(module, recompute=False)
        return self._reference

    def _score(self, scorer: Scorer, samples: list[Sample], temperature: float) -> tuple[Tensor, int]:
        """See `batch_logprobs`; without samples, of one token, so as to take part."""
        ids, masks = [s.token_ids for s in samples], [s.loss_mask for s in samples]
        if not samples:
            ids, masks = [_NO_TOKEN[0]], [_NO_TOKEN[1]]
        return scorer(ids, masks, temperature)


def _total_norm(grads: Sequence[Tensor]) -> float:
    """Return the norm of all gradients together, over all ranks; a collective."""
    norm = torch.nn.utils.get_total_norm(grads)
    return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)
