"""pyproject.toml, requirements.txt and scripts/setup.sh agree on versions; setup.sh selects the right torch build."""

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from megatron.packages import pip_install
from megatron_tools.doctor.machine import SUPPORTED, TOO_NEW, version_key
from tds._deepspeed import SUPPORTED as SUPPORTED_DEEPSPEED
from tests.support import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
RANGES = {each.name: each.specifier for each in map(Requirement, PROJECT["dependencies"])}


def pins(name: str) -> dict[str, str]:
    lines = (ROOT / name).read_text(encoding="utf-8").splitlines()
    return dict(line.split("==") for line in lines if line and not line.startswith("#"))


def test_pins_lie_in_the_ranges() -> None:
    there = pins("requirements.txt")
    assert set(RANGES) <= set(there)
    assert [name for name, range_ in RANGES.items() if not range_.contains(there[name], prereleases=True)] == []
    extras = [Requirement(each) for group in PROJECT["optional-dependencies"].values() for each in group]
    pinned = {**there, **pins("requirements-dev.txt")}
    assert [e.name for e in extras if e.name in pinned and not e.specifier.contains(pinned[e.name])] == []


def test_the_doctor_has_the_same_ends() -> None:
    for name, (oldest, _) in SUPPORTED.items():
        (low,) = (each.version for each in RANGES[name] if each.operator == ">=")
        assert version_key(low)[:2] == version_key(oldest)[:2], name
    ends = {each.operator: version_key(each.version)[:2] for each in RANGES["deepspeed"]}
    assert (ends[">="], ends["<"]) == SUPPORTED_DEEPSPEED and ends["<"] == version_key(TOO_NEW["deepspeed"])


@pytest.mark.parametrize("found", ["2.11.0a0+ecd3bbb.nv26.03", "2.11.0", "2.13.0+rocm7.1", "2.15.0"])
def test_a_users_torch_satisfies_the_range(found: str) -> None:
    assert RANGES["torch"].contains(found, prereleases=True)


def test_no_registry_is_named() -> None:
    hosts = re.compile(r"pypi\.org|pythonhosted|download\.pytorch|registry\.npmjs|aliyun|tsinghua")
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    files = [ROOT / name for name in listed.stdout.splitlines() if name != "tests/unit/test_requirements.py"]
    texts = [
        path
        for path in files
        if path.suffix in (".py", ".sh", ".md", ".toml", ".txt", ".yml", ".yaml", ".json", ".cff")
    ]
    assert [str(path) for path in texts if hosts.search(path.read_text(encoding="utf-8"))] == []


# -------------------------- setup.sh chooses a build of torch; a script stands in for Python and pip

STAND_IN = """#!/bin/bash
# torch is what the file `torch` says; pip writes down what it is asked for, and has what `served` matches
here=$(cd "$(dirname "$0")/../.." && pwd)
case "$*" in
    *metadata*) cat "$here/torch" 2>/dev/null || true ;;
    *tomllib*) exec "$REAL_PYTHON" "$@" ;;
    *"pip install"*) echo "${@: -1}" "$@" >>"$here/asked"
        case "${@: -1}" in
            torch==*) grep -qxF -- "${@: -1}" "$here/served" || exit 1; version=${@: -1}; version=${version#torch==}
                echo "${version%%,*}" >"$here/torch" ;;
        esac ;;
esac
"""


def set_up(
    folder: Path, torch: str = "", served: str = "torch==2.13.0", kind: str = "", **env: str
) -> tuple[int, str, str]:
    """Run setup.sh; return the exit code, the output and the arguments of pip.

    torch: version of torch that .venv already has, or "". served: version of torch that the stand-in for pip installs.
    kind: argument of setup.sh, or "".
    """
    for name in ("scripts/setup.sh", "scripts/_torch.sh", "requirements.txt", "pyproject.toml"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes((ROOT / name).read_bytes())
    python = folder / ".venv/bin/python"
    python.parent.mkdir(parents=True, exist_ok=True)
    python.write_text(STAND_IN)
    python.chmod(0o755)
    (folder / "served").write_text(served + "\n")
    if torch:
        (folder / "torch").write_text(torch + "\n")
    environment = {key: value for key, value in os.environ.items() if key != "TORCH_INDEX_URL"} | env
    environment["REAL_PYTHON"] = sys.executable
    command = ["bash", "scripts/setup.sh", *kind.split()]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, env=environment, timeout=60)
    asked = (folder / "asked").read_text() if (folder / "asked").exists() else ""
    return done.returncode, done.stdout + done.stderr, asked


