"""Comparison of a converted model with its original: logits of both models, and ids of both tokenizers."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from megatron.config import Config
from megatron.model import global_parameters
from megatron.model.gpt2 import GPT2Model
from megatron.model.t5 import T5Model
from megatron.packages import pip_install
from megatron.tokenizer import Tokenizer
from megatron.tokenizer.base import read_object
from megatron.tokenizer.hf import HFTokenizer, import_tokenizers
from megatron.tokenizer.load import find_vocab_file, has_vocab_file
from megatron.tokenizer.sentencepiece import SentencePieceTokenizer
from megatron.tokenizer.sibling_files import SETTINGS

from ..doctor.machine import version_key
from .hf_config import FAMILIES
from .hf_tokenizer import sample_texts

WeightReader = Callable[[str], Tensor]  # returns a tensor by its name
OLDEST_TRANSFORMERS = "5.3"  # release of transformers; 5.0 to 5.2 give other ids for the tokenizer.model of a Llama
SCALE_KEY = "scale_decoder_outputs"
MIN_TOKENS = 64  # tokens of a comparison, if the model has that many positions
MARGIN = 17  # tokens beyond the last distance at which the model changes
_COMPARED_DTYPES = torch.float32, torch.float64  # in which logits are compared until they agree
_LogitsOf = Callable[[torch.dtype], Tensor]  # returns a model's logits, computed in a dtype


@torch.no_grad()
def compare_with_hf(config: Config, read_weight: WeightReader, folder: Path) -> None:
    """Compare logits of our model and the Hugging Face model in `folder` on the same random tokens.

    The tokens cover all learned positions, or reach beyond the sliding window, the original context of scaled rotary
    positions and the largest distance of relative positions. Prints the largest difference and the number of tokens.
    read_weight: function that takes a parameter's global name and returns our weight. Raises ValueError if a difference
    exceeds 1e-5 times the range of the logits, in fp32 and in fp64: large weights amplify the rounding of fp32.
    """
    hf_model = _load_hf_model(config, folder)
    length = max(_tokens_needed(config), _tokens_needed_by_hf(config, hf_model.config))
    tokens = _random_tokens(config, length)

    def hf_logits(dtype: torch.dtype) -> Tensor:
        inputs = {"input_ids": tokens}
        if config.is_t5:
            inputs["decoder_input_ids"] = tokens
        logits: Tensor = hf_model.to(dtype)(**inputs).logits
        return logits

    # Both functions still lack the dtype, which _check_logits passes.
    _check_logits(partial(_our_logits, config, read_weight, tokens), hf_logits, folder)


def _import_transformers() -> Any:
    """Import the package transformers. Raises ValueError if it is not installed, or older than OLDEST_TRANSFORMERS."""
    command = pip_install(f"transformers>={OLDEST_TRANSFORMERS}")
    try:
        import transformers
    except ImportError:
        raise ValueError(f"--verify needs the package transformers: {command}") from None
    installed = transformers.__version__
    if version_key(installed) < version_key(OLDEST_TRANSFORMERS):
        raise ValueError(
            f"--verify needs transformers {OLDEST_TRANSFORMERS} or later, but {installed} is installed: {command}"
        )
    return transformers


def _load_hf_model(config: Config, folder: Path) -> Any:
    """Return the model in `folder`, loaded by transformers. Raises ValueError if the installed release misreads it."""
    transformers = _import_transformers()
    model_type = read_object(folder / "config.json")["model_type"]
    model_class: Any = getattr(transformers, FAMILIES[model_type].class_name)
    is_unscaled_umt5 = model_type == "umt5" and not config.model.scale_tied_logits
    # Releases before 5.24 ignore the key scale_decoder_outputs of a UMT5.
    if is_unscaled_umt5 and not hasattr(model_class.config_class(), SCALE_KEY):
        raise ValueError(
            f"--verify: {folder} is a UMT5 without scaled logits, but the installed transformers "
            f"{transformers.__version__} scales the logits of every UMT5; install transformers>=5.24 or omit --verify"
        )
    hf_model = model_class.from_pretrained(folder, dtype=torch.float32).eval()
    if config.model.num_experts is not None:
        hf_model.set_experts_implementation("eager")  # the default needs widths that are multiples of 4
    return hf_model


@torch.no_grad()
def compare_own_models(
    config: Config, read_weight: WeightReader, other_config: Config, read_other_weight: WeightReader, path: Path
) -> None:
    """Compare logits of two models of this project like `compare_with_hf`. path: checkpoint of the second model."""
    length = max(_tokens_needed(config), _tokens_needed(other_config))
    tokens = _random_tokens(config, length)
    # Both functions still lack the dtype, which _check_logits passes.
    our_logits = partial(_our_logits, config, read_weight, tokens)
    other_logits = partial(_our_logits, other_config, read_other_weight, tokens)
    _check_logits(our_logits, other_logits, path)


def _tokens_needed(config: Config) -> int:
    """Return how many tokens show everything in our model that depends on positions."""
    m = config.model
    if m.position_embedding == "learned":
        return config.positions
    if m.position_embedding == "relative":
        return max(MIN_TOKENS, m.relative_attention_max_distance + MARGIN)
    return _rotary_length(config, m.sliding_window, m.rope_original_length)


def _tokens_needed_by_hf(config: Config, hf_config: Any) -> int:
    """Return the length of `_tokens_needed` from the config of transformers, which an error of ours cannot shorten."""
    if config.is_t5:
        return int(hf_config.relative_attention_max_distance) + MARGIN
    # GPT-2: learned positions. Our model can read no more tokens than it has positions.
    if hasattr(hf_config, "n_positions"):
        return min(int(hf_config.n_positions), config.positions)
    # Llama and related models: rotary positions
    rope = getattr(hf_config, "rope_parameters", None) or {}
    window = getattr(hf_config, "sliding_window", None)
    return _rotary_length(config, window, rope.get("original_max_position_embeddings"))


def _rotary_length(config: Config, window: int | None, original_length: float | None) -> int:
    """Return a length beyond the sliding window and the original context, within the positions of the model."""
    needed = max(MIN_TOKENS, (window or 0) + MARGIN, int(original_length or 0) + MARGIN)
    return min(needed, config.positions)


def _random_tokens(config: Config, length: int) -> Tensor:
    """Return random tokens [b, length], at least 128 of them."""
    shape = math.ceil(128 / length), length
    return torch.randint(config.model.vocab_size or 0, shape, generator=torch.Generator().manual_seed(0))


def _our_logits(config: Config, read_weight: WeightReader, tokens: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the logits [b, s, v] of our model with these weights."""
    model_class: Any = T5Model if config.is_t5 else GPT2Model
    model = model_class(config, parallel_output=False).eval().to(dtype)
    for name, parameter in global_parameters(model):
        value = read_weight(name)
        # Our vocabulary may be padded: rows beyond those of `value` stay zero.
        parameter.zero_()
        parameter.narrow(0, 0, len(value)).copy_(value)
    # The encoder and the decoder of a T5 read the same tokens, as those of the Hugging Face model do.
    logits: Tensor = model(tokens, tokens) if config.is_t5 else model(tokens)
    return logits


