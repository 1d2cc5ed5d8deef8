"""The JSON bodies of the Tinker wire, closed: what cannot be honoured is taken only at the value that asks
for nothing.
"""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

_MAX_SAMPLES = 1024


class _Body(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, protected_namespaces=())

    type: str | None = None


# --- sessions, models and futures, which the front answers ---


class SessionBody(_Body):
    """Opens a session."""

    tags: list[str] = []
    user_metadata: dict[str, Any] | None = None
    sdk_version: str = ""
    project_id: str | None = None
    display_name: str | None = None


class HeartbeatBody(_Body):
    """Keeps a session's jobs."""

    session_id: str


class _AdamChoice(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    type: str = Field(default="adamw", pattern="^adamw$")


class LoraBody(_Body):
    """An adapter: its rank, its seed, and on which layers it is."""

    rank: int = Field(ge=1, le=4096)
    seed: int | None = Field(default=None, ge=0, lt=2**63)
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True


class CreateModelBody(_Body):
    """Makes a model to train. `lora_config` asks for an adapter; without, all weights are trained."""

    session_id: str
    model_seq_id: int = Field(ge=0, lt=10**9)
    base_model: str
    user_metadata: dict[str, Any] | None = None
    lora_config: LoraBody | None = None
    optimizer_config: _AdamChoice = _AdamChoice()


class RestoreBody(_Body):
    """Restores a checkpoint: in an open model (`model_id`), or in one that it makes (`session_id`)."""

    model_id: str | None = None
    seq_id: int | None = None
    session_id: str | None = None
    model_seq_id: int | None = Field(default=None, ge=0, lt=10**9)
    base_model: str | None = None
    user_metadata: dict[str, Any] | None = None
    path: str
    optimizer: bool
    optimizer_config: _AdamChoice | None = None
    weights_access_token: None = None


class SamplingSessionBody(_Body):
    """Makes a sampling client of saved weights, or of a base model."""

    session_id: str
    sampling_session_seq_id: int = Field(ge=0, lt=10**9)
    base_model: str | None = None
    model_path: str | None = None


class ModelBody(_Body):
    """Asks about a model."""

    model_id: str


class WeightsBody(_Body):
    """Asks about saved weights."""

    tinker_path: str
    weights_access_token: None = None


class FutureBody(_Body):
    """Asks for the result of a request, or to cancel it."""

    request_id: str
    allow_metadata_only: bool = False
    model_id: str | None = None


# --- calls of a model, which its engine answers ---


class _Adam(_Body):
    learning_rate: float = Field(ge=0)
    beta1: float = Field(ge=0, lt=1)
    beta2: float = Field(ge=0, lt=1)
    eps: float = Field(gt=0)
    weight_decay: float = Field(default=0.0, ge=0)
    grad_clip_norm: float = Field(default=0.0, ge=0)


class OptimStepBody(_Body):
    """Applies the accumulated gradient."""

    model_id: str
    seq_id: int = Field(ge=1)
    adam_params: _Adam


class SaveWeightsBody(_Body):
    """Writes weights and optimizer."""

    model_id: str
    seq_id: int = Field(ge=1)
    path: str | None = None
    overwrite: bool = False
    ttl_seconds: int | None = None
    user_metadata: dict[str, str] | None = None


class SaveForSamplerBody(_Body):
    """Makes the sampler use the current weights, and writes them where they get a name."""

    model_id: str
    seq_id: int = Field(ge=1)
    path: str | None = None
    sampling_session_seq_id: int | None = None
    kind: Literal["snapshot", "inflight"] = "snapshot"
    ttl_seconds: int | None = None
    user_metadata: dict[str, str] | None = None


class LoadWeightsBody(_Body):
    """Restores a checkpoint in an open model."""

    model_id: str
    seq_id: int = Field(ge=1)
    path: str
    optimizer: bool


class SamplingWishes(BaseModel):
    """How to sample."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    max_tokens: int | None = Field(default=None, ge=1)
    seed: int | None = Field(default=None, ge=0)
    stop: str | list[str] | list[int] | None = None
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0


class SampleBody(_Body):
    """Samples; what cannot be honoured is taken at the value that asks for nothing."""

    sampling_session_id: str = Field(pattern=r"^[A-Za-z0-9_.-]+:(live|[0-9]+):[A-Za-z0-9-]+$")
    seq_id: int = Field(ge=0)
    prompt: dict[str, Any]
    sampling_params: SamplingWishes
    num_samples: int = Field(default=1, ge=1, le=_MAX_SAMPLES)
    prompt_logprobs: bool | None = None
    topk_prompt_logprobs: Literal[0] = 0
    topk_sample_logprobs: Literal[0] = 0
    prompt_alt_tokens_k: Literal[0] = 0
    record_stability_info: Literal[False] | None = None
    prompt_logprobs_last_n: None = None
    target_prompt_logprobs: None = None
