#!/usr/bin/env bash
# Create .venv in this checkout and install requirements.txt. Does nothing if everything is installed.
#   PYTHON=python3.12 bash scripts/setup.sh      choose the interpreter
#   bash scripts/setup.sh dev                    also install what the tests need
#   bash scripts/setup.sh all                    also install every optional package, such as wandb, ray and gradio
#   PIP_INDEX_URL=URL bash scripts/setup.sh      install from a mirror of the package index
#   TORCH_INDEX_URL=URL bash scripts/setup.sh    install torch from this package index (builds for CPUs or ROCm)
# If torch is already installed in .venv, or for the interpreter PYTHON as in vendors' images, the script keeps it.
set -euo pipefail
CDPATH='' cd "$(dirname "${BASH_SOURCE[0]}")/.."

files=(requirements.txt)
case "${1:-}" in
    "") ;;
    dev) files+=(requirements-dev.txt) ;;
    all) files+=(pyproject.toml) ;;
    -h | --help) sed -n '2,/^[^#]/s/^# \{0,1\}//p' scripts/setup.sh; exit 0 ;;
    *) echo "setup.sh: unknown argument $1; use dev, all or none (--help)" >&2; exit 2 ;;
esac

# .venv contains a copy of each requirements file whose packages were installed. Exit if no copy differs from its file.
fresh=1
for file in "${files[@]}"; do
    cmp -s "$file" ".venv/.installed-$file" || fresh=0
done
[ "$fresh" = 1 ] && exit 0

# Another setup.sh of this checkout, on another node or in another terminal, may be installing. Wait for it, then look again.
if command -v flock >/dev/null; then
    exec 9>.setup.lock
    if ! flock -n 9; then
        echo "setup.sh: waiting for another setup.sh of this checkout"
        flock 9
        exec 9>&-
        exec bash scripts/setup.sh "$@"
    fi
fi

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
        echo "setup.sh: no Python found${PYTHON:+ under PYTHON=$PYTHON}; install Python 3.11 or set PYTHON=" >&2
        exit 2
    fi
    if ! "$python" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 14))'; then
        echo "setup.sh: $python is $("$python" -V 2>&1), but Python 3.11 to 3.14 is needed; set PYTHON=" >&2
        exit 2
    fi
    theirs=$(torch_of "$python")
    # With --system-site-packages, .venv sees the packages of a base interpreter, but not those of another environment.
    if "$python" -c 'import sys; sys.exit(sys.prefix == sys.base_prefix)'; then theirs=; fi
    over=
    if is_usable "$theirs"; then over=--system-site-packages; fi
    echo "setup.sh: creating .venv with $("$python" -V 2>&1)${over:+ and its packages, including torch $theirs}"
    if ! "$python" -m venv ${over:+"$over"} .venv; then
        echo "setup.sh: $python cannot create a virtual environment; install its venv module" >&2
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
        echo "setup.sh: pip install $* failed; the last lines of $log:" >&2
        tail -n 5 "$log" >&2
        exit 1
    fi
}

# Print what the file $1 requires, without torch: lines of a requirements file, or what the extra `all` of pyproject.toml names.
wanted_by() {
    if [ "$1" != pyproject.toml ]; then
        grep -v '^torch==' "$1"
        return
    fi
    .venv/bin/python -c '
import re, tomllib
with open("pyproject.toml", "rb") as file:
    extras = tomllib.load(file)["project"]["optional-dependencies"]
names = re.search(r"\[(.*)\]", extras["all"][0])[1]
for name in names.split(","):
    print(*extras[name], sep="\n")'
}

install_torch
# This constraint keeps pip from replacing torch. DeepSpeed compiles no kernels when it is installed (DS_BUILD_OPS=0).
echo "torch==$(torch_of .venv/bin/python)" >.venv/torch.txt
for file in "${files[@]}"; do
    cmp -s "$file" ".venv/.installed-$file" && continue
    echo "setup.sh: installing $file (once, a minute or more)"
    wanted_by "$file" >.venv/wanted.txt
    pip -c .venv/torch.txt -r .venv/wanted.txt
    cp "$file" ".venv/.installed-$file"
done
echo "setup.sh: done; .venv takes $(du -sh .venv | cut -f1)"
