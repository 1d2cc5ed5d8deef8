"""Weights, gradients and optimizer of one model on one device; synchronous, one thread at a time.

The forward pass computes log-probs of trained tokens only, and a prefix that samples share once, where the
layers allow it. Loss and gradient with respect to them come from `algorithms.policy_loss`, in float64, and
are propagated back from there. A micro-batch holds whole rollouts, and denominators count the whole batch, so
how a batch is split changes nothing.

The module stays in evaluation mode: dropout would make the importance ratio a lie.

With LoRA the adapter alone has gradients and moments, and the reference is the same module without it.
"""

import contextlib
from collections.abc import Generator, Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from pilotage.algorithms import aligned, in_order, split_trained
from pilotage.engine.adapter_checkpoint import load_adapter, save_adapter, save_merged
from pilotage.engine.checkpoint import load_optimizer, save_optimizer
from pilotage.engine.gradients import Totals, propagate, require_applicable, summarise, to_numpy
from pilotage.engine.logprobs import batch_logprobs, trained_logprobs
from pilotage.engine.lora import LoraOptions, add_adapters, trained_weights, without_adapters
from pilotage.engine.micro_batches import passes, samples_of
from pilotage.engine.modules import load_module
from pilotage.engine.tree_layers import enable_trees
from pilotage.errors import TrainerError
from pilotage.types import (
    AdamParams,
    Denominators,
    ForwardBackwardResult,
    LossConfig,
    Sample,
    StepResult,
)


