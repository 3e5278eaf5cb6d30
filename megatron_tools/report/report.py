"""Write a page about runs, as one file: curves, timetables, settings and differences."""

import argparse
import contextlib
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from data_utils.cli import Parser, local_path, new_figure, output_file, run, save_figure
from data_utils.run_data import with_recorded_stages
from megatron.atomic import write_text
from megatron.config import Config
from megatron.config.data_stages import parse_stages
from megatron.config.messages import describe_error

from . import facts
from .page import page
from .runs import Row, RunData, named_splits, read_run, short_names
from .timetable import read_timetable
from .unigram import target_entropies, text_entropy

EXAMPLES = """\
  python tools/report.py runs/gpt2                 writes report.html and loss.png to its folder
  python tools/report.py runs/a runs/b --output both.html"""


MARKERS = {"train": None, "valid": "o", "test": "D"}  # kind of data -> marker of its points
Curve = tuple[str, str, str, str, str | None]  # split, key, label, colour and marker


def unigram_baselines(config: Config, global_batch: int | None) -> dict[str, float]:
    """Return the unigram entropy of the validation data in nats per token, such as {"validation text": 5.1}.

    For a T5, the dict has two entries: one for all target tokens, one for the masked text without sentinels. The dict
    is empty if the entropy cannot be computed. global_batch: samples in each iteration of an evaluation, if known.
    """
    if not config.is_t5:
        if config.objective == "sft" or config.data.eod_mask_loss:
            return {}  # the loss counts only some of the tokens, so the entropy of all is no baseline
        entropy = text_entropy(config)
        return {} if entropy is None else {"validation text": entropy}
    if not global_batch or not config.train.eval_iters:
        return {}
    entropies = target_entropies(config, global_batch * config.train.eval_iters)
    return {} if entropies is None else {"targets": entropies.targets, "masked text": entropies.text}


def stage_starts(run: RunData) -> list[float]:
    """Return the iterations at which the data stages after the first begin, as far as the run has come."""
    config = run.config
    if named_splits(run.rows, "train"):  # several corpora: --override-data may have begun stages with some of them
        config = with_recorded_stages(config)
    stages = config.data.data_stages
    if not stages:
        return []
    starts = []
    for stage in parse_stages(stages)[1:]:
        consumed_key = f"consumed_{stage.unit}"
        previous = {"iteration": 0, consumed_key: 0}
        for row in run.rows_of("train"):
            if row[consumed_key] >= stage.begin:
                # Rows are some iterations apart; in between, the samples or tokens are taken to grow evenly. A stage
                # that begins at sample 1500 has its start at iteration 15 if the rows around it have 1000 samples at
                # iteration 10 and 2000 at iteration 20.
                share = (stage.begin - previous[consumed_key]) / (row[consumed_key] - previous[consumed_key])
                starts.append(previous["iteration"] + share * (row["iteration"] - previous["iteration"]))
                break
            previous = row
    return starts


def draw_losses(rows: Sequence[Row], baselines: dict[str, float], path: Path, stages: Sequence[float]) -> None:
    """Draw the loss curves as a PNG. Raises ValueError without matplotlib.

    stages: iterations at which data stages begin, marked by vertical lines.
    """
    figure = new_figure("loss.png", figsize=(7.2, 4.2), dpi=150)
    axes = figure.subplots()
    for split, key, label, colour, marker in _loss_curves(rows):
        iterations = []
        losses = []
        for row in rows:
            if row.get("split") == split and key in row:
                iterations.append(row["iteration"])
                losses.append(row[key])
        if iterations:
            # The training curve of a single corpus, such as train/web, has many points.
            is_thin = "/" in split and marker is None
            axes.plot(
                iterations,
                losses,
                color=colour,
                marker=marker,
                markersize=4,
                linewidth=0.8 if is_thin else 1.8,
                label=label,
            )
    for iteration in stages:
        axes.axvline(iteration, color="#525252", linestyle=":", linewidth=1.0)
    # A T5 has two baselines: dotted for all targets, dashed for the masked text. Other runs have one or none, and then
    # zip ends before the styles do.
    styles = (":", "--") if len(baselines) > 1 else ("--",)
    for (text_name, nats), style in zip(baselines.items(), styles, strict=False):
        axes.axhline(nats, color="#525252", linestyle=style, linewidth=1.2, label=f"unigram entropy of the {text_name}")
    axes.set_xlabel("iteration")
    axes.set_ylabel("nats per token")
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    if rows:  # else there is no line
        axes.legend(facecolor="white", edgecolor="none", framealpha=0.9)
    figure.tight_layout()
    save_figure(figure, path)


