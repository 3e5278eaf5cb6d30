"""Checkpoints to and from Hugging Face (GPT2LMHeadModel, T5ForConditionalGeneration), and from CPM-1 and Megatron-LM."""

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from _cli import Parser, run
from torch import Tensor

from megatron.arguments import with_values
from megatron.checkpointing import CheckpointReader, find_checkpoint, plain_config
from megatron.checkpointing.files import WEIGHT
from megatron.checkpointing.save import write_checkpoint
from megatron.checkpointing.stream import Entry
from megatron.config import Config
from megatron.hf_config import FAMILIES, check_special_tokens, gpt2_config, t5_config
from megatron.hf_folder import DTYPES, Folder, FolderReader, entries_of, publish, write_tensors
from megatron.hf_names import Match, gpt2_matches, t5_matches
from megatron.hf_tokenizer import as_theirs
from megatron.model import GPT2Model, T5Model, global_parameters
from megatron.rank_files import ORDERS, RankFiles
from megatron.tokenizer import SentinelTokenizer, Tokenizer, load_tokenizer
from megatron.tokenizer.load import folder_has_one, refuse_other_ids
from megatron.tokenizer.sentinels import own_sentinels

EXAMPLES = """\
  python tools/convert_checkpoint.py --load runs/gpt2 --output exported --verify
      then: transformers.AutoModelForCausalLM.from_pretrained("exported")
  python tools/convert_checkpoint.py --load runs/t5 --output exported --dtype bf16 --max-shard-size 2
  python tools/convert_checkpoint.py --from-hf downloaded/ --output runs/mine/checkpoints --vocab-file downloaded/tokenizer.json
      then: python pretrain_gpt2.py --load runs/mine/checkpoints ...
  python tools/convert_checkpoint.py --from-megatron CPM-large --num-attention-heads 32 --output runs/cpm/checkpoints --vocab-file bpe_3w_new/"""


def export(args: argparse.Namespace) -> None:
    path = find_checkpoint(args.load)
    reader = CheckpointReader(path)
    reader.verify()
    config = plain_config(reader)
    tokenizer = _tokenizer(config, args.vocab_file)
    reader.check_tokenizer(tokenizer.fingerprint)
    t5 = config.is_t5
    if t5:
        assert isinstance(tokenizer, SentinelTokenizer)
        described = t5_config(config.model, tokenizer.pad, tokenizer.eod, args.dtype)
    else:
        described = gpt2_config(config.model, reader.positions, tokenizer.eod, args.dtype)

    def shape(name: str) -> list[int]:
        found: list[int] = reader.tensors[f"{WEIGHT}.{name}"]["shape"]
        return found

    def read(name: str) -> Tensor:
        entry = reader.tensors[f"{WEIGHT}.{name}"]
        return reader.read(f"{WEIGHT}.{name}", entry["dim"], 0, entry["shape"][entry["dim"]])

    by_name = {match.ours: match for match in (t5_matches if t5 else gpt2_matches)(config.model)}
    entries = entries_of(by_name.values(), read, shape, args.dtype)

    def fill(folder: Path) -> None:
        write_tensors(folder, entries, int(args.max_shard_size * 1e9))
        (folder / "config.json").write_text(json.dumps(described, indent=2), encoding="utf-8")
        ends = {
            key: described[key]
            for key in ("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id")
            if key in described
        }
        (folder / "generation_config.json").write_text(json.dumps(ends, indent=2), encoding="utf-8")
        _write_tokenizer(folder, config, tokenizer, args.vocab_file)
        if args.verify:  # before the folder gets its name
            compare(config, lambda name: _rounded(by_name[name], read(name), DTYPES[args.dtype]), folder)

    publish(Path(args.output), fill)
    print(f"{len(entries)} tensors -> {args.output}")


def _rounded(match: Match, value: Tensor, dtype: torch.dtype) -> Tensor:
    """One of our weights with the numbers that it has in a file of `dtype`."""
    return match.join([part.to(dtype).float() for part in match.split(value)])


def _tokenizer(config: Config, vocab_file: str | None) -> Tokenizer:
    given = vocab_file or config.data.vocab_file
    if given is None or not Path(given).exists():
        raise ValueError(f"the tokenizer {given} is not there: give --vocab-file")
    tokenizer = load_tokenizer(given, config.data.tokenizer_type)
    if config.is_t5:
        return SentinelTokenizer(tokenizer, config.data.num_sentinels, config.data.span_convention)
    return tokenizer


