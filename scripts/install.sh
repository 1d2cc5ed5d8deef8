#!/usr/bin/env bash
# Make a virtual environment with Pilotage in it, from nothing but Python 3.12, and say what is installed.
#
#   scripts/install.sh VENV_DIR
#
# Exit code 2 where no usable Python is found. bubblewrap and tmux come from apt where that is possible;
# where it is not, one line says so and the rest goes on.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=${1:?usage: scripts/install.sh VENV_DIR}
export UV_PYTHON_DOWNLOADS=never

say() { echo "pilotage install: $*" >&2; }

is_usable() {
    "$1" -c 'import sys; sys.exit(not (3, 12) <= sys.version_info[:2] <= (3, 13))' >/dev/null 2>&1
}

find_python() {
    local candidate
    for candidate in python3.12 "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.12*/bin/python3.12 \
        python3 python3.13 "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.13*/bin/python3.13; do
        if is_usable "$candidate"; then
            command -v "$candidate"
            return
        fi
    done
    return 1
}

install_programs() {
    local missing=()
    command -v bwrap >/dev/null || missing+=(bubblewrap)
    command -v tmux >/dev/null || missing+=(tmux)
    [ ${#missing[@]} -eq 0 ] && return
    local as_root=()
    if [ "$(id -u)" -ne 0 ]; then
        as_root=(sudo -n)
    fi
    if command -v apt-get >/dev/null && "${as_root[@]}" true 2>/dev/null; then
        say "installing ${missing[*]} with apt-get"
        if "${as_root[@]}" apt-get update -qq >/dev/null &&
            "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq \
                --no-install-recommends "${missing[@]}" >/dev/null; then
            return
        fi
    fi
    say "cannot install ${missing[*]} here; please do. Without bubblewrap only rollouts.unsandboxed=true runs"
}

make_venv() {
    local python=$1
    if is_usable "$venv/bin/python" && "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
        return
    fi
    say "making $venv with $("$python" --version)"
    if ! "$python" -m venv --clear "$venv"; then
        say "$python cannot make a virtual environment; on Debian and Ubuntu install python3.12-venv"
        exit 2
    fi
}

if ! python=$(find_python); then
    found=$(python3 --version 2>/dev/null || echo "no python3")
    say "Pilotage needs Python 3.12 or 3.13, found $found; install python3.12 and try again"
    exit 2
fi
install_programs
make_venv "$python"
if ! [ -x "$venv/bin/uv" ]; then
    say "installing uv with pip"
    "$venv/bin/python" -m pip install --quiet -c constraints.txt uv
fi
say "installing pilotage[local,agents,dev] with uv: about 250 packages, 3 GB to download of which torch is most"
# Compiled once here, not by each of the many processes that a run starts, where they may not write.
"$venv/bin/uv" pip install --compile-bytecode --python "$venv/bin/python" -c constraints.txt -e '.[local,agents,dev]'
touch "$venv/.pilotage-installed"
say "done; . $venv/bin/activate gives you the pilotage command"
