"""Bodies of the Cortex Training wire that describe jobs.

`create` is closed, which the stock service's is not: a key that is neither known nor starts with `x-` is
refused with its path. Keys that a stock client sends and that only tune speed or memory are known and listed
as ignored in the job record; keys that would change results and that the runtime cannot honour are refused.
"""

import re
from collections.abc import Mapping
from enum import StrEnum
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, AliasChoices, BaseModel, ConfigDict, Field, model_validator

from pilotage.wire.core import Closed

HARDWARE = ("H200", "B200", "B300")
JOB_ID_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,127}$"


class JobStatus(StrEnum):
    """State of a job."""

    PENDING = "pending"
    PLACING = "placing"
    INITIALIZING = "initializing"
    RUNNING = "running"
    FAILED = "failed"
    CANCELLED = "cancelled"
    TERMINATED = "terminated"


ENDED = frozenset({JobStatus.FAILED, JobStatus.CANCELLED, JobStatus.TERMINATED})
ACTIVE = frozenset(JobStatus) - ENDED
_STATUS_GROUPS = {
    "active": frozenset(status.value for status in ACTIVE),
    "done": frozenset({"cancelled", "terminated", "done"}),  # the last is one of older services
}


def read_statuses(text: str | None) -> frozenset[str]:
    """Read a filter of jobs: states and the groups `active` and `done`, with commas; nothing is no filter.

    Raises:
        ValueError: an unknown name.
    """
    found: set[str] = set()
    for name in (part.strip().lower() for part in text.split(",")) if text else ():
        if name not in _STATUS_GROUPS and name not in JobStatus:
            raise ValueError(f"status is of {', '.join([*JobStatus, *_STATUS_GROUPS])}; got {name[:40]!r}")
        found |= _STATUS_GROUPS.get(name, {name})
    return frozenset(found)


def _timeout(seconds: int) -> int:
    if not 300 <= seconds <= 604_800:
        raise ValueError("must lie in 300..604800")
    return seconds


def _idle_timeout(seconds: int) -> int:
    return seconds if seconds == 0 else _timeout(seconds)


class OptimizerConfig(BaseModel):
    """AdamW; every step may override all of it through the strict core."""

    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True, allow_inf_nan=False)

    name: Literal["AdamW"] = Field(default="AdamW", validation_alias=AliasChoices("name", "type"))
    lr: float = Field(default=1e-6, ge=0)
    weight_decay: float = Field(default=0.0, ge=0)
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = Field(default=1e-8, gt=0)
    fused: bool | None = None
    """Speed only."""

    @model_validator(mode="before")
    @classmethod
    def _canonical(cls, value: Any) -> Any:
        """Take the spellings of the stock client: nested `params`, `beta1`/`beta2`."""
        if not isinstance(value, Mapping):
            return value
        params = value.get("params") or {}
        if not isinstance(params, Mapping):
            raise ValueError("params is an object")
        flat = {k: v for k, v in value.items() if k != "params"} | dict(params)
        if "beta1" in flat or "beta2" in flat:
            flat["betas"] = (flat.pop("beta1", 0.9), flat.pop("beta2", 0.999))
        return flat


_SPEED_ONLY_TRAINING = {
    "model_provider", "attn_implementation", "attn_impl", "sp_size", "mb_spec", "ds_config",
    "ds_worker_config", "activation_checkpointing", "ac_config", "compile", "cuda_allocator_conf",
    "release_weight_sync_staging_buffers", "step_peak_memory_log", "training_memory_telemetry", "nccl_debug",
    "dtype", "checkpoint_path",
}  # fmt: skip
_SPEED_ONLY_INFERENCE = {"gpu_memory_utilization", "vllm_config", "vllm", "tensor_parallel_size", "dtype"}


