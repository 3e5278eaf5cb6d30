"""Translation of foreign flags (of other frameworks) to this project's settings, by the tables in table.py."""

import argparse
import difflib
from collections.abc import Container, Mapping, Sequence
from typing import Any

from megatron.config.fields import flag
from megatron.config.messages import format_flag
from megatron.config.sections import Config
from megatron.config.source import Change, Source
from megatron.json_text import brief

from .core import BALANCING, EXPERT_BIAS, with_expert_bias
from .defaults import USUAL
from .outcomes import ByValue, Depends, NoEffect, Outcome, Refused, Translated
from .table import FLAGS, IMPLIED, VALUES

# Some launchers and JSON files write these words for a flag that takes no value.
BOOLEAN_WORDS = {"true": True, "false": False}
Settings = dict[str, Any]  # name of a setting -> value


class _StoreForeignFlag(argparse.Action):
    """Action that stores the value of a foreign flag in the dict `foreign`, keyed by `dest`, its name in table.py."""

    def __call__(self, parser: Any, namespace: Any, values: Any, *_: Any) -> None:
        namespace.foreign = getattr(namespace, "foreign", {}) | {self.dest: values}


def add_foreign_flags(parser: argparse.ArgumentParser) -> None:
    """Let `parser` accept foreign flags, which its help does not show, and store their values in the dict `foreign`.

    Each flag is also accepted with `_` in place of `-`.
    """
    for name, row in FLAGS.items():
        options: dict[str, Any] = {"type": row.value_type}
        if row.value_type in (None, object):
            # One word or none, because launchers may write `true` or `false`; True if the flag stands alone
            options = {"nargs": "?", "const": True}
        elif row.value_type is list:
            options = {"nargs": "*"}
        options |= {"action": _StoreForeignFlag, "dest": name, "help": argparse.SUPPRESS}
        # Both spellings are equal for a flag of one word. Argparse refuses a flag that is added twice, so the dict
        # drops the second.
        for spelling in dict.fromkeys((name, f"--{_key_of(name)}")):
            parser.add_argument(spelling, **options)


def _key_of(name: str) -> str:
    """Return the JSON key with the same name as a foreign flag."""
    return name[2:].replace("-", "_")


def flag_of(key: str) -> str | None:
    """Return the foreign flag that has the same name as a JSON key, or None."""
    return next((name for name in FLAGS if key == _key_of(name)), None)


def suggest_flag(name: str, ours: Sequence[str], all_foreign: bool = True) -> str:
    """Return `; did you mean --x?` for an unknown flag, or an empty string if no known flag is similar.

    Candidates are the flags `ours` and the foreign flags. If a foreign flag is closest, its replacement in this project
    is suggested.
    ours: flags of this project.
    all_foreign: also consider foreign flags whose replacement is not in `ours`.
    """
    # The same flag in another spelling, such as --seq_length
    dashed = "--" + name.lstrip("-").replace("_", "-")
    if dashed in ours:
        return f"; did you mean {dashed}?"
    # The beginning, up to a hyphen, of exactly one flag
    longer = [each for each in ours if each.startswith(f"{dashed}-")]
    if len(longer) == 1:
        return f"; did you mean {longer[0]}?"
    candidates = [*ours]
    for theirs in FLAGS:
        # A tool with few flags suggests only what it has: the replacement of a foreign flag, if there is one.
        replacements = {flag(setting) for setting in settings_for(_key_of(theirs))}
        is_replaceable = bool(replacements) and replacements <= set(ours)
        if theirs not in ours and (all_foreign or is_replaceable):
            candidates.append(theirs)
    matches = difflib.get_close_matches(dashed, candidates, n=1, cutoff=0.7)
    if not matches:
        return ""
    match = matches[0]
    replacement = f"{match}?" if match in ours else _suggest_replacement(match, ours, dashed)
    return f"; did you mean {replacement}"


def _suggest_replacement(theirs: str, ours: Sequence[str], given: str) -> str:
    """Return the suggestion for a foreign flag: its replacement, or its name and the reason why it is refused."""
    outcome = FLAGS[theirs].outcome
    if isinstance(outcome, ByValue):
        outcome = _typical_outcome(outcome)
    if isinstance(outcome, Refused):
        return f"{theirs}? It is not accepted: {outcome.advice}"
    flags = list(map(flag, outcome.settings)) if isinstance(outcome, Translated) else []
    # A flag without effect, or whose settings are known only later, is accepted under its own name.
    if not flags or not set(flags) <= set(ours):
        return f"{theirs}?"
    origin = f" ({theirs} in other projects)" if theirs != given else ""
    return f"{' and '.join(flags)}{origin}?"


