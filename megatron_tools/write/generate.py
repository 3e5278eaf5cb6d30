"""Continue texts with a trained GPT-2 or Llama, or fill the masked spans of texts with a trained T5.

Loads a checkpoint of any layout, and uses the GPU if there is one.
"""

import argparse
import json
import math
import sys
from functools import partial
from pathlib import Path

import torch.distributed as dist

from data_utils.chat_templates import Message
from data_utils.cli import Parser, any_path, local_path, run
from megatron import mpu
from megatron.checkpointing import load_weights
from megatron.checkpointing.pruned import read_newest
from megatron.config import Config
from megatron.config.fields import refuse, problems_where
from megatron.model.gpt2 import GPT2Model, gpt2_layers, vocab_size_of
from megatron.model.t5 import T5Model, t5_layers
from megatron.ranks import device as device_module
from megatron.ranks.errors import exit_now
from megatron.ranks.initialize import initialize_megatron
from megatron.ranks.rank_0 import is_rank_0
from megatron.tokenizer import SentinelTokenizer, Tokenizer, load_tokenizer
from megatron_tools.shapes import described

from ..convert.hf_folder import Folder, is_hf_folder
from .generation import Stages
from .prompts import add_flags, as_json, prompts, reader_of, with_answer
from .prompts import check as check_prompts
from .questions import Conversation, Prompt, Question, answer
from .writer import OnTokens, Writer, answers

EXAMPLES = """\
  python tools/generate.py --load runs/gpt2 --prompt "春天的早晨" --stream
  python tools/generate.py --load runs/gpt2 --prompt "Once upon" --num-samples 3 --temperature 0.8 --top-p 0.9
  python tools/generate.py --load runs/gpt2 --interactive
  python tools/generate.py --load runs/gpt2 --input prompts.txt --batch-size 32 --json > texts.jsonl
  python tools/generate.py --load downloaded/ --prompt "Once upon"
      a Hugging Face folder
  python tools/generate.py --load runs/chat --chat --interactive
      trained with --objective sft, or a chat model
  python tools/generate.py --load runs/code --prompt "def add(a, b):" --suffix "    return c"
      --fim-rate
  python tools/generate.py --load runs/t5 --prompt "春天来了，<extra_id_0>都开了。" --num-beams 4
  python tools/launch.py --standalone --nproc-per-node 4 tools/generate.py --load runs/gpt2 \\
      --model-parallel-size 2 --pipe-parallel-size 2 --prompt "春天" """


def load(args: argparse.Namespace) -> Writer:
    """Load the model of --load with its tokenizer. Every rank must call this function."""
    if is_hf_folder(Path(args.load)):
        return _load(args, None)
    alone = args.model_parallel_size == 1 and args.pipe_parallel_size <= 1
    return read_newest(args.load, partial(_load, args), again=alone)


def _load(args: argparse.Namespace, path: Path | None) -> Writer:
    """Load the model of the checkpoint `path`, or of a Hugging Face folder if `path` is None."""
    sizes = (args.model_parallel_size, args.pipe_parallel_size)
    several = args.model_parallel_size > 1 or args.pipe_parallel_size > 1
    theirs = None
    if path is None:
        theirs = Folder(Path(args.load), *sizes)
        if args.ema:
            raise ValueError("--ema needs --load of a run with --ema-decay, not a Hugging Face folder")
        config = theirs.config
        own: str | None = str(theirs.path)
        kind = "auto"
    else:
        config = described(path, *sizes)
        own = config.data.vocab_file
        kind = config.data.tokenizer_type
    vocab_file = args.vocab_file or own
    if vocab_file is None:
        raise ValueError("there is no tokenizer; give --vocab-file")
    tokenizer = load_tokenizer(vocab_file, kind)
    if theirs:
        if config.is_t5:
            raise ValueError(f"{theirs.path} is a T5; convert it first with tools/convert_checkpoint.py --from-hf")
        for note in theirs.check_tokenizer(tokenizer):
            print(f"note: {note}", file=sys.stderr)
    if config.is_t5:
        tokenizer = SentinelTokenizer(tokenizer, config.data.num_sentinels, config.data.span_convention)
    device = initialize_megatron(config) if several else device_module.current()
    model, stages = _model(config)
    if theirs:
        theirs.load(model)
    elif path:
        load_weights(path, model, args.ema).check_tokenizer(tokenizer.fingerprint, vocab_file=vocab_file)
    return Writer(model.to(device), tokenizer, config, stages, reader_of(args, config, tokenizer, vocab_file))


