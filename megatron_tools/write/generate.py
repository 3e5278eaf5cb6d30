"""Continue texts with a trained GPT-2 or Llama, or fill the masked spans of texts with a trained T5.

Loads a checkpoint of any layout, and uses the GPU if there is one.
"""

import argparse
import itertools
import json
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from data_utils.cli import Parser, run
from megatron import mpu
from megatron.checkpointing import find_checkpoint, load_weights
from megatron.config import Config
from megatron.model.gpt2 import GPT2Model, gpt2_layers, vocab_size_of
from megatron.model.t5 import T5Model, t5_layers
from megatron.ranks import device as device_module
from megatron.ranks.errors import exit_now
from megatron.ranks.initialize import initialize_megatron
from megatron.ranks.rank_0 import is_rank_0
from megatron.tokenizer import SentinelTokenizer, Tokenizer, load_tokenizer
from megatron.tokenizer.chat import Message
from megatron_tools.convert.shapes import described

from ..convert.hf_config import check_tokenizer
from ..convert.hf_folder import Folder, is_hf_folder
from ..report.unigram import counted
from .generation import GPT2Stepper, Sampling, Stages, Stepper, T5Stepper, beam_searches, sample
from .prompts import add_flags, as_json, prompts, reader_of, with_answer
from .prompts import check as check_prompts
from .questions import Asked, Conversation, Gap, Question, Reader, answer

EXAMPLES = """\
  python tools/generate.py --load runs/gpt2 --prompt "春天的早晨" --stream
  python tools/generate.py --load runs/gpt2 --prompt "Once upon" --num-samples 3 --temperature 0.8 --top-p 0.9
  python tools/generate.py --load runs/gpt2 --interactive
  python tools/generate.py --load runs/gpt2 --input prompts.txt --batch-size 32 --json > texts.jsonl
  python tools/generate.py --load downloaded/ --prompt "Once upon"      (a folder of Hugging Face: Llama, Qwen, Mistral, GPT-2)
  python tools/generate.py --load runs/chat --chat --interactive        (trained with --objective sft, or a chat model of theirs)
  python tools/generate.py --load runs/code --prompt "def add(a, b):" --suffix "    return c"      (trained with --fim-rate)
  python tools/generate.py --load runs/t5 --prompt "春天来了，<extra_id_0>都开了。" --num-beams 4
  python tools/launch.py --standalone --nproc-per-node 4 tools/generate.py --load runs/gpt2 \\
      --model-parallel-size 2 --pipe-parallel-size 2 --prompt "春天" """


Heard = Callable[[list[int]], None]
WINDOW = 16  # batches read ahead to find prompts of equal length


@dataclass
class Writer:
    """A model with its tokenizer, ready to generate text."""

    model: GPT2Model | T5Model
    tokenizer: Tokenizer
    config: Config
    stages: Stages | None
    reader: Reader

    def question(self, asked: Asked) -> Question:
        """Return a prompt as tokens. Raises ValueError if fill-in-the-middle lacks special tokens."""
        if isinstance(asked, Gap) and self.reader.marks is None:
            raise ValueError("the model was not trained with --fim-rate: give --fim-tokens PREFIX MIDDLE SUFFIX")
        return self.reader.question(asked)

    def stepper(self, sources: list[list[int]]) -> Stepper:
        """Return the model with these prompts, of equal length."""
        if isinstance(self.model, GPT2Model):
            prefix = self.config.objective == "prefix-lm"
            return GPT2Stepper(self.model, sources, self.config.positions, stages=self.stages, prefix=prefix)
        assert isinstance(self.tokenizer, SentinelTokenizer)
        start = self.tokenizer.pad if self.tokenizer.convention == "t5" else self.tokenizer.sentinels[0]
        return T5Stepper(self.model, sources, start, stages=self.stages)

    def write(self, asked: Sequence[Question], args: argparse.Namespace, heard: Heard | None) -> list[list[str]]:
        """Return each prompt's continuations. The prompts have equal length and the same end token."""
        stepper, end, each = self.stepper([question.tokens for question in asked]), asked[0].end, args.num_samples
        longest = args.max_new_tokens
        if self.config.is_t5 and self.config.model.position_embedding == "learned":
            longest = min(longest, self.config.positions)
        if args.num_beams:
            searched = beam_searches(stepper, args.num_beams, longest, end)
            found = [[ids for _, ids in best[:each]] for best in searched]
        else:
            sampling = Sampling(args.temperature, args.top_k, args.top_p)
            rows = sample(stepper, each, longest, end, sampling, args.seed, heard)
            found = [rows[i : i + each] for i in range(0, len(rows), each)]
        return [[self.text(q, ids) for ids in own] for q, own in zip(asked, found, strict=True)]

    def favoured(self, question: Question, count: int) -> str:
        """Return the tokens that the model favours most over their frequency in the training text, as a line.

        They are next tokens, or the first tokens of a T5's first masked span. They are ranked by
        p log(p / share), their term of the KL divergence from the training text, or by p without that text.
        """
        stepper, tokenizer = self.stepper([question.tokens]), self.tokenizer
        logits = stepper.first(1)
        if isinstance(tokenizer, SentinelTokenizer) and tokenizer.convention == "t5" and not self.reader.goes_on:
            logits = stepper.next(torch.tensor([tokenizer.sentinels[0]], device=logits.device))
        p = logits[0].double().softmax(-1).cpu()[: tokenizer.vocab_size]
        p[[*tokenizer.specials.values(), *getattr(tokenizer, "sentinels", [])]] = 0  # special tokens are no text
        found = counted(list(self.config.data.data_path or []), self.config.data.split, logits.shape[-1])
        shares = None if found is None else torch.from_numpy(found[0][: len(p)] + 1) / (found[0].sum() + len(p))
        best = (p if shares is None else torch.special.xlogy(p, p / shares)).topk(count).indices.tolist()
        times = ["" if shares is None else f" ({p[i] / shares[i]:.1f} times its share)" for i in best]
        told = [f"{tokenizer.decode([i])!r} {p[i]:.1%}{more}" for i, more in zip(best, times, strict=True)]
        return "favoured: " + ", ".join(told)

    def text(self, question: Question, ids: list[int]) -> str:
        """Return the generated ids as text."""
        if isinstance(self.tokenizer, SentinelTokenizer):
            kept = ids[:-1] if ids[-1:] == [question.end] else ids
            if self.reader.goes_on:
                return question.before + answer(self.tokenizer, question, kept)
            return fill(str(question.prompt), self.tokenizer, kept)
        return question.before + answer(self.tokenizer, question, ids) + question.after