def _loss_curves(rows: Sequence[Row]) -> Iterator[Curve]:
    """Yield (split, key, label, colour, marker) of each curve of the loss; a corpus has one colour in all splits."""
    yield "train", "lm_loss", "training loss", "#9db7d5", None
    yield "valid", "lm_loss", "validation loss", "#c2410c", "o"
    yield "valid", "text_loss", "validation loss on masked text", "#15803d", "s"
    yield "test", "lm_loss", "test loss", "#7c3aed", MARKERS["test"]
    splits = named_splits(rows, "train", "valid", "test")  # one for each corpus, such as valid/web
    corpora = sorted({split.partition("/")[2] for split in splits})
    for split in splits:
        part, _, corpus = split.partition("/")
        colour = f"C{corpora.index(corpus) % 10}"  # matplotlib has ten default colours, C0 to C9
        yield split, "lm_loss", split, colour, MARKERS[part]


def whole_page(runs: Sequence[RunData]) -> str:
    """Return the HTML of the page, with the timetables of the runs that recorded pipeline timelines."""
    timetables = {}
    for index, run_data in enumerate(runs):
        table = read_timetable(run_data.folder)
        if table:
            timetables[index] = table
    return page(runs, [_count_parameters(run_data.config) for run_data in runs], timetables)


def _read_with_baselines(folder: Path, name: str) -> RunData:
    """Return a run with its unigram baselines. Raises ValueError for a folder that holds no run."""
    run_data = read_run(folder, name)
    try:
        baselines = unigram_baselines(run_data.config, run_data.global_batch)
    except (ValueError, OSError) as error:  # the corpus or the tokenizer may be gone since the run
        print(f"report.py: no unigram baseline of {folder}: {describe_error(error)}", file=sys.stderr, flush=True)
        return run_data
    return replace(run_data, baselines=baselines)


def _count_parameters(config: Config) -> int | None:
    """Return the number of parameters, or None for user-defined models."""
    if config.model.family is None or not config.model.vocab_size:
        return None
    from megatron.estimate.sizes import parameters  # imports torch, which --help does not need

    with contextlib.suppress(ValueError, TypeError):
        return parameters(config)
    return None


def main(args: argparse.Namespace) -> None:
    run_paths = list(args.runs)
    if args.run_dir:
        run_paths.append(args.run_dir)
    if not run_paths:
        raise ValueError("give the folders of one or more runs")
    # A folder that is given twice is read once.
    folders = list(dict.fromkeys(map(Path, run_paths)))
    names = short_names(folders)
    runs = [_read_with_baselines(folder, name) for folder, name in zip(folders, names, strict=True)]
    results = list(map(facts.result_facts, runs))
    print(facts.as_text(names, results), flush=True)
    note = facts.tokenizer_note(runs)
    if note:
        print(note, flush=True)
    for each in runs:
        if each.reason:
            print(f"{each.name} failed: {each.reason}", flush=True)
    is_single_run = len(runs) == 1 and not args.output  # a single run's page lies in its folder, with a plot beside it
    page_path = Path(args.output) if args.output else folders[0] / "report.html"
    if is_single_run:
        try:
            draw_losses(runs[0].rows, dict(runs[0].baselines), page_path.with_name("loss.png"), stage_starts(runs[0]))
        except (ValueError, OSError) as error:  # such as a missing package, which the page does not need
            message = f"report.py: loss.png was not written to {page_path.parent}: {describe_error(error)}"
            print(message, file=sys.stderr)
    try:
        page_path.parent.mkdir(parents=True, exist_ok=True)
        write_text(page_path, whole_page(runs))
    except (ValueError, OSError) as error:
        if args.output:
            raise
        print(
            f"report.py: {page_path.name} was not written to {page_path.parent}: {describe_error(error)}",
            file=sys.stderr,
        )
        return
    print(f"-> {page_path}")


def build_parser() -> Parser:
    parser = Parser(__doc__, EXAMPLES)
    add = parser.add_argument
    add("runs", type=local_path, nargs="*", metavar="RUN", help="folders of runs")
    add("--run-dir", type=local_path, help="folder of one more run, as if given as RUN")
    add("--output", type=output_file, help="page to write (default: report.html in the folder of the first run)")
    return parser


def cli() -> None:
    run(main, build_parser())
