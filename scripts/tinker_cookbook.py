"""Run two recipes of the public tinker-cookbook, unmodified, against `pilotage serve` on this machine.

    python -m venv cookbook && cookbook/bin/pip install tinker-cookbook
    python scripts/tinker_cookbook.py cookbook/bin/python

`sl_loop` teaches a tiny policy (Qwen3's architecture and tokenizer, random weights) to answer `\\boxed{...}`;
`rl_loop` then starts from what it saved, and is rewarded for the right number. The recipes name a model and
two datasets of the hub: in their working directory there are directories of these names, with our model
and a few hundred lines of our own, so that nothing is downloaded. Prints each recipe's metrics by step.

Needs the extra pilotage[local], and the tokenizer of scripts/fetch_test_tokenizers.py.
"""

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TOKENIZER = ROOT / ".cache" / "tokenizers" / "qwen3"
TEMPLATE = ROOT / ".cache" / "tokenizers" / "templates" / "qwen3.jinja"
BASE, TAUGHT = "Qwen/Qwen3-8B", "Qwen/Qwen3-32B"
"""Names that the recipes know; the weights are ours."""
FILLERS = ("one", "two", "many", "of", "an", "it", "and", "or", "in", "a", "so")
SHOWN = {
    "sl_loop": ("train_mean_nll", "train_mean_bpb", "time_total"),
    "rl_loop": ("reward/total", "time/total"),
}
CONFIGS = (
    "---\nconfigs:\n- config_name: {name}\n  data_files:\n  - split: train\n    path: train.jsonl\n---\n"
)


def write_model(directory: Path) -> None:
    """Write a random model of two layers with the official tokenizer."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    tokens = json.loads((TOKENIZER / "tokenizer.json").read_bytes())["added_tokens"]
    end = next(token["id"] for token in tokens if token["content"] == "<|im_end|>")
    config = Qwen3Config(
        vocab_size=151_936, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=512, tie_word_embeddings=True,
        eos_token_id=end,
    )  # fmt: skip
    Qwen3ForCausalLM(config).save_pretrained(directory)
    for path in TOKENIZER.iterdir():
        shutil.copy(path, directory)
    shutil.copy(TEMPLATE, directory / "chat_template.jinja")


def write_datasets(directory: Path) -> None:
    """Write conversations that answer with any digit, and questions whose answer is 3."""
    chance = random.Random(0)

    def asked() -> dict[str, str]:
        # Of many lengths, because the recipe for RL puts more words around a question.
        words = " ".join(chance.choices(FILLERS, k=chance.randint(0, 60)))
        return {"role": "user", "content": f"{words} How many is {chance.choice('abc')}?".strip()}

    def answered() -> dict[str, str]:
        return {"role": "assistant", "content": f"\\boxed{{{chance.randint(2, 5)}}}"}

    talks = [{"messages": [asked(), answered(), asked(), answered()]} for _ in range(1600)]
    questions = [
        {"question": f"How many is {chance.choice('abc')}?", "answer": "It is three.\n#### 3"}
        for _ in range(800)
    ]
    for name, config, rows in (
        ("HuggingFaceH4/no_robots", "default", talks),
        ("openai/gsm8k", "main", questions),
    ):
        target = directory / name
        target.mkdir(parents=True)
        (target / "README.md").write_text(CONFIGS.format(name=config))
        (target / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def run_recipe(python: str, work: Path, url: str, name: str, *settings: str) -> Path:
    """Run a recipe and print its metrics; returns its log directory."""
    log = work / name
    command = [
        python,
        "-m",
        f"tinker_cookbook.recipes.{name}",
        f"base_url={url}",
        f"log_path={log}",
        *settings,
    ]
    print(f"python -m tinker_cookbook.recipes.{name} {' '.join(settings)}", flush=True)
    environment = os.environ | {"TINKER_API_KEY": "tml-local", "HF_HUB_OFFLINE": "1", "TINKER_TELEMETRY": "0"}
    with (work / f"{name}.out").open("wb") as output:
        done = subprocess.run(command, cwd=work, env=environment, stdout=output, stderr=output, check=False)
    if done.returncode:
        sys.exit((work / f"{name}.out").read_text()[-3000:])
    for line in (log / "metrics.jsonl").read_text().splitlines():
        record = json.loads(line)
        figures = "  ".join(f"{key} {record[key]:.3f}" for key in SHOWN[name] if key in record)
        print(f"  step {record['step']:>2}  {figures}")
    return log


def saved_model(log: Path, data: Path) -> Path:
    """Return the directory of the weights that a recipe saved last."""
    last = json.loads((log / "checkpoints.jsonl").read_text().splitlines()[-1])
    model, kind, name = last["state_path"].removeprefix("tinker://").split("/")
    assert kind == "weights"
    return data / "jobs" / model.replace(":", ".") / "checkpoints" / name


def main() -> None:
    """Run both."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("python", help="of an environment with tinker-cookbook")
    parser.add_argument("--sl-steps", type=int, default=60)
    parser.add_argument("--rl-steps", type=int, default=15)
    arguments = parser.parse_args()
    if not TOKENIZER.is_dir():
        sys.exit("no tokenizer yet; run `python scripts/fetch_test_tokenizers.py` first")
    with tempfile.TemporaryDirectory() as scratch:
        work = Path(scratch)
        write_model(work / BASE)
        write_datasets(work)
        serve = [sys.executable, "-m", "pilotage", "serve", "--no-auth", "--models", str(work), "--port", "0"]
        service = subprocess.Popen(
            [*serve, "--data", str(work / "service")],
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"},
        )
        try:
            assert service.stdout is not None
            url = service.stdout.readline().removeprefix("serving on ").strip()
            steps = f"max_steps={arguments.sl_steps}"
            taught = run_recipe(
                arguments.python, work, url, "sl_loop",
                f"model_name={BASE}", "batch_size=16", "max_length=192", "learning_rate=0.01", steps,
            )  # fmt: skip
            shutil.copytree(saved_model(taught, work / "service"), work / TAUGHT)
            for path in (work / BASE).glob("*token*"):
                shutil.copy(path, work / TAUGHT)
            run_recipe(
                arguments.python, work, url, "rl_loop",
                f"model_name={TAUGHT}", "batch_size=8", "group_size=8", "learning_rate=0.003",
                "max_tokens=16", "loss_fn=importance_sampling", f"max_steps={arguments.rl_steps}",
            )  # fmt: skip
        finally:
            service.terminate()
            service.wait(60)


if __name__ == "__main__":
    main()
