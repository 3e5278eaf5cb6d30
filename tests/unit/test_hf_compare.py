"""`convert_checkpoint --verify` sees every difference that depends on positions, and compares token ids."""

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
from tokenizers import decoders, normalizers, pre_tokenizers

from megatron.config.command_line import with_values
from megatron.model import GPT2Model, T5Model, global_parameters
from megatron.tokenizer import load_tokenizer
from megatron.tokenizer.base import TokenizerError, byte_piece
from megatron_tools.convert.hf_compare import compare_imported_ids, compare_with_hf
from megatron_tools.convert.hf_folder import HFModelFolder
from tests.unit.test_hf_configs import nothing, write

transformers = pytest.importorskip("transformers")
tokenization_qwen2 = pytest.importorskip("transformers.models.qwen2.tokenization_qwen2")
LONG = {"max_position_embeddings": 300}
YARN = {"rope_type": "yarn", "rope_theta": 100.0, "factor": 2.0, "original_max_position_embeddings": 150}


def imported(folder: Path, family: str, settings: dict[str, Any]) -> tuple[HFModelFolder, dict[str, torch.Tensor]]:
    """Save a model of transformers in `folder` and return it as imported: (settings, weights by name)."""
    write(folder, family, settings, nothing, "float32")
    found = HFModelFolder(folder)
    model: Any = (T5Model if found.config.is_t5 else GPT2Model)(found.config, parallel_output=False)
    found.load(model)
    return found, {name: p.detach().clone() for name, p in global_parameters(model)}


@pytest.mark.parametrize("window", [81, None, 79])
@pytest.mark.parametrize("family", ["mistral", "qwen2"])
def test_another_window_is_found(family: str, window: int | None, tmp_path: Path) -> None:
    settings = {**LONG, "use_sliding_window": True, "max_window_layers": 0} if family == "qwen2" else LONG
    found, weights = imported(tmp_path, family, {**settings, "sliding_window": 80})
    assert found.config.model.sliding_window == 80
    compare_with_hf(found.config, weights.__getitem__, tmp_path)
    path = tmp_path / "config.json"
    other = {"sliding_window": window}
    if window is None and family == "qwen2":
        other = {"use_sliding_window": False, "layer_types": None}
    path.write_text(json.dumps(json.loads(path.read_text()) | other))
    with pytest.raises(ValueError, match="not the same model"):
        compare_with_hf(found.config, weights.__getitem__, tmp_path)


def test_a_missing_window_of_ours_is_found(tmp_path: Path) -> None:
    found, weights = imported(tmp_path, "mistral", {**LONG, "sliding_window": 80})
    other = with_values(found.config, {"sliding_window": None})
    with pytest.raises(ValueError, match="not the same model"):
        compare_with_hf(other, weights.__getitem__, tmp_path)


@pytest.mark.parametrize("family", ["t5", "gpt2", "llama"])
def test_large_weights_are_compared_in_fp64(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Large weights amplify the rounding of fp32, so a comparison in fp32 cannot tell it from a wrong weight."""
    settings = {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False} if family == "t5" else {}
    write(tmp_path, family, settings, nothing, "float32")
    model = transformers.AutoModelForSeq2SeqLM if family == "t5" else transformers.AutoModelForCausalLM
    theirs = model.from_pretrained(tmp_path, dtype=torch.float32)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator))
    theirs.save_pretrained(tmp_path)
    found = HFModelFolder(tmp_path)
    again: Any = (T5Model if found.config.is_t5 else GPT2Model)(found.config, parallel_output=False)
    found.load(again)
    weights = {name: p.detach().clone() for name, p in global_parameters(again)}
    # A run in fp32 alone may or may not pass: it depends on the CPU.
    monkeypatch.setattr("megatron_tools.convert.hf_compare._COMPARED_DTYPES", (torch.float64,))
    compare_with_hf(found.config, weights.__getitem__, tmp_path)
    name = next(name for name in weights if name.endswith("attention.dense.weight"))
    weights[name][0, 0] += 1e-2
    with pytest.raises(ValueError, match="not the same model"):
        compare_with_hf(found.config, weights.__getitem__, tmp_path)


@pytest.mark.parametrize(("first", "last"), [(64, 256), (255, 256)])
def test_learned_positions_are_compared_to_the_last(first: int, last: int, tmp_path: Path) -> None:
    found, weights = imported(tmp_path, "gpt2", {"n_positions": 256})
    compare_with_hf(found.config, weights.__getitem__, tmp_path)
    weights["position_embedding.weight"][first:last] = 0
    with pytest.raises(ValueError, match="not the same model"):
        compare_with_hf(found.config, weights.__getitem__, tmp_path)


@pytest.mark.parametrize("stack", ["encoder", "decoder"])
def test_all_buckets_of_relative_positions_are_compared(stack: str, tmp_path: Path) -> None:
    found, weights = imported(tmp_path, "t5", {"relative_attention_max_distance": 90})
    compare_with_hf(found.config, weights.__getitem__, tmp_path)
    name = next(name for name in weights if name.startswith(stack) and "relative_positions" in name)
    weights[name][-1] += 1  # the bucket of the largest distances
    with pytest.raises(ValueError, match="not the same model"):
        compare_with_hf(found.config, weights.__getitem__, tmp_path)


@pytest.mark.parametrize(
    ("family", "settings", "length"),
    [
        ("llama", {"max_position_embeddings": 24}, 24),
        ("llama", {**LONG, "rope_parameters": YARN}, 167),
        ("mistral", {**LONG, "sliding_window": 80}, 97),
        ("mistral", {**LONG, "sliding_window": 3000}, 300),
        ("t5", {"relative_attention_max_distance": 90}, 107),
        ("gpt2", {"n_positions": 256}, 256),
    ],
)
def test_the_number_of_tokens_is_reported(
    family: str, settings: dict[str, Any], length: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found, weights = imported(tmp_path, family, settings)
    capsys.readouterr()
    compare_with_hf(found.config, weights.__getitem__, tmp_path)
    assert f" {length} tokens" in capsys.readouterr().out


RIVERS = ["The river runs slowly to the sea", "春天来了", " slow rivers run 123"] * 20


def save_tokenizer(folder: Path, tokenizer: tokenizers.Tokenizer, specials: list[str], **settings: str) -> Path:
    """Train `tokenizer` on RIVERS and write it with its tokenizer_config.json; return the folder."""
    alphabet = pre_tokenizers.ByteLevel.alphabet() if settings["tokenizer_class"].startswith("Qwen") else []
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=500, special_tokens=specials, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(RIVERS, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def llama_2(folder: Path) -> Path:
    """Write a tokenizer.json in the form of Llama 2's: one more space before every text, as sentencepiece adds it."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence([
        decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)
    ])  # fmt: skip
    specials = ["<unk>", "<s>", "</s>", *map(byte_piece, range(256))]
    named = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    return save_tokenizer(folder, tokenizer, specials, tokenizer_class="LlamaTokenizer", **named)


