"""Reading of the Hugging Face files next to a vocabulary file, such as tokenizer_config.json."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from .base import Tokenizer, TokenizerError, read_object

SETTINGS = "tokenizer_config.json"
GENERATION = "generation_config.json"
# Keys of generation_config.json that models saved before 2023 have in config.json
GENERATION_KEYS = (
    "max_length", "min_length", "do_sample", "early_stopping", "num_beams", "num_beam_groups", "diversity_penalty",
    "temperature", "top_k", "top_p", "typical_p", "repetition_penalty", "length_penalty", "no_repeat_ngram_size",
    "encoder_no_repeat_ngram_size", "bad_words_ids", "num_return_sequences", "forced_bos_token_id",
    "forced_eos_token_id", "remove_invalid_values", "exponential_decay_length_penalty", "suppress_tokens",
    "begin_suppress_tokens",
)  # fmt: skip
TOKEN_ID_KEYS = ("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id")
# model_type in config.json -> default tokenizer class. The table lists only classes that define tokens such as the
# end-of-text token even without a tokenizer_config.json.
DEFAULT_CLASSES = {
    "gpt2": "GPT2Tokenizer", "qwen2": "Qwen2Tokenizer", "qwen3": "Qwen2Tokenizer", "t5": "T5Tokenizer",
    "mt5": "T5Tokenizer", "qwen2_moe": "Qwen2Tokenizer", "qwen3_moe": "Qwen2Tokenizer",
}  # fmt: skip
# Default special tokens of transformers' tokenizer classes, used where the files do not set a role.
CLASS_ROLES: dict[str, dict[str, str]] = {
    "GPT2Tokenizer": dict.fromkeys(("bos_token", "eos_token", "unk_token"), "<|endoftext|>"),
    "Qwen2Tokenizer": dict.fromkeys(("eos_token", "pad_token", "unk_token"), "<|endoftext|>"),
    "LlamaTokenizer": {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"},
    "T5Tokenizer": {"eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"},
}
PLACEHOLDER = "placeholder_for"
TOKENS_MAP = "special_tokens_map.json"
TOKEN_FILES = (TOKENS_MAP, "added_tokens.json")
TEMPLATE, MORE_TEMPLATES = "chat_template.jinja", "additional_chat_templates"


def read_tokenizer_config(path: Path) -> dict[str, Any]:
    """Return the content of tokenizer_config.json next to `path`, or {} if the file does not exist.

    Raises ValueError if the file does not contain a JSON object.
    """
    return _read_beside(path, SETTINGS)


def _read_beside(path: Path, name: str) -> dict[str, Any]:
    """Return the content of the file `name` next to `path`, or {} if the file does not exist."""
    file = path.with_name(name)
    return read_object(file) if file.is_file() else {}


def read_token_name(path: Path, key: str) -> str | None:
    """Return the token name under `key` (such as eos_token) in tokenizer_config.json, or None.

    Raises TokenizerError if the value is neither a string nor a token object.
    """
    return role_name(path, key, read_tokenizer_config(path))


def role_name(path: Path, key: str, roles: Mapping[str, Any]) -> str | None:
    """Return the token name under `key` in `roles`, which were read from tokenizer_config.json next to `path`.

    Raises TokenizerError if the value is neither a string nor a token object.
    """
    token = roles.get(key)
    # A token is its name, or an object with the name under "content". An object without it stays one and is refused.
    name = token.get("content", token) if isinstance(token, dict) else token
    if name is not None and not isinstance(name, str):
        raise TokenizerError(f"{path.with_name(SETTINGS)}: {key} is {name!r}, which is not a token name")
    return name


def read_roles(path: Path) -> dict[str, Any]:
    """Return role -> token, such as eos_token -> "</s>", from the files next to `path`.

    As in transformers, special_tokens_map.json overrides a tokenizer_config.json without added_tokens_decoder.
    """
    settings = read_tokenizer_config(path)
    if "added_tokens_decoder" not in settings:
        settings |= _read_beside(path, TOKENS_MAP)
    # add_bos_token and the like are booleans, not tokens.
    roles = {key: token for key, token in settings.items() if key.endswith("_token") and not key.startswith("add_")}
    for key in ("extra_special_tokens", "model_specific_special_tokens"):  # with user-defined roles, such as eot_token
        named = settings.get(key)
        if isinstance(named, dict):
            roles |= named
    return roles


def find_contradiction(tokenizer: Tokenizer, path: Path, id_of: Callable[[str], int | None]) -> str:
    """Return a sentence if the files next to `path`, the tokenizer's own file, name another end token, else ""."""
    end = role_name(path, "eos_token", read_roles(path))
    if end is None or id_of(end) == tokenizer.eod:
        return ""
    names = {i: name for name, i in tokenizer.marks.items()}
    return (
        f"the files next to {path} name {end!r} as eos_token, but documents would end with "
        f"{names.get(tokenizer.eod, tokenizer.eod)!r}; correct eos_token, or save the tokenizer again as one "
        f"tokenizer.json with transformers' save_pretrained()"
    )


def special_token_roles(tokenizer: Tokenizer, path: Path) -> dict[str, Any]:
    """Return role -> token, such as pad_token -> "<pad>", from the files next to `path`, the tokenizer's own file.

    Roles that the files do not set have the default of their tokenizer class.
    """
    class_roles = CLASS_ROLES.get(read_tokenizer_class(path), {})
    roles: dict[str, Any] = {key: name for key, name in class_roles.items() if name in tokenizer.marks}
    return roles | read_roles(path)


