"""Which tokens an exported folder names as bos_token, eos_token and so on.

They come from the Hugging Face files next to the vocabulary file, else from our tokenizer.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron.tokenizer import Tokenizer
from megatron.tokenizer.base import read_object
from megatron.tokenizer.sibling_files import (
    ROLES,
    class_beside,
    ends_beside,
    generation_beside,
    ids_beside,
    settings_beside,
)

Content = dict[str, Any]  # the content of a JSON file
PADS = ("<pad>", "<|pad|>", "[PAD]", "<unk>")  # names of special tokens that may serve as padding
NO_TEXT = "\U0010fffd"  # a text of one private-use character, which no vocabulary contains
# Keys of the original tokenizer_config.json that are not copied to the export. Code is not exported, the chat template
# is a separate file, and the export sets its own tokenizer class.
REPLACED = ("chat_template", "auto_map", "tokenizer_class", "tokenizer_file", "legacy", "sp_model_kwargs")
# Default special tokens of transformers' tokenizer classes, used where tokenizer_config.json does not set a role.
CLASS_ROLES: dict[str, dict[str, str]] = {
    "GPT2Tokenizer": dict.fromkeys(("bos_token", "eos_token", "unk_token"), "<|endoftext|>"),
    "Qwen2Tokenizer": dict.fromkeys(("eos_token", "pad_token", "unk_token"), "<|endoftext|>"),
    "LlamaTokenizer": {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"},
    "T5Tokenizer": {"eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"},
}
# Regular expression by which Qwen2Tokenizer splits text into words before BPE.
QWEN2_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# auto_map of an exported tokenizer_config.json. For Qwen2, Mistral and Mixtral, AutoTokenizer ignores tokenizer_class
# unless auto_map refers to Python code. The code that this entry refers to does not exist and is never run.
NO_CODE = {"AutoTokenizer": ["load_it_without_trust_remote_code.Tokenizer"] * 2}


def named_roles(tokenizer: Tokenizer, source: Path) -> Content:
    """Return role -> token, such as pad_token -> "<pad>", from tokenizer_config.json next to the file `source`.

    Roles that the file does not set have the default of its tokenizer class.
    """
    settings = settings_beside(source)
    usual = CLASS_ROLES.get(class_beside(source), {})
    known = {key: name for key, name in usual.items() if name in tokenizer.marks}
    for key, value in settings.items():
        if key.endswith("_token"):
            known[key] = value
    return known


def _name_of(token: Any) -> str:
    if isinstance(token, dict):
        return str(token.get("content"))
    return str(token or "")


def pad_of(tokenizer: Tokenizer, source: Path) -> str | None:
    """Return the name of the padding token, or None if there is none.

    It is the padding token that the source folder names. If the folder has no tokenizer_config.json, it is a token of
    PADS that is not the end token and never occurs in encoded text. Data collators mask padding in the loss, so if the
    padding token were also the end token, a fine-tuned model would never learn to stop.
    """
    given = _name_of(named_roles(tokenizer, source).get("pad_token"))
    if given in tokenizer.marks:
        return given
    # If tokenizer_config.json of the source folder names no padding token, the export does not name one either.
    if settings_beside(source):
        return None
    unusable = {None, tokenizer.eod, *tokenizer.encode(NO_TEXT)}
    for name in PADS:
        if tokenizer.specials.get(name) not in unusable:
            return name
    return None


def tokenizer_settings(tokenizer: Tokenizer, source: Path, positions: int | None) -> Content:
    """Return the content of tokenizer_config.json for an export that has a tokenizer.json.

    positions: maximum number of tokens in a text if the model has learned positions, else None.
    """
    names = {i: name for name, i in tokenizer.marks.items()}
    settings = settings_beside(source)
    given = {key: value for key, value in settings.items() if key not in REPLACED}
    for key, value in named_roles(tokenizer, source).items():
        if value is not None:
            given[key] = value
    described = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **given}
    described.setdefault("eos_token", names[tokenizer.eod])
    pad = pad_of(tokenizer, source)
    if pad is not None:
        described.setdefault("pad_token", pad)
    if tokenizer.start:
        described.setdefault("bos_token", names[tokenizer.start[0]])
    if class_beside(source).startswith("Llama"):  # other tokenizer classes pad on the right by default
        described.setdefault("padding_side", "left")
    if positions is not None:
        longest = given.get("model_max_length")
        described["model_max_length"] = min(longest, positions) if type(longest) is int else positions
    return described


def named_class(source: Path, model_type: str, is_json: bool) -> Content:
    """Return the entries of tokenizer_config.json that determine which tokenizer class AutoTokenizer loads.

    is_json: whether the exported folder has a tokenizer.json.
    """
    replaced = model_type in ("mistral", "mixtral") and not is_json
    if model_type == "qwen2":
        if is_json and class_beside(source) == "Qwen2Tokenizer" and _cuts_as_qwen2(source):
            return {"tokenizer_class": "Qwen2Tokenizer"}
        replaced = True
    return {"auto_map": NO_CODE} if replaced else {}


def _cuts_as_qwen2(source: Path) -> bool:
    """Return whether the file `source`, a tokenizer.json, normalises and splits text like Qwen2Tokenizer.

    Qwen2Tokenizer ignores the normaliser and the pre-tokenizer in the file, and always uses its own.
    """
    content = read_object(source)
    if content.get("normalizer") != {"type": "NFC"}:
        return False
    words = content.get("pre_tokenizer") or {}
    parts = words.get("pretokenizers", [])
    if not parts:
        return False
    pattern = parts[0].get("pattern", {})
    return bool(pattern.get("Regex") == QWEN2_WORDS)


def _trained_ids(trained: Mapping[str, Any]) -> Content:
    return {key: trained[key] for key in ROLES if key in trained}


def model_ids(trained: Mapping[str, Any], tokenizer: Tokenizer, source: Path, is_t5: bool) -> Content:
    """Return the special-token ids for config.json, such as {"eos_token_id": 1}.

    trained: the ids used in training, under the same keys.
    """
    given = ids_beside(source)
    ids = _trained_ids(trained)
    ends = given.get("eos_token_id")
    if ends == tokenizer.eod or (isinstance(ends, list) and tokenizer.eod in ends):
        ids["eos_token_id"] = ends
    start = tokenizer.marks.get(_name_of(named_roles(tokenizer, source).get("bos_token")))
    if "bos_token_id" in given:
        ids["bos_token_id"] = given["bos_token_id"]
    elif start is not None and not is_t5:
        ids["bos_token_id"] = start
    # A T5's padding id must stay the one used in training, because the decoder starts with this id.
    if is_t5:
        return ids
    pad = pad_of(tokenizer, source)
    if "pad_token_id" in given:
        ids["pad_token_id"] = given["pad_token_id"]
    elif not given and pad is not None:
        ids["pad_token_id"] = tokenizer.marks[pad]
    return ids


def bare_roles(source: Path, trained: Mapping[str, Any]) -> tuple[Content, Content]:
    """Return (special-token ids, generation settings) of a model that came without a tokenizer.

    The ids (eos_token_id, ...) belong in config.json. The generation settings are the content of
    generation_config.json.
    """
    ids = _trained_ids(trained) | ids_beside(source)
    generation = ids | generation_beside(source)
    return ids, generation


def generation_settings(ids: Mapping[str, Any], tokenizer: Tokenizer, source: Path, turn_end: int | None) -> Content:
    """Return the content of generation_config.json for an export.

    The generation settings of the source folder override `ids`, the special-token ids of config.json. eos_token_id
    holds every id that ends an answer, including `turn_end`.
    """
    given = ends_beside(source)
    listed = given if isinstance(given, list) else [given]
    ends = [i for i in listed if type(i) is int and 0 <= i < tokenizer.vocab_size]
    if tokenizer.eod not in ends:
        ends = [tokenizer.eod]
    if turn_end is not None:
        ends.append(turn_end)
    ends = list(dict.fromkeys(ends))
    one = len(ends) == 1 and not isinstance(given, list)
    return {**ids, **generation_beside(source), "eos_token_id": ends[0] if one else ends}