def qwen_2(folder: Path, nfc: bool) -> Path:
    """Write a tokenizer.json in the form of Qwen2's, with or without its normalizer."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    words = tokenizers.Regex(tokenization_qwen2.PRETOKENIZE_REGEX)
    bytes_ = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(words, "isolated"), bytes_])
    tokenizer.decoder = decoders.ByteLevel()
    if nfc:
        tokenizer.normalizer = normalizers.NFC()
    end = "<|endoftext|>"
    return save_tokenizer(folder, tokenizer, [end], tokenizer_class="Qwen2Tokenizer", eos_token=end)


def test_ids_of_a_llama_2_are_those_of_its_file(tmp_path: Path) -> None:
    """transformers 5 adds no space before a text that begins with a space; the file always adds one."""
    ours = load_tokenizer(str(llama_2(tmp_path)))
    file = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    text = "  slow"
    assert ours.encode(text) == file.encode(text, add_special_tokens=False).ids
    differs = ours.encode(text) != theirs(text, add_special_tokens=False)["input_ids"]
    assert differs == (transformers.__version__ > "5.1")  # 5.0 reads the whole file
    note = compare_imported_ids(ours, tmp_path)
    assert ("tokenizer.json" in note and "LlamaTokenizer" in note) == differs


@pytest.mark.parametrize("nfc", [True, False])
def test_a_missing_normalizer_is_found(nfc: bool, tmp_path: Path) -> None:
    note = compare_imported_ids(load_tokenizer(str(qwen_2(tmp_path, nfc))), tmp_path)
    assert ("Qwen2Tokenizer" in note) is not nfc


def test_ids_that_are_neither_transformers_nor_the_files_are_refused(tmp_path: Path) -> None:
    ours = load_tokenizer(str(llama_2(tmp_path)))
    content = (tmp_path / "tokenizer.json").read_text()
    content = content.replace('"Prepend"', '"Strip", "strip_left": true, "strip_right": true')
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ValueError, match="AutoTokenizer"):
        compare_imported_ids(ours, tmp_path)


def test_a_tokenizer_that_transformers_cannot_load(tmp_path: Path) -> None:
    ours = load_tokenizer(str(llama_2(tmp_path)))
    path = tmp_path / "tokenizer_config.json"
    path.write_text(json.dumps({"auto_map": {"AutoTokenizer": ["own.Tokenizer", None]}, "tokenizer_class": "Own"}))
    with pytest.raises(ValueError, match="AutoTokenizer"):
        compare_imported_ids(ours, tmp_path)


def test_a_vocabulary_of_qwen_2_is_no_gpt_2(tmp_path: Path) -> None:
    qwen_2(tmp_path, nfc=True)
    tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json")).model.save(str(tmp_path))
    load_tokenizer(str(tmp_path))
    with pytest.raises(TokenizerError, match="Qwen2Tokenizer"):
        load_tokenizer(str(tmp_path / "vocab.json"))
