"""Checks of transformers: logits, losses and token ids against this project's, and against sums in fp64."""

import argparse
import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from data_utils.tokenizer_training import train_byte_bpe
from megatron.config.command_line import parse
from megatron.tokenizer import Tokenizer, load_tokenizer
from megatron_tools.convert.convert_checkpoint import _weight_reader
from megatron_tools.convert.export_tokenizer import ChatFormat, write_tokenizer
from megatron_tools.convert.hf_compare import compare_with_hf
from megatron_tools.convert.hf_import import import_hf

from .with_sentencepiece import documents, lines

GPT2 = {"vocab_size": 61, "n_positions": 24, "n_embd": 16, "n_layer": 2, "n_head": 4}
LLAMA = {
    "vocab_size": 61, "hidden_size": 32, "intermediate_size": 20, "num_hidden_layers": 2, "num_attention_heads": 8,
    "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
MIXTRAL = {**LLAMA, "num_local_experts": 4, "num_experts_per_tok": 2}
T5 = {"vocab_size": 61, "d_model": 16, "d_kv": 6, "d_ff": 20, "num_layers": 2, "num_heads": 2, "num_decoder_layers": 3}
T5 |= {"decoder_start_token_id": 0}
CLASSES = {
    "gpt2": ("GPT2Config", "GPT2LMHeadModel", GPT2),
    "llama": ("LlamaConfig", "LlamaForCausalLM", LLAMA),
    "mixtral": ("MixtralConfig", "MixtralForCausalLM", MIXTRAL),
    "t5": ("T5Config", "T5ForConditionalGeneration", T5),
    "umt5": ("UMT5Config", "UMT5ForConditionalGeneration", T5),
}
END = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>"}
TEXT = "The river runs slowly to the sea, 春天来了。  Two  spaces\n\n"
LLAMA_TEXTS = ["The river runs slowly to the sea", "a boat on the river", "rain falls slowly over the hills"] * 8


def random_model(kind: str) -> Any:
    """Return a small model of transformers with random weights so large that mistakes show."""
    import transformers

    config, model, sizes = CLASSES[kind]
    torch.manual_seed(5)
    found = getattr(transformers, model)(getattr(transformers, config)(**sizes)).eval()
    for parameter in found.parameters():
        nn.init.normal_(parameter, mean=float(parameter.dim() == 1), std=0.15)
    return found


def _check_logits(kind: str, **edits: Any) -> None:
    """Import a model of transformers and compare logits of both. edits: changed keys of its config.json."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        random_model(kind).save_pretrained(folder)
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | edits))
        config, _, entries = import_hf(argparse.Namespace(from_hf=name, vocab_file=None))
        try:
            compare_with_hf(config, _weight_reader(entries), folder)
        except ValueError as error:
            if "is not the same model" in str(error):
                raise AssertionError(str(error)) from None
            raise


def check_router_loss() -> None:
    """Compare Mixtral's auxiliary loss of a padded batch with experts * sum of shares * mean probabilities in fp64."""
    model = random_model("mixtral")
    inputs: list[Tensor] = []
    weights: list[Tensor] = []
    for name, module in model.named_modules():
        if name.endswith(".gate"):
            weights.append(module.weight.double())
            module.register_forward_pre_hook(lambda _, args: inputs.append(args[0].detach().flatten(0, -2).double()))
    tokens = torch.randint(1, 61, (2, 17), generator=torch.Generator().manual_seed(3))
    mask = torch.ones_like(tokens)
    mask[1, 9:] = 0
    found = model(tokens, attention_mask=mask, output_router_logits=True).aux_loss
    is_text = mask.flatten().bool()
    logits = torch.cat([(x @ w.T)[is_text] for x, w in zip(inputs, weights, strict=True)])
    probabilities = logits.softmax(-1)
    chosen = torch.zeros_like(logits).scatter_(1, logits.topk(2).indices, 1.0)
    expected = 4 * (chosen.mean(0) * probabilities.mean(0)).sum()
    ratio = float(found / expected)
    assert abs(ratio - 1) < 1e-4, f"the loss is {ratio:.4g} times the right one"


def check_accumulated_loss() -> None:
    """Compare T5's loss over two micro-batches of different lengths with the mean over all tokens in fp64."""
    model = random_model("t5")
    dice = torch.Generator().manual_seed(4)
    tokens = torch.randint(3, 61, (2, 12), generator=dice)
    labels = torch.randint(3, 61, (2, 10), generator=dice)
    labels[1, 3:] = -100
    count = int((labels != -100).sum())
    total = 0.0
    sums = torch.zeros((), dtype=torch.float64)
    for row, label in zip(tokens.split(1), labels.split(1), strict=True):
        try:
            result = model(input_ids=row, labels=label, num_items_in_batch=count)
        except TypeError:
            raise AssertionError("T5's forward() does not accept num_items_in_batch") from None
        total += float(result.loss)
        sums += nn.functional.cross_entropy(result.logits[0].double(), label[0], reduction="sum")
    ratio = total / float(sums / count)
    assert abs(ratio - 1) < 1e-4, f"the loss is {ratio:.4g} times the mean over all tokens"


def _compare_ids(ours: Tokenizer, theirs: Any, given: list[str]) -> None:
    for text in given:
        found = theirs(text, add_special_tokens=False)["input_ids"]
        assert found == ours.encode(text), f"other ids for {text[:40]!r}"


@contextmanager
def exported(tokenizer: Tokenizer, path: str, model_type: str) -> Iterator[str]:
    """Export a tokenizer, beside the config.json of a model of this type; yield the folder."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps({"model_type": model_type}))
        write_tokenizer(Path(folder), parse(["--family", "gpt2"]), tokenizer, path, ChatFormat(None, None), model_type)
        yield folder


def check_exported_json() -> None:
    """Compare ids of AutoTokenizer with ours for an exported byte-level BPE with special tokens."""
    import transformers

    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/tokenizer.json"
        train_byte_bpe(documents(), path, 1000, "hf", ["<|im_start|>"])
        ours = load_tokenizer(path)
        for model_type in ("gpt2", "llama", "qwen3"):
            with exported(ours, path, model_type) as output:
                theirs: Any = transformers.AutoTokenizer.from_pretrained(output)
            _compare_ids(ours, theirs, [*lines(), TEXT])
            marked = theirs(f"<|im_start|>{TEXT}", add_special_tokens=False)["input_ids"]
            assert marked == ours.encode_names(f"<|im_start|>{TEXT}"), "other ids with a special token"


def check_exported_llama() -> None:
    """Compare ids of AutoTokenizer with ours for an exported Llama tokenizer.model."""
    import transformers
    from sentencepiece import SentencePieceTrainer

    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "tokenizer.model"
        with path.open("wb") as model:
            SentencePieceTrainer.train(
                sentence_iterator=iter(LLAMA_TEXTS), model_writer=model, model_type="bpe", minloglevel=2,
                split_digits=True, normalization_rule_name="identity", remove_extra_whitespaces=False,
                byte_fallback=True, vocab_size=330, num_threads=1,
            )  # fmt: skip
        about = {"tokenizer_class": "LlamaTokenizer", "add_bos_token": True, "bos_token": "<s>", "eos_token": "</s>"}
        path.with_name("tokenizer_config.json").write_text(json.dumps({**about, "unk_token": "<unk>"}))
        ours = load_tokenizer(str(path))
        with exported(ours, str(path), "llama") as output:
            theirs: Any = transformers.AutoTokenizer.from_pretrained(output)
        _compare_ids(ours, theirs, [*LLAMA_TEXTS[:3], " two  spaces", "a\nb", "slow\u2581river", "春天 1234"])


def check_imported_vocabulary() -> None:
    """Compare ids of AutoTokenizer with ours for a folder with vocab.json and merges.txt."""
    import transformers

    with tempfile.TemporaryDirectory() as folder:
        train_byte_bpe(documents(), folder, 1000, "gpt2-bpe")
        (Path(folder) / "tokenizer_config.json").write_text(json.dumps(END | {"tokenizer_class": "GPT2Tokenizer"}))
        _compare_ids(load_tokenizer(folder), transformers.AutoTokenizer.from_pretrained(folder), [*lines(), TEXT])


def check_vocab_file() -> None:
    """GPT2Tokenizer reads the files that vocab_file= and merges_file= name."""
    from transformers import GPT2Tokenizer

    with tempfile.TemporaryDirectory() as folder:
        train_byte_bpe(documents(), folder, 1000, "gpt2-bpe")
        theirs = GPT2Tokenizer(vocab_file=f"{folder}/vocab.json", merges_file=f"{folder}/merges.txt")
        ours = load_tokenizer(folder)
    assert len(theirs) == ours.vocab_size, f"{len(theirs)} tokens instead of {ours.vocab_size}"
    _compare_ids(ours, theirs, [*lines(), TEXT])


CHECKS = {
    "transformers": {
        "logits of GPT-2": lambda: _check_logits("gpt2"),
        "logits of Llama": lambda: _check_logits("llama"),
        "logits of T5": lambda: _check_logits("t5"),
        "logits of UMT5 that are not scaled": lambda: _check_logits("umt5", scale_decoder_outputs=False),
        "logits of Mixtral": lambda: _check_logits("mixtral"),
        "auxiliary loss of a padded batch": check_router_loss,
        "T5 loss of accumulated batches": check_accumulated_loss,
        "ids of an exported tokenizer.json": check_exported_json,
        "ids of an exported Llama tokenizer.model": check_exported_llama,
        "ids of an imported vocab.json": check_imported_vocabulary,
        "vocab_file= of GPT2Tokenizer": check_vocab_file,
    }
}
