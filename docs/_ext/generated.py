"""Write pages from the package itself: commands, recipe keys, methods and the public Python names.

A line `% generated: NAME` of a page is replaced by the Markdown of the function of this name; a word after NAME is the
function's argument. The extension also writes llms.txt, a list of all pages for programs that read documentation.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import click
import typer.main
from sphinx.application import Sphinx

import fedslr
from fedslr.algorithms import ALGORITHMS
from fedslr.cli.main import app as command_line
from fedslr.core import schema
from fedslr.run import recipe_text

MARKER = re.compile(r"^% generated: (\w+)(?: ([\w-]+))?$", re.MULTILINE)
RUNNING = (
    *("load", "Federation", "ClientData", "run", "Settings", "Result", "TrainedModels", "compare", "Comparison"),
    *("open_run", "export", "load_exported", "write_report"),
)
WRITING = ("Algorithm", "Problem", "LocalData", "Batch", "Round")
ALIASES = ("Params", "Payload", "ALGORITHMS", "__version__")
ERRORS = ("FedslrError", "WireError", "CheckpointError", "Interrupted")


# --- commands ---------------------------------------------------------------------------------------------------------


def commands() -> str:
    """Return the reference of all commands."""
    root = typer.main.get_command(command_line)
    return "\n".join(_command(root, click.Context(root, info_name="fedslr"), level=1))


def _command(command: click.Command, context: click.Context, level: int) -> Iterator[str]:
    """Yield the section of a command and those of its subcommands."""
    if level > 1:
        yield f"\n{'#' * level} {context.command_path}\n"
    yield f"{_prose(command.help or '')}\n"
    yield f"```text\n{_usage(command, context)}\n```\n"
    yield from _options(command, context)
    for name, inner in getattr(command, "commands", {}).items():
        yield from _command(inner, click.Context(inner, info_name=name, parent=context), level + 1)


def _usage(command: click.Command, context: click.Context) -> str:
    return f"{context.command_path} {' '.join(command.collect_usage_pieces(context))}"


def _options(command: click.Command, context: click.Context) -> Iterator[str]:
    """Yield the table of a command's arguments and options."""
    records = [record for p in command.get_params(context) if (record := p.get_help_record(context))]
    rows = [f"| `{' '.join(name.split())}` | {_cell(text)} |" for name, text in records if name != "--help"]
    if rows:
        yield "\n".join(["| option | meaning |", "|---|---|", *rows]) + "\n"


def _prose(text: str) -> str:
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in text.split("\n\n"))


def _cell(text: str) -> str:
    """Return a text as a cell of a Markdown table."""
    parts = re.split(r"(`[^`]+`)", " ".join(text.split()).replace("|", r"\|"))
    return "".join(p if p.startswith("`") else re.sub(r"([*_<\[])", r"\\\1", p) for p in parts)


# --- recipes and methods ----------------------------------------------------------------------------------------------

METHOD_PAGES = Path(__file__).parents[1] / "methods"


def recipe() -> str:
    """Return a recipe with every key, its default and its meaning."""
    return f"```toml\n{recipe_text.template('fedslr')}```\n"


def methods() -> str:
    """Return the table of methods with their hyperparameters; a name leads to the method's page."""
    rows = ["| name | class | summary | hyperparameters |", "|---|---|---|---|"]
    for name, cls in ALGORITHMS.items():
        summary = (cls.__doc__ or "").splitlines()[0]
        given = ", ".join(f"`{o.name} = {_number(o.default)}`" for o in schema.describe(cls)) or "none"
        rows.append(f"| [`{name}`]({name}.md) | {{py:obj}}`~fedslr.{cls.__name__}` | {_cell(summary)} | {given} |")
    return "\n".join(rows) + "\n"


def method_pages() -> str:
    """Return the table of contents of the pages about methods."""
    pages = sorted(page.stem for page in METHOD_PAGES.glob("*.md") if page.stem != "index")
    return "\n".join(["```{toctree}", ":hidden:", "", *pages, "```", ""]) if pages else ""


