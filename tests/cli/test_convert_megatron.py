"""Checkpoints of CPM-1, CPM-Pretrain, Megatron-LM and DeepSpeed are imported; code in their pickles never runs."""

import argparse
import enum
import io
import os
import pickle
import random
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import Tensor

from megatron.checkpointing import CheckpointReader, find_checkpoint, load_weights, plain_config
from megatron.model import GPT2Model
from megatron.tokenizer import load_tokenizer
from megatron_tools.convert.megatron_lm import RankFiles
from megatron_tools.convert.plain_pickle import load_plain
from tests.parity import reference
from tests.sentences import SENTENCES
from tests.support import command, covering

LAYERS, HIDDEN, HEADS, VOCAB, POSITIONS = 4, 16, 4, 3000, 12
PADDED = 3072


def some_weights() -> dict[str, Tensor]:
    """Return the weights of a GPT-2 as a dict: name in this project -> random tensor."""
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
    """Return the shards of a tensor-parallel rank, with QKV rows in the order of Megatron-LM's checkpoint version."""
    found = {}
    head = HIDDEN // HEADS
    for name, value in w.items():
        if "query_key_value" in name:
            order = []
            own = range(rank * HEADS // ranks, (rank + 1) * HEADS // ranks)
            # In `w`, row (n * 3 + c) * head + d is feature d of the query, key or value (c) of head n.
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
    """Save in CPM-1-large's format: two DeepSpeed ranks, fp16, Megatron-LM's oldest names; return converter flags."""
    (folder / "80000").mkdir(parents=True)
    (folder / "latest_checkpointed_iteration.txt").write_text("80000")
    names = {"embedding.word_embeddings.weight": "word_embeddings.weight"}
    names |= {"position_embedding.weight": "position_embeddings.weight"}
    names |= {f"final_norm.norm.{kind}": f"transformer.final_layernorm.{kind}" for kind in ("weight", "bias")}
    for rank in range(2):
        module = {names.get(n, f"transformer.{n}"): v.half() for n, v in of_rank(w, rank, 2, 0).items()}
        torch.save({"module": module, "iteration": 80000}, folder / "80000" / f"mp_rank_{rank:02d}_model_states.pt")
    return ["--num-attention-heads", str(HEADS)]


def save_megatron(
    folder: Path, w: Mapping[str, Tensor], version: int, stages: int = 1, say_version: bool = True
) -> list[str]:
    """Save in Megatron-LM's format of 2020 and 2021, nested dicts that include settings; return converter flags."""
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
                    if version > 2 and rest.startswith("attention."):
                        rest = f"self_{rest}"
                    layers[f"layers.{at}.{rest}"] = v
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
            said = {"checkpoint_version": float(version)} if say_version else {}
            torch.save({"args": args, **said, "iteration": 100, "model": model, **generators()}, path)
    return []


def save_core(folder: Path, w: Mapping[str, Tensor], fused: bool) -> list[str]:
    """Save in the format of Megatron-LM with models of Megatron Core: two ranks, two stages; return converter flags.

    fused: whether layers of Transformer Engine hold the norms before them and have states of FP8.
    """
    names = {
        "input_layernorm.": "self_attention.linear_qkv.layer_norm_" if fused else "input_layernorm.",
        "attention.query_key_value.": "self_attention.linear_qkv.",
        "attention.dense.": "self_attention.linear_proj.",
        "post_attention_layernorm.": "mlp.linear_fc1.layer_norm_" if fused else "pre_mlp_layernorm.",
        "mlp.dense_h_to_4h.": "mlp.linear_fc1.",
        "mlp.dense_4h_to_h.": "mlp.linear_fc2.",
    }
    each = LAYERS // 2
    modules = {"enums": "ModelType", "transformer.enums": "AttnBackend", "rerun_state_machine": "RerunMode"}
    enums = {name: enum.Enum(name, {"auto": 5}, module=f"megatron.core.{at}") for at, name in modules.items()}
    members = {name: kind(5) for name, kind in enums.items()}
    args = argparse.Namespace(
        num_attention_heads=HEADS,
        use_mcore_models=True,
        normalization="LayerNorm",
        model_type=members.pop("ModelType"),
        position_embedding_type=2,  # absolute, in BigScience's enum
    )
    for rank in range(2):
        mine = of_rank(w, rank, 2, 3)
        words = mine["embedding.word_embeddings.weight"]
        positions = mine["position_embedding.weight"]
        first = {"embedding.word_embeddings.weight": words, "embedding.position_embeddings.weight": positions}
        last = {f"decoder.final_layernorm.{kind}": mine[f"final_norm.norm.{kind}"] for kind in ("weight", "bias")}
        models = [first, last | {"output_layer.weight": words}]
        for i in range(LAYERS):
            model, stem = models[i // each], f"decoder.layers.{i % each}."
            for ours, theirs in names.items():
                for kind in ("weight", "bias"):
                    model[f"{stem}{theirs}{kind}"] = mine[f"layers.{i}.{ours}{kind}"]
            if fused:
                model[f"{stem}mlp.linear_fc1._extra_state"] = torch.empty(0, dtype=torch.uint8)
                model[f"{stem}mlp.linear_fc2._extra_state"] = io.BytesIO(b"of Transformer Engine 1")
        for stage, model in enumerate(models):
            path = folder / f"mp_rank_{rank:02d}_{stage:03d}" / "model_optim_rng.pt"
            path.parent.mkdir(parents=True)
            content = {"args": args, "checkpoint_version": 3.0, "model": model, "rerun_state_machine": members}
            with patch.dict(sys.modules, {kind.__module__: SimpleNamespace(**enums) for kind in enums.values()}):
                torch.save(content, path)  # pickles an enum as the name of its class and its value
    return []


def generators() -> dict[str, Any]:
    """Return states of random number generators, as Megatron-LM saves them next to the weights."""
    return {
        "random_rng_state": random.getstate(),
        "np_rng_state": np.random.get_state(),
        "torch_rng_state": torch.get_rng_state(),
        "rng_tracker_states": {"model-parallel-rng": torch.get_rng_state()},
    }


def save_deepspeed(folder: Path, w: Mapping[str, Tensor], version: int, ranks: int) -> list[str]:
    """Save in the format of CPM-Pretrain without a pipeline; return the converter's flags.

    The format is DeepSpeed's, with the names of Megatron-LM 1.1.5 and no checkpoint version.
    """
    (folder / "100").mkdir(parents=True)
    (folder / "latest").write_text("100")
    for rank in range(ranks):
        module = {}
        for name, tensor in of_rank(w, rank, ranks, version).items():
            if name.startswith("layers."):
                name = f"language_model.transformer.{name}"
            elif name.startswith("final_norm"):
                name = f"language_model.transformer.final_layernorm.{name.split('.')[-1]}"
            else:
                name = (
                    f"language_model.embedding.{name.removeprefix('embedding.').replace('_embedding.', '_embeddings.')}"
                )
            module[name] = tensor
        content = {"module": module, "iteration": 100, "csr_tensor_module_names": set(), "mp_world_size": ranks}
        torch.save(content | generators(), folder / "100" / f"mp_rank_{rank:02d}_model_states.pt")
    return ["--num-attention-heads", str(HEADS), "--checkpoint-version", str(version)]


def save_layers(folder: Path, w: Mapping[str, Tensor], version: int, ranks: int, said: bool = False) -> list[str]:
    """Save in the format of CPM-Pretrain with a pipeline, one file per layer; return the converter's flags.

    said: whether to save the checkpoint version, too.
    """
    place = folder / "global_step100"
    place.mkdir(parents=True)
    (folder / "latest").write_text("global_step100")
    (folder / "latest_checkpointed_iteration.txt").write_text("100")
    for rank in range(ranks):
        mine = of_rank(w, rank, ranks, version)
        words = {"word_embeddings.weight": mine["embedding.word_embeddings.weight"]}
        # Layers 0 and 2 have no weights, so no files. The converter ignores the last layer's position embeddings.
        items: dict[int, dict[str, Tensor]] = {
            1: words | {"position_embeddings.weight": mine["position_embedding.weight"]},
            LAYERS + 4: {kind: mine[f"final_norm.norm.{kind}"] for kind in ("weight", "bias")},
            LAYERS + 5: words | {"position_embeddings.weight": torch.randn(POSITIONS, HIDDEN)},
        }
        for i in range(LAYERS):
            stem = f"layers.{i}."
            items[i + 3] = {name.removeprefix(stem): value for name, value in mine.items() if name.startswith(stem)}
        for at, content in items.items():
            torch.save(content, place / f"layer_{at:02d}-model_{rank:02d}-model_states.pt")
    for stage_and_rank in range(2 * ranks):
        content = {"module": None, "iteration": 100} | generators() | ({"checkpoint_version": version} if said else {})
        torch.save(content, place / f"mp_rank_{stage_and_rank:02d}_model_states.pt")
    return ["--num-attention-heads", str(HEADS), *([] if said else ["--checkpoint-version", str(version)])]


def save_ours(folder: Path, w: Mapping[str, Tensor]) -> list[str]:
    """Save weights by their names in this project, in DeepSpeed's format; return the converter's flags."""
    folder.mkdir(parents=True)
    torch.save({"module": dict(w)}, folder / "mp_rank_00_model_states.pt")
    return ["--num-attention-heads", str(HEADS)]


FORMS: dict[str, Callable[[Path, Mapping[str, Tensor]], list[str]]] = {
    "cpm-1": save_cpm1,
    "megatron-0": lambda folder, w: save_megatron(folder, w, 0),
    "megatron-unsaid": lambda folder, w: save_megatron(folder, w, 0, say_version=False),
    "megatron-1": lambda folder, w: save_megatron(folder, w, 1),
    "megatron-2": lambda folder, w: save_megatron(folder, w, 2),
    "megatron-3-pipeline": lambda folder, w: save_megatron(folder, w, 3, stages=2),
    "megatron-core": lambda folder, w: save_core(folder, w, fused=False),
    "megatron-core-fused": lambda folder, w: save_core(folder, w, fused=True),
    "deepspeed": lambda folder, w: save_deepspeed(folder, w, 2, 1),
    "deepspeed-2": lambda folder, w: save_deepspeed(folder, w, 2, 2),
    "deepspeed-resumed": lambda folder, w: save_deepspeed(folder, w, 0, 2),
    "layers": lambda folder, w: save_layers(folder, w, 2, 1),
    "layers-2": lambda folder, w: save_layers(folder, w, 2, 2),
    "layers-2-resumed": lambda folder, w: save_layers(folder, w, 0, 2),
    "layers-said": lambda folder, w: save_layers(folder, w, 3, 2, said=True),
    "ours": save_ours,
}
COVERED = ("cpm-1", "megatron-1", "megatron-3-pipeline", "deepspeed-2", "layers-2")


def logits_of(w: Mapping[str, Tensor], tokens: Tensor) -> Tensor:
    """Return the logits [b, s, v] that plain torch computes for tokens [b, s] from weights `w`."""
    positions, allowed, _ = reference.masks(tokens, -1, by_document=False)
    return reference.logits(w, tokens, positions, allowed, LAYERS, HEADS)[..., :VOCAB]


def some_tokens() -> Tensor:
    return torch.randint(VOCAB, (2, POSITIONS), generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("form", list(FORMS))
def test_every_form_is_read(form: str, tmp_path: Path) -> None:
    """Every format is read bit for bit; a wrong --checkpoint-version means a wrong QKV order, so logits differ."""
    w = some_weights()
    if form == "cpm-1":
        w = {name: value.half().float() for name, value in w.items()}
    more = FORMS[form](tmp_path / "theirs", w)
    given = int(more[-1]) if "--checkpoint-version" in more else None
    theirs = RankFiles(tmp_path / "theirs", given)
    found = {name: theirs.read(name, HEADS) for name in theirs.names()}
    assert found.keys() == w.keys()
    assert all(torch.equal(found[name], w[name]) for name in w)
    if given is not None:
        expected = logits_of(w, some_tokens())
        for other in {0, 1, 2} - {given}:
            theirs = RankFiles(tmp_path / "theirs", other)
            wrong = logits_of({name: theirs.read(name, HEADS) for name in w}, some_tokens())
            assert (wrong - expected).abs().max() > 0.1


@pytest.mark.parametrize("form", ["deepspeed", "layers", "layers-2"])
def test_what_cannot_be_told_is_asked_for(form: str, tmp_path: Path) -> None:
    FORMS[form](tmp_path / "theirs", some_weights())
    argv = ["--from-megatron", str(tmp_path / "theirs"), "--output", str(tmp_path / "o"), "--num-attention-heads", "4"]
    sentence = says(*argv)
    assert "give --checkpoint-version 0 (all queries" in sentence
    assert not (tmp_path / "o").exists()


@pytest.mark.parametrize("form", covering(list(FORMS), lambda form: form in COVERED))
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
    with torch.no_grad():
        torch.testing.assert_close(model(some_tokens()), logits_of(w, some_tokens()), rtol=1e-5, atol=1e-5)


class Payload:
    """An object that creates the file `path` by a shell command when it is unpickled, like an attacker's code."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.path}",)


class Reduced:
    """An object whose __reduce__ returns `call`: (function, arguments) and, optionally, a state."""

    def __init__(self, *call: Any) -> None:
        self.call = call

    def __reduce__(self) -> Any:
        return self.call


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
            assert "mp_rank_00_model_states.pt requests posix.system and is not loaded" in sentence
            assert not trace.exists()
    torch.load(path, weights_only=False)
    assert trace.exists(), "unpickled without restrictions, the payload must work"


def test_the_state_of_numpys_generator_loads_and_nothing_else_of_numpy(tmp_path: Path) -> None:
    path = tmp_path / "file.pt"
    state, weight = np.random.RandomState(3).get_state(), torch.arange(4.0)
    rebuild = np.arange(3).__reduce__()[0]  # the function with which numpy unpickles arrays
    for old_format in (False, True):
        torch.save({"np_rng_state": state, "weight": weight}, path, _use_new_zipfile_serialization=not old_format)
        assert torch.equal(load_plain(path)["weight"], weight)
    # Pickles of numpy 1 have the module name numpy.core instead of numpy._core.
    written = pickle.dumps({"np_rng_state": state}, protocol=2).replace(b"numpy._core", b"numpy.core")
    assert b"numpy.core.multiarray" in written
    path.write_bytes(b"".join(legacy_header()) + written + pickle.dumps([], protocol=2))
    assert "np_rng_state" in load_plain(path)
    for bad, word in (
        (np.arange(3), "dtype('i8')"),
        (np.array([None], dtype=object), "dtype('O8')"),
        (np.zeros((2, 2), np.uint32), "not the state of a random generator"),
        (np.float64(1.5), "numpy._core.multiarray.scalar"),
        (Reduced(rebuild, (os.system, (0,), b"b")), "posix.system"),
        (Reduced(rebuild, (Payload, (0,), b"b")), "Payload"),
        (Reduced(rebuild, (torch.Tensor, (0,), b"b")), "_reconstruct for an object of type Tensor"),
        (Reduced(rebuild, (argparse.Namespace, (0,), b"b")), "_reconstruct for an object of type Namespace"),
        (Reduced(np.ndarray, ((10**12,),)), "numpy.ndarray"),
        (Reduced(eval, ("1",)), "eval"),
        (Reduced(load_tokenizer, ("a",)), "megatron.tokenizer.load.load_tokenizer"),
    ):
        for old_format in (False, True):
            torch.save({"a": bad}, path, _use_new_zipfile_serialization=not old_format)
            with pytest.raises(ValueError, match=SENTENCES["and_is_not_loaded"]) as caught:
                load_plain(path)
            assert word in str(caught.value), caught.value


def legacy_header() -> list[bytes]:
    """Return the pickles at the start of a file that torch 1.5 or older saved."""
    magic = 0x1950A86A20F9469CFC6C
    sizes = {"short": 2, "int": 4, "long": 4}
    system = {"protocol_version": 1001, "little_endian": True, "type_sizes": sizes}
    return [pickle.dumps(each, protocol=2) for each in (magic, 1001, system)]


def test_mistakes(tmp_path: Path, vocab_file: str) -> None:
    w = some_weights()
    save_cpm1(tmp_path / "theirs", w)
    base = ["--from-megatron", str(tmp_path / "theirs"), "--output", str(tmp_path / "o")]
    assert "give --num-attention-heads" in says(*base)
    second = tmp_path / "theirs" / "80000" / "mp_rank_01_model_states.pt"
    second.rename(second.with_name("mp_rank_02_model_states.pt"))
    assert "lacks the file of model-parallel rank 1" in says(*base)
    second.with_name("mp_rank_02_model_states.pt").write_bytes(b"x" * 1000)
    second.write_bytes(b"")
    assert "mp_rank_01_model_states.pt" in says(*base)
    (tmp_path / "theirs" / "latest_checkpointed_iteration.txt").write_text("90000")
    assert "names 90000" in says(*base)
    assert "there is no folder /no/where" in says("--from-megatron", "/no/where", "--output", str(tmp_path / "o"))
    assert "neither mp_rank_00_model_states.pt" in says("--from-megatron", str(tmp_path), *base[2:])
    torch.save({"module": {"strange.weight": torch.ones(2)}}, tmp_path / "mp_rank_00_model_states.pt")
    assert "strange.weight of shape [2] is unknown" in says("--from-megatron", str(tmp_path), *base[2:])
    assert not (tmp_path / "o").exists()


def test_folders_that_do_not_fit_together(tmp_path: Path) -> None:
    w = some_weights()
    save_layers(tmp_path / "layers", w, 2, 2)
    place = tmp_path / "layers" / "global_step100"

    def refused(folder: Path, version: int | None, sentence: str) -> None:
        with pytest.raises(ValueError, match=sentence):
            RankFiles(folder, version)

    head = place / f"layer_{LAYERS + 5:02d}-model_01-model_states.pt"
    content = torch.load(head)
    torch.save({**content, "word_embeddings.weight": content["word_embeddings.weight"] + 1}, head)
    refused(tmp_path / "layers", 2, "word_embeddings.weight differs from the embedding")
    torch.save(content, head)
    for rank in range(2):
        (place / f"layer_04-model_{rank:02d}-model_states.pt").unlink()
        refused(
            tmp_path / "layers", 2, "lacks the file of model-parallel rank 0, layer 4" if not rank else "lacks layers"
        )
    save_megatron(tmp_path / "said", w, 1)
    refused(tmp_path / "said", 0, "version 1, but --checkpoint-version is 0")
    path = tmp_path / "said" / "iter_0000100" / "mp_rank_01" / "model_optim_rng.pt"
    torch.save({**torch.load(path, weights_only=False), "checkpoint_version": 2.0}, path)
    refused(tmp_path / "said", None, "checkpoint version 1.0 is unknown or differs")
    save_megatron(tmp_path / "later", w, 2)
    for path in (tmp_path / "later").rglob("*.pt"):
        torch.save({"model": torch.load(path, weights_only=False)["model"]}, path)
    # Every Megatron-LM that used these weight names saved a version, so a missing version does not mean version 0.
    refused(tmp_path / "later", None, "give --checkpoint-version 0")
