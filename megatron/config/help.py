"""`--help` of the training scripts: the flags that people use first, those of one section, one flag, or all."""

import os
import shutil
import textwrap
from collections.abc import Iterator
from dataclasses import Field, fields
from itertools import chain
from typing import Any, NamedTuple

from .command_line import metavar
from .defaults import DEFAULTS
from .fields import ConfigError, flag, types_of
from .names import nearest
from .sections import SECTIONS

ABOUT = {
    "gpt2": "Train a GPT-2 on a preprocessed corpus. The same command resumes the run.",
    "llama": "Train a Llama, Qwen, Mistral or Mixtral on a preprocessed corpus. The same command resumes the run.",
    "t5": "Train a T5 on a preprocessed corpus. The same command resumes the run.",
    None: "Train a model. The same command resumes the run.",
}
FIRST = (
    "data_path", "vocab_file", "run_dir", "num_layers", "hidden_size", "num_attention_heads", "seq_length",
    "enc_seq_length", "dec_seq_length", "batch_size", "gas", "train_iters", "lr", "precision", "eval_interval",
    "save_interval", "load", "model_parallel_size", "pipe_parallel_size", "zero_stage", "checkpoint_activations",
    "dry_run",
)  # fmt: skip
CONFIG = "JSON file with settings by section, or the name of a preset in configs/models; may be repeated"
EXAMPLES = """\
examples:
  python {script} --data-path data/corpus_text_document \\
      --vocab-file tokenizer.model --run-dir runs/a
  python tools/launch.py --standalone --nproc-per-node 4 {script} \\
      --pipe-parallel-size 2 --model-parallel-size 2 --data-path ...
  python {script} --config my.json --max-position-embeddings none ...
      none removes an optional setting that a file has set
"""
LEFT = 28  # columns of the names of flags
WIDEST = 100


class _Setting(NamedTuple):
    """A setting, the title of its flag, and what `--help` says of it."""

    name: str
    title: str
    text: str


def _title(section: type, setting: "Field[Any]") -> str:
    """Return a flag with the placeholder of its value."""
    kinds = types_of(section, setting.name)
    if bool in kinds:
        return f"--[no-]{flag(setting.name).removeprefix('--')}"
    kind = next(each for each in kinds if each is not type(None))
    return f"{flag(setting.name)} {metavar(setting, kind)}"


def _text(setting: "Field[Any]", family: str | None) -> str:
    """Return what a setting does, with its default in the script of the family."""
    about = str(setting.metadata["help"])
    value = DEFAULTS.get(family or "", {}).get(setting.name, setting.default)
    if value is None or value == ():
        return about
    words = value
    if isinstance(value, bool):
        words = "on" if value else "off"
    elif isinstance(value, tuple):
        words = " ".join(map(str, value))
    return f"{about} (default: {words})"


def _is_read(setting: "Field[Any]", family: str | None) -> bool:
    families = setting.metadata["family"]
    return families is None or family is None or family in families


def own_first(section: type) -> list["Field[Any]"]:
    """Return the settings of a section: its own first, then those of its base classes and features."""
    known = {each.name: each for each in fields(section)}  # type: ignore[arg-type]
    names = dict.fromkeys(chain.from_iterable(vars(kind).get("__annotations__", {}) for kind in section.__mro__))
    return [known[name] for name in names if name in known]


def _settings_of(section: type, family: str | None) -> list[_Setting]:
    """Return the settings of a section that the family reads."""
    read = [each for each in own_first(section) if _is_read(each, family)]
    return [_Setting(each.name, _title(section, each), _text(each, family)) for each in read]


def _lines_of(title: str, text: str, width: int) -> Iterator[str]:
    """Yield the lines of a flag: its title on the left, and what it does on the right."""
    wrapped = textwrap.wrap(text, width - LEFT, break_on_hyphens=False)
    if len(title) + 4 > LEFT:
        yield f"  {title}"
        title = ""
    yield f"  {title}".ljust(LEFT) + wrapped[0]
    for line in wrapped[1:]:
        yield " " * LEFT + line


class _Help:
    """The settings that a script reads, by section and by name, and the width of the text."""

    def __init__(self, script: str, family: str | None) -> None:
        self.script = script
        self.family = family
        self.width = min(int(os.environ.get("COLUMNS", 0)) or shutil.get_terminal_size().columns, WIDEST)
        self.sections: dict[str, list[_Setting]] = {}
        self.every: dict[str, _Setting] = {}
        for name, section in SECTIONS.items():
            found = _settings_of(section, family)
            self.sections[name] = found
            self.every.update({each.name: each for each in found})

    def flag(self, name: str) -> Iterator[str]:
        """Yield the lines of a setting."""
        setting = self.every[name]
        return _lines_of(setting.title, setting.text, self.width)

    def section(self, name: str) -> Iterator[str]:
        """Yield the lines of a section's settings, below its name."""
        yield f"{name}:"
        for each in self.sections[name]:
            yield from self.flag(each.name)
        yield ""

    def first(self) -> Iterator[str]:
        """Yield what the script does, the flags that people use first, how to see the others, and examples."""
        yield from (ABOUT[self.family], "", f"usage: {self.script} [--config FILE] [FLAG VALUE ...]", "")
        yield from _lines_of("--config FILE", CONFIG, self.width)
        for name in FIRST:
            if name in self.every:
                yield from self.flag(name)
        names = ", ".join(self.sections)
        more = f"--help SECTION shows the flags of a section ({names}), --help FLAG one flag, --help all every flag."
        yield from ("", *textwrap.wrap(more, self.width, break_on_hyphens=False), "")
        yield EXAMPLES.format(script=self.script)


def help_text(script: str, family: str | None, topic: str | None) -> str:
    """Return the text of `--help TOPIC`: a section, `all`, or the name of a setting; None for the usual flags.

    Raises ConfigError for an unknown topic.
    """
    asked = _Help(script, family)
    if topic is None:
        return "\n".join(asked.first())
    wanted = topic.removeprefix("--").replace("-", "_")
    if wanted in asked.every:
        return "\n".join(asked.flag(wanted))
    if wanted in asked.sections:
        return "\n".join(asked.section(wanted))
    if wanted == "all":
        return "\n".join(chain.from_iterable(map(asked.section, asked.sections)))
    raise ConfigError(
        f"--help {topic}: the sections are {', '.join(asked.sections)}; else give a flag or all"
        f"{nearest(wanted, [*asked.sections, *asked.every])}"
    )
