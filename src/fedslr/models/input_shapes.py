"""The check of the input shape that models for images share."""

from __future__ import annotations

from fedslr.core.errors import FedslrError


def require_images(model: str, shape: tuple[int, ...], smallest: int = 1, square: bool = False) -> tuple[int, int, int]:
    """Return channels, height and width of images; refuse other inputs and images that the model cannot take."""
    if len(shape) != 3 or min(shape[1:]) < smallest or (square and shape[1] != shape[2]):
        kind = f"{'square ' if square else ''}images (channels, height, width) of {smallest}×{smallest} or more"
        raise FedslrError(
            f"model.name: '{model}' takes {kind}, but inputs have shape {list(shape)}; choose another model"
        )
    return shape[0], shape[1], shape[2]
