#!/usr/bin/env bash
# Runs Python on the phantom: torch's CUDA build, fake libraries, a GH200 that is not there.
#
# usage: scripts/phantom_python.sh ARGUMENTS OF PYTHON      (make phantom first, or: make test-phantom)
# FAKECUDA_HBM=bytes is the size of the GPU (96 GB unless set); see docs/phantom.md for the other variables.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
phantom=${PHANTOM_VENV:-$root/.venv-phantom}
[ -x "$phantom/bin/python" ] && [ -d "$phantom/phantom" ] || { echo "phantom: there is none yet; run: make phantom" >&2; exit 1; }

# The loader reads this once, at the start of a process: it cannot be set from inside Python.
export LD_LIBRARY_PATH="$phantom/phantom${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
export FAKECUDA_PHANTOM="$phantom/phantom"
export FAKECUDA_HBM=${FAKECUDA_HBM:-$((96 * 1000 * 1000 * 1000))}
exec "$phantom/bin/python" "$@"
