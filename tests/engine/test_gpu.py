"""What only a GPU can show; `scripts/gpu_check.sh` runs these."""

from pathlib import Path

import numpy as np
import pytest
import torch
from tests.engine.models import STOP, module_logprobs
from tests.engine.test_trainer import batch

from pilotage.engine import LocalEngine
from pilotage.types import AdamParams, LossConfig, SamplingParams, token_ids

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


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
