# Which torch there is and which one comes; sourced by setup.sh.
# shellcheck shell=bash

# The version of torch that the interpreter $1 has, or nothing. torch is not imported.
torch_of() {
    "$1" -c 'import importlib.metadata as m
try: print(m.version("torch"))
except m.PackageNotFoundError: pass'
}

# Whether version $1 is 2.11 or newer (pyproject.toml); a vendor's 2.11.0a0+... is one.
is_usable() {
    local major minor
    IFS=. read -r major minor _ <<<"$1"
    [[ $major =~ ^[0-9]+$ && $minor =~ ^[0-9]+ ]] && [ $((major * 1000 + BASH_REMATCH[0])) -ge 2011 ]
}

# The version that the list $1 pins, or nothing.
torch_pinned_by() {
    if [ -f "$1" ]; then sed -n 's/^torch==//p' "$1"; fi
}

case "${TORCH_BUILD:-}" in
    cuda | cpu | "") ;;
    *) echo "setup.sh: TORCH_BUILD may be cuda or cpu, not $TORCH_BUILD" >&2; exit 2 ;;
esac

# TORCH_BUILD says it where an image is built for another machine.
wants_cuda() {
    case "${TORCH_BUILD:-}" in
        cuda) return 0 ;;
        cpu) return 1 ;;
        *) compgen -G "/dev/nvidia[0-9]*" >/dev/null || [ -e /dev/dxg ] ;;
    esac
}

# torch in .venv: whose it is, and if nobody's, the pinned version in the build that fits this machine.
install_torch() {
    local there pin before
    there=$(torch_of .venv/bin/python)
    pin=$(torch_pinned_by requirements.txt)
    before=$(torch_pinned_by .venv/.installed-requirements.txt)
    [ "${there%%+*}" = "$pin" ] && return
    if [ -n "$there" ] && [ "${there%%+*}" != "$before" ]; then # not installed by us
        if is_usable "$there"; then
            echo "setup.sh: torch $there stays as it is (the tests have seen $pin)"
            return
        fi
        echo "setup.sh: .venv has torch $there, which is not this script's to replace, and 2.11 or newer is needed; install one there, or delete .venv" >&2
        exit 2
    fi
    echo "setup.sh: installing torch $pin, $(build_that_fits)"
    if [ -n "${TORCH_INDEX_URL:-}" ]; then
        pip --extra-index-url "$TORCH_INDEX_URL" "torch==$pin"
    elif wants_cuda; then
        pip "torch==$pin,!=$pin+cpu"
    elif ! try_pip "torch==$pin+cpu"; then # most indexes have the builds for CPUs elsewhere
        case "$(uname -sm)" in
            "Linux x86_64") echo "setup.sh: this package index has no build of torch for CPUs only: what comes holds CUDA, too, 2.7 GB to download and 4.7 GB on disk; TORCH_INDEX_URL= names another index" ;;
        esac
        pip "torch==$pin"
    fi
}

# In words, for install_torch.
build_that_fits() {
    if [ -n "${TORCH_INDEX_URL:-}" ]; then
        echo "the build of TORCH_INDEX_URL"
    elif wants_cuda; then
        echo "with CUDA for NVIDIA GPUs: 2.7 GB to download, 4.7 GB on disk (TORCH_INDEX_URL= names an index of other builds)"
    elif [ "${TORCH_BUILD:-}" = cpu ]; then
        echo "for CPUs: 0.2 GB to download, 0.8 GB on disk"
    elif [ -e /dev/kfd ]; then
        echo "for CPUs: the AMD GPU that is here needs TORCH_INDEX_URL=, an index of builds for ROCm"
    else
        echo "for CPUs, as there is no GPU here: 0.2 GB to download, 0.8 GB on disk"
    fi
}
