"""The table of releases in docs/releases.md, made from tests/releases/results.json.

`python -m tests.releases --write` measures rows; `python -m docs.site.results` writes the table.
"""

import json
import re
from pathlib import Path
from typing import Any

from .reference import table

ROOT = Path(__file__).resolve().parents[2]
FILE = ROOT / "tests" / "releases" / "results.json"
COLUMNS = [(engine, precision) for engine in ("plain", "pipeline") for precision in ("fp32", "bf16", "fp16")]
HEADS = {
    "en": ["DeepSpeed", "torch", "`tds`", *(f"{e}, {p}" for e, p in COLUMNS), "scripts"],
    "zh": [
        *("DeepSpeed", "torch", "`tds`"),
        *(f"{'无流水线' if e == 'plain' else '流水线'}，{p}" for e, p in COLUMNS),
        "脚本",
    ],
}
ZH = {
    "right": "正确",
    "refused": "拒绝",
    "wrong": "**数值错误**",
    "fails": "报错",
    "taken": "接受",
    "with accumulation": "梯度累积时",
    "clipped SGD": "裁剪的 SGD",
    ", ": "、",
    "; ": "；",
    ": ": "：",
}
EN = {"wrong": "**wrong**"}


def rows() -> list[dict[str, Any]]:
    """Return the measured rows, newest release of DeepSpeed first."""
    return json.loads(FILE.read_text(encoding="utf-8")) if FILE.exists() else []


def _key(row: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(tuple(map(int, re.findall(r"\d+", row[name])[:3])) for name in ("deepspeed", "torch"))


def add_row(row: dict[str, Any]) -> None:
    """Add a row to the file, in place of the row of the same releases."""
    others = [each for each in rows() if _key(each) != _key(row)]
    found = sorted([*others, row], key=_key, reverse=True)
    FILE.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def _label(zero: str, names: list[str], every: list[str]) -> str:
    """Name the routes `names` of a ZeRO stage, of which `every` are all: "ZeRO 2 with accumulation"."""
    ways = [name.split(" ", 4)[-1].replace("SGD, clipped", "clipped SGD") for name in names]
    if ways == ["sharded"]:
        return "`DistributedOptimizer`"
    if len(names) == len(every) or zero == "3":  # outcomes of ZeRO 3 on CPUs are random before DeepSpeed 0.19.8
        return f"ZeRO {zero}"
    some = "with accumulation" if len(names) == len(every) - 1 and " x1 " not in str(names) else ", ".join(ways)
    return f"ZeRO {zero} ({some})"


def _cell(found: dict[str, str], engine: str, precision: str) -> str:
    """Summarise the outcomes of the routes of an engine and a precision."""
    here = {name: each for name, each in found.items() if name.startswith(f"{engine} {precision} ")}
    if len({each.partition(":")[0] for each in here.values()}) == 1:
        return next(iter(here.values())).partition(":")[0]
    parts = []
    for kind in ("wrong", "fails", "refused"):
        labels = []
        for zero in "0123":
            every = [n for n in here if f" zero-{zero} " in n and not n.endswith("sharded")]
            names = [n for n in every if here[n].startswith(kind)]
            labels += [_label(zero, names, every)] if names else []
            labels += [_label(zero, [n], [n]) for n in here if f" zero-{zero} " in n and n.endswith("sharded")
                       and here[n].startswith(kind)]  # fmt: skip
        parts += [f"{kind}: {', '.join(labels)}"] if labels else []
    return "; ".join(["right", *parts]) if "right" in here.values() else "; ".join(parts)


def _without_luck(found: dict[str, str]) -> dict[str, str]:
    """Give all routes of ZeRO 3 the outcome of a bad one, because before DeepSpeed 0.19.8 they are wrong at random."""
    bad = [each for name, each in found.items() if " zero-3 " in name and each != "right"]
    return {name: bad[0] if bad and " zero-3 " in name else each for name, each in found.items()}


def _scripts(found: dict[str, str]) -> str:
    wrong = {
        name: each.partition(":")[0] for name, each in found.items() if name.startswith("script") and each != "right"
    }
    return "; ".join(f"{each}: {name.partition(': ')[2]}" for name, each in wrong.items()) or "right"


def _translated(cell: str, language: str) -> str:
    words = ZH if language == "zh" else EN
    return re.sub("|".join(map(re.escape, words)), lambda word: words[word[0]], cell)


def block(language: str) -> str:
    """Return the table as Markdown, below a caption with the dates."""
    found = rows()
    made = []
    for row in found:
        lacks = f"lacks {len(row['lacks'])} names".replace(" 1 names", " 1 name") if row["lacks"] else ""
        taken = "taken" if row["tds"] == "taken" else "; ".join(filter(None, ("refused", lacks)))
        routes = _without_luck(row["routes"])
        cells = [taken, *(_cell(routes, *column) for column in COLUMNS), _scripts(routes)]
        cells = [re.sub(r"lacks (\d+) names?", r"缺 \1 个名字", cell) if language == "zh" else cell for cell in cells]
        made.append(
            (row["deepspeed"], row["torch"].partition("+")[0], *(_translated(cell, language) for cell in cells))
        )
    dates = sorted({row["date"] for row in found})
    measured = {"en": "Measured with `python -m tests.releases`, {}:", "zh": "用 `python -m tests.releases` 测量，{}："}
    return f"{measured[language].format(' / '.join(dates))}\n\n{table(tuple(HEADS[language]), made)}"
