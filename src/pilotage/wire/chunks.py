"""Frames larger than one POST: byte ranges of a frame, each in a frame of its own.

A chunk is a DSSST1 frame of {"payload": uint8 [n]} whose `op` describes the whole:

    request_chunk | result_chunk: {chunk_idx, total_chunks, frame_sha256, frame_size_bytes,
                                   chunk_group_id (requests), operation (requests)}

Invariant: `join_chunks` returns the very bytes that `split_frame` was given, or raises. Both sides of the
public client read what this writes and write what this reads.

It keeps no state between calls: who holds half a group, and for how long, is the service's business.
"""

import hashlib
import re
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from pilotage.errors import WireError
from pilotage.wire.blob import Buffer
from pilotage.wire.frames import Json, TreeLike, decode_frame, encode_frame, read_op

MAX_CHUNK_BYTES = 60 * 1024 * 1024
"""The largest body that the service takes in one POST."""
CHUNK_OVERHEAD_BYTES = 8192
"""What a chunk leaves free for its own header; the header takes about 500."""
MAX_NAME_LENGTH = 256

_SHA256 = re.compile(r"[0-9a-f]{64}")


class ChunkKind(StrEnum):
    """Which way a chunk goes."""

    REQUEST = "request"
    RESULT = "result"


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkDescriptor:
    """What a chunk says of itself and of the frame it is part of."""

    kind: ChunkKind
    chunk_idx: int
    total_chunks: int
    frame_sha256: str
    """Of the whole frame, lower-case hex."""
    frame_size_bytes: int
    chunk_group_id: str | None = None
    """The caller's name of the group; None for results."""
    operation: str | None = None
    """`fwd-bwd`, `generate` or `forward`; None for results."""

    def __post_init__(self) -> None:
        counts = (self.chunk_idx, self.total_chunks, self.frame_size_bytes)
        if not all(type(count) is int for count in counts):
            raise WireError(f"chunk counts must be integers, got {counts}")
        if not 0 <= self.chunk_idx < self.total_chunks:
            raise WireError(f"chunk_idx {self.chunk_idx} is not below total_chunks {self.total_chunks}")
        if self.frame_size_bytes < 0:
            raise WireError(f"frame_size_bytes is {self.frame_size_bytes}")
        if not _SHA256.fullmatch(self.frame_sha256):
            raise WireError("frame_sha256 is not 64 lower-case hex digits")
        for name in (self.chunk_group_id, self.operation):
            if name is not None and not 0 < len(name) <= MAX_NAME_LENGTH:
                raise WireError(f"chunk_group_id and operation have 1 to {MAX_NAME_LENGTH} characters")


def split_frame(
    frame: bytes,
    *,
    kind: ChunkKind,
    operation: str | None = None,
    max_bytes: int = MAX_CHUNK_BYTES,
    group_id: str | None = None,
    force: bool = False,
) -> list[bytes]:
    """Split `frame` into chunks of at most `max_bytes` each.

    Args:
        kind: requests carry a group id and an operation, results neither.
        max_bytes: more than `CHUNK_OVERHEAD_BYTES`.
        group_id: of a request; a random UUID where None.
        force: wrap a frame that would fit as it is, for calls that take nothing but chunks.

    Returns:
        `[frame]` where it fits and `force` is False, else its chunks in order.

    Raises:
        WireError: an argument does not fit the others.
    """
    if max_bytes <= CHUNK_OVERHEAD_BYTES:
        raise WireError(f"max_bytes is {max_bytes}; a chunk needs more than {CHUNK_OVERHEAD_BYTES}")
    if kind is ChunkKind.RESULT and (group_id is not None or operation is not None):
        raise WireError("a result has no group id and no operation; they belong to requests")
    if len(frame) <= max_bytes and not force:
        return [frame]
    if kind is ChunkKind.REQUEST and group_id is None:
        group_id = str(uuid.uuid4())
    payload_bytes = max_bytes - CHUNK_OVERHEAD_BYTES
    stored = np.frombuffer(frame, np.uint8) if frame else np.empty(0, np.uint8)
    starts = range(0, max(len(frame), 1), payload_bytes)
    digest = hashlib.sha256(frame).hexdigest()
    return [
        _encode_chunk(
            stored[start : start + payload_bytes],
            ChunkDescriptor(
                kind=kind,
                chunk_idx=index,
                total_chunks=len(starts),
                frame_sha256=digest,
                frame_size_bytes=len(frame),
                chunk_group_id=group_id,
                operation=operation,
            ),
        )
        for index, start in enumerate(starts)
    ]


