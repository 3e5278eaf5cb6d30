"""The tables of docs/migration.md and docs/migration_zh.md: `python -m tests.unit.flags_table` prints them."""

import re
from collections.abc import Mapping, Sequence

from megatron.config import foreign_core, foreign_trainer
from megatron.config.fields import flag
from megatron.config.foreign_flags import MEGATRON, VALUES
from megatron.config.outcomes import ByValue, Depends, Means, NoEffect, Outcome, Refused, Row, given
from megatron.config.translate import written


def _ours(settings: Mapping[str, object]) -> str:
    return " ".join(
        f"{flag(name)} N" if value is given or callable(value) else written(flag(name), value)
        for name, value in settings.items()
    )


def _outcome(outcome: Outcome) -> str:
    if isinstance(outcome, Means) and outcome.unless:
        why = f" ({outcome.but})" if outcome.but else ""
        return f"`{_ours(outcome.settings)}`, and unless said otherwise `{_ours(outcome.unless)}`{why}"
    if isinstance(outcome, Means):
        return f"`{_ours(outcome.settings)}`" + (f"; {outcome.but}" if outcome.but else "")
    if isinstance(outcome, ByValue):
        others = [f"else: {_outcome(outcome.other)}"] if outcome.other else []
        return "; ".join([*(f"{value}: {_outcome(each)}" for value, each in outcome.values.items()), *others])
    if isinstance(outcome, Depends):
        return outcome.says
    return outcome.why if isinstance(outcome, NoEffect) else outcome.advice


def _rows(kinds: tuple[type, ...], of: Sequence[Row] = (*MEGATRON, *foreign_core.ROWS)) -> dict[str, list[str]]:
    """Flags by what they come to, in the order of the table."""
    found: dict[str, list[str]] = {}
    for row in of:
        if isinstance(row.outcome, kinds):
            found.setdefault(_outcome(row.outcome), []).extend(row.names.split())
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
        _table("flag", "taken for", _rows((Means, ByValue, Depends)) | _values()),
        _table("flag", "has no effect, because", _rows((NoEffect,))),
        _table("flag", "is refused with this advice", _rows((Refused,))),
        _table("name", "here", _rows((Means, ByValue, Depends, NoEffect, Refused), foreign_trainer.ROWS)),
    ]


def _taken(rows: Sequence[Row]) -> dict[str, list[str]]:
    """What is taken for settings of ours, in Chinese."""
    taken: dict[str, list[str]] = {}
    for row in rows:
        if isinstance(row.outcome, Means):
            more = f"，没有另外给出时还有 `{_ours(row.outcome.unless)}`" if row.outcome.unless else ""
            taken.setdefault(f"`{_ours(row.outcome.settings)}`{more}", []).extend(row.names.split())
        elif isinstance(row.outcome, (ByValue, Depends)):
            ours = dict.fromkeys(re.findall(r"--[a-z0-9-]+", _outcome(row.outcome)))
            text = "视取值而定" if isinstance(row.outcome, ByValue) else "视其他参数而定"
            taken.setdefault(f"{text}：{'、'.join(f'`{name}`' for name in ours)}" if ours else text, []).extend(
                row.names.split()
            )
    return taken


def chinese() -> list[str]:
    ours = (*MEGATRON, *foreign_core.ROWS)
    lists = [
        _names([name for names in _rows((kind,), rows).values() for name in names])
        for rows in (ours, foreign_trainer.ROWS)
        for kind in (NoEffect, Refused)
    ]
    return [
        _table("参数", "当作", _taken(ours) | _values()), *lists[:2], _table("名称", "这里", _taken(foreign_trainer.ROWS)), *lists[2:],
    ]  # fmt: skip


if __name__ == "__main__":
    print("\n\n".join([*english(), *chinese()]))