def _typical_outcome(outcome: ByValue) -> Outcome:
    """Return the first translation among the outcomes of a flag's values, or the outcome of other values."""
    for each in outcome.values.values():
        if isinstance(each, Translated):
            return each
    return _outcome_of_other(outcome)


def _outcome_of_other(outcome: ByValue) -> Translated | Refused:
    """Return the outcome of a value that is not in the table: by default, a refusal that lists the table's values."""
    return outcome.other or Refused(f"choose one of {', '.join(outcome.values)}")


def settings_for(key: str) -> list[str]:
    """Return the names of this project's settings to which the foreign key `key` translates."""
    name = flag_of(key)
    outcome = FLAGS[name].outcome if name else None
    return list(outcome.settings) if isinstance(outcome, Translated) else []


def _opposite(name: str) -> Translated | None:
    """Return the translation of a foreign flag whose value is False, as a JSON file may have it; None if it has none.

    For example, --disable-bias-linear sets hidden_bias to False, so `"disable_bias_linear": false` sets it to True. A
    flag that takes a value, or sets something else than booleans, has no opposite.
    """
    row = FLAGS[name]
    if row.value_type not in (None, object) or not isinstance(row.outcome, Translated):
        return None
    opposites = {}
    for setting, value in row.outcome.settings.items():
        if not isinstance(value, bool):  # 1 equals True, but is a number
            return None
        opposites[setting] = not value
    return Translated(opposites) if opposites else None


