"""TinyImageNet: the `tiny-imagenet-200` folder of the Stanford course CS231n."""

from __future__ import annotations

from operator import attrgetter
from pathlib import Path

import numpy as np

from fedslr.core.errors import FedslrError
from fedslr.data import decoded_cache
from fedslr.data.dataset import Dataset, image_dataset
from fedslr.data.image_decoding import read_images
from fedslr.data.normalization import Normalization

IMAGE_SIZE = (64, 64)
CROP_PADDING = 8


def tinyimagenet(root: Path) -> Dataset:
    """Return TinyImageNet from ROOT/tiny-imagenet-200: 110,000 images of two hundred classes; `val` is the test set."""
    folder = root / "tiny-imagenet-200"
    names = sorted(p.name for p in (folder / "train").glob("*") if p.is_dir())
    number = {name: i for i, name in enumerate(names)}
    annotations = folder / "val" / "val_annotations.txt"
    try:
        lines = [line.split("\t") for line in annotations.read_text("utf-8").splitlines()]
        test = [(folder / "val" / "images" / line[0], number[line[1]]) for line in lines]
    except (OSError, LookupError, UnicodeDecodeError):
        raise FedslrError(
            f"data.root: {annotations} is missing, damaged, or names a class that train/ lacks; get the dataset with "
            f"`fedslr data fetch tinyimagenet --root {root}`"
        ) from None
    # Names compare ten times as fast as paths.
    files = {n: sorted((folder / "train" / n / "images").glob("*.JPEG"), key=attrgetter("name")) for n in names}
    train = [(path, number[name]) for name in names for path in files[name]]
    paths, test_paths = ([path for path, _ in part] for part in (train, test))
    labels, test_labels = (np.array([label for _, label in part]) for part in (train, test))

    def decode() -> decoded_cache.Arrays:
        x, x_test = read_images(paths, IMAGE_SIZE), read_images(test_paths, IMAGE_SIZE)
        return {"x": x, "y": labels, "x_test": x_test, "y_test": test_labels}

    arrays = decoded_cache.load_or_decode(root, "tinyimagenet", folder, [*paths, *test_paths, annotations], decode)
    return image_dataset(arrays, len(names), Normalization((0.5,), (0.5,)), CROP_PADDING, names)
