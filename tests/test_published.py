"""Fetching and verifying published datasets, against a server of our own that misbehaves."""

from __future__ import annotations

import hashlib
import io
import tarfile
import threading
import zipfile
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

import fedslr
from fedslr.data import published
from fedslr.data.published import PUBLISHED, Published

FILES = {"data_batch_1.bin": 3073, "test_batch.bin": 3073}


def tar_of(files: dict[str, bytes]) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as archive:
        for name, data in files.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(data)
            archive.addfile(entry, io.BytesIO(data))
    return out.getvalue()


ARCHIVE = tar_of({f"toy/{name}": bytes(size) for name, size in FILES.items()})


class Server:
    """Serves one archive in the way it is told to, and remembers what it was asked."""

    def __init__(self) -> None:
        self.mode, self.body, self.ranges = "good", ARCHIVE, []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                outer.ranges.append(self.headers.get("Range"))
                start = int((self.headers.get("Range") or "bytes=0-").removeprefix("bytes=").rstrip("-"))
                if outer.mode == "missing":
                    self.send_error(404)
                    return
                if outer.mode == "no ranges":
                    start = 0
                if start >= len(outer.body):
                    self.send_error(416)
                    return
                body = outer.body[start:]
                self.send_response(206 if start else 200)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body[: len(body) // 2] if outer.mode == "breaks" else body)

            def log_message(self, *args: object) -> None:
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.http.serve_forever, daemon=True).start()

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.http.server_port}/toy.tar.gz"


@pytest.fixture
def server(monkeypatch):
    made = Server()
    item = Published("a toy", made.address, hashlib.md5(ARCHIVE).hexdigest(), "toy", FILES)
    monkeypatch.setitem(PUBLISHED, "toy", item)
    yield made
    made.http.shutdown()


def test_a_dataset_is_fetched_verified_and_unpacked(server, tmp_path):
    told: list[tuple[int, int]] = []
    home = published.fetch("toy", tmp_path, report=lambda done, total: told.append((done, total)))
    assert {p.name: p.stat().st_size for p in home.iterdir()} == FILES
    assert told[-1] == (len(ARCHIVE), len(ARCHIVE))
    assert [p.name for p in tmp_path.iterdir()] == ["toy"]
    assert published.verify("toy", tmp_path) == []
    with pytest.raises(fedslr.FedslrError, match="is there already"):
        published.fetch("toy", tmp_path)


@pytest.mark.parametrize("then", ["good", "no ranges"])
def test_a_download_that_broke_off_goes_on(then, server, tmp_path):
    server.mode = "breaks"
    with pytest.raises(fedslr.FedslrError, match=r"broke off at|run the same command again"):
        published.fetch("toy", tmp_path)
    (part,) = tmp_path.iterdir()
    assert part.stat().st_size == len(ARCHIVE) // 2
    server.mode = then
    published.fetch("toy", tmp_path)
    assert server.ranges == [None, f"bytes={len(ARCHIVE) // 2}-"]
    assert published.verify("toy", tmp_path) == []


def test_a_complete_part_is_not_fetched_again(server, tmp_path):
    (tmp_path / ".toy.tar.gz.part").write_bytes(ARCHIVE)
    published.fetch("toy", tmp_path)
    assert published.verify("toy", tmp_path) == []


def test_a_wrong_checksum_is_not_unpacked(server, tmp_path):
    server.body = tar_of({"toy/data_batch_1.bin": b"evil"})
    with pytest.raises(fedslr.FedslrError, match=r"has the MD5 \w+, expected \w+; it was not unpacked"):
        published.fetch("toy", tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_missing_page_and_a_dead_server_are_one_line(server, tmp_path):
    server.mode = "missing"
    with pytest.raises(fedslr.FedslrError, match=r"answers 404 .*; try a mirror with --from"):
        published.fetch("toy", tmp_path)
    server.http.shutdown()
    server.http.server_close()
    with pytest.raises(fedslr.FedslrError, match="cannot get") as refused:
        published.fetch("toy", tmp_path)
    assert "\n" not in str(refused.value)


def test_mirrors_and_files(server, tmp_path):
    local = tmp_path / "mine.tar.gz"
    local.write_bytes(ARCHIVE)
    for i, place in enumerate((str(local), f"file://{local}", server.address)):
        published.fetch("toy", tmp_path / str(i), place)
        assert published.verify("toy", tmp_path / str(i)) == []
    assert local.exists()
    with pytest.raises(fedslr.FedslrError, match="--from: got 'nothing', expected a file"):
        published.fetch("toy", tmp_path / "x", "nothing")


@pytest.mark.parametrize("kind", ["tar", "zip"])
def test_members_cannot_leave_the_folder(kind, tmp_path, monkeypatch):
    path = tmp_path / "evil"
    if kind == "tar":
        path.write_bytes(tar_of({"../../outside": b"x", "toy/a": b"y"}))
    else:
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("../../outside", "x")
    item = Published("", "http://x/evil", hashlib.md5(path.read_bytes()).hexdigest(), "toy", {})
    monkeypatch.setitem(PUBLISHED, "toy", item)
    with pytest.raises(fedslr.FedslrError, match=r"cannot be unpacked|holds no folder"):
        published.fetch("toy", tmp_path / "a" / "b", str(path))
    assert not list(tmp_path.rglob("outside"))


def test_verify_says_exactly_what_is_wrong(server, tmp_path):
    assert published.verify("toy", tmp_path)[0].endswith(
        f"is missing; get it with: fedslr data fetch toy --root {tmp_path}"
    )
    home = published.fetch("toy", tmp_path)
    (home / "test_batch.bin").unlink()
    (home / "data_batch_1.bin").write_bytes(b"half")
    assert published.verify("toy", tmp_path) == [
        f"{home / 'data_batch_1.bin'} has 4 bytes, expected 3,073",
        f"{home / 'test_batch.bin'} is missing",
    ]


def test_the_commands(server, tmp_path, command):
    code, printed, _ = command("data", "list", "--root", tmp_path)
    assert code == 0
    assert "cifar100" in printed
    code, _, err = command("data", "fetch", "cifar", "--root", tmp_path)
    assert (code, len(err.splitlines())) == (2, 1)
    assert "did you mean 'cifar" in err
    assert command("data", "fetch", "toy", "--root", tmp_path)[0] == 0
    code, _, err = command("data", "verify", "cifar10", "--root", tmp_path)
    assert code == 2
    assert "fedslr data fetch cifar10" in err
    picture = tmp_path / "split.png"
    code, printed, _ = command("data", "show", "digits", "--clients", 10, "--alpha", 0.1, "--plot", picture)
    assert code == 0
    assert "most frequent label" in printed
    assert picture.read_bytes().startswith(b"\x89PNG")
    code, _, err = command("data", "show", "digits", "--alpha", -1)
    assert (code, "data.alpha: got -1" in err) == (2, True)


def test_skew_is_zero_where_all_clients_are_alike(tmp_path):
    import numpy as np

    from fedslr.report.split import extremes, skew

    assert skew(np.full((4, 5), 10)) == {"largest_share": 0.2, "labels_held": 5.0, "distance": 0.0}
    assert skew(np.eye(4) * 7)["distance"] == pytest.approx(0.75)
    assert extremes(np.array([[1, 3], [3, 1]])) == "every label has 50.0 % of all samples"
    assert extremes(np.array([[1, 8, 1], [4, 2, 4]])) == "label 0 has 25.0 % of all samples, label 1 has 50.0 %"


def test_published_figures_are_well_formed():
    for item in PUBLISHED.values():
        assert len(item.md5) == 32
        assert Path(item.folder).name == item.folder
