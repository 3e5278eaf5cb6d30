"""Reading of the Hugging Face files next to a vocabulary file, such as tokenizer_config.json."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from .base import TokenizerError, read_object

SETTINGS = "tokenizer_config.json"
GENERATION = "generation_config.json"
ROLES = ("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id")
# model_type in config.json -> default tokenizer class. The table lists only classes that define tokens such as the
# end-of-text token even without a tokenizer_config.json.
CLASSES = {
    "gpt2": "GPT2Tokenizer", "qwen2": "Qwen2Tokenizer", "qwen3": "Qwen2Tokenizer", "t5": "T5Tokenizer",
    "mt5": "T5Tokenizer", "qwen2_moe": "Qwen2Tokenizer", "qwen3_moe": "Qwen2Tokenizer",
}  # fmt: skip
PLACEHOLDER = "placeholder_for"
TOKEN_FILES = ("special_tokens_map.json", "added_tokens.json")
TEMPLATE, MORE_TEMPLATES = "chat_template.jinja", "additional_chat_templates"


def settings_beside(path: Path) -> dict[str, Any]:
    """Return the content of tokenizer_config.json next to `path`, or {} if the file does not exist.

    Raises ValueError if the file does not contain a JSON object.
    """
    nearby = path.with_name(SETTINGS)
    return read_object(nearby) if nearby.is_file() else {}


def token_beside(path: Path, key: str) -> str | None:
    """Return the token name under `key` (such as eos_token) in tokenizer_config.json, or None.

    Raises TokenizerError if the value is neither a string nor a token object.
    """
    token = settings_beside(path).get(key)
    name = token.get("content", token) if isinstance(token, dict) else token
    if name is not None and not isinstance(name, str):
        raise TokenizerError(f"{path.with_name(SETTINGS)}: {key} is {name!r}, which is not a token name")
    return name


def named_beside(path: Path) -> set[str]:
    """Return the names of the tokens that tokenizer_config.json lists as eos_token, extra_special_tokens and so on."""
    settings = settings_beside(path)
    tokens = [token for key, token in settings.items() if key.endswith("_token")]
    for key in ("additional_special_tokens", "extra_special_tokens"):
        more = settings.get(key)
        if isinstance(more, dict):
            more = list(more.values())
        if isinstance(more, list):
            tokens += more
    names = map(_name_of, tokens)
    return {name for name in names if isinstance(name, str)}


def _name_of(token: Any) -> Any:
    """Return the name of a token that is given by its name or as an object with "content"."""
    return token.get("content") if isinstance(token, dict) else token


def added_beside(path: Path) -> dict[str, int]:
    """Return the added tokens in added_tokens.json and in tokenizer_config.json as name -> id.

    Raises TokenizerError if added_tokens_decoder in tokenizer_config.json is malformed.
    """
    more = path.with_name("added_tokens.json")
    added = dict(read_object(more)) if more.is_file() else {}
    listed = settings_beside(path).get("added_tokens_decoder") or {}
    malformed = TokenizerError(f"{path.with_name(SETTINGS)}: added_tokens_decoder must map ids to tokens")
    if not isinstance(listed, dict):
        raise malformed
    for number, token in listed.items():
        if not isinstance(token, dict) or not number.isdigit():
            raise malformed
        added[str(token.get("content"))] = int(number)
    return added


def placeholder_of(file: str) -> dict[str, Any]:
    """Return the content of a placeholder tokenizer.json, which makes transformers fail with an error.

    Without the placeholder, transformers would silently build a different or an empty tokenizer from `file`. The error
    message shows the value of `version`, so this value names the library that can read `file`.
    """
    version = f"none: {file} beside it is read by megatron.tokenizer, not by transformers"
    return {"version": version, PLACEHOLDER: file, "added_tokens": [], "model": {}}


def named_by_placeholder(path: Path) -> Path | None:
    """Return the vocabulary file that the placeholder `path` names, or None if `path` is a real tokenizer.json."""
    with open(path, "rb") as file:
        if f'"{PLACEHOLDER}"'.encode() not in file.read(1024):
            return None
    return path.with_name(Path(str(read_object(path).get(PLACEHOLDER))).name)


def generation_beside(path: Path) -> dict[str, Any]:
    """Return the content of generation_config.json next to `path`, or {} if the file does not exist.

    Raises ValueError if the file does not contain a JSON object.
    """
    nearby = path.with_name(GENERATION)
    return read_object(nearby) if nearby.is_file() else {}


def class_beside(path: Path) -> str:
    """Return the name of the tokenizer's class in transformers, without the suffix "Fast", or "" if unknown.

    tokenizer_config.json takes precedence over config.json. If neither file names a class, the default class of the
    model_type in config.json is returned.
    """
    nearby = path.with_name("config.json")
    config = read_object(nearby) if nearby.is_file() else {}
    usual = CLASSES.get(str(config.get("model_type")))
    named = settings_beside(path).get("tokenizer_class") or config.get("tokenizer_class") or usual
    return str(named or "").removesuffix("Fast")


def ids_beside(path: Path) -> dict[str, Any]:
    """Return the entries of config.json that name token ids, such as bos_token_id."""
    nearby = path.with_name("config.json")
    content = read_object(nearby) if nearby.is_file() else {}
    return {key: content[key] for key in ROLES if key in content}


def ends_beside(path: Path) -> int | list[int] | None:
    """Return eos_token_id from generation_config.json, else from config.json, else None."""
    for name in (GENERATION, "config.json"):
        file = path.with_name(name)
        found: int | list[int] | None = read_object(file).get("eos_token_id") if file.is_file() else None
        if found is not None:
            return found
    return None


def refuse_missing_tokens(
    path: Path, id_of: Callable[[str], int | None], known: Callable[[str], object] | None = None
) -> None:
    """Raise TokenizerError if the vocabulary lacks an added token or has the token under a different id.

    known: returns True for names of tokens that the vocabulary may lack, such as sentinels.
    """
    for token, i in added_beside(path).items():
        may_lack = known is not None and known(token)
        if id_of(token) != i and not may_lack:
            raise TokenizerError(
                f"{path} has no token {token!r} with id {i}, which a file next to it lists; save the tokenizer again "
                f"as one tokenizer.json with transformers' save_pretrained()"
            )
