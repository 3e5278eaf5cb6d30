"""From CPM-1 and Megatron-LM: the network that was saved, against plain torch; and nothing in a file is ever run."""

import argparse
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.checkpointing import CheckpointReader, find_checkpoint, load_weights, plain_config
from megatron.model import GPT2Model
from megatron.tokenizer import load_tokenizer
from tests.parity import reference
from tests.support import command, covering

LAYERS, HIDDEN, HEADS, VOCAB, POSITIONS = 4, 16, 4, 3000, 12
PADDED = 3072


def some_weights() -> dict[str, Tensor]:
    """By our names, drawn here."""
    g = torch.Generator().manual_seed(2)
    shapes: dict[str, tuple[int, ...]] = {
        "embedding.word_embeddings.weight": (PADDED, HIDDEN),
        "position_embedding.weight": (POSITIONS, HIDDEN),
        "final_norm.norm.weight": (HIDDEN,),
        "final_norm.norm.bias": (HIDDEN,),
    }
    for i in range(LAYERS):
        for name, rows, columns in (
            ("input_layernorm", HIDDEN, 0),
            ("attention.query_key_value", 3 * HIDDEN, HIDDEN),
            ("attention.dense", HIDDEN, HIDDEN),
            ("post_attention_layernorm", HIDDEN, 0),
            ("mlp.dense_h_to_4h", 4 * HIDDEN, HIDDEN),
            ("mlp.dense_4h_to_h", HIDDEN, 4 * HIDDEN),
        ):
            shapes[f"layers.{i}.{name}.weight"] = (rows, columns) if columns else (rows,)
            shapes[f"layers.{i}.{name}.bias"] = (rows,)
    return {name: torch.randn(shape, generator=g) * 0.3 for name, shape in shapes.items()}


