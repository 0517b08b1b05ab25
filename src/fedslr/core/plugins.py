"""Import of users' own code as `module:function` or `module:Class`, from the Python path or the current folder."""

from __future__ import annotations

import importlib
import inspect
import os
import re
import sys
import sysconfig
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from fedslr.core.errors import TRACEBACK, FedslrError, suggest

NAME = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
LIBRARIES = (
    *(sysconfig.get_path(kind) + os.sep for kind in ("stdlib", "platstdlib", "purelib", "platlib")),
    str(Path(__file__).parent.parent) + os.sep,
    "<frozen",
    "<string>",
    "<eval_with_key>",
)
"""Beginnings of the paths of code that is not the user's own; Python and PyTorch generate the code of the last two."""


def is_name(text: str) -> bool:
    """Return whether a text has the form module:name."""
    return NAME.fullmatch(text) is not None


def function(where: str, text: str, *arguments: str) -> Callable[..., Any]:
    """Return the function of some arguments that a user names as module:function; `where` is the recipe's key."""
    found = find(where, text)
    if not callable(found) or not _takes(found, arguments):
        kind = f"takes {inspect.signature(found)}" if callable(found) else f"is a {type(found).__name__}"
        raise FedslrError(f"{where}: got '{text}', which {kind}, expected a function ({', '.join(arguments)})")
    return found  # type: ignore[no-any-return]


def _takes(found: Callable[..., Any], arguments: Sequence[str]) -> bool:
    """Return whether a function can be called with some positional arguments; true if it does not say."""
    try:
        inspect.signature(found).bind(*arguments)
    except TypeError:
        return False
    except ValueError:  # Some functions of C have no signature.
        return True
    return True


def find(where: str, text: str) -> Any:
    """Return the object that a user names as module:name; import its module if necessary."""
    module_name, _, name = text.partition(":")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.append(here)
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        hint = "; leave out .py" if module_name.endswith(".py") else "; correct the name"
        raise FedslrError(
            f"{where}: got '{text}', but there is no module '{error.name}' in this folder or on the Python path{hint}"
        ) from None
    except (Exception, SystemExit) as error:
        raise FedslrError(f"{where}: got '{text}', but importing it fails{_describe(error)}") from error
    if not hasattr(module, name):
        raise FedslrError(f"{where}: got '{text}', but {_why_missing(module, name)}")
    return getattr(module, name)


def _why_missing(module: ModuleType, name: str) -> str:
    """Return the reason why a module lacks a name, and advice."""
    own_file = f"{module.__name__}.py"
    if module.__name__ in sys.stdlib_module_names and Path(own_file).exists():
        return f"Python has a module of the same name, which hides {own_file}; rename the file"
    known = [known for known in dir(module) if not known.startswith("_") and callable(getattr(module, known, None))]
    return f"'{module.__name__}' ({getattr(module, '__file__', 'built in')}) has no '{name}'; {suggest(name, known)}"


def own_mistake(error: BaseException) -> str | None:
    """Return one line about an error in a user's own code, such as a model; None for any other error."""
    return f"your code fails{_describe(error)}" if _own_lines(error) else None


def _own_lines(error: BaseException) -> list[traceback.FrameSummary]:
    return [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(LIBRARIES)]


def _describe(error: BaseException) -> str:
    """Return the place in the user's own code that led to an error, and the error."""
    own = _own_lines(error)
    place = f" in {own[-1].filename}, line {own[-1].lineno}" if own else ""
    words = " ".join(" ".join([str(error), *(f"({note})" for note in getattr(error, "__notes__", []))]).split())
    return f"{place}: {type(error).__name__}: {words} ({TRACEBACK}=1 shows the traceback)"
