"""Generate the reference from the code: every flag, ds_config key, tool, public name and import from CPM-Pretrain.

`python -m docs.site.reference` writes docs/reference; a test fails when a page is stale. Text taken from the code
stays English in both languages.
"""

import argparse
import ast
import importlib
import inspect
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatron.config import SECTIONS
from megatron.config.defaults import DEFAULTS
from megatron.config.ds_file import PASSED_KEYS, RECONCILED_KEYS, REPLACEMENT_FLAGS
from megatron.config.fields import OneOf, flag, types_of
from megatron.config.help import fields_own_first

from .imports import imports_page
from .words import KEYS, REPLACEMENTS, WORDS

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "docs" / "reference"
NAMES = ROOT / "tests" / "unit" / "public_names.txt"


def _words(default: object) -> str:
    """Return a flag's default value as it is written on a command line."""
    return " ".join(
        f'"{each}"' if " " in str(each) else str(each) for each in (default if isinstance(default, list) else [default])
    )


def cell(text: object) -> str:
    """Return text escaped for a table cell, with flags, paths and tags marked as code."""
    words = " ".join(str(text).split()).replace("|", "\\|")
    parts = words.split("`")  # odd parts are code spans already, so only even parts are marked
    marked = [re.sub(r"(?<![\w/`-])(--[a-z][\w-]*|[\w./*]*_[\w./*]*\w|<[^>]+>)", r"`\1`", part) for part in parts[::2]]
    parts[::2] = [part.replace("*", "\\*") if "`" not in part else part for part in marked]
    return "`".join(parts)


def table(heads: tuple[str, ...], rows: Iterator[tuple[object, ...]] | list[tuple[object, ...]]) -> str:
    """Return a Markdown table."""
    lines = [f"| {' | '.join(heads)} |", "|" + " --- |" * len(heads)]
    return "\n".join([*lines, *(f"| {' | '.join(map(str, row))} |" for row in rows)]) + "\n"


def code(text: object) -> str:
    """Return text as a code span that is safe inside a table cell."""
    return f"`{text}`".replace("|", "\\|") if str(text) else ""


def _values(section: type, setting: Any) -> str:
    """Return the values that a setting may take."""
    kinds = [kind for kind in types_of(section, setting.name) if kind is not type(None)]
    check = setting.metadata["check"]
    if isinstance(check, OneOf):
        return ", ".join(code(choice) for choice in check.choices if choice is not None)
    if kinds == [bool]:
        return code(f"--no-{flag(setting.name)[2:]}")
    return {int: "int", float: "float", str: "text", tuple: "text ..."}[kinds[0]]


def _default(value: object) -> str:
    """Return a default as text, or the empty string if there is none."""
    if isinstance(value, bool):
        return "on" if value else "off"
    return "" if value in (None, ()) else code(value)


def flags_page(say: dict[str, str]) -> str:
    """Return a page of every flag of the training scripts and every variable of scripts/run_*.sh."""
    out = [f"# {say['flags']}\n\n{say['flags_about']}\n"]
    heads = (say["flag"], say["values"], say["default"], say["meaning"])
    for name, section in SECTIONS.items():
        rows = []
        for each in fields_own_first(section):
            family = each.metadata["family"]
            only = say["only"].format(say["comma"].join(family)) if family else ""
            about = cell(each.metadata["help"]) + only
            rows.append((code(flag(each.name)), _values(section, each), _default(each.default), about))
        out.append(f"## {name}\n\n{cell(' '.join((section.__doc__ or '').split()))}\n\n{table(heads, rows)}")
    rows = [
        (code(f"pretrain_{family}.py"), code(flag(name)), _default(value))
        for family, values in DEFAULTS.items()
        for name, value in values.items()
        if name != "family"
    ]
    out.append(f"## {say['by_family']}\n\n{table((say['script'], say['flag'], say['default']), rows)}")
    lines = (ROOT / "scripts" / "variables.txt").read_text(encoding="utf-8").splitlines()
    rows = [(code(line.split()[0]), cell(line.split(maxsplit=1)[1])) for line in lines]
    out.append(f"## {say['variables']}\n\n{say['variables_about']}\n\n{table((say['variable'], say['meaning']), rows)}")
    return "\n".join(out)


