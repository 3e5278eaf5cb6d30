"""Write the output of the quick-start scripts (scripts/run_*.sh) into the pages that show it.

`python -m docs.site.transcript gpt2 t5` runs two of the scripts and writes their output (15 minutes).
"""

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = {
    "gpt2": ("README.md", "README_zh.md"),
    "t5": ("docs/t5.md", "docs/t5_zh.md"),
    "llama": ("docs/llama.md", "docs/llama_zh.md"),
}
# Patterns of the output lines that a page shows. Omitted lines between them become "...". From the first line that
# matches SUMMARY, all lines before the line that matches END are shown, too.
SHOWN = (
    r"documents, .* tokens ->",
    r"ranks? on ",
    r"million parameters",
    r"\b10/\d+",
    r"\b50 .*valid",
    r"\b(\d+)/\1\b",
    r"\b[35]00 .*valid",
)
SUMMARY = re.compile(r"iterations {2,}\d+$")
# The front page shows fewer lines.
BRIEF = r"documents, .* tokens ->", r"\b10/\d+", r"\b(\d+)/\1\b"
BRIEF_SUMMARY = re.compile("best validation loss")
END = re.compile(r"settings {2,}")  # first line of the list of files at the end of the output; pages omit this list


def run(name: str, folder: str, *flags: str) -> list[str]:
    """Run scripts/run_NAME.sh with `folder` as run directory and return the lines of its output.

    In these lines, the path of the run directory is replaced by runs/NAME.
    """
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"RUN_DIR": folder}
    flags = "--precision", "fp32", *flags  # the default precision depends on the CPU: bf16 if it has AMX tiles
    done = subprocess.run(
        ["bash", f"scripts/run_{name}.sh", *flags], cwd=ROOT, env=env, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(done.stdout[-2000:] + done.stderr[-2000:])
    return done.stdout.replace(folder, f"runs/{name}").splitlines()


def shown(name: str, lines: Sequence[str]) -> Iterator[str]:
    """Yield the lines of the output of run_NAME.sh that its page shows."""
    is_brief = name == "gpt2"
    patterns = BRIEF if is_brief else SHOWN
    summary = BRIEF_SUMMARY if is_brief else SUMMARY
    gap, whole = False, False
    for line in lines:
        whole = (whole or bool(summary.match(line))) and not END.match(line)
        if whole or any(re.search(pattern, line) for pattern in patterns):
            if gap:
                yield "" if whole else "..."
            gap = False
            yield line.rstrip()
        else:
            gap = True


def shape(line: str) -> str:
    """Return a line with each number replaced by 0 and repeated spaces by one."""
    return re.sub(r"[\d.,:+-]+(?:e-?\d+)?", "0", re.sub(r" +", " ", line))


def on_page(page: str, name: str) -> list[str]:
    """Return the lines of a script's transcript on a page."""
    return _block(name).search((ROOT / page).read_text(encoding="utf-8"))[2].splitlines()  # type: ignore[index]


def _block(name: str) -> re.Pattern[str]:
    return re.compile(rf"(<!-- transcript of run_{name}\.sh[^\n]*\n+```\n)(.*?)(?=^```)", re.DOTALL | re.MULTILINE)


def main(names: Sequence[str]) -> None:
    """Run each script and write its transcript into its pages."""
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            text = "\n".join(shown(name, run(name, folder))).strip() + "\n"
        for page in PAGES[name]:
            path = ROOT / page
            new, found = _block(name).subn(lambda match, text=text: match[1] + text, path.read_text(encoding="utf-8"))  # type: ignore[misc]
            if not found:
                raise ValueError(f"{page} has no transcript of run_{name}.sh")
            path.write_text(new, encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:] or list(PAGES))
