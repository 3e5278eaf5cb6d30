"""Check an installation and a run before launch. Prints a line for each check, with a remedy for each problem.

Also accepts the command of a run, the training script and its flags; with --run-dir alone it uses the run's saved
settings. The exit code is 1 if any check failed.
"""

import argparse
import importlib.metadata
import json
import os
import sys
from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import megatron
from data_utils.cli import Parser, local_path, positive_float, positive_int, usable_cores
from megatron.config import Config

from . import corpora, machine, memory, network, run_dir, settings
from .finding import FAILED, WARNING, Finding, Findings, failed, findings_of, ok, warning

if TYPE_CHECKING:
    from megatron.config.ds_config import Resolved
    from megatron_tools.plan.cluster import Cluster

EXAMPLES = """\
  python tools/doctor.py
  python tools/doctor.py pretrain_gpt2.py --run-dir runs/mine --data-path data/corpus_text_document \\
      --vocab-file tokenizer.model --ranks 4 --pipe-parallel-size 2 --model-parallel-size 2 \\
      --config configs/models/gpt2_345M.json
  python tools/doctor.py --run-dir runs/mine --hostfile scripts/hostfile.example --json"""


class Examination:
    """All checks of one installation and one run, in order. Later checks use the results of earlier checks.

    args: the doctor's own flags. flags: the training script's flags.
    """

    def __init__(self, args: argparse.Namespace, flags: Sequence[str]) -> None:
        self.args = args
        self.flags = flags
        self.run_dir = Path(args.run_dir) if args.run_dir else None
        self.hosts: list[network.Host] = []
        self.config: Config | None = None
        self.has_torch = False
        self.tokenizer: Any = None
        self.cluster: Cluster | None = None
        if args.cluster:
            from megatron_tools.plan.cluster import load_cluster

            self.cluster = load_cluster(args.cluster)

    def findings(self) -> Findings:
        """Run the checks one after another and yield their findings."""
        yield from self._installation()
        yield from self._network()
        yield from self._settings()
        yield from self._machine()
        config = self.config
        if config is not None and self.has_torch:
            names_corpora = config.data.names_corpora
            # A layout for a cluster may be checked elsewhere, before there are any data, so their absence is no
            # failure.
            if self.args.cluster and not names_corpora and config.data.vocab_file is None:
                yield warning("data", "no corpus and no tokenizer is given", "give --data-path and --vocab-file")
            else:
                yield from findings_of("tokenizer", self._load_tokenizer(config))
                # With a family, by pretrain_*.py or --family, flags must name corpora. Other scripts may make data.
                if names_corpora or (self.flags and config.model.family):
                    yield from findings_of("data", corpora.check_corpora(config, self.tokenizer, self.args.quick))
                else:
                    yield warning("data", "data that the script itself makes are not checked", "use its --dry-run")
            yield from self._size_and_resume(config)
        if self.run_dir is not None:
            yield from findings_of("run directory", run_dir.check_writable(self.run_dir))
            yield from findings_of("run lock", run_dir.check_lock(self.run_dir, config))
        yield from self._hosts()

    @property
    def ranks(self) -> int:
        """Number of ranks in the run: the known number, else that of one model replica."""
        if self._known_ranks:
            return self._known_ranks
        return self.config.parallel.fewest_ranks if self.config else 1

    @property
    def _known_ranks(self) -> int:
        """Number of ranks: --ranks, else the hostfile's slots, else WORLD_SIZE, else 0."""
        slots = sum(host.slots for host in self.hosts)
        world = os.environ.get("WORLD_SIZE", "")
        world_size = int(world) if world.isdecimal() else 0
        return int(self.args.ranks or slots or world_size)

    @property
    def ranks_here(self) -> int | None:
        """Number of the run's ranks on a machine: as the hostfile, --cluster or LOCAL_WORLD_SIZE says.

        Without these, all ranks are taken for ranks of this machine if it has as many CPU cores or devices; else the
        number is unknown, None.
        """
        if self.hosts:
            return max(host.slots for host in self.hosts)
        if self.cluster:
            return min(self.ranks, self.cluster.devices_per_node)
        local = os.environ.get("LOCAL_WORLD_SIZE", "")
        if local.isdecimal():
            return int(local)
        devices = 0
        if self.has_torch:
            import torch

            devices = torch.accelerator.device_count()
        return self.ranks if self.ranks <= max(usable_cores(), devices) else None

    def _installation(self) -> Findings:
        """Check Python, the packages and their imports."""
        yield from machine.check_python()
        yield from machine.check_packages()
        import_findings = list(machine.check_import("torch"))
        # deepspeed imports torch, so without torch its import would only repeat the failure.
        if import_findings[0].state != FAILED:
            import_findings += machine.check_import("deepspeed")
        # The later checks import modules that need both packages.
        self.has_torch = import_findings[-1].state != FAILED
        yield from import_findings
        # The folders of PYTHONPATH, without empty entries, and those in which this process looks for modules.
        python_path = os.environ.get("PYTHONPATH", "").split(os.pathsep)
        folders = [*filter(None, python_path), *sys.path]
        yield from machine.check_hidden_package(Path(megatron.__file__).parent, folders)

    def _network(self) -> Findings:
        """Read the hostfile, and check names, interfaces, ports and the launcher's variables."""
        if self.args.hostfile:
            yield from network.check_hostfile(self.args.hostfile)
            with suppress(OSError, ValueError):  # reported by the check
                self.hosts = network.read_hostfile(self.args.hostfile)
            slots = sum(host.slots for host in self.hosts)
            if self.hosts and self.args.ranks and self.args.ranks != slots:
                yield failed(
                    "hostfile",
                    f"the file lists {slots} slots, but --ranks is {self.args.ranks}",
                    "omit --ranks, or change the slots in the hostfile",
                )
        yield from network.check_launcher_variables()
        yield from findings_of("names", network.check_host_names())
        yield from network.check_master_address()
        yield from findings_of("interface", network.check_interfaces())
        yield from findings_of("port", network.check_port())

    def _settings(self) -> Findings:
        """Parse the flags, or read the saved settings of the run, and check the layout."""
        flags = list(self.flags)
        saved_config = None
        if self.run_dir is not None:
            saved_config = self.run_dir / "config.json"
            if flags:
                # The doctor's own parser has taken --run-dir out of the script's flags.
                flags += ["--run-dir", str(self.run_dir)]
        # Without flags or saved settings, only the installation is checked.
        if not flags and (saved_config is None or not saved_config.is_file()):
            return
        self.config, findings = settings.read_settings(flags, saved_config, self._known_ranks)
        yield from findings
        if self.config is None:
            return
        run_directory = self.config.log.run_dir or self.config.checkpoint.save
        if self.run_dir is None and run_directory:
            self.run_dir = Path(run_directory)
        yield from settings.check_layout(self.config, self.ranks)

    def _machine(self) -> Findings:
        """Check devices, compiler, threads, open files and shared memory of this machine."""
        finds_device = False
        if self.has_torch:
            from megatron.ranks import device

            finds_device = device.has_accelerator()
            has_gpu = any(Path("/dev").glob("nvidia[0-9]*"))
            built_for = device.supported_accelerator()
            yield from findings_of("devices", machine.check_devices(built_for, finds_device, has_gpu))
        if not self.args.cluster:
            if self.config is not None and self.config.train.compile and not finds_device:
                yield from machine.check_compiler()
            yield from machine.check_threads(self.ranks_here or self.ranks, on_cpu=not finds_device)
        yield from machine.check_open_files()
        yield from machine.check_shared_memory()

    def _load_tokenizer(self, config: Config) -> Findings:
        from megatron.tasks import task_of
        from megatron.tokenizer import load_tokenizer

        if config.data.vocab_file is None:
            yield failed("tokenizer", "none is given", "give --vocab-file; tools/train_tokenizer.py trains a tokenizer")
            return
        self.tokenizer = task_of(config).extended(
            config, load_tokenizer(config.data.vocab_file, config.data.tokenizer_type)
        )
        size = config.model.vocab_size or self.tokenizer.vocab_size
        text = f"{config.data.vocab_file}: {self.tokenizer.vocab_size} tokens"
        if size < self.tokenizer.vocab_size:
            yield failed(
                "tokenizer",
                f"{text} (with the sentinels of a T5), more than --vocab-size {size}",
                "raise --vocab-size or leave it out",
            )
        else:
            yield ok("tokenizer", text)

    def _size_and_resume(self, config: Config) -> Findings:
        """Estimate the memory, and check the disk and the checkpoint to resume from."""
        from megatron.config.command_line import with_values

        resolved, findings = settings.resolve_settings(config, self.ranks, self.cluster)
        yield from findings
        vocab_size = corpora.vocabulary_size(config, self.tokenizer)
        if vocab_size is None:
            yield warning(
                "memory",
                "the memory was not estimated: the vocabulary size is unknown",
                "give --vocab-file or --vocab-size",
            )
            return
        # The size of a model depends on its vocabulary, which the tokenizer gives if no flag does.
        full_config = with_values(config, {"vocab_size": vocab_size})
        yield from findings_of("memory", self._memory(full_config, resolved))
        if self.run_dir is not None:
            # Without a tokenizer, that of the checkpoint is not compared.
            fingerprint = self.tokenizer.fingerprint if self.tokenizer is not None else None
            yield from findings_of(
                "checkpoint", run_dir.check_resume(full_config, self.run_dir, fingerprint, self.args.quick)
            )

    def _memory(self, config: Config, resolved: "Resolved | None") -> Findings:
        """Check that the model fits in memory, and its checkpoints on the disk."""
        from megatron.ranks import device
        from megatron.training.run_folder import save_dir_of

        device_bytes: float | None = None
        if device.has_accelerator():
            device_bytes = device.total_memory(device.current_device())
        # With --cluster, the memory of its devices counts, not that of this machine.
        if self.cluster:
            device_bytes = self.cluster.memory * 1e9 if self.cluster.accelerated else None
        yield from settings.check_memory(config, resolved, self.ranks, self.ranks_here, device_bytes)
        if self.run_dir is not None and config.model.family:  # the size of a custom model is unknown
            save_dir = save_dir_of(config, self.run_dir)
            yield from run_dir.check_disk(save_dir, self.run_dir, memory.checkpoint_bytes(config), config)

    def _hosts(self) -> Findings:
        """Check over ssh that all hosts have equal versions and share the run directory."""
        if not self.hosts:
            return
        # Of Python, torch and deepspeed. All hosts must have the same.
        versions = [".".join(map(str, sys.version_info[:2]))]
        try:
            versions += map(importlib.metadata.version, ("torch", "deepspeed"))
        except importlib.metadata.PackageNotFoundError:
            return  # `machine.check_packages` has already reported the missing package
        try:
            # Other hosts look for a temporary file in the run directory. Without one, only the versions are compared.
            marker_context = run_dir.create_marker(self.run_dir) if self.run_dir is not None else nullcontext()
        except OSError:  # `run_dir.check_writable` has already reported it
            marker_context = nullcontext()
        with marker_context as file:
            path = Path(file.name) if file is not None else None
            yield from network.check_hosts(self.hosts, versions, path, self.args.ssh_timeout)


