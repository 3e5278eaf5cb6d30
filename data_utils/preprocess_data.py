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
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from data_utils.chat_encoder import ChatEncoder
from data_utils.chat_templates import Piece, messages_of
from data_utils.indexed_writer import IndexedDatasetBuilder, fit
from megatron.config.fields import describe
from megatron.data.cpm_masking import PARTS, mask_document
from megatron.data.indexed_dataset import LOSS, best_dtype
from megatron.tokenizer import Tokenizer, load_tokenizer
from megatron.tokenizer.load import KINDS

from . import chats
from .cli import Parser, input_flags, local_path, max_document_bytes, run, unreadable, worker_flags, write_json
from .documents import CHUNK_BYTES, Chunk, chunks, documents
from .draws import DRAWS, draw_of
from .files import Source, find_files, is_compressed, kind
from .journal import Journal
from .parallel import ordered_map
from .progress import Progress
from .records import other_columns
from .sentences import split_sentences
from .streams import BadLine, InputError

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


class Part(NamedTuple):
    """Tokens of one chunk for one of the output pairs."""

    ids: NDArray[Any]  # all tokens, concatenated
    lengths: NDArray[np.int32]  # number of tokens of each sequence
    sequences: NDArray[np.int32]  # number of sequences of each document


class Tokens(NamedTuple):
    """The tokens of one chunk, as a worker process returns them."""

    parts: list[Part]
    bad: list[BadLine]
    empty: int
    source_bytes: int


class _Worker:
    """Settings of a worker process, set once when it starts."""

    args: argparse.Namespace
    tokenizer: Tokenizer
    start: NDArray[np.int32]
    eod: NDArray[np.int32]
    take: Any  # the record's keys to tokenize, or a function that extracts a conversation from a record
    chat: ChatEncoder


def _start_worker(args: argparse.Namespace) -> None:
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # the worker processes already use all cores
    _Worker.args, _Worker.tokenizer = args, load_tokenizer(args.vocab_file, args.tokenizer_type)
    _Worker.start = np.array(_Worker.tokenizer.start, dtype=np.int32)
    _Worker.eod = np.array([_Worker.tokenizer.eod] if args.append_eod else [], dtype=np.int32)
    _Worker.take = args.keys
    if args.objective == "sft":
        template = chats.template_of(args, _Worker.tokenizer)
        _Worker.take = lambda record: template.pieces(messages_of(record))
        _Worker.chat = ChatEncoder(_Worker.tokenizer, args.append_eod)


def tokenize(chunk: Chunk) -> Tokens:
    """Read and encode one chunk in a worker process."""
    args = _Worker.args
    found = list(documents(chunk, _Worker.take, args.seed, max_document_bytes(args), DRAWS[args.draw]))
    bad = [each for each in found if isinstance(each, BadLine)]
    good = [each for each in found if not isinstance(each, BadLine) and all(each)]
    parts: list[Part] = _conversations(good) if args.objective == "sft" else []
    for column in range(len(args.keys)) if args.objective != "sft" else ():
        texts = [document[column] for document in good]
        parts += _masked(chunk, texts) if args.objective == "cpm-t5" else [_encoded(texts)]
    return Tokens(parts, bad, len(found) - len(bad) - len(good), chunk.length)


def _encoded(texts: list[str]) -> Part:
    split = [split_sentences(text) for text in texts] if _Worker.args.split_sentences else [[text] for text in texts]
    encoded = _Worker.tokenizer.encode_batch([piece for pieces in split for piece in pieces])
    counts = np.array([len(pieces) for pieces in split], dtype=np.int32)
    if len(_Worker.eod):
        for last in np.cumsum(counts) - 1:
            encoded[last] = np.append(encoded[last], _Worker.eod)
    if len(_Worker.start):
        for first in np.cumsum(counts) - counts:
            encoded[first] = np.append(_Worker.start, encoded[first])
    ids = np.concatenate(encoded) if encoded else np.empty(0, np.int32)
    dtype = np.dtype(best_dtype(_Worker.tokenizer.vocab_size))
    return Part(fit(ids, dtype, "the output"), np.array([len(part) for part in encoded], dtype=np.int32), counts)


