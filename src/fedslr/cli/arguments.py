"""Arguments and options that several commands take, and the checks of their values."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from fedslr.core.errors import FedslrError, suggest

RecipeName = Annotated[
    str, typer.Argument(metavar="RECIPE", help="A TOML file, or a name that `fedslr recipes` lists, such as demo.")
]
Changes = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Change a key of the recipe, such as lr=0.05 or algorithm.name=ditto. Repeatable.",
    ),
]
Resume = Annotated[bool, typer.Option("--resume", help="Go on with the runs in the folder.")]
Track = Annotated[
    list[str] | None,
    typer.Option(metavar="NAME", help="Also send every round to a tracker: tensorboard, mlflow, wandb. Repeatable."),
]
Pick = Annotated[
    str,
    typer.Option(
        metavar="WHICH", help="Accuracy of the last, the best or the last five evaluations: last, best, late."
    ),
]
Clients = Annotated[
    str, typer.Option(metavar="WHICH", help="Accuracy over all clients or those sampled in that round: all, sampled.")
]
RunFolders = Annotated[
    list[Path], typer.Argument(metavar="FOLDER...", help="Folders of runs, or folders that hold such folders.")
]
Client = Annotated[
    str | None, typer.Option(metavar="CLIENT", help="The client, by its number or by its name in the data.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, for scripts.")]


@contextmanager
def placed(prefix: str) -> Iterator[None]:
    """Put the place of a mistake before an error, such as the option that was wrong."""
    try:
        yield
    except FedslrError as error:
        raise FedslrError(f"{prefix}{error}") from error


def split_words(text: str) -> list[str]:
    """Return the words of a text that commas separate."""
    return [word.strip() for word in text.split(",") if word.strip()]


def require_known(option: str, value: str, known: Collection[str]) -> None:
    """Refuse a value of an option that is not among the known ones."""
    if value not in known:
        raise FedslrError(f"{option}: got '{value}'; {suggest(value, known)}")


def check_accuracy(pick: str, clients: str) -> None:
    """Refuse accuracies that no table has."""
    require_known("--pick", pick, ("last", "best", "late"))
    require_known("--clients", clients, ("all", "sampled"))


def default_folder(recipe: Path) -> Path:
    """Return the folder for the runs of a recipe, which is named after it and after its group."""
    # recipes/demo/x.toml and recipes/paper/x.toml are two experiments.
    group = recipe.parent.name
    return Path("runs") / (f"{group}-{recipe.stem}" if group not in ("", "recipes") else recipe.stem)
