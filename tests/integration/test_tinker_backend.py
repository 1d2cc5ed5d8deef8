"""Backend tinker: the public SDK against `pilotage serve`, compared with the embedded engine.

What is compared are the weights after a step of an Adam without moments whose eps outweighs every gradient:
they move by the gradient itself, to a length of 0.1.
"""

import asyncio
import dataclasses
import os
import re
import subprocess
import sys
import time
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import load_file
from tests.integration.test_service_faults import plan as cortex_plan

from pilotage.client import Connection, Secret, open_engine
from pilotage.client.remote_checkpoint import RemoteCheckpoint
from pilotage.client.tinker_checkpoint import TinkerCheckpoint
from pilotage.client.tinker_engine import TinkerEngine, TinkerPlan
from pilotage.client.tinker_sdk import TinkerConnection
from pilotage.client.tinker_session import open_tinker
from pilotage.engine import LocalEngine
from pilotage.engine.lora import LoraOptions
from pilotage.errors import (
    AuthError,
    ConfigError,
    ContextExceededError,
    NotFoundError,
    SamplerError,
    TrainerError,
    WeightsChangingError,
)
from pilotage.interfaces import Engine
from pilotage.service.tinker_bodies import LoraBody
from pilotage.service.tinker_models import adapter_asked
from pilotage.types import (
    AdamParams,
    LossConfig,
    PolicyLoss,
    Reduction,
    Sample,
    SamplingParams,
    token_ids,
)
from pilotage.wire.jobs import CreateJobBody, PeftConfig

ROOT = Path(__file__).resolve().parents[2]
POLICY = ROOT / "recipes" / "demo" / "policy"
PILOTAGE = str(Path(sys.executable).with_name("pilotage"))
CONTEXT, STOPS = 256, (2, 0)
KEY = Secret("tml-" + "k" * 12)
SWITCHES = LoraBody(rank=8)
ADAPTER = PeftConfig.model_validate(adapter_asked(SWITCHES, adapts_unembed=True))
"""What the Tinker API's defaults are at the service, and so for the other backends here."""
LINEAR = AdamParams(learning_rate=1e5, beta1=0.0, beta2=0.0, eps=1e6, max_grad_norm=1.0)
LOSS = LossConfig(policy_loss=PolicyLoss.GSPO, clip_low=0.05, clip_high=0.05)
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """A service of its own process."""

    url: str
    data: Path

    @property
    def connection(self) -> TinkerConnection:
        return TinkerConnection(base_url=self.url, key=KEY)

    def files(self, directory: Path) -> Path:
        """Where the files are of a checkpoint that any of the backends saved."""
        if (directory / "tinker_checkpoint.json").exists():
            found = re.fullmatch(r"tinker://(.+)/weights/(.+)", TinkerCheckpoint.read(directory).path)
            assert found is not None
            directory = self.checkpoint(found[1].replace(":", "."), found[2])
        elif (directory / "remote_checkpoint.json").exists():
            remote = RemoteCheckpoint.read(directory)
            directory = self.checkpoint(remote.job_id, remote.record.checkpoint_id)
        return directory

    def weights(self, directory: Path) -> dict[str, NDArray[np.float32]]:
        return load_file(self.files(directory) / "adapter_model.safetensors")

    def checkpoint(self, job_id: str, checkpoint_id: str) -> Path:
        return self.data / "jobs" / job_id / "checkpoints" / checkpoint_id


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    yield from serve(tmp_path_factory.mktemp("service"), "--no-auth")


def serve(data: Path, *options: str) -> Iterator[Served]:
    command = [
        PILOTAGE,
        "serve",
        *options,
        "--models",
        str(POLICY.parent),
        "--port",
        "0",
        "--data",
        str(data),
    ]
    with (data / "log").open("wb") as log:
        service = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=log, env=os.environ | {"OMP_NUM_THREADS": "1"}, text=True
        )
    try:
        assert service.stdout is not None
        url = service.stdout.readline().removeprefix("serving on ").strip()
        assert url, (data / "log").read_text()
        yield Served(url=url, data=data)
    finally:
        service.terminate()
        service.wait(60)