def ds_config_page(say: dict[str, str]) -> str:
    """Return a page of every key that a --deepspeed-config file may have, and of the refused keys."""
    from deepspeed.comm.config import CommsLoggerConfig
    from deepspeed.monitor.config import CSVConfig, TensorBoardConfig, WandbConfig
    from deepspeed.runtime import precision_config
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    from tds._deepspeed import FLOPS_PROFILER

    assert KEYS.keys() == RECONCILED_KEYS | PASSED_KEYS, "docs/site/words.py must describe each key of a ds_config"
    language = WORDS["zh"] is say
    heads = (say["key"], say["meaning"])
    out = [f"# {say['ds_config']}\n\n{say['ds_config_about']}\n"]
    for title, keys in ((say["resolved"], RECONCILED_KEYS), (say["passed_on"], PASSED_KEYS)):
        rows: list[tuple[object, ...]] = [(code(key), KEYS[key][language]) for key in sorted(keys)]
        out.append(f"## {title}\n\n{table(heads, rows)}")
    assert REPLACEMENTS.keys() == REPLACEMENT_FLAGS.keys(), "docs/site/words.py must translate each refused key"
    replacements = REPLACEMENTS if language else REPLACEMENT_FLAGS
    rows = [(code(key), cell(instead)) for key, instead in replacements.items()]
    out.append(f"## {say['refused']}\n\n{table((say['key'], say['instead']), rows)}")
    out.append(f"## {say['inner']}\n\n{say['inner_about']}\n")
    models = {
        "zero_optimization": DeepSpeedZeroConfig,
        "fp16": precision_config.DeepSpeedFP16Config,
        "bf16": precision_config.DeepSpeedBF16Config,
        "comms_logger": CommsLoggerConfig,
        "tensorboard": TensorBoardConfig,
        "wandb": WandbConfig,
        "csv_monitor": CSVConfig,
    }
    for name, model in models.items():
        rows = []
        for key, each in model.model_fields.items():
            usual = each.default_factory() if each.default_factory else each.default
            rows.append((code(each.alias or key), code(getattr(usual, "value", usual))))
        out.append(f"### {name}\n\n{table((say['key'], say['default']), rows)}")
    out.append(f"### flops_profiler\n\n{table((say['key'],), [(code(key),) for key in sorted(FLOPS_PROFILER)])}")
    return "\n".join(out)


def tool_module(path: Path) -> str:
    """Return the name of the module that a script in `tools/` runs."""
    return re.search(r"^from ([\w.]+) import cli$", path.read_text(encoding="utf-8"), re.MULTILINE)[1]  # type: ignore[index]


def tools_page(say: dict[str, str]) -> str:
    """Return a page of every flag of every tool."""
    out = [f"# {say['tools']}\n\n{say['tools_about']}\n"]
    for path in sorted((ROOT / "tools").glob("[!_]*.py")):
        module = importlib.import_module(tool_module(path))
        about = (inspect.getdoc(module) or "").split("\n\n")[0]
        out.append(f"## tools/{path.name}\n\n{cell(about)}\n")
        if hasattr(module, "build_parser"):
            out += _parsers(module.build_parser(), say, "")
        else:
            out.append(f"{say['own_help']}\n")
    return "\n".join(out)


def _parsers(parser: argparse.ArgumentParser, say: dict[str, str], name: str) -> Iterator[str]:
    """Yield a table of a parser's flags, then a table for each subcommand."""
    rows, inner = [], {}
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            inner = action.choices
        elif action.help != argparse.SUPPRESS and "-h" not in action.option_strings and action.dest != "debug":
            names = ", ".join(map(code, action.option_strings)) or code(action.metavar or action.dest)
            choices = ", ".join(map(code, action.choices)) if action.choices else ""
            if not choices and action.nargs != 0:
                choices = code(action.metavar or action.dest.upper()) + (" ..." if action.nargs in ("+", "*") else "")
            rows.append(
                (
                    names,
                    choices,
                    cell((action.help or "").replace("%%", "%").replace("%(default)s", _words(action.default))),
                )
            )
    title = f"### {name}\n\n" if name else ""
    if rows:
        yield title + table((say["flag"], say["values"], say["meaning"]), rows)
    for each, sub in inner.items():
        yield from _parsers(sub, say, f"{parser.prog.split()[-1]} {each}" if name else each)


def _signature(node: ast.FunctionDef | ast.AsyncFunctionDef, name: str) -> str:
    """Return a function's signature as in the source, but without `self` or `cls`."""
    arguments = ast.unparse(node.args)
    arguments = re.sub(r"^(self|cls)(, |$)", "", arguments)
    returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    line = f"{name}({arguments}){returns}"
    if len(line) <= 90:
        return line
    tree = ast.parse(f"def f({arguments}): ...").body[0]
    assert isinstance(tree, ast.FunctionDef)
    return f"{name}(\n" + textwrap.indent(",\n".join(_arguments(tree.args)), "    ") + f",\n){returns}"


