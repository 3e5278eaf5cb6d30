"""Continue texts with a trained GPT-2, or fill the gaps of texts with a trained T5. Loads a checkpoint of any layout."""

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from _cli import Parser, run

from megatron.checkpointing import CheckpointReader, find_checkpoint, load_weights, plain_config
from megatron.config import Config
from megatron.generation import GPT2Stepper, Sampling, Stages, Stepper, T5Stepper, beam_search, sample
from megatron.hf_folder import Folder, is_hf_folder
from megatron.initialize import initialize_megatron
from megatron.model import GPT2Model, T5Model
from megatron.model.gpt2 import gpt2_layers, vocab_size_of
from megatron.model.t5 import t5_layers
from megatron.runtime import is_rank_0, leave
from megatron.tokenizer import SentinelTokenizer, Tokenizer, load_tokenizer

EXAMPLES = """\
  python tools/generate.py --load runs/gpt2 --prompt "春天的早晨" --stream
  python tools/generate.py --load runs/gpt2 --prompt "Once upon" --num-samples 3 --temperature 0.8 --top-p 0.9
  python tools/generate.py --load runs/gpt2 --interactive
  python tools/generate.py --load runs/gpt2 --input prompts.txt --json > texts.jsonl
  python tools/generate.py --load runs/t5 --prompt "春天来了，<extra_id_0>都开了。" --num-beams 4
  python tools/launch.py --standalone --nproc-per-node 4 tools/generate.py --load runs/gpt2 \\
      --model-parallel-size 2 --pipe-parallel-size 2 --prompt "春天" """


@dataclass
class Writer:
    """A model ready to write, and its tokenizer."""

    model: GPT2Model | T5Model
    tokenizer: Tokenizer
    config: Config
    stages: Stages | None

    def start(self, prompt: str) -> tuple[Stepper, int]:
        """The model having read the prompt, and the token that ends what it writes."""
        tokenizer, model = self.tokenizer, self.model
        source = tokenizer.encode(prompt)
        if isinstance(model, GPT2Model):
            start = source or [tokenizer.eod]
            return GPT2Stepper(model, start, self.config.positions, stages=self.stages), tokenizer.eod
        assert isinstance(tokenizer, SentinelTokenizer)
        if tokenizer.convention == "t5":
            return T5Stepper(model, [*source, tokenizer.eod], tokenizer.pad, stages=self.stages), tokenizer.eod
        gaps = sum(token in tokenizer.sentinels for token in source)
        if gaps >= tokenizer.count:
            raise ValueError(
                f"{gaps} gaps in the prompt: the model has {tokenizer.count} sentinels, one of them to close with"
            )
        return T5Stepper(model, source, tokenizer.sentinels[0], stages=self.stages), tokenizer.sentinels[gaps]

    def write(self, prompt: str, args: argparse.Namespace, heard: Callable[[list[int]], None] | None) -> list[str]:
        """The prompt with each of its continuations."""
        stepper, end = self.start(prompt)
        longest = args.max_new_tokens
        if self.config.is_t5 and self.config.model.position_embedding == "learned":
            longest = min(longest, self.config.positions)
        if args.num_beams:
            found = [ids for _, ids in beam_search(stepper, args.num_beams, longest, end)][: args.num_samples]
        else:
            sampling = Sampling(args.temperature, args.top_k, args.top_p)
            found = sample(stepper, args.num_samples, longest, end, sampling, args.seed, heard)
        kept = [ids[:-1] if ids[-1:] == [end] else ids for ids in found]
        tokenizer = self.tokenizer
        if isinstance(tokenizer, SentinelTokenizer):
            return [fill(prompt, tokenizer, ids) for ids in kept]
        return [prompt + tokenizer.decode(ids) for ids in kept]


def fill(prompt: str, tokenizer: SentinelTokenizer, ids: list[int]) -> str:
    """The prompt with what a T5 wrote in place of its sentinels; a gap that it left out stays."""
    if tokenizer.convention == "cpm":
        ids = [tokenizer.sentinels[0], *ids]
    spans: dict[int, list[int]] = {}
    last = None
    for token in ids:
        if token in tokenizer.sentinels:
            last = token
            spans.setdefault(token, [])
        elif last is not None:
            spans[last].append(token)
    source = tokenizer.encode(prompt)
    return tokenizer.decode([t for token in source for t in (spans.get(token) or [token])])