def test_all_installs_each_optional_package_once(tmp_path: Path) -> None:
    code, said, asked = set_up(tmp_path, torch="2.13.0", kind="all")
    assert code == 0, said
    wanted = (tmp_path / ".venv/wanted.txt").read_text().splitlines()
    groups = PROJECT["optional-dependencies"]
    optional = {each for name, group in groups.items() if name != "dev" for each in group if "megatron-tds" not in each}
    assert len(wanted) == len(optional) and set(wanted) == optional
    assert len(asked.splitlines()) == 2
    assert set_up(tmp_path, torch="2.13.0", kind="all")[2] == asked, "nothing is installed again"


no_gpu = pytest.mark.skipif(any(Path("/dev").glob("nvidia[0-9]*")), reason="there is a GPU here")


@no_gpu
def test_without_a_gpu_the_build_for_cpus_is_taken_where_there_is_one(tmp_path: Path) -> None:
    code, said, asked = set_up(tmp_path, served="torch==2.13.0+cpu")
    assert code == 0 and "for CPUs, as no GPU was found: 0.2 GB to download" in said and "CUDA" not in said
    assert asked.splitlines()[0].startswith("torch==2.13.0+cpu ") and ".venv/torch.txt" in asked.splitlines()[1]
    assert (tmp_path / ".venv/torch.txt").read_text() == "torch==2.13.0+cpu\n"
    assert "torch==" not in (tmp_path / ".venv/wanted.txt").read_text()


@no_gpu
def test_without_one_it_says_how_large_what_comes_is(tmp_path: Path) -> None:
    code, said, asked = set_up(tmp_path)
    assert code == 0 and [line.split()[0] for line in asked.splitlines()[:2]] == ["torch==2.13.0+cpu", "torch==2.13.0"]
    if os.uname().machine == "x86_64" and os.uname().sysname == "Linux":
        assert "2.7 GB to download, 4.7 GB on disk (TORCH_INDEX_URL= selects another index)" in said


def test_an_index_of_ones_own(tmp_path: Path) -> None:
    code, said, asked = set_up(tmp_path, TORCH_INDEX_URL="file:///builds")
    assert code == 0 and "the build of TORCH_INDEX_URL" in said
    assert "--extra-index-url file:///builds torch==2.13.0" in asked.splitlines()[0]


@pytest.mark.parametrize("theirs", ["2.12.1+rocm7.1", "2.11.0a0+ecd3bbb.nv26.03", "2.15.0"])
def test_a_torch_of_somebody_else_stays(tmp_path: Path, theirs: str) -> None:
    code, said, asked = set_up(tmp_path, torch=theirs)
    assert code == 0 and f"keeping torch {theirs}" in said
    assert "torch==2.13.0" not in asked and (tmp_path / ".venv/torch.txt").read_text() == f"torch=={theirs}\n"


def test_one_that_is_too_old_is_not_replaced_either(tmp_path: Path) -> None:
    code, said, asked = set_up(tmp_path, torch="2.10.0")
    assert code == 2 and "which this script did not install, but 2.11 or newer is needed" in said and not asked


def test_our_own_of_an_older_list_gives_way(tmp_path: Path) -> None:
    (tmp_path / ".venv").mkdir()
    (tmp_path / ".venv/.installed-requirements.txt").write_text("torch==2.12.1\n")
    code, _, asked = set_up(tmp_path, torch="2.12.1+cpu", served="torch==2.13.0", TORCH_INDEX_URL="file:///builds")
    assert code == 0 and asked.startswith("torch==2.13.0 ")


def test_advice_names_the_python_that_lacks_a_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without an activated environment, `pip` in a shell would install the package for another Python."""
    own = tmp_path / "env" / "bin"
    own.mkdir(parents=True)
    for name in ("pip", "python"):
        (own / name).touch(mode=0o755)
    monkeypatch.setattr("sys.executable", str(own / "python"))
    monkeypatch.setenv("PATH", str(own))
    assert pip_install("gradio>=6,<7") == "pip install 'gradio>=6,<7'"
    monkeypatch.setenv("PATH", str(tmp_path))
    assert pip_install("ray") == f"{own}/python -m pip install ray"
    monkeypatch.chdir(tmp_path)
    assert pip_install("ray") == "env/bin/python -m pip install ray"
