"""Checks of the files in docker/, without building an image: syntax, the files they copy, the flags they pass."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron.config.command_line import parse
from megatron.config.defaults import DEFAULTS
from tests.support import FULL, ROOT, free_port

FOLDER = ROOT / "docker"
INSTRUCTIONS = {"FROM", "ARG", "RUN", "WORKDIR", "COPY", "ENV", "ENTRYPOINT", "CMD"}


def documents() -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((FOLDER / "pytorchjob.yaml").read_text(encoding="utf-8")))


DOCKERFILES = pytest.mark.parametrize("name", ["Dockerfile.cpu", "Dockerfile.cuda"])


@DOCKERFILES
def test_what_is_copied_before_the_installation_suffices_for_it(name: str, tmp_path: Path) -> None:
    """setup.sh needs no file that the Dockerfile copies only later. In the test, a shell script replaces Python."""
    lines = (FOLDER / name).read_text(encoding="utf-8").splitlines()
    (install,) = (at for at, line in enumerate(lines) if line.startswith("RUN") and "setup.sh" in line)
    for line in lines[:install]:
        if line.startswith("COPY"):
            *sources, target = line.split()[1:]
            (tmp_path / target).mkdir(exist_ok=True)
            for source in sources:
                shutil.copy(ROOT / source, tmp_path / target)
    python = tmp_path / ".venv/bin/python"
    python.parent.mkdir(parents=True)
    python.write_text('#!/bin/sh\necho "$@" >>asked\n')
    python.chmod(0o755)
    env = {**os.environ, "TORCH_INDEX_URL": ""}
    done = subprocess.run(
        ["bash", "-euc", lines[install].removeprefix("RUN ")], cwd=tmp_path, env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    asked = re.findall(r"torch==\S+", (tmp_path / "asked").read_text())
    assert asked[0].endswith("+cpu") and ("!=" in asked[0]) == name.endswith("cuda"), "torch for another device"


@DOCKERFILES
def test_dockerfiles(name: str) -> None:
    """Dockerfiles use known instructions, copy files that exist and are not in .dockerignore, and run valid shell."""
    text = (FOLDER / name).read_text(encoding="utf-8")
    assert f"-f docker/{name}" in text
    lines = [line.split(None, 1) for line in text.splitlines() if line and not line.startswith("#")]
    assert [word for word, _ in lines][0] == "FROM" and {word for word, _ in lines} <= INSTRUCTIONS
    ignored = (ROOT / ".dockerignore").read_text(encoding="utf-8").split()
    for word, rest in lines:
        if word == "COPY":
            *sources, _ = rest.split()
            assert all((ROOT / source).exists() and source not in ignored for source in sources)
        elif word in ("ENTRYPOINT", "CMD"):
            assert all(isinstance(each, str) for each in json.loads(rest))
        elif word == "RUN":
            shlex.split(rest)
            assert subprocess.run(["bash", "-n", "-c", rest], check=False).returncode == 0
    assert all((ROOT / each).exists() for each in re.findall(r"scripts/\w+\.sh", text))
    (command,) = (json.loads(rest) for word, rest in lines if word == "CMD")
    done = subprocess.run(["bash", *command], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "Variables:" in done.stdout


def test_the_job_of_kubernetes_gives_flags_that_our_scripts_take(tmp_path: Path) -> None:
    prepare, train = documents()
    (pod,) = prepare["spec"]["template"]["spec"]["containers"]
    script = pod["args"][1]
    assert subprocess.run(["bash", "-n", "-c", script], check=False).returncode == 0
    for tool, rest in re.findall(r"python tools/(\w+)\.py (.*)", script):
        known = subprocess.run(
            [sys.executable, ROOT / "tools" / f"{tool}.py", "--help"], capture_output=True, text=True
        )
        assert all(flag in known.stdout for flag in re.findall(r"--[a-z-]+", rest))
    replicas = train["spec"]["pytorchReplicaSpecs"]
    ranks = int(train["spec"]["nprocPerNode"]) * sum(spec["replicas"] for spec in replicas.values())
    for spec in replicas.values():
        (pod,) = spec["template"]["spec"]["containers"]
        assert pod["name"] == "pytorch" and pod["command"][1] == "tools/launch.py"
        script, *flags = pod["args"]
        flags = [flag.replace("configs/", f"{ROOT}/configs/") for flag in flags]
        config = parse(flags, DEFAULTS[re.findall(r"pretrain_(\w+)\.py", script)[0]], ranks)
        assert config.parallel.data_parallel_size(ranks) == 8
        mounted = {mount["mountPath"] for mount in pod["volumeMounts"]}
        assert mounted == {"/shared", "/dev/shm"}


def _environment(rank: int, nodes: int, each: int, port: int) -> dict[str, str]:
    """Return the environment variables that Kubeflow's training operator sets in the pod of a node."""
    return {
        "PET_NNODES": str(nodes),
        "PET_NPROC_PER_NODE": str(each),
        "PET_NODE_RANK": str(rank),
        "PET_MASTER_ADDR": "127.0.0.1",
        "PET_MASTER_PORT": str(port),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(nodes),
        "RANK": str(rank),
    }


def test_the_launcher_reads_the_variables_of_the_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.distributed.run import parse_args

    text = (FOLDER / "pytorchjob.yaml").read_text(encoding="utf-8")
    for name, value in _environment(1, 2, 8, 23456).items():
        monkeypatch.setenv(name, value)
        assert not name.startswith("PET_") or name in text
    args = parse_args(["pretrain_llama.py", "--run-dir=x"])  # type: ignore[no-untyped-call]
    assert (args.nnodes, args.nproc_per_node, args.node_rank) == ("2", "8", 1)
    assert (args.master_addr, args.master_port) == ("127.0.0.1", 23456)


@FULL
def test_two_pods(tmp_path: Path) -> None:
    rank = tmp_path / "rank.py"
    rank.write_text("import os\nprint(*(os.environ[name] for name in ('RANK', 'LOCAL_RANK', 'WORLD_SIZE')))\n")
    port = free_port()
    pods = [
        subprocess.Popen(
            [sys.executable, "tools/launch.py", str(rank)],
            cwd=ROOT,
            env={**os.environ, **_environment(node, 2, 2, port)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for node in range(2)
    ]
    said = [line for pod in pods for line in pod.communicate(timeout=100)[0].splitlines()]
    assert sorted(said) == ["0 0 4", "1 1 4", "2 0 4", "3 1 4"]
