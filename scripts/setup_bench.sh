#!/usr/bin/env bash
# Makes the environment of the benchmarks: the product's own one, with the peers it is measured against on top.
#
# usage: scripts/setup_bench.sh VENV BENCH_VENV
#
# Peers stay out of the product's environment. A .pth file lends them its packages, so torch is not installed twice.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=${1:?usage: scripts/setup_bench.sh VENV BENCH_VENV}
bench=${2:?usage: scripts/setup_bench.sh VENV BENCH_VENV}
stamp=$bench/.supertuner-setup

digest=$( { cat benchmarks/peers.txt benchmarks/peers-without-dependencies.txt scripts/setup_bench.sh; cat "$venv/.supertuner-setup"; } | sha256sum | cut -d ' ' -f 1)
if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$digest" ]; then
    exit 0
fi

echo "bench: making $bench"
rm -rf "$bench"
"$venv/bin/python" -m venv "$bench"
site() { "$1/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'; }
site "$venv" > "$(site "$bench")/supertuner-venv.pth"
# The product itself is an editable install; its own hook is not followed through a .pth file, so name its folder.
pwd >> "$(site "$bench")/supertuner-venv.pth"

pip() { "$bench/bin/python" -m pip --disable-pip-version-check "$@"; }
pip install -qq -c constraints.txt -r benchmarks/peers.txt
# These would pull in cloud clients, torchvision and more that the benchmark never touches.
pip install -qq --no-deps -r benchmarks/peers-without-dependencies.txt
echo "$digest" > "$stamp"
