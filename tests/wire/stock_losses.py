"""The public package's losses, in a process of their own: its environment has torch, ours need not.

    python stock_losses.py < CASES > RESULTS

CASES is a JSON list of {"rows": [{"logprobs", "old", "advantages", "reference", "mask"}], "config"}, in the
frame of the wire, config in the stock names; RESULTS a list of {"loss", "gradient"} by row. The module is
loaded from its file: importing its package asks for a GPU stack.
"""

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any


def functional() -> Any:
    package = importlib.util.find_spec("arctic_platform")
    assert package is not None
    assert package.submodule_search_locations is not None
    path = Path(package.submodule_search_locations[0]) / "rl" / "processors" / "functional.py"
    spec = importlib.util.spec_from_file_location("functional", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def evaluate(module: Any, case: dict[str, Any]) -> dict[str, Any]:
    import torch

    rows, config = case["rows"], dict(case["config"])
    width = max(len(row["mask"]) for row in rows)

    def padded(key: str) -> Any:
        values = [row[key] + [0] * (width - len(row[key])) for row in rows]
        return torch.tensor(values, dtype=torch.bool if key == "mask" else torch.float64)

    logprobs, mask = padded("logprobs").requires_grad_(), padded("mask")
    old = logprobs.detach() if config.pop("x-on-policy", False) else padded("old")
    counts = {
        key: config.pop(key) for key in ("dp_size", "batch_num_tokens", "global_batch_size") if key in config
    }
    scale = {"loss_agg_mode": config.pop("loss_agg_mode", "token-mean"), **counts}
    kl_coef = config.pop("kl_loss_coef", 0.001) if config.pop("use_kl_loss", False) else 0.0
    name = "cispo_actor_loss_fn" if config.pop("use_cispo_loss", False) else "ppo_actor_loss_fn"
    loss, _ = getattr(module, name)(
        logprobs=logprobs,
        proximal_logprobs=old,
        old_logprobs=old,
        advantages=padded("advantages"),
        loss_mask=mask,
        **{"eps_clip": 0.2, **config},
        **scale,
    )
    if kl_coef:
        kl = module.kl_penalty(logprobs, padded("reference"), "low_var_kl")
        loss = loss + kl_coef * module.agg_loss(kl, mask, **scale)
    loss.backward()
    assert logprobs.grad is not None
    gradient = [grad[: len(row["mask"])].tolist() for grad, row in zip(logprobs.grad, rows, strict=True)]
    return {"loss": loss.item(), "gradient": gradient}


if __name__ == "__main__":
    module = functional()
    json.dump([evaluate(module, case) for case in json.load(sys.stdin)], sys.stdout)
