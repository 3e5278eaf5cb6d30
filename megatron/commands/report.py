"""A page about a run: loss curve, perplexity and unigram baselines, as report.html and loss.png in its folder."""

import argparse
import base64
import html
import json
import math
import sys
from pathlib import Path
from typing import Any

from megatron.checkpointing.nearby import relocated
from megatron.config.command_line import from_file
from megatron.config.fields import describe

from .cli import Parser, run
from .unigram import of_targets, of_text

EXAMPLES = """\
  python tools/report.py --run-dir runs/gpt2"""
Row = dict[str, Any]


def read_metrics(run_dir: Path) -> list[Row]:
    """The rows of metrics.jsonl, with nan where it has null. Raises ValueError where it is missing."""
    path = run_dir / "metrics.jsonl"
    if not path.is_file():
        raise ValueError(f"{path} does not exist: {run_dir} is not the folder of a run")
    rows: list[Row] = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line]
    return [row | {"lm_loss": math.nan} if row.get("lm_loss", 0) is None else row for row in rows]  # null says nan


def baselines_of(run_dir: Path, config: Row, train: list[Row]) -> dict[str, float]:
    """Unigram entropies in nats per token, by what they are of; none where there is no validation text."""
    if config["model"]["family"] != "t5":
        if config["data"]["objective"] == "sft":
            return {}  # its losses are of some tokens only
        text = of_text(config)
        return {} if text is None else {"validation text": text}
    if not train:
        return {}
    batch = train[-1]["consumed_samples"] // train[-1]["iteration"]
    both = of_targets(
        relocated(from_file(str(run_dir / "config.json")), run_dir), batch * config["train"]["eval_iters"]
    )
    return {} if both is None else {"targets": both.targets, "masked text": both.text}


def draw(rows: list[Row], baselines: dict[str, float], path: Path) -> None:
    """The loss curves as a picture. Raises ValueError without matplotlib."""
    try:
        import matplotlib
    except ImportError:
        raise ValueError("the picture needs matplotlib: pip install -e '.[plots]'") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7.2, 4.2), dpi=150)
    for split, key, label, colour, marker in (
        ("train", "lm_loss", "training loss", "#9db7d5", None),
        ("valid", "lm_loss", "validation loss", "#c2410c", "o"),
        ("valid", "text_loss", "validation loss on masked text", "#15803d", "s"),
    ):
        chosen = [row for row in rows if row.get("split") == split and key in row]
        if chosen:
            x, y = [row["iteration"] for row in chosen], [row[key] for row in chosen]
            axes.plot(x, y, color=colour, marker=marker, markersize=4, linewidth=1.8, label=label)
    for (of, nats), style in zip(baselines.items(), (":", "--") if len(baselines) > 1 else ("--",), strict=False):
        axes.axhline(nats, color="#525252", linestyle=style, linewidth=1.2, label=f"unigram entropy of the {of}")
    axes.set_xlabel("iteration")
    axes.set_ylabel("nats per token")
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(facecolor="white", edgecolor="none", framealpha=0.9)
    figure.tight_layout()
    figure.savefig(path)
    plt.close(figure)


def page(run_dir: Path, facts: list[tuple[str, str]], picture: Path) -> str:
    """The report as HTML that needs no other file."""
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
    config = relocated(from_file(str(run_dir / "config.json")), run_dir).to_dict()
    train = [row for row in rows if row.get("split") == "train"]
    valid = [row for row in rows if row.get("split") == "valid"]
    baselines = baselines_of(run_dir, config, train)
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
    if valid and "text_loss" in valid[-1]:
        text = [row["text_loss"] for row in valid]
        facts += [
            ("masked text only, first and last", f"{text[0]:.3f}, {text[-1]:.3f} nats/token"),
            ("masked text guessed right", f"{valid[-1]['text_accuracy']:.1%}"),
        ]
    for of, nats in baselines.items():
        facts.append((f"unigram entropy of the {of}", f"{nats:.3f} nats/token (perplexity {math.exp(nats):.1f})"))
    width = max(len(name) for name, _ in facts)
    for name, value in facts:
        print(f"{name:{width}}  {value}")
    try:
        draw(rows, baselines, run_dir / "loss.png")
        (run_dir / "report.html").write_text(page(run_dir, facts, run_dir / "loss.png"), encoding="utf-8")
    except (ValueError, OSError) as error:
        print(f"report.py: loss.png and report.html were not written in {run_dir}: {describe(error)}", file=sys.stderr)


def build_parser() -> Parser:
    parser = Parser(__doc__ or "", EXAMPLES)
    parser.add_argument("--run-dir", required=True, help="the folder of a run")
    return parser


def cli() -> None:
    run(main, build_parser())


if __name__ == "__main__":
    cli()
