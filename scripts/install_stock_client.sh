#!/usr/bin/env bash
# Install the public clients of Cortex Training, cortex-training and arctic-platform, unmodified, into an
# environment of their own for the tests: they bring versions that the agents' packages do not take.
#
#   scripts/install_stock_client.sh VENV_DIR STOCK_VENV_DIR
set -euo pipefail
cd "$(dirname "$0")/.."
venv=${1:?usage: scripts/install_stock_client.sh VENV_DIR STOCK_VENV_DIR}
stock=${2:?usage: scripts/install_stock_client.sh VENV_DIR STOCK_VENV_DIR}
[ -e "$stock/.installed" ] && exit
"$venv/bin/uv" venv --quiet --clear --python "$venv/bin/python" "$stock"
# The torch that is there already: nothing of its 3 GB is downloaded twice.
torch=$("$venv/bin/python" -c 'import importlib.metadata; print(importlib.metadata.version("torch"))')
"$venv/bin/uv" pip install --quiet --python "$stock/bin/python" cortex-training==0.0.3 "arctic-platform[cortex]==0.1.4" "torch==$torch"
touch "$stock/.installed"
