"""The report's answers: differences with their certainty, trends, clients and costs."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.stats

from fedslr.report.certainty import Estimate, final_trend, paired_difference, separable_best, trend_in_words
from fedslr.report.run_facts import run_facts
from fedslr.report.run_groups import Group
from fedslr.report.saved_runs import Run
from test_report import shown, write_run


def group(values: dict[int, float | None]) -> Group:
    """A group of runs with a figure for every seed."""
    return Group({}, [Run(Path(), {"seed": seed}, {"figure": value}, []) for seed, value in values.items()])


def figure(run: Run) -> float | None:
    value: float | None = run.summary["figure"]
    return value


def test_a_paired_difference_is_students_t():
    ours, theirs = [0.9, 0.8, 0.95, 0.7], [0.85, 0.7, 0.9, 0.72]
    found = paired_difference(group(dict(enumerate(ours))), group(dict(enumerate(theirs))), figure)
    exact = scipy.stats.ttest_rel(ours, theirs).confidence_interval(0.95)
    assert found is not None
    assert (found.low, found.high) == pytest.approx((exact.low, exact.high))


def test_only_seeds_of_both_are_compared():
    found = paired_difference(group({0: 1.0, 1: 5.0, 2: None}), group({0: 0.5, 2: 4.0, 3: 9.0}), figure)
    assert found == Estimate(0.5, math.inf)
    assert paired_difference(group({0: 1.0}), group({1: 1.0}), figure) is None


def test_the_best_is_separable_only_with_seeds_and_a_gap():
    low, high = group({0: 0.5, 1: 0.6, 2: 0.7}), group({0: 0.7, 1: 0.81, 2: 0.9})
    assert separable_best([low, high], figure) is high
    assert separable_best([low, high, group({0: 0.9, 1: 0.5, 2: 0.9})], figure) is None
    assert separable_best([group({0: 0.5}), group({0: 0.9})], figure) is None
    assert separable_best([high], figure) is None
    assert separable_best([high, high._replace()], figure) is None


def test_a_trend_is_least_squares_over_the_last_tenth():
    """With one seed scipy's slope and interval; a constant of a seed changes nothing."""
    rng = np.random.default_rng(0)
    x = np.arange(1, 201)
    line = list(zip(x.tolist(), (80 + 0.02 * x + rng.normal(size=200)).tolist(), strict=True))
    found, known = final_trend([line]), scipy.stats.linregress(*zip(*line[179:], strict=True))
    assert found is not None
    assert (found.value, found.half) == pytest.approx((known.slope, scipy.stats.t.ppf(0.975, 19) * known.stderr))
    both, moved = final_trend([line, line]), final_trend([line, [(n, y - 30) for n, y in line]])
    assert both == pytest.approx(moved)
    assert both is not None
    assert both.value == pytest.approx(found.value)
    assert both.half < found.half
    assert final_trend([line[:2]]) is None
    assert final_trend([]) is None


