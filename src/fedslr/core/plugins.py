"""People's own code by name: `module:function` or `module:Class`, found on the Python path or in the current folder."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import os
import re
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
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
"""Where code lies that is nobody's own; the last two are Python's and PyTorch's, written while they run."""


def is_name(text: str) -> bool:
    """Whether a text has the form module:name."""
    return NAME.fullmatch(text) is not None


def load(where: str, text: str) -> Callable[..., Any]:
    """The function a person names; what goes wrong in it is told as their mistake."""
    return _guarded(where, text, function(where, text))


def function(where: str, text: str) -> Callable[..., Any]:
    """The function a person names, as it is."""
    found = find(where, text)
    if not callable(found):
        raise FedslrError(f"{where}: got '{text}', which is a {type(found).__name__}, expected a function")
    return found  # type: ignore[no-any-return]


def find(where: str, text: str) -> Any:
    """What a person names. Their module runs as any import."""
    module_name, _, name = text.partition(":")
    _look_here()
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        hint = "; leave out .py" if module_name.endswith(".py") else ""
        raise FedslrError(
            f"{where}: got '{text}', but there is no module '{error.name}' here or on the path{hint}"
        ) from None
    except (Exception, SystemExit) as error:
        raise FedslrError(f"{where}: got '{text}', but importing it fails{_told(error)}") from error
    if not hasattr(module, name):
        known = [known for known in dir(module) if not known.startswith("_") and callable(getattr(module, known, None))]
        place = f" ({module.__file__})" if getattr(module, "__file__", None) else ""
        if module_name in sys.stdlib_module_names and Path(f"{module_name}.py").exists():
            raise FedslrError(
                f"{where}: got '{text}', but {module_name}.py is called like a module of Python's own, which hides it; "
                "give it another name"
            )
        raise FedslrError(f"{where}: got '{text}', but '{module_name}'{place} has no '{name}'; {suggest(name, known)}")
    return getattr(module, name)


def is_there(text: str) -> bool:
    """Whether there is a module of that name, without running it."""
    importlib.invalidate_caches()
    try:
        return importlib.util.find_spec(text.partition(":")[0]) is not None
    except (ImportError, ValueError):  # a script, or something in a package that is gone
        return False


_added: list[str] = []
"""The current folder, where the path did not have it."""


def _look_here() -> None:
    """Find modules in the current folder, and no longer in the one that was it before."""
    now = str(Path.cwd())
    while _added and _added[-1] != now:
        with suppress(ValueError):
            sys.path.remove(_added.pop())
    if now not in sys.path:
        sys.path.append(now)
        _added.append(now)


def _guarded(where: str, text: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """The same function, but for what it raises."""

    @functools.wraps(function)
    def call(*args: Any) -> Any:
        with mistakes(where, text, function):
            made = function(*args)
            # The body of a generator runs when it is read.
            return list(made) if isinstance(made, Iterator) else made

    return call


@contextmanager
def mistakes(where: str, text: str, code: Any, passing: tuple[type[BaseException], ...] = ()) -> Iterator[None]:
    """What a person's code raises becomes one line that says where in it that was; some errors are not its own."""
    try:
        yield
    except (Exception, SystemExit) as error:
        if isinstance(error, (FedslrError, *passing)):
            raise
        raise FedslrError(f"{where}: '{text}' fails{_told(error, code)}") from error


def own_mistake(error: BaseException) -> str | None:
    """A line for an error that came by way of a person's own code, such as a model; None for any other."""
    return f"your code fails{_told(error)}" if _own_lines(error) else None


def _own_lines(error: BaseException) -> list[traceback.FrameSummary]:
    return [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(LIBRARIES)]


def _told(error: BaseException, code: Any = None) -> str:
    """The last line of a person's own that led to an error, that of their code if none did, and the error."""
    own = _own_lines(error)
    place = f" in {own[-1].filename}, line {own[-1].lineno}" if own else ""
    if not own and code is not None:
        with suppress(OSError, TypeError):
            place = f" in {inspect.getsourcefile(code)}, line {inspect.getsourcelines(code)[1]}"
    words = " ".join(" ".join([str(error), *(f"({note})" for note in getattr(error, "__notes__", []))]).split())
    return f"{place}: {type(error).__name__}: {words} ({TRACEBACK}=1 shows the traceback)"
