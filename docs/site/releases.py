"""The tables in docs/releases.md, made from results.json and packages.json in tests/releases.

`python -m tests.releases --write` measures rows of the table of DeepSpeed and torch, and with `--packages` those of
the table of other packages; `python -m docs.site.results` writes the tables.
"""

import json
import re
from collections.abc import Callable
from itertools import groupby
from pathlib import Path
from typing import Any

from tests.releases.watch import WATCHED

from .reference import table

ROOT = Path(__file__).resolve().parents[2]
FILE = ROOT / "tests" / "releases" / "results.json"
PACKAGES = FILE.with_name("packages.json")
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
PACKAGE_HEADS = {
    "en": ["package", "contract", "what depends on it", "releases", "outcome"],
    "zh": ["包", "约定", "依赖它的功能", "版本", "结果"],
}
# Contracts and what depends on them, in tests/releases/watch.py; names of commands need no translation.
PACKAGE_ZH = {
    "logits of GPT-2": "GPT-2 的 logits",
    "logits of Llama": "Llama 的 logits",
    "logits of T5": "T5 的 logits",
    "logits of UMT5 that are not scaled": "不缩放的 UMT5 logits",
    "logits of Mixtral": "Mixtral 的 logits",
    "ids of an imported vocab.json": "导入的 vocab.json 的 id",
    "ids of an exported tokenizer.json": "导出的 tokenizer.json 的 id",
    "ids of an exported Llama tokenizer.model": "导出的 Llama tokenizer.model 的 id",
    "auxiliary loss of a padded batch": "有填充的批次的辅助损失",
    "T5 loss of accumulated batches": "梯度累积时 T5 的损失",
    "vocab_file= of GPT2Tokenizer": "GPT2Tokenizer 的 vocab_file=",
    "ids of byte-level BPE": "字节级 BPE 的 id",
    "ids of added tokens": "附加词元的 id",
    "vocabulary from a text": "从文本训练的词表",
    "ids of BPE": "BPE 的 id",
    "ids of unigram": "unigram 的 id",
    "ids with several threads": "多线程时的 id",
    "words of jieba": "与 jieba 相同的分词",
    "random numbers of a seed": "同一种子的随机数",
    "tensors of known bytes": "已知字节的张量",
    "tensors of our files": "本项目文件中的张量",
    "checksum of a file": "文件的校验和",
    "frames of known bytes": "已知字节的帧",
    "several frames of unknown size": "多个未标明大小的帧",
    "documents of a .parquet file": ".parquet 文件的文档",
    "estimated similarity": "估计的相似度",
    "signature of a document": "文档的签名",
    "listing after a write": "写入后的列表",
    "ranged reads": "按范围读取",
    "a file of several parts": "分段上传的文件",
    "accuracy of a task": "任务的准确率",
    "corpus files": "语料文件",
    "defaults, learning rates, router loss": "默认值、学习率、路由器损失",
    "exported tokenizers": "导出的分词器",
    "corpora and checkpoints at `s3://`": "`s3://` 上的语料和检查点",
    "training of exported Mixtral models with transformers": "用 transformers 训练导出的 Mixtral",
    "training of exported T5 models with transformers": "用 transformers 训练导出的 T5",
    "scripts that load an exported vocab.json": "加载导出的 vocab.json 的脚本",
    "the order of samples after a resume": "断点续训后的样本顺序",
    "exported checkpoints": "导出的检查点",
    "`BLAKE3SUMS` of checkpoints": "检查点的 `BLAKE3SUMS`",
    "`.bin` and `.idx` files": "`.bin` 和 `.idx` 文件",
    "flags of Megatron-LM": "Megatron-LM 的参数",
}


def rows(file: Path = FILE) -> list[dict[str, Any]]:
    """Return the measured rows of a file, newest release first."""
    return json.loads(file.read_text(encoding="utf-8")) if file.exists() else []


def _version(text: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", text)[:3]))


def _key(row: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(_version(row[name]) for name in ("deepspeed", "torch"))


def _package_key(row: dict[str, Any]) -> tuple[Any, ...]:
    return -list(WATCHED).index(row["package"]), _version(row["release"])


def add_row(row: dict[str, Any], file: Path = FILE, key: Callable[[dict[str, Any]], Any] = _key) -> None:
    """Add a row to the file, in place of the row of the same releases."""
    others = [each for each in rows(file) if key(each) != key(row)]
    found = sorted([*others, row], key=key, reverse=True)
    file.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def add_package(row: dict[str, Any]) -> None:
    """Add a row of a package, in place of the row of the same release."""
    add_row(row, PACKAGES, _package_key)


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
    return f"{_caption('python -m tests.releases', found, language)}\n\n{table(tuple(HEADS[language]), made)}"


def _caption(command: str, found: list[dict[str, Any]], language: str) -> str:
    """Return the line above a table: its command, and the dates of its rows."""
    dates = sorted({row["date"] for row in found})
    words = {"en": "Measured with `{}`, {}:", "zh": "用 `{}` 测量，{}："}
    return words[language].format(command, " / ".join(dates))


def packages_block(language: str) -> str:
    """Return the table of other packages as Markdown; releases with the same outcome share a row."""
    found = rows(PACKAGES)
    made = []
    for name, watched in WATCHED.items():
        measured = [row for row in found if row["package"] == name]
        for contract, use in watched.uses.items():
            shown = (PACKAGE_ZH[contract], PACKAGE_ZH.get(use, use)) if language == "zh" else (contract, use)
            kinds = [(row["contracts"][contract].partition(":")[0], row["release"]) for row in measured]
            for kind, group in groupby(kinds, lambda each: each[0]):
                releases = _translated(", ".join(release for _, release in group), language)
                made.append((name, *shown, releases, _translated(kind, language)))
    caption = _caption("python -m tests.releases --packages", found, language)
    return f"{caption}\n\n{table(tuple(PACKAGE_HEADS[language]), made)}"