def tinker_plan(loss: LossConfig = LOSS, *, context: int = CONTEXT, model: str = "policy") -> TinkerPlan:
    return TinkerPlan(
        base_model=model,
        lora_rank=SWITCHES.rank,
        lora_seed=None,
        max_context_tokens=context,
        stop_token_ids=STOPS,
        loss=loss,
        startup_timeout_s=300,
    )


@asynccontextmanager
async def tinker(served: Served) -> AsyncGenerator[TinkerEngine]:
    async with open_tinker(served.connection, tinker_plan()) as engine:
        yield engine


@asynccontextmanager
async def embedded(served: Served) -> AsyncGenerator[LocalEngine]:
    engine = await LocalEngine.open(
        POLICY,
        max_context_tokens=CONTEXT,
        max_batch=8,
        stop_token_ids=STOPS,
        device="cpu",
        lora=LoraOptions.of(ADAPTER, seed=0),
    )
    yield engine
    await engine.close()


@asynccontextmanager
async def cortex(served: Served) -> AsyncGenerator[Engine]:
    planned = cortex_plan(served.data)
    content = planned.body.model_dump(mode="json", by_alias=True)
    for part, config in zip(content["sub_job_configs"], ("training", "inference"), strict=True):
        part[f"{config}_config"]["peft_config"] = ADAPTER.model_dump(mode="json")
    planned = dataclasses.replace(planned, body=CreateJobBody.model_validate(content), run_directory=None)
    async with open_engine(Connection(origin=served.url), planned) as engine:
        yield engine


BACKENDS = {"embedded": embedded, "cortex": cortex, "tinker": tinker}


def sample(name: str, ids: Sequence[int], trained: Sequence[int], advantage: float) -> Sample:
    """Behaviour log-probs are put in by `with_logprobs`."""
    mask = np.isin(np.arange(len(ids)), trained)
    return Sample(
        sequence_id=name,
        group_id="group",
        token_ids=token_ids(ids),
        loss_mask=mask,
        sampler_logprobs=np.zeros(len(ids), np.float32),
        advantages=np.where(mask, np.float32(advantage), np.float32(0)),
        weights_versions=np.where(mask, np.int32(0), np.int32(-1)),
    )


def rollouts() -> list[Sample]:
    """Three rollouts; the last one has two branches of one prefix."""
    rng = np.random.default_rng(0)
    a, b, c = (rng.integers(3, 1700, size).tolist() for size in (12, 9, 14))
    return [
        sample("a", a, range(5, 12), 1.5),
        sample("b", b, range(3, 9), -2.0),
        sample("c", c[:10], range(4, 10), 0.8),
        sample("c", [*c[:6], *c[10:]], range(6, 10), 0.8),
    ]


async def with_logprobs(engine: Engine, samples: Sequence[Sample], *, spread: float) -> list[Sample]:
    """Return the samples as if sampled by a policy whose log-probs differ by up to `spread`."""
    rng = np.random.default_rng(1)
    scored = await engine.forward(samples, temperature=1.0)
    return [
        dataclasses.replace(
            sample,
            sampler_logprobs=np.where(
                sample.loss_mask, row + rng.uniform(-spread, spread, row.size), 0
            ).astype(np.float32),
        )
        for sample, row in zip(samples, scored, strict=True)
    ]


def moved(
    before: dict[str, NDArray[np.float32]], after: dict[str, NDArray[np.float32]]
) -> NDArray[np.float64]:
    """Return by how much each weight has moved."""
    return np.concatenate(
        [(after[name].astype(np.float64) - before[name]).ravel() for name in sorted(before)]
    )


