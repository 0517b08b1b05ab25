"""Published datasets: their addresses, their download, and checks of the files on the disk."""

from __future__ import annotations

import hashlib
import shutil
import tarfile
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
    """A dataset's archive, its published checksum, and the files it holds with their sizes (0: not checked)."""

    title: str
    url: str
    md5: str
    folder: str
    file_sizes: dict[str, int]


PUBLISHED: dict[str, PublishedDataset] = {
    "cifar10": PublishedDataset(
        "60,000 colour images of ten things, 32×32",
        "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",
        "c32a1d4ab5d03f1284b67883e8d87530",
        "cifar-10-batches-bin",
        {**{f"data_batch_{i}.bin": 30_730_000 for i in range(1, 6)}, "test_batch.bin": 30_730_000},
    ),
    "cifar100": PublishedDataset(
        "60,000 colour images of a hundred things, 32×32",
        "https://www.cs.toronto.edu/~kriz/cifar-100-binary.tar.gz",
        "03b5dce01913d631647c71ecec9e9cb8",
        "cifar-100-binary",
        {"train.bin": 153_700_000, "test.bin": 30_740_000},
    ),
    "tinyimagenet": PublishedDataset(
        "110,000 colour images of two hundred things, 64×64",
        "http://cs231n.stanford.edu/tiny-imagenet-200.zip",
        "90528d7ca1a48142e341f4ef8d21d0de",
        "tiny-imagenet-200",
        {"wnids.txt": 0, "val/val_annotations.txt": 0},
    ),
}


def find(name: str) -> PublishedDataset:
    if name not in PUBLISHED:
        raise FedslrError(f"data: '{name}' cannot be downloaded; {suggest(name, PUBLISHED)}")
    return PUBLISHED[name]


# --- fetch ----------------------------------------------------------------------------------------------------------


def fetch(name: str, root: Path, source: str | None = None, report: Progress = lambda done, total: None) -> Path:
    """Download, verify and unpack a dataset, from a file or another address if a source is given.

    An interrupted download is continued. An archive whose checksum is wrong is deleted, never unpacked.
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
    found = checksum(archive)
    if found != dataset.md5:
        archive.unlink()
        raise FedslrError(f"data: {url} has the MD5 {found}, expected {dataset.md5}; it was not unpacked")
    _unpack(archive, dataset.folder, root)
    archive.unlink()
    return home


def checksum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()


def _download(url: str, part: Path, report: Progress) -> Path:
    """Download to a file, or continue a download that the file is the first part of."""
    have = part.stat().st_size if part.exists() else 0
    request = urllib.request.Request(url, headers={"Range": f"bytes={have}-"} if have else {})
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS) as answer:
            if answer.status != 206:  # The server ignores the range and sends all of the file.
                have = 0
            length = int(answer.headers.get("Content-Length") or 0)
            total = have + length if length else 0
            with part.open("ab" if have else "wb") as file:
                while block := answer.read(BLOCK_BYTES):
                    file.write(block)
                    have += len(block)
                    report(have, total)
        if have < total:
            raise OSError(f"the connection broke off at {have} of {total} bytes")
    except (OSError, ValueError) as error:
        if isinstance(error, urllib.error.HTTPError) and error.code == 416:  # The file is complete already.
            return part
        raise FedslrError(
            f"data: cannot download {url}: {error}; run the same command again to continue, or choose a mirror with "
            "--from"
        ) from None
    return part


def _unpack(archive: Path, folder: str, root: Path) -> None:
    """Unpack a verified archive beside its place and move it there when it is complete."""
    with tempfile.TemporaryDirectory(dir=root, prefix=".unpack-") as scratch:
        if zipfile.is_zipfile(archive):
            with zipfile.ZipFile(archive) as packed:
                packed.extractall(scratch)
        else:
            with tarfile.open(archive) as packed_tar:
                packed_tar.extractall(scratch, filter="data")
        shutil.move(Path(scratch) / folder, root / folder)


# --- verify ---------------------------------------------------------------------------------------------------------


def verify(name: str, root: Path) -> list[str]:
    """Return what is wrong with a dataset on the disk, an empty list if it is complete."""
    dataset = find(name)
    home = root / dataset.folder
    if not home.is_dir():
        return [f"{home} is missing; get it with: fedslr data fetch {name} --root {root}"]
    wrong = []
    for file, size in dataset.file_sizes.items():
        path = home / file
        if not path.is_file():
            wrong.append(f"{path} is missing")
        elif size and path.stat().st_size != size:
            wrong.append(f"{path} has {path.stat().st_size:,} bytes, expected {size:,}")
    return wrong
