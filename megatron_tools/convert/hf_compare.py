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
from megatron.tokenizer import Tokenizer
from megatron.tokenizer.base import read_object
from megatron.tokenizer.hf import HFTokenizer, library
from megatron.tokenizer.load import file_of, folder_has_one
from megatron.tokenizer.sentencepiece import SentencePieceTokenizer
from megatron.tokenizer.sibling_files import SETTINGS

from ..doctor.machine import version_key
from .hf_config import FAMILIES
from .hf_tokenizer import texts_of

Reader = Callable[[str], Tensor]  # returns a tensor by its name
OLDEST = "5.3"  # release of transformers; 5.0 to 5.2 give other ids for the tokenizer.model of a Llama
SCALE = "scale_decoder_outputs"
SHORTEST = 64  # tokens of a comparison, if the model has that many positions
MARGIN = 17  # tokens beyond the last distance at which the model changes
_FORMATS = torch.float32, torch.float64  # in which logits are compared until they agree
_LogitsOf = Callable[[torch.dtype], Tensor]  # returns a model's logits, computed in a dtype


@torch.no_grad()
def compare(config: Config, weight: Reader, folder: Path) -> None:
    """Compare logits of our model and the Hugging Face model in `folder` on the same random tokens.

    The tokens cover all learned positions, or reach beyond the sliding window, the original context of scaled rotary
    positions and the largest distance of relative positions. Prints the largest difference and the number of tokens.
    weight: function that takes a parameter's global name and returns our weight. Raises ValueError if a difference
    exceeds 1e-5 times the range of the logits, in fp32 and in fp64: large weights amplify the rounding of fp32.
    """
    other = _their_model(config, folder)
    tokens = _tokens(config, max(_length(config), _their_length(config, other.config)))

    def theirs(dtype: torch.dtype) -> Tensor:
        inputs = {"input_ids": tokens}
        if config.is_t5:
            inputs["decoder_input_ids"] = tokens
        found: Tensor = other.to(dtype)(**inputs).logits
        return found

    _refuse_difference(partial(_logits, config, weight, tokens), theirs, folder)


def _transformers() -> Any:
    """Import the package transformers. Raises ValueError if it is not installed, or older than OLDEST."""
    how = f"pip install 'transformers>={OLDEST}'"
    try:
        import transformers
    except ImportError:
        raise ValueError(f"--verify needs the package transformers: {how}") from None
    found = transformers.__version__
    if version_key(found) < version_key(OLDEST):
        raise ValueError(f"--verify needs transformers {OLDEST} or later, but {found} is installed: {how}")
    return transformers


def _their_model(config: Config, folder: Path) -> Any:
    """Return the model in `folder`, loaded by transformers. Raises ValueError if the installed release misreads it."""
    transformers = _transformers()
    kind = read_object(folder / "config.json")["model_type"]
    theirs: Any = getattr(transformers, FAMILIES[kind].class_name)
    # Releases before 5.24 ignore the key scale_decoder_outputs of a UMT5.
    if kind == "umt5" and not config.model.scale_tied_logits and not hasattr(theirs.config_class(), SCALE):
        raise ValueError(
            f"--verify: {folder} is a UMT5 without scaled logits, but the installed transformers "
            f"{transformers.__version__} scales the logits of every UMT5; install transformers>=5.24 or omit --verify"
        )
    other = theirs.from_pretrained(folder, dtype=torch.float32).eval()
    if config.model.num_experts is not None and hasattr(other, "set_experts_implementation"):
        other.set_experts_implementation("eager")  # the default needs widths that are multiples of 4
    return other


@torch.no_grad()
def compare_ours(config: Config, weight: Reader, other: Config, other_weight: Reader, path: Path) -> None:
    """Compare logits of two models of this project as `compare` does. path: the checkpoint of the second model."""
    tokens = _tokens(config, max(_length(config), _length(other)))
    ours = partial(_logits, config, weight, tokens)
    theirs = partial(_logits, other, other_weight, tokens)
    _refuse_difference(ours, theirs, path)


def _length(config: Config) -> int:
    """Return how many tokens show everything in our model that depends on positions."""
    m = config.model
    if m.position_embedding == "learned":
        return config.positions
    if m.position_embedding == "relative":
        return max(SHORTEST, m.relative_attention_max_distance + MARGIN)
    return _rotary_length(config, m.sliding_window, m.rope_original_length)


def _their_length(config: Config, theirs: Any) -> int:
    """Return the same length as `_length` from the config of transformers, which an error of ours cannot shorten."""
    if hasattr(theirs, "n_positions") and not config.is_t5:
        return min(int(theirs.n_positions), config.positions)
    if config.is_t5:
        return int(theirs.relative_attention_max_distance) + MARGIN
    rope = getattr(theirs, "rope_parameters", None) or {}
    window = getattr(theirs, "sliding_window", None)
    return _rotary_length(config, window, rope.get("original_max_position_embeddings"))


def _rotary_length(config: Config, window: int | None, original: float | None) -> int:
    """Return a length beyond the sliding window and the original context, within the positions of the model."""
    longest = max(SHORTEST, (window or 0) + MARGIN, int(original or 0) + MARGIN)
    return min(longest, config.positions)


def _tokens(config: Config, length: int) -> Tensor:
    """Return random tokens [b, length], at least 128 of them."""
    shape = math.ceil(128 / length), length
    return torch.randint(config.model.vocab_size or 0, shape, generator=torch.Generator().manual_seed(0))


