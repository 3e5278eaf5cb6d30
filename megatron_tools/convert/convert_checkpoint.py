"""Convert checkpoints to and from Hugging Face, from CPM-1 and Megatron-LM, and from dense models to mixtures.

The models of Hugging Face are GPT-2, T5, Llama, Qwen, Mistral, Mixtral and the mixtures of Qwen.
"""

import argparse
import json
import math
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
from megatron.tokenizer import SentinelTokenizer, Tokenizer, load_tokenizer
from megatron.tokenizer.base import read_object
from megatron.tokenizer.beside import GENERATION, ROLES, generation_beside
from megatron.tokenizer.load import file_of, folder_has_one, refuse_other_ids
from megatron.tokenizer.sentinels import own_sentinels
from megatron_tools.shapes import check_model

from .export_roles import bare_roles, generation_settings, model_ids
from .export_tokenizer import Chat, chat_of, write_tokenizer
from .hf_compare import compare, compare_ids, compare_imported_ids, compare_ours
from .hf_config import check_tokenizer, gpt2_config, notes_on_scale, t5_config
from .hf_experts import left_out
from .hf_folder import DTYPES, Folder, FolderReader, entries_of, write_tensors
from .hf_llama import llama_config
from .hf_names import Match, matches_of
from .megatron_lm import ORDERS, RankFiles
from .megatron_settings import check_complete, settings_of
from .upcycle import read_whole, router_buffers, upcycled_config, upcycled_entries

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
    for note in left_out(config.model) if config.model.family == "llama" else notes_on_scale(config.model):
        print(f"note: {note}")

    def shape(name: str) -> list[int]:
        return list(reader.tensors[f"{WEIGHT}.{name}"]["shape"])

    def read(name: str) -> Tensor:
        return read_whole(reader, f"{WEIGHT}.{name}")

    by_name = {match.ours: match for match in matches_of(config.model)}
    entries = entries_of(by_name.values(), read, shape, args.dtype)

    with whole_folder(Path(args.output)) as folder:
        write_tensors(folder, entries, int(args.max_shard_size * 1e9))
        (folder / "config.json").write_text(json.dumps(described, indent=2), encoding="utf-8")
        (folder / GENERATION).write_text(json.dumps(generation, indent=2), encoding="utf-8")
        notes = ["the folder contains no tokenizer, because the model came without one; --vocab-file adds one"]
        if tokenizer:
            notes = write_tokenizer(folder, config, tokenizer, vocab_file, chat, described["model_type"])
        for note in notes:
            print(f"note: {note}")
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
    start, end = (tokenizer.before[0], tokenizer.eod) if tokenizer else (0, 1)
    if config.is_t5:
        pad = tokenizer.pad if isinstance(tokenizer, SentinelTokenizer) else 0
        described = t5_config(config.model, pad, end, dtype)
    elif config.model.family == "llama":
        described = llama_config(config.model, reader.positions, start, end, dtype)
    else:
        described = gpt2_config(config.model, reader.positions, end, dtype)
    if tokenizer is None:
        ids, generation = bare_roles(kept_beside(reader.path.parent), described if config.is_t5 else {})
        return {key: value for key, value in described.items() if key not in ROLES} | ids, generation
    base = tokenizer.base if isinstance(tokenizer, SentinelTokenizer) else tokenizer
    ids = model_ids(described, base, file_of(vocab_file), config.is_t5)
    return described | ids, generation_settings(ids, tokenizer, file_of(vocab_file), chat.end)


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
    reader.check_tokenizer(tokenizer.fingerprint)
    if tokenizer.vocab_size > (rows := config.model.vocab_size or 0):
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
    read = from_dense if args.upcycle is not None else from_megatron if args.from_megatron else from_hf
    config, fingerprint, entries = read(args)
    if args.verify and args.from_hf:
        if config.data.vocab_file:
            print(f"note: {compare_imported_ids(load_tokenizer(config.data.vocab_file), Path(args.from_hf))}")
        by_name = {entry.name.removeprefix(f"{WEIGHT}."): entry for entry in entries}
        compare(config, lambda name: by_name[name].make(), Path(args.from_hf))
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


def _write_settings(path: Path, config: Config) -> None:
    """Write the model's settings, tokenizer and sequence lengths to `path`.

    Training continues from the imported checkpoint with `--config path`.
    """
    data = config.to_dict()["data"]
    kept = ("vocab_file", "tokenizer_type", "seq_length", "enc_seq_length", "span_convention", "num_sentinels")
    content = {"model": config.to_dict()["model"], "data": {key: data[key] for key in kept if data[key] is not None}}
    write_json(str(path), content)


def from_hf(args: argparse.Namespace) -> tuple[Config, str, list[Entry]]:
    """Return (our settings, tokenizer fingerprint, tensors to write) for the model in the folder --from-hf."""
    theirs = Folder(Path(args.from_hf))
    for note in theirs.notes:
        print(f"note: {note}")
    generation_beside(theirs.path / "config.json")  # raises an error now if the file is malformed
    settings, fingerprint = _their_tokenizer(theirs, args.vocab_file)
    config = with_values(theirs.config, settings)
    entries = [_entry(match, theirs.tensors) for match in theirs.matches]
    routers = [match.ours.removesuffix(".weight") for match in theirs.matches if match.ours.endswith(".router.weight")]
    for name in routers:
        entries += router_buffers(name, config.model.num_experts or 0)
    return config, fingerprint, entries


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
        by_name = {entry.name.removeprefix(f"{WEIGHT}."): entry for entry in entries}
        weights = lambda name: by_name[name].make(), lambda name: read_whole(reader, f"{WEIGHT}.{name}")  # noqa: E731
        compare_ours(config, weights[0], dense, weights[1], path)
    return config, reader.tokenizer or "", entries


