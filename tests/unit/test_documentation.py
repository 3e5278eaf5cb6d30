"""Tests of the pages: links are valid, both languages agree, terms are consistent, generated parts match the code."""

import ast
import re
import tomllib
from functools import cache
from importlib.metadata import version
from pathlib import Path

import pytest

from docs.site import pages, reference, results
from tests.support import ROOT

ENGLISH = sorted(ROOT / f"{page}.md" for all_pages in pages.chapters().values() for page in all_pages)
ALONE = {"CHANGELOG.md", "SECURITY.md", "corpus/README.md"}  # these pages have no Chinese version
PAIRS = [path for path in ENGLISH if str(path.relative_to(ROOT)) not in ALONE]
EVERY = [*ENGLISH, *(path.with_name(f"{path.stem}_zh.md") for path in PAIRS)]
CHINESE = re.compile("[\u4e00-\u9fff]")


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


@cache
def text(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def blocks(path: Path, *languages: str) -> list[str]:
    return re.findall(rf"^```(?:{'|'.join(languages)})\n(.*?)^```", text(path), flags=re.DOTALL | re.MULTILINE)


def headings(path: Path) -> list[str]:
    return [line for line, prose in pages.outside_fences(text(path)) if prose and line.startswith("#")]


def anchors(path: Path) -> set[str]:
    """Return the anchors that GitHub and the site derive from a page's headings."""
    found: set[str] = set()
    for line in headings(path):
        words = re.sub(r"[^\w\- ]", "", line.lstrip("# ").strip().lower()).replace(" ", "-")
        found.add(words if words not in found else f"{words}-1")
    return found


@pytest.mark.parametrize("path", EVERY, ids=name)
def test_links_lead_somewhere(path: Path) -> None:
    for line, prose in pages.outside_fences(text(path)):
        for _, _, target in pages.LINK.findall(re.sub(r"`[^`]*`", "", line)) if prose else ():
            if re.match(r"[a-z]+:", target):
                continue
            where, _, anchor = target.partition("#")
            file = (path.parent / where).resolve() if where else path
            assert file.exists(), target
            assert not anchor or anchor in anchors(file), target


@pytest.mark.parametrize("path", PAIRS, ids=name)
def test_both_languages_have_the_same_commands_and_headings(path: Path) -> None:
    other = path.with_name(f"{path.stem}_zh.md")
    for languages in (("bash",), ("console",), ("text",)):
        ours, theirs = ([re.sub(r" *#.*", "", b) for b in blocks(p, *languages)] for p in (path, other))
        assert ours == theirs
    levels = [[line.split()[0] for line in headings(p)] for p in (path, other)]
    assert levels[0] == levels[1]
    rows = [len(re.findall(r"^ *\|", text(p), flags=re.MULTILINE)) for p in (path, other)]
    if path.parent != reference.FOLDER and path.stem != "migration":  # these pages have fewer rows in Chinese
        assert rows[0] == rows[1], "tables of another number of rows"


def refused() -> list[str]:
    """Return the terms that the Chinese glossary rejects."""
    table = re.findall(
        r"^\| [^|]+ \| [^|]+ \| ([^|]*) \| [^|]+ \|$", text(ROOT / "docs" / "glossary_zh.md"), flags=re.MULTILINE
    )
    return [word for cell in table for word in cell.strip().split("、") if word not in ("", "不用", "---")]


def drifting(content: str) -> list[str]:
    """Return "term: context" for each rejected term in Chinese prose, ignoring code, URLs and English text."""
    found = []
    for line, prose in pages.outside_fences(content):
        for cell in re.split(r"\|", re.sub(r"`[^`]*`|\]\([^)]*\)", "", line)) if prose else ():
            if CHINESE.search(cell):
                for word in refused():
                    own = rf"(?<![\w/.-]){word}s?(?![\w/.-])" if word.isascii() else word
                    found += [f"{word}: {cell.strip()}"] if re.search(own, cell, flags=re.ASCII) else []
    return found


@pytest.mark.parametrize("path", [p for p in EVERY if p.stem.endswith("_zh")], ids=name)
def test_words_do_not_drift(path: Path) -> None:
    if path.stem != "glossary_zh" and path.parent != reference.FOLDER:  # these two kinds of pages list rejected terms
        assert drifting(text(path)) == []


def test_a_refused_word_is_found() -> None:
    assert len(refused()) > 20
    assert len(drifting("各批次比较散列，都有 micro-batch。\n\n`token` 在代码里\n\n| tokens | 每个 token |\n")) == 3


def test_the_reference_is_that_of_the_code() -> None:
    if version("deepspeed") != re.search(r"deepspeed==(\S+)", text(ROOT / "requirements.txt"))[1]:  # type: ignore[index]
        pytest.skip("its keys are those of the DeepSpeed of requirements.txt")
    stale = [name(path) for path, made in reference.pages().items() if path.read_text(encoding="utf-8") != made]
    assert stale == [], "python -m docs.site.reference writes them"


def test_tables_of_measurements_are_those_of_the_data_file() -> None:
    stale = [name(path) for path, made in results.pages().items() if text(path) != made]
    assert stale == [], "python -m docs.site.results writes them"
    assert all(
        results.results()["default"]["date"] in text(path) for path in results.PAGES if "benchmarks" in path.stem
    )


@cache
def sentences() -> list[str]:
    """Return all strings in the code and the scripts that may be parts of error messages, longest first."""
    found = set()
    for package in ("megatron", "megatron_compat", "megatron_tools", "tds", "data_utils"):
        for path in (ROOT / package).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Constant) and isinstance(node.value, str):
                    found.add(node.value.strip(" (;:,"))
    for path in (ROOT / "scripts").glob("*.sh"):
        found |= {part.strip() for part in re.split(r"\$\{?\w+\}?|\"|\{[^}\n]*\}", path.read_text(encoding="utf-8"))}
    return sorted((each for each in found if 6 <= len(each) <= 300), key=len, reverse=True)