def _write_tokenizer(folder: Path, config: Config, tokenizer: Tokenizer, vocab_file: str | None) -> None:
    """A tokenizer.json where ours is one of theirs; else our own file, as it is."""
    base = tokenizer.base if isinstance(tokenizer, SentinelTokenizer) else tokenizer
    theirs = as_theirs(base)
    if theirs is None:
        source = Path(vocab_file or str(config.data.vocab_file))
        (folder / source.name).write_bytes(source.read_bytes())
        print(
            f"note: {source.name} is of the kind {base.name}, which transformers does not read; use it with this project's tokenizers"
        )
        return
    from tokenizers import AddedToken

    names = {i: name for name, i in tokenizer.specials.items()}
    described: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "eos_token": names[tokenizer.eod],
        "pad_token": names[tokenizer.eod],
    }
    if config.model.position_embedding == "learned":
        described["model_max_length"] = config.positions
    if isinstance(tokenizer, SentinelTokenizer):
        order = sorted((id_, f"<extra_id_{i}>") for i, id_ in enumerate(tokenizer.sentinels))
        added = ["<pad>", *(name for _, name in order)]
        theirs.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in added])
        described |= {"pad_token": "<pad>", "extra_special_tokens": added[1:]}
    theirs.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(described, indent=2), encoding="utf-8")


def bring_in(args: argparse.Namespace) -> None:
    """A checkpoint of ours from a folder of another format, before any training."""
    config, fingerprint, entries = from_megatron(args) if args.from_megatron else from_hf(args)
    if args.verify and args.from_hf:
        by_name = {entry.name.removeprefix(f"{WEIGHT}."): entry for entry in entries}
        compare(config, lambda name: by_name[name].make(), Path(args.from_hf))
    final = Path(args.output) / "iter_0000000"
    write_checkpoint(final, entries, config, fingerprint)
    print(f"{len(entries)} tensors -> {final}")
    settings = Path(args.output) / "settings.json"
    _write_settings(settings, config)
    script = "pretrain_t5.py" if config.is_t5 else "pretrain_gpt2.py"
    print(f"to train on: python {script} --config {settings} --load {args.output} --data-path ... --run-dir ...")


def _write_settings(path: Path, config: Config) -> None:
    """What --config needs to continue this model: what it is, and the tokenizer and lengths that it was trained with."""
    data = config.to_dict()["data"]
    kept = ("vocab_file", "tokenizer_type", "seq_length", "enc_seq_length", "span_convention", "num_sentinels")
    content = {"model": config.to_dict()["model"], "data": {key: data[key] for key in kept if data[key] is not None}}
    temporary = path.with_name(f"{path.name}.tmp")
    temporary.write_text(json.dumps(content, indent=2), encoding="utf-8")
    temporary.replace(path)


def from_hf(args: argparse.Namespace) -> tuple[Config, str, list[Entry]]:
    theirs = Folder(Path(args.from_hf))
    for note in theirs.notes:
        print(f"note: {note}")
    settings, fingerprint = _their_tokenizer(theirs, args.vocab_file)
    return (
        with_values(theirs.config, settings),
        fingerprint,
        [_entry(match, theirs.tensors) for match in theirs.matches],
    )


def _their_tokenizer(theirs: Folder, vocab_file: str | None) -> tuple[dict[str, Any], str]:
    """Settings and fingerprint of the tokenizer of a model of theirs: what is in its folder, or --vocab-file."""
    there = folder_has_one(theirs.path)
    path = vocab_file or (str(theirs.path) if there else None)
    if path is None:
        print(f"note: there is no tokenizer in {theirs.path}; training and writing will need --vocab-file")
        return {}, ""
    found = load_tokenizer(path)
    if vocab_file and there:
        refuse_other_ids(found, load_tokenizer(str(theirs.path)), f"{vocab_file} is not the tokenizer of {theirs.path}")
    settings: dict[str, Any] = {"vocab_file": path}
    tokenizer = found
    if theirs.config.is_t5:
        # Their T5Tokenizer adds 100 behind a vocabulary without them; a model with fewer rows has fewer.
        free = theirs.values["vocab_size"] - found.vocab_size - ("<pad>" not in found.specials)
        settings["num_sentinels"] = len(own_sentinels(found, "t5")) or max(min(100, free), 1)
        tokenizer = SentinelTokenizer(found, settings["num_sentinels"], "t5")
    check_special_tokens(theirs.values, theirs.given, tokenizer, theirs.path / "config.json")
    if tokenizer.vocab_size > theirs.values["vocab_size"]:
        raise ValueError(f"{path} has {tokenizer.vocab_size} tokens, the model {theirs.values['vocab_size']}")
    return settings, found.fingerprint


