"""Export keeps an imported folder's bos, eos, pad and unk; a pad token that export adds is never an end token."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import torch

from data_utils.tokenizer_training import train_byte_bpe, train_sentencepiece
from megatron.checkpointing.relocation import TOKENIZER_FOLDER, copy_tokenizer
from megatron.config.command_line import parse
from megatron.tokenizer import load_tokenizer
from megatron.tokenizer.sibling_files import CLASS_ROLES
from megatron_tools.convert import convert_checkpoint, convert_flags, export_roles
from megatron_tools.convert.export_roles import generation_settings, pad_token_name, special_token_ids
from megatron_tools.convert.export_tokenizer import ChatFormat, write_tokenizer

transformers = pytest.importorskip("transformers")
TEXT = ["The river runs slowly to the sea. user assistant system 123 == \n"] * 20
SIZES = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}
IM = ["<|im_start|>", "<|im_end|>"]
SAMPLING = {"do_sample": True, "temperature": 0.6, "top_p": 0.95, "top_k": 20, "repetition_penalty": 1.05}
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"


def folder_of(path: Path, kind: str, about: dict[str, Any], generation: dict[str, Any], **ids: Any) -> Path:
    """Save a random model of transformers with a byte-level tokenizer; return its folder.

    about: content of tokenizer_config.json. generation: key of generation_config.json -> token. ids: key of
    config.json -> token.
    """
    path.mkdir()
    train_byte_bpe(TEXT, str(path / "tokenizer.json"), 300, "hf", [*IM, "<s>", "</s>"])
    marks = load_tokenizer(str(path)).marks
    make = {"qwen3": transformers.Qwen3Config, "llama": transformers.LlamaConfig, "gpt2": transformers.GPT2Config}[kind]
    sizes = SIZES if kind != "gpt2" else {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 1024}
    config = make(vocab_size=304, **sizes, **{key: marks[name] for key, name in ids.items()})
    model = transformers.AutoModelForCausalLM.from_config(config)
    named = {key: [marks[n] for n in v] if isinstance(v, list) else marks[v] for key, v in generation.items()}
    model.generation_config = transformers.GenerationConfig(**named, **SAMPLING)
    model.save_pretrained(path)
    (path / "tokenizer_config.json").write_text(json.dumps(about))
    return path


QWEN = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "bos_token": None,
    "eos_token": "<|im_end|>",
    "pad_token": "<|endoftext|>",
    "model_max_length": 131072,
    "additional_special_tokens": IM,
    "chat_template": TEMPLATE,
    "padding_side": "left",
}
LLAMA = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "bos_token": "<s>",
    "eos_token": "</s>",
    "model_max_length": 4096,
}
FOLDERS: dict[str, tuple[str, dict[str, Any], dict[str, Any], dict[str, str]]] = {
    "Qwen3": (
        "qwen3",
        QWEN,
        {
            "eos_token_id": ["<|im_end|>", "<|endoftext|>"],
            "bos_token_id": "<|endoftext|>",
            "pad_token_id": "<|endoftext|>",
        },
        {"bos_token_id": "<|endoftext|>", "eos_token_id": "<|im_end|>"},
    ),
    "Llama": (
        "llama",
        LLAMA,
        {"eos_token_id": "</s>", "bos_token_id": "<s>"},
        {"bos_token_id": "<s>", "eos_token_id": "</s>"},
    ),
    "GPT-2": (
        "gpt2",
        {"model_max_length": 1024},
        {"eos_token_id": "<|endoftext|>"},
        {"eos_token_id": "<|endoftext|>", "bos_token_id": "<|endoftext|>"},
    ),
}


@pytest.mark.parametrize("name", FOLDERS)
def test_every_role_that_came_in_goes_out(name: str, tmp_path: Path) -> None:
    kind, about, generation, ids = FOLDERS[name]
    folder = folder_of(tmp_path / "in", kind, about, generation, **ids)
    main, parser = convert_checkpoint.main, convert_flags.build_parser()
    main(parser.parse_args(["--from-hf", str(folder), "--output", str(tmp_path / "c")]))
    main(parser.parse_args(["--load", str(tmp_path / "c"), "--output", str(tmp_path / "out"), "--verify"]))
    same_roles(folder, tmp_path / "out")
    copy_tokenizer(str(folder), tmp_path / "c")  # copies the tokenizer into folder c, as a training run does
    shutil.rmtree(folder / "config.json", ignore_errors=True)
    kept = str(tmp_path / "c" / TOKENIZER_FOLDER)
    main(parser.parse_args(["--load", str(tmp_path / "c"), "--output", str(tmp_path / "again"), "--vocab-file", kept]))
    same_roles(folder, tmp_path / "again")


def same_roles(folder: Path, output: Path) -> None:
    before, after = (transformers.AutoTokenizer.from_pretrained(each) for each in (folder, output))
    for role in ("bos_token", "eos_token", "pad_token", "unk_token", "model_max_length", "padding_side"):
        assert getattr(after, role) == getattr(before, role), role
    assert after.get_chat_template() == before.get_chat_template() if before.chat_template else True
    assert set(after.all_special_tokens) == set(before.all_special_tokens)
    was, now = (transformers.GenerationConfig.from_pretrained(each).to_diff_dict() for each in (folder, output))
    assert {**now, **was} == now
    was, now = (transformers.AutoConfig.from_pretrained(each) for each in (folder, output))
    assert [getattr(now, key) for key in ("bos_token_id", "eos_token_id")] == [
        getattr(was, key) for key in ("bos_token_id", "eos_token_id")
    ]


def test_an_exported_chat_model_learns_its_ends(tmp_path: Path) -> None:
    """Labels that transformers makes with an exported chat tokenizer contain the end-of-turn tokens.

    The data collator masks pad tokens, so the end-of-turn token must not be the pad token.
    """
    kind, about, generation, ids = FOLDERS["Qwen3"]
    folder = folder_of(tmp_path / "in", kind, about, generation, **ids)
    ours, output = load_tokenizer(str(folder)), tmp_path / "out"
    output.mkdir()
    write_tokenizer(output, parse(["--family", "gpt2"]), ours, str(folder), ChatFormat(TEMPLATE, None), "qwen3")
    theirs: Any = transformers.AutoTokenizer.from_pretrained(output)
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "river"}]
    row = theirs.apply_chat_template(turns)["input_ids"]
    collate = transformers.DataCollatorForLanguageModeling(theirs, mlm=False)
    labels = collate([{"input_ids": row}, {"input_ids": row[:-3]}])["labels"]
    assert int((labels == ours.marks["<|im_end|>"]).sum()) == row.count(ours.marks["<|im_end|>"]) * 2 - 1


@pytest.mark.parametrize("kind", ["sentencepiece", "hf"])
def test_our_own_pad_is_no_end(kind: str, tmp_path: Path) -> None:
    path = tmp_path / ("tokenizer.json" if kind == "hf" else "m.model")
    if kind == "hf":
        train_byte_bpe(TEXT, str(path), 300, "hf", IM)
    else:
        train_sentencepiece(TEXT, str(path), 290, specials=IM)
    ours, output = load_tokenizer(str(path)), tmp_path / "out"
    output.mkdir()
    write_tokenizer(output, parse(["--family", "gpt2"]), ours, str(path), ChatFormat(None, None), "gpt2")
    theirs: Any = transformers.AutoTokenizer.from_pretrained(output)
    assert theirs.pad_token_id not in (ours.eod, ours.marks["<|im_end|>"])
    assert (theirs.pad_token is None) == (kind == "hf")
    ids = special_token_ids({"eos_token_id": ours.eod, "bos_token_id": ours.eod}, ours, path, is_t5=False)
    assert ids.get("pad_token_id") == theirs.pad_token_id
    end = ours.marks["<|im_end|>"]
    assert generation_settings(ids, ours, path, end)["eos_token_id"] == [ours.eod, end]


def test_a_pad_that_a_text_may_give_is_none(tmp_path: Path) -> None:
    """A token that ordinary text may produce, such as <unk> without byte fallback, does not become the pad token."""
    import sentencepiece

    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXT),
        model_prefix=str(tmp_path / "m"),
        vocab_size=40,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    assert pad_token_name(load_tokenizer(str(tmp_path / "m.model")), tmp_path / "m.model") is None


@pytest.mark.parametrize("name", CLASS_ROLES)
def test_roles_that_classes_give(name: str) -> None:
    """CLASS_ROLES has the default special tokens of transformers' tokenizer classes."""
    theirs = getattr(transformers, name)()
    roles = {role: getattr(theirs, role) for role in ("bos_token", "eos_token", "unk_token", "pad_token")}
    assert CLASS_ROLES[name] == {role: token for role, token in roles.items() if token is not None}