def _conversations(found: list[tuple[Piece, ...]]) -> list[Part]:
    """Return the tokens of conversations and the loss mask of these tokens, as two parts."""
    ids, counts, lengths = chats.encode(_Worker.chat, found)
    dtype, ones = np.dtype(best_dtype(_Worker.tokenizer.vocab_size)), np.ones(len(found), dtype=np.int32)
    return [Part(fit(ids, dtype, "the output"), lengths, ones), Part(counts, lengths, ones)]


def _masked(chunk: Chunk, texts: list[str]) -> list[Part]:
    """Mask spans for CPM's T5, seeded by each document's position; return contexts, targets and target offsets."""
    args, tokenizer = _Worker.args, _Worker.tokenizer
    made: tuple[list[NDArray[np.int64]], ...] = ([], [], [])
    for number, ids in enumerate(tokenizer.encode_batch(texts)):
        seed = (args.seed, chunk.source.number, chunk.start, number)
        whole = np.append(ids, _Worker.eod)
        masked = mask_document(whole, tokenizer.vocab_size, args.noise_density, args.mean_span_length, seed)
        for part, piece in zip(made, masked, strict=True):
            part.append(piece)
    return [
        Part(
            # Sentinel ids follow the vocabulary, and a document may have any number of spans, so ids need int32.
            fit(np.concatenate(pieces), np.dtype(np.int32), "the output") if pieces else np.empty(0, np.int32),
            np.array([len(piece) for piece in pieces], dtype=np.int32),
            np.ones(len(pieces), dtype=np.int32),
        )
        for pieces in made
    ]


def main(args: argparse.Namespace) -> None:
    _check(args)
    tokenizer = load_tokenizer(args.vocab_file, args.tokenizer_type)
    chats.print_notes(args, tokenizer)
    sources = find_files(args.input, args.encoding)
    journal = Journal(f"{args.output_prefix}.part.json", _job(args, sources, tokenizer))
    args = chats.with_date(args, journal.state or {})
    args.draw = draw_of(journal.state)
    try:
        output = _Output(args, tokenizer, journal.state or {})
    except BaseException:
        journal.release()
        raise
    try:
        output.save(journal)  # reserve space for the journal before the disk fills up
        _convert(args, sources, output, journal)
        output.finish()
    except KeyboardInterrupt:
        output.keep(journal)
        raise
    except Exception as error:
        if not output.count["documents"]:
            output.abort()
            journal.remove()
            raise
        kept = output.keep(journal)
        raise RuntimeError(
            f"{describe(error)}; {kept} documents are kept: run the same command to resume, "
            f"or delete {journal.path} to start again"
        ) from error
    journal.remove()


def _check(args: argparse.Namespace) -> None:
    if args.objective == "cpm-t5" and not args.append_eod:
        raise ValueError("--objective cpm-t5 needs an end-of-document token in every document; remove --no-append-eod")
    if args.objective == "cpm-t5" and args.split_sentences:
        raise ValueError("--objective cpm-t5 masks spans of documents, not of sentences; remove --split-sentences")
    chats.check(args)
    if len(set(args.keys)) != len(args.keys):
        raise ValueError("--keys lists a key twice")
    if args.workers < 0:
        raise ValueError("--workers must not be negative")


def _job(args: argparse.Namespace, sources: list[Source], tokenizer: Tokenizer) -> dict[str, Any]:
    """Return all inputs and settings that determine the output; a journal identifies its job by them."""
    files = [(*source, os.stat(source.path).st_size, os.stat(source.path).st_mtime_ns) for source in sources]
    ignored = ("input", "workers", "ray", "quiet", "debug", "vocab_file", "on_error")
    settings = {name: value for name, value in vars(args).items() if name not in ignored}
    settings |= chats.sidecar_entries(args, tokenizer)
    settings.pop("chat_date")  # a job may be resumed on another day, so the default date must not identify it
    settings |= {"chat_date": args.chat_date} if args.chat_date else {}
    job = {"files": files, "tokenizer": tokenizer.fingerprint, "chunk": CHUNK_BYTES, "settings": settings}
    # A chunk contains only the columns that are read, so the choice of columns determines where chunks end.
    columns = {source.path: other_columns(source.path) for source in sources if kind(source.path) == ".parquet"}
    return {**job, "columns": columns} if any(columns.values()) else job


