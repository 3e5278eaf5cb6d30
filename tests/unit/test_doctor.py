"""tools/doctor.py finds each fault that a test creates, and reports it in one line that says what to do."""

import json
import os
import re
import resource
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from data_utils import inspect_data, preprocess_data
from data_utils.indexed_writer import IndexedDatasetBuilder
from data_utils.sidecars import read_sidecar
from data_utils.tokenizer_training import train_byte_bpe
from megatron.config.command_line import parse
from megatron.config.defaults import DEFAULTS
from megatron.data.corpus_paths import TRIPLE_PARTS
from megatron.data.fingerprints import made_with
from megatron.locks.run_lock import Holder, RunLock
from megatron.storage import RemotePath
from megatron.tasks import TASKS
from megatron.tokenizer import Tokenizer, load_tokenizer
from megatron.training.inputs import check_tokenizer
from megatron_tools.doctor import corpora, doctor, machine, memory, network, run_dir, settings
from megatron_tools.doctor.finding import Finding
from tests.sentences import SENTENCES
from tests.support import ROOT

MODEL = [
    "--num-layers",
    "2",
    "--hidden-size",
    "16",
    "--num-attention-heads",
    "2",
    "--seq-length",
    "16",
    "--split",
    "90,10,0",
]


def only(found: Iterable[Finding], check: str) -> Finding:
    return next(each for each in found if each.check == check)


@pytest.fixture
def examined(tmp_path: Path, tiny_data: str, vocab_file: str, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """A function that runs the checks of tools/doctor.py with the given flags and returns check name -> finding."""
    for name in ("WORLD_SIZE", "MASTER_PORT", "MASTER_ADDR", "GLOO_SOCKET_IFNAME", "PYTHONPATH"):
        monkeypatch.delenv(name, raising=False)

    def examine(*flags: str, data: str = tiny_data) -> dict[str, Finding]:
        given = ["--run-dir", str(tmp_path / "run"), "--data-path", data, "--vocab-file", vocab_file, *MODEL, *flags]
        args, rest = doctor.build_parser().parse_known_args(given)
        return {each.check: each for each in doctor.Examination(args, rest).findings()}

    return examine


def test_a_healthy_run(examined: Callable[..., Any], tmp_path: Path) -> None:
    found = examined("--ranks", "2", "--model-parallel-size", "2")
    assert [str(each) for each in found.values() if each.state == "failed"] == []
    expected = {
        "torch",
        "deepspeed",
        "settings",
        "layout",
        "ds_config",
        "data",
        "tokens",
        "memory",
        "disk",
        "checkpoint",
    }
    assert expected <= found.keys() and not (tmp_path / "run").exists()


def test_all_faults_of_flags_and_files(examined: Callable[..., Any], tmp_path: Path, tiny_data: str) -> None:
    def check(name: str, words: str, *flags: str, data: str = tiny_data, state: str = "failed") -> None:
        found = examined(*flags, data=data)[name]
        assert found.state == state and words in found.words and found.remedy, found

    check("settings", "unknown argument --num-layer; did you mean --num-layers?", "--num-layer", "3")
    check("layout", "3 ranks cannot be divided", "--ranks", "3", "--model-parallel-size", "2")
    refused = tmp_path / "ds.json"
    refused.write_text('{"scheduler": {}}')
    check("ds_config", "'scheduler' has no effect in this project", "--deepspeed-config", str(refused))
    check("tokens", "a sample needs 4097", "--seq-length", "4096", state="warning")
    check("tokens", "a sample needs 100001", "--seq-length", "100000")
    check("data", "there is no", data=str(tmp_path / "nowhere"))
    check("ids", "the largest id of the vocabulary is 499", "--vocab-size", "500")

    cut = tmp_path / "cut"
    for ending in (".bin", ".idx"):
        shutil.copy(tiny_data + ending, f"{cut}{ending}")
    os.truncate(f"{cut}.bin", 100)
    check("data", "100", data=str(cut))
    shutil.copy(tiny_data + ".bin", f"{cut}.bin")
    Path(f"{cut}.json").write_text(json.dumps({"fingerprint": "0" * 64}))
    check("tokenizer of the data", "SHA-256 000000000000", data=str(cut))


def test_memory_and_disk(examined: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "machine_bytes", lambda: 1e5)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1e5))
    found = examined("--num-workers", "2")
    assert found["memory"].state == "failed" and "--zero-stage" in found["memory"].remedy
    assert found["disk"].state == "failed" and "--keep-last" in found["disk"].remedy
    assert found["shared memory"].state == "warning" and "--shm-size" in found["shared memory"].remedy


