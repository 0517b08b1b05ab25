"""The version of the installed package."""

from __future__ import annotations

from importlib import metadata

try:
    __version__ = metadata.version("fedslr")
except metadata.PackageNotFoundError:  # run from a source tree
    __version__ = "0+source"
