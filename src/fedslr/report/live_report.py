"""A report that is served on this machine and follows its run."""

from __future__ import annotations

import re
import signal
from contextlib import suppress
from functools import partial
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from fedslr.core.errors import FedslrError
from fedslr.core.interrupts import STOP_SIGNALS
from fedslr.report.html_report import report_page
from fedslr.report.saved_runs import find_runs

HOST = "127.0.0.1"
HOST_NAMES = {HOST, "localhost"}
WATCHED_FILES = ("config.toml", "metrics.jsonl", "summary.json")


class ReportServer(ThreadingHTTPServer):
    """A server of one folder's report, reachable from this machine only; open requests do not keep it from ending."""

    daemon_threads = True
    timeout = 0.2

    def __init__(self, folder: Path, port: int) -> None:
        try:
            super().__init__((HOST, port), partial(_ReportRequest, folder))
        except OSError as error:
            raise FedslrError(f"--port: {port}: {error.strerror}; choose another, or 0 for a free one") from None

    def serve_until(self, signals: list[int]) -> None:
        """Answer requests until a signal came."""
        while not signals:
            self.handle_request()


def received_signals() -> list[int]:
    """Return a list that the first Ctrl-C or SIGTERM from now on is added to; later ones are ignored."""
    received: list[int] = []

    def receive(number: int, frame: object) -> None:
        received.append(number)
        for each in STOP_SIGNALS:
            signal.signal(each, signal.SIG_IGN)

    for number in STOP_SIGNALS:
        signal.signal(number, receive)
    return received


def stamp(folder: Path) -> str:
    """Return a text that changes whenever a file of the report does."""
    places = [folder, *(p.parent for p in sorted(folder.glob("*/config.toml")))]
    found = []
    for path in (place / name for place in places for name in WATCHED_FILES):
        with suppress(OSError):
            seen = path.stat()
            found.append(f"{seen.st_size}.{seen.st_mtime_ns}")
    return "-".join([str(len(found)), format(hash(tuple(found)) & 0xFFFFFFFFFFFF, "x")])


class _ReportRequest(BaseHTTPRequestHandler):
    """Answers `/` with the report and `/stamp` with its stamp."""

    def __init__(self, folder: Path, *args: Any) -> None:
        self.folder = folder
        super().__init__(*args)

    def do_GET(self) -> None:
        # A foreign page whose host name resolves to this machine must not read the report.
        if re.sub(r":\d+$", "", self.headers.get("Host") or "") not in HOST_NAMES:
            return self._answer(HTTPStatus.FORBIDDEN, "text/plain", "this report is for 127.0.0.1")
        if self.path == "/stamp":
            return self._answer(HTTPStatus.OK, "text/plain", stamp(self.folder))
        if self.path == "/favicon.ico":
            return self._answer(HTTPStatus.NO_CONTENT, "text/plain", "")
        if self.path != "/":
            return self._answer(HTTPStatus.NOT_FOUND, "text/plain", "there is / only")
        now = stamp(self.folder)
        try:
            text = report_page(find_runs([self.folder], unfinished=True), live=now)
        except (FedslrError, OSError) as error:
            return self._answer(HTTPStatus.SERVICE_UNAVAILABLE, "text/plain", str(error))
        self._answer(HTTPStatus.OK, "text/html", text)

    def _answer(self, status: HTTPStatus, kind: str, text: str) -> None:
        body = text.encode()
        with suppress(BrokenPipeError, ConnectionResetError):
            self.send_response(status)
            self.send_header("Content-Type", f"{kind}; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Cache-Control", "no-store")
            if status == HTTPStatus.SERVICE_UNAVAILABLE:
                # The folder may be repaired while somebody looks at the page.
                self.send_header("Refresh", "2")
            self.end_headers()
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing about requests."""
