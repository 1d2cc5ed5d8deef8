"""What only a GPU can show; `scripts/gpu_check.sh` runs these."""

from pathlib import Path

import numpy as np
import pytest
import torch
from tests.engine.models import STOP, module_logprobs
from tests.engine.test_prefix_tree import rollouts
from tests.engine.test_trainer import batch

from pilotage.engine import LocalEngine
from pilotage.engine.logprobs import batch_logprobs
from pilotage.engine.modules import load_module
from pilotage.engine.tree_layers import enable_trees
from pilotage.types import AdamParams, LossConfig, SamplingParams, token_ids

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def test_a_tree_has_the_log_probs_and_gradients_of_rows(model_dirs: dict[str, Path]) -> None:
    samples = rollouts(groups=2, size=4, prompt=200, sampled=60)
    ids, masks = [s.token_ids for s in samples], [s.loss_mask for s in samples]
    values: list[torch.Tensor] = []
    gradients: list[list[torch.Tensor]] = []
    for as_tree in (False, True):
        module = load_module(model_dirs["qwen3"], device=torch.device("cuda"))
        assert not as_tree or enable_trees(module)
        logprobs, _ = batch_logprobs(module, ids, masks, temperature=1.0, as_tree=as_tree)
        (logprobs * torch.linspace(-1, 1, logprobs.numel(), device="cuda")).sum().backward()
        values.append(logprobs.detach())
        gradients.append([p.grad for p in module.parameters() if p.grad is not None])
    torch.testing.assert_close(*values, atol=1e-4, rtol=1e-4)
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, atol=1e-3, rtol=1e-2)


async def test_sampling_training_and_publishing_on_a_gpu_agree_with_a_forward_pass(
    model_dirs: dict[str, Path],
) -> None:
    engine = await LocalEngine.open(
        model_dirs["qwen3"], max_context_tokens=256, max_batch=8, stop_token_ids=[STOP], device="cuda"
    )
    try:
        prompt, params = [1, 2, 3], SamplingParams(temperature=0.0, max_tokens=8)
        before = await engine.sample(token_ids(prompt), params, session_id="gpu", turn_index=0)
        rows = module_logprobs(model_dirs["qwen3"], [*prompt, *before.token_ids.tolist()])
        expected = rows[len(prompt) - 1 :][np.arange(before.token_ids.size), before.token_ids]
        np.testing.assert_allclose(before.logprobs, expected, atol=1e-3)

        await engine.forward_backward(batch(), LossConfig())
        await engine.step(AdamParams(learning_rate=1e-3))
        version = await engine.publish()  # compares the canary's log-probs, or raises

        after = await engine.sample(token_ids(prompt), params, session_id="gpu", turn_index=1)
        assert after.weights_versions.tolist() == [version] * after.token_ids.size
    finally:
        await engine.close()
