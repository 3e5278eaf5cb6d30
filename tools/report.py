"""A page about a run: loss curve, perplexity and a unigram baseline, as report.html and loss.png in its folder."""

import argparse
import base64
import html
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
from _cli import Parser, run

from megatron.data.corpora import parse_blend
from megatron.data.indexed_dataset import IndexedDataset
from megatron.data.splits import parse_split, split_documents

EXAMPLES = """\
  python tools/report.py --run-dir runs/gpt2"""
AT_MOST = 20_000_000  # tokens looked at for the baseline


def read_metrics(run_dir: Path) -> list[dict[str, Any]]:
    path = run_dir / "metrics.jsonl"
    if not path.is_file():
        raise ValueError(f"{path} does not exist: {run_dir} is not the folder of a run")
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line]


def unigram_loss(data_path: list[str] | None, split: str, vocab_size: int) -> float | None:
    """Nats per token that a model of token frequencies alone has on the validation part.

    Frequencies are counted in the training part, one added to each. None without validation documents,
    and for several corpora.
    """
    corpora = parse_blend(data_path or [])
    if len(corpora) != 1:
        return None
    indexed = IndexedDataset(corpora[0][1])
    train, valid, _ = split_documents(parse_split(split), indexed.num_documents)
    ends = np.concatenate([[0], indexed.document_ends()])

    def counts(part: range) -> np.ndarray[Any, np.dtype[np.int64]]:
        tokens = indexed.tokens[ends[part.start] : ends[part.stop]][:AT_MOST]
        return np.bincount(tokens, minlength=vocab_size)

    seen, asked = counts(train) + 1, counts(valid)
    if not asked.sum():
        return None
    return float(-(asked * np.log(seen / seen.sum())).sum() / asked.sum())


def draw(rows: list[dict[str, Any]], baseline: float | None, path: Path) -> None:
    """The loss curves as a picture. Raises ValueError without matplotlib."""
    try:
        import matplotlib
    except ImportError:
        raise ValueError("the picture needs matplotlib: pip install -e '.[plots]'") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7.2, 4.2), dpi=150)
    for split, colour, marker in (("train", "#9db7d5", None), ("valid", "#c2410c", "o")):
        chosen = [row for row in rows if row.get("split") == split]
        if chosen:
            x, y = [row["iteration"] for row in chosen], [row["lm_loss"] for row in chosen]
            axes.plot(x, y, color=colour, marker=marker, markersize=4, linewidth=1.8, label=f"{split}ing loss"
                      if split == "train" else "validation loss")  # fmt: skip
    if baseline is not None:
        axes.axhline(baseline, color="#525252", linestyle="--", linewidth=1.2, label="unigram entropy")
    axes.set_xlabel("iteration")
    axes.set_ylabel("nats per token")
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.tight_layout()
    figure.savefig(path)
    plt.close(figure)


def page(run_dir: Path, facts: list[tuple[str, str]], picture: Path) -> str:
    rows = "".join(f"<tr><td>{html.escape(name)}</td><td>{html.escape(value)}</td></tr>" for name, value in facts)
    data = base64.b64encode(picture.read_bytes()).decode()
    return (
        "<!doctype html><meta charset=utf-8><title>Run</title>"
        "<style>body{font:16px/1.5 system-ui,sans-serif;max-width:46rem;margin:2rem auto;padding:0 1rem}"
        "td{padding:.15rem 1.5rem .15rem 0}img{max-width:100%}</style>"
        f"<h1>{html.escape(run_dir.name)}</h1><img alt='loss curve' src='data:image/png;base64,{data}'><table>{rows}</table>"
    )


def main(args: argparse.Namespace) -> None:
    run_dir = Path(args.run_dir)
    rows = read_metrics(run_dir)
    config = json.loads((run_dir / "config.json").read_text(encoding="utf-8"))
    train = [row for row in rows if row.get("split") == "train"]
    valid = [row for row in rows if row.get("split") == "valid"]
    baseline = unigram_loss(config["data"]["data_path"], config["data"]["split"], config["model"]["vocab_size"])
    facts = [("iterations", str(max((row["iteration"] for row in rows), default=0)))]
    if train:
        speeds = sorted(row["tokens_per_second"] for row in train)
        facts += [
            ("tokens seen", f"{train[-1]['consumed_tokens']:,}"),
            ("median speed", f"{speeds[len(speeds) // 2]:,.0f} tokens/s"),
            ("training loss, first and last line", f"{train[0]['lm_loss']:.3f}, {train[-1]['lm_loss']:.3f} nats/token"),
        ]
    if valid:
        best = min(valid, key=lambda row: float(row["lm_loss"]))
        facts += [
            ("validation loss, first and last", f"{valid[0]['lm_loss']:.3f}, {valid[-1]['lm_loss']:.3f} nats/token"),
            ("best", f"{best['lm_loss']:.3f} at iteration {best['iteration']} (perplexity {best['ppl']:.1f})"),
        ]
    if baseline is not None:
        facts.append(
            (
                "unigram entropy of the validation text",
                f"{baseline:.3f} nats/token (perplexity {math.exp(baseline):.1f})",
            )
        )
    width = max(len(name) for name, _ in facts)
    for name, value in facts:
        print(f"{name:{width}}  {value}")
    draw(rows, baseline, run_dir / "loss.png")
    (run_dir / "report.html").write_text(page(run_dir, facts, run_dir / "loss.png"), encoding="utf-8")


def build_parser() -> Parser:
    parser = Parser(__doc__ or "", EXAMPLES)
    parser.add_argument("--run-dir", required=True, help="the folder of a run")
    return parser


if __name__ == "__main__":
    run(main, build_parser())