def _convert(args: argparse.Namespace, sources: list[Source], output: "_Output", journal: Journal) -> None:
    """Tokenize the chunks that the journal does not list as done."""
    done = output.count["chunks"]
    pending = itertools.islice(
        (c for source in sources for c in chunks(source, largest=max_document_bytes(args))), done, None
    )
    any_stream = any(is_compressed(source.path) or kind(source.path) == ".parquet" for source in sources)
    total = None if any_stream else sum(os.path.getsize(source.path) for source in sources)
    progress = Progress[bytes](
        total=total, initial=output.count["source_bytes"], unit="B", unit_scale=True, desc="tokenizing",
        disable=args.quiet,
    )  # fmt: skip
    if done:
        print(f"resuming after {output.count['documents']} documents")
    begin, saved = output.count["tokens"], time.monotonic()
    with progress:
        for tokens in ordered_map(tokenize, pending, args.workers, _start_worker, (args,), args.ray):
            if tokens.bad and args.on_error == "stop":
                raise unreadable(tokens.bad[0])
            output.add(tokens)
            progress.update(tokens.source_bytes)
            elapsed = max(progress.elapsed, 1e-9)
            progress.set_note(f"{(output.count['tokens'] - begin) / elapsed / 1e3:.0f}k tokens/s")
            if time.monotonic() - saved > JOURNAL_SECONDS:
                output.save(journal)
                saved = time.monotonic()
    output.save(journal)
    if not output.count["documents"]:
        raise InputError(f"no text in {', '.join(args.input)}")


class _Output:
    """Writer of all output pairs, with counts of what was read and written."""

    def __init__(self, args: argparse.Namespace, tokenizer: Tokenizer, state: dict[str, Any]) -> None:
        self.args, self.tokenizer = args, tokenizer
        level = "sentence" if args.split_sentences else "document"
        self.prefixes = [f"{args.output_prefix}_{key}_{level}" for key in args.keys]
        masks, self.sft = args.objective == "cpm-t5", args.objective == "sft"
        self.names = [f"{p}_{part}" for p in self.prefixes for part in PARTS] if masks else self.prefixes
        dtypes: list[Any] = [np.int32 if masks else best_dtype(tokenizer.vocab_size)] * len(self.names)
        if self.sft:
            self.prefixes = [f"{args.output_prefix}_sft"]
            self.names, dtypes = [self.prefixes[0], self.prefixes[0] + LOSS], [*dtypes, np.uint8]
        for name in self.names:
            if state and not os.path.exists(f"{name}.bin.part"):
                if not os.path.exists(f"{name}.bin"):
                    raise ValueError(
                        f"{name}.bin.part is missing; delete {args.output_prefix}.part.json to start again"
                    )
                state = {}  # the earlier run was killed while it renamed its files, so start again
        states = state.get("builders", [None] * len(self.names))
        self.builders = [
            IndexedDatasetBuilder(name, dtype, "part", state)
            for name, dtype, state in zip(self.names, dtypes, states, strict=True)
        ]
        zero = dict.fromkeys(("chunks", "source_bytes", "documents", "tokens", "targets", "bad_lines", "empty"), 0)
        self.count: dict[str, int] = {**zero, **state.get("count", {})}
        self._journaled = self.count["documents"]
        self._whole = True  # false while a chunk is being added

    def add(self, tokens: Tokens) -> None:
        self._whole = False
        for builder, part in zip(self.builders, tokens.parts, strict=True):
            builder.add_batch(*part)
        self.count["chunks"] += 1
        self.count["source_bytes"] += tokens.source_bytes
        self.count["documents"] += len(tokens.parts[0].sequences)
        self.count["tokens"] += sum(len(part.ids) for part in tokens.parts[: 1 if self.sft else None])
        self.count["targets"] += int(tokens.parts[1].ids.sum()) if self.sft else 0
        self.count["bad_lines"] += len(tokens.bad)
        self.count["empty"] += tokens.empty
        self._whole = True

    def save(self, journal: Journal) -> None:
        state = {"builders": [builder.state() for builder in self.builders], "count": self.count}
        journal.write({**state, "chat_date": self.args.chat_date, "draw": self.args.draw})
        self._journaled = self.count["documents"]

    def keep(self, journal: Journal) -> int:
        """After an error, save all complete chunks, so that a later run can resume; return their number of documents.

        If saving fails, only the chunks that the journal already records remain saved.
        """
        with contextlib.suppress(OSError, ValueError):  # saving fails on a full disk, or if files are already closed
            if self._whole:
                self.save(journal)
        for builder in self.builders:
            builder.close()
        journal.release()
        return self._journaled

    def finish(self) -> None:
        for builder in self.builders:
            builder.prepare()
        for prefix in self.prefixes:
            _write_sidecar(
                prefix, self.tokenizer, self.args, [b for b in self.builders if b.prefix.startswith(prefix)], self.count
            )
        for builder in self.builders:
            builder.publish()
        skipped = f", {self.count['bad_lines']} unreadable and {self.count['empty']} empty documents skipped"
        learned = f", {self.count['targets']} of which count in the loss" if self.sft else ""
        print(
            f"{self.count['documents']} documents, {self.count['tokens']} tokens{learned} -> "
            + ", ".join(f"{name}.bin" for name in self.names)
            + skipped * bool(self.count["bad_lines"] or self.count["empty"])
        )

    def abort(self) -> None:
        for builder in self.builders:
            builder.abort()