def _their_tokenizer(theirs: Folder, vocab_file: str | None) -> tuple[dict[str, Any], str]:
    """Return (our tokenizer settings, fingerprint) for --vocab-file, else for the tokenizer in the model's folder."""
    there = folder_has_one(theirs.path)
    path = vocab_file or (str(theirs.path) if there else None)
    if path is None:
        usual = theirs.values["pad_token_id"] in (0, None) and theirs.values["eos_token_id"] in (1, [1], None)
        if theirs.config.is_t5 and not (usual and theirs.values["decoder_start_token_id"] in (0, None)):
            raise ValueError(
                f"{theirs.path}: config.json has unusual ids for the padding, start or end token, but the folder "
                "contains no tokenizer; give --vocab-file"
            )
        print(f"note: there is no tokenizer in {theirs.path}; training and generation need --vocab-file")
        return {}, ""
    found = load_tokenizer(path)
    if vocab_file and there:
        refuse_other_ids(found, load_tokenizer(str(theirs.path)), f"{vocab_file} is not the tokenizer of {theirs.path}")
    settings: dict[str, Any] = {"vocab_file": path}
    tokenizer = found
    if theirs.config.is_t5:
        free = theirs.values["vocab_size"] - found.vocab_size - ("<pad>" not in found.specials)
        settings["num_sentinels"] = len(own_sentinels(found, "t5")) or _extra_ids(file_of(path), free)
        tokenizer = SentinelTokenizer(found, settings["num_sentinels"], "t5")
    for note in check_tokenizer(theirs.values, theirs.given, tokenizer, theirs.path / "config.json"):
        print(f"note: {note}")
    return settings, found.fingerprint


def _extra_ids(vocab_file: Path, free: int) -> int:
    """Return how many sentinels T5Tokenizer adds to a vocabulary that contains no sentinels.

    The key `extra_ids` in the tokenizer_config.json beside `vocab_file` gives this number. Without the key, the
    default is 100, but at most `free` and at least 1.
    free: number of rows of the model's embedding that belong to no token of the vocabulary.
    """
    nearby = vocab_file.with_name("tokenizer_config.json")
    given = read_object(nearby).get("extra_ids") if nearby.is_file() else None
    if given is None:
        if 0 < free < 100:
            print(
                f"note: {vocab_file} does not give the number of sentinels; assuming {free}, one for each unused "
                "embedding row"
            )
        return min(100, max(free, 1))
    if type(given) is not int or given < 1:
        raise ValueError(f"{nearby}: extra_ids is {given!r}, but a T5 needs at least one sentinel")
    return given


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


def _entry(match: Any, theirs: FolderReader) -> Entry:
    def make() -> Tensor:
        tensor: Tensor = match.join([theirs.read(name) for name in match.theirs])
        if not tensor.isfinite().all():
            print(f"note: NaN or Inf in {' and '.join(match.theirs)}")
        return tensor

    # Joining empty tensors gives the shape without reading any weights.
    shape = match.join([torch.empty(*theirs.shape(name), device="meta") for name in match.theirs]).shape
    return Entry(f"{WEIGHT}.{match.ours}", tuple(shape), torch.float32, make)


def main(args: argparse.Namespace) -> None:
    if sum(map(bool, (args.load, args.from_hf, args.from_megatron))) != 1:
        raise ValueError(
            "give one of --load (a run to export or upcycle), --from-hf and --from-megatron (a folder to import)"
        )
    only_with = {
        "from_megatron": ("checkpoint_version", "num_layers", "num_attention_heads"),
        "load": ("upcycle", "ema"),
        "upcycle": ("experts_per_token", "moe_layer_frequency"),
    }
    is_given = {name: value is not None and value is not False for name, value in vars(args).items()}
    for needed, names in only_with.items():
        for name in names:
            if is_given[name] and not is_given[needed]:
                raise ValueError(f"{flag(name)} needs {flag(needed)}")
    exports = args.load and args.upcycle is None
    for name, default in (("dtype", "fp32"), ("max_shard_size", 5.0)):
        if getattr(args, name) is None:
            setattr(args, name, default)
        elif not exports:
            raise ValueError(f"{flag(name)} is for an export: --load without --upcycle")
    if args.verify and args.from_megatron:
        raise ValueError(
            "--verify compares with transformers, which cannot read the --from-megatron folder; omit --verify"
        )
    if not 0 < args.max_shard_size < math.inf:
        raise ValueError(f"--max-shard-size {args.max_shard_size:g} must be a positive number of GB")
    if args.load:
        read_newest(args.load, lambda path: export(args, path) if exports else import_checkpoint(args))
    else:
        import_checkpoint(args)


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
