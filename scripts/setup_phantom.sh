#!/usr/bin/env bash
# Creates the environment of the phantom: torch's CUDA build without NVIDIA's libraries, and the fake libraries it runs on.
#
# usage: scripts/setup_phantom.sh VENV PHANTOM_VENV
#
# All packages except torch come from SuperTuner's own environment through a .pth file, so versions cannot differ. There
# are two stamps by content: one for the downloads, one (written by the builder) for the fake libraries, which compile in
# seconds. Exits with 75 if the packages cannot be downloaded.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=${1:?usage: scripts/setup_phantom.sh VENV PHANTOM_VENV}
phantom=${2:?usage: scripts/setup_phantom.sh VENV PHANTOM_VENV}
stamp=$phantom/.supertuner-setup
# The headers of the CUDA release that this torch was built with (its "cuda-toolkit" requirement).
headers="nvidia-cuda-runtime==13.0.96 nvidia-cuda-crt==13.0.88"

fail() { echo "phantom: $*" >&2; exit 1; }
site() { "$1/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'; }

[ "$(uname -s)" = Linux ] || fail "the phantom needs Linux: torch has no CUDA build for $(uname -s)"
for tool in gcc g++ nm readelf; do
    command -v "$tool" >/dev/null || fail "$tool is not installed, but the fake libraries must be compiled; install it (build-essential on Debian and Ubuntu)"
done

digest=$( { cat scripts/setup_phantom.sh; grep -E '^torch==' constraints.txt; site "$venv"; pwd; } | sha256sum | cut -d ' ' -f 1)
if ! { [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$digest" ]; }; then
    torch=$(grep -E '^torch==' constraints.txt)
    echo "phantom: downloading the CUDA build of $torch (half a gigabyte)"
    wheels=$(mktemp -d)
    trap 'rm -rf "$wheels"' EXIT
    # pip may be configured to prefer a local CPU build of torch; so this download ignores pip's config file and further
    # locations. Other environment variables (a proxy, certificates, an index) stay in effect.
    fetch() {
        PIP_CONFIG_FILE=/dev/null PIP_FIND_LINKS='' PIP_EXTRA_INDEX_URL='' \
            "$venv/bin/python" -m pip --disable-pip-version-check download -qq --no-deps -d "$wheels" "$@" \
            || { echo "phantom: cannot download $*; the phantom needs the package index once (the rest of the project does not need the phantom)" >&2; exit 75; }
    }
    fetch "$torch"
    # shellcheck disable=SC2086  # a list of words
    fetch $headers

    echo "phantom: creating $phantom"
    rm -rf "$phantom"
    "$venv/bin/python" -m venv "$phantom"
    { site "$venv"; pwd; } > "$(site "$phantom")/supertuner-venv.pth"
    "$phantom/bin/python" -m pip --disable-pip-version-check install -qq --no-deps --no-index "$wheels"/torch-*.whl
    "$phantom/bin/python" -m zipfile -e "$wheels"/nvidia_cuda_runtime-*.whl "$wheels/headers"
    "$phantom/bin/python" -m zipfile -e "$wheels"/nvidia_cuda_crt-*.whl "$wheels/headers"
    # Headers only: torch would load the real libraries if they were present.
    mkdir -p "$phantom/cuda"
    cp -r "$wheels"/headers/nvidia/*/include "$phantom/cuda/"
    "$phantom/bin/python" - <<'EOF' || fail "the downloaded torch is not a CUDA build; pip found another one first"
import importlib.util, pathlib, sys
folder = pathlib.Path(importlib.util.find_spec("torch").origin).parent
sys.exit(not (folder / "lib" / "libtorch_cuda.so").exists())
EOF
    echo "$digest" > "$stamp"
fi
"$phantom/bin/python" tests/fakes/phantom.py --cuda-include "$phantom/cuda/include" --out "$phantom/phantom"
