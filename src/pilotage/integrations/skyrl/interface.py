"""The part of SkyRL's interfaces that is spoken here, by the names of skyrl 0.4.0.

Its TypedDicts are plain dictionaries and its generators are called, never asked for their class; so nothing
of it is imported.
"""

from collections.abc import Mapping, Sequence
from typing import Protocol, TypedDict


class TrajectoryId(Protocol):
    """Which attempt at which prompt: SkyRL's `TrajectoryID`."""

    @property
    def instance_id(self) -> str:
        """The prompt; trajectories that share it share a baseline."""
        ...

    @property
    def repetition_id(self) -> int:
        """0, 1, ... among the attempts at the prompt."""
        ...


class BatchMetadata(Protocol):
    """Where the trainer stands."""

    @property
    def global_step(self) -> int | None:
        """None where nothing is trained."""
        ...

    @property
    def training_phase(self) -> str:
        """`train` or `eval`."""
        ...


class GeneratorInput(TypedDict):
    """What the trainer asks for; the lists have one entry for each trajectory."""

    prompts: Sequence[object]
    env_classes: Sequence[str]
    env_extras: Sequence[Mapping[str, object]] | None
    """The dataset's other columns."""
    sampling_params: Mapping[str, object] | None
    """As vLLM takes them."""
    trajectory_ids: Sequence[TrajectoryId] | None
    batch_metadata: BatchMetadata | None


class GeneratorOutput(TypedDict):
    """What the trainer gets; the lists have one entry for each row, a trajectory's rows adjacent."""

    prompt_token_ids: list[list[int]]
    response_ids: list[list[int]]
    rewards: list[float]
    loss_masks: list[list[int]]
    stop_reasons: list[str]
    rollout_metrics: dict[str, float]
    rollout_logprobs: list[list[float]]
    trajectory_ids: list[TrajectoryId]
    trajectory_generation_times: list[float]
    trajectory_time_splits: None
    rollout_expert_indices: None
    rollout_sample_support: None
    is_last_step: list[bool]
    """True in the last row of a trajectory."""
    env_metrics: None
    pixel_values: None
    image_grid_thw: None


class EngineConfig(Protocol):
    """The settings of SkyRL's section `generator.inference_engine` that matter here."""

    @property
    def engine_init_kwargs(self) -> Mapping[str, object]:
        """What vLLM is started with beside SkyRL's own choices."""
        ...


class GeneratorConfig(Protocol):
    """The settings of SkyRL's section `generator` that a generator of ours must agree with."""

    @property
    def step_wise_trajectories(self) -> bool:
        """Whether a trajectory may have several rows."""
        ...

    @property
    def apply_overlong_filtering(self) -> bool:
        """Whether generators mask what was cut short."""
        ...

    @property
    def zero_reward_on_non_stop(self) -> bool:
        """Whether generators give 0 to what was cut short."""
        ...

    @property
    def inference_engine(self) -> EngineConfig:
        """How vLLM is started."""
        ...


class EngineInput(TypedDict):
    """A request to SkyRL's inference engines; one entry for each completion."""

    prompts: None
    prompt_token_ids: list[list[int]]
    sampling_params: dict[str, object]
    session_ids: list[str]
    mm_features: None
    cache_salt: str


class EngineOutput(TypedDict):
    """The engines' answer."""

    response_ids: Sequence[Sequence[int]]
    stop_reasons: Sequence[str]
    response_logprobs: Sequence[Sequence[float] | None] | None


class InferenceClient(Protocol):
    """SkyRL's `RemoteInferenceClient`, as far as it is used."""

    @property
    def weight_version(self) -> int:
        """Number of weight syncs so far."""
        ...

    async def generate(self, input_batch: EngineInput, model: str | None = None) -> EngineOutput:
        """Sample completions; `model` names a LoRA adapter, or the base model where it is None."""
        ...
