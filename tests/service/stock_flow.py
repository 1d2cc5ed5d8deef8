"""The stock client's own flow, run by an interpreter that has the `cortex-training` package, unmodified.

It returns one object that JSON can hold: what each call returned, for the test to judge.
"""

import time
from typing import Any

import torch
from cortex_training import CortexTrainingClient, SubJobConfig, wire  # pyright: ignore

MODEL, CONTEXT = "policy", 256


def connect(arguments: list[str]) -> Any:
    kind, *rest = arguments
    if kind == "sdk":
        return CortexTrainingClient(rest[0], "CORTEX_TRAINING_DB", "PUBLIC", poll_interval=0.1)
    return CortexTrainingClient.from_pat(
        host=rest[0],
        pat=rest[1],
        database="CORTEX_TRAINING_DB",
        schema="PUBLIC",
        poll_interval=0.1,
        max_retries=1,
    )


def batch(**config: Any) -> bytes:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(5, 50, (2, 8), generator=generator)
    attention = torch.ones(2, 8, dtype=torch.long)
    ids[1, 6:], attention[1, 6:] = 0, 0
    mask = torch.zeros(2, 8)
    mask[0, 3:7], mask[1, 2:5] = 1, 1
    kwargs = {"input_ids": ids, "attention_mask": attention, "position_ids": torch.arange(8).repeat(2, 1)}
    context: dict[str, Any] = {
        "input_ids": ids,
        "advantages": mask * torch.tensor([[1.0], [-1.0]]),
        "loss_mask": mask.bool(),
    }
    if "x-on-policy" not in config and "without_old" not in config:
        context["old_log_probs_shifted"] = torch.full((2, 8), -4.0) * mask
    config.pop("without_old", None)
    processing = {"loss_fn": "grpo", "config": {"eps_clip": 0.2, **config}, "post": ["compute_logprobs"]}
    return wire.dumps(
        {"args": (), "kwargs": kwargs, "context": context, "processing": processing},
        metadata={"response_options": {"format": "dssst1", "delivery": "chunked"}},
    )


def failure(call: Any) -> str:
    try:
        call()
    except Exception as error:  # noqa: BLE001 - the test reads what the client made of it
        return f"{type(error).__name__}: {error}"
    return "no error"


def flow(client: Any) -> dict[str, Any]:
    seen: dict[str, Any] = {"capacity": client.get_capacity("H200")}
    optimizer = {"name": "AdamW", "lr": 1e-3}
    trainer = SubJobConfig.training_job(
        MODEL, optimizer=optimizer, max_seq_len=CONTEXT, train_batch_size=2, n_gpus=1
    )
    job = client.create_job([trainer, SubJobConfig.sampling_job(MODEL, max_seq_len=CONTEXT, n_gpus=1)])
    seen["job"] = job
    seen["running"] = client.wait_for_job(job)["status"]
    seen["listed"] = [entry["job_id"] for entry in client.list_jobs("running")]
    training, sampling = f"{job}:training:0", f"{job}:sampling:0"

    def poll(request: str) -> Any:
        return client.poll_request(job, request)

    params = {"max_tokens": 4, "temperature": 1.0, "seed": 1, "logprobs": 1, "prompt_logprobs": 1}
    seen["generated"] = poll(client.generate(job, [[5, 6, 7, 8], [9, 10]], params, routing_key="a"))
    seen["generated_again"] = poll(client.generate(job, [[5, 6, 7, 8], [9, 10]], params))
    seen["from_text"] = poll(client.generate(job, ["open the file"], {"max_tokens": 3}))
    seen["top_k_logprobs"] = failure(lambda: client.generate(job, [[5]], {"logprobs": 5}))
    trained = poll(client.forward_backward(job, batch()))
    trained["post_process_outputs"] = {k: v.tolist() for k, v in trained["post_process_outputs"].items()}
    seen["trained"] = trained
    seen["without_old"] = failure(lambda: poll(client.forward_backward(job, batch(without_old=True))))
    seen["on_policy"] = poll(client.forward_backward(job, batch(**{"x-on-policy": True})))["avg_loss"]
    seen["no_effect"] = failure(lambda: poll(client.forward_backward(job, batch(entropy_coeff=0.1))))
    seen["step"] = poll(client.step(job, 1e-5))
    seen["step_without_gradient"] = failure(lambda: poll(client.step(job)))
    seen["synced"] = poll(client.weight_sync(job, training, [sampling], weight_format="hf"))
    seen["reset"] = client.reset_prefix_cache(job, sub_job_id=sampling)
    seen["saved"] = poll(client.save(job))
    seen["weights_only"] = poll(client.save(job, checkpoint_type="weights-only"))
    seen["checkpoints"] = client.list_checkpoints(job)
    checkpoint = seen["saved"]["checkpoint_id"]
    seen["exported"] = client.export_checkpoint(job, checkpoint)
    seen["loaded"] = poll(client.load(job, checkpoint, target_sub_job_id=training))
    stream = client.generate_stream(job, [[5, 6, 7], [8]], {"max_tokens": 3})
    events: list[Any] = []
    while not any(event["type"] == "done" for event in events):
        events += client.get_request_status(job, stream["request_id"], max_events=1)["events"]
        time.sleep(0.02)
    seen["stream"] = events
    forward = client.forward(job, batch(), sub_job_id=training)
    seen["forward"] = poll(forward["request_id"])["post_process_outputs"]["logprobs"].tolist()
    seen["cancelled_request"] = client.cancel_request(job, forward["request_id"])
    seen["logs"] = [entry.get("msg") for entry in client.stream_logs(job, sub_job_id=training, follow=False)]
    seen["experiment"] = client.get_experiment_run(job)
    client.delete_checkpoint(job, checkpoint)
    seen["left"] = [entry["checkpoint_id"] for entry in client.list_checkpoints(job)]
    client.cancel_job(job)
    seen["cancelled"] = client.get_job(job)["status"]
    seen["free"] = client.get_capacity()["available_gpus"]
    return seen
