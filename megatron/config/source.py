"""The settings of one source (entry script, file or command line), and how sources are merged."""

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from typing import Any

from .._compat import compat
from .decoder import unused_rope_settings
from .fields import OneOf, flag
from .messages import format_flag
from .names import HOME
from .sections import Config, settings

Change = Callable[[Config, Mapping[str, Any]], Config]
# Setting -> its choices. Other words may be those of another framework.
_CHOICES = {f.name: f.metadata["check"].choices for _, _, f in settings() if isinstance(f.metadata["check"], OneOf)}


class Source:
    """Settings of one source, with notes and problems for the user.

    where: name of the source for messages. own: settings under this project's names.
    The subclass `Translation` also translates flags of other frameworks. A source without such flags has no implied and
    no deferred settings.
    """

    def __init__(self, own: Mapping[str, Any], where: str = "") -> None:
        self.where = where
        self.values = dict(own)
        self.notes: list[str] = []
        self.problems: list[str] = []

    def translate_all(self, flags: Mapping[str, Any]) -> None:
        """Translate all foreign flags of the source: name -> value."""

    def deferred_flags(self) -> list[str]:
        """Return the foreign flags whose translation is deferred to `apply_deferred`."""
        return []

    def implied_settings(self, values: Mapping[str, Any], given_elsewhere: Container[str] = ()) -> dict[str, Any]:
        """Return the further settings that translated flags imply; see `Translation.implied_settings`."""
        return {}

    def apply_deferred(self, config: Config, ranks: int, change: Change) -> Config:
        """Apply the deferred flags to `config` and return the result; see `Translation.apply_deferred`."""
        return config


def new_source(own: Mapping[str, Any], foreign: Mapping[str, Any], where: str = "") -> Source:
    """Return a source with the settings `own`, to which flags of other frameworks, `foreign`, can be added."""
    if not foreign and not any(_may_be_foreign(name, value) for name, value in own.items()):
        return Source(own, where)
    source: Source = compat("flags.translate").Translation(own, where)
    return source


def _may_be_foreign(name: str, value: Any) -> bool:
    """Return whether a value may be the word of another framework."""
    if not isinstance(value, str):
        return False
    if name == "tokenizer_type":  # the flag has no list of choices, but none of our names has this ending
        return value.endswith("Tokenizer")
    return name in _CHOICES and value not in _CHOICES[name]


def merge(sources: Sequence[Source], cli: Source) -> tuple[dict[str, Any], list[str]]:
    """Merge the settings of files and of the command line; return the merged settings and notes on dropped settings.

    The command line overrides files, and later files override earlier files.
    sources: the entry script, and the files in their order. cli: the command line.
    """
    values: dict[str, Any] = {}
    source_of: dict[str, str] = {}
    notes: list[str] = []
    for source in (*sources, cli):
        # Only files can have an objective that older versions stored by mistake.
        new = source.values if source is cli else without_stray_objective(source.values)
        # `values` still has the earlier --rope-scaling method here.
        notes += _drop_unused_rope(values, new, source_of)
        values |= new  # later sources override earlier ones
        source_of |= dict.fromkeys(new, source.where)
    # Flags of other frameworks may imply further settings, which must not override what is given: those that a file
    # implies give way to the command line, and those that the command line implies to the user's files.
    for source in sources:
        values |= source.implied_settings(values, cli.values)
    files = sources[1:]  # without the entry script
    values |= cli.implied_settings(values, given_in_files(files))
    return values, notes


def _drop_unused_rope(values: dict[str, Any], new: Mapping[str, Any], source_of: Mapping[str, str]) -> Iterator[str]:
    """Drop from `values` the parameters that only an old --rope-scaling method uses, if `new` changes the method.

    Yields a note on each of them. source_of: source of each setting in `values`.
    """
    old_method = values.get("rope_scaling")
    method = new.get("rope_scaling", old_method)
    if method == old_method:
        return
    for name in unused_rope_settings(values, method):
        if name in new:  # given together with the method: `DecoderConfig` refuses this
            continue
        unused = format_flag(flag(name), values.pop(name))
        reason = f"{format_flag('--rope-scaling', method)} does not use it"
        yield f"{source_of[name]}: {unused} has no effect: {reason}"


def given_in_files(sources: Sequence[Source]) -> dict[str, Any]:
    """Return the settings that the user's --config files give, without those of files that a run or import has saved.

    A handwritten file contains only chosen settings, so each of them counts, even if its value is the default. A saved
    file also contains all other settings of the model, and does not show which ones were chosen.
    """
    given: dict[str, Any] = {}
    for source in sources:
        if not is_saved_by_run(source):
            given |= source.values
    return given


def is_saved_by_run(source: Source) -> bool:
    """Return whether a run or an import has saved the file: it has at least a third of the settings, the model's."""
    return len(source.values) >= len(HOME) / 3


def with_family(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings `values`, by name, with `family` added if it is missing.

    Only old settings files lack `family`; the missing family is t5 if the file sets enc_seq_length, else gpt2.
    An objective that older versions stored by mistake is removed, see `without_stray_objective`.
    """
    family = "gpt2" if values.get("enc_seq_length") is None else "t5"
    values = {"family": family, **values}  # a family in `values` overrides this one
    return without_stray_objective(values)


def without_stray_objective(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings `values` of a file, by name, without the objective `span-corruption` if the family is not t5.

    Older versions stored this default objective of T5 in the settings of all families.
    """
    # Without a family, the model may be a T5, whose objective this is.
    is_stray = values.get("family", "t5") != "t5" and values.get("objective") == "span-corruption"
    kept = dict(values)
    if is_stray:
        del kept["objective"]
    return kept