def batches(asked: Sequence[Question], size: int) -> Iterator[list[int]]:
    """Yield the indices of questions to answer in one batch: of equal length, with the same end token."""
    alike: dict[tuple[int, int], list[int]] = {}
    for i, question in enumerate(asked):
        alike.setdefault((len(question.tokens), question.end), []).append(i)
    for numbers in alike.values():
        yield from (numbers[i : i + size] for i in range(0, len(numbers), size))


def answers(
    writer: Writer, prompts: Iterable[Asked], args: argparse.Namespace, size: int
) -> Iterator[tuple[Asked, list[str]]]:
    """Yield each prompt with its texts, in the order of the prompts."""
    stream = iter(prompts)
    while asked := [writer.question(prompt) for prompt in itertools.islice(stream, size * WINDOW if size > 1 else 1)]:
        texts: list[list[str]] = [[] for _ in asked]
        for numbers in batches(asked, size):
            for i, found in zip(numbers, writer.write([asked[i] for i in numbers], args, None), strict=True):
                texts[i] = found
        yield from ((question.prompt, found) for question, found in zip(asked, texts, strict=True))


def fill(prompt: str, tokenizer: SentinelTokenizer, ids: list[int]) -> str:
    """Return the prompt with its sentinels replaced by the T5's output; sentinels without output stay."""
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
    """Load the model that the flags name; every rank must call it."""
    sizes = args.model_parallel_size, args.pipe_parallel_size
    theirs = Folder(Path(args.load), *sizes) if is_hf_folder(Path(args.load)) else None
    if theirs:
        path, config = None, theirs.config
    else:
        path = find_checkpoint(args.load)
        config = described(path, *sizes)
    vocab_file = args.vocab_file or (str(theirs.path) if theirs else config.data.vocab_file)
    if vocab_file is None:
        raise ValueError("no tokenizer: give --vocab-file")
    tokenizer = load_tokenizer(vocab_file, "auto" if theirs else config.data.tokenizer_type)
    if config.is_t5 and theirs:
        raise ValueError(
            f"{theirs.path} is a T5: make it a checkpoint first, with tools/convert_checkpoint.py --from-hf"
        )
    if theirs:
        for note in check_tokenizer(theirs.values, theirs.given, tokenizer, theirs.path / "config.json"):
            print(f"note: {note}", file=sys.stderr)
    if config.is_t5:
        tokenizer = SentinelTokenizer(tokenizer, config.data.num_sentinels, config.data.span_convention)
    several = args.model_parallel_size > 1 or args.pipe_parallel_size > 1
    device = initialize_megatron(config) if several else device_module.current()
    layers = (t5_layers if config.is_t5 else gpt2_layers)(config, vocab_size_of(config))
    stages = Stages(layers) if args.pipe_parallel_size > 1 else None
    own = stages.own if stages else None
    with mpu.undrawn():
        model = (T5Model if config.is_t5 else GPT2Model)(config, parallel_output=False, own=own).eval()
    if path:
        load_weights(path, model).check_tokenizer(tokenizer.fingerprint)
    elif theirs:
        theirs.load(model)
    return Writer(model.to(device), tokenizer, config, stages, reader_of(args, config, tokenizer, vocab_file))


