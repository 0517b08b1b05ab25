"""CIFAR-10, CIFAR-100 and TinyImageNet, read from their published layouts.

CIFAR: Krizhevsky, Learning Multiple Layers of Features from Tiny Images (2009), binary or Python version.
TinyImageNet: the `tiny-imagenet-200` folder of the Stanford course CS231n.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch

from fedslr.core.errors import FedslrError
from fedslr.core.machine import cores
from fedslr.data import cache, decode
from fedslr.data.dataset import Dataset
from fedslr.data.federation import PARTS
from fedslr.data.normalization import Normalization

Array = np.ndarray[Any, Any]
PIXELS = 3 * 32 * 32
FEW = 1000
"""Images that are not worth starting processes for."""
AT_ONCE = 32
"""Images that are read from such a process at a time."""
Report = Callable[[int, int], None]
"""Told how many images are decoded and how many there are."""

_report: ContextVar[Report] = ContextVar("report", default=lambda done, total: None)


def pooled(
    arrays: cache.Arrays,
    classes: int,
    normalization: Normalization,
    crop_padding: int = 0,
    names: Sequence[str] | None = None,
) -> Dataset:
    """8-bit images, with a hundred test samples for a client."""
    x, y, x_test, y_test = (torch.from_numpy(np.ascontiguousarray(arrays[part])) for part in PARTS)
    called = None if names is None else tuple(names)
    return Dataset(x, y, x_test, y_test, classes, 100, crop_padding, normalization, called)


# --- CIFAR ----------------------------------------------------------------------------------------------------------


def read_cifar(path: Path, label_bytes: int, classes: int) -> tuple[Array, Array]:
    """Images and (last) labels of a file of records: label bytes, then 3072 pixels."""
    try:
        data = np.fromfile(path, np.uint8)
    except OSError as error:
        raise FedslrError(f"data.root: cannot read {path}: {error.strerror}") from None
    record = label_bytes + PIXELS
    if not data.size or data.size % record:
        raise FedslrError(f"{path}: has {data.size} bytes, expected a multiple of {record}; download it again")
    records = data.reshape(-1, record)
    labels = records[:, label_bytes - 1]
    if labels.max() >= classes:
        raise FedslrError(f"{path}: has label {labels.max()}, expected 0 to {classes - 1}; is it another dataset?")
    return records[:, label_bytes:].reshape(-1, 3, 32, 32), labels.astype(np.int64)


def read_cifar_pickle(path: Path, key: str, classes: int) -> tuple[Array, Array]:
    """Images and labels of a file of the "python version"; nothing but arrays and plain values is unpickled."""
    try:
        with path.open("rb") as file:
            batch = PlainUnpickler(file, encoding="bytes").load()
        pixels, labels = np.asarray(batch[b"data"]), np.asarray(batch[key.encode()])
        if pixels.dtype != np.uint8 or pixels.shape != (len(labels), PIXELS) or labels.dtype.kind not in "iu":
            raise ValueError("its arrays do not have the published shapes")
        if labels.size and not 0 <= labels.min() <= labels.max() < classes:
            raise ValueError(f"it has label {labels.max()}, expected 0 to {classes - 1}")
    except Exception as error:
        raise FedslrError(
            f"{path}: is no batch of CIFAR: {str(error).splitlines()[0] if str(error) else error!r}"
        ) from None
    return pixels.reshape(-1, 3, 32, 32), labels.astype(np.int64)


class PlainUnpickler(pickle.Unpickler):
    """Knows numpy's arrays and nothing that could do anything else."""

    ALLOWED: ClassVar = {
        ("numpy", "ndarray"),
        ("numpy", "dtype"),
        ("numpy.core.multiarray", "_reconstruct"),
        ("numpy._core.multiarray", "_reconstruct"),
        ("_codecs", "encode"),
    }

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in self.ALLOWED:
            raise ValueError(f"it wants to call {module}.{name}, which no dataset needs; refused")
        return super().find_class(module.replace("numpy.core", "numpy._core"), name)


