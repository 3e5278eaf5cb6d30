"""For damaged or malicious files and environment variables, one sentence names the cause; no program hangs."""

import json
import subprocess
import sys
import time
import tracemalloc
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from data_utils import jinja_sandbox as sandbox
from data_utils.chat_messages import Message
from data_utils.chat_templates import template_from
from data_utils.documents import InputError, read_texts
from data_utils.tokenizer_training import train_byte_bpe
from megatron.checkpointing import share, slow
from megatron.checkpointing.checksums import SHA256
from megatron.config.command_line import read_json
from megatron.config.fields import ConfigError
from megatron.json_text import JsonError, parse_json
from megatron.rows import RowError, parse_row
from megatron.tokenizer import load_tokenizer
from megatron.tokenizer.base import TokenizerError, read_object
from megatron.training.metrics import MetricsWriter
from megatron_tools.plan.cluster import load_cluster
from megatron_tools.report import report
from tds.parent_death import ImpossibleRanks, refuse_impossible_ranks
from tests.sentences import SENTENCES
from tests.support import ROOT, command

# ---------------------------------------------------------------- metrics.jsonl

STRANGE = [
    "42",
    "null",
    "[]",
    '"text"',
    '{"iteration": "4"}',
    '{"iteration": null}',
    '{"iteration": 2, "lm_loss": "low"}',
    '{"iteration": 2, "expert_tokens": [1, 2]}',
    '{"iteration": 2, "expert_tokens": {"layers.0": 3}}',
    '{"iteration": 2, "expert_tokens": {"layers.0": [1, -1]}}',
    '{"iteration": 2, "expert_tokens": {"layers.0": [1, 0.5]}}',
    "{}",
]


@pytest.mark.parametrize("line", STRANGE)
def test_a_strange_line_of_metrics_is_dropped_by_name_when_a_run_resumes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], line: str
) -> None:
    path = tmp_path / "metrics.jsonl"
    good = ['{"split": "valid", "iteration": 2, "lm_loss": 1.0}', '{"split": "valid", "iteration": 9}']
    path.write_text("\n".join([good[0], line, good[1], '{"cut sho']))
    writer = MetricsWriter(str(tmp_path), 4, True)
    assert path.read_text() == good[0] + "\n" and writer.has_row("valid", 2)
    assert f"{path}, line 2" in capsys.readouterr().out


def test_a_resume_does_not_hold_the_rows_of_metrics_in_memory(tmp_path: Path) -> None:
    row = {"split": "train", "iteration": 1, "consumed_samples": 1, "consumed_tokens": 1, "note": "x" * 10_000}
    text = (json.dumps(row) + "\n") * 300
    (tmp_path / "metrics.jsonl").write_text(text + '{"split": "train", "iteration": 3}\n')
    tracemalloc.start()
    MetricsWriter(str(tmp_path), 2, True)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < len(text) / 10 and (tmp_path / "metrics.jsonl").read_text() == text


@pytest.mark.parametrize("line", STRANGE)
def test_a_report_names_file_and_line(tmp_path: Path, line: str) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "metrics.jsonl").write_text('{"split": "valid", "iteration": 2, "lm_loss": null}\n' + line + "\n")
    with pytest.raises(ValueError, match=r"metrics.jsonl, line 2: "):
        report.main(report.build_parser().parse_args([str(tmp_path)]))


def test_rows_of_runs_are_rows() -> None:
    assert parse_row('{"split": "train", "iteration": 1') is None
    assert parse_row('{"split": "train", "iteration": 1, "consumed_samples": 2, "consumed_tokens": 3, "mfu": null}')
    for lacking in (
        '"iteration": 0, "consumed_samples": 2, "consumed_tokens": 3',
        '"iteration": 1, "consumed_samples": 2',
    ):
        with pytest.raises(RowError, match="training"):
            parse_row('{"split": "train", ' + lacking + "}")


# --------------------------------------------------------------- long numbers

LONG = "1" * 5000


def test_numbers_of_thousands_of_digits_are_named_with_file_and_line(tmp_path: Path) -> None:
    path = tmp_path / "given.json"
    path.write_text('{\n"hidden_size":\n' + LONG + "}")
    for read, error in (
        (read_json, ConfigError),
        (load_cluster, ValueError),
        (lambda p: read_object(Path(p)), ValueError),
    ):
        with pytest.raises(error, match=SENTENCES["a_number_of_5000_digits"]):
            read(str(path))
    with pytest.raises(JsonError, match=SENTENCES["line_3_a_number_of_5000"]):
        parse_json(path.read_text(), "the file", dict, constants=False)
    records = ['{"text": "a"}', '{"text": "b", "id": ' + LONG + "}"]
    for name, text in {"corpus.jsonl": "\n".join(records), "corpus.json": "[" + ",\n".join(records) + "]"}.items():
        corpus = tmp_path / name
        corpus.write_text(text)
        with pytest.raises(InputError, match=rf"{name}.*2.*digits"):
            list(read_texts([str(corpus)]))


# -------------------------------------------------------------- chat templates

