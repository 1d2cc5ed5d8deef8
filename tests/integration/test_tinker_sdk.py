"""The public Tinker SDK, unmodified, against our service with a real engine."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import tinker
import torch
from safetensors.torch import load_file
from tinker import types

from pilotage.engine.lora import LoraOptions, trained_weights
from pilotage.engine.trainer import TorchTrainer
from pilotage.rendering import TokenizerFile

ROOT = Path(__file__).resolve().parents[2]
PILOTAGE = str(Path(sys.executable).with_name("pilotage"))
ADAM = types.AdamParams(learning_rate=1e-2, beta1=0.9, beta2=0.95, eps=1e-8)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("ignore:DEPRECATED:FutureWarning"),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """A service, a session of one owner, and a model whose first weights are saved as `start`."""

    url: str
    data: Path
    keys: dict[str, str]
    client: tinker.ServiceClient
    model: tinker.TrainingClient
    start: str

    def fresh(self) -> tinker.TrainingClient:
        """Return the model with its first weights and a new optimizer."""
        self.model.load_state(self.start).result()  # pyright: ignore[reportDeprecated]
        return self.model


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    directory = tmp_path_factory.mktemp("tinker")
    command = [PILOTAGE, "serve", "--models", str(ROOT / "recipes/demo"), "--data", str(directory / "data")]
    keys = {
        owner: "tml-" + subprocess.check_output(
            [PILOTAGE, "token", "create", owner, "--data", str(directory / "data")], text=True
        ).strip()
        for owner in ("ada", "ben")
    }  # fmt: skip
    with (directory / "log").open("wb") as log:
        service = subprocess.Popen(
            [*command, "--port", "0", "--capacity", "H200=16"],
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"},
        )
        try:
            assert service.stdout is not None
            url = service.stdout.readline().removeprefix("serving on ").strip()
            assert url, (directory / "log").read_text()
            client = tinker.ServiceClient(base_url=url, api_key=keys["ada"])
            model = client.create_lora_training_client(base_model="policy").result()
            start = model.save_state("start").result().path
            yield Bench(url=url, data=directory / "data", keys=keys, client=client, model=model, start=start)
            client.close("success").result()
        finally:
            service.terminate()
            service.wait(60)


def trained_layers(bench: Bench, path: str) -> tuple[int, set[str], dict[str, torch.Tensor]]:
    """Return rank, kinds of adapted layers, and weights of a saved state."""
    model_id, _, name = path.removeprefix("tinker://").split("/")
    directory = bench.data / "jobs" / model_id.replace(":", ".") / "checkpoints" / name
    weights = load_file(directory / "adapter_model.safetensors")
    config = json.loads((directory / "adapter_config.json").read_text())
    return config["r"], {key.split(".lora_")[0].rpartition(".")[2] for key in weights}, weights


def made(ids: list[int], **inputs: Any) -> types.Datum:
    """Return a datum; the SDK converts lists and arrays."""
    given: Any = inputs
    return types.Datum(model_input=types.ModelInput.from_ints(ids), loss_fn_inputs=given)


def datum(seed: int, size: int = 12) -> types.Datum:
    rng = np.random.default_rng(seed)
    ids = rng.integers(3, 400, size + 1)
    counted = np.arange(size) >= size // 3
    return made(
        ids[:-1].tolist(), target_tokens=np.where(counted, ids[1:], 0), weights=np.where(counted, 1.0, 0.0)
    )


def policy_datum(seed: int, logprobs: list[float]) -> types.Datum:
    """Return the same sequence for a policy loss, sampled with log-probs a little off."""
    base = datum(seed)
    weights = np.array(base.loss_fn_inputs["weights"].data)
    rng = np.random.default_rng(seed)
    return made(
        base.model_input.to_ints(),
        target_tokens=base.loss_fn_inputs["target_tokens"],
        logprobs=weights * (np.array(logprobs) + rng.normal(0, 0.2, weights.size)),
        advantages=weights * rng.normal(size=weights.size),
    )


def scores(model: tinker.TrainingClient, *data: types.Datum) -> list[list[float]]:
    result = model.forward(list(data), "cross_entropy").result()
    return [list(output["logprobs"].data) for output in result.loss_fn_outputs]


def test_the_server_names_its_models_and_the_client_finds_its_tokenizer(bench: Bench) -> None:
    rest = tinker.RestClient(base_url=bench.url, api_key=bench.keys["ada"])
    (found,) = rest.get_server_capabilities().result().supported_models
    assert (found.model_name, found.max_context_length) == ("policy", 2048)
    info = bench.model.get_info()
    assert (info.model_data.model_name, info.is_lora, info.lora_rank) == ("policy", True, 32)


def test_gradients_accumulate_until_the_step_and_splitting_a_batch_changes_nothing(bench: Bench) -> None:
    data = [datum(seed) for seed in range(4)]
    ends: list[list[list[float]]] = []
    for pieces in ([data], [data[:1], data[1:]], [[one] for one in data]):
        model = bench.fresh()
        losses = [model.forward_backward(piece, "cross_entropy") for piece in pieces]
        norm = model.optim_step(ADAM).result().metrics
        assert norm is not None
        assert norm["grad_norm"] > 0
        total = sum(loss.result().metrics["loss:sum"] for loss in losses)
        before = scores(bench.fresh(), *data)
        weights = [one.loss_fn_inputs["weights"].data for one in data]
        assert total == pytest.approx(
            -sum(np.dot(w, p) for w, p in zip(weights, before, strict=True)), rel=1e-5
        )
    for end in ends[1:]:
        np.testing.assert_allclose(np.concatenate(end), np.concatenate(ends[0]), atol=1e-4)


def test_futures_may_be_read_in_any_order_and_calls_run_in_theirs(bench: Bench) -> None:
    model = bench.fresh()
    data, gentle = [datum(0)], ADAM.model_copy(update={"learning_rate": 1e-3})
    steps = [(model.forward_backward(data, "cross_entropy"), model.optim_step(gentle)) for _ in range(4)]
    read = [step.result() and loss.result().metrics["loss:sum"] for loss, step in reversed(steps)]
    assert read == sorted(read)  # read backwards: every loss is below the one before it
    again = bench.fresh()
    alone = [again.forward_backward(data, "cross_entropy").result().metrics["loss:sum"]]
    assert alone == [read[-1]]


def test_samples_are_seeded_scored_and_stopped_as_asked(bench: Bench) -> None:
    model = bench.fresh()
    sampler = model.save_weights_and_get_sampling_client().result()
    prompt = datum(5).model_input
    params = types.SamplingParams(max_tokens=6, seed=3, temperature=1.0)
    first = sampler.sample(prompt, 4, params, include_prompt_logprobs=True).result()
    again = sampler.sample(prompt, 4, params).result()
    assert [s.tokens for s in first.sequences] == [s.tokens for s in again.sequences]
    assert len({tuple(s.tokens) for s in first.sequences}) > 1
    assert len({s.sequence_id for s in first.sequences}) == 4
    assert first.prompt_logprobs is not None
    assert first.prompt_logprobs[0] is None
    for sequence in first.sequences:
        whole = prompt.to_ints() + sequence.tokens
        scored = made(whole[:-1], target_tokens=whole[1:], weights=[0.0] * (len(whole) - 1))
        (under_trainer,) = scores(model, scored)
        of_prompt = np.array(first.prompt_logprobs[1:], float)
        np.testing.assert_allclose(under_trainer[: prompt.length - 1], of_prompt, atol=1e-4)
        assert sequence.logprobs is not None
        np.testing.assert_allclose(under_trainer[prompt.length - 1 :], sequence.logprobs, atol=1e-3)
    stop = first.sequences[0].tokens[2]
    stopped = sampler.sample(prompt, 1, types.SamplingParams(max_tokens=6, seed=3, stop=[stop])).result()
    expected = first.sequences[0].tokens[: first.sequences[0].tokens.index(stop) + 1]
    assert (stopped.sequences[0].tokens, stopped.sequences[0].stop_reason) == (expected, "stop")
    text = TokenizerFile.load(ROOT / "recipes/demo/policy").decode([stop]).strip()
    cut = sampler.sample(prompt, 1, types.SamplingParams(max_tokens=6, seed=3, stop=[text])).result()
    assert len(cut.sequences[0].tokens) <= len(expected)


def test_a_sampling_client_never_samples_from_newer_weights_unless_it_was_made_to(bench: Bench) -> None:
    model = bench.fresh()
    snapshot = model.save_weights_and_get_sampling_client().result()
    follows = model.save_weights_and_get_sampling_client(kind="inflight").result()
    same = model.save_weights_and_get_sampling_client().result()
    prompt, params = datum(5).model_input, types.SamplingParams(max_tokens=2)
    for client in (snapshot, follows, same):  # nothing was trained between them
        client.sample(prompt, 1, params).result()
    model.forward_backward([datum(0)], "cross_entropy")
    model.optim_step(ADAM)
    model.save_weights_and_get_sampling_client().result().sample(prompt, 1, params).result()
    follows.sample(prompt, 1, params).result()
    with pytest.raises(tinker.RequestFailedError, match="the weights of this sampling client were replaced"):
        snapshot.sample(prompt, 1, params).result()


def test_a_checkpoint_restores_weights_and_optimizer_or_weights_alone(bench: Bench) -> None:
    model, data = bench.fresh(), [datum(1)]
    model.forward_backward(data, "cross_entropy")
    model.optim_step(ADAM)
    path = model.save_state("after-one").result().path

    def next_scores(start: Callable[[], tinker.TrainingClient]) -> list[float]:
        trained = start()
        trained.forward_backward(data, "cross_entropy")
        trained.optim_step(ADAM).result()
        return scores(trained, *data)[0]

    def with_optimizer() -> tinker.TrainingClient:
        model.load_state_with_optimizer(path).result()  # pyright: ignore[reportDeprecated]
        return model

    def without() -> tinker.TrainingClient:
        model.load_state(path).result()  # pyright: ignore[reportDeprecated]
        return model

    went_on = next_scores(lambda: model)
    np.testing.assert_allclose(next_scores(with_optimizer), went_on, atol=1e-6)
    assert np.abs(np.subtract(next_scores(without), went_on)).max() > 1e-4
    for create, same in (
        (bench.client.create_training_client_from_state_with_optimizer, True),
        (bench.client.create_training_client_from_state, False),
    ):
        made = create(path).result()
        assert made.get_info().model_id != model.get_info().model_id
        gap = np.abs(np.subtract(next_scores(lambda made=made: made), went_on)).max()
        assert bool(gap < 1e-6) is same
    rest = tinker.RestClient(base_url=bench.url, api_key=bench.keys["ada"])
    listed = rest.list_checkpoints(model.get_info().model_id).result().checkpoints
    assert path in [checkpoint.tinker_path for checkpoint in listed]
    rest.delete_checkpoint(model.get_info().model_id, "weights/after-one").result()
    with pytest.raises(tinker.APIStatusError, match="no checkpoint after-one"):
        bench.client.create_training_client_from_state(path).result()


def test_saved_weights_are_sampled_by_the_model_or_by_a_sampler_of_their_own(bench: Bench) -> None:
    """A sampler that is not there yet is waited for: the SDK backs off."""
    model = bench.fresh()
    path = model.save_weights_for_sampler("first").result().path
    prompt, params = datum(5).model_input, types.SamplingParams(max_tokens=4, seed=1)
    shared = bench.client.create_sampling_client(model_path=path).result().sample(prompt, 1, params).result()
    model.forward_backward([datum(0)], "cross_entropy")
    model.optim_step(ADAM)
    model.save_weights_and_get_sampling_client().result()
    for client in (
        bench.client.create_sampling_client(model_path=path).result(),
        bench.client.create_sampling_client(base_model="policy").result(),
    ):
        own = client.sample(prompt, 1, params).result()
        assert own.sequences[0].tokens == shared.sequences[0].tokens


def test_a_lora_config_says_how_large_the_adapter_is_where_it_is_and_from_which_seed(bench: Bench) -> None:
    rank, layers, _ = trained_layers(bench, bench.start)
    attention, mlp = {f"{name}_proj" for name in "qkvo"}, {f"{name}_proj" for name in ("gate", "up", "down")}
    assert (rank, layers) == (32, attention | mlp | {"lm_head"})
    small = bench.client.create_lora_training_client(
        base_model="policy", rank=4, seed=3, train_mlp=False, train_unembed=False
    ).result()
    info = small.get_info()
    assert (info.is_lora, info.lora_rank) == (True, 4)
    before = small.save_state("before").result().path
    rank, layers, weights = trained_layers(bench, before)
    assert (rank, layers) == (4, attention)
    expected = TorchTrainer(
        ROOT / "recipes/demo/policy",
        device=torch.device("cpu"),
        micro_batch_tokens=64,
        lora=LoraOptions(rank=4, alpha=32, target_modules=r".*self_attn\..*_proj", seed=3),
    )
    for name, weight in trained_weights(expected.module).items():
        assert torch.equal(weight, weights[name])

    ids = datum(5).model_input.to_ints()
    scored = made(ids[:-1], target_tokens=ids[1:], weights=[0.0] * (len(ids) - 1))
    (start,) = scores(small, scored)
    small.forward_backward([datum(0)], "cross_entropy")
    small.optim_step(ADAM).result()
    (after,) = scores(small, scored)
    assert np.abs(np.subtract(after, start)).max() > 1e-2
    path = small.save_weights_for_sampler("trained").result().path
    small.forward_backward([datum(1)], "cross_entropy")
    small.optim_step(ADAM).result()
    small.save_weights_and_get_sampling_client().result()  # so that `path` needs a sampler of its own
    sampler = bench.client.create_sampling_client(model_path=path).result()
    params, prompt = types.SamplingParams(max_tokens=1), types.ModelInput.from_ints(ids)
    found = sampler.sample(prompt, 1, params, include_prompt_logprobs=True).result().prompt_logprobs
    assert found is not None
    np.testing.assert_allclose(np.array(found[1:], float), after, atol=1e-4)


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"rank": 0}, "lora_config.rank"),
        ({"rank": 8, "seed": -1}, "lora_config.seed"),
        ({"rank": 8, "train_mlp": False, "train_attn": False, "train_unembed": False}, "this one none"),
    ],
)
def test_a_lora_config_that_cannot_be_had_is_refused(bench: Bench, asked: dict[str, Any], said: str) -> None:
    reply = httpx.post(
        f"{bench.url}/api/v1/create_model",
        headers={"X-API-Key": bench.keys["ada"]},
        json={"session_id": "s", "model_seq_id": 0, "base_model": "policy", "lora_config": asked},
    )
    assert reply.status_code == 422
    assert said in reply.text


@pytest.mark.parametrize("loss_fn", ["importance_sampling", "ppo", "cispo", "gspo"])
def test_a_named_loss_trains_as_the_same_loss_written_by_the_caller(bench: Bench, loss_fn: Any) -> None:
    start = scores(bench.fresh(), datum(0), datum(1))
    data = [policy_datum(seed, start[seed]) for seed in (0, 1)]

    def custom(given: list[types.Datum], logprobs: list[Any]) -> tuple[Any, dict[str, float]]:
        terms: list[Any] = []
        for one, p in zip(given, logprobs, strict=True):
            q, a = (torch.tensor(list(one.loss_fn_inputs[name].data)) for name in ("logprobs", "advantages"))
            ratio, mask = torch.exp(p - q), a != 0
            if loss_fn == "gspo":
                ratio = torch.exp((p - q)[mask].mean())
            if loss_fn == "cispo":
                terms.append(ratio.clamp(0.8, 1.2).detach() * a * p)
            elif loss_fn == "importance_sampling":
                terms.append(ratio * a)
            else:
                terms.append(torch.minimum(ratio * a, ratio.clamp(0.8, 1.2) * a))
        return -torch.cat(terms).sum(), {}

    ends: list[Any] = []
    for is_named in (True, False):
        model = bench.fresh()
        asked = (
            model.forward_backward(data, loss_fn) if is_named else model.forward_backward_custom(data, custom)
        )
        loss = asked.result().metrics["loss:sum"]
        norm = model.optim_step(ADAM).result().metrics
        assert norm is not None
        ends.append([loss, norm["grad_norm"], *np.concatenate(scores(model, datum(0), datum(1)))])
    np.testing.assert_allclose(ends[0], ends[1], rtol=1e-5, atol=1e-4)


def test_a_call_that_is_refused_holds_up_none_behind_it(bench: Bench) -> None:
    model = bench.fresh()
    wrong = made([5, 6, 7], target_tokens=[6, 99, 8], weights=[1.0, 1.0, 1.0])
    refused = model.forward_backward([wrong], "cross_entropy")
    unknown = model.forward_backward([datum(0)], "stable_reinforce")
    good = model.forward_backward([datum(0)], "cross_entropy")
    with pytest.raises(tinker.RequestFailedError, match="position 1 counts, but its target 99"):
        refused.result()
    with pytest.raises(tinker.RequestFailedError, match="'stable_reinforce' cannot be had here"):
        unknown.result()
    assert good.result().metrics["loss:sum"] > 0
    model.optim_step(ADAM).result()
    with pytest.raises(tinker.RequestFailedError, match="no gradient was accumulated"):
        model.optim_step(ADAM).result()


def test_a_key_opens_what_belongs_to_its_owner_and_nothing_else(bench: Bench) -> None:
    with pytest.raises(tinker.AuthenticationError, match="give a valid token"):
        tinker.ServiceClient(base_url=bench.url, api_key="tml-nobody")._get_session_holder()  # pyright: ignore
    other = tinker.ServiceClient(base_url=bench.url, api_key=bench.keys["ben"])
    with pytest.raises(tinker.NotFoundError):
        other.create_training_client_from_state(bench.start).result()
    other.close("success").result()
    for key, status in ((bench.keys["ben"], 404), ("tml-nobody", 401), (bench.keys["ada"], 200)):
        reply = httpx.post(
            f"{bench.url}/api/v1/get_info",
            headers={"X-API-Key": key},
            json={"model_id": bench.model.get_info().model_id},
        )
        assert reply.status_code == status


def test_results_come_as_json_to_clients_that_do_not_read_protobuf(bench: Bench) -> None:
    model = bench.fresh()
    sampler = model.save_weights_and_get_sampling_client().result()
    headers = {"X-API-Key": bench.keys["ada"]}
    asked = httpx.post(
        f"{bench.url}/api/v1/asample",
        headers=headers,
        json={
            "sampling_session_id": sampler._sampling_session_id,  # pyright: ignore[reportPrivateUsage]
            "seq_id": 10**9,
            "prompt": {"chunks": [{"type": "encoded_text", "tokens": [5, 6, 7]}]},
            "sampling_params": {"max_tokens": 2},
        },
    ).json()
    deadline = time.monotonic() + 60
    reply: dict[str, Any] = {"type": "try_again"}
    while time.monotonic() < deadline:
        body = {"request_id": asked["request_id"]}
        reply = httpx.post(
            f"{bench.url}/api/v1/retrieve_future", headers=headers, json=body, timeout=60
        ).json()
        if reply["type"] != "try_again":
            break
    assert len(reply["sequences"][0]["tokens"]) == len(reply["sequences"][0]["logprobs"])
