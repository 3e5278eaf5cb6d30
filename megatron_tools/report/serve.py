"""A local web server for a page that is updated while runs continue. It answers two addresses only."""

import hashlib
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

HOST = "127.0.0.1"
POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'"


def server(whole: Callable[[], str], body: Callable[[], str], port: int) -> ThreadingHTTPServer:
    """Return a server on loopback with `whole` at / and `body` at /live.

    port: 0 for any free port. Raises OSError if the port is taken. Requests under a host name other than
    localhost are refused, so that no web page can read it through DNS rebinding.
    """

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:  # http.server calls this name
            host = urlsplit(f"//{self.headers.get('Host', '')}").hostname
            if host not in ("127.0.0.1", "localhost", "::1"):
                self.send_error(403)
                return
            pages = {"/": whole, "/live": body}
            path = urlsplit(self.path).path
            if path not in pages:
                self.send_error(404)
                return
            try:
                content = pages[path]().encode()
            except (ValueError, OSError) as error:  # a run is just being restarted
                self.send_error(503, explain=str(error))
                return
            self._answer(content)

        def _answer(self, content: bytes) -> None:
            version = f'"{hashlib.sha256(content).hexdigest()[:16]}"'
            same = self.headers.get("If-None-Match") == version
            self.send_response(304 if same else 200)
            for name, value in (
                ("Content-Type", "text/html; charset=utf-8"),
                ("ETag", version),
                ("Cache-Control", "no-store"),
                ("Content-Security-Policy", POLICY),
                ("Content-Length", "0" if same else str(len(content))),
            ):
                self.send_header(name, value)
            self.end_headers()
            if not same:
                self.wfile.write(content)

        def log_message(self, format: str, *args: object) -> None:
            """Suppress the request log."""

    return ThreadingHTTPServer((HOST, port), Handler)