def assert_same_gradient(found: NDArray[np.float64], expected: NDArray[np.float64], what: str) -> None:
    length = float(np.linalg.norm(expected))
    assert length == pytest.approx(0.1, rel=0.01), what
    # The weights are float32: what they hold of their moves is off by about 1e-5 of the moves' length.
    assert float(np.abs(found - expected).max()) <= 1e-5 * length + 2e-7, what


def every_loss() -> Iterator[tuple[str, LossConfig]]:
    for policy_loss in PolicyLoss:
        clip = 0.5 if "sequence" in policy_loss else 0.05  # a product of ratios is farther from 1
        plain = LossConfig(clip_low=clip, clip_high=clip, dr_grpo_tokens=5)
        for reduction in Reduction:
            yield (
                f"{policy_loss} {reduction}",
                dataclasses.replace(plain, policy_loss=policy_loss, reduction=reduction),
            )
        yield f"{policy_loss} on-policy", dataclasses.replace(plain, policy_loss=policy_loss, on_policy=True)
    for policy_loss in (PolicyLoss.GRPO, PolicyLoss.GSPO):
        yield f"{policy_loss} dual", LossConfig(policy_loss=policy_loss, clip_high=0.05, dual_clip=1.02)


async def test_every_loss_has_the_gradient_of_the_embedded_engine(served: Served, tmp_path: Path) -> None:
    async with tinker(served) as remote, embedded(served) as local:
        await remote.save(tmp_path / "start")
        start = tmp_path / "start"
        for name, loss in every_loss():
            await local.load(served.files(start))  # else rounding would grow from loss to loss
            samples = await with_logprobs(local, rollouts(), spread=0.1)
            figures = [await engine.forward_backward(samples, loss) for engine in (remote, local)]
            norms = [(await engine.step(LINEAR)).grad_norm for engine in (remote, local)]
            assert norms[0] == pytest.approx(norms[1], rel=1e-5), name
            for field in ("loss", "logprob_gap_mean", "gap_k3", "clip_fraction", "trained_tokens"):
                found, expected = (getattr(figure, field) for figure in figures)
                wanted = None if expected is None else pytest.approx(expected, rel=1e-5, abs=1e-7)
                assert found == wanted, (name, field)
            ends = [tmp_path / f"{where} {name}" for where in ("remote", "local")]
            for engine, end in zip((remote, local), ends, strict=True):
                await engine.save(end)
            moves = [moved(served.weights(start), served.weights(end)) for end in ends]
            assert_same_gradient(moves[0], moves[1], name)
            start = ends[0]


@pytest.mark.parametrize("backend", BACKENDS)
async def test_a_rollout_split_into_branches_has_the_loss_and_the_gradient_of_the_whole(
    served: Served, tmp_path: Path, backend: str
) -> None:
    ids = np.random.default_rng(2).integers(3, 1700, 12).tolist()
    whole = [sample("a", ids, [3, 4, 5, 8, 9, 10, 11], 1.5), sample("b", ids[::-1], range(6, 12), -1.0)]
    split = [
        sample("a", ids[:6], [3, 4, 5], 1.5),
        whole[1],
        sample("a", ids, [8, 9, 10, 11], 1.5),
    ]
    async with BACKENDS[backend](served) as engine:
        await engine.save(tmp_path / "start")
        start = served.weights(tmp_path / "start")
        results = list[tuple[float, NDArray[np.float64]]]()
        for name, samples in (("whole", whole), ("split", split)):
            if results:
                await engine.load(tmp_path / "start")
            scored = await engine.forward(samples, temperature=1.0)
            recorded = [  # the same gap at a token wherever it is trained
                dataclasses.replace(
                    item, sampler_logprobs=np.where(item.loss_mask, row + 0.01, 0).astype(np.float32)
                )
                for item, row in zip(samples, scored, strict=True)
            ]
            figures = await engine.forward_backward(recorded, LOSS)
            await engine.step(LINEAR)
            await engine.save(tmp_path / name)
            results.append((figures.loss, moved(start, served.weights(tmp_path / name))))
    assert results[1][0] == pytest.approx(results[0][0], rel=1e-5)
    assert_same_gradient(results[1][1], results[0][1], backend)


