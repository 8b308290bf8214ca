#!/usr/bin/env bash
# Creates a virtual environment with SuperTuner and its development tools; does nothing if nothing changed.
#
# usage: scripts/setup.sh FOLDER      PYTHON=python3.12 chooses the interpreter (default: python3)
#
# Changes are detected by content, not by dates: the stamp in the environment is a digest of pyproject.toml, setup.py,
# constraints.txt, the C files, this script and the path (an environment that was moved does not work).
set -euo pipefail
cd "$(dirname "$0")/.."
venv=${1:?usage: scripts/setup.sh FOLDER}
asked=${PYTHON:-}
stamp=$venv/.supertuner-setup

fail() { echo "setup: $*" >&2; exit 1; }

digest=$( { cat pyproject.toml setup.py constraints.txt scripts/setup.sh supertuner/core/*.c supertuner/memory/overflow_allocator/*.[ch] supertuner/optim/automagic/*.c; pwd; } | sha256sum | cut -d ' ' -f 1)
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

pip() { "$venv/bin/python" -m pip --disable-pip-version-check "$@"; }
torch=$(grep -E '^torch==' constraints.txt)

# torch first: once the tested version is installed, no other package can pull in another build of it.
echo "setup: installing $torch (the largest part; minutes on a slow connection)"
pip install -qq -c constraints.txt "$torch"
echo "setup: installing SuperTuner and its tools (about a minute the first time)"
pip install -qq -c constraints.txt -e '.[train,dev,docs]'

echo "$digest" > "$stamp"
echo "setup: done"
