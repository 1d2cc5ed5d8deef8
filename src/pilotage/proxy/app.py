"""The ASGI app: who may ask, and the path of a request from bytes to bytes.

    authorise -> read -> note overrides -> replay, or join a sampler call -> write
                  |                                                           |
                  '------------------------ dialect --------------------------'

What is between the two ends of a dialect is the same for all of them. A turn is recorded before any byte of
its answer is sent. The key is the session: it is kept as a digest only, and appears in no log and no error
body.
"""

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from functools import partial
from hashlib import sha256

from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from pilotage.errors import SamplerError, WeightsChangingError
from pilotage.interfaces import Renderer, Sampler
from pilotage.proxy.answers import Answer, encode
from pilotage.proxy.dialect import Dialect
from pilotage.proxy.dialects import DIALECTS
from pilotage.proxy.fields import JsonObject
from pilotage.proxy.measures import ProxyMeasures
from pilotage.proxy.patience import Patience
from pilotage.proxy.refusals import Refusal, openai_error, unknown_key
from pilotage.proxy.requests import TurnRequest, read_object, turn_request
from pilotage.proxy.session import Policy, Session
from pilotage.types import SessionAccess, SessionRecord, SessionSpec

type _Answering = Callable[[Dialect, Session, TurnRequest, Request], Awaitable[Response]]

_LOG = logging.getLogger(__name__)

MAX_BODY_BYTES = 64 * 2**20
_KEY_BYTES = 32
_JSON = "application/json"


