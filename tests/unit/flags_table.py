"""Print the tables of docs/migration.md and docs/migration_zh.md: `python -m tests.unit.flags_table`."""

from collections.abc import Mapping, Sequence

from megatron.config.fields import flag
from megatron.config.foreign import core as foreign_core
from megatron.config.foreign import keys as foreign_keys
from megatron.config.foreign.flags import MEGATRON, VALUES
from megatron.config.foreign.outcomes import ByValue, Depends, Means, NoEffect, Outcome, Refused, Row, given
from megatron.config.foreign.translate import written
from tests.unit.flags_words import CHINESE


def _ours(settings: Mapping[str, object]) -> str:
    return " ".join(
        f"{flag(name)} N" if value is given or callable(value) else written(flag(name), value)
        for name, value in settings.items()
    )


def _outcome(outcome: Outcome, chinese: bool = False) -> str:
    def say(words: str) -> str:
        return CHINESE[words] if chinese and words else words

    stop, colon = ("；", "：") if chinese else ("; ", ": ")
    if isinstance(outcome, Means) and outcome.unless:
        why = f"（{say(outcome.but)}）" if chinese else f" ({outcome.but})"
        more = "，没有另外给出时还有" if chinese else ", and unless given explicitly"
        if not outcome.settings:
            return (
                f"{'没有另外给出时为' if chinese else 'unless given explicitly'} "
                f"`{_ours(outcome.unless)}`{why if outcome.but else ''}"
            )
        return f"`{_ours(outcome.settings)}`{more} `{_ours(outcome.unless)}`{why if outcome.but else ''}"
    if isinstance(outcome, Means):
        return f"`{_ours(outcome.settings)}`" + (f"{stop}{say(outcome.but)}" if outcome.but else "")
    if isinstance(outcome, ByValue):
        cases = {**outcome.values, **({"其他" if chinese else "else": outcome.other} if outcome.other else {})}
        return stop.join(f"{value}{colon}{_outcome(each, chinese)}" for value, each in cases.items())
    if isinstance(outcome, Depends):
        return say(outcome.says)
    return say(outcome.why if isinstance(outcome, NoEffect) else outcome.advice)


def _rows(
    kinds: tuple[type, ...], of: Sequence[Row] = (*MEGATRON, *foreign_core.ROWS), chinese: bool = False
) -> dict[str, list[str]]:
    """Return table cell -> foreign flags in the order of `of`; the cell describes the effect of these flags."""
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
        _table("flag", "translated to", _rows((Means, ByValue, Depends)) | _values()),
        _table("flag", "has no effect, because", _rows((NoEffect,))),
        _table("flag", "is refused with this advice", _rows((Refused,))),
        _table("name", "here", _rows((Means, ByValue, Depends, NoEffect, Refused), foreign_keys.ROWS)),
    ]


def chinese() -> list[str]:
    """Return the tables of foreign flags in Chinese. Raises KeyError if flags_words.py lacks a text's translation."""
    return [
        _table("参数", "翻译为", _rows((Means, ByValue, Depends), chinese=True) | _values()),
        _table("参数", "没有作用，因为", _rows((NoEffect,), chinese=True)),
        _table("参数", "被拒绝，建议是", _rows((Refused,), chinese=True)),
        _table("名称", "这里", _rows((Means, ByValue, Depends, NoEffect, Refused), foreign_keys.ROWS, chinese=True)),
    ]


if __name__ == "__main__":
    print("\n\n".join([*english(), *chinese()]))
