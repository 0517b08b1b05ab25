"""Decoding of image files to arrays of pixels."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path

import numpy as np
from PIL import Image, UnidentifiedImageError

from fedslr.core.errors import FedslrError
from fedslr.core.machine import cores
from fedslr.data.decoded_cache import Array

Size = tuple[int, ...]
"""Height and width."""
Progress = Callable[[int, int], None]
"""A function of the number of decoded images and of all images."""
MODES_BEYOND_8_BITS = ("I", "F")
"""The first letters of Pillow's modes with more than 8 bits per channel; Pillow would clip their values at 255."""

_progress: ContextVar[Progress] = ContextVar("progress", default=lambda done, total: None)


@contextmanager
def decoding_progress(report: Progress) -> Iterator[None]:
    """Call `report` with the progress of all decoding within the block."""
    token = _progress.set(report)
    try:
        yield
    finally:
        _progress.reset(token)


def read_images(paths: Sequence[Path], size: Size | None = None) -> Array:
    """Return many images of one size as one array; without `size`, all must have the size of the first image."""
    size = size or read_image(paths[0]).shape[1:]
    images = np.empty((len(paths), 3, *size), np.uint8)

    def decode(i: int) -> None:
        images[i] = read_image(paths[i], size)

    # Pillow releases the interpreter's lock while it decodes.
    pool = ThreadPoolExecutor(cores())
    try:
        for done, _ in enumerate(pool.map(decode, range(len(paths))), 1):
            _progress.get()(done, len(paths))
    finally:
        pool.shutdown(cancel_futures=True)
    return images


def read_image(path: Path, size: Size | None = None) -> Array:
    """Return an image as (3, height, width), with grey repeated over the colours; refuse a size other than `size`."""
    try:
        # Read the file at once: Pillow's own small reads take a third of the time of a small image.
        with Image.open(io.BytesIO(path.read_bytes())) as image:
            mode, pixels = image.mode, np.asarray(image.convert("RGB"))
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        reason = "unknown format" if isinstance(error, UnidentifiedImageError) else " ".join(str(error).split())
        raise FedslrError(f"{path}: this file is not a readable image ({reason}); replace or delete it") from None
    height, width, _ = pixels.shape
    expected = size or (height, width)
    if mode.startswith(MODES_BEYOND_8_BITS) or (height, width) != expected:
        bits = "more than 8" if mode.startswith(MODES_BEYOND_8_BITS) else "8"
        raise FedslrError(
            f"{path}: this image has {width}×{height} pixels of {bits} bits, expected {expected[1]}×{expected[0]} of 8 "
            "bits; convert all images to one size and to 8 bits per channel"
        )
    return pixels.transpose(2, 0, 1)