def _arguments(given: ast.arguments) -> list[str]:
    """Return the source of each argument separately."""
    empty = ast.arguments(posonlyargs=[], args=[], kwonlyargs=[], kw_defaults=[], defaults=[])
    found, plain = [], [*given.posonlyargs, *given.args]
    usual = [None] * (len(plain) - len(given.defaults)) + list(given.defaults)
    for each, default in zip(plain, usual, strict=True):
        found.append(
            ast.unparse(ast.arguments(**{**vars(empty), "args": [each], "defaults": [default] if default else []}))
        )
    if given.vararg or given.kwonlyargs:
        found.append("*" + (ast.unparse(given.vararg) if given.vararg else ""))
    for each, default in zip(given.kwonlyargs, given.kw_defaults, strict=True):
        found.append(ast.unparse(each) + (f"={ast.unparse(default)}" if default else ""))
    return found + ([f"**{ast.unparse(given.kwarg)}"] if given.kwarg else [])


def _prose(doc: str | None) -> str:
    """Convert a docstring to Markdown.

    Lines that begin with an argument's name, "Raises" or "Returns" become list items.
    """
    out: list[str] = []
    for line in inspect.cleandoc(doc or "").splitlines():
        point = re.match(r"(?:[`\w]+(?:\([\w, ]*\))?(?:, [\w`]+)*(?: ->[^:]*)?: |Raises |Returns )", line)
        text = re.sub(r"(?<!`)([*_<])(?![^`]*`)", r"\\\1", line) if "`" not in line else line
        if point:
            out.append(f"{'' if out and out[-1].lstrip().startswith('- ') else chr(10)}- {text}")
        elif line and out and out[-1].startswith(("- ", "\n- ")):
            out[-1] += f" {text.strip()}"
        else:
            out.append(text)
    return "\n".join(out)


def _definition(thing: Any) -> ast.ClassDef | ast.FunctionDef:
    node = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(thing)))).body[0]
    assert isinstance(node, (ast.ClassDef, ast.FunctionDef))
    return node


def _entry(name: str, thing: Any) -> str:
    """Return the entry of a public name: its signature, its docstring and its methods."""
    title = name.removeprefix("megatron.")
    if not inspect.isclass(thing) and not inspect.isfunction(thing):
        about = _prose(inspect.getdoc(thing)) if inspect.ismodule(thing) else code(name)
        return f"### {title}\n\n{about}\n"
    node, short = _definition(thing), name.rpartition(".")[2]
    if isinstance(node, ast.FunctionDef):
        return f"### {title}\n\n```python\n{_signature(node, short)}\n```\n\n{_prose(ast.get_docstring(node))}\n"
    functions = {each.name: each for each in node.body if isinstance(each, ast.FunctionDef)}
    fields = [ast.unparse(each) for each in node.body if isinstance(each, ast.AnnAssign)]
    head = short
    if "__init__" in functions:
        head = _signature(functions["__init__"], short).removesuffix(" -> None")
    elif fields:
        head = f"{short}(\n" + textwrap.indent(",\n".join(fields), "    ") + ",\n)"
    out = [f"### {title}\n\n```python\n{head}\n```\n\n{_prose(ast.get_docstring(node))}\n"]
    for method, each in functions.items():
        if not method.startswith("_") and (doc := ast.get_docstring(each)):
            out.append(f"```python\n{_signature(each, f'{short}.{method}')}\n```\n\n{_prose(doc)}\n")
    return "\n".join(out)


def api_page(say: dict[str, str]) -> str:
    """Return a page of every public name, by module."""
    out, last = [f"# {say['api']}\n\n{say['api_about']}\n"], ""
    for name in NAMES.read_text(encoding="utf-8").split():
        module, _, short = name.rpartition(".")
        if module != last:
            out.append(f"## {module}\n\n{_prose(inspect.getdoc(importlib.import_module(module)))}\n")
            last = module
        out.append(_entry(name, getattr(importlib.import_module(module), short)))
    return "\n".join(out)


def pages() -> dict[Path, str]:
    """Return the expected contents of the files of docs/reference."""
    makers = {
        "flags": flags_page, "ds_config": ds_config_page, "tools": tools_page, "api": api_page, "imports": imports_page,
    }  # fmt: skip
    return {
        FOLDER / f"{name}{end}.md": re.sub(r"\n{3,}", "\n\n", make(WORDS[language])).rstrip() + "\n"
        for name, make in makers.items()
        for language, end in (("en", ""), ("zh", "_zh"))
    }


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for path, text in pages().items():
        path.write_text(text, encoding="utf-8")
