#!/usr/bin/env bash
# Collect wheels for a machine without network whose image has torch, numpy and triton, but no DeepSpeed:
#
#     bash scripts/wheels.sh wheels                        for this Python
#     PYTHON_VERSION=3.12 bash scripts/wheels.sh wheels    for another one, on Linux x86-64
#
# On that machine:
#     python3 -m pip install -q --no-index --no-deps --no-compile --target site wheels/*.whl
#     PYTHONPATH="$PWD/site" python3 -m tests.gpu
set -euo pipefail
folder=$(realpath -m "${1:?usage: bash scripts/wheels.sh FOLDER}")
CDPATH='' cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash scripts/setup.sh
version=${PYTHON_VERSION:-$(.venv/bin/python -c 'import sys; print("%d.%d" % sys.version_info[:2])')}
mkdir -p "$folder"
pip() { .venv/bin/python -m pip --disable-pip-version-check --no-input "$@"; }
# DeepSpeed is distributed as source. Without compiled ops its wheel is pure Python and fits any version of Python.
deepspeed=$(grep '^deepspeed==' requirements.txt)
DS_BUILD_OPS=0 pip wheel -q --no-deps --no-build-isolation --wheel-dir "$folder" "$deepspeed"
pip download -q --only-binary=:all: --no-deps --python-version "$version" --implementation cp --dest "$folder" \
    hjson "$(pip freeze | grep '^pydantic==')" "$(pip freeze | grep '^pydantic_core==')" \
    annotated-types typing-inspection typing-extensions einops msgpack packaging psutil py-cpuinfo tqdm
ls -l "$folder"
