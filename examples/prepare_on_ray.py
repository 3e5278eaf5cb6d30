"""Prepare training data on a Ray cluster, or with local processes if Ray is not installed; the output is the same.

    python examples/prepare_on_ray.py --input corpus/sample.jsonl --output runs/prepared --vocab-size 4000

The example shows three steps: clean the text, train a tokenizer, and tokenize the text. The two long steps, cleaning
and tokenizing, run on the Ray cluster. The example prints the output of each step, where the workers ran, and the
SHA-256 of the tokens.
"""

import argparse
import hashlib
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def cluster():
    """Return the value of the --ray flag: $RAY_ADDRESS or "local"; None if Ray is not installed."""
    try:
        import ray  # an optional package: pip install ray
    except ImportError:
        return None
    del ray
    return os.environ.get("RAY_ADDRESS", "local")  # "local" starts Ray on this machine, "auto" joins `ray start`


def tool(name, *words):
    subprocess.run([sys.executable, ROOT / "tools" / f"{name}.py", *words], check=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--input", nargs="+", required=True, help="input of tools/clean_corpus.py: files, folders or globs"
    )
    parser.add_argument(
        "--output",
        type=Path,
        required=True,
        help="output folder, on a file system that all machines of the cluster share",
    )
    parser.add_argument("--vocab-size", default="30000")
    parser.add_argument("--workers", default=str(min(os.cpu_count() or 1, 8)))
    args = parser.parse_args()
    args.output.mkdir(parents=True, exist_ok=True)
    address = cluster()
    workers = ["--workers", args.workers, *(["--ray", address] if address else [])]
    clean, model = str(args.output / "clean.jsonl"), str(args.output / "tokenizer.model")

    tool("clean_corpus", "--input", *args.input, "--output", clean, *workers)
    tool("train_tokenizer", "--input", clean, "--vocab-size", args.vocab_size, "--output", model)
    prefix = str(args.output / "data")
    tool("preprocess_data", "--input", clean, "--vocab-file", model, "--output-prefix", prefix, "--quiet", *workers)

    print(
        f"{args.workers} workers",
        f"of the Ray cluster {address}" if address else "on this machine, as Ray is not installed",
    )
    print("sha256", hashlib.sha256(Path(f"{prefix}_text_document.bin").read_bytes()).hexdigest())


if __name__ == "__main__":
    try:
        main()
    except subprocess.CalledProcessError as error:
        sys.exit(error.returncode)  # the tool has already printed the error
