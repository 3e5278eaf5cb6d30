"""`--help` of the training scripts: the flags that people use first, those of one section, one flag, or all."""

import shutil
import textwrap
from collections.abc import Iterator
from dataclasses import Field, fields
from itertools import chain
from typing import Any

from .defaults import DEFAULTS
from .fields import ConfigError, flag, types_of
from .flags import metavar
from .names import nearest
from .sections import SECTIONS

SCRIPT_SUMMARIES = {
    "gpt2": "Train a GPT-2 on a preprocessed corpus. The same command resumes the run.",
    "llama": "Train a Llama, Qwen, Mistral or Mixtral on a preprocessed corpus. The same command resumes the run.",
    "t5": "Train a T5 on a preprocessed corpus. The same command resumes the run.",
    None: "Train a model. The same command resumes the run.",
}
COMMON_FLAGS = (
    "data_path", "vocab_file", "run_dir", "num_layers", "hidden_size", "num_attention_heads", "seq_length",
    "enc_seq_length", "dec_seq_length", "batch_size", "gas", "train_iters", "lr", "precision", "eval_interval",
    "save_interval", "load", "model_parallel_size", "pipe_parallel_size", "zero_stage", "checkpoint_activations",
    "dry_run",
)  # fmt: skip
CONFIG_HELP = "JSON file with settings by section, or the name of a preset in configs/models; may be repeated"
EXAMPLES = """\
examples:
  python {script} --data-path data/corpus_text_document \\
      --vocab-file tokenizer.model --run-dir runs/a
  python tools/launch.py --standalone --nproc-per-node 4 {script} \\
      --pipe-parallel-size 2 --model-parallel-size 2 --data-path ...
  python {script} --config my.json --max-position-embeddings none ...
      none removes an optional setting that a file has set
"""
TITLE_WIDTH = 28  # columns of the names of flags
MAX_WIDTH = 100


def _flag_title(section: type, setting: "Field[Any]") -> str:
    """Return a flag with the placeholder of its value."""
    kinds = types_of(section, setting.name)
    if bool in kinds:
        return f"--[no-]{flag(setting.name).removeprefix('--')}"
    return f"{flag(setting.name)} {metavar(setting, kinds[0])}"  # the first of `int | None` is int


def _help_with_default(setting: "Field[Any]", family: str | None) -> str:
    """Return what a setting does, with its default in the script of the family."""
    description = str(setting.metadata["help"])
    family_defaults = DEFAULTS.get(family or "", {})  # {} without a family
    default = family_defaults.get(setting.name, setting.default)
    if default is None or default == ():
        return description
    words = default
    if isinstance(default, bool):
        words = "on" if default else "off"
    elif isinstance(default, tuple):
        words = " ".join(map(str, default))
    return f"{description} (default: {words})"


def fields_own_first(section: type) -> Iterator["Field[Any]"]:
    """Yield the settings of a section: its own first, then those of its base classes and features."""
    by_name = {f.name: f for f in fields(section)}  # type: ignore[arg-type]
    for base in section.__mro__:  # the class itself, then its base classes
        for name in vars(base).get("__annotations__", {}):
            if name in by_name:
                yield by_name.pop(name)  # removed, because a base class may repeat the name


def _format_flag(title: str, text: str, width: int) -> Iterator[str]:
    """Yield the lines of a flag: its title on the left, and what it does on the right."""
    if len(title) + 4 > TITLE_WIDTH:  # two columns of indentation, and two between title and text
        yield f"  {title}"
        title = ""
    start = f"  {title}".ljust(TITLE_WIDTH)
    indent = " " * TITLE_WIDTH
    yield from textwrap.wrap(text, width, initial_indent=start, subsequent_indent=indent, break_on_hyphens=False)


class _Help:
    """The settings that a script reads, and the width of the text.

    sections: name of a section -> names of its settings. flags: name of a setting -> lines of its help.
    """

    def __init__(self, script: str, family: str | None) -> None:
        self.script = script
        self.family = family
        columns = shutil.get_terminal_size().columns  # COLUMNS, if it is set to a number
        self.width = min(columns, MAX_WIDTH)
        self.sections: dict[str, list[str]] = {}
        self.flags: dict[str, list[str]] = {}
        for name, section in SECTIONS.items():
            self.sections[name] = []
            for f in fields_own_first(section):
                families = f.metadata["family"]  # of models that read the setting; None stands for all
                if families is None or family is None or family in families:
                    title = _flag_title(section, f)
                    text = _help_with_default(f, family)
                    self.flags[f.name] = list(_format_flag(title, text, self.width))
                    self.sections[name].append(f.name)

    def section_lines(self, name: str) -> Iterator[str]:
        """Yield the lines of a section's settings, below its name."""
        yield f"{name}:"
        for each in self.sections[name]:
            yield from self.flags[each]
        yield ""

    def overview_lines(self) -> Iterator[str]:
        """Yield what the script does, the flags that people use first, how to see the others, and examples."""
        yield from (SCRIPT_SUMMARIES[self.family], "", f"usage: {self.script} [--config FILE] [FLAG VALUE ...]", "")
        yield from _format_flag("--config FILE", CONFIG_HELP, self.width)
        for name in COMMON_FLAGS:
            if name in self.flags:
                yield from self.flags[name]
        names = ", ".join(self.sections)
        hint = f"--help SECTION shows the flags of a section ({names}), --help FLAG one flag, --help all every flag."
        yield from ("", *textwrap.wrap(hint, self.width, break_on_hyphens=False), "")
        yield EXAMPLES.format(script=self.script)


def help_text(script: str, family: str | None, topic: str | None) -> str:
    """Return the text of `--help TOPIC`: a section, `all`, or the name of a setting; None for the usual flags.

    Raises ConfigError for an unknown topic.
    """
    page = _Help(script, family)
    if topic is None:
        return "\n".join(page.overview_lines())
    name = topic.removeprefix("--").replace("-", "_")
    if name in page.flags:
        return "\n".join(page.flags[name])
    if name in page.sections:
        return "\n".join(page.section_lines(name))
    if name == "all":
        return "\n".join(chain.from_iterable(map(page.section_lines, page.sections)))
    raise ConfigError(
        f"--help {topic}: the sections are {', '.join(page.sections)}; else give a flag or all"
        f"{nearest(name, [*page.sections, *page.flags])}"
    )
