"""Published datasets: their addresses, and their verified download."""

from __future__ import annotations

import hashlib
import shutil
import tempfile
import urllib.error
import urllib.parse
import urllib.request
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from fedslr.core.errors import FedslrError, suggest

BLOCK_BYTES = 2**20
TIMEOUT_SECONDS = 30
Progress = Callable[[int, int], None]
"""A function of the number of received bytes and of all bytes (0 if unknown)."""


class PublishedDataset(NamedTuple):
    """A published dataset: the address and checksum of its archive, and the folder that the archive unpacks to."""

    title: str
    url: str
    md5: str
    folder: str


PUBLISHED: dict[str, PublishedDataset] = {
    "cifar10": PublishedDataset(
        "60,000 colour images of ten classes, 32×32",
        "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",
        "c32a1d4ab5d03f1284b67883e8d87530",
        "cifar-10-batches-bin",
    ),
    "cifar100": PublishedDataset(
        "60,000 colour images of a hundred classes, 32×32",
        "https://www.cs.toronto.edu/~kriz/cifar-100-binary.tar.gz",
        "03b5dce01913d631647c71ecec9e9cb8",
        "cifar-100-binary",
    ),
    "tinyimagenet": PublishedDataset(
        "110,000 colour images of two hundred classes, 64×64",
        "http://cs231n.stanford.edu/tiny-imagenet-200.zip",
        "90528d7ca1a48142e341f4ef8d21d0de",
        "tiny-imagenet-200",
    ),
}


def find(name: str) -> PublishedDataset:
    """Return a published dataset by name; refuse other names."""
    if name not in PUBLISHED:
        raise FedslrError(f"data: fedslr cannot download '{name}'; {suggest(name, PUBLISHED)}")
    return PUBLISHED[name]


def fetch(name: str, root: Path, source: str | None = None, report: Progress = lambda done, total: None) -> Path:
    """Download, verify and unpack a published dataset; return its folder.

    A download that was interrupted is continued. An archive with a wrong checksum is deleted and never unpacked. The
    archive comes from its published address, unless `source` names a file or another address, such as a mirror.
    """
    dataset = find(name)
    home = root / dataset.folder
    if home.exists():
        raise FedslrError(f"data: {home} already exists; check it with: fedslr data verify {name} --root {root}")
    url = source or dataset.url
    if "://" not in url:
        url = Path(url).absolute().as_uri()
    root.mkdir(parents=True, exist_ok=True)
    archive = _download(url, root / f".{Path(urllib.parse.urlparse(dataset.url).path).name}.part", report)
    with archive.open("rb") as file:
        found = hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()
    if found != dataset.md5:
        archive.unlink()
        raise FedslrError(
            f"data: {url} has the MD5 checksum {found}, expected {dataset.md5}; the archive was deleted; download it "
            "again, or choose a mirror with --from"
        )
    _unpack(archive, dataset.folder, root)
    archive.unlink()
    return home


def _download(url: str, part: Path, report: Progress) -> Path:
    """Download to the file `part`; if the file already holds the first bytes, download the remaining ones."""
    have = part.stat().st_size if part.exists() else 0
    request = urllib.request.Request(url, headers={"Range": f"bytes={have}-"} if have else {})
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS) as answer:
            if answer.status != 206:  # The server ignores the range and sends the whole file.
                have = 0
            length = int(answer.headers.get("Content-Length") or 0)
            total = have + length if length else 0
            with part.open("ab" if have else "wb") as file:
                while block := answer.read(BLOCK_BYTES):
                    file.write(block)
                    have += len(block)
                    report(have, total)
        if have < total:
            raise OSError(f"the connection was lost after {have} of {total} bytes")
    except (OSError, ValueError) as error:
        if isinstance(error, urllib.error.HTTPError) and error.code == 416:  # The file is complete already.
            return part
        reason = getattr(error, "reason", error)
        reason = getattr(reason, "strerror", None) or reason
        raise FedslrError(
            f"data: cannot download {url}: {reason}; run the same command again to continue, or choose a mirror with "
            "--from"
        ) from None
    return part


def _unpack(archive: Path, folder: str, root: Path) -> None:
    """Unpack a verified archive to a temporary folder, then move its folder to `root`, complete or not at all."""
    with tempfile.TemporaryDirectory(dir=root, prefix=".unpack-") as scratch:
        kind = "zip" if zipfile.is_zipfile(archive) else "gztar"
        shutil.unpack_archive(archive, scratch, kind, filter=None if kind == "zip" else "data")
        shutil.move(Path(scratch) / folder, root / folder)
