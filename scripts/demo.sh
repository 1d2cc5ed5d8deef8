#!/usr/bin/env bash
# Run the demo: make its tasks where they are missing, train, report.
#
#   scripts/demo.sh PILOTAGE_COMMAND SEED
#
# An unfinished run of that seed is taken up where it stopped; a finished one is kept, and a new run gets
# the next free number.
set -euo pipefail
cd "$(dirname "$0")/.."
pilotage=${1:?usage: scripts/demo.sh PILOTAGE_COMMAND SEED}
seed=${2:?usage: scripts/demo.sh PILOTAGE_COMMAND SEED}

is_finished() { grep -qs '"event":"finished"' "runs/$1/events.jsonl"; }

name=demo-seed$seed
number=2
while is_finished "$name"; do
    name=demo-seed$seed-$number
    number=$((number + 1))
done
resume=()
if [ -e "runs/$name/config.toml" ]; then
    resume=(--resume)
fi

[ -d tasks/demo ] || "$pilotage" data demo --out tasks/demo
"$pilotage" train recipes/demo.toml "loop.seed=$seed" --run-name "$name" "${resume[@]}"
"$pilotage" report "runs/$name"
