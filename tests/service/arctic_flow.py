"""Arctic Platform's client for RL, unmodified: arctic_flow.py BASE_URL, run where the package is installed.

Prints one JSON object as its last line: what each operation returned, or how it failed.
"""

import json
import sys
from collections.abc import Callable
from typing import Any

import torch
from arctic_platform.client import (  # pyright: ignore
    ArcticClientConfig,
    ArcticRLClient,
    CortexConfig,
    TrainingConfig,
)


def attempt(call: Callable[[], Any]) -> Any:
    try:
        return call()
    except Exception as error:  # noqa: BLE001 - the test reads what the client made of it
        return f"{type(error).__name__}: {error}"


def flow(base_url: str) -> dict[str, Any]:
    optimizer = {"type": "AdamW", "params": {"lr": 1e-5, "betas": [0.9, 0.95]}}
    config = ArcticClientConfig(
        model_name="policy",
        max_seq_len=256,
        training_gpus=1,
        sampling_gpus=1,
        training=TrainingConfig(ds_config={"train_batch_size": 2, "optimizer": optimizer}),
        backend=CortexConfig(base_url=base_url, database="CORTEX_TRAINING_DB", schema="PUBLIC"),
    )
    ids = torch.arange(5, 21).reshape(2, 8)
    mask = torch.zeros(2, 8, dtype=torch.bool)
    mask[:, 3:7] = True
    context = {
        "input_ids": ids,
        "advantages": mask * torch.tensor([[1.0], [-1.0]]),
        "loss_mask": mask,
        "old_log_probs_shifted": torch.full((2, 8), -5.0) * mask,
    }
    batch = {
        "args": (),
        "kwargs": {"input_ids": ids, "attention_mask": torch.ones_like(ids)},
        "context": context,
    }
    processing = {"loss_fn": "grpo", "config": {"eps_clip": 0.2}, "post": ["compute_logprobs"]}
    seen: dict[str, Any] = {}
    with ArcticRLClient(config) as client:
        trained = client.fwd_bwd(batch, processing=processing)
        seen["trained"] = trained["avg_loss"]
        seen["logprobs"] = list(trained["batch"]["logprobs"].shape)
        seen["step"] = client.step(1e-5)
        seen["synced"] = client.sync_weights(weight_format="hf")
        seen["generated"] = client.generate([[5, 6, 7]], {"max_tokens": 3, "seed": 1, "temperature": 1.0})
        seen["saved"] = attempt(client.save_checkpoint)
        seen["reset"] = client.reset_prefix_cache()
        seen["fwd_no_grad"] = attempt(lambda: client.fwd_no_grad(batch))  # pyright: ignore - no types
        seen["load_checkpoint"] = attempt(lambda: client.load_checkpoint("none"))  # pyright: ignore - no types
    return seen


if __name__ == "__main__":
    sys.stdout.write("\n" + json.dumps(flow(sys.argv[1]), default=str) + "\n")
