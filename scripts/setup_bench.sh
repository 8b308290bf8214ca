#!/usr/bin/env bash
# Creates the environment of the benchmarks: SuperTuner's own environment plus the peers it is compared with.
#
# usage: scripts/setup_bench.sh VENV BENCH_VENV
#
# Peers stay out of SuperTuner's environment. A .pth file makes its packages importable, so torch is not installed twice.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=${1:?usage: scripts/setup_bench.sh VENV BENCH_VENV}
bench=${2:?usage: scripts/setup_bench.sh VENV BENCH_VENV}
stamp=$bench/.supertuner-setup

digest=$( { cat benchmarks/peers.txt benchmarks/peers-without-dependencies.txt scripts/setup_bench.sh; cat "$venv/.supertuner-setup"; } | sha256sum | cut -d ' ' -f 1)
if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$digest" ]; then
    exit 0
fi

echo "bench: creating $bench"
rm -rf "$bench"
"$venv/bin/python" -m venv "$bench"
site() { "$1/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'; }
site "$venv" > "$(site "$bench")/supertuner-venv.pth"
# SuperTuner is an editable install, whose import hook does not work through a .pth file; so its folder is added too.
pwd >> "$(site "$bench")/supertuner-venv.pth"

pip() { "$bench/bin/python" -m pip --disable-pip-version-check "$@"; }
pip install -qq -c constraints.txt -r benchmarks/peers.txt
# Their dependencies (cloud clients, torchvision and more) are not needed by the benchmark.
pip install -qq --no-deps -r benchmarks/peers-without-dependencies.txt
echo "$digest" > "$stamp"