def special_token_names(tokenizer: Tokenizer, path: Path) -> dict[str, str]:
    """Return role -> name of its token for the roles that `special_token_roles` sets.

    Raises TokenizerError if a value is neither a string nor a token object.
    """
    roles = special_token_roles(tokenizer, path)
    names = {}
    for key in roles:
        name = role_name(path, key, roles)
        if name is not None:
            names[key] = name
    return names


def read_token_names(path: Path) -> set[str]:
    """Return the names of the tokens that tokenizer_config.json lists as eos_token, extra_special_tokens and so on."""
    settings = read_tokenizer_config(path)
    tokens = [token for key, token in settings.items() if key.endswith("_token")]
    for key in ("additional_special_tokens", "extra_special_tokens"):
        listed = settings.get(key)
        if isinstance(listed, dict):
            listed = list(listed.values())
        if isinstance(listed, list):
            tokens += listed
    # A token is given by its name or as an object with "content".
    names = (token.get("content") if isinstance(token, dict) else token for token in tokens)
    return {name for name in names if isinstance(name, str)}


def read_added_tokens(path: Path) -> dict[str, int]:
    """Return the added tokens in added_tokens.json and in tokenizer_config.json as name -> id.

    Raises TokenizerError if added_tokens_decoder in tokenizer_config.json is malformed.
    """
    added = _read_beside(path, "added_tokens.json")
    # added_tokens.json has names -> ids, but added_tokens_decoder ids -> tokens: {"0": {"content": "<s>"}}.
    listed = read_tokenizer_config(path).get("added_tokens_decoder") or {}
    malformed = TokenizerError(f"{path.with_name(SETTINGS)}: added_tokens_decoder must map ids to tokens")
    if not isinstance(listed, dict):
        raise malformed
    for number, token in listed.items():
        if not isinstance(token, dict) or not number.isdigit():
            raise malformed
        added[str(token.get("content"))] = int(number)
    return added


def make_placeholder(file: str) -> dict[str, Any]:
    """Return the content of a placeholder tokenizer.json, which makes transformers fail with an error.

    Without the placeholder, transformers would silently build a different or an empty tokenizer from `file`. The error
    message shows the value of `version`, so this value names the library that can read `file`.
    """
    version = f"none: {file} beside it is read by megatron.tokenizer, not by transformers"
    return {"version": version, PLACEHOLDER: file, "added_tokens": [], "model": {}}


def resolve_placeholder(path: Path) -> Path | None:
    """Return the vocabulary file that the placeholder `path` names, or None if `path` is a real tokenizer.json."""
    with open(path, "rb") as file:
        if f'"{PLACEHOLDER}"'.encode() not in file.read(1024):  # a real tokenizer.json may have many megabytes
            return None
    # `.name` drops folders, so that a placeholder names only a file next to it.
    return path.with_name(Path(str(read_object(path).get(PLACEHOLDER))).name)


def read_generation_config(path: Path) -> dict[str, Any]:
    """Return the content of generation_config.json next to `path`, else the generation settings of config.json.

    Raises ValueError if a file does not contain a JSON object.
    """
    generation_path = path.with_name(GENERATION)
    if generation_path.is_file():
        return read_object(generation_path)
    config = _read_beside(path, "config.json")
    return {key: config[key] for key in GENERATION_KEYS if config.get(key) is not None}


def read_tokenizer_class(path: Path) -> str:
    """Return the name of the tokenizer's class in transformers, without the suffix "Fast", or "" if unknown.

    tokenizer_config.json takes precedence over config.json. If neither file names a class, the default class of the
    model_type in config.json is returned.
    """
    config = _read_beside(path, "config.json")
    default_class = DEFAULT_CLASSES.get(str(config.get("model_type")))
    listed_class = read_tokenizer_config(path).get("tokenizer_class")
    class_name = listed_class or config.get("tokenizer_class") or default_class
    return str(class_name or "").removesuffix("Fast")


def token_ids_in(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of `content` that name token ids, such as bos_token_id."""
    return {key: content[key] for key in TOKEN_ID_KEYS if key in content}


def read_token_ids(path: Path) -> dict[str, Any]:
    """Return the entries of config.json that name token ids, such as bos_token_id."""
    return token_ids_in(_read_beside(path, "config.json"))


def read_eos_ids(path: Path) -> int | list[int] | None:
    """Return eos_token_id from generation_config.json, else from config.json, else None."""
    for name in (GENERATION, "config.json"):
        eos_ids: int | list[int] | None = _read_beside(path, name).get("eos_token_id")
        if eos_ids is not None:
            return eos_ids
    return None


def require_added_tokens(
    path: Path, id_of: Callable[[str], int | None], known: Callable[[str], object] | None = None
) -> None:
    """Raise TokenizerError if the vocabulary lacks an added token or has the token under a different id.

    known: returns True for names of tokens that the vocabulary may lack, such as sentinels.
    """
    for token, i in read_added_tokens(path).items():
        may_lack = known is not None and known(token)
        if id_of(token) != i and not may_lack:
            raise TokenizerError(
                f"{path} has no token {token!r} with id {i}, which a file next to it lists; save the tokenizer again "
                f"as one tokenizer.json with transformers' save_pretrained()"
            )