def _model(config: Config) -> tuple[GPT2Model | T5Model, Stages | None]:
    """Return this rank's layers of the model, without weights, and the stages of its pipeline if it has one."""
    kind: type[GPT2Model | T5Model] = T5Model if config.is_t5 else GPT2Model
    layers_of = t5_layers if config.is_t5 else gpt2_layers
    stages = None
    own = None
    if config.parallel.pipe_parallel_size > 1:
        stages = Stages(layers_of(config, vocab_size_of(config)))
        own = stages.own
    with mpu.skip_init():
        model = kind(config, parallel_output=False, own=own)
    return model.eval(), stages


def token_printer(tokenizer: Tokenizer, question: Question) -> OnTokens:
    """Return a callback that prints an answer token by token, and a character only when it has all its bytes."""
    ids: list[int] = []
    shown = 0

    def on_tokens(tokens: list[int]) -> None:
        nonlocal shown
        ids.extend(tokens)
        whole = answer(tokenizer, question, ids)
        print(whole[shown:], end="", flush=True)
        shown = len(whole)

    return on_tokens


def print_texts(writer: Writer, args: argparse.Namespace) -> None:
    """Print the generated texts of each prompt after they are complete."""
    size = args.batch_size if args.input else 1
    for asked, texts in answers(writer, prompts(args), args, size):
        if is_rank_0():
            for text in texts:
                _print_text(asked, text, args)
        if args.top_lift:
            line = writer.top_lift(writer.question(asked), args.top_lift)
            if is_rank_0():
                print(f"    {line}", flush=True)


def _print_text(asked: Prompt, text: str, args: argparse.Namespace) -> None:
    """Print a text: in one line for --input, with its prompt in JSON."""
    if args.json:
        about = as_json(asked) if args.input else {}
        line = json.dumps({**about, "text": text}, ensure_ascii=False)
    else:
        line = text.replace("\n", " ") if args.input else text
    print(line, flush=True)


def stream_texts(writer: Writer, args: argparse.Namespace) -> None:
    """Print the generated text of each prompt token by token. With --chat --interactive, each prompt is a new turn."""
    first = is_rank_0()
    before: tuple[Message, ...] = ()
    for asked in prompts(args):
        if isinstance(asked, Conversation):
            asked = Conversation((*before, *asked.messages))
        try:
            question = writer.question(asked)
        except ValueError as error:
            if not args.interactive:
                raise
            if first:
                print(f"invalid prompt: {error}", flush=True)
            continue
        on_tokens = None
        if first:
            print(question.before, end="", flush=True)
            on_tokens = token_printer(writer.tokenizer, question)
        ((text,),) = writer.write([question], args, on_tokens)
        if first:
            print(question.after, flush=True)
        if isinstance(asked, Conversation) and args.interactive:
            before = with_answer(asked, text)


def check(args: argparse.Namespace) -> None:
    """Raise ValueError for a flag whose number is out of range."""
    for name, good, wanted in (
        ("num_samples", args.num_samples >= 1, "at least 1"),
        ("max_new_tokens", args.max_new_tokens >= 1, "at least 1"),
        ("temperature", 0 <= args.temperature < math.inf, "at least 0 (0: greedy decoding), and finite"),
        ("top_k", args.top_k >= 0, "at least 0 (0: all tokens)"),
        ("top_p", 0 < args.top_p <= 1, "above 0 and at most 1 (1: all tokens)"),
        ("num_beams", args.num_beams >= 0, "at least 0 (0: sampling)"),
        ("top_lift", args.top_lift >= 0, "at least 0 (0: prints no tokens)"),
        ("batch_size", args.batch_size >= 1, "at least 1"),
        ("model_parallel_size", args.model_parallel_size >= 1, "at least 1"),
        ("pipe_parallel_size", args.pipe_parallel_size >= 0, "at least 0 (0: no pipeline)"),
    ):
        if not good:
            raise ValueError(f"--{name.replace('_', '-')} {getattr(args, name)} must be {wanted}")
    if 0 < args.num_beams < args.num_samples:
        raise ValueError(f"--num-samples {args.num_samples} exceeds --num-beams {args.num_beams}; raise --num-beams")


