#!/usr/bin/env bash
# Run the demo: make its tasks where they are missing, train, report.
#
#   scripts/demo.sh PILOTAGE_COMMAND SEED [local|cortex|tinker] [packages|factory]
#
# `packages` are bugs put into installed packages, made in a minute; `factory` are bugs that the packages' own
# tests have proven, made in about ten. With cortex or tinker the policy is held by a job of `pilotage serve`,
# which is started for the run and stopped after it. The Tinker wire has no temperature of a trainer and no
# reference, so that the run has temperature 1 and no KL term. An unfinished run of that seed is taken up where
# it stopped; a finished one is kept, and a new run gets the next free number.
set -euo pipefail
cd "$(dirname "$0")/.."
usage='usage: scripts/demo.sh PILOTAGE_COMMAND SEED [local|cortex|tinker] [packages|factory]'
pilotage=${1:?$usage}
seed=${2:?$usage}
backend=${3:-local}

case ${4:-packages} in
    packages) kind=demo tasks=tasks/demo ;;
    factory) kind=demo_factory tasks=tasks/factory ;;
    *) echo "demo: TASKS is packages or factory, got $4" >&2 && exit 2 ;;
esac

make_tasks() {
    if [ "$kind" = demo ]; then
        [ -d "$tasks" ] || "$pilotage" data demo --out "$tasks"
        return
    fi
    # Goes on where it was interrupted; done only when the table is there, which is written last.
    [ -e "$tasks/train/yield.md" ] || "$pilotage" data make-bugs --bare-issue --out "$tasks/train" --tasks 136 \
        boltons==26.2.0 tabulate==0.10.0 tomlkit==0.15.2 toolz==1.2.0
    [ -e "$tasks/held_out/yield.md" ] || "$pilotage" data make-bugs --bare-issue --out "$tasks/held_out" --tasks 102 \
        cachetools==8.0.2 h11==0.16.0 tinydb==4.9.0
}

is_finished() { grep -qs '"event":"finished"' "runs/$1/events.jsonl"; }

base=${kind//_/-}
[ "$backend" = local ] || base=$base-$backend
base=$base-seed$seed
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

# Serve recipes/$kind/policy as `policy` on a free port of loopback; the service ends with this script.
start_service() {
    announced=$(mktemp)  # not local: the trap runs after the function has ended
    "$pilotage" serve --no-auth --models "recipes/$kind" --data runs/service --port 0 >"$announced" &
    service=$!
    trap 'kill "$service" 2>/dev/null; wait "$service" || true; rm -f "$announced"' EXIT
    until grep -q "serving on" "$announced"; do
        kill -0 "$service" || exit 1
        sleep 0.2
    done
    ARCTIC_CORTEX_BASE_URL=$(sed -n 's/^serving on //p' "$announced")
    TINKER_BASE_URL=$ARCTIC_CORTEX_BASE_URL
    TINKER_API_KEY=tml-any  # the service asks for none, and the SDK for one that starts so
    export ARCTIC_CORTEX_BASE_URL TINKER_BASE_URL TINKER_API_KEY
}

settings=("backend=$backend" "loop.seed=$seed")
if [ "$backend" = tinker ]; then
    settings+=(loop.sampling.temperature=1 loop.loss.temperature=1 loop.loss.kl_coef=0)
    settings+=(loop.optimizer.learning_rate=2e-3)  # of an adapter, which is what that API trains
fi

make_tasks
[ "$backend" = local ] || start_service
"$pilotage" train "recipes/$kind.toml" "${settings[@]}" --run-name "$name" "${resume[@]}"
"$pilotage" baseline --json --methods random,bm25-1 "$tasks/held_out" >"$tasks/anchors.json"
"$pilotage" report --window 5 --anchors "$tasks/anchors.json" "runs/$name"