class Layout(NamedTuple):
    """Where the published archives put a CIFAR dataset, in their binary and their Python version."""

    classes: int
    label_bytes: int
    label_key: str
    binary: tuple[str, tuple[str, ...], str]
    python: tuple[str, tuple[str, ...], str]
    mean: tuple[float, ...]
    deviation: tuple[float, ...]
    names: tuple[str, ...] | None = None


CIFAR10 = Layout(
    10, 1, "labels",
    ("cifar-10-batches-bin", tuple(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin"),
    ("cifar-10-batches-py", tuple(f"data_batch_{i}" for i in range(1, 6)), "test_batch"),
    (0.491, 0.482, 0.447), (0.247, 0.243, 0.262),
    ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"),
)  # fmt: skip
CIFAR100 = Layout(
    100, 2, "fine_labels",
    ("cifar-100-binary", ("train.bin",), "test.bin"), ("cifar-100-python", ("train",), "test"),
    (0.5071, 0.4867, 0.4408), (0.2675, 0.2565, 0.2761),
)  # fmt: skip


def _cifar(name: str, root: Path, layout: Layout) -> Dataset:
    binary, python = root / layout.binary[0], root / layout.python[0]
    if binary.is_dir():
        folder, (_, train, test) = binary, layout.binary
    elif python.is_dir():
        folder, (_, train, test) = python, layout.python
    else:
        raise FedslrError(
            f"data.root: neither {binary} nor {python} is there; get it with `fedslr data fetch {name}`, or unpack the "
            f"published archive in {root}"
        )

    def read(file: str) -> tuple[Array, Array]:
        if folder == binary:
            return read_cifar(folder / file, layout.label_bytes, layout.classes)
        return read_cifar_pickle(folder / file, layout.label_key, layout.classes)

    def decode_all() -> cache.Arrays:
        x, y = zip(*(read(file) for file in train), strict=True)
        x_test, y_test = read(test)
        return {"x": np.concatenate(x), "y": np.concatenate(y), "x_test": x_test, "y_test": y_test}

    arrays = cache.kept(root, name, root, [folder / file for file in (*train, test)], decode_all)
    return pooled(arrays, layout.classes, Normalization(layout.mean, layout.deviation), 4, layout.names)


def cifar10(root: Path) -> Dataset:
    """60,000 images of ten things."""
    return _cifar("cifar10", root, CIFAR10)


def cifar100(root: Path) -> Dataset:
    """60,000 images of a hundred things."""
    return _cifar("cifar100", root, CIFAR100)


# --- files of images ------------------------------------------------------------------------------------------------


@contextmanager
def reporting(report: Report) -> Iterator[None]:
    """Whoever wants to know how far decoding is."""
    token = _report.set(report)
    try:
        yield
    finally:
        _report.reset(token)


def read_images(paths: Sequence[Path], size: tuple[int, int] | None = None) -> Array:
    """Many images of one size (height, width), that of most of them unless given; decoded on all cores."""
    try:
        height, width = size or decode.image_size(paths[0])
        out = np.empty((len(paths), 3, height, width), np.uint8)
        try:
            if len(paths) < FEW or not _decode_in_processes(paths, out):
                _decode_in_threads(paths, out)
        except decode.WrongSize:
            _require_one_size(paths, size)
            raise
        return out
    except MemoryError:
        raise FedslrError(f"{paths[0]}: {len(paths)} images of {width}×{height} do not fit into memory") from None
    except ValueError as error:
        raise FedslrError(str(error)) from None


def _require_one_size(paths: Sequence[Path], size: tuple[int, int] | None) -> None:
    """Blame the right image where sizes differ: the first that is not as large as most."""
    sizes = [decode.image_size(path) for path in paths]
    expected = size or Counter(sizes).most_common(1)[0][0]
    for path, found in zip(paths, sizes, strict=True):
        decode.require_size(path, found, expected)


def _decode_in_threads(paths: Sequence[Path], out: Array) -> None:
    """For a few images, which may be large: Pillow lets go of the interpreter's lock only while it decodes."""

    def fill(i: int) -> None:
        out[i] = decode.read_sized(paths[i], out.shape[2:])

    with ThreadPoolExecutor() as pool:
        for done, _ in enumerate(pool.map(fill, range(len(paths))), 1):
            _report.get()(done, len(paths))


def _decode_in_processes(paths: Sequence[Path], out: Array) -> bool:
    """For many images, which are mostly small: each process takes a share of them. False if none can be started."""
    shares = np.array_split(np.arange(len(paths)), cores())
    done = [0] * len(shares)
    stop = threading.Event()

    def take(worker: int) -> None:
        first, last = int(shares[worker][0]), int(shares[worker][-1]) + 1
        for count in _decoded(paths[first:last], out[first:last]):
            done[worker] = count
            if stop.is_set():
                break

    with ThreadPoolExecutor(len(shares)) as pool:
        futures = [pool.submit(take, worker) for worker in range(len(shares))]
        try:
            while wait(futures, 0.1, FIRST_EXCEPTION).not_done and not any(f.done() and f.exception() for f in futures):
                _report.get()(sum(done), len(paths))
        finally:
            stop.set()
    try:
        for future in futures:
            future.result()
    except OSError:
        return False
    _report.get()(len(paths), len(paths))
    return True


def _decoded(paths: Sequence[Path], out: Array) -> Iterator[int]:
    """Have a process decode some images into `out`; how many there are so far, again and again."""
    command = [sys.executable, "-P", "-W", "ignore", decode.__file__, str(out.shape[2]), str(out.shape[3])]
    found = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with (
        tempfile.TemporaryFile() as said,
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=said, env=found) as process,
    ):
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            with contextlib.suppress(BrokenPipeError), process.stdin as names:
                names.write(b"\0".join(os.fsencode(path) for path in paths))
            for start in range(0, len(paths), AT_ONCE):
                pixels = out[start : start + AT_ONCE].reshape(-1)
                if process.stdout.readinto(pixels.data) < pixels.nbytes:  # type: ignore[attr-defined]
                    break
                yield min(start + AT_ONCE, len(paths))
            else:
                return
            process.wait()
            said.seek(0)
            raise _failure(said.read().decode(errors="surrogateescape"))
        finally:
            process.kill()


def _failure(said: str) -> Exception:
    """What a process that decodes says last: an image is at fault, or the process itself."""
    kind, _, text = said.rpartition("\n")[2].partition(" ")
    kinds: dict[str, type[Exception]] = {"ValueError": ValueError, "WrongSize": decode.WrongSize}
    return kinds.get(kind, OSError)(text)


def by_name(paths: Iterable[Path]) -> list[Path]:
    """The files of a folder in order; names compare ten times as fast as paths."""
    return sorted(paths, key=lambda path: path.name)


# --- TinyImageNet ---------------------------------------------------------------------------------------------------


def tinyimagenet(root: Path) -> Dataset:
    """110,000 images of two hundred things, from ROOT/tiny-imagenet-200; its `val` part is for testing."""
    folder = root / "tiny-imagenet-200"
    names = sorted(p.name for p in (folder / "train").glob("*") if p.is_dir())
    annotations = folder / "val" / "val_annotations.txt"
    if not names or not annotations.exists():
        raise FedslrError(f"data.root: {folder} lacks train/ or val/val_annotations.txt; unpack the dataset there")
    number = {name: i for i, name in enumerate(names)}
    train = [(p, number[n]) for n in names for p in by_name((folder / "train" / n / "images").glob("*.JPEG"))]
    test = []
    for line in annotations.read_text("utf-8").splitlines():
        file, name = line.split("\t")[:2] if "\t" in line else (line, "")
        if name not in number:
            raise FedslrError(f"{annotations}: the line '{line[:60]}' names no class of train/")
        test.append((folder / "val" / "images" / file, number[name]))
    paths, test_paths = ([path for path, _ in part] for part in (train, test))
    labels, test_labels = (np.array([label for _, label in part]) for part in (train, test))

    def decode_all() -> cache.Arrays:
        x, x_test = read_images(paths, (64, 64)), read_images(test_paths, (64, 64))
        return {"x": x, "y": labels, "x_test": x_test, "y_test": test_labels}

    arrays = cache.kept(root, "tinyimagenet", folder, [*paths, *test_paths, annotations], decode_all)
    return pooled(arrays, len(names), Normalization((0.5,), (0.5,)), 8, names)
