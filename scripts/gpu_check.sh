#!/usr/bin/env bash
# Everything that only a GPU can show, in under ten minutes: the embedded engine on CUDA, then Ray, FSDP2 and
# vLLM on one GPU: four steps of a small Qwen3 with random weights, each published and probed, with the gap
# between sampler and trainer and tokens per second. Installs and downloads nothing.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${VENV:-.venv}/bin/python
needs="gpu_check: needs an environment with pilotage[gpu,dev] (not beside pilotage[agents]); VENV names it"
[[ -x $python ]] || { echo "$needs: $python does not exist" >&2; exit 1; }
missing=$("$python" - <<'PY'
from importlib.util import find_spec

print(*(name for name in ("torch", "ray", "vllm", "peft", "pytest") if find_spec(name) is None))
PY
)
[[ -z $missing ]] || { echo "$needs; missing: $missing" >&2; exit 1; }
if ! "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
    echo "gpu_check: no CUDA device that torch can use" >&2
    exit 1
fi
timeout 600 "$python" -m pytest -m gpu -s tests/engine "$@"
