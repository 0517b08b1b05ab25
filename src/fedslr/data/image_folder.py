"""Users' images: one folder per class."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedslr.core.errors import FedslrError, FedslrWarning
from fedslr.data import decoded_cache
from fedslr.data.dataset import Dataset, image_dataset
from fedslr.data.image_decoding import read_images
from fedslr.data.normalization import Normalization

SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff")
TEST_SHARE = 0.2
"""The share of images that are held out for testing if the folder has no test/ part."""


def image_folder(root: Path) -> Dataset:
    """Return the images of ROOT/train/CLASS/* and ROOT/test/CLASS/*, or of ROOT/CLASS/*.

    A fifth of ROOT/CLASS/* is held out for testing: always the same images, with samples of every class.
    """
    divided = (root / "train").is_dir() and (root / "test").is_dir()
    names = _class_names(root / "train", root / "test") if divided else _class_names(root)
    if divided:
        (train, y), (test, y_test) = (_list_images(root / part, names, at_least=1) for part in ("train", "test"))
    else:
        (train, y), (test, y_test) = _hold_out(*_list_images(root, names, at_least=2), len(names))

    def decode() -> decoded_cache.Arrays:
        x = read_images(train)
        mean, deviation = channel_statistics(x)
        x_test = read_images(test, x.shape[2:])
        return {"x": x, "y": y, "x_test": x_test, "y_test": y_test, "mean": mean, "deviation": deviation}

    # The cache lies beside the folder, because every folder within is a class.
    home = root.resolve()
    arrays = decoded_cache.load_or_decode(home.parent, f"imagefolder-{home.name}", root, [*train, *test], decode)
    mean, deviation = (tuple(arrays[name].tolist()) for name in ("mean", "deviation"))
    return image_dataset(arrays, len(names), Normalization(mean, deviation), class_names=names)


def channel_statistics(images: np.ndarray[Any, Any]) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Return the mean and the standard deviation of every channel, for pixels as numbers from 0 to 1."""
    # Counts of the 256 values need no copy of the images in floating point.
    counts = np.stack([np.bincount(channel.ravel(), minlength=256) for channel in images.swapaxes(0, 1)])
    values, shares = np.arange(256) / 255, counts / counts.sum(1, keepdims=True)
    mean = shares @ values
    return mean, np.sqrt((shares * (values - mean[:, None]) ** 2).sum(1)) + 1e-6


def _class_names(*folders: Path) -> list[str]:
    """Return the names of all classes that occur in at least one of the folders."""
    found = {p.name for folder in folders if folder.is_dir() for p in folder.iterdir() if p.is_dir()}
    names = sorted(name for name in found if not name.startswith("."))
    if len(names) < 2:
        raise FedslrError(
            f"data.name: {folders[0]} has {len(names)} class folders, expected at least two; put the images of every "
            "class into a folder of its own, or into train/CLASS and test/CLASS"
        )
    return names


def _list_images(folder: Path, names: Sequence[str], at_least: int) -> tuple[list[Path], np.ndarray[Any, Any]]:
    """Return the image files of all classes and their labels; warn of files that are not images."""
    images: list[Path] = []
    others: list[Path] = []
    labels: list[int] = []
    for label, name in enumerate(names):
        # macOS leaves hidden files such as ._cat.png among the images.
        files = sorted(p for p in (folder / name).glob("*") if not p.name.startswith("."))
        found = [p for p in files if p.suffix.lower() in SUFFIXES]
        if len(found) < at_least:
            raise FedslrError(
                f"{folder / name}: this class folder has {len(found)} images ({', '.join(SUFFIXES[:3])}, …), expected "
                f"at least {at_least}; add images{', one of which is held out for testing' * (at_least > 1)}"
            )
        images += found
        labels += [label] * len(found)
        others += [p for p in files if p.suffix.lower() not in SUFFIXES]
    if others:
        warnings.warn(
            f"{folder}: ignored {len(others)} files that are not images ({', '.join(SUFFIXES)}), such as {others[0]}",
            FedslrWarning,
            stacklevel=3,
        )
    return images, np.array(labels)


Part = tuple[list[Path], np.ndarray[Any, Any]]


def _hold_out(images: Sequence[Path], labels: np.ndarray[Any, Any], num_classes: int) -> tuple[Part, Part]:
    """Return training and test images with their labels; every class has some of both."""
    # scikit-learn takes a second to import.
    from sklearn.model_selection import train_test_split

    held_out = max(math.ceil(TEST_SHARE * len(images)), num_classes)
    train, test = train_test_split(np.arange(len(images)), test_size=held_out, stratify=labels, random_state=0)
    return ([images[i] for i in train], labels[train]), ([images[i] for i in test], labels[test])
