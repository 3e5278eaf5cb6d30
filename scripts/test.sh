#!/usr/bin/env bash
# Check style and types, then run the tests. With arguments, only run pytest with them:
#   bash scripts/test.sh quick                   style, types, single-process tests and a few layouts
#   bash scripts/test.sh tests/unit -k lr
set -euo pipefail
CDPATH='' cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash scripts/setup.sh dev
# shellcheck disable=SC1091
source .venv/bin/activate
unset PYTHONDONTWRITEBYTECODE # else each of hundreds of processes would compile the project's source again
export OMP_NUM_THREADS=1 TORCH_EXTENSIONS_DIR="${TORCH_EXTENSIONS_DIR:-$PWD/.venv/torch_extensions}"
if [ $# -eq 0 ] || [ "$*" = quick ]; then
    ruff check .
    ruff format --check .
    mypy
    if [ $# -eq 0 ]; then set -- -n 3 --dist worksteal --durations 30; else set -- -n 2 --quick; fi
fi
exec python -m pytest "$@"
