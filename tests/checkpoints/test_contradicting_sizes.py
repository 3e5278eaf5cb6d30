"""Sizes in checkpoint.json or config.json that contradict the tensors are refused before memory is allocated."""

import json
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from blake3 import blake3

from data_utils.tokenizer_training import train_byte_bpe
from megatron.checkpointing import CheckpointError, CheckpointReader, find_checkpoint
from megatron.checkpointing.stream import LazyTensor
from megatron.checkpointing.write import write_checkpoint
from megatron.config.command_line import parse
from megatron.data.corpus_paths import prefixes_of
from megatron_tools.convert import convert_checkpoint, convert_flags
from megatron_tools.convert.hf_folder import HFModelFolder
from megatron_tools.shapes import config_of_checkpoint, whole_shapes
from megatron_tools.write import evaluate, evaluate_flags, generate, generate_flags
from tests.sentences import SENTENCES
from tests.support import RankFailure, train_gpt2

SMALL = (
    "--num-layers 2 --hidden-size 16 --num-attention-heads 2 --seq-length 8 --max-position-embeddings 8 "
    "--vocab-size 270"
)
FAMILIES = {
    "gpt2": SMALL,
    "llama": f"{SMALL} --position-embedding rope --normalization rmsnorm --activation swiglu --no-hidden-bias "
    "--no-tie-embeddings",
    "t5": f"{SMALL} --num-sentinels 5 --enc-seq-length 8 --num-decoder-layers 3 --position-embedding relative "
    "--normalization rmsnorm --no-hidden-bias",
}
LIMIT = 2 << 30  # bytes of memory that a test may allocate in addition to what it uses already


@contextmanager
def little_memory() -> Iterator[None]:
    """Limit this process's address space, so that huge allocations raise MemoryError at once."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + LIMIT, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def checkpoint(folder: Path, family: str) -> Path:
    """Write a checkpoint with weights of zero, and a tokenizer; return the checkpoint's folder."""
    train_byte_bpe(["The river runs slowly to the sea. "] * 9, str(folder / "tokenizer.json"), 260, "hf")
    config = parse([*FAMILIES[family].split(), "--family", family, "--vocab-file", str(folder / "tokenizer.json")])
    entries = [
        LazyTensor(f"weight.{name}", shape, torch.float32, lambda shape=shape: torch.zeros(shape))
        for name, shape in whole_shapes(config).items()
    ]
    write_checkpoint(folder / "c" / "iter_0000000", entries, config, "")
    (folder / "c" / "latest").write_text("iter_0000000\n")
    return folder / "c" / "iter_0000000"


