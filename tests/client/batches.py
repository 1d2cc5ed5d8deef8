"""Batches and job bodies for tests of the client."""

from typing import Any

import numpy as np

from pilotage.types import Sample
from pilotage.wire.jobs import CreateJobBody


def sample(name: str = "r0", *, size: int = 5, advantage: float = 1.0, first_id: int = 1) -> Sample:
    """Return a sample whose last two tokens are trained, each with `advantage`."""
    mask = np.arange(size) >= size - 2
    return Sample(
        sequence_id=name,
        group_id="g0",
        token_ids=np.arange(first_id, first_id + size, dtype=np.int32),
        loss_mask=mask,
        sampler_logprobs=np.where(mask, np.float32(-1), np.float32(0)),
        advantages=np.where(mask, np.float32(advantage), np.float32(0)),
        weights_versions=np.where(mask, np.int32(1), np.int32(-1)),
    )


def job_body(*, lease_s: float | None = 5.0, **changes: Any) -> CreateJobBody:
    """Return a job of one trainer and one sampler that stops at token 0."""
    extras: dict[str, Any] = {"engine": {"stop_token_ids": [0]}}
    if lease_s is not None:
        extras["lease_s"] = lease_s
    return CreateJobBody.model_validate(
        {
            "sub_job_configs": [
                {
                    "job_type": "training",
                    "model_name": "policy",
                    "training_config": {
                        "optimizer": {"name": "AdamW"},
                        "max_seq_len": 64,
                        "train_batch_size": 1,
                        "n_gpus": 1,
                    },
                },
                {
                    "job_type": "sampling",
                    "model_name": "policy",
                    "inference_config": {"max_seq_len": 64, "n_gpus": 1},
                },
            ],
            "x-pilotage": extras,
            **changes,
        }
    )
