"""The work of tools/convert_checkpoint.py, whose flags are in convert_flags.py."""

import argparse
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from data_utils.cli import write_json
from megatron.atomic import atomic_folder
from megatron.checkpointing import CheckpointReader, find_checkpoint
from megatron.checkpointing.bounds import refuse_absurd_sizes
from megatron.checkpointing.files import WEIGHT
from megatron.checkpointing.pruned import read_newest
from megatron.checkpointing.relocation import TOKENIZER_FOLDER, copy_special_tokens, copy_tokenizer, kept_tokenizer
from megatron.checkpointing.stream import LazyTensor
from megatron.checkpointing.write import write_checkpoint
from megatron.config import Config
from megatron.config.command_line import with_values
from megatron.config.fields import flag
from megatron.ranks.rank_0 import print_notes
from megatron.tokenizer import SentinelTokenizer, Tokenizer, load_tokenizer
from megatron.tokenizer.load import find_vocab_file
from megatron.tokenizer.sibling_files import (
    GENERATION,
    TOKEN_ID_KEYS,
    read_generation_config,
    read_token_ids,
    token_ids_in,
)
from megatron_tools.shapes import config_of_checkpoint

from .export_roles import generation_settings, special_token_ids
from .export_tokenizer import ChatFormat, chat_format_of, write_tokenizer
from .hf_compare import compare_imported_ids, compare_own_models, compare_token_ids, compare_with_hf
from .hf_config import gpt2_config, logit_scale_notes, t5_config
from .hf_experts import unexported_notes
from .hf_folder import DTYPES, export_entries, write_tensors
from .hf_import import import_hf
from .hf_llama import llama_config
from .hf_names import parameter_matches
from .megatron_lm import RankFiles
from .megatron_settings import check_complete, settings_from_megatron
from .upcycle import upcycled_config, upcycled_entries

# Settings of the data in the settings.json of an import; it has all settings of the model, too.
DATA_SETTINGS = (
    "vocab_file", "tokenizer_type", "seq_length", "enc_seq_length", "dec_seq_length", "span_convention",
    "num_sentinels",
)  # fmt: skip


def export_checkpoint(args: argparse.Namespace, path: Path) -> None:
    """Export the checkpoint `path` as a Hugging Face folder."""
    reader = CheckpointReader(path, args.ema)
    reader.verify()
    config = config_of_checkpoint(path)
    tokenizer = _load_model_tokenizer(reader, config, args.vocab_file)
    vocab_file = str(args.vocab_file or config.data.vocab_file)
    chat = chat_format_of(config, tokenizer, vocab_file) if tokenizer else ChatFormat()
    config_json, generation_json = _config_contents(reader, config, tokenizer, vocab_file, chat, args.dtype)
    m = config.model
    notes_on_model = unexported_notes if m.family == "llama" else logit_scale_notes
    print_notes(notes_on_model(m))
    if config.is_t5 and m.attention_dropout != m.hidden_dropout:
        print_notes(
            [f"Hugging Face's T5 has one rate of dropout, so --attention-dropout {m.attention_dropout} is lost"]
        )
    if config.is_t5 and config.data.span_convention == "cpm":
        print_notes(["an answer ends with the sentinel after its last span; pass its id as eos_token_id to generate()"])

    def shape_of(name: str) -> list[int]:
        return list(reader.tensors[f"{WEIGHT}.{name}"]["shape"])

    def read_weight(name: str) -> Tensor:
        return reader.read_whole(f"{WEIGHT}.{name}")

    matches = {match.our_name: match for match in parameter_matches(m)}

    def read_rounded(name: str) -> Tensor:
        """Return our weight in fp32, after the rounding to --dtype that an export applies to it."""
        match = matches[name]
        dtype = DTYPES[args.dtype]
        return match.join([part.to(dtype).float() for part in match.split(read_weight(name))])

    # The weights themselves are read while `write_tensors` writes them, one at a time.
    entries = export_entries(matches.values(), read_weight, shape_of, args.dtype)

    with atomic_folder(Path(args.output)) as folder:
        # --max-shard-size is in GB.
        write_tensors(folder, entries, int(args.max_shard_size * 1e9))
        write_json(folder / "config.json", config_json)
        write_json(folder / GENERATION, generation_json)
        notes = ["the folder contains no tokenizer, because the model came without one; --vocab-file adds one"]
        if tokenizer:
            notes = write_tokenizer(folder, config, tokenizer, vocab_file, chat, config_json["model_type"])
        print_notes(notes)
        # The folder has a temporary name until this check has passed. If the check fails, the folder is deleted.
        if args.verify:
            if tokenizer:
                compare_token_ids(tokenizer, folder)
            # The exported weights are rounded to --dtype, so ours are rounded alike.
            compare_with_hf(config, read_rounded, folder)
    print(f"{len(entries)} tensors -> {args.output}")


