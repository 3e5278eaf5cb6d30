"""Speed of the data pipeline compared with other libraries: text to tokens, start-up, reading samples.

    python benchmarks/data.py --corpus zh_docs.jsonl --rounds 5
    python benchmarks/data.py --sections preprocess startup read remote

Without --corpus a synthetic Chinese-like text is generated. Contenders take turns within every round. A contender's
rate is its output divided by the CPU-seconds of all its processes. The tables show the median, lowest and highest rate
of the rounds. Peak memory is that of a contender's largest process.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from _alternate import ROOT, new_parser, spread

from data_utils.documents import read_texts
from data_utils.indexed_writer import IndexedDatasetBuilder
from data_utils.tokenizer_training import train_byte_bpe, train_cpm, train_sentencepiece
from megatron.data.indexed_dataset import HEADER, MAGIC, VERSION
from megatron.tokenizer import TokenizerError

Rates = dict[str, list[float]]
SEQ = 1024


def write_synthetic(path: Path, megabytes: float) -> None:
    """Write a JSON Lines file of documents made of random words: Chinese words of 1 to 4 characters, some English."""
    rng = random.Random(1)
    words = [
        "".join(chr(0x4E00 + int(rng.paretovariate(1.0) * 40) % 5000) for _ in range(rng.randint(1, 4)))
        for _ in range(20000)
    ]
    words += ["Python", "GPU", "model-1.3B", "C++", "3.14"] * 40
    size = 0
    with open(path, "w", encoding="utf-8") as file:
        while size < megabytes * 1e6:
            text = "".join(rng.choice(words) + "，。 \n"[rng.randrange(4)] * (rng.random() < 0.2) for _ in range(600))
            size += len((json.dumps({"text": text}, ensure_ascii=False)).encode())
            file.write(json.dumps({"text": text}, ensure_ascii=False) + "\n")


# ------------------------------------------------------------------------------------------ text to tokens


PLAIN = """
import json, sys, time, numpy
kind, model, source, out = sys.argv[1:]
if kind == "jieba":
    import jieba, logging; jieba.setLogLevel(logging.WARNING); jieba.initialize()
if kind in ("jieba", "sentencepiece"):
    import sentencepiece; sp = sentencepiece.SentencePieceProcessor(model_file=model)
else:
    import tokenizers; tok = tokenizers.Tokenizer.from_file(model)
begin = time.process_time(); total = 0; written = open(out, "wb")
table = str.maketrans(" \\n", "\\u2582\\u2583")
lines = open(source, encoding="utf-8")
if kind == "tokenizers":
    docs = [json.loads(line)["text"] for line in lines]
    for i in range(0, len(docs), 200):
        for each in tok.encode_batch(docs[i:i + 200]):
            total += len(each.ids); numpy.array(each.ids, dtype=numpy.uint16).tofile(written)
else:
    for line in lines:
        text = json.loads(line)["text"]
        if kind == "jieba":
            text = " ".join(word.translate(table) for word in jieba.cut(text))
        ids = sp.encode(text); total += len(ids); numpy.array(ids, dtype=numpy.uint16).tofile(written)
print(time.process_time() - begin, total)
"""
MEGATRON = """
import json, sys, time, multiprocessing, resource
sys.path[:] = [p for p in sys.path if p not in ("", sys.argv[5])]
def start(model):
    global sp
    import sentencepiece; sp = sentencepiece.SentencePieceProcessor(model_file=model)
def encode(line):
    return sp.encode(json.loads(line)["text"]), len(line)