class _Tunable(BaseModel):
    """A config block whose known speed-only keys are taken and named, never obeyed."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    ignored_keys: tuple[str, ...] = Field(default=(), alias="x-ignored")

    @classmethod
    def _set_aside(cls, value: Any, known: set[str]) -> Any:
        if not isinstance(value, Mapping):
            return value
        aside = sorted(key for key in value if key in known)
        kept = {
            k: v for k, v in value.items() if k not in known and not (k.startswith("x-") and k != "x-ignored")
        }
        already = kept.get("x-ignored", ())
        if not isinstance(already, list | tuple):
            raise ValueError("x-ignored is a list")
        return kept | ({"x-ignored": (*already, *aside)} if aside or already else {})


class PeftConfig(Closed):
    """A LoRA adapter that is trained instead of all weights; with dropout or biases it cannot be had."""

    peft_type: Literal["Lora"]
    """The one kind there is."""
    target_modules: str | tuple[str, ...] = Field(min_length=1)
    """Names of layers or their last parts, a regular expression of whole names, or `all-linear`: all but the
    output projection."""
    r: int = Field(default=8, ge=1, le=4096)
    """Rank."""
    lora_alpha: int = Field(default=8, ge=1, le=65_536)
    """The adapter's product is scaled by `lora_alpha` / `r`."""
    lora_dropout: Literal[0] = 0
    """It would make the importance ratio a lie."""
    bias: Literal["none"] = "none"
    """Which biases are trained."""


class TrainingConfig(_Tunable):
    """The trainer of a job."""

    optimizer: OptimizerConfig
    max_seq_len: int = Field(gt=0)
    train_batch_size: int = Field(gt=0)
    n_gpus: int = Field(gt=0)
    gradient_clipping: float = Field(default=1.0, ge=0)
    load_optimizer_states: bool = True
    peft_config: PeftConfig | None = None

    @model_validator(mode="before")
    @classmethod
    def _aside(cls, value: Any) -> Any:
        return cls._set_aside(value, _SPEED_ONLY_TRAINING)


class InferenceConfig(_Tunable):
    """A sampler of a job."""

    max_seq_len: int = Field(gt=0)
    n_gpus: int = Field(gt=0)
    peft_config: PeftConfig | None = None

    @model_validator(mode="before")
    @classmethod
    def _aside(cls, value: Any) -> Any:
        return cls._set_aside(value, _SPEED_ONLY_INFERENCE)


class SourceCheckpoint(Closed):
    """Weights to start from, other than the model's own."""

    checkpoint_id: str
    source_job_id: str


class SubJobBody(Closed):
    """One typed part of a job."""

    job_type: Literal["training", "sampling"]
    model_name: str = Field(min_length=1, max_length=512)
    training_config: TrainingConfig | None = None
    inference_config: InferenceConfig | None = None
    global_batch_size: int | None = None
    dtype: str | None = None
    seed: int | None = Field(default=None, ge=0, lt=2**63)
    """Of an adapter's first weights, which is all that is random in a trainer; absent is 0."""
    post_init_hooks: tuple[str, ...] = Field(default=(), max_length=0, alias="model_post_init")
    """Hooks in the server's process; there are none."""
    source_checkpoint_info: SourceCheckpoint | None = None
    weight_format: str | None = None

    @model_validator(mode="after")
    def _config_of_its_type(self) -> Self:
        wanted, other = ("training_config", "inference_config")[:: 1 if self.job_type == "training" else -1]
        if getattr(self, wanted) is None or getattr(self, other) is not None:
            raise ValueError(f"a {self.job_type} sub-job has {wanted} and no {other}")
        return self

    @property
    def n_gpus(self) -> int:
        """GPUs it holds."""
        config = self.training_config or self.inference_config
        assert config is not None
        return config.n_gpus


class EngineSizes(Closed):
    """How the job's engine holds the policy; absent values are the engine's defaults."""

    max_batch: int = Field(default=32, ge=1)
    """Completions that are sampled at once."""
    micro_batch_tokens: int = Field(default=8192, ge=1)
    """Tokens of one forward pass of the trainer."""
    trainer_threads: int = Field(default=1, ge=1)
    tensor_parallel: int = Field(default=1, ge=1)
    """GPUs of one sampler replica, on an engine of many devices."""
    stop_token_ids: tuple[int, ...] | None = None
    """Ids that end a completion; absent reads them from the model."""


class JobExtras(Closed):
    """What the stock wire has no word for: `x-pilotage` of a create body."""

    lease_s: float | None = Field(default=None, ge=5, le=86_400)
    """A job whose lease is not renewed for so long is dealt with by `on_lost`; absent is no lease."""
    on_lost: Literal["cancel", "keep"] = "cancel"
    engine: EngineSizes = EngineSizes()