def show_as_it_comes(tokenizer: Tokenizer, question: Question) -> Heard:
    """Return a callback that prints an answer token by token. A character appears once all its bytes are there."""
    ids: list[int] = []
    shown = 0

    def heard(tokens: list[int]) -> None:
        nonlocal shown
        ids.extend(tokens)
        whole = answer(tokenizer, question, ids)
        print(whole[shown:], end="", flush=True)
        shown = len(whole)

    return heard


def show(writer: Writer, args: argparse.Namespace) -> None:
    """Print each prompt with its text as it is generated; on a terminal a conversation continues."""
    before: tuple[Message, ...] = ()
    for asked in prompts(args):
        if isinstance(asked, Conversation):
            asked = Conversation((*before, *asked.messages))
        try:
            question = writer.question(asked)
        except ValueError as error:
            if not args.interactive:
                raise
            if is_rank_0():
                print(f"not understood: {error}", flush=True)
            continue
        if is_rank_0():
            print(question.before, end="", flush=True)
        heard = show_as_it_comes(writer.tokenizer, question) if is_rank_0() else None
        ((text,),) = writer.write([question], args, heard)
        if is_rank_0():
            print(question.after, flush=True)
        if isinstance(asked, Conversation) and args.interactive:
            before = with_answer(asked, text)


def check(args: argparse.Namespace) -> None:
    """Raise ValueError for a number out of range."""
    for name, good, wanted in (
        ("num_samples", args.num_samples >= 1, "at least 1"),
        ("max_new_tokens", args.max_new_tokens >= 1, "at least 1"),
        ("temperature", 0 <= args.temperature < math.inf, "at least 0 (0 takes the likeliest token), and finite"),
        ("top_k", args.top_k >= 0, "at least 0 (0 draws from all)"),
        ("top_p", 0 < args.top_p <= 1, "above 0 and at most 1 (1 draws from all)"),
        ("num_beams", args.num_beams >= 0, "at least 0 (0 draws)"),
        ("favoured", args.favoured >= 0, "at least 0 (0 shows none)"),
        ("batch_size", args.batch_size >= 1, "at least 1"),
        ("model_parallel_size", args.model_parallel_size >= 1, "at least 1"),
        ("pipe_parallel_size", args.pipe_parallel_size >= 0, "at least 0 (0 for no stages)"),
    ):
        if not good:
            raise ValueError(f"--{name.replace('_', '-')} {getattr(args, name)} must be {wanted}")
    if 0 < args.num_beams < args.num_samples:
        raise ValueError(f"--num-samples {args.num_samples} is more than --num-beams {args.num_beams} finds")


def main(args: argparse.Namespace) -> None:
    check(args)
    check_prompts(args)
    writer = load(args)
    stream = args.stream or (args.interactive and not (args.json or args.num_beams or writer.config.is_t5))
    if args.favoured and (args.json or stream):
        raise ValueError("--favoured does not go with --json and --stream")
    if args.chat and args.interactive and not stream:
        raise ValueError("--chat --interactive shows one answer as it is written: not --num-beams, --json")
    if stream and (writer.config.is_t5 or args.num_beams or args.json or args.num_samples > 1):
        raise ValueError("--stream shows one text of a GPT-2 as it is written: not --num-beams, --json, --num-samples")
    if stream:
        show(writer, args)
    else:
        for asked, texts in answers(writer, prompts(args), args, args.batch_size if args.input else 1):
            for text in texts if is_rank_0() else []:
                whole = {**as_json(asked), "text": text} if args.input else {"text": text}
                line = text.replace("\n", " ") if args.input else text
                print(json.dumps(whole, ensure_ascii=False) if args.json else line, flush=True)
            if args.favoured:
                told = writer.favoured(writer.question(asked), args.favoured)
                if is_rank_0():
                    print(f"    {told}", flush=True)
    if dist.is_initialized():
        dist.barrier()
        exit_now(0)


def build_parser() -> Parser:
    parser = Parser(__doc__ or "", EXAMPLES)
    add = parser.add_argument
    add(
        "--load",
        required=True,
        help="a run directory, a folder of checkpoints, one checkpoint, or a GPT-2, Llama, Qwen or Mistral of Hugging Face",
    )
    add_flags(parser)
    add(
        "--batch-size",
        type=int,
        default=16,
        help="of --input: prompts that are read together, of those with equally many tokens; the texts are the same, "
        "and come in the order of the prompts (default: 16)",
    )
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
    add(
        "--favoured",
        type=int,
        default=0,
        help="below each prompt's texts, so many tokens that the model puts most above their share of the training text",
    )
    add("--json", action="store_true", help="one JSON line per continuation")
    return parser


def cli() -> None:
    run(main, build_parser())


if __name__ == "__main__":
    cli()
