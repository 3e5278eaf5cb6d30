"""Convert checkpoints to and from Hugging Face, from CPM-1 and Megatron-LM, and from dense models to mixtures.

The models of Hugging Face are GPT-2, T5, Llama, Qwen, Mistral, Mixtral and the mixtures of Qwen.
"""

import argparse
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from data_utils.cli import Parser, any_path, local_path, run, write_json
from megatron.atomic import whole_folder
from megatron.checkpointing import CheckpointReader, find_checkpoint, plain_config
from megatron.checkpointing.bounds import refuse_absurd_sizes
from megatron.checkpointing.files import WEIGHT
from megatron.checkpointing.pruned import read_newest
from megatron.checkpointing.relocation import keep_roles, keep_tokenizer, kept_beside, kept_tokenizer
from megatron.checkpointing.stream import Entry
from megatron.checkpointing.write import write_checkpoint
from megatron.config import Config
from megatron.config.command_line import with_values
from megatron.config.fields import flag
from megatron.ranks.rank_0 import print_notes
from megatron.tokenizer import SentinelTokenizer, Tokenizer, load_tokenizer
from megatron.tokenizer.load import file_of
from megatron.tokenizer.sibling_files import GENERATION, ROLES
from megatron_tools.shapes import check_model

from .export_roles import bare_roles, generation_settings, model_ids
from .export_tokenizer import Chat, chat_of, write_tokenizer
from .hf_compare import compare, compare_ids, compare_imported_ids, compare_ours
from .hf_config import gpt2_config, notes_on_scale, t5_config
from .hf_experts import left_out
from .hf_folder import DTYPES, entries_of, write_tensors
from .hf_import import from_hf
from .hf_llama import llama_config
from .hf_names import Match, matches_of
from .megatron_lm import ORDERS, RankFiles
from .megatron_settings import check_complete, settings_of
from .upcycle import upcycled_config, upcycled_entries

EXAMPLES = """\
  python tools/convert_checkpoint.py --load runs/gpt2 --output exported --verify
      then: transformers.AutoModelForCausalLM.from_pretrained("exported")
  python tools/convert_checkpoint.py --load runs/t5 --output exported --dtype bf16 --max-shard-size 2
  python tools/convert_checkpoint.py --from-hf downloaded/ --output runs/mine/checkpoints
      then: the command that it prints: python pretrain_gpt2.py --config runs/mine/checkpoints/settings.json ...
  python tools/convert_checkpoint.py --from-megatron CPM-large --num-attention-heads 32 --output runs/cpm/checkpoints \\
      --vocab-file bpe_3w_new/
  python tools/convert_checkpoint.py --load runs/llama --upcycle 8 --output runs/experts/checkpoints --verify"""


def export(args: argparse.Namespace, path: Path) -> None:
    """Export the checkpoint `path` as a Hugging Face folder."""
    reader = CheckpointReader(path, args.ema)
    reader.verify()
    config = plain_config(reader)
    check_model(reader, config)
    tokenizer = _tokenizer(reader, config, args.vocab_file)
    vocab_file = str(args.vocab_file or config.data.vocab_file)
    chat = chat_of(config, tokenizer, vocab_file) if tokenizer else Chat(None, None)
    described, generation = _described(reader, config, tokenizer, vocab_file, chat, args.dtype)
    print_notes(left_out(config.model) if config.model.family == "llama" else notes_on_scale(config.model))

    def shape(name: str) -> list[int]:
        return list(reader.tensors[f"{WEIGHT}.{name}"]["shape"])

    def read(name: str) -> Tensor:
        return reader.whole(f"{WEIGHT}.{name}")

    by_name = {match.ours: match for match in matches_of(config.model)}
    entries = entries_of(by_name.values(), read, shape, args.dtype)

    with whole_folder(Path(args.output)) as folder:
        write_tensors(folder, entries, int(args.max_shard_size * 1e9))
        (folder / "config.json").write_text(json.dumps(described, indent=2), encoding="utf-8")
        (folder / GENERATION).write_text(json.dumps(generation, indent=2), encoding="utf-8")
        notes = ["the folder contains no tokenizer, because the model came without one; --vocab-file adds one"]
        if tokenizer:
            notes = write_tokenizer(folder, config, tokenizer, vocab_file, chat, described["model_type"])
        print_notes(notes)
        # The folder has a temporary name until this check has passed. If the check fails, the folder is deleted.
        if args.verify:
            if tokenizer:
                compare_ids(tokenizer, folder)
            compare(config, lambda name: _rounded(by_name[name], read(name), DTYPES[args.dtype]), folder)
    print(f"{len(entries)} tensors -> {args.output}")