class ChatCompletionsProxy:
    """Records every token that agents sample through chat completions and the other dialects.

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
        self.measures = ProxyMeasures()
        self.app = Starlette(
            routes=[
                *(route for dialect in DIALECTS for route in self._routes(dialect)),
                Route("/v1/models", self._models, methods=["GET"]),
                Route("/health", _health, methods=["GET"]),
            ]
        )

    def open(self, spec: SessionSpec) -> SessionAccess:
        """Make a session and its key."""
        key = secrets.token_urlsafe(_KEY_BYTES)
        self._sessions[_digest(key)] = Session(spec, self._policy)
        self.measures.opened()
        return SessionAccess(base_url=self.base_url, api_key=key, model=self.model_name)

    def prolong(self, access: SessionAccess, seconds: float) -> None:
        """See `SessionHost`."""
        self._sessions[_digest(access.api_key)].prolong(seconds)

    async def close(self, access: SessionAccess) -> SessionRecord:
        """End a session: cancel what is running, forget the key, return what was recorded.

        Raises:
            ValueError: the session is not open.
        """
        session = self._sessions.pop(_digest(access.api_key), None)
        if session is None:
            raise ValueError("the session is not open: its key is unknown here, or it was closed before")
        record = await session.close()
        self.measures.closed(record.trajectory, record.counters.items())
        return record

    def _routes(self, dialect: Dialect) -> Iterator[Route]:
        yield Route(dialect.path, partial(self._serve, dialect, self._complete), methods=["POST"])
        yield Route(dialect.path, _no_socket, methods=["GET"])
        if dialect.count_path is not None:
            yield Route(dialect.count_path, partial(self._serve, dialect, self._count), methods=["POST"])

    async def _models(self, request: Request) -> Response:
        try:
            self._session_of(request)
        except Refusal as refusal:
            return _refuse(refusal, openai_error(refusal))
        model = {"id": self.model_name, "object": "model", "created": 0, "owned_by": "pilotage"}
        return _json({"object": "list", "data": [model]})

    async def _serve(self, dialect: Dialect, answer: _Answering, request: Request) -> Response:
        """Take a request of `dialect` through its session to `answer`."""
        try:
            session = self._session_of(request)
        except Refusal as refusal:
            return _refuse(refusal, dialect.refused(refusal))
        session.counters["requests"] += 1
        try:
            sent = read_object(await _read_body(request))
            asked = dialect.read(sent, session.reader(dialect.path))
            return await answer(dialect, session, turn_request(asked, sent, request.headers), request)
        except Refusal as refusal:
            session.counters[f"refused_{refusal.code}"] += 1
            return _refuse(refusal, dialect.refused(refusal))
        except Exception as error:  # noqa: BLE001 - the boundary: a fault of ours must reach the agent as JSON, and the log whole
            _LOG.exception("rollout %s: the proxy failed on a request", session.spec.rollout_id)
            session.note_fault(error)
            refusal = Refusal(500, "internal_error", "the proxy failed on this request; its log says why")
            return _refuse(refusal, dialect.refused(refusal))

    def _session_of(self, request: Request) -> Session:
        """Return the session that the request's key names: a bearer key, or Anthropic's header.

        The look-up is by digest: how long it takes says nothing about a key.
        """
        scheme, _, bearer = request.headers.get("authorization", "").partition(" ")
        keys = [request.headers.get("x-api-key", "")]
        if scheme.lower() == "bearer":
            keys.insert(0, bearer)
        sessions = (self._sessions.get(_digest(key.strip())) for key in keys)
        session = next((found for found in sessions if found is not None), None)
        if session is None or session.has_expired:
            raise unknown_key()
        return session

    async def _count(
        self, dialect: Dialect, session: Session, wanted: TurnRequest, request: Request
    ) -> Response:
        return _json({"input_tokens": await session.count_tokens(wanted)})

    async def _complete(
        self, dialect: Dialect, session: Session, wanted: TurnRequest, request: Request
    ) -> Response:
        session.note_overrides(wanted)
        index = session.replayed_turn(wanted)
        if index is None:
            index = await _turn_or_disconnect(session, wanted, request)
        if index is None:
            return Response(status_code=499)  # nobody reads it
        session.deliver(index, wanted)
        tree = session.tree
        answer = Answer(
            name=f"{session.spec.rollout_id}-{index}",
            model=self.model_name,
            turn=tree.turn(index),
            message=tree.reply(index).message,
            prompt_tokens=tree.prompt_tokens(index),
            prompt_ids=partial(tree.prompt_ids_of, index),
            sent=wanted.sent,
        )
        if wanted.asked.is_streamed:
            return StreamingResponse(_stream(dialect.events(answer)), media_type="text/event-stream")
        return _json(dialect.whole(answer))


async def _turn_or_disconnect(session: Session, wanted: TurnRequest, request: Request) -> int | None:
    """Wait for the turn that answers `wanted`; None where the client went away first."""
    call = session.join(wanted)
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
    try:
        async for chunk in request.stream():
            num_bytes += len(chunk)
            if num_bytes > MAX_BODY_BYTES:
                message = f"the body is larger than {MAX_BODY_BYTES} bytes"
                raise Refusal(413, "body_too_large", message)
            chunks.append(chunk)
    except ClientDisconnect:  # the client's doing: neither a fault of ours nor of the sampler
        raise Refusal(400, "body_incomplete", "the client left before its request had arrived") from None
    return b"".join(chunks)


async def _stream(events: Iterator[bytes]) -> AsyncIterator[bytes]:
    for part in events:
        yield part


async def _no_socket(request: Request) -> Response:
    """Refuse a WebSocket with the status that sends Codex to HTTP at once, not after seven attempts."""
    return Response(status_code=426 if "upgrade" in request.headers else 405, headers={"allow": "POST"})


async def _health(request: Request) -> Response:
    return _json({"status": "ok"})


def _json(body: JsonObject) -> Response:
    return Response(encode(body), media_type=_JSON)


def _refuse(refusal: Refusal, body: JsonObject) -> Response:
    return Response(encode(body), refusal.status, dict(refusal.headers), _JSON)


def _digest(key: str) -> bytes:
    return sha256(key.encode("utf-8", "surrogatepass")).digest()
