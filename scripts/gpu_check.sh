#!/usr/bin/env bash
# Everything that only a GPU can show, in under ten minutes. Needs `make install` and a CUDA device.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${VENV:-.venv}/bin/python
if ! "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
    echo "gpu_check: no CUDA device that torch can use" >&2
    exit 1
fi
timeout 600 "$python" -m pytest -m gpu tests "$@"
