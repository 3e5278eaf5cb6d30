"""A page that is there while a run goes on: a web server of this machine only, which answers two addresses and no other."""

import hashlib
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

HOST = "127.0.0.1"
POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'"


def server(whole: Callable[[], str], body: Callable[[], str], port: int) -> ThreadingHTTPServer:
    """Ready to serve `whole` as / and `body` as /live on loopback. port: 0 for one that is free. Raises OSError where it is taken.

    Asked under another name than this machine's own for itself, it refuses: so no page of the web can read it by a name of its own.
    """

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:  # noqa: N802  # the name that http.server calls
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
            except (ValueError, OSError) as error:  # a run that is just being begun again
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
            """Say nothing of what is asked."""

    return ThreadingHTTPServer((HOST, port), Handler)
