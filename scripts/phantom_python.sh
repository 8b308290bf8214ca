#!/usr/bin/env bash
# Runs Python on the phantom: torch's CUDA build on fake libraries that emulate a GH200.
#
# usage: scripts/phantom_python.sh ARGUMENTS OF PYTHON      (make phantom first, or: make test-phantom)
# FAKECUDA_HBM=bytes is the size of GPU memory (default 96 GB); docs/phantom.md lists the other variables.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
phantom=${PHANTOM_VENV:-$root/.venv-phantom}
[ -x "$phantom/bin/python" ] && [ -d "$phantom/phantom" ] || { echo "phantom: $phantom does not exist; run: make phantom" >&2; exit 1; }

# The dynamic loader reads this only at the start of a process, so it cannot be set from inside Python.
export LD_LIBRARY_PATH="$phantom/phantom${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
export FAKECUDA_PHANTOM="$phantom/phantom"
export FAKECUDA_HBM=${FAKECUDA_HBM:-$((96 * 1000 * 1000 * 1000))}
exec "$phantom/bin/python" "$@"
