"""The page of tools/demo.py in a browser, which requests nothing from other machines, and `transformers serve`."""

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support import FULL, ROOT, command, free_port, train_gpt2

LOCAL = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def ask(url: str, content: Any = None, method: str | None = None) -> Any:
    """Return the JSON that a server on this machine answers."""
    data = None if content is None else json.dumps(content).encode()
    with LOCAL.open(
        urllib.request.Request(url, data, {"Content-Type": "application/json"}, method=method), timeout=60
    ) as answer:
        return json.loads(answer.read())


def wait(known: Callable[[], Any], seconds: float = 120) -> Any:
    """Return the first true value of `known`, and fail if there is none after so many seconds."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        with contextlib.suppress(OSError, KeyError):
            if found := known():
                return found
        time.sleep(0.02)
    raise AssertionError(f"nothing after {seconds} seconds")


class Browser:
    """Chromium, driven over the WebDriver protocol of chromedriver."""

    def __init__(self, driver: str) -> None:
        flags = ["--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--disable-background-networking"]
        options = {"goog:chromeOptions": {"args": flags}, "goog:loggingPrefs": {"performance": "ALL"}}
        session = ask(f"{driver}/session", {"capabilities": {"alwaysMatch": options}})
        self.at = f"{driver}/session/{session['value']['sessionId']}"

    def run(self, script: str) -> Any:
        """Return what the body of a JavaScript function returns on the page."""
        return ask(f"{self.at}/execute/sync", {"script": script, "args": []})["value"]

    def requested(self) -> list[str]:
        """Return the addresses that the page has requested since the last call."""
        found = []
        for entry in ask(f"{self.at}/se/log", {"type": "performance"})["value"]:
            message = json.loads(entry["message"])["message"]
            if message["method"] == "Network.requestWillBeSent":
                found.append(message["params"]["request"]["url"])
        return found


@contextlib.contextmanager
def started(*argv: str, env: dict[str, str] | None = None) -> Iterator[None]:
    """Run a server in the checkout while the `with` block runs."""
    with subprocess.Popen(argv, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1", **(env or {})}) as process:
        try:
            yield
        finally:
            process.terminate()


@pytest.fixture
def browser() -> Iterator[Browser]:
    if not (shutil.which("chromium") and shutil.which("chromedriver")):
        pytest.skip("needs chromium and chromedriver")
    port = free_port()
    with started("chromedriver", f"--port={port}"):
        driver = f"http://127.0.0.1:{port}"
        wait(lambda: ask(f"{driver}/status")["value"]["ready"])
        found = Browser(driver)
        try:
            yield found
        finally:
            ask(found.at, method="DELETE")


@pytest.fixture
def run(tmp_path: Path, tiny_data: str, vocab_file: str) -> str:
    sizes = "--num-layers 2 --hidden-size 16 --num-attention-heads 2 --seq-length 256 --batch-size 2 --eval-iters 0"
    more = f"--train-iters 1 --precision fp32 --no-tensorboard --data-path {tiny_data} --vocab-file {vocab_file}"
    train_gpt2(1, tmp_path / "run", *sizes.split(), *more.split())
    return str(tmp_path / "run")


@pytest.fixture
def page(run: str) -> Iterator[tuple[str, socket.socket]]:
    """The address of a page, and a socket that stands in for the proxy through which its server reaches others."""
    pytest.importorskip("gradio")
    with socket.create_server(("127.0.0.1", 0)) as proxy:
        away = f"http://127.0.0.1:{proxy.getsockname()[1]}"
        env = {"http_proxy": away, "https_proxy": away, "all_proxy": away, "no_proxy": ""}
        port = str(free_port())
        argv = [sys.executable, "tools/demo.py", "--load", run, "--port", port, "--poem"]
        with started(*argv, "--num-samples", "2", "--max-new-tokens", "200", env=env):
            yield f"http://127.0.0.1:{port}", proxy


def text(browser: Browser, name: str) -> str:
    return str(browser.run(f"const found = document.getElementById('{name}'); return found ? found.innerText : ''"))


@FULL
@pytest.mark.timeout(600)
def test_a_page_writes_and_requests_nothing_from_others(browser: Browser, page: tuple[str, socket.socket]) -> None:
    address, proxy = page
    wait(lambda: LOCAL.open(address, timeout=5).status == 200)
    ask(f"{browser.at}/url", {"url": address})
    wait(lambda: text(browser, "write_poem"))
    browser.run("document.getElementById('write_poem').click()")
    poems = wait(lambda: text(browser, "texts").count("。") == 4 and text(browser, "texts"))
    assert poems.count("《月夜忆舍弟》") == 2
    browser.run(
        "for (const tab of document.querySelectorAll('button[role=tab]')) if (/Text/.test(tab.innerText)) tab.click()"
    )
    wait(lambda: text(browser, "write"))
    browser.run("document.getElementById('write').click()")
    seen = set()

    def is_complete() -> bool:
        seen.add(text(browser, "texts"))
        return len(seen) > 2  # what was there before, and two texts of different length

    wait(is_complete)
    bars = "return document.querySelectorAll('#chart .bar').length"
    assert browser.run(bars) == 20
    others = [url for url in browser.requested() if not url.startswith((address, "data:", "blob:"))]
    assert others == []
    proxy.settimeout(0.1)
    with pytest.raises(TimeoutError):
        proxy.accept()


@FULL
@pytest.mark.timeout(600)
def test_transformers_serves_an_export(run: str, tmp_path: Path) -> None:
    """The server continues a prompt greedily, as tools/generate.py does."""
    for name in ("transformers", "openai", "fastapi", "uvicorn"):
        pytest.importorskip(name)
    folder = str(tmp_path / "exported")
    done = command("python", "tools/convert_checkpoint.py", "--load", run, "--output", folder)
    assert done.returncode == 0, done.stderr
    argv = ["--load", run, "--prompt", "春天", "--temperature", "0", "--max-new-tokens", "8"]
    expected = command("python", "tools/generate.py", *argv).stdout.rstrip("\n")
    port = str(free_port())
    address = f"http://127.0.0.1:{port}"
    with started(sys.executable, "-m", "transformers.cli.transformers", "serve", folder, "--port", port):
        wait(lambda: LOCAL.open(f"{address}/health", timeout=5).status == 200)
        found = ask(f"{address}/v1/completions", {"model": folder, "prompt": "春天", "max_tokens": 8})
    assert "春天" + found["choices"][0]["text"].rstrip("\ufffd") == expected
