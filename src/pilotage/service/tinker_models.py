"""Tinker's words for jobs: names of models, and the jobs that stand for them."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from pilotage.service.jobs import Job
from pilotage.service.refusals import Refusal
from pilotage.service.tinker_bodies import LoraBody
from pilotage.wire.core import ErrorCode
from pilotage.wire.jobs import CreateJobBody

LEASE_S = 180.0
"""The SDK sends a heartbeat every 10 s, and warns its user after two minutes without one."""
_SESSION = re.compile(r"[A-Za-z0-9-]{1,64}")
_MODEL = re.compile(r"([A-Za-z0-9-]{1,64}):(train|sample):([0-9]{1,9})")
_MAX_CONTEXT_TOKENS = 32_768
_LORA_ALPHA = 32
"""For every rank."""
_TARGETS = {
    "train_attn": r".*\.(self_attn|linear_attn)\.\w*proj\w*",
    "train_mlp": r".*\.mlp\.(.+\.)?\w*proj",
    "train_unembed": r"(.+\.)?lm_head",
}
"""Which layers each switch of a lora_config means, by the names that most families give them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TinkerTerms:
    """What a service gives to callers of the Tinker wire, who cannot say."""

    training_gpus: int = 1
    """Of a model's trainer."""
    sampling_gpus: int = 1
    """Of a sampler."""
    adapts_unembed: bool = True
    """Whether an engine puts adapters on the output projection too."""


def model_id_of(session_id: str, kind: str, number: int) -> str:
    """Return the id of a session's model, as the SDK makes it too.

    Raises:
        Refusal: that is no session's id.
    """
    if not _SESSION.fullmatch(session_id):
        raise Refusal(ErrorCode.INVALID, "that is no session id", path="session_id")
    return f"{session_id}:{kind}:{number}"


def job_id_of(model_id: str) -> str:
    """Return the id of a model's job.

    Raises:
        Refusal: that is no model's id.
    """
    if not _MODEL.fullmatch(model_id):
        raise Refusal(ErrorCode.NOT_FOUND, f"no model {model_id[:200]!r} here", path="model_id")
    return model_id.replace(":", ".")


def model_of(job: Job) -> str:
    """Return the id of a job's model."""
    return job.id.replace(".", ":")


def job_body(
    models: Mapping[str, Path],
    terms: TinkerTerms,
    name: str,
    *,
    adapter: Mapping[str, Any] | None = None,
    seed: int | None = None,
    source: Mapping[str, str] | None = None,
    trains: bool = True,
    with_optimizer: bool = True,
) -> CreateJobBody:
    """Return the job of a model, or of a sampler alone.

    Args:
        models: name -> directory of those that there are.
        seed: of the adapter's first weights.
        source: checkpoint that it starts from.

    Raises:
        Refusal: there is no model of that name.
    """
    if name not in models:
        known = ", ".join(models) or "none"
        raise Refusal(ErrorCode.NOT_FOUND, f"no model {name!r} here; there are {known}", path="base_model")
    shared = {"max_seq_len": context_tokens(models[name]), "peft_config": adapter}
    training = {
        "optimizer": {"lr": 0.0},
        "train_batch_size": 1,
        "n_gpus": terms.training_gpus,
        "load_optimizer_states": with_optimizer,
    }
    parts: list[dict[str, Any]] = [
        {"job_type": "sampling", "inference_config": {"n_gpus": terms.sampling_gpus} | shared}
    ]
    if trains:
        parts.insert(0, {"job_type": "training", "training_config": training | shared, "seed": seed})
    same = {"model_name": name, "source_checkpoint_info": source}
    content = {
        "sub_job_configs": [part | same for part in parts],
        "comment": "tinker",
        "idle_timeout_seconds": 0,  # a session lives as long as its heartbeats, however seldom it calls
        "x-pilotage": {"lease_s": LEASE_S},
    }
    return CreateJobBody.model_validate(content)


def adapter_asked(lora: LoraBody, *, adapts_unembed: bool) -> dict[str, Any]:
    """Return the adapter that a lora_config asks for.

    Args:
        adapts_unembed: see `TinkerTerms`; without, the output projection stays as it is.

    Raises:
        Refusal: nothing would be trained.
    """
    wanted = {name for name in _TARGETS if getattr(lora, name)}
    if not adapts_unembed:
        wanted.discard("train_unembed")
    if not wanted:
        raise Refusal(
            ErrorCode.INVALID, "a lora_config trains some layers; this one none", path="lora_config"
        )
    targets = "|".join(pattern for name, pattern in _TARGETS.items() if name in wanted)
    if wanted == {"train_attn", "train_mlp"}:
        targets = "all-linear"
    return {"peft_type": "Lora", "target_modules": targets, "r": lora.rank, "lora_alpha": _LORA_ALPHA}


def adapter_of(job: Job) -> dict[str, Any] | None:
    """Return the adapter that a job trains, as a body gives it."""
    return None if job.body.adapter is None else job.body.adapter.model_dump(mode="json")


def adapter_info(job: Job) -> dict[str, Any]:
    """Return what the wire says of the adapter that a job trains."""
    adapter = job.body.adapter
    return {"is_lora": adapter is not None, "lora_rank": None if adapter is None else adapter.r}


def context_tokens(model_dir: Path) -> int:
    """Return the longest context of a model's jobs: its own, within a bound."""
    config = orjson.loads((model_dir / "config.json").read_bytes())
    return min(int(config.get("max_position_embeddings", _MAX_CONTEXT_TOKENS)), _MAX_CONTEXT_TOKENS)
