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

from pilotage.service.tinker_routes import checkpoint_of

ROOT = Path(__file__).resolve().parent.parent
TOKENIZER = ROOT / ".cache" / "tokenizers" / "qwen3"
TEMPLATE = ROOT / ".cache" / "tokenizers" / "templates" / "qwen3.jinja"
BASE, TAUGHT = "Qwen/Qwen3-4B-Instruct-2507", "Qwen/Qwen3-30B-A3B-Instruct-2507"
"""Names that the recipes know; the weights are ours."""
READ_RECIPE = """
import ast, inspect, json
from tinker_cookbook.recipes import rl_loop
found = {}
for node in ast.walk(ast.parse(inspect.getsource(rl_loop))):
    if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) in ("convo_prefix", "question_suffix"):
        exec(ast.unparse(node), found)
print(json.dumps({name: found[name] for name in ("convo_prefix", "question_suffix")}))
"""
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


def surroundings(python: str) -> tuple[list[dict[str, str]], str]:
    """Return what `rl_loop` puts before a question and behind it, read from the installed recipe."""
    printed = subprocess.run([python, "-c", READ_RECIPE], capture_output=True, text=True, check=True).stdout
    found = json.loads(printed)
    return found["convo_prefix"], found["question_suffix"]


def write_datasets(directory: Path, before: list[dict[str, str]], behind: str) -> None:
    """Write conversations that answer with any digit, and questions whose answer is 3."""
    chance = random.Random(0)

    def question() -> str:
        return f"How many is {chance.choice('abc')}?"

    def answer() -> dict[str, str]:
        return {"role": "assistant", "content": f"\\boxed{{{chance.randint(2, 5)}}}"}

    talks = [
        {"messages": [*before, {"role": "user", "content": question() + behind}, answer()]}
        for _ in range(800)
    ]
    questions = [{"question": question(), "answer": "It is three.\n#### 3"} for _ in range(800)]
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
    """Return the directory of the model that a recipe saved last, its adapter merged."""
    last = json.loads((log / "checkpoints.jsonl").read_text().splitlines()[-1])
    model, checkpoint_id = checkpoint_of(last["sampler_path"])
    return data / "jobs" / model.replace(":", ".") / "checkpoints" / checkpoint_id


def main() -> None:
    """Run both."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("python", help="of an environment with tinker-cookbook")
    parser.add_argument("--sl-steps", type=int, default=100)
    parser.add_argument("--rl-steps", type=int, default=15)
    arguments = parser.parse_args()
    if not TOKENIZER.is_dir():
        sys.exit("no tokenizer yet; run `python scripts/fetch_test_tokenizers.py` first")
    with tempfile.TemporaryDirectory() as scratch:
        work = Path(scratch)
        write_model(work / BASE)
        write_datasets(work, *surroundings(arguments.python))
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
                f"model_name={BASE}", "batch_size=8", "max_length=256", "learning_rate=0.003",
                "train_on_what=last_assistant_message", steps,
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
