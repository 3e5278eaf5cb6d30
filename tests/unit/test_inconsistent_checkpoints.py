"""Inconsistent or incomplete Hugging Face and Megatron-LM checkpoints are refused; the error names the file or key."""

import argparse
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.tokenizer import TokenizerError, load_tokenizer
from megatron.tokenizer.load import check_same_ids
from megatron.tokenizer.sentinels import SentinelTokenizer
from megatron_tools.convert.convert_checkpoint import import_megatron
from megatron_tools.convert.convert_flags import build_parser
from megatron_tools.convert.hf_config import check_tokenizer, read_config
from megatron_tools.convert.hf_folder import HFModelFolder, export_entries
from megatron_tools.convert.hf_import import _sentinel_count
from megatron_tools.convert.hf_names import Match
from megatron_tools.convert.megatron_lm import RankFiles
from megatron_tools.convert.megatron_settings import check_complete, settings_from_megatron
from megatron_tools.write import generate_flags
from megatron_tools.write.evaluate import load_subject
from megatron_tools.write.generate import load_writer
from megatron_tools.write.questions import PromptEncoder
from tests.sentences import SENTENCES
from tests.support import command
from tests.unit.test_hf_configs import T5, nothing, old, write

safetensors_torch = pytest.importorskip("safetensors.torch")
tokenizers = pytest.importorskip("tokenizers")
INDEX = "model.safetensors.index.json"


def sharded(folder: Path) -> dict[str, Any]:
    """Save a GPT-2 as two safetensors files; return the index that names each tensor's file."""
    write(folder, "gpt2", {}, nothing, "float32")
    tensors = safetensors_torch.load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    where = {}
    for file, own in (("a.safetensors", names[:9]), ("b.safetensors", names[9:])):
        safetensors_torch.save_file({name: tensors[name] for name in own}, folder / file)
        where |= dict.fromkeys(own, file)
    return {"weight_map": where}


def wrong_file(index: dict[str, Any]) -> object:
    first = min(index["weight_map"])
    return {"weight_map": index["weight_map"] | {first: "b.safetensors"}}


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda index: [], "must hold a JSON object"),
        (lambda index: {}, "weight_map must map"),
        (lambda index: {"weight_map": None}, "weight_map must map"),
        (lambda index: {"weight_map": dict.fromkeys(index["weight_map"], 5)}, "weight_map must map"),
        (lambda index: {"weight_map": dict.fromkeys(index["weight_map"], "../a.safetensors")}, "weight_map must map"),
        (wrong_file, "b.safetensors lacks"),
    ],
)
def test_an_index_that_lies(change: Callable[[dict[str, Any]], object], sentence: str, tmp_path: Path) -> None:
    (tmp_path / INDEX).write_text(json.dumps(change(sharded(tmp_path))))
    with pytest.raises(ValueError, match=sentence):
        HFModelFolder(tmp_path)


def test_one_file_beside_an_index_of_others_is_ambiguous(tmp_path: Path) -> None:
    index = sharded(tmp_path)
    (tmp_path / INDEX).write_text(json.dumps(index))
    HFModelFolder(tmp_path)
    (tmp_path / "model.safetensors").write_bytes((tmp_path / "a.safetensors").read_bytes())
    with pytest.raises(ValueError, match=SENTENCES["left_over_from_another_model"]):
        HFModelFolder(tmp_path)


@pytest.mark.parametrize("content", ["[]", "null", "3", "{", '"gpt2"'])
def test_a_config_that_is_no_object(content: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ValueError, match=SENTENCES["config_json_is_not_an_object"]):
        HFModelFolder(tmp_path)


