"""The work of tools/generate.py, whose flags are in generate_flags.py."""

import argparse
import json
import math
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch.distributed as dist

from data_utils.chat_messages import Message
from megatron import mpu
from megatron.checkpointing import load_weights
from megatron.checkpointing.pruned import read_newest
from megatron.config import Config
from megatron.config.command_line import with_values
from megatron.config.fields import flag, problems_where, raise_first_problem
from megatron.features.cpu_matmul import pack_weights
from megatron.model.gpt2 import GPT2Model
from megatron.model.gpt2_layers import gpt2_layers, vocab_size_of
from megatron.model.t5 import T5Model, t5_layers
from megatron.ranks import device as device_module
from megatron.ranks.errors import exit_now
from megatron.ranks.initialize import initialize_megatron
from megatron.ranks.rank_0 import is_rank_0
from megatron.tokenizer import SentinelTokenizer, Tokenizer, load_tokenizer
from megatron_tools.shapes import config_of_checkpoint

from ..convert.hf_folder import HFModelFolder, check_vocab_file, is_hf_folder
from .generation import Stages
from .prompts import as_json, check_prompt_flags, prompt_encoder, read_prompts
from .questions import Conversation, Prompt, Question, decode_answer
from .writer import OnTokens, Writer, write_all


def load_writer(args: argparse.Namespace) -> Writer:
    """Load the model of --load with its tokenizer. Every rank must call this function."""
    if is_hf_folder(Path(args.load)):
        return _load_checkpoint(args, path=None)
    # If another run deletes the checkpoint while it is read, a single process reads the newest again. Of several ranks,
    # some may have read the checkpoint before, and they could not agree to try again.
    is_one_process = args.model_parallel_size == 1 and args.pipe_parallel_size <= 1
    return read_newest(args.load, partial(_load_checkpoint, args), may_retry=is_one_process)


def _load_checkpoint(args: argparse.Namespace, path: Path | None) -> Writer:
    """Load the model of the checkpoint `path`, or of a Hugging Face folder if `path` is None."""
    sizes = (args.model_parallel_size, args.pipe_parallel_size)
    hf_folder = None
    if path is None:
        hf_folder = HFModelFolder(Path(args.load), *sizes)
        if args.ema:
            raise ValueError("--ema needs --load of a run with --ema-decay, not a Hugging Face folder")
        config = hf_folder.config
        default_vocab: str | None = str(hf_folder.path)
    else:
        config = config_of_checkpoint(path, *sizes)
        default_vocab = config.data.vocab_file
    vocab_file = args.vocab_file or default_vocab
    if vocab_file is None:
        raise ValueError("there is no tokenizer; give --vocab-file")
    tokenizer = load_tokenizer(vocab_file, config.data.tokenizer_type)
    if hf_folder:
        if config.is_t5:
            raise ValueError(f"{hf_folder.path} is a T5; convert it first with tools/convert_checkpoint.py --from-hf")
        check_vocab_file(hf_folder.path, tokenizer, args.vocab_file)
        for note in hf_folder.check_tokenizer(tokenizer):
            print(f"note: {note}", file=sys.stderr)
    if config.is_t5:
        tokenizer = SentinelTokenizer(tokenizer, config.data.num_sentinels, config.data.span_convention)
    if args.interactive:
        config = with_values(config, {"startup_timeout_minutes": 10_000.0})  # the other ranks wait for a user's prompt
    is_distributed = config.parallel.fewest_ranks > 1
    device = initialize_megatron(config) if is_distributed else device_module.current_device()
    model, stages = _build_model(config)
    if hf_folder:
        hf_folder.load(model)
    elif path:
        load_weights(path, model, args.ema).check_tokenizer(tokenizer.fingerprint, vocab_file=vocab_file)
    model.to(device)
    # A step reads one token of each beam or sample of a prompt. This number decides which weights are worth packing.
    pack_weights(model, args.num_beams or args.num_samples)
    return Writer(model, tokenizer, config, stages, prompt_encoder(args, config, tokenizer, vocab_file))


def _build_model(config: Config) -> tuple[GPT2Model | T5Model, Stages | None]:
    """Return this rank's layers of the model, without weights, and the stages of its pipeline if it has one."""
    model_class: type[GPT2Model | T5Model] = T5Model if config.is_t5 else GPT2Model
    make_layers = t5_layers if config.is_t5 else gpt2_layers
    stages = None
    own_layers = None  # all layers
    if config.parallel.pipe_parallel_size > 1:
        stages = Stages(make_layers(config, vocab_size_of(config)))
        own_layers = stages.own_layers
    with mpu.skip_init():
        model = model_class(config, parallel_output=False, own=own_layers)
    return model.eval(), stages


def token_printer(tokenizer: Tokenizer, question: Question) -> OnTokens:
    """Return a callback that prints an answer token by token, and a character only when it has all its bytes."""
    all_ids: list[int] = []
    printed_length = 0

    def on_tokens(tokens: list[int]) -> None:
        nonlocal printed_length
        all_ids.extend(tokens)
        text = decode_answer(tokenizer, question, all_ids)
        print(text[printed_length:], end="", flush=True)
        printed_length = max(printed_length, len(text))  # an invalid byte may shorten the text

    return on_tokens


