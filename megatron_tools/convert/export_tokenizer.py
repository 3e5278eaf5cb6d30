"""Export of the tokenizer and its chat template to Hugging Face."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from data_utils.chat_encoder import missing_marks, turn_end
from data_utils.chat_templates import NAMED, ChatML, is_undated, own_template, template_of_corpus
from data_utils.sidecars import of_conversations
from megatron.config import Config
from megatron.data.corpora import prefixes_of
from megatron.tokenizer import SentinelTokenizer, Tokenizer
from megatron.tokenizer.load import file_of
from megatron.tokenizer.sentencepiece import SentencePieceTokenizer
from megatron.tokenizer.sibling_files import (
    MORE_TEMPLATES,
    SETTINGS,
    TEMPLATE,
    TOKEN_FILES,
    placeholder_of,
    settings_beside,
    token_beside,
)

from .export_roles import REPLACED, named_class, tokenizer_settings
from .hf_tokenizer import is_t5_model, to_hf_tokenizer


class Chat(NamedTuple):
    """The chat format of a model.

    source: text of the chat template, None if unknown. end: id of the end-of-turn token, or None if the model was not
    trained to end its answers with this token. notes: remarks for the user.
    """

    source: str | None
    end: int | None
    notes: tuple[str, ...] = ()


def chat_of(config: Config, tokenizer: Tokenizer, vocab_file: str) -> Chat:
    """Return the chat format of the conversations in the training data.

    If the run was not trained on conversations, return the format of the chat template next to `vocab_file`.
    """
    if config.is_t5:
        return Chat(None, None)
    own = own_template(vocab_file)
    notes = _skipped_templates(vocab_file)
    if config.objective != "sft":
        return Chat(own, None, tuple(notes))
    abouts = [about for _, about in of_conversations(config)]
    if not abouts:
        prefixes = prefixes_of(config.data.paths) if config.data.names_corpora else []
        corpora = ", ".join(prefixes) or "the run"
        template = "the template of the tokenizer" if own else "no template"
        notes.append(
            f"{corpora} has no sidecar file with the chat template, so {template} is exported and "
            "eos_token_id contains no end-of-turn token"
        )
        return Chat(own, None, tuple(notes))
    first = abouts[0]
    end = None
    if any(about["chat_template"] != first["chat_template"] for about in abouts):
        notes.append("the corpora of this run have different chat templates; that of the first corpus is exported")
    if date := first.get("chat_date"):
        notes.append(f"chat_template.jinja inserts the current date; the run was trained with {date}")
    elif is_undated(first):
        notes.append(
            "chat_template.jinja inserts the current date; the run was trained without a date, because its corpus was "
            "made by an older version of this project, which offered no strftime_now to templates"
        )
    try:
        end = turn_end(template_of_corpus(first, tokenizer, vocab_file), tokenizer)
    except ValueError as error:
        notes.append(f"eos_token_id contains no end-of-turn token: {error}")
    return Chat(str(first["chat_template"]), end, tuple(notes))


def _skipped_templates(vocab_file: str) -> list[str]:
    """Return a note that names further chat templates beside the tokenizer, if there are any."""
    path = file_of(vocab_file)
    several = settings_beside(path).get("chat_template")
    names = []
    for each in several if isinstance(several, list) else ():
        if each.get("name") != "default":
            names.append(str(each.get("name")))
    for file in sorted(path.with_name(MORE_TEMPLATES).glob("*.jinja")):
        names.append(file.name)
    return [f"further chat templates of the tokenizer are not exported: {', '.join(names)}"] if names else []


def write_tokenizer(
    folder: Path, config: Config, tokenizer: Tokenizer, vocab_file: str, chat: Chat, model_type: str = ""
) -> list[str]:
    """Write the tokenizer and chat_template.jinja for transformers. Return notes for the user.

    If transformers would encode text to other ids than `tokenizer`, the function writes a placeholder tokenizer.json
    instead, which makes AutoTokenizer fail with an error.
    """
    base = tokenizer.base if isinstance(tokenizer, SentinelTokenizer) else tokenizer
    source = file_of(vocab_file)
    theirs = to_hf_tokenizer(base)
    if theirs is not None:
        positions = config.positions if config.model.position_embedding == "learned" else None
        described = tokenizer_settings(base, source, positions)
        described |= _write_json(folder, tokenizer, source, theirs, described)
    else:
        (folder / source.name).write_bytes(source.read_bytes())
        described = _settings_of_model(source, tokenizer, base)
        if not described:
            return _write_placeholder(folder, source.name, base.name, chat)
    described |= named_class(source, model_type, theirs is not None)
    for file in TOKEN_FILES:
        if source.with_name(file).is_file():
            (folder / file).write_bytes(source.with_name(file).read_bytes())
    notes = _write_template(folder, tokenizer, chat)
    # Chat templates use variables such as bos_token. transformers takes their values from tokenizer_config.json.
    for key in NAMED:
        name = token_beside(source, key)
        if name in base.marks and key in (chat.source or ""):
            described[key] = name
    (folder / SETTINGS).write_text(json.dumps(described, indent=2), encoding="utf-8")
    return notes


def _write_placeholder(folder: Path, file: str, name: str, chat: Chat) -> list[str]:
    """Write a tokenizer.json that AutoTokenizer rejects; return notes. file, name: the tokenizer's file and name."""
    placeholder = json.dumps(placeholder_of(file), indent=2)
    (folder / "tokenizer.json").write_text(placeholder, encoding="utf-8")
    notes = [
        f"transformers has no tokenizer with the ids of {file} ({name}), so AutoTokenizer rejects this folder; load "
        f"{file} with this project's tokenizers"
    ]
    if chat.source:
        notes.append("no chat template is exported, because it needs a tokenizer that transformers can load")
    return notes