class Translation(Source):
    """Translation of one source (file or command line): resulting settings, notes and problems.

    own: settings that the source gives under this project's names. `values` starts with them; the settings to which
    foreign flags translate are added to it.
    """

    def __init__(self, own: Mapping[str, Any], where: str) -> None:
        super().__init__(own, where)
        self._typed_flag: dict[str, str] = {}
        self._deferred: Settings = {}
        self._with_implied: list[tuple[str, Settings, Translated]] = []
        self._ignored: list[tuple[str, Translated]] = []  # flags whose value False is ignored
        for setting, values in VALUES.items():
            word = own.get(setting)
            if isinstance(word, str) and word in values:
                # Another framework's word for the value of a flag that both projects have.
                typed = format_flag(flag(setting), word)
                self._set(typed, {setting: values[word]}, IMPLIED.get(word, Translated({})))

    def _set(self, typed: str, new_settings: Settings, outcome: Translated) -> None:
        """Add the settings to which a flag translates to the values, and a note on them.

        If the flag implies further settings, `implied_settings` adds the note later.
        typed: the flag as typed. outcome: its translation, of which only `implied` and `note` are used.
        """
        self.values |= new_settings
        if outcome.implied:
            self._with_implied.append((typed, new_settings, outcome))
        else:
            self.notes.append(_translation_note(typed, new_settings, outcome.note))

    def translate_all(self, flags: Mapping[str, Any]) -> None:
        """Translate all foreign flags of the source: name -> value."""
        remaining = {}
        for name, value in flags.items():
            # A flag without a value (None), or with an optional value (object)
            if FLAGS[name].value_type in (None, object):
                value = BOOLEAN_WORDS.get(str(value).lower(), value)
            remaining[name] = value
        # These two flags together mean something else than each of them alone.
        translation = with_expert_bias(remaining)
        if translation:
            typed = []
            for name in (EXPERT_BIAS, BALANCING):
                if name in remaining:
                    typed.append(format_flag(name, remaining.pop(name)))
            self._add_settings(" ".join(typed), None, translation)  # its settings are constants
        # Megatron-LM reads the number of groups only if the other flag is True.
        if remaining.get("--group-query-attention") is False:
            num_groups = remaining.pop("--num-query-groups", None)
            if num_groups:
                self.notes.append("--num-query-groups has no effect without grouped-query attention")
        for name, value in remaining.items():
            self.add(name, value)

    def add(self, name: str, value: Any) -> None:
        """Translate a foreign flag. If its translation depends on other settings, it is deferred to `apply_deferred`.

        The value False inverts the boolean settings of a flag. For other flags, False is the default of the other
        framework and is ignored, with a note if the run has what the flag stands for.
        """
        outcome = FLAGS[name].outcome
        if FLAGS[name].value_type is None and not isinstance(value, bool):
            self.problems.append(f"{name} must be true or false, not {value!r}")
        elif value is False:
            opposite = _opposite(name)
            if opposite:
                self._translate(name, False, opposite)
            elif isinstance(outcome, Translated) and outcome.settings:
                self._ignored.append((name, outcome))
        elif isinstance(outcome, Depends):
            self._deferred[name] = value
        else:
            self._translate(name, value, outcome)

    def deferred_flags(self) -> list[str]:
        """Return the foreign flags whose translation is deferred to `apply_deferred`."""
        return list(self._deferred)

    def implied_settings(self, values: Mapping[str, Any], given_elsewhere: Container[str] = ()) -> Settings:
        """Return the further settings that flags imply (`Translated.implied`), and add a note for each such flag.

        values: all settings so far. Those that differ from their defaults are not overridden.
        given_elsewhere: names of settings that a source of higher precedence gives. They are not overridden, either.
        """
        all_implied = Settings()
        current = {**USUAL, **values}
        for typed, new_settings, outcome in self._with_implied:
            # A later flag or file may have overridden the settings of this flag, which then implies nothing.
            implied = Settings()
            if all(values.get(setting) == value for setting, value in new_settings.items()):
                implied = _implied_settings(outcome, current)
            # Settings that are given, or that an earlier flag implies, take precedence.
            for setting in list(implied):
                if setting in given_elsewhere or setting in self.values or setting in all_implied:
                    del implied[setting]
            if new_settings or implied:
                note = outcome.note if implied else ""  # the note explains what the flag implies
                self.notes.append(_translation_note(typed, {**new_settings, **implied}, note))
            else:
                # The flag only implies settings, such as --group-query-attention, and none of them is free to be set.
                used = [format_flag(flag(name), current[name]) for name in outcome.implied]
                self.notes.append(f"{typed} has no effect: the run uses {' and '.join(used)}")
            all_implied |= implied
        # A flag with the value False, although something else has set what the flag stands for.
        for name, outcome in self._ignored:
            if all(values.get(setting) == value for setting, value in outcome.settings.items()):
                self.notes.append(f"{name} False has no effect: the run uses {_as_flags(outcome.settings)}")
        return all_implied

    def apply_deferred(self, config: Config, ranks: int, change: Change) -> Config:
        """Apply the deferred flags to `config`, in the order of the table FLAGS; return the result.

        change: function that returns a Config with some settings replaced.
        """
        for name, foreign in FLAGS.items():
            if name not in self._deferred:
                continue
            value = self._deferred[name]
            assert isinstance(foreign.outcome, Depends)
            outcome = foreign.outcome.translate(config, value, ranks)
            new = self._translate(name, value, outcome)
            if new:
                config = change(config, new)
        return config

    def _translate(self, name: str, value: Any, outcome: Outcome) -> Settings:
        """Add the outcome of a flag to values, notes or problems; return the new settings."""
        typed = f"{name} False" if value is False else brief(format_flag(name, value), 300)
        if isinstance(outcome, ByValue):
            # The keys of the table are texts, but a flag without a value has the value True.
            outcome = outcome.values.get(str(value)) or _outcome_of_other(outcome)
        if isinstance(outcome, Refused):
            self.problems.append(f"{typed} is not accepted: {outcome.advice}")
        elif isinstance(outcome, NoEffect):
            self.notes.append(f"{typed} has no effect: {outcome.reason}")
        elif isinstance(outcome, Translated):
            return self._add_settings(typed, value, outcome)
        return {}

    def _add_settings(self, typed: str, value: Any, outcome: Translated) -> Settings:
        """Set the settings to which a flag translates and return them; {} if another value is given for one of them.

        typed: the flag as typed.
        """
        # A rule is a constant, or a function of the value that the user gave.
        new_settings = {}
        for setting, rule in outcome.settings.items():
            new_settings[setting] = rule(value) if callable(rule) else rule
        for setting, new_value in new_settings.items():
            if setting in self.values and self.values[setting] != new_value:
                # Either another foreign flag has set the other value, or a flag of this project.
                conflicting = self._typed_flag.get(setting) or format_flag(flag(setting), self.values[setting])
                self.problems.append(
                    f"{typed} means {_as_flags(new_settings)}, but {conflicting} is given; leave one of them out"
                )
                return {}
        self._typed_flag |= dict.fromkeys(new_settings, typed)
        self._set(typed, new_settings, outcome)
        return new_settings


def _implied_settings(outcome: Translated, values: Mapping[str, Any]) -> Settings:
    """Return the settings that `outcome.implied` lists: those with their default in `values`, all settings."""
    implied = {}
    for setting, value in outcome.implied.items():
        default = USUAL[setting]
        if callable(value):
            value = value(values)
        # A value that is the default anyway needs no setting.
        is_unchanged = values[setting] == default
        if is_unchanged and value != default:
            implied[setting] = value
    return implied


def _as_flags(values: Mapping[str, Any]) -> str:
    return " ".join(format_flag(flag(setting), value) for setting, value in values.items())


def _translation_note(typed: str, values: Mapping[str, Any], note: str) -> str:
    reason = f" ({note})" if note else ""
    return f"{typed} translated to {_as_flags(values)}{reason}"
