"""Results of a run in a few lines, for the terminal and for the table on a page."""

import contextlib
import math
import statistics
from collections.abc import Iterable, Sequence
from typing import Any

from data_utils.tables import align_columns
from megatron.tokenizer.load import find_vocab_file
from megatron_tools.tables import split_columns

from .runs import RunData

Facts = Iterable[tuple[str, str]]


def result_facts(run: RunData) -> Facts:
    """Yield the run's losses and speed as (name, value) pairs."""
    train = run.trained
    valid = run.rows_of("valid")
    yield "iterations", str(run.iteration)
    if train:
        measured = train[1:] or train  # the first row also measures the start of training
        speed = statistics.median(row["tokens_per_second"] for row in measured)
        yield "tokens seen", f"{train[-1]['consumed_tokens']:,}"
        yield "median speed", f"{speed:,.0f} tokens/s"
        losses = f"{train[0]['lm_loss']:.3f}, {train[-1]['lm_loss']:.3f} nats/token"
        yield "training loss, first and last line", losses
    if valid:
        first = valid[0]
        last = valid[-1]
        best = min(valid, key=lambda row: (math.isnan(row["lm_loss"]), row["lm_loss"]))  # NaN only if all are NaN
        # ppl is the perplexity.
        best_at = f"at iteration {best['iteration']} (perplexity {best['ppl']:.1f})"
        yield "validation loss, first and last", f"{first['lm_loss']:.3f}, {last['lm_loss']:.3f} nats/token"
        yield "best validation loss", f"{best['lm_loss']:.3f} {best_at}"
        if best.get("bits_per_byte"):
            yield "bits per byte, there", f"{best['bits_per_byte']:.3f}"
        if "text_loss" in last:
            yield "masked text only, first and last", f"{first['text_loss']:.3f}, {last['text_loss']:.3f} nats/token"
            yield "accuracy on masked text", f"{last['text_accuracy']:.1%}"
    for text_name, nats in run.baselines.items():
        yield f"unigram entropy of the {text_name}", f"{nats:.3f} nats/token (perplexity {math.exp(nats):.1f})"


def machine_facts(run: RunData, parameters: int | None) -> Facts:
    """Yield the model's size, the parallel layout and the use of memory and compute as (name, value) pairs."""
    p = run.config.parallel
    train = run.trained
    if parameters is not None:
        yield "parameters", f"{parameters / 1e6:,.2f} million"
    yield "layout", layout_label(run)

    def column(key: str) -> list[Any]:
        # 0 replaces a missing value, and a null such as that of mfu on a device whose peak FLOP/s are unknown.
        return [row.get(key) or 0 for row in train]

    if train:
        peak_memory = max(column("memory_mb"))
        memory_before = max(column("memory_before_model_mb"))  # logged on CPUs only
        memory_text = f"{peak_memory / 1e3:,.2f} GB"
        if memory_before:
            memory_text += f" of the process, {memory_before / 1e3:,.2f} GB of it before the model was built"
        yield "peak memory of rank 0", memory_text
        first_row = 1 if len(train) > 1 else 0  # the first row also measures the start of training
        speed_text = f"{statistics.median(column('tflops')[first_row:]):.3g} TFLOP/s"
        known_shares = list(filter(None, column("mfu")[first_row:]))
        if known_shares:
            speed_text += f", MFU {statistics.median(known_shares):.1%}"
        yield "speed of a rank", speed_text
    skipped = sum(column("skipped_steps"))
    if skipped:
        yield "skipped steps", str(skipped)
    if p.pipe_parallel_size:
        schedule = p.pipeline_schedule
        if p.virtual_pipeline_size > 1:
            schedule += f", {p.virtual_pipeline_size} chunks"
        yield "schedule", schedule


def layout_label(run: RunData) -> str:
    """Return the run's parallel sizes, such as "pipe 2 x data 4 x model 1, experts over 2".

    The number of replicas (data) is the number of samples in an iteration, divided by --batch-size and --gas.
    """
    p = run.config.parallel
    train = run.config.train
    words = [f"pipe {p.pipe_parallel_size}"] if p.pipe_parallel_size else ["no pipeline"]
    if run.global_batch:
        words.append(f"data {max(run.global_batch // (train.batch_size * train.gas), 1)}")
    words.append(f"model {p.model_parallel_size}")
    if p.context_parallel_size > 1:
        words.append(f"context {p.context_parallel_size}")
    experts = f", experts over {p.expert_parallel_size}" if p.expert_parallel_size > 1 else ""
    return " x ".join(words) + experts


def progress(run: RunData) -> tuple[str, float]:
    """Return (state of the run in words, completed share of --train-iters from 0 to 1)."""
    total = run.config.train.train_iters
    share = min(run.iteration / total, 1.0) if total else 1.0
    return f"{run.state()} · iteration {run.iteration:,} of {total:,}", share


def tokenizer_note(runs: Sequence[RunData]) -> str:
    """Return a note for runs whose tokenizers differ, as their losses cannot be compared; "" if they do not."""
    vocabularies = set()
    for run in runs:
        vocab_file = run.config.data.vocab_file
        if vocab_file is None:
            continue
        with contextlib.suppress(ValueError, OSError):  # the tokenizer is gone
            vocabularies.add(find_vocab_file(vocab_file).read_bytes())
    if len(vocabularies) < 2:
        return ""
    return "The runs have different tokenizers: compare their bits per byte, not their losses or perplexities."


def facts_table(runs: Sequence[Facts]) -> list[tuple[str, list[str]]]:
    """Return a row (name, [value in each run]) for each fact, with "" for a run that lacks the fact.

    Facts keep the order of the first run in which they occur.
    """
    columns = list(map(dict, runs))
    names: dict[str, None] = {}  # a set that keeps its order
    for column in columns:
        names |= dict.fromkeys(column)
    rows = []
    for name in names:
        rows.append((name, [column.get(name, "") for column in columns]))
    return rows


def as_text(names: Sequence[str], runs: Sequence[Facts]) -> str:
    """Return the table for a terminal. For a single run, the table has no header.

    A table that is wider than the terminal becomes several, with a row for each run and an empty line between them.
    """
    rows = [[name, *values] for name, values in facts_table(runs)]
    if len(runs) > 1:
        rows.insert(0, ["", *names])
    # Each part has the names and as many runs as fit the terminal. If that needs several parts, turn the table.
    parts = list(split_columns(rows, gap=2))
    if len(parts) > 1:
        turned = list(zip(*rows, strict=True))
        parts = list(split_columns(turned, gap=2))
    return "\n\n".join(map(align_columns, parts))