if __name__ == "__main__":
    workers, model, source, out = sys.argv[1:5]
    import numpy, torch
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
    begin = time.process_time(); total = 0
    builder = IndexedDatasetBuilder(out + ".bin", dtype=numpy.uint16)
    with multiprocessing.Pool(int(workers), start, (model,)) as pool:
        for ids, _ in pool.imap(encode, open(source, encoding="utf-8"), 32):
            builder.add_document(ids + [1], [len(ids) + 1]); total += len(ids) + 1
        builder.finalize(out + ".idx")
        pool.close(); pool.join()
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    print(time.process_time() - begin + children.ru_utime + children.ru_stime, total)
"""


def run_tool(model: str, kind: str, workers: int, source: str, folder: Path) -> Callable[[], tuple[float, int, int]]:
    """Return a function that runs preprocess_data.py and returns (CPU-seconds without start-up, tokens, peak kB)."""
    nearly_nothing = folder / "nearly_nothing.jsonl"
    # The spaces put each document into a separate chunk of text, so every worker gets a document and has to start.
    if not nearly_nothing.exists():
        nearly_nothing.write_text(('{"text": "\u4f60\u597d"}\n' + " " * 1_100_000 + "\n") * 4)

    def convert(path: str) -> tuple[float, int, str]:
        command = [sys.executable, str(ROOT / "tools/preprocess_data.py"), "--input", path, "--vocab-file", model]
        command += ["--tokenizer-type", kind, "--output-prefix", str(folder / "ours"), "--workers", str(workers)]
        return measured([*command, "--quiet"])

    def run() -> tuple[float, int, int]:
        start = convert(str(nearly_nothing))[0]
        cpu, peak, output = convert(source)
        return cpu - start, int(output.split(" tokens ->")[0].split()[-1]), peak

    return run


def run_script(script: str, argv: list[str]) -> Callable[[], tuple[float, int, int]]:
    """Return a function that runs another library's script.

    The function returns (CPU-seconds without start-up, tokens, peak kB).
    """

    def run() -> tuple[float, int, int]:
        with tempfile.NamedTemporaryFile("w", suffix=".py") as file:
            file.write(script)
            file.flush()
            _, peak, output = measured([sys.executable, file.name, *argv])
        seconds, total = output.split()[-2:]
        return float(seconds), int(total), peak

    return run


def measured(command: list[str]) -> tuple[float, int, str]:
    """Run a command; return (CPU-seconds of all its processes, peak kB of the largest process, its output)."""
    wrapper = (
        "import json, resource, subprocess, sys\n"
        "done = subprocess.run(sys.argv[1:], capture_output=True, text=True)\n"
        "used = resource.getrusage(resource.RUSAGE_CHILDREN)\n"
        "seconds = used.ru_utime + used.ru_stime\n"
        "print(json.dumps([done.returncode, seconds, used.ru_maxrss, done.stdout, done.stderr[-2000:]]))"
    )
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONWARNINGS": "ignore"}
    out = subprocess.run(
        [sys.executable, "-c", wrapper, *command], capture_output=True, text=True, check=True, env=environment
    )
    code, cpu, peak, output, wrong = json.loads(out.stdout)
    if code:
        raise RuntimeError(f"{' '.join(command[:4])}: {wrong}")
    return cpu, peak, output


def _train_cpm(sample: list[str], path: str) -> None:
    """Train a CPM tokenizer with at most 6,000 tokens; synthetic text has too few characters for more."""
    for size in range(6000, 1000, -250):
        try:
            train_cpm(sample, path, size)
            return
        except TokenizerError:
            continue
    sys.exit("data.py: this text is too small to train a vocabulary; pass another --corpus")


def preprocess(args: argparse.Namespace, folder: Path) -> None:
    source = args.corpus
    size = sum(len(text.encode()) for text in read_texts([source])) / 1e6
    sample = list(read_texts([source]))[:400]
    models = {name: str(folder / f"{name}.model") for name in ("unigram", "bpe", "cpm")}
    print("training the tokenizers that all contenders share ...", flush=True)
    train_sentencepiece(sample, models["unigram"], 8000, "unigram")
    train_sentencepiece(sample, models["bpe"], 8000)
    _train_cpm(sample, models["cpm"])
    train_byte_bpe(sample, str(folder / "tokenizer.json"), 8000, "hf")
    big = folder / "big.jsonl"  # Fast contenders convert more text, so that timing is precise.
    big.write_bytes(Path(source).read_bytes() * max(1, round(100 / size)))
    medium = folder / "medium.jsonl"
    medium.write_bytes(Path(source).read_bytes() * 3)
    large, bpe = size * max(1, round(100 / size)), str(folder / "tokenizer.json")
    unigram, out, here = models["unigram"], str(folder / "peer"), str(ROOT)
    contenders: dict[str, tuple[float, Callable[[], tuple[float, int, int]]]] = {
        "ours, sentencepiece unigram, 2 workers": (large, run_tool(unigram, "sentencepiece", 2, str(big), folder)),
        "ours, sentencepiece unigram, 1 process": (large, run_tool(unigram, "sentencepiece", 0, str(big), folder)),
        "(b) sentencepiece unigram, plain loop": (large, run_script(PLAIN, ["sentencepiece", unigram, str(big), out])),
        "megatron-core's builder, 2 workers": (large, run_script(MEGATRON, ["2", unigram, str(big), out, here])),
        "ours, sentencepiece bpe, 2 workers": (large, run_tool(models["bpe"], "sentencepiece", 2, str(big), folder)),
        "ours, cpm with rjieba, 2 workers": (3 * size, run_tool(models["cpm"], "cpm+rjieba", 2, str(medium), folder)),
        "ours, cpm with rjieba, 1 process": (3 * size, run_tool(models["cpm"], "cpm+rjieba", 0, str(medium), folder)),
        "(a) jieba + sentencepiece, plain loop": (size, run_script(PLAIN, ["jieba", models["cpm"], source, out])),
        "ours, cpm with only jieba, 2 workers": (size, run_tool(models["cpm"], "cpm", 2, source, folder)),
        "ours, hf byte BPE, 2 workers": (size, run_tool(bpe, "hf", 2, source, folder)),
        "(c) tokenizers encode_batch, plain": (size, run_script(PLAIN, ["tokenizers", bpe, source, out])),
    }  # fmt: skip
    rates: Rates = {name: [] for name in contenders}
    tokens: Rates = {name: [] for name in contenders}
    peaks: dict[str, int] = dict.fromkeys(contenders, 0)
    for round_ in range(args.rounds):
        for name, (megabytes, work) in contenders.items():
            cpu, count, peak = work()
            rates[name].append(megabytes / cpu)
            tokens[name].append(count / cpu / 1e3)
            peaks[name] = max(peaks[name], peak)
            print(f"round {round_}: {name}: {megabytes / cpu:.2f} MB/CPU-s", flush=True)
    print(f"\n| text to tokens, {size:.0f} MB | MB per CPU-s | 1,000 tokens per CPU-s | peak MB |\n|{' --- |' * 4}")
    for name in contenders:
        print(f"| {name} | {spread(rates[name], '.2f')} | {spread(tokens[name], ',.0f')} | {peaks[name] / 1024:.0f} |")
    pairs = [
        ("ours, sentencepiece unigram, 2 workers", "megatron-core's builder, 2 workers"),
        ("ours, sentencepiece unigram, 1 process", "(b) sentencepiece unigram, plain loop"),
        ("ours, cpm with rjieba, 2 workers", "(a) jieba + sentencepiece, plain loop"),
        ("ours, cpm with rjieba, 1 process", "(a) jieba + sentencepiece, plain loop"),
        ("ours, cpm with only jieba, 2 workers", "(a) jieba + sentencepiece, plain loop"),
        ("ours, hf byte BPE, 2 workers", "(c) tokenizers encode_batch, plain"),
    ]
    print_ratios(pairs, rates)


def print_ratios(pairs: list[tuple[str, str]], rates: Rates) -> None:
    for ours, theirs in pairs:
        by_round = [a / b for a, b in zip(rates[ours], rates[theirs], strict=True)]
        print(f"speed of {ours} / speed of {theirs}: {spread(by_round, '.2f')}")


# ------------------------------------------------------------------------------------------------ start-up


START = """
import sys, time, resource; sys.path.insert(0, sys.argv[1])
import numpy, torch
from megatron.data.gpt2_dataset import build_train_valid_test_datasets
numpy.random.default_rng(0).permutation(10)
def memory(key):
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(key)) / 1024
before, begin = memory("VmHWM"), time.perf_counter()
(train, valid, test), _ = build_train_valid_test_datasets(sys.argv[2], "949,50,1", 1024, 1, 50000)
train[0]; train[train.samples_per_epoch // 2]
took = time.perf_counter() - begin
print(took, memory("VmHWM") - before, memory("RssAnon"), train.samples_per_epoch)
"""


def sparse_pair(prefix: Path, documents: int, tokens_each: int) -> None:
    """Write a corpus whose tokens are all 0; its .bin is a sparse file, which occupies no disk space."""
    with open(f"{prefix}.idx", "wb") as file:
        file.write(HEADER.pack(MAGIC, VERSION, 8, documents, documents + 1))
        rng = np.random.default_rng(0)
        sizes = rng.integers(1, 2 * tokens_each, documents).astype("<i4")
        file.write(sizes.tobytes())
        ends = np.cumsum(sizes, dtype=np.int64) * 2
        file.write(np.concatenate([[0], ends[:-1]]).astype("<i8").tobytes())
        file.write(np.arange(documents + 1, dtype="<i8").tobytes())
    with open(f"{prefix}.bin", "wb") as file:
        file.truncate(int(ends[-1]))


def startup(args: argparse.Namespace, folder: Path) -> None:
    found: dict[str, Any] = {}
    for name, documents in (("1G tokens, 1M documents", 10**6), ("10G tokens, 10M documents", 10**7)):
        sparse_pair(folder / "big", documents, 1000)
        rounds = []
        for _ in range(args.rounds):
            out = subprocess.run(
                [sys.executable, "-c", START, str(ROOT), str(folder / "big")],
                capture_output=True,
                text=True,
                check=True,
            )
            rounds.append([float(x) for x in out.stdout.split()])
        found[name] = rounds
        for ending in ("bin", "idx"):
            (folder / f"big.{ending}").unlink()
    print("\n| start-up to the first samples, without imports | seconds | added peak MB |\n| --- | --- | --- |")
    for name, rounds in found.items():
        print(f"| ours, {name} | {spread([r[0] for r in rounds], '.2f')} | {spread([r[1] for r in rounds], '.0f')} |")


# ----------------------------------------------------------------------------------------- reading samples


class _Core:
    """A process that reads megatron-core's dataset."""

    def __init__(self, kind: str, prefix: str, seq: int, vocab: int) -> None:
        command = [sys.executable, str(ROOT / "benchmarks/_core_reader.py"), kind, prefix, str(seq), str(vocab)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        while (line := self._process.stdout.readline()) and line != "ready\n":  # type: ignore[union-attr]
            pass
        if not line:
            raise RuntimeError(f"megatron-core's {kind} dataset did not start")

    def seconds(self, count: int) -> float:
        assert self._process.stdin and self._process.stdout
        print(count, file=self._process.stdin, flush=True)
        return float(self._process.stdout.readline())

    def close(self) -> None:
        self._process.kill()


class _Ours:
    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        self._numbers = np.random.default_rng(0).integers(0, dataset.samples_per_epoch, 10**6).tolist()
        self._at = 0

    def seconds(self, count: int) -> float:
        begin = time.process_time()
        for n in self._numbers[self._at : self._at + count]:
            self._dataset[n]
        self._at = (self._at + count) % 500_000
        return time.process_time() - begin


def read(args: argparse.Namespace, folder: Path) -> None:
    import torch

    from megatron.data.gpt2_dataset import build_train_valid_test_datasets
    from megatron.data.t5_dataset import Objective, Specials
    from megatron.data.t5_dataset import build_train_valid_test_datasets as build_t5

    torch.set_num_threads(1)
    rng, vocab = np.random.default_rng(2), 8000
    pairs = {"1,100-token documents": 1100, "129-token documents": 129}
    rates: Rates = {}
    for name, mean in pairs.items():
        prefix = str(folder / f"docs{mean}")
        with IndexedDatasetBuilder(prefix, np.uint16) as builder:
            for _ in range(40_000_000 // mean // 1000):
                sizes = rng.integers(mean // 2, mean * 3 // 2, 1000)
                builder.add_batch(rng.integers(2, vocab, int(sizes.sum())), sizes, np.ones(1000, np.int64))
        (ours, _, _), _ = build_train_valid_test_datasets(prefix, "1", SEQ, 1, vocab)
        run_rounds(
            args,
            {
                f"ours, GPT-2, {name}": _Ours(ours),
                f"megatron-core GPTDataset, {name}": _Core("gpt", prefix, SEQ, vocab),
            },
            20000,
            rates,
        )
    # Sentences have about 30 tokens; megatron-core packs only whole sentences.
    prefix = str(folder / "sentences")
    with IndexedDatasetBuilder(prefix, np.uint16) as builder:
        for _ in range(300):
            sizes = rng.integers(5, 55, 1000)
            builder.add_batch(rng.integers(2, vocab, int(sizes.sum())), sizes, np.full(50, 20))
    specials = Specials(1, vocab, tuple(range(vocab + 200, vocab, -1)))
    (ours_t5, _, _), _ = build_t5(prefix, "1", Objective(), 512, None, specials, 1, vocab)
    run_rounds(
        args,
        {"ours, T5, 512 / 114": _Ours(ours_t5), "megatron-core T5 masking, 512": _Core("t5", prefix, 512, vocab)},
        500,
        rates,
    )
    print("\n| samples in random order, files in the page cache | samples per CPU-s |\n| --- | --- |")
    for name, found in rates.items():
        print(f"| {name} | {spread(found, ',.0f')} |")
    names = list(rates)
    print_ratios(list(zip(names[::2], names[1::2], strict=True)), rates)


def remote(args: argparse.Namespace, folder: Path) -> None:
    """Compare samples of a corpus in object storage, when all blocks are in the cache, with those of a local file."""
    import torch

    from megatron.data.gpt2_dataset import build_train_valid_test_datasets
    from megatron.storage import to_path

    torch.set_num_threads(1)
    os.environ["MEGATRON_CACHE_DIR"] = str(folder / "cache")
    rng, rates = np.random.default_rng(3), Rates()
    for megabytes in (80, 400):  # one and two files of the cache
        prefix = str(folder / f"corpus{megabytes}")
        with IndexedDatasetBuilder(prefix, np.uint16) as builder:
            for _ in range(megabytes * 500 // 1100):
                sizes = rng.integers(550, 1650, 1000)
                builder.add_batch(rng.integers(2, 8000, int(sizes.sum())), sizes, np.ones(1000, np.int64))
        url = f"memory://bucket/corpus{megabytes}"
        for end in (".bin", ".idx"):
            to_path(url + end).upload(Path(prefix + end))  # type: ignore[attr-defined]
        contenders = {}
        for name, each in (("object storage, warm cache", url), ("local file", prefix)):
            (ours, _, _), _ = build_train_valid_test_datasets(each, "1", SEQ, 1, 8000)
            contenders[f"{name}, {megabytes} MB"] = _Ours(ours)
        contenders[f"object storage, warm cache, {megabytes} MB"].seconds(20000)
        run_rounds(args, contenders, 20000, rates)
    print("\n| GPT-2 samples in random order | samples per CPU-s |\n| --- | --- |")
    for name, found in rates.items():
        print(f"| {name} | {spread(found, ',.0f')} |")
    names = list(rates)
    print_ratios(list(zip(names[::2], names[1::2], strict=True)), rates)


def run_rounds(args: argparse.Namespace, contenders: dict[str, Any], count: int, rates: Rates) -> None:
    for each in contenders.values():
        each.seconds(count // 4)
    for _ in range(max(args.rounds, 5)):
        for name, each in contenders.items():
            rates.setdefault(name, []).append(count / each.seconds(count))
    for each in contenders.values():
        getattr(each, "close", lambda: None)()


SECTIONS = {"preprocess": preprocess, "startup": startup, "read": read, "remote": remote}


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("--corpus", help=".jsonl file of Chinese text (default: synthetic text)")
    parser.add_argument("--sections", nargs="+", choices=SECTIONS, default=list(SECTIONS))
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        if args.corpus is None:
            args.corpus = str(folder / "synthetic.jsonl")
            write_synthetic(Path(args.corpus), 20)
        for name in args.sections:
            SECTIONS[name](args, folder)


if __name__ == "__main__":
    main()
