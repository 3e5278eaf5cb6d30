"""Speed of attention within documents: attention computed per document, compared with one mask for the whole sample.

    python benchmarks/documents.py --tokens 16 100 400

The script times a forward and a backward pass of a small GPT-2, and of a small T5 with relative positions. Passes
alternate between attention computed per document and `--reference-ops document-attention`, which masks the sample. Peak
memory is measured in separate processes.
"""

import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from _alternate import new_parser, spread

GPT2 = (
    "--num-layers 4 --hidden-size 256 --num-attention-heads 4 --seq-length {length} --vocab-size 1024 --batch-size 4 "
    "--hidden-dropout 0"
)
T5 = (
    GPT2 + " --family t5 --enc-seq-length {length} --dec-seq-length 128 --position-embedding relative "
    "--normalization rmsnorm --no-hidden-bias"
)
FAMILIES = {"gpt2": GPT2, "t5": T5}


def step(family: str, length: int, tokens: int, dropout: float, masked: bool) -> Callable[[], None]:
    """Return a function that runs forward and backward on samples packed with documents of about `tokens` tokens.

    masked: if True, apply one attention mask to the whole sample; if False, compute attention per document.
    """
    import torch

    from megatron.config.command_line import parse
    from megatron.model import GPT2Model, T5Model

    flags = f"{FAMILIES[family].format(length=length)} --attention-dropout {dropout}"
    config = parse([*flags.split(), *(["--reference-ops", "document-attention"] if masked else [])])
    b, s = config.train.batch_size, config.data.seq_length or config.data.enc_seq_length
    torch.manual_seed(1)
    model: Any = (T5Model if family == "t5" else GPT2Model)(config)
    dice = torch.Generator().manual_seed(2)

    def batch() -> dict[str, Any]:  # Every batch has new document ids, as in training.
        starts = torch.rand(b, s, generator=dice) < 1 / tokens
        ids = starts.int().cumsum(1).int() + 1
        text = torch.randint(1024, (b, s), generator=dice)
        if family == "gpt2":
            return {"tokens": text, "document_ids": ids, "labels": text}
        few = ids[:, ::4].contiguous()
        wanted = text[:, ::4]
        inputs = {"encoder_tokens": text, "decoder_tokens": wanted, "labels": wanted}
        return {**inputs, "encoder_document_ids": ids, "decoder_document_ids": few}

    def run() -> None:
        model(**batch()).mean().backward()
        model.zero_grad()

    return run


def _peak_of_this_process() -> int:
    """Return this process's peak memory in MB.

    Python's `resource` module is not used because it may report the parent process's peak.
    """
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) // 1024


def _peak(argv: list[str]) -> int:
    found = subprocess.run([sys.executable, __file__, *argv], check=True, capture_output=True, text=True)
    return int(found.stdout)


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("--families", nargs="+", choices=tuple(FAMILIES), default=list(FAMILIES))
    parser.add_argument("--tokens", nargs="+", type=int, default=[16, 100, 400])
    parser.add_argument("--length", type=int, default=512, help="tokens per sample (default: 512)")
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument(
        "--alone", choices=("masked", "ours"), help="run only this variant and print its peak memory in MB"
    )
    args = parser.parse_args()
    if args.alone:
        run = step(args.families[0], args.length, args.tokens[0], args.dropout, args.alone == "masked")
        for _ in range(3):
            run()
        print(_peak_of_this_process())
        return
    print(
        "| model, tokens per document | attention with one mask, ms | attention per document, ms | "
        "ratio of the two times | peak memory with one mask, MB; with attention per document, MB |"
    )
    print("| --- | --- | --- | --- | --- |")
    for family in args.families:
        for tokens in args.tokens:
            ours, masked = [], []
            runs = [
                (step(family, args.length, tokens, args.dropout, way), times)
                for way, times in ((True, masked), (False, ours))
            ]
            for round_ in range(args.rounds + 1):
                for run, times in runs:
                    begin = time.perf_counter()
                    run()
                    if round_:
                        times.append(1e3 * (time.perf_counter() - begin))
            common = f"--families {family} --tokens {tokens} --dropout {args.dropout} --length {args.length}".split()
            peaks = [_peak([*common, "--alone", way]) for way in ("masked", "ours")]
            ratios = spread([theirs / mine for theirs, mine in zip(masked, ours, strict=True)], ".2f")
            middle = [f"{statistics.median(times):.0f}" for times in (masked, ours)]
            print(
                f"| {family}, {tokens} | {middle[0]} | {middle[1]} | {ratios} | {peaks[0]} to {peaks[1]} |", flush=True
            )


if __name__ == "__main__":
    main()
