"""Published datasets: where they are, how to get them whole, and whether what is on the disk is what was published."""

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

BLOCK = 2**20
TIMEOUT = 30
Report = Callable[[int, int], None]
"""Told how many bytes there are and how many there will be (0 if nobody knows)."""


class Published(NamedTuple):
    """A dataset's archive, its checksum as published, and the files it holds with their sizes (0: not checked)."""

    title: str
    address: str
    md5: str
    folder: str
    files: dict[str, int]


PUBLISHED: dict[str, Published] = {
    "cifar10": Published(
        "60,000 colour images of ten things, 32×32",
        "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",
        "c32a1d4ab5d03f1284b67883e8d87530",
        "cifar-10-batches-bin",
        {**{f"data_batch_{i}.bin": 30_730_000 for i in range(1, 6)}, "test_batch.bin": 30_730_000},
    ),
    "cifar100": Published(
        "60,000 colour images of a hundred things, 32×32",
        "https://www.cs.toronto.edu/~kriz/cifar-100-binary.tar.gz",
        "03b5dce01913d631647c71ecec9e9cb8",
        "cifar-100-binary",
        {"train.bin": 153_700_000, "test.bin": 30_740_000},
    ),
    "tinyimagenet": Published(
        "110,000 colour images of two hundred things, 64×64",
        "http://cs231n.stanford.edu/tiny-imagenet-200.zip",
        "90528d7ca1a48142e341f4ef8d21d0de",
        "tiny-imagenet-200",
        {"wnids.txt": 0, "val/val_annotations.txt": 0},
    ),
}


def find(name: str) -> Published:
    if name not in PUBLISHED:
        raise FedslrError(f"data: '{name}' is not fetched; {suggest(name, PUBLISHED)}")
    return PUBLISHED[name]


# --- fetch ----------------------------------------------------------------------------------------------------------


def fetch(name: str, root: Path, source: str | None = None, report: Report = lambda done, total: None) -> Path:
    """Download, verify and unpack a dataset. A download that broke off goes on; nothing is unpacked unverified."""
    item = find(name)
    home = root / item.folder
    if home.exists():
        raise FedslrError(f"data: {home} is there already; check it with: fedslr data verify {name} --root {root}")
    place = source or item.address
    local = _local(place)
    root.mkdir(parents=True, exist_ok=True)
    archive = local or _download(place, root / f".{Path(urllib.parse.urlparse(item.address).path).name}.part", report)
    found = checksum(archive)
    if found != item.md5:
        if local is None:
            archive.unlink()
        raise FedslrError(f"data: {place} has the MD5 {found}, expected {item.md5}; it was not unpacked")
    _unpack(archive, item.folder, root)
    if local is None:
        archive.unlink()
    return home


def _local(place: str) -> Path | None:
    """The file a place names, if it is one on this machine."""
    scheme = urllib.parse.urlparse(place).scheme
    if scheme in ("http", "https"):
        return None
    path = Path(urllib.parse.unquote(urllib.parse.urlparse(place).path)) if scheme == "file" else Path(place)
    if not path.is_file():
        raise FedslrError(f"--from: got '{place}', expected a file or an http(s) address")
    return path


def checksum(path: Path) -> str:
    digest = hashlib.md5(usedforsecurity=False)
    with path.open("rb") as file:
        while block := file.read(BLOCK):
            digest.update(block)
    return digest.hexdigest()


def _download(address: str, part: Path, report: Report) -> Path:
    """Into a file beside its place; what is there already is not asked for again."""
    have = part.stat().st_size if part.exists() else 0
    request = urllib.request.Request(address, headers={"Range": f"bytes={have}-"} if have else {})
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT) as answer:
            if have and answer.status != 206:
                have = 0
            length = int(answer.headers.get("Content-Length") or 0)
            total = have + length if length else 0
            with part.open("ab" if have else "wb") as file:
                while block := answer.read(BLOCK):
                    file.write(block)
                    have += len(block)
                    report(have, total)
    except urllib.error.HTTPError as error:
        if error.code == 416:  # nothing is left to send
            return part
        raise FedslrError(f"data: {address} answers {error.code} {error.reason}; try a mirror with --from") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", error)
        raise FedslrError(f"data: cannot get {address}: {reason}; run the same command again to go on") from None
    if total and have < total:
        raise FedslrError(f"data: {address} broke off at {have} of {total} bytes; run the same command again to go on")
    return part


def _unpack(archive: Path, folder: str, root: Path) -> None:
    """Unpack beside the place and move it there when all of it is; no member may leave the folder."""
    with tempfile.TemporaryDirectory(dir=root, prefix=".unpack-") as scratch:
        try:
            if zipfile.is_zipfile(archive):
                with zipfile.ZipFile(archive) as packed:
                    packed.extractall(scratch)
            else:
                with tarfile.open(archive) as packed_tar:
                    packed_tar.extractall(scratch, filter="data")
        except (OSError, tarfile.TarError, zipfile.BadZipFile, EOFError) as error:
            raise FedslrError(f"data: {archive} cannot be unpacked: {error}") from None
        made = Path(scratch) / folder
        if not made.is_dir():
            raise FedslrError(f"data: {archive} holds no folder '{folder}'")
        shutil.move(str(made), str(root / folder))


# --- verify ---------------------------------------------------------------------------------------------------------


def verify(name: str, root: Path) -> list[str]:
    """What is wrong with a dataset on the disk; nothing if it is whole."""
    item = find(name)
    home = root / item.folder
    if not home.is_dir():
        return [f"{home} is missing; get it with: fedslr data fetch {name} --root {root}"]
    wrong = []
    for file, size in item.files.items():
        path = home / file
        if not path.is_file():
            wrong.append(f"{path} is missing")
        elif size and path.stat().st_size != size:
            wrong.append(f"{path} has {path.stat().st_size:,} bytes, expected {size:,}")
    return wrong