async def test_samples_have_the_version_that_was_published_last(served: Served) -> None:
    params = SamplingParams(max_tokens=6, seed=5)
    async with tinker(served) as engine:
        samples = await with_logprobs(engine, rollouts(), spread=0.1)
        for version in (1, 2):
            assert await engine.publish() == engine.weights_version == version
            completion = await engine.sample(token_ids([5, 6, 7]), params, session_id="s", turn_index=0)
            assert completion.weights_versions.tolist() == [version] * completion.token_ids.size
            again = await engine.sample(token_ids([5, 6, 7]), params, session_id="s", turn_index=0)
            other = await engine.sample(token_ids([5, 6, 7]), params, session_id="s", turn_index=1)
            assert again.token_ids.tolist() == completion.token_ids.tolist()
            assert other.token_ids.tolist() != completion.token_ids.tolist()
            scored = sample(
                "s", [5, 6, 7, *completion.token_ids], range(3, 3 + completion.token_ids.size), 1.0
            )
            (row,) = await engine.forward([scored], temperature=1.0)
            np.testing.assert_allclose(row[3:], completion.logprobs, atol=1e-4)
            await engine.forward_backward(samples, LOSS)
            await engine.step(LINEAR)


async def test_a_completion_that_new_weights_overtake_is_to_be_sampled_again(served: Served) -> None:
    async with tinker(served) as engine:
        samples = await with_logprobs(engine, rollouts(), spread=0.1)
        await engine.publish()
        long = SamplingParams(max_tokens=CONTEXT - 3, seed=1)
        running = [
            asyncio.create_task(
                engine.sample(token_ids([5, 6, 7]), long, session_id=str(index), turn_index=index)
            )
            for index in range(16)
        ]
        await engine.forward_backward(samples, LOSS)
        await engine.step(LINEAR)
        await engine.publish()
        outcomes = await asyncio.gather(*running, return_exceptions=True)
        overtaken = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
        assert overtaken
        assert all(isinstance(outcome, WeightsChangingError) for outcome in overtaken), overtaken


async def test_a_cancelled_sample_frees_its_slot(served: Served) -> None:
    async with tinker(served) as engine:
        await engine.publish()
        long = SamplingParams(max_tokens=CONTEXT - 3, seed=1)
        running = [
            asyncio.create_task(
                engine.sample(token_ids([5, 6, 7]), long, session_id=str(index), turn_index=index)
            )
            for index in range(64)
        ]
        await asyncio.sleep(0.5)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        started = time.monotonic()
        await engine.sample(
            token_ids([5, 6, 7]), SamplingParams(max_tokens=1, seed=1), session_id="x", turn_index=0
        )
        assert time.monotonic() - started < 10


async def test_another_session_goes_on_from_a_checkpoint(served: Served, tmp_path: Path) -> None:
    async with tinker(served) as engine:
        samples = await with_logprobs(engine, rollouts(), spread=0.1)
        await engine.publish()
        for version, name in ((2, "first"), (3, "second")):
            await engine.forward_backward(samples, LOSS)
            await engine.step(AdamParams(learning_rate=1e-3))
            assert await engine.publish() == version
            await engine.save(tmp_path / name)
    async with tinker(served) as engine:
        await engine.load(tmp_path / "first")
        assert await engine.publish() == 2
        await engine.forward_backward(samples, LOSS)
        await engine.step(AdamParams(learning_rate=1e-3))
        await engine.save(tmp_path / "again")
    wanted, found = served.weights(tmp_path / "second"), served.weights(tmp_path / "again")
    for name, values in wanted.items():
        np.testing.assert_allclose(found[name], values, atol=1e-6)


