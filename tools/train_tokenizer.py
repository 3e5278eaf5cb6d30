"""Train a lossless sentencepiece tokenizer on a corpus."""

import argparse
import random
from collections.abc import Iterator

from _cli import Parser, run
from tqdm import tqdm

from data_utils.documents import InputError, find_files, texts
from megatron.tokenizer import load_tokenizer
from megatron.tokenizer.sentencepiece import train

EXAMPLES = """\
  python tools/train_tokenizer.py --input corpus.jsonl --vocab-size 8000 --output tokenizer.model
  python tools/train_tokenizer.py --input texts/ --vocab-size 32000 --output tokenizer.model --max-mb 200"""


def sample(inputs: list[str], key: str, max_bytes: int, seed: int) -> list[str]:
    """Documents of the corpus, at most about `max_bytes`, every one as likely (reservoir by size)."""
    kept: list[str] = []
    rng, size = random.Random(seed), 0
    for seen, text in enumerate(texts(inputs, key), start=1):
        if size < max_bytes:
            kept.append(text)
            size += len(text.encode())
        elif (at := rng.randrange(seen)) < len(kept):
            kept[at] = text
    return kept


def main(args: argparse.Namespace) -> None:
    if args.vocab_size < 300:
        raise ValueError("--vocab-size must be at least 300: 256 bytes come first")
    find_files(args.input)
    corpus = sample(args.input, args.json_key, args.max_mb * 10**6, args.seed)
    if not any(text.strip() for text in corpus):
        raise InputError(f"no text in {', '.join(args.input)}")

    def watched() -> Iterator[str]:
        yield from tqdm(corpus, desc="training tokenizer", unit=" documents", disable=args.quiet)

    train(watched(), args.output, args.vocab_size, args.model_type)
    tokenizer = load_tokenizer(args.output)
    print(f"{tokenizer.vocab_size} tokens -> {args.output}")


def build_parser() -> Parser:
    parser = Parser(__doc__ or "", EXAMPLES)
    parser.add_argument("--input", nargs="+", required=True, help="files or folders: .jsonl, .json, .txt, plain or .gz")
    parser.add_argument("--output", required=True, help="where to write the .model file")
    parser.add_argument("--vocab-size", type=int, default=8000, help="number of tokens (default: 8000)")
    parser.add_argument("--model-type", choices=("bpe", "unigram"), default="bpe", help="default: bpe")
    parser.add_argument("--json-key", default="text", help="key of the text in a JSON line (default: text)")
    parser.add_argument("--max-mb", type=int, default=50, help="train on at most this much of the text (default: 50)")
    parser.add_argument("--seed", type=int, default=1234, help="seed of the sample (default: 1234)")
    parser.add_argument("--quiet", action="store_true", help="no progress bar")
    return parser


if __name__ == "__main__":
    run(main, build_parser())
