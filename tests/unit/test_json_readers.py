"""Every reader of JSON refuses bad text by one short sentence that names the file, in linear time."""

import itertools
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from data_utils.documents import read_texts
from data_utils.journal import Journal
from data_utils.sidecars import read_sidecar
from megatron.checkpointing import schema
from megatron.config import settings
from megatron.config.command_line import from_file, parse, with_values
from megatron.config.data_stages import parse_stages
from megatron.config.ds_config import resolve
from megatron.config.ds_file import PASSED_KEYS, RECONCILED_KEYS
from megatron.config.fields import ConfigError
from megatron.config.param_groups import read_param_rules
from megatron.data.fingerprints import made_with
from megatron.features.scoring import read_cloze
from megatron.json_text import MAX_NESTING, JsonError, format_value, parse_json
from megatron.tokenizer.base import read_object
from megatron.tokenizer.cpm import read_vocabulary
from megatron_compat.flags.table import FLAGS
from megatron_tools.plan.cluster import load_cluster
from megatron_tools.report.runs import read_metrics
from megatron_tools.write.prompts import _parse_input_line
from tds import timeline
from tests.support import FULL

LONG = "x" * 100_000
KEYS = ", ".join(f'"k{i}": {i}' for i in range(20_000))
BAD = {
    "empty": "",
    "null": "null",
    "number": "42",
    "text": '"text"',
    "list": "[]",
    "object": "{}",
    "cut": '{"a": [1, 2',
    "comma": '{\n"a": 1,\n}',
    "comment": '{"a": 1} // so',
    "nested lists": "[" * 5000 + "]" * 5000,
    "nested objects": '{"a": ' * 5000 + "1" + "}" * 5000,
    "nested in a list": '[{"samples": ' + "[" * 5000 + "]" * 5000 + "}]",
    "nested, not closed": "[" * 5000,
    "twice": "{" + KEYS + ', "k9": 0}',
    "twice inside": '{"a": {"b": 1, "b": 2}}',
    "400 digits": '{"optim": {"lr": 1' + "0" * 400 + '}, "iteration": 1' + "0" * 400 + "}",
    "5000 digits": '{"iteration": ' + "1" * 5000 + "}",
    "huge float": '{"lr": 1e999, "gradient_clipping": 1e999}',
    "NaN": '{"lr": NaN, "gradient_clipping": NaN}',
    "long value": json.dumps({"lr": LONG, "gradient_clipping": LONG, "prompt": [LONG], "text": [LONG]}),
    "long key": json.dumps({LONG: 1}),
    "long entry": json.dumps([LONG, {"pattern": LONG, LONG: 1}]),
    "quotes": '"\\' + '\\"' * 50_000,
    "samples": '[{"samples": 0}]',
    "strange samples": '[{"samples": "x", "documents": {"a": [[]]}}]',
    "strange ranges": '[{"samples": 0, "documents": {"a": ["9-2", 3]}}]',
    "no bytes": "\udcff\udcfe{}",
}
IN_CI = ("null", "cut", "nested lists", "nested objects", "twice", "400 digits", "long value", "samples")


def timelines(path: Path) -> object:
    path.rename(path.with_name("rank_00000.json"))
    return timeline.read(path.parent)


def metrics(path: Path) -> object:
    path.rename(path.with_name("metrics.jsonl"))
    return read_metrics(path.parent)


def prompts(path: Path) -> object:
    return _parse_input_line(path.read_text(encoding="utf-8", errors="replace"), False, f"{path}, line 1")


def stages(path: Path) -> object:
    return parse_stages([str(path)])


def stages_as_text(path: Path) -> object:
    return parse_stages([path.read_text(encoding="utf-8", errors="replace")])


def corpora(path: Path) -> object:
    return list(read_texts([str(path.rename(path.with_suffix(".jsonl")))]))


def index(path: Path) -> object:
    text = path.read_text(encoding="utf-8", errors="replace")
    return schema.check_index(parse_json(text, "the file", dict, constants=False), [])


READERS: dict[str, tuple[Callable[[Path], object], str]] = {
    "--config": (lambda path: parse(["--config", str(path)]), "given.json"),
    "--deepspeed-config": (lambda path: resolve(parse(["--deepspeed-config", str(path)]), 1, False), "given.json"),
    "--param-groups": (lambda path: read_param_rules(str(path)), "given.json"),
    "--data-stages": (stages, "given.json"),
    "--data-stages TEXT": (stages_as_text, "--data-stages"),
    "config.json": (lambda path: from_file(str(path)), "given.json"),
    "checkpoint.json": (index, ""),
    "PREFIX.json": (lambda path: made_with(str(path.with_suffix(""))), "given.json"),
    "sidecar": (lambda path: read_sidecar(str(path.with_suffix(""))), "given.json"),
    "tokenizer": (read_object, "given.json"),
    "vocabulary": (lambda path: read_vocabulary(str(path), path.read_bytes()), "given.json"),
    "cloze": (lambda path: read_cloze(str(path), None, 8), "given.json"),  # type: ignore[arg-type]
    "cluster": (lambda path: load_cluster(str(path)), "given.json"),
    "journal": (lambda path: Journal(str(path), {}), "given.json"),
    "metrics": (metrics, "metrics.jsonl"),
    "prompts": (prompts, "given.json"),
    "timelines": (timelines, "rank_00000.json"),
    "corpus": (corpora, "given.jsonl"),
}


