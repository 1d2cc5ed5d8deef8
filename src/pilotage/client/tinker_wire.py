"""Between our records and the SDK's: batches, log-probs, completions."""

import math
from collections.abc import Mapping, Sequence

import numpy as np
import tinker
from numpy.typing import NDArray

from pilotage.client.tinker_losses import WireLoss
from pilotage.errors import SamplerError, TrainerError
from pilotage.types import Completion, FinishReason, Sample, token_ids

type Rows = list[NDArray[np.float32]]
"""For each sample [L - 1] values, one a target."""


def data_of(samples: Sequence[Sample], wire: WireLoss) -> list[tinker.Datum]:
    """Return the samples as the wire has them: token i predicts target i, which is token i + 1."""
    return [
        tinker.Datum(
            model_input=tinker.ModelInput.from_ints(sample.token_ids[:-1].tolist()),
            loss_fn_inputs={
                "target_tokens": tinker.TensorData.from_numpy(sample.token_ids[1:].astype(np.int64)),
                **{name: tinker.TensorData.from_numpy(row) for name, row in inputs.items()},
            },
        )
        for sample, inputs in zip(samples, wire.inputs, strict=True)
    ]


def logprob_rows(samples: Sequence[Sample], output: tinker.ForwardBackwardOutput) -> Rows:
    """Read [L - 1] log-probs of each sample's targets.

    Raises:
        TrainerError: they are not all there, or not finite where they are trained.
    """
    rows: Rows = []
    for sample, found in zip(samples, output.loss_fn_outputs, strict=True):
        if "logprobs" not in found:
            raise TrainerError("the server returns no log-probs of the targets; use another server")
        row = np.asarray(found["logprobs"].to_numpy(), np.float32).reshape(-1)
        if row.size != sample.token_ids.size - 1 or not np.isfinite(row[sample.loss_mask[1:]]).all():
            raise TrainerError(
                f"the server's log-probs of {sample.sequence_id} are not one finite number a target"
            )
        rows.append(row)
    return rows


def completion_of(reply: tinker.SampleResponse, version: int, stops: tuple[int, ...]) -> Completion:
    """Read the one sequence of a reply.

    Raises:
        SamplerError: it cannot be trained: ids or log-probs are missing.
    """
    [sequence] = reply.sequences
    ids, logprobs = token_ids(sequence.tokens), sequence.logprobs
    is_stop = sequence.stop_reason == "stop"
    fault = None
    if logprobs is None or len(logprobs) != ids.size or not ids.size:
        fault = f"{ids.size} ids come with {0 if logprobs is None else len(logprobs)} log-probs"
    elif is_stop and int(ids[-1]) not in stops:
        fault = f"it ends with none of {list(stops)}, so the server keeps the stop token, or stops at another"
    if fault is not None:
        failed = SamplerError(f"the server's completion cannot be trained: {fault}; use another server")
        failed.retryable = False
        raise failed
    return Completion(
        token_ids=ids,
        logprobs=np.array(logprobs, np.float32),
        weights_versions=np.full(ids.size, version, np.int32),
        finish_reason=FinishReason.STOP if is_stop else FinishReason.LENGTH,
    )


def grad_norm_of(metrics: Mapping[str, float]) -> float:
    """Return the gradient's norm, which the API does not name; servers that tell it call it ...grad_norm."""
    found = (value for name, value in metrics.items() if name.partition(":")[0].endswith("grad_norm"))
    return next(found, math.nan)
