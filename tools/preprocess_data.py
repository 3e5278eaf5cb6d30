"""Text to tokens: jsonl or txt files -> one .bin/.idx pair for training.

The output does not depend on the number of workers, and memory not on the size of the input:
at most a few chunks of about a megabyte are under way for each worker.
"""

import argparse
import itertools
import json
import os
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, contextmanager
from multiprocessing import get_context
from typing import NamedTuple

import numpy as np
from _cli import Parser, run
from numpy.typing import NDArray
from tqdm import tqdm

from data_utils.documents import BadLine, Chunk, InputError, chunks, documents, find_files
from megatron.data.indexed_dataset import IndexedDatasetBuilder, best_dtype
from megatron.tokenizer import Tokenizer, load_tokenizer

EXAMPLES = """\
  python tools/preprocess_data.py --input corpus.jsonl --vocab-file tokenizer.model --output-prefix data/corpus
      writes data/corpus_text_document.bin, .idx and .json; train with --data-path data/corpus_text_document
  python tools/preprocess_data.py --input texts/ more.jsonl.gz --vocab-file tokenizer.model --output-prefix data/all \\
      --workers 8 --on-error skip"""
CHUNKS_AHEAD = 3  # per worker


class Tokens(NamedTuple):
    """What a worker makes of a chunk."""

    ids: NDArray[np.int32]  # all tokens, back to back
    lengths: NDArray[np.int32]  # tokens of each document
    bad: list[BadLine]
    empty: int
    source_bytes: int


class _Worker:
    """Settings of a worker process, set once when it starts."""

    tokenizer: Tokenizer
    key: str
    append_eod: bool


def _start_worker(vocab_file: str, key: str, append_eod: bool) -> None:
    _Worker.tokenizer, _Worker.key, _Worker.append_eod = load_tokenizer(vocab_file), key, append_eod


def tokenize(chunk: Chunk) -> Tokens:
    """Read and encode one chunk."""
    found = list(documents(chunk, _Worker.key))
    bad = [each for each in found if isinstance(each, BadLine)]
    good = [each for each in found if isinstance(each, str) and each]
    encoded = _Worker.tokenizer.encode_batch(good)
    if _Worker.append_eod:
        eod = np.array([_Worker.tokenizer.eod], dtype=np.int32)
        encoded = [part for ids in encoded for part in (ids, eod)]
    ids = np.concatenate(encoded) if encoded else np.empty(0, np.int32)
    sizes = np.array([len(part) for part in encoded], dtype=np.int32)
    if _Worker.append_eod:
        sizes = sizes.reshape(-1, 2).sum(axis=1, dtype=np.int32)
    empty = len(found) - len(bad) - len(good)
    return Tokens(ids, sizes, bad, empty, chunk.length)


def tokenize_all(pending: Iterator[Chunk], workers: int, settings: tuple[str, str, bool]) -> Iterator[Tokens]:
    """`tokenize` over all chunks, in their order, by `workers` processes (0: in this one)."""
    if workers == 0:
        _start_worker(*settings)
        yield from map(tokenize, pending)
        return
    under_way: deque[Future[Tokens]] = deque()
    with ProcessPoolExecutor(workers, get_context("spawn"), _start_worker, settings) as pool:
        try:
            for chunk in pending:
                under_way.append(pool.submit(tokenize, chunk))
                if len(under_way) >= workers * CHUNKS_AHEAD:
                    yield under_way.popleft().result()
            while under_way:
                yield under_way.popleft().result()
        except BrokenProcessPool:
            raise RuntimeError("a worker process died, perhaps for lack of memory; try fewer --workers") from None
        finally:
            pool.shutdown(cancel_futures=True)


