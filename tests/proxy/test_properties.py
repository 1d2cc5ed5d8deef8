"""Laws of the proxy, over random conversations of plain clients, in every dialect.

Whatever an agent does to its history: the ids of a turn are those that the sampler returned, its context is
what the sampler saw, each delivered token is trained once, and a history that only grew stores only what it
added.
"""

import asyncio
import copy
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.fakes import END, ScriptedSampler, WordRenderer
from tests.proxy.rig import Body, Connection, schema, spec, system, tool, user
from tests.proxy.tongues import TONGUES, Tongue, text_of

from pilotage.algorithms import to_samples
from pilotage.proxy import ChatCompletionsProxy
from pilotage.types import Message, Role, SessionRecord, TokenIds

type Case = list[tuple[str, int]]
"""Operations, each with a number that decides its details."""

REPLIES: list[Callable[[WordRenderer, int], list[int]]] = [
    lambda words, k: words.reply(["ok", "look here", "\n ", "caf\u00e9"][k % 4]),
    lambda words, k: words.reply("", ("ls", f'{{"n": {k % 2}, "path": "caf\u00e9"}}')),
    lambda words, k: words.reply("see", ("ls", "{}"), reasoning="hm" if k % 2 else ""),
    lambda words, k: words.reply(
        "", ("ls", '{"n": 1}'), ("ls", '{"n' if k % 2 else "{}"), ("ls", '{"n": 3}')
    ),
    lambda words, k: words.reply("", ("ls", '{"cmd": "l')),
    lambda words, k: words.reply("ok", reasoning=f"thought {k % 2}"),
    lambda words, k: [END],
    lambda words, k: words.reply("look here", is_closed=False),
    lambda words, k: words.reply("", ("ls", '{"n"'), is_closed=False),
]
"""Few words, so that equal replies happen."""


@dataclass(slots=True, kw_only=True)
class Conversation:
    """One history as an agent keeps it."""

    messages: list[Body]
    tools: list[Body] = field(default_factory=list[Body])
    hint: str = ""
    num_repeated: int | None = None
    """Messages that were answered and have only been respelled since; None after a rewrite."""
    num_rewritten: int = 0
    """Messages of the last request that did not just grow: the replies among them may be context."""
    last_request: list[Body] = field(default_factory=list[Body])


