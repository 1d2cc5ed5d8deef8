#!/usr/bin/env bash
# Train Qwen3.5-4B by recipes/harbor.toml. Takes the variables of the Arctic launch blocks, which
# docs/reference.md lists, and overrides, theirs or ours:
#
#   RUN_NAME=first recipes/rl/harbor/run_qwen35_4b.sh trainer.max_training_steps=100
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../../.." && pwd)
pilotage=$root/.venv/bin/pilotage
[ -x "$pilotage" ] || pilotage=pilotage
exec "$pilotage" train "$root/recipes/harbor.toml" --launch-environment "$@"