def from_megatron(args: argparse.Namespace) -> tuple[Config, str, list[Entry]]:
    theirs = RankFiles(Path(args.from_megatron), args.checkpoint_version)
    heads = args.num_attention_heads or theirs.settings.get("num_attention_heads")
    if heads is None:
        raise ValueError(f"{theirs.folder} does not say how many heads the model has: give --num-attention-heads")
    if int(heads) < 1 or int(heads) % theirs.ranks:
        raise ValueError(f"{heads} heads do not go into {theirs.ranks} model-parallel ranks: see --num-attention-heads")
    print(f"query, key and value: in the order of checkpoint version {theirs.version:g}, {theirs.told_by}")
    rows, hidden = theirs.shape("embedding.word_embeddings.weight")
    positions = theirs.shape("position_embedding.weight")[0]
    settings = {
        "num_layers": theirs.layers,
        "hidden_size": hidden,
        "num_attention_heads": int(heads),
        "ff_hidden_size": theirs.shape("layers.0.mlp.dense_h_to_4h.weight")[0],
        "max_position_embeddings": positions,
        "seq_length": positions,
        "vocab_size": rows,
        "layernorm_epsilon": float(theirs.settings.get("layernorm_epsilon", 1e-5)),
    }
    fingerprint = ""
    if args.vocab_file:
        tokenizer = load_tokenizer(args.vocab_file)
        if tokenizer.vocab_size > rows:
            raise ValueError(f"{args.vocab_file} has {tokenizer.vocab_size} tokens, the model {rows}")
        fingerprint = tokenizer.fingerprint
        settings |= {"vocab_file": args.vocab_file, "vocab_size": tokenizer.vocab_size}  # the rest is padding
    config = with_values(Config(), settings)
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
        return tensor

    # The shape follows from empty tensors; nothing is read for it.
    shape = match.join([torch.empty(*theirs.shape(name), device="meta") for name in match.theirs]).shape
    return Entry(f"{WEIGHT}.{match.ours}", tuple(shape), torch.float32, make)


@torch.no_grad()
def compare(config: Config, weight: Callable[[str], Tensor], folder: Path) -> None:
    """The same random tokens through a model of ours, of these weights (by global name), and the class that `folder` names.

    Prints the largest difference of a logit. Raises ValueError if it is not within 1e-5 of what logits differ by.
    """
    try:
        import transformers
    except ImportError:
        raise ValueError("--verify needs the package transformers: pip install transformers") from None
    kind = json.loads((folder / "config.json").read_text(encoding="utf-8"))["model_type"]
    other: Any = getattr(transformers, FAMILIES[kind].class_name).from_pretrained(folder, dtype=torch.float32).eval()
    model: Any = (T5Model if config.is_t5 else GPT2Model)(config, parallel_output=False).eval()
    for name, parameter in global_parameters(model):
        parameter.zero_().narrow(0, 0, len(whole := weight(name))).copy_(whole)
    shape = 2, min(64, config.positions)
    tokens = torch.randint(config.model.vocab_size or 0, shape, generator=torch.Generator().manual_seed(0))
    if config.is_t5:
        wanted = tokens[:, :17].contiguous()
        found, expected = model(tokens, wanted), other(input_ids=tokens, decoder_input_ids=wanted).logits
    else:
        found, expected = model(tokens), other(tokens).logits
    worst, spread = float((found - expected).abs().max()), float(expected.max() - expected.min())
    print(f"largest difference of a logit: {worst:.1e} (logits reach over {spread:.1e})")
    if not worst <= 1e-5 * spread:
        raise ValueError(
            f"{folder} is not the same model: its logits differ by {worst:.1e}, where they reach over {spread:.1e}"
        )


def main(args: argparse.Namespace) -> None:
    if sum(map(bool, (args.load, args.from_hf, args.from_megatron))) != 1:
        raise ValueError(
            "give one of --load (a run to be exported), --from-hf and --from-megatron (a folder of theirs)"
        )
    if args.checkpoint_version is not None and not args.from_megatron:
        raise ValueError("--checkpoint-version belongs to --from-megatron")
    if args.load:
        export(args)
    else:
        bring_in(args)


def build_parser() -> Parser:
    parser = Parser(__doc__ or "", EXAMPLES)
    add = parser.add_argument
    add("--load", help="a run directory, or one of its checkpoints, to be exported")
    add("--from-hf", help="a folder with config.json and safetensors, to become a checkpoint of ours")
    add(
        "--from-megatron",
        help="a folder of CPM-1, CPM-Pretrain, Megatron-LM (GPT) or DeepSpeed with mp_rank_* or layer_* files, likewise",
    )
    add("--num-attention-heads", type=int, help="of --from-megatron, where its files do not tell: 32 for CPM-1-large")
    add(
        "--checkpoint-version",
        type=int,
        choices=range(4),
        help="of --from-megatron, where its files do not tell: how queries, keys and values are ordered; "
        f"{ORDERS}; of CPM-Pretrain: 2 for a run that was never resumed, 0 after a resume",
    )
    add("--output", required=True, help="the new folder; of --from-* the folder of checkpoints")
    add("--vocab-file", help="the tokenizer (default: the run's)")
    add("--dtype", choices=DTYPES, default="fp32", help="of the exported weights (default: fp32)")
    add("--max-shard-size", type=float, default=5.0, help="largest file, in GB (default: 5)")
    add(
        "--verify", action="store_true", help="run the same tokens through both models and compare (needs transformers)"
    )
    return parser


if __name__ == "__main__":
    run(main, build_parser())
