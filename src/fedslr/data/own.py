"""Everybody's own data: folders of images, npz files, LEAF's JSON, and functions.

Nothing here runs code that came with data: arrays are read without pickles, and what a file claims is checked before it
is believed.
"""

from __future__ import annotations

import json
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn.model_selection import train_test_split

from fedslr.data.dataset import Dataset
from fedslr.data.federation import PARTS, Federation
from fedslr.data.images import normalized, read_images
from fedslr.errors import FedslrError

SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff")
LARGE, RATIO = 2**31, 100
"""A file that unpacks to more than this many bytes and to more than so many times its size is taken for a bomb."""

# --- folders of images ----------------------------------------------------------------------------------------------


def image_folder(root: Path) -> Dataset:
    """ROOT/train/CLASS/* and ROOT/test/CLASS/*, or ROOT/CLASS/*, of which a fixed fifth is held out for testing."""
    divided = (root / "train").is_dir() and (root / "test").is_dir()
    names = _classes(root / "train" if divided else root)
    if divided:
        (train, y), (test, y_test) = _list(root / "train", names), _list(root / "test", names)
    else:
        paths, labels = _list(root, names)
        if min(np.bincount(labels, minlength=len(names))) < 2:
            raise FedslrError(f"{root}: every class needs at least two images, one of them to test on")
        parts = train_test_split(np.arange(len(paths)), test_size=0.2, stratify=labels, random_state=0)
        (train, y), (test, y_test) = (([paths[i] for i in part], labels[part]) for part in parts)
    images, test_images = read_images(train), read_images(test)
    if images.shape[1:] != test_images.shape[1:]:
        raise FedslrError(f"{root}: training and test images differ in size")
    mean, deviation = images.mean((0, 2, 3)) / 255, images.std((0, 2, 3)) / 255 + 1e-6
    x, x_test = normalized(images, mean, deviation), normalized(test_images, mean, deviation)
    return Dataset(x, torch.from_numpy(y), x_test, torch.from_numpy(y_test), len(names), 100)


def _classes(folder: Path) -> list[str]:
    names = sorted(p.name for p in folder.iterdir() if p.is_dir()) if folder.is_dir() else []
    if len(names) < 2:
        raise FedslrError(f"data.name: {folder} has {len(names)} class folders, expected at least two")
    return names


def _list(folder: Path, names: Sequence[str]) -> tuple[list[Path], np.ndarray[Any, Any]]:
    paths, labels = [], []
    for label, name in enumerate(names):
        found = sorted(p for p in (folder / name).glob("*") if p.suffix.lower() in SUFFIXES)
        if not found:
            raise FedslrError(f"{folder / name}: has no images ({', '.join(SUFFIXES[:3])}, …)")
        paths += found
        labels += [label] * len(found)
    return paths, np.array(labels)


# --- npz ------------------------------------------------------------------------------------------------------------


def npz(path: Path) -> Federation:
    """A folder with a file per client (x, y, x_test, y_test), or one file that has `client` and `client_test` too."""
    if path.is_dir():
        files = sorted(path.glob("*.npz"))
        if not files:
            raise FedslrError(f"data.name: {path} has no .npz files")
        return _named(Federation.from_arrays([_require(f, read_npz(f), PARTS) for f in files]), path)
    arrays = _require(path, read_npz(path), (*PARTS, "client", "client_test"))
    for who, labels in (("client", "y"), ("client_test", "y_test")):
        if arrays[who].shape != arrays[labels].shape:
            raise FedslrError(
                f"{path}: '{who}' has shape {list(arrays[who].shape)}, '{labels}' {list(arrays[labels].shape)}"
            )
    clients = []
    for one in np.unique(arrays["client"]):
        train, test = arrays["client"] == one, arrays["client_test"] == one
        clients.append({p: arrays[p][test if p.endswith("test") else train] for p in PARTS})
    return _named(Federation.from_arrays(clients), path)


def read_npz(path: Path) -> dict[str, np.ndarray[Any, Any]]:
    """The arrays of an npz file, without pickles and without bombs."""
    try:
        with zipfile.ZipFile(path) as archive:
            unpacked = sum(entry.file_size for entry in archive.infolist())
        if unpacked > LARGE and unpacked > RATIO * path.stat().st_size:
            raise FedslrError(f"{path}: would unpack from {path.stat().st_size} to {unpacked} bytes; refused as a bomb")
        with np.load(path, allow_pickle=False) as loaded:
            return {name: loaded[name] for name in loaded.files}
    except FileNotFoundError:
        raise FedslrError(f"data.name: {path} does not exist") from None
    except FedslrError:
        raise
    except Exception as error:
        reason = "it holds Python objects" if "allow_pickle" in str(error) else str(error).split("\\n")[0]
        raise FedslrError(f"{path}: cannot be read as npz: {reason}") from None


def _require(
    path: Path, arrays: dict[str, np.ndarray[Any, Any]], parts: Sequence[str]
) -> dict[str, np.ndarray[Any, Any]]:
    if missing := [p for p in parts if p not in arrays]:
        raise FedslrError(f"{path}: lacks the array '{missing[0]}'; expected {', '.join(parts)}")
    return {p: arrays[p] for p in parts}


def _named(federation: Federation, path: Path) -> Federation:
    return Federation(federation.clients, federation.num_classes, path.stem)


# --- LEAF -----------------------------------------------------------------------------------------------------------


def femnist(root: Path) -> Federation:
    """Handwritten characters by writer, from LEAF's JSON (Caldas et al., 2018) in ROOT/femnist/train and …/test."""
    folder = root / "femnist"
    train, test = (_leaf(folder / part) for part in ("train", "test"))
    writers = sorted(set(train) & set(test))
    if not writers:
        raise FedslrError(f"data.root: {folder} has no writer with training and test data")
    clients = []
    for writer in writers:
        (x, y), (x_test, y_test) = train[writer], test[writer]
        clients.append({"x": x, "y": y, "x_test": x_test, "y_test": y_test})
    federation = Federation.from_arrays(clients, num_classes=62)
    return Federation(federation.clients, 62, "femnist")


def _leaf(folder: Path) -> dict[str, tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]]:
    files = sorted(folder.glob("*.json"))
    if not files:
        raise FedslrError(f"data.root: {folder} has no .json files; make them with LEAF's femnist preprocessing")
    out: dict[str, tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]] = {}
    for path in files:
        try:
            users: Mapping[str, Any] = json.loads(path.read_bytes())["user_data"]
            for user, data in users.items():
                x = np.asarray(data["x"], np.float32).reshape(-1, 1, 28, 28)
                y = np.asarray(data["y"], np.int64)
                if y.shape != (len(x),) or user in out:
                    raise ValueError(f"writer '{user}' comes twice or has {len(x)} images for {y.size} labels")
                out[user] = (x, y)
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            reason = f"it lacks {error}" if isinstance(error, KeyError) else str(error).split("\\n")[0]
            raise FedslrError(f"{path}: is not LEAF's JSON: {reason}") from None
    return out
