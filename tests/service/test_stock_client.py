"""The stock client, unmodified, against `pilotage serve`: its SDK and its command line.

It lives in an environment of its own (it brings other versions than the agents need): the interpreter is this
one if it has the package, or else the one that PILOTAGE_STOCK_PYTHON names.
"""

import datetime
import importlib.util
import ipaddress
import json
import os
import re
import subprocess
import sys
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROCESS = Path(__file__).with_name("stock_process.py")
PILOTAGE = str(Path(sys.executable).with_name("pilotage"))


def stock_python() -> str | None:
    if importlib.util.find_spec("cortex_training") is not None:
        return sys.executable
    return os.environ.get("PILOTAGE_STOCK_PYTHON")


pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        stock_python() is None, reason="needs the cortex-training package; see PILOTAGE_STOCK_PYTHON"
    ),
]


def serve(directory: Path, *options: str) -> tuple["subprocess.Popen[str]", str]:
    """Start `pilotage serve` on a free port with the shipped policy; returns it with its URL."""
    command = [PILOTAGE, "serve", "--models", str(ROOT / "recipes" / "demo")]
    process = subprocess.Popen(
        [*command, "--data", str(directory), "--port", "0", *options],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert process.stdout is not None
    line = process.stdout.readline()
    found = re.search(r"serving on (\S+)", line)
    assert found, line
    return process, found[1]


def stop(process: "subprocess.Popen[str]") -> None:
    process.terminate()
    assert process.wait(30) == 0


class Stock:
    """The stock client in a process of its own."""

    def __init__(self) -> None:
        python = stock_python()
        assert python is not None
        self.process = subprocess.Popen(
            [python, str(PROCESS)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"CORTEX_TRAINING_DISABLE_TELEMETRY": "1", "OMP_NUM_THREADS": "1"},
        )

    def run(self, call: str, *words: str, **environment: str) -> str:
        """Return what a command or a flow printed; AssertionError with what it complained of."""
        request = {"call": call, "words": words, "environment": environment}
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        answer = json.loads(self.process.stdout.readline())
        assert answer["code"] == 0, answer["error"][-3000:]
        return answer["output"]


@pytest.fixture(scope="module")
def stock() -> Generator[Stock]:
    started = Stock()
    yield started
    assert started.process.stdin is not None
    started.process.stdin.close()
    assert started.process.wait(30) == 0


@pytest.fixture(scope="module")
def loopback(tmp_path_factory: pytest.TempPathFactory) -> Generator[str]:
    process, url = serve(tmp_path_factory.mktemp("service"), "--no-auth")
    yield url
    stop(process)


@pytest.fixture(scope="module")
def seen(stock: Stock, loopback: str) -> dict[str, Any]:
    """What the SDK's flow returned."""
    return json.loads(stock.run("flow", "sdk", loopback).splitlines()[-1])


def test_jobs_are_created_waited_for_listed_and_cancelled(seen: dict[str, Any]) -> None:
    assert seen["capacity"]["max_total_gpus"] == 8
    assert seen["running"] == "running"
    assert seen["job"] in seen["listed"]
    assert seen["cancelled"] == "cancelled"
    assert seen["free"] == 8
    assert seen["experiment"]["experiment_run_name"] == seen["job"]
    assert any("the engine is open" in (message or "") for message in seen["logs"])


def test_generate_returns_ids_and_logprobs_by_id_the_same_for_the_same_seed(seen: dict[str, Any]) -> None:
    first = seen["generated"]["results"][0]
    assert len(first["token_ids"]) == len(first["logprobs"]) <= 4
    for token, entry in zip(first["token_ids"], first["logprobs"], strict=True):
        assert entry[str(token)]["logprob"] < 0
    assert first["prompt_logprobs"][0] is None
    assert [list(entry) for entry in first["prompt_logprobs"][1:]] == [["6"], ["7"], ["8"]]
    assert seen["generated_again"] == seen["generated"]
    assert seen["from_text"]["results"][0]["finish_reason"] in ("stop", "length")
    assert "the top 5 cannot be had" in seen["top_k_logprobs"] or "422" in seen["top_k_logprobs"]


def test_training_returns_logprobs_in_the_shifted_frame_and_forward_agrees(seen: dict[str, Any]) -> None:
    rows = seen["trained"]["post_process_outputs"]["logprobs"]
    assert [i for i, value in enumerate(rows[0]) if value != 0] == [3, 4, 5, 6]
    assert [i for i, value in enumerate(rows[1]) if value != 0] == [2, 3, 4]
    assert seen["trained"]["metrics"]["trained_tokens"] == 7
    assert seen["step"]["global_steps"] == 1
    assert seen["step"]["last_lr"] == 1e-5
    # The step trained row 0 up and row 1 down, and forward scores under the loaded, trained weights.
    assert sum(seen["forward"][0][3:7]) > sum(rows[0])
    assert sum(seen["forward"][1][2:5]) < sum(rows[1])


def test_what_is_unsafe_is_refused_with_the_safe_way(seen: dict[str, Any]) -> None:
    assert "x-on-policy" in seen["without_old"]
    assert seen["on_policy"] is not None
    assert "entropy_coeff" in seen["no_effect"]
    assert "no gradient was accumulated" in seen["step_without_gradient"]


def test_weights_are_synced_saved_loaded_exported_and_deleted(seen: dict[str, Any]) -> None:
    assert seen["synced"] == {"weights_version": 1}
    assert seen["reset"]["reset"] is True
    kinds = [entry["checkpoint_type"] for entry in seen["checkpoints"]]
    assert kinds == ["resumable", "weights-only"]
    names = [file["filename"] for file in seen["exported"]["files"]]
    assert "model.safetensors" in names
    assert seen["loaded"]["checkpoint_id"] == seen["saved"]["checkpoint_id"]
    assert seen["left"] == [seen["weights_only"]["checkpoint_id"]]


def test_a_stream_gives_every_result_once_and_then_its_end(seen: dict[str, Any]) -> None:
    *results, done = seen["stream"]
    assert sorted(event["index"] for event in results) == [0, 1]
    assert done == {"type": "done", "completed": 2, "failed": 0}


def test_the_command_line_works_over_a_base_url(stock: Stock, loopback: str, tmp_path: Path) -> None:
    def command(*words: str) -> Any:
        output = stock.run("command", "--base-url", loopback, "--database", "CORTEX_TRAINING_DB", *words)
        return json.loads(output[output.index("{") :]) if "{" in output else output

    training = {
        "optimizer": {"name": "AdamW", "lr": 1e-3},
        "max_seq_len": 64,
        "train_batch_size": 1,
        "n_gpus": 1,
    }
    body = {
        "sub_job_configs": [
            {"job_type": "training", "model_name": "policy", "training_config": training},
            {
                "job_type": "sampling",
                "model_name": "policy",
                "inference_config": {"max_seq_len": 64, "n_gpus": 1},
            },
        ]
    }
    path = tmp_path / "rl.json"
    path.write_text(json.dumps(body))
    job = command("--poll-interval", "0.1", "submit", str(path), "--wait")["job_id"]
    assert command("get", job)["status"] == "running"
    assert command("wait", job)["status"] == "running"
    assert command("capacity", "--hardware", "H200")["in_use_gpus"] == 2
    assert job in [entry["job_id"] for entry in command("list", "--status", "running")["jobs"]]
    prompts = tmp_path / "prompts.json"
    prompts.write_text(json.dumps({"prompts": [[5, 6, 7]], "sampling_params": {"max_tokens": 2}}))
    generated = command("--job", job, "generate", str(prompts))
    assert len(generated["result"]["results"][0]["token_ids"]) <= 2
    rows = tmp_path / "rows.json"
    rows.write_text(json.dumps({"payload": {"input_ids": [[5, 6, 7, 8]], "labels": "next_token"}}))
    trained = command("--job", job, "fwd-bwd", str(rows))
    assert trained["result"]["avg_loss"] > 0
    assert command("--job", job, "step", "--lr", "0.001")["result"]["global_steps"] == 1
    assert command("checkpoints", job) == {"checkpoints": []}
    assert command("cancel", job)["cancelled"] is True


def test_arctic_platforms_client_trains_samples_syncs_and_saves(loopback: str) -> None:
    if not _has_arctic():
        pytest.skip("needs the arctic-platform package beside the stock client")
    python = stock_python()
    assert python is not None
    flow = [python, str(PROCESS.with_name("arctic_flow.py")), loopback]
    done = subprocess.run(
        flow, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"}, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    seen = json.loads(done.stdout.splitlines()[-1])
    assert seen["logprobs"] == [2, 8]
    assert seen["step"]["global_steps"] == 1
    assert seen["synced"] == {"weights_version": 1}
    assert seen["generated"][0]["weights_versions"] == [1] * len(seen["generated"][0]["token_ids"])
    assert seen["saved"]["checkpoint_type"] == "resumable"
    assert seen["reset"]["reset"] is True
    # Its transport for Cortex has neither; no request reaches the service.
    assert seen["fwd_no_grad"] == "NotImplementedError: cortex has no forward"
    assert seen["load_checkpoint"] == "NotImplementedError: cortex has no load-checkpoint"


def _has_arctic() -> bool:
    python = stock_python()
    assert python is not None
    look = "import importlib.util, sys; sys.exit(importlib.util.find_spec('arctic_platform') is None)"
    found = subprocess.run([python, "-c", look], capture_output=True, check=False)
    return found.returncode == 0


def test_a_bearer_token_over_verified_tls_is_let_in_and_a_wrong_one_is_not(
    stock: Stock, tmp_path: Path
) -> None:
    certificate, key = _self_signed(tmp_path)
    data = tmp_path / "service"
    token = subprocess.run(
        [PILOTAGE, "token", "create", "ann", "--data", str(data)], capture_output=True, text=True, check=True
    ).stdout.strip()
    process, url = serve(data, "--host", "127.0.0.1", "--tls-cert", str(certificate), "--tls-key", str(key))
    try:
        host = url.removeprefix("https://").replace("127.0.0.1", "localhost")
        good = stock.run("flow", "pat", host, token, REQUESTS_CA_BUNDLE=str(certificate))
        assert json.loads(good.splitlines()[-1])["cancelled"] == "cancelled"
        with pytest.raises(AssertionError, match="401"):
            stock.run("flow", "pat", host, "plt_wrong", REQUESTS_CA_BUNDLE=str(certificate))
        with pytest.raises(AssertionError, match="CERTIFICATE_VERIFY_FAILED"):
            stock.run("flow", "pat", host, token)
    finally:
        stop(process)
    assert not [p for p in data.rglob("*") if p.is_file() and token.encode() in p.read_bytes()]


def _self_signed(directory: Path) -> tuple[Path, Path]:
    """Write a certificate for localhost that is its own CA."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import NameOID

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "localhost")])
    now = datetime.datetime.now(datetime.UTC)
    addresses = x509.SubjectAlternativeName(
        [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
    )
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(minutes=5))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(addresses, critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    paths = directory / "cert.pem", directory / "key.pem"
    paths[0].write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    paths[1].write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
    )
    return paths