async def test_a_checkpoint_that_the_server_does_not_have_is_one_line(served: Served, tmp_path: Path) -> None:
    elsewhere = TinkerCheckpoint(
        base_url="https://other.example",
        path="tinker://gone:train:0/weights/x",
        weights_version=1,
        is_published=True,
        weights_only=False,
    )
    elsewhere.write(tmp_path / "elsewhere")
    async with tinker(served) as engine:
        with pytest.raises(NotFoundError, match=r"gone:train:0.*, which was saved at https://other\.example"):
            await engine.load(tmp_path / "elsewhere")
        with pytest.raises(ConfigError, match=r"holds no tinker_checkpoint\.json"):
            await engine.load(POLICY)


async def test_a_failed_gradient_is_never_applied(served: Served, tmp_path: Path) -> None:
    async with tinker(served) as engine:
        await engine.save(tmp_path / "start")
        bad = await with_logprobs(engine, rollouts(), spread=0.1)
        bad[1] = dataclasses.replace(bad[1], token_ids=np.full(9, 99_999, np.int32))
        with pytest.raises(TrainerError):
            await engine.forward_backward(bad, dataclasses.replace(LOSS, policy_loss=PolicyLoss.CISPO))
        with pytest.raises(TrainerError, match="an earlier call failed"):
            await engine.step(LINEAR)
        await engine.load(tmp_path / "start")
        with pytest.raises(TrainerError, match="no gradient was accumulated"):
            await engine.step(LINEAR)


async def test_what_the_server_cannot_do_is_said_before_anything_is_made(served: Served) -> None:
    wrong = [
        (
            served.connection,
            tinker_plan(model="other"),
            "has no model other; set tinker.model_name to one of: policy",
        ),
        (
            served.connection,
            tinker_plan(context=9999),
            "policy.max_context_tokens is 9999, .* has 2048; lower it",
        ),
        (served.connection, tinker_plan(LossConfig(kl_coef=0.1)), "kl_coef is 0.1"),
        (TinkerConnection(base_url="http://127.0.0.1:9", key=KEY), tinker_plan(), "no Tinker server answers"),
        (
            TinkerConnection(base_url=f"{served.url}/api/v2", key=KEY),
            tinker_plan(),
            "answers 404: no Tinker server; is TINKER_BASE_URL right",
        ),
    ]
    for connection, planned, message in wrong:
        with pytest.raises(ConfigError, match=message) as refused:
            async with open_tinker(connection, planned):
                pass
        assert "\n" not in str(refused.value)


async def test_a_prompt_that_fills_the_context_and_a_server_that_is_lost_are_errors(served: Served) -> None:
    async with tinker(served) as engine:
        samples = await with_logprobs(engine, rollouts(), spread=0.1)
        await engine.publish()
        with pytest.raises(ContextExceededError, match="256 tokens leaves no room in 256"):
            await engine.sample(token_ids([5] * CONTEXT), SamplingParams(), session_id="s", turn_index=0)
        long = SamplingParams(max_tokens=CONTEXT - 1, seed=1)
        running = asyncio.create_task(engine.sample(token_ids([5]), long, session_id="s", turn_index=0))
        await asyncio.sleep(0)
        engine.lose("it has not answered")
        with pytest.raises(SamplerError, match="sample: it has not answered"):
            await running
        with pytest.raises(TrainerError, match="forward: it has not answered"):
            await engine.forward_backward(samples, LOSS)


async def test_a_key_that_the_server_does_not_know_is_one_line_without_the_key(tmp_path: Path) -> None:
    data = tmp_path / "service"
    data.mkdir()
    command = [PILOTAGE, "token", "create", "someone", "--data", str(data)]
    token = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[-1]  # noqa: ASYNC221
    for served in serve(data):
        with pytest.raises(AuthError, match="refused") as refused:
            async with open_tinker(served.connection, tinker_plan()):
                pass
        assert KEY.reveal() not in str(refused.value)
        known = TinkerConnection(base_url=served.url, key=Secret(f"tml-{token}"))
        async with open_tinker(known, tinker_plan()):
            pass
