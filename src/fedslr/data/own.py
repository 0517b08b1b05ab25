"""Everybody's own data: folders of images, npz files, LEAF's JSON, and functions.

Nothing here runs code that came with data: arrays are read without pickles, and what a file claims is checked before it
is believed.
"""

from __future__ import annotations

import json
import math
import re
import warnings
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from fedslr.core.errors import FedslrError, FedslrWarning
from fedslr.data import cache
from fedslr.data.dataset import Dataset
from fedslr.data.federation import PARTS, Federation
from fedslr.data.images import by_name, pooled, read_images
from fedslr.data.normalization import Normalization

SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff")
LARGE, RATIO = 2**31, 100
"""A file that unpacks to more than this many bytes and to more than so many times its size is taken for a bomb."""

DEPLOYED = "the nodes' own data"
"""What a federation of several machines is trained on."""

# --- folders of images ----------------------------------------------------------------------------------------------


def image_folder(root: Path) -> Dataset:
    """ROOT/train/CLASS/* and ROOT/test/CLASS/*, or ROOT/CLASS/*, of which a fixed fifth is held out for testing."""
    divided = (root / "train").is_dir() and (root / "test").is_dir()
    names = _classes(root / "train" if divided else root)
    if divided:
        for stray in sorted(p for p in (root / "test").iterdir() if not (root / "train" / p.name).exists()):
            if not _hidden(stray) and _images(stray):
                raise FedslrError(f"{stray}: is a class that {root / 'train'} has not")
        (train, y), (test, y_test) = _list(root / "train", names), _list(root / "test", names)
    else:
        paths, labels = _list(root, names)
        if min(np.bincount(labels, minlength=len(names))) < 2:
            raise FedslrError(f"{root}: every class needs at least two images, one of them to test on")
        from sklearn.model_selection import train_test_split

        # Of few images a fifth would not have one of every class.
        held_out = max(math.ceil(0.2 * len(paths)), len(names))
        parts = train_test_split(np.arange(len(paths)), test_size=held_out, stratify=labels, random_state=0)
        (train, y), (test, y_test) = (([paths[i] for i in part], labels[part]) for part in parts)

    def decode() -> cache.Arrays:
        x, x_test = read_images(train), read_images(test)
        if x.shape[1:] != x_test.shape[1:]:
            raise FedslrError(f"{root}: training and test images differ in size")
        mean, deviation = channel_statistics(x)
        return {"x": x, "y": y, "x_test": x_test, "y_test": y_test, "mean": mean, "deviation": deviation}

    # Beside the folder, not in it: there every folder is a class.
    home = root.resolve()
    arrays = cache.kept(home.parent, f"imagefolder-{home.name}", root, [*train, *test], decode)
    mean, deviation = (tuple(arrays[name].tolist()) for name in ("mean", "deviation"))
    return pooled(arrays, len(names), Normalization(mean, deviation), names=names)


