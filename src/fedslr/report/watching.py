"""A report that is served on this machine and follows its run."""

from __future__ import annotations

import errno
import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from fedslr.core.errors import FedslrError
from fedslr.core.interrupts import ASKS
from fedslr.report import page, tables

HOST = "127.0.0.1"
NAMES = {HOST, "localhost"}
WATCHED = ("config.toml", "metrics.jsonl", "summary.json")


class Server(ThreadingHTTPServer):
    """One thread for every visitor; none of them keeps the server from ending."""

    daemon_threads = True


@contextmanager
def serving(folder: Path, port: int) -> Iterator[Server]:
    """A server of one folder's report, reachable from this machine only."""
    try:
        server = Server((HOST, port), partial(_Visit, folder))
    except OSError as error:
        if error.errno in (errno.EADDRINUSE, errno.EACCES):
            raise FedslrError(
                f"--port: {port} is taken or not yours to use; choose another, or 0 for a free one"
            ) from None
        raise
    with server:
        yield server


@contextmanager
def until_told() -> Iterator[None]:
    """Ctrl-C or SIGTERM is the way to end this, and no failure; told again, it is ending already."""

    def stop(number: int, frame: object) -> None:
        for each in before:
            signal.signal(each, signal.SIG_IGN)
        raise KeyboardInterrupt

    before = {number: signal.getsignal(number) for number in ASKS}
    try:
        for number in before:
            signal.signal(number, stop)
        yield
    except KeyboardInterrupt:
        pass
    finally:
        for number, handler in before.items():
            if signal.getsignal(number) is stop:
                signal.signal(number, handler)


def stamp(folder: Path) -> str:
    """Another one whenever something that the report shows has changed."""
    places = [folder, *(p.parent for p in sorted(folder.glob("*/config.toml")))]
    found = []
    for path in (place / name for place in places for name in WATCHED):
        with suppress(OSError):
            seen = path.stat()
            found.append(f"{seen.st_size}.{seen.st_mtime_ns}")
    return "-".join([str(len(found)), format(hash(tuple(found)) & 0xFFFFFFFFFFFF, "x")])


class _Visit(BaseHTTPRequestHandler):
    """Answers `/` with the report and `/stamp` with its stamp."""

    def __init__(self, folder: Path, *args: Any) -> None:
        self.folder = folder
        super().__init__(*args)

    def do_GET(self) -> None:
        # A page elsewhere that has its own name point to this machine must not read the report.
        if re.sub(r":\d+$", "", self.headers.get("Host") or "") not in NAMES:
            return self._answer(HTTPStatus.FORBIDDEN, "text/plain", "this report is for 127.0.0.1")
        if self.path == "/stamp":
            return self._answer(HTTPStatus.OK, "text/plain", stamp(self.folder))
        if self.path == "/favicon.ico":
            return self._answer(HTTPStatus.NO_CONTENT, "text/plain", "")
        if self.path != "/":
            return self._answer(HTTPStatus.NOT_FOUND, "text/plain", "there is / only")
        now = stamp(self.folder)
        try:
            text = page.page(tables.find_runs([self.folder], unfinished=True), live=now)
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
                # What is wrong may be mended while somebody looks at it.
                self.send_header("Refresh", "2")
            self.end_headers()
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Visits are not worth a line."""