def streams(args: argparse.Namespace, is_t5: bool) -> bool:
    """Return whether to print text while it is generated. Raises ValueError for flags that conflict with streaming."""
    complete = args.json or args.num_beams or is_t5  # such texts are printed when they are complete
    stream = args.stream or (args.interactive and not complete)
    several = complete or args.num_samples > 1
    problems = problems_where(
        (args.top_lift and (args.json or stream), "--top-lift cannot be combined with --json or --stream"),
        (
            args.chat and args.interactive and not stream,
            "--chat --interactive streams one answer; omit --num-beams and --json",
        ),
        (
            stream and several,
            "--stream prints one text of a GPT-2 or Llama; omit --num-beams, --json and --num-samples",
        ),
    )
    refuse(problems)
    return bool(stream)


def main(args: argparse.Namespace) -> None:
    """Read prompts, let the model continue each prompt, and print the texts.

    `prompts` yields the prompts, and `Writer` encodes them and generates tokens. `print_texts` prints finished texts,
    `stream_texts` prints each token as soon as it is generated.
    """
    check(args)
    check_prompts(args)
    writer = load(args)
    if streams(args, writer.config.is_t5):
        stream_texts(writer, args)
    else:
        print_texts(writer, args)
    if dist.is_initialized():
        dist.barrier()
        exit_now(0)


def add_model_flags(parser: Parser) -> None:
    """Add the flags that name the model and its tokenizer."""
    add = parser.add_argument
    add("--ema", action="store_true", help="use the moving average of the weights that a run with --ema-decay keeps")
    add(
        "--load",
        type=any_path,
        required=True,
        help="run directory, checkpoint(s), or Hugging Face folder of a GPT-2, Llama, Qwen or Mistral",
    )
    add("--vocab-file", type=local_path, help="tokenizer file or folder (default: the tokenizer of --load)")


def add_sampling_flags(parser: Parser) -> None:
    """Add the flags of sampling."""
    add = parser.add_argument
    add("--num-samples", type=int, default=1, help="texts per prompt (default: 1)")
    add("--max-new-tokens", type=int, default=64, help="longest continuation in tokens (default: 64)")
    add("--temperature", type=float, default=0.8, help="sampling temperature; 0 for greedy decoding (default: 0.8)")
    add("--top-k", type=int, default=0, help="sample from the k likeliest tokens; 0 for all (default: 0)")
    add(
        "--top-p",
        type=float,
        default=0.9,
        help="sample from the likeliest tokens of total probability p (default: 0.9)",
    )
    add(
        "--seed",
        type=int,
        default=1234,
        help="seed of the samples; each prompt draws random numbers of its own (default: 1234)",
    )


def build_parser() -> Parser:
    parser = Parser(__doc__ or "", EXAMPLES)
    add = parser.add_argument
    add_model_flags(parser)
    add_flags(parser)
    add(
        "--batch-size",
        type=int,
        default=16,
        help="prompts of --input per batch; the texts and their order do not depend on it (default: 16)",
    )
    add("--stream", action="store_true", help="print the text while it is generated")
    add_sampling_flags(parser)
    add("--num-beams", type=int, default=0, help="width of beam search; 0 for sampling (default: 0)")
    add("--model-parallel-size", type=int, default=1, help="tensor-parallel ranks (default: 1)")
    add("--pipe-parallel-size", type=int, default=0, help="pipeline stages; 0 for none (default: 0)")
    add(
        "--top-lift",
        "--favoured",
        type=int,
        default=0,
        help="after the texts of each prompt, print this many candidates for the next token, ranked by how much their "
        "probability exceeds their frequency in the training text (default: 0)",
    )
    add("--json", action="store_true", help="print one JSON line per text")
    return parser


def cli() -> None:
    run(main, build_parser())


if __name__ == "__main__":
    cli()
