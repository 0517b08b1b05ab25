"""CIFAR-10, CIFAR-100 and TinyImageNet, read from their published layouts.

CIFAR: Krizhevsky, Learning Multiple Layers of Features from Tiny Images (2009), binary or Python version.
TinyImageNet: the `tiny-imagenet-200` folder of the Stanford course CS231n.
"""

from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from PIL import Image, UnidentifiedImageError
from torch import Tensor

from fedslr.data.dataset import Dataset
from fedslr.errors import FedslrError

Array = np.ndarray[Any, Any]
PIXELS = 3 * 32 * 32


def normalized(images: Array, mean: Sequence[float] | Array, deviation: Sequence[float] | Array) -> Tensor:
    """8-bit images (samples, channels, height, width) as numbers of mean 0 and deviation 1."""
    x = torch.from_numpy(images).float().div_(255)
    shift, scale = (torch.as_tensor(np.asarray(v, np.float32)).view(-1, 1, 1) for v in (mean, deviation))
    return x.sub_(shift).div_(scale)


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


CIFAR10 = Layout(
    10, 1, "labels",
    ("cifar-10-batches-bin", tuple(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin"),
    ("cifar-10-batches-py", tuple(f"data_batch_{i}" for i in range(1, 6)), "test_batch"),
    (0.491, 0.482, 0.447), (0.247, 0.243, 0.262),
)  # fmt: skip
CIFAR100 = Layout(
    100, 2, "fine_labels",
    ("cifar-100-binary", ("train.bin",), "test.bin"), ("cifar-100-python", ("train",), "test"),
    (0.5071, 0.4867, 0.4408), (0.2675, 0.2565, 0.2761),
)  # fmt: skip


def _cifar(root: Path, layout: Layout) -> Dataset:
    binary, python = root / layout.binary[0], root / layout.python[0]
    if binary.is_dir():
        folder, (_, train, test) = binary, layout.binary
    elif python.is_dir():
        folder, (_, train, test) = python, layout.python
    else:
        raise FedslrError(f"data.root: neither {binary} nor {python} is there; unpack the published archive in {root}")

    def read(name: str) -> tuple[Array, Array]:
        if folder == binary:
            return read_cifar(folder / name, layout.label_bytes, layout.classes)
        return read_cifar_pickle(folder / name, layout.label_key, layout.classes)

    parts = [read(name) for name in train]
    test_images, test_labels = read(test)
    x = normalized(np.concatenate([x for x, _ in parts]), layout.mean, layout.deviation)
    y = torch.from_numpy(np.concatenate([y for _, y in parts]))
    x_test, y_test = normalized(test_images, layout.mean, layout.deviation), torch.from_numpy(test_labels)
    return Dataset(x, y, x_test, y_test, layout.classes, 100, crop_padding=4)


def cifar10(root: Path) -> Dataset:
    """60,000 images of ten things."""
    return _cifar(root, CIFAR10)


def cifar100(root: Path) -> Dataset:
    """60,000 images of a hundred things."""
    return _cifar(root, CIFAR100)


# --- TinyImageNet ---------------------------------------------------------------------------------------------------


def read_image(path: Path) -> Array:
    """An image as (3, height, width); grey ones are repeated over the colours."""
    try:
        with Image.open(path) as image:
            pixels = np.asarray(image.convert("RGB"))
    except (OSError, UnidentifiedImageError, SyntaxError, ValueError) as error:
        raise FedslrError(f"{path}: is no readable image ({error})") from None
    return pixels.transpose(2, 0, 1)


def read_images(paths: Sequence[Path], size: tuple[int, int] | None = None) -> Array:
    """Many images of one size (height, width), that of most of them unless given; decoded on all cores."""
    with ThreadPoolExecutor() as pool:
        images = list(pool.map(read_image, paths))
    height, width = size or Counter(image.shape[1:] for image in images).most_common(1)[0][0]
    for path, image in zip(paths, images, strict=True):
        if image.shape[1:] != (height, width):
            raise FedslrError(f"{path}: is {image.shape[2]}×{image.shape[1]}, expected {width}×{height}")
    return np.stack(images)


def tinyimagenet(root: Path) -> Dataset:
    """110,000 images of two hundred things, from ROOT/tiny-imagenet-200; its `val` part is for testing."""
    folder = root / "tiny-imagenet-200"
    names = sorted(p.name for p in (folder / "train").glob("*") if p.is_dir())
    annotations = folder / "val" / "val_annotations.txt"
    if not names or not annotations.exists():
        raise FedslrError(f"data.root: {folder} lacks train/ or val/val_annotations.txt; unpack the dataset there")
    number = {name: i for i, name in enumerate(names)}
    train = [(path, number[n]) for n in names for path in sorted((folder / "train" / n / "images").glob("*.JPEG"))]
    test = []
    for line in annotations.read_text().splitlines():
        file, name = line.split("\t")[:2] if "\t" in line else (line, "")
        if name not in number:
            raise FedslrError(f"{annotations}: the line '{line[:60]}' names no class of train/")
        test.append((folder / "val" / "images" / file, number[name]))
    (x, y), (x_test, y_test) = (
        (
            normalized(read_images([path for path, _ in part], (64, 64)), (0.5, 0.5, 0.5), (0.5, 0.5, 0.5)),
            torch.tensor([label for _, label in part]),
        )
        for part in (train, test)
    )
    return Dataset(x, y, x_test, y_test, len(names), 100, crop_padding=8)
