#!/usr/bin/env bash
# Creates a virtual environment with SuperTuner and its development tools; does nothing if nothing changed.
#
# usage: scripts/setup.sh FOLDER      PYTHON=python3.12 chooses the interpreter (default: python3)
#                                     TORCH=cpu, TORCH=cuda, TORCH=auto or TORCH='arguments for pip' chooses the build of torch
#                                     (default: scripts/choose_torch.py decides by the machine's GPU)
#
# Changes are detected by content, not by dates: the stamp in the environment is a digest of pyproject.toml, setup.py,
# constraints.txt, the C files, this script, the chosen torch and the path (an environment that was moved does not work).
set -euo pipefail
cd "$(dirname "$0")/.."
venv=${1:?usage: scripts/setup.sh FOLDER}
asked=${PYTHON:-}
stamp=$venv/.supertuner-setup

fail() { echo "setup: $*" >&2; exit 1; }

# TORCH is remembered, so that the next command does not install another build; TORCH=auto forgets it.
TORCH=${TORCH:-$(cat "$venv/.supertuner-torch" 2>/dev/null || true)}
export TORCH
# Without a Python the choice is empty; the checks below explain what is missing.
choice=$("$(command -v "${asked:-python3}" || echo false)" scripts/choose_torch.py) || choice=
torch=$(sed -n 1p <<< "$choice") needs=$(sed -n 2p <<< "$choice") reason=$(sed -n 3p <<< "$choice")
digest=$( { echo "$torch"; cat pyproject.toml setup.py constraints.txt scripts/setup.sh supertuner/core/*.c supertuner/memory/overflow_allocator/*.[ch] supertuner/optim/automagic/*.c; pwd; } | sha256sum | cut -d ' ' -f 1)
version_of() { "$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])'; }

if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$digest" ] && [ -x "$venv/bin/supertuner" ]; then
    if [ -z "$asked" ] || [ "$(version_of "$asked" 2>/dev/null)" = "$(version_of "$venv/bin/python")" ]; then
        exit 0
    fi
fi

python=${asked:-python3}
command -v "$python" >/dev/null || fail "'$python' is not installed; install Python 3.11 or newer, or name one: make setup PYTHON=/path/to/python3"
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
    || fail "'$python' is Python $(version_of "$python"); 3.11 or newer is needed: make setup PYTHON=python3.12"
"$python" -c 'import venv, ensurepip' 2>/dev/null \
    || fail "'$python' cannot create virtual environments; install its venv package (python3-venv on Debian and Ubuntu)"

# An environment of another Python version, or without its interpreter, is created again.
if [ ! -x "$venv/bin/python" ] || ! [ "$(version_of "$venv/bin/python" 2>/dev/null)" = "$(version_of "$python")" ]; then
    echo "setup: creating $venv with Python $(version_of "$python")"
    "$python" -m venv --clear "$venv"
fi
rm -f "$stamp"

[ -n "$torch" ] || exit 1 # choose_torch.py has said why

pip() { "$venv/bin/python" -m pip --disable-pip-version-check "$@"; }

# torch first: once the tested version is installed, no other package can pull in another build of it.
echo "setup: installing $torch (the largest part; minutes on a slow connection)"
echo "setup: $reason"
# shellcheck disable=SC2086  # a list of words
pip install -qq $torch
if [ "$needs" = cuda ]; then
    "$venv/bin/python" -c 'import sys, torch; sys.exit(torch.version.cuda is None)' \
        || fail "the installed torch is not a CUDA build; pip found another one first: look at \`pip config list\`"
    "$venv/bin/python" -c 'import torch; torch.cuda.init()' 2>/dev/null \
        || echo "setup: torch cannot use the GPU yet; \`$venv/bin/supertuner doctor\` says why" >&2
fi
echo "setup: installing SuperTuner and its tools (about a minute the first time)"
pip install -qq -c constraints.txt -e '.[train,dev,docs]'

echo "$TORCH" > "$venv/.supertuner-torch"
echo "$digest" > "$stamp"
echo "setup: done; \`. $venv/bin/activate\` makes \`supertuner\` a command of this terminal"