class CreateJobBody(BaseModel):
    """Create a job: at most one trainer, any number of samplers."""

    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True)

    sub_job_configs: tuple[SubJobBody, ...] = Field(min_length=1, max_length=64)
    job_id: str | None = Field(default=None, pattern=JOB_ID_PATTERN)
    experiment_name: str | None = None
    hardware: Literal["H200", "B200", "B300"] = "H200"
    idle_timeout_seconds: Annotated[int, AfterValidator(_idle_timeout)] = 1800
    """0 never reclaims."""
    pending_timeout_seconds: Annotated[int, AfterValidator(_timeout)] = 86_400
    comment: str | None = Field(default=None, max_length=4096)
    extras: JobExtras = Field(default=JobExtras(), alias="x-pilotage")

    @model_validator(mode="before")
    @classmethod
    def _drop_foreign_extras(cls, value: Any) -> Any:
        if not isinstance(value, Mapping):
            return value
        return {k: v for k, v in value.items() if not (k.startswith("x-") and k != "x-pilotage")}

    @model_validator(mode="after")
    def _one_trainer_one_model(self) -> Self:
        trainers = [s for s in self.sub_job_configs if s.job_type == "training"]
        if len(trainers) > 1:
            raise ValueError(f"a job has at most one training sub-job, got {len(trainers)}")
        if len({s.model_name for s in self.sub_job_configs}) > 1:
            raise ValueError("the sub-jobs of a job share one model_name")
        if len({repr(_peft(s)) for s in self.sub_job_configs}) > 1:
            raise ValueError("peft_config must be the same on every sub-job")
        return self

    @property
    def n_gpus(self) -> int:
        """GPUs of all sub-jobs."""
        return sum(sub_job.n_gpus for sub_job in self.sub_job_configs)

    @property
    def trainer(self) -> SubJobBody | None:
        """The training sub-job."""
        return next((s for s in self.sub_job_configs if s.job_type == "training"), None)

    @property
    def training_config(self) -> TrainingConfig | None:
        """How the training sub-job trains; None where there is none."""
        return None if self.trainer is None else self.trainer.training_config

    @property
    def model_name(self) -> str:
        """The model that all sub-jobs share."""
        return self.sub_job_configs[0].model_name

    @property
    def adapter(self) -> PeftConfig | None:
        """The adapter that is trained or sampled from; None is the whole model."""
        return _peft(self.sub_job_configs[0])

    @property
    def adapter_seed(self) -> int:
        """Seed of the adapter's first weights."""
        return 0 if self.trainer is None else self.trainer.seed or 0

    @property
    def max_context_tokens(self) -> int:
        """Longest sequence of any sub-job."""
        configs = [s.training_config or s.inference_config for s in self.sub_job_configs]
        return max(config.max_seq_len for config in configs if config is not None)


def _peft(sub_job: SubJobBody) -> PeftConfig | None:
    config = sub_job.training_config or sub_job.inference_config
    return None if config is None else config.peft_config


def sub_job_ids(job_id: str, body: CreateJobBody) -> tuple[str, ...]:
    """Return `job:type:index` for every sub-job, the index counted per type."""
    counts: dict[str, int] = {}
    ids: list[str] = []
    for sub_job in body.sub_job_configs:
        index = counts.get(sub_job.job_type, 0)
        counts[sub_job.job_type] = index + 1
        ids.append(f"{job_id}:{sub_job.job_type}:{index}")
    return tuple(ids)


class SubJobRecord(BaseModel):
    """A sub-job as `get` shows it."""

    sub_job_id: str
    job_type: str
    status: str
    model_name: str
    training_config: dict[str, Any] | None = None
    inference_config: dict[str, Any] | None = None


class JobRecord(BaseModel):
    """A job as `get` and `list` show it; a reader ignores keys that it does not know."""

    job_id: str
    status: str
    reason: str | None = None
    created_at: str
    updated_at: str
    submitted_by: str | None = None
    hardware: str | None = None
    idle_timeout_seconds: int | None = None
    pending_timeout_seconds: int | None = None
    comment: str | None = None
    experiment_name: str | None = None
    sub_jobs: tuple[SubJobRecord, ...] = ()

    @property
    def is_ended(self) -> bool:
        """Whether nothing will change any more; a status that is not known counts as in progress."""
        return normalised_status(self.status) in {status.value for status in ENDED} | {"done"}


class CapacityRecord(BaseModel):
    """GPUs of one kind; absent numbers are 0."""

    has_reservation: bool = False
    max_total_gpus: int = 0
    """-1 is no ceiling."""
    reserved_gpus: int = 0
    in_use_gpus: int = 0
    pending_gpus: int = 0
    available_gpus: int = 0


def normalised_status(status: str) -> str:
    """Return a status without the spellings of older services: `JOB_STATE_RUNNING` is `running`."""
    return re.sub(r"^job_state_", "", status.lower())
