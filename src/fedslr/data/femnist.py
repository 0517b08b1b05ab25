"""FEMNIST: handwritten characters by writer, from the JSON files of LEAF (Caldas et al., 2018)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from fedslr.core.errors import FedslrError
from fedslr.data import decoded_cache
from fedslr.data.client_data import ARRAY_NAMES
from fedslr.data.decoded_cache import Array
from fedslr.data.federation import Federation

NUM_CLASSES = 62


def femnist(root: Path) -> Federation:
    """Return FEMNIST from ROOT/femnist/train/*.json and ROOT/femnist/test/*.json; every client is a writer."""
    folder = root / "femnist"
    files = sorted(folder.glob("train/*.json")) + sorted(folder.glob("test/*.json"))
    arrays = decoded_cache.load_or_decode(root, "femnist", folder, files, lambda: _read_all(folder))
    ends, ends_test = (np.cumsum(arrays[sizes])[:-1] for sizes in ("sizes", "sizes_test"))
    parts = [np.split(arrays[part], ends_test if part.endswith("test") else ends) for part in ARRAY_NAMES]
    clients = [dict(zip(ARRAY_NAMES, mine, strict=True)) for mine in zip(*parts, strict=True)]
    return Federation.from_arrays(clients, num_classes=NUM_CLASSES, name="femnist")


def _read_all(folder: Path) -> decoded_cache.Arrays:
    """Return the concatenated samples of all writers, and the number of samples of each writer."""
    train, test = (read_leaf(folder / part) for part in ("train", "test"))
    writers = sorted(set(train) & set(test))
    if not writers:
        raise FedslrError(
            f"data.root: {folder} has no writer with training and test data; create train/*.json and test/*.json with "
            "the preprocessing of LEAF's femnist"
        )
    arrays: decoded_cache.Arrays = {}
    for suffix, part in (("", train), ("_test", test)):
        images, labels = zip(*(part[writer] for writer in writers), strict=True)
        arrays |= {f"x{suffix}": np.concatenate(images), f"y{suffix}": np.concatenate(labels)}
        arrays[f"sizes{suffix}"] = np.array([len(y) for y in labels])
    x, x_test = _as_pixels(arrays["x"]), _as_pixels(arrays["x_test"])
    return arrays if x is None or x_test is None else {**arrays, "x": x, "x_test": x_test}


def read_leaf(folder: Path) -> dict[str, tuple[Array, Array]]:
    """Return the images and labels of every writer in a folder of LEAF's JSON files."""
    writers: dict[str, tuple[Array, Array]] = {}
    for path in sorted(folder.glob("*.json")):
        try:
            users: Mapping[str, Any] = json.loads(path.read_bytes())["user_data"]
            for user, data in users.items():
                labels = np.asarray(data["y"], np.int64)
                writers[user] = (np.asarray(data["x"], np.float32).reshape(len(labels), 1, 28, 28), labels)
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            raise FedslrError(f"{path}: fedslr cannot read this LEAF JSON file ({reason}); create it again") from None
    return writers


def _as_pixels(x: Array) -> Array | None:
    """Return 8-bit images that equal x after a division by 255; None if there are no such images."""
    if not (x.size and x.min() >= 0 and x.max() <= 1):
        return None
    pixels = np.rint(x * 255).astype(np.uint8)
    return pixels if np.array_equal(pixels / np.float32(255), x) else None