def test_errors_of_the_faq_are_those_of_the_code() -> None:
    shown = blocks(ROOT / "docs" / "faq.md", "text")
    assert len(shown) >= 20
    for error in shown:
        rest = error.strip().partition(": ")[2]
        for sentence in sentences():
            rest = rest.replace(sentence, "")
        # Find three words in a row that no string of the code contains.
        words = re.search(r"(?:[a-z']{2,} ){2}[a-z']{2,}", re.sub(r" +", " ", rest))
        assert not words, f"nothing in the code says this any more: {rest}"


def test_console_commands_have_flags_that_there_are() -> None:
    """Flags and environment variables in the pages' `console` blocks exist in the code.

    These blocks need GPUs, several machines or users' files, so they are not run.
    """
    from megatron.config.flags import build_parser

    known = {option for action in build_parser()._actions for option in action.option_strings}
    tools = text(reference.FOLDER / "tools.md")
    variables = {line.split()[0] for line in text(ROOT / "scripts" / "variables.txt").splitlines()}
    for path in PAIRS:
        for line in "\n".join(blocks(path, "console")).replace("\\\n", " ").splitlines():
            for variable in (
                re.findall(r"(?:^| )([A-Z_]+)=", line.split("bash scripts/run_")[0]) if "scripts/run_" in line else ()
            ):
                assert variable in variables, line
            script = re.search(r"(?:pretrain_\w+\.py|run_\w+\.sh)(.*)", line.split("#")[0])
            is_trained = script and not re.search("launch.py|verify_layout.py", line)
            for flag in re.findall(r"(--[a-z][\w-]*)", script[1]) if is_trained else ():
                assert flag in known, line
            tool = re.match(r"(?:\.venv/bin/)?python tools/(\w+)\.py(.*)", line.split(" #")[0])
            if tool and tool[1] != "launch":
                own = re.search(rf"^## tools/{tool[1]}\.py$(.*?)(?=^## |\Z)", tools, flags=re.MULTILINE | re.DOTALL)
                assert own, line
                allowed = set(re.findall(r"`(--[\w-]+)`", own[1])) | (
                    known if tool[1] in ("doctor", "plan", "verify_layout") else set()
                )
                for flag in re.findall(r"(?<= )(--[a-z][\w-]*)", tool[2]):
                    assert flag in allowed | {"--debug", "--help"}, line


def test_both_trees_of_the_site_are_whole(tmp_path: Path) -> None:
    """The site has the same pages in both languages, and all links of its pages lead to existing files."""
    pages.main(tmp_path / "staged", tmp_path / "site")
    trees = [
        {p.relative_to(tmp_path / "staged" / lang) for p in (tmp_path / "staged" / lang).rglob("*.md")}
        for lang in pages.LANGUAGES
    ]
    own = [{p for p in tree if p.parts[0] != "source"} for tree in trees]
    assert own[0] == own[1] and len(own[0]) >= len(PAIRS)
    for tree, lang in zip(trees, pages.LANGUAGES, strict=True):
        for page in tree:
            file = tmp_path / "staged" / lang / page
            for line, prose in pages.outside_fences(file.read_text(encoding="utf-8")):
                for _, _, target in pages.LINK.findall(line) if prose else ():
                    if not re.match(r"[a-z]+:|#", target):
                        assert (file.parent / target.partition("#")[0]).exists(), f"{page}: {target}"


def test_the_menu_marks_english_pages_and_the_page_404_needs_no_file(tmp_path: Path) -> None:
    """A host shows the page 404 at addresses of any depth, where relative and absolute paths lead to nothing."""
    nav = str(pages.Tree(tmp_path, "zh").settings(tmp_path)["nav"])
    without = [page for page in pages.Tree(tmp_path, "zh").pages if pages.source_of(page, "zh").name == f"{page}.md"]
    assert without and all(pages.ENGLISH[page] in nav for page in without)
    page = text(ROOT / "docs/site/theme/404.html")
    assert not re.search(r"""src=|<link|href="(?!\./")""", page)
    assert "英文" not in str(pages.Tree(tmp_path, "en").settings(tmp_path)["nav"])


def test_every_dependency_has_its_licence_on_the_page() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    named = [*project["dependencies"], *(each for extra in project["optional-dependencies"].values() for each in extra)]
    named += (ROOT / "requirements-docs.txt").read_text(encoding="utf-8").splitlines()
    packages = {match[0] for each in named if (match := re.match(r"[A-Za-z][\w-]*", each))} - {project["name"]}
    rows = re.findall(r"^\| ([^|]+) \|", text(ROOT / "CONTRIBUTING.md").split("## Licences")[1], flags=re.MULTILINE)
    assert packages == {name for row in rows[2:] for name in row.split(", ")}


@pytest.mark.parametrize("page", ["docs/silent.md", "docs/silent_zh.md"])
def test_the_tests_that_a_page_names_exist(page: str) -> None:
    named = re.findall(r"tests/[\w/]+\.py(?:::\w+)?", (ROOT / page).read_text(encoding="utf-8"))
    assert len(named) > 15
    for each in named:
        file, _, test = each.partition("::")
        assert (ROOT / file).is_file(), each
        assert f"def {test}" in (ROOT / file).read_text(encoding="utf-8"), each
