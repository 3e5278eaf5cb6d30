"""Lay out the documentation for MkDocs: one tree per language, with links rewritten for the site.

`python -m docs.site.pages FOLDER SITE` writes the trees FOLDER/en and FOLDER/zh and an MkDocs configuration for each;
scripts/docs.sh builds SITE from these trees. This module needs only the standard library. A link to a file that is
not a page leads to a generated page that shows the file.
"""

import json
import os
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# Title of each chapter (English, Chinese) -> its pages, in menu order. Pages of docs/ that no chapter lists are added
# to "Running".
CHAPTERS = {
    ("Start", "入门"): [
        "README",
        "docs/start",
        "docs/howto",
        "docs/layouts",
        "docs/fp8",
        "docs/faq",
        "docs/glossary",
        "docs/migration",
    ],
    ("Models and data", "模型与数据"): [
        "docs/own_model",
        "docs/llama",
        "docs/experts",
        "docs/t5",
        "docs/data",
        "docs/objectives",
        "corpus/README",
    ],
    ("Running", "运行"): ["docs/launching", "docs/checkpoints", "docs/reliability", "docs/scaling", "docs/planning"],
    ("Inside", "内部"): [
        "docs/design",
        "docs/tds",
        "docs/releases",
        "docs/silent",
        "docs/parity",
        "docs/benchmarks",
        "CONTRIBUTING",
        "CHANGELOG",
        "SECURITY",
    ],
    ("Reference", "参考"): [
        "docs/reference/flags",
        "docs/reference/ds_config",
        "docs/reference/tools",
        "docs/reference/api",
        "docs/reference/imports",
    ],
}
LANGUAGES = ("en", "zh")
HOME = ("Home", "首页")
NAMES = {
    "README": "index",
    "corpus/README": "corpus",
    "CONTRIBUTING": "contributing",
    "CHANGELOG": "changelog",
    "SECURITY": "security",
}
# Pages without a Chinese translation -> their names in the Chinese menu.
ENGLISH = {"CHANGELOG": "更新日志（英文）", "SECURITY": "安全（英文）"}
LEXERS = {".py": "python", ".json": "json", ".sh": "bash", ".txt": "text", ".md": "markdown", ".yml": "yaml"}
LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")
CHINESE_END, CHINESE_BEGIN = re.compile("[\u3000-\u9fff\uff00-\uffef]$"), re.compile("[\u4e00-\u9fff“（]")
FENCE = re.compile(r"^ *(```+|~~~+)")


def chapters() -> dict[tuple[str, str], list[str]]:
    """Return (English, Chinese title) -> pages for each chapter, the pages as paths without `.md` and `_zh`.

    The chapter "Running" also gets the pages of docs/ that CHAPTERS does not list.
    """
    named = {page for pages in CHAPTERS.values() for page in pages}
    there = {f"docs/{path.stem}" for path in (ROOT / "docs").glob("*.md") if not path.stem.endswith("_zh")}
    found = {
        title: [page for page in pages if (ROOT / f"{page}.md").exists()]
        + (sorted(there - named) if title[0] == "Running" else [])
        for title, pages in CHAPTERS.items()
    }
    return {title: pages for title, pages in found.items() if pages}


def source_of(page: str, language: str) -> Path:
    """Return the file of a page in `language`, or the English file if there is no translation."""
    translated = ROOT / f"{page}_zh.md"
    return translated if language == "zh" and translated.exists() else ROOT / f"{page}.md"


def staged(page: str) -> str:
    """Return the path of a page within the tree of a language, such as start.md for docs/start."""
    return NAMES.get(page, page.removeprefix("docs/")) + ".md"


def outside_fences(text: str) -> Iterator[tuple[str, bool]]:
    """Yield (line, True if it is prose or False if it belongs to a code block) for each line."""
    fence = ""
    for line in text.splitlines():
        mark = FENCE.match(line)
        inside = bool(fence)
        if mark and not fence:
            fence = mark[1]
        elif mark and mark[1].startswith(fence):
            fence = ""
        yield line, not (inside or mark)


