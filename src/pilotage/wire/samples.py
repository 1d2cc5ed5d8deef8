"""The bodies of the strict core that carry arrays: batches, log-probs, sample calls and completions.

A batch is ragged: the tokens of all samples, one after the other, and, only for the n tokens under the loss
mask, what a loss reads of them:

    lengths             int32 [S]
    token_ids           int32 [sum L]
    loss_mask           bool  [sum L]
    advantages          float32 [n]
    weights_versions    int32 [n]
    sampler_logprobs    float32 [n]    absent exactly where the loss does not read them
    reference_logprobs  float32 [n]    optional
    sequence_ids, group_ids            lists of S strings
    loss                               object, `LossConfig`
    denominators                       object, `Denominators`; absent where this is a whole batch

Invariant: everything is checked before anything is computed, and `unpack_x(pack_x(y))` is y, bit for bit.
What a `Sample` holds outside of its loss mask is not sent: it comes back as 0, or -1 for a version.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field

from pilotage.types import (
    Completion,
    Denominators,
    FinishReason,
    Logprobs,
    LossConfig,
    Mask,
    Sample,
    SamplingParams,
    TokenIds,
)
from pilotage.wire.fields import Fields
from pilotage.wire.frames import Tree, TreeLike

type Body = dict[str, TreeLike]


class _Settings(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    loss: LossConfig
    denominators: Denominators | None = None


class _Params(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    params: SamplingParams
    turn_index: int = Field(ge=0)


class _Temperature(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    temperature: float = Field(gt=0)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SampleRequest:
    """One call of a sampler."""

    prompt_ids: TokenIds
    params: SamplingParams
    session_id: str
    turn_index: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Tokens:
    """The tokens of S samples, one after the other."""

    ends: NDArray[np.int64]
    """[S] where each sample ends."""
    token_ids: TokenIds
    loss_mask: Mask

    @property
    def num_trained(self) -> int:
        return int(self.loss_mask.sum())

    def parts[T: np.generic](self, flat: NDArray[T]) -> list[NDArray[T]]:
        """Cut an array of all tokens into those of each sample."""
        return np.split(flat, self.ends[:-1])

    def spread[T: np.generic](self, trained: NDArray[T], elsewhere: int) -> list[NDArray[T]]:
        """Put values of the trained tokens in place, and cut."""
        flat = np.full(self.loss_mask.size, elsewhere, trained.dtype)
        flat[self.loss_mask] = trained
        return self.parts(flat)


def pack_samples(samples: Sequence[Sample], loss: LossConfig, denominators: Denominators | None) -> Body:
    """Return the body of forward_backward.

    Raises:
        ValueError: some samples bring reference log-probs and others do not.
    """
    body: Body = {
        **_pack_tokens(samples),
        "advantages": _trained(samples, [sample.advantages for sample in samples], np.float32),
        "weights_versions": _trained(samples, [sample.weights_versions for sample in samples], np.int32),
        "sequence_ids": [sample.sequence_id for sample in samples],
        "group_ids": [sample.group_id for sample in samples],
        "loss": asdict(loss),
    }
    if loss.reads_sampler_logprobs:
        logprobs = [sample.sampler_logprobs for sample in samples]
        body["sampler_logprobs"] = _trained(samples, logprobs, np.float32)
    references = [s.reference_logprobs for s in samples if s.reference_logprobs is not None]
    if references and len(references) != len(samples):
        raise ValueError(
            f"{len(references)} of {len(samples)} samples bring reference log-probs; send them separately"
        )
    if references:
        body["reference_logprobs"] = _trained(samples, references, np.float32)
    if denominators is not None:
        body["denominators"] = asdict(denominators)
    return body


def unpack_samples(tree: Tree) -> tuple[list[Sample], LossConfig, Denominators | None]:
    """Read the body of forward_backward.

    Raises:
        InvalidBodyError: it is not one, nothing in it is trained, or its denominators are not those of a
            batch that holds it.
    """
    fields = Fields(tree)
    tokens = _read_tokens(fields)
    settings = fields.model(_Settings, "loss", "denominators")
    num_trained, num_samples = tokens.num_trained, tokens.ends.size
    versions = fields.array("weights_versions", np.int32, num_trained)
    if (versions < -1).any():
        fields.fail(f"weights_versions.{np.argmax(versions < -1)}", "a version is at least 0, or -1 for none")
    advantages = tokens.spread(fields.array("advantages", np.float32, num_trained), 0)
    behaviour = tokens.spread(_sampler_logprobs(fields, settings.loss, num_trained), 0)
    reference = fields.optional_array("reference_logprobs", np.float32, num_trained)
    references = [None] * num_samples if reference is None else tokens.spread(reference, 0)
    sequence_ids, group_ids = (
        fields.texts("sequence_ids", num_samples),
        fields.texts("group_ids", num_samples),
    )
    fields.close()
    columns = zip(
        sequence_ids,
        group_ids,
        tokens.parts(tokens.token_ids),
        tokens.parts(tokens.loss_mask),
        behaviour,
        advantages,
        tokens.spread(versions, -1),
        references,
        strict=True,
    )
    samples = [
        Sample(
            sequence_id=sequence_id,
            group_id=group_id,
            token_ids=ids,
            loss_mask=mask,
            sampler_logprobs=logprobs,
            advantages=advantage,
            weights_versions=version,
            reference_logprobs=reference_logprobs,
        )
        for sequence_id, group_id, ids, mask, logprobs, advantage, version, reference_logprobs in columns
    ]
    _check_denominators(fields, samples, settings.denominators)
    return samples, settings.loss, settings.denominators


def pack_forward_request(samples: Sequence[Sample], *, temperature: float) -> Body:
    """Return the body of forward: `lengths`, `token_ids`, `loss_mask` as in a batch, and `temperature`."""
    return {**_pack_tokens(samples), "temperature": temperature}


def unpack_forward_request(tree: Tree) -> tuple[list[Sample], float]:
    """Read the body of forward: samples with tokens and mask only, and the temperature.

    Raises:
        InvalidBodyError: it is not one.
    """
    fields = Fields(tree)
    tokens = _read_tokens(fields)
    temperature = fields.model(_Temperature, "temperature").temperature
    fields.close()
    parts = zip(tokens.parts(tokens.token_ids), tokens.parts(tokens.loss_mask), strict=True)
    return [scored_sample(ids, mask, name=str(index)) for index, (ids, mask) in enumerate(parts)], temperature


def scored_sample(ids: TokenIds, mask: Mask, *, name: str) -> Sample:
    """Return a sample of which only tokens and mask matter."""
    nothing = np.zeros(ids.size, np.float32)
    return Sample(
        sequence_id=name,
        group_id=name,
        token_ids=ids,
        loss_mask=mask,
        sampler_logprobs=nothing,
        advantages=nothing,
        weights_versions=np.full(ids.size, -1, np.int32),
    )


def pack_logprobs(logprobs: Sequence[Logprobs]) -> Body:
    """Return the reply of forward: `lengths` int32 [S] and `logprobs` float32 [sum L]."""
    return {
        "lengths": np.array([array.size for array in logprobs], np.int32),
        "logprobs": np.concatenate([np.zeros(0, np.float32), *logprobs], dtype=np.float32),
    }


def unpack_logprobs(tree: Tree) -> list[Logprobs]:
    """Read the reply of forward: for each sample [L], 0 outside of its loss mask.

    Raises:
        InvalidBodyError: it is not one.
    """
    fields = Fields(tree)
    ends = _read_ends(fields)
    logprobs = fields.array("logprobs", np.float32, int(ends[-1]) if ends.size else 0)
    fields.close()
    return np.split(logprobs, ends[:-1]) if ends.size else []


def pack_sample_request(
    prompt_ids: TokenIds, params: SamplingParams, *, session_id: str, turn_index: int
) -> Body:
    """Return the body of sample: `prompt_ids` int32 [n], `params`, `session_id`, `turn_index`."""
    return {
        "prompt_ids": np.asarray(prompt_ids, np.int32),
        "params": asdict(params),
        "session_id": session_id,
        "turn_index": turn_index,
    }


def unpack_sample_request(tree: Tree) -> SampleRequest:
    """Read the body of sample.

    Raises:
        InvalidBodyError: it is not one, or the prompt is empty.
    """
    fields = Fields(tree)
    prompt_ids = fields.array("prompt_ids", np.int32)
    if not prompt_ids.size:
        fields.fail("prompt_ids", "a prompt needs at least one token")
    _check_ids(fields, "prompt_ids", prompt_ids)
    settings = fields.model(_Params, "params", "turn_index")
    session_id = fields.text("session_id")
    fields.close()
    return SampleRequest(
        prompt_ids=prompt_ids,
        params=settings.params,
        session_id=session_id,
        turn_index=settings.turn_index,
    )


def pack_completion(completion: Completion) -> Body:
    """Return the reply of sample: int32, float32 and int32 arrays [K], and `finish_reason`."""
    return {
        "token_ids": np.asarray(completion.token_ids, np.int32),
        "logprobs": np.asarray(completion.logprobs, np.float32),
        "weights_versions": np.asarray(completion.weights_versions, np.int32),
        "finish_reason": completion.finish_reason.value,
    }


def unpack_completion(tree: Tree) -> Completion:
    """Read the reply of sample.

    Raises:
        InvalidBodyError: it is not one.
    """
    fields = Fields(tree)
    token_ids = fields.array("token_ids", np.int32)
    _check_ids(fields, "token_ids", token_ids)
    logprobs = fields.array("logprobs", np.float32, token_ids.size)
    versions = fields.array("weights_versions", np.int32, token_ids.size)
    reason = fields.text("finish_reason")
    if reason not in FinishReason:
        fields.fail("finish_reason", f"expected one of {', '.join(FinishReason)}, got {reason!r}")
    fields.close()
    return Completion(
        token_ids=token_ids,
        logprobs=logprobs,
        weights_versions=versions,
        finish_reason=FinishReason(reason),
    )


def _pack_tokens(samples: Sequence[Sample]) -> dict[str, NDArray[Any]]:
    return {
        "lengths": np.array([sample.token_ids.size for sample in samples], np.int32),
        "token_ids": np.concatenate(
            [np.zeros(0, np.int32), *(sample.token_ids for sample in samples)],
            dtype=np.int32,
            casting="same_kind",
        ),
        "loss_mask": np.concatenate([np.zeros(0, np.bool_), *(sample.loss_mask for sample in samples)]),
    }


def _trained(
    samples: Sequence[Sample], arrays: Sequence[NDArray[Any]], dtype: type[np.generic]
) -> NDArray[Any]:
    """Return the entries of the trained tokens, sample after sample."""
    parts = [array[sample.loss_mask] for sample, array in zip(samples, arrays, strict=True)]
    return np.concatenate([np.zeros(0, dtype), *parts], dtype=dtype, casting="same_kind")


def _read_ends(fields: Fields) -> NDArray[np.int64]:
    lengths = fields.array("lengths", np.int32)
    if (lengths < 1).any():
        fields.fail(f"lengths.{np.argmax(lengths < 1)}", "a sample has at least one token")
    return np.cumsum(lengths, dtype=np.int64)


def _read_tokens(fields: Fields) -> _Tokens:
    ends = _read_ends(fields)
    size = int(ends[-1]) if ends.size else 0
    token_ids = fields.array("token_ids", np.int32, size)
    _check_ids(fields, "token_ids", token_ids)
    loss_mask = fields.array("loss_mask", np.bool_, size)
    if not loss_mask.any():
        fields.fail("loss_mask", "no token is under the mask, so there is nothing to compute")
    is_wrong = loss_mask[np.concatenate([[0], ends[:-1]])]
    if is_wrong.any():
        at = int(np.argmax(is_wrong))
        fields.fail(f"loss_mask.{ends[at - 1] if at else 0}", "nothing predicts a sample's first token")
    return _Tokens(ends=ends, token_ids=token_ids, loss_mask=loss_mask)


def _check_ids(fields: Fields, key: str, ids: TokenIds) -> None:
    if (ids < 0).any():
        fields.fail(f"{key}.{np.argmax(ids < 0)}", "a token id is at least 0")


def _sampler_logprobs(fields: Fields, loss: LossConfig, num_trained: int) -> NDArray[np.float32]:
    key = "sampler_logprobs"
    if loss.reads_sampler_logprobs:
        if fields.get(key) is None:
            fields.fail(key, "missing: a ratio needs them; set loss.on_policy where the ratio is 1")
        return fields.array(key, np.float32, num_trained)
    if fields.get(key) is not None:
        fields.fail(key, "this loss does not read them; leave them out, or set loss.on_policy to false")
    return np.zeros(num_trained, np.float32)


def _check_denominators(fields: Fields, samples: Sequence[Sample], given: Denominators | None) -> None:
    own = Denominators.of(samples)
    counts: Mapping[str, int] = {} if given is None else asdict(given)
    for key, least in asdict(own).items():
        if key in counts and counts[key] < least:
            fields.fail(f"denominators.{key}", f"{counts[key]}, but this piece alone has {least}")
