"""CIFAR-10 and CIFAR-100: Krizhevsky, Learning Multiple Layers of Features from Tiny Images (2009).

Both published versions can be read: the binary version, and the Python version without executing code in it.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np

from fedslr.core.errors import FedslrError
from fedslr.data import decoded_cache
from fedslr.data.dataset import Dataset, image_dataset
from fedslr.data.decoded_cache import Array
from fedslr.data.normalization import Normalization

CROP_PADDING = 4


class ArchiveFolder(NamedTuple):
    """The folder that a published archive unpacks to, and its files."""

    name: str
    train: tuple[str, ...]
    test: str


class CifarFormat(NamedTuple):
    """The files of a CIFAR dataset in the binary and in the Python version."""

    num_classes: int
    label_bytes: int
    """Bytes before an image in the binary version; the last of these bytes is the label."""
    label_key: bytes
    """The key of the labels in the Python version."""
    binary: ArchiveFolder
    python: ArchiveFolder
    normalization: Normalization
    class_names: tuple[str, ...] | None = None


CIFAR10 = CifarFormat(
    10, 1, b"labels",
    ArchiveFolder("cifar-10-batches-bin", tuple(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin"),
    ArchiveFolder("cifar-10-batches-py", tuple(f"data_batch_{i}" for i in range(1, 6)), "test_batch"),
    Normalization((0.491, 0.482, 0.447), (0.247, 0.243, 0.262)),
    ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"),
)  # fmt: skip
CIFAR100 = CifarFormat(
    100, 2, b"fine_labels",
    ArchiveFolder("cifar-100-binary", ("train.bin",), "test.bin"),
    ArchiveFolder("cifar-100-python", ("train",), "test"),
    Normalization((0.5071, 0.4867, 0.4408), (0.2675, 0.2565, 0.2761)),
)  # fmt: skip


class ArrayUnpickler(pickle.Unpickler):
    """An unpickler that accepts numpy arrays only, so that a file cannot execute code."""

    MODULES: ClassVar = {
        ("numpy", "ndarray"): "numpy",
        ("numpy", "dtype"): "numpy",
        ("numpy.core.multiarray", "_reconstruct"): "numpy._core.multiarray",
        ("numpy._core.multiarray", "_reconstruct"): "numpy._core.multiarray",
        ("_codecs", "encode"): "_codecs",
    }

    def find_class(self, module: str, name: str) -> Any:
        return super().find_class(self.MODULES[module, name], name)


def read_batch(path: Path, cifar: CifarFormat) -> tuple[Array, Array]:
    """Return the images and the labels of a published file."""
    try:
        pixels, labels = _read_binary(path, cifar) if path.suffix == ".bin" else _read_pickle(path, cifar)
        images = pixels.reshape(len(labels), 3, 32, 32)
        if images.dtype != np.uint8 or not 0 <= labels.min() <= labels.max() < cifar.num_classes:
            raise ValueError(f"expected 8-bit images with labels from 0 to {cifar.num_classes - 1}")
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise FedslrError(f"{path}: fedslr cannot read this CIFAR batch ({reason}); download it again") from None
    return images, labels.astype(np.int64)


def _read_binary(path: Path, cifar: CifarFormat) -> tuple[Array, Array]:
    records = np.fromfile(path, np.uint8).reshape(-1, cifar.label_bytes + 3 * 32 * 32)
    return records[:, cifar.label_bytes :], records[:, cifar.label_bytes - 1]


def _read_pickle(path: Path, cifar: CifarFormat) -> tuple[Array, Array]:
    with path.open("rb") as file:
        batch = ArrayUnpickler(file, encoding="bytes").load()
    return np.asarray(batch[b"data"]), np.asarray(batch[cifar.label_key])


def _read_dataset(name: str, root: Path, cifar: CifarFormat) -> Dataset:
    archive = next((f for f in (cifar.binary, cifar.python) if (root / f.name).is_dir()), None)
    if archive is None:
        raise FedslrError(
            f"data.root: neither {root / cifar.binary.name} nor {root / cifar.python.name} exists; get the dataset "
            f"with `fedslr data fetch {name}`, or unpack the published archive in {root}"
        )
    folder = root / archive.name

    def decode() -> decoded_cache.Arrays:
        x, y = zip(*(read_batch(folder / file, cifar) for file in archive.train), strict=True)
        x_test, y_test = read_batch(folder / archive.test, cifar)
        return {"x": np.concatenate(x), "y": np.concatenate(y), "x_test": x_test, "y_test": y_test}

    files = [folder / file for file in (*archive.train, archive.test)]
    arrays = decoded_cache.load_or_decode(root, name, root, files, decode)
    return image_dataset(arrays, cifar.num_classes, cifar.normalization, CROP_PADDING, cifar.class_names)


def cifar10(root: Path) -> Dataset:
    """Return CIFAR-10: 60,000 images of ten classes."""
    return _read_dataset("cifar10", root, CIFAR10)


def cifar100(root: Path) -> Dataset:
    """Return CIFAR-100: 60,000 images of a hundred classes."""
    return _read_dataset("cifar100", root, CIFAR100)
