"""Tokenize text files into .bin/.idx pairs for training, one pair for each key of the records.

The output does not depend on the number of workers. Memory does not grow with the size of the input: each
worker has a few chunks of about a megabyte in flight, and no document may exceed --max-document-mb. A killed
run resumes where it stopped when the same command is run again.
"""

import argparse
import contextlib
import itertools
import os
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from data_utils.indexed_writer import IndexedDatasetBuilder
from megatron.config.fields import at_least, between
from megatron.config.messages import describe_error
from megatron.data.corpus_paths import TRIPLE_PARTS
from megatron.data.indexed_dataset import LOSS_SUFFIX, best_dtype
from megatron.tokenizer import Tokenizer, load_tokenizer
from megatron.tokenizer.fast_bpe import SWITCH_AFTER
from megatron.tokenizer.load import KINDS

from . import chats
from .chunk_tokens import TokenizedChunk, start_worker, tokenize
from .cli import (
    Parser,
    add_input_flags,
    add_worker_flags,
    all_chunks,
    local_path,
    natural_int,
    number_type,
    output_prefix,
    run,
    unreadable_error,
    write_json,
)
from .documents import CHUNK_BYTES
from .files import Source, find_files, format_suffix, is_compressed
from .journal import Journal
from .parallel import ordered_map
from .progress import Progress
from .sidecars import check_output
from .streams import InputError

EXAMPLES = """\
  python tools/preprocess_data.py --input corpus.jsonl --vocab-file tokenizer.model --output-prefix data/corpus
      writes data/corpus_text_document.bin, .idx and .json; train with --data-path data/corpus_text_document
  python tools/preprocess_data.py --input texts/ 'more/*.jsonl.gz@0.5' --vocab-file tokenizer.model \\
      --output-prefix data/all --workers 8 --on-error skip
      reads every document of texts/ and a random half of the others
  python tools/preprocess_data.py --input qa.jsonl --keys question answer --vocab-file vocab.json \\
      --output-prefix data/qa
      writes data/qa_question_document and data/qa_answer_document
  python tools/preprocess_data.py --objective sft --input chats.jsonl --vocab-file tokenizer.model \\
      --output-prefix data/chats
      writes data/chats_sft and data/chats_sft_loss; train with --objective sft --data-path data/chats_sft"""
JOURNAL_SECONDS = 10.0


def main(args: argparse.Namespace) -> None:
    _check_flags(args)
    tokenizer = load_tokenizer(args.vocab_file, args.tokenizer_type)
    chats.print_notes(args, tokenizer)
    sources = find_files(args.input, args.encoding)
    _print_tokenizer_note(args, tokenizer, sources)
    journal = Journal(f"{args.output_prefix}.part.json", _job_description(args, sources, tokenizer))
    state = journal.state or {}
    chats.set_chat_date(args, state)
    try:
        output = _Output(args, tokenizer, state)
    except BaseException:  # also Ctrl-C
        journal.release()  # the lock only; the progress of an earlier run stays in the journal
        raise
    try:
        output.save(journal)  # reserve space for the journal before the disk fills up
        _tokenize_chunks(args, tokenizer.fingerprint, sources, output, journal)
        output.finish()
    except KeyboardInterrupt:
        output.save_and_close(journal)
        raise
    except Exception as error:
        # Without a document, there is nothing to resume.
        if not output.counts["documents"]:
            for builder in output.builders:
                builder.abort()
            journal.remove()
            raise
        kept = output.save_and_close(journal)
        raise RuntimeError(
            f"{describe_error(error)}; {kept} documents are kept: run the same command to resume, "
            f"or delete {journal.path} to start again"
        ) from error
    journal.remove()


def _print_tokenizer_note(args: argparse.Namespace, tokenizer: Tokenizer, sources: list[Source]) -> None:
    """Print why a large corpus is not encoded by tiktoken, if its tokenizer is a byte-level BPE."""
    size = sum(os.stat(source.path).st_size for source in sources)
    # The parts of conversations are too short for tiktoken to gain much, so they are never encoded by it.
    if args.objective == "sft" or size < SWITCH_AFTER:
        return
    reason = tokenizer.slow_reason()
    if reason:
        print(f"note: {args.vocab_file} is encoded by tokenizers and not by the faster tiktoken: {reason}")