def print_texts(writer: Writer, args: argparse.Namespace) -> None:
    """Print the generated texts of each prompt after they are complete: in one line each for --input and --json."""
    # Other prompts come one by one, and each is answered before the next is read.
    batch_size = args.batch_size if args.input else 1
    for prompt, texts in write_all(writer, valid_prompts(writer, args), args, batch_size):
        if is_rank_0():
            # With --input, a line also has the fields of its prompt (--json), or no line breaks.
            prompt_fields = as_json(prompt) if args.input else {}
            for text in texts:
                if args.json:
                    text = json.dumps({**prompt_fields, "text": text}, ensure_ascii=False)
                elif args.input:
                    text = text.replace("\n", " ")
                print(text, flush=True)
        # --top-lift N adds a line with the N tokens whose probability most exceeds their share of the training text.
        if args.top_lift:
            line = writer.top_lift(writer.question(prompt), args.top_lift)
            if is_rank_0():
                print(f"    {line}", flush=True)


def valid_prompts(writer: Writer, args: argparse.Namespace) -> Iterator[Prompt]:
    """Yield the prompts that the model can answer. See `ask` for the others."""
    for prompt in read_prompts(args):
        if ask(writer, args, prompt):
            yield prompt


def ask(writer: Writer, args: argparse.Namespace, prompt: Prompt) -> Question | None:
    """Return the encoded prompt, or None for one that the model cannot answer.

    With --interactive, such a prompt is reported, else it raises ValueError.
    """
    try:
        return writer.question(prompt)
    except ValueError as error:
        if not args.interactive:
            raise
        if is_rank_0():
            print(f"invalid prompt: {error}", file=sys.stderr, flush=True)
        return None


def stream_texts(writer: Writer, args: argparse.Namespace) -> None:
    """Print the generated text of each prompt token by token. With --chat --interactive, each prompt is a new turn."""
    earlier_messages: tuple[Message, ...] = ()
    for prompt in read_prompts(args):
        if isinstance(prompt, Conversation):
            prompt = Conversation((*earlier_messages, *prompt.messages))
        question = ask(writer, args, prompt)
        if question is None:
            continue
        on_tokens = None
        if is_rank_0():
            print(question.text_before, end="", flush=True)
            on_tokens = token_printer(writer.tokenizer, question)
        text = writer.write([question], args, on_tokens)[0][0]  # one prompt, one sample
        if is_rank_0():
            print(question.text_after, flush=True)
        if isinstance(prompt, Conversation) and args.interactive:
            # The next prompt continues this conversation.
            earlier_messages = (*prompt.messages, Message("assistant", text))


# Flags of whole numbers -> smallest value
MINIMA = {
    "num_samples": 1, "max_new_tokens": 1, "batch_size": 1, "model_parallel_size": 1,
    "top_k": 0, "num_beams": 0, "top_lift": 0, "pipe_parallel_size": 0,
}  # fmt: skip


def check_sampling_flags(args: argparse.Namespace) -> None:
    """Raise ValueError for a flag whose number is out of range."""
    for name, minimum in MINIMA.items():
        value = getattr(args, name)
        if value < minimum:
            raise ValueError(f"{flag(name)} {value} must be at least {minimum}")
    problems = problems_where(
        (
            not 0 <= args.temperature < math.inf,
            f"--temperature {args.temperature} must be at least 0 (0: greedy decoding), and finite",
        ),
        (not 0 < args.top_p <= 1, f"--top-p {args.top_p} must be above 0 and at most 1 (1: all tokens)"),
        (
            0 < args.num_beams < args.num_samples,
            f"--num-samples {args.num_samples} exceeds --num-beams {args.num_beams}; raise --num-beams",
        ),
    )
    raise_first_problem(problems)


def should_stream(args: argparse.Namespace, is_t5: bool) -> bool:
    """Return whether to print text while it is generated. Raises ValueError for flags that conflict with streaming."""
    # A JSON line, the best beam and a T5's filled prompt are known only when the text is complete.
    is_printed_whole = args.json or args.num_beams or is_t5
    streams = args.stream or (args.interactive and not is_printed_whole)
    is_unstreamable = is_printed_whole or args.num_samples > 1  # several texts would be mixed
    problems = problems_where(
        (
            args.top_lift and (args.json or streams),
            "--top-lift cannot be combined with --json or --stream, which --interactive implies for a GPT-2 or Llama",
        ),
        (
            args.chat and args.interactive and not streams,
            "--chat --interactive streams one answer; omit --num-beams and --json",
        ),
        (
            streams and is_unstreamable,
            "--stream prints one text of a GPT-2 or Llama, and --interactive implies it; omit --num-beams, --json and "
            "--num-samples",
        ),
    )
    raise_first_problem(problems)
    return bool(streams)


def main(args: argparse.Namespace) -> None:
    """Read prompts, let the model continue each prompt, and print the texts.

    `read_prompts` yields the prompts, and `Writer` encodes them and generates tokens. `print_texts` prints finished
    texts, `stream_texts` prints each token as soon as it is generated.
    """
    check_sampling_flags(args)
    check_prompt_flags(args)
    writer = load_writer(args)
    if should_stream(args, writer.config.is_t5):
        stream_texts(writer, args)
    else:
        print_texts(writer, args)
    # No rank ends while others still need it.
    if dist.is_initialized():
        dist.barrier()
        exit_now(0)
