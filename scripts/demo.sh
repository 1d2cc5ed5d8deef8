#!/usr/bin/env bash
# Run the demo: make its tasks where they are missing, train, report.
#
#   scripts/demo.sh PILOTAGE_COMMAND SEED [local|cortex]
#
# With cortex the policy is held by a job of `pilotage serve`, which is started for the run and stopped after
# it. An unfinished run of that seed is taken up where it stopped; a finished one is kept, and a new run gets
# the next free number.
set -euo pipefail
cd "$(dirname "$0")/.."
pilotage=${1:?usage: scripts/demo.sh PILOTAGE_COMMAND SEED [local|cortex]}
seed=${2:?usage: scripts/demo.sh PILOTAGE_COMMAND SEED [local|cortex]}
backend=${3:-local}

is_finished() { grep -qs '"event":"finished"' "runs/$1/events.jsonl"; }

base=demo-seed$seed
[ "$backend" = local ] || base=demo-$backend-seed$seed
name=$base
number=2
while is_finished "$name"; do
    name=$base-$number
    number=$((number + 1))
done
resume=()
if [ -e "runs/$name/config.toml" ]; then
    resume=(--resume)
fi

# Serve recipes/demo/policy as `policy` on a free port of loopback; the service ends with this script.
start_service() {
    announced=$(mktemp)  # not local: the trap runs after the function has ended
    "$pilotage" serve --no-auth --models recipes/demo --data runs/service --port 0 >"$announced" &
    service=$!
    trap 'kill "$service" 2>/dev/null; wait "$service" || true; rm -f "$announced"' EXIT
    until grep -q "serving on" "$announced"; do
        kill -0 "$service" || exit 1
        sleep 0.2
    done
    ARCTIC_CORTEX_BASE_URL=$(sed -n 's/^serving on //p' "$announced")
    export ARCTIC_CORTEX_BASE_URL
}

[ -d tasks/demo ] || "$pilotage" data demo --out tasks/demo
[ "$backend" = local ] || start_service
"$pilotage" train recipes/demo.toml "backend=$backend" "loop.seed=$seed" --run-name "$name" "${resume[@]}"
"$pilotage" report --window 5 "runs/$name"