@pytest.mark.parametrize(
    ("trend", "words"),
    [
        (Estimate(0.05, 0.01), "still rising"),
        (Estimate(-0.05, 0.01), "still falling"),
        (Estimate(0.05, 0.06), "no clear trend"),
        (Estimate(0.0009, 0.0001), "level"),
    ],
)
def test_trends_have_words(trend, words):
    assert trend_in_words(trend, rounds=1000 // 10) == words


# --- the page -------------------------------------------------------------------------------------------------------


def table_of(text: str, title: str) -> list[list[str]]:
    """The rows of the table whose title begins so."""
    table = text[text.index(f'<h3 class="question">{title}') :].partition("</table>")[0]
    rows = [re.findall(r"<t[dh][^>]*>(?:<button[^>]*>)?(.*?)</", row) for row in table.split("<tr")[1:]]
    assert len({len(row) for row in rows}) == 1
    return rows


def write_method(home: Path, name: str, seed: int, accuracy: list[float], **more: Any) -> None:
    """A run of 40 rounds that ends at given accuracies of its clients; `more` changes all records."""
    folder = write_run(home / f"{name}-{seed}", name=name, seed=seed, rounds=40, clients=len(accuracy))
    mean = sum(accuracy) / len(accuracy)
    end = {f"accuracy_{model}": mean for model in ("global", "personal")}
    end |= {f"accuracy_{model}_per_client": accuracy for model in ("global", "personal")}
    lines = [json.loads(line) | end | more for line in (folder / "metrics.jsonl").read_text().splitlines()]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_one_seed_proves_nothing(tmp_path):
    write_method(tmp_path, "fedslr", 0, [0.9, 0.9])
    write_method(tmp_path, "fedavg", 0, [0.5, 0.5])
    text = shown(tmp_path)
    assert "Every method ran with one seed, and one seed proves nothing" in text
    assert "<b>" not in text
    (_, best, other) = table_of(text, "Which method")
    assert best == ["fedslr", "90.00", "1", "–", "–", "highest mean"]
    assert other == ["fedavg", "50.00", "1", "−40.00", "–", "one seed proves nothing"]


def test_bold_is_what_seeds_separate(tmp_path):
    for seed, own in enumerate((0.9, 0.92, 0.91)):
        write_method(tmp_path, "fedslr", seed, [own, own])
        write_method(tmp_path, "ditto", seed, [own - 0.01 * seed, own - 0.01 * seed])
        write_method(tmp_path, "fedavg", seed, [own - 0.2 - 0.001 * seed, own - 0.2 - 0.001 * seed])
    text = shown(tmp_path)
    assert [row[-1] for row in table_of(text, "Which method")[1:]] == ["highest mean", "not separable", "worse"]
    assert "<b>" not in text
    for folder in tmp_path.glob("ditto-*"):
        folder.rename(tmp_path.parent / folder.name)
    text = shown(tmp_path)
    assert len(re.findall(r"<b>91\.00[^<]*</b>", text)) == 3
    assert table_of(text, "Which method")[2][3:5] == ["−20.10", "−20.35 to −19.85"]


def test_every_client_is_compared_with_fedavg_and_with_local_training(tmp_path):
    """Client by client and seed by seed, with the data that it holds."""
    for seed in (0, 1):
        write_method(tmp_path, "fedslr", seed, [0.9, 0.8 - 0.1 * seed])
        write_method(tmp_path, "fedavg", seed, [0.7, 0.75])
        write_method(tmp_path, "local", seed, [0.5, 0.9])
    text = shown(tmp_path)
    head, *rows = table_of(text, "For which clients")
    assert head == [
        *("client", "seed", "training samples", "labels held"),
        *("fedslr %", "fedslr − fedavg", "fedslr − local"),
        *("fedavg %", "fedavg − local", "local %", "local − fedavg"),
    ]
    assert rows[0] == ["0", "0", "4", "2", "90.0", "+20.0", "+40.0", "70.0", "+20.0", "50.0", "−20.0"]
    assert rows[3] == ["1", "1", "4", "2", "70.0", "−5.0", "−20.0", "75.0", "−15.0", "90.0", "+15.0"]
    assert "worse off than with fedavg: fedslr 1 of 4, local 2 of 4. " in text
    assert "worse off than with local: fedslr 2 of 4, fedavg 2 of 4. " in text


def test_the_clients_of_a_large_federation_are_those_served_worst(tmp_path, monkeypatch):
    monkeypatch.setattr("fedslr.report.answer_tables.MAX_CLIENT_ROWS", 2)
    write_method(tmp_path, "fedslr", 0, [0.9, 0.2, 0.8, 0.1])
    text = shown(tmp_path)
    assert [row[0] for row in table_of(text, "For which clients")[1:]] == ["1", "3"]
    assert "The 2 of 4 clients with the lowest accuracy of fedslr." in text


def test_a_run_that_still_rises_says_so(tmp_path):
    write_method(tmp_path, "fedslr", 0, [0.9, 0.9])
    assert table_of(shown(tmp_path), "Has it converged?")[1][-1] == "level"
    metrics = tmp_path / "fedslr-0" / "metrics.jsonl"
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    rising = [line | {"accuracy_personal": 0.5 + 0.001 * line["round"]} for line in lines]
    metrics.write_text("".join(json.dumps(line) + "\n" for line in rising))
    text = shown(tmp_path)
    assert table_of(text, "Has it converged?")[1] == [
        "personal",
        "+1.00 per 10 rounds",
        "+1.00 to +1.00",
        "still rising",
    ]
    assert "Not converged yet: personal (still rising)." in text


def test_costs_are_means_over_seeds(tmp_path):
    for seed in (0, 1):
        folder = write_run(tmp_path / str(seed), seed=seed)
        summary = json.loads((folder / "summary.json").read_text())
        summary |= {
            "bytes": {"down": 1000 + 1000 * seed, "up": 500},
            "seconds": {"train": 2.0, "aggregate": 1.0 + seed},
        }
        (folder / "summary.json").write_text(json.dumps(summary))
    # Summaries of earlier versions lack the size as shipped.
    assert table_of(shown(tmp_path), "What does it cost?")[1] == ["fedslr", "1.5 kB", "500 B", "3.5", "40", "52", "–"]


def test_costs_have_the_size_as_counted_and_as_shipped(tmp_path):
    folder = write_run(tmp_path / "run")
    summary = json.loads((folder / "summary.json").read_text())
    summary["parameters"] |= {"personal": 131.0, "shipped": 97.0}
    (folder / "summary.json").write_text(json.dumps(summary))
    assert table_of(shown(folder), "What does it cost?")[1][-2:] == ["131", "97"]
    assert ("parameters, personal, shipped", "97", "97 % of dense") in run_facts(summary, [])
