"""Image files to pixels. Run as a program it decodes for another process: see `images.read_images`.

    python decode.py HEIGHT WIDTH < paths > pixels

Paths come separated by zero bytes; every image goes out as 3·HEIGHT·WIDTH bytes, in their order. What is wrong is said
in one line on stderr, and nothing follows. It imports neither torch nor the rest of the package, so it starts at once.
"""

from __future__ import annotations

import io
import os
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, UnidentifiedImageError

Array = np.ndarray[Any, Any]
Size = tuple[int, ...]
"""Height and width."""
UNREADABLE = (OSError, UnidentifiedImageError, SyntaxError, ValueError, Image.DecompressionBombError)


DEEP = ("I", "F")
"""How the names of Pillow's modes begin that have more than 8 bits; it would cut off what is above 255."""


class WrongSize(ValueError):
    """An image that is not as large as the others."""


def read_image(path: Path) -> Array:
    """An image as (3, height, width); grey ones are repeated over the colours."""
    try:
        # All of the file at once: Pillow's own many small reads take a third of the time of a small image.
        with Image.open(io.BytesIO(path.read_bytes())) as image:
            deep = image.mode.startswith(DEEP)
            pixels = np.asarray(image.convert("RGB"))
    except UNREADABLE as error:
        raise ValueError(f"{path}: is no readable image ({_reason(error)})") from None
    if deep:
        raise ValueError(f"{path}: has more than 8 bits per pixel; expected images scaled to 0 to 255 and saved so")
    return pixels.transpose(2, 0, 1)


def image_size(path: Path) -> Size:
    """Height and width, without decoding."""
    try:
        with Image.open(path) as image:
            return image.height, image.width
    except UNREADABLE as error:
        raise ValueError(f"{path}: is no readable image ({_reason(error)})") from None


def read_sized(path: Path, size: Size) -> Array:
    """An image that must have this size."""
    image = read_image(path)
    require_size(path, image.shape[1:], size)
    return image


def require_size(path: Path, found: Size, expected: Size) -> None:
    if found != expected:
        raise WrongSize(f"{path}: is {found[1]}×{found[0]}, expected {expected[1]}×{expected[0]}")


def _reason(error: BaseException) -> str:
    if isinstance(error, UnidentifiedImageError):
        return "of no known format"
    return (error.strerror if isinstance(error, OSError) else None) or str(error).split("\n")[0]


def main(size: Size) -> int:
    # Ctrl-C reaches the whole process group; it is for the process that reads from this one to answer it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    paths = [Path(os.fsdecode(name)) for name in sys.stdin.buffer.read().split(b"\0") if name]
    try:
        for path in paths:
            sys.stdout.buffer.write(read_sized(path, size).tobytes())
        sys.stdout.buffer.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except ValueError as error:
        sys.stdout.buffer.flush()
        sys.stderr.buffer.write(f"{type(error).__name__} {error}".encode(errors="surrogateescape"))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main((int(sys.argv[1]), int(sys.argv[2]))))