def grid() -> list[Any]:
    pairs = itertools.product(READERS, BAD)
    return [pytest.param(r, b, id=f"{r}-{b}", marks=() if b in IN_CI else FULL) for r, b in pairs]


@pytest.mark.parametrize(("reader", "bad"), grid())
def test_bad_json_gives_one_sentence_that_names_the_file(tmp_path: Path, reader: str, bad: str) -> None:
    read, where = READERS[reader]
    path = tmp_path / "given.json"
    path.write_bytes(BAD[bad].encode("utf-8", "surrogateescape"))
    begin = time.monotonic()
    try:
        read(path)
    except ValueError as error:
        message = str(error)
        names_a_flag = message.startswith("--")  # the file is valid, a setting in it is not
        assert (where in message or names_a_flag) and "\n" not in message, message[:500]
        assert len(message) < 700 + 2 * len(str(tmp_path)), message[:1000]
    assert time.monotonic() - begin < 5


def test_nesting_is_counted_outside_of_strings() -> None:
    deepest = "[" * MAX_NESTING + "]" * MAX_NESTING
    assert parse_json(deepest, "x") and parse_json(json.dumps(["[" * 5000, '\\"[' * 500]), "x")
    with pytest.raises(JsonError, match="x, line 3"):
        parse_json(f"[\n[],\n[{deepest}]]", "x")


def test_a_duplicate_key_is_found_in_linear_time() -> None:
    """An object of 200,000 keys takes as many steps as keys: some hundred milliseconds."""
    keys = [f'"{i}": 1' for i in range(200_000)]
    begin = time.monotonic()
    with pytest.raises(JsonError, match="199999"):
        parse_json("{" + ", ".join([*keys, '"199999": 2']) + "}", "x")
    assert time.monotonic() - begin < 5


def test_what_is_shown_is_short() -> None:
    deep: Any = []
    for _ in range(5000):
        deep = [deep]
    assert format_value(deep) == "list"
    assert len(format_value(LONG)) < 200 and format_value({"a": [1, None]}) == '{"a": [1, null]}'


def test_the_shape_of_a_tensor_is_bounded_before_its_product() -> None:
    """Multiplying 60,000 sizes of 2^62 would make a number of 3.7 million bits, in quadratic time."""
    begin = time.monotonic()
    with pytest.raises(schema.SchemaError, match="shape"):
        schema._check_tensor("tensors['x']", {"shape": [2**62] * 60_000, "dim": 0, "pieces": []}, [])
    assert time.monotonic() - begin < 1


STRANGE: tuple[Any, ...] = ([1], {"a": {}}, "", "x" * 5000, 10**299, -(10**299), -1, 1e308, True, [[]], ["1" * 5000])


@pytest.mark.parametrize("name", [f.name for _, _, f in settings()])
def test_a_strange_value_of_a_setting_is_refused_by_name(tmp_path: Path, name: str) -> None:
    path = tmp_path / "given.json"
    for value in STRANGE:
        path.write_text(json.dumps({name: value}))
        try:
            from_file(str(path))
        except ConfigError as error:
            assert len(str(error)) < 2000, (value, str(error)[:500])


@pytest.mark.parametrize("name", FLAGS)
def test_a_strange_value_of_a_foreign_key_is_refused_by_name(tmp_path: Path, name: str) -> None:
    path = tmp_path / "given.json"
    for value in STRANGE:
        path.write_text(json.dumps({name[2:].replace("-", "_"): value}))
        try:
            from_file(str(path))
        except ConfigError as error:
            assert len(str(error)) < 2000, (value, str(error)[:500])


@pytest.mark.parametrize("name", sorted(PASSED_KEYS | RECONCILED_KEYS | {"pipeline"}))
def test_a_strange_value_of_a_key_of_a_ds_config_is_refused_by_name(tmp_path: Path, name: str) -> None:
    path = tmp_path / "ds.json"
    config = with_values(parse([]), {"deepspeed_config": str(path)})
    for value in (*STRANGE, {"enabled": [1]}, {"stage": []}, {"loss_scale": "x" * 5000, "enabled": True}, {"x": 1}):
        path.write_text(json.dumps({name: value}))
        try:
            resolve(config, 1, False)
        except ConfigError as error:
            assert "ds.json" in str(error) and len(str(error)) < 2000, (value, str(error)[:500])