def test_disk_for_the_checkpoints_that_keep_every_keeps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 100 saves, --keep-every keeps all, or those at every 7th iteration that is also one of a save."""
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=37e9))

    def state(*flags: str) -> str:
        saves = ["--train-iters", "100000", "--save-interval", "1000", "--keep-last", "2"]
        config = parse(["--data-path", "a", *saves, *flags], {})
        return only(run_dir.check_disk(tmp_path, tmp_path, 7.5e9, config), "disk").state

    assert state() == "ok"
    assert state("--keep-every", "1000") == "warning"
    assert state("--keep-every", "7") == "warning"  # 14 multiples of 7000
    assert state("--keep-every", "60001") == "ok"
    (tmp_path / "iter_0099000").mkdir()
    assert state("--keep-every", "1000") == "ok", "one more is kept; the others are there"


@pytest.mark.parametrize(
    ("data", "expected"), [("--data-path", "failed"), ("--train-data-path", "ok"), ("--data-stages", "failed")]
)
def test_another_split_matters_only_if_it_changes_the_training_documents(
    data: str, expected: str, tiny_data: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from megatron.checkpointing import Wanted, reader

    words = f"0: {tiny_data}" if data == "--data-stages" else tiny_data
    saved, config = (parse([data, words, "--split", split], {}) for split in ("100,0,0", "90,10,0"))
    monkeypatch.setattr(reader, "plain_config", lambda _: saved)
    checkpoint = SimpleNamespace(state={"consumed_samples": 8, "iteration": 2})
    assert only(run_dir._check_samples(checkpoint, config, Wanted()), "resume").state == expected
    same_documents = parse([data, words, "--split", "200,0,0"], {})
    assert only(run_dir._check_samples(checkpoint, same_documents, Wanted()), "resume").state == "ok"


@pytest.mark.parametrize(("corpus", "expected"), [("b", "ok"), ("c", "warning")])
def test_data_that_override_data_has_begun_continue(
    corpus: str, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from megatron.checkpointing import Wanted, reader

    for token, name in enumerate("abc"):
        with IndexedDatasetBuilder(str(tmp_path / name), np.uint16) as builder:
            builder.add_document(np.full(9, token))
    monkeypatch.chdir(tmp_path)
    saved = parse(["--data-stages", "0: a; 4: b", "--data-path", "b"], {})
    monkeypatch.setattr(reader, "plain_config", lambda _: saved)
    checkpoint = SimpleNamespace(state={"consumed_samples": 8, "iteration": 2})
    config = parse(["--data-path", corpus], {})
    assert only(run_dir._check_samples(checkpoint, config, Wanted()), "resume").state == expected


def test_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        if name == "torch":
            raise machine.importlib.metadata.PackageNotFoundError(name)
        return {"deepspeed": "0.16.9", "numpy": "9.0"}[name]

    monkeypatch.setattr(machine.importlib.metadata, "version", version)
    found = list(machine.check_packages())
    assert [each.state for each in found] == ["failed", "failed", "warning"]
    assert found[0].remedy.startswith("pip install") and found[1].words == "0.16.9 is too old"
    for release, state in (("0.18.9", "failed"), ("0.19.0", "ok"), ("0.19.99", "warning"), ("0.20.0", "failed")):
        monkeypatch.setattr(machine.importlib.metadata, "version", lambda name, release=release: release)
        assert {each.check: each.state for each in machine.check_packages()}["deepspeed"] == state, release
    assert machine.version_key("2.13.0+cpu") == (2, 13, 0) > machine.version_key("2.6")


def test_a_torch_that_cannot_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken:
        def find_spec(self, name: str, *_: Any) -> None:
            if name == "torch":
                raise OSError("libtorch.so: cannot open shared object file")

    monkeypatch.delitem(sys.modules, "torch")
    monkeypatch.setattr(sys, "meta_path", [Broken(), *sys.meta_path])
    found = list(machine.check_import("torch"))
    assert found[0].state == "failed" and "libtorch.so" in found[0].words and "pytorch.org" in found[0].remedy


def test_a_build_of_torch_that_does_not_fit() -> None:
    def state(*given: Any) -> tuple[str, str]:
        (found,) = machine.check_devices(*given)
        return found.state, found.words

    assert state(None, False, True) == ("failed", "there is a GPU, but this torch was built for CPUs only")
    assert state("CUDA 13", False, True)[0] == "failed"
    assert state("CUDA 13", False, False)[0] == "warning"
    assert state("CUDA 13", True, True)[0] == state(None, False, False)[0] == "ok"


def test_another_package_of_our_name(tmp_path: Path) -> None:
    ours, other = tmp_path / "ours" / "megatron", tmp_path / "other" / "megatron"
    for folder in (ours, other):
        folder.mkdir(parents=True)
        (folder / "__init__.py").touch()
    before, after = [str(other.parent), str(ours.parent)], [str(ours.parent), str(other.parent)]
    (hidden,), (there,) = machine.check_hidden_package(ours, before), machine.check_hidden_package(ours, after)
    assert hidden.state == "failed" and "hides" in hidden.words and "PYTHONPATH" in hidden.remedy
    assert there.state == "warning"
    assert next(machine.check_hidden_package(ours, [str(ours.parent)])).state == "ok"


def test_compiler_threads_and_open_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert only(machine.check_compiler(), "compiler").state == "failed"
    monkeypatch.setenv("OMP_NUM_THREADS", "many")
    assert only(machine.check_threads(1, True), "threads").state == "failed"
    monkeypatch.setenv("OMP_NUM_THREADS", "64")
    assert only(machine.check_threads(64, True), "threads").state == "warning"
    for limit, state in ((64, "failed"), (1024, "warning"), (resource.RLIM_INFINITY, "ok")):
        monkeypatch.setattr(resource, "getrlimit", lambda _, limit=limit: (limit, limit))
        assert only(machine.check_open_files(), "open files").state == state


def test_ports_names_and_interfaces(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        monkeypatch.setenv("MASTER_PORT", str(taken.getsockname()[1]))
        found = only(network.check_port(), "port")
        assert found.state == "failed" and "another MASTER_PORT" in found.remedy
    assert only(network.check_port(), "port").state == "ok"
    monkeypatch.setenv("MASTER_PORT", "many")
    assert only(network.check_port(), "port").state == "failed"
    monkeypatch.setattr(socket, "gethostname", lambda: "no-such-host.invalid")
    found = only(network.check_host_names(), "hostname")
    assert found.state == "failed" and "/etc/hosts" in found.remedy and "127." not in found.remedy
    for address, state in (("127.0.1.1", "warning"), ("10.0.0.5", "ok")):  # the first one is Debian's own entry
        with monkeypatch.context() as patch:
            patch.setattr(socket, "getaddrinfo", lambda *_, address=address: [(0, 0, 0, "", (address, 0))])
            assert only(network.check_host_names(), "hostname").state == state
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nowhere7")
    found = only(network.check_interfaces(), "interface")
    assert found.state == "failed" and "nowhere7" in found.words


@pytest.mark.parametrize(
    "text, words",
    [
        ("node1 slots=8\nnode2 8\n", "line 2"),
        ("a slots=1\na slots=1\n", "twice"),
        ("# none\n", "no host"),
        ("a slots=x", "line 1"),
    ],
)
def test_a_wrong_hostfile(text: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text(text)
    (found,) = network.check_hostfile(str(tmp_path / "hosts"))
    assert found.state == "failed" and words in found.words and "slots=N" in found.remedy


SSH = """#!/bin/sh
for word; do case $word in up|old|far|down|slow) host=$word;; esac; done
case $host in
  up) echo VERSIONS 3.11 2.13.0 0.19.8; echo SHARED;;
  old) echo VERSIONS 3.11 2.9.0 0.19.8; echo SHARED;;
  far) echo VERSIONS 3.11 2.13.0 0.19.8;;
  down) echo "down: Permission denied (publickey)." >&2; exit 255;;
  slow) exec sleep 30;;
