"""report.html: one file that is right for every run, whatever its names, its length and its end."""

from __future__ import annotations

import base64
import hashlib
import itertools
import json
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from markupsafe import escape
from torch import nn

import fedslr
from conftest import make_federation, mlp
from fedslr.data.client_data import ClientData
from fedslr.report import (
    accuracy_sections,
    colours,
    curves,
    html_report,
    label_section,
    line_chart,
    model_size_section,
    number_text,
    report_view,
    result_tables,
    svg_axes,
    violin_chart,
)
from fedslr.report.run_facts import run_facts
from fedslr.report.run_groups import group_runs
from fedslr.report.saved_runs import find_runs
from fedslr.run import execution
from fedslr.storage.statistics import ACCURACY

ROOT = Path(__file__).parent.parent.parent
HOSTILE = "<script>alert(1)</script>\"'><img src=x onerror=alert(2)>"
VOID = {"meta", "input", "br", "img", "link", "hr"}
NO_NUMBER = re.compile(r"\b(nan|NaN|None|inf|undefined)\b")


class Checked(HTMLParser):
    """A page whose elements are all closed, in order; counts them."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: dict[str, int] = {}
        self.attributes: list[tuple[str, str, str | None]] = []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen[tag] = self.seen.get(tag, 0) + 1
        self.attributes += [(tag, key, value) for key, value in attrs]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def checked(text: str) -> Checked:
    """What holds for every report: well formed, from one place, no number that is none."""
    found = Checked(text)
    assert not [a for a in found.attributes if a[1] in ("src", "href", "srcset", "style") or a[1].startswith("on")]
    assert "http://" not in text.replace("http://www.w3.org/2000/svg", "")
    assert "https://" not in text
    assert found.seen["script"] == found.seen["style"] == 1
    body = re.sub(r"<(script|style|pre).*?</\1>", "", text, flags=re.DOTALL)
    assert not NO_NUMBER.search(body), NO_NUMBER.search(body)
    return found


def write_run(
    folder: Path, rounds: int = 4, clients: int = 5, planned: int | None = None, seed: int = 0, **config: Any
) -> Path:
    """A run folder as a run leaves it; unfinished if more rounds were planned."""
    rng = np.random.default_rng(seed)
    name = config.pop("name", "fedslr")
    folder.mkdir(parents=True)
    lines = [f"rounds = {planned or rounds}", f"seed = {seed}", *(f"{k} = {json.dumps(v)}" for k, v in config.items())]
    lines += [f"algorithm.name = {json.dumps(name)}", 'data.name = "digits"', f"data.clients = {clients}"]
    (folder / "config.toml").write_text("\n".join(lines))
    records = []
    for n in range(1, rounds + 1):
        line: dict[str, Any] = {"round": n, "clients": [0, 1], "bytes_down": 900 // n + 100, "bytes_up": 1000}
        line |= {"numbers_down": 200, "numbers_up": 250, "seconds": 0.5, "seconds_by": {"train": 0.4, "aggregate": 0.1}}
        line |= {"lr": 0.1, "rank": {"a.weight": max(1, 8 - n), "b.weight": 3} if name == "fedslr" else {}}
        if n % 2 == 0 or n == planned:
            own = (0.5 + 0.4 * rng.random(clients)).tolist()
            shared = own if name == "fedavg" else [x - 0.1 for x in own]
            line |= {"accuracy_personal_per_client": own, "accuracy_global_per_client": shared}
            line |= {"accuracy_personal": sum(own) / clients, "accuracy_global": sum(shared) / clients}
            line |= {"parameters_global": 40, "parameters_personal": [50 + i for i in range(clients)]}
            line["parameters_dense"] = 100
        records.append(line)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    (folder / "labels.json").write_text(json.dumps({"counts": [[3, 0, 1]] * clients}))
    if planned is None:
        summary: dict[str, Any] = {"algorithm": name, "dataset": "digits", "clients": clients, "rounds": rounds}
        summary |= {"seed": seed, "rerunnable": True, "fairness": {}, "paper_gb": 0.1, "seconds": {"train": 1.0}}
        summary |= {"accuracy": fedslr.storage.statistics.mean_over_clients(records), "rank": records[-1]["rank"]}
        summary |= {"parameters": {"dense": 100, "global": 40, "personal": 52.0, "personal_std": 1.4}}
        summary |= {"bytes": {way: sum(r[f"bytes_{way}"] for r in records) for way in ("down", "up")}}
        (folder / "summary.json").write_text(json.dumps(summary))
    return folder


def shown(*folders: Path) -> str:
    return html_report.report_page(find_runs(folders, unfinished=True))


def figure_of(text: str, title: str) -> str:
    """The figure whose title begins so."""
    return text[text.index(f"<h3>{title}") :].partition("</figure>")[0]


def charts_of(text: str) -> list[str]:
    return re.findall(r"<h3>(.*?)</h3>", text)


def test_a_run_ends_in_a_report(tmp_path):
    fedslr.run(fedslr.FedSLR(), make_federation([6, 7]), mlp(), rounds=3, evaluate_every=1, out=tmp_path)
    text = (tmp_path / "report.html").read_text()
    found = checked(text)
    assert found.seen["svg"] == len(charts_of(text))
    assert charts_of(text) == [
        "Accuracy over rounds",
        "Accuracy over bytes sent",
        "Accuracy of every client",
        "Size of the models",
        "Sparsity of the personal parts",
        "Rank of every layer over rounds",
        "Bytes per round",
        "Seconds per round",
        "Labels of every client",
    ]
    assert "This run was given something in Python that a recipe has no name for" in text
    assert "accuracy, personal models" in text


def test_a_report_of_one_round(tmp_path):
    fedslr.run(fedslr.FedAvg(), make_federation([6, 7]), mlp(), rounds=1, out=tmp_path)
    text = (tmp_path / "report.html").read_text()
    checked(text)
    assert "Accuracy over rounds" in charts_of(text)
    assert "1 round," in text


def test_hostile_names_are_only_text(tmp_path):
    write_run(tmp_path / "a", name=HOSTILE, note=HOSTILE)
    write_run(tmp_path / "b", name="fedavg", note="plain")
    text = shown(tmp_path)
    found = checked(text)
    assert "img" not in found.seen
    assert "<script>alert" not in text
    assert str(escape(HOSTILE)) in text
    named = [value for _, key, value in found.attributes if key == "data-name"]
    assert any(HOSTILE in str(value) for value in named)


def test_a_hostile_dataset_of_a_real_run(tmp_path):
    clients = make_federation([6, 7]).clients
    arrays = [{"x": c.x, "y": c.y, "x_test": c.x_test, "y_test": c.y_test} for c in clients]
    federation = fedslr.Federation.from_arrays(arrays, name=HOSTILE)
    fedslr.run(fedslr.FedSLR(), federation, mlp(), rounds=1, out=tmp_path)
    text = (tmp_path / "report.html").read_text()
    assert "img" not in checked(text).seen
    assert "&lt;script&gt;alert(1)" in text


def test_a_run_that_failed_says_so(tmp_path):
    """Whatever ended it, what it did until then is in the report."""

    def fail(record: fedslr.storage.record.Record) -> None:
        if record.round == 3:
            raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        fedslr.run(fedslr.FedAvg(), make_federation([6, 7]), mlp(), rounds=9, on_round=fail, out=tmp_path)
    text = (tmp_path / "report.html").read_text()
    checked(text)
    assert "not finished: 3 of 9 rounds are there" in text


def test_a_run_that_is_half_way_says_so(tmp_path):
    text = shown(write_run(tmp_path / "half", rounds=4, planned=9))
    checked(text)
    assert "not finished: 4 of 9 rounds are there" in text
    assert "Accuracy over rounds" in charts_of(text)


def test_an_interrupted_run_has_a_report(tmp_path):
    options: dict[str, Any] = {"rounds": 5, "evaluate_every": 1, "out": tmp_path}
    with pytest.raises(fedslr.core.errors.Interrupted):
        fedslr.run(fedslr.FedAvg(), make_federation([6, 7]), mlp(), should_stop=lambda: True, **options)
    assert "not finished: 1 of 5 rounds are there" in (tmp_path / "report.html").read_text()
    fedslr.run(fedslr.FedAvg(), make_federation([6, 7]), mlp(), resume=True, **options)
    assert "not finished" not in (tmp_path / "report.html").read_text()


def test_a_run_that_was_killed_before_its_summary_gets_a_new_report(tmp_path):
    options: dict[str, Any] = {"rounds": 2, "out": tmp_path}
    fedslr.run(fedslr.FedAvg(), make_federation([6, 7]), mlp(), **options)
    (tmp_path / "summary.json").unlink()
    (tmp_path / "report.html").write_text("not finished")
    fedslr.run(fedslr.FedAvg(), make_federation([6, 7]), mlp(), resume=True, **options)
    assert (tmp_path / "summary.json").exists()
    assert "not finished" not in (tmp_path / "report.html").read_text()


def test_nothing_evaluated_yet(tmp_path):
    text = shown(write_run(tmp_path / "young", rounds=1, planned=9))
    checked(text)
    assert "Nothing has been evaluated yet" in text
    assert "Accuracy over rounds" not in charts_of(text)
    assert "Bytes per round" in charts_of(text)


def test_no_round_yet(tmp_path):
    folder = write_run(tmp_path / "new", rounds=1, planned=9)
    (folder / "metrics.jsonl").write_text('{"round": 1, "clie')
    text = shown(folder)
    checked(text)
    assert "0 of 9 rounds" in text


def test_what_is_no_number_is_left_out(tmp_path):
    folder = write_run(tmp_path / "odd")
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    broken = json.loads(lines[1]) | {"accuracy_personal": float("nan"), "seconds": float("inf")}
    (folder / "metrics.jsonl").write_text("\n".join([lines[0], json.dumps(broken), *lines[2:]]))
    checked(shown(folder))


DAMAGES: dict[str, tuple[Any, str]] = {
    "a line in the middle": (lambda lines: [lines[0], b'{"round": 2, "cli\n', *lines[2:]], "line 2 is damaged"),
    "a line is gone": (lambda lines: [lines[0], *lines[2:]], "line 2 is damaged or missing"),
    "the last line is gone": (lambda lines: lines[:-1], "line 4 is damaged or missing"),
    "the last line was cut short": (lambda lines: [*lines[:-1], lines[-1][:30]], "line 4 is damaged"),
    "nothing is left": (lambda lines: [], "line 1 is damaged or missing"),
    "no text": (lambda lines: [*lines[:2], b"\xff\xfe" + lines[2], lines[3]], "line 3 is damaged"),
    "a key is gone": (
        lambda lines: [lines[0], lines[1].replace(b"bytes_up", b"bites_up"), *lines[2:]],
        "line 2 is damaged",
    ),
    "no record": (lambda lines: [b"[1]\n", *lines[1:]], "line 1 is damaged"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_metrics_are_told_in_one_line(damage, command, tmp_path):
    """Tables and figures of what is left would be those of no run."""
    metrics = write_run(tmp_path / "run") / "metrics.jsonl"
    change, says = DAMAGES[damage]
    metrics.write_bytes(b"".join(change(metrics.read_bytes().splitlines(keepends=True))))
    for call in (["show"], ["report"], ["figures", "--out", tmp_path / "figures"], ["watch", "--port", "0"]):
        code, _, err = command(call[0], tmp_path / "run", *call[1:])
        assert code == 2, err
        assert err.startswith(f"error: {metrics}: ")
        assert says in err
        assert len(err.splitlines()) == 1


def test_only_the_last_line_of_an_unfinished_run_may_be_cut_short(tmp_path):
    metrics = write_run(tmp_path / "run", planned=9) / "metrics.jsonl"
    lines = metrics.read_bytes().splitlines(keepends=True)
    metrics.write_bytes(b"".join([*lines, lines[0][:30]]))
    assert "4 of 9 rounds" in shown(tmp_path / "run")
    for number, damaged in ((3, [*lines[:2], b"{}\n", lines[3]]), (5, [*lines, b"{}\n"])):
        metrics.write_bytes(b"".join(damaged))
        with pytest.raises(fedslr.FedslrError, match=f"line {number} is damaged"):
            shown(tmp_path / "run")


def test_an_unfinished_run_says_how_large_its_models_are(tmp_path):
    text = " ".join(shown(write_run(tmp_path / "a", planned=9)).split())
    assert "size of the global model" in text
    assert "40 of 100 parameters" in text
    assert "zeros in the personal parts" in text


def test_a_mean_says_over_how_many_clients_it_is(tmp_path):
    first, second = make_federation([9, 7]).clients
    untested = ClientData(second.x, second.y, second.x_test[:0], second.y_test[:0])
    for clients, says in (([first, second], "mean over clients"), ([first, untested], "mean over 1 of 2 clients")):
        result = fedslr.run(fedslr.FedAvg(), fedslr.Federation(clients, 3), mlp(), rounds=1)
        assert [row[2] for row in run_facts(result.summary, result.records)[:2]] == [says] * 2


def test_who_is_not_compared_with_fedavg_is_named(tmp_path):
    federation = make_federation([9, 7])
    for method, rounds in ((fedslr.FedAvg(), 2), (fedslr.Ditto(), 2), (fedslr.Local(), 3)):
        fedslr.run(method, federation, mlp(), rounds=rounds, out=tmp_path / method.name)
    html_report.write_report([tmp_path], tmp_path / "report.html")
    text = (tmp_path / "report.html").read_text("utf-8")
    assert re.search("Left out, for want of a run of FedAvg with the same data, settings and seed: local[^.]*\\.", text)


def test_what_was_given_in_python_tells_runs_apart(tmp_path):
    """Two seeds of one model are a row, two models are two, though config.toml calls them alike."""
    federation = make_federation([9, 7])

    def narrow():
        return nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 3))

    for name, seed, model in (("a", 0, narrow()), ("b", 1, narrow()), ("c", 2, mlp())):
        fedslr.run(fedslr.FedAvg(), federation, model, rounds=1, seed=seed, out=tmp_path / name)
    groups = group_runs(find_runs([tmp_path]))
    assert [[run.folder.name for run in group.runs] for group in groups] == [["a", "b"], ["c"]]
    assert all(re.fullmatch(r"Sequential [0-9a-f]{8}", group.labels["model"]) for group in groups)


def test_unfinished_seeds_do_not_count_beside_finished_ones(tmp_path):
    write_run(tmp_path / "a", seed=0)
    write_run(tmp_path / "b", seed=1, rounds=2, planned=4)
    runs = find_runs([tmp_path], unfinished=True)
    (group,) = curves.ranked_groups(runs)
    assert [r.folder.name for r in group.runs] == ["a"]
    text = html_report.report_page(runs)
    checked(text)
    assert "b: not finished: 2 of 4 rounds are there" in text
    assert "It counts neither in the curves nor in the table" in text


@pytest.mark.parametrize("methods", [1, 2, 11, 17])
def test_one_method_or_many(methods, tmp_path):
    names = list(fedslr.ALGORITHMS)[:methods]
    for name in names:
        write_run(tmp_path / name, name=name)
    text = shown(tmp_path)
    found = checked(text)
    boxes = [value for tag, key, value in found.attributes if tag == "input" and key == "id"]
    assert boxes == ([f"g{i}" for i in range(methods)] if methods > 1 else [])
    for box in boxes:
        assert f"body:has(#{box}:not(:checked)) .{box} {{ display: none; }}" in text
    assert ("Accuracy relative to FedAvg" in charts_of(text)) == ("fedavg" in names and methods > 1)


def test_long_names(tmp_path):
    write_run(tmp_path / "a", name="x" * 300)
    write_run(tmp_path / "b", name="y z " * 80)
    text = shown(tmp_path)
    checked(text)
    assert "x" * 13 + "…" + "x" * 13 + "," in text


def test_names_of_rows_go_on_two_lines():
    assert violin_chart.in_two("fedslr, personal") == ["fedslr, personal"]
    assert violin_chart.in_two("rank_penalty 0.001, epochs 1, global") == ["rank_penalty 0.001,", "epochs 1, global"]
    assert violin_chart.in_two("x" * 30) == ["x" * 30]


def test_rows_of_a_sweep_over_two_keys_are_told_apart(tmp_path):
    for n, (lr, size) in enumerate((a, b) for a in (0.001, 0.005) for b in (1, 2)):
        write_run(tmp_path / str(n), lr=lr, personal_epochs=size)
    chart = figure_of(shown(tmp_path), "Accuracy of every").partition("</svg>")[0]
    rows = [re.findall(r">([^<]*)</text>", row) for row in chart.split("<g ")[1:]]
    assert rows[0][:2] == ["lr 0.001,", "personal_epochs 1, personal"]
    assert len(set(map(str, rows))) == len(rows) == 8


@pytest.mark.parametrize("wanted", [[5.0], [3, 3, 3], [0, 0, 100, 99, 98], [50, 49, 51, 48], list(range(40))])
def test_names_set_apart_do_not_overlap(wanted):
    """They keep their order and their room; those that are apart already stay."""
    placed = line_chart.set_apart(wanted, 13, 0, 100)
    gap = min(13, 100 / max(1, len(wanted) - 1))
    assert all(-1e-9 <= place <= 100 + 1e-9 for place in placed)
    assert all(b - a >= gap - 1e-9 for a, b in itertools.pairwise(sorted(placed)))
    assert [i for _, i in sorted(zip(placed, range(99), strict=False))] == sorted(
        range(len(wanted)), key=wanted.__getitem__
    )
    assert line_chart.set_apart([10, 90, 40], 13, 0, 100) == [10, 90, 40]


@pytest.mark.parametrize("values", [1, 2, 5])
def test_lines_are_named_at_their_ends(values, tmp_path):
    for epochs in (1, 2, 3):
        for lr in range(1, values + 1):
            write_run(tmp_path / f"{lr}-{epochs}", lr=lr, epochs=epochs)
    chart = figure_of(shown(tmp_path), "Accuracy over epochs")
    names = re.findall(r'<text x="([\d.]+)" y="([\d.]+)" class="end">(?:<title>.*?</title>)?(.*?)<', chart)
    ends = max(float(x) for x in re.findall(r'cx="([\d.]+)"', chart))
    assert len(names) == 2 * values
    for x, _, name in names:
        assert ends < float(x) < float(x) + svg_axes.WIDE_LETTER_WIDTH * len(name) <= svg_axes.WIDTH
    assert all(b - a >= 12.9 for a, b in itertools.pairwise(sorted(float(y) for _, y, _ in names)))


def test_lines_that_begin_far_below_leave_their_ends_room():
    """The law: nothing in the last third of any line is cut off."""
    lines = [[(n, 90 - 80 / n) for n in range(1, 31)], [(n, 95 - 60 / n) for n in range(1, 61)]]
    assert curves.late_minimum(lines) == 90 - 80 / 20
    assert curves.late_minimum([[(1, 50), (2, 60), (3, 70)]]) is None
    assert curves.late_minimum([[(1, 50)]]) is None


def test_equal_lines_all_remain_visible():
    """Full lines lie below dashed ones, and every line below another is wider."""
    points = [(1, 5.0), (2, 6.0)]
    series = [line_chart.Series(str(i), i, colours.Look(i), points, i == 1) for i in range(3)]
    axis = svg_axes.Axis("x")
    drawn = re.findall(r'data-name="(\d)".*?stroke-width="([\d.]+)"', line_chart.line_chart("t", series, axis, axis))
    assert [name for name, _ in drawn] == ["2", "0", "1"]
    assert [float(width) for _, width in drawn] == sorted((float(width) for _, width in drawn), reverse=True)
    assert len({width for _, width in drawn}) == 3


def test_a_method_without_messages_is_a_level_line(tmp_path):
    write_run(tmp_path / "a")
    metrics = write_run(tmp_path / "b", name="local") / "metrics.jsonl"
    records = [json.loads(line) | {"bytes_down": 0, "bytes_up": 0} for line in metrics.read_text().splitlines()]
    metrics.write_text("".join(json.dumps(record) + "\n" for record in records))
    chart = figure_of(shown(tmp_path), "Accuracy over bytes sent")
    levels = re.findall(r'<path d="M([\d.]+) ([\d.]+)L([\d.]+) ([\d.]+)" data-name="([^"]*): no bytes"', chart)
    assert {name for *_, name in levels} == {"local, personal", "local, global"}
    right = max(float(x) for x in re.findall(r'cx="([\d.]+)"', chart))
    for x0, y0, x1, y1, _ in levels:
        assert (y0, float(x1)) == (y1, right)
        assert float(x0) < right / 3


def test_a_line_of_its_own_kind_has_dots_of_its_own_kind(tmp_path):
    """With a single evaluation there are nothing but dots."""
    chart = figure_of(shown(write_run(tmp_path / "a", rounds=2)), "Accuracy over rounds")
    assert len(re.findall(r'class="dot"', chart)) == len(re.findall(r'class="dot hollow"', chart)) == 1
    assert "hollow dots: the global model" in chart


def test_captions_say_what_is_drawn(tmp_path):
    for seed in (0, 1):
        for lr in (1, 2, 3):
            write_run(tmp_path / f"{seed}-{lr}", seed=seed, lr=lr)
    text = shown(tmp_path)
    assert "Bands: lowest and highest seed." in figure_of(text, "Accuracy over lr")
    sizes = figure_of(text, "Size of the models")
    assert "(band: smallest and largest client)" in sizes
    assert "One seed of each." in sizes
    assert "One of 2 seeds." in figure_of(text, "Rank of every layer over rounds: lr 1")
    for lr in (4, 5, 6, 7):
        write_run(tmp_path / f"0-{lr}", lr=lr)
    sizes = figure_of(shown(tmp_path), "Size of the models")
    assert 'class="spread"' not in sizes
    assert "band" not in re.sub(r"<svg.*</svg>", "", sizes)


def test_whose_split_is_shown_is_said(tmp_path):
    def write(name: str, counts: list[list[int]], **config: Any) -> None:
        (write_run(tmp_path / name, **config) / "labels.json").write_text(json.dumps({"counts": counts}))

    write("a", [[3, 1]] * 5, lr=1)
    write("b", [[3, 1]] * 5, lr=2)
    assert "others differ" not in shown(tmp_path)
    write("c", [[1, 3]] * 5, lr=1, seed=1)
    assert "This is the split of seed 0; others differ." in shown(tmp_path)
    write("d", [[2, 2]] * 5, lr=3)
    assert "This is the split of lr 1, seed 0; others differ." in shown(tmp_path)
    assert "On average a client holds 2.0 labels" in shown(tmp_path)


def test_clients_stand_in_the_middle_of_their_bars():
    for clients in (1, 3, 20):
        chart = label_section.label_chart("x", np.ones((clients, 2), int))
        bars = re.findall(r"M([\d.]+) [\d.]+h([\d.]+)", re.findall(r'd="([^"]*)" class="bar"', chart)[0])
        middles = [float(x) + float(wide) / 2 for x, wide in bars]
        ticks = {float(x): int(n) for x, n in re.findall(r'<path d="M([\d.]+) [\d.]+v4".*?>(\d+)</text>', chart)}
        assert ticks
        for at, client in ticks.items():
            assert middles[client] == pytest.approx(at, abs=0.2)


def test_no_accuracy_is_above_100_per_cent(tmp_path):
    folder = write_run(tmp_path / "a", clients=1)
    text = (folder / "metrics.jsonl").read_text()
    (folder / "metrics.jsonl").write_text(re.sub(r'(_per_client": )\[[^]]*\]', r"\1[1.0]", text))
    violins = figure_of(shown(folder), "Accuracy of every client")
    ticks = [float(n) for n in re.findall(r'text-anchor="middle">([\d.]+)<', violins)]
    assert max(ticks) == 100
    assert svg_axes.Scale([0, 0], accuracy_sections.score_axis(ACCURACY), 0, 1).low == 0


def test_the_table_and_the_figures_on_top_are_those_asked_for(tmp_path):
    """Whatever evaluation and clients: the page says what table.md says."""
    for name in ("fedslr", "fedavg"):
        write_run(tmp_path / name, name=name, rounds=8)
    runs = find_runs([tmp_path])
    assert "not of its last" not in html_report.report_page(runs)
    for pick, clients, says in (
        ("best", "all", "of the best evaluation of every run, not of its last (--pick best)."),
        ("late", "all", "means of the last five evaluations of every run, not those of its last (--pick late)."),
        ("last", "sampled", "of the clients sampled in the evaluated round, not of all (--clients sampled)."),
    ):
        html_report.write_report([tmp_path], tmp_path / "report.html", pick, clients)
        text = (tmp_path / "report.html").read_text()
        checked(text)
        assert says in text
        columns = result_tables.columns(pick, clients)
        rows = result_tables.result_table(curves.ranked_groups(runs), columns).rows
        body = text[text.index("<h2>Table") :]
        assert [re.sub("</?b>", "", c) for c in re.findall(r"<td[^>]*>(.*?)</td>", body)] == [
            c for r in rows for c in r
        ]
        best = max(float(row[2]) for row in rows)
        assert f"<strong>{best:.2f} %</strong> <span>highest accuracy of personal models" in text
        single = html_report.report_page(runs[:1], pick=pick, clients=clients)
        shown = fedslr.storage.statistics.mean_over_clients(runs[0].records, pick, clients)["personal"]
        assert f"<strong>{number_text.percent(shown)}</strong> <span>accuracy of the personal models" in single
        assert f"<td>{number_text.percent(shown)}</td>" in single


def test_ranks_are_shown_against_the_largest_there_can_be(tmp_path):
    folder = write_run(tmp_path / "a", rounds=60)
    seen = figure_of(shown(folder), "Rank of every layer")
    assert ">1 / 7<" in seen
    assert "the largest that it had" in seen
    path = folder / "summary.json"
    summary = json.loads(path.read_text()) | {"rank_full": {"a.weight": 16, "b.weight": 3}}
    path.write_text(json.dumps(summary))
    seen = figure_of(shown(folder), "Rank of every layer")
    assert ">1 / 16<" in seen
    assert "the largest that its matrix can have" in seen


def test_a_summary_tells_full_ranks():
    options: dict[str, Any] = {"federation": make_federation([6, 7]), "model": mlp(), "rounds": 1}
    found = fedslr.run(fedslr.FedSLR(), **options)
    shapes = {k: x.shape for k, x in found.global_params.items() if x.ndim == 2}
    assert found.summary["rank_full"] == {k: min(shape) for k, shape in shapes.items()}
    assert found.summary["rank_full"].keys() == found.summary["rank"].keys()
    assert fedslr.run(fedslr.FedAvg(), **options).summary["rank_full"] == {}


def test_a_deviation_that_cannot_be_seen_is_left_out():
    figures = {c.key: c for c in result_tables.columns()}
    for key, mean, deviation, says in (
        ("bytes_up", 8.2e6, 11, ""),
        ("bytes_up", 7.6499e6, 11_800, ""),
        ("bytes_up", 8.2e6, 3e5, " ± 300.0 kB"),
        ("parameters_global", 1234, 56, " ± 0.1k"),
        ("paper_gb", 0.0305, 1e-6, ""),
        ("accuracy_global", 0.65, 1e-17, ""),
        ("accuracy_global", 0.65, 0.0123, " ± 1.23"),
        ("accuracy_global", 0.65, None, ""),
    ):
        assert result_tables._spread(figures[key].show, mean, deviation) == says


def test_methods_of_ones_own_have_their_names(tmp_path):
    def write(folder: str, method: str, called: str, planned: int | None = None) -> None:
        path = write_run(tmp_path / folder, name=method, planned=planned) / "summary.json"
        if planned is None:
            path.write_text(json.dumps(json.loads(path.read_text()) | {"algorithm": called}))

    def names() -> list[str]:
        return [g.labels["method"] for g in group_runs(find_runs([tmp_path], unfinished=True))]

    write("a", "fedavg", "fedavg")
    write("b", "mine:Half", "half", planned=9)
    assert names() == ["fedavg", "Half"]
    write("c", "mine:Half", "half")
    assert set(names()) == {"fedavg", "half"}
    write("d", "other:Half", "quarter")
    assert set(names()) == {"fedavg", "half", "quarter"}
    write("e", "third:Half", "half")
    assert set(names()) == {"fedavg", "mine:Half", "quarter", "third:Half"}


def test_a_sweep_shows_its_sensitivity(tmp_path):
    for seed in (0, 1):
        for i, value in enumerate((1e-4, 1e-3, 1e-2)):
            write_run(tmp_path / f"{i}-{seed}", seed=seed, lr=value)
    text = shown(tmp_path)
    checked(text)
    assert "Accuracy over lr" in charts_of(text)
    assert "fedslr on digits, by lr" in text
    found = curves.find_sweep(curves.ranked_groups(find_runs([tmp_path])))
    assert found is not None
    assert [x for x, _ in found.lines[""]] == [1e-4, 1e-3, 1e-2]
    assert [len(g.runs) for _, g in found.lines[""]] == [2, 2, 2]


def test_violins_are_relative_to_fedavg_client_by_client(tmp_path):
    """The law: a run less FedAvg's of its own seed, and never another's."""
    for seed in (0, 1):
        write_run(tmp_path / f"a{seed}", name="fedavg", seed=seed)
        write_run(tmp_path / f"s{seed}", name="fedslr", seed=seed)
    write_run(tmp_path / "s2", name="fedslr", seed=2)
    runs = find_runs([tmp_path])
    base = curves.baselines(runs)
    for run in runs:
        gains = curves.relative(run, base, "global")
        expected = {"fedavg": 0.0, "fedslr": -0.1}[run.summary["algorithm"]]
        assert list(gains.values()) == pytest.approx([] if run.config["seed"] == 2 else [expected] * 5)


def test_zeros_are_what_the_personal_part_leaves(tmp_path):
    (run,) = find_runs([write_run(tmp_path / "a")])
    assert model_size_section.zero_shares(run) == pytest.approx({c: 1 - (10 + c) / 100 for c in range(5)})


def test_the_sparsity_shown_is_that_of_the_states(tmp_path):
    federation = make_federation([6, 7, 5])
    result = fedslr.run(fedslr.FedSLR(l1_penalty=0.5), federation, mlp(), rounds=3, clients_per_round=3, out=tmp_path)
    (run,) = find_runs([tmp_path])
    for client, share in model_size_section.zero_shares(run).items():
        p = result._simulation.state.roster.member(client).client.p
        zeros = sum(int((x == 0).sum()) for x in p.values())
        assert share == pytest.approx(zeros / sum(x.numel() for x in p.values()))


def test_a_thousand_rounds_and_a_hundred_clients_are_small():
    folder = ROOT / "results" / "cifar10-dirichlet0.1"
    text = shown(folder)
    checked(text)
    assert len(text.encode()) < 250_000 * len(list(folder.glob("*/summary.json")))
    assert "on cifar10" in text
    accuracy = json.loads((folder / "fedslr" / "summary.json").read_text())["accuracy"]["personal"]
    assert f"{100 * accuracy:.2f}" in text


def test_many_dots_are_left_out(tmp_path, monkeypatch):
    folder = write_run(tmp_path / "a", clients=40)
    assert 'class="client"' in shown(folder)
    monkeypatch.setattr(report_view, "MAX_DOTS", 30)
    assert 'class="client"' not in shown(folder)


def test_the_script_is_the_one_its_policy_allows(tmp_path):
    """Whatever would be smuggled in, a browser runs our script only."""
    text = shown(write_run(tmp_path / "a"))
    (script,) = re.findall(r"<script>(.*?)</script>", text, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in text


def test_a_run_without_label_counts_has_a_report(tmp_path):
    """A deployed federation does not know the labels of its clients."""
    folder = write_run(tmp_path / "a")
    assert "Labels of every client" in charts_of(shown(folder))
    (folder / "labels.json").unlink()
    assert "Labels of every client" not in charts_of(shown(folder))


def test_a_report_that_fails_does_not_fail_the_run(tmp_path, monkeypatch):
    monkeypatch.setattr(execution, "write_report", lambda *a: 1 / 0)
    with pytest.warns(UserWarning, match="report.html could not be written"):
        result = fedslr.run(fedslr.FedAvg(), make_federation([6, 7]), mlp(), rounds=1, out=tmp_path)
    assert result.summary["rounds"] == 1
    assert (tmp_path / "summary.json").exists()


# --- pieces ---------------------------------------------------------------------------------------------------------


def test_looks_are_different_and_lasting():
    many = colours.looks([*fedslr.ALGORITHMS, "mine"])
    assert len(set(many)) == len(many)
    assert colours.looks(["x", "fedavg", "fedslr"])[1:] == colours.looks(["fedavg", "local", "fedslr"])[::2]


@pytest.mark.parametrize("values", [[1, 2], [0, 1e-9], [-3, 7e5], [0.02, 97.3], [5, 5]])
def test_ticks_are_round_and_inside(values):
    scale = svg_axes.Scale(values, svg_axes.Axis("x"), 0, 100)
    ticks = scale.ticks()
    assert 2 <= len(ticks) <= 8
    for tick in ticks:
        assert -1e-6 <= scale(tick) <= 100 + 1e-6
        assert float(f"{tick:.3g}") == pytest.approx(tick)


def test_ticks_of_counts_are_whole():
    for values in ([1, 1], [1, 2], [3, 7], [1, 1000]):
        ticks = svg_axes.Scale(values, svg_axes.Axis("x", whole=True), 0, 100).ticks()
        assert ticks == sorted({float(round(t)) for t in ticks})
        assert all(values[0] - 1 <= t <= values[1] + 1 for t in ticks)


@pytest.mark.parametrize("values", [[0.3, 6], [1e-5, 1e-2], [1, 1e12], [4, 4]])
def test_ticks_of_magnitudes(values):
    scale = svg_axes.Scale(values, svg_axes.Axis("x", log=True), 0, 100)
    assert scale.log
    assert scale.ticks()
    for tick in scale.ticks():
        assert -0.2 <= scale(tick) <= 100.2


def test_bins_keep_the_mean_and_the_end():
    points = [(float(n), float(n % 7)) for n in range(1, 1001)]
    made = curves.binned(points, 100)
    assert len(made) == 100
    assert made[-1][0] == 1000
    assert np.mean([y for _, y in made]) == pytest.approx(np.mean([y for _, y in points]))


def test_communication_is_bytes_over_bandwidth_plus_delay(tmp_path):
    (run,) = find_runs([write_run(tmp_path / "a", rounds=2)])
    found = curves.communication(run, megabits=0.008, milliseconds=250)
    # 1000 bytes a second, two clients a round, two messages each.
    assert found == [(1, pytest.approx(2000 / 2 / 1000 + 0.5)), (2, pytest.approx(1550 / 2 / 1000 + 0.5))]


def test_amounts_read_well():
    assert [number_text.format_bytes(n) for n in (0, 999, 1000, 1.5e6, 2e9, 7e12)] == [
        "0 B",
        "999 B",
        "1.0 kB",
        "1.5 MB",
        "2.0 GB",
        "7.0 TB",
    ]
    assert number_text.percent(0.9555) == "95.5 %"
    assert number_text.percent(None) == "–"


# --- the command ----------------------------------------------------------------------------------------------------


def test_the_command_writes_where_it_says(command, tmp_path, monkeypatch):
    write_run(tmp_path / "runs" / "a")
    write_run(tmp_path / "runs" / "b", name="fedavg")
    assert command("report", tmp_path / "runs")[0] == 0
    assert "fedslr and fedavg on digits" in (tmp_path / "runs" / "report.html").read_text()
    monkeypatch.chdir(tmp_path)
    code, printed, _ = command("report", "runs/a", "runs/b")
    assert (code, printed.strip()) == (0, "written to report.html")
    assert (tmp_path / "report.html").read_text() == (tmp_path / "runs" / "report.html").read_text()
    assert command("report", "runs/a", "--out", "mine.html", "--pick", "late")[0] == 0
    assert "fedslr on digits" in (tmp_path / "mine.html").read_text()
    assert "(--pick late)" in (tmp_path / "mine.html").read_text()


def test_mistakes_are_answered_with_a_line(command, tmp_path):
    (tmp_path / "empty").mkdir()
    run = write_run(tmp_path / "run")
    broken = shutil.copytree(run, tmp_path / "broken")
    (broken / "config.toml").write_text("rounds = ")
    emptied = shutil.copytree(run, tmp_path / "emptied")
    (emptied / "config.toml").write_text("")
    for arguments, words in [
        ([tmp_path / "none"], "none: no such folder; correct the path"),
        ([tmp_path / "empty"], "empty: no run in it (config.toml is missing); name the folder of a run"),
        ([broken], "config.toml: cannot be read"),
        ([emptied], "config.toml: cannot be read as the recipe of a run: 'rounds' is missing; restore it"),
        ([run, "--pick", "first"], "--pick: got 'first'; known: best, last, late"),
        ([run, "--out", tmp_path / "empty"], "empty: Is a directory; name a file"),
        ([run, "--out", tmp_path / "nowhere" / "x.html"], "x.html: No such file or directory; create it, or choose"),
        ([run, "--out", tmp_path / ("x" * 300)], "File name too long; choose a shorter name"),
    ]:
        code, _, err = command("report", *arguments)
        assert code == 2
        assert words in err
        assert "make room" not in err
        assert len(err.splitlines()) == 1