def _described(
    reader: CheckpointReader, config: Config, tokenizer: Tokenizer | None, vocab_file: str, chat: Chat, dtype: str
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the contents of config.json and generation_config.json for the model of a checkpoint.

    Raises ConfigError if no model class of transformers supports the settings.
    """
    start = 0
    end = 1
    if tokenizer:
        start = tokenizer.before[0]
        end = tokenizer.eod
    if config.is_t5:
        pad = tokenizer.pad if isinstance(tokenizer, SentinelTokenizer) else 0
        described = t5_config(config.model, pad, end, dtype)
    elif config.model.family == "llama":
        described = llama_config(config.model, reader.positions, start, end, dtype)
    else:
        described = gpt2_config(config.model, reader.positions, end, dtype)
    if tokenizer is None:
        trained = described if config.is_t5 else {}
        ids, generation = bare_roles(kept_beside(reader.path.parent), trained)
        without_ids = {key: value for key, value in described.items() if key not in ROLES}
        return without_ids | ids, generation
    source = file_of(vocab_file)
    base = tokenizer.base if isinstance(tokenizer, SentinelTokenizer) else tokenizer
    ids = model_ids(described, base, source, config.is_t5)
    return described | ids, generation_settings(ids, tokenizer, source, chat.end)


def _rounded(match: Match, value: Tensor, dtype: torch.dtype) -> Tensor:
    """Return our weight `value` in fp32, after the rounding to `dtype` that an export applies to it."""
    return match.join([part.to(dtype).float() for part in match.split(value)])


def _tokenizer(reader: CheckpointReader, config: Config, vocab_file: str | None) -> Tokenizer | None:
    """Return the model's tokenizer, or None if the model was imported without a tokenizer.

    Raises ValueError if the tokenizer's file is missing, or if it is not the tokenizer used in training.
    """
    given = vocab_file or config.data.vocab_file
    if given is None and not reader.tokenizer:
        return None
    if given is None or not Path(given).exists():
        raise ValueError(f"{reader.path}: the tokenizer {given or 'of the run'} does not exist; give --vocab-file")
    tokenizer = load_tokenizer(given, config.data.tokenizer_type)
    if config.is_t5:
        tokenizer = SentinelTokenizer(tokenizer, config.data.num_sentinels, config.data.span_convention)
    reader.check_tokenizer(tokenizer.fingerprint, vocab_file=given)
    rows = config.model.vocab_size or 0
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
    read = from_hf
    if args.upcycle is not None:
        read = from_dense
    elif args.from_megatron:
        read = from_megatron
    config, fingerprint, entries = read(args)
    if args.verify and args.from_hf:
        if config.data.vocab_file:
            note = compare_imported_ids(load_tokenizer(config.data.vocab_file), Path(args.from_hf))
            print_notes([note])
        compare(config, _weights_in(entries), Path(args.from_hf))
    with whole_folder(output) as folder:
        write_checkpoint(folder / "iter_0000000", entries, config, fingerprint)
        if args.from_hf and config.data.vocab_file is None:
            keep_roles(Path(args.from_hf) / "config.json", folder)
        if args.upcycle is not None and config.data.vocab_file and Path(config.data.vocab_file).exists():
            keep_tokenizer(config.data.vocab_file, folder)
            kept = Path(kept_tokenizer(folder, config.data.vocab_file) or folder)
            config = with_values(config, {"vocab_file": str(output.resolve() / kept.relative_to(folder))})
        _write_settings(folder / "settings.json", config)
    print(f"{len(entries)} tensors -> {output / 'iter_0000000'}")
    settings = output / "settings.json"
    script = f"pretrain_{config.model.family}.py"
    print(
        f"to continue training: python {script} --config {settings} --load {args.output} --data-path ... --run-dir ..."
    )


def _weights_in(entries: Sequence[Entry]) -> Callable[[str], Tensor]:
    """Return a function that computes a weight of `entries`, given its name in the model."""
    by_name = {entry.name.removeprefix(f"{WEIGHT}."): entry for entry in entries}
    return lambda name: by_name[name].make()


def _write_settings(path: Path, config: Config) -> None:
    """Write the model's settings, tokenizer and sequence lengths to `path`.

    Training continues from the imported checkpoint with `--config path`.
    """
    content = config.to_dict()
    data = {}
    for key in ("vocab_file", "tokenizer_type", "seq_length", "enc_seq_length", "span_convention", "num_sentinels"):
        value = content["data"][key]
        if value is not None:
            data[key] = value
    write_json(str(path), {"model": content["model"], "data": data})


def from_dense(args: argparse.Namespace) -> tuple[Config, str, list[Entry]]:
    """Return (settings, tokenizer fingerprint, tensors to write) of the checkpoint --load with --upcycle experts."""
    path = find_checkpoint(args.load)
    reader = CheckpointReader(path, args.ema)
    reader.verify()
    dense = plain_config(reader)
    check_model(reader, dense)
    config = upcycled_config(reader, args.upcycle, args.experts_per_token, args.moe_layer_frequency)
    entries = list(upcycled_entries(reader, config))
    if args.verify:
        compare_ours(config, _weights_in(entries), dense, lambda name: reader.whole(f"{WEIGHT}.{name}"), path)
    return config, reader.tokenizer or "", entries


def from_megatron(args: argparse.Namespace) -> tuple[Config, str, list[Entry]]:
    """Return (our settings, tokenizer fingerprint, tensors to write) for the model in the folder --from-megatron."""
    theirs = RankFiles(Path(args.from_megatron), args.checkpoint_version, args.num_layers)
    settings = settings_of(theirs, args.num_attention_heads)
    refuse_absurd_sizes(settings, map(theirs.shape, theirs.names()), Path(args.from_megatron))
    rows = settings["vocab_size"]
    fingerprint = ""
    print(
        f"the rows of query, key and value are assumed to be ordered as in checkpoint version {theirs.version:g} "
        f"({theirs.version_source})"
    )
    if args.vocab_file:
        tokenizer = load_tokenizer(args.vocab_file)
        if tokenizer.vocab_size > rows:
            raise ValueError(
                f"{args.vocab_file} has {tokenizer.vocab_size} tokens, more than the model's vocabulary of {rows}"
            )
        fingerprint = tokenizer.fingerprint
        # Embedding rows beyond the tokenizer's vocabulary are padding and are not imported.
        settings |= {"vocab_file": args.vocab_file, "vocab_size": tokenizer.vocab_size}
    config = with_values(Config(), settings)
    check_complete(theirs, config)
    return config, fingerprint, [_megatron_entry(theirs, name, config) for name in theirs.names()]


def _megatron_entry(theirs: RankFiles, name: str, config: Config) -> Entry:
    rows = config.model.vocab_size if "word_embeddings" in name else None
    shape = (rows or theirs.shape(name)[0], *theirs.shape(name)[1:])
    return Entry(
        f"{WEIGHT}.{name}", shape, torch.float32, lambda: theirs.read(name, config.model.num_attention_heads)[:rows]
    )


def main(args: argparse.Namespace) -> None:
    exports = args.load and args.upcycle is None
    _check(args, exports)
    if args.load:
        read_newest(args.load, lambda path: export(args, path) if exports else import_checkpoint(args))
    else:
        import_checkpoint(args)


def _check(args: argparse.Namespace, exports: bool) -> None:
    """Raise ValueError for flags that do not belong together, and set the defaults of the flags of an export."""
    if sum(map(bool, (args.load, args.from_hf, args.from_megatron))) != 1:
        raise ValueError(
            "give one of --load (a run to export or upcycle), --from-hf and --from-megatron (a folder to import)"
        )
    only_with = {
        "from_megatron": ("checkpoint_version", "num_layers", "num_attention_heads"),
        "load": ("upcycle", "ema"),
        "upcycle": ("experts_per_token", "moe_layer_frequency"),
    }
    given = {name for name, value in vars(args).items() if value is not None and value is not False}
    for needed, names in only_with.items():
        for name in names:
            if name in given and needed not in given:
                raise ValueError(f"{flag(name)} needs {flag(needed)}")
    for name, default in (("dtype", "fp32"), ("max_shard_size", 5.0)):
        if name not in given:
            setattr(args, name, default)
        elif not exports:
            raise ValueError(f"{flag(name)} is for an export: --load without --upcycle")
    if args.verify and args.from_megatron:
        raise ValueError(
            "--verify compares with transformers, which cannot read the --from-megatron folder; omit --verify"
        )
    if not 0 < args.max_shard_size < math.inf:
        raise ValueError(f"--max-shard-size {args.max_shard_size:g} must be a positive number of GB")


def build_parser() -> Parser:
    parser = Parser(__doc__ or "", EXAMPLES)
    add = parser.add_argument
    add("--load", type=any_path, help="run directory or checkpoint to export or upcycle")
    add("--from-hf", type=local_path, help="folder with config.json and safetensors to import as a checkpoint")
    add(
        "--from-megatron",
        type=local_path,
        help="folder with mp_rank_* or layer_* files of CPM-1, CPM-Pretrain, Megatron-LM (GPT) or DeepSpeed to import",
    )
    add(
        "--num-attention-heads",
        type=int,
        help="number of attention heads of the --from-megatron model, if its files do not record it; CPM-1-large: 32",
    )
    add(
        "--num-layers",
        type=int,
        help="number of layers of the --from-megatron model, if there is one file per layer and no file records it",
    )
    add(
        "--checkpoint-version",
        type=int,
        choices=range(4),
        help="order of query, key and value in the --from-megatron files, if they do not record it: "
        f"{ORDERS}; for CPM-Pretrain, 2 if the run was never resumed, else 0",
    )
    add(
        "--upcycle",
        type=int,
        help="number of experts of a new checkpoint, each a copy of the MLP of --load; without optimizer state",
    )
    add("--experts-per-token", type=int, help="number of experts of a token with --upcycle (default: 2)")
    add("--moe-layer-frequency", nargs="+", help="layers that get experts with --upcycle (default: 1, all layers)")
    add("--output", type=local_path, required=True, help="new folder for the exported model or the new checkpoint")
    add("--ema", action="store_true", help="use the moving average of the weights that a run with --ema-decay keeps")
    add(
        "--vocab-file",
        type=local_path,
        help="tokenizer file or folder (default: the tokenizer of the run or of the imported folder)",
    )
    add("--dtype", choices=DTYPES, help="dtype of the exported weights (default: fp32)")
    add("--max-shard-size", type=float, help="largest exported file in GB (default: 5)")
    add(
        "--verify",
        action="store_true",
        help="compare the logits of this project's model and of the Hugging Face model (needs transformers)",
    )
    return parser


def cli() -> None:
    run(main, build_parser())


if __name__ == "__main__":
    cli()