esac
"""


def test_hosts_over_ssh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "ssh").write_text(SSH)
    (tmp_path / "ssh").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    hosts = [network.Host(name, 8) for name in ("up", "old", "far", "down", "slow", "localhost")]
    versions = ["3.11", "2.13.0", "0.19.8"]
    found = {each.check: each for each in network.check_hosts(hosts, versions, tmp_path / "marker", seconds=1)}
    states = {name: each.state for name, each in found.items()}
    assert states == {
        "host up": "ok", "disk of up": "ok", "host old": "failed", "disk of old": "ok", "host far": "ok",
        "disk of far": "failed", "host down": "failed", "host slow": "failed",
    }  # fmt: skip
    assert "2.9.0" in found["host old"].words and "all hosts share" in found["disk of far"].remedy
    assert "Permission denied" in found["host down"].words and "ssh-copy-id down" in found["host down"].remedy
    assert "did not answer" in found["host slow"].words


def test_a_lock_of_the_folder_of_checkpoints(tmp_path: Path) -> None:
    held = RunLock(tmp_path / "a" / "checkpoints")
    config = parse(["--save", str(tmp_path / "a" / "checkpoints")])
    found = only(run_dir.check_lock(tmp_path / "b", config), "run lock")
    assert found.state == "failed" and "a/checkpoints is in use" in found.words and "another --save" in found.remedy
    held.release()
    assert only(run_dir.check_lock(tmp_path / "b", config), "run lock").state == "ok"


def test_run_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held = RunLock(tmp_path)
    found = only(run_dir.check_lock(tmp_path), "run lock")
    assert found.state == "failed" and f"process {os.getpid()}" in found.words and "another --run-dir" in found.remedy
    held.release()
    assert only(run_dir.check_lock(tmp_path), "run lock").state == "ok"
    (tmp_path / "run.lock").write_text(json.dumps(asdict(Holder.here())))
    assert only(run_dir.check_lock(tmp_path), "run lock").state == "warning"
    monkeypatch.setattr("megatron.locks.advisory.LOCAL", ())
    (tmp_path / "run.lock").write_text("{")
    found = only(run_dir.check_lock(tmp_path), "run lock")
    assert found.state == "failed" and "another process" in found.words and "delete" in found.remedy


def test_a_run_directory_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    found = only(run_dir.check_writable(tmp_path / "file" / "run"), "run directory")
    assert found.state == "failed" and "--run-dir" in found.remedy


def test_checkpoints_that_are_damaged(examined: Callable[..., Any], tmp_path: Path) -> None:
    folder = tmp_path / "run" / "checkpoints"
    folder.mkdir(parents=True)
    (folder / "latest").write_text("iter_0000007\n")
    found = examined()["checkpoint"]
    assert found.state == "failed" and "iter_0000007" in found.words and "latest" in found.remedy


def test_remedies_fit_the_problem(examined: Callable[..., Any], tmp_path: Path) -> None:
    """The flag is at fault, and neither a ds_config, nor a missing corpus, nor a damaged checkpoint of this run."""
    found = examined("--quick", "--optimizer", "muon", "--zero-stage", "2", "--load", str(tmp_path), data="0.7")
    flag_is_wrong = found["ds_config"]
    assert (
        flag_is_wrong.state == "failed" and "flag" in flag_is_wrong.remedy and "ds_config" not in flag_is_wrong.remedy
    )
    assert found["data"].state == "failed" and "correct the flag" in found["data"].remedy
    assert found["checkpoint"].state == "failed" and "another --load" in found["checkpoint"].remedy


def test_a_run_whose_only_folder_is_that_of_save_is_examined(
    tmp_path: Path, tiny_data: str, vocab_file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    (tmp_path / "latest").write_text("iter_0000100\n")  # its checkpoint is missing
    monkeypatch.setattr("megatron.locks.advisory.LOCAL", ())
    (tmp_path / "run.lock").write_text("damaged")
    given = ["--quick", *MODEL, "--data-path", tiny_data, "--vocab-file", vocab_file, "--save", str(tmp_path)]
    args, rest = doctor.build_parser().parse_known_args(given)
    states = {each.check: each.state for each in doctor.Examination(args, rest).findings()}
    assert states["checkpoint"] == states["run lock"] == "failed"
    assert states.keys() >= {"disk", "run directory"}


def test_a_first_start_is_no_failure_and_a_forgotten_save_is_one(tmp_path: Path) -> None:
    run = tmp_path / "run"
    saved = tmp_path / "saved"
    run.mkdir()
    flags = [*MODEL, "--run-dir", str(run)]
    config = parse([*flags, "--save", str(saved), "--load", str(saved)])
    assert [each.state for each in run_dir.check_resume(config, run, None, quick=True)] == ["ok"]
    strict = parse([*flags, "--save", str(saved), "--load", str(saved), "--exit-on-missing-checkpoint"])
    assert [each.state for each in run_dir.check_resume(strict, run, None, quick=True)] == ["failed"]
    saved.mkdir()
    (saved / "latest").write_text("iter_0000500\n")
    (run / "config.json").write_text(json.dumps(config.to_dict()))
    (found,) = run_dir.check_resume(parse(flags), run, None, quick=True)
    assert found.state == "failed" and f"--save {saved}" in found.words


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("MASTER_PORT", "none")
    assert doctor.main(["--run-dir", str(tmp_path), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert {"check", "state", "words", "remedy"} == set(found[0])
    monkeypatch.delenv("MASTER_PORT")
    monkeypatch.setattr(network, "check_port", lambda: iter(()))
    assert doctor.main(["--run-dir", str(tmp_path)]) == 0
    assert "0 failed" in capsys.readouterr().out.splitlines()[-1]


def test_the_memory_of_a_schedule_that_only_the_script_knows_is_not_estimated() -> None:
    flags = [*MODEL, "--vocab-size", "64", "--pipe-parallel-size", "2", "--pipeline-schedule", "waves"]
    config, found = settings.read_settings(["mine.py", *flags], None, 2)
    assert config is not None and found[0].state == "ok"
    resolved, findings = settings.resolve_settings(config, 2, None)
    assert [each.state for each in findings] == ["ok"]
    (memory_finding,) = settings.check_memory(config, resolved, 2, 2, None)
    assert memory_finding.state == "warning" and "waves" in memory_finding.words


@pytest.mark.parametrize("method", ["measured", "uniform", "parameters", "type:GPT2Layer"])
def test_without_known_stages_memory_is_not_estimated_and_the_disk_is_checked(
    method: str, examined: Callable[..., Any]
) -> None:
    """These stages are only known when the model is built."""
    found = examined("--quick", "--ranks", "2", "--pipe-parallel-size", "2", "--partition-method", method)
    assert (found["memory"].state, found["disk"].state) == ("ok", "ok")
    assert "--partition-method" in found["memory"].words


@pytest.mark.parametrize("has_flags", [False, True])
def test_a_script_may_make_its_data_and_its_model(has_flags: bool, tmp_path: Path, vocab_file: str) -> None:
    flags = [*MODEL, "--vocab-file", vocab_file]
    given = ["mine.py", *flags]
    if not has_flags:
        (tmp_path / "config.json").write_text(json.dumps(parse(flags).to_dict()))
        given = []
    args, rest = doctor.build_parser().parse_known_args(["--quick", "--run-dir", str(tmp_path), *given])
    found = {each.check: each for each in doctor.Examination(args, rest).findings()}
    assert (found["data"].state, found["checkpoint"].state, found["memory"].state) == ("warning", "ok", "ok")
    assert "custom model" in found["memory"].words and "disk" not in found


def test_settings_of_a_run_that_has_begun(tmp_path: Path) -> None:
    config = parse([*MODEL, "--family", "gpt2"])
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict()))
    read, found = settings.read_settings([], tmp_path / "config.json", 1)
    assert read is not None and read.model.hidden_size == 16 and found[0].state == "ok"
    written = tmp_path / "config.json"
    read, found = settings.read_settings(MODEL, written, 1)
    assert read is not None and f"from the given flags; {written}" in found[0].words
    assert "given flags" not in settings.read_settings(MODEL, tmp_path / "none.json", 1)[1][0].words


@pytest.mark.parametrize(
    ("environment", "check"),
    [
        ({"WORLD_SIZE": "abc"}, "WORLD_SIZE"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE"),
        ({"WORLD_SIZE": "2", "RANK": "5"}, "RANK"),
    ],
    ids=str,
)
def test_what_a_shell_exported_long_ago(
    environment: dict[str, str], check: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert doctor.main([*MODEL, "--quick", "--json"]) == 1
    found = {each["check"]: each for each in json.loads(capsys.readouterr().out)}
    assert found[check]["state"] == "failed" and "unset it" in found[check]["remedy"]


def test_ranks_of_expert_parallelism(examined: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Without --ranks, the smallest run is examined: with --expert-parallel-size 4 it has four data-parallel ranks."""
    found = examined("--num-experts", "4", "--expert-parallel-size", "4", "--zero-stage", "0")["layout"]
    assert found.state == "ok"
    assert "4 ranks" in found.words and "4 replicas, experts divided over 4 ranks" in found.words
    wrong = examined("--num-experts", "4", "--expert-parallel-size", "4", "--ranks", "6", "--zero-stage", "0")
    assert wrong["layout"].state == "failed" and "6 data-parallel ranks" in wrong["layout"].words


