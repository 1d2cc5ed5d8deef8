"""The ASGI app: who may ask, and the path of a request from bytes to bytes.

    authorise -> read -> parse -> note overrides -> replay, or join a sampler call -> answer

A turn is recorded before any byte of its answer is sent. The bearer key is the session: it is kept as
a digest only, and appears in no log and no error body.
"""

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator
from hashlib import sha256

import orjson
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from pilotage.errors import SamplerError, WeightsChangingError
from pilotage.interfaces import Renderer, Sampler
from pilotage.proxy.patience import Patience
from pilotage.proxy.refusals import Refusal, unknown_key
from pilotage.proxy.replies import Answer, events, whole_body
from pilotage.proxy.requests import ChatRequest, parse_request
from pilotage.proxy.session import Policy, Session
from pilotage.types import SessionAccess, SessionRecord, SessionSpec

_LOG = logging.getLogger(__name__)

MAX_BODY_BYTES = 64 * 2**20
_KEY_BYTES = 32
_JSON = "application/json"


class ChatCompletionsProxy:
    """Records every token that agents sample through `POST /v1/chat/completions`.

    Agents often send an assistant message back without its reasoning. The request then still extends
    the recorded turn: the recorded ids are the truth, and the resent message is a label. Only other,
    non-empty reasoning makes a branch, or missing reasoning under `honour_dropped_reasoning`.

    Args:
        sampler: answers ids with ids.
        renderer: encodes new messages and parses what was sampled.
        model_name: what `/v1/models` lists; a request may name any model.
        patience: how long faults of the sampler are waited out before the agent hears of them.
        honour_dropped_reasoning: whether an agent that drops reasoning takes it from the context too.
    """

    def __init__(
        self,
        sampler: Sampler,
        renderer: Renderer,
        *,
        model_name: str = "policy",
        patience: Patience | None = None,
        honour_dropped_reasoning: bool = False,
    ) -> None:
        self.model_name = model_name
        self.base_url = "http://proxy/v1"
        """Where agents reach the app; `serve` sets it."""
        self._policy = Policy(
            sampler=sampler,
            renderer=renderer,
            patience=patience or Patience(),
            honour_dropped_reasoning=honour_dropped_reasoning,
        )
        self._sessions: dict[bytes, Session] = {}
        self.app = Starlette(
            routes=[
                Route("/v1/chat/completions", self._chat, methods=["POST"]),
                Route("/v1/models", self._models, methods=["GET"]),
                Route("/health", _health, methods=["GET"]),
            ]
        )

    def open(self, spec: SessionSpec) -> SessionAccess:
        """Make a session and its key."""
        key = secrets.token_urlsafe(_KEY_BYTES)
        self._sessions[_digest(key)] = Session(spec, self._policy)
        return SessionAccess(base_url=self.base_url, api_key=key, model=self.model_name)

    async def close(self, access: SessionAccess) -> SessionRecord:
        """End a session: cancel what is running, forget the key, return what was recorded.

        Raises:
            ValueError: the session is not open.
        """
        session = self._sessions.pop(_digest(access.api_key), None)
        if session is None:
            raise ValueError("the session is not open: its key is unknown here, or it was closed before")
        return await session.close()

    async def _models(self, request: Request) -> Response:
        try:
            self._session_of(request)
        except Refusal as refusal:
            return _refuse(refusal)
        model = {"id": self.model_name, "object": "model", "created": 0, "owned_by": "pilotage"}
        return Response(orjson.dumps({"object": "list", "data": [model]}), media_type=_JSON)

    async def _chat(self, request: Request) -> Response:
        try:
            session = self._session_of(request)
        except Refusal as refusal:
            return _refuse(refusal)
        session.counters["requests"] += 1
        try:
            chat = parse_request(await _read_body(request), request.headers, session.reader)
            session.note_overrides(chat)
            return await self._complete(session, chat, request)
        except Refusal as refusal:
            session.counters[f"refused_{refusal.code}"] += 1
            return _refuse(refusal)
        except Exception as error:  # noqa: BLE001 - the boundary: a fault of ours must reach the agent as JSON, and the log whole
            _LOG.exception("rollout %s: the proxy failed on a request", session.spec.rollout_id)
            session.note_fault(error)
            return _refuse(
                Refusal(500, "internal_error", "the proxy failed on this request; its log says why")
            )

    def _session_of(self, request: Request) -> Session:
        """Return the session that the bearer key names.

        The look-up is by digest: how long it takes says nothing about a key.
        """
        scheme, _, key = request.headers.get("authorization", "").partition(" ")
        session = self._sessions.get(_digest(key.strip()))
        if session is None or session.has_expired or scheme.lower() != "bearer":
            raise unknown_key()
        return session

    async def _complete(self, session: Session, chat: ChatRequest, request: Request) -> Response:
        turn = session.replayed_turn(chat)
        if turn is None:
            turn = await _turn_or_disconnect(session, chat, request)
        if turn is None:
            return Response(status_code=499)  # nobody reads it
        session.deliver(turn, chat)
        answer = Answer(
            id=f"chatcmpl-{session.spec.rollout_id}-{turn}",
            model=self.model_name,
            turn=session.tree.turn(turn),
            reply=session.tree.reply(turn),
            prompt_tokens=session.tree.prompt_tokens(turn),
            prompt_ids=session.tree.prompt_ids_of(turn) if chat.wants_token_ids else None,
        )
        if chat.is_streamed:
            return StreamingResponse(_stream(answer, chat), media_type="text/event-stream")
        return Response(whole_body(answer, chat), media_type=_JSON)


async def _turn_or_disconnect(session: Session, chat: ChatRequest, request: Request) -> int | None:
    """Wait for the turn that answers `chat`; None where the client went away first."""
    call = session.join(chat)
    gone = asyncio.create_task(_disconnected(request))
    try:
        await asyncio.wait({call.task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if gone.done():
            return None
        return _result(call.task)
    finally:
        gone.cancel()
        session.leave(call)


def _result(task: asyncio.Task[int]) -> int:
    if task.cancelled():
        raise unknown_key()  # only closing the session cancels a call that somebody waits for
    try:
        return task.result()
    except WeightsChangingError as error:
        headers = {"retry-after": str(max(1, round(error.retry_after_s)))}
        raise Refusal(429, "weights_changing", str(error), headers=headers) from error
    except SamplerError as error:
        raise Refusal(
            503, "sampler_error", f"the sampler failed: {error}", headers={"retry-after": "1"}
        ) from error


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _read_body(request: Request) -> bytes:
    chunks: list[bytes] = []
    num_bytes = 0
    async for chunk in request.stream():
        num_bytes += len(chunk)
        if num_bytes > MAX_BODY_BYTES:
            message = f"the body is larger than {MAX_BODY_BYTES} bytes"
            raise Refusal(413, "body_too_large", message)
        chunks.append(chunk)
    return b"".join(chunks)


async def _stream(answer: Answer, chat: ChatRequest) -> AsyncIterator[bytes]:
    for event in events(answer, chat):
        yield event


async def _health(request: Request) -> Response:
    return Response(b'{"status":"ok"}', media_type=_JSON)


def _refuse(refusal: Refusal) -> Response:
    return Response(refusal.body(), refusal.status, dict(refusal.headers), _JSON)


def _digest(key: str) -> bytes:
    return sha256(key.encode("utf-8", "surrogatepass")).digest()