def main(args: argparse.Namespace) -> None:
    if args.objective == "cpm-t5" and not args.append_eod:
        raise ValueError("--objective cpm-t5 masks the end of every document: leave --no-append-eod out")
    tokenizer = load_tokenizer(args.vocab_file)
    files = find_files(args.input)
    prefix = f"{args.output_prefix}_{args.json_key}_document"
    total = sum(os.path.getsize(path) for path in files if not path.endswith(".gz"))
    any_compressed = any(path.endswith(".gz") for path in files)
    pending = (chunk for path in files for chunk in chunks(path))
    results = tokenize_all(pending, args.workers, (args.vocab_file, args.json_key, args.append_eod))
    count = {"documents": 0, "tokens": 0, "bad_lines": 0, "empty": 0}
    progress = tqdm(
        total=None if any_compressed else total, unit="B", unit_scale=True, desc="tokenizing", disable=args.quiet
    )
    with progress, _writer(args, prefix, tokenizer) as write:
        for tokens in results:
            if tokens.bad and args.on_error == "stop":
                raise InputError(f"{tokens.bad[0]} (--on-error skip leaves such documents out)")
            write(tokens)
            count["documents"] += len(tokens.lengths)
            count["tokens"] += len(tokens.ids)
            count["bad_lines"] += len(tokens.bad)
            count["empty"] += tokens.empty
            progress.update(tokens.source_bytes)
            elapsed = max(progress.format_dict["elapsed"], 1e-9)
            progress.set_postfix_str(f"{count['tokens'] / elapsed / 1e3:.0f}k tokens/s")
        if not count["documents"]:
            raise InputError(f"no text in {', '.join(args.input)}")
        _write_sidecar(prefix, tokenizer, args.append_eod, count)
    left_out = f", {count['bad_lines']} bad and {count['empty']} empty left out"
    print(
        f"{count['documents']} documents, {count['tokens']} tokens -> {prefix}{'_context' * (args.objective != 'text')}.bin"
        + left_out * bool(count["bad_lines"] or count["empty"])
    )


@contextmanager
def _writer(args: argparse.Namespace, prefix: str, tokenizer: Tokenizer) -> Iterator[Callable[[Tokens], None]]:
    """What appends the documents of a chunk to the output; all files get their names at the end, or none."""
    if args.objective == "text":
        with IndexedDatasetBuilder(prefix, best_dtype(tokenizer.vocab_size)) as builder:
            yield lambda tokens: builder.add_batch(tokens.ids, tokens.lengths, np.ones(len(tokens.lengths), np.int64))
        return
    from megatron.data import cpm_triples  # it needs torch, which the workers are spared

    with ExitStack() as stack:
        # Ids behind the vocabulary stand for spans, and nothing bounds a document's number of them.
        parts = [stack.enter_context(IndexedDatasetBuilder(f"{prefix}_{name}", np.int32)) for name in cpm_triples.PARTS]
        numbers = itertools.count()

        def write(tokens: Tokens) -> None:
            for ids in np.split(tokens.ids, np.cumsum(tokens.lengths)[:-1]):
                seed = args.seed, next(numbers)
                masked = cpm_triples.mask_document(
                    ids, tokenizer.vocab_size, args.noise_density, args.mean_span_length, seed
                )
                for builder, part in zip(parts, masked, strict=True):
                    builder.add_document(part)

        yield write


def _write_sidecar(prefix: str, tokenizer: Tokenizer, append_eod: bool, count: dict[str, int]) -> None:
    """What training checks the data against: which tokenizer made it."""
    content = {
        "tokenizer": tokenizer.name,
        "fingerprint": tokenizer.fingerprint,
        "vocab_size": tokenizer.vocab_size,
        "eod": tokenizer.eod,
        "append_eod": append_eod,
        **count,
    }
    temporary = f"{prefix}.json.{os.getpid()}.tmp"
    with open(temporary, "w", encoding="utf-8") as file:
        json.dump(content, file, indent=2)
    os.replace(temporary, f"{prefix}.json")


def build_parser() -> Parser:
    parser = Parser(__doc__ or "", EXAMPLES)
    parser.add_argument("--input", nargs="+", required=True, help="files or folders: .jsonl, .json, .txt, plain or .gz")
    parser.add_argument("--output-prefix", required=True, help="where to write, without the ending")
    parser.add_argument("--vocab-file", required=True, help="the tokenizer: a sentencepiece .model file")
    parser.add_argument("--json-key", default="text", help="key of the text in a JSON line (default: text)")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="processes (default: all cores)")
    parser.add_argument(
        "--append-eod", action=argparse.BooleanOptionalAction, default=True, help="end every document with <eod>"
    )
    parser.add_argument("--on-error", choices=("stop", "skip"), default="stop", help="what to do with a bad line")
    parser.add_argument(
        "--objective", choices=("text", "cpm-t5"), default="text",
        help="cpm-t5 masks spans now and writes PREFIX_context, _target and _target_offset; T5 can mask plain text as it reads (default: text)",
    )  # fmt: skip
    parser.add_argument(
        "--noise-density", type=float, default=0.15, help="cpm-t5: share of masked tokens (default: 0.15)"
    )
    parser.add_argument("--mean-span-length", type=float, default=3.0, help="cpm-t5: tokens of a span (default: 3)")
    parser.add_argument("--seed", type=int, default=1234, help="cpm-t5: seed of the spans (default: 1234)")
    parser.add_argument("--quiet", action="store_true", help="no progress bar")
    return parser


if __name__ == "__main__":
    run(main, build_parser())
