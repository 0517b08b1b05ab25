"""`fedslr watch`: the report follows its run, on this machine only, and ends when it is told to."""

from __future__ import annotations

import http.client
import json
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from fedslr.report.live_report import ReportServer
from test_report import checked, write_run


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_run(tmp_path / "run", rounds=2, planned=9)


@pytest.fixture
def server(folder: Path) -> Iterator[ReportServer]:
    with ReportServer(folder, 0) as made:
        thread = threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield made
        made.shutdown()
        thread.join()


def get(server: ReportServer, path: str, host: str | None = None) -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=600)
    try:
        connection.request("GET", path, headers={"Host": host} if host else {})
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


def test_the_page_follows_the_run(folder, server):
    status, text = get(server, "/")
    assert status == 200
    checked(text)
    assert "2 of 9 rounds" in text
    before = get(server, "/stamp")[1]
    assert f'<meta name="stamp" content="{before}">' in text
    assert get(server, "/stamp")[1] == before
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    third = json.loads(lines[-1]) | {"round": 3}
    (folder / "metrics.jsonl").write_text("\n".join([*lines, json.dumps(third), '{"round": 4, "cli']))
    assert get(server, "/stamp")[1] != before
    assert "3 of 9 rounds" in get(server, "/")[1]


def test_it_serves_nothing_else(folder, server):
    for path in ("/config.toml", "/../config.toml", "/metrics.jsonl"):
        assert get(server, path)[0] == 404
    assert get(server, "/", host="evil.example:80")[0] == 403
    assert get(server, "/", host=f"localhost:{server.server_port}")[0] == 200
    assert server.server_address[0] == "127.0.0.1"


def test_a_folder_that_went_away_is_told(folder, server):
    (folder / "config.toml").unlink()
    status, text = get(server, "/")
    assert status == 503
    assert "config.toml is missing" in text


def test_damage_is_told_until_it_is_mended(folder, server):
    metrics = folder / "metrics.jsonl"
    whole = metrics.read_bytes()
    metrics.write_bytes(b"\xff" + whole)
    status, text = get(server, "/")
    assert (status, text.splitlines()) == (503, [text])
    assert "line 1 is damaged" in text
    metrics.write_bytes(whole)
    assert get(server, "/")[0] == 200


def test_a_taken_port_is_answered_with_a_line(command, folder):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        code, _, err = command("watch", folder, "--port", port)
    assert code == 2
    assert err.splitlines() == [f"error: --port: {port}: Address already in use; choose another, or 0 for a free one"]


def test_mistakes_are_answered_with_a_line(command, tmp_path):
    assert "no such folder" in command("watch", tmp_path / "none")[2]
    assert "no run in it" in command("watch", tmp_path)[2]
    code, _, err = command("watch", tmp_path, "--port", 99999)
    assert code == 2
    assert "'--port': 99999 is not in the range 0<=x<=65535" in err


@pytest.mark.parametrize("times", [1, 20])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_it_cleanly(number, times, folder):
    """Sent again while it ends, it changes nothing."""
    call = [sys.executable, "-m", "fedslr", "watch", str(folder), "--port", "0"]
    with subprocess.Popen(call, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert "http://127.0.0.1:" in process.stdout.readline()
        for _ in range(times):
            process.send_signal(number)
            with suppress(subprocess.TimeoutExpired):
                process.wait(0.01)
        _, err = process.communicate(timeout=600)
    assert (process.returncode, err) == (0, "")
