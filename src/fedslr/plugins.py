"""People's own code by name: `module:function`, found on the Python path or in the current folder."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fedslr.errors import FedslrError, suggest

NAME = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")


def is_name(text: str) -> bool:
    """Whether a text has the form module:function."""
    return NAME.fullmatch(text) is not None


def load(where: str, text: str) -> Callable[..., Any]:
    """The function a person names. Their module runs as any import does."""
    module_name, _, function = text.partition(":")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.append(here)
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise FedslrError(f"{where}: got '{text}', but there is no module '{error.name}' here or on the path") from None
    except Exception as error:
        raise FedslrError(f"{where}: got '{text}', but importing it fails: {type(error).__name__}: {error}") from error
    found = getattr(module, function, None)
    if not callable(found):
        known = [name for name, value in vars(module).items() if callable(value) and not name.startswith("_")]
        raise FedslrError(
            f"{where}: got '{text}', but '{module_name}' has no such function; {suggest(function, known)}"
        )
    result: Callable[..., Any] = found
    return result