class Tree:
    """The source files of the site in one language; `write` creates them in `folder`."""

    def __init__(self, folder: Path, language: str) -> None:
        self.folder, self.language = folder, language
        self.pages = [page for pages in chapters().values() for page in pages]
        self.by_path = {
            ROOT / f"{page}{end}.md": (page, lang) for page in self.pages for end, lang in (("", "en"), ("_zh", "zh"))
        }
        self.shown: set[Path] = set()  # files and folders for which a page has been generated

    def write(self) -> None:
        """Write all pages, and a copy or a generated page of each file that a page links to."""
        for page in self.pages:
            path = source_of(page, self.language)
            self._put(staged(page), self._page(path.read_text(encoding="utf-8"), path, staged(page)))

    def _put(self, name: str, text: str) -> None:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")

    def _page(self, text: str, path: Path, name: str) -> str:
        twin = path.with_name(path.name.replace("_zh.md", ".md") if self.language == "zh" else f"{path.stem}_zh.md")
        lines = []
        for line, prose in outside_fences(text):
            if prose and re.fullmatch(rf"\W*(?:中文|English)?\W*\[[^\]]+\]\({twin.name}\)\W*", line):
                continue  # omit the link to the other language: the site has a language switch
            if prose:
                line = re.sub(rf" ?(?:中文：|English: )\[[^\]]+\]\({twin.name}\)\.?", "", line)
                line = LINK.sub(lambda link: self._link(link, path, name), line)
                if (
                    lines
                    and CHINESE_END.search(lines[-1])
                    and CHINESE_BEGIN.match(line)
                    and not lines[-1].startswith(("#", "|"))
                ):
                    lines[-1] += line  # a browser would render a line break between Chinese characters as a space
                    continue
            lines.append(line)
        return "\n".join(lines) + "\n"

    def _link(self, link: re.Match[str], path: Path, name: str) -> str:
        image, words, target = link.groups()
        if re.match(r"[a-z]+:|#", target):
            return link[0]
        where, _, anchor = target.partition("#")
        file = Path(os.path.normpath(path.parent / where))
        anchor = f"#{anchor}" if anchor else ""
        if file in self.by_path:
            page, language = self.by_path[file]
            if language != self.language and source_of(page, self.language) != file:
                up = "../" * name.count("/")
                there = staged(page).removesuffix(".md") + ".html"
                return f'<a href="{up}{"../" if self.language == "zh" else "zh/"}{there}{anchor}">{words}</a>'
            new = staged(page)
        elif image or file.suffix in (".png", ".svg", ".html"):
            new = f"images/{file.name}"
            (self.folder / "images").mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, self.folder / new)
        else:
            new = self._shown(file)
        return f"{image}[{words}]({os.path.relpath(new, Path(name).parent)}{anchor})"

    def _shown(self, file: Path) -> str:
        """Return the page that shows a file or lists a folder; write it on first use."""
        relative = file.relative_to(ROOT)
        name = f"source/{relative}.md"
        if file in self.shown:
            return name
        self.shown.add(file)
        head = f"---\nsearch:\n  exclude: true\n---\n\n# {relative}\n\n"
        if file.is_dir():
            inside = [each for each in sorted(file.iterdir()) if each.is_file() and each.suffix in LEXERS]
            rows = [f"- [{each.name}]({os.path.relpath(self._shown(each), Path(name).parent)})" for each in inside]
            self._put(name, head + "\n".join(rows) + "\n")
        else:
            self._put(
                name, f"{head}````` {LEXERS.get(file.suffix, 'text')}\n{file.read_text(encoding='utf-8')}\n`````\n"
            )
        return name

    def settings(self, site: Path) -> dict[str, object]:
        """Return the MkDocs settings that extend mkdocs.yml. They are written as JSON, which is valid YAML."""
        here = LANGUAGES.index(self.language)
        return {
            "INHERIT": str(ROOT / "docs" / "site" / "mkdocs.yml"),
            "docs_dir": str(self.folder),
            "site_dir": str(site / "zh" if self.language == "zh" else site),
            "theme": {"language": self.language, "custom_dir": str(ROOT / "docs" / "site" / "theme")},
            "extra": {
                "alternate": [
                    {"name": "English", "link": ("./", "../")[here], "lang": "en"},
                    {"name": "中文", "link": ("./zh/", "./")[here], "lang": "zh"},
                ]
            },
            "nav": [{title[here]: [self._entry(page) for page in pages]} for title, pages in chapters().items()],
        }

    def _entry(self, page: str) -> str | dict[str, str]:
        """Return the entry of a page in the menu: its path, or {name: path} if its first heading is not its name."""
        if page == "README":
            return {HOME[LANGUAGES.index(self.language)]: "index.md"}
        if self.language == "zh" and page in ENGLISH:
            return {ENGLISH[page]: staged(page)}
        return staged(page)


def main(folder: Path, site: Path) -> None:
    """Write the trees and MkDocs configurations of both languages to `folder`."""
    for language in LANGUAGES:
        tree = Tree(folder / language, language)
        shutil.rmtree(tree.folder, ignore_errors=True)
        tree.write()
        shutil.copytree(ROOT / "docs" / "site" / "assets", tree.folder / "assets")
        (folder / f"{language}.yml").write_text(json.dumps(tree.settings(site), ensure_ascii=False, indent=1))


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve(), Path(sys.argv[2]).resolve())