def _settings_of_model(source: Path, tokenizer: Tokenizer, base: Tokenizer) -> dict[str, Any]:
    """Return the content of tokenizer_config.json for a sentencepiece model.

    The result is {} if transformers would encode text to other ids than `tokenizer`.
    """
    if not isinstance(base, SentencePieceTokenizer):
        return {}
    settings = dict(base.settings)
    if source.name == "spiece.model" and isinstance(tokenizer, SentinelTokenizer) and is_t5_model(base):
        for key in REPLACED:
            settings.pop(key, None)
        return {**settings, "tokenizer_class": "T5Tokenizer", "extra_ids": tokenizer.count}
    if base.is_llama and source.name == "tokenizer.model":
        settings.pop("chat_template", None)
        return settings
    return {}


def _write_json(
    folder: Path, tokenizer: Tokenizer, source: Path, theirs: Any, settings: Mapping[str, Any]
) -> dict[str, Any]:
    """Write tokenizer.json; for a T5, the file also contains the padding token and the sentinels.

    Returns entries for tokenizer_config.json that name these tokens of a T5, else {}.
    """
    from tokenizers import AddedToken

    described: dict[str, Any] = {}
    added: list[str] = []
    if isinstance(tokenizer, SentinelTokenizer):
        numbers = {id_: i for i, id_ in enumerate(tokenizer.sentinels)}
        sentinels = [f"<extra_id_{numbers[id_]}>" for id_ in sorted(numbers)]
        tokens = []
        for name in ("<pad>", *sentinels):
            tokens.append(AddedToken(name, special=True, normalized=False))
            if name not in tokenizer.base.specials:
                added.append(name)
        theirs.add_special_tokens(tokens)
        more = settings.get("extra_special_tokens")
        if isinstance(more, list):
            sentinels = list(dict.fromkeys([*more, *sentinels]))
        described = {"pad_token": "<pad>", "extra_special_tokens": sentinels}
    if source.name == "tokenizer.json" and not added:
        (folder / source.name).write_bytes(source.read_bytes())
    else:
        theirs.save(str(folder / "tokenizer.json"))
    return described


def _write_template(folder: Path, tokenizer: Tokenizer, chat: Chat) -> list[str]:
    """Write chat_template.jinja, if transformers can render the template alike; return notes."""
    notes = list(chat.notes)
    source = chat.source
    if source is None:
        return notes
    if source == ChatML.source:
        if missing := missing_marks(ChatML(), tokenizer):
            why = f"{' and '.join(missing)} are text in this tokenizer, which transformers may tokenize differently"
            return [*notes, f"chat_template.jinja is not exported: chatml's {why}"]
        source = ChatML.jinja
    (folder / TEMPLATE).write_text(source, encoding="utf-8")
    return notes