def _write_sidecar(
    prefix: str,
    tokenizer: Tokenizer,
    args: argparse.Namespace,
    builders: list[IndexedDatasetBuilder],
    count: dict[str, int],
) -> None:
    """Write the sidecar PREFIX.json; training and tools/inspect_data.py check the data against its contents."""
    content = {
        "tokenizer": tokenizer.name,
        "fingerprint": tokenizer.fingerprint,
        "vocab_size": tokenizer.vocab_size,
        "eod": tokenizer.eod,
        "append_eod": args.append_eod,
        **chats.sidecar_entries(args, tokenizer),
        "documents": count["documents"],
        "sequences": builders[0].sequences,
        "tokens": count["tokens"] if args.objective == "sft" else sum(builder.num_tokens for builder in builders),
        "bad_lines": count["bad_lines"],
        "empty": count["empty"],
        "sha256": {Path(builder.prefix).name: builder.checksums for builder in builders},
    }
    write_json(f"{prefix}.json", content)


def build_parser() -> Parser:
    parser = Parser(__doc__ or "", EXAMPLES)
    add = parser.add_argument
    input_flags(parser)
    add("--output-prefix", type=local_path, required=True, help="path prefix of the output files, such as data/corpus")
    add("--vocab-file", type=local_path, required=True, help="tokenizer of tools/train_tokenizer.py or Hugging Face")
    add("--tokenizer-type", choices=KINDS, default="auto", help="tokenizer type (default: detected from the file)")
    add(
        "--keys",
        "--json-keys",
        "--json-key",
        nargs="+",
        default=["text"],
        help="keys of a record whose texts are tokenized, each key into its own pair (default: text)",
    )
    add("--split-sentences", action="store_true", help="store sentences as separate sequences in PREFIX_KEY_sentence")
    worker_flags(parser)
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
    add("--noise-density", type=float, default=0.15, help="share of masked tokens for cpm-t5 (default: 0.15)")
    add("--mean-span-length", type=float, default=3.0, help="mean tokens in a masked span for cpm-t5 (default: 3)")
    add("--seed", type=int, default=1234, help="seed for span masking and for sampling FILE@0.5 (default: 1234)")
    add("--quiet", action="store_true", help="show no progress bar")
    return parser


def cli() -> None:
    run(main, build_parser())


if __name__ == "__main__":
    cli()
