"""Comparison of a converted model with its original: logits of both models, and ids of both tokenizers."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.config import Config
from megatron.model import global_parameters
from megatron.model.gpt2 import GPT2Model
from megatron.model.t5 import T5Model
from megatron.tokenizer import Tokenizer
from megatron.tokenizer.base import read_object
from megatron.tokenizer.beside import SETTINGS

from .hf_config import FAMILIES
from .hf_tokenizer import texts_of

SCALE = "scale_decoder_outputs"


@torch.no_grad()
def compare(config: Config, weight: Callable[[str], Tensor], folder: Path) -> None:
    """Compare logits of our model and the Hugging Face model in `folder` on the same random tokens.

    weight: function that takes a parameter's global name and returns our weight. Prints the largest difference between
    the logits, and raises ValueError if it exceeds 1e-5 times the range of the logits.
    """
    try:
        import transformers
    except ImportError:
        raise ValueError("--verify needs the package transformers: pip install transformers") from None
    kind = read_object(folder / "config.json")["model_type"]
    theirs: Any = getattr(transformers, FAMILIES[kind].class_name)
    # Releases before 5.24 ignore the key scale_decoder_outputs of a UMT5.
    if kind == "umt5" and not config.model.scale_tied_logits and not hasattr(theirs.config_class(), SCALE):
        raise ValueError(
            f"--verify: {folder} is a UMT5 without scaled logits, but the installed transformers "
            f"{transformers.__version__} scales the logits of every UMT5; install transformers>=5.24 or omit --verify"
        )
    other: Any = theirs.from_pretrained(folder, dtype=torch.float32).eval()
    if config.model.num_experts is not None and hasattr(other, "set_experts_implementation"):
        other.set_experts_implementation("eager")  # the default needs widths that are multiples of 4
    tokens, wanted = _tokens(config)
    expected = (other(input_ids=tokens, decoder_input_ids=wanted) if config.is_t5 else other(tokens)).logits
    _refuse_difference(_logits(config, weight), expected, folder)


@torch.no_grad()
def compare_ours(
    config: Config, weight: Callable[[str], Tensor], other: Config, other_weight: Callable[[str], Tensor], path: Path
) -> None:
    """Compare logits of two models of this project as `compare` does. path: the checkpoint of the second model."""
    _refuse_difference(_logits(config, weight), _logits(other, other_weight), path)


def _tokens(config: Config) -> tuple[Tensor, Tensor]:
    """Return random tokens [b, s] for the model, and for the decoder of a T5 [b, s]."""
    shape = 2, min(64, config.positions)
    tokens = torch.randint(config.model.vocab_size or 0, shape, generator=torch.Generator().manual_seed(0))
    return tokens, tokens[:, :17].contiguous()


def _logits(config: Config, weight: Callable[[str], Tensor]) -> Tensor:
    model: Any = (T5Model if config.is_t5 else GPT2Model)(config, parallel_output=False).eval()
    for name, parameter in global_parameters(model):
        parameter.zero_().narrow(0, 0, len(whole := weight(name))).copy_(whole)
    tokens, wanted = _tokens(config)
    found: Tensor = model(tokens, wanted) if config.is_t5 else model(tokens)
    return found


def _refuse_difference(found: Tensor, expected: Tensor, where: Path) -> None:
    worst, spread = float((found - expected).abs().max()), float(expected.max() - expected.min())
    print(f"largest logit difference: {worst:.1e} (range of the logits: {spread:.1e})")
    if not worst <= 1e-5 * spread:
        raise ValueError(
            f"{where} is not the same model: its logits differ by {worst:.1e} (the range of the logits is {spread:.1e})"
        )


def compare_ids(tokenizer: Tokenizer, folder: Path) -> None:
    """Raise ValueError if AutoTokenizer, reading `folder`, encodes any test text differently than `tokenizer`."""
    from transformers import AutoTokenizer

    # Without tokenizer_config.json, the folder's tokenizer.json is a placeholder that AutoTokenizer rejects.
    if not (folder / SETTINGS).is_file():
        return
    theirs: Any = AutoTokenizer.from_pretrained(folder)
    for text in texts_of(tokenizer):
        ours, found = tokenizer.encode(text), theirs(text, add_special_tokens=False)["input_ids"]
        if ours != found:
            raise ValueError(f"{folder}: AutoTokenizer encodes {text[:40]!r} as {found[:8]}, not {ours[:8]}")
