"""A sampler on SkyRL's engines asks what vLLM takes, and passes on only what can be trained."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import pytest
from tests.fakes import END, ScriptedSampler
from tests.integrations.rig import EngineClient

from pilotage.errors import ContextExceededError, SamplerError
from pilotage.integrations.skyrl import SkyRLSampler
from pilotage.integrations.skyrl.interface import EngineInput, EngineOutput
from pilotage.types import Completion, FinishReason, SamplingParams

PARAMS = SamplingParams(temperature=0.5, max_tokens=8)


def sampler_on(client: EngineClient, **fields: object) -> SkyRLSampler:
    chosen: dict[str, object] = {"max_context_tokens": 32, "stop_token_ids": (END,)}
    return SkyRLSampler(client, **(chosen | fields))  # pyright: ignore[reportArgumentType]


def client_that_says(*replies: Sequence[int]) -> EngineClient:
    return EngineClient(sampler=ScriptedSampler(script=iter(replies)))


async def ask(
    sampler: SkyRLSampler, prompt: Sequence[int] = (11, 12), params: SamplingParams = PARAMS, turn: int = 0
) -> Completion:
    return await sampler.sample(np.array(prompt, np.int32), params, session_id="rollout-1", turn_index=turn)


async def test_a_completion_has_the_engines_ids_and_log_probs_and_the_version_it_began_under() -> None:
    client = client_that_says([21, 22, END])
    client.weight_version = 7

    completion = await ask(sampler_on(client))

    assert completion.token_ids.tolist() == [21, 22, END]
    assert completion.logprobs.tolist() == [-0.5, -0.25, np.float32(-0.5 / 3)]
    assert completion.weights_versions.tolist() == [7, 7, 7]
    assert completion.finish_reason is FinishReason.STOP


async def test_the_request_is_what_vllm_takes() -> None:
    client = client_that_says([21, END])
    client.weight_version = 4

    await ask(sampler_on(client, model="policy-adapter"))

    [(request, model)] = client.requests
    assert model == "policy-adapter"
    assert request["prompt_token_ids"] == [[11, 12]]
    assert request["session_ids"] == ["rollout-1"]
    assert request["cache_salt"] == "weights-4"
    assert request["sampling_params"] == {
        "temperature": 0.5,
        "top_p": 1.0,
        "top_k": -1,
        "max_tokens": 8,
        "min_tokens": 1,
        "logprobs": 1,
        "stop_token_ids": [END],
        "skip_special_tokens": False,
    }


async def test_a_seed_gives_each_turn_a_seed_of_its_own_that_does_not_change() -> None:
    client = client_that_says([END], [END], [END])
    sampler = sampler_on(client)
    for turn in (0, 1, 0):
        await ask(sampler, params=replace(PARAMS, seed=5), turn=turn)

    seeds = [request["sampling_params"]["seed"] for request, _ in client.requests]
    assert seeds[0] == seeds[2] != seeds[1]
    assert all(isinstance(seed, int) and 0 <= seed < 2**63 for seed in seeds)


async def test_a_completion_never_runs_out_of_the_context_window() -> None:
    client = client_that_says([END])
    sampler = sampler_on(client, max_context_tokens=5)

    await ask(sampler, prompt=[11, 12, 13])
    with pytest.raises(ContextExceededError, match="the prompt has 5 tokens and the context window 5"):
        await ask(sampler, prompt=[11, 12, 13, 14, 15])

    [(request, _)] = client.requests
    assert request["sampling_params"]["max_tokens"] == 2


class Answering:
    """A client that gives this answer, whatever it is asked, or raises it."""

    weight_version = 0

    def __init__(self, answer: EngineOutput | Exception) -> None:
        self._answer = answer

    async def generate(self, input_batch: EngineInput, model: str | None = None) -> EngineOutput:
        if isinstance(self._answer, Exception):
            raise self._answer
        return self._answer


def broken_answers() -> Iterator[tuple[EngineOutput | Exception, str]]:
    whole = EngineOutput(response_ids=[[21]], stop_reasons=["stop"], response_logprobs=[[-1.0]])
    yield ConnectionError("router gone"), "SkyRL's engines failed: ConnectionError: router gone"
    yield {**whole, "stop_reasons": ["abort"]}, "ended a request after 1 tokens with 'abort'"
    yield {**whole, "response_ids": [[]]}, "ended a request after 0 tokens with 'stop'"
    yield {**whole, "response_logprobs": None}, "returned no log-probs for 1 tokens"
    yield {**whole, "response_logprobs": [None]}, "returned no log-probs for 1 tokens"
    yield {**whole, "response_logprobs": [[-1.0, -2.0]]}, "returned 2 log-probs for 1 tokens"


@pytest.mark.parametrize(("answer", "message"), broken_answers())
async def test_an_answer_that_cannot_be_trained_is_a_fault_of_the_sampler(
    answer: EngineOutput | Exception, message: str
) -> None:
    sampler = SkyRLSampler(Answering(answer), max_context_tokens=32, stop_token_ids=(END,))

    with pytest.raises(SamplerError, match=message) as caught:
        await ask(sampler)

    assert caught.value.retryable
