"""Write the tables of `results/` from the run folders in it, beside the paper's figures.

    python benchmarks/against_paper.py            # writes results/README.md and a README.md per recipe
    python benchmarks/against_paper.py --check    # changes nothing; exit code 2 if a table does not match its runs

`results/cifar10-dirichlet0.1/` holds runs of `recipes/paper/cifar10-dirichlet.toml`, and so on. A `notes.md` beside the
runs becomes the end of that folder's README.md. `runs.toml` says which commit made a run, where that is known.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import paper_tables
import report
from fedslr.core.errors import FedslrError
from fedslr.storage.statistics import LATE_EVALUATIONS

RESULTS = Path("results")


@dataclass(frozen=True)
class Run:
    """A run folder under results/; an unfinished run has no summary."""

    folder: Path

    @cached_property
    def config(self) -> dict[str, Any]:
        return tomllib.loads((self.folder / "config.toml").read_text())

    @cached_property
    def summary(self) -> dict[str, Any] | None:
        path = self.folder / "summary.json"
        return json.loads(path.read_text()) if path.exists() else None

    @cached_property
    def records(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.folder / "metrics.jsonl").read_text().splitlines()]

    @property
    def column(self) -> str:
        return self.folder.parent.name

    @property
    def method(self) -> str:
        return str(self.config["algorithm"]["name"])

    @property
    def selection(self) -> str:
        return str(self.config.get("selection", "uniform"))

    @property
    def precision(self) -> str:
        return str(self.config.get("precision", "float32"))

    @property
    def finished(self) -> bool:
        return self.summary is not None

    @property
    def rounds(self) -> str:
        """Return the number of rounds; of an unfinished run, up to its last evaluation."""
        if self.finished:
            return str(len(self.records))
        last = max(r["round"] for r in self.records if "accuracy_personal" in r)
        return f"{last} of {self.config['rounds']}"

    @property
    def commit(self) -> str:
        path = self.folder.parent / "runs.toml"
        known = tomllib.loads(path.read_text()) if path.exists() else {}
        return str(known.get(self.folder.name, {}).get("commit", "–"))

    def accuracies(self, model: str) -> list[float]:
        """Return the mean accuracy over clients in %, evaluation by evaluation."""
        name = f"accuracy_{model}"
        return [100 * r[name] for r in self.records if r.get(name) is not None]

    def last(self, model: str) -> float | None:
        found = self.accuracies(model)
        return found[-1] if found else None

    def late(self, model: str) -> str:
        """Return mean ± standard deviation of the last evaluations."""
        found = self.accuracies(model)[-LATE_EVALUATIONS:]
        return f"{statistics.fmean(found):.2f} ± {statistics.stdev(found):.2f}" if len(found) > 1 else "–"


def beside(ours: float | None, paper: float | None) -> str:
    """Return our figure, and the paper's in brackets."""
    left = "–" if ours is None else f"{ours:.2f}"
    return left if paper is None else f"{left} ({paper:.2f})"