class _KeepFp64(TorchFunctionMode):
    """Mode in which casts of fp64 tensors to fp32 do nothing.

    Both models cast to fp32 for norms, softmax and rotary positions, so a comparison in fp64 would round like one in
    fp32.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        keywords = kwargs or {}
        first = args[0] if args else None
        is_fp64 = isinstance(first, Tensor) and first.dtype is torch.float64
        if not is_fp64:
            return func(*args, **keywords)
        if func is Tensor.float:
            return first
        # Arguments such as dtype=torch.float32 of softmax or `to` would cast, too.
        fp64_args = map(_fp64_for_fp32, args)
        fp64_keywords = {name: _fp64_for_fp32(value) for name, value in keywords.items()}
        return func(*fp64_args, **fp64_keywords)


def _fp64_for_fp32(value: Any) -> Any:
    """Return torch.float64 for torch.float32, and any other argument of a function as it is."""
    return torch.float64 if value is torch.float32 else value


def _check_logits(our_logits: _LogitsOf, their_logits: _LogitsOf, path: Path) -> None:
    """Print the largest difference of logits; raise ValueError if it is too large in both fp32 and fp64."""
    # Agreement in one dtype suffices: fp64 is tried only if fp32 differs, perhaps by rounding.
    for dtype in _COMPARED_DTYPES:
        with _KeepFp64() if dtype is torch.float64 else nullcontext():
            logits = our_logits(dtype)
            expected = their_logits(dtype)
        largest = float((logits - expected).abs().max())
        spread = float(expected.max() - expected.min())
        token_count = f"{logits.shape[0]} x {logits.shape[1]} tokens in {str(dtype).removeprefix('torch.')}"
        print(f"largest logit difference: {largest:.1e} (range of the logits: {spread:.1e}; {token_count})")
        if largest <= 1e-5 * spread:
            return
    raise ValueError(
        f"{path} is not the same model: its logits differ by {largest:.1e} (the range of the logits is {spread:.1e})"
    )


class _IdDifference(NamedTuple):
    """A text that this project and AutoTokenizer encode differently."""

    text: str
    ours: list[int]
    theirs: list[int]

    def __str__(self) -> str:
        return f"AutoTokenizer encodes {self.text[:40]!r} as {self.theirs[:8]}, this project as {self.ours[:8]}"


def compare_token_ids(tokenizer: Tokenizer, folder: Path) -> None:
    """Raise ValueError if AutoTokenizer, reading `folder`, encodes any test text differently than `tokenizer`."""
    # Without tokenizer_config.json, the folder's tokenizer.json is a placeholder that AutoTokenizer rejects.
    if not (folder / SETTINGS).is_file():
        return
    # The first difference is reported.
    for difference in _id_differences(tokenizer, _auto_tokenizer(folder), sample_texts(tokenizer)):
        raise ValueError(f"{folder}: {difference}")


def compare_imported_ids(tokenizer: Tokenizer, folder: Path) -> str:
    """Compare the ids of an imported tokenizer with those of AutoTokenizer, reading `folder`; return a note.

    Raises ValueError for a difference, unless our ids are those of the folder's file: some tokenizer classes of
    transformers 5 take only vocabulary and merges from tokenizer.json and replace its normalizer and pre-tokenizer.
    """
    transformers = _import_transformers()
    # A tokenizer.json may be the placeholder of an export, which AutoTokenizer rejects. `find_vocab_file` then returns
    # the file of another name for which the placeholder stands.
    has_json = (folder / "tokenizer.json").is_file()
    if not has_vocab_file(folder) or (has_json and find_vocab_file(str(folder)).name != "tokenizer.json"):
        return f"{folder} has no tokenizer that transformers can read, so --verify compares no token ids"
    theirs = _auto_tokenizer(folder)
    texts = sample_texts(tokenizer)
    differences = list(_id_differences(tokenizer, theirs, texts))
    if not differences:
        return f"AutoTokenizer gives equal ids for {len(texts)} texts"
    encoders = _file_encoders(tokenizer)
    for difference in differences:
        # The file itself is right. If one of its encoders gives our ids, only transformers differs from it.
        if all(difference.ours != encode(difference.text) for encode in encoders):
            raise ValueError(f"{folder}: {difference}")
    shortest = min(differences, key=lambda difference: len(difference.text))
    return (
        f"AutoTokenizer gives other ids for {len(differences)} of {len(texts)} texts: {shortest}. This project's ids "
        f"are right: they are those of {find_vocab_file(str(folder))} as it is, and of transformers 4; "
        f"{type(theirs).__name__} of transformers {transformers.__version__} reads only a part of it"
    )


def _auto_tokenizer(folder: Path) -> Any:
    """Return transformers' tokenizer of `folder`. Raises ValueError if transformers cannot load it."""
    auto_tokenizer = _import_transformers().AutoTokenizer
    try:
        return auto_tokenizer.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # the package tokenizers raises Exception itself, no subclass
        reason = str(error).split("\n")[0]
        raise ValueError(f"--verify: AutoTokenizer cannot load the tokenizer in {folder}: {reason[:200]}") from None


def _id_differences(tokenizer: Tokenizer, hf_tokenizer: Any, texts: Sequence[str]) -> Iterator[_IdDifference]:
    """Yield each text that `tokenizer` and the tokenizer of transformers encode differently."""
    for text in texts:
        our_ids = tokenizer.encode(text)
        their_ids = hf_tokenizer(text, add_special_tokens=False)["input_ids"]
        if our_ids != their_ids:
            yield _IdDifference(text, our_ids, their_ids)


def _file_encoders(tokenizer: Tokenizer) -> list[Callable[[str], list[int]]]:
    """Return the encoders that a tokenizer's file alone defines in its own library, or [] if there are none.

    Sentencepiece has two: with and without a space before the text, since a LlamaTokenizer sometimes adds none.
    """
    if isinstance(tokenizer, SentencePieceTokenizer):
        return [tokenizer._sp.encode, tokenizer._no_prefix_model.encode]
    if type(tokenizer) is not HFTokenizer:
        return []
    hf_tokenizer = import_tokenizers().Tokenizer.from_file(tokenizer._path)
    return [lambda text: list(hf_tokenizer.encode(text, add_special_tokens=False).ids)]
