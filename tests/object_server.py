"""An S3 server on this machine for tests, which can fail, be slow or refuse access when a test asks for it."""

import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from megatron.storage import _file_system, to_path

from .support import preload

BUCKET = "s3://bucket"
preload("s3fs")  # otherwise, each rank and each command imports 150 modules
Respond = Callable[..., Any]


@dataclass
class Faults:
    """Faults of the server.

    every: each n-th request gets the status `status` and the error code `code`; 0 for none.
    delay: seconds before each answer.
    only_key: the access key that the server accepts; None accepts every key. requests: the requests so far, as text.
    """

    every: int = 0
    status: str = "503 Slow Down"
    code: str = "ServiceUnavailable"
    delay: float = 0.0
    only_key: str | None = None
    requests: list[str] = field(default_factory=list)


class FaultyServer:
    """moto's S3 with `Faults`. `url` is its address; `environment` gives the variables by which clients find it."""

    def __init__(self) -> None:
        from moto.server import DomainDispatcherApplication, create_backend_app
        from werkzeug.serving import WSGIRequestHandler, make_server

        class Silent(WSGIRequestHandler):
            def log(self, type: str, message: str, *args: Any) -> None:
                pass

        self.faults = Faults()
        self._app = DomainDispatcherApplication(create_backend_app)
        self._server = make_server("127.0.0.1", 0, self, threaded=True, request_handler=Silent)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    @property
    def environment(self) -> dict[str, str]:
        """Variables for s3fs, as a user sets them."""
        return {
            "AWS_ENDPOINT_URL": self.url, "AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_DEFAULT_REGION": "us-east-1",
        }  # fmt: skip

    def __call__(self, environ: dict[str, Any], start_response: Respond) -> Any:
        faults = self.faults
        faults.requests.append(f"{environ['REQUEST_METHOD']} {environ['PATH_INFO']} {environ.get('HTTP_RANGE', '')}")
        time.sleep(faults.delay)
        key = environ.get("HTTP_AUTHORIZATION", "").partition("Credential=")[2].partition("/")[0]
        if faults.only_key is not None and key != faults.only_key:
            return self._error(environ, start_response, "403 Forbidden", "InvalidAccessKeyId")
        if faults.every and len(faults.requests) % faults.every == 0:
            return self._error(environ, start_response, faults.status, faults.code)
        return self._app(environ, start_response)

    @staticmethod
    def _error(environ: dict[str, Any], start_response: Respond, status: str, code: str) -> list[bytes]:
        environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        text = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>as the test asked</Message></Error>".encode()
        start_response(status, [("Content-Type", "application/xml"), ("Content-Length", str(len(text)))])
        return [] if environ["REQUEST_METHOD"] == "HEAD" else [text]  # such an answer has no content

    def close(self) -> None:
        self._server.shutdown()


@contextmanager
def s3_server() -> Iterator[FaultyServer]:
    """Run a server with an empty bucket; the tests are skipped if a package is missing."""
    for package in ("s3fs", "moto", "flask", "flask_cors"):
        pytest.importorskip(package, reason=f"S3 is tested with {package}, which requirements-dev.txt installs")
    server = FaultyServer()
    try:
        with pytest.MonkeyPatch.context() as patch:
            for name, value in server.environment.items():
                patch.setenv(name, value)
            _file_system.cache_clear()  # its connections are those to the server of another test file
            # moto keeps its objects in this process, so they would outlive the server of another test file.
            urllib.request.urlopen(f"{server.url}/moto-api/reset", data=b"").close()
            to_path(BUCKET).request("make", lambda fs, url: fs.makedirs(url, exist_ok=True))
            yield server
    finally:
        server.close()
