"""The Tinker wire's tensors: what the public SDK sends with forward_backward, and what it reads of results.

The SDK writes forward_backward, and reads the results of forward_backward and of sampling, as protobuf; its
other calls, and older versions, are JSON. Both forms are read here into the same values, and results are
written as protobuf, from which their JSON follows. Field numbers are those of `tinker_public.proto`, as the
SDK 0.38 has them; what it sends beside (provenance of spans) is not read.

Tinker aligns everything to positions of `model_input`: position i predicts `target_tokens[i]`, which is the
token after input i.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError
from numpy.typing import NDArray

from pilotage.errors import InvalidBodyError
from pilotage.types import Completion, FinishReason, Logprobs, TokenIds

PROTOBUF = "application/x-protobuf"
_PACKAGE = "pilotage_tinker"
_DTYPES = {1: np.dtype("<f4"), 2: np.dtype("<i8"), 3: np.dtype("<i4")}
_FLOAT32 = 1
_STOP, _LENGTH = 0, 1
_MAX_TOKENS = 2**24
"""Of one datum; far over any context."""

# A field is "number name type", `*` for repeated ones; maps are repeated entries, which is the same on the
# wire, and so are enums and int32.
_MESSAGES = {
    "SparseCsr": "1 values bytes, 2 crow_indices bytes, 3 col_indices bytes",
    "Tensor": "1 dense bytes, 2 sparse_csr SparseCsr, 3 dtype int32, 4 shape *int64",
    "EncodedText": "1 tokens bytes",
    "Chunk": "1 encoded_text EncodedText, 2 image bytes, 3 dmel bytes",
    "Input": "1 key string, 2 value Tensor",
    "Datum": "1 model_input *Chunk, 2 loss_fn_inputs *Input",
    "Number": "1 key string, 2 value double",
    "Setting": "1 number double, 2 text string",
    "NamedSetting": "1 key string, 2 value Setting",
    "ForwardBackwardRequest": "1 model_id string, 2 seq_id int32, 3 data *Datum, 4 loss_fn string,"
    " 5 loss_fn_config *Number, 6 forward_only bool, 7 loss_fn_config_v2 *NamedSetting",
    "BatchedTensor": "1 data bytes, 2 offsets bytes, 3 dtype int32, 4 trailing_shape *int64",
    "Field": "1 key string, 2 value BatchedTensor",
    "ArrayRecord": "1 type_tag string, 2 fields *Field, 3 num_datums int64",
    "ForwardBackwardOutput": "1 loss_fn_output_type string, 2 loss_fn_outputs *ArrayRecord,"
    " 3 metrics *Number",
    "SampledSequence": "1 stop_reason int32, 2 tokens bytes, 3 logprobs bytes",
    "SampleResponse": "1 sequences *SampledSequence, 2 prompt_logprobs bytes",
}
_SCALARS = {"double": 1, "int64": 3, "int32": 5, "bool": 8, "string": 9, "bytes": 12}


def _message_classes() -> dict[str, Any]:
    file = descriptor_pb2.FileDescriptorProto(name=f"{_PACKAGE}.proto", package=_PACKAGE, syntax="proto2")
    for name, text in _MESSAGES.items():
        message = file.message_type.add(name=name)
        for part in text.split(","):
            number, field_name, kind = part.split()
            is_repeated, kind = kind.startswith("*"), kind.removeprefix("*")
            added = message.field.add(name=field_name, number=int(number), label=3 if is_repeated else 1)
            added.type = _SCALARS.get(kind, 11)  # pyright: ignore[reportAttributeAccessIssue]
            if kind not in _SCALARS:
                added.type_name = f".{_PACKAGE}.{kind}"
            elif is_repeated:
                added.options.packed = True
    pool = descriptor_pool.DescriptorPool()  # of its own: the SDK's messages may be in the default one
    pool.Add(file)  # pyright: ignore[reportUnknownMemberType]
    found = {name: pool.FindMessageTypeByName(f"{_PACKAGE}.{name}") for name in _MESSAGES}
    return {name: message_factory.GetMessageClass(kind) for name, kind in found.items()}


_CLASSES = _message_classes()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Datum:
    """One sequence with what a loss reads of it, all aligned to positions of the input."""

    input_ids: TokenIds
    """[N]"""
    inputs: Mapping[str, NDArray[Any]]
    """Name -> [N]; `target_tokens` is always there."""

    @property
    def targets(self) -> NDArray[np.int64]:
        """[N] the token that each position predicts."""
        return self.inputs["target_tokens"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ForwardBackward:
    """A call of forward_backward, or of forward."""

    loss_fn: str
    config: Mapping[str, float | str] = field(default_factory=dict[str, float | str])
    data: Sequence[Datum]
    is_forward_only: bool


def address_of(content: bytes) -> tuple[str, int]:
    """Return model id and number of a forward_backward in protobuf form.

    Raises:
        InvalidBodyError: it is none.
    """
    message = _request(content)
    return message.model_id, message.seq_id


def read_forward_backward(content: bytes) -> ForwardBackward:
    """Read the protobuf form.

    Raises:
        InvalidBodyError: it is none, or a datum cannot be used; the path says which.
    """
    message = _request(content)
    config: dict[str, float | str] = {entry.key: entry.value for entry in message.loss_fn_config}
    for entry in message.loss_fn_config_v2:
        is_text = entry.value.HasField("text")
        config[entry.key] = entry.value.text if is_text else entry.value.number
    return ForwardBackward(
        loss_fn=message.loss_fn,
        config=config,
        data=[_datum(datum, f"data.{index}") for index, datum in enumerate(message.data)],
        is_forward_only=message.forward_only,
    )


def read_forward_backward_json(content: Mapping[str, Any]) -> ForwardBackward:
    """Read the JSON form of older SDKs, whose input lies under `forward_backward_input` or `forward_input`.

    Raises:
        InvalidBodyError: as `read_forward_backward`.
    """
    is_forward_only = "forward_input" in content
    name = "forward_input" if is_forward_only else "forward_backward_input"
    given = content.get(name)
    if not isinstance(given, Mapping) or not isinstance(given.get("data"), list):
        raise InvalidBodyError(name, f"{name} holds data, a list of datums")
    return ForwardBackward(
        loss_fn=str(given.get("loss_fn")),
        config=dict(given.get("loss_fn_config") or {}),
        data=[_datum_of_json(datum, f"{name}.data.{index}") for index, datum in enumerate(given["data"])],
        is_forward_only=is_forward_only,
    )


def read_prompt(content: Any, *, path: str) -> TokenIds:
    """Read the JSON form of a ModelInput: chunks of token ids.

    Raises:
        InvalidBodyError: it holds something else; images are not taken.
    """
    chunks = content.get("chunks") if isinstance(content, Mapping) else None
    if not isinstance(chunks, list):
        raise InvalidBodyError(path, "a model input is an object with chunks")
    ids: list[int] = []
    for index, chunk in enumerate(chunks):
        tokens = chunk.get("tokens") if isinstance(chunk, Mapping) else None
        if not isinstance(tokens, list):
            raise InvalidBodyError(f"{path}.chunks.{index}", "only chunks of token ids are taken")
        ids += tokens
    return _token_ids(ids, path)


def write_forward_backward(logprobs: Sequence[Logprobs], metrics: Mapping[str, float]) -> bytes:
    """Return the protobuf form of a result.

    Args:
        logprobs: of each datum [N], aligned to its targets.
    """
    sizes = [4 * values.size for values in logprobs]
    tensor = _CLASSES["BatchedTensor"](
        data=b"".join(values.astype("<f4").tobytes() for values in logprobs),
        offsets=np.cumsum([0, *sizes], dtype="<i8").tobytes(),
        dtype=_FLOAT32,
    )
    record = _CLASSES["ArrayRecord"](
        type_tag="ArrayRecord",
        fields=[_CLASSES["Field"](key="logprobs", value=tensor)],
        num_datums=len(logprobs),
    )
    numbers = [_CLASSES["Number"](key=name, value=value) for name, value in metrics.items()]
    output = _CLASSES["ForwardBackwardOutput"](
        loss_fn_output_type="ArrayRecord", loss_fn_outputs=[record], metrics=numbers
    )
    return output.SerializeToString()


def write_samples(completions: Sequence[Completion], prompt_logprobs: Logprobs | None) -> bytes:
    """Return the protobuf form of sampled sequences.

    Args:
        prompt_logprobs: [prompt] with NaN where there is none (the first token); None where not wanted.
    """
    sequences = [
        _CLASSES["SampledSequence"](
            stop_reason=_LENGTH if completion.finish_reason is FinishReason.LENGTH else _STOP,
            tokens=completion.token_ids.astype("<i4").tobytes(),
            logprobs=completion.logprobs.astype("<f4").tobytes(),
        )
        for completion in completions
    ]
    response = _CLASSES["SampleResponse"](sequences=sequences)
    if prompt_logprobs is not None:
        response.prompt_logprobs = prompt_logprobs.astype("<f4").tobytes()
    return response.SerializeToString()


def forward_backward_json(content: bytes) -> dict[str, Any]:
    """Return the JSON form of what `write_forward_backward` wrote."""
    output = _CLASSES["ForwardBackwardOutput"].FromString(content)
    (record,) = output.loss_fn_outputs
    (values,) = record.fields
    rows = np.split(
        np.frombuffer(values.value.data, "<f4"), np.frombuffer(values.value.offsets, "<i8")[1:-1] // 4
    )
    rows = rows[: record.num_datums]
    return {
        "loss_fn_output_type": output.loss_fn_output_type,
        "loss_fn_outputs": [
            {"logprobs": {"data": row.tolist(), "dtype": "float32", "shape": [row.size]}} for row in rows
        ],
        "metrics": {number.key: number.value for number in output.metrics},
    }


def samples_json(content: bytes) -> dict[str, Any]:
    """Return the JSON form of what `write_samples` wrote."""
    response = _CLASSES["SampleResponse"].FromString(content)
    prompt = np.frombuffer(response.prompt_logprobs, "<f4").tolist()
    return {
        "type": "sample",
        "sequences": [
            {
                "stop_reason": "length" if sequence.stop_reason == _LENGTH else "stop",
                "tokens": np.frombuffer(sequence.tokens, "<i4").tolist(),
                "logprobs": np.frombuffer(sequence.logprobs, "<f4").tolist(),
            }
            for sequence in response.sequences
        ],
        "prompt_logprobs": [None if value != value else value for value in prompt]
        if response.HasField("prompt_logprobs")
        else None,
    }


# --- parts ---


def _request(content: bytes) -> Any:
    try:
        return _CLASSES["ForwardBackwardRequest"].FromString(content)
    except DecodeError as error:
        raise InvalidBodyError("", f"the body is no ForwardBackwardRequest: {error}") from None


def _datum(message: Any, path: str) -> Datum:
    pieces: list[bytes] = []
    for index, chunk in enumerate(message.model_input):
        if not chunk.HasField("encoded_text"):
            raise InvalidBodyError(f"{path}.model_input.chunks.{index}", "only chunks of token ids are taken")
        pieces.append(chunk.encoded_text.tokens)
    ids = _array(b"".join(pieces), np.dtype("<i4"), f"{path}.model_input")
    inputs: dict[str, NDArray[Any]] = {}
    for entry in message.loss_fn_inputs:
        where, tensor = f"{path}.loss_fn_inputs.{entry.key}", entry.value
        dtype = _DTYPES.get(tensor.dtype)
        if dtype is None or not tensor.HasField("dense"):
            raise InvalidBodyError(where, "a tensor is dense, of float32, int64 or int32")
        _require_flat(list(tensor.shape), where)
        inputs[entry.key] = _array(tensor.dense, dtype, where)
    return _checked(ids, inputs, path)


def _datum_of_json(content: Any, path: str) -> Datum:
    if not isinstance(content, Mapping) or not isinstance(content.get("loss_fn_inputs"), Mapping):
        raise InvalidBodyError(path, "a datum is an object with model_input and loss_fn_inputs")
    inputs: dict[str, NDArray[Any]] = {}
    for name, tensor in content["loss_fn_inputs"].items():
        where = f"{path}.loss_fn_inputs.{name}"
        if not isinstance(tensor, Mapping) or tensor.get("dtype") not in ("float32", "int64"):
            raise InvalidBodyError(where, "a tensor has data, and a dtype that is float32 or int64")
        if tensor.get("sparse_crow_indices") is not None:
            raise InvalidBodyError(where, "a tensor is dense")
        _require_flat(tensor.get("shape") or [], where)
        try:
            values = np.asarray(tensor.get("data"), np.dtype(str(tensor["dtype"])))
        except (TypeError, ValueError, OverflowError):
            raise InvalidBodyError(where, "data is a list of numbers") from None
        inputs[str(name)] = values.reshape(-1)
    return _checked(read_prompt(content.get("model_input"), path=f"{path}.model_input"), inputs, path)


def _checked(ids: TokenIds, inputs: Mapping[str, NDArray[Any]], path: str) -> Datum:
    if "target_tokens" not in inputs:
        raise InvalidBodyError(f"{path}.loss_fn_inputs.target_tokens", "a datum has target_tokens")
    for name, values in inputs.items():
        where = f"{path}.loss_fn_inputs.{name}"
        if values.size != ids.size:
            raise InvalidBodyError(where, f"{values.size} values for {ids.size} input tokens")
        if values.dtype.kind == "f" and not np.isfinite(values).all():
            raise InvalidBodyError(where, "a value is not finite")
    targets = inputs["target_tokens"]
    _token_ids(targets, f"{path}.loss_fn_inputs.target_tokens")
    _token_ids(ids, f"{path}.model_input")
    return Datum(input_ids=ids, inputs={**inputs, "target_tokens": targets.astype(np.int64)})


def _token_ids(values: Sequence[int] | NDArray[Any], path: str) -> TokenIds:
    try:
        array: NDArray[Any] = np.asarray(values)
    except (ValueError, OverflowError):
        array = np.zeros(0, np.float64)
    if array.ndim != 1 or not 0 < array.size <= _MAX_TOKENS or array.dtype.kind not in "iu":
        raise InvalidBodyError(path, "expected a list of token ids")
    if array.min() < 0 or array.max() > np.iinfo(np.int32).max:
        raise InvalidBodyError(path, "a token id is out of range")
    return array.astype(np.int32)


def _array(content: bytes, dtype: np.dtype[Any], path: str) -> NDArray[Any]:
    if len(content) % dtype.itemsize:
        raise InvalidBodyError(path, f"{len(content)} bytes are no array of {dtype.name}")
    return np.frombuffer(content, dtype)


def _require_flat(shape: Sequence[int], path: str) -> None:
    if len(shape) > 1:
        raise InvalidBodyError(
            path,
            f"one value for each position, got shape {list(shape)}; several targets a position are not taken",
        )