class World:
    """Plays one case, and keeps what it expects of the record."""

    def __init__(self, tongue: Tongue) -> None:
        self.tongue = tongue
        self.words = WordRenderer()
        self.sampler = ScriptedSampler(script=self.sample)
        self.proxy = ChatCompletionsProxy(self.sampler, self.words)
        self.access = self.proxy.open(spec())
        self.conversations = [Conversation(messages=[system("be brief"), user("fix it")])]
        self.at = 0
        self.detail = 0
        self.delivered: set[int] = set()
        self.grown: dict[int, set[int]] = {}
        """Turn -> the sizes that its context may have."""
        self.cut_when_sampled: asyncio.Event | None = None

    @property
    def now(self) -> Conversation:
        return self.conversations[self.at]

    @property
    def num_turns(self) -> int:
        return len(self.sampler.calls)

    def sample(self, prompt_ids: TokenIds) -> list[int]:
        if self.cut_when_sampled is not None:
            self.cut_when_sampled.set()
        return REPLIES[self.detail % len(REPLIES)](self.words, self.detail // len(REPLIES))

    def connect(self, headers: dict[str, str] | None = None) -> Connection:
        """Return a request for the current history, not yet sent."""
        hint = {"prompt_cache_key": self.now.hint} if self.now.hint else {}
        body = self.tongue.body(self.now.messages, self.now.tools) | hint
        return Connection(self.proxy, self.access.api_key, body, headers, path=self.tongue.path)

    def deliver(self, answer: Body) -> Body:
        """Note which turn an answer came from; returns its message."""
        self.delivered.add(int(answer["id"].rsplit("-", 1)[1]))
        return self.tongue.message(answer)

    async def ask(self, *, keeps_reply: bool = True) -> None:
        """Send the current history; take the reply, and what the agent answers to it, into the history."""
        now, before = self.now, self.num_turns
        answer = await self.connect().answer()
        assert self.num_turns == before + 1
        reply = self.deliver(answer)
        if now.num_repeated is not None:
            added = [plain(body) for body in now.messages[now.num_repeated :]]
            self.grown[before] = {self.words.render_suffix(last, added, []).size for last in (END, None)}
        else:
            now.num_rewritten = len(now.messages)
        now.last_request = list(now.messages)
        if keeps_reply:
            self.take(reply)

    def take(self, reply: Body) -> None:
        now = self.now
        now.num_repeated = len(now.messages) + 1
        calls = reply.get("tool_calls", [])
        results = [tool(call, ["a.py", "no such file"][self.detail % 2]) for call in calls]
        now.messages += [reply, *(results or [user(["go on", "look here"][self.detail % 2])])]


def plain(body: Body) -> Message:
    """Return what the renderer gets to see of a user or tool message."""
    return Message(role=Role(body["role"]), content=text_of(body))


def respelled(messages: list[Body], detail: int, first_sampled: int) -> list[Body]:
    """Return `messages` as another agent would write the same.

    What loses text, OpenHands' placeholder and dropped reasoning, is done to sampled replies only, which
    lie at `first_sampled` or after: before it a rewritten history is context, where the text counts.
    """
    spelled: list[Body] = []
    for at, body in enumerate(copy.deepcopy(messages)):
        if body["role"] == "assistant":
            if not body.get("content"):
                body |= [{"content": None}, {"content": ""}, {"content": []}][detail % 3]
            if detail % 2 and at >= first_sampled:
                body.pop("reasoning_content", None)
            for call in body.get("tool_calls", []):
                call["id"] += "-mine"
                function = call["function"]
                function["arguments"] = respelled_arguments(
                    function["arguments"], detail, at >= first_sampled
                )
        elif body["role"] == "tool":
            body.pop("name", None)
            body["tool_call_id"] += "-mine"
        if isinstance(body.get("content"), str) and detail % 3:
            half = len(body["content"]) // 2
            texts = [body["content"][:half], body["content"][half:]]
            body["content"] = [{"type": "text", "text": text} for text in texts]
        spelled.append(dict(reversed(body.items())))
    return spelled


def respelled_arguments(text: str, detail: int, is_sampled: bool) -> str:
    try:
        value: Body = json.loads(text)
    except ValueError:
        return (
            text
            if not is_sampled
            else json.dumps({"_openhands_malformed_tool_call": True, "error": "no JSON"})
        )
    if "_openhands_malformed_tool_call" in value:
        return text
    return json.dumps(dict(reversed(value.items())), indent=detail % 3, ensure_ascii=detail % 2 == 0)


def replies_in(messages: list[Body]) -> list[int]:
    return [at for at, body in enumerate(messages) if body["role"] == "assistant"]


async def grow(world: World) -> None:
    await world.ask()


async def respell(world: World) -> None:
    world.now.messages = respelled(world.now.messages, world.detail, world.now.num_rewritten)
    await world.ask()


async def repeat(world: World) -> None:
    """The same request again, not marked as a retry; the agent keeps either reply."""
    now = world.now
    if now.last_request:
        kept, repeated = now.messages, now.num_repeated
        now.messages = list(now.last_request)
        now.num_repeated = None
        await world.ask(keeps_reply=world.detail % 2 == 0)
        if world.detail % 2:
            now.messages, now.num_repeated = kept, repeated
    else:
        await world.ask()


async def repeat_marked(world: World) -> None:
    """A retry that the client marks: the same answer, and nothing is sampled."""
    now, before = world.now, world.num_turns
    if now.last_request:
        kept, now.messages = now.messages, now.last_request
        answer = await world.connect({"x-stainless-retry-count": "1"}).answer()
        now.messages = kept
        assert world.num_turns == before
        world.deliver(answer)


async def rewrite_reply(world: World) -> None:
    now = world.now
    for at in replies_in(now.messages)[-1 - world.detail % 2 :][:1]:
        now.messages[at] = {"role": "assistant", "content": f"changed {world.detail % 3}"}
    now.num_repeated = None
    await world.ask()


async def rewrite_argument(world: World) -> None:
    now = world.now
    for at in replies_in(now.messages):
        changed = copy.deepcopy(now.messages[at])
        for call in changed.get("tool_calls", [])[-1:]:
            call["function"]["arguments"] = '{"n": 1, "timeout": null}'
        now.messages[at] = changed
    now.num_repeated = None
    await world.ask()


async def rewrite_result(world: World) -> None:
    now = world.now
    at = world.detail % (len(now.messages) - 1) + 1
    if now.messages[at]["role"] != "assistant":
        now.messages[at] = now.messages[at] | {"content": f"masked {world.detail % 3}"}
    now.num_repeated = None
    await world.ask()


async def change_reasoning(world: World) -> None:
    now = world.now
    for at in replies_in(now.messages)[-1:]:
        now.messages[at] = now.messages[at] | {"reasoning_content": "a summary"}
    now.num_repeated = None
    await world.ask()


async def split(world: World) -> None:
    """What OpenHands makes of a parallel reply with a malformed call."""
    now = world.now
    for at in replies_in(now.messages)[-1:]:
        calls = now.messages[at].get("tool_calls", [])
        if len(calls) > 1:
            first = {"role": "assistant", "tool_calls": calls[:2]}
            later = [{"role": "assistant", "tool_calls": calls[2:]}] if calls[2:] else []
            results = [tool(call, "x") for call in calls]
            now.messages[at:] = [first, results[1], *later, results[0], *results[2:]]
    now.num_repeated = None
    await world.ask()


async def compact(world: World) -> None:
    now = world.now
    now.messages = [*now.messages[:2], user(f"summary {world.detail % 3}")]
    now.num_repeated = None
    await world.ask()


async def rewind(world: World) -> None:
    now = world.now
    at = replies_in(now.messages)
    if at:
        now.messages = [*now.messages[: at[world.detail % len(at)]], user("look here")]
    now.num_repeated = None
    await world.ask()


async def change_tools(world: World) -> None:
    now = world.now
    now.tools = [] if now.tools else [schema("ls", n={"type": "integer"})]
    now.num_repeated = None
    await world.ask()


async def delegate(world: World) -> None:
    """A sub-conversation; the agent stays in it until it switches."""
    number = world.detail % 3
    hint = f"sub-{number}" if world.detail % 2 else ""
    opening = [system(f"sub-agent {number}"), user("fix it")]
    world.conversations.append(Conversation(messages=opening, hint=hint))
    world.at = len(world.conversations) - 1
    await world.ask()


async def switch(world: World) -> None:
    world.at = world.detail % len(world.conversations)
    await world.ask()


async def leave(world: World) -> None:
    """The client goes away while the sampler works: nothing is recorded."""
    world.sampler.gate = asyncio.Event()
    connection = world.connect()
    before, cancelled = world.num_turns, world.sampler.num_cancelled
    async with asyncio.TaskGroup() as group:
        group.create_task(connection.run())
        await started(world.sampler)
        connection.cut.set()
    world.sampler.gate = None
    assert (world.num_turns, world.sampler.num_cancelled) == (before, cancelled + 1)


async def leave_late(world: World) -> None:
    """The client goes away as the sampler answers: recorded, but not delivered."""
    connection = world.connect()
    world.cut_when_sampled = connection.cut
    before = world.num_turns
    await connection.run()
    world.cut_when_sampled = None
    assert world.num_turns == before + 1
    world.now.last_request = list(world.now.messages)


async def twice_at_once(world: World) -> None:
    """Two identical requests at one time share a sampler call."""
    world.sampler.gate = asyncio.Event()
    before = world.num_turns
    async with asyncio.TaskGroup() as group:
        pair = [world.connect() for _ in range(2)]
        posts = [group.create_task(connection.answer()) for connection in pair]
        await started(world.sampler)
        for _ in range(20):  # lets the second request reach the running call
            await asyncio.sleep(0)
        world.sampler.gate.set()
    world.sampler.gate = None
    assert world.num_turns == before + 1
    first, second = (world.deliver(post.result()) for post in posts)
    assert first == second
    world.now.last_request = list(world.now.messages)
    world.take(first)


async def started(sampler: ScriptedSampler) -> None:
    """Wait until a call has reached the gate."""
    count = sampler.num_started
    while sampler.num_started == count:  # noqa: ASYNC110 - a fake without hooks is polled
        await asyncio.sleep(0)


OPERATIONS: dict[str, Callable[[World], Awaitable[None]]] = {
    operation.__name__: operation
    for operation in (
        *(grow, respell, repeat, repeat_marked, rewrite_reply, rewrite_argument, rewrite_result),
        *(change_reasoning, split, compact, rewind, change_tools, delegate, switch),
        *(leave, leave_late, twice_at_once),
    )
}


def check(world: World, record: SessionRecord) -> None:
    """Hold the record against what the sampler and the client saw."""
    trajectory, calls = record.trajectory, world.sampler.calls
    turns = trajectory.turns
    assert len(turns) == len(calls)
    for index, (turn, call) in enumerate(zip(turns, calls, strict=True)):
        assert call.completion_ids is not None
        assert turn.completion_ids.tolist() == call.completion_ids.tolist()
        assert trajectory.prompt_ids(index).tolist() == call.prompt_ids.tolist()
    assert {index for index, turn in enumerate(turns) if turn.is_delivered} == world.delivered
    assert not turns or len(trajectory.leaves()) == 1 + len(list(trajectory.branch_causes()))
    for index, sizes in world.grown.items():
        assert turns[index].parent is not None
        assert turns[index].context_ids.size in sizes
    check_credit(record)


def check_credit(record: SessionRecord) -> None:
    """Each delivered token is trained once, in a sample that replays what the sampler saw."""
    trajectory = record.trajectory
    samples = to_samples(trajectory, sequence_id="r", group_id="g", advantage=1.0)
    delivered = [index for index, turn in enumerate(trajectory.turns) if turn.is_delivered]
    sampled = sum(trajectory.turns[index].completion_ids.size for index in delivered)
    assert sum(sample.trained_tokens for sample in samples) == sampled
    replayed = [sample.token_ids.tolist() for sample in samples]
    for index in delivered:
        seen = [*trajectory.prompt_ids(index).tolist(), *trajectory.turns[index].completion_ids.tolist()]
        assert any(tokens[: len(seen)] == seen for tokens in replayed)


async def play(case: Case, tongue: Tongue) -> None:
    """Play one case and check its laws."""
    world = World(tongue)
    for name, world.detail in case:
        await OPERATIONS[name](world)
    check(world, await world.proxy.close(world.access))


def check_cases(count: int, tongue: Tongue) -> None:
    """Play `count` random cases on one event loop."""
    steps = st.tuples(st.sampled_from(sorted(OPERATIONS)), st.integers(0, 8 * len(REPLIES) - 1))
    with asyncio.Runner() as runner:

        @settings(
            max_examples=count, deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow]
        )
        @given(st.lists(steps, min_size=1, max_size=8))
        def run(case: Case) -> None:
            runner.run(play(case, tongue))

        run()


every_tongue = pytest.mark.parametrize("tongue", TONGUES.values(), ids=TONGUES)


@every_tongue
def test_500_random_conversations_are_recorded_token_by_token(tongue: Tongue) -> None:
    check_cases(500, tongue)


@pytest.mark.parametrize(
    ("tongue", "count"),
    [(tongue, 10_000 if name == "chat" else 2_000) for name, tongue in TONGUES.items()],
    ids=TONGUES,
)
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_thousands_of_random_conversations_are_recorded_token_by_token(tongue: Tongue, count: int) -> None:
    check_cases(count, tongue)


@every_tongue
@pytest.mark.parametrize("name", sorted(OPERATIONS))
def test_every_operation_holds_the_laws_on_its_own_and_before_and_after_growth(
    name: str, tongue: Tongue
) -> None:
    for detail in range(2 * len(REPLIES)):
        asyncio.run(play([(name, detail)], tongue))
        case = [("grow", detail), (name, detail + 1), ("grow", 0), (name, detail)]
        asyncio.run(play(case, tongue))