def channel_statistics(images: np.ndarray[Any, Any]) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Mean and deviation of every channel's pixels as numbers from 0 to 1, from counts of the 256 values there are."""
    counts = np.zeros((images.shape[1], 256))
    for some in np.array_split(images, len(images) // 1000 + 1):
        counts += [np.bincount(some[:, channel].ravel(), minlength=256) for channel in range(len(counts))]
    values, shares = np.arange(256), counts / counts[0].sum()
    mean = (counts @ values) / counts[0].sum()
    deviation = np.sqrt((shares * (values - mean[:, None]) ** 2).sum(1))
    return mean / 255, deviation / 255 + 1e-6


def _classes(folder: Path) -> list[str]:
    if not folder.is_dir():
        raise FedslrError(f"data.name: {folder} is no folder; expected one with a folder of images for every class")
    names = sorted(p.name for p in folder.iterdir() if p.is_dir() and not _hidden(p))
    if len(names) < 2:
        lacks = "; with train/ there must be test/" if names == ["train"] else ""
        raise FedslrError(f"data.name: {folder} has {len(names)} class folders, expected at least two{lacks}")
    return names


def _hidden(path: Path) -> bool:
    """What tools leave among the data: .git, .ipynb_checkpoints, macOS' ._cat.png."""
    return path.name.startswith(".")


def _images(folder: Path) -> list[Path]:
    return _sorted_out(folder)[0]


def _sorted_out(folder: Path) -> tuple[list[Path], list[Path]]:
    """The images of a folder, and what else is in it."""
    found: tuple[list[Path], list[Path]] = ([], [])
    for path in by_name(p for p in folder.glob("*") if not _hidden(p)):
        found[path.suffix.lower() not in SUFFIXES].append(path)
    return found


def _tell_others(found: Sequence[Path]) -> None:
    """Whoever lays images where they are not looked for, or has some of another format, misses them here."""
    if found:
        others = f" and {len(found) - 1} other{'s' if len(found) > 2 else ''} are" if len(found) > 1 else " is"
        no_images = f"no image{'s' if len(found) > 1 else ''} ({', '.join(SUFFIXES)})"
        warnings.warn(f"{found[0]}{others} {no_images} and left out", FedslrWarning, stacklevel=4)


def _list(folder: Path, names: Sequence[str]) -> tuple[list[Path], np.ndarray[Any, Any]]:
    paths: list[Path] = []
    others: list[Path] = []
    labels: list[int] = []
    for label, name in enumerate(names):
        found, rest = _sorted_out(folder / name)
        if not found:
            raise FedslrError(f"{folder / name}: has no images ({', '.join(SUFFIXES[:3])}, …)")
        paths += found
        labels += [label] * len(found)
        others += rest
    _tell_others(others)
    return paths, np.array(labels)


# --- npz ------------------------------------------------------------------------------------------------------------


def npz(path: Path) -> Federation:
    """A folder with a file per client (x, y, x_test, y_test), or one file that has `client` and `client_test` too."""
    if path.is_dir():
        files = sorted(path.glob("*.npz"), key=_as_counted)
        if not files:
            raise FedslrError(f"data.name: {path} has no .npz files")
        clients = [_require(f, read_npz(f), PARTS) for f in files]
        return _federation(clients, path, [f.name for f in files], [f.stem for f in files])
    arrays = _require(path, read_npz(path), (*PARTS, "client", "client_test"))
    for part in PARTS:
        who = "client_test" if part.endswith("test") else "client"
        if arrays[who].ndim != 1 or arrays[part].shape[:1] != arrays[who].shape:
            shapes = f"'{who}' has shape {list(arrays[who].shape)}, '{part}' {list(arrays[part].shape)}"
            raise FedslrError(f"{path}: {shapes}; expected one entry for every sample")
    if unknown := set(arrays["client_test"].tolist()) - set(arrays["client"].tolist()):
        raise FedslrError(f"{path}: 'client_test' has {min(unknown)!r}, who has no training data in 'client'")
    clients, names = [], np.unique(arrays["client"])
    for one in names:
        train, test = arrays["client"] == one, arrays["client_test"] == one
        clients.append({p: arrays[p][test if p.endswith("test") else train] for p in PARTS})
    called = [f"client {name!r}" for name in names.tolist()]
    return _federation(clients, path, called, list(map(str, names.tolist())))


def _federation(
    clients: Sequence[Mapping[str, Any]], path: Path, names: Sequence[str], kept: Sequence[str]
) -> Federation:
    """Clients from a path. People know their files and names; which client one becomes is ours."""

    def told(text: object) -> str:
        text = re.sub(r"\bclient (\d+)\b", lambda found: names[int(found[1])], str(text))
        return f"{path}: " + re.sub(", or num_classes( if that is meant)?$", "", text)  # which no recipe gives

    try:
        with warnings.catch_warnings(record=True) as heard:
            warnings.simplefilter("always")
            made = _named(Federation.from_arrays(clients, client_names=kept), path)
    except FedslrError as error:
        raise FedslrError(told(error)) from None
    for warning in heard:
        warnings.warn(told(warning.message), warning.category, stacklevel=4)
    return made


def _as_counted(path: Path) -> list[tuple[str, int]]:
    """A key by which 2.npz comes before 10.npz."""
    return [(words, int(number or 0)) for words, number in re.findall(r"(\D*)(\d*)", path.name)]


def one_client(path: Path, num_classes: int) -> Federation:
    """A single client: an npz file with x, y, x_test and y_test, or a folder that holds one."""
    files = sorted(path.glob("*.npz")) if path.is_dir() else [path]
    if len(files) != 1:
        raise FedslrError(f"data: {path} has {len(files)} .npz files, expected one with {', '.join(PARTS)}")
    arrays = _require(files[0], read_npz(files[0]), PARTS)
    try:
        return _named(Federation.from_arrays([arrays], num_classes), path)
    except FedslrError as error:
        # It is number 0 here, and may be any in its federation.
        raise FedslrError(str(error).replace("client 0:", f"{files[0]}:")) from None


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
        here = "" if path.is_absolute() else f" in {Path.cwd()}, where this was started"
        raise FedslrError(f"{path}: does not exist{here}") from None
    except FedslrError:
        raise
    except Exception as error:
        reason = "it holds Python objects" if "allow_pickle" in str(error) else str(error).split("\\n")[0]
        raise FedslrError(f"{path}: cannot be read as npz (arrays that numpy saved): {reason}") from None


def _require(
    path: Path, arrays: dict[str, np.ndarray[Any, Any]], parts: Sequence[str]
) -> dict[str, np.ndarray[Any, Any]]:
    if missing := [p for p in parts if p not in arrays]:
        raise FedslrError(f"{path}: lacks the array '{missing[0]}'; expected {', '.join(parts)}")
    return {p: arrays[p] for p in parts}


def _named(federation: Federation, path: Path) -> Federation:
    return replace(federation, name=path.stem)


# --- LEAF -----------------------------------------------------------------------------------------------------------


def femnist(root: Path) -> Federation:
    """Handwritten characters by writer, from LEAF's JSON (Caldas et al., 2018) in ROOT/femnist/train and …/test."""
    folder = root / "femnist"
    files = [path for part in ("train", "test") for path in _json_files(folder / part)]
    arrays = cache.kept(root, "femnist", folder, files, lambda: _read_femnist(folder))
    ends, ends_test = (np.cumsum(arrays[sizes])[:-1] for sizes in ("sizes", "sizes_test"))
    parts = [np.split(arrays[part], ends_test if part.endswith("test") else ends) for part in PARTS]
    clients = [dict(zip(PARTS, mine, strict=True)) for mine in zip(*parts, strict=True)]
    return Federation.from_arrays(clients, num_classes=62, name="femnist")


def _read_femnist(folder: Path) -> cache.Arrays:
    """All writers one after another, and how many samples each has."""
    train, test = (_leaf(folder / part) for part in ("train", "test"))
    writers = sorted(set(train) & set(test))
    if not writers:
        raise FedslrError(f"data.root: {folder} has no writer with training and test data")
    arrays: cache.Arrays = {}
    for suffix, part in (("", train), ("_test", test)):
        x, y = zip(*(part[writer] for writer in writers), strict=True)
        arrays |= {f"x{suffix}": np.concatenate(x), f"y{suffix}": np.concatenate(y)}
        arrays[f"sizes{suffix}"] = np.array([len(labels) for labels in y])
    x, x_test = _pixels(arrays["x"]), _pixels(arrays["x_test"])
    return arrays if x is None or x_test is None else {**arrays, "x": x, "x_test": x_test}


def _pixels(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any] | None:
    """The 8-bit image whose 255th parts these numbers are; None if there is none."""
    if not (x.size and x.min() >= 0 and x.max() <= 1):
        return None
    pixels = np.rint(x * 255).astype(np.uint8)
    return pixels if np.array_equal(pixels / np.float32(255), x) else None


def _json_files(folder: Path) -> list[Path]:
    files = sorted(folder.glob("*.json"))
    if not files:
        raise FedslrError(f"data.root: {folder} has no .json files; make them with LEAF's femnist preprocessing")
    return files


def _leaf(folder: Path) -> dict[str, tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]]:
    out: dict[str, tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]] = {}
    for path in _json_files(folder):
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
