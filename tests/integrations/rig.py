"""SkyRL's side: its inference client over a sampler of ours, its settings, and what its trainer asks."""

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from pilotage.integrations.skyrl import GeneratorInput
from pilotage.integrations.skyrl.interface import EngineInput, EngineOutput
from pilotage.interfaces import RolloutRunner, Sampler
from pilotage.types import Rollout, RolloutRequest, SamplingParams


@dataclass(frozen=True)
class Identity:
    """As SkyRL's `TrajectoryID`."""

    instance_id: str
    repetition_id: int


@dataclass(frozen=True)
class Metadata:
    """As SkyRL's `BatchMetadata`."""

    global_step: int | None
    training_phase: str


@dataclass(frozen=True, kw_only=True)
class Engines:
    engine_init_kwargs: Mapping[str, object] = field(
        default_factory=lambda: {"logprobs_mode": "processed_logprobs"}
    )


@dataclass(frozen=True, kw_only=True)
class Settings:
    """As SkyRL's `cfg.generator`, set as it must be."""

    step_wise_trajectories: bool = True
    apply_overlong_filtering: bool = False
    zero_reward_on_non_stop: bool = False
    inference_engine: Engines = field(default_factory=Engines)


# What SkyRL's `get_vllm_sampling_params` makes of its defaults, with 256 tokens a turn.
VLLM_PARAMS: Mapping[str, object] = {
    "min_tokens": 1,
    "skip_special_tokens": True,
    "include_stop_str_in_output": True,
    "max_tokens": 256,
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "logprobs": 1,
    "stop": None,
}


def batch_of(
    tasks: Mapping[str, Path],
    *,
    samples: int = 2,
    phase: str = "train",
    params: Mapping[str, object] = VLLM_PARAMS,
) -> GeneratorInput:
    """Return what SkyRL's `prepare_generator_input` makes of rows with these uids and tasks."""
    ids = [Identity(uid, repetition) for uid in tasks for repetition in range(samples)]
    return GeneratorInput(
        prompts=[[{"role": "user", "content": "solve it"}] for _ in ids],
        env_classes=["harbor" for _ in ids],
        env_extras=[{"task_path": str(tasks[identity.instance_id])} for identity in ids],
        sampling_params=params,
        trajectory_ids=ids,
        batch_metadata=Metadata(3, phase),
    )


@dataclass(kw_only=True)
class EngineClient:
    """SkyRL's `RemoteInferenceClient` on a sampler of ours."""

    sampler: Sampler
    weight_version: int = 0
    requests: list[tuple[EngineInput, str | None]] = field(
        default_factory=list[tuple[EngineInput, str | None]]
    )

    async def generate(self, input_batch: EngineInput, model: str | None = None) -> EngineOutput:
        self.requests.append((input_batch, model))
        asked = input_batch["sampling_params"]
        [prompt], [session] = input_batch["prompt_token_ids"], input_batch["session_ids"]
        top_k, seed = asked["top_k"], asked.get("seed")
        assert isinstance(top_k, int)
        assert isinstance(asked["max_tokens"], int)
        ids = np.array(prompt, np.int32)
        completion = await self.sampler.sample(
            ids,
            SamplingParams(
                temperature=_float(asked["temperature"]),
                top_p=_float(asked["top_p"]),
                top_k=max(top_k, 0),
                max_tokens=asked["max_tokens"],
                # Without one, the same draws for the same rollout, so that no test depends on chance.
                seed=seed if isinstance(seed, int) else zlib.crc32(session.encode() + ids.tobytes()),
            ),
            session_id=session,
            turn_index=0,
        )
        return EngineOutput(
            response_ids=[completion.token_ids.tolist()],
            stop_reasons=[completion.finish_reason.value],
            response_logprobs=[completion.logprobs.tolist()],
        )


def _float(value: object) -> float:
    assert isinstance(value, float)
    return value


@dataclass(kw_only=True)
class Watched:
    """A runner that keeps what it returned."""

    runner: RolloutRunner
    rollouts: dict[str, Rollout] = field(default_factory=dict[str, Rollout])

    async def run(self, request: RolloutRequest) -> Rollout:
        rollout = await self.runner.run(request)
        self.rollouts[request.id] = rollout
        return rollout


@dataclass(kw_only=True)
class Finished:
    """A runner that has these rollouts for each prompt, in order."""

    rollouts: Mapping[str, Sequence[Rollout]]
    requests: list[RolloutRequest] = field(default_factory=list[RolloutRequest])

    async def run(self, request: RolloutRequest) -> Rollout:
        position = sum(earlier.group_id == request.group_id for earlier in self.requests)
        self.requests.append(request)
        return self.rollouts[request.group_id][position]