def load(args: argparse.Namespace) -> Writer:
    sizes = args.model_parallel_size, args.pipe_parallel_size
    theirs = Folder(Path(args.load), *sizes) if is_hf_folder(Path(args.load)) else None
    if theirs:
        path, config = None, theirs.config
    else:
        path = find_checkpoint(args.load)
        config = plain_config(CheckpointReader(path), *sizes)
    vocab_file = args.vocab_file or (str(theirs.path) if theirs else config.data.vocab_file)
    if vocab_file is None:
        raise ValueError("no tokenizer: give --vocab-file")
    tokenizer = load_tokenizer(vocab_file, "auto" if theirs else config.data.tokenizer_type)
    if config.is_t5 and theirs:
        raise ValueError(
            f"{theirs.path} is a T5: make it a checkpoint first, with tools/convert_checkpoint.py --from-hf"
        )
    if config.is_t5:
        tokenizer = SentinelTokenizer(tokenizer, config.data.num_sentinels, config.data.span_convention)
    if args.model_parallel_size > 1 or args.pipe_parallel_size > 1:
        initialize_megatron(config)
    layers = (t5_layers if config.is_t5 else gpt2_layers)(config, vocab_size_of(config))
    stages = Stages(layers) if args.pipe_parallel_size > 1 else None
    own = stages.own if stages else None
    model = (T5Model if config.is_t5 else GPT2Model)(config, parallel_output=False, own=own).eval()
    if path:
        load_weights(path, model).check_tokenizer(tokenizer.fingerprint)
    elif theirs:
        theirs.load(model)
    return Writer(model, tokenizer, config, stages)


def show_as_it_comes(tokenizer: Tokenizer) -> Callable[[list[int]], None]:
    """Prints the text of one continuation token by token, a character once all of its bytes are there."""
    ids: list[int] = []
    shown = 0

    def heard(tokens: list[int]) -> None:
        nonlocal shown
        ids.extend(tokens)
        text = tokenizer.decode([token for token in ids if token != tokenizer.eod])
        whole = text.rstrip("\ufffd")
        print(whole[shown:], end="", flush=True)
        shown = len(whole)

    return heard


def prompts(args: argparse.Namespace) -> Iterator[str]:
    """One after another, the same on all ranks."""
    if args.input:
        with open(args.input, encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                yield _prompt_of(line, f"{args.input}, line {number}")
    elif args.interactive:
        while True:
            asked: list[Any] = [None]
            if is_rank_0():
                print("> ", end="", flush=True, file=sys.stderr)
                asked[0] = sys.stdin.readline()
            if dist.is_initialized() and dist.get_world_size() > 1:
                dist.broadcast_object_list(asked)
            if not asked[0]:
                return
            yield asked[0].rstrip("\n")
    else:
        yield args.prompt


def _prompt_of(line: str, where: str) -> str:
    """A line of text, or of JSON with a "prompt" or "text"."""
    if not line.startswith("{"):
        return line.rstrip("\n")
    try:
        content = json.loads(line)
        return str(content["prompt"] if "prompt" in content else content["text"])
    except (ValueError, KeyError):
        raise ValueError(f'{where} is not a JSON object with a "prompt"') from None


def main(args: argparse.Namespace) -> None:
    if sum(map(bool, (args.prompt, args.input, args.interactive))) > 1:
        raise ValueError("give one of --prompt, --input and --interactive")
    writer = load(args)
    stream = args.stream or (args.interactive and not (args.json or args.num_beams or writer.config.is_t5))
    if stream and (writer.config.is_t5 or args.num_beams or args.json or args.num_samples > 1):
        raise ValueError("--stream shows one text of a GPT-2 as it is written: not --num-beams, --json, --num-samples")
    for prompt in prompts(args):
        heard = show_as_it_comes(writer.tokenizer) if stream and is_rank_0() else None
        if heard:
            print(prompt, end="", flush=True)
        texts = writer.write(prompt, args, heard)
        for text in texts if is_rank_0() else []:
            whole = {"prompt": prompt, "text": text} if args.input else {"text": text}
            if heard:
                print(flush=True)
            else:
                print(json.dumps(whole, ensure_ascii=False) if args.json else text, flush=True)
    if dist.is_initialized():
        dist.barrier()
        leave(0)


def build_parser() -> Parser:
    parser = Parser(__doc__ or "", EXAMPLES)
    add = parser.add_argument
    add(
        "--load",
        required=True,
        help="a run directory, a folder of checkpoints, one checkpoint, or a GPT-2 of Hugging Face",
    )
    add("--prompt", default="", help="the text to continue; for T5 with <extra_id_0> or <s_0> for gaps")
    add("--input", help='a file with a prompt a line, or JSON lines with a "prompt"')
    add("--interactive", action="store_true", help="ask for prompts, one after another")
    add("--stream", action="store_true", help="show the text while it is written")
    add("--vocab-file", help="the tokenizer; by default the one that the model was trained with")
    add("--num-samples", type=int, default=1, help="continuations (default: 1)")
    add("--max-new-tokens", type=int, default=64, help="longest continuation (default: 64)")
    add("--temperature", type=float, default=0.8, help="0 takes the likeliest token (default: 0.8)")
    add("--top-k", type=int, default=0, help="draw from the k likeliest; 0 for all (default: 0)")
    add("--top-p", type=float, default=0.9, help="draw from the likeliest p of all (default: 0.9)")
    add("--num-beams", type=int, default=0, help="beam search of this width instead of drawing")
    add("--model-parallel-size", type=int, default=1, help="ranks that share every layer (default: 1)")
    add("--pipe-parallel-size", type=int, default=0, help="stages that the layers are cut into (default: none)")
    add("--seed", type=int, default=1234, help="seed of the draws (default: 1234)")
    add("--json", action="store_true", help="one JSON line per continuation")
    return parser


if __name__ == "__main__":
    run(main, build_parser())