def of_rank(w: Mapping[str, Tensor], rank: int, ranks: int, version: int) -> dict[str, Tensor]:
    """A rank's tensors, query, key and value in the order of that checkpoint version; index by index."""
    found = {}
    head = HIDDEN // HEADS
    for name, value in w.items():
        if "query_key_value" in name:
            order = []
            own = range(rank * HEADS // ranks, (rank + 1) * HEADS // ranks)
            # Row (n, c, d) of ours: feature d of c = query, key or value of head n.
            if version == 0:
                order = [(n, c, d) for c in range(3) for n in own for d in range(head)]
            elif version == 1:
                order = [(n, c, d) for n in own for d in range(head) for c in range(3)]
            else:
                order = [(n, c, d) for n in own for c in range(3) for d in range(head)]
            value = value[[(n * 3 + c) * head + d for n, c, d in order]]
        elif "word_embeddings" in name or "dense_h_to_4h" in name:
            value = value.chunk(ranks)[rank]
        elif name.endswith(("attention.dense.weight", "dense_4h_to_h.weight")):
            value = value.chunk(ranks, 1)[rank]
        found[name] = value.clone()
    return found


def save_cpm1(folder: Path, w: Mapping[str, Tensor]) -> list[str]:
    """As CPM-1-large's: two ranks under DeepSpeed, half precision, the names of Megatron-LM's first version."""
    (folder / "80000").mkdir(parents=True)
    (folder / "latest_checkpointed_iteration.txt").write_text("80000")
    names = {"embedding.word_embeddings.weight": "word_embeddings.weight"}
    names |= {"position_embedding.weight": "position_embeddings.weight"}
    names |= {f"final_norm.norm.{kind}": f"transformer.final_layernorm.{kind}" for kind in ("weight", "bias")}
    for rank in range(2):
        module = {names.get(n, f"transformer.{n}"): v.half() for n, v in of_rank(w, rank, 2, 0).items()}
        torch.save({"module": module, "iteration": 80000}, folder / "80000" / f"mp_rank_{rank:02d}_model_states.pt")
    return ["--num-attention-heads", str(HEADS)]


def save_megatron(folder: Path, w: Mapping[str, Tensor], version: int, stages: int = 1) -> list[str]:
    """As Megatron-LM's of 2020 and 2021: nested, with its settings, cut into pipeline stages from version 3 on."""
    (folder / "latest_checkpointed_iteration.txt").parent.mkdir(parents=True)
    (folder / "latest_checkpointed_iteration.txt").write_text("100")
    body = "encoder" if version >= 2 else "transformer"
    each = LAYERS // stages
    for rank in range(2):
        mine = of_rank(w, rank, 2, version)
        for stage in range(stages):
            layers: dict[str, Tensor] = {}
            for n, v in mine.items():
                if n.startswith("layers.") and int(n.split(".")[1]) // each == stage:
                    at, rest = int(n.split(".")[1]) % each, n.split(".", 2)[2]
                    layers[
                        f"layers.{at}.{rest.replace('attention.', 'self_attention.') if version > 2 and rest.startswith('attention.') else rest}"
                    ] = v
            model: dict[str, Any] = {"language_model": {body: layers}}
            if stage == stages - 1:
                layers |= {f"final_layernorm.{kind}": mine[f"final_norm.norm.{kind}"] for kind in ("weight", "bias")}
                if stages > 1:
                    model["word_embeddings_for_head"] = {"weight": mine["embedding.word_embeddings.weight"]}
            if stage == 0:
                model["language_model"]["embedding"] = {
                    "word_embeddings": {"weight": mine["embedding.word_embeddings.weight"]},
                    "position_embeddings": {"weight": mine["position_embedding.weight"]},
                }
            name = f"mp_rank_{rank:02d}" + (f"_{stage:03d}" if stages > 1 else "")
            path = folder / "iter_0000100" / name / "model_optim_rng.pt"
            path.parent.mkdir(parents=True)
            args = argparse.Namespace(num_attention_heads=HEADS, layernorm_epsilon=1e-5, params_dtype=torch.half)
            torch.save({"args": args, "checkpoint_version": float(version), "iteration": 100, "model": model}, path)
    return []


FORMS = {
    "cpm-1": save_cpm1,
    "megatron-0": lambda folder, w: save_megatron(folder, w, 0),
    "megatron-1": lambda folder, w: save_megatron(folder, w, 1),
    "megatron-2": lambda folder, w: save_megatron(folder, w, 2),
    "megatron-3-pipeline": lambda folder, w: save_megatron(folder, w, 3, stages=2),
}


@pytest.mark.parametrize("form", covering(list(FORMS), lambda form: form not in ("megatron-0", "megatron-2")))
def test_the_network_that_was_saved(form: str, tmp_path: Path, vocab_file: str) -> None:
    w = some_weights()
    if form == "cpm-1":
        w = {name: value.half().float() for name, value in w.items()}
    more = FORMS[form](tmp_path / "theirs", w)
    argv = ["--from-megatron", str(tmp_path / "theirs"), "--output", str(tmp_path / "ours"), "--vocab-file", vocab_file]
    done = command("python", "tools/convert_checkpoint.py", *argv, *more)
    assert done.returncode == 0, done.stderr
    path = find_checkpoint(str(tmp_path / "ours"))
    config = plain_config(CheckpointReader(path))
    assert config.model.vocab_size == load_tokenizer(vocab_file).vocab_size == VOCAB
    model = GPT2Model(config, parallel_output=False).eval()
    load_weights(path, model)
    tokens = torch.randint(VOCAB, (2, POSITIONS), generator=torch.Generator().manual_seed(3))
    positions, allowed, _ = reference.masks(tokens, -1, by_document=False)
    expected = reference.logits(w, tokens, positions, allowed, LAYERS, HEADS)[..., :VOCAB]
    with torch.no_grad():
        torch.testing.assert_close(model(tokens), expected, rtol=1e-4, atol=1e-4)


class Payload:
    """What an attacker puts into a checkpoint."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.path}",)


def says(*argv: str) -> str:
    done = command("python", "tools/convert_checkpoint.py", *argv)
    assert done.returncode == 1, done.stdout
    assert len(done.stderr.strip().splitlines()) == 1, done.stderr
    return done.stderr


def test_a_payload_is_refused_and_never_run(tmp_path: Path) -> None:
    folder, trace = tmp_path / "theirs", tmp_path / "run"
    folder.mkdir()
    path = folder / "mp_rank_00_model_states.pt"
    for content in ({"module": {"word_embeddings.weight": Payload(trace)}}, Payload(trace)):
        for old_format in (False, True):
            torch.save(content, path, _use_new_zipfile_serialization=not old_format)
            sentence = says("--from-megatron", str(folder), "--output", str(tmp_path / "o"))
            assert "mp_rank_00_model_states.pt asks for posix.system, which is not run" in sentence
            assert not trace.exists()
    torch.load(path, weights_only=False)
    assert trace.exists(), "the payload would have worked"


def test_mistakes(tmp_path: Path, vocab_file: str) -> None:
    w = some_weights()
    save_cpm1(tmp_path / "theirs", w)
    base = ["--from-megatron", str(tmp_path / "theirs"), "--output", str(tmp_path / "o")]
    assert "does not say how many heads the model has: give --num-attention-heads" in says(*base)
    second = tmp_path / "theirs" / "80000" / "mp_rank_01_model_states.pt"
    second.rename(second.with_name("mp_rank_02_model_states.pt"))
    assert "lacks the file of model-parallel rank 1" in says(*base)
    second.with_name("mp_rank_02_model_states.pt").write_bytes(b"x" * 1000)
    second.write_bytes(b"")
    assert "mp_rank_01_model_states.pt" in says(*base)
    (tmp_path / "theirs" / "latest_checkpointed_iteration.txt").write_text("90000")
    assert "names 90000, which is not there" in says(*base)
    assert "there is no folder /no/where" in says("--from-megatron", "/no/where", "--output", str(tmp_path / "o"))
    assert "holds neither mp_rank_00_model_states.pt" in says("--from-megatron", str(tmp_path), *base[2:])
    torch.save({"module": {"strange.weight": torch.ones(2)}}, tmp_path / "mp_rank_00_model_states.pt")
    assert "no place is known for the tensor strange.weight" in says("--from-megatron", str(tmp_path), *base[2:])
    assert not (tmp_path / "o").exists()
