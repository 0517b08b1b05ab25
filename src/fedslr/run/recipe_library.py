"""The recipes that come with fedslr, by name, such as `demo` or `paper/cifar10-dirichlet`."""

from __future__ import annotations

import difflib
import tomllib
from pathlib import Path

from fedslr.core.errors import FedslrError

LIBRARY = Path(__file__).parent / "library"


def shipped() -> dict[str, Path]:
    """Return the files of the recipes that come with fedslr; `demo/compare` is called `demo`."""
    return {
        _name(path.relative_to(LIBRARY).with_suffix("").as_posix()): path for path in sorted(LIBRARY.rglob("*.toml"))
    }


def _name(text: str) -> str:
    return text.removesuffix("/compare")


def about(path: Path) -> tuple[str, str]:
    """Return the command that makes a recipe's experiment, and the first comment, which says what it is for."""
    text = path.read_text("utf-8")
    return "sweep" if "sweep" in tomllib.loads(text) else "compare", text.partition("\n")[0].lstrip("# ")


def find_recipe(text: str) -> Path:
    """Return the file of a recipe that is given by its path, or by its name in the library.

    Raises:
        FedslrError: The text is neither a path nor a name.
    """
    path, named = Path(text), shipped().get(_name(text))
    if path.suffix == ".toml" or (path.exists() and ("/" in text or named is None)):
        return path
    if named is None:
        near = [name for name in shipped() if text in name] or difflib.get_close_matches(text, shipped(), cutoff=0.4)
        hint = f"did you mean {' or '.join(near[:3])}? " if near else ""
        raise FedslrError(
            f"recipe: got '{text}', neither a file nor a recipe of fedslr; {hint}(fedslr recipes lists them)"
        )
    return named
