"""Text samples from each checkpoint that a run has kept, to show how the model developed."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from megatron.atomic import write_text
from megatron.checkpointing.files import CheckpointError
from megatron.checkpointing.pruned import WHY, was_deleted
from megatron.config.command_line import from_file
from megatron.training.run_folder import save_dir_of

from ..write.generate import build_parser as generate_parser
from ..write.generate import load
from ..write.writer import answers
from .runs import SAMPLES, read_lines


def checkpoints_of(run_dir: Path) -> list[tuple[int, Path]]:
    """Return (iteration, folder) of the checkpoints that a run has kept, in order."""
    folder = save_dir_of(from_file(str(run_dir / "config.json")), run_dir)
    there = folder if folder.is_dir() else run_dir / "checkpoints"
    return sorted((int(path.name[5:]), path) for path in there.glob("iter_*") if path.name[5:].isdigit())


def write_samples(run_dir: Path, prompts: Sequence[str], longest: int) -> None:
    """Let each kept checkpoint continue each prompt, and write the texts to samples.jsonl; skip those already there.

    Sampling uses the defaults of tools/generate.py. It runs in one process, which can load a checkpoint of any layout.
    Raises ValueError if the run has kept no checkpoint.
    """
    path = run_dir / SAMPLES
    rows = read_lines(path) if path.is_file() else []
    known = {(row["iteration"], row["prompt"], row["tokens"]) for row in rows}
    found = checkpoints_of(run_dir)
    if not found:
        raise ValueError(f"{run_dir} has kept no checkpoint, which --prompt needs")
    for iteration, checkpoint in found:
        asked = [prompt for prompt in prompts if (iteration, prompt, longest) not in known]
        if not asked:
            continue
        flags = ["--load", str(checkpoint), "--max-new-tokens", str(longest)]
        args = generate_parser().parse_args(flags)
        try:
            writer = load(args)
        except CheckpointError:
            if not was_deleted(checkpoint):
                raise
            print(f"note: {checkpoint} {WHY}; there are no samples of iteration {iteration}", file=sys.stderr)
            continue
        for prompt, (_, (text,)) in zip(asked, answers(writer, asked, args, 1), strict=True):
            rows.append({"iteration": iteration, "prompt": prompt, "tokens": longest, "text": text})
        write_text(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