def _check_flags(args: argparse.Namespace) -> None:
    """Raise ValueError for flags that contradict each other."""
    is_cpm_t5 = args.objective == "cpm-t5"
    if is_cpm_t5 and not args.append_eod:
        raise ValueError("--objective cpm-t5 needs an end-of-document token in every document; remove --no-append-eod")
    if is_cpm_t5 and args.split_sentences:
        raise ValueError("--objective cpm-t5 masks spans of documents, not of sentences; remove --split-sentences")
    masking = (args.noise_density, args.mean_span_length)
    if not is_cpm_t5 and masking != (0.15, 3.0):  # the defaults
        raise ValueError("--noise-density and --mean-span-length require --objective cpm-t5")
    chats.check_flags(args)
    if len(set(args.keys)) != len(args.keys):
        raise ValueError("--keys lists a key twice")


def _job_description(args: argparse.Namespace, sources: list[Source], tokenizer: Tokenizer) -> dict[str, Any]:
    """Return all inputs and settings that determine the output; a journal identifies its job by them."""
    files = []
    for source in sources:
        status = os.stat(source.path)
        files.append((*source, status.st_size, status.st_mtime_ns))
    settings = dict(vars(args))
    for ignored in ("input", "workers", "ray", "quiet", "debug", "vocab_file", "on_error"):
        settings.pop(ignored, None)
    settings |= chats.sidecar_entries(args, tokenizer)
    settings.pop("chat_date")  # a job may be resumed on another day, so the default date must not identify it
    if args.chat_date:
        settings["chat_date"] = args.chat_date
    return {
        "files": files,
        "tokenizer": tokenizer.fingerprint,
        "chunk": CHUNK_BYTES,
        "settings": settings,
        # How documents of FILE@0.5 are drawn. Jobs of earlier versions, which drew otherwise and read fewer columns of
        # Parquet files, must start again.
        "draw": "blake2b",
    }


def _tokenize_chunks(
    args: argparse.Namespace, fingerprint: str, sources: list[Source], output: "_Output", journal: Journal
) -> None:
    """Tokenize the chunks that the journal does not list as done. fingerprint: that of the tokenizer."""
    num_done = output.counts["chunks"]
    pending = itertools.islice(all_chunks(args, sources), num_done, None)
    progress = Progress(
        total=_total_bytes(sources), initial=output.counts["source_bytes"], unit="B", unit_scale=True,
        desc="tokenizing", disable=args.quiet,
    )  # fmt: skip
    if num_done:
        print(f"resuming after {output.counts['documents']} documents")
    first_tokens = output.counts["tokens"]
    last_saved = time.monotonic()
    with progress:
        for tokens in ordered_map(tokenize, pending, args.workers, start_worker, (args, fingerprint), args.ray):
            if tokens.bad and args.on_error == "stop":
                raise unreadable_error(tokens.bad[0])
            output.add(tokens)
            progress.update(tokens.source_bytes)
            rate = (output.counts["tokens"] - first_tokens) / max(progress.elapsed, 1e-9)
            progress.set_note(f"{rate / 1e3:.0f}k tokens/s")
            if time.monotonic() - last_saved > JOURNAL_SECONDS:
                output.save(journal)
                last_saved = time.monotonic()
    output.save(journal)
    if not output.counts["documents"]:
        raise InputError(
            f"no text in {', '.join(args.input)}: {output.counts['bad_lines']} unreadable and {output.counts['empty']} "
            "empty documents skipped (--on-error stop names the first unreadable one)"
        )


def _total_bytes(sources: list[Source]) -> int | None:
    """Return the bytes that all chunks have together, None if a file is compressed or holds columns."""
    total = 0
    for source in sources:
        if is_compressed(source.path) or format_suffix(source.path) == ".parquet":
            return None
        total += os.path.getsize(source.path)
    return total


