"""Runs that are launched as docs/launching.md says, one command on each host."""

import subprocess
from pathlib import Path

import pytest

from tests.support import FULL, ROOT

from .lab import Host, lab, needs_hosts
from .runs import iterations, results_of
from .test_faults import LAYOUTS, STEPS
from .test_heartbeat import wait_for

SCRIPT = """
import sys
from tests.hosts.runs import train_gpt2

train_gpt2(" ".join(sys.argv[1:]), 0.1)
"""


class Nodes:
    """The commands of the two nodes of a run."""

    def __init__(self, folder: Path, data: str, vocab_file: str) -> None:
        self.folder = folder
        self.run_dir = folder / "run"
        (folder / "train.py").write_text(SCRIPT)
        where = f"--run-dir {self.run_dir} --data-path {data} --vocab-file {vocab_file}"
        self._flags = f"{STEPS} {LAYOUTS['pp 2']} {where}".split()

    def start(self, host: Host, *more: str) -> "subprocess.Popen[str]":
        """Start this project's launcher on a host."""
        number = int(host.name.removeprefix("node")) - 1
        nodes = f"--nnodes 2 --node-rank {number} --master-addr node1 --nproc-per-node 1".split()
        return self._start(host, "tools/launch.py", *nodes, *more)

    def start_deepspeed(self, host: Host) -> "subprocess.Popen[str]":
        """Start DeepSpeed's launcher on a host, which would otherwise reach the other host by ssh."""
        hosts = self.folder / "hosts"
        hosts.write_text("node1 slots=1\nnode2 slots=1\n")
        number = int(host.name.removeprefix("node")) - 1
        more = f"--hostfile {hosts} --no_ssh --node_rank {number} --master_addr node1".split()
        return self._start(host, "-m", "deepspeed.launcher.runner", *more)

    def _start(self, host: Host, *launcher: str) -> "subprocess.Popen[str]":
        argv = ["python", *launcher, str(self.folder / "train.py"), *self._flags]
        env = {"PYTHONPATH": str(ROOT), "TDS_HOST_TIMEOUT": "5"}
        return host.start(*argv, env=env, out=self.folder / f"{host.name}.log")

    def said(self) -> str:
        return "".join(file.read_text() for file in sorted(self.folder.glob("*.log")))


def wait_for_iteration(nodes: Nodes, iteration: int, *commands: "subprocess.Popen[str]") -> None:
    for _ in range(600):
        if iterations(nodes.run_dir) >= iteration:
            return
        with pytest.raises(subprocess.TimeoutExpired):  # a command that ends here has failed
            commands[0].wait(0.1)
    raise AssertionError(nodes.said())


@FULL
@needs_hosts
def test_both_launchers_train_the_same_run(tmp_path: Path, tiny_data: str, vocab_file: str) -> None:
    found = []
    for name in ("ours", "deepspeed"):
        (tmp_path / name).mkdir()
        nodes = Nodes(tmp_path / name, tiny_data, vocab_file)
        with lab(2) as net:
            commands = [nodes.start(host) if name == "ours" else nodes.start_deepspeed(host) for host in net.hosts]
            assert [command.wait(120) for command in commands] == [0, 0], nodes.said()
        found.append(results_of(nodes.run_dir))
    assert len(found[0]) == 16 and found[0] == found[1]


@FULL
@needs_hosts
def test_with_max_restarts_only_the_command_of_the_replaced_host_is_given_again(
    tmp_path: Path, tiny_data: str, vocab_file: str
) -> None:
    (tmp_path / "plain").mkdir()
    plain = Nodes(tmp_path / "plain", tiny_data, vocab_file)
    with lab(2) as net:
        commands = [plain.start(host) for host in net.hosts]
        assert [command.wait(120) for command in commands] == [0, 0], plain.said()
    nodes = Nodes(tmp_path, tiny_data, vocab_file)
    with lab(2) as net:
        first, second = net.hosts
        stays = nodes.start(first, "--max-restarts", "3")
        nodes.start(second, "--max-restarts", "3")
        wait_for_iteration(nodes, 6, stays)
        net.cut_power(second)
        wait_for(tmp_path / "node1.log", "node2 (rank 1) has not answered since")
        again = nodes.start(net.replace(second), "--max-restarts", "3")
        assert again.wait(120) == 0, nodes.said()
        assert stays.wait(30) == 0, nodes.said()
    assert results_of(nodes.run_dir) == results_of(plain.run_dir)
