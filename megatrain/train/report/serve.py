"""A server for a page that follows a run: read-only, and for this machine alone.

Only three addresses have an answer, each made here: no path of a request is looked up on the disk. A request
whose Host is another name is refused, so that no page of the web can read a run through the browser. A policy
in each answer lets the browser run the page's own scripts alone, send nothing elsewhere, and show it in no
frame.
"""

from __future__ import annotations

import base64
import hashlib
import json
import logging
import re
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from megatrain.errors import MegatrainError, OutputError
from megatrain.train.report.collect import read_run
from megatrain.train.report.page import live_page, page_data, plotly_file

_log = logging.getLogger(__name__)

ADDRESS = "127.0.0.1"


_PAGE = "text/html; charset=utf-8"
_NOTHING = "default-src 'none'; frame-ancestors 'none'"
_SCRIPT = re.compile(r"<script>(.*?)</script>", re.DOTALL)

REST = 4
"""The ratio of pauses to reading time, since a long history takes long to read."""


def policy_of(page: str) -> str:
    """Return the Content-Security-Policy of a page: its inline scripts by their hashes, and this server's.

    Styles may be inline, since plotly writes some; they run no code, and load nothing from elsewhere.
    """
    digests = (hashlib.sha256(text.encode()).digest() for text in _SCRIPT.findall(page))
    hashes = [base64.b64encode(digest).decode() for digest in digests]
    scripts = " ".join(["'self'", *(f"'sha256-{each}'" for each in hashes)])
    return (
        f"{_NOTHING}; script-src {scripts}; style-src 'unsafe-inline'; connect-src 'self'; "
        "img-src data: blob:; base-uri 'none'; form-action 'none'"
    )


class LiveData:
    """The data of the page as JSON, which is read so rarely that the machine is left to the run."""

    def __init__(self, run: Path, clock: Callable[[], float] = time.monotonic) -> None:
        """Store the run directory."""
        self._run = run
        self._clock = clock
        self._lock = threading.Lock()
        self._content = b""
        self._next_s = 0.0

    def get(self) -> bytes:
        """Return the data of the run.

        Raises:
            OutputError: The run is there no longer.
        """
        with self._lock:  # one thread reads, however many look
            began_s = self._clock()
            if not self._content or began_s >= self._next_s:
                self._content = b""
                self._content = json.dumps(page_data(read_run(self._run)), allow_nan=False).encode()
                ended_s = self._clock()
                self._next_s = ended_s + REST * (ended_s - began_s)
            return self._content


class RunServer(ThreadingHTTPServer):
    """Serves the page of one run at `port`."""

    daemon_threads = True

    def __init__(self, run: Path, port: int) -> None:
        """Listen.

        Args:
            run: The run directory.
            port: The port; 0 takes a free one.

        Raises:
            ConfigError: plotly is not installed.
            OutputError: The path is no run directory, or the port is taken.
        """
        read_run(run)
        plotly_file()
        self.run_path = run
        self.live = LiveData(run)
        try:
            super().__init__((ADDRESS, port), _Handler)
        except OSError as error:
            raise OutputError(
                f"port {port} of {ADDRESS} cannot be used ({error.strerror}); give another with --port, "
                "or --port 0 for one that is free"
            ) from error

    @property
    def port(self) -> int:
        """Return the port on which it listens."""
        return int(self.server_address[1])

    @property
    def address(self) -> str:
        """Return the address to open in a browser."""
        return f"http://{ADDRESS}:{self.port}/"


class _Handler(BaseHTTPRequestHandler):
    server: RunServer

    def do_GET(self) -> None:
        host, colon, port = self.headers.get("Host", "").partition(":")
        if host not in (ADDRESS, "localhost") or (colon and not port.isdecimal()):
            self._answer(HTTPStatus.FORBIDDEN, "text/plain", b"this page is for this machine alone\n")
            return
        try:
            kind, content = self._content(self.path.partition("?")[0])
        except KeyError:
            self._answer(HTTPStatus.NOT_FOUND, "text/plain", b"nothing here\n")
        except (MegatrainError, OSError) as error:
            self._answer(HTTPStatus.SERVICE_UNAVAILABLE, "text/plain", f"{error}\n".encode())
        else:
            self._answer(
                HTTPStatus.OK, kind, content, policy_of(content.decode()) if kind == _PAGE else _NOTHING
            )

    def _content(self, path: str) -> tuple[str, bytes]:
        run = self.server.run_path
        if path == "/":
            return _PAGE, live_page(read_run(run)).encode()
        if path == "/data.json":
            return "application/json", self.server.live.get()
        if path == "/plotly.js":
            return "text/javascript; charset=utf-8", plotly_file().read_bytes()
        raise KeyError(path)

    def _answer(self, status: HTTPStatus, kind: str, content: bytes, policy: str = _NOTHING) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("Content-Security-Policy", policy)
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("X-Frame-Options", "DENY")
        self.send_header("Referrer-Policy", "no-referrer")
        self.send_header("Cross-Origin-Resource-Policy", "same-origin")
        with suppress(ConnectionError):  # the client may have gone
            self.end_headers()
            self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        _log.debug(format, *args)
