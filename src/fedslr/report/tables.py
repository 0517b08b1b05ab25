"""Tables of finished runs: what varies between them, mean ± deviation over seeds; as text, Markdown, CSV and LaTeX."""

from __future__ import annotations

import contextlib
import csv
import io
import re
import tomllib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean, pstdev, stdev
from typing import Any, NamedTuple

from fedslr.algorithms import naming
from fedslr.channel import model_size
from fedslr.core.errors import FedslrError
from fedslr.core.toml import flatten
from fedslr.report import amount, read_run
from fedslr.storage import statistics
from fedslr.storage.record import read_records

SEEDS = ("seed", "data.seed")
NOT_SHOWN = {
    *SEEDS,
    "device",
    "checkpoint.every",
    "checkpoint.minutes",
    "evaluate.every",
    "diagnostics",
    "store",
}
"""Keys that make no other experiment of a run; they are shown only where they tell runs of one seed apart."""


class Run(NamedTuple):
    folder: Path
    config: dict[str, Any]
    summary: dict[str, Any]
    """What summary.json says; of an unfinished run, as much of it as its rounds tell."""
    records: list[dict[str, Any]]
    recipe: str = ""
    """The text of config.toml."""
    finished: bool = True


class Column(NamedTuple):
    """A figure of a run, how people read it, and its name in a CSV file."""

    title: str
    key: str
    value: Callable[[Run], float | None]
    show: Callable[[float], str]
    spread: Callable[[Run], float | None] | None = None
    """A deviation within a run, shown instead of that over seeds."""

    def figures(self, runs: Sequence[Run]) -> tuple[float | None, float | None]:
        """Mean and deviation over the runs of a group."""
        mean, deviation = mean_and_deviation([self.value(r) for r in runs])
        if self.spread is None:
            return mean, deviation
        return mean, mean_and_deviation([self.spread(r) for r in runs])[0]


class Group(NamedTuple):
    """Runs that differ in their seed only."""

    labels: dict[str, str]
    runs: list[Run]

    @property
    def name(self) -> str:
        """What tells the group from others, in one line."""
        return ", ".join(text if key == "method" else f"{key} {text}" for key, text in self.labels.items())


def find_runs(folders: Sequence[Path], unfinished: bool = False) -> list[Run]:
    """The finished runs in the given folders, or in folders right below them; all runs if that is asked for."""
    runs: dict[Path, Run] = {}
    for folder in folders:
        if not folder.is_dir():
            raise FedslrError(f"{folder}: no such folder")
        homes = _homes(folder)
        deeper = None if homes else next(folder.glob("*/*/config.toml"), None)
        if deeper is not None:
            raise FedslrError(f"{folder}: no run right in it, but there are some in {deeper.parent.parent}; name that")
        if not homes and unfinished:
            raise FedslrError(f"{folder}: no run in it (config.toml is missing)")
        found = [home for home in homes if unfinished or (home / "summary.json").exists()]
        if not found:
            raise FedslrError(f"{folder}: no finished run in it (summary.json is missing)")
        for home in found:
            # The same folder by another path is the same run.
            runs.setdefault(home.resolve(), run_in(home))
    return list(runs.values())


def unfinished(folders: Sequence[Path]) -> list[Run]:
    """The runs in the given folders, or right below them, that have not come to their end, as far as they are whole."""
    found: dict[Path, Run] = {}
    for home in (home for folder in folders for home in _homes(folder)):
        if not (home / "summary.json").exists():
            with contextlib.suppress(FedslrError):
                found.setdefault(home.resolve(), run_in(home))
    return list(found.values())


def _homes(folder: Path) -> list[Path]:
    """The folder of a run, or those right below."""
    return [folder] if (folder / "config.toml").exists() else sorted(p.parent for p in folder.glob("*/config.toml"))


