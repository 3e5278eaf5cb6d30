"""The work of tools/evaluate.py, whose flags are in evaluate_flags.py."""

import argparse
import json
import math
import sys
from pathlib import Path
from typing import Any

import torch

from data_utils.cli import max_document_bytes
from data_utils.documents import read_texts
from data_utils.progress import Progress
from megatron import mpu
from megatron.atomic import write_text
from megatron.checkpointing import load_weights
from megatron.checkpointing.pruned import read_newest
from megatron.config.fields import problems_where, raise_first_problem
from megatron.features.cpu_matmul import pack_weights
from megatron.features.harness import evaluate_tasks
from megatron.features.scoring import Score, read_cloze, score_one, token_nats
from megatron.model.gpt2 import GPT2Model
from megatron.packages import pip_install
from megatron.ranks import device
from megatron.tokenizer import load_tokenizer
from megatron.tokenizer.load import find_vocab_file
from megatron_tools.shapes import config_of_checkpoint

from ..convert.export_roles import generation_settings
from ..convert.export_tokenizer import chat_format_of
from ..convert.hf_folder import HFModelFolder, check_vocab_file, is_hf_folder
from .lm_eval import Harness


def load_subject(args: argparse.Namespace) -> Harness:
    """Return the model of --load, a run or a Hugging Face folder, built with this project's model classes."""
    folder = Path(args.load)
    if is_hf_folder(folder):
        return _build_subject(args, HFModelFolder(folder), folder)
    return read_newest(args.load, lambda path: _build_subject(args, None, path))


def _build_subject(args: argparse.Namespace, hf_folder: HFModelFolder | None, path: Path) -> Harness:
    """Return the model of the Hugging Face folder `hf_folder`, or, if it is None, of the checkpoint `path`."""
    if args.ema and hf_folder:
        raise ValueError("--ema needs --load of a run with --ema-decay, not a Hugging Face folder")
    config = hf_folder.config if hf_folder else config_of_checkpoint(path)
    if config.is_t5:
        raise ValueError(f"{path} is a T5, but evaluate.py scores left-to-right models; use tools/generate.py")
    default_vocab = str(path) if hf_folder else config.data.vocab_file
    vocab_file = args.vocab_file or default_vocab
    if vocab_file is None:
        raise ValueError("there is no tokenizer; give --vocab-file")
    tokenizer = load_tokenizer(vocab_file, config.data.tokenizer_type)
    with mpu.skip_init():  # loading sets all weights
        model = GPT2Model(config, parallel_output=False)
    if hf_folder:
        check_vocab_file(path, tokenizer, args.vocab_file)
        for note in hf_folder.check_tokenizer(tokenizer):
            print(f"note: {note}", file=sys.stderr)
        hf_folder.load(model)
        default_window = config.positions
    else:
        load_weights(path, model, args.ema).check_tokenizer(tokenizer.fingerprint, vocab_file=vocab_file)
        # The model was trained on samples of --seq-length tokens, even if it has more positions.
        default_window = min(config.positions, config.data.seq_length)
    # A generated text ends at the ids that generation_config.json would name if this model were exported, so that it
    # ends where the exported model ends it in transformers. {}: ids of a config.json, which eos_token_id does not need.
    chat = chat_format_of(config, tokenizer, vocab_file)
    generation_json = generation_settings({}, tokenizer, find_vocab_file(vocab_file), chat.end_id)
    device_here = device.current_device()
    window = _context_window(args, default_window, config.positions)
    model.eval().to(device_here)
    pack_weights(model, window)  # a memory layout for faster matmuls of `window` tokens on a CPU
    return Harness(model, tokenizer, window, device_here, generation_json["eos_token_id"])


def _context_window(args: argparse.Namespace, default: int, max_length: int) -> int:
    """Return the context window in tokens: --window, else `default`. Raises ValueError if it exceeds `max_length`."""
    if args.window is not None and not 1 <= args.window <= max_length:
        raise ValueError(f"--window {args.window} must be from 1 to {max_length}, the longest input of this model")
    return args.window or default


def load_hf_subject(args: argparse.Namespace) -> Harness:
    """Return the model of the Hugging Face folder --hf, built with transformers."""
    try:
        from transformers import AutoModelForCausalLM
    except ImportError:
        raise ValueError(f"--hf needs the package transformers: {pip_install('transformers')}") from None
    model: Any = AutoModelForCausalLM.from_pretrained(args.hf, dtype=torch.float32)
    device_here = device.current_device()
    model.eval().to(device_here)
    tokenizer = load_tokenizer(args.vocab_file or args.hf)
    tokenizer.refuse_contradiction()
    check_vocab_file(Path(args.hf), tokenizer, args.vocab_file)
    text_config = model.config.get_text_config()  # the settings of the text model, for models that also read images
    if tokenizer.vocab_size > text_config.vocab_size:
        raise ValueError(
            f"the tokenizer has {tokenizer.vocab_size} tokens, "
            f"more than the model's vocabulary of {text_config.vocab_size}"
        )
    # The longest input is called `max_position_embeddings`, but `max_seq_len` in MPT. Models with neither (BLOOM's,
    # Mamba's) have no limit, so any --window fits; their default is 2,048 tokens, as in lm-eval.
    mpt_limit = getattr(text_config, "max_seq_len", args.window or 2048)
    max_length = getattr(text_config, "max_position_embeddings", mpt_limit)
    window = _context_window(args, max_length, max_length)
    return Harness(
        lambda tokens: model(tokens).logits, tokenizer, window, device_here, model.generation_config.eos_token_id
    )


