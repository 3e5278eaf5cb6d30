"""What Hugging Face's files next to a vocabulary say of it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from .base import TokenizerError, read_object

SETTINGS = "tokenizer_config.json"
GENERATION = "generation_config.json"
ROLES = ("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id")
# Types of models whose tokenizers have a class that gives roles to tokens by itself.
CLASSES = {
    "gpt2": "GPT2Tokenizer", "qwen2": "Qwen2Tokenizer", "qwen3": "Qwen2Tokenizer", "t5": "T5Tokenizer", "mt5": "T5Tokenizer",
}  # fmt: skip
PLACEHOLDER = "placeholder_for"
TOKEN_FILES = ("special_tokens_map.json", "added_tokens.json")
TEMPLATE, MORE_TEMPLATES = "chat_template.jinja", "additional_chat_templates"


def settings_beside(path: Path) -> dict[str, Any]:
    """What tokenizer_config.json says, if there is one. Raises ValueError for what is no object."""
    nearby = path.with_name(SETTINGS)
    return read_object(nearby) if nearby.is_file() else {}


def token_beside(path: Path, key: str) -> str | None:
    """The name of a token in tokenizer_config.json, such as eos_token. Raises TokenizerError for what is none."""
    token = settings_beside(path).get(key)
    name = token.get("content", token) if isinstance(token, dict) else token
    if name is not None and not isinstance(name, str):
        raise TokenizerError(f"{path.with_name(SETTINGS)}: {key} is {name!r}, not a token")
    return name


def named_beside(path: Path) -> set[str]:
    """Names of all tokens to which tokenizer_config.json gives a role, such as eos_token, or calls special."""
    settings = settings_beside(path)
    found: list[Any] = [token for key, token in settings.items() if key.endswith("_token")]
    for key in ("additional_special_tokens", "extra_special_tokens"):
        more = settings.get(key)
        found += more.values() if isinstance(more, dict) else more if isinstance(more, list) else []
    names = (token.get("content") if isinstance(token, dict) else token for token in found)
    return {name for name in names if isinstance(name, str)}


def added_beside(path: Path) -> dict[str, int]:
    """Ids of the tokens that added_tokens.json and added_tokens_decoder name. Raises TokenizerError for a list that is none."""
    nearby, more = path.with_name(SETTINGS), path.with_name("added_tokens.json")
    added = dict(read_object(more)) if more.is_file() else {}
    listed = settings_beside(path).get("added_tokens_decoder") or {}
    if not isinstance(listed, dict) or not all(isinstance(token, dict) and i.isdigit() for i, token in listed.items()):
        raise TokenizerError(f"{nearby}: added_tokens_decoder must give a token for each id")
    return {**added, **{str(token.get("content")): int(i) for i, token in listed.items()}}


def placeholder_of(file: str) -> dict[str, Any]:
    """Return a tokenizer.json that no library reads: each raises an error that shows this version.

    Without it transformers would build another tokenizer from `file`, or one of no tokens, and say nothing.
    """
    version = f"none: {file} beside it is read by megatron.tokenizer, not by transformers"
    return {"version": version, PLACEHOLDER: file, "added_tokens": [], "model": {}}


def named_by_placeholder(path: Path) -> Path | None:
    """Return the file beside `path` that a placeholder names; None if `path` is a real tokenizer.json."""
    with open(path, "rb") as file:
        if f'"{PLACEHOLDER}"'.encode() not in file.read(1024):
            return None
    return path.with_name(Path(str(read_object(path).get(PLACEHOLDER))).name)


def generation_beside(path: Path) -> dict[str, Any]:
    """Return what generation_config.json says, {} without one. Raises ValueError for what is no object."""
    nearby = path.with_name(GENERATION)
    return read_object(nearby) if nearby.is_file() else {}


def class_beside(path: Path) -> str:
    """Return the class of transformers that reads a tokenizer, without "Fast"; "" where nothing says it.

    tokenizer_config.json names it, else config.json, else it follows from the type of the model.
    """
    nearby = path.with_name("config.json")
    config = read_object(nearby) if nearby.is_file() else {}
    usual = CLASSES.get(str(config.get("model_type")))
    named = settings_beside(path).get("tokenizer_class") or config.get("tokenizer_class") or usual
    return str(named or "").removesuffix("Fast")


def ids_beside(path: Path) -> dict[str, Any]:
    """Return the ids with a role in the config.json of the model that came with a tokenizer, such as bos_token_id."""
    nearby = path.with_name("config.json")
    content = read_object(nearby) if nearby.is_file() else {}
    return {key: content[key] for key in ROLES if key in content}


def ends_beside(path: Path) -> int | list[int] | None:
    """The eos_token_id of the model that came with it: of generation_config.json, else of config.json; None where neither says it."""
    nearby = [file for name in (GENERATION, "config.json") if (file := path.with_name(name)).is_file()]
    return next((found for file in nearby if (found := read_object(file).get("eos_token_id")) is not None), None)


def refuse_lacking(
    path: Path, id_of: Callable[[str], int | None], known: Callable[[str], object] | None = None
) -> None:
    """Raise TokenizerError for an added token that the vocabulary itself does not have under its id.

    known: says of a name that it is no matter of the vocabulary, such as a sentinel that is counted by other means.
    """
    for token, i in added_beside(path).items():
        if id_of(token) != i and not (known and known(token)):
            raise TokenizerError(
                f"{path} has no token {token!r} of id {i}, which a file next to it names: save the tokenizer again, with "
                f"transformers' save_pretrained, as one tokenizer.json"
            )