def run_in(home: Path) -> Run:
    """A run from its folder, whether it is finished or not."""
    try:
        recipe = (home / "config.toml").read_text("utf-8")
        config = flatten(tomllib.loads(recipe))
    except (OSError, ValueError) as error:
        raise FedslrError(f"{home / 'config.toml'}: cannot be read: {error}") from None
    if missing := [key for key in ("rounds", "algorithm.name") if key not in config]:
        raise FedslrError(f"{home / 'config.toml'}: {missing[0]} is missing; the file is not that of a run, or damaged")
    if (home / "summary.json").exists():
        summary, records = read_run(home)
        given = {f"given.{name}": str(text) for name, text in dict(summary.get("given", {})).items()}
        return Run(home, config | given, summary, records, recipe)
    records = read_records(home) if (home / "metrics.jsonl").exists() else []
    return Run(home, config, summary_so_far(config, records), records, recipe, finished=False)


def summary_so_far(config: Mapping[str, Any], records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What can be said of a run that has not come to its end; sizes of models are those of its last evaluation."""
    sized = [r for r in records if r.get("parameters_personal")]
    own = sized[-1]["parameters_personal"] if sized else []
    phases = {phase for r in records for phase in r.get("seconds_by", {})}
    return {
        "algorithm": config.get("algorithm.name", "–"),
        "dataset": config.get("data.name", "–"),
        "clients": config.get("data.clients"),
        "rounds": records[-1]["round"] if records else 0,
        "seed": config.get("seed"),
        "rerunnable": True,
        "accuracy": statistics.accuracy(records),
        "parameters": {
            "dense": sized[-1].get("parameters_dense") if sized else None,
            "global": sized[-1].get("parameters_global") if sized else None,
            "personal": fmean(own) if own else None,
            "personal_std": pstdev(own) if own else None,
        },
        "rank": records[-1].get("rank", {}) if records else {},
        "bytes": {way: sum(r[f"bytes_{way}"] for r in records) for way in ("down", "up")},
        "paper_gb": model_size.gigabytes(sum(r["numbers_down"] + r["numbers_up"] for r in records)),
        "seconds": {phase: sum(r.get("seconds_by", {}).get(phase, 0.0) for r in records) for phase in sorted(phases)},
    }


def group(runs: Sequence[Run], beside: Sequence[Run] = ()) -> list[Group]:
    """Runs by what varies between them; hyperparameters only where one method has several values of them.

    No group has a seed twice: a mean over it would say that more was tried than was. Others that were made `beside`
    them are in no group, and what tells them apart is said all the same.
    """
    every = [*runs, *beside]
    keys = sorted({k for r in every for k in r.config} - NOT_SHOWN)
    shown = [k for k in keys if _varies(k, every)]
    shown = shown + _between_equals(runs, shown) or ["algorithm.name"]
    titles = [_title(k, shown) for k in shown]
    titles = [title if titles.count(title) == 1 else key for title, key in zip(titles, shown, strict=True)]
    called = _called(runs)
    groups: dict[tuple[int, str], Group] = {}
    seen: Counter[str] = Counter()
    for run in runs:
        alike = _values(run, [*shown, *SEEDS])
        labels = dict(zip(titles, (_value(run, k, called) for k in shown), strict=True))
        groups.setdefault((seen[alike], _values(run, shown)), Group(labels, [])).runs.append(run)
        seen[alike] += 1
    found = list(groups.values())
    return found if max(seen.values(), default=0) < 2 else list(map(_with_folder, found))


def _called(runs: Sequence[Run]) -> dict[str, str]:
    """What config.toml calls a method to its name; of one's own that has no finished run, to its class."""
    found: dict[str, str] = {}
    for run in sorted(runs, key=lambda r: r.finished):
        name = _text(run.config.get("algorithm.name"))
        found[name] = _text(run.summary["algorithm"]) if run.finished else naming.short(name)
    return found


def _value(run: Run, key: str, called: Mapping[str, str]) -> str:
    """A setting as people read it: a method of one's own by its name, if that tells it from the others."""
    text = _text(run.config.get(key))
    if key != "algorithm.name":
        return text
    return called[text] if list(called.values()).count(called[text]) == 1 else text


def _values(run: Run, keys: Sequence[str]) -> str:
    return repr([run.config.get(k) for k in keys])


def _between_equals(runs: Sequence[Run], shown: Sequence[str]) -> list[str]:
    """The keys that are not shown, but in which runs of one seed differ that would else be the same."""
    equals: dict[str, list[Run]] = {}
    for run in runs:
        equals.setdefault(_values(run, [*shown, *SEEDS]), []).append(run)
    return [k for k in sorted(NOT_SHOWN.difference(SEEDS)) if any(_varies_over(k, some) for some in equals.values())]


def _with_folder(group: Group) -> Group:
    """A group beside others of the very same runs, made again: only where they are tells them apart."""
    where = _text(group.runs[0].folder) if len(group.runs) == 1 else "–"
    return group._replace(labels={**group.labels, "folder": where})


def _varies(key: str, runs: Sequence[Run]) -> bool:
    if key.startswith("algorithm.") and key != "algorithm.name":
        names = {r.config.get("algorithm.name") for r in runs}
        return any(_varies_over(key, [r for r in runs if r.config.get("algorithm.name") == name]) for name in names)
    return _varies_over(key, runs)


def _varies_over(key: str, runs: Sequence[Run]) -> bool:
    return len({repr(r.config.get(key)) for r in runs}) > 1


def _title(key: str, shown: Sequence[str]) -> str:
    """The last part of a key where that is enough to tell it from the others."""
    if key == "algorithm.name":
        return "method"
    first, _, last = key.rpartition(".")
    if last == "name":
        return first
    return last if [k.rpartition(".")[2] for k in shown].count(last) == 1 else key


def _text(value: Any) -> str:
    return "–" if value is None else " ".join(str(value).split())


def columns(pick: str = "last", clients: str = "all") -> list[Column]:
    """The paper's figures: accuracy, fairness, parameters, communication in bytes and in the paper's GB."""
    choices = [c for c, usual in ((pick, "last"), (clients, "all")) if c != usual]
    chosen = f" ({', '.join(choices)})" if choices else ""

    def accuracy(model: str) -> Callable[[Run], float | None]:
        return lambda run: statistics.accuracy(run.records, pick, clients)[model]

    def worst(run: Run) -> float | None:
        return statistics.worst_decile(run.records, pick, clients)

    def percent(value: float) -> str:
        return f"{100 * value:.2f}"

    def count(value: float) -> str:
        return f"{value / 1e6:.2f}M" if value >= 1e6 else f"{value / 1e3:.1f}k"

    def gb(value: float) -> str:
        return f"{value:.2f}" if value >= 1 else f"{value:.4f}"

    return [
        Column(f"global %{chosen}", "accuracy_global", accuracy("global"), percent),
        Column(f"personal %{chosen}", "accuracy_personal", accuracy("personal"), percent),
        Column(f"worst 10th %{chosen}", "worst_decile_personal", worst, percent),
        Column("size global", "parameters_global", lambda r: r.summary["parameters"]["global"] or None, count),
        Column(
            "size personal",
            "parameters_personal",
            lambda r: r.summary["parameters"]["personal"],
            count,
            lambda r: r.summary["parameters"]["personal_std"],
        ),
        Column("down", "bytes_down", lambda r: r.summary["bytes"]["down"], amount),
        Column("up", "bytes_up", lambda r: r.summary["bytes"]["up"], amount),
        Column("GB", "paper_gb", lambda r: r.summary["paper_gb"], gb),
    ]


def mean_and_deviation(values: Sequence[float | None]) -> tuple[float | None, float | None]:
    """Over seeds; the deviation is the sample's, and there is none of a single seed."""
    known = [v for v in values if v is not None]
    if not known:
        return None, None
    return fmean(known), stdev(known) if len(known) > 1 else None


class Table(NamedTuple):
    """Titles and cells, as text."""

    titles: list[str]
    rows: list[list[str]]
    labels: int
    """How many columns, from the left, are labels."""


SPARE = ("up", "down", "worst 10th %", "size global")
"""Columns that a narrow screen does without, the first one first."""


def spare(made: Table, kind: str) -> str | None:
    """What a column of this kind is called in a table, if there is one."""
    return next((title for title in made.titles[made.labels :] if title.startswith(kind)), None)


def without(made: Table, title: str) -> Table:
    """A table less one of its figures."""
    at = made.titles.index(title, made.labels)
    rows = [row[:at] + row[at + 1 :] for row in made.rows]
    return Table(made.titles[:at] + made.titles[at + 1 :], rows, made.labels)


def table(groups: Sequence[Group], figures: Sequence[Column]) -> Table:
    """A row for every group; how many seeds it has is said where some have more than others."""
    seeds = ["seeds"] if len({len(one.runs) for one in groups}) > 1 else []
    rows = []
    for one in groups:
        cells = [*one.labels.values(), *(str(len(one.runs)) for _ in seeds)]
        for column in figures:
            mean, deviation = column.figures(one.runs)
            cells.append("–" if mean is None else column.show(mean) + _spread(column.show, mean, deviation))
        rows.append(cells)
    labels = [*groups[0].labels, *seeds]
    return Table(labels + [c.title for c in figures], rows, len(labels))


def _spread(show: Callable[[float], str], mean: float, deviation: float | None) -> str:
    """± a deviation, unless it is too small to be seen beside the mean as it is written."""
    if not deviation or show(mean + deviation) == show(mean) or deviation < _last_digit(show(mean), mean) / 2:
        return ""
    return f" ± {show(deviation)}"


def _last_digit(text: str, value: float) -> float:
    """What the last digit of a written value counts; 0 where all of them are 0."""
    number = re.match(r"-?\d+\.?(\d*)", text)
    return value / float(number[0]) / 10 ** len(number[1]) if number and float(number[0]) else 0.0


def markdown(made: Table) -> str:
    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(c.replace("\\", "\\\\").replace("|", "\\|") for c in cells) + " |"

    rule = ["---"] * made.labels + ["---:"] * (len(made.titles) - made.labels)
    return "\n".join([line(made.titles), line(rule), *(line(row) for row in made.rows)]) + "\n"


LATEX = {"\\": r"\textbackslash{}", "%": r"\%", "&": r"\&", "_": r"\_", "#": r"\#", "$": r"\$", "{": r"\{", "}": r"\}",
         "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "±": r"$\pm$", "–": "--"}  # fmt: skip


def latex(made: Table) -> str:
    """A booktabs tabular."""

    def line(cells: Sequence[str]) -> str:
        return " & ".join("".join(LATEX.get(ch, ch) for ch in c) for c in cells) + r" \\"

    shape = "l" * made.labels + "r" * (len(made.titles) - made.labels)
    body = [line(row) for row in made.rows]
    head = [rf"\begin{{tabular}}{{{shape}}}", r"\toprule", line(made.titles), r"\midrule"]
    return "\n".join([*head, *body, r"\bottomrule", r"\end{tabular}", ""])


def comma_separated(groups: Sequence[Group], figures: Sequence[Column]) -> str:
    """Plain numbers: a mean, a deviation and the number of seeds for every figure."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    titles = [title for c in figures for title in (c.key, f"{c.key}_std")]
    writer.writerow([*groups[0].labels, "seeds", *titles])
    for one in groups:
        cells: list[Any] = []
        for column in figures:
            cells += ["" if v is None else v for v in column.figures(one.runs)]
        writer.writerow([*one.labels.values(), len(one.runs), *cells])
    return out.getvalue()
