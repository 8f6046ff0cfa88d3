#!/bin/sh
# Creates a virtual environment with this repository and its dependencies, or does nothing if the
# environment is up to date.
#
#   tools/setup.sh [VENV [CONSTRAINTS]]
#
# Arguments:
#   VENV         folder of the environment; default .venv
#   CONSTRAINTS  a pip constraints file; default none
# Environment variables:
#   PYTHON       the interpreter to use; default: the first suitable one that is found
#   EXTRAS       extras to install; default "dev", and "cuda13" if there is an NVIDIA GPU
set -eu

root=$(CDPATH='' cd -- "$(dirname -- "$0")/.." && pwd)
cd "$root"
venv=${1:-.venv}
constraints=${2:-}

if [ -z "${EXTRAS:-}" ]; then
    EXTRAS=dev
    if command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L 2>/dev/null | grep -q GPU; then
        EXTRAS=dev,cuda13
    fi
fi

# The key contains the root, because the environment of a moved checkout has stale paths.
# shellcheck disable=SC2086
key="$root $EXTRAS $(cat pyproject.toml tools/setup.sh $constraints | cksum)"
stamp=$venv/.up-to-date

fits() {
    "$@" -c '
import sys, sysconfig
fits = sys.version_info >= (3, 12) and not sysconfig.get_config_var("Py_GIL_DISABLED")
if fits:
    import ensurepip, venv
sys.exit(not fits)' >/dev/null 2>&1
}

if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$key" ] && fits "$venv/bin/python"; then
    exit 0
fi

# Versions that most packages have wheels for come first.
find_python() {
    pyenv=${PYENV_ROOT:-$HOME/.pyenv}/versions
    for name in python3.12 python3.13 python3.14 python3 python python3.15 python3.16 \
        "$pyenv"/3.12*/bin/python "$pyenv"/3.13*/bin/python "$pyenv"/3.1[4-9]*/bin/python; do
        if fits "$name"; then
            echo "$name"
            return
        fi
    done
}

make_venv() {
    if [ -n "${PYTHON:-}" ]; then
        if ! fits "$PYTHON"; then
            echo "PYTHON=$PYTHON cannot be used: expected Python 3.12 or newer with venv and" \
                "ensurepip. Give another, or leave PYTHON out and one is looked for." >&2
            exit 1
        fi
        python=$PYTHON
    else
        python=$(find_python)
    fi
    if [ -n "$python" ]; then
        echo "Making $venv with $("$python" -c 'import sys; print(sys.executable)')"
        "$python" -m venv --clear "$venv"
    elif command -v uv >/dev/null 2>&1; then
        echo "Making $venv with uv"
        rm -rf "$venv"
        uv venv --seed --python '>=3.12' "$venv"
    else
        cat >&2 <<'MESSAGE'
No Python 3.12 or newer (with its venv and ensurepip modules) was found: looked for python3,
python3.12 and newer on PATH, for pyenv's versions, and for uv. Install one of these, then
run the same command again:
    Debian, Ubuntu   sudo apt-get install python3.12 python3.12-venv
    Fedora           sudo dnf install python3.12
    macOS            brew install python@3.12
    pyenv            pyenv install 3.12
    uv               curl -LsSf https://astral.sh/uv/install.sh | sh
or name one: make PYTHON=/path/to/python3.12 ...
MESSAGE
        exit 1
    fi
}

fits "$venv/bin/python" || make_venv
"$venv/bin/python" -m pip --version >/dev/null 2>&1 || "$venv/bin/python" -m ensurepip

echo "Installing .[$EXTRAS] into $venv"
"$venv/bin/python" -m pip install --quiet --no-input --disable-pip-version-check \
    ${constraints:+--constraint "$constraints"} --editable ".[$EXTRAS]"
echo "$key" >"$stamp"
