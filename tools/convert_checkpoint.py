"""Checkpoints to and from Hugging Face: GPT2LMHeadModel and T5ForConditionalGeneration, tensor by tensor."""

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from _cli import Parser, run
from torch import Tensor

from megatron.arguments import with_values
from megatron.checkpointing import CheckpointReader, find_checkpoint, load_weights, plain_config
from megatron.checkpointing.files import WEIGHT
from megatron.checkpointing.save import write_checkpoint
from megatron.checkpointing.stream import Entry
from megatron.config import Config
from megatron.hf_folder import (
    DTYPES,
    FolderReader,
    entries_of,
    gpt2_config,
    publish,
    settings_of,
    t5_config,
    write_tensors,
)
from megatron.hf_names import gpt2_matches, t5_matches
from megatron.model import GPT2Model, T5Model
from megatron.tokenizer import SentinelTokenizer, Tokenizer, load_tokenizer

EXAMPLES = """\
  python tools/convert_checkpoint.py --load runs/gpt2 --output exported --verify
      then: transformers.AutoModelForCausalLM.from_pretrained("exported")
  python tools/convert_checkpoint.py --load runs/t5 --output exported --dtype bf16 --max-shard-size 2
  python tools/convert_checkpoint.py --from-hf downloaded/ --output runs/mine/checkpoints --vocab-file downloaded/tokenizer.json
      then: python pretrain_gpt2.py --load runs/mine/checkpoints ..."""


def export(args: argparse.Namespace) -> None:
    path = find_checkpoint(args.load)
    reader = CheckpointReader(path)
    reader.verify()
    config = plain_config(reader)
    tokenizer = _tokenizer(config, args.vocab_file)
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

    matches = (t5_matches if t5 else gpt2_matches)(config.model)
    entries = entries_of(matches, read, shape, args.dtype)

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

    publish(Path(args.output), fill)
    print(f"{len(entries)} tensors -> {args.output}")
    if args.verify:
        verify(path, Path(args.output))


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
    inner: Any = getattr(base, "_tokenizer", None)
    if inner is None:
        source = Path(vocab_file or str(config.data.vocab_file))
        (folder / source.name).write_bytes(source.read_bytes())
        print(
            f"note: {source.name} is of the kind {base.name}, which transformers does not read; use it with this project's tokenizers"
        )
        return
    from tokenizers import AddedToken
    from tokenizers import Tokenizer as Theirs

    theirs = Theirs.from_str(inner.to_str())
    names = {i: name for name, i in tokenizer.specials.items()}
    described: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": names[tokenizer.eod]}
    if isinstance(tokenizer, SentinelTokenizer):
        order = sorted((id_, f"<extra_id_{i}>") for i, id_ in enumerate(tokenizer.sentinels))
        added = ["<pad>", *(name for _, name in order)]
        theirs.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in added])
        described |= {"pad_token": "<pad>", "extra_special_tokens": added[1:]}
    theirs.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(described, indent=2), encoding="utf-8")


def bring_in(args: argparse.Namespace) -> None:
    source, output = Path(args.from_hf), Path(args.output)
    if not (source / "config.json").is_file():
        raise ValueError(f"{source}/config.json does not exist: {source} is not a model of Hugging Face")
    content = json.loads((source / "config.json").read_text(encoding="utf-8"))
    settings = settings_of(content, source / "config.json")
    fingerprint = ""
    if args.vocab_file:
        settings["vocab_file"], fingerprint = args.vocab_file, load_tokenizer(args.vocab_file).fingerprint
    config = with_values(Config(), settings)
    theirs = FolderReader(source)
    matches = list((t5_matches if config.is_t5 else gpt2_matches)(config.model))
    entries = [_entry(match, theirs) for match in matches]
    final = output / "iter_0000000"

    write_checkpoint(final, entries, config, fingerprint)
    print(f"{len(entries)} tensors -> {final}")
    if args.verify:
        verify(final, source)


def _entry(match: Any, theirs: FolderReader) -> Entry:
    def make() -> Tensor:
        tensor: Tensor = match.join([theirs.read(name) for name in match.theirs])
        return tensor

    # The shape follows from empty tensors; nothing is read for it.
    shape = match.join([torch.empty(*theirs.shape(name), device="meta") for name in match.theirs]).shape
    return Entry(f"{WEIGHT}.{match.ours}", tuple(shape), torch.float32, make)


@torch.no_grad()
def verify(ours: Path, theirs: Path) -> None:
    """The same random tokens through both; print the largest difference of a logit. Raises ValueError if it is large."""
    try:
        from transformers import AutoModelForCausalLM, T5ForConditionalGeneration
    except ImportError:
        raise ValueError("--verify needs the package transformers: pip install transformers") from None
    config = plain_config(CheckpointReader(ours))
    vocab_size = config.model.vocab_size or 0
    length = min(64, config.positions)
    tokens = torch.randint(vocab_size, (2, length), generator=torch.Generator().manual_seed(0))
    if config.is_t5:
        model: Any = T5Model(config, parallel_output=False)
        load_weights(ours, model)
        other: Any = T5ForConditionalGeneration.from_pretrained(theirs, dtype=torch.float32)
        found, expected = (
            model.eval()(tokens, tokens[:, :17]),
            other(input_ids=tokens, decoder_input_ids=tokens[:, :17]).logits,
        )
    else:
        model = GPT2Model(config, parallel_output=False)
        load_weights(ours, model)
        other = AutoModelForCausalLM.from_pretrained(theirs, dtype=torch.float32)
        found, expected = model.eval()(tokens), other(tokens).logits
    worst = float((found - expected).abs().max())
    scale = float(expected.abs().max())
    print(f"largest difference of a logit: {worst:.1e} (largest logit {scale:.1f})")
    if worst > 1e-4 * max(scale, 1.0) and _exact(theirs):
        raise ValueError(f"{ours} and {theirs} are not the same model")


def _exact(folder: Path) -> bool:
    content = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return bool(content.get("dtype", content.get("torch_dtype", "float32")) == "float32")


def main(args: argparse.Namespace) -> None:
    if bool(args.from_hf) == bool(args.load):
        raise ValueError("give either --load (a run to be exported) or --from-hf (a folder of Hugging Face)")
    if args.from_hf:
        bring_in(args)
    else:
        export(args)


def build_parser() -> Parser:
    parser = Parser(__doc__ or "", EXAMPLES)
    add = parser.add_argument
    add("--load", help="a run directory, or one of its checkpoints, to be exported")
    add("--from-hf", help="a folder with config.json and safetensors, to become a checkpoint of ours")
    add("--output", required=True, help="the new folder; of --from-hf the folder of checkpoints")
    add("--vocab-file", help="the tokenizer (default: the run's)")
    add("--dtype", choices=DTYPES, default="fp32", help="of the exported weights (default: fp32)")
    add("--max-shard-size", type=float, default=5.0, help="largest file, in GB (default: 5)")
    add(
        "--verify", action="store_true", help="run the same tokens through both models and compare (needs transformers)"
    )
    return parser


if __name__ == "__main__":
    run(main, build_parser())
