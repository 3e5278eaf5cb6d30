"""Each setting changes something that can be observed in a run, or gives a note that it has no effect."""

import inspect
import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data_utils.documents import read_texts
from data_utils.indexed_writer import IndexedDatasetBuilder
from data_utils.tokenizer_training import train_sentencepiece
from megatron.config import settings
from megatron.config.command_line import parse
from megatron.config.defaults import DEFAULTS
from megatron.config.ds_file import PASSED_KEYS, RECONCILED_KEYS
from megatron.config.ds_notes import ineffective_keys
from megatron.config.fields import ConfigError, flag
from megatron.config.ineffective import ROWS
from megatron_tools.convert import convert_checkpoint
from tests.materials import SAMPLE
from tests.support import FULL, ROOT, on_ranks

from .effects import Trial, differences, flat, observe_all
from .runs import Start, run_all
from .settings_table import CASES, DS_CONFIGS, ELSEWHERE, IDLE


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory, tiny_data: str, vocab_file: str) -> Path:
    """A folder with everything that the runs read: corpora, a checkpoint and small files."""
    folder = tmp_path_factory.mktemp("here")
    for suffix in (".bin", ".idx"):
        (folder / f"tiny{suffix}").symlink_to(f"{tiny_data}{suffix}")
    rng = np.random.default_rng(1)
    with IndexedDatasetBuilder(str(folder / "other"), np.uint16) as builder:
        for _ in range(60):
            builder.add_document(rng.integers(3, 2900, 100))
    train_sentencepiece(read_texts([str(SAMPLE)]), str(folder / "fim.model"), 3000, specials=["<a>", "<b>", "<c>"])
    (folder / "groups.json").write_text(json.dumps([{"pattern": "*", "lr_factor": 0.5}]))
    (folder / "ds_config.json").write_text(json.dumps({"gradient_clipping": 0.01}))
    lines = [{"context": "The number is", "target": "seven"}, {"context": "The word is", "target": "last"}]
    (folder / "cloze.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    start = Start("gpt2", folder / "before", "--train-iters 3 --batch-size 2 --precision fp32 --hidden-dropout 0.1")
    on_ranks(1, run_all, [start], tiny_data, vocab_file)
    return folder


def cases() -> Iterator[Any]:
    for name, case in CASES.items():
        yield pytest.param(name, id=name, marks=() if case.in_ci else FULL)


@pytest.mark.parametrize("name", cases())
def test_a_setting_has_an_effect_or_a_note(name: str, here: Path, vocab_file: str, tmp_path: Path) -> None:
    case = CASES[name]
    for each in here.iterdir():
        (tmp_path / each.name).symlink_to(each)
    base = f"--vocab-file {vocab_file} {case.beside}"
    trials = [Trial(case.model, base), Trial(case.model, base), Trial(case.model, f"{base} {case.change}")]
    found: list[str] = []
    for usual, again, changed in on_ranks(case.ranks, observe_all, trials, tmp_path):
        found += [note for note in changed["notes"] if note.startswith(f"{flag(name)} ")]
        found += differences(usual, again, changed)
        assert found or not usual["error"], usual["error"]
    print(f"EFFECT {name}: {found[:4]} of {len(found)}; {changed['error'][:200]}")
    assert found, f"{case.change} changes nothing and gives no note"


def test_equal_runs_do_not_differ(here: Path, vocab_file: str) -> None:
    trial = Trial("gpt2", f"--vocab-file {vocab_file}")
    usual, again, third = on_ranks(1, observe_all, [trial] * 3, here)[0]
    assert not usual["error"] and differences(usual, again, third) == []
    kinds = {name.split(".")[1] for name in flat(usual)}
    assert kinds >= {"attributes", "calls", "checkpoint", "files", "lines", "operations", "order", "rows", "saved"}


def test_the_table_names_every_setting() -> None:
    names = {f.name for _, _, f in settings()}
    assert names == CASES.keys() | ELSEWHERE.keys()
    assert not CASES.keys() & ELSEWHERE.keys()


@pytest.mark.parametrize("name", ELSEWHERE)
def test_what_no_short_run_shows_has_a_test_of_its_own(name: str) -> None:
    _, path, word = ELSEWHERE[name]
    assert word in (ROOT / path).read_text()


def notes_of(family: str, line: str) -> list[str]:
    notes: list[str] = []
    parse(shlex.split(line), DEFAULTS[family], 1, notes.append)
    return notes


@pytest.mark.parametrize(("family", "line"), IDLE)
def test_a_flag_without_effect_gets_a_note(family: str, line: str) -> None:
    name = line.split()[0]
    assert [note for note in notes_of(family, line) if note.startswith(f"{name} ") and " has no effect: " in note]


def test_every_row_of_the_table_has_a_case() -> None:
    noted = {line.split()[0].replace("--no-", "--") for _, line in IDLE} | {
        "--rope-scaling-factor",
        "--experts-per-token",
        "--save",
    }
    assert {flag(name) for row in ROWS for name in row.names.split()} <= noted


def test_checkpoints_that_end_with_the_process_get_a_note() -> None:
    for place, noted in (("memory://bucket/run", True), ("Memory://b/x", True), ("runs/memory", False)):
        notes = notes_of("gpt2", f"--save {place} --run-dir runs/mine")
        assert bool([note for note in notes if note.startswith(f"--save {place} ")]) == noted


def test_what_asks_for_nothing_gets_no_note() -> None:
    quiet = (
        "--optimizer sgd --lr-decay-style constant --min-lr 0 --eval-iters 0 --virtual-pipeline-size 1 "
        "--checkpoint-num-layers 1 --no-sequence-parallel --pipeline-extra-warmup 0 --check-replicas 0"
    )
    assert notes_of("gpt2", quiet) == []


@pytest.mark.parametrize(
    ("line", "has_effect"),
    [
        ("--data-path x --eval-interval 50 --sample-prompt hi", True),
        ("--data-path x --eval-interval 50 --sample-prompt hi --sample-interval 5", False),
        ("--data-stages '0: x' --valid-data-path v", True),
        ("--data-stages '0: x' --test-data-path v", True),
        ("--train-data-path x --valid-data-path v", False),
    ],
)
def test_without_evaluations_some_flags_of_them_still_have_an_effect(line: str, has_effect: bool) -> None:
    """Texts are sampled every --eval-interval iterations, and a separate corpus lets stages use all documents."""
    assert (notes_of("gpt2", f"{line} --eval-iters 0") == []) == has_effect


def test_the_settings_that_a_run_saved_get_no_note(tmp_path: Path) -> None:
    saved = parse(["--adam-beta1", "0.8", "--optimizer", "sgd"], DEFAULTS["gpt2"]).to_dict()
    whole = tmp_path / "config.json"
    whole.write_text(json.dumps(saved))
    short = tmp_path / "short.json"
    short.write_text(json.dumps({"optim": {"optimizer": "sgd", "adam_beta1": 0.8}}))
    imported = tmp_path / "settings.json"
    convert_checkpoint._write_settings(imported, parse(["--family", "llama", "--position-embedding", "rope"]))
    assert notes_of("gpt2", f"--config {whole}") == notes_of("llama", f"--config {imported}") == []
    assert notes_of("gpt2", f"--config {short}") == ["--adam-beta1 0.8 has no effect: the optimizer is sgd"]


@pytest.mark.parametrize("path", sorted((ROOT / "configs" / "models").glob("*.json")), ids=lambda path: path.stem)
def test_published_models_get_no_note(path: Path) -> None:
    family = json.loads(path.read_text())["model"]["family"]
    try:
        assert notes_of(family, f"--config {path}") == []
    except ConfigError as error:
        raise AssertionError(str(error)) from None


@FULL
@pytest.mark.parametrize("name", DS_CONFIGS)
def test_a_key_of_a_ds_config_has_an_effect_or_a_note(name: str, here: Path, vocab_file: str, tmp_path: Path) -> None:
    (tmp_path / "tiny.bin").symlink_to(here / "tiny.bin")
    (tmp_path / "tiny.idx").symlink_to(here / "tiny.idx")
    usual, changed = (json.dumps(each).replace("HERE", str(tmp_path)) for each in DS_CONFIGS[name])
    (tmp_path / "usual.json").write_text(usual)
    (tmp_path / "changed.json").write_text(changed)
    optimizer = "sgd" if "untested" in name else "adam"
    flags = f"--vocab-file {vocab_file} --optimizer {optimizer} --deepspeed-config {tmp_path}"
    files = ("usual", "usual", "changed")
    trials = [Trial("gpt2", f"{flags}/{file}.json", "auto") for file in files]
    first, second, third = on_ranks(1, observe_all, trials, tmp_path)[0]
    key = name.split(".")[-1]
    found = [note for note in third["notes"] if key in note] + differences(first, second, third)
    print(f"EFFECT {name}: {found[:4]} of {len(found)}; {first['error'][:200]}; {third['error'][:200]}")
    assert found, f"{name} changes nothing and gives no note"


def listed_keys(section: str) -> set[str]:
    """Return the keys that docs/reference/ds_config.md lists in a section."""
    text = (ROOT / "docs" / "reference" / "ds_config.md").read_text(encoding="utf-8")
    rows = text.split(f"### {section}\n")[1].split("###")[0]
    return set(re.findall(r"^\| `(\w+)` \|", rows, re.MULTILINE))


def test_every_key_of_a_ds_config_has_a_case() -> None:
    inside = {f"{section}.{key}" for section in ("fp16", "bf16") for key in listed_keys(section) - {"enabled"}}
    assert DS_CONFIGS.keys() == inside | PASSED_KEYS | RECONCILED_KEYS


def test_keys_of_zero_have_a_note_exactly_if_deepspeed_does_not_read_them() -> None:
    """The parameters of DeepSpeed's optimizers and the attributes that its partitioning reads say what it reads."""
    from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
    from deepspeed.runtime.zero import partition_parameters
    from deepspeed.runtime.zero.parameter_offload import DeepSpeedZeRoOffload
    from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

    early = set(inspect.signature(DeepSpeedZeroOptimizer.__init__).parameters)
    late = set(inspect.signature(DeepSpeedZeroOptimizer_Stage3.__init__).parameters)
    late |= set(inspect.signature(DeepSpeedZeRoOffload.__init__).parameters)
    late |= set(re.findall(r"zero_config\.(\w+)", inspect.getsource(partition_parameters)))
    late.add("zero_quantized_gradients")  # the engine itself reads it
    by_hand = {"stage", "legacy_stage1", "leaf_module", "cpu_offload", "cpu_offload_param"}
    by_hand.add("cpu_offload_use_pin_memory")
    own = {"elastic_checkpoint", "save_muon_momentum_buffer_in_memory"}  # for its checkpoints and its Muon
    bf16 = set(inspect.signature(BF16_Optimizer.__init__).parameters) | {"compute_grad_norm", "zenflow"}
    routes = (("fp32", 1, early), ("fp32", 2, early), ("bf16", 1, bf16), ("bf16", 2, early), ("bf16", 3, late))
    by_hand |= {"offload_optimizer", "offload_param"}  # in bf16, they choose another optimizer
    for precision, stage, read in routes:
        names = read | {name.removesuffix("_config").removeprefix("zero_") for name in read}
        for key in listed_keys("zero_optimization") - by_hand:
            reads = key.removeprefix("stage3_") in names and key not in own
            noted = bool(ineffective_keys({"zero_optimization": {key: 1}}, precision, stage))
            assert noted != reads, (precision, stage, key)
    for key in listed_keys("zero_optimization") - by_hand:
        assert ineffective_keys({"zero_optimization": {key: 1}}, "fp32", 0)
