"""Models as files that run without the run they come from."""

from __future__ import annotations

from fedslr.export.model_export import Exported, export
from fedslr.export.safetensors_file import load_exported

__all__ = ["Exported", "export", "load_exported"]