def test_a_wrong_layout_is_said_once(capsys: pytest.CaptureFixture[str]) -> None:
    doctor.main([*MODEL, "--pipe-parallel-size", "2", "--ranks", "3", "--quick", "--json"])
    states = {each["check"]: each["state"] for each in json.loads(capsys.readouterr().out)}
    assert states["layout"] == "failed" and "ds_config" not in states


@pytest.mark.parametrize("content", ["{", "[1]", '{"text": "a"}', '{"text": "a"}\n{"text": "b"}\n'])
def test_what_stands_beside_a_corpus_is_damaged_or_no_sidecar(content: str, tmp_path: Path) -> None:
    (tmp_path / "data.json").write_text(content)
    for read in (made_with, read_sidecar):
        with pytest.raises(ValueError, match=r"data\.json .*copy it again.*rename the file"):
            read(str(tmp_path / "data"))
    assert made_with(str(tmp_path / "other")) is None


def test_a_corpus_whose_documents_end_otherwise(tmp_path: Path) -> None:
    """A corpus whose end-of-document token is not the tokenizer's is reported, even if fingerprints are equal."""
    train_byte_bpe(["The river runs"] * 9, str(tmp_path / "tokenizer.json"), 264, "hf", ["<|im_end|>"])
    pair, jsonl = str(tmp_path / "c_text_document"), tmp_path / "c.jsonl"
    jsonl.write_text("".join(json.dumps({"text": f"river {i} runs"}) + "\n" for i in range(9)))

    def tokenizer_with(end: str) -> Tokenizer:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": end}))
        return load_tokenizer(str(tmp_path))

    def preprocess(name: str, *more: str) -> None:
        argv = ["--input", str(jsonl), "--vocab-file", str(tmp_path), "--workers", "0", "--quiet", *more]
        preprocess_data.main(
            preprocess_data.build_parser().parse_args([*argv, "--output-prefix", f"{tmp_path}/{name}"])
        )

    def checked(tokenizer: Tokenizer, prefix: str = pair) -> str:
        config = parse(["--data-path", prefix, "--vocab-file", str(tmp_path), "--seq-length", "8"])
        found = only(corpora.check_corpora(config, tokenizer, quick=True), "tokenizer of the data")
        try:
            check_tokenizer(config, tokenizer)
        except ValueError as error:
            assert found.state == "failed" and str(error) == f"{found.words}: {found.remedy}"
            return str(error)
        return found.state

    def inspect(*argv: str) -> None:
        args = inspect_data.build_parser().parse_args(list(argv))
        args.function(args)

    usual = tokenizer_with("<|endoftext|>")
    preprocess("c")
    assert checked(usual) == "ok"
    inspect("verify", pair, "--vocab-file", str(tmp_path))
    other = tokenizer_with("<|im_end|>")
    assert other.fingerprint == usual.fingerprint and other.eod != usual.eod
    words = rf"token {usual.eod} \(<\|endoftext\|>\), but \S+ with {other.eod} \(<\|im_end\|>\)"
    assert re.search(words, checked(other))
    with pytest.raises(ValueError, match=words):
        inspect("verify", pair, "--vocab-file", str(tmp_path))
    preprocess("d")
    with pytest.raises(ValueError, match=SENTENCES["end_their_documents_with_different_tokens"]):
        inspect("merge", pair, f"{tmp_path}/d_text_document", "--output", f"{tmp_path}/m")
    preprocess("e", "--no-append-eod")  # this corpus has no end-of-document tokens
    assert checked(usual, f"{tmp_path}/e_text_document") == "ok"
    about = json.loads((tmp_path / "c_text_document.json").read_text())
    del about["eod"]  # older versions did not record the end token, so it is not checked
    (tmp_path / "c_text_document.json").write_text(json.dumps(about))
    assert checked(other) == "ok"