def build_parser() -> Parser:
    parser = Parser(__doc__, EXAMPLES)
    add = parser.add_argument
    add("--run-dir", type=local_path, help="folder of the run")
    add("--hostfile", type=local_path, help="file with lines such as 'node1 slots=8'; each host is checked over ssh")
    add(
        "--ranks",
        type=positive_int,
        help="number of ranks of the run (default: slots of the hostfile, else WORLD_SIZE, else one model replica)",
    )
    add(
        "--cluster",
        type=local_path,
        help="hardware of the run, such as h100: its memory is checked, not this machine's",
    )
    add(
        "--ssh-timeout",
        type=positive_float,
        default=network.SSH_SECONDS,
        help="seconds to wait for a host (default: 10)",
    )
    add("--quick", action="store_true", help="skip the checks that read the whole checkpoint and the whole corpora")
    add("--json", action="store_true", help="print the results as a JSON list")
    return parser


def main(argv: Sequence[str]) -> int:
    parser = build_parser()
    args, flags = parser.parse_known_args(argv)
    try:
        examination = Examination(args, flags)
    except ValueError as error:
        parser.error(f"--cluster: {error}")
    findings = list[Finding]()
    counts: Counter[str] = Counter()
    for finding in examination.findings():
        findings.append(finding)
        counts[finding.state] += 1
        if not args.json:
            print(finding, flush=True)
    if args.json:
        print(json.dumps(list(map(asdict, findings)), indent=2, ensure_ascii=False))
    else:
        print(f"{len(findings)} checks: {counts[FAILED]} failed, {counts[WARNING]} warnings")
    return 1 if counts[FAILED] else 0


def cli() -> None:
    sys.exit(main(sys.argv[1:]))