def measure_perplexity(subject: Harness, args: argparse.Namespace) -> dict[str, Any]:
    """Return metric name -> value: loss, perplexity and bits per byte over all documents in --input.

    Each document is scored separately, and its end-of-document token is included.
    """
    score = Score()
    tokenizer = subject.tokenizer
    window_length = subject.max_length + 1  # the last token of a window is a target, but not an input
    stride = args.stride or max(subject.max_length // 2, 1)
    documents = read_texts(args.input, args.json_key, max_document_bytes(args), encoding=args.encoding)
    for text in Progress(documents, desc="scoring", unit=" documents", disable=args.quiet):
        # `before` gives the first token of the text a context.
        ids = [*tokenizer.before, *tokenizer.encode(text), tokenizer.eod]
        token_losses = token_nats(ids, subject.logits_of, window_length, stride, subject.device)
        score += Score(sum(token_losses), len(token_losses), len(text), len(text.encode()))
    if not score.tokens:
        raise ValueError(f"{', '.join(args.input)} contains no text")
    loss = score.nats / score.tokens
    bits = score.nats / math.log(2)
    return {
        "loss": loss,
        "perplexity": math.exp(min(loss, 700)),  # exp(710) overflows
        "bits_per_byte": bits / max(score.bytes, 1),
        "bits_per_character": bits / max(score.characters, 1),
        "tokens": score.tokens,
        "characters": score.characters,
        "bytes": score.bytes,
        "window": subject.max_length,
        "stride": stride,
    }


def measure_cloze(subject: Harness, args: argparse.Namespace) -> dict[str, Any]:
    """Return the cloze accuracy: the share of questions whose target is the greedy continuation of the context."""
    requests = read_cloze(args.cloze, subject.tokenizer, subject.max_length)[: args.limit]
    num_right = sum(score_one(request, subject.logits_of, subject.device).greedy for request in requests)
    return {"accuracy": num_right / len(requests), "right": num_right, "questions": len(requests)}


def run_tasks(subject: Harness, args: argparse.Namespace) -> dict[str, Any]:
    """Return the numbers that lm-eval computes for the tasks in --tasks, by task and metric."""
    folders = [args.task_folder] if args.task_folder else []
    metrics = {}
    for task, row in evaluate_tasks(subject, args.tasks.split(","), args.limit, folders).items():
        for name, value in row.items():
            if isinstance(value, (int, float)):  # not a text, such as the task's alias
                metrics[f"{task} {name}"] = value
    return metrics


def main(args: argparse.Namespace) -> None:
    has_input_options = args.stride or args.json_key != "text" or args.encoding != "utf-8"  # other than default
    problems = problems_where(
        # Exactly one of the two may be given.
        (bool(args.load) == bool(args.hf), "give either --load (a run) or --hf (a Hugging Face folder)"),
        (args.hf and not Path(args.hf).is_dir(), f"--hf {args.hf} is not a folder"),
        (args.ema and args.hf, "--ema needs --load, a run with --ema-decay; leave it out with --hf"),
        # Exactly one of the three may be given.
        (
            sum(map(bool, (args.input, args.cloze, args.tasks))) != 1,
            "give one of --input (text to score), --cloze (questions) and --tasks (tasks of lm-eval)",
        ),
        (has_input_options and not args.input, "--stride, --json-key and --encoding need --input"),
        (args.task_folder and not args.tasks, "--task-folder needs --tasks"),
        (args.limit and args.input, "--limit is for --cloze and --tasks; omit it with --input"),
    )
    raise_first_problem(problems)
    subject = load_subject(args) if args.load else load_hf_subject(args)
    if args.tasks:
        metrics = run_tasks(subject, args)
    elif args.input:
        metrics = measure_perplexity(subject, args)
    else:
        metrics = measure_cloze(subject, args)
    try:
        # The file comes first, because printing fails if the reader of the output, such as `head`, has ended. If the
        # file cannot be written, the results are printed nevertheless.
        if args.json:
            write_text(args.json, json.dumps(metrics, indent=1))
    finally:
        for key, value in metrics.items():
            number = f"{value:,.4f}" if isinstance(value, float) else f"{value:,}"
            print(f"{key.ljust(20)} {number}")