class _Output:
    """Writer of all output pairs, with counts of what was read and written."""

    def __init__(self, args: argparse.Namespace, tokenizer: Tokenizer, state: dict[str, Any]) -> None:
        if not state:  # a new corpus; a resumed one continues with the ids that it has
            tokenizer.refuse_contradiction()  # raises if it does not follow a setting next to its vocabulary
        self.args = args
        self.tokenizer = tokenizer
        # Tokens around a document. They may come from files that the tokenizer's fingerprint does not cover, so the
        # journal records them, and `_is_usable` compares them.
        self._added = [*tokenizer.start, tokenizer.eod]
        self.sft = args.objective == "sft"
        level = "sentence" if args.split_sentences else "document"
        self.prefixes = [f"{args.output_prefix}_{key}_{level}" for key in args.keys]
        dtypes: dict[str, Any] = {"": best_dtype(tokenizer.vocab_size)}  # ending of a pair -> its dtype
        if self.sft:
            self.prefixes = [f"{args.output_prefix}_sft"]
            dtypes[LOSS_SUFFIX] = np.uint8
        elif args.objective == "cpm-t5":
            dtypes = {f"_{part}": np.int32 for part in TRIPLE_PARTS}
        pairs = {}  # prefix of a pair -> its dtype
        for prefix in self.prefixes:
            for ending, dtype in dtypes.items():
                pairs[prefix + ending] = dtype
            check_output(prefix, endings=dtypes)
        self.names = list(pairs)
        if state and not self._is_usable(state):  # killed while it renamed its files: begin again
            state = {}
        states = state.get("builders", [None] * len(self.names))  # None starts a pair from its beginning
        self.builders = []
        for (name, dtype), builder_state in zip(pairs.items(), states, strict=True):
            self.builders.append(IndexedDatasetBuilder(name, dtype, "part", builder_state))
        self.counts: Counter[str] = Counter(state.get("count"))
        self._num_journaled = self.counts["documents"]
        self._is_consistent = True  # false while a chunk is being added

    def _is_usable(self, state: dict[str, Any]) -> bool:
        """Return whether the earlier run left all temporary files; False if it was killed while it renamed them.

        Raises ValueError if a file was deleted, or if its tokenizer began or ended documents with other tokens.
        """
        if state["added"] != self._added:
            raise ValueError(
                f"{self.args.output_prefix}.part.json belongs to a run whose tokenizer begins or ends documents with "
                f"other tokens; use that tokenizer, or delete this file to start again"
            )
        for name in self.names:
            if os.path.exists(f"{name}.bin.part"):
                continue
            if not os.path.exists(f"{name}.bin"):
                raise ValueError(
                    f"{name}.bin.part is missing; delete {self.args.output_prefix}.part.json to start again"
                )
            return False  # this file has its final name already
        return True

    def add(self, tokens: TokenizedChunk) -> None:
        """Append the tokens of one chunk to all output pairs."""
        self._is_consistent = False
        for builder, part in zip(self.builders, tokens.parts, strict=True):
            builder.add_batch(*part)
        counts = self.counts
        counted = tokens.parts
        if self.sft:
            counted = tokens.parts[:1]  # without the loss mask
            counts["targets"] += int(tokens.parts[1].ids.sum())
        for part in counted:
            counts["tokens"] += len(part.ids)
        counts["chunks"] += 1
        counts["source_bytes"] += tokens.source_bytes
        counts["documents"] += len(tokens.parts[0].sequences)
        counts["bad_lines"] += len(tokens.bad)
        counts["empty"] += tokens.empty
        self._is_consistent = True

    def save(self, journal: Journal) -> None:
        states = [builder.state() for builder in self.builders]
        journal.write(
            {"builders": states, "count": self.counts, "chat_date": self.args.chat_date, "added": self._added}
        )
        self._num_journaled = self.counts["documents"]

    def save_and_close(self, journal: Journal) -> int:
        """After an error, save all complete chunks, so that a later run can resume; return their number of documents.

        If saving fails, only the chunks that the journal already records remain saved.
        """
        with contextlib.suppress(OSError, ValueError):  # saving fails on a full disk, or if files are already closed
            if self._is_consistent:
                self.save(journal)
        for builder in self.builders:
            builder.close()
        journal.release()
        return self._num_journaled

    def finish(self) -> None:
        """Write the sidecars, give all files their final names, and print a summary."""
        for builder in self.builders:
            builder.prepare()
        pairs = len(self.builders) // len(self.prefixes)  # number of pairs of a corpus, which share a sidecar
        for number, prefix in enumerate(self.prefixes):
            builders = self.builders[number * pairs : (number + 1) * pairs]
            self._write_sidecar(prefix, builders)
        for builder in self.builders:
            builder.publish()
        counts = self.counts
        summary = f"{counts['documents']} documents, {counts['tokens']} tokens"
        if self.sft:
            summary += f", {counts['targets']} of which count in the loss"
        files = ", ".join(f"{name}.bin" for name in self.names)
        summary += f" -> {files}"
        if counts["bad_lines"] or counts["empty"]:
            summary += f", {counts['bad_lines']} unreadable and {counts['empty']} empty documents skipped"
        print(summary)
        name = str(self.args.input[0])
        if counts["documents"] == 1 and format_suffix(name) == ".txt":
            print(f"note: {name} is a single document: in .txt files, a blank line separates documents")

    def _write_sidecar(self, prefix: str, builders: list[IndexedDatasetBuilder]) -> None:
        """Write the sidecar PREFIX.json; training and tools/inspect_data.py check the data against its contents."""
        tokenizer = self.tokenizer
        counts = self.counts
        tokens = sum(builder.num_tokens for builder in builders)
        if self.sft:
            tokens = counts["tokens"]  # without the loss mask
        content = {
            "tokenizer": tokenizer.name,
            "fingerprint": tokenizer.fingerprint,
            "vocab_size": tokenizer.vocab_size,
            "eod": tokenizer.eod,
            "append_eod": self.args.append_eod,
            **chats.sidecar_entries(self.args, tokenizer),
            "documents": counts["documents"],
            "sequences": builders[0].sequences,
            "tokens": tokens,
            "bad_lines": counts["bad_lines"],
            "empty": counts["empty"],
            "sha256": {Path(builder.prefix).name: builder.checksums for builder in builders},
        }
        write_json(f"{prefix}.json", content)


