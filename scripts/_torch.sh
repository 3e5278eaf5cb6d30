# Find the installed torch and install the pinned one; sourced by setup.sh.
# shellcheck shell=bash

# Print the version of torch that the interpreter $1 has, without importing torch. Print nothing if it has no torch.
torch_of() {
    "$1" -c 'import importlib.metadata as m
try: print(m.version("torch"))
except m.PackageNotFoundError: pass'
}

# Return whether version $1 is 2.11 (the minimum in pyproject.toml) or newer; a vendor's 2.11.0a0+... counts as 2.11.
is_usable() {
    local major minor
    IFS=. read -r major minor _ <<<"$1"
    [[ $major =~ ^[0-9]+$ && $minor =~ ^[0-9]+ ]] && [ $((major * 1000 + BASH_REMATCH[0])) -ge 2011 ]
}

# Print the version of torch that the requirements file $1 pins, or nothing.
torch_pinned_by() {
    if [ -f "$1" ]; then sed -n 's/^torch==//p' "$1"; fi
}

case "${TORCH_BUILD:-}" in
    cuda | cpu | "") ;;
    *) echo "setup.sh: TORCH_BUILD=$TORCH_BUILD must be cuda or cpu" >&2; exit 2 ;;
esac

# Return whether to install a CUDA build: if TORCH_BUILD is cuda or, without TORCH_BUILD, if this machine has an NVIDIA
# GPU. Set TORCH_BUILD when you build a container image, because the image will run on another machine.
wants_cuda() {
    case "${TORCH_BUILD:-}" in
        cuda) return 0 ;;
        cpu) return 1 ;;
        *) compgen -G "/dev/nvidia[0-9]*" >/dev/null || [ -e /dev/dxg ] ;;
    esac
}

# Install the pinned version of torch in the build that fits this machine. Keep a torch that the user has installed.
install_torch() {
    local there pin before
    there=$(torch_of .venv/bin/python)
    pin=$(torch_pinned_by requirements.txt)
    before=$(torch_pinned_by .venv/.installed-requirements.txt)
    [ "${there%%+*}" = "$pin" ] && return
    if [ -n "$there" ] && [ "${there%%+*}" != "$before" ]; then # not installed by this script
        if is_usable "$there"; then
            echo "setup.sh: keeping torch $there, which was installed before (tested: $pin)"
            return
        fi
        echo "setup.sh: .venv has torch $there, which this script did not install, but 2.11 or newer is needed;" \
            "install that in .venv, or delete .venv" >&2
        exit 2
    fi
    echo "setup.sh: installing torch $pin, $(build_that_fits)"
    if [ -n "${TORCH_INDEX_URL:-}" ]; then
        pip --extra-index-url "$TORCH_INDEX_URL" "torch==$pin"
    elif wants_cuda; then
        pip "torch==$pin,!=$pin+cpu"
    elif ! try_pip "torch==$pin+cpu"; then # most indexes lack CPU-only builds
        case "$(uname -sm)" in
            "Linux x86_64")
                echo "setup.sh: this package index has no CPU-only torch, so the build with CUDA is installed:" \
                    "2.7 GB to download, 4.7 GB on disk (TORCH_INDEX_URL= selects another index)" ;;
        esac
        pip "torch==$pin"
    fi
}

# Print a description of the build of torch that install_torch installs, for the message of install_torch.
build_that_fits() {
    if [ -n "${TORCH_INDEX_URL:-}" ]; then
        echo "the build of TORCH_INDEX_URL"
    elif wants_cuda; then
        echo "with CUDA for NVIDIA GPUs: 2.7 GB to download, 4.7 GB on disk (TORCH_INDEX_URL= selects another build)"
    elif [ "${TORCH_BUILD:-}" = cpu ]; then
        echo "for CPUs: 0.2 GB to download, 0.8 GB on disk"
    elif [ -e /dev/kfd ]; then
        echo "for CPUs (for the AMD GPU here, set TORCH_INDEX_URL= to an index of ROCm builds)"
    else
        echo "for CPUs, as no GPU was found: 0.2 GB to download, 0.8 GB on disk"
    fi
}