class TorchTrainer:
    """Gradient accumulation and AdamW on a Hugging Face module in float32."""

    def __init__(
        self,
        model_dir: Path,
        *,
        device: torch.device,
        micro_batch_tokens: int,
        lora: LoraOptions | None = None,
    ) -> None:
        """Load a model.

        Args:
            lora: adapters to train instead of the weights.

        Raises:
            ConfigError: the directory is no usable model, or the adapters do not fit it.
        """
        self.module: PreTrainedModel = load_module(model_dir, device=device)
        if lora is not None:
            add_adapters(self.module, lora)
        self._lora = lora
        self._takes_trees = enable_trees(self.module)
        self._model_dir = model_dir
        self._micro_batch_tokens = micro_batch_tokens
        self._reference: PreTrainedModel | None = None
        self._optimizer = self._fresh_optimizer()
        self._num_backwards = 0

    def forward_backward(
        self, samples: Sequence[Sample], loss: LossConfig, *, denominators: Denominators | None = None
    ) -> ForwardBackwardResult:
        """Add the gradient of `loss` over whole rollouts; a failure leaves no partial gradient.

        Args:
            denominators: counts of the batch that the samples are a piece of; None counts the samples.
        """
        trained = [sample for sample in samples if sample.trained_tokens]
        counts = Denominators.of(trained)
        denominators = denominators or counts
        totals = Totals()
        forwarded_tokens = 0
        try:
            micro_batches = self._split(trained)
            for micro_batch in micro_batches:
                forwarded_tokens += self._add_gradient(micro_batch, loss, denominators, totals)
        except BaseException:
            self.discard()
            raise
        self._num_backwards += 1
        scored = zip(micro_batches, totals.trainer_logprobs, strict=True)
        return summarise(
            totals,
            loss,
            counts,
            forwarded_tokens=forwarded_tokens,
            trainer_logprobs_n=in_order(trained, scored),
        )

    def forward(self, samples: Sequence[Sample], *, temperature: float) -> list[NDArray[np.float32]]:
        """Return, for each sample, [L] log-probs of its trained tokens, 0 elsewhere; no gradient.

        Args:
            temperature: the logits are divided by it before the softmax.
        """
        trained = [sample for sample in samples if sample.trained_tokens]
        scored: list[tuple[list[Sample], NDArray[np.float32]]] = []
        for micro_batch in self._split(trained):
            with torch.no_grad():
                logprobs, _ = self._forward(self.module, micro_batch, temperature)
            scored.append((micro_batch, logprobs.float().cpu().numpy()))
        return aligned(samples, in_order(trained, scored))

    def step(self, params: AdamParams) -> StepResult:
        """Clip, apply and clear the accumulated gradient.

        Raises:
            TrainerError: nothing was accumulated, or the gradient is not finite; it is cleared, and the
                weights are as before.
        """
        if not self._num_backwards:
            raise TrainerError("step without forward_backward: no gradient was accumulated")
        parameters = [p for p in self.module.parameters() if p.grad is not None]
        num_backwards = self._num_backwards
        norm = float(torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None]))
        try:
            require_applicable(norm)
            if 0 < params.max_grad_norm < norm:
                torch.nn.utils.clip_grads_with_norm_(parameters, params.max_grad_norm, torch.tensor(norm))
            for group in self._optimizer.param_groups:
                group.update(
                    lr=params.learning_rate,
                    betas=(params.beta1, params.beta2),
                    eps=params.eps,
                    weight_decay=params.weight_decay,
                )
            self._optimizer.step()
        finally:
            self.discard()
        return StepResult(grad_norm=norm, learning_rate=params.learning_rate, num_backwards=num_backwards)

    def discard(self) -> None:
        """Drop the accumulated gradient."""
        self._optimizer.zero_grad(set_to_none=True)
        self._num_backwards = 0

    def logprobs(self, token_ids: NDArray[np.int32]) -> NDArray[np.float64]:
        """Return [L - 1] log-probs of tokens 1 to L - 1 of one sequence, at temperature 1."""
        mask = np.ones(token_ids.size, np.bool_)
        mask[0] = False
        with torch.no_grad():
            values = trained_logprobs(self.module, [token_ids], [mask], temperature=1.0)
        return values.double().cpu().numpy()

    def save_state(self, directory: Path, *, weights_only: bool = False) -> None:
        """Write weights, config and, unless `weights_only`, the optimizer into an existing directory.

        With LoRA they are the adapter's, and with `weights_only` the merged model's beside them.
        """
        if self._lora is None:
            self.module.save_pretrained(directory)
        elif weights_only:
            save_merged(directory, self.module, self._lora, base_dir=self._model_dir)
        else:
            save_adapter(directory, self.module, self._lora, base_dir=self._model_dir)
        if not weights_only:
            save_optimizer(directory, trained_weights(self.module), self._optimizer)

    def load_state(self, directory: Path, *, weights_only: bool = False) -> None:
        """Restore what `save_state` wrote; without an optimizer, or `weights_only`, a fresh one starts.

        Raises:
            ConfigError: the directory is no usable model, or holds no such adapter where one is trained.
        """
        if self._lora is None:
            module = load_module(directory, device=self.module.device)
            self.module.load_state_dict(module.state_dict())
        else:
            load_adapter(directory, self.module, self._lora)
        self._optimizer = self._fresh_optimizer()
        if not weights_only:
            load_optimizer(directory, trained_weights(self.module), self._optimizer)
        self.discard()

    def _fresh_optimizer(self) -> torch.optim.AdamW:
        return torch.optim.AdamW(trained_weights(self.module).values(), foreach=True)

    def _add_gradient(
        self, samples: Sequence[Sample], loss: LossConfig, denominators: Denominators, totals: Totals
    ) -> int:
        """Forward, loss and backward of one micro-batch of whole rollouts; returns the tokens forwarded."""
        reference = self._reference_logprobs(samples, loss) if loss.kl_coef else None
        logprobs, forwarded_tokens = self._forward(self.module, samples, loss.temperature)
        propagate(
            logprobs,
            samples,
            loss,
            denominators=denominators,
            reference_logprobs_n=reference,
            totals=totals,
        )
        return forwarded_tokens

    def _reference_logprobs(self, samples: Sequence[Sample], loss: LossConfig) -> NDArray[np.float64]:
        """Return [n] reference log-probs: those that a sample brings, or else the frozen reference's."""
        missing = [sample for sample in samples if sample.reference_logprobs is None]
        computed = np.zeros(0)
        if missing:
            with torch.no_grad(), self._frozen_reference() as module:
                logprobs, _ = self._forward(module, missing, loss.temperature)
            computed = to_numpy(logprobs)
        parts = iter(split_trained(missing, computed))
        brought = [
            next(parts) if sample.reference_logprobs is None else sample.reference_logprobs[sample.loss_mask]
            for sample in samples
        ]
        return np.concatenate(brought, dtype=np.float64)

    @contextlib.contextmanager
    def _frozen_reference(self) -> Generator[PreTrainedModel]:
        """Give the weights that the engine was opened with: those below the adapters, or else a second copy,
        loaded the first time it is needed.
        """
        if self._lora is not None:
            with without_adapters(self.module):
                yield self.module
            return
        if self._reference is None:
            self._reference = load_module(self._model_dir, device=self.module.device)
            self._reference.requires_grad_(False)
            enable_trees(self._reference)
        yield self._reference

    def _split(self, samples: Sequence[Sample]) -> list[list[Sample]]:
        """Split a batch into micro-batches of whole rollouts."""
        split = passes(samples, budget_tokens=self._micro_batch_tokens, trees=self._takes_trees)
        return [samples_of(rollouts) for rollouts in split]

    def _forward(
        self, module: PreTrainedModel, samples: Sequence[Sample], temperature: float
    ) -> tuple[Tensor, int]:
        """Return [n] log-probs of the trained tokens, and how many tokens were forwarded for them."""
        ids, masks = [s.token_ids for s in samples], [s.loss_mask for s in samples]
        return batch_logprobs(module, ids, masks, temperature=temperature, as_tree=self._takes_trees)
