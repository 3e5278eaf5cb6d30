"""Print the tables of docs/migration.md and docs/migration_zh.md: `python -m tests.unit.flags_table`."""

from collections.abc import Mapping, Sequence

from megatron.config.fields import flag
from megatron.config.sections import settings
from megatron_compat.flags import core as foreign_core
from megatron_compat.flags import keys as foreign_keys
from megatron_compat.flags.outcomes import ByValue, Depends, NoEffect, Outcome, Refused, Row, Translated, user_value
from megatron_compat.flags.table import MEGATRON, VALUES
from megatron_compat.flags.translate import format_flag
from tests.unit.flags_words import CHINESE

USUAL = {f.name: f.default for _, _, f in settings()}


def _ours(changed: Mapping[str, object]) -> str:
    return " ".join(_shown(name, value) for name, value in changed.items())


def _shown(name: str, value: object) -> str:
    if value is not user_value and callable(value) and isinstance(USUAL[name], bool):
        return format_flag(flag(name), not USUAL[name])  # the only result that changes the setting
    if value is bool:  # the flag takes no value
        return flag(name)
    return f"{flag(name)} N" if value is user_value or callable(value) else format_flag(flag(name), value)


def _outcome(outcome: Outcome, chinese: bool = False) -> str:
    def say(words: str) -> str:
        return CHINESE[words] if chinese and words else words

    stop, colon = ("；", "：") if chinese else ("; ", ": ")
    if isinstance(outcome, Translated) and outcome.implied:
        implied, why = f"`{_ours(outcome.implied)}`", f"{stop}{say(outcome.note)}" if outcome.note else ""
        if chinese:
            also = f"`{_ours(outcome.settings)}`，没有另外给出时还有" if outcome.settings else "没有另外给出时为"
            return f"{also} {implied}{why}"
        also = f"`{_ours(outcome.settings)}`, and also " if outcome.settings else ""
        return f"{also}{implied} unless set explicitly{why}"
    if isinstance(outcome, Translated):
        return f"`{_ours(outcome.settings)}`" + (f"{stop}{say(outcome.note)}" if outcome.note else "")
    if isinstance(outcome, ByValue):
        values: dict[str, list[str]] = {}  # effect -> the values with this effect
        for value, each in outcome.values.items():
            values.setdefault(_effect(each, chinese), []).append(f"`{value}`")
        if outcome.other:
            values.setdefault(_effect(outcome.other, chinese), []).append("其他" if chinese else "other values")
        return stop.join(f"{('、' if chinese else ', ').join(each)}{colon}{effect}" for effect, each in values.items())
    if isinstance(outcome, Depends):
        return say(outcome.summary)
    return say(outcome.reason if isinstance(outcome, NoEffect) else outcome.advice)


def _effect(outcome: Translated | NoEffect | Refused, chinese: bool) -> str:
    """Return a description of one value's effect; unlike `_outcome`, it says if the value is refused or ineffective."""
    if isinstance(outcome, Translated):
        note = (CHINESE[outcome.note] if chinese else outcome.note) if outcome.note else ""
        return f"`{_ours(outcome.settings)}`" + (f"（{note}）" if note and chinese else f" ({note})" if note else "")
    said = _outcome(outcome, chinese)
    if chinese:
        return f"{'不起作用' if isinstance(outcome, NoEffect) else '拒绝'}（{said}）"
    return f"{'no effect' if isinstance(outcome, NoEffect) else 'refused'} ({said})"


def _rows(
    kinds: tuple[type, ...], of: Sequence[Row] = (*MEGATRON, *foreign_core.ROWS), chinese: bool = False
) -> dict[str, list[str]]:
    """Return a table's rows: description of an effect -> the flags with this effect, in the order of the list `of`."""
    found: dict[str, list[str]] = {}
    for row in of:
        if isinstance(row.outcome, kinds):
            found.setdefault(_outcome(row.outcome, chinese), []).extend(row.names.split())
    return found


def _names(names: list[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _table(left: str, right: str, rows: Mapping[str, list[str]]) -> str:
    return "\n".join(
        [f"| {left} | {right} |", "| --- | --- |", *(f"| {_names(names)} | {text} |" for text, names in rows.items())]
    )


def _values() -> dict[str, list[str]]:
    return {
        f"`{flag(setting)} {ours}`": [f"{flag(setting)} {theirs}" for theirs, each in values.items() if each == ours]
        for setting, values in VALUES.items()
        for ours in values.values()
    }


def english() -> list[str]:
    return [
        _table("flag", "translated to (N: the value of the flag)", _rows((Translated, ByValue, Depends)) | _values()),
        _table("flag", "has no effect, because", _rows((NoEffect,))),
        _table("flag", "is refused; reason or alternative", _rows((Refused,))),
        _table(
            "key",
            "translated to (N: the value of the key)",
            _rows((Translated, ByValue, Depends, NoEffect, Refused), foreign_keys.ROWS),
        ),
    ]


def chinese() -> list[str]:
    """Return the tables of foreign flags in Chinese. Raises KeyError if flags_words.py lacks a text's translation."""
    return [
        _table("参数", "翻译为（N：参数的值）", _rows((Translated, ByValue, Depends), chinese=True) | _values()),
        _table("参数", "没有作用，因为", _rows((NoEffect,), chinese=True)),
        _table("参数", "被拒绝，建议是", _rows((Refused,), chinese=True)),
        _table(
            "名称",
            "翻译为（N：它的值）",
            _rows((Translated, ByValue, Depends, NoEffect, Refused), foreign_keys.ROWS, chinese=True),
        ),
    ]


if __name__ == "__main__":
    print("\n\n".join([*english(), *chinese()]))