def test_rank_0_of_another_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("MASTER_ADDR", "192.0.2.1")  # reserved for documentation (RFC 5737), so no machine has it
    assert only(network.check_master_address(), "MASTER_ADDR").state == "failed"
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    assert not list(network.check_master_address())


@pytest.mark.parametrize("broken", ["torch", "deepspeed"])
def test_packages_that_are_there_and_broken(broken: str, tmp_path: Path) -> None:
    """A package whose import fails is reported, and all other checks still run, with and without flags of a run."""
    (tmp_path / broken).mkdir()
    (tmp_path / broken / "__init__.py").write_text('raise OSError("libmissing.so.12: cannot open shared object file")')
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    for flags in ([], [*MODEL, "--quick"]):
        command = [sys.executable, str(ROOT / "tools/doctor.py"), *flags]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        assert done.returncode == 1 and not done.stderr, done.stderr
        assert f"import {broken}: OSError: libmissing.so.12" in done.stdout and done.stdout.splitlines()[-1].endswith(
            "warnings"
        )


LLAMA = ["--num-key-value-heads", "1", "--ff-hidden-size", "48"]


@pytest.mark.parametrize(
    ("command", "wanted"),
    [
        (["pretrain_llama.py", *LLAMA], "a llama"),
        (["somewhere/pretrain_t5.py", "--dec-seq-length", "12"], "a t5"),
        (["--family", "llama", *LLAMA], "a llama"),
        (["pretrain_mine.py"], "a custom model"),
    ],
)
def test_the_flags_of_each_script_are_accepted(
    command: list[str], wanted: str, tmp_path: Path, tiny_data: str, vocab_file: str
) -> None:
    given = [*command, *MODEL, "--data-path", tiny_data, "--vocab-file", vocab_file]
    args, rest = doctor.build_parser().parse_known_args(given)
    config, found = settings.read_settings(rest, None, 1)
    assert config is not None and found[0].words.startswith(wanted)


