"""The proxy's laws hold for the real OpenHands SDK, whatever a policy writes."""

import asyncio
import json
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.fakes import END, SamplerCall, ScriptedSampler, WordRenderer

from pilotage.algorithms import to_samples
from pilotage.proxy import ChatCompletionsProxy, serve
from pilotage.types import BranchCause, SamplingParams, SessionAccess, SessionRecord, SessionSpec, Trajectory

pytestmark = pytest.mark.agents

_MAX_TURNS = 10


@pytest.fixture(autouse=True)
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the SDK's files out of the user's home, and its look-ups off the network."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")


class Policy:
    """Writes random replies: good and bad calls, several at once, thoughts, nothing, and an end."""

    def __init__(self, words: WordRenderer, seed: int) -> None:
        self._words = words
        self._random = random.Random(seed)
        self._replies = iter(range(self._random.randint(2, _MAX_TURNS - 1)))
        self.num_split = 0
        """Replies of several calls, one of them bad: the agent rewrites their history."""

    def __iter__(self) -> Iterator[list[int]]:
        return self

    def __next__(self) -> list[int]:
        if next(self._replies, None) is None:
            return self._random.choice([self._words.reply("I am done."), self._finish()])
        kind = self._random.choice(
            [self._good, self._good, self._parallel, self._bad, self._thought, self._empty]
        )
        return kind()

    def _place(self) -> str:
        return self._random.choice(["src", "caf\u00e9 \u4e2d", 'a "b" \\ c', "line\nbreak", ""])

    def _call(self) -> tuple[str, str]:
        arguments = {"place": self._place(), "depth": self._random.randint(1, 9)}
        if self._random.random() < 0.3:
            arguments |= {"summary": "looking", "security_risk": "LOW"}
        return ("look", json.dumps(arguments, ensure_ascii=self._random.random() < 0.5))

    def _bad_call(self) -> tuple[str, str]:
        return self._random.choice(
            [
                ("look", '{"place": "sr'),  # cut
                ("look", "{'place': 'src'}"),  # no JSON
                ("look", '{"depth": 1}'),  # lacks an argument
                ("look", '{"place": "src", "depth": "deep"}'),  # of the wrong type
                ("gaze", '{"place": "src"}'),  # no such tool
            ]
        )

    def _good(self) -> list[int]:
        return self._words.reply(self._random.choice(["", "I look. ", "\n\n"]), self._call())

    def _parallel(self) -> list[int]:
        calls = [self._call() for _ in range(self._random.randint(2, 3))]
        if self._random.random() < 0.4:
            calls[self._random.randrange(len(calls))] = self._bad_call()
            self.num_split += 1
        return self._words.reply("", *calls)

    def _bad(self) -> list[int]:
        return self._words.reply(self._random.choice(["", "I try. "]), self._bad_call())

    def _thought(self) -> list[int]:
        return self._words.reply("", self._call(), reasoning="where could it be")

    def _empty(self) -> list[int]:
        return [END]

    def _finish(self) -> list[int]:
        return self._words.reply("", ("finish", '{"message": "done"}'))


def converse(access: SessionAccess, workspace: str) -> None:
    """Run one conversation to its end, in this thread."""
    from openhands.sdk import LLM, Agent, Conversation, Tool
    from openhands.sdk.conversation.exceptions import ConversationRunError
    from pydantic import SecretStr
    from tests.integration.look_tool import TOOL_NAME

    llm = LLM(
        model=f"openai/{access.model}",
        base_url=access.base_url,
        api_key=SecretStr(access.api_key),
        usage_id="agent",
        reasoning_effort=None,
        capability_overrides={"supports_reasoning_effort": False, "supports_sampling_params": True},
        temperature=0.3,
        num_retries=1,
        timeout=30,
        input_cost_per_token=0.0,
        output_cost_per_token=0.0,
        litellm_extra_body={"return_token_ids": True, "logprobs": True},
    )
    agent = Agent(
        llm=llm, tools=[Tool(name=TOOL_NAME)], system_prompt="You look.", include_default_tools=["FinishTool"]
    )
    conversation = Conversation(
        agent=agent, workspace=workspace, visualizer=None, max_iteration_per_run=_MAX_TURNS + 2
    )
    conversation.send_message("Look around.")
    try:
        conversation.run()
    except ConversationRunError:
        pass  # e.g. the iterations ran out: how a rollout ends is not what is tested here
    finally:
        conversation.close()


async def rollout(seed: int, workspace: str) -> tuple[SessionRecord, list[SamplerCall], Policy]:
    """Run one random policy through the SDK and the proxy, over a real socket."""
    words = WordRenderer()
    policy = Policy(words, seed)
    sampler = ScriptedSampler(script=iter(policy))
    proxy = ChatCompletionsProxy(sampler, words)
    async with serve(proxy):
        spec = SessionSpec(rollout_id=f"seed-{seed}", sampling=SamplingParams(), ttl_s=600)
        access = proxy.open(spec)
        await asyncio.to_thread(converse, access, workspace)
        return await proxy.close(access), sampler.calls, policy


def check(trajectory: Trajectory, calls: list[SamplerCall]) -> None:
    """Ids and contexts are the sampler's, and each token is trained once."""
    assert len(trajectory.turns) == len(calls) > 0
    for index, (turn, call) in enumerate(zip(trajectory.turns, calls, strict=True)):
        assert call.completion_ids is not None
        assert turn.is_delivered
        assert turn.completion_ids.tolist() == call.completion_ids.tolist()
        assert trajectory.prompt_ids(index).tolist() == call.prompt_ids.tolist()
    assert len(trajectory.leaves()) == 1 + len(list(trajectory.branch_causes()))
    samples = to_samples(trajectory, sequence_id="r", group_id="g", advantage=1.0)
    assert sum(sample.trained_tokens for sample in samples) == trajectory.sampled_tokens


async def test_random_policies_through_openhands_are_recorded_token_by_token(tmp_path: Path) -> None:
    causes: Counter[BranchCause] = Counter()
    num_split = num_turns = num_malformed = 0
    for seed in range(30):
        record, calls, policy = await rollout(seed, str(tmp_path))
        check(record.trajectory, calls)
        branches = list(record.trajectory.branch_causes())
        causes.update(branches)
        num_split += policy.num_split
        num_turns += len(calls)
        num_malformed += record.counters["malformed_calls"]
        assert len(branches) <= policy.num_split, f"seed {seed}: {branches}"
        assert record.counters["overridden_temperature"] == len(calls)
    assert num_turns > 100
    assert num_malformed > 10
    assert num_split > 5
    assert set(causes) <= {BranchCause.HISTORY_REWRITTEN, BranchCause.COMPACTION}, causes
