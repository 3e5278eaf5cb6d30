"""Which tokens an exported folder names as bos_token, eos_token and so on.

They come from the Hugging Face files next to the vocabulary file, else from our tokenizer.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron.tokenizer import Tokenizer
from megatron.tokenizer.base import read_object
from megatron.tokenizer.sibling_files import (
    read_eos_ids,
    read_generation_config,
    read_token_ids,
    read_tokenizer_class,
    read_tokenizer_config,
    special_token_roles,
    token_ids_in,
)

Content = dict[str, Any]  # the content of a JSON file
PAD_CANDIDATES = ("<pad>", "<|pad|>", "[PAD]", "<unk>")  # names of special tokens that may serve as padding
OUT_OF_VOCABULARY = "\U0010fffd"  # a text of one private-use character, which no vocabulary contains
# Keys of the original tokenizer_config.json that are not copied to the export. Code is not exported, the chat template
# is a separate file, and the export sets its own tokenizer class.
DROPPED_KEYS = ("chat_template", "auto_map", "tokenizer_class", "tokenizer_file", "legacy", "sp_model_kwargs")
# Regular expression by which Qwen2Tokenizer splits text into words before BPE.
QWEN2_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# auto_map of an exported tokenizer_config.json. For many model types, AutoTokenizer ignores tokenizer_class unless
# auto_map refers to Python code. The code that this entry refers to does not exist. It never runs.
PLACEHOLDER_AUTO_MAP = {"AutoTokenizer": ["load_it_without_trust_remote_code.Tokenizer"] * 2}


def _token_text(token: Any) -> str:
    if isinstance(token, dict):
        return str(token.get("content"))
    return str(token or "")


def pad_token_name(tokenizer: Tokenizer, vocab_path: Path) -> str | None:
    """Return the name of the padding token, or None if there is none.

    It is the padding token that the source folder names. If the folder has no tokenizer_config.json, it is a token of
    PAD_CANDIDATES that is not the end token and never occurs in encoded text. Data collators mask padding in the loss,
    so if the padding token were also the end token, a fine-tuned model would never learn to stop.
    """
    named_pad = _token_text(special_token_roles(tokenizer, vocab_path).get("pad_token"))
    if named_pad in tokenizer.marks:
        return named_pad
    # If tokenizer_config.json of the source folder names no padding token, the export does not name one either.
    if read_tokenizer_config(vocab_path):
        return None
    # Unusable are names that the vocabulary lacks (None), the end token, and the ids of unknown characters, which occur
    # in texts.
    unusable = {None, tokenizer.eod, *tokenizer.encode(OUT_OF_VOCABULARY)}
    for name in PAD_CANDIDATES:
        if tokenizer.specials.get(name) not in unusable:
            return name
    return None


def tokenizer_settings(tokenizer: Tokenizer, vocab_path: Path, positions: int | None) -> Content:
    """Return the content of tokenizer_config.json for an export that has a tokenizer.json.

    positions: maximum number of tokens in a text if the model has learned positions, else None.
    """
    name_of_id = {i: name for name, i in tokenizer.marks.items()}
    kept = read_tokenizer_config(vocab_path)
    for key in DROPPED_KEYS:
        kept.pop(key, None)
    for key, value in special_token_roles(tokenizer, vocab_path).items():
        if value is not None:
            kept[key] = value
    # What the source folder gives is kept. Our tokenizer only fills in what is missing.
    exported = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **kept}
    # A token of text has no name in `marks`.
    exported.setdefault("eos_token", name_of_id.get(tokenizer.eod) or tokenizer.decode([tokenizer.eod]))
    pad_name = pad_token_name(tokenizer, vocab_path)
    if pad_name is not None:
        exported.setdefault("pad_token", pad_name)
    if tokenizer.start:
        exported.setdefault("bos_token", name_of_id.get(tokenizer.start[0]) or tokenizer.decode(tokenizer.start[:1]))
    if read_tokenizer_class(vocab_path).startswith("Llama"):  # other tokenizer classes pad on the right by default
        exported.setdefault("padding_side", "left")
    if positions is not None:
        # The key may be missing, and a float such as 1e30 means that there is no limit.
        source_length = kept.get("model_max_length")
        if type(source_length) is int:
            positions = min(source_length, positions)
        exported["model_max_length"] = positions
    return exported


def tokenizer_class_entries(vocab_path: Path, model_type: str, is_json: bool) -> Content:
    """Return the entries of tokenizer_config.json that determine which tokenizer class AutoTokenizer loads.

    is_json: whether the exported folder has a tokenizer.json.
    """
    if is_json:
        # With a tokenizer.json, AutoTokenizer follows tokenizer_class, except for qwen2.
        if model_type != "qwen2":
            return {}
        if read_tokenizer_class(vocab_path) == "Qwen2Tokenizer" and _splits_like_qwen2(vocab_path):
            return {"tokenizer_class": "Qwen2Tokenizer"}
    elif model_type in ("llama", "t5", "mt5"):
        return {}
    # For all other types, AutoTokenizer of some releases chooses the class by the model type, unless auto_map names
    # code: in transformers 5.3 to 5.5, for gpt2, qwen2_moe, qwen3 and qwen3_moe, too.
    return {"auto_map": PLACEHOLDER_AUTO_MAP}


def _splits_like_qwen2(vocab_path: Path) -> bool:
    """Return whether the file `vocab_path`, a tokenizer.json, normalises and splits text like Qwen2Tokenizer.

    Qwen2Tokenizer ignores the normaliser and the pre-tokenizer in the file, and always uses its own.
    """
    content = read_object(vocab_path)
    if content.get("normalizer") != {"type": "NFC"}:
        return False
    # Qwen2's is {"pretokenizers": [{"pattern": {"Regex": QWEN2_WORDS}, ...}, ...]}.
    pre_tokenizer = content.get("pre_tokenizer") or {}
    steps = pre_tokenizer.get("pretokenizers", [])
    if not steps:
        return False
    pattern = steps[0].get("pattern", {})
    return bool(pattern.get("Regex") == QWEN2_WORDS)


def special_token_ids(trained: Mapping[str, Any], tokenizer: Tokenizer, vocab_path: Path, is_t5: bool) -> Content:
    """Return the special-token ids for config.json, such as {"eos_token_id": 1}.

    They are the ids used in training. Ids in the source folder replace them unless this would change the model.
    trained: the ids used in training, under the same keys.
    """
    source_ids = read_token_ids(vocab_path)
    ids = token_ids_in(trained)
    source_end = source_ids.get("eos_token_id")
    # The source may list several end ids. Its entry is kept only if it contains the id used in training.
    if source_end == tokenizer.eod or (isinstance(source_end, list) and tokenizer.eod in source_end):
        ids["eos_token_id"] = source_end
    # The text of a missing role is "", which is the name of no token.
    start_name = _token_text(special_token_roles(tokenizer, vocab_path).get("bos_token"))
    start_id = tokenizer.marks.get(start_name)
    if "bos_token_id" in source_ids:
        ids["bos_token_id"] = source_ids["bos_token_id"]
    elif start_id is not None and not is_t5:
        ids["bos_token_id"] = start_id
    # A T5's padding id must stay the one used in training, because the decoder starts with this id.
    if is_t5:
        return ids
    pad_name = pad_token_name(tokenizer, vocab_path)
    if "pad_token_id" in source_ids:
        ids["pad_token_id"] = source_ids["pad_token_id"]
    # A source that names ids, but none for padding, has no padding token; then the export names none, either.
    elif not source_ids and pad_name is not None:
        ids["pad_token_id"] = tokenizer.marks[pad_name]
    return ids


def generation_settings(
    ids: Mapping[str, Any], tokenizer: Tokenizer, vocab_path: Path, turn_end: int | None
) -> Content:
    """Return the content of generation_config.json for an export.

    The generation settings of the source folder override `ids`, the special-token ids of config.json. eos_token_id
    holds every id that ends an answer, including `turn_end`.
    """
    source_end = read_eos_ids(vocab_path)
    source_ends = source_end if isinstance(source_end, list) else [source_end]
    end_ids = []
    # None, if the source gives no id, and ids outside the vocabulary are dropped.
    for end_id in source_ends:
        if type(end_id) is int and 0 <= end_id < tokenizer.vocab_size:
            end_ids.append(end_id)
    # Ids that do not include the end used in training belong to another tokenizer.
    if tokenizer.eod not in end_ids:
        end_ids = [tokenizer.eod]
    if turn_end is not None:
        end_ids.append(turn_end)
    # Remove repeated ids, and keep their order.
    end_ids = list(dict.fromkeys(end_ids))
    # A source that lists its end ids gets a list again, even for a single id.
    is_single = len(end_ids) == 1 and not isinstance(source_end, list)
    eos_token_id = end_ids[0] if is_single else end_ids
    settings = {**ids, **read_generation_config(vocab_path), "eos_token_id": eos_token_id}
    # A T5's decoder starts as in training, also if the tokenizer comes from the folder of another model.
    if "decoder_start_token_id" in ids:
        settings["decoder_start_token_id"] = ids["decoder_start_token_id"]
    return settings
