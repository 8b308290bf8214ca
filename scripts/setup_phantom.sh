#!/usr/bin/env bash
# Makes the environment of the phantom: torch's CUDA build with no NVIDIA library behind it, and the fakes it runs on.
#
# usage: scripts/setup_phantom.sh VENV PHANTOM_VENV
#
# Everything but torch is lent by the product's own environment through a .pth file, so versions cannot differ. Two
# stamps, by content: one for what is fetched, one (kept by the builder) for the fakes, which are compiled in seconds.
# Ends with 75 when the packages cannot be had.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=${1:?usage: scripts/setup_phantom.sh VENV PHANTOM_VENV}
phantom=${2:?usage: scripts/setup_phantom.sh VENV PHANTOM_VENV}
stamp=$phantom/.supertuner-setup
# The headers of the CUDA release that this torch was built with (its "cuda-toolkit" requirement); headers only.
headers="nvidia-cuda-runtime==13.0.96 nvidia-cuda-crt==13.0.88"

fail() { echo "phantom: $*" >&2; exit 1; }
site() { "$1/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'; }

[ "$(uname -s)" = Linux ] || fail "the phantom needs Linux: torch has no CUDA build for $(uname -s)"
for tool in gcc g++ nm readelf; do
    command -v "$tool" >/dev/null || fail "there is no $tool here, and the fake libraries are compiled; install it (build-essential on Debian and Ubuntu)"
done

digest=$( { cat scripts/setup_phantom.sh; grep -E '^torch==' constraints.txt; site "$venv"; pwd; } | sha256sum | cut -d ' ' -f 1)
if ! { [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$digest" ]; }; then
    torch=$(grep -E '^torch==' constraints.txt)
    echo "phantom: fetching the CUDA build of $torch (half a gigabyte)"
    wheels=$(mktemp -d)
    trap 'rm -rf "$wheels"' EXIT
    # pip may be set to prefer a local CPU build of torch: no config file and no further places, for this fetch alone.
    # What is in the environment (a proxy, certificates, an index) stays.
    fetch() {
        PIP_CONFIG_FILE=/dev/null PIP_FIND_LINKS='' PIP_EXTRA_INDEX_URL='' \
            "$venv/bin/python" -m pip --disable-pip-version-check download -qq --no-deps -d "$wheels" "$@" \
            || { echo "phantom: could not fetch $*; the phantom needs the package index once, and the rest of the project does not need the phantom" >&2; exit 75; }
    }
    fetch "$torch"
    # shellcheck disable=SC2086  # a list of words
    fetch $headers

    echo "phantom: making $phantom"
    rm -rf "$phantom"
    "$venv/bin/python" -m venv "$phantom"
    { site "$venv"; pwd; } > "$(site "$phantom")/supertuner-venv.pth"
    "$phantom/bin/python" -m pip --disable-pip-version-check install -qq --no-deps --no-index "$wheels"/torch-*.whl
    "$phantom/bin/python" -m zipfile -e "$wheels"/nvidia_cuda_runtime-*.whl "$wheels/headers"
    "$phantom/bin/python" -m zipfile -e "$wheels"/nvidia_cuda_crt-*.whl "$wheels/headers"
    # Headers alone: with the libraries beside them, torch would find the real ones first.
    mkdir -p "$phantom/cuda"
    cp -r "$wheels"/headers/nvidia/*/include "$phantom/cuda/"
    "$phantom/bin/python" - <<'EOF' || fail "that was no CUDA build of torch; pip found another one first"
import importlib.util, pathlib, sys
folder = pathlib.Path(importlib.util.find_spec("torch").origin).parent
sys.exit(not (folder / "lib" / "libtorch_cuda.so").exists())
EOF
    echo "$digest" > "$stamp"
fi
"$phantom/bin/python" tests/fakes/phantom.py --cuda-include "$phantom/cuda/include" --out "$phantom/phantom"