def _number(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


# --- results ----------------------------------------------------------------------------------------------------------

RESULTS = Path(__file__).parents[2] / "results"
RESULT_PAGES = {
    "cifar10-dirichlet0.1": "cifar10",
    "tinyimagenet-dirichlet0.1": "tinyimagenet",
    "precision": "precision",
}


def results_overview() -> str:
    """Return the page of all results."""
    return _results(RESULTS)


def results_cifar10() -> str:
    """Return the page of the CIFAR-10 runs."""
    return _results(RESULTS / "cifar10-dirichlet0.1")


def results_tinyimagenet() -> str:
    """Return the page of the TinyImageNet runs."""
    return _results(RESULTS / "tinyimagenet-dirichlet0.1")


def results_precision() -> str:
    """Return the page of the runs in several precisions."""
    return _results(RESULTS / "precision")


def _results(folder: Path) -> str:
    """Return the README of a folder of results without its title; links lead to pages of this site."""
    text = (folder / "README.md").read_text("utf-8").split("\n", 1)[1]
    text = re.sub(r"!\[([^\]]*)\]\(", rf"![\1](../../{folder.relative_to(RESULTS.parent)}/", text)
    for name, page in RESULT_PAGES.items():
        text = re.sub(rf"\((?:\.\./)?{re.escape(name)}/README\.md\)", f"({page}.md)", text)
    # Folders of runs are not part of the site.
    return re.sub(r"(?<!!)\[([^\]]*)\]\((?![\w-]+\.md|http)[^)]*\)", r"`\1`", text)


# --- results of one method --------------------------------------------------------------------------------------------

COLUMNS = {
    "cifar10-iid": "CIFAR-10, IID",
    "cifar10-dirichlet0.1": "CIFAR-10, Dirichlet 0.1",
    "cifar100-iid": "CIFAR-100, IID",
    "cifar100-dirichlet0.1": "CIFAR-100, Dirichlet 0.1",
    "tinyimagenet-iid": "TinyImageNet, IID",
    "tinyimagenet-dirichlet0.1": "TinyImageNet, Dirichlet 0.1",
}
"""The titles of the columns of the paper's Table 1, by their names in results/README.md."""
NO_RUN = "open"
"""The word of results/README.md for a figure of the paper without a run of ours."""
ABOUT_RESULTS = """The table shows the mean test accuracy over all clients. The paper's figures are from its Table 1.
Ours are those of the last evaluation of one run of 1000 rounds, unless stated otherwise. A dash means that there is no
run. [Our runs beside the paper's](../results/overview.md) has the details.
"""


def method_results(name: str) -> str:
    """Return the paper's accuracies of a method beside ours, from the first two tables of results/README.md."""
    figures, runs, *_ = _tables((RESULTS / "README.md").read_text("utf-8"))
    rounds = {(run["column"], run["model"]): run["rounds"] for run in runs if run["method"] == name}
    rows = []
    for row in (row for row in figures if row["method"] == name):
        for column, title in COLUMNS.items():
            ours, paper = row[column].removesuffix(")").split(" (")
            done, *planned = rounds.get((column, row["model"]), "").split(" of ")
            ours = "–" if ours == NO_RUN else f"{ours}, after {done} rounds" if planned else ours
            rows.append(f"| {title} | {row['model']} | {paper} | {ours} |")
    if not rows:
        raise ValueError(f"results/README.md has no figures of {name}; remove the marker from its page")
    return "\n".join([ABOUT_RESULTS, "| data | model | paper % | ours % |", "|---|---|---:|---:|", *rows]) + "\n"


def _tables(markdown: str) -> Iterator[list[dict[str, str]]]:
    """Yield the tables of a page. A row maps the titles of the columns to the row's cells."""
    for table in re.findall(r"(?:^\|.*\|\n)+", markdown, re.MULTILINE):
        titles, _, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines())
        yield [dict(zip(titles, row, strict=True)) for row in rows]


# --- Python -----------------------------------------------------------------------------------------------------------


def python_running() -> str:
    """Return the entries of everything that runs and reads experiments, new public names included."""
    listed = {*RUNNING, *WRITING, *ALIASES, *ERRORS, *(cls.__name__ for cls in ALGORITHMS.values())}
    return _entries((*RUNNING, *sorted(set(fedslr.__all__) - listed)))


def python_methods() -> str:
    """Return the entries of all methods, without the functions that every method has."""
    return _entries((cls.__name__ for cls in ALGORITHMS.values()), members=False)


def python_writing() -> str:
    """Return the entries of the protocol of methods."""
    return _entries(WRITING)


def python_errors() -> str:
    """Return the entries of the errors."""
    return _entries(ERRORS, members=False)


def _entries(names: Iterable[str], members: bool = True) -> str:
    lines = ["```{eval-rst}"]
    for name in names:
        found = getattr(fedslr, name)
        kind = "class" if isinstance(found, type) else "function" if callable(found) else "data"
        lines += [f".. auto{kind}:: fedslr.{name}", *["   :members:"][: members and kind == "class"], ""]
    return "\n".join([*lines, "```", ""])


# --- Sphinx -----------------------------------------------------------------------------------------------------------

PAGES: dict[str, Callable[..., str]] = {
    page.__name__: page
    for page in (
        *(commands, recipe, methods, method_pages, python_running, python_methods, python_writing, python_errors),
        *(results_overview, results_cifar10, results_tinyimagenet, results_precision, method_results),
    )
}


def fill(app: Sphinx, page: str, source: list[str]) -> None:
    """Replace the markers of a page."""
    source[0] = MARKER.sub(lambda found: PAGES[found[1]](*filter(None, found.groups()[1:])), source[0])


def write_llms_txt(app: Sphinx, error: Exception | None) -> None:
    """Write the list of all pages."""
    if error is None:
        pages = sorted(app.env.found_docs)
        lines = [f"- [{app.env.titles[page].astext()}]({page}.html)" for page in pages if page in app.env.titles]
        head = ["# fedslr", "", f"> {(fedslr.__doc__ or '').splitlines()[0]}", "", "## Pages", ""]
        Path(app.outdir, "llms.txt").write_text("\n".join([*head, *lines]) + "\n", "utf-8")


def setup(app: Sphinx) -> dict[str, Any]:
    app.connect("source-read", fill)
    app.connect("build-finished", write_llms_txt)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
