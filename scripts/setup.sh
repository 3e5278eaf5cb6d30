#!/usr/bin/env bash
# Make .venv in this checkout and install what requirements.txt pins. Silent and instant when all is there.
#   PYTHON=python3.12 bash scripts/setup.sh      choose the interpreter
#   bash scripts/setup.sh dev                    what the tests need, too
#   TORCH_INDEX_URL=URL bash scripts/setup.sh    take torch from this package index, e.g. one of builds for CPUs, CUDA 12 or ROCm
# A torch that somebody else installed (in .venv, or for PYTHON as in images of vendors) stays as it is.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

files=(requirements.txt)
case "${1:-}" in
    "") ;;
    dev) files+=(requirements-dev.txt) ;;
    -h | --help) sed -n '2,/^[^#]/s/^# \{0,1\}//p' scripts/setup.sh; exit 0 ;;
    *) echo "setup.sh: $1 is not known; dev is, or nothing (--help)" >&2; exit 2 ;;
esac

# One stamp per list of requirements; its content is the list it was installed from.
fresh=1
for file in "${files[@]}"; do
    cmp -s "$file" ".venv/.installed-$file" || fresh=0
done
[ "$fresh" = 1 ] && exit 0

# shellcheck disable=SC1091
source scripts/_torch.sh

if [ ! -x .venv/bin/python ]; then
    python=${PYTHON:-}
    if [ -z "$python" ]; then
        for candidate in python3.11 python3.12 python3.13 python3.14 python3; do
            if command -v "$candidate" >/dev/null && "$candidate" -c '' 2>/dev/null; then python=$candidate; break; fi
        done
    fi
    if [ -z "$python" ] || ! command -v "$python" >/dev/null; then
        echo "setup.sh: no Python found${PYTHON:+ under PYTHON=$PYTHON}; install Python 3.11 or name one with PYTHON=" >&2
        exit 2
    fi
    if ! "$python" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 14))'; then
        echo "setup.sh: $python is $("$python" -V 2>&1), but Python 3.11 to 3.14 is needed; name one with PYTHON=" >&2
        exit 2
    fi
    theirs=$(torch_of "$python")
    # A virtual environment hands on the packages of the interpreter below it, not its own.
    if "$python" -c 'import sys; sys.exit(sys.prefix == sys.base_prefix)'; then theirs=; fi
    over=
    if is_usable "$theirs"; then over=--system-site-packages; fi
    echo "setup.sh: making .venv with $("$python" -V 2>&1)${over:+, over its packages, torch $theirs among them}"
    if ! "$python" -m venv ${over:+"$over"} .venv; then
        echo "setup.sh: $python cannot make a virtual environment; install its venv module" >&2
        exit 2
    fi
fi

log=.venv/setup.log
: >"$log"
try_pip() {
    DS_BUILD_OPS=0 .venv/bin/python -m pip install --disable-pip-version-check --no-input -q "$@" >>"$log" 2>&1
}
pip() {
    if ! try_pip "$@"; then
        echo "setup.sh: pip install $* failed; its last lines, the rest is in $log:" >&2
        tail -n 5 "$log" >&2
        exit 1
    fi
}

install_torch
# With this constraint nothing below can choose another torch; DeepSpeed compiles nothing here.
echo "torch==$(torch_of .venv/bin/python)" >.venv/torch.txt
for file in "${files[@]}"; do
    cmp -s "$file" ".venv/.installed-$file" && continue
    echo "setup.sh: installing what $file lists (once, a minute or more)"
    grep -v '^torch==' "$file" >.venv/wanted.txt
    pip -c .venv/torch.txt -r .venv/wanted.txt
    cp "$file" ".venv/.installed-$file"
done
echo "setup.sh: done; .venv takes $(du -sh .venv | cut -f1)"