def table(rows: Sequence[dict[str, str]]) -> str:
    """Return a Markdown table."""
    lines = [list(rows[0]), ["---"] * len(rows[0]), *(list(row.values()) for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def runs_row(run: Run) -> dict[str, str]:
    cost = paper_tables.cost(run.method, run.column)
    summary = run.summary or {}
    parameters = {model: n / 1e6 for model, n in summary.get("parameters", {}).items()}
    seconds = [record["seconds"] for record in run.records]
    return {
        "run": run.folder.name,
        "split, seed": f"{run.config['data']['split']}, {run.config['seed']}",
        "cohorts": run.selection,
        "precision": run.precision,
        "rounds": run.rounds,
        "global %": beside(run.last("global"), paper_tables.accuracy(run.method, "global", run.column)),
        "global late %": run.late("global"),
        "personal %": beside(run.last("personal"), paper_tables.accuracy(run.method, "personal", run.column)),
        "personal late %": run.late("personal"),
        "global M": beside(parameters.get("global"), cost and cost.parameters_global),
        "personal M": beside(parameters.get("personal"), cost and cost.parameters_personal),
        "GB": beside(summary.get("paper_gb"), cost and cost.gigabytes),
        "s/round": f"{statistics.median(seconds):.2f} ({statistics.fmean(seconds[1:]):.2f})",
        "minutes": f"{sum(summary['seconds'].values()) / 60:.1f}" if summary else "–",
        "commit": run.commit,
    }


RUNS_TEXT = f"""Every row is a run folder beside this file; `fedslr run FOLDER/config.toml` repeats the run.
The paper's figures (TMLR 2023, Tables 1 and 2) stand in brackets.

- Accuracies are means over all clients at the last evaluation. "Late" is the mean ± standard deviation of the last
  {LATE_EVALUATIONS} evaluations.
- M: millions of parameters. GB: gigabytes sent in all rounds, counted as the paper counts them.
- s/round: the median and, in brackets, the mean without the first round, evaluations included. Minutes: the whole run,
  with compiling, evaluations and checkpoints.
- An unfinished run shows the figures of its last evaluation.
"""


def column_page(folder: Path, runs: Sequence[Run]) -> str:
    """Return the README.md of one column's runs."""
    notes = folder / "notes.md"
    text = f"\n{notes.read_text().strip()}\n" if notes.exists() else ""
    rows = table([runs_row(run) for run in runs])
    return f"# {folder.name}\n\n{RUNS_TEXT}\n{rows}\n{text}\n{WRITTEN_BY} and `notes.md`.\n"


WRITTEN_BY = "`python benchmarks/against_paper.py` writes this page from the run folders"


class Chosen(NamedTuple):
    """The run that a cell of Table 1 shows, and the number of seeds among the method's finished runs."""

    run: Run
    seeds: int


def representative(method: str, model: str, runs: Sequence[Run]) -> Chosen | None:
    """Return the run that a cell of Table 1 shows.

    FedAvg's global model is also Ditto's. A finished run on the recipe's split with the recipe's cohorts and default
    precision comes first.
    """
    methods = {method, "ditto"} if (method, model) == ("fedavg", "global") else {method}
    found = [run for run in runs if run.method in methods and run.accuracies(model)]
    if not found:
        return None

    def preference(run: Run) -> tuple[bool, ...]:
        recipe = run.config["data"]["split"] == "authors"
        return (run.finished, recipe, run.selection == "uniform", run.precision == "bf16", run.config["seed"] == 0)

    return Chosen(max(found, key=preference), len({run.config["seed"] for run in found if run.finished}))


def matrix(runs: Sequence[Run]) -> str:
    """Return Table 1 with our figures: last evaluation in %, the paper's in brackets."""
    rows = []
    for method, model, papers in paper_tables.ROWS:
        row = {"method": method, "model": model}
        for column, paper in zip(paper_tables.COLUMNS, papers, strict=True):
            chosen = representative(method, model, [run for run in runs if run.column == column])
            row[column] = beside(chosen.run.last(model), paper) if chosen else f"open ({paper:.2f})"
        rows.append(row)
    return table(rows)


def details(runs: Sequence[Run]) -> list[dict[str, str]]:
    """Return a row for every cell of Table 1 that we have a run for."""
    rows = []
    for column in paper_tables.COLUMNS:
        for method, model, papers in paper_tables.ROWS:
            chosen = representative(method, model, [run for run in runs if run.column == column])
            if not chosen:
                continue
            paper = papers[paper_tables.COLUMNS.index(column)]
            run, ours = chosen.run, chosen.run.accuracies(model)[-1]
            rows.append(
                {
                    "column": column,
                    "method": method,
                    "model": model,
                    "ours %": f"{ours:.2f}",
                    "late %": run.late(model),
                    "paper %": f"{paper:.2f}",
                    "difference": f"{ours - paper:+.2f}",
                    "rounds": run.rounds,
                    "seeds": str(chosen.seeds),
                    "commit": run.commit,
                    "run": f"[{run.folder.name}]({column}/{run.folder.name})",
                }
            )
    return rows


def overview(runs: Sequence[Run]) -> str:
    """Return results/README.md: Table 1 of the paper, cell by cell."""
    filled = details(runs)
    pages = sorted({run.column for run in runs})
    return f"""# Our runs beside the paper's

The paper's Table 1 (TMLR 2023) has {len(paper_tables.COLUMNS) * len(paper_tables.ROWS)} accuracies.
We have runs for {len(filled)} of them; the others are open. The table shows ours in %, and the paper's in brackets:

{matrix(runs)}

- All runs are of the recipes under `recipes/paper` on one H200. The column "rounds" shows those
  that ended before round 1000.
- Our figure is the last evaluation of one run, as the mean over all clients. "Late" below is the mean ± standard
  deviation of the last {LATE_EVALUATIONS} evaluations. Accuracy moves by one to three points between two evaluations.
- The run shown has the recipe's split (that of the authors' code) if there is such a run, seed 0 and bf16. "Seeds"
  counts the seeds of all finished runs of the method, on any split.
- FedAvg's figures may come from a run of Ditto, whose global model is FedAvg's.

{table(filled)}

Sizes, bytes and seconds stand on a page per column: {", ".join(f"[{page}]({page}/README.md)" for page in pages)}.
The effect of bf16 is measured in [precision](precision/README.md). `benchmarks/*.json` holds timings.

{WRITTEN_BY}.
"""


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--check", action="store_true", help="change nothing, compare the tables with the runs")
    check: bool = options.parse_args().check
    folders = [RESULTS / column for column in paper_tables.COLUMNS if (RESULTS / column).is_dir()]
    runs = [Run(path.parent) for folder in folders for path in sorted(folder.glob("*/metrics.jsonl"))]
    pages = {RESULTS / "README.md": overview(runs)}
    for folder in folders:
        pages[folder / "README.md"] = column_page(folder, [run for run in runs if run.column == folder.name])
    for path, text in pages.items():
        if not check:
            path.write_text(text)
        elif not path.exists() or path.read_text() != text:
            raise FedslrError(f"{path} does not match its run folders: run python benchmarks/against_paper.py")
    print(f"{len(pages)} pages {'match' if check else 'written'}", file=sys.stderr)


if __name__ == "__main__":
    report.call(main)