@pytest.mark.parametrize(
    ("family", "settings", "sentence"),
    [
        ("gpt2", {"activation_function": ["gelu"]}, "activation_function is"),
        ("gpt2", {"model_type": ["gpt2"]}, "model_type"),
        ("gpt2", {"architectures": "GPT2LMHeadModel"}, "architectures must be a list"),
        ("gpt2", {"n_layer": "2"}, "n_layer is '2', not of type int"),
        ("gpt2", {"n_head": True}, "n_head is True, not of type int"),
        ("t5", {"feed_forward_proj": None}, "feed_forward_proj is None"),
        ("t5", {"eos_token_id": [1, "2"]}, "eos_token_id is"),
    ],
)
def test_values_of_another_type(family: str, settings: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    write(tmp_path, family, {}, old(**settings), "float32")
    with pytest.raises(ValueError, match=sentence):
        HFModelFolder(tmp_path)


def test_null_is_no_for_the_scale_of_logits() -> None:
    """A null `scale_decoder_outputs` in a T5's config.json is read as False.

    Without the key, logits are scaled exactly if the embeddings are tied, as in transformers.
    """
    said = {"model_type": "t5", **T5}
    assert "scale_decoder_outputs" not in said
    assert read_config({**said, "scale_decoder_outputs": None}, Path("config.json"))["scale_decoder_outputs"] is False
    assert read_config(said, Path("config.json"))["scale_decoder_outputs"] is None


@pytest.mark.parametrize("dtype", [torch.int8, torch.bool, torch.float8_e4m3fn])
def test_quantized_weights_are_not_taken_for_numbers(dtype: torch.dtype, tmp_path: Path) -> None:
    write(tmp_path, "gpt2", {}, nothing, "float32")
    tensors = safetensors_torch.load_file(tmp_path / "model.safetensors")
    tensors["transformer.h.0.mlp.c_fc.weight"] = tensors["transformer.h.0.mlp.c_fc.weight"].to(dtype)
    safetensors_torch.save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=SENTENCES["c_fc_weight_is_quantized"]):
        HFModelFolder(tmp_path)


# ------------------------------------------------------------------------------------ tokenizers


