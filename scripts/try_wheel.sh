#!/usr/bin/env bash
# Builds sdist and wheel, installs the wheel into an empty environment, and tries it: first bare, then with what training needs.
#
# usage: scripts/try_wheel.sh PYTHON FOLDER      PYTHON has the `build` package; FOLDER receives the files
set -euo pipefail
cd "$(dirname "$0")/.."
python=${1:?usage: scripts/try_wheel.sh PYTHON FOLDER}
folder=${2:?usage: scripts/try_wheel.sh PYTHON FOLDER}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

rm -rf "$folder"
"$python" -m build --quiet --outdir "$folder" .
wheel=$(ls "$folder"/*.whl)
version=$("$python" -c 'import supertuner; print(supertuner.__version__)')

"$python" -m venv "$work/bare"
pip() { "$work/bare/bin/python" -m pip --disable-pip-version-check "$@"; }
pip install -qq -c constraints.txt "$wheel"
if "$work/bare/bin/python" -c 'import torch' 2>/dev/null; then
    echo "wheel: a bare installation brought torch along" >&2
    exit 1
fi
cd "$work" # not the checkout: what is tried is what was installed
run() { "$work/bare/bin/supertuner" "$@"; }
[ "$(run --version)" = "supertuner $version" ]
run estimate --help > /dev/null
run arena ls > /dev/null
mkdir pictures && touch pictures/a.jpg
echo '{"datasets": [{"instance_data_dir": "pictures"}]}' > run.json
run config validate run.json > /dev/null
status=0
run quickstart > quickstart.txt 2>&1 || status=$?
message="supertuner quickstart needs the extra \"train\": pip install 'supertuner[train]'"
if [ "$status" != 2 ] || ! grep -qF "$message" quickstart.txt; then
    cat quickstart.txt >&2
    echo "wheel: quickstart without the extra 'train' exits with $status; expected 2 and: $message" >&2
    exit 1
fi
cd - > /dev/null

torch=$(grep -E '^torch==' constraints.txt)
pip install -qq -c constraints.txt "$torch"
pip install -qq -c constraints.txt "$wheel[train]"
cd "$work"
# The first seconds of the quickstart: the dataset is drawn and staged, and training has begun.
timeout --signal=INT 60 "$work/bare/bin/supertuner" quickstart > quickstart.txt 2>&1 || true
cd - > /dev/null
[ -d "$work/quickstart" ] || { cat "$work/quickstart.txt" >&2; echo "wheel: quickstart made nothing" >&2; exit 1; }
echo "wheel: $(basename "$wheel") works, bare and with the extra 'train'"
