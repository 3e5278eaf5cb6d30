"""Train a lossless tokenizer on a corpus: decoding the ids of any Unicode text gives the same text."""

import argparse
import heapq
import random
from collections.abc import Iterator
from operator import itemgetter
from pathlib import Path

from megatron.tokenizer import load_tokenizer
from megatron.tokenizer.segment import SEGMENTERS
from megatron.tokenizer.sentencepiece import EOD

from .cli import Parser, add_input_flags, local_path, max_document_bytes, positive_int, run, unreadable_error
from .documents import read_texts
from .files import check_outputs
from .progress import Progress
from .streams import BadLine, InputError
from .tokenizer_training import BYTES, train_byte_bpe, train_cpm, train_cpm_vocab, train_sentencepiece

EXAMPLES = """\
  python tools/train_tokenizer.py --input corpus.jsonl --vocab-size 8000 --output tokenizer.model
      sentencepiece BPE on raw text, the default: trains fastest and gives the fewest tokens
  python tools/train_tokenizer.py --input texts/ --model-type unigram --word-borders jieba --vocab-size 32000 \\
      --output tokenizer.model
      no token crosses a word boundary of jieba; only training needs jieba
  python tools/train_tokenizer.py --input texts/ --tokenizer-type cpm --vocab-size 30000 --output cpm.model
  python tools/train_tokenizer.py --input texts/ --tokenizer-type gpt2-bpe --vocab-size 50000 --output bpe/
      writes bpe/vocab.json and bpe/merges.txt"""
# Type -> suffix by which tools recognise its file; gpt2-bpe is a folder.
SUFFIXES = {"sentencepiece": ".model", "cpm": ".model", "cpm-vocab": ".txt", "gpt2-bpe": None, "hf": ".json"}


def sample_documents(documents: Iterator[str], max_bytes: int, seed: int, quiet: bool) -> list[str]:
    """Return a uniform random sample of the documents, in their order, with about `max_bytes` in total.

    Each document draws a number. Those with the lowest numbers are kept, as many as `max_bytes` need.
    """
    rng = random.Random(seed)
    kept: list[tuple[float, int, int, str]] = []  # heap of (-number, place, bytes, text), the highest number first
    size = 0
    for place, text in enumerate(Progress(documents, desc="reading", unit=" documents", disable=quiet)):
        num_bytes = len(text.encode())
        size += num_bytes
        heapq.heappush(kept, (-rng.random(), place, num_bytes, text))
        # kept[0] is the document with the highest number. Drop it while the other documents suffice.
        while size - kept[0][2] >= max_bytes:
            _, _, popped_bytes, _ = heapq.heappop(kept)
            size -= popped_bytes
    kept.sort(key=itemgetter(1))
    return [text for *_, text in kept]


def main(args: argparse.Namespace) -> None:
    if args.vocab_size < 300:
        raise ValueError(f"--vocab-size {args.vocab_size} must be at least 300, because 256 tokens stand for bytes")
    kind = args.tokenizer_type
    output = args.output
    if args.word_borders and kind != "sentencepiece":
        raise ValueError(f"--word-borders is for --tokenizer-type sentencepiece, not for {kind}")
    if args.model_type and kind not in ("sentencepiece", "cpm"):
        raise ValueError(f"--model-type is for sentencepiece and cpm, not for {kind}")
    if args.special_tokens and kind not in ("sentencepiece", "hf"):
        raise ValueError(f"--special-tokens is for --tokenizer-type sentencepiece and hf, not for {kind}")
    names = ["", *args.special_tokens]
    if kind == "sentencepiece":
        names += ["<unk>", EOD, "\n", *BYTES]
    if len(set(names)) < len(names):
        raise ValueError("--special-tokens lists a name twice, an empty name, or a token that is always added")
    check_outputs(args.input, [output], args.encoding)
    needed = SUFFIXES[kind]
    suffix = Path(output).suffix
    # `load_tokenizer` reads a file with any other suffix as a .model file.
    format_read = suffix if suffix in (".txt", ".json") else ".model"
    if needed and needed != format_read:
        raise ValueError(f"--output {output} must end with {needed} for --tokenizer-type {kind}")
    num_bad = 0

    def on_bad(line: BadLine) -> None:
        nonlocal num_bad
        if args.on_error == "stop":
            raise unreadable_error(line)
        num_bad += 1

    documents = read_texts(
        args.input, args.json_key, max_document_bytes(args), on_bad, args.seed, encoding=args.encoding
    )
    corpus = sample_documents(documents, args.max_mb * 10**6, args.seed, args.quiet)
    skipped = f", {num_bad} unreadable documents skipped (--on-error stop names the first)" if num_bad else ""
    if not any(text.strip() for text in corpus):
        raise InputError(f"no text in {', '.join(args.input)}{skipped}")

    def with_progress() -> Iterator[str]:
        yield from Progress(corpus, desc="training tokenizer", unit=" documents", disable=args.quiet)

    if kind == "sentencepiece":
        train_sentencepiece(
            with_progress(),
            output,
            args.vocab_size,
            args.model_type or "bpe",
            args.word_borders,
            args.special_tokens,
        )
    elif kind == "cpm":
        train_cpm(with_progress(), output, args.vocab_size, args.model_type or "unigram")
    elif kind == "cpm-vocab":
        train_cpm_vocab(with_progress(), output, args.vocab_size)
    else:
        train_byte_bpe(with_progress(), output, args.vocab_size, kind, args.special_tokens)
    tokenizer = load_tokenizer(output, kind)
    print(f"{tokenizer.vocab_size} tokens -> {output}{skipped}")


def build_parser() -> Parser:
    parser = Parser(__doc__, EXAMPLES)
    add = parser.add_argument
    add_input_flags(parser)
    add("--output", type=local_path, required=True, help="output file (.model, .txt or .json); for gpt2-bpe a folder")
    add("--vocab-size", type=int, default=8000, help="number of tokens (default: 8000)")
    add("--tokenizer-type", choices=SUFFIXES, default="sentencepiece", help="tokenizer type (default: sentencepiece)")
    add(
        "--model-type",
        choices=("bpe", "unigram"),
        help="sentencepiece algorithm (default: bpe for sentencepiece, unigram for cpm)",
    )
    add("--word-borders", choices=SEGMENTERS, help="segmenter whose word boundaries no token may cross")
    add(
        "--special-tokens", nargs="+", default=[], metavar="NAME",
        help="names of special tokens to add, such as '<|im_start|>' '<|im_end|>' for chats or '<fim_prefix>'; a text "
        "that contains such a name is still encoded as plain text. Only for --tokenizer-type sentencepiece and hf",
    )  # fmt: skip
    add("--json-key", default="text", help="key of the text in a record (default: text)")
    add("--max-mb", type=positive_int, default=50, help="amount of text to sample from the input, in MB (default: 50)")
    add("--seed", type=int, default=1234, help="seed of the sample (default: 1234)")
    return parser


def cli() -> None:
    run(main, build_parser())


if __name__ == "__main__":
    cli()