def edit(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Apply `change` to the content of checkpoint.json and update its checksum."""
    content = json.loads((path / "checkpoint.json").read_text())
    change(content)
    before = blake3((path / "checkpoint.json").read_bytes()).hexdigest()
    (path / "checkpoint.json").write_text(json.dumps(content))
    after = blake3((path / "checkpoint.json").read_bytes()).hexdigest()
    (path / "BLAKE3SUMS").write_text((path / "BLAKE3SUMS").read_text().replace(before, after))


def uses(path: Path) -> dict[str, Callable[[], Any]]:
    """Return tool -> a call that loads the checkpoint's model as the tool does."""

    def by(flags: Any, *argv: str) -> Any:
        return flags.build_parser().parse_args([*argv, "--load", str(path)])

    return {
        "convert_checkpoint": lambda: convert_checkpoint.main(by(convert_flags, "--output", str(path / "out"))),
        "generate": lambda: generate.load_writer(by(generate_flags, "--prompt", "a")),
        "evaluate": lambda: evaluate.load_subject(by(evaluate_flags, "--input", "x")),
    }


def model(key: str, value: Any) -> Callable[[dict[str, Any]], None]:
    def change(content: dict[str, Any]) -> None:
        content["config"]["model"][key] = value

    return change


def lose(name: str) -> Callable[[dict[str, Any]], None]:
    def change(content: dict[str, Any]) -> None:
        del content["tensors"][f"weight.{name}"]

    return change


WRONG: list[tuple[str, Callable[[dict[str, Any]], None], str]] = [
    *(("gpt2", model("num_layers", n), "num_layers") for n in (2**31, 2**200, 600)),
    ("gpt2", model("num_layers", 1), "layers.1."),
    ("gpt2", model("num_layers", 3), "layers.2."),
    *(
        ("gpt2", model(key, 2**31), key)
        for key in ("hidden_size", "num_attention_heads", "vocab_size", "ff_hidden_size")
    ),
    ("gpt2", model("hidden_size", 32), "word_embeddings.weight"),
    ("gpt2", model("vocab_size", 300), "word_embeddings.weight"),
    ("gpt2", model("ff_hidden_size", 24), "dense_h_to_4h"),
    ("gpt2", model("max_position_embeddings", 16), "position_embedding.weight"),
    ("gpt2", model("max_position_embeddings", 2**70), "max_position_embeddings"),
    ("gpt2", lambda content: content.update(positions=4), "positions"),
    ("gpt2", lose("layers.1.mlp.dense_4h_to_h.bias"), "layers.1.mlp.dense_4h_to_h.bias"),
    ("llama", model("num_layers", 2**31), "num_layers"),
    ("llama", model("num_key_value_heads", 1), "query_key_value"),
    ("llama", model("tie_embeddings", True), "head.word_embeddings.weight"),
    ("t5", model("num_decoder_layers", 2**31), "num_decoder_layers"),
    ("t5", model("num_decoder_layers", 2), "decoder.layers.2."),
    ("t5", model("relative_attention_num_buckets", 2**40), "relative_attention_num_buckets"),
]


@pytest.mark.parametrize(("family", "change", "named"), WRONG)
def test_settings_that_the_tensors_contradict(
    family: str, change: Callable[[dict[str, Any]], None], named: str, tmp_path: Path
) -> None:
    path = checkpoint(tmp_path, family)
    edit(path, change)
    for use, call in uses(path).items():
        with little_memory(), pytest.raises(ValueError, match=r"checkpoint\.json|iter_0000000") as error:
            call()
        assert named in str(error.value) and "\n" not in str(error.value), use
    assert not (path / "out").exists()


@pytest.mark.parametrize("family", FAMILIES)
def test_settings_that_are_those_of_the_tensors(family: str, tmp_path: Path) -> None:
    path = checkpoint(tmp_path, family)
    config_of_checkpoint(path)
    uses(path)["convert_checkpoint"]()
    assert (path / "out" / "config.json").is_file()


@pytest.mark.parametrize(("samples", "name"), [(0, "a"), (5, "a"), (6, "b"), (9, "b"), (10, "c")])
def test_the_corpus_of_the_last_sample(samples: int, name: str, tmp_path: Path) -> None:
    """Chats with such a model, and its export, have the chat template of this corpus."""
    path = checkpoint(tmp_path, "gpt2")
    values = {"data_stages": ["0: a; 5: b; 72 tokens: c"], "valid_data_path": ["v"]}
    edit(path, lambda content: content["config"]["data"].update(values))
    edit(path, lambda content: content["state"].update(consumed_samples=samples, consumed_tokens=8 * samples))
    assert prefixes_of(config_of_checkpoint(path).data.paths) == [name]


def test_more_tokens_than_the_model_has(tmp_path: Path) -> None:
    path = checkpoint(tmp_path, "gpt2")
    train_byte_bpe([f"word{i} other{i}" for i in range(99)], str(tmp_path / "tokenizer.json"), 300, "hf")
    with pytest.raises(ValueError, match=SENTENCES["300_tokens_more_than_the_model"]):
        uses(path)["convert_checkpoint"]()


@pytest.mark.parametrize("kept", [[], ["exp_avg"]])
def test_moments_that_are_announced_and_missing(kept: list[str], tmp_path: Path) -> None:
    """A checkpoint.json that lists two optimizer moments is refused if tensors of one or of both are missing."""
    path = checkpoint(tmp_path, "gpt2")

    def announce(content: dict[str, Any]) -> None:
        content["optimizer"]["moments"] = ["exp_avg", "exp_avg_sq"]
        for name, entry in list(content["tensors"].items()):
            if name != "weight.final_norm.norm.bias":
                content["tensors"] |= {name.replace("weight.", f"{moment}.", 1): entry for moment in kept}

    edit(path, announce)
    with pytest.raises(CheckpointError, match="exp_avg"):
        CheckpointReader(path)


def test_weights_without_moments_are_listed(tmp_path: Path) -> None:
    path = checkpoint(tmp_path, "gpt2")

    def announce(content: dict[str, Any], without: list[str]) -> None:
        content["optimizer"] |= {"moments": ["exp_avg"], "without_moments": without}
        weights = {name: entry for name, entry in content["tensors"].items() if name.startswith("weight.")}
        content["tensors"] |= {
            name.replace("weight.", "exp_avg.", 1): entry
            for name, entry in weights.items()
            if name != "weight.final_norm.norm.bias"
        }

    edit(path, lambda content: announce(content, ["final_norm.norm.bias"]))
    CheckpointReader(path)
    edit(path, lambda content: announce(content, []))
    with pytest.raises(CheckpointError, match=r"exp_avg\.final_norm\.norm\.bias"):
        CheckpointReader(path)


@pytest.mark.parametrize("family", ["gpt2", "t5", "llama", "qwen3"])
def test_a_config_of_theirs_that_no_memory_holds(family: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    from tests.unit.test_hf_configs import nothing, write

    write(tmp_path, family, {}, nothing, "float32")
    content = json.loads((tmp_path / "config.json").read_text())
    for key in (
        "n_layer",
        "num_layers",
        "num_decoder_layers",
        "num_hidden_layers",
        "num_attention_heads",
        "n_head",
        "vocab_size",
    ):
        if key not in content:
            continue
        for value in (2**31, 2**70):
            (tmp_path / "config.json").write_text(json.dumps({**content, key: value}))
            with little_memory(), pytest.raises(ValueError, match=rf"config\.json: {key} is"):
                HFModelFolder(tmp_path)


def test_a_resume_drops_no_layer(tmp_path: Path, tiny_data: str, vocab_file: str) -> None:
    """A resume is refused if the checkpoint has one layer more than its settings and the run's flags say."""
    flags = (
        f"{SMALL.replace(' --vocab-size 270', '')} --batch-size 2 --eval-iters 0 --precision fp32 --no-tensorboard"
    ).split()
    flags += ["--data-path", tiny_data, "--vocab-file", vocab_file, "--save-interval", "1", "--lr", "0.001"]
    train_gpt2(1, tmp_path / "run", *flags, "--train-iters", "1")
    path = find_checkpoint(str(tmp_path / "run"))
    edit(path, model("num_layers", 1))
    (path.parent / "latest").write_text(f"{path.name}\n")
    with pytest.raises(RankFailure, match=SENTENCES["lists_unknown_weights"]):
        train_gpt2(1, tmp_path / "run", *flags, "--train-iters", "2", "--num-layers", "1")
