"""Models that ship: files that run without the run they come from, each no larger or slower than it has to be."""

from __future__ import annotations

from fedslr.export.export import Exported, export
from fedslr.export.files import load_exported

__all__ = ["Exported", "export", "load_exported"]
