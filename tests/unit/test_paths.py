"""Words that name files: URLs with a mistake are refused, and every path of every tool goes through one door."""

import argparse
import importlib
import json
import re
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from data_utils.cli import any_path, any_prefix, local_path
from megatron.config import SECTIONS
from megatron.config.command_line import parse
from megatron.config.ds_config import resolve
from megatron.config.fields import ConfigError, types_of
from megatron.config.places import PATH_SETTINGS, URL_SETTINGS
from megatron.data.corpus_paths import parse_named_sets
from megatron.data.remote_tokens import cache_folder
from megatron.storage import PathError, RemotePath, is_url, require_local, to_path
from tds.saving import refuse_url
from tests.support import ROOT

MISTAKES = [
    "s3:/bucket/run", "s3:bucket/run", "s3//bucket/run", "s3:///bucket/run", "s3://", "s3:", "://bucket/run",
    "S3:/bucket/run", "gs:/bucket/run", "memory:/bucket", "https:/host/x", " s3://bucket/run", "'s3://bucket/run'",
    "s3://bucket//run", "S3://bucket/./run", "gs://bucket/a//b", "memory://bucket//",
    "file:///home/x", "file:/home/x", "local:///home/x", "sftp//host/x", "hdfs//name/x",
]  # fmt: skip
# Settings and arguments of text that is no path.
WORDS = {
    "moe_layer_frequency", "rope_scaling", "recompute_modules", "reference_ops", "partition_method", "split",
    "tokenizer_type", "fim_tokens", "batch_size_schedule", "skip_iterations", "skip_samples", "trace_iterations",
    "profile_iterations", "encoding", "max_document_mb", "json_key", "ray", "tasks", "prompt", "suffix",
    "sample_prompt", "host", "special_tokens", "keys", "chat_date", "params", "layouts", "reference", "flags",
    "documents", "set",
}  # fmt: skip


@pytest.mark.parametrize("text", MISTAKES)
def test_a_url_with_a_mistake_is_no_path(text: str) -> None:
    for door in (to_path, require_local):
        with pytest.raises(PathError, match=re.escape(text)):
            door(text)
    for check in (local_path, any_path, any_prefix):
        with pytest.raises(argparse.ArgumentTypeError, match=re.escape(text)):
            check(text)


@pytest.mark.parametrize("text", ["a/b", "/a:b/c", "data/s3:/x", "C:/x", "a:b", "hf//x", "memory", "0.3"])
def test_a_path_on_this_machine(text: str) -> None:
    assert to_path(text) == Path(text) and not is_url(to_path(text)) and require_local(text) == text


@pytest.mark.parametrize("text", ["./s3:/x", ".//memory:x"])
def test_a_folder_whose_name_looks_like_a_url(text: str) -> None:
    found = to_path(text)
    assert not is_url(found) and found.is_absolute() and found == Path.cwd() / text
    # A path is often turned into text and read again.
    assert to_path(str(found)) == found and require_local(str(found)) == str(found)


@pytest.mark.parametrize("url", ["s3://bucket/a//b", "s3://bucket/./a/b", "s3://bucket//a/./b/"])
def test_the_url_that_a_path_would_name_is_suggested(url: str) -> None:
    with pytest.raises(PathError, match=r"did you mean s3://bucket/a/b\?"):
        to_path(url)


@pytest.mark.parametrize("text", ["s3://bucket/Run", "S3://bucket/Run", "GS://b/x", "Memory://b/x"])
def test_schemes_in_any_case(text: str) -> None:
    scheme, _, rest = text.partition("://")
    found = to_path(text)
    assert isinstance(found, RemotePath) and str(found) == str(RemotePath(text)) == f"{scheme.lower()}://{rest}"
    assert found == to_path(f"{scheme.lower()}://{rest}")
    with pytest.raises(PathError):
        require_local(text)


@pytest.mark.parametrize("name", URL_SETTINGS + PATH_SETTINGS)
def test_flags_of_a_run_refuse_a_url_with_a_mistake(name: str) -> None:
    flags = ["--run-dir", "run", "--" + name.replace("_", "-")]
    flags += ["0: 1 s3:/bucket/a; 1M: b"] if name == "data_stages" else ["s3:/bucket/a"]
    flags += ["--train-data-path", "x"] if name in ("valid_data_path", "test_data_path") else []
    with pytest.raises(ConfigError, match=f"{flags[2]} s3:/bucket/a"):
        parse(flags)


@pytest.mark.parametrize("words", [["web=s3:/b/x", "books=y"], ["0.3", "a", "0.7", "gs:/b/x"], ["1 a 1 s3:b/x"]])
def test_corpora_with_names_and_weights(words: list[str]) -> None:
    with pytest.raises(ConfigError, match="--valid-data-path (s3|gs):"):
        parse(["--train-data-path", "x", "--valid-data-path", *words])


def test_files_of_settings_are_local() -> None:
    for url in ("s3://bucket/a.json", "s3:/bucket/a.json"):
        with pytest.raises(ConfigError, match=f"--config {url}"):
            parse(["--config", url])


def test_every_setting_of_text_is_a_path_or_named_here() -> None:
    for section in SECTIONS.values():
        for f in fields(section):
            chosen = f.metadata["check"] is not None and hasattr(f.metadata["check"], "choices")
            if {str, tuple} & set(types_of(section, f.name)) and not chosen:
                assert (f.name in URL_SETTINGS + PATH_SETTINGS) != (f.name in WORDS), f.name


def _actions(parser: argparse.ArgumentParser) -> Iterator[Any]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for each in action.choices.values():
                yield from _actions(each)
        elif action.nargs != 0:
            yield action


TOOLS = sorted(path.stem for path in (ROOT / "tools").glob("[a-z]*.py") if path.stem != "launch")


@pytest.mark.parametrize("tool", TOOLS)
def test_every_path_of_every_tool_goes_through_the_door(tool: str) -> None:
    """launch.py has no path of its own: the script's name goes to torchrun, the flags to the script."""
    module = re.findall(r"from (\S+) import cli", (ROOT / "tools" / f"{tool}.py").read_text())[0]
    for action in _actions(importlib.import_module(module).build_parser()):
        text = action.type in (None, str) and action.choices is None
        words = action.dest in WORDS or (tool == "clean_corpus" and action.dest == "script")
        assert not text or words, f"{action.dest} takes any text"
        if action.type is local_path:
            with pytest.raises(argparse.ArgumentTypeError, match="s3://bucket/x"):
                action.type("s3://bucket/x")


@pytest.mark.parametrize("url", ["s3:/bucket/x", "s3://bucket/x"])
def test_other_doors(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Paths in a file for DeepSpeed, in the environment, and in DeepSpeed's own saves."""
    (tmp_path / "ds.json").write_text(
        json.dumps({"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": url}}})
    )
    with pytest.raises(ConfigError, match=f"nvme_path.*{url}"):
        resolve(parse(["--deepspeed-config", str(tmp_path / "ds.json")]), 1, False)
    monkeypatch.setenv("MEGATRON_CACHE_DIR", url)
    with pytest.raises(PathError, match=url):
        cache_folder()
    with pytest.raises(ValueError, match=url):
        refuse_url(url)
    refuse_url(tmp_path / "a:b")


def test_data_sets_may_have_names_in_any_script() -> None:
    assert parse_named_sets(["中文=data/a", "été=0.5 b 0.5 c"], "valid") == {"中文": "data/a", "été": "0.5 b 0.5 c"}
    assert parse_named_sets(["7=data/a"], "valid") == {"": ["7=data/a"]}
