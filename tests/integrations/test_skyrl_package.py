"""SkyRL's own code takes what comes from here, in a Python that has skyrl 0.4.0 beside Pilotage."""

import dataclasses
import json
import os
import subprocess
from pathlib import Path

import pytest
from tests.algorithms.strategies import make_rollout, make_turn
from tests.integrations.rig import Finished, Settings, batch_of
from tests.rollouts.rig import write_task

from pilotage.integrations.skyrl import SkyRLGenerator
from pilotage.types import Outcome

PYTHON = os.environ.get("SKYRL_PYTHON")
ROOT = Path(__file__).resolve().parents[2]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        PYTHON is None, reason="set SKYRL_PYTHON to a Python that has skyrl 0.4.0 and Pilotage"
    ),
]

VALIDATE = """
import json, sys
import numpy as np, torch
from skyrl.backends.skyrl_train.utils.ppo_utils import compute_grpo_outcome_advantage
from skyrl.train.dataset.preprocess import (
    compute_prompt_mini_batch_boundaries, convert_prompts_responses_to_batch_tensors,
)
from skyrl.train.generators.base import TrajectoryID
from skyrl.train.generators.utils import concatenate_generator_outputs, get_metrics_from_generator_output
from skyrl.train.utils.trainer_utils import validate_generator_output

output = json.load(sys.stdin)
output["trajectory_ids"] = [TrajectoryID(**identity) for identity in output["trajectory_ids"]]
validate_generator_output(6, output, step_wise=True)
whole = concatenate_generator_outputs([output], step_wise=True)
uids = [identity.instance_id for identity in whole["trajectory_ids"]]
boundaries = compute_prompt_mini_batch_boundaries(uids, 1, 3, True, 2)
tensors = convert_prompts_responses_to_batch_tensors(
    0, whole["prompt_token_ids"], whole["response_ids"], [[r] * len(i) for r, i in
    zip(whole["rewards"], whole["response_ids"])], whole["loss_masks"], whole["rollout_logprobs"], None, None
)
last = np.array(whole["is_last_step"])
rewards = torch.tensor(whole["rewards"])[last][:, None]
advantages, _ = compute_grpo_outcome_advantage(
    token_level_rewards=rewards, response_mask=torch.ones_like(rewards),
    index=np.array(uids)[last], grpo_norm_by_std=False,
)
print(json.dumps({
    "boundaries": boundaries,
    "rows": list(tensors[0].shape),
    "trained": int(tensors[4].sum()),
    "advantages": advantages[:, 0].tolist(),
    "metrics": {k: v for k, v in whole["rollout_metrics"].items() if k.startswith("ledger/")},
}))
"""

SAMPLE = """
import asyncio, json
import numpy as np
from aiohttp import web
from skyrl.backends.skyrl_train.inference_servers.remote_inference_client import RemoteInferenceClient
from pilotage.integrations.skyrl import SkyRLSampler
from pilotage.types import SamplingParams

class Tokenizer:
    def batch_decode(self, ids):
        return ["" for _ in ids]

async def main():
    asked = []

    async def generate(request):
        asked.append((dict(request.headers).get("X-Session-ID"), await request.json()))
        content = [{"logprob": -0.5, "token": "token_id:21"}, {"logprob": -1.5, "token": "token_id:3"}]
        choice = {"token_ids": [21, 3], "finish_reason": "stop", "logprobs": {"content": content}}
        return web.json_response({"choices": [choice]})

    app = web.Application()
    app.router.add_post("/inference/v1/generate", generate)
    server = web.AppRunner(app)
    await server.setup()
    site = web.TCPSite(server, "127.0.0.1", 0)
    await site.start()
    url = "http://127.0.0.1:%d" % site._server.sockets[0].getsockname()[1]
    client = RemoteInferenceClient(
        proxy_url=url, server_urls=[url], data_parallel_size=1, model_name="policy", tokenizer=Tokenizer()
    )
    client.increment_weight_version()
    sampler = SkyRLSampler(client, max_context_tokens=64, stop_token_ids=(3,))
    completion = await sampler.sample(
        np.array([11, 12], np.int32), SamplingParams(max_tokens=8), session_id="rollout-1", turn_index=0
    )
    await client.aclose()
    await server.cleanup()
    print(json.dumps({
        "ids": completion.token_ids.tolist(), "logprobs": completion.logprobs.tolist(),
        "versions": completion.weights_versions.tolist(), "finish": completion.finish_reason, "asked": asked,
    }))

asyncio.run(main())
"""