def test_the_words_of_qwen2_are_those_of_the_class() -> None:
    from transformers.models.qwen2 import tokenization_qwen2

    assert export_roles.QWEN2_WORDS == tokenization_qwen2.PRETOKENIZE_REGEX


def test_a_qwen2_with_other_words_keeps_its_ids(tmp_path: Path) -> None:
    """Export keeps token ids, even if a tokenizer names Qwen2Tokenizer but does not split words as this class does."""
    folder = folder_of(tmp_path / "in", "qwen3", {**QWEN, "tokenizer_class": "Qwen2Tokenizer"}, {})
    ours, output = load_tokenizer(str(folder)), tmp_path / "out"
    output.mkdir()
    (output / "config.json").write_text('{"model_type": "qwen2"}')
    write_tokenizer(output, parse(["--family", "gpt2"]), ours, str(folder), ChatFormat(None, None), "qwen2")
    theirs: Any = transformers.AutoTokenizer.from_pretrained(output)
    for text in ("1234  don't", "e\u0301 ==\n\n"):
        assert theirs(text)["input_ids"] == ours.encode(text)


@pytest.mark.parametrize("family", ["gpt2", "llama", "qwen3", "qwen3_moe", "t5", "umt5"])
def test_a_model_without_a_tokenizer_goes_out_without_one(
    family: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A model without a tokenizer is exported without one, but with its special token ids and generation settings."""
    from tests.unit.test_hf_configs import nothing, old, write

    ids = {"bos_token_id": 3, "eos_token_id": [5, 7], "pad_token_id": 9}
    write(tmp_path / "in", family, {}, nothing if "t5" in family else old(**ids), "float32")
    settings = {**({} if "t5" in family else ids), "temperature": 0.6, "do_sample": True, "max_new_tokens": 9}
    (tmp_path / "in" / "generation_config.json").write_text(json.dumps(settings))
    main, parser = convert_checkpoint.main, convert_flags.build_parser()
    main(parser.parse_args(["--from-hf", str(tmp_path / "in"), "--output", str(tmp_path / "c"), "--verify"]))
    main(parser.parse_args(["--load", str(tmp_path / "c"), "--output", str(tmp_path / "out"), "--verify"]))
    assert "no tokenizer" in capsys.readouterr().out
    assert not list((tmp_path / "out").glob("*token*"))
    before, after = (json.loads((tmp_path / each / "config.json").read_text()) for each in ("in", "out"))
    assert after["model_type"] == before["model_type"]
    assert {key: after.get(key) for key in ids} == {key: before.get(key) for key in ids}
    generation = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert {**generation, **settings} == generation
    from safetensors.torch import load_file

    was, now = (load_file(tmp_path / each / "model.safetensors") for each in ("in", "out"))
    assert all(torch.equal(now[name], was[name]) for name in now)


def test_an_upcycled_model_without_a_tokenizer_keeps_its_special_token_ids(tmp_path: Path) -> None:
    from tests.unit.test_hf_configs import nothing, write

    ids = {"bos_token_id": 3, "eos_token_id": [5, 7]}
    write(tmp_path / "in", "llama", ids, nothing, "float32")
    (tmp_path / "in" / "generation_config.json").write_text(json.dumps({**ids, "temperature": 0.6}))
    main, parser = convert_checkpoint.main, convert_flags.build_parser()
    main(parser.parse_args(["--from-hf", str(tmp_path / "in"), "--output", str(tmp_path / "dense")]))
    experts = ["--upcycle", "2", "--output", str(tmp_path / "experts")]
    main(parser.parse_args(["--load", str(tmp_path / "dense"), *experts]))
    main(parser.parse_args(["--load", str(tmp_path / "experts"), "--output", str(tmp_path / "out")]))
    for name in ("config.json", "generation_config.json"):
        content = json.loads((tmp_path / "out" / name).read_text())
        assert content == {**content, **ids}
    assert content["temperature"] == 0.6


@pytest.mark.parametrize("has_tokenizer", [False, True])
def test_sampling_settings_of_an_old_config_json_go_out(has_tokenizer: bool, tmp_path: Path) -> None:
    """Folders saved before 2023 have no generation_config.json; transformers reads the settings in config.json."""
    folder = folder_of(tmp_path / "in", "gpt2", {}, {}, eos_token_id="<|endoftext|>", bos_token_id="<|endoftext|>")
    (folder / "generation_config.json").unlink()
    if not has_tokenizer:
        (folder / "tokenizer.json").unlink()
        (folder / "tokenizer_config.json").unlink()
    content = json.loads((folder / "config.json").read_text())
    settings = {"num_beams": 4, "no_repeat_ngram_size": 3, "max_length": 120, "early_stopping": True, "top_k": None}
    (folder / "config.json").write_text(json.dumps({**content, **settings}))
    main, parser = convert_checkpoint.main, convert_flags.build_parser()
    main(parser.parse_args(["--from-hf", str(folder), "--output", str(tmp_path / "c")]))
    main(parser.parse_args(["--load", str(tmp_path / "c"), "--output", str(tmp_path / "out")]))
    for each in (folder, tmp_path / "out"):
        found = transformers.GPT2LMHeadModel.from_pretrained(each).generation_config
        assert {key: getattr(found, key) for key in settings if key != "top_k"} == {
            key: value for key, value in settings.items() if key != "top_k"
        }
    assert "top_k" not in json.loads((tmp_path / "out" / "generation_config.json").read_text())


def test_an_end_token_that_is_an_ordinary_piece_is_exported(tmp_path: Path) -> None:
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXT),
        model_prefix=str(tmp_path / "tokenizer"),
        vocab_size=300,
        model_type="bpe",
        byte_fallback=True,
        user_defined_symbols=["[EOS]"],
        bos_id=-1,
        eos_id=-1,
        minloglevel=3,
        hard_vocab_limit=False,
    )
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "[EOS]"}))
    tokenizer = load_tokenizer(str(tmp_path / "tokenizer.model"))
    exported = export_roles.tokenizer_settings(tokenizer, tmp_path / "tokenizer.model", None)
    assert exported["eos_token"] == "[EOS]"