def test_the_family_of_a_config_file_decides(tmp_path: Path) -> None:
    (tmp_path / "one.json").write_text(json.dumps({"model": {"family": "llama", "num_key_value_heads": 1}}))
    (tmp_path / "two.json").write_text(json.dumps({"train": {"train_iters": 3}}))
    flags = [*MODEL, "--config", str(tmp_path / "one.json"), "--config", str(tmp_path / "two.json")]
    config, found = settings.read_settings(flags, None, 1)
    assert config is not None and config.model.family == "llama" and config.model.normalization == "rmsnorm"


def test_a_stale_lock_does_not_hide_one_that_is_held(tmp_path: Path) -> None:
    held = RunLock(tmp_path / "save")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.lock").write_text(json.dumps(asdict(Holder.here())))
    found = only(run_dir.check_lock(tmp_path / "run", parse(["--save", str(tmp_path / "save")])), "run lock")
    assert found.state == "failed" and str(tmp_path / "save") in found.words and "--save" in found.remedy
    held.release()


@pytest.mark.parametrize(
    ("value", "states"),
    [
        ("^lo,docker0", ["ok"]), ("lo,nowhere7", ["ok", "failed"]), ("l", ["ok"]), ("=l", ["failed"]),
        ("=nowhere7,lo", ["failed", "ok"]),
    ],
)  # fmt: skip
def test_a_sign_of_nccl_holds_for_the_whole_list(
    value: str, states: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(socket, "if_nameindex", lambda: [(1, "lo"), (2, "eth0")])
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", value)
    assert [each.state for each in network.check_interfaces()] == states


@pytest.mark.parametrize("flags", ["--train-samples 1000", "--batch-size-schedule 0:8", "--micro-batch-size 4"])
def test_without_ranks_the_smallest_run_of_a_layout_is_examined(flags: str, examined: Callable[..., Any]) -> None:
    found = examined("--model-parallel-size", "2", *flags.split())
    assert found["settings"].state == "ok" and "2 ranks" in found["layout"].words


def write_pair(prefix: Path, documents: list[list[int]]) -> str:
    with IndexedDatasetBuilder(str(prefix), np.uint16) as builder:
        for document in documents:
            builder.add_document(document)
    return str(prefix)


def tokenizer_of_ten() -> Any:
    """A tokenizer of 10 ids, of which 7 ends documents."""
    return SimpleNamespace(fingerprint="0", eod=7, name="any", marks={}, vocab_size=10)


def test_documents_are_separated_only_in_corpora_with_ends_of_documents(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The model finds documents by their last token, so flags that separate documents need this token."""
    prefix = write_pair(tmp_path / "x", [[5, 6], [6, 5]] * 6)
    tokenizer = tokenizer_of_ten()

    def check(flags: str, family: str = "gpt2") -> None:
        config = parse(["--data-path", prefix, "--seq-length", "8", "--split", "1", *flags.split()], DEFAULTS[family])
        found = list(corpora.check_corpora(config, tokenizer, quick=True))
        failures = [each.words for each in found if each.state == "failed"]
        try:
            check_tokenizer(config, tokenizer)
        except ValueError as error:
            assert len(failures) == 1 and str(error).startswith(failures[0])
            raise
        assert not failures

    sidecar = {"fingerprint": "0", "eod": 7, "append_eod": False}
    (tmp_path / "x.json").write_text(json.dumps(sidecar))
    for flag in ("--reset-attention-mask", "--reset-position-ids"):
        with pytest.raises(ValueError, match=flag):
            check(flag)
    check("--eod-mask-loss")
    check("--reset-attention-mask --objective sft")  # conversations have their own documents
    check("--reset-attention-mask", "t5")
    (tmp_path / "x.json").write_text(json.dumps({**sidecar, "append_eod": True}))
    check("--reset-attention-mask")
    (tmp_path / "x.json").unlink()
    assert capsys.readouterr().out == ""
    check("--reset-attention-mask")
    assert f"{prefix}.bin" in capsys.readouterr().out
    write_pair(tmp_path / "x", [[5, 7], [6, 7]] * 6)
    check("--reset-attention-mask")
    assert capsys.readouterr().out == ""


def test_a_masked_corpus_is_healthy_if_it_is_whole(tmp_path: Path) -> None:
    prefix = str(tmp_path / "m")
    for part, ids in zip(TRIPLE_PARTS, ([5, 10], [10, 6, 7], [0, 3]), strict=True):  # 10 is the first sentinel
        write_pair(Path(f"{prefix}_{part}"), [ids] * 3)
    flags = ["--data-path", prefix, "--enc-seq-length", "8"]
    with_sentinels: Any = SimpleNamespace(eod=7, pad=10, sentinels=[11, 12], base=tokenizer_of_ten())
    for missing in (["--dec-seq-length", "8"], ["--span-convention", "cpm"]):
        refused = parse([*flags, *missing], DEFAULTS["t5"])
        found = list(corpora.check_corpora(refused, tokenizer_of_ten(), quick=False))
        (finding,) = [each for each in found if each.state == "failed"]
        with pytest.raises(ValueError, match="--dec-seq-length") as error:
            TASKS["t5"]().datasets(refused, with_sentinels)
        assert finding.state == "failed" and finding.words == str(error.value)
    config = parse([*flags, "--dec-seq-length", "8", "--span-convention", "cpm"], DEFAULTS["t5"])
    found = list(corpora.check_corpora(config, tokenizer_of_ten(), quick=False))
    assert {each.state for each in found} == {"ok"}
    Path(f"{prefix}_target.bin").unlink()
    found = list(corpora.check_corpora(config, tokenizer_of_ten(), quick=False))
    assert [each.state for each in found] == ["failed"] and f"{prefix}_target.bin" in found[0].words


def test_a_damaged_sidecar_is_reported_once(tmp_path: Path) -> None:
    prefix = write_pair(tmp_path / "x", [[5, 6, 7]] * 300)
    Path(f"{prefix}.json").write_text("{")
    config = parse(["--data-path", prefix, "--seq-length", "8"], DEFAULTS["gpt2"])
    found = list(corpora.check_corpora(config, tokenizer_of_ten(), quick=False))
    (failure,) = [each for each in found if each.state == "failed"]
    assert f"{prefix}.json" in failure.words


def test_samples_of_a_t5_do_not_have_the_seq_length_of_a_decoder(tmp_path: Path) -> None:
    """The encoder's and the decoder's lengths determine how many tokens of the corpus a sample of a T5 takes."""
    prefix = write_pair(tmp_path / "x", [[5, 6, 7]] * 300)
    flags = ["--data-path", prefix, "--split", "90,10,0", "--objective", "prefix-lm"]
    config = parse([*flags, "--enc-seq-length", "128"], DEFAULTS["t5"])
    found = list(corpora.check_corpora(config, tokenizer_of_ten(), quick=True))
    assert {each.state for each in found} == {"ok"}
    decoder = parse([*flags, "--seq-length", "1024"], DEFAULTS["gpt2"])
    found = list(corpora.check_corpora(decoder, tokenizer_of_ten(), quick=True))
    assert only(found, "tokens").state == "failed"


def test_a_corpus_in_object_storage_is_examined(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("fsspec")
    monkeypatch.setenv("MEGATRON_CACHE_DIR", str(tmp_path / "cache"))
    local = write_pair(tmp_path / "x", [[5, 6, 7]] * 40)
    for ending in (".bin", ".idx"):
        RemotePath(f"memory://doctor/x{ending}").upload(Path(local + ending))
    config = parse(["--data-path", "memory://doctor/x", "--seq-length", "8", "--split", "1"], DEFAULTS["gpt2"])
    found = list(corpora.check_corpora(config, tokenizer_of_ten(), quick=False))
    assert {each.state for each in found} == {"ok"}
    assert "7" in only(found, "ids").words


def test_a_vocabulary_that_is_smaller_than_the_tokenizer(examined: Callable[..., Any], vocab_file: str) -> None:
    tokens = load_tokenizer(vocab_file).vocab_size
    assert examined("--quick", "--vocab-size", str(tokens - 1))["tokenizer"].state == "failed"
    assert examined("--quick", "--vocab-size", str(tokens + 1))["tokenizer"].state == "ok"


def test_an_unknown_cluster_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        doctor.main(["--run-dir", str(tmp_path), "--cluster", "nowhere"])
    assert ended.value.code == 2
    assert "--cluster" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("section", "offloads"),
    [
        ({"cpu_offload": True}, True),
        ({"offload_optimizer": {"device": "cpu"}}, True),
        ({"offload_param": {"device": "none"}}, False),
        ({"cpu_offload": False}, False),
        ({}, False),
    ],
)
def test_the_memory_with_offloading_is_not_estimated(section: dict[str, Any], offloads: bool, tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({"zero_optimization": {"stage": 2, **section}}))
    flags = [*MODEL, "--vocab-size", "64", "--deepspeed-config", str(path)]
    config, _ = settings.read_settings(["pretrain_gpt2.py", *flags], None, 2)
    assert config is not None
    resolved, _ = settings.resolve_settings(config, 2, None)
    found = next(iter(settings.check_memory(config, resolved, 2, 2, 80e9)))
    assert ("offloading" in found.words) is offloads