ENDLESS = [
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "{% for a in messages %}{% for b in range(99999) %}{% for c in range(99999) %}{% endfor %}{% endfor %}{% endfor %}",
    "{{ 10 ** (10 ** 8) }}",
    "{% set n = 10 ** (10 * messages | length * 10 ** 6) %}",
    "{{ 'a' * 10 ** 10 }}",
    "{% set n = namespace(s='aa') %}{% for a in range(90) %}{% set n.s = n.s + n.s %}{% endfor %}",
    "{% set n = namespace(s=3) %}{% for a in range(90) %}{% set n.s = n.s * n.s %}{% endfor %}",
    "{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}",
    "{{ 1 // 0 }}",
    "{{ '%999999999d' % 1 }}",
    "{{ '%*d' % (10 ** 9, 1) }}",
]


@pytest.mark.parametrize("source", ENDLESS)
def test_a_template_without_an_end_is_named(vocab_file: str, monkeypatch: pytest.MonkeyPatch, source: str) -> None:
    monkeypatch.setattr(sandbox, "TIME_LIMIT", 0.2)
    began = time.monotonic()
    with pytest.raises(ValueError, match=SENTENCES["the_chat_template"]):
        template = template_from(source, load_tokenizer(vocab_file), vocab_file)
        template.pieces([Message("user", "a"), Message("assistant", "b")])
    assert time.monotonic() - began < 30


def test_small_numbers_of_a_template_are_computed() -> None:
    source = "{{ 2.0 ** 3 }} {{ 4 ** 0.5 }} {{ 2 ** 10 }} {{ 1 ** (10 ** 8) }} {{ 'ab' * 2 }} {{ 7 % 4 }}"
    environment = sandbox.sandbox_environment(None, sandbox.GenerationBlocks())
    assert environment.from_string(source).render() == "8.0 2.0 1024 1 abab 3"


# ------------------------------------------------------------------ tokenizers


def test_a_regular_expression_without_an_end_is_named_by_a_worker(tmp_path: Path) -> None:
    """A worker's error names the tokenizer.json whose regular expression backtracks catastrophically.

    The worker must convert the tokenizers library's panic, which cannot be pickled and sent to the main process.
    """
    path = tmp_path / "tokenizer.json"
    train_byte_bpe(["What is the capital of France? system user assistant. " * 20], str(path), 290, "hf")
    content: dict[str, Any] = json.loads(path.read_text())
    split = {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}
    content["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [split, content["pre_tokenizer"]]}
    path.write_text(json.dumps(content))
    with pytest.raises(TokenizerError, match=SENTENCES["tokenizer_json_cannot_split_this_text"]):
        load_tokenizer(str(path)).encode("a" * 60 + "!")
    (tmp_path / "corpus.jsonl").write_text(json.dumps({"text": "a" * 60 + "!"}) + "\n")
    argv = [
        "--input",
        str(tmp_path / "corpus.jsonl"),
        "--vocab-file",
        str(path),
        "--output-prefix",
        str(tmp_path / "out"),
    ]
    done = subprocess.run(
        [sys.executable, "tools/preprocess_data.py", *argv, "--workers", "1"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    last = done.stderr.strip().splitlines()[-1]
    assert done.returncode == 1 and "tokenizer.json" in last and "Can't pickle" not in done.stderr


# ----------------------------------------------------------------------- ranks


@pytest.mark.parametrize(
    ("env", "names"),
    [
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK=2 .*WORLD_SIZE=2"),
        ({"LOCAL_RANK": "8", "LOCAL_WORLD_SIZE": "8"}, "LOCAL_RANK=8"),
        ({"RANK": "-1", "WORLD_SIZE": "2"}, "RANK=-1"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE=0"),
        ({"RANK": "x"}, "RANK=x"),
    ],
)
def test_impossible_ranks_are_refused_at_once(monkeypatch: pytest.MonkeyPatch, env: dict[str, str], names: str) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ImpossibleRanks, match=names):
        refuse_impossible_ranks()


def test_a_run_refuses_a_rank_beyond_the_world(tiny_data: str, vocab_file: str) -> None:
    env = {"RANK": "3", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    argv = ["pretrain_gpt2.py", "--data-path", tiny_data, "--vocab-file", vocab_file]
    done = command("python", *argv, env=env, timeout=60)
    assert done.returncode == 2 and "RANK=3" in done.stderr and len(done.stderr.strip().splitlines()) == 1


# ----------------------------------------------------------------------- saves


def test_a_save_that_hangs_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(slow, "SLOW_SECONDS", 0.05)
    buffers: Any = SimpleNamespace(write=lambda *_: None)
    for name, seconds in (("iter_0000002", 0.5), ("iter_0000004", 0.0)):
        monkeypatch.setattr(share, "write_share", lambda *_, seconds=seconds: time.sleep(seconds))
        share.Share(tmp_path / f"{name}.tmp" / "share.safetensors", [], buffers, SHA256, {}).write([])
    time.sleep(0.2)
    said = capsys.readouterr().out
    assert "rank 0" in said and "iter_0000002.tmp" in said and "iter_0000004" not in said