def _config_contents(
    reader: CheckpointReader, config: Config, tokenizer: Tokenizer | None, vocab_file: str, chat: ChatFormat, dtype: str
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the contents of config.json and generation_config.json for the model of a checkpoint.

    Raises ConfigError if no model class of transformers supports the settings.
    """
    m = config.model
    # Without a tokenizer, a T5 keeps these ids, which T5's own tokenizer has: 0 for padding, 1 for the end.
    start_id = 0
    end_id = 1
    if tokenizer:
        # `before` holds the ids that precede each text: a start token, or the end-of-document token.
        start_id = tokenizer.before[0]
        end_id = tokenizer.eod
    if config.is_t5:
        config_json = t5_config(m, 0, end_id, dtype)
        if isinstance(tokenizer, SentinelTokenizer):
            config_json |= {"pad_token_id": tokenizer.pad, "decoder_start_token_id": tokenizer.decoder_start}
    elif m.family == "llama":
        config_json = llama_config(m, reader.positions, start_id, end_id, dtype)
    else:
        config_json = gpt2_config(m, reader.positions, start_id, end_id, dtype)
    # If config.json names no version, transformers assumes for vocabularies of more than 100,000 tokens that their
    # regular expression for words has a known error.
    config_json["transformers_version"] = "5.3.0"
    if tokenizer is None:
        # A GPT-2 or Llama without a tokenizer gets only the ids that its source folder named.
        trained_ids = token_ids_in(config_json) if config.is_t5 else {}
        config_path = reader.path.parent / TOKENIZER_FOLDER / "config.json"  # may be missing
        ids = trained_ids | read_token_ids(config_path)
        for key in TOKEN_ID_KEYS:
            config_json.pop(key, None)
        return config_json | ids, ids | read_generation_config(config_path)
    tokenizer_file = find_vocab_file(vocab_file)
    ids = special_token_ids(config_json, tokenizer, tokenizer_file, config.is_t5)
    return config_json | ids, generation_settings(ids, tokenizer, tokenizer_file, chat.end_id)


def _load_model_tokenizer(reader: CheckpointReader, config: Config, vocab_file: str | None) -> Tokenizer | None:
    """Return the model's tokenizer, or None if the model was imported without a tokenizer.

    Raises ValueError if the tokenizer's file is missing, or if it is not the tokenizer used in training.
    """
    path = vocab_file or config.data.vocab_file
    # reader.tokenizer is the fingerprint of the tokenizer used in training, empty if there was none. If there was one,
    # but its path is unknown, the user must give it.
    if path is None and not reader.tokenizer:
        return None
    if path is None or not Path(path).exists():
        raise ValueError(f"{reader.path}: the tokenizer {path or 'of the run'} does not exist; give --vocab-file")
    tokenizer = load_tokenizer(path, config.data.tokenizer_type)
    if config.is_t5:
        tokenizer = SentinelTokenizer(tokenizer, config.data.num_sentinels, config.data.span_convention)
    reader.check_tokenizer(tokenizer.fingerprint, vocab_file=path)
    rows = config.model.vocab_size or 0  # the model may have more rows than tokens
    if tokenizer.vocab_size > rows:
        raise ValueError(
            f"{reader.path}: the tokenizer has {tokenizer.vocab_size} tokens, "
            f"more than the model's vocabulary of {rows}"
        )
    return tokenizer


def import_checkpoint(args: argparse.Namespace) -> None:
    """Write a foreign checkpoint (--from-hf or --from-megatron), or one with experts (--upcycle), at iteration 0."""
    output = Path(args.output)
    if output.exists() and any(output.iterdir()):
        raise ValueError(f"{output} exists and is not empty; choose another --output")
    convert = import_hf
    if args.upcycle is not None:
        convert = upcycle_dense
    elif args.from_megatron:
        convert = import_megatron
    config, fingerprint, entries = convert(args)
    vocab_file = config.data.vocab_file
    if args.verify and args.from_hf:
        if vocab_file:
            note = compare_imported_ids(load_tokenizer(vocab_file), Path(args.from_hf))
            print_notes([note])
        compare_with_hf(config, _weight_reader(entries), Path(args.from_hf))
    with atomic_folder(output) as folder:
        write_checkpoint(folder / "iter_0000000", entries, config, fingerprint)
        # A later export then finds the ids that the source folder named, even though there is no tokenizer. A dense
        # model that was imported without a tokenizer has them in the same place.
        if vocab_file is None and not args.from_megatron:
            source = Path(args.from_hf or find_checkpoint(args.load).parent / TOKENIZER_FOLDER)
            copy_special_tokens(source / "config.json", folder)
        if args.upcycle is not None and vocab_file and Path(vocab_file).exists():
            copy_tokenizer(vocab_file, folder)
            # `folder` has a temporary name, under which it is written, and then becomes `output`. The settings must
            # name the copy in `output`, so the path inside the folder is needed.
            tokenizer_path = Path(kept_tokenizer(folder, vocab_file) or folder)
            config = with_values(config, {"vocab_file": str(output.resolve() / tokenizer_path.relative_to(folder))})
        _write_settings(folder / "settings.json", config)
    print(f"{len(entries)} tensors -> {output / 'iter_0000000'}")
    settings = output / "settings.json"
    script = f"pretrain_{config.model.family}.py"
    print(
        f"to continue training: python {script} --config {settings} --load {args.output} --data-path ... --run-dir ..."
    )


def _weight_reader(entries: Sequence[LazyTensor]) -> Callable[[str], Tensor]:
    """Return a function that computes a weight of `entries`, given its name in the model."""
    entries_by_name = {entry.name.removeprefix(f"{WEIGHT}."): entry for entry in entries}
    return lambda name: entries_by_name[name].build()


def _write_settings(path: Path, config: Config) -> None:
    """Write the model's settings, tokenizer and sequence lengths to `path`.

    Training continues from the imported checkpoint with `--config path`.
    """
    all_settings = config.to_dict()
    data_settings = {}
    for key in DATA_SETTINGS:
        value = all_settings["data"][key]
        if value is not None:
            data_settings[key] = value
    write_json(path, {"model": all_settings["model"], "data": data_settings})


def upcycle_dense(args: argparse.Namespace) -> tuple[Config, str, list[LazyTensor]]:
    """Return (settings, tokenizer fingerprint, tensors to write) of the checkpoint --load with --upcycle experts."""
    path = find_checkpoint(args.load)
    reader = CheckpointReader(path, args.ema)
    reader.verify()
    dense_config = config_of_checkpoint(path)
    config = upcycled_config(reader, args.upcycle, args.experts_per_token, args.moe_layer_frequency)
    entries = list(upcycled_entries(reader, config))
    if args.verify:
        compare_own_models(
            config, _weight_reader(entries), dense_config, lambda name: reader.read_whole(f"{WEIGHT}.{name}"), path
        )
    return config, reader.tokenizer or "", entries


def import_megatron(args: argparse.Namespace) -> tuple[Config, str, list[LazyTensor]]:
    """Return (our settings, tokenizer fingerprint, tensors to write) for the model in the folder --from-megatron."""
    source = RankFiles(Path(args.from_megatron), args.checkpoint_version, args.num_layers)
    settings = settings_from_megatron(source, args.num_attention_heads)
    refuse_absurd_sizes(settings, map(source.shape, source.names()), Path(args.from_megatron))
    vocab_rows = settings["vocab_size"]
    fingerprint = ""
    print(
        f"the rows of query, key and value are assumed to be ordered as in checkpoint version {source.version:g} "
        f"({source.version_source})"
    )
    if args.vocab_file:
        tokenizer = load_tokenizer(args.vocab_file)
        tokenizer.refuse_contradiction()
        if tokenizer.vocab_size > vocab_rows:
            raise ValueError(
                f"{args.vocab_file} has {tokenizer.vocab_size} tokens, more than the model's vocabulary of {vocab_rows}"
            )
        fingerprint = tokenizer.fingerprint
        # Embedding rows beyond the tokenizer's vocabulary are padding and are not imported.
        settings |= {"vocab_file": args.vocab_file, "vocab_size": tokenizer.vocab_size}
    config = with_values(Config(), settings)
    check_complete(source, config)
    return config, fingerprint, [_megatron_entry(source, name, config) for name in source.names()]


def _megatron_entry(source: RankFiles, name: str, config: Config) -> LazyTensor:
    """Return the tensor to write for our parameter `name`, which is read when it is written."""
    # An embedding may have rows of padding beyond vocab_size, which are cut off. For other tensors, None keeps all
    # rows: tensor[:None] is the whole tensor.
    vocab_rows = config.model.vocab_size if "word_embeddings" in name else None
    rows, *other_dims = source.shape(name)
    shape = (vocab_rows or rows, *other_dims)
    return LazyTensor(
        f"{WEIGHT}.{name}",
        shape,
        torch.float32,
        lambda: source.read(name, config.model.num_attention_heads)[:vocab_rows],
    )


def main(args: argparse.Namespace) -> None:
    is_export = args.load and args.upcycle is None
    _check_flags(args, is_export)
    if args.load:
        read_newest(args.load, lambda path: export_checkpoint(args, path) if is_export else import_checkpoint(args))
    else:
        import_checkpoint(args)


def _check_flags(args: argparse.Namespace, is_export: bool) -> None:
    """Raise ValueError for flags that do not belong together, and set the defaults of the flags of an export."""
    # Exactly one of the three may be given.
    if sum(map(bool, (args.load, args.from_hf, args.from_megatron))) != 1:
        raise ValueError(
            "give one of --load (a run to export or upcycle), --from-hf and --from-megatron (a folder to import)"
        )
    if args.upcycle is not None and args.vocab_file:
        raise ValueError("--vocab-file has no effect with --upcycle, which keeps the tokenizer of the run")
    dependent_flags = {
        "from_megatron": ("checkpoint_version", "num_layers", "num_attention_heads"),
        "load": ("upcycle", "ema"),
        "upcycle": ("experts_per_token", "moe_layer_frequency"),
    }
    # A flag that was not given is None, or False for a switch; a given 0 counts as given. The defaults of the flags of
    # an export are set below, because the parser's defaults would look like given flags.
    given = {name for name, value in vars(args).items() if value is not None and value is not False}
    for required, dependents in dependent_flags.items():
        for name in dependents:
            if name in given and required not in given:
                raise ValueError(f"{flag(name)} needs {flag(required)}")
    for name, default in (("dtype", "fp32"), ("max_shard_size", 5.0)):
        if name not in given:
            setattr(args, name, default)
        elif not is_export:
            raise ValueError(f"{flag(name)} is for an export: --load without --upcycle")
    if args.verify and args.from_megatron:
        raise ValueError(
            "--verify compares with transformers, which cannot read the --from-megatron folder; omit --verify"
        )
    if not 0 < args.max_shard_size < math.inf:
        raise ValueError(f"--max-shard-size {args.max_shard_size:g} must be a positive number of GB")
