#!/usr/bin/env bash
# Run what depends on DeepSpeed's inside on the oldest and the newest version that we promise:
#
#     bash scripts/test_deepspeed_versions.sh              # both
#     VERSIONS="0.18.0" bash scripts/test_deepspeed_versions.sh
#
# Each version is installed into a folder of its own and put before the one of the environment.
set -euo pipefail
cd "$(dirname "$0")/.."
bash scripts/setup.sh dev
. .venv/bin/activate
VERSIONS=${VERSIONS:-"0.17.0 0.19.8"}
FOLDER=${FOLDER:-$(mktemp -d)}
export OMP_NUM_THREADS=1 TORCH_EXTENSIONS_DIR="$FOLDER/extensions"

for version in $VERSIONS; do
    target="$FOLDER/deepspeed-$version"
    [ -d "$target" ] || DS_BUILD_OPS=0 python -m pip install --quiet --no-deps --no-build-isolation --target "$target" "deepspeed==$version"
    found=$(PYTHONPATH="$target" python -c "import tds; print(tds.__version__)" | tail -n 1)  # old versions log there, too
    echo "DeepSpeed $found"
    [ "$found" = "$version" ] || { echo "asked for $version, found $found" >&2; exit 1; }
    PYTHONPATH="$target" python -m pytest -q -n 2 tests/conformance tests/ranks/test_tds.py tests/ranks/test_faults.py
done
