"""Requests that arrive in several POSTs: DSSST1 chunk groups of the stock wire.

A group is known by (`chunk_group_id`, `frame_sha256`). Its chunks are kept by the engine, not by a
connection, and may be sent again. A group that is not known must start at chunk 0. When it is complete the
frame is handed over once; the finished group is remembered by its id, so that its last chunk, repeated,
finds the first execution.
"""

import time
from dataclasses import dataclass, field

from pilotage.service.refusals import Refusal
from pilotage.wire.chunks import ChunkDescriptor, ChunkKind, join_chunks, read_descriptor
from pilotage.wire.core import ErrorCode

_MAX_OPEN_BYTES = 2 * 2**30
_MAX_AGE_S = 900.0
_MAX_CHUNKS = 4096
_CHUNK_OVERHEAD_BYTES = 1024
_MAX_FINISHED = 100_000


@dataclass(slots=True, kw_only=True)
class _Group:
    first: ChunkDescriptor
    chunks: dict[int, bytes] = field(default_factory=dict[int, bytes])
    touched_at: float = field(default_factory=time.monotonic)


@dataclass(frozen=True, slots=True, kw_only=True)
class Received:
    """What became of one POST."""

    group_id: str | None
    """None for a frame that came whole."""
    frame: bytes | None
    """The whole frame; None while chunks are missing, or where the group was finished before."""
    is_repeat: bool = False
    """Whether the group had been finished before."""


class ChunkGroups:
    """The open and the finished groups of one engine."""

    def __init__(self, *, max_open_bytes: int = _MAX_OPEN_BYTES) -> None:
        """Args:
        max_open_bytes: what the chunks of unfinished groups may take, all together.
        """
        self._max_open_bytes = max_open_bytes
        self._open: dict[str, _Group] = {}
        self._held_bytes = 0
        """Of all chunks of open groups, `_CHUNK_OVERHEAD_BYTES` each included."""
        self._finished: dict[str, str] = {}
        """Digest of the frame by group id."""

    def receive(self, body: bytes, *, operation: str) -> Received:
        """Take one POST of `operation`.

        Raises:
            Refusal: the chunk does not belong where it says.
            WireError: the body is no frame.
        """
        descriptor = read_descriptor(body)
        if descriptor is None:
            return Received(group_id=None, frame=body)
        group_id = descriptor.chunk_group_id
        if descriptor.kind is not ChunkKind.REQUEST or group_id is None or descriptor.operation != operation:
            raise Refusal(ErrorCode.INVALID, f"the chunk is not one of a {operation} request")
        if descriptor.total_chunks > _MAX_CHUNKS:
            raise Refusal(ErrorCode.TOO_LARGE, f"at most {_MAX_CHUNKS} chunks, got {descriptor.total_chunks}")
        finished = self._finished.get(group_id)
        if finished is not None:
            if finished != descriptor.frame_sha256:
                raise _conflict(group_id)
            return Received(group_id=group_id, frame=None, is_repeat=True)
        return self._add(group_id, descriptor, body)

    def forget(self, group_id: str | None) -> None:
        """Let a finished group go whose frame was not taken, so that it may be sent again."""
        if group_id is not None:
            self._finished.pop(group_id, None)

    def _add(self, group_id: str, descriptor: ChunkDescriptor, body: bytes) -> Received:
        group = self._open.get(group_id)
        if group is None:
            if descriptor.chunk_idx != 0:
                raise Refusal(
                    "chunk_group_restart_required",
                    f"chunk group {group_id} is not known here; send it again from chunk 0",
                    status=409,
                )
            self._drop_old()
            group = _Group(first=descriptor)
        if not _is_same_group(group.first, descriptor):
            raise _conflict(group_id)
        known = group.chunks.get(descriptor.chunk_idx)
        if known is not None and known != body:
            raise _conflict(group_id)
        if known is None:
            self._require_room(len(body))
            self._held_bytes += len(body) + _CHUNK_OVERHEAD_BYTES
        self._open[group_id] = group
        group.chunks[descriptor.chunk_idx] = body
        group.touched_at = time.monotonic()
        is_last = descriptor.chunk_idx == descriptor.total_chunks - 1
        missing = descriptor.total_chunks - len(group.chunks)
        if is_last and missing:
            raise Refusal(
                "chunk_group_missing_chunks",
                f"the last chunk of group {group_id} came, but {missing} before it did not",
                status=409,
            )
        if missing:
            return Received(group_id=group_id, frame=None)
        self._forget(group_id)
        frame = join_chunks([group.chunks[i] for i in range(len(group.chunks))], kind=ChunkKind.REQUEST)
        self._finished[group_id] = descriptor.frame_sha256
        if len(self._finished) > _MAX_FINISHED:
            del self._finished[next(iter(self._finished))]
        return Received(group_id=group_id, frame=frame)

    def _forget(self, group_id: str) -> None:
        chunks = self._open.pop(group_id).chunks.values()
        self._held_bytes -= sum(len(chunk) + _CHUNK_OVERHEAD_BYTES for chunk in chunks)

    def _drop_old(self) -> None:
        now = time.monotonic()
        for group_id in [g for g, group in self._open.items() if now - group.touched_at > _MAX_AGE_S]:
            self._forget(group_id)

    def _require_room(self, incoming_bytes: int) -> None:
        if self._held_bytes + incoming_bytes > self._max_open_bytes:
            raise Refusal(
                ErrorCode.TOO_LARGE,
                f"unfinished chunk groups hold {self._held_bytes} bytes; finish them before another is begun",
                retryable=True,
                retry_after_s=5.0,
            )


def _is_same_group(first: ChunkDescriptor, other: ChunkDescriptor) -> bool:
    return (first.frame_sha256, first.total_chunks, first.frame_size_bytes) == (
        other.frame_sha256,
        other.total_chunks,
        other.frame_size_bytes,
    )


def _conflict(group_id: str) -> Refusal:
    return Refusal(
        "chunk_group_conflict",
        f"chunk group {group_id} was begun with another frame or other chunks",
        status=409,
    )