def _encode_chunk(payload: NDArray[np.uint8], descriptor: ChunkDescriptor) -> bytes:
    fields: dict[str, TreeLike] = {
        "chunk_idx": descriptor.chunk_idx,
        "total_chunks": descriptor.total_chunks,
        "frame_sha256": descriptor.frame_sha256,
        "frame_size_bytes": descriptor.frame_size_bytes,
    }
    if descriptor.chunk_group_id is not None:
        fields["chunk_group_id"] = descriptor.chunk_group_id
    if descriptor.operation is not None:
        fields["operation"] = descriptor.operation
    return encode_frame({"payload": payload}, op={f"{descriptor.kind}_chunk": fields})


def read_descriptor(chunk: Buffer) -> ChunkDescriptor | None:
    """Return what a chunk says of itself, None for a frame that is no chunk; the payload is not read.

    Raises:
        WireError: not a frame, or a malformed descriptor.
    """
    op = read_op(chunk)
    found = [kind for kind in ChunkKind if f"{kind}_chunk" in op]
    if not found:
        return None
    if len(found) > 1:
        raise WireError("a frame is a request chunk or a result chunk, not both")
    return _parse_descriptor(found[0], op[f"{found[0]}_chunk"])


def _parse_descriptor(kind: ChunkKind, fields: Json) -> ChunkDescriptor:
    match fields:
        case {
            "chunk_idx": int(index),
            "total_chunks": int(total),
            "frame_sha256": str(sha256),
            "frame_size_bytes": int(size_bytes),
        }:
            pass
        case _:
            raise WireError(
                f"{kind}_chunk needs the integers chunk_idx, total_chunks and frame_size_bytes,"
                " and the string frame_sha256"
            )
    group_id, operation = fields.get("chunk_group_id"), fields.get("operation")
    if not isinstance(group_id, str | None) or not isinstance(operation, str | None):
        raise WireError(f"{kind}_chunk: chunk_group_id and operation are strings")
    return ChunkDescriptor(
        kind=kind,
        chunk_idx=index,
        total_chunks=total,
        frame_sha256=sha256,
        frame_size_bytes=size_bytes,
        chunk_group_id=group_id,
        operation=operation,
    )


def join_chunks(chunks: Sequence[Buffer], kind: ChunkKind) -> bytes:
    """Return the frame whose chunks these are, in any order; a frame that is no chunk stands for itself.

    Raises:
        WireError: chunks of another kind or of several frames, one too many, twice or missing, or bytes
            that are not those that were split (size and SHA-256).
    """
    if not chunks:
        raise WireError("no chunks")
    if len(chunks) == 1 and read_descriptor(chunks[0]) is None:
        return bytes(chunks[0])
    first = _descriptor(chunks[0], kind)
    payloads: dict[int, NDArray[np.uint8]] = {}
    for chunk in chunks:
        descriptor = _descriptor(chunk, kind)
        if replace(descriptor, chunk_idx=0) != replace(first, chunk_idx=0):
            raise WireError(f"chunk {descriptor.chunk_idx} is of another frame or group than the first")
        if descriptor.chunk_idx in payloads:
            raise WireError(f"chunk {descriptor.chunk_idx} is there twice")
        payloads[descriptor.chunk_idx] = _payload(chunk)
    return _checked_frame(first, payloads)


def _descriptor(chunk: Buffer, kind: ChunkKind) -> ChunkDescriptor:
    descriptor = read_descriptor(chunk)
    if descriptor is None:
        raise WireError("a frame that is no chunk is among the chunks")
    if descriptor.kind is not kind:
        raise WireError(f"a {descriptor.kind} chunk is among {kind} chunks")
    return descriptor


def _payload(chunk: Buffer) -> NDArray[np.uint8]:
    match decode_frame(chunk):
        case {"payload": np.ndarray() as payload, **rest} if not rest:
            pass
        case _:
            raise WireError("a chunk holds one array, 'payload'")
    if payload.dtype != np.uint8 or payload.ndim != 1:
        raise WireError(f"a chunk's payload is uint8 [n], not {payload.dtype} of shape {payload.shape}")
    return payload


def _checked_frame(descriptor: ChunkDescriptor, payloads: Mapping[int, NDArray[np.uint8]]) -> bytes:
    """Join the payloads by index; `descriptor` is that of any of them."""
    total = descriptor.total_chunks
    if len(payloads) != total:
        raise WireError(f"{len(payloads)} of {total} chunks are there")
    frame = b"".join(payloads[index].data for index in range(total))
    if len(frame) != descriptor.frame_size_bytes:
        raise WireError(f"the joined frame has {len(frame)} bytes, not {descriptor.frame_size_bytes}")
    if hashlib.sha256(frame).hexdigest() != descriptor.frame_sha256:
        raise WireError("the joined frame's SHA-256 is not the one stated: its bytes were changed")
    return frame