def build_parser() -> Parser:
    parser = Parser(__doc__, EXAMPLES)
    add = parser.add_argument
    add_input_flags(parser)
    prefix_help = "path prefix of the output files, such as data/corpus"
    add("--output-prefix", type=output_prefix, required=True, help=prefix_help)
    add("--vocab-file", type=local_path, required=True, help="tokenizer of tools/train_tokenizer.py or Hugging Face")
    add("--tokenizer-type", choices=KINDS, default="auto", help="tokenizer type (default: detected from the file)")
    add(
        "--keys",
        "--json-keys",
        "--json-key",
        nargs="+",
        default=["text"],
        help="keys of a record whose texts are tokenized, each key into its own pair; a record with an empty text "
        "under one of them is skipped (default: text)",
    )
    add("--split-sentences", action="store_true", help="store sentences as separate sequences in PREFIX_KEY_sentence")
    add_worker_flags(parser)
    add(
        "--append-eod",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="end every document with the end-of-document token (default: yes)",
    )
    add(
        "--objective", choices=("text", "sft", "cpm-t5"), default="text",
        help="type of corpus (default: text). sft: conversations; a record has the key messages, or the keys "
        "instruction, input and output; writes PREFIX_sft and its loss mask PREFIX_sft_loss. cpm-t5: documents in "
        "which this tool masks spans for T5; writes PREFIX_KEY_document_context, _target and _target_offset. For T5 on "
        "a corpus of type text, spans are masked during training",
    )  # fmt: skip
    add(
        "--chat-template", type=local_path, default="chatml",
        help="chat template for sft: chatml (default), tokenizer (the tokenizer's own template) or a Jinja file",
    )  # fmt: skip
    add(
        "--chat-date",
        help="date that strftime_now returns in the chat template, such as 2024-07-26 or 2024-07-26T15:30:00 "
        "(default: the current time); recorded in the sidecar",
    )
    density = number_type(between(0.01, 0.9))
    add("--noise-density", type=density, default=0.15, help="share of masked tokens for cpm-t5 (default: 0.15)")
    length = number_type(at_least(1))
    add("--mean-span-length", type=length, default=3.0, help="mean tokens in a masked span for cpm-t5 (default: 3)")
    add("--seed", type=natural_int, default=1234, help="seed of masked spans and of FILE@0.5 (default: 1234)")
    return parser


def cli() -> None:
    run(main, build_parser())


if __name__ == "__main__":
    cli()