def _logits(config: Config, weight: Reader, tokens: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the logits [b, s, v] of our model with these weights."""
    kind: Any = T5Model if config.is_t5 else GPT2Model
    model = kind(config, parallel_output=False).eval().to(dtype)
    for name, parameter in global_parameters(model):
        whole = weight(name)
        parameter.zero_().narrow(0, 0, len(whole)).copy_(whole)
    found: Tensor = model(tokens, tokens) if config.is_t5 else model(tokens)
    return found


class _KeepFp64(TorchFunctionMode):
    """Casts of fp64 tensors to fp32 do nothing: both models compute norms, softmax and rotary positions in "fp32"."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = kwargs or {}
        first = args[0] if args else None
        is_wide = isinstance(first, Tensor) and first.dtype is torch.float64
        if not is_wide:
            return func(*args, **named)
        if func is Tensor.float:
            return first
        values = map(_widened, named.values())
        return func(*map(_widened, args), **dict(zip(named, values, strict=True)))


def _widened(value: Any) -> Any:
    """Return torch.float64 for torch.float32, and any other argument of a function as it is."""
    return torch.float64 if value is torch.float32 else value


def _refuse_difference(ours: _LogitsOf, theirs: _LogitsOf, where: Path) -> None:
    """Print the largest difference of logits; raise ValueError if it is too large in both fp32 and fp64."""
    for dtype in _FORMATS:
        with _KeepFp64() if dtype is torch.float64 else nullcontext():
            found = ours(dtype)
            expected = theirs(dtype)
        worst = float((found - expected).abs().max())
        spread = float(expected.max() - expected.min())
        size = f"{found.shape[0]} x {found.shape[1]} tokens in {str(dtype).removeprefix('torch.')}"
        print(f"largest logit difference: {worst:.1e} (range of the logits: {spread:.1e}; {size})")
        if worst <= 1e-5 * spread:
            return
    raise ValueError(
        f"{where} is not the same model: its logits differ by {worst:.1e} (the range of the logits is {spread:.1e})"
    )


class _Difference(NamedTuple):
    """A text that this project and AutoTokenizer encode differently."""

    text: str
    ours: list[int]
    theirs: list[int]

    def __str__(self) -> str:
        return f"AutoTokenizer encodes {self.text[:40]!r} as {self.theirs[:8]}, this project as {self.ours[:8]}"


def compare_ids(tokenizer: Tokenizer, folder: Path) -> None:
    """Raise ValueError if AutoTokenizer, reading `folder`, encodes any test text differently than `tokenizer`."""
    # Without tokenizer_config.json, the folder's tokenizer.json is a placeholder that AutoTokenizer rejects.
    if not (folder / SETTINGS).is_file():
        return
    for different in _other_ids(tokenizer, _auto_tokenizer(folder), texts_of(tokenizer)):
        raise ValueError(f"{folder}: {different}")


def compare_imported_ids(tokenizer: Tokenizer, folder: Path) -> str:
    """Compare the ids of an imported tokenizer with those of AutoTokenizer, reading `folder`; return a note.

    Raises ValueError for a difference, unless our ids are those of the folder's file: some tokenizer classes of
    transformers 5 take only vocabulary and merges from tokenizer.json and replace its normalizer and pre-tokenizer.
    """
    transformers = _transformers()
    if not folder_has_one(folder) or _has_placeholder(folder):
        return f"{folder} has no tokenizer that transformers can read, so --verify compares no token ids"
    theirs = _auto_tokenizer(folder)
    texts = texts_of(tokenizer)
    different = list(_other_ids(tokenizer, theirs, texts))
    if not different:
        return f"AutoTokenizer gives equal ids for {len(texts)} texts"
    encoders = _encoders_of_file(tokenizer)
    for each in different:
        if all(each.ours != encode(each.text) for encode in encoders):
            raise ValueError(f"{folder}: {each}")
    shortest = min(different, key=lambda each: len(each.text))
    return (
        f"AutoTokenizer gives other ids for {len(different)} of {len(texts)} texts: {shortest}. This project's ids are "
        f"right: they are those of {file_of(str(folder))} as it is, and of transformers 4; {type(theirs).__name__} of "
        f"transformers {transformers.__version__} reads only a part of it"
    )


def _has_placeholder(folder: Path) -> bool:
    """Return whether tokenizer.json is the placeholder of an export, which AutoTokenizer rejects."""
    return (folder / "tokenizer.json").is_file() and file_of(str(folder)).name != "tokenizer.json"


def _auto_tokenizer(folder: Path) -> Any:
    """Return transformers' tokenizer of `folder`. Raises ValueError if transformers cannot load it."""
    auto = _transformers().AutoTokenizer
    try:
        return auto.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # the package tokenizers raises Exception itself, no subclass
        reason = str(error).split("\n")[0]
        raise ValueError(f"--verify: AutoTokenizer cannot load the tokenizer in {folder}: {reason[:200]}") from None


def _other_ids(tokenizer: Tokenizer, theirs: Any, texts: Sequence[str]) -> Iterator[_Difference]:
    """Yield each text that `tokenizer` and the tokenizer of transformers encode differently."""
    for text in texts:
        ours = tokenizer.encode(text)
        found = theirs(text, add_special_tokens=False)["input_ids"]
        if ours != found:
            yield _Difference(text, ours, found)


def _encoders_of_file(tokenizer: Tokenizer) -> list[Callable[[str], list[int]]]:
    """Return the encoders that a tokenizer's file alone defines in its own library, or [] if there are none.

    Sentencepiece has two: with and without a space before the text, since a LlamaTokenizer sometimes adds none.
    """
    if isinstance(tokenizer, SentencePieceTokenizer):
        return [tokenizer._sp.encode, tokenizer._bare.encode]
    if type(tokenizer) is not HFTokenizer:
        return []
    file = library().Tokenizer.from_file(tokenizer._path)
    return [lambda text: list(file.encode(text, add_special_tokens=False).ids)]
