"""Export of the tokenizer and its chat template to Hugging Face."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from shutil import copyfile
from typing import Any, NamedTuple

from data_utils.chat_encoder import missing_chatml_tokens, turn_end
from data_utils.chat_templates import ChatML, has_unrecorded_date, template_of_corpus, tokenizer_template
from data_utils.cli import write_json
from data_utils.sidecars import chat_corpora
from megatron.config import Config
from megatron.data.corpus_paths import prefixes_of
from megatron.tokenizer import SentinelTokenizer, Tokenizer
from megatron.tokenizer.load import find_vocab_file
from megatron.tokenizer.sentencepiece import SentencePieceTokenizer
from megatron.tokenizer.sibling_files import (
    MORE_TEMPLATES,
    SETTINGS,
    TEMPLATE,
    TOKEN_FILES,
    TOKENS_MAP,
    make_placeholder,
    read_tokenizer_config,
    special_token_names,
)

from .export_roles import DROPPED_KEYS, tokenizer_class_entries, tokenizer_settings
from .hf_tokenizer import frame_texts, is_t5_model, to_hf_tokenizer


class ChatFormat(NamedTuple):
    """The chat format of a model.

    template: text of the chat template, None if unknown. end_id: id of the end-of-turn token, or None if the model was
    not trained to end its answers with this token. notes: remarks for the user.
    """

    template: str | None = None
    end_id: int | None = None
    notes: Sequence[str] = ()


def chat_format_of(config: Config, tokenizer: Tokenizer, vocab_file: str) -> ChatFormat:
    """Return the chat format of the conversations in the training data.

    If the run was not trained on conversations, return the format of the chat template next to `vocab_file`.
    """
    if config.is_t5:
        return ChatFormat()
    template = tokenizer_template(vocab_file)
    notes = _skipped_template_notes(vocab_file)
    # Only supervised fine-tuning (sft) trains on conversations, so other runs have learned no end of a turn.
    if config.objective != "sft":
        return ChatFormat(template, notes=notes)
    sidecars = [sidecar for _, sidecar in chat_corpora(config)]
    if not sidecars:
        prefixes = prefixes_of(config.data.paths) if config.data.names_corpora else []
        corpora = ", ".join(prefixes) or "the run"
        template_words = "the template of the tokenizer" if template else "no template"
        notes.append(
            f"{corpora} has no sidecar file with the chat template, so {template_words} is exported and "
            "eos_token_id contains no end-of-turn token"
        )
        return ChatFormat(template, notes=notes)
    first_sidecar = sidecars[0]
    if any(sidecar["chat_template"] != first_sidecar["chat_template"] for sidecar in sidecars):
        notes.append("the corpora of this run have different chat templates; that of the first corpus is exported")
    date = first_sidecar.get("chat_date")
    if date:
        notes.append(f"chat_template.jinja inserts the current date; the run was trained with {date}")
    elif has_unrecorded_date(first_sidecar):
        notes.append(
            "chat_template.jinja inserts the current date; the run was trained without a date, because its corpus was "
            "made by an older version of this project, which offered no strftime_now to templates"
        )
    end_id = None
    try:  # the template may fail to render a conversation
        end_id = turn_end(template_of_corpus(first_sidecar, tokenizer, vocab_file), tokenizer)
    except ValueError as error:
        notes.append(f"eos_token_id contains no end-of-turn token: {error}")
    return ChatFormat(str(first_sidecar["chat_template"]), end_id, notes)


def _skipped_template_notes(vocab_file: str) -> list[str]:
    """Return a note that names further chat templates beside the tokenizer, if there are any."""
    vocab_path = find_vocab_file(vocab_file)
    templates = read_tokenizer_config(vocab_path).get("chat_template")
    names = []
    # chat_template is one template, or a list of named templates of which only `default` is exported.
    if isinstance(templates, list):
        for template in templates:
            name = template.get("name")
            if name != "default":
                names.append(str(name))
    for file in sorted(vocab_path.with_name(MORE_TEMPLATES).glob("*.jinja")):
        names.append(file.name)
    return [f"further chat templates of the tokenizer are not exported: {', '.join(names)}"] if names else []


def write_tokenizer(
    folder: Path, config: Config, tokenizer: Tokenizer, vocab_file: str, chat: ChatFormat, model_type: str = ""
) -> list[str]:
    """Write the tokenizer and chat_template.jinja for transformers. Return notes for the user.

    If transformers would encode text to other ids than `tokenizer`, the function writes a placeholder tokenizer.json
    instead, which makes AutoTokenizer fail with an error.
    """
    base_tokenizer = tokenizer.base if isinstance(tokenizer, SentinelTokenizer) else tokenizer
    vocab_path = find_vocab_file(vocab_file)
    hf_tokenizer = to_hf_tokenizer(base_tokenizer)
    adds_tokens = tokenizer.vocab_size > base_tokenizer.vocab_size  # a T5's sentinels
    # The package gives a new token the number of all tokens as its id. If some ids have no token, this project gives it
    # another id: the next one after the largest.
    if hf_tokenizer is not None and adds_tokens and hf_tokenizer.get_vocab_size() < base_tokenizer.vocab_size:
        hf_tokenizer = None
    if hf_tokenizer is not None:
        # Only learned positions limit the length of a text that the model can read.
        positions = config.positions if config.model.position_embedding == "learned" else None
        tokenizer_config = tokenizer_settings(base_tokenizer, vocab_path, positions)
        tokenizer_config |= _write_tokenizer_json(folder, tokenizer, vocab_path, hf_tokenizer, tokenizer_config)
    else:
        # The placeholder needs the name tokenizer.json itself.
        file_name = vocab_path.name.replace("tokenizer.json", "base_tokenizer.json")
        copyfile(vocab_path, folder / file_name)
        tokenizer_config = _sentencepiece_settings(vocab_path, tokenizer, base_tokenizer)
        # No class of transformers gives the ids of this file, which only this project can read.
        if not tokenizer_config:
            return _write_placeholder(folder, file_name, base_tokenizer.name, chat)
    tokenizer_config |= tokenizer_class_entries(vocab_path, model_type, hf_tokenizer is not None)
    for file_name in TOKEN_FILES:
        source = vocab_path.with_name(file_name)
        # Its roles are in tokenizer_config already. In transformers, it would override the pad_token of a T5.
        is_merged = file_name == TOKENS_MAP and hf_tokenizer is not None and isinstance(tokenizer, SentinelTokenizer)
        if source.is_file() and not is_merged:
            copyfile(source, folder / file_name)
    notes = _write_template(folder, tokenizer, chat)
    # Chat templates use variables such as bos_token. transformers takes their values from tokenizer_config.json.
    for key, token in special_token_names(base_tokenizer, vocab_path).items():
        if token in base_tokenizer.marks and key in (chat.template or ""):
            tokenizer_config[key] = token
    write_json(folder / SETTINGS, tokenizer_config)
    return notes


def _write_placeholder(folder: Path, file_name: str, tokenizer_name: str, chat: ChatFormat) -> list[str]:
    """Write a tokenizer.json that AutoTokenizer rejects; return notes.

    file_name, tokenizer_name: names of the tokenizer's file and of the tokenizer.
    """
    write_json(folder / "tokenizer.json", make_placeholder(file_name))
    notes = [
        f"transformers has no tokenizer with the ids of {file_name} ({tokenizer_name}), so AutoTokenizer rejects "
        f"this folder; load {file_name} with this project's tokenizers"
    ]
    if chat.template:
        notes.append("no chat template is exported, because it needs a tokenizer that transformers can load")
    return notes


def _sentencepiece_settings(vocab_path: Path, tokenizer: Tokenizer, base_tokenizer: Tokenizer) -> dict[str, Any]:
    """Return the content of tokenizer_config.json for a sentencepiece model.

    The result is {} if transformers would encode text to other ids than `tokenizer`.
    """
    if not isinstance(base_tokenizer, SentencePieceTokenizer):
        return {}
    settings = dict(base_tokenizer.settings)
    if isinstance(tokenizer, SentinelTokenizer):
        # T5Tokenizer numbers its sentinels as in the convention t5, and puts the end token after each text.
        is_t5_file = vocab_path.name == "spiece.model" and is_t5_model(base_tokenizer)
        if tokenizer.convention != "t5" or not is_t5_file:
            return {}
        for key in DROPPED_KEYS:
            settings.pop(key, None)
        return {**settings, "tokenizer_class": "T5Tokenizer", "extra_ids": tokenizer.count}
    # transformers reads this file by LlamaTokenizer, which only knows BPE, and neither normalises text nor merges
    # spaces.
    facts = base_tokenizer.facts
    suits_llama = facts.normalization == "identity" and not facts.merges_spaces and facts.algorithm == "bpe"
    if suits_llama and base_tokenizer.is_llama and vocab_path.name == "tokenizer.model":
        settings.pop("chat_template", None)  # `_write_template` writes it as a file
        return settings
    return {}


def _write_tokenizer_json(
    folder: Path, tokenizer: Tokenizer, vocab_path: Path, hf_tokenizer: Any, tokenizer_config: Mapping[str, Any]
) -> dict[str, Any]:
    """Write tokenizer.json; for a T5, the file also contains the padding token and the sentinels.

    Returns entries for tokenizer_config.json that name these tokens of a T5, else {}.
    """
    from tokenizers import AddedToken

    entries: dict[str, Any] = {}
    source_json = hf_tokenizer.to_str()
    if isinstance(tokenizer, SentinelTokenizer):
        # The file lists the names of sentinels in the order of their ids.
        sentinels = [tokenizer.decode([id_]) for id_ in sorted(tokenizer.sentinels)]
        # Tokens that the source has already stay as they are.
        tokens = [AddedToken(name, special=True, normalized=False) for name in ("<pad>", *sentinels)]
        hf_tokenizer.add_special_tokens(tokens)
        # The source may put other tokens around a text than this T5 does: replace them.
        end_ids = [tokenizer.eod] if tokenizer.convention == "t5" else []
        frame_texts(hf_tokenizer, tokenizer.start, end_ids)
        listed = tokenizer_config.get("extra_special_tokens")
        if isinstance(listed, list):
            # The source's own tokens come first; a sentinel that is already among them is not repeated.
            sentinels = list(dict.fromkeys([*listed, *sentinels]))
        entries = {"pad_token": "<pad>", "extra_special_tokens": sentinels}
    # A tokenizer.json that needs no change is copied byte by byte.
    if vocab_path.name == "tokenizer.json" and hf_tokenizer.to_str() == source_json:
        copyfile(vocab_path, folder / vocab_path.name)
    else:
        hf_tokenizer.save(str(folder / "tokenizer.json"))
    return entries


def _write_template(folder: Path, tokenizer: Tokenizer, chat: ChatFormat) -> list[str]:
    """Write chat_template.jinja, if transformers can render the template alike; return notes."""
    notes = list(chat.notes)
    template = chat.template
    if template is None:
        return notes
    # A corpus records our built-in template by its name; transformers needs the Jinja text.
    if template == ChatML.source:
        missing = missing_chatml_tokens(ChatML(), tokenizer)
        if missing:
            problem = f"{' and '.join(missing)} are text in this tokenizer, which transformers may tokenize differently"
            return [*notes, f"chat_template.jinja is not exported: chatml's {problem}"]
        template = ChatML.jinja
    (folder / TEMPLATE).write_text(template, encoding="utf-8")
    return notes
