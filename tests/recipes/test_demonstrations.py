"""The script behind the demonstrations: what it samples is a valid call that follows from its context."""

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pilotage.recipes.demonstrations import DemonstrationSampler
from pilotage.recipes.tiny_tokenizer import write_tokenizer
from pilotage.rendering import TemplateRenderer, TokenizerFile, load_renderer
from pilotage.types import Completion, FinishReason, Message, Role, SamplingParams, ToolSchema

TOOLS = (
    ToolSchema(name="code_search", parameters={"properties": {"query": {"type": "string"}}}),
    ToolSchema(name="localization_finish", parameters={"properties": {"locations": {"type": "array"}}}),
)
WORDS = ("read_limit", "chunk2", "state")
HITS = ("h11/core.py::Reader::read", "h11/core.py::top", "h11/other.py::Writer::flush")
OPENING = (
    Message(role=Role.SYSTEM, content="Find the bug."),
    Message(
        role=Role.USER, content=f"A limit is wrong.\nSeen with `{WORDS[0]}`, `{WORDS[1]}` and `{WORDS[2]}`.\n"
    ),
)
RESULT = Message(role=Role.TOOL, content="\n".join(HITS))


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(directory, [message.content for message in (*OPENING, RESULT)])
    return directory


@pytest.fixture(scope="module")
def renderer(directory: Path) -> TemplateRenderer:
    return load_renderer(directory)


@pytest.fixture(scope="module")
def sampler(directory: Path, renderer: TemplateRenderer) -> DemonstrationSampler:
    return DemonstrationSampler(renderer, TokenizerFile.load(directory))


async def first_turn(sampler: DemonstrationSampler, renderer: TemplateRenderer, seed: int) -> Completion:
    prompt = renderer.render_prompt(OPENING, TOOLS)
    return await sampler.sample(prompt, SamplingParams(seed=seed), session_id="s", turn_index=0)


async def second_turn(sampler: DemonstrationSampler, renderer: TemplateRenderer, seed: int) -> Completion:
    call = renderer.parse((await first_turn(sampler, renderer, seed)).token_ids, TOOLS).message
    prompt = renderer.render_prompt([*OPENING, call, RESULT], TOOLS)
    return await sampler.sample(prompt, SamplingParams(seed=seed), session_id="s", turn_index=1)


def the_call(renderer: TemplateRenderer, completion: Completion) -> tuple[str, dict[str, object]]:
    """The only thing that was said."""
    assert completion.finish_reason is FinishReason.STOP
    assert completion.token_ids[-1] in renderer.stop_token_ids
    reply = renderer.parse(completion.token_ids, TOOLS)
    assert reply.malformed_calls == 0
    assert reply.message.content == ""
    (call,) = reply.message.tool_calls
    return call.name, json.loads(call.arguments)


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**31))
async def test_it_first_searches_for_words_that_the_issue_quotes(
    sampler: DemonstrationSampler, renderer: TemplateRenderer, seed: int
) -> None:
    name, arguments = the_call(renderer, await first_turn(sampler, renderer, seed))
    assert name == "code_search"
    assert arguments.keys() == {"query"}
    query = str(arguments["query"]).split(" ")
    assert 1 <= len(query) == len(set(query)) <= 3
    assert set(query) <= set(WORDS)


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**31))
async def test_it_then_hands_in_one_hit_whole_or_its_file(
    sampler: DemonstrationSampler, renderer: TemplateRenderer, seed: int
) -> None:
    name, arguments = the_call(renderer, await second_turn(sampler, renderer, seed))
    assert name == "localization_finish"
    assert arguments.keys() == {"locations"}
    locations = arguments["locations"]
    assert isinstance(locations, list)
    assert len(locations) == 1
    assert locations[0] in {*HITS, *(hit.partition("::")[0] for hit in HITS)}


async def test_choices_are_left_open(sampler: DemonstrationSampler, renderer: TemplateRenderer) -> None:
    searched = {json.dumps(the_call(renderer, await first_turn(sampler, renderer, s))) for s in range(60)}
    sizes = {len(json.loads(text)[1]["query"].split(" ")) for text in searched}
    assert sizes == {1, 2, 3}
    handed_in = {json.dumps(the_call(renderer, await second_turn(sampler, renderer, s))) for s in range(60)}
    assert len(handed_in) == 5  # three hits, two files


async def test_the_same_seed_gives_the_same_ids_and_another_turn_may_give_others(
    sampler: DemonstrationSampler, renderer: TemplateRenderer
) -> None:
    once, again = [await first_turn(sampler, renderer, 5) for _ in range(2)]
    assert once.token_ids.tolist() == again.token_ids.tolist()
    assert once.logprobs.tolist() == [0.0] * once.token_ids.size
    prompt = renderer.render_prompt(OPENING, TOOLS)
    turns = [
        await sampler.sample(prompt, SamplingParams(seed=5), session_id="s", turn_index=turn)
        for turn in range(8)
    ]
    assert len({tuple(turn.token_ids.tolist()) for turn in turns}) > 1