EXPERIMENT = """
import asyncio, importlib.util, json, sys
from pathlib import Path
from skyrl.backends.skyrl_train.inference_servers.engine_utils import get_sampling_params_for_backend
from skyrl.train.config import SkyRLTrainConfig
from skyrl.train.generators.utils import prepare_generator_input
from skyrl.train.utils.trainer_utils import validate_generator_output
from pilotage.recipes import load_recipe

given = json.load(sys.stdin)
spec = importlib.util.spec_from_file_location("train", given["script"])
script = importlib.util.module_from_spec(spec)
spec.loader.exec_module(script)

async def main():
    cfg = SkyRLTrainConfig.from_cli_overrides([*script.NEEDED, "trainer.export_path=" + given["directory"]])
    experiment = script.Experiment.__new__(script.Experiment)  # its own constructor wants GPUs
    experiment.recipe = load_recipe(Path(given["recipe"]))
    generator = experiment.get_generator(cfg, None, None)
    row = {"prompt": [{"role": "user", "content": "x"}], "env_class": None, "uid": "7"}
    row["env_extras"] = {"task_path": given["task"]}
    params = get_sampling_params_for_backend("vllm", cfg.generator.sampling_params)
    batch, uids = prepare_generator_input([row], 2, params, "harbor", "train", 1)
    async with experiment.rollouts():
        output = await generator.generate(batch)
    validate_generator_output(2, output, step_wise=True)
    ids = [identity.to_string() for identity in output["trajectory_ids"]]
    print(json.dumps({"ids": ids, "rewards": output["rewards"], "stop_reasons": output["stop_reasons"]}))

asyncio.run(main())
"""

RECIPE = """
name = "skyrl"
[policy]
model = "{model}"
[rollouts]
agent = "oracle"
workers = 0
"""


def run_there(program: str, given: object = None) -> dict[str, object]:
    """Run a program with SkyRL's Python; returns the object in its last line."""
    assert PYTHON is not None
    done = subprocess.run(
        [PYTHON, "-W", "ignore", "-c", program],
        input=json.dumps(given, default=dataclasses.asdict),
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


async def test_skyrls_trainer_takes_the_batch_and_computes_the_advantages_that_it_means(
    tmp_path: Path,
) -> None:
    branched = (make_turn(None, [1], [2, 3]), make_turn(0, [4], [5]), make_turn(0, [6], [7]))
    failed = make_rollout("failed", reward=None, outcome=Outcome.SAMPLER_ERROR)
    rollouts = {
        "0": [make_rollout("a", *branched, reward=2.0), make_rollout("b", reward=1.0)],
        "1": [make_rollout("c", reward=3.0), failed],
        "2": [failed, failed],
    }
    tasks = {uid: write_task(tmp_path, f"task-{uid}").path for uid in rollouts}

    output = await SkyRLGenerator(Finished(rollouts=rollouts), config=Settings()).generate(batch_of(tasks))
    found = run_there(VALIDATE, output)

    # Rows: two branches and one sibling; one without a sibling, masked; one that holds a place.
    assert found["rows"] == [5, 5]  # the longest branch has five tokens
    assert found["boundaries"] == [[0, 3], [3, 4], [4, 5]]
    assert found["trained"] == 4 + 3  # of a two, and one more in each branch; of b three
    # a - mean, b - mean; the bare reward that SkyRL gives to c meets a mask; nothing for the lost prompt.
    assert found["advantages"] == [0.5, -0.5, 3.0, 0.0]
    assert found["metrics"] == {
        "ledger/sampled_tokens": 4 + 3 + 3 + 3 * 3,
        "ledger/trained_tokens": 7,
        "ledger/masked_tokens": 0,
        "ledger/dropped_tokens": 3 + 9,
        "ledger/dropped_tokens/group_too_small": 3,
        "ledger/dropped_tokens/sampler_error": 9,
    }


def test_skyrls_client_sends_what_the_sampler_asks_and_brings_back_what_vllm_says() -> None:
    found = run_there(SAMPLE)

    assert (found["ids"], found["logprobs"], found["versions"]) == ([21, 3], [-0.5, -1.5], [1, 1])
    assert found["finish"] == "stop"
    assert found["asked"] == [
        [
            "rollout-1",
            {
                "model": "policy",
                "token_ids": [11, 12],
                "cache_salt": "weights-1",
                "sampling_params": {
                    "temperature": 1.0,
                    "top_p": 1.0,
                    "top_k": -1,
                    "max_tokens": 8,
                    "min_tokens": 1,
                    "logprobs": 1,
                    "stop_token_ids": [3],
                    "skip_special_tokens": False,
                },
            },
        ]
    ]


@pytest.mark.agents
def test_the_script_runs_trials_for_what_skyrl_asks(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(RECIPE.format(model=ROOT / "recipes" / "demo" / "policy"))
    given = {
        "script": str(ROOT / "recipes" / "skyrl" / "train.py"),
        "recipe": str(recipe),
        "directory": str(tmp_path),
        "task": str(write_task(tmp_path / "tasks").path),
    }

    found = run_there(EXPERIMENT, given)

    # The oracle solves the task and samples nothing: its reward counts, and there is nothing to train.
    assert found == {"ids": ["7_0", "7_1"], "rewards": [1.0, 1.0], "stop_reasons": ["completed"] * 2}