def bpe(folder: Path, **settings: Any) -> str:
    """Save a byte-level tokenizer.json, with `settings` in tokenizer_config.json; return the folder."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(["The river runs slowly to the sea"] * 3, trainer)
    folder.mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return str(folder)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"add_prefix_space": True}, "sets add_prefix_space to True, but tokenizer.json"),
        ({"added_tokens_decoder": {"400": {"content": "<mask>"}}}, "has no token '<mask>' with id 400"),
        ({"added_tokens_decoder": {"0": {"content": "<mask>"}}}, "has no token '<mask>' with id 0"),
        ({"added_tokens_decoder": ["<mask>"]}, "added_tokens_decoder"),
        ({"eos_token": ["</s>"]}, "is not a token|not a token"),
        ({"eos_token": {"text": "</s>"}}, "not a token"),
    ],
)
def test_what_stands_beside_a_tokenizer_is_not_passed_over(
    settings: dict[str, Any], sentence: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=sentence):
        load_tokenizer(bpe(tmp_path, **settings))


def test_null_leaves_the_space_in_front_to_the_tokenizer(tmp_path: Path) -> None:
    """transformers 5 saves a Qwen2Tokenizer with add_prefix_space null."""
    folder = bpe(tmp_path, add_prefix_space=None, tokenizer_class="Qwen2Tokenizer", eos_token="<|endoftext|>")
    ours = load_tokenizer(folder)
    assert ours.decode(ours.encode("a b")) == "a b"
    load_tokenizer(bpe(tmp_path / "off", add_prefix_space=False))


def test_tokens_added_in_another_file(tmp_path: Path) -> None:
    folder = bpe(tmp_path, add_prefix_space=False, added_tokens_decoder={"0": {"content": "<|endoftext|>"}})
    (tmp_path / "added_tokens.json").write_text('{"<|endoftext|>": 0}')
    load_tokenizer(folder)
    (tmp_path / "added_tokens.json").write_text('{"<mask>": 300}')
    with pytest.raises(ValueError, match=SENTENCES["has_no_token_mask_of_id"]):
        load_tokenizer(folder)


def test_a_space_in_front_of_a_text(tmp_path: Path) -> None:
    """The file tokenizer_config.json decides whether a tokenizer of vocab.json and merges.txt adds a leading space."""
    transformers = pytest.importorskip("transformers")
    library = tokenizers.Tokenizer.from_file(str(Path(bpe(tmp_path / "json")) / "tokenizer.json"))
    fingerprints = set()
    for prefix in (False, True):
        folder = tmp_path / str(prefix)
        folder.mkdir()
        library.model.save(str(folder))
        (folder / "tokenizer_config.json").write_text(
            json.dumps({"tokenizer_class": "GPT2Tokenizer", "add_prefix_space": prefix})
        )
        ours, theirs = load_tokenizer(str(folder)), transformers.AutoTokenizer.from_pretrained(folder)
        assert ours.encode("The river") == theirs("The river", add_special_tokens=False)["input_ids"]
        fingerprints.add(ours.fingerprint)
    assert len(fingerprints) == 2


def unigram(folder: Path, scheme: str, special: bool = True, frame: str = "$A </s>", **strips: bool) -> str:
    """Save a T5-style Unigram tokenizer.json, with ▁ for spaces and sentinels as the last tokens; return the folder.

    frame: tokens around a text $A. strips: lstrip and rstrip of the sentinels.
    """
    words = ["▁", "The", "▁The", "river", "▁river", "t", "u", "▁t", "▁u", "<", "/", "s", ">", "a", "▁a"]
    specials = ["<pad>", "</s>", "<unk>", "<s>"]
    pieces = [*((name, 0.0) for name in specials), *((word, -3.0 - i) for i, word in enumerate(words))]
    tokenizer = tokenizers.Tokenizer(tokenizers.models.Unigram(pieces, unk_id=2))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace(prepend_scheme=scheme)
    tokenizer.decoder = tokenizers.decoders.Metaspace(prepend_scheme=scheme)
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single=frame, special_tokens=[("</s>", 1), ("<s>", 3)]
    )
    tokenizer.add_special_tokens(specials)
    new = [tokenizers.AddedToken(f"<extra_id_{i}>", normalized=False, special=special, **strips) for i in (2, 1, 0)]
    tokenizer.add_special_tokens(new) if special else tokenizer.add_tokens(new)
    folder.mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>", "pad_token": "<pad>"})
    )
    return str(folder)


@pytest.mark.parametrize(
    "flags",
    [{}, {"special": False}, {"lstrip": True, "frame": "<s> $A </s>"}, {"lstrip": True, "rstrip": True}],
    ids=str,
)
@pytest.mark.parametrize("scheme", ["always", "first", "never"])
def test_prompts_with_sentinels_get_the_ids_of_transformers(scheme: str, flags: Any, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    ours = PromptEncoder(SentinelTokenizer(load_tokenizer(unigram(tmp_path, scheme, **flags)), 3, "t5"))
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    for text in ("t<extra_id_0>u", "The river <extra_id_0> a <extra_id_1>", " \n <extra_id_2> <extra_id_0>  river"):
        assert ours.question(text).tokens == theirs(text)["input_ids"], text


def test_the_name_of_a_special_token_in_a_text_is_text(tmp_path: Path) -> None:
    """The name of a special token in a text is encoded as plain text: the HTML tag `</s>` must not end a document."""
    tokenizer = load_tokenizer(unigram(tmp_path, "always"))
    for text in ("a</s>t", "</s>", "a <pad> t</s>", "</s></s>"):
        ids = tokenizer.encode(text)
        assert not {0, 1} & set(ids), text
        assert [list(found) for found in tokenizer.encode_batch([text, "The river"])] == [
            ids,
            tokenizer.encode("The river"),
        ]
    assert tokenizer.decode(tokenizer.encode("a</s>t")) == "a</s>t"


def test_two_tokens_of_a_vocabulary_exchanged(tmp_path: Path) -> None:
    first = bpe(tmp_path / "a")
    content = json.loads((tmp_path / "a" / "tokenizer.json").read_text())
    vocab = content["model"]["vocab"]
    vocab["Q"], vocab["Z"] = vocab["Z"], vocab["Q"]
    (tmp_path / "b.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match=SENTENCES["not_this_one_its_token"]):
        check_same_ids(load_tokenizer(str(tmp_path / "b.json")), load_tokenizer(first), "not this one")


@pytest.mark.parametrize("load", [load_subject, load_writer])
def test_a_hugging_face_folder_is_read_only_with_the_ids_of_its_own_tokenizer(
    load: Callable[[argparse.Namespace], object], tmp_path: Path
) -> None:
    """--vocab-file with two tokens exchanged has the same size and end, and yet it is another tokenizer."""
    folder = tmp_path / "hf"
    write(folder, "gpt2", {"vocab_size": 300, "bos_token_id": 0, "eos_token_id": 0}, nothing, "float32")
    content = json.loads((Path(bpe(folder)) / "tokenizer.json").read_text())
    same_file = tmp_path / "same.json"
    same_file.write_text(json.dumps(content))
    vocab = content["model"]["vocab"]
    vocab["Q"], vocab["Z"] = vocab["Z"], vocab["Q"]
    other_file = tmp_path / "other.json"
    other_file.write_text(json.dumps(content))
    args = generate_flags.build_parser().parse_args(["--load", str(folder), "--vocab-file", str(same_file)])
    args.window = None  # a flag of evaluate.py
    load(args)
    args.vocab_file = str(other_file)
    with pytest.raises(TokenizerError):
        load(args)


def test_several_ends_and_too_many_tokens_are_said(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(bpe(tmp_path))
    values = {"model_type": "gpt2", "vocab_size": tokenizer.vocab_size, "eos_token_id": [0, 7]}
    assert "only 0 ends a document" in check_tokenizer(values, values, tokenizer, tmp_path)[0]
    with pytest.raises(ValueError, match="more than vocab_size 100"):
        check_tokenizer(values | {"vocab_size": 100}, values, tokenizer, tmp_path)


def test_a_dtype_that_cannot_hold_a_weight() -> None:
    entries = export_entries([Match("a", ("b",))], lambda name: torch.tensor([1.0, 7e4]), lambda name: [2], "fp16")
    with pytest.raises(ValueError, match=SENTENCES["b_reaches_7e_04_which_overflows"]):
        entries[0].build()


# ----------------------------------------------------------------------------------- Megatron-LM

LAYERS, HIDDEN, HEADS, VOCAB, POSITIONS = 2, 16, 4, 40, 12


def weights() -> dict[str, Tensor]:
    shapes: dict[str, tuple[int, ...]] = {}
    for i in range(LAYERS):
        for name, rows, columns in (
            ("input_layernorm", HIDDEN, 0), ("attention.query_key_value", 3 * HIDDEN, HIDDEN),
            ("attention.dense", HIDDEN, HIDDEN), ("post_attention_layernorm", HIDDEN, 0),
            ("mlp.dense_h_to_4h", 4 * HIDDEN, HIDDEN), ("mlp.dense_4h_to_h", HIDDEN, 4 * HIDDEN),
        ):  # fmt: skip
            shapes |= {
                f"layers.{i}.{name}.weight": (rows, columns) if columns else (rows,),
                f"layers.{i}.{name}.bias": (rows,),
            }
    shapes |= {"final_layernorm.weight": (HIDDEN,), "final_layernorm.bias": (HIDDEN,)}
    return {name: torch.randn(shape) for name, shape in shapes.items()}


def save(folder: Path, body: dict[str, Tensor], name: str = "model_optim_rng.pt", **args: Any) -> None:
    embedding = {
        "word_embeddings": {"weight": torch.randn(VOCAB, HIDDEN)},
        "position_embeddings": {"weight": torch.randn(POSITIONS, HIDDEN)},
    }
    path = folder / "mp_rank_00" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    said = argparse.Namespace(num_attention_heads=HEADS, num_layers=LAYERS, **args)
    torch.save(
        {
            "args": said,
            "checkpoint_version": 3.0,
            "model": {"language_model": {"encoder": body, "embedding": embedding}},
        },
        path,
    )


def read(folder: Path, heads: int | None = None) -> dict[str, Any]:
    from megatron.config import Config
    from megatron.config.command_line import with_values

    theirs = RankFiles(folder)
    settings = settings_from_megatron(theirs, heads)
    check_complete(theirs, with_values(Config(), settings))
    return settings


@pytest.mark.parametrize(
    ("args", "settings"),
    [
        ({}, {"activation": "gelu-tanh", "layernorm_epsilon": 1e-5, "hidden_dropout": 0.1}),
        ({"bias_gelu_fusion": True}, {"activation": "gelu-tanh"}),
        ({"bias_gelu_fusion": False}, {"activation": "gelu"}),
        ({"bias_gelu_fusion": False, "openai_gelu": True}, {"activation": "gelu-tanh"}),
        ({"onnx_safe": True}, {"activation": "gelu"}),
        ({"norm_epsilon": 0.3, "layernorm_epsilon": None}, {"layernorm_epsilon": 0.3}),
        ({"hidden_dropout": 0.0, "attention_dropout": 0.2}, {"hidden_dropout": 0.0, "attention_dropout": 0.2}),
        ({"normalization": "layernorm"}, {"layernorm_epsilon": 1e-5}),  # the word of Megatron-DeepSpeed
    ],
)
def test_megatrons_arguments_are_honoured(args: dict[str, Any], settings: dict[str, Any], tmp_path: Path) -> None:
    save(tmp_path, weights(), **args)
    found = read(tmp_path)
    assert {key: found[key] for key in settings} == settings


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        ({"apply_residual_connection_post_layernorm": True}, "apply_residual_connection_post_layernorm is True"),
        ({"squared_relu": True}, "squared_relu is True"),
        ({"swiglu": True}, "swiglu is True"),
        ({"apply_layernorm_1p": True}, "apply_layernorm_1p is True"),
        ({"normalization": "RMSNorm"}, "normalization is 'RMSNorm'"),
        ({"use_mup": True}, "use_mup is True"),
        ({"group_query_attention": True, "num_query_groups": 2}, "group_query_attention is True"),
        ({"tensor_model_parallel_size": 2}, "the folder has files of 1 ranks"),
        ({"onnx_safe": True, "bias_gelu_fusion": True}, "onnx_safe and bias_gelu_fusion"),
        ({"norm_epsilon": 0.3, "layernorm_epsilon": 0.2}, "contradict each other"),
        ({"layernorm_epsilon": "small"}, "not a number"),
    ],
)
def test_megatrons_arguments_are_refused(args: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    save(tmp_path, weights(), **args)
    with pytest.raises(ValueError, match=sentence):
        read(tmp_path)


def without(name: str) -> Callable[[dict[str, Tensor]], None]:
    return lambda body: body.__delitem__(name)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (without("layers.1.mlp.dense_h_to_4h.bias"), "lacks layers.1.mlp.dense_h_to_4h.bias"),
        (without("final_layernorm.weight"), "lacks final_norm.norm.weight"),
        (lambda body: body.update({"layers.1.attention.dense.weight": torch.ones(8, HIDDEN)}), "has shape"),
        (lambda body: body.update({"layers.1.attention.query_key_value.weight": torch.tensor(1.0)}), r"has shape \[\]"),
        (
            lambda body: body.update({"layers.0.attention.dense.bias": torch.ones(HIDDEN, dtype=torch.int8)}),
            "torch.int8",
        ),
    ],
)
def test_megatrons_files_are_whole(change: Callable[[dict[str, Tensor]], None], sentence: str, tmp_path: Path) -> None:
    body = weights()
    change(body)
    save(tmp_path, body)
    with pytest.raises(ValueError, match=sentence):
        read(tmp_path)


def test_megatrons_files_contradict_the_command_or_each_other(tmp_path: Path) -> None:
    save(tmp_path, weights())
    with pytest.raises(ValueError, match="--num-attention-heads is 2"):
        read(tmp_path, 2)
    save(tmp_path, weights(), "model_rng.pt")
    with pytest.raises(ValueError, match="model_optim_rng.*model_rng"):
        read(tmp_path)


def test_an_import_of_megatrons_files_refuses_a_contradictory_tokenizer(tmp_path: Path) -> None:
    save(tmp_path, weights())
    vocabulary = bpe(tmp_path / "tokenizer", eos_token="<|eot|>")
    args = build_parser().parse_args(["--from-megatron", str(tmp_path), "--vocab-file", vocabulary, "--output", "a"])
    with pytest.raises(TokenizerError, match=re.escape("<|eot|>")):
        import_megatron(args)


def test_a_file_a_layer_tells_how_many_there_should_be(tmp_path: Path) -> None:
    """A checkpoint with one file per layer needs --num-layers if its file numbers are not those of CPM-Pretrain.

    With --num-layers, an error names the missing file of a layer.
    """
    body = weights()
    items: dict[int, dict[str, Tensor]] = {
        0: {
            "word_embeddings.weight": torch.randn(VOCAB, HIDDEN),
            "position_embeddings.weight": torch.randn(POSITIONS, HIDDEN),
        },
        **{
            2 + i: {n.removeprefix(f"layers.{i}."): v for n, v in body.items() if n.startswith(f"layers.{i}.")}
            for i in range(2)
        },
        5: {kind: body[f"final_layernorm.{kind}"] for kind in ("weight", "bias")},
    }
    for at, content in items.items():
        torch.save(content, tmp_path / f"layer_{at:02d}-model_00-model_states.pt")
    with pytest.raises(ValueError, match="give --num-layers"):
        RankFiles(tmp_path, 2)
    assert RankFiles(tmp_path, 2, 2).layers == 2
    (tmp_path / "layer_03-model_00-model_states.pt").unlink()
    with pytest.raises(ValueError, match="--num-layers"):
        RankFiles(tmp_path, 2, 2)


# ------------------------------------------------------------------------------------ the command


def test_what_the_command_refuses(tmp_path: Path) -> None:
    write(tmp_path / "hf", "gpt2", {}, nothing, "float32")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "latest").write_text("iter_0000500")
    save(tmp_path / "meg", weights())
    base = ("python", "tools/convert_checkpoint.py", "--output", str(tmp_path / "run"))
    for more, sentence in (
        (("--from-hf", str(tmp_path / "hf")), "exists and is not empty"),
        (("--from-megatron", str(tmp_path / "meg")), "exists and is not empty"),
        (("--from-megatron", str(tmp_path / "meg"), "--verify"), "--verify compares with transformers"),
        (("--from-hf", str(tmp_path / "hf"), "--num-layers", "2"), "--num-layers needs --from-megatron"),
        (("--load", str(tmp_path / "run"), "--max-shard-size", "nan"), "--max-shard-size nan must be"),
        (("--load", str(tmp_path / "run"), "--max-shard-size", "-1"), "--max-shard-size -1 must be"),
    ):
        done = command(*base, *more)
        assert done.returncode == 1 and sentence in done.stderr and "Traceback" not in done.stderr, done.stderr
    assert (tmp_path / "run" / "latest").read_text() == "iter_0000500"


def test_sentinels_that_a_folder_says_it_has(tmp_path: Path) -> None:
    """The number of sentinels is `extra_ids` of tokenizer_config.json, by default 100, even if more ids are unused."""
    model = tmp_path / "spiece.model"
    assert (_sentinel_count(model, 180), _sentinel_count(model, 100), _sentinel_count(model, 20)) == (100, 100, 20)
    for said, count in (("20", 20), ("200", 200), ("null", 100)):
        (tmp_path / "tokenizer_config.json").write_text(f'{{"extra_ids": {said}}}')
        assert _sentinel_count(model, 180) == count
    (tmp_path / "tokenizer_config.json").write_text('{"extra_ids": 0}')
    with pytest.raises(ValueError, match="extra_ids is 0"):
        _sentinel_count(model, 180)
