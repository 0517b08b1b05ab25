"""CIFAR-10, CIFAR-100 and TinyImageNet, read from their published layouts.

CIFAR: Krizhevsky, Learning Multiple Layers of Features from Tiny Images (2009), the "binary version".
TinyImageNet: the `tiny-imagenet-200` folder of the Stanford course CS231n.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, UnidentifiedImageError
from torch import Tensor

from fedslr.data.dataset import Dataset
from fedslr.errors import FedslrError

Array = np.ndarray[Any, Any]
PIXELS = 3 * 32 * 32


def normalized(images: Array, mean: Sequence[float], deviation: Sequence[float]) -> Tensor:
    """8-bit images (samples, channels, height, width) as numbers of mean 0 and deviation 1."""
    x = torch.from_numpy(images).float().div_(255)
    return x.sub_(torch.tensor(mean).view(-1, 1, 1)).div_(torch.tensor(deviation).view(-1, 1, 1))


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


def _cifar(
    folder: Path,
    train: Sequence[str],
    test: str,
    label_bytes: int,
    classes: int,
    scale: tuple[Sequence[float], Sequence[float]],
) -> Dataset:
    if not folder.is_dir():
        raise FedslrError(f"data.root: {folder} is missing; unpack the dataset's binary version there")
    parts = [read_cifar(folder / name, label_bytes, classes) for name in train]
    images, labels = np.concatenate([x for x, _ in parts]), np.concatenate([y for _, y in parts])
    test_images, test_labels = read_cifar(folder / test, label_bytes, classes)
    x, x_test = normalized(images, *scale), normalized(test_images, *scale)
    return Dataset(x, torch.from_numpy(labels), x_test, torch.from_numpy(test_labels), classes, 100, crop_padding=4)


def cifar10(root: Path) -> Dataset:
    """60,000 images of ten things, from ROOT/cifar-10-batches-bin."""
    files = [f"data_batch_{i}.bin" for i in range(1, 6)]
    scale = ((0.491, 0.482, 0.447), (0.247, 0.243, 0.262))
    return _cifar(root / "cifar-10-batches-bin", files, "test_batch.bin", 1, 10, scale)


def cifar100(root: Path) -> Dataset:
    """60,000 images of a hundred things, from ROOT/cifar-100-binary."""
    scale = ((0.5071, 0.4867, 0.4408), (0.2675, 0.2565, 0.2761))
    return _cifar(root / "cifar-100-binary", ["train.bin"], "test.bin", 2, 100, scale)


# --- TinyImageNet ---------------------------------------------------------------------------------------------------


def read_image(path: Path, size: int = 64) -> Array:
    """An image as (3, size, size); grey ones are repeated over the colours."""
    try:
        with Image.open(path) as image:
            pixels = np.asarray(image.convert("RGB"))
    except (OSError, UnidentifiedImageError, SyntaxError, ValueError) as error:
        raise FedslrError(f"{path}: is no readable image ({error})") from None
    if pixels.shape != (size, size, 3):
        raise FedslrError(f"{path}: is {pixels.shape[1]}×{pixels.shape[0]}, expected {size}×{size}")
    return pixels.transpose(2, 0, 1)


def _read_images(paths: Sequence[Path]) -> Array:
    with ThreadPoolExecutor() as pool:
        return np.stack(list(pool.map(read_image, paths)))


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
            normalized(_read_images([path for path, _ in part]), (0.5, 0.5, 0.5), (0.5, 0.5, 0.5)),
            torch.tensor([label for _, label in part]),
        )
        for part in (train, test)
    )
    return Dataset(x, y, x_test, y_test, len(names), 100, crop_padding=8)
