#!/usr/bin/env bash
# Test this checkout with the oldest and with the newest versions that pyproject.toml allows, each in a new environment:
#
#     bash scripts/test_versions.sh                                      # oldest and newest
#     ENDS=oldest PYTHON=python3.12 bash scripts/test_versions.sh        # only oldest, with another Python
#     ENDS=newest PINS="torch==2.12.1 deepspeed==0.19.3" bash scripts/test_versions.sh
#     ENDS=newest EXTRAS=[all] TESTS=none bash scripts/test_versions.sh  # all extras; test only the commands
#
# The script tests the installed commands in an empty folder (tests/cli/test_installed.py). Then it runs TESTS, by
# default the tests that depend on DeepSpeed's internals or on torch.compile. FOLDER=PATH keeps the environments in this
# folder (6 GB each with CUDA); without FOLDER the environments are deleted.
set -euo pipefail
CDPATH='' cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python3.11}
ENDS=${ENDS:-oldest newest}
TESTS=${TESTS:-tests/conformance tests/ranks/test_tds.py tests/ranks/test_faults.py tests/ranks/test_compiled.py}
if [ -z "${FOLDER:-}" ]; then
    FOLDER=$(mktemp -d)
    trap 'rm -rf "$FOLDER"' EXIT
fi
FOLDER=$(realpath "$FOLDER")
export OMP_NUM_THREADS=1 DS_BUILD_OPS=0 TORCH_CPP_LOG_LEVEL=FATAL

# Print the lowest allowed version of each requirement as a pin.
oldest() {
    "$PYTHON" - <<'EOF'
import re, tomllib

for each in tomllib.load(open("pyproject.toml", "rb"))["project"]["dependencies"]:
    name, version = re.match(r"([\w-]+)>=([\d.]+)", each).groups()
    print(f"{name}=={version}{'.0' * (2 - version.count('.'))}")
EOF
}

for end in $ENDS; do
    env=$FOLDER/$end-$(basename "$PYTHON")
    [ -d "$env" ] || "$PYTHON" -m venv "$env"
    case $end in
        oldest) oldest >"$env/constraints.txt" ;;
        newest) : >"$env/constraints.txt" ;;
        *) echo "test_versions.sh: ENDS= must be oldest or newest, not $end" >&2; exit 2 ;;
    esac
    for pin in ${PINS:-}; do
        sed -i "/^${pin%%=*}=/d" "$env/constraints.txt"
        echo "$pin" >>"$env/constraints.txt"
    done
    source=$(mktemp -d "$FOLDER/source-XXXX")
    git ls-files -z | xargs -0 cp --parents -t "$source"
    echo "test_versions.sh: installing the $end versions into $env"
    "$env/bin/python" -m pip install -q --disable-pip-version-check --upgrade pip
    "$env/bin/python" -m pip install -q --disable-pip-version-check -c "$env/constraints.txt" \
        ${TORCH_INDEX_URL:+--extra-index-url "$TORCH_INDEX_URL"} \
        "$source${EXTRAS:-}" pytest pytest-timeout pytest-xdist hypothesis
    rm -rf "$source"
    "$env/bin/python" - <<'EOF'
import importlib.metadata as m, sys

names = "torch numpy deepspeed sentencepiece safetensors tokenizers jieba rjieba regex zstandard".split()
print("Python", sys.version.split()[0], *(f"{name} {m.version(name)}" for name in names), sep=", ")
EOF
    export TORCH_EXTENSIONS_DIR=$env/extensions
    INSTALLED=$env/bin "$env/bin/python" -m pytest -q -p no:cacheprovider --full -k text_to_text \
        tests/cli/test_installed.py
    # shellcheck disable=SC2086  # $TESTS holds several paths, which must be split
    if [ "$TESTS" != none ]; then "$env/bin/python" -m pytest -q -p no:cacheprovider -n 2 $TESTS; fi
done
echo "test_versions.sh: done"
